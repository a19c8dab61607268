//! Relayed packets on the way between a device and its relay, by a socket or a stream.

use std::collections::BTreeMap;
use std::io;

use d2tp_session::{Addresses, LinkId, StreamPathId};

use crate::driver_core::DriverSocket;
use crate::relay_state::put;
use crate::stream_queues::StreamQueues;

/// Sends relayed packets of one size to the other end of a session between a device and its relay, by a socket or by
/// the stream that the address identifies. R-RELAY-2: what either does not accept at once is dropped.
pub(crate) fn put_relayed(
    sockets: &BTreeMap<LinkId, DriverSocket>,
    streams: &mut StreamQueues,
    to: &Addresses,
    bytes: &[u8],
    stride: usize,
) -> io::Result<()> {
    if let Some(stream) = StreamPathId::of(&to.remote) {
        streams.enqueue_relayed(stream, bytes, stride);
        return Ok(());
    }
    match sockets.get(&to.link) {
        Some(socket) => put(&socket.io, to, bytes, stride),
        None => Ok(()),
    }
}
