//! Go, Node and Java connect, listen and fetch through the proxy; Python's wheel is built and imported.

use std::process::Command;

use crate::examples;
use crate::support::{library, told};
use crate::surroundings::Surroundings;

/// Checks the lines that all examples print.
fn expect_all(said: &str, first: &str) {
    for line in [
        first,
        "known ok\n",
        "listen ok: by D2TP\n",
        "alone ok\n",
        "deadline ok: the deadline passed\n",
        "http ok: hello\n",
        "ipv6 ok: hello\n",
        "the proxy refuses (502): no such name\n",
    ] {
        assert!(said.contains(line), "{line:?} is missing:\n{said}");
    }
}

#[test]
fn go_dials_listens_and_fetches_through_the_proxy() {
    let around = Surroundings::new();
    if let Some(example) = examples::go(around.folder.path()) {
        expect_all(&around.output_of(&example, &around.arguments), "conn ok\n");
    }
}

#[test]
fn node_connects_listens_and_fetches_through_the_proxy() {
    let around = Surroundings::new();
    if let Some(example) = examples::node(around.folder.path()) {
        let said = around.output_of(&example, &around.arguments);
        expect_all(&said, "socket ok\n");
        assert!(said.contains("given up ok\n"), "{said}");
    }
}

#[test]
fn java_connects_listens_and_fetches_through_the_proxy() {
    let around = Surroundings::new();
    if let Some(example) = examples::java(around.folder.path()) {
        let said = around.output_of(&example, &around.arguments);
        expect_all(&said, "socket ok\n");
        assert!(said.contains("close ok\n"), "{said}");
    }
}

#[test]
fn pythons_wheel_brings_the_library_along() {
    let tools = Command::new("python3")
        .args(["-c", "import pip, setuptools, wheel.bdist_wheel"])
        .output();
    if !tools.is_ok_and(|said| said.status.success()) {
        eprintln!("Python's wheel not tried: no pip, setuptools and wheel here");
        return;
    }
    let around = Surroundings::new();
    // A build leaves folders in the source folder.
    let source = around.path("source");
    std::fs::create_dir_all(source.join("d2tp")).expect("a folder");
    for file in ["pyproject.toml", "setup.py", "d2tp/__init__.py"] {
        std::fs::copy(
            examples::bindings().join("python").join(file),
            source.join(file),
        )
        .expect("a copy");
    }
    let target = around.path("site");
    let installed = Command::new("python3")
        .args(["-m", "pip", "install", "-q", "--no-build-isolation"])
        .args(["--no-deps", "--no-index", "--target"])
        .args([&target, &source])
        .env("D2TP_LIBRARY", library())
        .output();
    told("pip install", installed.expect("it runs"));
    let ran = Command::new("python3")
        .args(["-c", "import d2tp; print(d2tp.connect and d2tp.__file__)"])
        .env("PYTHONPATH", &target)
        .env_remove("D2TP_LIBRARY")
        .output();
    let said = told("python3", ran.expect("it runs"));
    assert!(said.trim_end().ends_with("site/d2tp/__init__.py"), "{said}");
    assert!(target.join("d2tp/libd2tp.so.1").is_file());
}
