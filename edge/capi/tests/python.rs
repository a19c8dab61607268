//! The Python module, by its example.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::Command;

use support::{C, Server, here, library, told};

#[test]
fn the_example_runs_blocking_on_asyncio_with_requests_and_with_httpx() {
    if Command::new("python3").arg("-V").output().is_err() {
        eprintln!("not tried: no python3 here");
        return;
    }
    let proxy = C::with_d2tp("proxy.c");
    let proxy_process = Server::start(&proxy);
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
    let output = Command::new("python3")
        .arg(here().join("python/example.py"))
        .args([&proxy_process.1, &url])
        .env("D2TP_LIBRARY", library())
        .env("XDG_CONFIG_HOME", proxy.folder.path())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .output();
    let said = told("example.py", output.expect("it runs"));
    assert!(
        said.starts_with("blocking ok\nasyncio ok\ndatagrams ok\ngiven up ok\n"),
        "{said}"
    );
    assert_eq!(said.matches("ipv6 ok: hello\n").count(), 2, "{said}");
    assert!(
        said.contains("requests ok: hello\n") || said.contains("requests is not installed"),
        "{said}"
    );
    assert!(
        said.contains("httpx ok: hello\n") || said.contains("httpx is not installed"),
        "{said}"
    );
    assert!(
        said.contains("refused: [Errno 113] the proxy refuses (502): no such name"),
        "{said}"
    );
}

#[test]
fn an_import_without_the_library_says_what_to_do() {
    let output = Command::new("python3")
        .args(["-c", "import d2tp"])
        .env("PYTHONPATH", here().join("python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("D2TP_LIBRARY", "/nowhere/libd2tp.so.1")
        .output();
    let Ok(output) = output else {
        eprintln!("not tried: no python3 here");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    let words = "ImportError: /nowhere/libd2tp.so.1: cannot open shared object file";
    assert!(said.contains(words), "{said}");
    assert!(said.contains("$D2TP_LIBRARY"), "{said}");
}
