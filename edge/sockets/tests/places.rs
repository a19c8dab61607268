//! Tests with more connections to one server than a process may have.

use std::time::{Duration, Instant};

use d2tp_sockets::{D2tpListener, D2tpStream};

/// The number of flows that a process may have to one server.
const FLOWS_MAX: usize = 1_024;

#[test]
fn a_connection_beyond_the_limit_waits_for_one_to_end() {
    let home = tempfile::tempdir().unwrap();
    // SAFETY: only the test's own thread runs in this process yet.
    unsafe {
        std::env::set_var("XDG_CONFIG_HOME", home.path());
        std::env::set_var("CEDOS_AGENT", "none");
    }
    let listener = D2tpListener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address().unwrap();
    std::thread::spawn(move || {
        let accepted = std::iter::from_fn(|| listener.accept().ok());
        // Each is held until its peer has ended.
        for (stream, _) in accepted {
            std::thread::Builder::new()
                .stack_size(64 << 10)
                .spawn(move || std::io::copy(&mut &stream, &mut std::io::sink()))
                .unwrap();
        }
    });
    let connect = || D2tpStream::connect(&address);
    let mut held: Vec<D2tpStream> = (0..FLOWS_MAX).map(|_| connect().unwrap()).collect();
    let there = address.clone();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(D2tpStream::connect(&there).map(drop)));
    let early = told.recv_timeout(Duration::from_secs(2));
    assert!(early.is_err(), "it does not wait: {early:?}");
    let ended = Instant::now();
    held.pop().unwrap().end().unwrap();
    let connected = told.recv_timeout(Duration::from_secs(30)).unwrap();
    connected.unwrap();
    eprintln!("connected {:?} after a place was free", ended.elapsed());
}
