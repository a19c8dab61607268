//! Streams that block and tokio's, against each other.

use std::io::{Read, Write};
use std::time::Duration;

use d2tp_sockets::{Cause, Settings, Thresholds, asynchronous};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const BYTES: usize = 2_000_000;

fn content() -> Vec<u8> {
    (0..BYTES as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8)
        .collect()
}

#[test]
fn blocking_and_asynchronous_streams_carry_both_ways_and_say_why_they_end() {
    let home = tempfile::tempdir().unwrap();
    // SAFETY: before anything else of this process runs, but the test's own thread.
    unsafe { std::env::set_var("XDG_CONFIG_HOME", home.path()) };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let listener = {
        let _entered = runtime.enter();
        asynchronous::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap()
    };
    let address = listener.address().unwrap();

    let there = address.clone();
    let blocking = std::thread::spawn(move || {
        let levels = |low, high| Settings {
            buffer: Some(Thresholds {
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
        stream.shutdown().await.unwrap();

        let settings = Settings {
            deadline: Some(Duration::from_secs(1)),
            ..Default::default()
        };
        let connecting = settings.connect_async(&address);
        let (late, accepted) = tokio::join!(connecting, listener.accept());
        let error = late.unwrap().read_u8().await.unwrap_err();
        let cause = error.get_ref().and_then(|e| e.downcast_ref::<Cause>());
        let cause = cause.expect("the library knows why");
        assert_eq!(
            (cause.errno, cause.words.as_str()),
            (libc::ETIME, "the deadline passed")
        );
        drop(accepted);
    });
    blocking.join().unwrap();

    let error = Settings::default().connect("nonsense").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}
