//! Scenarios that showed a fault of the core, each as small as possible. They are never removed.

use std::path::Path;

use cedos_lab_scenario::Scenario;
use cedos_lab_sim::fuzz::{try_scenario, try_seeds};

/// Faults that are not mended yet. A mended one must leave the list.
const OPEN: [(&str, &str); 0] = [];

#[test]
fn a_fault_that_was_mended_stays_mended() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults");
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let scenario = Scenario::load(&path).unwrap_or_else(|fault| panic!("{fault}"));
        let open = OPEN.iter().any(|(known, _)| *known == name);
        match (try_scenario(&scenario), open) {
            (Ok(_), true) => wrong.push(format!("{name} holds now: take it off the list")),
            (Err(fault), false) => wrong.push(format!(
                "cedos sim run lab/sim/tests/faults/{name} --seed {}\n  {fault}",
                scenario.seed
            )),
            _ => {}
        }
    }
    wrong.sort();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn drawn_scenarios_complete() {
    let tried = try_seeds(0..40, 0, |_| ());
    let failing = tried.failing.iter();
    let failing: Vec<_> = failing
        .map(|f| format!("{}\n  {}", f.replay(), f.what))
        .collect();
    assert!(failing.is_empty(), "\n{}", failing.join("\n"));
    // However the threads share them.
    assert_eq!(tried.coverage, try_seeds(0..40, 0, |_| ()).coverage);
    assert!(
        tried.coverage.surprising().is_empty(),
        "{:?}",
        tried.coverage.surprising()
    );
}
