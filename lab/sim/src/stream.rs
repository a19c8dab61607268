//! The applications' side of a flow: sending bytes from a cursor, receiving bytes and checking each
//! of them.
//!
//! ```text
//!  download   device: request ──▶          proxy: content of the size and seed asked for ◀──
//!  upload     device: request, content ──▶ proxy: a receipt for what arrived ◀──
//! ```

use bytes::Bytes;
use d2tp_session::{FlowId, ReadOutcome, Session};
use sha2::{Digest, Sha256};

use cedos_lab_scenario::content;

use crate::fault::SimFault;

/// The size of a request in bytes: kind, size, first byte, seed.
pub(crate) const REQUEST_BYTES: usize = 25;
/// The size of the answer to an upload in bytes.
pub(crate) const DIGEST_BYTES: usize = 32;
/// The number of bytes given or taken at a time.
pub(crate) const CHUNK_BYTES: u64 = 64 * 1024;

/// The device's request at the beginning of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SimRequest {
    pub upload: bool,
    pub size: u64,
    /// The first byte that is requested: the application has those before.
    pub from: u64,
    pub seed: u64,
}

impl SimRequest {
    pub(crate) fn encode(self) -> Vec<u8> {
        let mut out = vec![u8::from(self.upload)];
        out.extend(self.size.to_be_bytes());
        out.extend(self.from.to_be_bytes());
        out.extend(self.seed.to_be_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<SimRequest> {
        let (upload, rest) = bytes.split_first()?;
        let (size, rest) = rest.split_first_chunk::<8>()?;
        let (from, seed) = rest.split_first_chunk::<8>()?;
        Some(SimRequest {
            upload: *upload == 1,
            size: u64::from_be_bytes(*size),
            from: u64::from_be_bytes(*from),
            seed: u64::from_be_bytes(*seed.first_chunk()?),
        })
    }
}

/// Bytes to be sent that can be generated again from any offset: a head, then content.
#[derive(Clone, Debug)]
pub(crate) struct SimSource {
    pub head: Vec<u8>,
    pub seed: u64,
    /// The first byte of the content to be sent.
    from: u64,
    /// The size of the content, including the bytes before `from`.
    pub size: u64,
    /// The offset of the next byte to give; `None` until the session requests the first offset.
    pub cursor: Option<u64>,
    /// Whether the end is to be held back.
    pub open_ended: bool,
    /// Whether nothing is given, because others go first.
    pub held: bool,
    finished: bool,
}

impl SimSource {
    pub(crate) fn new(head: Vec<u8>, seed: u64, from: u64, size: u64) -> SimSource {
        SimSource {
            head,
            seed,
            from: from.min(size),
            size,
            cursor: Some(0),
            open_ended: false,
            held: false,
            finished: false,
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.head.len() as u64 + self.size - self.from
    }

    /// Handles the session's request for the bytes from `offset` on.
    pub(crate) fn begin_at(&mut self, offset: u64) {
        self.cursor = Some(offset);
        self.finished = false;
    }

    /// Handles the session's hibernation: it will say later where to begin.
    pub(crate) fn wait(&mut self) {
        self.cursor = None;
        self.finished = false;
    }

    /// Gives the session as many bytes as it accepts, and the end.
    pub(crate) fn give(&mut self, session: &mut Session, id: FlowId) {
        let waits = self.held || self.finished;
        let Some(mut cursor) = self.cursor.filter(|_| !waits) else {
            return;
        };
        while cursor < self.total() {
            // An error means that the flow is over; its event reports that.
            let Ok(room) = session.source_room(id) else {
                return;
            };
            let n = room.min(self.total() - cursor).min(CHUNK_BYTES);
            if n == 0 || session.write(id, self.bytes(cursor, n)).is_err() {
                self.cursor = Some(cursor);
                return;
            }
            cursor += n;
        }
        self.cursor = Some(cursor);
        self.finished = !self.open_ended && session.finish(id).is_ok();
    }

    fn bytes(&self, offset: u64, n: u64) -> Bytes {
        let mut out = vec![0; n as usize];
        let head = self.head.get(offset as usize..).unwrap_or(&[]);
        let of_head = head.len().min(out.len());
        out[..of_head].copy_from_slice(&head[..of_head]);
        let at = (offset + of_head as u64).saturating_sub(self.head.len() as u64);
        content::fill(self.seed, self.from + at, &mut out[of_head..]);
        out.into()
    }
}

/// The receiver of bytes: a head, which is stored, then content, which is compared and hashed.
#[derive(Clone, Debug)]
pub(crate) struct SimSink {
    head_bytes: usize,
    pub head: Vec<u8>,
    /// The seed of the content; known when the head is complete.
    pub seed: u64,
    /// The content that the application had before this flow.
    from: u64,
    /// The number of bytes received on this flow.
    pub offset: u64,
    pub ended: bool,
}

impl SimSink {
    pub(crate) fn new(head_bytes: usize, seed: u64) -> SimSink {
        SimSink {
            head_bytes,
            head: Vec::new(),
            seed,
            from: 0,
            offset: 0,
            ended: false,
        }
    }

    /// The head, once it is complete.
    pub(crate) fn whole_head(&self) -> Option<&[u8]> {
        (self.head.len() == self.head_bytes).then_some(&self.head)
    }

    /// Continues with the same content in a new flow from the current offset.
    pub(crate) fn go_on(&mut self) {
        self.from = self.content_bytes();
        self.head.clear();
        self.offset = 0;
        self.ended = false;
    }

    /// The number of content bytes received, including those before this flow.
    pub(crate) fn content_bytes(&self) -> u64 {
        self.from + self.offset - self.head.len() as u64
    }

    /// The receipt for the received bytes. Each byte was compared with the expected one, which is
    /// stronger than a digest and saves a third of a run's time.
    pub(crate) fn receipt(&self) -> [u8; DIGEST_BYTES] {
        receipt(self.seed, self.content_bytes())
    }

    /// Takes available bytes from the session, and checks that they are a prefix of what was
    /// written.
    pub(crate) fn take(&mut self, session: &mut Session, id: FlowId) -> Result<(), SimFault> {
        if let Some((at, _)) = session.received(id)
            && at != self.offset
        {
            return Err(SimFault::Skipped {
                flow: id,
                expected: self.offset,
                got: at,
            });
        }
        loop {
            match session.read(id, CHUNK_BYTES as usize) {
                Ok(ReadOutcome::Chunk(bytes)) => self.accept(id, &bytes)?,
                Ok(ReadOutcome::End) => {
                    self.ended = true;
                    return Ok(());
                }
                Ok(ReadOutcome::Pending) | Err(_) => return Ok(()),
            }
        }
    }

    fn accept(&mut self, id: FlowId, bytes: &[u8]) -> Result<(), SimFault> {
        if self.ended {
            return Err(SimFault::BeyondEnd {
                flow: id,
                offset: self.offset,
            });
        }
        let of_head = (self.head_bytes - self.head.len()).min(bytes.len());
        self.head.extend(&bytes[..of_head]);
        self.offset += of_head as u64;
        if of_head > 0
            && self.head_bytes == REQUEST_BYTES
            && let Some(request) = self.whole_head().and_then(SimRequest::decode)
        {
            self.seed = request.seed;
        }
        let rest = &bytes[of_head..];
        if rest.is_empty() {
            return Ok(());
        }
        let mut right = vec![0; rest.len()];
        content::fill(self.seed, self.content_bytes(), &mut right);
        if let Some(at) = rest
            .iter()
            .zip(&right)
            .position(|(got, right)| got != right)
        {
            return Err(SimFault::WrongByte {
                flow: id,
                offset: self.offset + at as u64,
            });
        }
        self.offset += rest.len() as u64;
        Ok(())
    }
}

/// The receipt of a receiver of this many bytes of this content.
pub(crate) fn receipt(seed: u64, bytes: u64) -> [u8; DIGEST_BYTES] {
    let mut digest = Sha256::new();
    digest.update(seed.to_be_bytes());
    digest.update(bytes.to_be_bytes());
    digest.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_as_it_was_written() {
        let request = SimRequest {
            upload: true,
            size: 1 << 40,
            from: 1 << 39,
            seed: 77,
        };
        assert_eq!(request.encode().len(), REQUEST_BYTES);
        assert_eq!(SimRequest::decode(&request.encode()), Some(request));
        assert_eq!(SimRequest::decode(&[1, 2, 3]), None);
    }

    #[test]
    fn a_source_gives_the_same_bytes_from_any_offset() {
        let source = SimSource::new(vec![1, 2, 3], 9, 0, 100);
        let whole = source.bytes(0, 103);
        assert_eq!(whole[..3], [1, 2, 3]);
        for at in [0, 2, 3, 50] {
            assert_eq!(source.bytes(at, 20), whole[at as usize..at as usize + 20]);
        }
    }

    #[test]
    fn a_new_flow_goes_on_where_the_one_before_stopped() {
        let mut sink = SimSink::new(0, 9);
        let first = SimSource::new(vec![], 9, 0, 100).bytes(0, 40);
        sink.accept(FlowId(0), &first).unwrap();
        sink.go_on();
        let source = SimSource::new(vec![], 9, 40, 100);
        assert_eq!(source.total(), 60);
        sink.accept(FlowId(2), &source.bytes(0, 60)).unwrap();
        assert_eq!(sink.content_bytes(), 100);
        assert_eq!(sink.receipt(), receipt(9, 100));
    }

    #[test]
    fn a_wrong_byte_is_found_and_named() {
        let mut sink = SimSink::new(0, 9);
        let mut bytes = SimSource::new(vec![], 9, 0, 100).bytes(0, 100).to_vec();
        sink.accept(FlowId(0), &bytes[..40]).unwrap();
        bytes[70] ^= 1;
        let fault = sink.accept(FlowId(0), &bytes[40..]).unwrap_err();
        assert!(
            matches!(fault, SimFault::WrongByte { offset: 70, .. }),
            "{fault}"
        );
    }
}
