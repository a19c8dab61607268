//! The events of the links, in order of time.
//!
//! All link settings of a scenario (constants, `at` entries, repeats, handovers, traces, rebinding)
//! become one list of events, each with the link's complete condition after it, so that the
//! simulator and the lab only have to apply them. A run begins with one event per link at 0.
//!
//! ```text
//!             up = true          attach_s later
//!   Down ───────────────▶ Attaching ───────▶ Up, with a fresh address
//!     ▲───── up = false ──────┴────────────────┘
//! ```
//!
//! For links that are up at the beginning, `attach_s` has already passed.

use crate::file::{Class, Link, Scenario};
use crate::properties::{LinkProperties, Settings};
use cedos_lab_link::trace::{self, TraceRow};
use cedos_lab_link::{LinkCondition, LinkReach, Rate, Span, TcpPassage, Time, seeded};
use rand::Rng;

/// The random stream from which handovers are drawn; links use those from 0 on.
const HANDOVER_STREAM: u64 = 1 << 32;

/// An event of a link.
#[derive(Clone, Debug, PartialEq)]
pub struct ScenarioLinkEvent {
    /// The time of the event.
    pub at: Time,
    /// The link's number in the scenario.
    pub link: usize,
    /// The kind of the event.
    pub kind: EventKind,
    /// The link's condition after the event.
    pub condition: LinkCondition,
    /// The access point that the link is joined to or joining.
    pub access_point: Option<String>,
}

/// The kind of an event of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The link is lost, or down at the beginning.
    Down,
    /// The link begins to attach; not usable yet.
    Attaching,
    /// The link is attached and has an address, with its number among the link's addresses, from 0.
    Up {
        /// The number of this address among the link's addresses.
        address: u32,
    },
    /// The link stays attached and has another address instead of the one before.
    NewAddress {
        /// The number of this address among the link's addresses.
        address: u32,
    },
    /// The link's NAT drops all mappings.
    Rebind,
    /// The link's rate, delay, loss or another property changes.
    Changed,
}

/// The events of a scenario's links, in order of time.
#[derive(Clone, Debug)]
pub struct Timeline {
    events: std::vec::IntoIter<ScenarioLinkEvent>,
}

impl Timeline {
    /// The time of the next event.
    pub fn next_at(&self) -> Option<Time> {
        self.events.as_slice().first().map(|event| event.at)
    }
}

impl Iterator for Timeline {
    type Item = ScenarioLinkEvent;
    fn next(&mut self) -> Option<ScenarioLinkEvent> {
        self.events.next()
    }
}

impl Scenario {
    /// All events of the links until the end of the run.
    pub fn timeline(&self) -> Timeline {
        let end = Time::from_secs_f64(self.duration_s);
        let handovers = self.handovers(end);
        let mut events = Vec::new();
        for (number, link) in self.links.iter().enumerate() {
            let managed = self
                .handover
                .as_ref()
                .and_then(|h| h.links.iter().position(|n| *n == link.name));
            let up = managed.map_or(link.up, |turn| turn == 0);
            let mut steps = link.steps(end);
            let own = handovers.iter().filter(|(_, of, _)| *of == number);
            steps.extend(own.map(|(at, _, up)| (*at, Step::Up(*up))));
            // A stable sort: of events at the same time, the first in the file comes first.
            steps.sort_by_key(|(at, _)| *at);
            let mut history = History::new(number, link, up);
            for (at, step) in steps.into_iter().take_while(|(at, _)| *at <= end) {
                history.take(at, step);
            }
            history.attach_until(end);
            events.append(&mut history.events);
        }
        events.sort_by_key(|event| (event.at, event.link));
        Timeline {
            events: events.into_iter(),
        }
    }

    /// The condition of link `number` as the run begins.
    ///
    /// # Panics
    /// If there is no such link.
    pub fn condition_at_start(&self, number: usize) -> LinkCondition {
        let first = self.timeline().find(|event| event.link == number);
        first
            .expect("a timeline begins with an event for each link")
            .condition
    }

    /// The numbers of the free links.
    pub fn free_links(&self) -> impl Iterator<Item = usize> {
        let free = |(number, link): (usize, &Link)| (link.class == Class::Free).then_some(number);
        self.links.iter().enumerate().filter_map(free)
    }

    /// The generated handovers: when which link goes up or down.
    fn handovers(&self, end: Time) -> Vec<(Time, usize, bool)> {
        let Some(handover) = &self.handover else {
            return Vec::new();
        };
        let mut rng = seeded(self.seed, HANDOVER_STREAM);
        let mut draw = |[min, max]: [f64; 2]| min + (max - min) * rng.random::<f64>();
        let links: Vec<usize> = handover
            .links
            .iter()
            .filter_map(|name| self.link_number(name))
            .collect();
        let until = handover.until_s.map_or(end, Time::from_secs_f64).min(end);
        let mut out = Vec::new();
        let mut at = Time::from_secs_f64(handover.from_s);
        for turn in 0.. {
            at += Span::from_secs_f64(draw(handover.every_s));
            if at > until {
                break;
            }
            let (old, new) = (links[turn % links.len()], links[(turn + 1) % links.len()]);
            let attach = Span::from_secs_f64(self.links[new].attach_s);
            let overlap = draw([0.0, 1.0]) < handover.overlap_share;
            match (handover.overlap_s, handover.gap_s) {
                (Some(overlap_s), gap) if overlap || gap.is_none() => {
                    let both = Span::from_secs_f64(draw(overlap_s));
                    out.push((at, new, true));
                    at = at + attach + both;
                    out.push((at, old, false));
                }
                (_, gap_s) => {
                    let gap = Span::from_secs_f64(draw(gap_s.unwrap_or_default()));
                    out.push((at, old, false));
                    at += gap;
                    out.push((at, new, true));
                    at += attach;
                }
            }
        }
        out
    }
}

/// One setting of the scenario for a link.
#[derive(Clone, Debug)]
enum Step {
    Set(LinkProperties),
    /// The values of these properties before any `Set`.
    Restore(LinkProperties),
    Up(bool),
    Dead(bool),
    Stall(bool),
    Cut(bool),
    BlockUdp(bool),
    Portal(bool),
    OnlyHttpProxy(bool),
    Tcp(TcpPassage),
    NewAddress,
    Rebind,
    Join(String),
    Recorded(TraceRow),
}

impl Link {
    fn steps(&self, end: Time) -> Vec<(Time, Step)> {
        let mut steps = Vec::new();
        self.recorded_steps(end, &mut steps);
        for at in &self.at {
            let t = Time::from_secs_f64(at.t_s);
            let change = LinkChange {
                properties: at.properties(),
                up: at.up,
                dead: at.dead,
                stall: at.stall,
                cut: at.cut,
                udp_blocked: at.udp_blocked,
                portal: at.portal,
                only_http_proxy: at.only_http_proxy,
                tcp: at.tcp,
                new_address: at.new_address,
                rebind: at.rebind,
            };
            change.begin(t, &mut steps);
            if let Some(join) = &at.join {
                steps.push((t, Step::Join(join.clone())));
            }
        }
        for repeat in &self.repeat {
            let change = LinkChange {
                properties: repeat.properties(),
                up: repeat.up,
                dead: repeat.dead,
                stall: repeat.stall,
                cut: repeat.cut,
                udp_blocked: repeat.udp_blocked,
                portal: repeat.portal,
                only_http_proxy: repeat.only_http_proxy,
                tcp: repeat.tcp,
                new_address: repeat.new_address,
                rebind: repeat.rebind,
            };
            let until = repeat.until_s.map_or(end, Time::from_secs_f64).min(end);
            for t in every(
                repeat.first_s.unwrap_or(repeat.every_s),
                repeat.every_s,
                until,
            ) {
                change.begin(t, &mut steps);
                if let Some(for_s) = repeat.for_s {
                    change.end(t + Span::from_secs_f64(for_s), &mut steps);
                }
            }
        }
        if let Some(rebind_s) = self.nat_rebind_s {
            steps.extend(every(rebind_s, rebind_s, end).map(|t| (t, Step::Rebind)));
        }
        steps
    }

    fn recorded_steps(&self, end: Time, steps: &mut Vec<(Time, Step)>) {
        let start = Time::from_secs_f64(self.trace_start_s).since(Time::ZERO);
        let rows = &self.recorded.rows;
        let length = trace::length(rows);
        let mut round = Span::ZERO;
        loop {
            let moved = |at: Time| {
                Time::from_nanos((at + round).as_nanos().saturating_sub(start.as_nanos()))
            };
            let mut up_before = None;
            for (index, row) in rows.iter().enumerate() {
                // Of the rows before the start only the last one counts.
                let over = rows
                    .get(index + 1)
                    .is_some_and(|next| next.at + round <= Time::ZERO + start);
                if over {
                    continue;
                }
                // `up` takes effect when it changes, so that the events file may contain further
                // events in between.
                let mut row = *row;
                if row.up == up_before {
                    row.up = None;
                } else {
                    up_before = row.up;
                }
                steps.push((moved(row.at), Step::Recorded(row)));
            }
            for (at, ap) in &self.recorded.events {
                if *at + round >= Time::ZERO + start {
                    let step = ap.clone().map_or(Step::Up(false), Step::Join);
                    steps.push((moved(*at), step));
                }
            }
            round = round + length;
            if !self.trace_repeat || length == Span::ZERO || Time::ZERO + round > end + start {
                return;
            }
        }
    }
}

/// The times `first`, `first + every`, … up to `until`, in seconds, without accumulating errors.
fn every(first_s: f64, every_s: f64, until: Time) -> impl Iterator<Item = Time> {
    (0u64..)
        .map(move |n| Time::from_secs_f64(first_s + n as f64 * every_s))
        .take_while(move |t| *t <= until)
}

struct LinkChange {
    properties: LinkProperties,
    up: Option<bool>,
    dead: Option<bool>,
    stall: Option<bool>,
    cut: Option<bool>,
    udp_blocked: Option<bool>,
    portal: Option<bool>,
    only_http_proxy: Option<bool>,
    tcp: Option<TcpPassage>,
    new_address: bool,
    rebind: bool,
}

impl LinkChange {
    fn begin(&self, t: Time, steps: &mut Vec<(Time, Step)>) {
        if self.properties != LinkProperties::default() {
            steps.push((t, Step::Set(self.properties.clone())));
        }
        steps.extend(self.dead.map(|dead| (t, Step::Dead(dead))));
        steps.extend(self.stall.map(|stall| (t, Step::Stall(stall))));
        steps.extend(self.cut.map(|cut| (t, Step::Cut(cut))));
        steps.extend(self.udp_blocked.map(|blocked| (t, Step::BlockUdp(blocked))));
        steps.extend(self.portal.map(|portal| (t, Step::Portal(portal))));
        steps.extend(
            self.only_http_proxy
                .map(|only| (t, Step::OnlyHttpProxy(only))),
        );
        steps.extend(self.tcp.map(|passage| (t, Step::Tcp(passage))));
        steps.extend(self.up.map(|up| (t, Step::Up(up))));
        steps.extend(self.new_address.then_some((t, Step::NewAddress)));
        steps.extend(self.rebind.then_some((t, Step::Rebind)));
    }

    fn end(&self, t: Time, steps: &mut Vec<(Time, Step)>) {
        if self.properties != LinkProperties::default() {
            steps.push((t, Step::Restore(self.properties.clone())));
        }
        steps.extend(self.dead.map(|dead| (t, Step::Dead(!dead))));
        steps.extend(self.stall.map(|stall| (t, Step::Stall(!stall))));
        steps.extend(self.cut.map(|cut| (t, Step::Cut(!cut))));
        steps.extend(
            self.udp_blocked
                .map(|blocked| (t, Step::BlockUdp(!blocked))),
        );
        steps.extend(self.portal.map(|portal| (t, Step::Portal(!portal))));
        steps.extend(
            self.only_http_proxy
                .map(|only| (t, Step::OnlyHttpProxy(!only))),
        );
        steps.extend(self.tcp.map(|_| (t, Step::Tcp(TcpPassage::Pass))));
        steps.extend(self.up.map(|up| (t, Step::Up(!up))));
    }
}

/// The state of a link while its events are generated.
struct History<'a> {
    link: &'a Link,
    number: usize,
    settings: Settings,
    dead: bool,
    stalled: bool,
    cut: bool,
    udp_blocked: bool,
    portal: bool,
    only_http_proxy: bool,
    tcp: TcpPassage,
    up: bool,
    attached_at: Option<Time>,
    addresses: u32,
    access_point: Option<String>,
    events: Vec<ScenarioLinkEvent>,
}

impl<'a> History<'a> {
    fn new(number: usize, link: &'a Link, up: bool) -> History<'a> {
        let mut history = History {
            link,
            number,
            settings: link.settings(),
            dead: link.dead
                || link
                    .access_point(link.join.as_deref())
                    .is_some_and(|ap| ap.dead),
            stalled: false,
            cut: false,
            udp_blocked: false,
            portal: false,
            only_http_proxy: false,
            tcp: TcpPassage::Pass,
            up,
            attached_at: None,
            addresses: u32::from(up),
            access_point: link.join.clone(),
            events: Vec::new(),
        };
        let kind = if up {
            EventKind::Up { address: 0 }
        } else {
            EventKind::Down
        };
        history.emit(Time::ZERO, kind);
        history
    }

    fn take(&mut self, at: Time, step: Step) {
        self.attach_until(at);
        let before = self.condition();
        match step {
            Step::Set(properties) => self.settings.apply(&properties),
            Step::Restore(properties) => {
                let base = self.link.settings_at(self.access_point.as_deref());
                self.settings.restore(&properties, &base);
            }
            Step::Dead(dead) => self.dead = dead,
            Step::Stall(stalled) => self.stalled = stalled,
            Step::Cut(cut) => self.cut = cut,
            Step::BlockUdp(blocked) => self.udp_blocked = blocked,
            Step::Portal(portal) => self.portal = portal,
            Step::OnlyHttpProxy(only) => self.only_http_proxy = only,
            Step::Tcp(passage) => self.tcp = passage,
            Step::Recorded(row) => {
                self.record(&row);
                if let Some(up) = row.up {
                    self.turn(at, up);
                }
            }
            Step::Up(up) => self.turn(at, up),
            Step::NewAddress if self.up => {
                let address = self.address();
                self.emit(at, EventKind::NewAddress { address });
            }
            Step::NewAddress => {}
            Step::Rebind => self.emit(at, EventKind::Rebind),
            Step::Join(name) => {
                self.turn(at, false);
                self.settings = self.link.settings_at(Some(&name));
                self.dead = self
                    .link
                    .access_point(Some(&name))
                    .is_some_and(|ap| ap.dead);
                self.access_point = Some(name);
                self.turn(at, true);
            }
        }
        let told = self
            .events
            .last()
            .is_some_and(|last| last.condition == self.condition());
        if self.condition() != before && !told {
            self.emit(at, EventKind::Changed);
        }
    }

    /// Adds the event if the link got its address by `now`.
    fn attach_until(&mut self, now: Time) {
        if let Some(at) = self.attached_at.filter(|at| *at <= now) {
            self.attached_at = None;
            self.up = true;
            let address = self.address();
            self.emit(at, EventKind::Up { address });
        }
    }

    fn turn(&mut self, at: Time, up: bool) {
        let on_the_way = self.up || self.attached_at.is_some();
        if up && !on_the_way {
            self.attached_at = Some(at + Span::from_secs_f64(self.link.attach_s));
            self.emit(at, EventKind::Attaching);
            self.attach_until(at);
        } else if !up && on_the_way {
            self.up = false;
            self.attached_at = None;
            self.emit(at, EventKind::Down);
        }
    }

    fn record(&mut self, row: &TraceRow) {
        let base = self.link.settings_at(self.access_point.as_deref());
        self.settings.down = row.down_bps.map_or(base.down, Rate::BitsPerSecond);
        self.settings.upward = row.up_bps.map_or(base.upward, Rate::BitsPerSecond);
        let half_rtt = row.rtt.map(|rtt| Span::from_nanos(rtt.as_nanos() / 2));
        self.settings.delay_down = half_rtt.unwrap_or(base.delay_down);
        self.settings.delay_up = half_rtt.unwrap_or(base.delay_up);
        self.settings.loss_down = row.loss.unwrap_or(base.loss_down);
        self.settings.loss_up = row.loss.unwrap_or(base.loss_up);
    }

    fn address(&mut self) -> u32 {
        self.addresses += 1;
        self.addresses - 1
    }

    fn condition(&self) -> LinkCondition {
        let (down, upward) = self.settings.profiles();
        LinkCondition {
            up: self.up,
            dead: self.dead,
            stalled: self.stalled,
            reach: match self {
                _ if self.cut => LinkReach::FirstHop,
                _ if self.portal => LinkReach::Portal,
                _ if self.only_http_proxy => LinkReach::HttpProxy,
                _ if self.udp_blocked => LinkReach::NoUdp,
                _ => LinkReach::All,
            },
            tcp: self.tcp,
            down,
            upward,
        }
    }

    fn emit(&mut self, at: Time, kind: EventKind) {
        let condition = self.condition();
        let access_point = self.access_point.clone();
        self.events.push(ScenarioLinkEvent {
            at,
            link: self.number,
            kind,
            condition,
            access_point,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::ScenarioFault;

    fn scenario(text: &str) -> Scenario {
        let text = format!("duration_s = 60\n{text}");
        Scenario::parse("test", &text, &mut |name| match name {
            "t.csv" => Ok(format!(
                "{}\n0,wifi,1,10,2,30,0.1\n1,wifi,1,,,,\n2,wifi,0,,,,\n3,wifi,1,5,,,\n",
                trace::CSV_HEADER
            )),
            "e.csv" => Ok("t_s,event,ap\n4,attach,a\n6,attach,b\n8,detach,b\n".to_owned()),
            other => Err(ScenarioFault {
                file: other.to_owned(),
                fault: "gone".to_owned(),
            }),
        })
        .unwrap()
    }

    fn story(text: &str) -> Vec<(f64, usize, EventKind)> {
        scenario(text)
            .timeline()
            .map(|e| (e.at.as_secs_f64(), e.link, e.kind))
            .collect()
    }

    use EventKind::{Attaching, Changed, Down, NewAddress, Rebind, Up};

    #[test]
    fn a_link_takes_its_time_to_come_up_and_has_a_fresh_address() {
        let told = story(
            "[[link]]\nname = \"w\"\nattach_s = 1.5\n[[link.at]]\nt_s = 5\nup = false\n\
             [[link.at]]\nt_s = 10\nup = true\n[[link.at]]\nt_s = 20\nnew_address = true\n",
        );
        assert_eq!(
            told,
            [
                (0.0, 0, Up { address: 0 }),
                (5.0, 0, Down),
                (10.0, 0, Attaching),
                (11.5, 0, Up { address: 1 }),
                (20.0, 0, NewAddress { address: 2 }),
            ]
        );
    }

    #[test]
    fn a_link_lost_while_attaching_never_comes_up() {
        let told = story(
            "[[link]]\nname = \"w\"\nup = false\nattach_s = 3\n[[link.at]]\nt_s = 5\nup = true\n\
             [[link.at]]\nt_s = 6\nup = false\n",
        );
        assert_eq!(told, [(0.0, 0, Down), (5.0, 0, Attaching), (6.0, 0, Down)]);
    }

    #[test]
    fn properties_last_until_they_are_changed_again() {
        let scenario = scenario(
            "[[link]]\nname = \"w\"\nrtt_ms = 40\n[[link.at]]\nt_s = 5\ndown_mbps = 1\n\
             [[link.at]]\nt_s = 6\ndead = true\n",
        );
        let events: Vec<_> = scenario.timeline().collect();
        assert_eq!(
            events[1].condition.down.rate,
            Rate::BitsPerSecond(1_000_000)
        );
        assert_eq!(
            events[2].condition.down.rate,
            Rate::BitsPerSecond(1_000_000)
        );
        assert_eq!(events[2].condition.down.delay, Span::from_millis(20));
        assert!(events[2].condition.dead);
    }

    #[test]
    fn a_repeat_comes_again_and_takes_back_what_it_changed() {
        let told = story(
            "[[link]]\nname = \"w\"\n[[link.repeat]]\nevery_s = 20\nfor_s = 2\nup = false\nuntil_s = 45\n\
             [[link]]\nname = \"x\"\n[[link.repeat]]\nevery_s = 30\nfor_s = 1\nrtt_ms = 300\nuntil_s = 30\n",
        );
        assert_eq!(
            told,
            [
                (0.0, 0, Up { address: 0 }),
                (0.0, 1, Up { address: 0 }),
                (20.0, 0, Down),
                (22.0, 0, Attaching),
                (22.0, 0, Up { address: 1 }),
                (30.0, 1, Changed),
                (31.0, 1, Changed),
                (40.0, 0, Down),
                (42.0, 0, Attaching),
                (42.0, 0, Up { address: 2 }),
            ]
        );
    }

    #[test]
    fn what_passes_the_first_hop_is_the_least_that_any_change_leaves() {
        let scenario = scenario(
            "[[link]]\nname = \"w\"\n[[link.at]]\nt_s = 1\nudp_blocked = true\n[[link.at]]\nt_s = 9\n\
             udp_blocked = false\n[[link.at]]\nt_s = 8\nonly_http_proxy = true\n[[link.at]]\nt_s = 11\n\
             only_http_proxy = false\n[[link.repeat]]\nevery_s = 100\nfirst_s = 2\nfor_s = 4\nportal = true\n\
             [[link.at]]\nt_s = 3\ncut = true\n[[link.at]]\nt_s = 4\ncut = false\n",
        );
        assert!(scenario.has_http_proxy());
        let reach = scenario
            .timeline()
            .map(|e| (e.at.as_secs_f64(), e.condition.reach));
        let reach: Vec<_> = reach.take_while(|(at, _)| *at < 50.0).collect();
        assert_eq!(
            reach,
            [
                (0.0, LinkReach::All),
                (1.0, LinkReach::NoUdp),
                (2.0, LinkReach::Portal),
                (3.0, LinkReach::FirstHop),
                (4.0, LinkReach::Portal),
                (6.0, LinkReach::NoUdp),
                (8.0, LinkReach::HttpProxy),
                (11.0, LinkReach::All),
            ]
        );
    }

    #[test]
    fn a_rebinding_nat_rebinds_in_its_rhythm() {
        let told = story("[[link]]\nname = \"w\"\nnat = \"rebinding\"\nnat_rebind_s = 25\n");
        assert_eq!(told[1..], [(25.0, 0, Rebind), (50.0, 0, Rebind)]);
    }

    #[test]
    fn joining_another_access_point_is_a_break_with_other_properties() {
        let scenario = scenario(
            "[[link]]\nname = \"w\"\nattach_s = 1\njoin = \"home\"\n[[link.access_point]]\nname = \"home\"\n\
             [[link.access_point]]\nname = \"cafe\"\ndead = true\ndown_mbps = 2\n[[link.at]]\nt_s = 5\njoin = \"cafe\"\n",
        );
        let events: Vec<_> = scenario.timeline().collect();
        let kinds: Vec<_> = events.iter().map(|e| e.kind).collect();
        assert_eq!(
            kinds,
            [Up { address: 0 }, Down, Attaching, Up { address: 1 }]
        );
        assert_eq!(events[3].access_point.as_deref(), Some("cafe"));
        assert!(events[3].condition.dead);
        assert_eq!(events[3].condition.down.rate, Rate::from_mbps(2.0));
    }

    #[test]
    fn a_trace_sets_what_it_knows_and_leaves_the_rest_to_the_link() {
        let scenario = scenario("[[link]]\nname = \"w\"\ndown_mbps = 7\ntrace = \"t.csv\"\n");
        let events: Vec<_> = scenario.timeline().collect();
        let told: Vec<_> = events
            .iter()
            .map(|e| {
                (
                    e.at.as_secs_f64(),
                    e.kind,
                    e.condition.down.rate.bits_per_second().unwrap(),
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                (0.0, Up { address: 0 }, 7_000_000),
                (0.0, Changed, 10_000_000),
                (1.0, Changed, 7_000_000),
                (2.0, Down, 7_000_000),
                (3.0, Attaching, 5_000_000),
                (3.0, Up { address: 1 }, 5_000_000),
            ]
        );
        assert_eq!(events[1].condition.down.delay, Span::from_millis(15));
        assert_eq!(events[1].condition.upward.loss.random, 0.1);
    }

    #[test]
    fn a_trace_may_begin_in_its_middle_and_come_around_again() {
        let told = story(
            "[[link]]\nname = \"w\"\ntrace = \"t.csv\"\ntrace_start_s = 2.5\ntrace_repeat = true\n",
        );
        assert_eq!(
            told[..6],
            [
                (0.0, 0, Up { address: 0 }),
                (0.0, 0, Down),
                (0.5, 0, Attaching),
                (0.5, 0, Up { address: 1 }),
                (1.5, 0, Changed),
                (2.5, 0, Changed),
            ]
        );
        assert_eq!(told[6], (3.5, 0, Down));
    }

    #[test]
    fn the_events_beside_a_trace_say_which_access_point() {
        let scenario = scenario("[[link]]\nname = \"w\"\nup = false\ntrace_events = \"e.csv\"\n");
        let told: Vec<_> = scenario
            .timeline()
            .map(|e| (e.kind, e.access_point))
            .collect();
        let ap = |name: &str| Some(name.to_owned());
        assert_eq!(
            told,
            [
                (Down, None),
                (Attaching, ap("a")),
                (Up { address: 0 }, ap("a")),
                (Down, ap("a")),
                (Attaching, ap("b")),
                (Up { address: 1 }, ap("b")),
                (Down, ap("b")),
            ]
        );
    }

    const HANDOVERS: &str = "seed = 3\n[[link]]\nname = \"a\"\nattach_s = 0.5\n[[link]]\nname = \"b\"\n\
        [handover]\nlinks = [\"a\", \"b\"]\nevery_s = [5, 10]\n";

    #[test]
    fn overlapping_handovers_leave_no_moment_without_a_link() {
        let mut up = [false; 2];
        let mut first = true;
        for event in scenario(&format!("{HANDOVERS}overlap_s = [1, 2]\n")).timeline() {
            up[event.link] = event.condition.up;
            first &= event.at == Time::ZERO;
            assert!(first || up != [false; 2], "{event:?}");
        }
    }

    #[test]
    fn handovers_with_gaps_never_have_two_links_and_follow_the_seed() {
        let text = format!("{HANDOVERS}gap_s = [0.5, 2]\n");
        let mut up = [false; 2];
        for event in scenario(&text).timeline() {
            up[event.link] = event.condition.up;
            assert_ne!(up, [true; 2], "{event:?}");
        }
        assert_eq!(story(&text), story(&text));
        assert_ne!(story(&text), story(&text.replace("seed = 3", "seed = 4")));
        assert!(story(&text).len() > 12);
    }
}
