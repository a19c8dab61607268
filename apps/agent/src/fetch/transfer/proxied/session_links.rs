//! The links of a session with a proxy: which of them are silent, their rates, and which one
//! carries data.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use d2tp_driver::PathSwitchKind;
use d2tp_links::{Link, LinkKind};
use d2tp_sched::{LinkCandidate, LinkClass};

use crate::fetch::boot_clock::BootInstant;
use crate::fetch::proxy::LinkTraffic;
use crate::fetch::transfer::control::TransferControl;

/// How long a link must answer before its rate is measured: a new path is still in slow start.
const RATE_AFTER: Duration = Duration::from_millis(1500); // a guess

/// A move of a session's data to another link.
pub(super) struct LinkSwitch {
    /// The link that carried before, where the session knows it.
    pub(super) from: Option<String>,
    /// The link that carries now.
    pub(super) to: String,
    /// Whether the paths overlapped.
    pub(super) kind: PathSwitchKind,
    /// How long nothing arrived.
    pub(super) silence: Duration,
}

/// The links of a session.
#[derive(Debug, Default)]
pub(super) struct SessionLinks {
    /// Since when each link answers.
    answering_since: BTreeMap<String, BootInstant>,
    /// Rates of metered links when they were last paid for: without payload there is no measurement.
    paid_rates: BTreeMap<String, f64>,
    /// Bytes that each link had carried at the last count.
    counted: BTreeMap<String, u64>,
    /// The first link on which the proxy answered, and after how many milliseconds.
    first_answer: Option<(String, u64)>,
    /// Metered links that work and were left because nothing may be spent there.
    left: BTreeSet<String>,
}

impl SessionLinks {
    /// The links as candidates for the scheduler. `spends`: the flow pays for metered links.
    pub(super) fn candidates(
        &mut self,
        links: &[Link],
        traffic: &BTreeMap<String, LinkTraffic>,
        spends: bool,
        now: BootInstant,
    ) -> Vec<LinkCandidate> {
        let usable = |link: &&Link| link.kind != LinkKind::Loopback && link.is_usable();
        let candidates = links.iter().filter(usable).map(|link| {
            let class = LinkClass::from(link.class.class);
            let in_use = match class {
                LinkClass::Free => true,
                LinkClass::Metered => spends,
                LinkClass::Roaming => false,
            };
            let traffic = traffic.get(&link.name);
            let answers = traffic.is_some_and(|traffic| traffic.is_answering == Some(true));
            let rate = traffic.and_then(|traffic| traffic.rate);
            let rate = self.rate(&link.name, rate, answers, now);
            LinkCandidate {
                name: link.name.clone(),
                class,
                rate_bytes_per_s: match class {
                    LinkClass::Metered => self.paid_rate(&link.name, rate.filter(|_| spends)),
                    LinkClass::Free | LinkClass::Roaming => rate,
                },
                metric: link.metric().unwrap_or(u32::MAX),
                stalled: traffic.is_some_and(|traffic| traffic.is_silent),
                in_use,
            }
        });
        candidates.collect()
    }

    /// The rate of a link that has answered for long enough.
    fn rate(
        &mut self,
        link: &str,
        rate: Option<u64>,
        answers: bool,
        now: BootInstant,
    ) -> Option<f64> {
        if !answers {
            self.answering_since.remove(link);
            return None;
        }
        let since = *self.answering_since.entry(link.to_owned()).or_insert(now);
        let rate = rate.filter(|_| now.since(since) >= RATE_AFTER);
        rate.map(|rate| rate as f64)
    }

    /// The rate of a metered link, measured now or when it was last paid for.
    fn paid_rate(&mut self, link: &str, measured: Option<f64>) -> Option<f64> {
        if let Some(rate) = measured {
            self.paid_rates.insert(link.to_owned(), rate);
        }
        self.paid_rates.get(link).copied()
    }

    /// Counts what the links have carried. Returns those that carried since the last count.
    pub(super) fn count(
        &mut self,
        traffic: BTreeMap<String, LinkTraffic>,
        control: &mut TransferControl<'_>,
    ) -> Vec<String> {
        let mut used = Vec::new();
        for (name, traffic) in traffic {
            let before = self.counted.insert(name.clone(), traffic.bytes);
            if traffic.bytes > before.unwrap_or(0) {
                used.push(name.clone());
            }
            let obstacle = traffic.stream.udp_obstacle();
            control.spending.record_udp_obstacle(&name, obstacle);
            if let Some(trip) = traffic.round_trip {
                control.spending.record_round_trip(&name, trip);
            }
            if let Some(busy) = traffic.active_time {
                control.spending.record_busy_time(&name, busy);
            }
            if traffic.bytes > 0 {
                control.usage.set(name, traffic.bytes);
            }
        }
        used
    }

    /// Records that the proxy answered on `link` after `took` milliseconds.
    pub(super) fn on_path_up(&mut self, link: String, took: u64) {
        self.first_answer.get_or_insert((link, took));
    }

    /// Reports on which link the first byte came.
    pub(super) fn report_first_byte(
        &self,
        traffic: &BTreeMap<String, LinkTraffic>,
        control: &mut TransferControl<'_>,
    ) {
        let busiest = traffic.iter().max_by_key(|(_, traffic)| traffic.bytes);
        let (first, took) = self.first_answer.clone().unzip();
        let Some(to) = busiest.map(|(name, _)| name.clone()).or(first) else {
            return;
        };
        control.usage.set_last_link(&to);
        let why = format!("the proxy answered in {} ms", took.unwrap_or(0));
        control.reporter.switched(None, to, why);
    }

    /// Records that data moved to another link, and reports it. `spends`: payload on metered links is
    /// paid for.
    pub(super) fn on_switched(
        &mut self,
        switch: LinkSwitch,
        traffic: &BTreeMap<String, LinkTraffic>,
        spends: bool,
        control: &mut TransferControl<'_>,
    ) {
        let last = control.usage.last_link().map(str::to_owned);
        let (from, to) = (switch.from.or(last), switch.to);
        if let Some(from) = &from {
            let traffic = traffic.get(from);
            let answers = traffic.is_some_and(|traffic| traffic.is_answering == Some(true));
            let carries = !control.usage.is_metered(from) || spends;
            if !self.has_moved(from, &to, answers, carries) {
                return;
            }
            control.usage.count_switch();
        }
        control.usage.set_last_link(&to);
        let kind = match switch.kind {
            PathSwitchKind::MakeBeforeBreak => "make-before-break",
            PathSwitchKind::BreakBeforeMake => "break-before-make",
        };
        control
            .reporter
            .session_switched(from, to, kind, switch.silence);
    }

    /// Whether data that came over `from` and now comes over `to` has moved: not if both carry it side
    /// by side, and once only if what is under way on `from` still trickles in. `carries`: payload may
    /// be on `from`, which answers or not.
    fn has_moved(&mut self, from: &str, to: &str, answers: bool, carries: bool) -> bool {
        if !answers || from == to {
            self.left.remove(to);
            return true;
        }
        // A metered link that may not be spent on is left while it still works.
        !carries && self.left.insert(from.to_owned())
    }

    /// Records that the permission to pay for links changed.
    pub(super) fn on_grant_changed(&mut self) {
        self.left.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_links::{CostAssessment, CostClass, DefaultRoute};

    fn link(name: &str, class: CostClass) -> Link {
        Link {
            name: name.into(),
            index: 1,
            kind: LinkKind::Wifi,
            class: CostAssessment {
                class,
                because: "test".into(),
            },
            up: true,
            carrier: true,
            mtu_bytes: 1500,
            dhcp_proxy: None,
            addresses: vec!["192.0.2.1".parse().unwrap()],
            routes: vec![DefaultRoute {
                metric: 1,
                ipv6: false,
                gateway: None,
                table: 254,
            }],
        }
    }

    fn traffic(name: &str, rate: u64, answers: bool) -> BTreeMap<String, LinkTraffic> {
        let traffic = LinkTraffic {
            bytes: 0,
            active_time: None,
            rate: Some(rate),
            is_silent: !answers,
            is_answering: Some(answers),
            stream: d2tp_driver::StreamStatus::Unused,
            round_trip: None,
        };
        BTreeMap::from([(name.to_owned(), traffic)])
    }

    fn at(ms: u64) -> BootInstant {
        BootInstant::from_boot(Duration::from_millis(100_000 + ms))
    }

    #[test]
    fn a_link_that_is_silent_carries_nothing_for_the_scheduler() {
        let mut session = SessionLinks::default();
        let links = [link("wlan0", CostClass::Free)];
        let mut stalled = |answers| {
            session.candidates(&links, &traffic("wlan0", 1, answers), false, at(0))[0].stalled
        };
        assert!(!stalled(true));
        assert!(stalled(false));
    }

    #[test]
    fn a_rate_counts_once_its_link_has_answered_for_a_while() {
        let mut session = SessionLinks::default();
        let links = [link("wlan0", CostClass::Free)];
        let mut rate = |answers, ms| {
            let traffic = traffic("wlan0", 7, answers);
            session.candidates(&links, &traffic, false, at(ms))[0].rate_bytes_per_s
        };
        assert_eq!(rate(true, 0), None);
        assert_eq!(rate(true, 1500), Some(7.0));
        assert_eq!(rate(false, 1600), None);
        assert_eq!(rate(true, 1700), None);
    }

    #[test]
    fn a_metered_link_keeps_the_rate_it_had_when_it_was_paid_for() {
        let mut session = SessionLinks::default();
        let links = [link("wwan0", CostClass::Metered)];
        let mut rate = |bytes, spends, ms| {
            let traffic = traffic("wwan0", bytes, true);
            session.candidates(&links, &traffic, spends, at(ms))[0].rate_bytes_per_s
        };
        assert_eq!(rate(9, false, 0), None);
        assert_eq!(rate(9, false, 2000), None);
        assert_eq!(rate(9, true, 2100), Some(9.0));
        assert_eq!(rate(1, false, 2200), Some(9.0));
    }

    #[test]
    fn a_metered_link_that_still_works_is_left_once() {
        let mut session = SessionLinks::default();
        assert!(!session.has_moved("wlan0", "wwan0", true, true));
        assert!(session.has_moved("wwan0", "wlan0", true, false));
        assert!(!session.has_moved("wwan0", "wlan0", true, false));
        session.on_grant_changed();
        assert!(session.has_moved("wwan0", "wlan0", true, false));
        assert!(session.has_moved("wlan0", "wwan0", false, true));
    }
}
