//! A request's head, read from a flow. Line ends that two readers could see differently are refused.

use std::io;
use std::time::Duration;

use d2tp_driver::MemoryCharge;
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::refusal::ProxRefusal;

/// The most bytes of a request head, the final empty line included. RELIABILITY: header block ≤ 32 kB.
pub const HEAD_BYTES_MAX: usize = 32 * 1024;

/// How often a head is there: as it came, and as the request that was parsed from it.
const HEAD_COPIES: u64 = 2;

/// Bytes read from the flow at once while looking for the end of the head.
const READ_BYTES: usize = 4096;

/// A request head, and the bytes that came after it.
#[derive(Debug)]
pub(crate) struct ProxRequestHead {
    pub(crate) bytes: Vec<u8>,
    pub(crate) end: usize,
}

impl ProxRequestHead {
    /// The head, its final empty line included.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.end]
    }

    /// Bytes that arrived after the head: the first of a tunnel.
    pub(crate) fn rest(&self) -> &[u8] {
        &self.bytes[self.end..]
    }
}

/// Why no head could be read.
#[derive(Debug)]
pub(crate) enum RequestHeadError {
    /// The request is refused with an answer.
    Refused(ProxRefusal),
    /// The flow ended or broke before the head was complete, so that no answer is possible.
    Gone(io::Error),
}

/// Reads a head up to its empty line. Its buffer is charged to `memory`.
pub(crate) async fn read_head<R>(
    flow: &mut R,
    limit: Duration,
    memory: &mut MemoryCharge,
) -> Result<ProxRequestHead, RequestHeadError>
where
    R: AsyncRead + Unpin,
{
    let reading = async {
        let mut bytes = Vec::new();
        let mut seen = 0;
        loop {
            match head_end(&bytes, seen) {
                Ok(Some(end)) if end <= HEAD_BYTES_MAX => {
                    bytes.shrink_to_fit();
                    memory.resize(HEAD_COPIES * bytes.len() as u64);
                    return Ok(ProxRequestHead { bytes, end });
                }
                Ok(None) if bytes.len() < HEAD_BYTES_MAX => {}
                Ok(_) => {
                    return Err(RequestHeadError::Refused(ProxRefusal::HeadTooLarge {
                        max: HEAD_BYTES_MAX,
                    }));
                }
                Err(why) => return Err(RequestHeadError::Refused(ProxRefusal::BadRequest(why))),
            }
            seen = bytes.len();
            let capacity = (seen + READ_BYTES) as u64;
            if !memory.try_resize(HEAD_COPIES * capacity) {
                return Err(RequestHeadError::Refused(ProxRefusal::ClientMemoryFull));
            }
            bytes.reserve_exact(READ_BYTES);
            match flow.take(READ_BYTES as u64).read_buf(&mut bytes).await {
                Ok(0) if bytes.is_empty() => {
                    return Err(RequestHeadError::Gone(io::ErrorKind::UnexpectedEof.into()));
                }
                Ok(0) => {
                    return Err(RequestHeadError::Refused(ProxRefusal::BadRequest(
                        "the head has no end",
                    )));
                }
                Ok(_) => {}
                Err(error) => return Err(RequestHeadError::Gone(error)),
            }
        }
    };
    match tokio::time::timeout(limit, reading).await {
        Ok(head) => head,
        Err(_) => Err(RequestHeadError::Refused(ProxRefusal::RequestTimeout(
            limit,
        ))),
    }
}

/// Finds the end of the head; bytes before `seen` were searched already. Refuses line ends that two
/// parsers could interpret differently.
pub(crate) fn head_end(bytes: &[u8], seen: usize) -> Result<Option<usize>, &'static str> {
    for at in seen..bytes.len() {
        let before = at.checked_sub(1).map(|i| bytes[i]);
        match bytes[at] {
            0 => return Err("a NUL byte in the head"),
            b'\n' if before != Some(b'\r') => return Err("a bare LF; lines end with CR LF"),
            b'\n' if at == 1 => return Err("an empty line before the request line"),
            b'\n' if at >= 3 && bytes[at - 3] == b'\r' && bytes[at - 2] == b'\n' => {
                return Ok(Some(at + 1));
            }
            b' ' | b'\t' if before == Some(b'\n') => {
                return Err("a folded header line (it starts with a space)");
            }
            byte if before == Some(b'\r') && byte != b'\n' => {
                return Err("a bare CR; lines end with CR LF");
            }
            _ => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_head_is_found_however_the_bytes_are_cut() {
        let text = b"GET http://h/ HTTP/1.1\r\nHost: h\r\n\r\nrest";
        for cut in 0..text.len() {
            let first = head_end(&text[..cut], 0).unwrap();
            let found = first.or_else(|| head_end(text, cut).unwrap());
            assert_eq!(found, Some(text.len() - 4), "cut at {cut}");
        }
    }
}
