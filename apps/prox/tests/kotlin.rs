//! Kotlin's example: coroutines over a D2TP flow, and OkHttp through D2Prox. Where its tools or what Maven Central
//! has are missing, the test says so and ends.

use std::ffi::OsStr;
use std::future::pending;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use cedos_prox::{Prox, ProxConfig, Resolve, serve};
use d2tp_driver::{Admission, Config, SecretKey, Server, ServerOptions};
use d2tp_sockets::{Listener, Stream};
use futures_util::future::BoxFuture;

/// `edge/capi`.
fn capi() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../edge/capi")
}

/// Where cargo put libd2tp.so, which is built with what this test depends on.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let folder = test.parent().expect("it lies in a folder");
    assert!(folder.join("libd2tp.so").is_file(), "{}", folder.display());
    folder.to_owned()
}

/// A D2TP server that says everything back; its address.
fn echoes() -> String {
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address().unwrap();
    let echo = |mut stream: Stream| -> io::Result<()> {
        let mut back = stream.try_clone()?;
        io::copy(&mut stream, &mut back)?;
        back.shutdown(Shutdown::Write)
    };
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            // A connection that its device gave up is no matter.
            std::thread::spawn(move || echo(stream).ok());
        }
    });
    address
}

/// Two names that nobody else finds.
struct Names;

impl Resolve for Names {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        let found = match name {
            "one.example" | "two.example" => Ok(vec![IpAddr::V4(Ipv4Addr::LOCALHOST)]),
            _ => Err(io::Error::other("no such name")),
        };
        Box::pin(std::future::ready(found))
    }
}

/// A D2Prox in a thread of its own; its address.
fn proxy() -> String {
    let (tell, address) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let server = Server::bind(ServerOptions {
                listen: "127.0.0.1:0".parse().unwrap(),
                key: SecretKey::from_bytes([8; 32]),
                admission: Admission::Anybody,
                config: Config::default(),
            });
            let server = Arc::new(server.unwrap());
            let config = ProxConfig {
                allow_any_client: true,
                allow_private: true,
                ..Default::default()
            };
            let prox = Prox::with_resolver(config, Arc::new(Names));
            let place = format!("d2tp://{}/{}", server.local_addr(), server.public_key());
            tell.send(place).unwrap();
            serve(server, prox.unwrap(), pending::<()>()).await;
        });
    });
    address.recv().unwrap()
}

/// What a program said that ended well.
fn told(name: &str, output: Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{name}: {}\n{said}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

/// A command that finds the library where it was installed.
fn command(prefix: &Path, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
        .env("LD_LIBRARY_PATH", prefix.join("lib"))
        .env("XDG_CONFIG_HOME", prefix)
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .env_remove("CEDOS_PROX");
    command
}

/// How long Maven may take to fetch what it needs, some 110 MB.
const FETCHING_MAX: &str = "240s";

/// The library and the example, compiled into `to`, and the class path of what they need: by what Maven has
/// here already, else with what it fetches. Nothing where it can fetch nothing.
fn compiled(to: &Path) -> Option<String> {
    let classpath = to.join("classpath");
    let maven = |more: &[&str]| {
        let mut maven = Command::new("timeout");
        maven
            .args([
                FETCHING_MAX,
                "mvn",
                "-B",
                "-q",
                "-ntp",
                "-Dstyle.color=never",
            ])
            .args(more)
            .arg(format!("-Dto={}", to.display()))
            .arg(format!("-Dmdep.outputFile={}", classpath.display()))
            .args(["-DincludeScope=test", "test-compile"])
            .arg("dependency:build-classpath")
            .current_dir(capi().join("kotlin"));
        maven.output().expect("it runs")
    };
    let mut made = maven(&["-o"]);
    let lacks = |made: &Output, words: &str| {
        !made.status.success() && String::from_utf8_lossy(&made.stdout).contains(words)
    };
    if lacks(&made, "offline") {
        made = maven(&["-U"]);
    }
    // As timeout(1) says it.
    if made.status.code() == Some(124) {
        eprintln!("Kotlin not tried: Maven was not ready after {FETCHING_MAX}");
        return None;
    }
    // What Maven Central does not have is "not found" there: a mistake of the pom.
    if lacks(&made, "Could not transfer") {
        eprintln!("Kotlin not tried: Maven Central is not to be reached");
        return None;
    }
    told("mvn", made);
    Some(std::fs::read_to_string(classpath).expect("what Maven wrote"))
}

#[test]
fn kotlin_suspends_over_a_flow_and_okhttp_fetches_through_the_proxy() {
    let tools = [
        ("mvn", "-version"),
        ("javac", "-version"),
        ("cc", "--version"),
        ("pkg-config", "--version"),
    ];
    for (tool, argument) in tools {
        let said = Command::new(tool).arg(argument).output();
        if !said.is_ok_and(|said| said.status.success()) {
            eprintln!("Kotlin not tried: no {tool} here");
            return;
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path();
    let Some(needed) = compiled(&prefix.join("kotlin")) else {
        return;
    };
    let installed = Command::new("sh")
        .arg(capi().join("install.sh"))
        .arg(prefix)
        .env("LIBRARIES", libraries())
        .output();
    told("install.sh", installed.unwrap());
    let built = command(prefix, "sh")
        .arg(capi().join("java/build.sh"))
        .arg(prefix.join("java"))
        .output();
    told("build.sh", built.unwrap());

    // SAFETY: before anything else of this process runs, but the test's own thread.
    unsafe { std::env::set_var("XDG_CONFIG_HOME", prefix) };
    let classes = prefix.join("kotlin");
    let ran = command(prefix, "java")
        .arg(format!(
            "-Dd2tp.library={}",
            prefix.join("java/libd2tp_java.so").display()
        ))
        .arg("-cp")
        .arg(format!(
            "{0}/classes:{0}/test-classes:{needed}",
            classes.display()
        ))
        .arg("ExampleKt")
        .args([echoes(), proxy()])
        .output();
    let said = told("Example", ran.unwrap());
    for line in [
        "echo ok\n",
        "cancel ok\n",
        "deadline ok: the deadline passed\n",
        "listen ok\n",
        "alone ok\n",
        "http ok: hello\n",
        "refused: the proxy refuses (502): ",
        "https ok: hello from one.example\n",
        "https ok: hello from two.example\n",
        "all ok\n",
    ] {
        assert!(said.contains(line), "{line:?} is missing:\n{said}");
    }
}
