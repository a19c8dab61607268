//! `libd2tp` through D2Prox: real sockets from the program to an ordinary TCP server.

use cedos_lab_rig::port::HeldPort;
use std::future::pending;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use cedos_prox::{Prox, ProxConfig, serve};
use d2tp_driver::{Admission, EndpointConfig, SecretKey, Server, ServerOptions};
use d2tp_sockets::{ConnectSettings, D2tpStream};

const BYTES: usize = 3_000_000;

fn content() -> Vec<u8> {
    (0..BYTES as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8)
        .collect()
}

/// A D2Prox in a thread of its own; its address.
fn proxy(allow_private: bool) -> String {
    let (tell, address) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let server = Server::bind(ServerOptions {
                listen: "127.0.0.1:0".parse().unwrap(),
                key: SecretKey::from_bytes([9; 32]),
                admission: Admission::Anybody,
                config: EndpointConfig::default(),
            });
            let server = Arc::new(server.unwrap());
            let prox = Prox::new(ProxConfig {
                allow_any_client: true,
                allow_private,
                ..Default::default()
            });
            let place = format!("d2tp://{}/{}", server.local_addr(), server.public_key());
            tell.send(place).unwrap();
            serve(server, prox.unwrap(), pending::<()>()).await;
        });
    });
    address.recv().unwrap()
}

fn through(proxy: &str) -> ConnectSettings {
    ConnectSettings {
        proxy: Some(proxy.to_owned()),
        deadline: Some(Duration::from_secs(120)),
        ..Default::default()
    }
}

/// A TCP server whose connections `script` plays, one after the other.
fn origin(script: impl Fn(TcpStream) -> io::Result<()> + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            script(stream.unwrap()).unwrap();
        }
    });
    address
}

fn is_home() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    // SAFETY: before anything else of this process runs, but the test's own thread.
    unsafe { std::env::set_var("XDG_CONFIG_HOME", home.path()) };
    home
}

#[test]
fn a_program_reaches_a_tcp_server_by_sockets_through_the_proxy() {
    let _home = is_home();
    let proxy = proxy(true);
    // Answers with what it heard, after the end of it.
    let echo = origin(|mut stream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all)?;
        stream.write_all(&all)
    });
    let mut stream = through(&proxy).connect(&echo).unwrap();
    let sent = content();
    let writing = (stream.try_clone().unwrap(), sent.clone());
    let writer = std::thread::spawn(move || {
        let (mut stream, sent): (D2tpStream, Vec<u8>) = writing;
        stream.write_all(&sent).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
    });
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    writer.join().unwrap();
    assert!(got == sent, "{} of {BYTES} bytes", got.len());

    // A server that resets is no end of file.
    let rude = origin(|mut stream| {
        stream.write_all(b"half")?;
        stream.read_exact(&mut [0])?;
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO))
    });
    let mut stream = through(&proxy).connect(&rude).unwrap();
    stream.write_all(b"x").unwrap();
    let error = stream.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");

    // Refusals are errors of `connect`, in words of the proxy.
    let held = HeldPort::take();
    let nobody = held.address().to_string();
    let error = through(&proxy).connect(&nobody).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");

    // On tokio, too.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.unwrap().block_on(async {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let settings = through(&proxy);
        let mut stream = settings.connect_async(&echo).await.unwrap();
        stream.write_all(b"asynchronous").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"asynchronous");
        let error = settings.connect_async(&nobody).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
    });

    // One that does not let programs into its own network says so.
    let strict = self::proxy(false);
    let error = through(&strict).connect(&echo).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
}
