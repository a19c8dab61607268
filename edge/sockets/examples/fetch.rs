//! Fetches a page by HTTP over D2TP, and writes it to standard output.
//!
//! ```text
//! cargo run -p d2tp-sockets --example fetch -- HOST:PORT [PATH]             through the proxy of $CEDOS_PROX
//! cargo run -p d2tp-sockets --example fetch -- d2tp://HOST:PORT/KEY [PATH]  from a D2TP server
//! ```

use std::io::{self, Read, Write};
use std::time::Duration;

use d2tp_sockets::{ConnectSettings, ConnectionFault};

/// Fetches a page; the answer includes its head.
pub fn fetch(address: &str, path: &str, settings: &ConnectSettings) -> io::Result<Vec<u8>> {
    let mut stream = settings.connect(address)?;
    let host = address.trim_start_matches("d2tp://");
    let host = host.split('/').next().unwrap_or(host);
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}

/// The error number that a C program would get, if the library knows the reason.
fn errno(error: &io::Error) -> Option<i32> {
    let cause = error.get_ref()?.downcast_ref::<ConnectionFault>()?;
    Some(cause.errno)
}

#[allow(dead_code, reason = "a test takes the rest of this file")]
fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(address) = arguments.next() else {
        eprintln!("usage: fetch HOST:PORT|d2tp://HOST:PORT/KEY [PATH]");
        std::process::exit(2);
    };
    let path = arguments.next().unwrap_or_else(|| "/".into());
    let settings = ConnectSettings {
        deadline: Some(Duration::from_secs(60)),
        ..Default::default()
    };
    match fetch(&address, &path, &settings) {
        Ok(answer) => io::stdout().write_all(&answer),
        Err(error) => {
            eprintln!("{address}: {error} (errno {:?})", errno(&error));
            std::process::exit(1);
        }
    }
}
