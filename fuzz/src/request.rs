//! Bytes as the first of a flow to the proxy. This is not part of `lib.rs`, whose other users do
//! not depend on the proxy.

/// Checks that an accepted request has lines that all parsers end at the same place, and that it
/// requests something.
pub fn request(bytes: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime of one thread");
    match runtime.block_on(cedos_prox::check_head(bytes)) {
        None => assert!(bytes.is_empty(), "somebody waits for an answer"),
        Some(Err(status)) => assert!((400..=505).contains(&status), "{status}"),
        Some(Ok(asked)) => {
            let end = bytes.windows(4).position(|w| w == b"\r\n\r\n");
            let head = &bytes[..end.expect("what is acted on has an end") + 4];
            assert!(head.len() <= cedos_prox::HEAD_BYTES_MAX);
            for (at, byte) in head.iter().enumerate() {
                let before = at.checked_sub(1).map(|i| head[i]);
                assert_eq!(
                    *byte == b'\n',
                    before == Some(b'\r'),
                    "a bare CR or LF at {at}"
                );
                assert_ne!(*byte, 0, "NUL at {at}");
            }
            assert!(
                !asked.is_empty() && !asked.contains(['\r', '\n', ' ', '#']),
                "{asked}"
            );
        }
    }
}
