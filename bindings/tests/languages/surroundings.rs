//! The servers for an example: a D2TP server and a proxy, both in C, and an ordinary origin.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::examples;
use crate::support::{CProgram, Server, told};

/// Servers that run until this is dropped.
pub struct Surroundings {
    /// The folder with the keys of examples.
    pub folder: TempDir,
    _server: (CProgram, Server),
    _proxy: (CProgram, Server),
    /// SERVER PROXY URL, the arguments of examples.
    pub arguments: [String; 3],
}

impl Surroundings {
    /// Starts the servers.
    pub fn new() -> Surroundings {
        let folder = TempDir::new().expect("a place");
        let start = |source: &str| {
            let program = CProgram::with_d2tp(source);
            let process = Server::start(&program);
            (program, process)
        };
        let (server, proxy) = (start("echoes.c"), start("proxy.c"));
        let arguments = [server.1.1.clone(), proxy.1.1.clone(), origin()];
        Surroundings {
            folder,
            _server: server,
            _proxy: proxy,
            arguments,
        }
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The output of an example with these arguments. It must succeed.
    pub fn output_of(&self, example: &examples::Example, arguments: &[String]) -> String {
        told(
            "example",
            example().args(arguments).output().expect("it runs"),
        )
    }
}

/// An HTTP server in its own thread that answers `hello`; returns its URL.
fn origin() -> String {
    let origin = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/", origin.local_addr().expect("an address"));
    std::thread::spawn(move || {
        loop {
            let (mut stream, _) = origin.accept().expect("a connection");
            let mut head = BufReader::new(stream.try_clone().expect("a twin")).lines();
            while !head.next().expect("a line").expect("a line").is_empty() {}
            let answer = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
            stream.write_all(answer.as_bytes()).expect("it is read");
        }
    });
    url
}
