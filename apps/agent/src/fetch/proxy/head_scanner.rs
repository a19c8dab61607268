//! The end of an answer's head in a stream of bytes.

/// Finds the end of an answer's head while its bytes are read.
#[derive(Debug, Default)]
pub(super) struct HeadScanner {
    bytes: u64,
    matched: usize,
}

impl HeadScanner {
    const END: &[u8; 4] = b"\r\n\r\n";

    pub(super) fn scan(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.matched == Self::END.len() {
                return;
            }
            self.bytes += 1;
            self.matched = match *byte == Self::END[self.matched] {
                true => self.matched + 1,
                false => usize::from(*byte == b'\r'),
            };
        }
    }

    pub(super) fn end(&self) -> Option<u64> {
        (self.matched == Self::END.len()).then_some(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_head_is_found_however_its_bytes_come() {
        let answer = b"HTTP/1.1 200 OK\r\nX: a\r\r\n\r\nbody\r\n\r\n";
        let head = answer.len() - b"body\r\n\r\n".len();
        for cut in 0..answer.len() {
            let mut meter = HeadScanner::default();
            meter.scan(&answer[..cut]);
            meter.scan(&answer[cut..]);
            assert_eq!(meter.end(), Some(head as u64), "cut at {cut}");
        }
    }
}
