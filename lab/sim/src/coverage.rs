//! Coverage: which faults occurred in which states, as a matrix that shows what random runs have
//! not tried.
//!
//! ```text
//!                 device:suspended  proxy:path-silent  device:flow-draining  …
//!  loss                      0              1204                     88
//!  crash-proxy              12                31                      3
//! ```
//!
//! A fault counts for each state of the two ends when it occurs: of the session, of each path and
//! of each flow. States are recorded once for each point in time, before its events.

use std::collections::BTreeMap;

use cedos_lab_link::{Counters, LinkReach, TcpPassage};
use cedos_lab_scenario::{EventKind, ScenarioLinkEvent, ScenarioState};
use d2tp_session::{FlowState, PathState, Session, SessionState};

use crate::device::SimDevice;
use crate::proxy::Proxy;

macro_rules! named {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $($(#[$variant_meta])* $variant,)* }
        impl $name {
            /// Every value of the type.
            pub const ALL: &[$name] = &[$($name::$variant,)*];
            /// The word used in reports.
            pub fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)* }
            }
        }
    };
}

named! {
    /// The kind of a fault.
    FaultKind {
        /// A packet is lost, also on a dead link.
        Loss = "loss",
        /// A packet is overtaken.
        Reorder = "reorder",
        /// A packet arrives twice.
        Duplicate = "duplicate",
        /// A packet arrives damaged.
        Corrupt = "corrupt",
        /// A packet finds the queue full.
        QueueFull = "queue-full",
        /// A packet is larger than the link's MTU.
        TooBig = "too-big",
        /// A link is lost, with the packets on it.
        LinkDown = "link-down",
        /// A link is back, with another address.
        LinkUp = "link-up",
        /// A link goes dead: attached, carries nothing.
        Dead = "dead",
        /// A link stalls with its queue.
        Stall = "stall",
        /// A network begins to block UDP and passes TCP.
        UdpBlocked = "udp-blocked",
        /// A host of the network begins to answer or to reset TCP connections.
        TcpHeld = "tcp-held",
        /// A link carries packets in one direction only.
        OneWay = "one-way",
        /// A link gets another address at once.
        NewAddress = "new-address",
        /// The NAT drops all mappings.
        Rebind = "rebind",
        /// Rate, delay or loss change.
        Change = "change",
        /// Old packets arrive again.
        Replay = "replay",
        /// The datagram again, from another address.
        ReplayElsewhere = "replay-elsewhere",
        /// The device's process is killed.
        CrashDevice = "crash-device",
        /// The proxy's process is killed.
        CrashProxy = "crash-proxy",
        /// A disk loses commits that it reported as durable.
        LostCommits = "lost-commits",
        /// The device is frozen; its clock jumps.
        FreezeDevice = "freeze-device",
        /// The proxy is frozen; its clock jumps.
        FreezeProxy = "freeze-proxy",
    }
}

/// An end, a fault, and a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CoveragePair {
    /// The kind of the fault.
    pub fault: FaultKind,
    /// Whether the fault is at the device; otherwise at the proxy.
    pub at_device: bool,
    /// The state of the end at which the fault occurs.
    pub state: ScenarioState,
}

impl CoveragePair {
    /// Every possible pair.
    pub fn all() -> impl Iterator<Item = CoveragePair> {
        let faults = FaultKind::ALL.iter();
        faults.flat_map(|fault| {
            [true, false].into_iter().flat_map(move |at_device| {
                ScenarioState::ALL.iter().map(move |state| CoveragePair {
                    fault: *fault,
                    at_device,
                    state: *state,
                })
            })
        })
    }

    /// The state's name with its end.
    pub fn state_word(&self) -> String {
        let end = if self.at_device { "device" } else { "proxy" };
        format!("{end}:{}", self.state.word())
    }

    /// Why this pair cannot occur; `None` if it can.
    pub fn impossible(&self) -> Option<&'static str> {
        crate::coverage_limits::impossible(*self)
    }
}

/// How often each fault occurred in each state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    counts: BTreeMap<CoveragePair, u64>,
    /// The states at this time: whether at the device, and which.
    states: Vec<(bool, ScenarioState)>,
    counters: Counters,
}

impl Coverage {
    pub(crate) fn new(counters: Counters) -> Coverage {
        Coverage {
            counters,
            ..Coverage::default()
        }
    }

    /// Records the states of both ends.
    pub(crate) fn look(&mut self, device: &SimDevice, proxy: &Proxy) {
        self.states.clear();
        let (away, asleep) = (device.host.is_away(), device.is_asleep());
        self.look_at(true, device.core(), away, asleep);
        let (away, asleep) = (proxy.host.is_away(), proxy.is_asleep());
        self.look_at(false, proxy.session(), away, asleep);
    }

    fn look_at(&mut self, at_device: bool, session: Option<&Session>, away: bool, asleep: bool) {
        let mut note = |state| {
            if !self.states.contains(&(at_device, state)) {
                self.states.push((at_device, state));
            }
        };
        if away {
            return note(ScenarioState::Away);
        }
        let Some(session) = session else {
            return note(if asleep {
                ScenarioState::Hibernated
            } else {
                ScenarioState::None
            });
        };
        note(match session.state() {
            _ if session.is_waking() => ScenarioState::Waking,
            SessionState::Suspended => ScenarioState::Suspended,
            SessionState::Handshaking => ScenarioState::Handshaking,
            SessionState::Established => ScenarioState::Established,
            SessionState::Closed => ScenarioState::None,
        });
        for path in session.path_states() {
            note(match path {
                PathState::Opening => ScenarioState::PathOpening,
                PathState::Active => ScenarioState::PathActive,
                PathState::Silent => ScenarioState::PathSilent,
            });
        }
        for flow in session.flow_states() {
            note(match flow {
                FlowState::Unclaimed => ScenarioState::FlowUnclaimed,
                FlowState::Open => ScenarioState::FlowOpen,
                FlowState::HalfClosedHere => ScenarioState::FlowHalfClosedHere,
                FlowState::HalfClosedThere => ScenarioState::FlowHalfClosedThere,
                FlowState::Draining => ScenarioState::FlowDraining,
            });
        }
    }

    /// Whether an end is in this state now.
    pub(crate) fn is_in(&self, at_device: bool, state: ScenarioState) -> bool {
        self.states.contains(&(at_device, state))
    }

    pub(crate) fn on_fault(&mut self, fault: FaultKind) {
        for (at_device, state) in &self.states {
            let pair = CoveragePair {
                fault,
                at_device: *at_device,
                state: *state,
            };
            *self.counts.entry(pair).or_default() += 1;
        }
    }

    pub(crate) fn on_link_event(&mut self, event: &ScenarioLinkEvent) {
        let condition = &event.condition;
        match event.kind {
            EventKind::Down => self.on_fault(FaultKind::LinkDown),
            EventKind::Up { .. } => self.on_fault(FaultKind::LinkUp),
            EventKind::NewAddress { .. } => self.on_fault(FaultKind::NewAddress),
            EventKind::Rebind => self.on_fault(FaultKind::Rebind),
            EventKind::Attaching => {}
            EventKind::Changed if !condition.up => {}
            EventKind::Changed => {
                let (down, up) = (condition.down.loss.random, condition.upward.loss.random);
                self.on_fault(if condition.dead {
                    FaultKind::Dead
                } else if matches!(condition.reach, LinkReach::NoUdp | LinkReach::HttpProxy) {
                    FaultKind::UdpBlocked
                } else if condition.stalled || condition.reach != LinkReach::All {
                    FaultKind::Stall
                } else if condition.tcp != TcpPassage::Pass {
                    FaultKind::TcpHeld
                } else if (down >= 1.0) != (up >= 1.0) {
                    FaultKind::OneWay
                } else {
                    FaultKind::Change
                });
            }
        }
    }

    /// Counts the faults of the links since the last call.
    pub(crate) fn on_counters(&mut self, now: Counters) {
        let before = std::mem::replace(&mut self.counters, now);
        for (fault, was, is) in [
            (FaultKind::Loss, before.packets_lost, now.packets_lost),
            (
                FaultKind::Reorder,
                before.packets_reordered,
                now.packets_reordered,
            ),
            (
                FaultKind::Duplicate,
                before.packets_duplicated,
                now.packets_duplicated,
            ),
            (
                FaultKind::Corrupt,
                before.packets_corrupted,
                now.packets_corrupted,
            ),
            (
                FaultKind::QueueFull,
                before.packets_queue_full,
                now.packets_queue_full,
            ),
            (
                FaultKind::TooBig,
                before.packets_too_big,
                now.packets_too_big,
            ),
        ] {
            if is > was {
                self.on_fault(fault);
            }
        }
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Coverage) {
        for (pair, n) in &other.counts {
            *self.counts.entry(*pair).or_default() += n;
        }
    }

    /// How often this pair occurred.
    pub fn of(&self, pair: CoveragePair) -> u64 {
        self.counts.get(&pair).copied().unwrap_or(0)
    }

    /// Pairs that can occur and never did.
    pub fn missed(&self) -> Vec<CoveragePair> {
        CoveragePair::all()
            .filter(|pair| pair.impossible().is_none() && self.of(*pair) == 0)
            .collect()
    }

    /// Pairs that are listed as impossible but occurred: the list is wrong.
    pub fn surprising(&self) -> Vec<CoveragePair> {
        let hit = self.counts.keys().copied();
        hit.filter(|pair| pair.impossible().is_some()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_counts_for_every_state_of_its_instant_once() {
        let mut coverage = Coverage {
            states: vec![
                (true, ScenarioState::Established),
                (false, ScenarioState::PathSilent),
            ],
            ..Coverage::default()
        };
        coverage.on_fault(FaultKind::Loss);
        coverage.on_fault(FaultKind::Loss);
        let pair = |at_device, state| CoveragePair {
            fault: FaultKind::Loss,
            at_device,
            state,
        };
        assert_eq!(coverage.of(pair(true, ScenarioState::Established)), 2);
        assert_eq!(coverage.of(pair(false, ScenarioState::PathSilent)), 2);
        assert_eq!(coverage.of(pair(true, ScenarioState::PathSilent)), 0);
        let mut sum = Coverage::default();
        sum.add(&coverage);
        sum.add(&coverage);
        assert_eq!(sum.of(pair(true, ScenarioState::Established)), 4);
        let missed = sum.missed();
        assert!(missed.contains(&pair(true, ScenarioState::PathSilent)));
        assert!(!missed.contains(&pair(true, ScenarioState::Established)));
    }

    #[test]
    fn names_of_faults_and_states_differ() {
        let mut words: Vec<_> = CoveragePair::all()
            .map(|p| (p.fault.word(), p.state_word()))
            .collect();
        let all = words.len();
        words.sort();
        words.dedup();
        assert_eq!(words.len(), all);
    }
}
