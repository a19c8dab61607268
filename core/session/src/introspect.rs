//! The state and the resource usage of a session, for simulators, metrics and tests.
//!
//! Nothing here is needed to run a session. [`Session::usage`] walks the session's queues, so its
//! cost grows with their lengths.

use d2tp_wire::FlowId;

use crate::config::{
    ACK_RANGES_MAX, DATAGRAMS_MAX, EVENTS_MAX, FLOW_GAPS_MAX, PATHS_MAX, SPARE_PATHS,
};
use crate::event::FlowArrival;
use crate::flow::SessionFlow;
use crate::path::PathState;
use crate::path_control::ISSUED_MAX;
use crate::session::Session;
use crate::session_state::SessionState;

/// The state of a flow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FlowState {
    /// The flow is not yet claimed or answered after a resume.
    Unclaimed,
    /// Both directions may carry bytes.
    Open,
    /// This end has ended its direction; the peer has not.
    HalfClosedHere,
    /// The peer has ended its direction; this end has not.
    HalfClosedThere,
    /// Both directions have ended; something is still to be read, acknowledged or made durable.
    Draining,
}

/// The current amounts of everything in a session that has a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionUsage {
    /// Live paths of the session.
    pub paths: usize,
    /// The most ranges of received packets kept for one path.
    pub ack_ranges: usize,
    /// The most gaps in the bytes received of one flow.
    pub flow_gaps: usize,
    /// Events the driver has not taken.
    pub events: usize,
    /// Unreliable datagrams that wait to be sent.
    pub datagrams: usize,
    /// Closed paths of which the peer does not know yet.
    pub gone: usize,
    /// Connection ids issued.
    pub issued: usize,
    /// Connection ids of the peer for paths that were not opened.
    pub spare: usize,
    /// The most grants received for one flow.
    pub grants: usize,
    /// Ranges of path ids that were used.
    pub used_path_ranges: usize,
    /// The most bytes that one flow holds for sending or until they are acknowledged.
    pub send_buffered: u64,
    /// Bytes received and not read, of all flows.
    pub unread: u64,
    /// The number of open flows.
    pub flows: usize,
}

impl Session {
    /// Takes the bytes per flow of the datagram that was handled last, for exact accounting by flow
    /// and link. Call it after each datagram, because the next one replaces them.
    pub fn take_arrivals(&mut self) -> Vec<FlowArrival> {
        std::mem::take(&mut self.arrivals)
    }

    /// The state of a flow; `None` if it is over.
    pub fn flow_state(&self, id: FlowId) -> Option<FlowState> {
        self.flows.get(id).map(state_of)
    }

    /// The state of each path.
    pub fn path_states(&self) -> impl Iterator<Item = PathState> {
        self.paths.iter().map(|p| p.state)
    }

    /// The state of each flow.
    pub fn flow_states(&self) -> impl Iterator<Item = FlowState> {
        self.flows.iter().map(state_of)
    }

    /// Whether the session existed before and waits for a handshake or for answers to its claims.
    pub fn is_waking(&self) -> bool {
        let had = self.generation > 0 || self.flows.iter().any(|f| f.announced);
        had && (self.state == SessionState::Handshaking || self.flows.iter().any(|f| f.unclaimed))
            && self.state != SessionState::Suspended
    }

    /// Whether no host knows anything of the session: no handshake has completed, and no flow is from an earlier
    /// process.
    pub fn is_new(&self) -> bool {
        let is_known = |f: &SessionFlow| f.announced || f.unclaimed || f.restored;
        self.generation == 0 && !self.flows.iter().any(is_known)
    }

    /// Describes what keeps each flow from sending, for debugging.
    pub fn explain(&self) -> String {
        let flow = |f: &SessionFlow| {
            let (send, window) = (&f.send, (f.send.next(), f.send.end(), f.send.acked_to()));
            format!(
                "{:?} {:?}: next, end, acked {window:?}, credit {}, fin acked {}, wants {:#x}, announced {}, \
                 held back {}, rewinding {}, grants in {:?}, out {:?}",
                f.id,
                state_of(f),
                send.credit(),
                send.is_fin_acked(),
                f.wants,
                f.announced,
                f.pause_in.1,
                f.rewinding,
                f.grants_in,
                f.grants_out
            )
        };
        let flows: Vec<String> = self.flows.iter().map(flow).collect();
        format!("{:?}; {}", self.credit, flows.join("; "))
    }

    /// The session's current usage of its limits.
    pub fn usage(&self) -> SessionUsage {
        let ranges = self.paths.iter().map(|p| p.acks.ranges().count());
        let flows = || self.flows.iter();
        SessionUsage {
            paths: self.paths.iter().count(),
            ack_ranges: ranges.max().unwrap_or(0),
            flow_gaps: flows().map(|f| f.recv.gaps()).max().unwrap_or(0),
            events: self.events.len(),
            datagrams: self.datagrams.len(),
            gone: self.gone.len(),
            issued: self.issued.len(),
            spare: self.spare.len(),
            grants: flows().map(|f| f.grants_in.len()).max().unwrap_or(0),
            used_path_ranges: self.used_paths.len(),
            send_buffered: flows().map(|f| f.send.buffered()).max().unwrap_or(0),
            unread: flows().map(|f| f.recv.unread()).sum(),
            flows: self.flows.len(),
        }
    }

    /// Describes the first limit that is exceeded; `None` if all limits hold.
    ///
    /// The caller of [`Session::write`] must keep to `send_buffer` (and as much again beyond a
    /// gap). It is checked with `chunk_max`, the largest chunk that a caller may have added.
    pub fn violated_limit(&self, chunk_max: u64) -> Option<String> {
        let h = self.usage();
        let waiting = (ISSUED_MAX + 2 * SPARE_PATHS) as usize + 1;
        let issued_max = PATHS_MAX + 2 * waiting;
        let gaps_max = FLOW_GAPS_MAX.max((self.config.flow_window / 2048) as usize) + 1;
        let bounds: [(&str, u64, u64); 12] = [
            ("paths", h.paths as u64, PATHS_MAX as u64),
            ("ACK ranges", h.ack_ranges as u64, ACK_RANGES_MAX as u64),
            ("gaps of a flow", h.flow_gaps as u64, gaps_max as u64),
            ("events", h.events as u64, EVENTS_MAX as u64),
            ("datagrams", h.datagrams as u64, DATAGRAMS_MAX as u64),
            ("paths gone", h.gone as u64, PATHS_MAX as u64),
            ("ids issued", h.issued as u64, issued_max as u64),
            ("ids of the peer", h.spare as u64, waiting as u64),
            (
                "grants of a flow",
                h.grants as u64,
                (PATHS_MAX + waiting) as u64,
            ),
            (
                "ranges of path ids",
                h.used_path_ranges as u64,
                waiting as u64,
            ),
            (
                "bytes to send",
                h.send_buffered,
                2 * self.config.send_buffer + chunk_max,
            ),
            ("bytes unread", h.unread, self.config.window_of_session()),
        ];
        let over = bounds.iter().find(|(_, held, max)| held > max)?;
        Some(format!("{}: {} held, {} allowed", over.0, over.1, over.2))
    }
}

fn state_of(flow: &SessionFlow) -> FlowState {
    let (here, there) = (flow.send.is_finished(), flow.recv.final_size().is_some());
    match (flow.unclaimed, here, there) {
        (true, ..) => FlowState::Unclaimed,
        (_, false, false) => FlowState::Open,
        (_, true, false) => FlowState::HalfClosedHere,
        (_, false, true) => FlowState::HalfClosedThere,
        (_, true, true) => FlowState::Draining,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EndpointConfig;
    use crate::flow_options::FlowOptions;
    use crate::session_state::Role;
    use bytes::Bytes;
    use d2tp_seal::{Rng, SecretKey};
    use d2tp_time::Time;

    fn session() -> Session {
        let key = SecretKey::from_bytes([1; 32]);
        let (peer, rng) = (key.public(), Rng::new([2; 32]));
        let config = EndpointConfig::default();
        Session::new(
            Role::Initiator,
            config,
            key,
            peer,
            1,
            1..100,
            rng,
            Time::ZERO,
        )
    }

    #[test]
    fn a_flow_goes_from_open_to_half_closed() {
        let mut session = session();
        let id = session.open(FlowOptions::default()).unwrap();
        assert_eq!(session.flow_state(id), Some(FlowState::Open));
        session.finish(id).unwrap();
        assert_eq!(session.flow_state(id), Some(FlowState::HalfClosedHere));
        assert_eq!(session.flow_ids(), [id]);
        assert!(!session.is_waking());
    }

    #[test]
    fn a_writer_who_does_not_ask_for_room_breaks_a_bound() {
        let mut session = session();
        let id = session.open(FlowOptions::default()).unwrap();
        assert_eq!(session.violated_limit(0), None);
        let more = 2 * session.config.send_buffer as usize + 1;
        session.write(id, Bytes::from(vec![0; more])).unwrap();
        let broken = session.violated_limit(0).unwrap();
        assert!(broken.starts_with("bytes to send"), "{broken}");
    }
}
