//! D2TP packets framed on serial lines: cables, and radios that look like one.
//!
//! ```text
//!  mobile                       serial line                       bridge                    D2Prox
//!  packet ─▶ MobileStation ─▶ frames (CRC-32, COBS or KISS) ─▶ Bridge ─▶ UDP, a socket for each mobile
//!         ◀─               ◀─                               ◀─        ◀─
//! ```
//!
//! No IP and no UDP header travels. Packets that are larger than a frame are cut, and put together at the
//! other end of the line. The bridge sees sealed packets only: it needs no key, and is trusted with nothing.

mod air;
mod bridge;
mod callsign;
mod counts;
mod delimiter;
mod fair_queue;
mod fragments;
mod frame;
mod line;
mod mobile_station;
mod port;
mod terminal;
mod turns;

pub use bridge::{Bridge, BridgeCounts, BridgeError, BridgeEvent, MOBILES_MAX};
pub use callsign::{Callsign, CallsignError};
pub use counts::LinkCounts;
pub use delimiter::{Delimited, FrameReader, delimit};
pub use fair_queue::{FairQueue, QueueFull, STATIONS_MAX};
pub use fragments::{PACKET_BYTES_MAX, Reassembled, Reassembly, fragment};
pub use frame::{FrameBody, FrameFault, LinkFragment, LinkFrame, StationAddress};
pub use line::{BAUD_DEFAULT, BAUD_RANGE, LineFraming, SerialLine, SerialLineError};
pub use mobile_station::{MobileStation, StationSender};
pub use port::{LinkPacket, OpenLineError, SerialPort, StationRole};
