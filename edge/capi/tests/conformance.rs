//! Compares D2TP sockets with the kernel's TCP: one program is compiled for both, and every
//! difference is listed in docs/sockets.md.

mod support;

use std::collections::{BTreeMap, BTreeSet};

use support::{CProgram, document};

fn seen(program: &CProgram) -> BTreeMap<String, String> {
    let said = program.run(&[]);
    let lines = said.lines().map(|line| {
        let (step, value) = line.rsplit_once(':').expect("step: value");
        (step.to_owned(), value.trim().to_owned())
    });
    lines.collect()
}

/// The steps in the table of differences.
fn documented() -> BTreeSet<String> {
    let rows = document("## Differences");
    rows.iter()
        .filter_map(|row| Some(row.strip_prefix("| `")?.split_once('`')?.0.to_owned()))
        .collect()
}

#[test]
fn the_same_program_sees_the_same_but_for_what_is_documented() {
    let kernel = seen(&CProgram::plain("conformance.c"));
    let ours = seen(&CProgram::with_d2tp("conformance.c"));
    assert!(kernel.len() > 200, "only {} steps ran", kernel.len());
    let steps: BTreeSet<&String> = kernel.keys().chain(ours.keys()).collect();
    let differ = steps
        .into_iter()
        .filter(|step| kernel.get(*step) != ours.get(*step));
    let differ: BTreeSet<String> = differ.cloned().collect();
    let documented = documented();
    for step in differ.union(&documented) {
        eprintln!(
            "{step}: kernel {:?}, d2tp {:?}",
            kernel.get(step),
            ours.get(step)
        );
    }
    assert_eq!(
        differ, documented,
        "the steps above, and the table in docs/sockets.md"
    );
}
