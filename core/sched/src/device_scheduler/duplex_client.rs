//! A client of the device's scheduler for a flow that carries data in both directions.
//!
//! ```text
//!  carried, both ways ─▶ the direction that carried more ─▶ DirectionScheduler (down | up)
//!                        joins there with its first report, and joins the other direction when that carries more
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use d2tp_time::Time;

use super::{ClientDecision, ClientId, ClientReport, DeviceScheduler, Grant, TransferDirection};
use crate::{FlowDemand, LinkCandidate, SourceSupply};

/// The demand of a flow in both directions, and what links carried for it.
#[derive(Debug, Clone)]
pub struct DuplexReport<'a> {
    /// Bytes still to be carried, time left, policy, and the flow's own budget.
    pub demand: FlowDemand,
    /// Bytes of the whole flow, when known.
    pub size_bytes: Option<u64>,
    /// For a flow that reads ahead: bytes that may be paid for now, even if a free link is expected
    /// soon. `demand` then describes the read-ahead.
    pub buy_bytes: Option<u64>,
    /// Whether a program controls the flow's traffic. See [`ClientReport::is_interactive`].
    pub is_interactive: bool,
    /// Whether the machine is woken and kept awake for the flow.
    pub keeps_awake: bool,
    /// The links that the flow could use.
    pub candidates: &'a [LinkCandidate],
    /// Payload bytes that each link carried for the flow, towards this device and from it.
    pub carried: &'a BTreeMap<String, (u64, u64)>,
}

/// A client for a flow in both directions. Links have different rates in each direction, and most flows
/// carry mostly one way, so the client joins the scheduler of the direction that carried more.
#[derive(Debug)]
pub struct DuplexClient {
    number: u64,
    client: Option<ClientId>,
    /// Bytes that each link had carried for the flow in that direction when it joined.
    before: BTreeMap<String, u64>,
}

impl DuplexClient {
    /// Creates a client that joins with its first report. `number` identifies it to others.
    pub fn new(number: u64) -> DuplexClient {
        DuplexClient {
            number,
            client: None,
            before: BTreeMap::new(),
        }
    }

    /// The client's id in the scheduler; `None` before the first report.
    pub fn id(&self) -> Option<ClientId> {
        self.client
    }

    /// Reports, and returns what the flow may use until the next report.
    pub fn decide(
        &mut self,
        now: Time,
        scheduler: &mut DeviceScheduler,
        report: &DuplexReport<'_>,
    ) -> ClientDecision {
        let sums = report.carried.values();
        let (down, up) = sums.fold((0, 0), |sum, (down, up)| (sum.0 + down, sum.1 + up));
        let direction = match up > down {
            true => TransferDirection::Up,
            false => TransferDirection::Down,
        };
        let carried = report.carried.iter().map(|(name, (down, up))| {
            let bytes = match direction {
                TransferDirection::Down => down,
                TransferDirection::Up => up,
            };
            (name.clone(), *bytes)
        });
        let mut carried: BTreeMap<String, u64> = carried.collect();
        let client = match self.client {
            Some(known) if known.direction == direction => known,
            other => {
                if let Some(other) = other {
                    scheduler.leave(other);
                    self.before.clone_from(&carried);
                }
                scheduler.join(now, direction, self.number)
            }
        };
        self.client = Some(client);
        for (name, bytes) in &mut carried {
            *bytes = bytes.saturating_sub(*self.before.get(name).unwrap_or(&0));
        }
        let mut decision = scheduler.decide(
            now,
            client,
            &ClientReport {
                demand: report.demand.clone(),
                size_bytes: report.size_bytes,
                priority: 0,
                start: None,
                candidates: report.candidates,
                carried: &carried,
                uses_several_links: true,
                always_pays: report.buy_bytes.is_some_and(|bytes| bytes > 0),
                is_interactive: report.is_interactive,
                keeps_awake: report.keeps_awake,
                source: SourceSupply::Ample,
            },
        );
        // Read-ahead is paid for by its own rule, up to its own limit.
        if let Some(bytes) = report.buy_bytes {
            let bytes = bytes.min(decision.limit.unwrap_or(u64::MAX));
            decision.grant = match bytes {
                0 => Grant::None,
                bytes => Grant::Spend { up_to: Some(bytes) },
            };
        }
        decision
    }

    /// The time until metered links would carry the flow; see [`DeviceScheduler::pays_after`].
    /// `None` before the first report.
    pub fn pays_after(&self, now: Time, scheduler: &DeviceScheduler) -> Option<Duration> {
        scheduler.pays_after(now, self.client?)
    }

    /// Leaves the scheduler, until the next report.
    pub fn leave(&mut self, scheduler: &mut DeviceScheduler) {
        if let Some(client) = self.client.take() {
            scheduler.leave(client);
        }
        self.before.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CostPolicy, DeadlineFallback, LinkClass, SchedulerKind};

    #[test]
    fn a_flow_is_in_the_direction_that_carried_more() {
        let mut scheduler = DeviceScheduler::new(SchedulerKind::D2Sched);
        let mut flow = DuplexClient::new(7);
        let candidates = [LinkCandidate {
            name: "wlan0".into(),
            class: LinkClass::Free,
            rate_bytes_per_s: None,
            metric: 0,
            stalled: false,
            in_use: true,
        }];
        let mut direction_after = |down, up| {
            let carried = BTreeMap::from([("wlan0".to_owned(), (down, up))]);
            let report = DuplexReport {
                demand: FlowDemand {
                    remaining_bytes: None,
                    left: None,
                    policy: CostPolicy::FreeFirst,
                    if_late: DeadlineFallback::Cell,
                    metered_bytes_left: None,
                },
                size_bytes: None,
                buy_bytes: None,
                is_interactive: false,
                keeps_awake: true,
                candidates: &candidates,
                carried: &carried,
            };
            flow.decide(Time::ZERO, &mut scheduler, &report);
            let known = scheduler.waking_clients(Time::ZERO).running;
            (flow.id().map(|id| id.direction), known)
        };
        let (down, up) = (TransferDirection::Down, TransferDirection::Up);
        assert_eq!(direction_after(0, 0), (Some(down), vec![7]));
        assert_eq!(direction_after(10, 9), (Some(down), vec![7]));
        assert_eq!(direction_after(10, 11), (Some(up), vec![7]));
    }
}
