//! Go, Node, Java and Python's wheel, each by its example: a D2TP server and a proxy in C, an ordinary origin.
//! Where a language's tools are missing its test says so and ends.

mod support;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::{C, Server, here, library, told};
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
        install(folder.path());
        let start = |source: &str| {
            let program = C::with_d2tp(source);
            let process = Server::start(&program);
            (program, process)
        };
        let (server, proxy) = (start("echoes.c"), start("proxy.c"));
        let origin = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/", origin.local_addr().expect("an address"));
        std::thread::spawn(move || {
            let (mut stream, _) = origin.accept().expect("a connection");
            let mut head = BufReader::new(stream.try_clone().expect("a twin")).lines();
            while !head.next().expect("a line").expect("a line").is_empty() {}
            let answer = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
            stream.write_all(answer.as_bytes()).expect("it is read");
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

    /// A command that finds the library where it was installed.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("PKG_CONFIG_PATH", self.path("lib/pkgconfig"))
            .env("LD_LIBRARY_PATH", self.path("lib"))
            .env("XDG_CONFIG_HOME", self.folder.path())
            .env("CEDOS_AGENT", "none")
            .env_remove("CEDOS_KEY_FILE")
            .env_remove("CEDOS_PROX");
        command
    }
}

/// The header, the shared library and what pkg-config reads.
fn install(prefix: &Path) {
    let installed = Command::new("sh")
        .arg(here().join("install.sh"))
        .arg(prefix)
        .env("LIBRARIES", library().parent().expect("a folder"))
        .output();
    told("install.sh", installed.expect("a shell"));
}

/// Whether all of these programs are here; if not, says which is missing.
fn has(language: &str, tools: &[(&str, &str)]) -> bool {
    let missing = tools.iter().find(|(tool, argument)| {
        let said = Command::new(tool).arg(argument).output();
        !said.is_ok_and(|said| said.status.success())
    });
    if let Some((tool, _)) = missing {
        eprintln!("{language} not tried: no {tool} here");
    }
    missing.is_none()
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
        "the proxy refuses (502): no such name\n",
    ] {
        assert!(said.contains(line), "{line:?} is missing:\n{said}");
    }
}

#[test]
fn go_dials_a_server_and_fetches_through_the_proxy() {
    if !has(
        "Go",
        &[
            ("go", "version"),
            ("cc", "--version"),
            ("pkg-config", "--version"),
        ],
    ) {
        return;
    }
    let around = Surroundings::new();
    let program = around.path("example");
    let built = around
        .command("go")
        // Where the library lies is part of what it keeps.
        .env("GOCACHE", around.path("go-cache"))
        .args(["build", "-o"])
        .arg(&program)
        .arg("./example")
        .current_dir(here().join("go"))
        // Nothing but the standard library, and no newer compiler.
        .env("GOFLAGS", "-mod=mod")
        .env("GOPROXY", "off")
        .env("GOTOOLCHAIN", "local")
        .output();
    told("go build", built.expect("it runs"));
    let ran = around.command(&program).args(&around.arguments).output();
    expect_all(&told("example", ran.expect("it runs")), "conn ok\n");
}

#[test]
fn node_connects_to_a_server_and_fetches_through_the_proxy() {
    if !has(
        "Node",
        &[
            ("node", "--version"),
            ("cc", "--version"),
            ("pkg-config", "--version"),
        ],
    ) {
        return;
    }
    let around = Surroundings::new();
    let binding = around.path("d2tp.node");
    let built = around
        .command("sh")
        .arg(here().join("node/build.sh"))
        .arg(&binding)
        .output()
        .expect("a shell");
    let complaint = String::from_utf8_lossy(&built.stderr);
    if complaint.contains("node_api.h") {
        eprintln!("Node not tried: its headers are not here (Debian: libnode-dev)");
        return;
    }
    told("build.sh", built.clone());
    let ran = around
        .command("node")
        .arg(here().join("node/example.js"))
        .args(&around.arguments)
        .env("D2TP_BINDING", &binding)
        .output();
    expect_all(&told("example.js", ran.expect("it runs")), "socket ok\n");
}

#[test]
fn java_connects_to_a_server_and_fetches_through_the_proxy() {
    if !has(
        "Java",
        &[
            ("javac", "-version"),
            ("cc", "--version"),
            ("pkg-config", "--version"),
        ],
    ) {
        return;
    }
    let around = Surroundings::new();
    let classes = around.path("java");
    let built = around
        .command("sh")
        .arg(here().join("java/build.sh"))
        .arg(&classes)
        .output();
    told("build.sh", built.expect("a shell"));
    let mut library = OsStr::new("-Dd2tp.library=").to_owned();
    library.push(classes.join("libd2tp_java.so"));
    let ran = around
        .command("java")
        .arg(library)
        .arg("-cp")
        .arg(&classes)
        .arg("Example")
        .args(&around.arguments)
        .output();
    let said = told("Example", ran.expect("it runs"));
    expect_all(&said, "socket ok\n");
    assert!(said.contains("close ok\n"), "{said}");
}

#[test]
fn pythons_wheel_brings_the_library_along() {
    if !has("Python's wheel", &[("python3", "-V")]) {
        return;
    }
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
