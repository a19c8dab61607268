//! A second decoder, `tools/decoder`, was written in Python from `docs/protocol.md` alone. It must
//! read every input as this crate does: refuse the same ones, and find the same fields in the
//! others.
//!
//! ```text
//!  inputs.rs   seed → bytes, and the reader's parameters (keys, expected number)
//!  verdict.rs  bytes → fields as decoded by core/, or null: refused
//!  decode.py   bytes → fields as decoded by the second decoder
//! ```
//!
//! A part of the inputs is kept in `docs/vectors/agreement` for other implementations. After a
//! change of the format, `cargo test -p d2tp-session --lib agreement -- --ignored` writes it again.
//! Every changed line must follow from a change in the document.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "starts another program, reads vector files, draws the seed it prints"
)]

mod inputs;
mod verdict;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

/// An input, the reader's parameters, and this crate's result (null: refused).
pub(crate) struct Case {
    /// The name of the reader: an entry of `CASES` in `tools/decoder/decode.py`.
    pub(crate) case: String,
    /// The purpose of the case, for people who investigate a difference.
    pub(crate) why: String,
    pub(crate) given: Value,
    pub(crate) bytes: Vec<u8>,
    pub(crate) says: Value,
}

impl Case {
    pub(crate) fn new(case: &str, why: String, given: Value, bytes: Vec<u8>) -> Case {
        let says = verdict::verdict(case, &given, &bytes);
        Case {
            case: case.to_owned(),
            why,
            given,
            bytes,
            says,
        }
    }

    fn line(&self) -> String {
        json!({"case": self.case, "why": self.why, "given": self.given,
               "hex": hex::encode(&self.bytes), "says": self.says})
        .to_string()
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn kept() -> PathBuf {
    root().join("docs/vectors/agreement")
}

/// The second decoder's result for each case; `None` without Python.
fn second_opinion(cases: &[Case]) -> Option<Vec<Value>> {
    let child = Command::new("python3")
        .arg(root().join("tools/decoder/decode.py"))
        .arg("say")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("SKIPPED: python3 is not installed, nobody to agree with");
            return None;
        }
        Err(e) => panic!("python3 did not start: {e}"),
    };
    let mut stdin = child.stdin.take().expect("it is piped");
    for case in cases {
        // The second decoder does not get this crate's result, so that it cannot repeat it.
        let asked =
            json!({"case": case.case, "given": case.given, "hex": hex::encode(&case.bytes)});
        writeln!(stdin, "{asked}").expect("it reads to the end before it writes");
    }
    drop(stdin);
    let out = child.wait_with_output().expect("it ends");
    assert!(out.status.success(), "the second decoder failed");
    let text = String::from_utf8(out.stdout).expect("JSON is text");
    Some(
        text.lines()
            .map(|line| serde_json::from_str(line).expect("a verdict"))
            .collect(),
    )
}

fn agree(cases: &[Case]) {
    let Some(theirs) = second_opinion(cases) else {
        return;
    };
    assert_eq!(theirs.len(), cases.len(), "a verdict for each case");
    let apart: Vec<String> = cases
        .iter()
        .zip(&theirs)
        .filter(|(case, theirs)| case.says != **theirs)
        .map(|(case, theirs)| format!("{}\n  second decoder: {theirs}", case.line()))
        .collect();
    assert!(
        apart.is_empty(),
        "{} of {} apart:\n{}",
        apart.len(),
        cases.len(),
        apart
            .iter()
            .take(20)
            .cloned()
            .collect::<Vec<_>>()
            .join("\n")
    );
}

/// The numbers of accepted and refused cases.
fn counts(cases: &[Case]) -> (usize, usize) {
    let refused = cases.iter().filter(|c| c.says.is_null()).count();
    (cases.len() - refused, refused)
}

fn read_kept() -> Vec<Case> {
    let mut names: Vec<PathBuf> = std::fs::read_dir(kept())
        .expect("the folder is in the repository")
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|e| e == "jsonl"))
        .collect();
    names.sort();
    let mut cases = Vec::new();
    for name in names {
        for line in std::fs::read_to_string(name).expect("text").lines() {
            let mut v: Value = serde_json::from_str(line).expect("a case is a line of JSON");
            let text = |v: &Value| v.as_str().expect("a string").to_owned();
            cases.push(Case {
                case: text(&v["case"]),
                why: text(&v["why"]),
                bytes: hex::decode(text(&v["hex"])).expect("hex"),
                given: v["given"].take(),
                says: v["says"].take(),
            });
        }
    }
    cases
}

#[test]
fn the_kept_inputs_say_to_us_what_their_files_say() {
    // R-WIRE-1, R-WIRE-2, R-WIRE-3, R-REC-1
    let cases = read_kept();
    let (taken, refused) = counts(&cases);
    assert!(
        taken >= 200 && refused >= 400,
        "{taken} taken, {refused} refused"
    );
    for case in &cases {
        let ours = verdict::verdict(&case.case, &case.given, &case.bytes);
        assert_eq!(ours, case.says, "{}", case.line());
    }
}

#[test]
fn the_second_decoder_reads_the_vectors_written_by_hand() {
    let run = Command::new("python3")
        .args(["-m", "unittest", "discover", "-s", "tools/decoder"])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(root())
        .output();
    match run {
        Ok(run) => assert!(
            run.status.success(),
            "{}",
            String::from_utf8_lossy(&run.stderr)
        ),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("SKIPPED: python3 is not installed");
        }
        Err(e) => panic!("python3 did not start: {e}"),
    }
}

#[test]
fn a_decoder_written_from_the_document_alone_agrees_on_the_kept_inputs() {
    agree(&read_kept());
}

#[test]
fn a_decoder_written_from_the_document_alone_agrees_on_inputs_nobody_chose() {
    let seed = std::env::var("D2TP_SEED").ok().map_or_else(
        || {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.expect("after 1970").as_nanos() as u64
        },
        |text| text.parse().expect("D2TP_SEED is a number"),
    );
    eprintln!("repeat with D2TP_SEED={seed} cargo test -p d2tp-session --lib agreement");
    agree(
        &inputs::inputs(seed)
            .into_iter()
            .flat_map(|(_, cases)| cases)
            .collect::<Vec<_>>(),
    );
}

#[test]
#[ignore = "writes docs/vectors/agreement: to be run after a change of the format"]
fn write_the_kept_inputs() {
    for (name, cases) in inputs::inputs(1) {
        let text: String = cases.iter().map(|case| case.line() + "\n").collect();
        std::fs::write(kept().join(name.replace(' ', "-") + ".jsonl"), text).expect("writable");
    }
}
