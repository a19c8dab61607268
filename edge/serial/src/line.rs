//! A serial line as its user names it: the device, its bit rate, and how frames look there.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::callsign::{AX25_HEAD_BYTES, Callsign, CallsignError};
use crate::frame::FRAGMENT_OVERHEAD_BYTES;

/// The bit rate of a line that states none.
pub const BAUD_DEFAULT: u32 = 115_200;
/// The bit rates that a line may have.
pub const BAUD_RANGE: std::ops::RangeInclusive<u32> = 50..=4_000_000;
/// Bits on the line for each byte: a start bit, eight of data, a stop bit.
const BITS_PER_BYTE: u32 = 10;
/// Bytes for the delimiters of a frame, and its byte stuffing.
const DELIMITER_BYTES: usize = 4;
/// How long a frame may occupy the line. Longer: one station keeps the others waiting, and noise destroys
/// more at once. Shorter: headers take more of a slow line.
const FRAME_TIME: Duration = Duration::from_millis(250); // a guess
/// The smallest frame in bytes, header and check included.
const FRAME_BYTES_MIN: u32 = 96;
/// The largest frame for packet-radio modems in bytes.
const FRAME_BYTES_MAX_KISS: u32 = 256; // the usual limit of packet radio (AX.25 N1)
/// The largest frame on other lines in bytes: a packet of 1,200 bytes is whole in it. Nothing is gained by smaller ones, because a packet
/// is lost with each of its fragments.
const FRAME_BYTES_MAX: u32 = 1_216;

/// How frames are delimited on a line.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LineFraming {
    /// Frames are delimited by a zero byte, which byte stuffing (COBS) keeps out of the frames.
    Cobs,
    /// Frames are delimited by KISS, for packet-radio modems (TNCs): every frame is an AX.25 frame
    /// of this station.
    Kiss(Callsign),
}

/// The device, bit rate and framing of a serial line.
///
/// ```
/// use d2tp_serial::SerialLine;
/// let line: SerialLine = "serial:/dev/ttyUSB0@9600".parse().unwrap();
/// assert_eq!((line.baud, line.bytes_per_second()), (9_600, 960));
/// let radio: SerialLine = "kiss:/dev/ttyACM0@1200,N0CALL-7,half-duplex".parse().unwrap();
/// assert!(radio.half_duplex && !radio.polled);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SerialLine {
    /// The device file.
    pub device: PathBuf,
    /// Bits per second.
    pub baud: u32,
    /// How frames are delimited.
    pub framing: LineFraming,
    /// Whether only one station can send at a time, so that each listens before it sends.
    pub half_duplex: bool,
    /// Whether the bridge gives turns: it polls mobiles, and they send nothing unless they are polled. Implies `half_duplex`.
    pub polled: bool,
    /// Whether a mobile uses the line only while no other link works, so that its radio sleeps.
    pub sleeps: bool,
}

/// A line's name that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SerialLineError {
    /// The name does not have the form of a line.
    #[error(
        "`{0}` is no serial line. Write serial:/dev/ttyUSB0@9600, or kiss:/dev/ttyUSB0@9600,CALLSIGN for a \
         packet-radio modem"
    )]
    Form(String),
    /// The bit rate is none.
    #[error(
        "`{0}` is no bit rate between {min} and {max}",
        min = BAUD_RANGE.start(),
        max = BAUD_RANGE.end()
    )]
    Baud(String),
    /// An option after a comma is unknown.
    #[error(
        "a serial line has no option `{0}`; there are half-duplex, polled and sleep, and a callsign on kiss lines"
    )]
    Option(String),
    /// A KISS line without a station.
    #[error("a kiss line needs the callsign of this station: kiss:/dev/ttyUSB0@9600,CALLSIGN")]
    NoCallsign,
    /// The callsign cannot be sent.
    #[error(transparent)]
    Callsign(#[from] CallsignError),
}

impl SerialLine {
    /// Whether a link's name is that of a serial line, well-formed or not.
    pub fn is_line_name(name: &str) -> bool {
        name.starts_with("serial:") || name.starts_with("kiss:")
    }

    /// A line without a modem.
    pub fn new(device: impl Into<PathBuf>, baud: u32) -> SerialLine {
        SerialLine {
            device: device.into(),
            baud,
            framing: LineFraming::Cobs,
            half_duplex: false,
            polled: false,
            sleeps: false,
        }
    }

    /// Bytes that the line carries in a second.
    pub fn bytes_per_second(&self) -> u32 {
        (self.baud / BITS_PER_BYTE).max(1)
    }

    /// Bytes of packets that the line carries in a second, where packets fill its frames.
    pub fn packet_bytes_per_second(&self) -> u32 {
        let head = match self.framing {
            LineFraming::Cobs => 0,
            LineFraming::Kiss(_) => AX25_HEAD_BYTES + 1,
        };
        let frame = self.frame_bytes_max();
        let content = frame - FRAGMENT_OVERHEAD_BYTES;
        let on_line = frame + head + DELIMITER_BYTES;
        let rate = u64::from(self.bytes_per_second()) * content as u64 / on_line as u64;
        u32::try_from(rate).unwrap_or(u32::MAX).max(1)
    }

    /// How long the line takes for some bytes.
    pub fn time_of(&self, bytes: usize) -> Duration {
        let nanos = bytes as u64 * 1_000_000_000 / u64::from(self.bytes_per_second());
        Duration::from_nanos(nanos)
    }

    /// The largest frame in bytes, before byte stuffing.
    pub fn frame_bytes_max(&self) -> usize {
        let in_time = u64::from(self.bytes_per_second()) * FRAME_TIME.as_millis() as u64 / 1_000;
        let max = match self.framing {
            LineFraming::Cobs => FRAME_BYTES_MAX,
            LineFraming::Kiss(_) => FRAME_BYTES_MAX_KISS,
        };
        in_time.clamp(FRAME_BYTES_MIN.into(), max.into()) as usize
    }
}

impl FromStr for SerialLine {
    type Err = SerialLineError;

    fn from_str(text: &str) -> Result<SerialLine, SerialLineError> {
        let refuse = || SerialLineError::Form(text.to_owned());
        let (scheme, rest) = text.split_once(':').ok_or_else(refuse)?;
        let mut parts = rest.split(',');
        let place = parts.next().filter(|place| !place.is_empty());
        let place = place.ok_or_else(refuse)?;
        let (device, baud) = match place.rsplit_once('@') {
            None => (place, BAUD_DEFAULT),
            Some((device, baud)) => {
                let read = baud.parse().ok().filter(|n| BAUD_RANGE.contains(n));
                let read = read.ok_or_else(|| SerialLineError::Baud(baud.to_owned()))?;
                (device, read)
            }
        };
        if device.is_empty() {
            return Err(refuse());
        }
        let mut line = SerialLine::new(device, baud);
        let mut callsign = None;
        for option in parts {
            match option {
                "half-duplex" => line.half_duplex = true,
                "polled" => (line.half_duplex, line.polled) = (true, true),
                "sleep" => line.sleeps = true,
                station if scheme == "kiss" && callsign.is_none() => {
                    callsign = Some(station.parse()?);
                }
                unknown => return Err(SerialLineError::Option(unknown.to_owned())),
            }
        }
        line.framing = match scheme {
            "serial" => LineFraming::Cobs,
            "kiss" => LineFraming::Kiss(callsign.ok_or(SerialLineError::NoCallsign)?),
            _ => return Err(refuse()),
        };
        Ok(line)
    }
}

impl fmt::Display for SerialLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.device.display();
        match &self.framing {
            LineFraming::Cobs => write!(f, "serial:{device}@{}", self.baud)?,
            LineFraming::Kiss(station) => write!(f, "kiss:{device}@{},{station}", self.baud)?,
        }
        match (self.polled, self.half_duplex) {
            (true, _) => f.write_str(",polled")?,
            (false, true) => f.write_str(",half-duplex")?,
            (false, false) => {}
        }
        match self.sleeps {
            true => f.write_str(",sleep"),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_from_its_name_and_names_itself_so() {
        for name in [
            "serial:/dev/ttyUSB0@9600",
            "serial:/dev/pts/7@300,half-duplex",
            "kiss:/dev/ttyACM0@1200,N0CALL",
            "kiss:/dev/ttyACM0@1200,N0CALL-15,half-duplex",
            "serial:/dev/ttyUSB0@9600,polled",
            "serial:/dev/ttyUSB0@9600,half-duplex,sleep",
        ] {
            let line: SerialLine = name.parse().unwrap();
            assert_eq!(line.to_string(), name);
            assert!(SerialLine::is_line_name(name));
        }
        let plain: SerialLine = "serial:/dev/ttyS0".parse().unwrap();
        assert_eq!(plain.baud, BAUD_DEFAULT);
    }

    #[test]
    fn what_is_wrong_with_a_name_is_said() {
        let fault = |name: &str| name.parse::<SerialLine>().unwrap_err();
        assert_eq!(
            fault("serial:/dev/x@fast"),
            SerialLineError::Baud("fast".into())
        );
        assert_eq!(fault("serial:/dev/x@0"), SerialLineError::Baud("0".into()));
        assert_eq!(
            fault("serial:/dev/x,fast"),
            SerialLineError::Option("fast".into())
        );
        assert_eq!(fault("kiss:/dev/x"), SerialLineError::NoCallsign);
        assert!(matches!(
            fault("kiss:/dev/x,TOOLONGCALL"),
            SerialLineError::Callsign(_)
        ));
        for name in ["serial:", "serial:@9600", "/dev/ttyS0", "tty:/dev/ttyS0"] {
            assert!(matches!(fault(name), SerialLineError::Form(_)), "{name}");
        }
    }

    #[test]
    fn a_frame_takes_no_longer_than_a_quarter_of_a_second_where_that_is_enough_for_headers() {
        let frame = |baud| SerialLine::new("x", baud).frame_bytes_max();
        assert_eq!((frame(300), frame(9_600), frame(19_200)), (96, 240, 480));
        assert_eq!((frame(115_200), frame(4_000_000)), (1_216, 1_216));
        let modem: SerialLine = "kiss:/dev/x@115200,N0CALL-7".parse().unwrap();
        assert_eq!(modem.frame_bytes_max(), 256);
    }

    #[test]
    fn a_packet_of_1200_bytes_is_whole_in_a_frame_of_a_fast_line() {
        let frame = SerialLine::new("x", 115_200).frame_bytes_max();
        let address = crate::StationAddress(7);
        assert_eq!(
            crate::fragment(&[1; 1_200], false, address, 0, frame).len(),
            1
        );
    }
}
