//! Assigns a session's datagrams to links, in an agent. Datagrams use only free links; this
//! separates them from the streams of the same session, so that only streams count against budgets.

use std::collections::BTreeMap;

use d2tp_driver::{LinkStatus, LinkUse};

use crate::socket_scheduler::SchedulerClient;

/// Bytes received, and bytes sent.
type DirectionBytes = (u64, u64);

/// Counts which links carried the datagrams of one session, for all its datagram sockets.
pub(crate) struct DatagramAccounting {
    client: Box<dyn SchedulerClient>,
    /// Bytes of the session's datagrams that have been assigned to links.
    assigned: DirectionBytes,
    /// All bytes that each link had carried at the last update.
    before: BTreeMap<String, DirectionBytes>,
    /// Bytes of datagrams that each link carried.
    carried: BTreeMap<String, DirectionBytes>,
}

impl DatagramAccounting {
    pub(crate) fn new(client: Box<dyn SchedulerClient>) -> DatagramAccounting {
        DatagramAccounting {
            client,
            assigned: (0, 0),
            before: BTreeMap::new(),
            carried: BTreeMap::new(),
        }
    }

    /// Assigns the bytes carried since the last update to links; `all`: bytes of the session's
    /// datagrams so far.
    pub(crate) fn update(&mut self, all: DirectionBytes, statuses: &[LinkStatus]) {
        let may = |status: &&LinkStatus| status.usage == LinkUse::Free;
        // A link whose class just changed carried the last of them, if no other link did.
        let mut takers: Vec<&LinkStatus> = statuses.iter().filter(may).collect();
        if takers.is_empty() {
            takers = statuses.iter().collect();
        }
        let since = |status: &LinkStatus| {
            let (down, up) = self.before.get(&status.name).copied().unwrap_or_default();
            let (all_down, all_up) = status.payload;
            (all_down.saturating_sub(down), all_up.saturating_sub(up))
        };
        let since: Vec<DirectionBytes> = takers.iter().map(|status| since(status)).collect();
        let (down, up): (Vec<u64>, Vec<u64>) = since.into_iter().unzip();
        let down = shares(all.0.saturating_sub(self.assigned.0), &down);
        let up = shares(all.1.saturating_sub(self.assigned.1), &up);
        for (status, (down, up)) in takers.iter().zip(down.into_iter().zip(up)) {
            let carried = self.carried.entry(status.name.clone()).or_default();
            carried.0 += down;
            carried.1 += up;
            self.assigned.0 += down;
            self.assigned.1 += up;
        }
        for status in statuses {
            self.before.insert(status.name.clone(), status.payload);
        }
        self.client.report(statuses, &self.carried);
    }

    /// The statuses of the links, reduced to what they carried for streams.
    pub(crate) fn stream_statuses(&self, statuses: &[LinkStatus]) -> Vec<LinkStatus> {
        let other = |status: &LinkStatus| {
            let (down, up) = self.carried.get(&status.name).copied().unwrap_or_default();
            LinkStatus {
                payload: (
                    status.payload.0.saturating_sub(down),
                    status.payload.1.saturating_sub(up),
                ),
                ..status.clone()
            }
        };
        statuses.iter().map(other).collect()
    }
}

/// Divides bytes in proportion to what each link carried; no share exceeds that.
fn shares(bytes: u64, carried: &[u64]) -> Vec<u64> {
    let all: u64 = carried.iter().sum();
    let bytes = bytes.min(all);
    let mut left = bytes;
    let mut share = |carried: &u64| {
        let share = (u128::from(bytes) * u128::from(*carried)).div_ceil(u128::from(all.max(1)));
        let share = (share as u64).min(*carried).min(left);
        left -= share;
        share
    };
    carried.iter().map(&mut share).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use d2tp_links::CostClass;

    use super::*;
    use d2tp_driver::FlowClientReport;
    use d2tp_sched::ClientDecision;

    type Told = Rc<RefCell<BTreeMap<String, DirectionBytes>>>;

    struct Listens(Told);

    impl SchedulerClient for Listens {
        fn decide(&mut self, _: &FlowClientReport<'_>) -> ClientDecision {
            panic!("datagrams pay for nothing")
        }

        fn pays_after(&self) -> Option<std::time::Duration> {
            None
        }

        fn report(&mut self, _: &[LinkStatus], carried: &BTreeMap<String, DirectionBytes>) {
            self.0.replace(carried.clone());
        }
    }

    fn status(name: &str, usage: LinkUse, payload: DirectionBytes) -> LinkStatus {
        LinkStatus {
            name: name.into(),
            class: CostClass::Free,
            usage,
            payload,
            busy: Default::default(),
            rate: None,
            answers: d2tp_driver::LinkAnswers::Answering,
            stream: d2tp_driver::StreamStatus::Unused,
            path: None,
        }
    }

    #[test]
    fn datagrams_are_on_links_that_cost_nothing_and_the_rest_is_of_streams() {
        let told = Told::default();
        let mut tally = DatagramAccounting::new(Box::new(Listens(told.clone())));
        let cell = |payload| status("wwan0", LinkUse::Paid, payload);
        let wifi = |payload| status("wlan0", LinkUse::Free, payload);
        let statuses = [cell((70_000, 9_000)), wifi((5_000, 2_000))];
        tally.update((4_000, 1_500), &statuses);
        assert_eq!(told.borrow()["wlan0"], (4_000, 1_500));
        assert!(!told.borrow().contains_key("wwan0"));
        let others = tally.stream_statuses(&statuses);
        assert_eq!(others[0].payload, (70_000, 9_000));
        assert_eq!(others[1].payload, (1_000, 500));
        // Bytes that no link is known to have carried yet are assigned to the next one.
        let statuses = [cell((80_000, 9_000)), wifi((5_100, 2_000))];
        tally.update((4_600, 1_500), &statuses);
        assert_eq!(told.borrow()["wlan0"], (4_100, 1_500));
        let statuses = [cell((80_000, 9_000)), wifi((5_600, 2_000))];
        tally.update((4_600, 1_500), &statuses);
        assert_eq!(told.borrow()["wlan0"], (4_600, 1_500));
    }

    #[test]
    fn links_share_them_by_what_they_carried() {
        assert_eq!(shares(0, &[]), Vec::<u64>::new());
        assert_eq!(shares(5, &[0, 0]), [0, 0]);
        assert_eq!(shares(300, &[1_000, 2_000]), [100, 200]);
        assert_eq!(shares(10, &[3, 3]), [3, 3]);
        assert_eq!(shares(100, &[333, 333, 334]).iter().sum::<u64>(), 100);
    }
}
