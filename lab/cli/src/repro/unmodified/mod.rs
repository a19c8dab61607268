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
use site::{ProgramFolder, SSH_MAKE};
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
            "there is no such part of C11: {name}. --only takes {}",
            PARTS.join(", ")
        );
    }
    let wanted = |part: &str| only.is_empty() || only.iter().any(|name| name == part);
    let site = ProgramFolder::new()?;
    let mut came = WaveResult::default();
    let (mut ours, mut baseline) = (json!({}), json!({}));
    // Parts that need quiet come first, so that remaining browser processes do not disturb them.
    if wanted("keys") {
        match site.make(&["ssh", "sshd", "python3", "root"], &[SSH_MAKE]) {
            Ok(()) => {
                let (figures, theirs) = keys::run(&site)?;
                ours["keys"] = figures;
                baseline["keys"] = theirs;
            }
            Err(why) => came.missing.push(format!("not run: keys: {why}")),
        }
    }
    if wanted("beside") {
        let (figures, theirs, missing) = beside::run(&site)?;
        merge(&mut ours, figures);
        merge(&mut baseline, theirs);
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
    }
    ensure!(
        ours != json!({}),
        "nothing of C11 was run, so there is no result. Install what is missing, or choose other parts \
         with --only ({}):\n{}",
        PARTS.join(", "),
        came.missing.join("\n")
    );
    let mut measured = Measured::figures(ours, baseline, 1);
    measured.conditions = came.missing;
    Ok(measured)
}

fn merge(into: &mut Value, figures: Value) {
    if let (Some(into), Value::Object(figures)) = (into.as_object_mut(), figures) {
        into.extend(figures);
    }
}

#[cfg(test)]
mod tests {
    use crate::repro::runner::{Measured, RowVenue};
    use crate::repro::{reproduced, rows};
    use serde_json::{Value, json};

    fn judged(ours: Value) -> reproduced::Reproduced {
        let measured = Measured::figures(ours, json!({}), 1);
        reproduced::judge(rows::find("C11").unwrap(), RowVenue::Lab, measured).unwrap()
    }

    #[test]
    fn only_marks_and_conditions_of_parts_that_were_run_count() {
        let programs = judged(json!({ "run": 14, "whole": 14, "across": 14 }));
        assert_eq!(programs.mark, ["whole == run", "across == run"]);
        assert!(programs.holds);
        assert_eq!(programs.conditions.len(), 2);
        let one_lost = judged(json!({ "run": 14, "whole": 13, "across": 14 }));
        assert!(!one_lost.holds);
        let timed = judged(json!({ "slower_pct": { "download": 4.2, "page": 5.1 } }));
        assert_eq!(
            timed.mark,
            ["slower_pct.download <= 5", "slower_pct.page <= 5"]
        );
        assert!(!timed.holds);
        assert!(!judged(json!({})).holds);
    }
}
