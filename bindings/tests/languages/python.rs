//! The Python module, tested by its example.

use std::process::Command;

use crate::examples;
use crate::surroundings::Surroundings;

#[test]
fn the_example_runs_blocking_on_asyncio_with_requests_and_with_httpx() {
    let around = Surroundings::new();
    let Some(example) = examples::python(around.folder.path()) else {
        return;
    };
    let said = around.output_of(&example, &around.arguments[1..]);
    assert!(
        said.starts_with("blocking ok\nasyncio ok\ndatagrams ok\ngiven up ok\n"),
        "{said}"
    );
    assert_eq!(said.matches("ipv6 ok: hello\n").count(), 2, "{said}");
    assert!(
        said.contains("requests ok: hello\n") || said.contains("requests is not installed"),
        "{said}"
    );
    assert!(
        said.contains("httpx ok: hello\n") || said.contains("httpx is not installed"),
        "{said}"
    );
    assert!(
        said.contains("refused: [Errno 113] the proxy refuses (502): no such name"),
        "{said}"
    );
}

#[test]
fn an_import_without_the_library_says_what_to_do() {
    let output = Command::new("python3")
        .args(["-c", "import d2tp"])
        .env("PYTHONPATH", examples::bindings().join("python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("D2TP_LIBRARY", "/nowhere/libd2tp.so.1")
        .output();
    let Ok(output) = output else {
        eprintln!("not tried: no python3 here");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    let words = "ImportError: /nowhere/libd2tp.so.1: cannot open shared object file";
    assert!(said.contains(words), "{said}");
    assert!(said.contains("$D2TP_LIBRARY"), "{said}");
}
