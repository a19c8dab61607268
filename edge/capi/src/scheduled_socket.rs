//! A socket as a client of the scheduler: its reports and decisions.

use std::rc::Rc;
use std::time::Duration;

use d2tp_driver::{CarriedByLink, FlowClientReport, LinkStatus};
use d2tp_sched::{ClientDecision, FlowDemand};
use d2tp_time::{Span, Time};

use crate::options::SocketOptions;
use crate::read_ahead::ReadAheadDemand;
use crate::socket_scheduler::{SchedulerClient, SocketScheduler};

/// How long a connection without a deadline may move nothing, with everything acknowledged, before it
/// counts as idle.
pub(crate) const RESTS_AFTER: Span = Span::from_secs(5); // the same as for other transfers

/// Byte counts of a program's socket.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ProgramBytes {
    /// Bytes for the program: delivered, or buffered for it.
    pub(crate) down: u64,
    /// Bytes from the program that the peer has acknowledged.
    pub(crate) up: u64,
    /// Bytes taken from the program.
    pub(crate) written: u64,
}

/// A socket as a client of the scheduler.
pub(crate) struct ScheduledSocket {
    scheduler: Rc<dyn SocketScheduler>,
    client: Option<Box<dyn SchedulerClient>>,
    carried: CarriedByLink,
    moved: ProgramBytes,
    moved_at: Time,
}

impl ScheduledSocket {
    /// A socket of which others have carried `before`, towards this device and from it.
    pub(crate) fn new(
        scheduler: Rc<dyn SocketScheduler>,
        now: Time,
        before: (u64, u64),
    ) -> ScheduledSocket {
        ScheduledSocket {
            scheduler,
            client: None,
            carried: CarriedByLink::after(before),
            moved: ProgramBytes::default(),
            moved_at: now,
        }
    }

    pub(crate) fn decide(
        &mut self,
        options: &SocketOptions,
        moved: ProgramBytes,
        left: Option<u64>,
        statuses: &[LinkStatus],
        wants: Option<&ReadAheadDemand>,
        wakes: bool,
    ) -> ClientDecision {
        self.carried.assign((moved.down, moved.up), statuses);
        let bytes = moved.down + moved.written;
        let report = FlowClientReport {
            demand: match wants {
                Some(wants) => wants.need.clone(),
                None => need(options, bytes, left),
            },
            size_bytes: wants.map_or(options.size, |wants| Some(wants.size)),
            buy_bytes: wants.map(|wants| wants.buy_bytes.unwrap_or(0)),
            keeps_awake: wakes,
            links: statuses,
            carried: self.carried.bytes(),
        };
        let scheduler = &self.scheduler;
        let client = self.client.get_or_insert_with(|| scheduler.join());
        client.decide(&report)
    }

    /// The time until metered links would carry the socket; see [`SchedulerClient::pays_after`].
    pub(crate) fn pays_after(&self) -> Option<Duration> {
        self.client.as_ref()?.pays_after()
    }

    /// Reports what was carried since the last report, at the end of the flow.
    pub(crate) fn close(mut self, moved: ProgramBytes, statuses: &[LinkStatus]) {
        self.carried.assign((moved.down, moved.up), statuses);
        let scheduler = &self.scheduler;
        let client = self.client.get_or_insert_with(|| scheduler.join());
        client.report(statuses, self.carried.bytes());
    }

    /// Whether the socket needs nothing now, so that others get its place. A `watched` socket will need
    /// something.
    pub(crate) fn is_idle(
        &mut self,
        now: Time,
        options: &SocketOptions,
        moved: ProgramBytes,
        watched: bool,
    ) -> bool {
        if moved != self.moved {
            self.moved = moved;
            self.moved_at = now;
        }
        let wants = watched
            || options.deadline.is_some()
            || moved.up < moved.written
            || options
                .size
                .is_some_and(|size| moved.down + moved.written < size);
        let rests = !wants && now.since(self.moved_at) >= RESTS_AFTER;
        if rests {
            self.client = None;
            // The counts restart when the socket joins the scheduler again.
            self.carried.restart();
        }
        rests
    }
}

/// The demand of a socket after `moved` bytes, given what is left of the budget.
pub(crate) fn need(options: &SocketOptions, moved: u64, left: Option<u64>) -> FlowDemand {
    FlowDemand {
        remaining_bytes: options.size.map(|size| size.saturating_sub(moved)),
        left: options.time_left(),
        policy: options.policy,
        if_late: options.if_late,
        metered_bytes_left: left,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::since_boot;

    #[test]
    fn a_connection_rests_when_it_wants_nothing_and_never_while_it_is_due() {
        struct Nobody;
        impl SocketScheduler for Nobody {
            fn join(&self) -> Box<dyn SchedulerClient> {
                panic!("nobody asks")
            }
        }
        let at = |seconds| Time::ZERO + Span::from_secs(seconds);
        let moved = |down, up, written| ProgramBytes { down, up, written };
        let plain = SocketOptions::default();
        let mut scheduled = ScheduledSocket::new(Rc::new(Nobody), at(0), (0, 0));
        assert!(!scheduled.is_idle(at(1), &plain, moved(10, 0, 0), false));
        assert!(!scheduled.is_idle(at(5), &plain, moved(10, 0, 0), false));
        assert!(scheduled.is_idle(at(6), &plain, moved(10, 0, 0), false));
        assert!(
            !scheduled.is_idle(at(60), &plain, moved(10, 0, 1), false),
            "the peer lacks a byte"
        );
        let due = SocketOptions {
            deadline: Some(since_boot() + Duration::from_secs(60)),
            ..SocketOptions::default()
        };
        assert!(!scheduled.is_idle(at(90), &due, moved(10, 1, 1), false));
        let sized = SocketOptions {
            size: Some(12),
            ..SocketOptions::default()
        };
        assert!(!scheduled.is_idle(at(90), &sized, moved(10, 1, 1), false));
        assert!(
            !scheduled.is_idle(at(90), &sized, moved(11, 1, 1), false),
            "it moved"
        );
        assert!(
            scheduled.is_idle(at(95), &sized, moved(11, 1, 1), false),
            "it is whole"
        );
    }
}
