//! Datagrams to a device that are not the core's own, by its socket or its stream.

use std::collections::BTreeMap;
use std::io;

use d2tp_session::{Addresses, Endpoint, LinkId, StreamPathId};

use crate::driver_core::DriverSocket;
use crate::relay_state::put;
use crate::stream_queues::StreamQueues;

/// Sends datagrams of one size to a device, by a socket or by the stream that its address
/// identifies.
pub(crate) fn put_to_device(
    core: &mut Endpoint,
    sockets: &BTreeMap<LinkId, DriverSocket>,
    streams: &mut StreamQueues,
    to: &Addresses,
    bytes: &[u8],
    stride: usize,
) -> io::Result<()> {
    if let Some(stream) = StreamPathId::of(&to.remote) {
        streams.enqueue(core, stream, bytes, stride);
        return Ok(());
    }
    match sockets.get(&to.link) {
        Some(socket) => put(&socket.io, to, bytes, stride),
        None => Ok(()),
    }
}
