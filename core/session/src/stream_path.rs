//! Stream paths: packets inside a reliable ordered stream, for networks that block UDP
//! (R-STREAM-1).
//!
//! ```text
//!  poll_transmit ─▶ batch to [100::n]:1 ─▶ the driver's queue ─▶ the kernel's socket
//!       ▲ room of the path: one batch             │
//!       └──────────── on_stream_room ◀────────────┘ there is room for another one
//!
//!  the connection ends ─▶ on_stream_closed: undelivered data is sent on other paths
//! ```
//!
//! The underlying stream has congestion control and recovers its own losses. So the path's window
//! is the number of bytes that the driver accepts, packets are not paced and have one large size,
//! and silence does not make data count as lost while the connection may still deliver it. Only an
//! overtaken packet is lost: the peer received it and could not keep it.

use d2tp_time::Time;
use d2tp_wire::{DATAGRAM_MAX_BYTES, ReasonCode};

use crate::config::EndpointConfig;
use crate::mtu::MtuDiscovery;
use crate::path::SessionPath;
use crate::session::Session;
use crate::session_state::{Role, SessionState};
use crate::stream_path_state::{STREAM_ROOM_BYTES, StreamPathId, StreamPathState, StreamWindow};

impl SessionPath {
    /// Whether the path uses a reliable ordered stream.
    pub(crate) fn is_stream(&self) -> bool {
        self.stream.is_some()
    }

    /// R-STREAM-2: sets up the path for its current carrier, if that is of another kind than
    /// before: a stream, or datagrams.
    pub(crate) fn set_carrier(&mut self, config: &EndpointConfig) {
        if let Some(line) = self.serial() {
            self.stream = None;
            return self.set_serial_line(config, line);
        }
        let on_stream = StreamPathId::of(&self.addresses.remote).is_some();
        if on_stream && self.stream.is_none() {
            self.mtu = MtuDiscovery::fixed(DATAGRAM_MAX_BYTES as u16);
            self.recovery.controller = Box::new(StreamWindow::new());
        } else if !on_stream && self.stream.is_some() {
            self.mtu = MtuDiscovery::new(config.mtu_max, self.addresses.remote.is_ipv6());
            let datagram = self.mtu.current() as u64;
            self.recovery.controller = config.new_controller(datagram);
        }
        self.stream = on_stream.then_some(StreamPathState {
            room: STREAM_ROOM_BYTES,
            closed: false,
        });
        self.fit_datagrams_to_limit();
    }
}

impl Session {
    /// Sets how many bytes the driver accepts for a stream path.
    pub(crate) fn set_stream_room(&mut self, stream: StreamPathId, room: u64) {
        let remote = stream.address();
        let mut paths = self.paths.iter_mut();
        if let Some(path) = paths.find(|p| p.addresses.remote == remote)
            && let Some(state) = &mut path.stream
        {
            state.room = room;
        }
    }

    /// R-STREAM-4: handles the end of a connection: unacknowledged data of its paths is sent on
    /// others, or waits for one. A device closes the paths; a server keeps them until the device
    /// closes them.
    pub(crate) fn on_stream_closed(&mut self, now: Time, stream: StreamPathId) {
        let remote = stream.address();
        if let Some(trace) = &mut self.trace {
            trace.at(now);
        }
        if self.role == Role::Initiator {
            let link = self.paths.iter().find(|p| p.addresses.remote == remote);
            if let Some(link) = link.map(|p| p.addresses.link) {
                self.on_link_down(now, link);
            }
            return;
        }
        let mut any = false;
        for slot in 0..self.paths.len() {
            let path = self.paths.at(slot);
            if path.addresses.remote != remote {
                continue;
            }
            any = true;
            if let Some(state) = &mut path.stream {
                state.closed = true;
            }
            path.wants = 0;
            path.probe_now = false;
            let alone = !self.paths.has_other_live(slot);
            self.freeze(now, slot, alone);
            self.requeue_in_flight(slot);
        }
        let open = |p: &SessionPath| p.stream.as_ref().is_none_or(|s| !s.closed);
        let left = self.paths.iter().any(open);
        if any && !left && self.state == SessionState::Established && self.closing.is_none() {
            // R-SUSPEND-2: only the device can reconnect.
            self.stop_until_answered(now, ReasonCode::NoPath);
        }
    }
}
