//! `cargo xtask model`: the symbolic models in `docs/model`, checked by Verifpal.
//!
//! ```text
//!  syn.vp ─┬─ as it is ───────────────▶ verifpal ─▶ c0c0c0a0a0   as its head expects
//!          └─ variant: replace, with ─▶ verifpal ─▶ c1c1c0a0a1   the attack that must be found
//! ```
//!
//! A variant takes a protection out, or gives the attacker more, by replacing text of the model. So
//! each query is seen to fail, and a variant cannot lag behind its model.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::repository::{files_below, root};
use crate::step::StepOutcome;

/// How Verifpal is installed. Its manifest asks for a newer compiler than it needs.
const INSTALL: &str = "cargo install verifpal --ignore-rust-version";
/// Runs of each end that the attacker sees at once, so that it may repeat what it saw in another run.
const SESSIONS: &str = "2";

/// One run of a model: as it is, or changed.
#[derive(Debug, PartialEq, Eq)]
struct ModelCase {
    name: String,
    replaced: Vec<(String, String)>,
    /// A letter for the kind of each query, and 1 where an attack is to be found.
    expected: String,
}

/// The cases in the head of a model: its comment lines before the attacker.
fn cases_of(text: &str) -> Result<Vec<ModelCase>> {
    let mut cases: Vec<ModelCase> = Vec::new();
    let case = |name: &str| ModelCase {
        name: name.to_owned(),
        replaced: Vec::new(),
        expected: String::new(),
    };
    let mut next = Some(case("as it is"));
    let head = text
        .lines()
        .take_while(|line| !line.starts_with("attacker["));
    for line in head.filter_map(|line| line.strip_prefix("// ")) {
        let Some((word, rest)) = line.split_once(' ') else {
            continue;
        };
        match (word, next.as_mut()) {
            ("variant", None) => next = Some(case(rest)),
            ("variant", Some(open)) => bail!("{}: nothing is expected", open.name),
            ("replace", Some(open)) => open.replaced.push((rest.to_owned(), String::new())),
            ("with", Some(open)) => match open.replaced.last_mut() {
                Some(last) => rest.clone_into(&mut last.1),
                None => bail!("{}: nothing to replace", open.name),
            },
            ("expect", Some(open)) => {
                rest.clone_into(&mut open.expected);
                cases.extend(next.take());
            }
            _ => {}
        }
    }
    ensure!(next.is_none(), "its last case expects nothing");
    Ok(cases)
}

/// The text of a model for a case.
fn changed(text: &str, case: &ModelCase) -> Result<String> {
    let (_, body) = text.split_once("attacker[").context("it has no attacker")?;
    let mut body = format!("attacker[{body}");
    for (old, new) in &case.replaced {
        ensure!(
            body.contains(old.as_str()),
            "{}: `{old}` is not there",
            case.name
        );
        body = body.replace(old.as_str(), new);
    }
    Ok(body)
}

/// Verifpal's verdict on a model.
fn verdict(model: &Path) -> Result<String> {
    let run = Command::new("verifpal")
        .args(["verify", "--quiet", "--result-code", "--sessions", SESSIONS])
        .arg(model)
        .output()?;
    let out = String::from_utf8_lossy(&run.stdout);
    match out.lines().last() {
        Some(code) if run.status.success() => Ok(code.trim().to_owned()),
        _ => bail!("verifpal: {}", String::from_utf8_lossy(&run.stderr).trim()),
    }
}

/// Runs the cases of one model; returns whether all verdicts are as expected.
fn check(model: &Path, scratch: &Path) -> Result<bool> {
    let text = std::fs::read_to_string(model)?;
    let name = model.file_name().context("a file")?.to_string_lossy();
    let mut held = true;
    for case in cases_of(&text)? {
        let file = scratch.join(&*name);
        std::fs::write(&file, changed(&text, &case)?)?;
        let found = verdict(&file)?;
        let right = found == case.expected;
        held &= right;
        let said = match right {
            true => "ok".to_owned(),
            false => format!("FAILED, expected {}", case.expected),
        };
        eprintln!("  {name}: {}: {found} {said}", case.name);
    }
    Ok(held)
}

/// Why the models cannot be checked here; none if they can.
pub fn missing_tool() -> Option<String> {
    let is_missing = Command::new("verifpal").arg("--version").output().is_err();
    is_missing.then(|| format!("Verifpal is not installed: {INSTALL}"))
}

/// Checks all models, if Verifpal is installed.
///
/// # Errors
/// A model cannot be read.
pub fn step() -> Result<StepOutcome> {
    if let Some(reason) = missing_tool() {
        return Ok(StepOutcome::Skipped(reason));
    }
    let scratch = tempfile::tempdir()?;
    let mut held = true;
    for model in files_below(&root().join("docs/model"), "vp")? {
        let checked = check(&model, scratch.path());
        held &= checked.with_context(|| model.display().to_string())?;
    }
    Ok(match held {
        true => StepOutcome::Held,
        false => StepOutcome::Failed,
    })
}

/// `cargo xtask model`; returns whether the models were checked and all verdicts are as expected.
///
/// # Errors
/// A model cannot be read.
pub fn run() -> Result<bool> {
    match step()? {
        StepOutcome::Held => Ok(true),
        StepOutcome::Failed => Ok(false),
        StepOutcome::Skipped(reason) => bail!(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_names_what_is_replaced_and_what_is_expected() {
        let text = "// A model.\n// expect c0\n//\n// variant it is sent in clear\n// replace [sealed]\n\
                    // with [plain]\n// expect c1\n\nattacker[active]\n\nA -> B: [sealed]\n";
        let cases = cases_of(text).unwrap();
        assert_eq!(cases.len(), 2);
        assert_eq!((&*cases[0].name, &*cases[0].expected), ("as it is", "c0"));
        assert_eq!(
            changed(text, &cases[1]).unwrap(),
            "attacker[active]\n\nA -> B: [plain]\n"
        );
        let elsewhere = text.replace("B: [sealed]", "B: [other]");
        assert!(changed(&elsewhere, &cases[1]).is_err());
        assert!(cases_of("// variant one\nattacker[active]").is_err());
    }

    #[test]
    fn each_query_of_a_model_has_a_variant_in_which_it_fails() {
        let models = files_below(&root().join("docs/model"), "vp").unwrap();
        assert!(models.len() >= 7, "{models:?}");
        for model in models {
            let text = std::fs::read_to_string(&model).unwrap();
            let cases = cases_of(&text).unwrap();
            for case in &cases {
                changed(&text, case).unwrap();
            }
            for query in (1..cases[0].expected.len()).step_by(2) {
                let verdicts = cases.iter().map(|case| case.expected.as_bytes()[query]);
                assert!(
                    verdicts.max() == Some(b'1'),
                    "{model:?}: query {}",
                    query / 2
                );
            }
        }
    }
}
