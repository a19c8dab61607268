//! Tests of blocking streams and tokio's streams with each other.

use std::io::{Read, Write};
use std::time::Duration;

use d2tp_sockets::info::ConnectionState;
use d2tp_sockets::{
    BufferThresholds, ConnectSettings, ConnectionFault, ConnectionPersist, ConnectionToken,
    D2tpConnection, D2tpStream, DLock, LatePolicy, PayPolicy, asynchronous, network_changed,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const BYTES: usize = 2_000_000;

fn content() -> Vec<u8> {
    (0..BYTES as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8)
        .collect()
}

/// Checks D2TP's own operations on a stream that has written all its data.
fn what_only_d2tp_knows(stream: &D2tpStream) {
    let info = stream.info().unwrap();
    assert_eq!(info.state, ConnectionState::Connected, "{info:?}");
    assert_eq!(info.bytes_acked, BYTES as u64, "{info:?}");
    assert!(info.slack.is_none() && !info.paths.is_empty(), "{info:?}");
    stream
        .set_deadline(Some(Duration::from_secs(3600)))
        .unwrap();
    stream.set_size(Some(2 * BYTES as u64)).unwrap();
    stream.set_policy(PayPolicy::FreeOnly).unwrap();
    stream.set_budget(Some(1)).unwrap();
    stream.set_if_late(LatePolicy::Wait).unwrap();
    stream.set_buffer(None).unwrap();
    let nonsense = BufferThresholds {
        low: 2,
        high: 1,
        ..Default::default()
    };
    let error = stream.set_buffer(Some(nonsense)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    let slack = stream.info().unwrap().slack.unwrap();
    assert!((3590..=3600).contains(&slack.as_secs()), "{slack:?}");
    stream.set_deadline(None).unwrap();
    assert_eq!(stream.token().unwrap(), None, "it is not kept");
    assert_eq!(stream.cause().unwrap(), None);
    network_changed().unwrap();
    drop((DLock::acquire().unwrap(), DLock::acquire().unwrap()));
}

/// Checks the error of a connection that should persist, without an agent.
fn without_an_agent(address: &str) {
    let cause = |error: std::io::Error| {
        assert_eq!(error.kind(), std::io::ErrorKind::Unsupported, "{error}");
        error.to_string()
    };
    let settings = ConnectSettings {
        persist: ConnectionPersist::Open,
        ..Default::default()
    };
    let said = cause(settings.connect(address).unwrap_err());
    assert!(said.contains("start `cedos agent`"), "{said}");
    let token = ConnectionToken::from_bytes([7; ConnectionToken::BYTES]);
    assert!(!format!("{token:?}").contains('7'), "it is in no log");
    assert!(ConnectionToken::try_from(&token.as_bytes()[1..]).is_err());
    let said = cause(D2tpStream::reopen(&token).unwrap_err());
    assert!(said.contains("start `cedos agent`"), "{said}");
}

#[test]
fn blocking_and_asynchronous_streams_carry_both_ways_and_say_why_they_end() {
    let home = tempfile::tempdir().unwrap();
    // SAFETY: only the test's own thread runs yet.
    unsafe {
        std::env::set_var("XDG_CONFIG_HOME", home.path());
        std::env::set_var("CEDOS_AGENT", "none");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let listener = {
        let _entered = runtime.enter();
        asynchronous::AsyncListener::bind("127.0.0.1:0".parse().unwrap()).unwrap()
    };
    let address = listener.address().unwrap();

    let there = address.clone();
    let blocking = std::thread::spawn(move || {
        let levels = |low, high| ConnectSettings {
            buffer: Some(BufferThresholds {
                low,
                high,
                ..Default::default()
            }),
            ..Default::default()
        };
        let nonsense = levels(2, 1).connect(&there).unwrap_err();
        assert_eq!(nonsense.raw_os_error(), Some(libc::EINVAL));
        let mut stream = levels(100_000, 400_000).connect(&there).unwrap();
        stream.write_all(&content()).unwrap();
        stream.flush_to_peer(Some(Duration::from_secs(60))).unwrap();
        what_only_d2tp_knows(&stream);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        assert!(got == content(), "{} bytes came back", got.len());
    });
    runtime.block_on(async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        assert!(got == content(), "{} bytes came", got.len());
        stream.write_all(&got).await.unwrap();
        stream.flush_to_peer().await.unwrap();
        assert_eq!(stream.info().unwrap().bytes_acked, BYTES as u64);
        stream.shutdown().await.unwrap();

        let settings = ConnectSettings {
            // A busy machine may take longer than a second to connect.
            deadline: Some(Duration::from_secs(4)),
            ..Default::default()
        };
        let connecting = settings.connect_async(&address);
        let (late, accepted) = tokio::join!(connecting, listener.accept());
        let error = late.unwrap().read_u8().await.unwrap_err();
        let cause = error
            .get_ref()
            .and_then(|e| e.downcast_ref::<ConnectionFault>());
        let cause = cause.expect("the library knows why");
        assert_eq!(
            (cause.errno, cause.words.as_str()),
            (libc::ETIME, "the deadline passed")
        );
        drop(accepted);
    });
    blocking.join().unwrap();
    without_an_agent(&address);

    let error = ConnectSettings::default().connect("nonsense").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}
