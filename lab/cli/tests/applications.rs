//! `cedos repro C10`: one cell of ours and one of curl, in the lab. If the system forbids
//! namespaces or there is no curl, the test prints a message and passes.

use std::process::Command;

use serde_json::{Value, json};

/// With the network away for 5 s, and at most 45 s of waiting once it is back.
#[test]
fn a_cell_says_that_curl_hung_and_that_ours_went_on() {
    let output = Command::new(env!("CARGO_BIN_EXE_cedos-lab"))
        .args([
            "repro",
            "C10",
            "--json",
            "--delays",
            "5",
            "--patience",
            "45",
        ])
        .args(["--only", "cedos/down/off", "--only", "curl/down/off"])
        .output()
        .expect("cedos");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let forbidden = [
        "refuses unprivileged user namespaces",
        "lets nobody make network namespaces",
    ];
    if forbidden.iter().any(|words| said.contains(words)) {
        eprintln!("skipped, no lab on this machine: {said}");
        return;
    }
    let row: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    let ours = &row["ours"]["table"]["cedos/down/off/5"];
    assert_eq!(ours["ended"], "right", "{row}");
    assert_eq!(ours["by_hand"], Value::Null);
    assert_eq!(ours["in_the_middle"], true);
    assert!(ours["after_s"].as_f64() > Some(5.0), "{ours}");
    // Nothing was fetched twice.
    assert!(ours["carried"].as_f64() < Some(1.15), "{ours}");
    assert_eq!(
        (&row["ours"]["cells"], &row["holds"]),
        (&json!(1), &json!(true))
    );
    assert!(output.status.success(), "{said}");

    let curl = &row["baseline"]["table"]["curl/down/off/5"];
    if curl.is_null() {
        let conditions = row["conditions"].to_string();
        assert!(conditions.contains("not run: curl: curl is not installed here"));
        eprintln!("skipped, there is no curl");
        return;
    }
    // Its address is gone, and nothing informs it.
    assert_eq!(curl["ended"], "hung", "{curl}");
    assert_eq!(curl["by_hand"], "right", "{curl}");
    assert!(curl["after_s"].as_f64() >= Some(50.0), "{curl}");
}

#[test]
fn a_cell_that_is_not_there_is_said_and_so_is_another_rows_option() {
    let said = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_cedos-lab"))
            .args(["repro"])
            .args(arguments)
            .output()
            .expect("cedos");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let cell = said(&["C10", "--only", "curl/sideways"]);
    assert!(cell.contains("there is no such cell") && cell.contains("curl/down/off/10"));
    let part = said(&["C11", "--only", "nothing"]);
    assert!(part.contains("there is no such part") && part.contains("caught, served, shown"));
    assert!(said(&["C5", "--delays", "10"]).contains("are of C10"));
}

/// A part whose programs are missing: a row without figures would say "not reproduced".
#[test]
fn a_part_of_which_nothing_can_be_run_is_an_error_that_says_what_to_do() {
    for part in ["beside", "keys"] {
        let output = Command::new(env!("CARGO_BIN_EXE_cedos-lab"))
            .args(["repro", "C11", "--json", "--only", part])
            .env("PATH", "/nothing")
            .output()
            .expect("cedos");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && output.stdout.is_empty());
        assert!(said.contains("is not installed here"), "{said}");
        assert!(said.contains("Install what is missing"), "{said}");
    }
}
