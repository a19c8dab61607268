//! Frames in a stream of bytes: where each begins and ends, by COBS or by KISS.
//!
//! ```text
//!  bytes of the line ─▶ FrameReader ─▶ frames ─▶ LinkFrame::decode
//!         … 00 │ stuffed frame │ 00 …                COBS
//!         … c0 00 │ AX.25 frame, escaped │ c0 …      KISS
//! ```
//!
//! After noise the reader is in step again at the next delimiter: at most one frame is lost with it. A
//! delimiter is sent before a frame as well as after it, so that noise between two frames harms neither.

use crate::callsign::ax25_content;
use crate::line::LineFraming;

/// The most bytes between two delimiters. What is longer is noise.
const STUFFED_BYTES_MAX: usize = 1_536;

const COBS_END: u8 = 0;
// KISS, as its authors Chepponis and Karn published it in 1987.
const KISS_END: u8 = 0xc0;
const KISS_ESCAPE: u8 = 0xdb;
const KISS_ESCAPED_END: u8 = 0xdc;
const KISS_ESCAPED_ESCAPE: u8 = 0xdd;
/// Data for the first port of a modem.
const KISS_DATA: u8 = 0;

/// Appends a frame with its delimiters.
pub fn delimit(framing: &LineFraming, frame: &[u8], out: &mut Vec<u8>) {
    match framing {
        LineFraming::Cobs => {
            out.push(COBS_END);
            out.extend(cobs::encode_vec(frame));
            out.push(COBS_END);
        }
        LineFraming::Kiss(station) => {
            out.extend([KISS_END, KISS_DATA]);
            for byte in station.ax25_head().iter().chain(frame) {
                match *byte {
                    KISS_END => out.extend([KISS_ESCAPE, KISS_ESCAPED_END]),
                    KISS_ESCAPE => out.extend([KISS_ESCAPE, KISS_ESCAPED_ESCAPE]),
                    plain => out.push(plain),
                }
            }
            out.push(KISS_END);
        }
    }
}

/// What lies between two delimiters.
#[derive(Debug, PartialEq, Eq)]
pub enum Delimited {
    /// Perhaps a frame.
    Frame(Vec<u8>),
    /// Bytes that no station of this kind sends: byte stuffing that is wrong, or too many bytes.
    Noise,
    /// Something else that a modem tells its host, or a frame of another kind of station.
    Foreign,
}

/// Finds frames in the bytes of a line.
#[derive(Debug)]
pub struct FrameReader {
    framing: LineFraming,
    held: Vec<u8>,
    /// Whether what is held is too long, so that everything to the next delimiter is dropped.
    overlong: bool,
}

impl FrameReader {
    /// A reader that has read nothing.
    pub fn new(framing: LineFraming) -> FrameReader {
        FrameReader {
            framing,
            held: Vec::new(),
            overlong: false,
        }
    }

    /// Reads some bytes of the line, and passes on what each delimiter ends.
    pub fn read(&mut self, bytes: &[u8], mut found: impl FnMut(Delimited)) {
        let end = match self.framing {
            LineFraming::Cobs => COBS_END,
            LineFraming::Kiss(_) => KISS_END,
        };
        for byte in bytes {
            if *byte == end {
                if let Some(delimited) = self.take() {
                    found(delimited);
                }
            } else if self.held.len() < STUFFED_BYTES_MAX {
                self.held.push(*byte);
            } else {
                self.overlong = true;
            }
        }
    }

    fn take(&mut self) -> Option<Delimited> {
        let stuffed = std::mem::take(&mut self.held);
        if std::mem::take(&mut self.overlong) {
            return Some(Delimited::Noise);
        }
        if stuffed.is_empty() {
            return None;
        }
        Some(match self.framing {
            LineFraming::Cobs => match cobs::decode_vec(&stuffed) {
                Ok(frame) => Delimited::Frame(frame),
                Err(_) => Delimited::Noise,
            },
            LineFraming::Kiss(_) => kiss_content(&stuffed),
        })
    }
}

fn kiss_content(escaped: &[u8]) -> Delimited {
    let Some((command, escaped)) = escaped.split_first() else {
        return Delimited::Noise;
    };
    if *command != KISS_DATA {
        return Delimited::Foreign;
    }
    let mut frame = Vec::with_capacity(escaped.len());
    let mut bytes = escaped.iter();
    while let Some(byte) = bytes.next() {
        let plain = match *byte {
            KISS_ESCAPE => match bytes.next() {
                Some(&KISS_ESCAPED_END) => KISS_END,
                Some(&KISS_ESCAPED_ESCAPE) => KISS_ESCAPE,
                _ => return Delimited::Noise,
            },
            plain => plain,
        };
        frame.push(plain);
    }
    match ax25_content(&frame) {
        Some(content) => Delimited::Frame(content.to_vec()),
        None => Delimited::Foreign,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn framings() -> [LineFraming; 2] {
        [
            LineFraming::Cobs,
            LineFraming::Kiss("N0CALL".parse().unwrap()),
        ]
    }

    fn read(framing: &LineFraming, bytes: &[u8], pieces: usize) -> Vec<Delimited> {
        let mut reader = FrameReader::new(framing.clone());
        let mut found = Vec::new();
        for piece in bytes.chunks(pieces) {
            reader.read(piece, |delimited| found.push(delimited));
        }
        found
    }

    proptest! {
        #[test]
        fn frames_come_back_however_they_are_cut(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 0..4),
            pieces in 1_usize..40,
        ) {
            for framing in framings() {
                let mut line = Vec::new();
                for frame in &frames {
                    delimit(&framing, frame, &mut line);
                }
                let found = read(&framing, &line, pieces);
                let sent: Vec<Delimited> = frames.iter().cloned().map(Delimited::Frame).collect();
                prop_assert_eq!(found, sent);
            }
        }

        #[test]
        fn noise_before_a_frame_does_not_harm_it(
            noise in prop::collection::vec(any::<u8>(), 0..3_000),
            frame in prop::collection::vec(any::<u8>(), 1..300),
        ) {
            for framing in framings() {
                let mut line = noise.clone();
                delimit(&framing, &frame, &mut line);
                let found = read(&framing, &line, 7);
                prop_assert_eq!(found.last(), Some(&Delimited::Frame(frame.clone())));
            }
        }
    }

    #[test]
    fn a_line_without_delimiters_holds_no_memory() {
        for framing in framings() {
            let mut reader = FrameReader::new(framing);
            for _ in 0..100 {
                reader.read(&[0x55; 4_096], |found| panic!("{found:?}"));
            }
            assert!(reader.held.capacity() <= 2 * STUFFED_BYTES_MAX);
        }
    }
}
