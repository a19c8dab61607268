//! C11: unmodified programs on links that change and fail, and without disturbance.
//!
//! ```text
//!  site.rs: the folder, the origin's servers ─┐
//!  program.rs: the programs and their calls ──┼─▶ wave.rs: many at once, a minute without a network ─┐
//!                                             ├─▶ keys.rs: an interactive ssh ───────────────────────┼─▶ figures,
//!                                             └─▶ beside.rs: undisturbed, beside direct TCP ─────────┘   marks
//! ```

mod beside;
mod keys;
mod program;
mod site;
mod wave;

use super::runner::Measured;
use anyhow::ensure;
use serde_json::{Value, json};
use site::{SSH_MAKE, Site};
use wave::{ProgramBatch, WaveResult};

/// The parts, as `--only` names them.
pub const PARTS: [&str; 5] = ["caught", "served", "shown", "keys", "beside"];

const WAVES: [(&str, ProgramBatch); 3] = [
    (
        "caught",
        ProgramBatch {
            programs: program::CAUGHT,
            wifi_s: 3,
            away_s: 7,
        },
    ),
    (
        "served",
        ProgramBatch {
            programs: program::SERVED,
            wifi_s: 6,
            away_s: 12,
        },
    ),
    (
        "shown",
        ProgramBatch {
            programs: program::SHOWN,
            // Browsers take seconds to start.
            wifi_s: 15,
            away_s: 22,
        },
    ),
];

/// Runs all parts on real sockets.
///
/// # Errors
/// There is no lab, or it could not follow a scenario.
pub fn emulate() -> anyhow::Result<Measured> {
    run(&[])
}

/// Runs some parts, or all if `only` is empty.
///
/// # Errors
/// There is no such part, there is no lab, or it could not follow a scenario.
pub fn run(only: &[String]) -> anyhow::Result<Measured> {
    for name in only {
        ensure!(
            PARTS.contains(&&**name),
            "there is no such part: {name} is none of {}",
            PARTS.join(", ")
        );
    }
    let wanted = |part: &str| only.is_empty() || only.iter().any(|name| name == part);
    let site = Site::new()?;
    let mut came = WaveResult::default();
    let (mut ours, mut baseline) = (json!({}), json!({}));
    let mut mark = Vec::new();
    let mut conditions = Vec::new();
    // Parts that need quiet come first, so that remaining browser processes do not disturb them.
    if wanted("keys") {
        match site.make(&["ssh", "sshd", "python3", "root"], &[SSH_MAKE]) {
            Ok(()) => {
                let (figures, theirs) = keys::run(&site)?;
                ours["keys"] = figures;
                baseline["keys"] = theirs;
                mark.extend(keys::marks());
                conditions.extend(keys::conditions());
            }
            Err(why) => came.missing.push(format!("not run: keys: {why}")),
        }
    }
    if wanted("beside") {
        let (figures, theirs, missing) = beside::run(&site)?;
        mark.extend(beside::marks(&figures));
        merge(&mut ours, figures);
        merge(&mut baseline, theirs);
        conditions.push(beside::condition());
        came.missing.extend(missing);
    }
    for (_, wave) in WAVES.iter().filter(|(name, _)| wanted(name)) {
        wave.run(&site, &mut came)?;
    }
    if !came.programs.is_empty() {
        ours["run"] = json!(came.programs.len());
        ours["whole"] = json!(came.whole);
        ours["across"] = json!(came.across);
        ours["programs"] = Value::Object(came.programs);
        mark.extend(["whole == run", "across == run"].map(str::to_owned));
        conditions.push(
            "programs: each with its own `cedos run`, and with it a session; 60 s without a network; links come back \
             with another address; whole: it ended well and its result is that of an undisturbed run; across: it ran \
             when the network went and had not ended when it came back"
                .to_owned(),
        );
        conditions.push(
            "the programs are what the distribution ships, or what their compiler made of a client that knows \
             nothing of us"
                .to_owned(),
        );
    }
    ensure!(
        !mark.is_empty(),
        "nothing could be run: {}",
        came.missing.join("; ")
    );
    conditions.extend(came.missing);
    Ok(Measured {
        ours,
        baseline,
        mark,
        conditions,
        seeds: 1,
    })
}

fn merge(into: &mut Value, figures: Value) {
    if let (Some(into), Value::Object(figures)) = (into.as_object_mut(), figures) {
        into.extend(figures);
    }
}
