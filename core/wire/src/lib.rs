//! D2TP on the wire: bytes to packets and frames, and back.
//!
//! A datagram holds one packet. Its first byte says which kind ([`PacketKind`]); a DATA packet's
//! plaintext is a sequence of frames ([`Frame`]). Everything here is a checked view over borrowed
//! bytes: decoding allocates nothing and never panics, encoding writes into a buffer it is given.
//! What the fields mean is in `docs/protocol.md`.

mod ack_ranges;
mod codec;
mod flow_id;
mod frame;
mod packet;
mod path_status;
mod reason_code;

pub use ack_ranges::AckRanges;
pub use codec::{DecodeError, VARINT_MAX, WireReader, WireWriter, varint_len};
pub use flow_id::FlowId;
pub use frame::{Frame, FrameIter, frame_type};
pub use packet::{
    CID_BYTES, Cid, DATA_HEADER_BYTES, DATAGRAM_FIRST_BYTES, DATAGRAM_MAX_BYTES, PN_BYTES,
    PacketKind, PathId, TAG_BYTES, TOKEN_BYTES, VERSION, expand_packet_number,
};
pub use path_status::PathStatus;
pub use reason_code::ReasonCode;
