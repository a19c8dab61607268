//! The beginning of an answer to a hostile request, which tells a refusal in words from an end without any.

use std::ops::RangeInclusive;

use d2tp_session::{FlowEnd, FlowId, ReadOutcome, Session};

/// Bytes of an answer that are kept: a refusal is shorter.
const KEPT_BYTES: usize = 1_024;
/// D2Prox's codes of resets, for each of which devices have a sentence (docs/proxy.md).
const RESET_CODES: RangeInclusive<u64> = 0xd201..=0xd20a;

/// What has come of an answer, from its beginning on.
#[derive(Default)]
pub struct AnswerStart {
    bytes: Vec<u8>,
    /// All bytes that came, those that are not kept included.
    total: u64,
    is_over: bool,
    /// Whether the flow ended with a reason for which devices have a sentence.
    has_reason: bool,
}

impl AnswerStart {
    /// Reads what has come.
    pub fn read(&mut self, session: &mut Session, flow: FlowId) {
        self.read_up_to(session, flow, u64::MAX);
    }

    /// Reads what has come, but no more than a refusal has.
    pub fn read_beginning(&mut self, session: &mut Session, flow: FlowId) {
        self.read_up_to(session, flow, KEPT_BYTES as u64);
    }

    fn read_up_to(&mut self, session: &mut Session, flow: FlowId, end: u64) {
        while !self.is_over && self.total < end {
            let room = usize::try_from(end - self.total).unwrap_or(usize::MAX);
            match session.read(flow, room) {
                Ok(ReadOutcome::Chunk(chunk)) => {
                    self.total += chunk.len() as u64;
                    let room = KEPT_BYTES.saturating_sub(self.bytes.len());
                    self.bytes
                        .extend_from_slice(&chunk[..chunk.len().min(room)]);
                }
                Ok(ReadOutcome::Pending) => return,
                Ok(ReadOutcome::End) | Err(_) => self.is_over = true,
            }
        }
    }

    /// Notes how the flow ended.
    pub fn note_end(&mut self, end: &FlowEnd) {
        self.has_reason = match end {
            FlowEnd::Refused(_) => true,
            FlowEnd::Reset(code) => RESET_CODES.contains(code),
            _ => false,
        };
    }

    /// Whether nothing more will come.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether the head of an answer of the origin has begun.
    pub fn is_accepted(&self) -> bool {
        ["HTTP/1.1 200 ", "HTTP/1.1 206 "]
            .iter()
            .any(|start| self.bytes.starts_with(start.as_bytes()))
    }

    /// The beginning of the answer, as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// The number of bytes after the head, as far as they have come.
    pub fn body_bytes(&self) -> u64 {
        let end = self.bytes.windows(4).position(|four| four == b"\r\n\r\n");
        end.map_or(0, |end| self.total - end as u64 - 4)
    }

    /// Whether the proxy refused the request, with words for whoever made it.
    pub fn is_refusal_in_words(&self) -> bool {
        if self.has_reason {
            return true;
        }
        let text = self.text();
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            return false;
        };
        let status = head.split(' ').nth(1).unwrap_or_default();
        status.starts_with(['4', '5']) && body.trim().split(' ').count() > 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_with_a_sentence_is_a_refusal_in_words() {
        for (text, is_one) in [
            (
                "HTTP/1.1 503 Busy\r\nx: y\r\n\r\nthe proxy is full now\n",
                true,
            ),
            ("HTTP/1.1 403 Forbidden\r\n\r\nno", false),
            ("HTTP/1.1 503 Busy\r\n\r\n", false),
            ("HTTP/1.1 200 OK\r\n\r\nthe body of an answer", false),
            ("", false),
        ] {
            let answer = AnswerStart {
                bytes: text.into(),
                is_over: true,
                ..AnswerStart::default()
            };
            assert_eq!(answer.is_refusal_in_words(), is_one, "{text:?}");
        }
    }

    #[test]
    fn a_reset_counts_as_explained_if_devices_have_a_sentence_for_its_code() {
        for (code, is_one) in [(0xd20a, true), (0xd20b, false), (1, false)] {
            let mut answer = AnswerStart::default();
            answer.note_end(&FlowEnd::Reset(code));
            assert_eq!(answer.is_refusal_in_words(), is_one, "{code:#x}");
        }
    }

    #[test]
    fn the_body_begins_after_the_head() {
        let text = "HTTP/1.1 200 OK\r\nx: y\r\n\r\n";
        let answer = AnswerStart {
            bytes: text.into(),
            total: text.len() as u64 + 5_000,
            ..AnswerStart::default()
        };
        assert_eq!(answer.body_bytes(), 5_000);
        assert_eq!(AnswerStart::default().body_bytes(), 0);
    }
}
