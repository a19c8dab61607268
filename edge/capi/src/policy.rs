//! Whether a socket's flow pays for links, from its options: D2Sched's decision for one flow, or in an agent
//! that of its scheduler for all.
//!
//! Only a deadline or a budget makes this look again every second, and only while a link that costs is up: other
//! policies are decided once. Where the program named thresholds, what is ahead of it decides ([`crate::ahead`]),
//! five times a second.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use d2tp_driver::{Device, Flow, LinkUse, PathState, Way};
use d2tp_sched::{CostPolicy, DeadlineFallback, FlowDemand};
use d2tp_steer::Seen;
use d2tp_time::{Span, Time};
use tokio::sync::Notify;

use crate::ahead::{Ahead, Wants};
use crate::carrier::{Decision, Judge, Owner, Seat, Standing};
use crate::dlock::{self, ASK_EVERY, Watched};
use crate::errno::Fault;
use crate::home::{Home, Line};
use crate::options::{Options, Persist, since_boot};
use crate::pump::Held;
use crate::tally::Tally;

/// Between two decisions where time counts.
const EPOCH: Duration = Duration::from_secs(1);

/// And where what is ahead of a program does.
pub(crate) const LOOK: Duration = Duration::from_millis(200); // as of others' streams

/// A budget that is used up ends a connection when no free link has worked for so long: shorter, and one that is
/// just being connected by is not waited for.
const BROKE_FOR: Span = Span::from_secs(5); // a guess

/// A connection without a deadline that moved nothing for so long, and owes nothing, wants nothing of links.
const RESTS_AFTER: Span = Span::from_secs(5); // as of others' transfers

/// Decides for a flow for as long as it is carried, or until its budget is used up and it would have to pay.
pub(crate) async fn steer(home: &Home, held: &Held) -> Fault {
    let Some(line) = held.line.as_ref().map(|line| line.0.clone()) else {
        // Who accepted does not decide.
        return std::future::pending().await;
    };
    let options = || held.options.borrow().clone();
    let moved = || Moved::of(held);
    let flow = &held.flow;
    let with = |f: &mut dyn FnMut(&Flow)| f(&flow.borrow());
    let wakes = Wakes {
        changed: &held.changed,
        resting: &held.resting,
    };
    let wants = |options: &Options, ways: &[Way], left| {
        let to_program = held.received.get();
        held.ahead.look(now(), options, ways, left, to_program)
    };
    if let Some(judge) = &home.judge {
        held.court.replace(Some(Court::new(judge.clone(), now())));
    }
    let sees = Sees {
        owner: held.owner(),
        with: &with,
        options: &options,
        moved: &moved,
        wants: &wants,
    };
    decide(home, &held.court, &line, &sees, wakes).await
}

/// While a server's name is looked for there is no session and nothing to be paid for. Until `line` is there the machine may
/// be woken, but for an agent's sockets: without a session nothing is seen of links.
pub(crate) async fn steer_calling<T>(
    home: &Home,
    owner: Option<&Owner>,
    line: impl Future<Output = T>,
) -> T {
    if home.judge.is_some() {
        return line.await;
    }
    let mut watched = Watched::new(&home.standby);
    let never = async {
        loop {
            let locked = is_locked(owner);
            watched.look(now(), 0, true, || None);
            tokio::select! {
                () = tokio::time::sleep(ASK_EVERY), if locked => {}
                () = locks_otherwise(home, owner, locked) => {}
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
fn is_locked(owner: Option<&Owner>) -> bool {
    owner.map_or_else(dlock::is_held, Owner::is_locked)
}

/// Until that may be otherwise, or the machine was asleep.
async fn locks_otherwise(home: &Home, owner: Option<&Owner>, than: bool) {
    match owner {
        Some(owner) => owner.locks_otherwise(than).await,
        None => home.standby.stirs().await,
    }
}

/// Whether an agent's machine is woken for a socket: its program asks for that, or left it to the agent to be in time, or
/// to go on without it.
fn is_woken_for(options: &Options, locked: bool) -> bool {
    locked || options.deadline.is_some() || options.persist != Persist::No
}

/// The same until the session and the proxy's tunnel are made, when there is nothing to be measured yet.
pub(crate) async fn steer_opening(
    home: &Home,
    owner: Option<&Owner>,
    line: &Line,
    flow: &RefCell<Flow>,
    options: &Options,
) -> Fault {
    let wakes = Wakes {
        changed: &Notify::new(),
        resting: &Cell::new(false),
    };
    let with = |f: &mut dyn FnMut(&Flow)| f(&flow.borrow());
    let options = || options.clone();
    let court = home.judge.clone().map(|judge| Court::new(judge, now()));
    let court = RefCell::new(court);
    let sees = Sees {
        owner,
        with: &with,
        options: &options,
        moved: &Moved::default,
        // What is ahead of a program that is not connected decides nothing yet: its answer is to come first.
        wants: &|options, ways, left| Ahead::default().look(now(), options, ways, left, 0),
    };
    decide(home, &court, line, &sees, wakes).await
}

/// Bytes of the program's.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Moved {
    /// To it, or kept for it.
    down: u64,
    /// From it, as the peer has acknowledged them.
    up: u64,
    /// From it, as they were taken.
    written: u64,
}

impl Moved {
    fn of(held: &Held) -> Moved {
        Moved {
            down: held.received.get() + held.ahead.kept(),
            up: held.acknowledged(),
            written: held.sent.get(),
        }
    }
}

/// What a decision is made anew for.
struct Wakes<'a> {
    changed: &'a Notify,
    resting: &'a Cell<bool>,
}

/// Lends the flow, which is borrowed for a moment at a time.
type WithFlow<'a> = dyn Fn(&mut dyn FnMut(&Flow)) + 'a;

/// With so much left to spend; none where there are no thresholds.
type WantsOf<'a> = dyn Fn(&Options, &[Way], Option<u64>) -> Option<Wants> + 'a;

/// What is seen of a socket.
struct Sees<'a> {
    /// Whose it is, where that is another process.
    owner: Option<&'a Owner>,
    with: &'a WithFlow<'a>,
    options: &'a dyn Fn() -> Options,
    moved: &'a dyn Fn() -> Moved,
    wants: &'a WantsOf<'a>,
}

async fn decide(
    home: &Home,
    court: &RefCell<Option<Court>>,
    line: &Line,
    sees: &Sees<'_>,
    wakes: Wakes<'_>,
) -> Fault {
    let Some(mut links) = line.links.clone() else {
        return std::future::pending().await;
    };
    let mut purse = Purse::default();
    let mut seen = Seen::default();
    let mut watched = Watched::new(&home.standby);
    loop {
        let locked = is_locked(sees.owner);
        let options = (sees.options)();
        let woken = is_woken_for(&options, locked);
        let moved = (sees.moved)();
        let ways = line.device.ways();
        let others = line.tally(&ways);
        seen.look(now(), &ways);
        let (mut stuck, mut watches, mut lacks) = (false, false, false);
        (sees.with)(&mut |flow: &Flow| {
            purse.look(&line.device, flow);
            let left = purse.left(&options);
            let bytes = moved.down + moved.written;
            let verdict = verdict(&seen, now(), &options, bytes, left);
            let wants = (sees.wants)(&options, &ways, left);
            let decision = match (&mut *court.borrow_mut(), &wants) {
                (Some(court), wants) => {
                    court.ask(&options, moved, left, &others, wants.as_ref(), woken)
                }
                (None, Some(wants)) => Decision {
                    pays: false,
                    probe: wants.fills,
                },
                (None, None) => Decision {
                    pays: verdict == Verdict::Pays,
                    probe: None,
                },
            };
            purse.allow(&line.device, flow, decision, options.budget);
            let is_broke = match &wants {
                Some(wants) => wants.is_broke,
                None => verdict == Verdict::Broke,
            };
            stuck = is_broke && ways.iter().any(costs);
            watches = wants.is_some_and(|wants| !wants.has_all);
            lacks = !ways.iter().any(|way| carries(way, purse.pays));
            watched.look(now(), moved.down + moved.up, lacks, || {
                if !ways.iter().any(costs) {
                    return None;
                }
                let span =
                    seen.spends_in(now(), need(&options, bytes, left), size(&options, bytes))?;
                // Sooner than it is looked again it needs no alarm.
                (span >= ASK_EVERY).then(|| now() + Span::from(span))
            });
        });
        if purse.is_broke(now(), stuck && !ways.iter().any(works_free)) {
            return Fault::new(libc::EDQUOT, used_up(&options));
        }
        let rests = court
            .borrow_mut()
            .as_mut()
            .map(|court| court.rests(now(), &options, moved, watches || woken && lacks));
        wakes.resting.set(rests == Some(true));
        let counts = match rests {
            Some(rests) => !rests,
            None => counts(&options, &ways),
        };
        // What is ahead of a program gets less while nothing comes.
        let watches = watches && ways.iter().any(costs);
        let pause = match (watches, counts) {
            (true, _) => LOOK,
            (false, true) => EPOCH,
            (false, false) => ASK_EVERY,
        };
        tokio::select! {
            () = tokio::time::sleep(pause), if counts || watches || locked && rests.is_none() => {}
            () = locks_otherwise(home, sees.owner, locked) => {}
            _ = links.changed() => {}
            () = wakes.changed.notified() => {}
        }
    }
}

/// Of an agent's datagram sockets, which never pay: takes down what links carried for their session, and looks what
/// messages fit.
pub(crate) async fn watch_messages<T>(home: &Home, held: &Held, look: &dyn Fn()) -> T {
    let line = held.line.as_ref().map(|line| line.0.clone());
    let mut links = line.as_ref().and_then(|line| line.links.clone());
    let moved = || (held.received.get(), held.sent.get());
    let (mut before, mut moved_at) = (moved(), now());
    loop {
        look();
        take_down_messages(home, held);
        if moved() != before {
            (before, moved_at) = (moved(), now());
        }
        let rests = now().since(moved_at) >= RESTS_AFTER;
        held.resting.set(rests);
        let changed = async {
            let is_told = match &mut links {
                Some(links) => links.changed().await.is_ok(),
                None => false,
            };
            if !is_told {
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

/// What is not taken down yet.
pub(crate) fn take_down_messages(home: &Home, held: &Held) {
    if let (Some(line), Some(judge)) = (&held.line, &home.judge)
        && line.0.links.is_some()
    {
        let begin = || Tally::new(judge.seat());
        line.0.tally.borrow_mut().get_or_insert_with(begin);
        line.0.tally(&line.0.device.ways());
    }
}

/// A socket before the judge of all.
pub(crate) struct Court {
    judge: Rc<dyn Judge>,
    seat: Option<Box<dyn Seat>>,
    /// What links of the session had carried, to this device and from it.
    before: BTreeMap<String, (u64, u64)>,
    /// Of the program's bytes, those whose links are known.
    placed: (u64, u64),
    carried: BTreeMap<String, (u64, u64)>,
    moved: Moved,
    moved_at: Time,
}

impl Court {
    fn new(judge: Rc<dyn Judge>, now: Time) -> Court {
        Court {
            judge,
            seat: None,
            before: BTreeMap::new(),
            placed: (0, 0),
            carried: BTreeMap::new(),
            moved: Moved::default(),
            moved_at: now,
        }
    }

    fn ask(
        &mut self,
        options: &Options,
        moved: Moved,
        left: Option<u64>,
        ways: &[Way],
        wants: Option<&Wants>,
        wakes: bool,
    ) -> Decision {
        self.place(moved, ways);
        let bytes = moved.down + moved.written;
        let standing = Standing {
            need: match wants {
                Some(wants) => wants.need.clone(),
                None => need(options, bytes, left),
            },
            size: wants.map_or(options.size, |wants| Some(wants.size)),
            fills: wants.map(|wants| wants.fills.unwrap_or(0)),
            wakes,
            ways,
            carried: &self.carried,
        };
        let judge = &self.judge;
        let seat = self.seat.get_or_insert_with(|| judge.seat());
        seat.decide(&standing)
    }

    /// It is over: what was carried since it asked last counts too.
    fn close(mut self, moved: Moved, ways: &[Way]) {
        self.place(moved, ways);
        let judge = &self.judge;
        let seat = self.seat.get_or_insert_with(|| judge.seat());
        seat.tell(ways, &self.carried);
    }

    /// Says of the program's bytes which links they took: as its session's streams did meanwhile, which others may
    /// share.
    fn place(&mut self, moved: Moved, ways: &[Way]) {
        let since: Vec<(u64, u64)> = ways
            .iter()
            .map(|way| {
                let known = self.before.get(&way.name).copied();
                let (down, up) = known.unwrap_or(way.payload);
                (
                    way.payload.0.saturating_sub(down),
                    way.payload.1.saturating_sub(up),
                )
            })
            .collect();
        let of = |mine: u64, all: u64, link: u64| {
            (u128::from(mine) * u128::from(link))
                .checked_div(u128::from(all))
                .map(|share| share as u64)
        };
        let all_down = since.iter().map(|(down, _)| down).sum();
        let all_up = since.iter().map(|(_, up)| up).sum();
        let mine_down = moved.down.saturating_sub(self.placed.0);
        let mine_up = moved.up.saturating_sub(self.placed.1);
        for (way, (down, up)) in ways.iter().zip(&since) {
            let carried = self.carried.entry(way.name.clone()).or_default();
            carried.0 += of(mine_down, all_down, *down).unwrap_or(0);
            carried.1 += of(mine_up, all_up, *up).unwrap_or(0);
            self.before.insert(way.name.clone(), way.payload);
        }
        // What no link has carried yet will be found on one.
        if all_down > 0 {
            self.placed.0 = moved.down;
        }
        if all_up > 0 {
            self.placed.1 = moved.up;
        }
    }

    /// Whether it wants nothing now: then others have its place. One that is `watched` will.
    fn rests(&mut self, now: Time, options: &Options, moved: Moved, watched: bool) -> bool {
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
            self.seat = None;
            // The next place begins to count anew.
            self.carried.clear();
        }
        rests
    }
}

/// The flow is over: it pays no more.
pub(crate) fn stop(held: &Held) {
    if let Some(line) = &held.line
        && line.0.links.is_some()
    {
        if let Some(court) = held.court.take() {
            let ways = line.0.device.ways();
            court.close(Moved::of(held), &line.0.tally(&ways));
        }
        line.0.device.allow_paid(&held.flow.borrow(), false, None);
    }
}

fn used_up(options: &Options) -> String {
    let bytes = options.budget.unwrap_or(0);
    format!("the budget of {bytes} bytes is used up, and no network that is free works")
}

fn costs(way: &Way) -> bool {
    way.usage == LinkUse::Paid
}

fn works(way: &Way) -> bool {
    let path = way.path.as_ref().map(|path| path.state);
    path == Some(PathState::Active)
}

fn works_free(way: &Way) -> bool {
    way.usage == LinkUse::Free && works(way)
}

/// Whether a link carries a flow that may pay, or may not.
fn carries(way: &Way, pays: bool) -> bool {
    works_free(way) || pays && costs(way) && works(way)
}

/// Whether time decides, as links are.
fn counts(options: &Options, ways: &[Way]) -> bool {
    let weighs = options.deadline.is_some() && is_weighing(options);
    ways.iter().any(costs) && (weighs || options.budget.is_some())
}

/// What a flow has spent. The device counts from when it was last allowed to.
#[derive(Default)]
struct Purse {
    pays: bool,
    /// In times before this one.
    before: u64,
    now: u64,
    told: Option<Option<u64>>,
    broke_since: Option<Time>,
}

impl Purse {
    fn look(&mut self, device: &Device, flow: &Flow) {
        if self.pays {
            self.now = device.paid_bytes(flow);
        }
    }

    /// What may still be spent.
    fn left(&self, options: &Options) -> Option<u64> {
        let spent = self.before + self.now;
        options.budget.map(|budget| budget.saturating_sub(spent))
    }

    /// Whether there is nothing left, and nothing that is free, for so long that it is no hole.
    fn is_broke(&mut self, now: Time, stuck: bool) -> bool {
        if !stuck {
            self.broke_since = None;
            return false;
        }
        now.since(*self.broke_since.get_or_insert(now)) >= BROKE_FOR
    }

    fn allow(&mut self, device: &Device, flow: &Flow, decision: Decision, budget: Option<u64>) {
        let spent = self.before + self.now;
        let (pays, budget) = match decision {
            Decision { pays: true, .. } => (true, budget),
            Decision {
                probe: Some(bytes), ..
            } => {
                let probe = spent.saturating_add(bytes);
                (true, Some(budget.map_or(probe, |budget| budget.min(probe))))
            }
            Decision { probe: None, .. } => (false, budget),
        };
        if self.pays && !pays {
            self.look(device, flow);
            self.before += std::mem::take(&mut self.now);
        }
        let budget = budget.map(|budget| budget.saturating_sub(self.before));
        let told = pays.then_some(budget);
        if pays != self.pays || told != self.told {
            device.allow_paid(flow, pays, budget);
            (self.pays, self.told) = (pays, told);
        }
    }
}

/// What is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It does not pay.
    Free,
    Pays,
    /// It would, and has nothing left.
    Broke,
}

fn now() -> Time {
    Time::from_nanos(u64::try_from(since_boot().as_nanos()).unwrap_or(u64::MAX))
}

/// Whether time decides.
fn is_weighing(options: &Options) -> bool {
    matches!(options.policy, CostPolicy::FreeFirst | CostPolicy::Balanced)
        && options.if_late == DeadlineFallback::Cell
}

/// What it needs, `moved` bytes after its beginning and with so much left to spend.
fn need(options: &Options, moved: u64, left: Option<u64>) -> FlowDemand {
    FlowDemand {
        remaining_bytes: options.size.map(|size| size.saturating_sub(moved)),
        left: options.left(),
        policy: options.policy,
        if_late: options.if_late,
        metered_bytes_left: left,
    }
}

/// Bytes of all of it, or what moved of it.
fn size(options: &Options, moved: u64) -> u64 {
    options.size.unwrap_or(moved)
}

/// What a flow with these options does, `moved` bytes after its beginning and with so much left to spend.
fn verdict(seen: &Seen, now: Time, options: &Options, moved: u64, left: Option<u64>) -> Verdict {
    let spends = |left| seen.spends(now, need(options, moved, left), size(options, moved));
    match left {
        _ if spends(left) => Verdict::Pays,
        Some(0) if options.if_late != DeadlineFallback::Wait && spends(None) => Verdict::Broke,
        _ => Verdict::Free,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_links::Class;

    fn way(class: Class, usage: LinkUse, rate: u64) -> Way {
        Way {
            name: format!("{class:?}"),
            class,
            usage,
            payload: (0, 0),
            busy: Default::default(),
            rate: Some(rate),
            answers: d2tp_driver::LinkAnswers::Answering,
            path: None,
        }
    }

    #[test]
    fn a_deadline_that_free_links_do_not_make_pays_and_one_that_they_make_does_not() {
        let ways = [
            way(Class::Free, LinkUse::Free, 100_000),
            way(Class::Metered, LinkUse::Paid, 1_000_000),
        ];
        let in_a_minute = Options {
            deadline: Some(crate::options::since_boot() + Duration::from_secs(60)),
            ..Options::default()
        };
        let begun = now();
        let mut seen = Seen::default();
        seen.look(begun + Span::from_secs(1), &ways);
        let later = begun + Span::from_secs(1);
        let verdict =
            |options: &Options, moved, left| super::verdict(&seen, later, options, moved, left);
        let spends = |options: &Options, moved| verdict(options, moved, None) == Verdict::Pays;
        let sized = |bytes| Options {
            size: Some(bytes),
            ..in_a_minute.clone()
        };
        assert!(!spends(&sized(1_000_000), 0));
        assert!(spends(&sized(30_000_000), 0));
        assert!(!spends(&sized(30_000_000), 29_500_000));
        let free_only = Options {
            policy: CostPolicy::FreeOnly,
            ..sized(30_000_000)
        };
        assert!(!spends(&free_only, 0));
        let fast = Options {
            policy: CostPolicy::Fast,
            ..Options::default()
        };
        assert!(spends(&fast, 0));
        assert_eq!(verdict(&fast, 0, Some(1)), Verdict::Pays);
        assert_eq!(verdict(&fast, 0, Some(0)), Verdict::Broke);
        // Nothing is to be paid for, so nothing is missing.
        assert_eq!(verdict(&free_only, 0, Some(0)), Verdict::Free);
        assert_eq!(verdict(&sized(1_000_000), 0, Some(0)), Verdict::Free);
        let patient = Options {
            if_late: DeadlineFallback::Wait,
            ..fast
        };
        assert_eq!(verdict(&patient, 0, Some(0)), Verdict::Free);
    }

    #[test]
    fn a_sockets_bytes_are_on_the_links_that_carried_its_session_meanwhile() {
        struct Nobody;
        impl Judge for Nobody {
            fn seat(&self) -> Box<dyn Seat> {
                panic!("nobody asks")
            }
        }
        let on = |name: &str, payload| Way {
            name: name.into(),
            payload,
            ..way(Class::Free, LinkUse::Free, 0)
        };
        let moved = |down, up| Moved {
            down,
            up,
            written: up,
        };
        let mut court = Court::new(Rc::new(Nobody), now());
        // What was carried before it came is not its own.
        court.place(moved(0, 0), &[on("wlan0", (5_000, 0))]);
        assert_eq!(court.carried["wlan0"], (0, 0));
        let both = [on("wlan0", (8_000, 0)), on("wwan0", (1_000, 0))];
        court.place(moved(3_000, 0), &both);
        // A link that was not known had carried nothing for it.
        assert_eq!(court.carried["wlan0"], (3_000, 0));
        let later = [on("wlan0", (8_500, 0)), on("wwan0", (2_500, 0))];
        court.place(moved(4_000, 700), &later);
        assert_eq!(court.carried["wlan0"], (3_250, 0));
        assert_eq!(court.carried["wwan0"], (750, 0));
        // What left before a link was seen to carry it is found on the next.
        let sent = [on("wlan0", (8_500, 800)), on("wwan0", (2_500, 0))];
        court.place(moved(4_000, 700), &sent);
        assert_eq!(court.carried["wlan0"], (3_250, 700));
    }

    #[test]
    fn a_connection_rests_when_it_wants_nothing_and_never_while_it_is_due() {
        struct Nobody;
        impl Judge for Nobody {
            fn seat(&self) -> Box<dyn Seat> {
                panic!("nobody asks")
            }
        }
        let at = |seconds| Time::ZERO + Span::from_secs(seconds);
        let moved = |down, up, written| Moved { down, up, written };
        let plain = Options::default();
        let mut court = Court::new(Rc::new(Nobody), at(0));
        assert!(!court.rests(at(1), &plain, moved(10, 0, 0), false));
        assert!(!court.rests(at(5), &plain, moved(10, 0, 0), false));
        assert!(court.rests(at(6), &plain, moved(10, 0, 0), false));
        assert!(
            !court.rests(at(60), &plain, moved(10, 0, 1), false),
            "the peer lacks a byte"
        );
        let due = Options {
            deadline: Some(since_boot() + Duration::from_secs(60)),
            ..Options::default()
        };
        assert!(!court.rests(at(90), &due, moved(10, 1, 1), false));
        let sized = Options {
            size: Some(12),
            ..Options::default()
        };
        assert!(!court.rests(at(90), &sized, moved(10, 1, 1), false));
        assert!(
            !court.rests(at(90), &sized, moved(11, 1, 1), false),
            "it moved"
        );
        assert!(
            court.rests(at(95), &sized, moved(11, 1, 1), false),
            "it is whole"
        );
    }

    #[test]
    fn a_free_link_that_comes_soon_enough_saves_a_flow_whose_budget_is_used_up() {
        let at = |seconds| Time::ZERO + Span::from_secs(seconds);
        let mut purse = Purse::default();
        assert!(!purse.is_broke(at(1), true));
        assert!(!purse.is_broke(at(5), true));
        assert!(!purse.is_broke(at(6), false), "it works again");
        assert!(!purse.is_broke(at(7), true));
        assert!(purse.is_broke(at(12), true));
    }

    #[test]
    fn what_was_spent_before_is_not_to_be_spent_again() {
        let purse = Purse {
            before: 700,
            now: 200,
            ..Purse::default()
        };
        let options = |budget| Options {
            budget,
            ..Options::default()
        };
        assert_eq!(purse.left(&options(Some(1000))), Some(100));
        assert_eq!(purse.left(&options(Some(500))), Some(0));
        assert_eq!(purse.left(&options(None)), None);
    }
}
