//! C programs against the library.

mod support;

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use support::{C, told};

fn says_ok(source: &str) {
    assert_eq!(C::with_d2tp(source).run(&[]), "ok\n", "{source}");
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
    let (server, client) = (C::with_d2tp("late.c"), C::with_d2tp("late.c"));
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

/// Cases of conformance.c that hand no bad memory to calls: a sanitizer looks at it before the kernel.
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
    let program = match C::with_flags("conformance.c", &[&flag]) {
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
    under("thread", ("TSAN_OPTIONS", "exitcode=9"));
}
