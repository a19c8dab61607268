//! Scheduling of a socket's flow: whether it may use metered links, by its options. In an agent the
//! agent's scheduler decides for all clients.
//!
//! Only a deadline, a budget, or data under the policy `any` requires a decision every second, and only while a metered
//! link is up; other policies are decided once. With thresholds, the data buffered ahead of the program
//! decides ([`crate::read_ahead`]), five times a second.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use d2tp_driver::{Device, Flow, LinkStatus, LinkUse, PathState};
use d2tp_sched::{
    ClientDecision, CostPolicy, DeadlineFallback, FlowSpending, Grant, REPORT_EVERY, SpendingChange,
};
use d2tp_time::{Span, Time};
use tokio::sync::Notify;

use crate::carried_flow::CarriedFlow;
use crate::clock::now;
use crate::datagram_accounting::DatagramAccounting;
use crate::dlock;
use crate::engine_state::EngineState;
use crate::errno::SocketFault;
use crate::options::{PersistMode, SocketOptions};
use crate::read_ahead::{LOOK, ReadAhead, ReadAheadBytes, ReadAheadDemand};
use crate::scheduled_socket::{ProgramBytes, RESTS_AFTER, ScheduledSocket, need};
use crate::server_session::ServerSession;
use crate::socket_owner::SocketOwner;
use crate::wake_registry::{ASK_EVERY, WakeEntry};

/// The interval between decisions while a metered link is up.
const EPOCH: Duration = Duration::from_nanos(REPORT_EVERY.as_nanos());

/// How long no free link may have worked before an exhausted budget ends a connection. Lower: a
/// link that is just coming up would not be waited for.
const BROKE_FOR: Span = Span::from_secs(5); // a guess
/// How long a path over metered links is kept after a socket paid for it, without payload.
const READY_FOR: Span = Span::from_secs(10); // a guess: as long as a radio stays awake

/// Schedules a flow while it is carried, or until its budget is used up and it would have to pay.
pub(crate) async fn enforce(home: &EngineState, held: &CarriedFlow) -> SocketFault {
    let Some(line) = held.session.as_ref().map(|line| line.0.clone()) else {
        // The accepting side does not decide.
        return std::future::pending().await;
    };
    let options = || held.options.borrow().clone();
    let moved = || held.program_bytes();
    let flow = &held.flow;
    let with = |f: &mut dyn FnMut(&Flow)| f(&flow.borrow());
    let wakes = DecisionTriggers {
        changed: &held.changed,
        resting: &held.resting,
    };
    let wants = |options: &SocketOptions, statuses: &[LinkStatus], left| {
        let bytes = ReadAheadBytes {
            arrived: held.flow.borrow().arrived(),
            to_program: held.received.get(),
        };
        held.read_ahead
            .update(now(), options, statuses, left, bytes)
    };
    let scheduled = ScheduledSocket::new(home.scheduler.clone(), now(), held.carried_before());
    held.scheduled.replace(Some(scheduled));
    let spent = |bytes| {
        if let Some(store) = &held.store {
            store.set_paid(bytes);
        }
    };
    let sees = PolicyInput {
        owner: held.owner(),
        access: &with,
        options: &options,
        moved: &moved,
        wants: &wants,
        spent: &spent,
    };
    // The path that the opening paid for serves the data, if that may pay too.
    let budget = BudgetMeter {
        inherits: true,
        spending: FlowSpending::new(held.store.as_ref().map_or(0, |store| store.paid())),
        ..BudgetMeter::default()
    };
    decide(home, &held.scheduled, &line, &sees, wakes, budget).await
}

/// Schedules while a server's name is resolved: there is no session and nothing to pay for. The machine
/// may be woken until `line` exists, except for an agent's sockets: without a session links are not
/// observed.
pub(crate) async fn enforce_connecting<T>(
    home: &EngineState,
    owner: Option<&SocketOwner>,
    line: impl Future<Output = T>,
) -> T {
    if home.is_agent {
        return line.await;
    }
    let mut watched = WakeEntry::new(&home.wake_registry);
    let never = async {
        loop {
            let locked = is_locked(owner);
            watched.update(now(), 0, true, || None);
            tokio::select! {
                () = tokio::time::sleep(ASK_EVERY), if locked => {}
                () = lock_changed(home, owner, locked) => {}
            }
        }
    };
    tokio::select! {
        biased;
        line = line => line,
        never = never => never,
    }
}

/// Whether the process of a socket holds a D-Lock.
fn is_locked(owner: Option<&SocketOwner>) -> bool {
    owner.map_or_else(dlock::is_held, SocketOwner::is_locked)
}

/// Waits until that changes, or until the machine has slept.
async fn lock_changed(home: &EngineState, owner: Option<&SocketOwner>, than: bool) {
    match owner {
        Some(owner) => owner.lock_changed(than).await,
        None => home.wake_registry.reconsidered().await,
    }
}

/// Whether an agent's machine may be woken for a socket: its program asks for it, or left it to the
/// agent to meet a deadline or to continue alone.
fn is_woken_for(options: &SocketOptions, locked: bool) -> bool {
    locked || options.deadline.is_some() || options.persist != PersistMode::No
}

/// Schedules a flow until the session and the proxy's tunnel exist, while there is nothing to measure.
pub(crate) async fn enforce_opening(
    home: &EngineState,
    owner: Option<&SocketOwner>,
    line: &ServerSession,
    flow: &RefCell<Flow>,
    options: &SocketOptions,
) -> SocketFault {
    let wakes = DecisionTriggers {
        changed: &Notify::new(),
        resting: &Cell::new(false),
    };
    let with = |f: &mut dyn FnMut(&Flow)| f(&flow.borrow());
    let options = || options.clone();
    let none = (0, 0);
    let scheduled = ScheduledSocket::new(home.scheduler.clone(), now(), none);
    let scheduled = RefCell::new(Some(scheduled));
    let sees = PolicyInput {
        owner,
        access: &with,
        options: &options,
        moved: &ProgramBytes::default,
        // Data buffered for a program that is not connected does not count, because the proxy's
        // answer comes first.
        wants: &|options, statuses, left| {
            let none = ReadAheadBytes::default();
            ReadAhead::default().update(now(), options, statuses, left, none)
        },
        spent: &|_| {},
    };
    decide(home, &scheduled, line, &sees, wakes, BudgetMeter::default()).await
}

/// The events that trigger a new decision.
struct DecisionTriggers<'a> {
    changed: &'a Notify,
    resting: &'a Cell<bool>,
}

/// Calls a function with the flow, which is borrowed for that moment.
type FlowAccess<'a> = dyn Fn(&mut dyn FnMut(&Flow)) + 'a;

/// Returns the demand for read-ahead, given what is left of the budget; none without thresholds.
type DemandSource<'a> =
    dyn Fn(&SocketOptions, &[LinkStatus], Option<u64>) -> Option<ReadAheadDemand> + 'a;

/// The inputs of a socket's scheduling.
struct PolicyInput<'a> {
    /// The process that owns the socket, if it is another one.
    owner: Option<&'a SocketOwner>,
    access: &'a FlowAccess<'a>,
    options: &'a dyn Fn() -> SocketOptions,
    moved: &'a dyn Fn() -> ProgramBytes,
    wants: &'a DemandSource<'a>,
    /// Is told what metered links have carried in total.
    spent: &'a dyn Fn(u64),
}

async fn decide(
    home: &EngineState,
    scheduled: &RefCell<Option<ScheduledSocket>>,
    line: &ServerSession,
    sees: &PolicyInput<'_>,
    wakes: DecisionTriggers<'_>,
    mut budget: BudgetMeter,
) -> SocketFault {
    let Some(mut links) = line.links.clone() else {
        return std::future::pending().await;
    };
    let mut candidates = line.device.watch_candidates();
    let mut watched = WakeEntry::new(&home.wake_registry);
    loop {
        let locked = is_locked(sees.owner);
        let options = (sees.options)();
        let woken = is_woken_for(&options, locked);
        let moved = (sees.moved)();
        let statuses = line.device.link_statuses();
        let others = line.account_datagrams(&statuses);
        home.scheduler.observe_links(&links.borrow());
        let (mut stuck, mut watches, mut lacks) = (false, false, false);
        (sees.access)(&mut |flow: &Flow| {
            budget.update(&line.device, flow);
            (sees.spent)(budget.spending.spent());
            let left = budget.left(&options);
            let mut scheduled = scheduled.borrow_mut();
            let Some(scheduled) = scheduled.as_mut() else {
                return;
            };
            let wants = (sees.wants)(&options, &statuses, left);
            let decision = scheduled.decide(&options, moved, left, &others, wants.as_ref(), woken);
            line.device.set_resting(&decision.resting);
            let keeps = left != Some(0) && counts(&options, &statuses);
            let grant = budget.with_path_kept(decision.grant, keeps);
            budget.allow(&line.device, flow, grant, options.budget);
            let is_broke = match &wants {
                Some(wants) => wants.is_broke,
                None => is_broke(&options, left, &decision),
            };
            stuck = is_broke && statuses.iter().any(costs);
            watches = wants.is_some_and(|wants| !wants.has_all);
            lacks = !statuses
                .iter()
                .any(|status| carries(status, budget.spending.is_allowed()));
            watched.update(now(), moved.down + moved.up, lacks, || {
                if !statuses.iter().any(costs) {
                    return None;
                }
                let span = scheduled.pays_after()?;
                // A start before the next check needs no alarm.
                (span >= ASK_EVERY).then(|| now() + Span::from(span))
            });
        });
        if budget.is_broke(now(), stuck && !statuses.iter().any(works_free)) {
            return SocketFault::new(libc::EDQUOT, budget_exhausted(&options));
        }
        // Whether free links are too slow shows while something moves.
        let compares = compares_links(&options, &statuses);
        let rests = scheduled
            .borrow_mut()
            .as_mut()
            .filter(|_| home.is_agent || compares)
            .map(|scheduled| scheduled.is_idle(now(), &options, moved, watches || woken && lacks));
        wakes.resting.set(rests == Some(true));
        let counts = match rests {
            Some(rests) => !rests,
            None => counts(&options, &statuses),
        };
        // A program's buffer shrinks while no data arrives.
        let watches = watches && statuses.iter().any(costs);
        let pause = match (watches, counts) {
            (true, _) => LOOK,
            (false, true) => EPOCH,
            (false, false) => ASK_EVERY,
        };
        tokio::select! {
            () = tokio::time::sleep(pause), if counts || watches || locked && !home.is_agent => {}
            () = lock_changed(home, sees.owner, locked) => {}
            _ = links.changed() => {}
            // A change of the links may reach the device later than `links`.
            _ = candidates.changed() => {}
            () = wakes.changed.notified() => {}
        }
    }
}

/// Counts what links carried for an agent's datagram sockets, which never pay, and updates the size
/// of datagrams that fit.
pub(crate) async fn watch_datagrams<T>(
    home: &EngineState,
    held: &CarriedFlow,
    look: &dyn Fn(),
) -> T {
    let line = held.session.as_ref().map(|line| line.0.clone());
    let mut links = line.as_ref().and_then(|line| line.links.clone());
    let moved = || (held.received.get(), held.sent.get());
    let (mut before, mut moved_at) = (moved(), now());
    loop {
        look();
        account_datagrams(home, held);
        if moved() != before {
            (before, moved_at) = (moved(), now());
        }
        let rests = now().since(moved_at) >= RESTS_AFTER;
        held.resting.set(rests);
        let changed = async {
            let is_notified = match &mut links {
                Some(links) => links.changed().await.is_ok(),
                None => false,
            };
            if !is_notified {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = tokio::time::sleep(EPOCH), if !rests => {}
            () = changed => {}
            () = held.changed.notified() => {}
        }
    }
}

/// Counts bytes that are not accounted for yet.
pub(crate) fn account_datagrams(home: &EngineState, held: &CarriedFlow) {
    if let Some(line) = &held.session
        && home.is_agent
        && line.0.links.is_some()
    {
        let begin = || DatagramAccounting::new(home.scheduler.join());
        line.0.accounting.borrow_mut().get_or_insert_with(begin);
        line.0.account_datagrams(&line.0.device.link_statuses());
    }
}

/// Ends scheduling, because the flow is over: it pays no more.
pub(crate) fn stop(held: &CarriedFlow) {
    if let Some(line) = &held.session
        && line.0.links.is_some()
    {
        if let Some(scheduled) = held.scheduled.take() {
            let statuses = line.0.device.link_statuses();
            scheduled.close(held.program_bytes(), &line.0.account_datagrams(&statuses));
        }
        line.0.device.allow_paid(&held.flow.borrow(), false, None);
    }
}

fn budget_exhausted(options: &SocketOptions) -> String {
    let bytes = options.budget.unwrap_or(0);
    format!("the budget of {bytes} bytes is used up, and no free network works")
}

fn costs(status: &LinkStatus) -> bool {
    status.usage == LinkUse::Paid
}

fn works(status: &LinkStatus) -> bool {
    let path = status.path.as_ref().map(|path| path.state);
    path == Some(PathState::Active)
}

fn works_free(status: &LinkStatus) -> bool {
    status.usage == LinkUse::Free && works(status)
}

/// Whether a link can carry a flow that may pay, or may not.
fn carries(status: &LinkStatus, pays: bool) -> bool {
    works_free(status) || pays && costs(status) && works(status)
}

/// Whether the decision depends on time with the current links.
fn counts(options: &SocketOptions, statuses: &[LinkStatus]) -> bool {
    statuses.iter().any(costs) && need(options, 0, options.budget).is_weighed()
}

/// Whether metered links may be used beside free ones that are up, if those are too slow.
fn compares_links(options: &SocketOptions, statuses: &[LinkStatus]) -> bool {
    options.policy == CostPolicy::Any && statuses.iter().any(costs)
}

/// What a flow has spent, and since when nothing is left of its budget.
#[derive(Default)]
struct BudgetMeter {
    spending: FlowSpending,
    broke_since: Option<Time>,
    /// Whether the device may still allow the flow what it was allowed before the first decision.
    inherits: bool,
}

impl BudgetMeter {
    fn update(&mut self, device: &Device, flow: &Flow) {
        self.spending.count(device.paid_bytes(flow));
    }

    /// The rest of the budget.
    fn left(&self, options: &SocketOptions) -> Option<u64> {
        self.spending.left(options.budget)
    }

    /// Whether the budget is used up and no free link has worked for longer than an ordinary
    /// outage.
    fn is_broke(&mut self, now: Time, stuck: bool) -> bool {
        if !stuck {
            self.broke_since = None;
            return false;
        }
        now.since(*self.broke_since.get_or_insert(now)) >= BROKE_FOR
    }

    /// The grant to apply. A path that was just paid for is kept for a while if `keeps`, because it may be needed
    /// again: what is in flight on a path that closes is sent again.
    fn with_path_kept(&mut self, decided: Grant, keeps: bool) -> Grant {
        let decided = match decided {
            // A path without payload is not kept for a socket: its first byte opens one.
            Grant::Path => Grant::None,
            decided => decided,
        };
        match keeps {
            true => self.spending.keep_path(now(), decided, READY_FOR),
            false => decided,
        }
    }

    fn allow(&mut self, device: &Device, flow: &Flow, grant: Grant, budget: Option<u64>) {
        if grant == Grant::None {
            self.update(device, flow);
        }
        let change = self.spending.apply(grant, budget);
        let inherits = std::mem::take(&mut self.inherits);
        match change {
            Some(SpendingChange::Allow { budget }) => device.allow_paid(flow, true, budget),
            Some(SpendingChange::Forbid) => device.allow_paid(flow, false, None),
            None if inherits => device.allow_paid(flow, false, None),
            None => {}
        }
    }
}

/// Whether metered links should carry a flow that has nothing left to spend on them.
fn is_broke(options: &SocketOptions, left: Option<u64>, decision: &ClientDecision) -> bool {
    left == Some(0) && options.if_late != DeadlineFallback::Wait && decision.lacks_budget
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    use crate::socket_scheduler::OwnScheduler;
    use d2tp_links::CostClass;

    fn status(class: CostClass, usage: LinkUse, rate: u64) -> LinkStatus {
        LinkStatus {
            name: format!("{class:?}"),
            class,
            usage,
            payload: (0, 0),
            busy: Default::default(),
            rate: Some(rate),
            answers: d2tp_driver::LinkAnswers::Answering,
            stream: d2tp_driver::StreamStatus::Unused,
            path: None,
        }
    }

    #[test]
    fn a_deadline_that_free_links_do_not_make_pays_and_one_that_they_make_does_not() {
        let statuses = [
            status(CostClass::Free, LinkUse::Free, 100_000),
            status(CostClass::Metered, LinkUse::Paid, 1_000_000),
        ];
        let in_a_minute = SocketOptions {
            deadline: Some(crate::clock::since_boot() + Duration::from_secs(60)),
            ..SocketOptions::default()
        };
        let decide = |options: &SocketOptions, moved: u64, left| {
            let mut socket = ScheduledSocket::new(Rc::new(OwnScheduler::default()), now(), (0, 0));
            let moved = ProgramBytes {
                down: moved,
                ..ProgramBytes::default()
            };
            socket.decide(options, moved, left, &statuses, None, false)
        };
        let spends = |options: &SocketOptions, moved| {
            let grant = decide(options, moved, None).grant;
            matches!(grant, Grant::Spend { .. })
        };
        let lacks =
            |options: &SocketOptions, left| is_broke(options, left, &decide(options, 0, left));
        let sized = |bytes| SocketOptions {
            size: Some(bytes),
            ..in_a_minute.clone()
        };
        assert!(!spends(&sized(1_000_000), 0));
        assert!(spends(&sized(30_000_000), 0));
        assert!(!spends(&sized(30_000_000), 29_500_000));
        let free_only = SocketOptions {
            policy: CostPolicy::FreeOnly,
            ..sized(30_000_000)
        };
        assert!(!spends(&free_only, 0));
        let fast = SocketOptions {
            policy: CostPolicy::Fast,
            ..SocketOptions::default()
        };
        assert!(spends(&fast, 0));
        assert!(!lacks(&fast, Some(1)));
        assert!(lacks(&fast, Some(0)));
        // Nothing is to be paid for, so no budget is missing.
        assert!(!lacks(&free_only, Some(0)));
        assert!(!lacks(&sized(1_000_000), Some(0)));
        let patient = SocketOptions {
            if_late: DeadlineFallback::Wait,
            ..fast
        };
        assert!(!lacks(&patient, Some(0)));
    }

    #[test]
    fn a_free_link_that_comes_soon_enough_saves_a_flow_whose_budget_is_used_up() {
        let at = |seconds| Time::ZERO + Span::from_secs(seconds);
        let mut budget = BudgetMeter::default();
        assert!(!budget.is_broke(at(1), true));
        assert!(!budget.is_broke(at(5), true));
        assert!(!budget.is_broke(at(6), false), "it works again");
        assert!(!budget.is_broke(at(7), true));
        assert!(budget.is_broke(at(12), true));
    }
}
