//! The station of a packet-radio modem, and the head of AX.25 frames that carry its packets.
//!
//! A modem that speaks KISS expects AX.25 frames. Ours are unnumbered information frames without
//! connection and repeaters (AX.25 2.2 §3.12.5, §4.3.3.6), to everybody:
//!
//! ```text
//!  destination CEDOS (7) ‖ source CALL-n (7) ‖ 03 ‖ f0 ‖ link frame
//! ```

use std::fmt;
use std::str::FromStr;

/// The size of the head of an AX.25 frame: two addresses, control, protocol.
pub(crate) const AX25_HEAD_BYTES: usize = 16;
/// The destination of all frames: every station of this kind.
const EVERYBODY: &[u8; 6] = b"CEDOS ";
/// An unnumbered information frame.
const CONTROL_UI: u8 = 0x03;
/// No protocol of layer 3.
const PROTOCOL_NONE: u8 = 0xf0;
/// The bits of an address byte that are always one.
const RESERVED_BITS: u8 = 0x60;
/// The bit that a command has in the destination's last byte.
const COMMAND_BIT: u8 = 0x80;
/// The bit that marks the last address.
const LAST_ADDRESS: u8 = 0x01;

/// The callsign of a station, with its number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Callsign {
    name: String,
    number: u8,
}

/// A callsign that does not fit into an AX.25 address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no callsign: it has one to six letters and digits, and may end with -0 to -15")]
pub struct CallsignError(String);

impl FromStr for Callsign {
    type Err = CallsignError;

    fn from_str(text: &str) -> Result<Callsign, CallsignError> {
        let refuse = || CallsignError(text.to_owned());
        let (name, number) = match text.split_once('-') {
            None => (text, 0),
            Some((name, number)) => (name, number.parse().map_err(|_| refuse())?),
        };
        let fits = (1..=6).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric());
        if !fits || number > 15 {
            return Err(refuse());
        }
        Ok(Callsign {
            name: name.to_ascii_uppercase(),
            number,
        })
    }
}

impl fmt::Display for Callsign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        match self.number {
            0 => Ok(()),
            number => write!(f, "-{number}"),
        }
    }
}

impl Callsign {
    /// The head of this station's frames.
    pub(crate) fn ax25_head(&self) -> [u8; AX25_HEAD_BYTES] {
        let mut head = [0; AX25_HEAD_BYTES];
        let mut own = [b' '; 6];
        own[..self.name.len()].copy_from_slice(self.name.as_bytes());
        for (byte, letter) in head.iter_mut().zip(EVERYBODY) {
            *byte = letter << 1;
        }
        head[6] = COMMAND_BIT | RESERVED_BITS;
        for (byte, letter) in head[7..].iter_mut().zip(own) {
            *byte = letter << 1;
        }
        head[13] = RESERVED_BITS | self.number << 1 | LAST_ADDRESS;
        head[14] = CONTROL_UI;
        head[15] = PROTOCOL_NONE;
        head
    }
}

/// The link frame in an AX.25 frame of a station like this one; `None` if it is another kind of frame.
pub(crate) fn ax25_content(frame: &[u8]) -> Option<&[u8]> {
    let (head, content) = frame.split_first_chunk::<AX25_HEAD_BYTES>()?;
    let to_everybody = head
        .iter()
        .zip(EVERYBODY)
        .all(|(byte, letter)| *byte == letter << 1);
    let plain = head[13] & LAST_ADDRESS != 0 && head[14..] == [CONTROL_UI, PROTOCOL_NONE];
    (to_everybody && plain).then_some(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_is_that_of_an_unnumbered_information_frame() {
        let station: Callsign = "n0call-7".parse().unwrap();
        assert_eq!(station.to_string(), "N0CALL-7");
        let head = station.ax25_head();
        let letters: Vec<u8> = head[7..13].iter().map(|b| b >> 1).collect();
        assert_eq!(letters, b"N0CALL");
        assert_eq!(head[13..], [0x6f, 0x03, 0xf0]);
        let mut frame = head.to_vec();
        frame.extend(b"content");
        assert_eq!(ax25_content(&frame), Some(&b"content"[..]));
        frame[0] ^= 2;
        assert_eq!(ax25_content(&frame), None, "another destination");
        assert_eq!(ax25_content(&frame[..10]), None);
    }

    #[test]
    fn a_callsign_that_does_not_fit_is_refused() {
        for text in ["", "TOOLONG", "N0-16", "N0-x", "N 0", "ÄÖ"] {
            assert!(text.parse::<Callsign>().is_err(), "{text}");
        }
    }
}
