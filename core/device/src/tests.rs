//! Tests of [`DeviceLinks`] with a list of paths as the session and numbers as sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use d2tp_session::{Addresses, PathId};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg32;

use super::*;
use crate::grants::{LinkSpend, PaidLinks};
use crate::stream::StreamFailure;

/// A test bench: a session with scripted paths, and a driver that carries out the actions.
#[derive(Default)]
struct Bench {
    now: Time,
    links: DeviceLinks,
    session: FakeSession,
    facts: BTreeMap<String, (LinkFacts, LinkUse)>,
    /// Sockets that are open, with the name of their link.
    open: BTreeMap<LinkId, String>,
    next_socket: u32,
    /// The number of address families of each link; one if it is not listed.
    families: BTreeMap<String, usize>,
    /// Every action, in order.
    done: Vec<LinkAction>,
    /// Attach requests that are not answered yet.
    requests: VecDeque<(String, u64)>,
    /// Requests for streams that are not answered yet.
    streams: VecDeque<(String, u64)>,
    /// Whether paths remain after a request to close them.
    closes_slowly: bool,
    /// Whether attach requests wait for [`Bench::attach_one`].
    slow_attach: bool,
}

#[derive(Default)]
struct FakeSession {
    paths: BTreeMap<LinkId, FakePath>,
    /// Flows of which nothing remains to be carried.
    carried: BTreeSet<FlowId>,
    over: bool,
}

struct FakePath {
    state: PathState,
    heard_at: Time,
    gated: bool,
    payload: u64,
    rtt: Span,
    /// Bytes granted and spent, by flow.
    flows: BTreeMap<FlowId, (u64, u64)>,
}

impl SessionPaths for FakeSession {
    fn is_over(&self) -> bool {
        self.over
    }

    fn path_stats(&self) -> Vec<PathStats> {
        let stats = |(link, path): (&LinkId, &FakePath)| PathStats {
            id: PathId(link.0),
            addresses: Addresses {
                link: *link,
                local: None,
                remote: server(0),
            },
            state: path.state,
            status: PathStatus::Available,
            gated: path.gated,
            rtt: path.rtt,
            rtt_min: path.rtt,
            window: 0,
            in_flight: 0,
            limit: None,
            mtu: 1200,
            payload_in: path.payload,
            payload_out: 0,
            copied_out: 0,
            fetched_out: 0,
            control_out: 0,
            control_in: 0,
            proved: true,
            heard_at: path.heard_at,
            lost: 0,
            spurious: 0,
            random: 0,
        };
        self.paths.iter().map(stats).collect()
    }

    fn has_path(&self, socket: LinkId) -> bool {
        self.paths.contains_key(&socket)
    }

    fn spend(&self, flow: FlowId, socket: LinkId) -> Option<LinkSpend> {
        let path = self.paths.get(&socket)?;
        let (granted, spent) = path.flows.get(&flow).copied().unwrap_or_default();
        Some(LinkSpend {
            socket,
            spent,
            granted_max: granted,
            granted_min: granted,
        })
    }

    fn is_carried(&self, flow: FlowId) -> bool {
        self.carried.contains(&flow)
    }
}

fn server(family: usize) -> SocketAddr {
    let addresses = ["192.0.2.1:4433", "[2001:db8::1]:4433"];
    addresses[family].parse().unwrap()
}

fn facts(name: &str) -> LinkFacts {
    LinkFacts {
        name: name.into(),
        index: 1,
        up: true,
        carrier: true,
        addresses: vec!["198.51.100.7".parse().unwrap()],
        routes_v4: true,
        routes_v6: false,
        half_duplex: name == "wlan0",
        serial_rate: (name == "serial:/dev/ttyS0").then_some(30),
        sleeps: false,
    }
}

const FLOW: FlowId = FlowId(4);

impl Bench {
    fn with(settings: DeviceLinkSettings) -> Bench {
        Bench {
            links: DeviceLinks::new(settings),
            ..Bench::default()
        }
    }

    /// Changes a link's facts with `change`, and sets its use.
    fn set(&mut self, name: &str, usage: LinkUse, change: impl FnOnce(&mut LinkFacts)) {
        let mut facts = facts(name);
        change(&mut facts);
        self.facts.insert(name.into(), (facts, usage));
        self.tell();
    }

    fn take_away(&mut self, name: &str) {
        self.facts.remove(name);
        self.tell();
    }

    fn tell(&mut self) {
        let present: Vec<_> = self.facts.values().cloned().collect();
        self.links.on_links(self.now, &self.session, &present);
        self.carry_out();
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.links.poll_action() {
            self.done.push(action.clone());
            match action {
                LinkAction::Attach { link, ticket } => {
                    self.requests.push_back((link.to_string(), ticket));
                    if !self.slow_attach {
                        self.attach_one();
                    }
                }
                LinkAction::OpenStream { link, ticket } => {
                    self.streams.push_back((link.to_string(), ticket));
                }
                LinkAction::OpenPath { socket, gated, .. }
                | LinkAction::WakeAt { socket, gated, .. } => {
                    assert!(self.open.contains_key(&socket), "{socket:?} is closed");
                    let path = FakePath {
                        state: PathState::Opening,
                        heard_at: self.now,
                        gated,
                        payload: 0,
                        rtt: Span::from_millis(50),
                        flows: BTreeMap::new(),
                    };
                    self.session.paths.insert(socket, path);
                }
                LinkAction::ClosePath { .. } if self.closes_slowly => {}
                LinkAction::ClosePath { socket } | LinkAction::DropSocket { socket } => {
                    assert!(self.open.remove(&socket).is_some(), "{socket:?} went twice");
                    self.session.paths.remove(&socket);
                }
                LinkAction::SetGated { socket, gated } => {
                    assert!(self.open.contains_key(&socket), "{socket:?} is closed");
                    if let Some(path) = self.session.paths.get_mut(&socket) {
                        path.gated = gated;
                    }
                }
                LinkAction::Grant {
                    flow,
                    socket,
                    bytes,
                } => {
                    if let Some(path) = self.session.paths.get_mut(&socket) {
                        path.flows.entry(flow).or_default().0 = bytes;
                    }
                }
                LinkAction::Freeze { socket } | LinkAction::Unfreeze { socket } => {
                    assert!(self.open.contains_key(&socket));
                }
                _ => {}
            }
        }
    }

    fn attach_one(&mut self) {
        let Some((link, ticket)) = self.requests.pop_front() else {
            return;
        };
        let families = self.families.get(&link).copied().unwrap_or(1);
        let mut made = Vec::new();
        for family in 0..families {
            let socket = LinkId(self.next_socket);
            self.next_socket += 1;
            self.open.insert(socket, link.clone());
            made.push(AttachedSocket {
                socket,
                remote: server(family),
            });
        }
        self.links.on_socket(self.now, &link, ticket, made);
        if !self.slow_attach {
            self.carry_out();
        }
    }

    /// Answers the oldest request for a stream: with the stream's socket, or why there is none.
    fn answer_stream(&mut self, failure: Option<StreamFailure>) -> Option<LinkId> {
        let (link, ticket) = self.streams.pop_front().expect("a stream was asked for");
        let made = match failure {
            Some(failure) => Err(failure),
            None => {
                let socket = LinkId(self.next_socket);
                self.next_socket += 1;
                self.open.insert(socket, link.clone());
                Ok(AttachedSocket {
                    socket,
                    remote: server(0),
                })
            }
        };
        self.links.on_stream(self.now, &link, ticket, made);
        self.carry_out();
        made.ok().map(|made| made.socket)
    }

    fn stream(&self, name: &str) -> StreamStatus {
        let statuses = self.links.statuses(&self.session);
        let found = statuses.iter().find(|status| *status.name == *name);
        found.expect("the link is known").stream
    }

    /// Lets time pass, calling `on_time` whenever it is due and at the end.
    fn pass(&mut self, span: Span) {
        let end = self.now + span;
        while let Some(at) = self.links.next_timeout().filter(|at| *at <= end) {
            // A real caller is always a little late.
            self.now = at.max(self.now + Span::from_micros(1)).min(end);
            self.look();
            if self.now == end {
                return;
            }
        }
        self.now = end;
        self.look();
    }

    fn look(&mut self) {
        self.links.on_time(self.now, &self.session);
        self.carry_out();
    }

    fn sockets(&self, name: &str) -> Vec<LinkId> {
        let mine = self.open.iter().filter(|(_, link)| *link == name);
        mine.map(|(socket, _)| *socket).collect()
    }

    fn answer(&mut self, socket: LinkId) {
        let path = self.session.paths.get_mut(&socket).unwrap();
        (path.state, path.heard_at) = (PathState::Active, self.now);
        self.look();
    }

    /// The session finds a path silent, `after` this time since a packet last arrived.
    fn fall_silent(&mut self, socket: LinkId, after: Span) {
        let path = self.session.paths.get_mut(&socket).unwrap();
        path.state = PathState::Silent;
        path.heard_at = self.now;
        self.now += after;
        self.links.on_path_silent(self.now, &self.session);
        self.carry_out();
    }

    fn answers(&self, name: &str) -> LinkAnswers {
        self.links.answers(name).unwrap()
    }

    /// The flow spends this many bytes of its grant.
    fn spend(&mut self, socket: LinkId, bytes: u64) {
        let flows = &mut self.session.paths.get_mut(&socket).unwrap().flows;
        let (granted, spent) = flows.entry(FLOW).or_default();
        let bytes = bytes.min(*granted);
        (*granted, *spent) = (*granted - bytes, *spent + bytes);
    }

    fn allow(&mut self, budget: Option<u64>, links: PaidLinks) {
        self.links
            .allow_paid(self.now, &self.session, FLOW, budget, links);
        self.carry_out();
    }

    fn allow_flow(&mut self, flow: FlowId) {
        let (budget, links) = (None, PaidLinks::All);
        self.links
            .allow_paid(self.now, &self.session, flow, budget, links);
        self.carry_out();
    }

    fn forbid_flow(&mut self, flow: FlowId) {
        self.links.forbid_paid(self.now, &self.session, flow);
        self.carry_out();
    }

    /// The last byte of a flow is carried; the links are updated a tick later.
    fn end_flow(&mut self, flow: FlowId) {
        self.session.carried.insert(flow);
        self.now += crate::TICK;
        self.look();
    }

    /// Opens the paid path over a metered link by a flow, which then ends.
    fn paid_and_ended(&mut self, name: &str) -> LinkId {
        self.set(name, LinkUse::Paid, |_| {});
        self.allow(None, PaidLinks::All);
        let socket = self.sockets(name)[0];
        self.answer(socket);
        self.end_flow(FLOW);
        socket
    }

    fn granted(&self, name: &str) -> u64 {
        let mine = self.sockets(name);
        let paths = mine.iter().filter_map(|s| self.session.paths.get(s));
        paths.filter_map(|p| p.flows.get(&FLOW)).map(|f| f.0).sum()
    }

    fn count(&self, of: impl Fn(&LinkAction) -> bool) -> usize {
        self.done.iter().filter(|action| of(action)).count()
    }
}

fn ms(n: u64) -> Span {
    Span::from_millis(n)
}

#[test]
fn a_free_link_has_a_path_while_it_is_usable_and_a_paid_one_while_some_flow_pays() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.set("cell", LinkUse::Paid, |_| {});
    assert_eq!(bench.sockets("wlan0").len(), 1);
    assert_eq!(bench.sockets("cell"), []);
    bench.allow(None, PaidLinks::All);
    let cell = bench.sockets("cell");
    assert_eq!(cell.len(), 1);
    assert!(bench.session.paths[&cell[0]].gated);
    bench.links.forbid_paid(bench.now, &bench.session, FLOW);
    bench.carry_out();
    assert_eq!(bench.sockets("cell"), []);
    assert_eq!(
        bench.count(|a| matches!(a, LinkAction::ClosePath { socket } if *socket == cell[0])),
        1,
        "the peer is told"
    );
    bench.take_away("wlan0");
    assert_eq!(bench.open, BTreeMap::new());
}

#[test]
fn a_flow_that_ended_pays_no_more_and_its_path_is_closed_after_a_pause() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let wifi = bench.sockets("wlan0")[0];
    bench.answer(wifi);
    let cell = bench.paid_and_ended("cell");
    bench.links.take_news();
    bench.pass(PAID_PATH_KEPT.saturating_sub(ms(1)));
    assert_eq!(bench.sockets("cell"), [cell], "another may need it soon");
    bench.pass(ms(2));
    assert_eq!(bench.sockets("cell"), []);
    assert_eq!(bench.sockets("wlan0"), [wifi]);
    let closes = |action: &LinkAction| *action == LinkAction::ClosePath { socket: cell };
    assert_eq!(bench.count(closes), 1, "the peer is told");
    assert!(
        bench.links.take_news().candidates,
        "the link answers no more"
    );
    assert_eq!(bench.links.next_timeout(), None);
}

#[test]
fn the_only_path_is_closed_too_when_nothing_pays_for_it() {
    let mut bench = Bench::default();
    let cell = bench.paid_and_ended("cell");
    // A flow that may not pay is open all the time.
    bench.forbid_flow(FlowId(8));
    bench.pass(Span::from_secs(3_600));
    assert_eq!(bench.sockets("cell"), []);
    // The next flow that pays opens it anew.
    bench.allow_flow(FlowId(12));
    let again = bench.sockets("cell");
    assert!(again.len() == 1 && again[0] != cell, "{again:?}");
}

#[test]
fn many_small_paid_requests_in_a_row_need_one_path() {
    for is_forbidden_at_end in [true, false] {
        let mut bench = Bench::default();
        bench.set("cell", LinkUse::Paid, |_| {});
        for request in 0..50 {
            let flow = FlowId(4 * (request + 1));
            bench.allow_flow(flow);
            let socket = bench.sockets("cell")[0];
            bench.answer(socket);
            let granted = bench.session.paths[&socket].flows[&flow].0;
            assert!(granted > 0, "request {request} is paid for at once");
            bench.end_flow(flow);
            if is_forbidden_at_end {
                // As programs do that end a connection.
                bench.forbid_flow(flow);
            }
            bench.pass(ms(900));
        }
        let opened = bench.count(|a| matches!(a, LinkAction::OpenPath { .. }));
        assert_eq!(opened, 1);
        bench.pass(PAID_PATH_KEPT);
        assert_eq!(bench.sockets("cell"), []);
    }
}

#[test]
fn a_path_is_kept_while_another_flow_pays_and_closed_after_the_last() {
    let mut bench = Bench::default();
    bench.set("cell", LinkUse::Paid, |_| {});
    let (first, second) = (FlowId(4), FlowId(8));
    bench.allow_flow(first);
    bench.allow_flow(second);
    let cell = bench.sockets("cell")[0];
    bench.answer(cell);
    bench.end_flow(first);
    // It rests, and may pay for what comes.
    bench.pass(Span::from_secs(3_600));
    assert_eq!(bench.sockets("cell"), [cell]);
    bench.end_flow(second);
    bench.pass(PAID_PATH_KEPT.saturating_sub(ms(1)));
    bench.allow_flow(FlowId(12));
    bench.pass(ms(500));
    assert_eq!(bench.sockets("cell"), [cell], "the pause is over");
    bench.end_flow(FlowId(12));
    bench.pass(PAID_PATH_KEPT.saturating_sub(ms(1)));
    assert_eq!(bench.sockets("cell"), [cell], "a whole pause follows");
    bench.pass(ms(2));
    assert_eq!(bench.sockets("cell"), []);
}

#[test]
fn what_an_ended_flow_spent_is_still_known_and_nothing_more_is_paid_for_it() {
    let mut bench = Bench::default();
    bench.set("cell", LinkUse::Paid, |_| {});
    bench.allow(Some(50_000), PaidLinks::All);
    let cell = bench.sockets("cell")[0];
    bench.answer(cell);
    bench.spend(cell, 30_000);
    bench.end_flow(FLOW);
    // The session forgets it.
    bench.session.paths.get_mut(&cell).unwrap().flows.clear();
    bench.allow(Some(80_000), PaidLinks::All);
    assert_eq!(bench.granted("cell"), 0);
    bench.pass(PAID_PATH_KEPT + ms(1));
    assert_eq!(bench.sockets("cell"), []);
    bench.allow(Some(80_000), PaidLinks::All);
    assert_eq!(bench.sockets("cell"), [], "it opens no path");
    assert_eq!(bench.links.paid_bytes(FLOW), 30_000);
    assert_eq!(bench.links.paid_bytes_now(&bench.session, FLOW), 30_000);
}

#[test]
fn the_spending_of_ended_flows_is_known_for_as_many_as_a_session_has_flows() {
    let mut bench = Bench::default();
    bench.set("cell", LinkUse::Paid, |_| {});
    let flow = |number: u64| FlowId(4 * (number + 1));
    for number in 0..1_100 {
        bench.allow_flow(flow(number));
        let cell = bench.sockets("cell")[0];
        bench.answer(cell);
        let flows = &mut bench.session.paths.get_mut(&cell).unwrap().flows;
        flows.get_mut(&flow(number)).unwrap().1 = 7;
        bench.end_flow(flow(number));
    }
    assert_eq!(bench.links.paid_bytes(flow(1_099)), 7);
    assert_eq!(bench.links.paid_bytes(flow(1_100 - 1_024)), 7);
    assert_eq!(bench.links.paid_bytes(flow(1_100 - 1_025)), 0);
}

#[test]
fn no_metered_path_is_opened_tried_again_or_probed_in_the_pause() {
    // One that has not answered is closed at once.
    let mut bench = Bench::default();
    bench.set("cell", LinkUse::Paid, |_| {});
    bench.allow(None, PaidLinks::All);
    bench.end_flow(FLOW);
    assert_eq!(bench.sockets("cell"), []);
    // Another link that comes up gets none.
    bench.set("other", LinkUse::Paid, |_| {});
    assert_eq!(bench.sockets("other"), []);
    // One that falls silent is not waited for, and one that fails is not replaced.
    for fails in [false, true] {
        let mut bench = Bench::default();
        let cell = bench.paid_and_ended("cell");
        match fails {
            false => bench.fall_silent(cell, ms(600)),
            true => bench.session.paths.clear(),
        }
        bench.look();
        assert_eq!(bench.sockets("cell"), []);
        bench.pass(Span::from_secs(60));
        assert_eq!(bench.sockets("cell"), []);
    }
}

#[test]
fn a_machine_that_slept_through_the_pause_opens_no_metered_path() {
    let mut bench = Bench::default();
    bench.paid_and_ended("cell");
    let opened = |bench: &Bench| bench.count(|a| matches!(a, LinkAction::OpenPath { .. }));
    let before = opened(&bench);
    let slept = Span::from_secs(1_800);
    bench.now += slept;
    bench.links.on_slept(bench.now, &bench.session, slept);
    bench.carry_out();
    assert_eq!((bench.sockets("cell"), opened(&bench)), (vec![], before));
    bench.pass(Span::from_secs(60));
    assert_eq!(opened(&bench), before);
}

#[test]
fn a_new_session_and_another_node_get_no_metered_path_in_the_pause() {
    let opened = |bench: &Bench| bench.count(|a| matches!(a, LinkAction::OpenPath { .. }));
    let mut bench = Bench::default();
    bench.paid_and_ended("cell");
    let before = opened(&bench);
    bench.session.paths.clear();
    bench.links.on_session_began(bench.now);
    bench.carry_out();
    assert_eq!((bench.sockets("cell"), opened(&bench)), (vec![], before));

    let mut bench = Bench::default();
    bench.paid_and_ended("cell");
    let before = opened(&bench);
    bench
        .links
        .on_node_changed(bench.now, &bench.session, true, crate::NODE_ANSWER_MAX);
    bench.carry_out();
    assert_eq!((bench.sockets("cell"), opened(&bench)), (vec![], before));
}

#[test]
fn a_metered_path_whose_carrier_is_lost_in_the_pause_is_dropped() {
    let mut bench = Bench::default();
    let cell = bench.paid_and_ended("cell");
    bench.closes_slowly = true;
    bench.set("cell", LinkUse::Paid, |facts| facts.carrier = false);
    assert_eq!(bench.sockets("cell"), []);
    let drops = |action: &LinkAction| *action == LinkAction::DropSocket { socket: cell };
    assert_eq!(bench.count(drops), 1, "no last packet can leave");
}

#[test]
fn a_link_that_begins_to_cost_has_its_open_path_gated() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.allow(None, PaidLinks::All);
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    bench.set("wlan0", LinkUse::Paid, |_| {});
    assert!(bench.session.paths[&socket].gated);
    bench.set("wlan0", LinkUse::Free, |_| {});
    assert!(!bench.session.paths[&socket].gated);
    assert_eq!(bench.sockets("wlan0"), [socket], "its path stays");
}

#[test]
fn a_link_that_begins_to_cost_while_nothing_answered_is_opened_anew_as_one_that_costs() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.allow(None, PaidLinks::All);
    let socket = bench.sockets("wlan0")[0];
    bench.set("wlan0", LinkUse::Paid, |_| {});
    let now = bench.sockets("wlan0");
    assert_ne!(now, [socket]);
    assert!(bench.session.paths[&now[0]].gated);
}

#[test]
fn a_path_that_is_being_closed_when_its_link_goes_is_dropped() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    bench.closes_slowly = true;
    bench.set("wlan0", LinkUse::Off, |_| {});
    assert!(
        bench.session.paths.contains_key(&socket),
        "it says its last word"
    );
    bench.take_away("wlan0");
    assert!(!bench.session.paths.contains_key(&socket));
}

#[test]
fn acks_and_lending_keep_a_paid_link_only_beside_a_free_one_that_they_help() {
    for (acks_pay, lend_rate) in [(true, None), (false, Some(10_000))] {
        let mut bench = Bench::with(DeviceLinkSettings {
            acks_pay,
            lend_rate,
            ..DeviceLinkSettings::default()
        });
        bench.set("cell", LinkUse::Paid, |_| {});
        assert_eq!(bench.sockets("cell"), []);
        bench.set("wlan0", LinkUse::Free, |_| {});
        bench.set("cell", LinkUse::Paid, |_| {});
        assert_eq!(bench.sockets("cell").len(), 1);
        bench.look();
        let lends = bench.count(|a| matches!(a, LinkAction::Lend { .. }));
        assert_eq!(lends > 0, lend_rate.is_some());
        bench.allow(None, PaidLinks::All);
        let ended = bench.count(|a| matches!(a, LinkAction::EndLending { .. }));
        assert_eq!(
            ended > 0,
            lend_rate.is_some(),
            "a flow of its own comes first"
        );
    }
}

#[test]
fn the_other_address_family_is_tried_beside_a_silent_one_and_the_first_answer_wins() {
    let mut bench = Bench::default();
    bench.families.insert("wlan0".into(), 2);
    bench.set("wlan0", LinkUse::Free, |_| {});
    let both = bench.sockets("wlan0");
    assert_eq!(bench.session.paths.len(), 1);
    bench.pass(ms(249));
    assert_eq!(bench.session.paths.len(), 1);
    bench.pass(ms(2));
    assert_eq!(bench.session.paths.len(), 2);
    bench.answer(both[1]);
    assert_eq!(bench.sockets("wlan0"), [both[1]]);
    bench.pass(ms(2_000));
    assert_eq!(bench.sockets("wlan0"), [both[1]]);
}

#[test]
fn both_families_of_a_half_duplex_link_are_known_to_be_half_duplex() {
    let mut bench = Bench::default();
    bench.families.insert("wlan0".into(), 2);
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.pass(ms(300));
    let opened = |a: &LinkAction| {
        matches!(
            a,
            LinkAction::OpenPath {
                half_duplex: true,
                ..
            }
        )
    };
    assert_eq!(bench.count(opened), 2);
}

#[test]
fn a_link_without_a_path_gets_other_sockets_ever_more_rarely_until_one_answers() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.look();
    let attached = |bench: &Bench| bench.count(|a| matches!(a, LinkAction::Attach { .. }));
    let mut waits = Vec::new();
    for _ in 0..8 {
        let (before, began) = (attached(&bench), bench.now);
        while attached(&bench) == before {
            // Every path fails as soon as it is opened.
            bench.session.paths.clear();
            bench.pass(ms(20));
        }
        waits.push((bench.now.since(began).as_millis() + 250) / 1_000);
    }
    assert_eq!(waits[..6], [1, 2, 4, 8, 16, 32]);
    assert_eq!(waits[7], 32, "half a minute at most");
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    bench.session.paths.clear();
    let (before, began) = (attached(&bench), bench.now);
    while attached(&bench) == before {
        bench.pass(ms(20));
    }
    assert!(
        bench.now.since(began) < ms(1_200),
        "an answer restores hope"
    );
}

#[test]
fn a_renewal_opens_new_paths_before_the_old_ones_go_and_is_done_once_a_second() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.now = Time::ZERO + Span::from_secs(9);
    let old = bench.sockets("wlan0")[0];
    bench.answer(old);
    bench.done.clear();
    bench
        .links
        .on_slept(bench.now, &bench.session, Span::from_secs(4));
    bench.carry_out();
    assert_eq!(bench.done, [], "its networks kept it");
    bench
        .links
        .on_slept(bench.now, &bench.session, Span::from_secs(60));
    bench.carry_out();
    let new = bench.sockets("wlan0")[0];
    assert_ne!(new, old);
    let at = |action: &dyn Fn(&LinkAction) -> bool| bench.done.iter().position(action).unwrap();
    let opened = at(&|a| matches!(a, LinkAction::OpenPath { socket, .. } if *socket == new));
    let dropped = at(&|a| matches!(a, LinkAction::DropSocket { socket } if *socket == old));
    assert!(opened < dropped);
    bench.links.renew(bench.now, &bench.session);
    bench.carry_out();
    bench.answer(new);
    assert_eq!(bench.sockets("wlan0"), [new], "not twice in a second");
    bench.pass(ms(1_100));
    assert_ne!(bench.sockets("wlan0"), [new]);
}

#[test]
fn a_socket_that_comes_when_its_link_is_another_is_dropped() {
    let mut bench = Bench {
        slow_attach: true,
        ..Bench::default()
    };
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.set("wlan0", LinkUse::Free, |f| f.index = 2);
    assert_eq!(bench.requests.len(), 2);
    bench.attach_one();
    bench.carry_out();
    assert_eq!(bench.open, BTreeMap::new());
    assert_eq!(bench.session.paths.len(), 0);
    bench.attach_one();
    bench.carry_out();
    assert_eq!(bench.session.paths.len(), 1);
    bench.pass(ms(500));
    assert_eq!(bench.requests.len(), 0);
}

#[test]
fn a_lost_carrier_freezes_and_the_same_network_goes_on_where_it_was() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    bench.set("wlan0", LinkUse::Free, |f| f.carrier = false);
    assert_eq!(bench.count(|a| matches!(a, LinkAction::Freeze { .. })), 1);
    bench.pass(Span::from_secs(29));
    assert_eq!(bench.sockets("wlan0"), [socket]);
    bench.set("wlan0", LinkUse::Free, |_| {});
    assert_eq!(bench.count(|a| matches!(a, LinkAction::Unfreeze { .. })), 1);
    assert_eq!(bench.sockets("wlan0"), [socket]);
}

#[test]
fn a_carrier_that_stays_away_or_comes_back_elsewhere_costs_the_link_its_sockets() {
    for elsewhere in [false, true] {
        let mut bench = Bench::default();
        bench.set("wlan0", LinkUse::Free, |_| {});
        let socket = bench.sockets("wlan0")[0];
        bench.answer(socket);
        bench.set("wlan0", LinkUse::Free, |f| f.carrier = false);
        if elsewhere {
            let other = vec!["203.0.113.9".parse().unwrap()];
            bench.set("wlan0", LinkUse::Free, |f| f.addresses = other);
            assert_ne!(bench.sockets("wlan0"), [socket]);
            assert_eq!(bench.sockets("wlan0").len(), 1);
        } else {
            bench.pass(Span::from_secs(31));
            assert_eq!(bench.sockets("wlan0"), []);
            assert_eq!(
                bench.links.next_timeout(),
                None,
                "nothing is left to wait for"
            );
        }
    }
}

#[test]
fn a_frozen_link_is_left_alone_and_asked_nothing() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    bench.links.freeze(bench.now, "wlan0");
    bench.carry_out();
    bench.links.on_path_quiet(bench.now, socket);
    bench.carry_out();
    assert_eq!(
        bench.count(|a| matches!(a, LinkAction::AskFirstHop { .. })),
        0
    );
    bench.session.paths.clear();
    bench.pass(Span::from_secs(20));
    assert_eq!(bench.sockets("wlan0"), [socket], "nothing is healed");
    bench.links.unfreeze(bench.now, &bench.session, "wlan0");
    bench.carry_out();
    bench.pass(Span::from_secs(3));
    assert_ne!(bench.sockets("wlan0"), [socket]);
}

#[test]
fn what_a_first_hop_says_is_told_only_of_a_quiet_path() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    let ask = |bench: &mut Bench, quiet: bool, answer| {
        match quiet {
            true => bench.links.on_path_quiet(bench.now, socket),
            false => bench.links.on_path_up(bench.now, &bench.session, socket),
        }
        let asked = bench.links.poll_action();
        let Some(LinkAction::AskFirstHop { link, ticket }) = asked else {
            panic!("{asked:?}");
        };
        bench.links.on_hop_answer(&link, ticket, answer);
        bench.links.poll_action()
    };
    assert_eq!(ask(&mut bench, false, Some(true)), None);
    let said = ask(&mut bench, true, Some(false));
    let Some(LinkAction::FirstHopSaid { hop, .. }) = said else {
        panic!("{said:?}");
    };
    assert_eq!(hop, d2tp_session::FirstHopStatus::Silent);
}

#[test]
fn radios_are_read_while_payload_moves_and_their_failures_have_the_first_hop_asked() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    let reads = |bench: &Bench, first_is| {
        bench.count(|a| matches!(a, LinkAction::ReadRadio { first, .. } if *first == first_is))
    };
    let moves = |bench: &mut Bench| {
        bench.session.paths.get_mut(&socket).unwrap().payload += 1_000;
        bench.pass(ms(100));
    };
    assert_eq!(reads(&bench, true), 0);
    moves(&mut bench);
    moves(&mut bench);
    assert_eq!(reads(&bench, true), 1);
    assert_eq!(reads(&bench, false), 0, "the first reading is under way");
    bench.links.on_radio(bench.now, "wlan0", Some(false));
    moves(&mut bench);
    assert_eq!(reads(&bench, false), 1);
    bench.links.on_radio(bench.now, "wlan0", Some(true));
    bench.carry_out();
    assert_eq!(
        bench.count(|a| matches!(a, LinkAction::AskFirstHop { .. })),
        1
    );
    bench.links.on_radio(bench.now, "wlan0", None);
    moves(&mut bench);
    assert_eq!(reads(&bench, false), 1, "it tells nothing");
}

#[test]
fn grants_are_renewed_until_the_budget_is_used_and_each_byte_counts_once() {
    let mut bench = Bench::default();
    bench.set("cell", LinkUse::Paid, |_| {});
    bench.set("other", LinkUse::Paid, |_| {});
    let budget = 200_000;
    bench.allow(Some(budget), PaidLinks::All);
    let mut total = 0;
    for turn in 0..100 {
        for name in ["cell", "other"] {
            let socket = bench.sockets(name)[0];
            bench.answer(socket);
            let granted = bench.granted(name);
            assert!(granted <= budget);
            let bytes = if turn == 3 { granted.min(1) } else { granted };
            bench.spend(socket, bytes);
            total += bytes;
            bench.session.paths.get_mut(&socket).unwrap().payload += bytes;
        }
        let granted = bench.granted("cell") + bench.granted("other");
        assert!(total + granted <= budget, "{total} and {granted}");
        bench.pass(ms(100));
    }
    assert_eq!(total, budget);
    assert_eq!(bench.links.paid_bytes(FLOW), budget);
    bench.allow(Some(budget + 10), PaidLinks::All);
    assert_eq!(bench.granted("cell") + bench.granted("other"), 10);
    bench.links.forbid_paid(bench.now, &bench.session, FLOW);
    bench.carry_out();
    assert_eq!(bench.links.paid_bytes(FLOW), 0);
}

#[test]
fn a_flow_is_granted_nothing_on_links_that_it_may_not_pay_for() {
    let mut bench = Bench::default();
    bench.set("cell", LinkUse::Paid, |_| {});
    bench.set("roaming", LinkUse::Paid, |_| {});
    let only = |name: &str| PaidLinks::Only(BTreeSet::from([name.into()]));
    bench.allow(None, only("cell"));
    bench.look();
    assert!(bench.granted("cell") > 0);
    assert_eq!(bench.granted("roaming"), 0);
    bench.allow(None, only("roaming"));
    assert_eq!(bench.granted("cell"), 0, "what was granted is revoked");
    assert!(bench.granted("roaming") > 0);
}

#[test]
fn a_link_counts_as_up_when_a_path_over_it_answers_and_not_when_it_has_an_address() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.look();
    let silent = LinkAnswers::Silent { since: Time::ZERO };
    let asked = LinkAnswers::Asked {
        since: Time::ZERO,
        until: Time::ZERO + ms(1_000),
    };
    assert_eq!(bench.answers("wlan0"), asked);
    bench.pass(ms(999));
    assert_eq!(bench.answers("wlan0"), asked);
    bench.pass(ms(2));
    assert_eq!(bench.answers("wlan0"), silent);
    let status = &bench.links.statuses(&bench.session)[0];
    assert_eq!(status.answers, silent);
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    assert!(bench.answers("wlan0").is_up());
}

#[test]
fn a_link_that_answered_is_silent_once_its_path_is_and_nothing_was_heard_for_half_a_second() {
    // Pairs: when the session finds the path silent after the last packet, and when the link counts
    // as silent.
    for (found_ms, verdict_ms) in [(90, 500), (499, 500), (500, 500), (1_200, 1_200)] {
        let mut bench = Bench::default();
        bench.set("wlan0", LinkUse::Free, |_| {});
        let socket = bench.sockets("wlan0")[0];
        bench.answer(socket);
        bench.pass(Span::from_secs(5));
        let heard = bench.now;
        bench.fall_silent(socket, ms(found_ms));
        let before_ms = verdict_ms.max(found_ms + 1) - 1 - found_ms;
        if before_ms > 0 {
            bench.pass(ms(before_ms));
            assert!(!bench.answers("wlan0").is_silent(), "{found_ms} ms");
        }
        bench.pass(ms(2));
        assert_eq!(
            bench.answers("wlan0"),
            LinkAnswers::Silent { since: heard },
            "{found_ms} ms"
        );
        assert!(bench.links.take_news().candidates);
        bench.answer(socket);
        assert!(bench.answers("wlan0").is_up());
        assert!(bench.links.take_news().candidates);
    }
}

#[test]
fn a_link_that_comes_or_goes_or_is_used_otherwise_is_news_to_its_flows() {
    let mut bench = Bench::default();
    bench.set("wwan0", LinkUse::Paid, |_| {});
    assert!(bench.links.take_news().candidates, "it came");
    bench.set("wwan0", LinkUse::Paid, |_| {});
    assert!(!bench.links.take_news().candidates, "nothing changed");
    bench.set("wwan0", LinkUse::Off, |_| {});
    assert!(bench.links.take_news().candidates, "its use changed");
    bench.set("wwan0", LinkUse::Off, |facts| facts.up = false);
    assert!(bench.links.take_news().candidates, "it went");
}

#[test]
fn a_link_that_is_heard_again_within_half_a_second_was_never_silent() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    bench.pass(Span::from_secs(5));
    bench.fall_silent(socket, ms(90));
    bench.pass(ms(300));
    bench.answer(socket);
    bench.pass(Span::from_secs(1));
    assert!(bench.answers("wlan0").is_up());
}

#[test]
fn a_flow_that_may_pay_is_granted_bytes_on_a_path_the_moment_it_comes_up() {
    let mut bench = Bench::default();
    bench.set("cell", LinkUse::Paid, |_| {});
    bench.allow(None, PaidLinks::All);
    let socket = bench.sockets("cell")[0];
    bench.session.paths.get_mut(&socket).unwrap().state = PathState::Active;
    assert_eq!(bench.granted("cell"), 0);
    bench.links.on_path_up(bench.now, &bench.session, socket);
    bench.carry_out();
    assert!(bench.granted("cell") > 0);
}

#[test]
fn the_silence_of_an_access_point_that_gives_only_an_address_outlasts_new_sockets() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.look();
    bench.pass(ms(1_100));
    for _ in 0..3 {
        // The handshake gave up the link.
        bench.session.paths.clear();
        bench.pass(Span::from_secs(9));
        assert_eq!(
            bench.answers("wlan0"),
            LinkAnswers::Silent { since: Time::ZERO }
        );
    }
    bench.take_away("wlan0");
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.look();
    let again = LinkAnswers::Asked {
        since: bench.now,
        until: bench.now + ms(1_000),
    };
    assert_eq!(bench.answers("wlan0"), again);
}

#[test]
fn the_links_of_a_session_that_is_over_are_not_asked() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    bench.session.over = true;
    bench.session.paths.clear();
    bench.pass(Span::from_secs(2));
    assert_eq!(bench.answers("wlan0"), LinkAnswers::Unasked);
}

#[test]
fn an_idle_device_wants_to_be_woken_for_nothing() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    bench.pass(ms(200));
    assert_eq!(bench.links.next_timeout(), None);
    bench.session.over = true;
    bench.session.paths.clear();
    bench.look();
    assert_eq!(
        bench.links.next_timeout(),
        None,
        "a session that is over is not healed"
    );
}

#[test]
fn a_new_session_has_its_paths_over_the_sockets_there_are() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let socket = bench.sockets("wlan0")[0];
    bench.answer(socket);
    bench.session.paths.clear();
    bench.links.on_session_began(bench.now);
    bench.carry_out();
    assert_eq!(
        bench.session.paths.keys().copied().collect::<Vec<_>>(),
        [socket]
    );
}

#[test]
fn whatever_happens_no_socket_is_lost_and_none_is_open_on_a_link_that_is_not_wanted() {
    for seed in 0..300 {
        let mut draw = Pcg32::seed_from_u64(seed);
        let mut bench = Bench::with(DeviceLinkSettings {
            acks_pay: draw.random_range(0..4) == 0,
            lend_rate: (draw.random_range(0..4) == 0).then_some(1_000),
            ..DeviceLinkSettings::default()
        });
        bench.slow_attach = draw.random_range(0..2) == 0;
        let names = ["wlan0", "cell", "eth0"];
        for name in names {
            bench.families.insert(name.into(), draw.random_range(0..3));
        }
        for _ in 0..200 {
            let name = names[draw.random_range(0..3)];
            match draw.random_range(0..18) {
                0..3 => {
                    let usage =
                        [LinkUse::Off, LinkUse::Free, LinkUse::Paid][draw.random_range(0..3)];
                    let (carrier, up, index) = (
                        draw.random_range(0..3) > 0,
                        draw.random_range(0..6) > 0,
                        draw.random_range(0..2),
                    );
                    bench.set(name, usage, |f| {
                        (f.carrier, f.up, f.index) = (carrier, up, index as u32);
                    });
                }
                3 => bench.take_away(name),
                4 => bench.allow(
                    (draw.random_range(0..2) == 0).then_some(50_000),
                    PaidLinks::All,
                ),
                5 => bench.links.forbid_paid(bench.now, &bench.session, FLOW),
                6 => bench.links.freeze(bench.now, name),
                7 => bench.links.unfreeze(bench.now, &bench.session, name),
                8 => bench.links.renew(bench.now, &bench.session),
                9 => bench.session.paths.clear(),
                10 => bench.links.on_session_began(bench.now),
                11 | 12 => {
                    let state = [PathState::Active, PathState::Silent][draw.random_range(0..2)];
                    let at = draw.random_range(0..=bench.session.paths.len());
                    if let Some(path) = bench.session.paths.values_mut().nth(at) {
                        path.state = state;
                    }
                }
                13 => bench.attach_one(),
                16 => {
                    if !bench.session.carried.remove(&FLOW) {
                        bench.session.carried.insert(FLOW);
                    }
                }
                15 => bench.links.on_node_changed(
                    bench.now,
                    &bench.session,
                    true,
                    crate::NODE_ANSWER_MAX,
                ),
                14 if !bench.streams.is_empty() => {
                    let failure =
                        (draw.random_range(0..2) == 0).then_some(StreamFailure::Unreachable);
                    bench.answer_stream(failure);
                }
                14 => {
                    let mut streams = bench.links.links.values().filter_map(|l| l.stream.socket);
                    if let Some(stream) = streams.next_back() {
                        bench
                            .links
                            .on_stream_closed(bench.now, &bench.session, stream);
                    }
                }
                _ => bench.pass(ms(draw.random_range(0..3_000))),
            }
            bench.carry_out();
        }
        while !bench.requests.is_empty() {
            bench.attach_one();
            bench.carry_out();
        }
        for name in names {
            bench.links.unfreeze(bench.now, &bench.session, name);
        }
        bench.pass(Span::from_secs(100));
        while !bench.requests.is_empty() {
            bench.attach_one();
            bench.carry_out();
        }
        while !bench.streams.is_empty() {
            bench.answer_stream(None);
        }
        let pays = bench.links.pays();
        for (socket, name) in &bench.open {
            let link = &bench.links.links[&**name];
            let known =
                link.has_socket(*socket) || link.other_family.iter().any(|s| s.socket == *socket);
            assert!(known, "seed {seed}: {socket:?} of {name} is leaked");
            assert!(link.is_wanted(pays), "seed {seed}: {name} is not wanted");
        }
        for (name, link) in &bench.links.links {
            let should = link.is_wanted(pays) && bench.families[&**name] > 0;
            let has = !link.sockets.is_empty();
            assert_eq!(has, should, "seed {seed}: {name}");
        }
    }
}

/// A free link on which nothing answers over UDP.
fn without_udp() -> Bench {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench
}

// R-LONG-2
#[test]
fn no_link_to_a_server_that_is_minutes_away_is_given_up_before_its_answer_can_come() {
    let round_trip = Span::from_secs(2_400);
    let mut bench = Bench::with(DeviceLinkSettings {
        round_trip,
        ..DeviceLinkSettings::default()
    });
    bench.set("wlan0", LinkUse::Free, |_| {});
    let sockets = bench.sockets("wlan0");
    bench.pass(round_trip);
    assert!(bench.streams.is_empty(), "no stream is tried");
    assert_eq!(bench.sockets("wlan0"), sockets);
    assert!(!bench.links.answers("wlan0").unwrap().is_silent());
    bench.pass(Span::from_secs(2));
    assert_eq!(bench.streams.len(), 1);
    assert!(bench.links.answers("wlan0").unwrap().is_silent());
}

#[test]
fn a_stream_is_opened_after_a_second_of_silence_and_the_first_that_answers_stays() {
    let mut bench = without_udp();
    bench.pass(ms(990));
    assert!(bench.streams.is_empty());
    bench.pass(ms(20));
    assert_eq!(
        (bench.streams.len(), bench.stream("wlan0")),
        (1, StreamStatus::Opening)
    );
    let stream = bench.answer_stream(None).unwrap();
    assert_eq!(bench.sockets("wlan0").len(), 2, "UDP is still asked");
    bench.answer(stream);
    assert_eq!(bench.sockets("wlan0"), [stream]);
    assert_eq!(bench.stream("wlan0"), StreamStatus::InUse);
    assert!(bench.answers("wlan0").is_up());
}

#[test]
fn a_stream_that_comes_after_udp_answered_is_closed() {
    let mut bench = without_udp();
    let udp = bench.sockets("wlan0")[0];
    bench.pass(ms(1_010));
    bench.answer(udp);
    bench.answer_stream(None);
    bench.pass(ms(100));
    assert_eq!(bench.sockets("wlan0"), [udp]);
    assert_eq!(bench.stream("wlan0"), StreamStatus::Unused);
}

#[test]
fn where_both_answer_udp_stays_and_the_peer_is_told_on_the_stream() {
    let mut bench = without_udp();
    let udp = bench.sockets("wlan0")[0];
    bench.pass(ms(1_010));
    let stream = bench.answer_stream(None).unwrap();
    for socket in [udp, stream] {
        bench.session.paths.get_mut(&socket).unwrap().state = PathState::Active;
    }
    bench.look();
    assert_eq!(bench.sockets("wlan0"), [udp]);
    let closes = |action: &LinkAction| *action == LinkAction::ClosePath { socket: stream };
    assert_eq!(bench.count(closes), 1);
}

#[test]
fn a_link_that_is_answered_over_udp_has_no_stream() {
    let mut bench = without_udp();
    let udp = bench.sockets("wlan0")[0];
    bench.pass(ms(300));
    bench.answer(udp);
    bench.pass(Span::from_secs(120));
    assert!(bench.streams.is_empty());
}

#[test]
fn a_network_known_to_block_udp_gets_a_stream_at_once_and_others_do_not() {
    let mut bench = without_udp();
    bench.pass(ms(1_010));
    let stream = bench.answer_stream(None).unwrap();
    bench.answer(stream);
    bench.take_away("wlan0");
    bench.pass(Span::from_secs(30));
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.look();
    assert_eq!(
        bench.streams.len(),
        1,
        "the same addresses: the same network"
    );
    bench.take_away("wlan0");
    bench.streams.clear();
    bench.set("wlan0", LinkUse::Free, |facts| {
        facts.addresses = vec!["203.0.113.99".parse().unwrap()];
    });
    bench.look();
    assert!(bench.streams.is_empty(), "another network");
    // A night later it is still known, and not for ever.
    for (hours, streams) in [(8, 1), (25, 0)] {
        bench.take_away("wlan0");
        bench.pass(Span::from_secs(hours * 3600));
        bench.streams.clear();
        bench.set("wlan0", LinkUse::Free, |_| {});
        bench.look();
        assert_eq!(bench.streams.len(), streams, "after {hours} hours");
    }
}

#[test]
fn a_stream_that_cannot_be_opened_is_tried_ever_more_rarely_and_its_failure_is_told() {
    let mut bench = without_udp();
    let mut tries = 0;
    for _ in 0..600 {
        bench.pass(Span::from_secs(1));
        if !bench.streams.is_empty() {
            // While a further try is under way, too.
            let failed = StreamStatus::Failed(StreamFailure::Foreign);
            assert!(tries == 0 || bench.stream("wlan0") == failed);
            tries += 1;
            bench.answer_stream(Some(StreamFailure::Foreign));
            assert_eq!(bench.stream("wlan0"), failed);
        }
    }
    assert!((10..18).contains(&tries), "{tries} in ten minutes");
}

#[test]
fn udp_is_tried_again_beside_a_stream_that_carries_and_taken_back_when_it_answers() {
    let mut bench = without_udp();
    bench.pass(ms(1_010));
    let stream = bench.answer_stream(None).unwrap();
    bench.answer(stream);
    // Without payload nothing is tried.
    bench.pass(Span::from_secs(300));
    assert_eq!(bench.sockets("wlan0"), [stream]);
    let carry = |bench: &mut Bench| {
        bench.session.paths.get_mut(&stream).unwrap().payload += 100_000;
        bench.pass(ms(200));
    };
    carry(&mut bench);
    carry(&mut bench);
    let [_, udp] = bench.sockets("wlan0")[..] else {
        panic!("UDP is tried beside the stream")
    };
    // Not answered: it goes, the stream stays, and the next trial is two minutes later.
    for _ in 0..25 {
        carry(&mut bench);
    }
    assert_eq!(bench.sockets("wlan0"), [stream]);
    for _ in 0..450 {
        carry(&mut bench);
    }
    assert_eq!(bench.sockets("wlan0"), [stream], "within 90 s");
    for _ in 0..150 {
        carry(&mut bench);
        if bench.sockets("wlan0").len() == 2 {
            break;
        }
    }
    let again = bench.sockets("wlan0")[1];
    assert_ne!(again, udp);
    bench.answer(again);
    assert_eq!(bench.sockets("wlan0"), [again]);
}

#[test]
fn a_stream_that_ended_is_replaced_at_once_and_one_that_is_silent_after_a_while() {
    let mut bench = without_udp();
    bench.pass(ms(1_010));
    let stream = bench.answer_stream(None).unwrap();
    bench.answer(stream);
    bench
        .links
        .on_stream_closed(bench.now, &bench.session, stream);
    bench.carry_out();
    bench.look();
    assert_eq!(bench.streams.len(), 1, "the network is known");
    let second = bench.answer_stream(None).unwrap();
    bench.answer(second);
    bench.fall_silent(second, ms(1_500));
    bench.pass(Span::from_secs(5));
    assert!(bench.streams.is_empty(), "TCP may still come through");
    bench.pass(Span::from_secs(5));
    assert_eq!(bench.streams.len(), 1);
    assert!(!bench.sockets("wlan0").contains(&second));
}

#[test]
fn a_stream_on_a_link_that_was_silent_for_long_has_its_time_to_answer() {
    let mut bench = without_udp();
    let refused = Some(StreamFailure::Unreachable);
    for _ in 0..30 {
        bench.pass(Span::from_secs(1));
        if !bench.streams.is_empty() {
            // A sign-in page that passes neither UDP nor TCP.
            bench.answer_stream(refused);
        }
    }
    while bench.streams.is_empty() {
        bench.pass(Span::from_secs(1));
    }
    let stream = bench.answer_stream(None).unwrap();
    bench.look();
    bench.pass(Span::from_secs(2));
    assert!(bench.sockets("wlan0").contains(&stream));
    bench.pass(Span::from_secs(7));
    assert!(!bench.sockets("wlan0").contains(&stream), "it is silent");
}

#[test]
fn udp_that_answers_and_then_carries_nothing_is_tried_ever_more_rarely() {
    let mut bench = without_udp();
    let mut streams = 0;
    let began = bench.now;
    // A network that throttles UDP to death: a trial is answered, and after it nothing is.
    while bench.now.since(began) < Span::from_secs(1_800) {
        if !bench.streams.is_empty() {
            streams += 1;
            let stream = bench.answer_stream(None).unwrap();
            bench.answer(stream);
        }
        let sockets = bench.sockets("wlan0");
        match sockets[..] {
            [stream, udp] if bench.stream("wlan0") == StreamStatus::InUse => {
                assert!(stream < udp);
                bench.answer(udp);
                bench.fall_silent(udp, ms(600));
            }
            _ => {
                for socket in sockets {
                    let path = bench.session.paths.get_mut(&socket);
                    path.unwrap().payload += 10_000;
                }
            }
        }
        bench.pass(ms(500));
    }
    assert!(
        (4..10).contains(&streams),
        "{streams} streams in half an hour"
    );
}

// R-NODE-2
#[test]
fn another_node_is_asked_beside_the_path_there_is_and_the_path_goes_when_it_has_answered() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let old = bench.sockets("wlan0")[0];
    bench.answer(old);
    bench.done.clear();
    bench
        .links
        .on_node_changed(bench.now, &bench.session, true, crate::NODE_ANSWER_MAX);
    bench.carry_out();
    let both = bench.sockets("wlan0");
    assert_eq!(both.len(), 2);
    let wakes = bench.count(|a| {
        matches!(
            a,
            LinkAction::WakeAt {
                half_duplex: true,
                ..
            }
        )
    });
    assert_eq!(wakes, 1);
    bench.pass(ms(500));
    assert_eq!(bench.sockets("wlan0").len(), 2, "it has not answered yet");
    let new = *both.iter().find(|socket| **socket != old).unwrap();
    // A handshake ends the paths before.
    bench.session.paths.remove(&old);
    bench.answer(new);
    assert_eq!(bench.sockets("wlan0"), [new]);
    assert!(bench.answers("wlan0").is_up());
}

#[test]
fn without_flows_the_path_to_the_node_before_is_closed_at_once() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let old = bench.sockets("wlan0")[0];
    bench.answer(old);
    bench
        .links
        .on_node_changed(bench.now, &bench.session, false, crate::NODE_ANSWER_MAX);
    bench.carry_out();
    let new = bench.sockets("wlan0");
    assert!(new.len() == 1 && new[0] != old, "{new:?}");
}

#[test]
fn a_node_that_does_not_answer_in_time_leaves_the_path_as_it_was() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let old = bench.sockets("wlan0")[0];
    bench.answer(old);
    bench
        .links
        .on_node_changed(bench.now, &bench.session, true, crate::NODE_ANSWER_MAX);
    bench.carry_out();
    bench.pass(crate::NODE_ANSWER_MAX + ms(1));
    assert_eq!(bench.sockets("wlan0"), [old]);
    assert!(bench.answers("wlan0").is_up());
}

#[test]
fn a_node_over_a_slow_network_is_asked_for_as_long_as_its_round_trips_take() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let old = bench.sockets("wlan0")[0];
    bench.answer(old);
    bench
        .links
        .on_node_changed(bench.now, &bench.session, true, ms(6_000));
    bench.carry_out();
    bench.pass(ms(5_990));
    assert_eq!(bench.sockets("wlan0").len(), 2, "it may still answer");
    bench.pass(ms(20));
    assert_eq!(bench.sockets("wlan0"), [old]);
}

// R-NODE-3
#[test]
fn a_node_that_is_silent_is_asked_no_more_once_another_is() {
    let mut bench = Bench::default();
    bench.set("wlan0", LinkUse::Free, |_| {});
    let old = bench.sockets("wlan0")[0];
    bench
        .links
        .on_node_changed(bench.now, &bench.session, true, crate::NODE_ANSWER_MAX);
    bench.carry_out();
    let new = bench.sockets("wlan0");
    assert!(new.len() == 1 && new[0] != old, "{new:?}");
    assert_eq!(bench.count(|a| matches!(a, LinkAction::WakeAt { .. })), 1);
}

// R-SERIAL-3
#[test]
fn a_serial_line_may_answer_slowly_and_gets_no_stream() {
    let mut bench = Bench::default();
    bench.set("serial:/dev/ttyS0", LinkUse::Free, |_| {});
    bench.pass(Span::from_secs(30));
    assert!(!bench.answers("serial:/dev/ttyS0").is_silent());
    bench.pass(Span::from_secs(30));
    assert!(bench.answers("serial:/dev/ttyS0").is_silent());
    assert_eq!(
        bench.count(|a| matches!(a, LinkAction::OpenStream { .. })),
        0
    );
}

#[test]
fn a_link_that_is_to_rest_is_left_once_another_answers_and_used_again_afterwards() {
    let mut bench = Bench::with(DeviceLinkSettings::default());
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.set("wwan0", LinkUse::Free, |_| {});
    let rest = |bench: &mut Bench, names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        bench.links.set_resting(bench.now, &bench.session, &names);
        bench.carry_out();
    };
    let cell = bench.sockets("wwan0")[0];
    bench.answer(cell);
    bench.pass(ms(100));
    rest(&mut bench, &["wwan0"]);
    assert_eq!(bench.sockets("wwan0"), [cell], "nothing else answers yet");
    let wifi = bench.sockets("wlan0")[0];
    bench.answer(wifi);
    bench.pass(ms(100));
    assert_eq!(bench.sockets("wwan0"), []);
    assert_eq!(bench.sockets("wlan0"), [wifi]);
    // Where all are to rest, the client waits, and nothing is sent.
    rest(&mut bench, &["wlan0", "wwan0"]);
    assert_eq!(bench.sockets("wlan0"), []);
    rest(&mut bench, &[]);
    assert_eq!(
        bench.sockets("wlan0").len() + bench.sockets("wwan0").len(),
        2
    );
}

#[test]
fn a_radio_that_sleeps_is_used_as_long_as_no_other_link_works() {
    const RADIO: &str = "serial:/dev/ttyS0";
    let mut bench = Bench::with(DeviceLinkSettings::default());
    bench.set("wlan0", LinkUse::Free, |_| {});
    bench.set(RADIO, LinkUse::Free, |facts| {
        (facts.serial_rate, facts.sleeps) = (Some(5_000), true);
    });
    let radio = bench.sockets(RADIO)[0];
    bench.answer(radio);
    bench.pass(ms(100));
    assert_eq!(bench.sockets(RADIO), [radio], "Wi-Fi has not answered yet");
    let wifi = bench.sockets("wlan0")[0];
    bench.answer(wifi);
    bench.pass(ms(100));
    assert_eq!(bench.sockets(RADIO), []);
    bench.pass(Span::from_secs(60));
    assert_eq!(bench.sockets(RADIO), []);
    // It wakes as soon as Wi-Fi is not heard, before Wi-Fi counts as silent.
    bench.fall_silent(wifi, ms(200));
    assert!(!bench.answers("wlan0").is_silent());
    let [radio] = bench.sockets(RADIO)[..] else {
        panic!("the radio sleeps on");
    };
    bench.answer(radio);
    bench.pass(Span::from_secs(30));
    assert_eq!(bench.sockets(RADIO), [radio]);
    let wifi = bench.sockets("wlan0")[0];
    bench.answer(wifi);
    bench.pass(ms(100));
    assert_eq!(bench.sockets(RADIO), []);
    // And when Wi-Fi is gone.
    bench.take_away("wlan0");
    assert_eq!(bench.sockets(RADIO).len(), 1);
}
