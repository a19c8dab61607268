//! Tests of the library with C programs.

mod support;

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use cedos_lab_rig::origin::ScriptedOrigin;
use support::{CProgram, Server, told};

fn says_ok(source: &str) {
    assert_eq!(CProgram::with_d2tp(source).run(&[]), "ok\n", "{source}");
}

#[test]
fn a_program_talks_to_itself() {
    says_ok("echo.c");
}

#[test]
fn no_thread_before_use_no_descriptor_taken_and_no_signal() {
    says_ok("quiet.c");
}

#[test]
fn deadlines_end_connections_unless_they_are_lifted_or_may_be_late() {
    says_ok("deadline.c");
}

#[test]
fn a_child_has_its_parents_sockets_and_an_engine_of_its_own() {
    says_ok("forks.c");
}

#[test]
fn what_was_written_before_exit_arrives_whole_at_a_slow_reader() {
    let (server, client) = (CProgram::with_d2tp("late.c"), CProgram::with_d2tp("late.c"));
    let mut server = server
        .command()
        .arg("serve")
        .stdout(Stdio::piped())
        .spawn()
        .map(|process| (process, server))
        .expect("it runs");
    let mut said = BufReader::new(server.0.stdout.take().expect("piped"));
    let mut address = String::new();
    said.read_line(&mut address).expect("its address");
    client.run(&["send", address.trim()]);
    let mut got = String::new();
    said.read_line(&mut got).expect("what it got");
    assert!(server.0.wait().expect("it ends").success());
    assert_eq!(got, "3000000 bytes, then the end\n");
}

#[test]
fn any_host_is_reached_through_the_proxy_and_its_refusals_are_errors_of_connect() {
    let (proxy, client) = (CProgram::with_d2tp("proxy.c"), CProgram::with_d2tp("get.c"));
    let proxy_process = Server::start(&proxy);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let body = "x".repeat(300_000);
    let origin = runtime.block_on(ScriptedOrigin::fixed(body.clone()));
    let port = origin.address.port().to_string();
    let get = |host: &str, port: &str| {
        let mut command = client.command();
        command
            .args([host, port, "/a"])
            .env("CEDOS_PROX", &proxy_process.1);
        told("get", command.output().expect("it runs"))
    };
    assert!(get("127.0.0.1", &port) == body);
    // Only the proxy can resolve this name.
    assert!(get("origin.example", &port) == body);
    let requests = origin.requests();
    let heads: Vec<_> = requests
        .iter()
        .map(|request| request.head.lines().next())
        .collect();
    assert_eq!(heads, [Some("GET /a HTTP/1.0"); 2]);
    // The origin's port is closed with its runtime.
    drop(runtime);
    let refused = get("127.0.0.1", &port);
    assert!(
        refused.starts_with("ECONNREFUSED: the proxy refuses (502)"),
        "{refused}"
    );
    let unknown = get("nobody.example", "80");
    assert!(
        unknown.starts_with("EHOSTUNREACH: ") && unknown.contains("no such name"),
        "{unknown}"
    );
}

#[test]
fn io_uring_sends_polls_receives_and_closes_descriptors_of_ours() {
    let said = CProgram::with_d2tp("uring.c").run(&[]);
    match said.strip_prefix("no io_uring here") {
        Some(why) => eprintln!("not tried: the kernel lets nobody use io_uring{why}"),
        None => assert_eq!(said, "ok\n"),
    }
}

/// Cases of conformance.c that pass no invalid memory to calls, which a sanitizer would report
/// before the kernel.
const SANE: [&str; 12] = [
    "half-close",
    "zero",
    "nonblocking",
    "flags",
    "waitall",
    "timeouts",
    "broken",
    "backlog",
    "states",
    "polling",
    "vectors",
    "storm",
];

fn under(sanitizer: &str, options: (&str, &str)) {
    let flag = format!("-fsanitize={sanitizer}");
    let program = match CProgram::with_flags("conformance.c", &[&flag]) {
        Ok(program) => program,
        Err(why) if why.contains("cannot find") => {
            eprintln!("not tried: this compiler has no {sanitizer} sanitizer");
            return;
        }
        Err(why) => panic!("{why}"),
    };
    for case in SANE {
        let output = program
            .command()
            .arg(case)
            .env(options.0, options.1)
            .output();
        let output = output.expect("it runs");
        let complained = String::from_utf8_lossy(&output.stderr).contains("Sanitizer");
        assert!(!told(case, output.clone()).is_empty(), "{case}");
        assert!(
            !complained,
            "{case}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn the_address_sanitizer_finds_nothing() {
    under("address", ("ASAN_OPTIONS", "exitcode=9"));
}

#[test]
fn the_thread_sanitizer_finds_nothing() {
    // Synchronization between Rust's threads is not instrumented and would look like races.
    let options = "exitcode=9 ignore_noninstrumented_modules=1";
    under("thread", ("TSAN_OPTIONS", options));
}
