//! One link of a device, with its sockets and timers.

use d2tp_session::LinkId;
use d2tp_time::{Span, Time};

use crate::facts::{AttachedSocket, LinkFacts, LinkUse};
use crate::health::{LinkAnswers, LinkHealth};
use crate::meter::LinkMeter;
use crate::stream::{LinkStream, STREAM_AFTER};

/// How long a link stays without a path before its socket is replaced, the first time.
pub(crate) const HEAL_AFTER: Span = Span::from_secs(1);
/// The most doublings of [`HEAL_AFTER`] while no socket of the link is answered: half a minute.
pub(crate) const HEAL_DOUBLINGS_MAX: u32 = 5;
/// How long a link's first address family may take to answer before the other is tried in parallel (RFC
/// 8305 §5).
const RACE_AFTER: Span = Span::from_millis(250);
/// How long another node of the server may take to answer a handshake before the device stays with the
/// node that it has: at least, as [`crate::NodeChoice::handshake_patience`] grows with the round trip.
pub const NODE_ANSWER_MAX: Span = Span::from_secs(2); // a guess: a SYN and two copies of it, as in `client_handshake.rs`

/// A link that the device knows.
#[derive(Debug)]
pub(crate) struct TrackedLink {
    pub(crate) facts: LinkFacts,
    pub(crate) usage: LinkUse,
    /// Whether the link is left to save energy.
    pub(crate) rests: bool,
    /// The link's sockets in use.
    pub(crate) sockets: Vec<AttachedSocket>,
    /// Sockets of its other address family, to be tried if the first does not answer.
    pub(crate) other_family: Vec<AttachedSocket>,
    /// Old sockets, which are closed when the new ones exist.
    pub(crate) retiring: Vec<LinkId>,
    /// Sockets whose paths are being closed, which are closed after the peer was informed.
    pub(crate) closing: Vec<LinkId>,
    /// The ticket of a pending request for sockets.
    pub(crate) attaching: Option<u64>,
    /// When the latest of the sockets was opened.
    pub(crate) opened_at: Time,
    /// Whether the paths were opened as metered.
    pub(crate) opened_gated: bool,
    pub(crate) meter: LinkMeter,
    /// When the link lost its path, or was last given a new socket.
    pub(crate) last_heal_at: Time,
    /// Whether the link had no path at the last update.
    pub(crate) pathless: bool,
    /// Failed attempts since the link last answered.
    pub(crate) tries: u32,
    pub(crate) health: LinkHealth,
    pub(crate) answers: LinkAnswers,
    pub(crate) stream: LinkStream,
    /// The sockets to the node before, while another node is asked over the link.
    pub(crate) former_node: Vec<LinkId>,
    /// How long the node of the attempt may take to answer.
    pub(crate) node_patience: Span,
    /// Whether the next sockets of the link are to another node.
    pub(crate) changes_node: bool,
    /// How long the server takes to answer, where that is known to be long.
    round_trip: Span,
}

impl TrackedLink {
    pub(crate) fn new(
        now: Time,
        facts: LinkFacts,
        usage: LinkUse,
        round_trip: Span,
    ) -> TrackedLink {
        TrackedLink {
            facts,
            usage,
            rests: false,
            sockets: Vec::new(),
            other_family: Vec::new(),
            retiring: Vec::new(),
            closing: Vec::new(),
            attaching: None,
            opened_at: now,
            opened_gated: false,
            meter: LinkMeter::new(now),
            last_heal_at: now,
            pathless: true,
            tries: 0,
            health: LinkHealth::default(),
            answers: LinkAnswers::Unasked,
            stream: LinkStream::default(),
            former_node: Vec::new(),
            node_patience: NODE_ANSWER_MAX,
            changes_node: false,
            round_trip,
        }
    }

    /// Whether the link should have a path now; `pays`: something may use metered links.
    pub(crate) fn is_wanted(&self, pays: bool) -> bool {
        let there = self.facts.is_usable() || self.health.keeps_sockets();
        match self.usage {
            _ if self.rests => false,
            LinkUse::Off => false,
            LinkUse::Free => there,
            LinkUse::Paid => there && pays,
        }
    }

    /// Whether a path that was paid for may stay open for a while although nothing uses metered links now: it answers, and is
    /// in order.
    pub(crate) fn has_paid_path(&self) -> bool {
        let is_paid = self.is_gated() && self.opened_gated;
        is_paid && self.is_wanted(true) && self.answers.is_up() && !self.health.keeps_sockets()
    }

    pub(crate) fn is_gated(&self) -> bool {
        self.usage == LinkUse::Paid
    }

    /// The link's sockets in use.
    pub(crate) fn socket_ids(&self) -> impl Iterator<Item = LinkId> + '_ {
        self.sockets.iter().map(|s| s.socket)
    }

    pub(crate) fn has_socket(&self, socket: LinkId) -> bool {
        self.socket_ids().any(|id| id == socket)
    }

    /// Removes all sockets, and cancels requested ones.
    pub(crate) fn take_sockets(&mut self) -> Vec<LinkId> {
        self.health.forget();
        self.meter.forget_sockets();
        self.attaching = None;
        self.stream.end();
        self.former_node.clear();
        self.changes_node = false;
        let made = self.sockets.drain(..).chain(self.other_family.drain(..));
        let mut ids: Vec<LinkId> = made.map(|s| s.socket).collect();
        ids.append(&mut self.retiring);
        ids
    }

    /// How long the link stays without a path before its socket is replaced.
    pub(crate) fn heal_delay(&self) -> Span {
        HEAL_AFTER.times(1 << self.tries.min(HEAL_DOUBLINGS_MAX)) + self.round_trip
    }

    /// How much longer than on most links an answer may take.
    pub(crate) fn answer_slack(&self) -> Span {
        self.facts.answer_slack() + self.round_trip
    }

    /// How long the first address family may take to answer before the other is tried.
    pub(crate) fn race_delay(&self) -> Span {
        RACE_AFTER + self.round_trip
    }

    /// How long UDP must be unanswered before a stream is opened too.
    pub(crate) fn stream_delay(&self) -> Span {
        STREAM_AFTER + self.round_trip
    }

    /// When the link is due to get another socket or address family, if nothing changes.
    pub(crate) fn next_try(&self) -> Option<Time> {
        let waits = self.pathless && self.attaching.is_none();
        let heal = waits.then(|| self.last_heal_at + self.heal_delay());
        let race = (!self.other_family.is_empty()).then(|| self.opened_at + self.race_delay());
        let change = (!self.former_node.is_empty()).then(|| self.opened_at + self.node_patience);
        heal.into_iter().chain(race).chain(change).min()
    }

    /// When a stream is to be opened over the link, or given up, as things are.
    pub(crate) fn stream_at(&self) -> Option<Time> {
        if self.sockets.is_empty() || self.attaching.is_some() || self.facts.serial_rate.is_some() {
            return None;
        }
        if let Some(until) = self.stream.trial_until {
            return Some(until);
        }
        let since = self.answers.unanswered_since()?;
        match self.stream.socket {
            Some(_) => Some(self.stream.replaced_at(since)),
            None => Some(self.stream.may_open_at()?.max(since + self.stream_delay())),
        }
    }

    /// Whether `facts` describe the current attachment, even if its carrier was lost or is back.
    /// Records when the carrier was lost.
    pub(crate) fn is_same_attachment(&mut self, now: Time, facts: &LinkFacts) -> bool {
        let same = facts.index == self.facts.index
            && facts.addresses == self.facts.addresses
            && facts.up
            && !self.sockets.is_empty();
        let lost = self.health.carrier_lost_at.is_some();
        if !same || (!lost && (facts.carrier || !self.facts.is_usable())) {
            return false;
        }
        if facts.is_usable() {
            self.health.carrier_lost_at = None;
        } else if facts.carrier {
            return false;
        } else if !lost {
            self.health.carrier_lost_at = Some(now);
        }
        true
    }
}
