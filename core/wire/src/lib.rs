//! D2TP on the wire: bytes to packets and frames, and back.
//!
//! A datagram holds one packet. Its first byte says which kind ([`PacketKind`]); a DATA packet's
//! plaintext is a sequence of frames ([`Frame`]). Everything here is a checked view over borrowed
//! bytes: decoding allocates nothing and never panics, encoding writes into a buffer it is given.
//! What the fields mean is in `docs/protocol.md`.

mod codec;
mod frame;
mod packet;

pub use codec::{DecodeError, VARINT_MAX, WireReader, WireWriter, varint_len};
pub use frame::{AckRanges, FlowId, Frame, FrameIter, PathStatus, ReasonCode, frame_type};
pub use packet::{
    CID_BYTES, Cid, DATA_HEADER_BYTES, DATAGRAM_FIRST_BYTES, DATAGRAM_MAX_BYTES, PN_BYTES,
    PacketKind, PathId, TAG_BYTES, TOKEN_BYTES, VERSION, expand_packet_number,
};
