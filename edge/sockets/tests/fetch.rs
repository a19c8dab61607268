//! Tests the example `fetch` against a server of this crate.

#[path = "../examples/fetch.rs"]
mod example;

use std::io::{Read, Write};
use std::time::Duration;

use d2tp_sockets::{ConnectSettings, D2tpListener};

#[test]
fn the_example_fetches_a_page() {
    let home = tempfile::tempdir().unwrap();
    // SAFETY: no other thread runs yet.
    unsafe {
        std::env::set_var("XDG_CONFIG_HOME", home.path());
        std::env::set_var("CEDOS_AGENT", "none");
    }
    let listener = D2tpListener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address().unwrap();
    let server = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let mut asked = Vec::new();
        while !asked.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            asked.push(byte[0]);
        }
        stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nhello").unwrap();
        String::from_utf8(asked).unwrap()
    });
    let settings = ConnectSettings {
        deadline: Some(Duration::from_secs(60)),
        ..Default::default()
    };
    let answer = example::fetch(&address, "/page", &settings).unwrap();
    assert!(answer.ends_with(b"\r\n\r\nhello"), "{answer:?}");
    let asked = server.join().unwrap();
    assert!(
        asked.starts_with("GET /page HTTP/1.0\r\nHost: 127.0.0.1:"),
        "{asked}"
    );
}
