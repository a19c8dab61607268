//! Go, Node, Java and Python's wheel, each by its example: a D2TP server and a proxy in C, an ordinary origin.
//! Where a language's tools are missing its test says so and ends.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;

use support::{C, Server, examples, here, library, told};
use tempfile::TempDir;

/// What every example needs.
struct Surroundings {
    folder: TempDir,
    // Ended with the test.
    _server: (C, Server),
    _proxy: (C, Server),
    /// SERVER PROXY URL, as examples take them.
    arguments: [String; 3],
}

impl Surroundings {
    fn new() -> Surroundings {
        let folder = TempDir::new().expect("a place");
        examples::install(folder.path());
        let start = |source: &str| {
            let program = C::with_d2tp(source);
            let process = Server::start(&program);
            (program, process)
        };
        let (server, proxy) = (start("echoes.c"), start("proxy.c"));
        let origin = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/", origin.local_addr().expect("an address"));
        std::thread::spawn(move || {
            loop {
                let (mut stream, _) = origin.accept().expect("a connection");
                let mut head = BufReader::new(stream.try_clone().expect("a twin")).lines();
                while !head.next().expect("a line").expect("a line").is_empty() {}
                let answer =
                    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
                stream.write_all(answer.as_bytes()).expect("it is read");
            }
        });
        let arguments = [server.1.1.clone(), proxy.1.1.clone(), url];
        Surroundings {
            folder,
            _server: server,
            _proxy: proxy,
            arguments,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What an example says, which is to end well.
    fn said(&self, example: examples::Example) -> String {
        let ran = example().args(&self.arguments).output();
        told("example", ran.expect("it runs"))
    }
}

/// What every example says in the end.
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
        expect_all(&around.said(example), "conn ok\n");
    }
}

#[test]
fn node_connects_listens_and_fetches_through_the_proxy() {
    let around = Surroundings::new();
    if let Some(example) = examples::node(around.folder.path()) {
        let said = around.said(example);
        expect_all(&said, "socket ok\n");
        assert!(said.contains("given up ok\n"), "{said}");
    }
}

#[test]
fn java_connects_listens_and_fetches_through_the_proxy() {
    let around = Surroundings::new();
    if let Some(example) = examples::java(around.folder.path()) {
        let said = around.said(example);
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
    // A build leaves folders beside what it builds.
    let source = around.path("source");
    std::fs::create_dir_all(source.join("d2tp")).expect("a folder");
    for file in ["pyproject.toml", "setup.py", "d2tp/__init__.py"] {
        std::fs::copy(here().join("python").join(file), source.join(file)).expect("a copy");
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
