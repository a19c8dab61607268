//! The state of one client in one direction: its last report and the last decision for it.

use std::collections::BTreeMap;
use std::time::Duration;

use d2tp_time::{Span, Time};

use super::super::rate_measurement::RateMeasurement;
use crate::{CostPolicy, ObjectStart, ScheduledFlow};

/// A link that carried for a client within this time works, whatever other clients report.
const CARRIED_WITHIN: Span = Span::from_secs(5); // a guess: several reports

/// The last report of a client, and the last decision for it.
#[derive(Debug)]
pub(super) struct ClientState {
    /// The number that identifies the client to others.
    pub(super) transfer: u64,
    pub(super) flow: Option<ScheduledFlow>,
    /// The deadline by the last report.
    pub(super) due_at: Option<Time>,
    /// Whether the beginning of the client's object is here, if it is wanted before the rest.
    pub(super) start: Option<ObjectStart>,
    pub(super) joined_at: Time,
    /// The links of the client, each with whether it works as far as the client knows.
    pub(super) links: Vec<(String, bool)>,
    pub(super) carried: BTreeMap<String, u64>,
    /// By link: how long it has carried the client according to its reports, and how much of that
    /// was counted.
    pub(super) busy: BTreeMap<String, (Span, Span)>,
    /// Bytes that links carried for an interactive client and that are not part of a measured rate yet.
    pub(super) measurements: BTreeMap<String, RateMeasurement>,
    pub(super) is_interactive: bool,
    pub(super) moved_at: Time,
    /// Since when no other client is served first.
    pub(super) goes_since: Option<Time>,
    /// The client's phase after the last decision.
    pub(super) last_phase: Option<ClientPhase>,
    /// Whether the machine is woken and kept awake for the client.
    pub(super) wakes: bool,
    /// Whether the server refuses the client at present, so that nothing can be promised.
    pub(super) is_refused: bool,
    /// When a client that waits to save energy will begin.
    pub(super) begins_at: Option<Time>,
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

/// How long the size of a new flow is waited for before its deadline makes it pay: most servers say it with their
/// first bytes. Longer: less is paid in ignorance, and a flow of unknown size begins later.
const SIZE_WAIT: Span = Span::from_secs(1); // a guess: a handshake, a request and its answer
/// The least time left for which a second of it is spent waiting.
const SIZE_WAIT_LEFT_MIN: Duration = Duration::from_secs(10); // a guess

impl ClientState {
    /// Whether the flow may pay for its deadline later, when its size will be known. Free links carry it
    /// meanwhile, so one of them must work.
    pub(super) fn awaits_size(&self, now: Time, is_free_up: bool) -> bool {
        let need = self.flow.as_ref().map(|flow| &flow.need);
        is_free_up
            && now.since(self.joined_at) < SIZE_WAIT
            && need.is_some_and(|need| {
                let by_deadline =
                    matches!(need.policy, CostPolicy::FreeFirst | CostPolicy::Balanced);
                let is_early = need.left.is_some_and(|left| left > SIZE_WAIT_LEFT_MIN);
                need.remaining_bytes.is_none() && by_deadline && is_early
            })
    }

    /// Whether a link has carried for the client within the last seconds.
    pub(super) fn moved_lately(&self, now: Time, link: &str) -> bool {
        self.carried.get(link).is_some_and(|bytes| *bytes > 0)
            && now.since(self.moved_at) < CARRIED_WITHIN
    }

    /// Creates the state of a client that has not reported yet.
    pub(super) fn new(now: Time, transfer: u64) -> ClientState {
        ClientState {
            transfer,
            flow: None,
            due_at: None,
            start: None,
            joined_at: now,
            links: Vec::new(),
            carried: BTreeMap::new(),
            busy: BTreeMap::new(),
            measurements: BTreeMap::new(),
            is_interactive: false,
            moved_at: now,
            goes_since: None,
            last_phase: None,
            wakes: false,
            is_refused: false,
            begins_at: None,
        }
    }

    /// How long a link carried the client since the last call; `None` if the client does not report
    /// it.
    pub(super) fn take_busy(&mut self, link: &str) -> Option<Span> {
        let (said, taken) = self.busy.get_mut(link)?;
        // A new session counts from zero.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeadlineFallback, FlowDemand, SourceSupply};

    #[test]
    fn a_new_flow_awaits_its_size_for_a_second_while_a_free_link_carries_it() {
        let now = Time::ZERO;
        let awaits = |remaining_bytes, left_s, policy, later, is_free_up| {
            let mut client = ClientState::new(now, 0);
            assert!(!client.awaits_size(now, true), "nothing was reported");
            client.flow = Some(ScheduledFlow {
                need: FlowDemand {
                    remaining_bytes,
                    left: Some(Duration::from_secs(left_s)),
                    policy,
                    if_late: DeadlineFallback::Cell,
                    metered_bytes_left: None,
                },
                size_bytes: 0,
                priority: 0,
                source: SourceSupply::Ample,
            });
            client.awaits_size(now + later, is_free_up)
        };
        let (none, free_first) = (Span::ZERO, CostPolicy::FreeFirst);
        assert!(awaits(None, 40, free_first, none, true));
        assert!(
            !awaits(None, 40, free_first, SIZE_WAIT, true),
            "a second later"
        );
        assert!(!awaits(Some(1), 40, free_first, none, true), "it is known");
        assert!(!awaits(None, 5, free_first, none, true), "there is no time");
        assert!(
            !awaits(None, 40, free_first, none, false),
            "nothing carries it"
        );
        assert!(!awaits(None, 40, CostPolicy::Fast, none, true));
    }
}
