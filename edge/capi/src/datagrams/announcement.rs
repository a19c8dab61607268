//! The first line of a datagram socket's flow, which names the context of its datagrams: `DATAGRAMS 7`.

use d2tp_driver::Flow;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// The first word of the line.
const LINE_WORD: &str = "DATAGRAMS";

/// The most bytes of the line.
const LINE_BYTES_MAX: usize = 32;

/// Reads the first line of a datagram socket's flow: the context number.
pub(super) async fn context_of(flow: &mut Flow) -> Option<u64> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        if line.len() == LINE_BYTES_MAX {
            return None;
        }
        line.push(flow.read_u8().await.ok()?);
    }
    context_in(&line)
}

fn context_in(line: &[u8]) -> Option<u64> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let context = line.strip_prefix(LINE_WORD)?.strip_prefix(' ')?;
    let context = context.parse().ok()?;
    (context > 0 && context < d2tp_driver::CONTEXTS_OF_COPIES).then_some(context)
}

/// Writes the first line of a flow, which names the context of its datagrams.
///
/// # Errors
/// The flow broke.
pub(super) async fn announce(flow: &mut Flow, context: u64) -> std::io::Result<()> {
    let line = format!("{LINE_WORD} {context}\n");
    flow.write_all(line.as_bytes()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flows_first_line_names_a_context_or_nothing() {
        assert_eq!(context_in(b"DATAGRAMS 7\n"), Some(7));
        for line in [
            &b"DATAGRAMS 7"[..],
            b"DATAGRAMS 0\n",
            b"DATAGRAMS 4294967296\n",
            b"DATAGRAMS x\n",
            b"GET / HTTP/1.1\n",
            b"\xff\n",
        ] {
            assert_eq!(context_in(line), None, "{line:?}");
        }
    }
}
