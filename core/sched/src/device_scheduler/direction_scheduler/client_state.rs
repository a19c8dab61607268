//! One client of a direction: what it last reported, and what it was told.

use std::collections::BTreeMap;

use d2tp_time::{Span, Time};

use super::super::rate_measurement::RateMeasurement;
use crate::ScheduledFlow;

/// A link that carried for a client no longer ago than this works, whatever another client says of it.
const CARRIED_WITHIN: Span = Span::from_secs(5); // a guess: several reports

/// The last report of a client, and the last decision for it.
#[derive(Debug)]
pub(super) struct ClientState {
    /// The number that identifies the client to others.
    pub(super) transfer: u64,
    pub(super) flow: Option<ScheduledFlow>,
    /// The links of the client, each with whether it works as far as the client knows.
    pub(super) links: Vec<(String, bool)>,
    pub(super) carried: BTreeMap<String, u64>,
    /// How long links have carried the client according to its reports, and how much of that was
    /// counted.
    pub(super) busy: BTreeMap<String, (Span, Span)>,
    /// Bytes that links carried for an interactive client and that are not part of a measured rate yet.
    pub(super) measurements: BTreeMap<String, RateMeasurement>,
    pub(super) is_interactive: bool,
    pub(super) moved_at: Time,
    /// Since when no other client goes first.
    pub(super) goes_since: Option<Time>,
    /// The phase that followed from the last decision.
    pub(super) last_phase: Option<ClientPhase>,
    /// Whether the machine is woken and kept awake for the client.
    pub(super) wakes: bool,
}

/// The phase of a client after a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientPhase {
    Runs,
    /// The client waits for a link.
    Waits,
    /// The client waits for another client.
    Behind,
}

impl ClientState {
    /// Whether a link has carried for the client, which carried something lately.
    pub(super) fn moved_lately(&self, now: Time, link: &str) -> bool {
        self.carried.get(link).is_some_and(|bytes| *bytes > 0)
            && now.since(self.moved_at) < CARRIED_WITHIN
    }

    /// Creates the state of a client that has not reported yet.
    pub(super) fn new(now: Time, transfer: u64) -> ClientState {
        ClientState {
            transfer,
            flow: None,
            links: Vec::new(),
            carried: BTreeMap::new(),
            busy: BTreeMap::new(),
            measurements: BTreeMap::new(),
            is_interactive: false,
            moved_at: now,
            goes_since: None,
            last_phase: None,
            wakes: false,
        }
    }

    /// How long a link carried the client since the last call; none if the client does not report it.
    pub(super) fn take_busy(&mut self, link: &str) -> Option<Span> {
        let (said, taken) = self.busy.get_mut(link)?;
        // Another session counts anew.
        let more = if *said < *taken {
            *said
        } else {
            said.saturating_sub(*taken)
        };
        *taken = *said;
        Some(more)
    }
}

/// The numbers of the clients that have reported a need, in the order of the scheduler's list.
pub(super) fn last_phase(clients: &BTreeMap<u64, ClientState>) -> impl Iterator<Item = u64> {
    let last_phase = clients.iter().filter(|(_, client)| client.flow.is_some());
    last_phase.map(|(number, _)| *number)
}
