//! The use of streams for a link's packets if UDP is not answered.
//!
//! ```text
//!  link asked over UDP ── answered ────────────────────────────────▶ UDP
//!        │ 1 s of silence; none on a network known to block UDP
//!        ▼
//!   OpenStream ──▶ on_stream: a socket like another, raced with UDP ── first answer ──▶ that one stays
//!        │ not reachable, or another host answers                      stream: the network blocks UDP
//!        ▼                                                                │ while payload moves, after
//!   again after 2 s, 4 s, … 1 min                                         ▼ 1 min, 2 min, … 10 min
//!                                               UDP ◀── answers ── UDP beside the stream for 3 s
//! ```

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use d2tp_sched::UdpObstacle;
use d2tp_session::LinkId;
use d2tp_time::{Span, Time};

use crate::facts::LinkFacts;

/// How long UDP must be unanswered before a stream is opened too. Shorter: streams are opened
/// without need while a slow radio starts. Longer: the first byte comes later on every new network
/// that blocks UDP.
pub(crate) const STREAM_AFTER: Span = Span::from_secs(1);
/// The pause after a stream could not be opened, doubled each time.
const STREAM_RETRY: Span = Span::from_secs(2); // a guess
const STREAM_RETRY_MAX: Span = Span::from_secs(60); // a guess
/// How long a network is known to block UDP. Longer: a stream is opened without need, once, if the
/// operator changed a rule, or another network has the same addresses: UDP is asked beside it, and
/// its first answer makes the device forget. Shorter: whoever comes back after a night waits a second again.
const BLOCKED_KEPT: Span = Span::from_secs(24 * 3600); // a guess
/// The maximum number of networks known to block UDP; the oldest is removed first.
const NETWORKS_MAX: usize = 32; // a guess
/// When UDP is tried again beside a stream that carries payload, doubled each time. A trial costs
/// one packet, and a few more if it is not answered.
const UDP_TRIAL_AFTER: Span = Span::from_secs(60); // a guess
const UDP_TRIAL_AFTER_MAX: Span = Span::from_secs(600); // a guess
/// How long UDP may take to answer beside a stream.
pub(crate) const UDP_TRIAL: Span = Span::from_secs(3); // a guess: a SYN and two repetitions
/// How long a stream may be silent before it is replaced by a new one: TCP waits longer before each
/// retransmission, but a new connection sends at once.
const STREAM_SILENT_MAX: Span = Span::from_secs(8); // a guess

/// Why a link has no stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamFailure {
    /// The server's TCP port does not answer, or the HTTP proxy refuses the connection.
    Unreachable,
    /// The server's host answers, and nobody listens at the port.
    Refused,
    /// Another host answers in place of the server: a portal or a middlebox.
    Foreign,
}

/// How a link uses streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StreamStatus {
    /// UDP is answered, or was not tried for long enough.
    #[default]
    Unused,
    /// UDP is not answered, and a stream is being opened.
    Opening,
    /// Packets are carried in a stream: UDP is blocked.
    InUse,
    /// UDP is not answered, and there is no stream either; further tries included.
    Failed(StreamFailure),
}

impl StreamStatus {
    /// The obstacle to UDP on the link that this state shows.
    pub fn udp_obstacle(self) -> Option<UdpObstacle> {
        match self {
            StreamStatus::InUse => Some(UdpObstacle::Blocked),
            StreamStatus::Failed(StreamFailure::Foreign) => Some(UdpObstacle::Intercepted),
            StreamStatus::Failed(StreamFailure::Unreachable) => Some(UdpObstacle::Unreachable),
            StreamStatus::Unused
            | StreamStatus::Opening
            | StreamStatus::Failed(StreamFailure::Refused) => None,
        }
    }
}

/// The stream of one link.
#[derive(Debug, Default)]
pub(crate) struct LinkStream {
    /// The socket of the link that is the stream.
    pub(crate) socket: Option<LinkId>,
    /// When the stream was opened.
    opened_at: Time,
    /// Whether something was heard in it.
    answered: bool,
    /// The ticket of a stream that is being opened.
    pub(crate) opening: Option<u64>,
    failure: Option<StreamFailure>,
    tries: u32,
    retry_at: Time,
    /// When UDP is tried again, and how long to wait after that.
    trial_at: Time,
    trial_pause: Span,
    /// The time until which UDP is tried beside the stream.
    pub(crate) trial_until: Option<Time>,
}

impl LinkStream {
    pub(crate) fn status(&self) -> StreamStatus {
        match (self.socket, self.opening, self.failure) {
            (Some(_), _, _) if self.answered => StreamStatus::InUse,
            // A further try is under way most of the time, and says nothing new.
            (None, _, Some(failure)) => StreamStatus::Failed(failure),
            (Some(_), _, _) | (None, Some(_), None) => StreamStatus::Opening,
            (None, None, None) => StreamStatus::Unused,
        }
    }

    /// Whether a stream may be opened now.
    pub(crate) fn may_open(&self, now: Time) -> bool {
        self.socket.is_none() && self.opening.is_none() && self.retry_at <= now
    }

    /// When a stream may be opened.
    pub(crate) fn may_open_at(&self) -> Option<Time> {
        (self.socket.is_none() && self.opening.is_none()).then_some(self.retry_at)
    }

    pub(crate) fn on_failure(&mut self, now: Time, failure: StreamFailure) {
        self.opening = None;
        self.failure = Some(failure);
        self.back_off(now);
    }

    /// Records that a stream ended by itself. The next one is opened at once, unless several ended
    /// shortly after their start.
    pub(crate) fn on_closed(&mut self, now: Time) {
        self.end();
        if self.tries > 0 {
            self.back_off(now);
        }
        self.tries += 1;
    }

    fn back_off(&mut self, now: Time) {
        let pause = STREAM_RETRY.times(1 << self.tries.min(5));
        self.retry_at = now + pause.min(STREAM_RETRY_MAX);
        self.tries += 1;
    }

    /// Records that the stream is open.
    pub(crate) fn on_open(&mut self, now: Time, socket: LinkId) {
        self.opening = None;
        (self.socket, self.opened_at) = (Some(socket), now);
        // It is as long as it was where UDP answered a trial and then carried nothing.
        self.trial_pause = self.trial_pause.max(UDP_TRIAL_AFTER);
        self.trial_at = now + self.trial_pause;
    }

    /// Records that the stream answered.
    pub(crate) fn on_answer(&mut self) {
        self.answered = true;
        self.tries = 0;
        self.failure = None;
    }

    /// Records that UDP is answered and there is no stream: one that comes now comes late.
    pub(crate) fn on_udp_answer(&mut self) {
        self.opening = None;
        self.tries = 0;
        self.failure = None;
    }

    /// When the stream is replaced, on a link that has been silent since `since`: a stream that was
    /// opened later has had less time to answer.
    pub(crate) fn replaced_at(&self, since: Time) -> Time {
        since.max(self.opened_at) + STREAM_SILENT_MAX
    }

    /// Whether UDP is to be tried beside the stream now.
    pub(crate) fn is_trial_due(&self, now: Time) -> bool {
        self.socket.is_some() && self.answered && self.trial_until.is_none() && self.trial_at <= now
    }

    pub(crate) fn begin_trial(&mut self, now: Time) {
        self.trial_until = Some(now + UDP_TRIAL);
        self.trial_pause = self.trial_pause.times(2).min(UDP_TRIAL_AFTER_MAX);
        self.trial_at = now + self.trial_pause;
    }

    /// Records the end of the stream's socket.
    pub(crate) fn end(&mut self) {
        self.socket = None;
        self.answered = false;
        self.trial_until = None;
    }

    /// Discards all state of the previous network.
    pub(crate) fn forget(&mut self) {
        *self = LinkStream::default();
    }
}

/// The key that distinguishes networks: the link, and the addresses that it assigned to the device.
type NetworkKey = (Arc<str>, Vec<IpAddr>);

fn network_of(facts: &LinkFacts) -> NetworkKey {
    let mut addresses: Vec<IpAddr> = facts.source_addresses().collect();
    addresses.sort();
    (facts.name.clone(), addresses)
}

/// The networks on which a stream was answered and UDP was not, the newest last.
#[derive(Debug, Default)]
pub(crate) struct BlockedNetworks(VecDeque<(NetworkKey, Time)>);

impl BlockedNetworks {
    pub(crate) fn note(&mut self, now: Time, facts: &LinkFacts) {
        let key = network_of(facts);
        self.0.retain(|(known, _)| *known != key);
        if self.0.len() == NETWORKS_MAX {
            self.0.pop_front();
        }
        self.0.push_back((key, now));
    }

    pub(crate) fn forget(&mut self, facts: &LinkFacts) {
        if self.0.is_empty() {
            return;
        }
        let key = network_of(facts);
        self.0.retain(|(known, _)| *known != key);
    }

    pub(crate) fn contains(&self, now: Time, facts: &LinkFacts) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let key = network_of(facts);
        let mut fresh = self
            .0
            .iter()
            .filter(|(_, at)| now.since(*at) < BLOCKED_KEPT);
        fresh.any(|(known, _)| *known == key)
    }
}
