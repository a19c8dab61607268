//! The connections of a session, and how much each may spend on metered links. Connections with the
//! same options are one client of the scheduler, of this process's or of the agent's.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use d2tp_driver::{
    CarriedByLink, Device, Flow, FlowClient, FlowClientReport, LinkStatus, LinkUse, SchedulerHandle,
};
use d2tp_links::CostClass;
use d2tp_sched::{FlowDemand, Grant};

use super::super::agent_scheduler::AgentScheduler;
use super::super::conn_options::ConnOptions;
use super::super::http_lengths::HttpLengths;
use crate::schedule_message::{
    FLOWS_MAX, ReportedFlow, ReportedLink, ReportedTraffic, ScheduleAnswer, ScheduleReport,
};

/// Bytes that a message must announce to be decided on at once, and not with the next second: what is paid for
/// meanwhile is not worth more. Smaller: more decisions for programs with many small messages.
const TELLS_BYTES: u64 = 100_000; // as much as a probe of a link

/// How long a path over metered links is kept after a connection paid for it, without payload.
const READY_FOR: Duration = Duration::from_secs(10); // a guess: as long as a radio stays awake

pub(super) fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Payload of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkPayload {
    /// The link's name.
    pub link: String,
    /// The link's cost class.
    pub class: CostClass,
    /// Bytes to this device.
    pub down: u64,
    /// Bytes from this device.
    pub up: u64,
}

/// Bytes read and written by a connection.
#[derive(Default)]
pub(super) struct ConnTraffic {
    pub(super) down: AtomicU64,
    pub(super) up: AtomicU64,
}

/// What the connections of one rule have carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleTraffic {
    /// Connections that were begun so far.
    pub connections: u64,
    /// Connections that have not ended.
    pub open: u64,
    /// Payload bytes over free links, in both directions.
    pub free_bytes: u64,
    /// Payload bytes over metered links, in both directions.
    pub metered_bytes: u64,
}

impl RuleTraffic {
    /// Adds what one connection carried. `moved`: all its payload; `paid`: what metered links carried of it.
    fn add(&mut self, moved: u64, paid: u64) {
        // What is paid for also has what was lost, and the request for the target.
        self.free_bytes += moved.saturating_sub(paid);
        self.metered_bytes += paid;
    }
}

/// How many bytes the payload of a connection still has, as far as its own HTTP heads tell.
#[derive(Default)]
pub(super) struct ConnLengths {
    /// Whether the target's bytes have begun, before which comes the proxy's answer, and have not ended.
    is_made: AtomicBool,
    /// Whether nothing tells any more.
    is_unknown: AtomicBool,
    lengths: Mutex<HttpLengths>,
}

impl ConnLengths {
    /// Records that everything read from now on is the target's.
    pub(super) fn on_made(&self) {
        self.is_made.store(true, Relaxed);
    }

    /// Records that both directions have ended: only the peer's confirmation is missing.
    pub(super) fn on_ended(&self) {
        self.is_made.store(false, Relaxed);
    }

    /// Reads what the program sent. True if that told of many bytes to come.
    pub(super) fn on_sent(&self, bytes: &[u8]) -> bool {
        self.observe(|lengths| lengths.on_sent(bytes))
    }

    /// Reads what the program received. True if that told of many bytes to come.
    pub(super) fn on_received(&self, bytes: &[u8]) -> bool {
        self.is_made.load(Relaxed) && self.observe(|lengths| lengths.on_received(bytes))
    }

    fn observe(&self, read: impl FnOnce(&mut HttpLengths)) -> bool {
        if self.is_unknown.load(Relaxed) {
            return false;
        }
        let mut lengths = lock(&self.lengths);
        let before = lengths.left().unwrap_or(0);
        read(&mut lengths);
        let left = lengths.left();
        self.is_unknown.store(left.is_none(), Relaxed);
        left.is_some_and(|left| left > before + TELLS_BYTES)
    }

    /// Bytes still to be carried; none if nothing tells.
    fn left(&self) -> Option<u64> {
        if self.is_unknown.load(Relaxed) {
            return None;
        }
        lock(&self.lengths).left()
    }
}

/// Connections with the same options, which are one client of the scheduler: a program opens many, and
/// a decision applies to all of them.
pub(super) struct ConnGroup {
    pub(super) id: u64,
    pub(super) conn_options: ConnOptions,
    pub(super) moved: Arc<ConnTraffic>,
    pub(super) client: Option<FlowClient>,
    pub(super) carried: CarriedByLink,
    /// The last decided grant of metered links for all its connections.
    pub(super) grant: Grant,
    /// Bytes that its connections still have to carry, at the last decision; none if that is unknown of one.
    pub(super) left: Option<u64>,
    /// When metered links were last allowed to carry payload.
    pub(super) spent_at: Option<Instant>,
}

impl ConnGroup {
    /// Takes a decision. A path that was just paid for is kept for a while where time decides, because it may
    /// be needed again: what is in flight on a path that closes is sent again. `budget_left`: bytes that
    /// metered links may still carry.
    fn take_grant(&mut self, decided: Grant, budget_left: Option<u64>) {
        if matches!(decided, Grant::Spend { .. }) {
            self.spent_at = Some(Instant::now());
        }
        let is_recent = self.spent_at.is_some_and(|at| at.elapsed() < READY_FOR);
        let may_pay_again = self.conn_options.demand().is_weighed() && budget_left != Some(0);
        self.grant = match decided {
            Grant::None | Grant::Path if is_recent && may_pay_again => Grant::Path,
            // A connection's first byte opens a path when it may be paid for.
            Grant::Path => Grant::None,
            decided => decided,
        };
    }
}

pub(super) struct SteeredFlow {
    pub(super) flow: Arc<Mutex<Flow>>,
    pub(super) lengths: Arc<ConnLengths>,
    pub(super) conn_options: ConnOptions,
    /// The applied permission to pay: the most bytes if limited, or none.
    pub(super) pays: Option<Option<u64>>,
    /// What the connection has carried.
    pub(super) moved: Arc<ConnTraffic>,
    /// Bytes that metered links carried while it was allowed to pay before.
    pub(super) paid_before: u64,
    /// Bytes that metered links have carried since it was last allowed to pay, as far as they were counted.
    pub(super) paid_since: u64,
}

impl SteeredFlow {
    /// Counts what metered links have carried.
    fn count_paid(&mut self, device: &Device) {
        if self.pays.is_some() {
            // An ended flow may be forgotten.
            let now = device.paid_bytes_now(&lock(&self.flow));
            self.paid_since = self.paid_since.max(now);
        }
    }

    fn add_to(&self, traffic: &mut RuleTraffic) {
        let moved = self.moved.down.load(Relaxed) + self.moved.up.load(Relaxed);
        traffic.add(moved, self.paid_before + self.paid_since);
    }
}

#[derive(Default)]
pub(super) struct SessionFlows {
    pub(super) next: u64,
    pub(super) all: BTreeMap<u64, SteeredFlow>,
    pub(super) groups: Vec<ConnGroup>,
    /// The links that rest to save energy.
    resting: BTreeSet<String>,
    /// Connections of each rule, with what those that ended have carried.
    ended: BTreeMap<u16, RuleTraffic>,
}

impl SessionFlows {
    /// Adds a connection.
    pub(super) fn insert(&mut self, number: u64, flow: SteeredFlow) {
        if let Some(rule) = flow.conn_options.rule {
            self.ended.entry(rule).or_default().connections += 1;
        }
        self.all.insert(number, flow);
    }

    /// Removes a connection that ended.
    pub(super) fn remove(&mut self, number: u64, device: Option<&Device>) {
        self.count_paid(number, device);
        let Some(flow) = self.all.remove(&number) else {
            return;
        };
        if let Some(rule) = flow.conn_options.rule {
            flow.add_to(self.ended.entry(rule).or_default());
        }
    }

    /// Counts what metered links have carried of a connection of a rule.
    pub(super) fn count_paid(&mut self, number: u64, device: Option<&Device>) {
        let flow = self.all.get_mut(&number);
        let flow = flow.filter(|flow| flow.conn_options.rule.is_some());
        if let (Some(flow), Some(device)) = (flow, device) {
            flow.count_paid(device);
        }
    }

    /// What the connections of a rule have carried.
    pub(super) fn rule_traffic(&mut self, rule: u16, device: Option<&Device>) -> RuleTraffic {
        let mut traffic = self.ended.get(&rule).copied().unwrap_or_default();
        let of_rule = |flow: &&mut SteeredFlow| flow.conn_options.rule == Some(rule);
        for flow in self.all.values_mut().filter(of_rule) {
            if let Some(device) = device {
                flow.count_paid(device);
            }
            flow.add_to(&mut traffic);
            traffic.open += 1;
        }
        traffic
    }

    /// Whether there is a connection to a target that has not ended: one that waits for the proxy's answer can begin again elsewhere.
    pub(super) fn has_made_connections(&self) -> bool {
        self.all
            .values()
            .any(|flow| flow.lengths.is_made.load(Relaxed))
    }

    /// Removes groups without connections from the scheduler. Returns the others, with what links
    /// carried for them.
    fn current_groups(&mut self, links: &[LinkStatus]) -> &mut [ConnGroup] {
        let all = &self.all;
        (self.groups).retain(|group| {
            all.values()
                .any(|flow| flow.conn_options == group.conn_options)
        });
        for group in &mut self.groups {
            let moved = &group.moved;
            let moved = (moved.down.load(Relaxed), moved.up.load(Relaxed));
            group.carried.assign(moved, links);
            let of_group = all.values();
            let of_group = of_group.filter(|flow| flow.conn_options == group.conn_options);
            let left: Option<u64> = of_group.map(|flow| flow.lengths.left()).sum();
            // Where nothing is under way, what comes next may be large.
            group.left = left.filter(|left| *left > 0);
        }
        &mut self.groups
    }

    /// Decides with a scheduler of this process. Returns the time after which the decision may change
    /// although nothing else does.
    pub(super) fn decide(
        &mut self,
        links: &[LinkStatus],
        scheduler: &Arc<SchedulerHandle>,
        left: Option<u64>,
    ) -> Option<Duration> {
        let (mut again, mut resting): (Option<Duration>, _) = (None, None);
        for group in self.current_groups(links) {
            let client = group
                .client
                .get_or_insert_with(|| FlowClient::new(scheduler));
            let decision = client.decide(&FlowClientReport {
                demand: FlowDemand {
                    remaining_bytes: group.left,
                    metered_bytes_left: left,
                    ..group.conn_options.demand()
                },
                size_bytes: None,
                buy_bytes: None,
                keeps_awake: false,
                links,
                carried: group.carried.bytes(),
            });
            group.take_grant(decision.grant, left);
            rest_of_all(&mut resting, decision.resting);
            again = again.into_iter().chain(decision.recheck_after).min();
        }
        self.resting = resting.unwrap_or_default();
        again
    }

    /// Reports to the agent, whose answer arrives later.
    pub(super) fn report(
        &mut self,
        links: &[LinkStatus],
        spent: &[LinkPayload],
        agent: &AgentScheduler,
    ) {
        let used = links.iter().filter(|link| link.usage != LinkUse::Off);
        let reported = |link: &LinkStatus| ReportedLink {
            name: link.name.clone(),
            class: link.class.into(),
            rate: link.rate.map(|rate| rate as f64),
            stalled: link.answers.is_silent(),
            in_use: link.answers.is_up(),
        };
        let flow = |group: &mut ConnGroup| {
            // The agent's scheduler knows it now, and this process's no longer.
            group.client = None;
            let demand = group.conn_options.demand();
            ReportedFlow {
                id: group.id,
                policy: demand.policy.as_str().to_owned(),
                if_late: demand.if_late.as_str().to_owned(),
                left_ms: demand.left.map(|left| left.as_millis() as u64),
                left_bytes: group.left,
                carried: group.carried.bytes().clone(),
            }
        };
        let groups = self.current_groups(links);
        agent.report(ScheduleReport {
            links: used.map(reported).collect(),
            flows: groups.iter_mut().take(FLOWS_MAX).map(flow).collect(),
            spent: spent
                .iter()
                .map(|more| ReportedTraffic {
                    link: more.link.clone(),
                    class: more.class.into(),
                    down: more.down,
                    up: more.up,
                })
                .collect(),
        });
    }

    /// Applies the agent's decisions. Returns the time after which they may change although nothing
    /// else does.
    pub(super) fn take_answer(&mut self, answer: &ScheduleAnswer) -> Option<Duration> {
        let (mut again, mut resting): (Option<Duration>, _) = (None, None);
        for decision in &answer.decisions {
            let mut groups = self.groups.iter_mut();
            if let Some(group) = groups.find(|group| group.id == decision.id) {
                group.take_grant(decision.grant.into(), answer.left);
                rest_of_all(&mut resting, decision.resting.clone());
                again = again.into_iter().chain(decision.recheck_after()).min();
            }
        }
        self.resting = resting.unwrap_or_default();
        again
    }

    /// Applies the decisions to the device.
    pub(super) fn apply(&mut self, device: &Device) {
        device.set_resting(&self.resting);
        for group in &self.groups {
            let flows = self
                .all
                .values()
                .filter(|flow| flow.conn_options == group.conn_options);
            let count = flows.count().max(1) as u64;
            let (may, share) = match group.grant {
                Grant::Spend { up_to } => (true, up_to.map(|bytes| bytes / count)),
                Grant::Probe { bytes } => (true, Some(bytes / count)),
                Grant::Path => (true, Some(0)),
                Grant::None => (false, None),
            };
            let flows = self.all.values_mut();
            for steered in flows.filter(|flow| flow.conn_options == group.conn_options) {
                let flow = lock(&steered.flow);
                let pays = may.then(|| share.map(|share| device.paid_bytes(&flow) + share));
                if pays != steered.pays {
                    if pays.is_none() {
                        // The device counts from zero when it may pay again.
                        let now = device.paid_bytes_now(&flow);
                        steered.paid_before += steered.paid_since.max(now);
                        steered.paid_since = 0;
                    }
                    steered.pays = pays;
                    device.allow_paid(&flow, may, pays.flatten());
                }
            }
        }
    }
}

/// Keeps of the links that may rest those that may do so for another group of connections, too.
fn rest_of_all(resting: &mut Option<BTreeSet<String>>, more: BTreeSet<String>) {
    *resting = Some(match resting.take() {
        None => more,
        Some(before) => &before & &more,
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Zoned;

    const ALL: Grant = Grant::Spend { up_to: None };

    fn group(by: Option<&str>) -> ConnGroup {
        ConnGroup {
            id: 1,
            conn_options: ConnOptions::of(by, None, &Zoned::now()).expect("a deadline"),
            moved: Arc::default(),
            client: None,
            carried: CarriedByLink::default(),
            grant: Grant::None,
            left: None,
            spent_at: None,
        }
    }

    #[test]
    fn a_path_that_was_paid_for_is_kept_for_a_while_where_time_decides() {
        let mut due = group(Some("+1h"));
        due.take_grant(Grant::Path, None);
        assert_eq!(due.grant, Grant::None, "nothing was paid for yet");
        due.take_grant(ALL, None);
        due.take_grant(Grant::None, None);
        assert_eq!(due.grant, Grant::Path);
        due.take_grant(Grant::None, Some(0));
        assert_eq!(due.grant, Grant::None, "the budget is used up");
        due.spent_at = Instant::now().checked_sub(READY_FOR);
        due.take_grant(Grant::None, None);
        assert_eq!(due.grant, Grant::None);
        let mut any = group(None);
        any.take_grant(ALL, None);
        any.take_grant(Grant::None, None);
        assert_eq!(any.grant, Grant::None);
    }
}
