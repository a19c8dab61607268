//! One client of a direction: what it last reported, and what it was told.

use std::collections::BTreeMap;

use d2tp_time::{Span, Time};

use super::super::rate_measurement::RateMeasurement;
use crate::ScheduledFlow;

/// A link that carried for a client no longer ago than this works, whatever another client says of it.
const CARRIED_WITHIN: Span = Span::from_secs(5); // a guess: several reports

/// What one client last reported, and what it was told.
#[derive(Debug)]
pub(super) struct ClientState {
    /// The number that others know the client by.
    pub(super) transfer: u64,
    pub(super) flow: Option<ScheduledFlow>,
    /// The links it could use, and whether they carry as far as it knows.
    pub(super) links: Vec<(String, bool)>,
    pub(super) carried: BTreeMap<String, u64>,
    /// For how long links have carried it, as far as it says; and as far as that is taken down.
    pub(super) busy: BTreeMap<String, (Span, Span)>,
    /// What links carried of it that no rate was measured by yet; of an interactive client.
    pub(super) measurements: BTreeMap<String, RateMeasurement>,
    pub(super) is_interactive: bool,
    pub(super) moved_at: Time,
    /// Nobody is before it since then.
    pub(super) goes_since: Option<Time>,
    /// What it was told last.
    pub(super) last_phase: Option<ClientPhase>,
    /// The machine is woken and kept awake for it.
    pub(super) wakes: bool,
}

/// What a client does by what it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientPhase {
    Runs,
    /// The client waits for a link.
    Waits,
    /// The client waits for another one.
    Behind,
}

impl ClientState {
    /// Whether a link has carried for the client, which carried something lately.
    pub(super) fn moved_lately(&self, now: Time, link: &str) -> bool {
        self.carried.get(link).is_some_and(|bytes| *bytes > 0)
            && now.since(self.moved_at) < CARRIED_WITHIN
    }

    /// A client that has not reported yet.
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

    /// For how long a link carried the client since that was last taken down; none if nobody says.
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
