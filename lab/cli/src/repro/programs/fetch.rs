//! A typical static HTTP client in Rust: fetch HOST PORT PATH. The answer goes to standard output.

use std::io::{Write, copy, stdout};
use std::net::TcpStream;

fn main() -> std::io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [host, port, path] = &words[..] else {
        std::process::exit(2);
    };
    let mut server = TcpStream::connect((host.as_str(), port.parse().expect("a port")))?;
    write!(server, "GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n")?;
    copy(&mut server, &mut stdout().lock())?;
    Ok(())
}
