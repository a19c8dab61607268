//! Tests of datagram sockets with a C program.

mod support;

use support::{CProgram, told};

#[test]
fn messages_keep_their_bounds_names_sizes_ways_times_and_ends() {
    assert_eq!(CProgram::with_d2tp("datagrams.c").run(&[]), "ok\n");
}

#[test]
fn the_address_sanitizer_finds_nothing_in_datagrams() {
    let program = match CProgram::with_flags("datagrams.c", &["-fsanitize=address"]) {
        Ok(program) => program,
        Err(why) if why.contains("cannot find") => {
            eprintln!("not tried: this compiler has no address sanitizer");
            return;
        }
        Err(why) => panic!("{why}"),
    };
    let output = program.command().env("ASAN_OPTIONS", "exitcode=9").output();
    assert_eq!(told("datagrams", output.expect("it runs")), "ok\n");
}
