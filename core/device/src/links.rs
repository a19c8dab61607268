//! All links of a device: inputs, the queue of actions, and the next timeout.
//!
//! Its parts: who may pay (`spending.rs`), which of several sockets is kept (`address_race.rs`,
//! `stream_race.rs`), and links that are suspected or frozen (`first_hop.rs`).

mod address_race;
mod first_hop;
mod spending;
mod stream_race;

pub use spending::PAID_PATH_KEPT;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use d2tp_session::{FlowId, LinkId, PathState, PathStats, PathStatus};
use d2tp_time::{Span, Time};

use crate::action::LinkAction;
use crate::facts::{AttachedSocket, LinkFacts, LinkUse, SessionPaths};
use crate::grants::PayingFlow;
use crate::health::LinkAnswers;
use crate::meter::TICK;
use crate::renewal::{SLEEP_MIN, SocketRenewal};
use crate::stream::{BlockedNetworks, StreamStatus};
use crate::tracked::TrackedLink;

/// The most sockets whose link can be named. Closed ones count, because events about them may still
/// arrive.
const NAMES_MAX: usize = 4_096; // a guess: more than an hour of one renewal a second

/// Settings of a device's links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceLinkSettings {
    /// Whether ACKs of a half-duplex link may use metered links, whatever flows may use.
    pub acks_pay: bool,
    /// The rate in bytes per second at which metered links carry retransmissions for free links, if
    /// no flow may pay. `None`: they carry none.
    pub lend_rate: Option<u64>,
    /// How long the server takes to answer, where that is known to be longer than on ordinary networks; otherwise zero. No
    /// link counts as silent, and nothing else is tried, before that is over.
    pub round_trip: Span,
}

/// Changes since [`DeviceLinks::take_news`] was last called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkNews {
    /// Whether payload moved.
    pub traffic: bool,
    /// Whether a link came, went, or changed its use, or began to answer, to be asked, or to be silent: what flows
    /// may use must be decided again.
    pub candidates: bool,
    /// Whether the last flow that paid has ended: [`DeviceLinks::next_timeout`] is earlier than before.
    pub unpaid: bool,
}

/// A link as the device uses it now.
#[derive(Clone, Debug, PartialEq)]
pub struct TrackedStatus {
    /// The device's name of the link.
    pub name: Arc<str>,
    /// What the link may be used for.
    pub usage: LinkUse,
    /// Payload bytes received and sent over the link since the device started.
    pub payload: (u64, u64),
    /// How long payload was arriving, in steps of 0.1 s.
    pub busy: Span,
    /// Recent bytes per second, received and sent together; `None` before any were.
    pub rate: Option<u64>,
    /// Whether packets sent over the link are answered.
    pub answers: LinkAnswers,
    /// Whether the link's packets are carried in a TCP connection.
    pub stream: StreamStatus,
    /// Statistics of the link's first path.
    pub path: Option<PathStats>,
}

/// The links of a device that has a session with one server.
#[derive(Debug, Default)]
pub struct DeviceLinks {
    settings: DeviceLinkSettings,
    links: BTreeMap<Arc<str>, TrackedLink>,
    /// The names of the links of all sockets, closed ones included.
    names: BTreeMap<LinkId, Arc<str>>,
    /// Flows that may pay.
    payers: BTreeMap<FlowId, PayingFlow>,
    /// What flows had spent that paid until they ended, the oldest first.
    ended_payers: VecDeque<(FlowId, u64)>,
    /// Until when metered paths are kept, since the last flow that paid has ended.
    kept_until: Option<Time>,
    /// The links that are to rest.
    resting: BTreeSet<String>,
    renewal: SocketRenewal,
    /// Whether payload moved at the last update.
    is_moving: bool,
    looked_at: Time,
    /// Whether the session was over at the last update.
    is_over: bool,
    /// Changes since [`DeviceLinks::take_news`].
    news: LinkNews,
    /// Networks on which UDP is known to be blocked.
    blocked: BlockedNetworks,
    actions: VecDeque<LinkAction>,
    last_ticket: u64,
}

impl DeviceLinks {
    /// A device without links.
    pub fn new(settings: DeviceLinkSettings) -> DeviceLinks {
        DeviceLinks {
            settings,
            ..DeviceLinks::default()
        }
    }

    /// The next action. Carry out all actions in this order before the next input.
    pub fn poll_action(&mut self) -> Option<LinkAction> {
        self.actions.pop_front()
    }

    // ---- inputs ----

    /// Sets the machine's current links, each with what it may be used for.
    pub fn on_links(
        &mut self,
        now: Time,
        session: &dyn SessionPaths,
        present: &[(LinkFacts, LinkUse)],
    ) {
        // Count what the paths carried before they are closed.
        self.observe(now, session);
        for link in self.links.values_mut() {
            let found = present.iter().find(|(f, _)| f.name == link.facts.name);
            let same = found.is_some_and(|(f, _)| {
                f.index == link.facts.index
                    && link.facts.source_addresses().eq(f.source_addresses())
                    && f.is_usable()
            });
            let holds = found.is_some_and(|(f, _)| link.is_same_attachment(now, f));
            if !same && !holds {
                drop_all(&mut self.actions, link.take_sockets());
                // The link is gone, so its closing paths cannot send a last packet.
                drop_all(&mut self.actions, link.closing.drain(..));
                link.tries = 0;
                link.answers = LinkAnswers::Unasked;
                link.stream.forget();
            }
            let before = (link.facts.is_usable(), link.usage);
            match found {
                Some((facts, usage)) => (link.facts, link.usage) = (facts.clone(), *usage),
                None => {
                    link.facts.up = false;
                    link.facts.addresses.clear();
                }
            }
            self.news.candidates |= before != (link.facts.is_usable(), link.usage);
        }
        for (facts, usage) in present {
            self.links.entry(facts.name.clone()).or_insert_with(|| {
                self.news.candidates = true;
                TrackedLink::new(now, facts.clone(), *usage, self.settings.round_trip)
            });
        }
        self.apply_freezes(now);
        self.apply_rest();
        self.update_paths(now);
    }

    /// Sets the links that rest to save energy; the others are used as before. A link that is in use is
    /// left once one that does not rest answers, so that data always moves, or at once if all rest.
    pub fn set_resting(
        &mut self,
        now: Time,
        session: &dyn SessionPaths,
        resting: &BTreeSet<String>,
    ) {
        if self.resting == *resting {
            return;
        }
        self.resting.clone_from(resting);
        self.observe(now, session);
        self.apply_rest();
        self.update_paths(now);
    }

    /// Changes what a link may be used for.
    pub fn on_use(&mut self, now: Time, session: &dyn SessionPaths, name: &str, usage: LinkUse) {
        if let Some(link) = self.links.get_mut(name) {
            self.news.candidates |= std::mem::replace(&mut link.usage, usage) != usage;
        }
        self.observe(now, session);
        self.update_paths(now);
    }

    /// Answers [`LinkAction::Attach`] with the sockets that were created, the best one first.
    pub fn on_socket(&mut self, now: Time, name: &str, ticket: u64, mut made: Vec<AttachedSocket>) {
        for made in &made {
            self.name_socket(made.socket, name);
        }
        let link = self.links.get_mut(name);
        let Some(link) = link.filter(|link| link.attaching == Some(ticket)) else {
            // The link changed while the sockets were created.
            drop_all(&mut self.actions, made.into_iter().map(|made| made.socket));
            return;
        };
        link.attaching = None;
        if std::mem::take(&mut link.changes_node) {
            let Some(first) = made.first().copied() else {
                return;
            };
            link.opened_at = now;
            link.former_node = link.socket_ids().collect();
            link.sockets.push(first);
            link.other_family = made.split_off(1);
            self.actions.push_back(wake_at(link, first));
            return;
        }
        link.opened_at = now;
        link.opened_gated = link.is_gated();
        link.other_family = made;
        if !link.other_family.is_empty() {
            let first = link.other_family.remove(0);
            link.sockets.push(first);
            self.actions.push_back(open_path(link, first));
        }
        // Bytes in flight on the old paths are sent again on the new one at once.
        let old = std::mem::take(&mut link.retiring);
        drop_all(&mut self.actions, old);
    }

    /// Replaces the previous session by a new one, and opens its paths over the existing sockets.
    pub fn on_session_began(&mut self, now: Time) {
        self.is_over = false;
        let pays = self.pays();
        self.kept_until = None;
        for link in self.links.values_mut() {
            if !link.is_wanted(pays) {
                // A metered path of the session before was kept for a while.
                drop_all(&mut self.actions, link.take_sockets());
            }
            link.pathless = true;
            link.last_heal_at = now;
            link.meter.forget_sockets();
            link.opened_gated = link.is_gated();
            for socket in &link.sockets {
                self.actions.push_back(open_path(link, *socket));
            }
        }
    }

    /// Handles the machine's wake-up after a sleep of this length.
    pub fn on_slept(&mut self, now: Time, session: &dyn SessionPaths, slept: Span) {
        if slept >= SLEEP_MIN {
            self.renew(now, session);
        }
    }

    /// Replaces the sockets of all links, now or as soon as allowed, because the networks changed.
    pub fn renew(&mut self, now: Time, session: &dyn SessionPaths) {
        self.renewal.request();
        self.renew_if_due(now, session);
    }

    /// Handles a path that came up. Paying flows get grants on it, and the first hop of its link is
    /// probed once, so that a later silence of that hop has a meaning.
    pub fn on_path_up(&mut self, now: Time, session: &dyn SessionPaths, socket: LinkId) {
        self.observe(now, session);
        if self.apply_rest() {
            self.update_paths(now);
        }
        self.update_grants(session);
        self.ask_hop_of(now, socket, false);
    }

    /// Handles a path that fell silent. Its link counts as silent after the time that
    /// [`LinkAnswers`] describes.
    pub fn on_path_silent(&mut self, now: Time, session: &dyn SessionPaths) {
        self.observe(now, session);
        // A radio that sleeps wakes at once: its path takes a round trip to open.
        if self.apply_rest() {
            self.update_paths(now);
        }
    }

    /// Handles timers and the current state of the session's paths: renewals, new sockets for links
    /// that do not answer, the other address family, grants, metered paths that nothing pays for any more.
    pub fn on_time(&mut self, now: Time, session: &dyn SessionPaths) {
        self.renew_if_due(now, session);
        self.drop_lost_carriers(now);
        self.observe(now, session);
        let is_unpaid = self.kept_until.is_some();
        if self.apply_rest() || is_unpaid {
            self.update_paths(now);
        }
        self.read_radios();
        self.heal(now, session);
        self.try_other_family(now, session);
        self.race_streams(now, session);
        self.update_grants(session);
    }

    /// When to call [`DeviceLinks::on_time`] if nothing happens before.
    pub fn next_timeout(&self) -> Option<Time> {
        if self.is_moving {
            return Some(self.looked_at + TICK);
        }
        let pays = self.pays();
        let used = |link: &&TrackedLink| {
            link.is_wanted(pays) && !link.health.keeps_sockets() && !self.is_over
        };
        let silences = self.links.values().filter_map(|l| l.answers.silent_at());
        let tries = self.links.values().filter(used);
        tries
            .filter_map(TrackedLink::next_try)
            .chain(silences)
            .chain(
                self.links
                    .values()
                    .filter(used)
                    .filter_map(TrackedLink::stream_at),
            )
            .chain(self.links.values().filter_map(|l| l.health.given_up_at()))
            .chain(self.renewal.next_at())
            .chain(self.kept_until)
            .min()
    }

    /// Updates byte counts, rates, spending and answers, and which flows may still pay. Queues no action.
    pub fn observe(&mut self, now: Time, session: &dyn SessionPaths) {
        self.is_over = session.is_over();
        let paths = session.path_stats();
        let was_moving = self.is_moving;
        self.is_moving = false;
        self.looked_at = now;
        for link in self.links.values_mut() {
            let sockets: Vec<LinkId> = link.socket_ids().collect();
            let received = link.meter.payload.0;
            let mut lent = false;
            let mut round_trip = Span::ZERO;
            for socket in &sockets {
                let mine = paths.iter().filter(|p| p.addresses.link == *socket);
                // The traffic on a lent link says nothing about its rate.
                lent |= mine.clone().any(|p| p.status == PathStatus::Standby);
                let longest = mine.clone().map(|p| p.rtt).max();
                round_trip = round_trip.max(longest.unwrap_or(Span::ZERO));
                let sum = mine
                    .map(|p| (p.payload_in, p.payload_out))
                    .reduce(|a, b| (a.0 + b.0, a.1 + b.1));
                if let Some(carried) = sum.or_else(|| session.failed_payload(*socket)) {
                    self.is_moving |= link.meter.count(*socket, carried);
                }
            }
            link.meter
                .end_look(now, received, was_moving, lent, round_trip);
            link.closing.retain(|socket| session.has_path(*socket));
            let held = link.health.keeps_sockets() || link.usage == LinkUse::Off || link.rests;
            let answers = match held || self.is_over || !link.facts.is_usable() {
                true => LinkAnswers::Unasked,
                false => {
                    let (opened, slack) = (link.opened_at, link.answer_slack());
                    link.answers.next(now, opened, slack, &sockets, &paths)
                }
            };
            self.news.candidates |= std::mem::replace(&mut link.answers, answers) != answers;
        }
        self.news.traffic |= self.is_moving;
        self.count_spending(session);
        self.release_ended(now, session);
    }

    // ---- queries ----

    /// Whether payload moved at the last update.
    pub fn is_moving(&self) -> bool {
        self.is_moving
    }

    /// Takes the changes since the last call.
    pub fn take_news(&mut self) -> LinkNews {
        std::mem::take(&mut self.news)
    }

    /// The name of a socket's link.
    pub fn link_name(&self, socket: LinkId) -> Option<&Arc<str>> {
        self.names.get(&socket)
    }

    /// All sockets whose link is known, with its name.
    pub fn socket_names(&self) -> impl Iterator<Item = (LinkId, &Arc<str>)> {
        self.names.iter().map(|(socket, name)| (*socket, name))
    }

    /// Names a socket that the caller created itself.
    pub fn name_socket(&mut self, socket: LinkId, name: &str) {
        self.names.insert(socket, name.into());
        while self.names.len() > NAMES_MAX {
            self.names.pop_first();
        }
    }

    /// Whether packets sent over a link are answered; `None` if there is no such link.
    pub fn answers(&self, name: &str) -> Option<LinkAnswers> {
        self.links.get(name).map(|link| link.answers)
    }

    /// Whether a link has a socket in use, or is about to have one.
    pub fn is_in_use(&self, name: &str) -> bool {
        let link = self.links.get(name);
        link.is_some_and(|link| !link.sockets.is_empty() || link.attaching.is_some())
    }

    /// Every link that is usable or has carried something, as of the last update.
    pub fn statuses(&self, session: &dyn SessionPaths) -> Vec<TrackedStatus> {
        let paths = session.path_stats();
        let told = |link: &&TrackedLink| link.facts.is_usable() || link.meter.payload != (0, 0);
        let status = |link: &TrackedLink| TrackedStatus {
            name: link.facts.name.clone(),
            usage: if link.facts.is_usable() {
                link.usage
            } else {
                LinkUse::Off
            },
            payload: link.meter.payload,
            busy: link.meter.busy,
            rate: link.meter.rate,
            answers: link.answers,
            stream: link.stream.status(),
            path: paths
                .iter()
                .find(|p| link.has_socket(p.addresses.link))
                .cloned(),
        };
        self.links.values().filter(told).map(status).collect()
    }

    // ---- decisions ----

    /// Whether anything may use metered links: flows, ACKs of a free half-duplex link, or repairs of a
    /// free link's losses.
    fn pays(&self) -> bool {
        // A link counts even while its sockets are being replaced.
        let carries = |link: &TrackedLink| link.usage == LinkUse::Free && link.facts.is_usable();
        let relieves = |link: &TrackedLink| carries(link) && link.facts.half_duplex;
        let (acks_pay, lends) = (self.settings.acks_pay, self.settings.lend_rate.is_some());
        !self.payers.is_empty()
            || (acks_pay && self.links.values().any(relieves))
            || (lends && self.links.values().any(carries))
    }

    fn ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    /// Lets links rest, or use them again: those that are to rest, and those whose radios sleep while another link works. True if
    /// any changed.
    fn apply_rest(&mut self) -> bool {
        let pays = self.pays();
        let works =
            |link: &TrackedLink| !link.facts.sleeps && link.is_wanted(pays) && link.answers.is_up();
        let lets_sleep = self.links.values().any(works);
        let is_to_rest = |link: &TrackedLink| {
            self.resting.contains(&*link.facts.name) || (lets_sleep && link.facts.sleeps)
        };
        let mut others = (self.links.values())
            .filter(|link| !is_to_rest(link) && link.is_wanted(pays))
            .peekable();
        let may_leave = others.peek().is_none() || others.any(|link| link.answers.is_up());
        let mut changed = false;
        for link in self.links.values_mut() {
            let is_used = !link.sockets.is_empty() || link.attaching.is_some();
            let rests = is_to_rest(link) && (!is_used || may_leave);
            changed |= std::mem::replace(&mut link.rests, rests) != rests;
        }
        changed
    }

    /// Opens and closes paths until they match [`LinkUse`] and the flows that may pay.
    fn update_paths(&mut self, now: Time) {
        let pays = self.pays();
        let is_due = self.kept_until.take_if(|until| *until <= now).is_some();
        let keeps_paid = self.kept_until.is_some();
        for link in self.links.values_mut() {
            if !link.is_wanted(pays) {
                if keeps_paid && link.has_paid_path() {
                    continue;
                }
                self.news.candidates |= is_due && link.answers.is_up();
                let is_frozen = link.health.frozen;
                let sockets = link.take_sockets();
                link.answers = LinkAnswers::Unasked;
                if is_frozen {
                    // A frozen path cannot send a last packet.
                    drop_all(&mut self.actions, sockets);
                    continue;
                }
                let close = |socket| LinkAction::ClosePath { socket };
                self.actions.extend(sockets.iter().copied().map(close));
                link.closing.extend(sockets);
                continue;
            }
            let gated = link.is_gated();
            let regate = !link.sockets.is_empty() && link.opened_gated != gated;
            if regate && !link.answers.is_up() {
                // A handshake may be under way over these sockets, so they are replaced when the
                // link's cost changes.
                drop_all(&mut self.actions, link.take_sockets());
            } else if regate {
                link.opened_gated = gated;
                let set = |socket| LinkAction::SetGated { socket, gated };
                self.actions.extend(link.socket_ids().map(set));
            }
            let bare = link.sockets.is_empty() && link.attaching.is_none();
            if bare && !link.health.keeps_sockets() {
                self.last_ticket += 1;
                link.attaching = Some(self.last_ticket);
                link.last_heal_at = now;
                self.actions.push_back(LinkAction::Attach {
                    link: link.facts.name.clone(),
                    ticket: self.last_ticket,
                });
            }
        }
    }

    /// Replaces the sockets of all links, if that was requested and is allowed now.
    fn renew_if_due(&mut self, now: Time, session: &dyn SessionPaths) {
        if !self.renewal.take_due(now) {
            return;
        }
        self.observe(now, session);
        let pays = self.pays();
        for link in self.links.values_mut() {
            link.tries = 0;
            let old = link.take_sockets();
            if link.is_wanted(pays) && !link.health.keeps_sockets() {
                // The old sockets are closed when the new ones exist.
                link.retiring = old;
            } else {
                drop_all(&mut self.actions, old);
            }
        }
        self.update_paths(now);
    }

    /// Replaces the sockets of a wanted link that has no path, because it failed or was not
    /// answered: after one second at first, then after ever longer intervals.
    fn heal(&mut self, now: Time, session: &dyn SessionPaths) {
        if session.is_over() {
            return;
        }
        let active = active_sockets(&session.path_stats());
        let pays = self.pays();
        let mut again = false;
        let wanted = |link: &&mut TrackedLink| {
            link.is_wanted(pays) && !link.health.keeps_sockets() && link.attaching.is_none()
        };
        for link in self.links.values_mut().filter(wanted) {
            if link.socket_ids().any(|id| active.contains(&id)) {
                link.tries = 0;
            }
            let had_path = !link.pathless;
            link.pathless = !link.sockets.iter().any(|s| session.has_path(s.socket));
            if !link.pathless || had_path {
                link.last_heal_at = now;
            } else if now.since(link.last_heal_at) >= link.heal_delay() {
                link.last_heal_at = now;
                link.tries += 1;
                again = true;
                drop_all(&mut self.actions, link.take_sockets());
            }
        }
        if again {
            self.update_paths(now);
        }
    }
}

fn active_sockets(paths: &[PathStats]) -> Vec<LinkId> {
    let active = paths.iter().filter(|p| p.state == PathState::Active);
    active.map(|p| p.addresses.link).collect()
}

fn open_path(link: &TrackedLink, socket: AttachedSocket) -> LinkAction {
    LinkAction::OpenPath {
        socket: socket.socket,
        remote: socket.remote,
        gated: link.is_gated(),
        half_duplex: link.facts.half_duplex,
    }
}

fn wake_at(link: &TrackedLink, socket: AttachedSocket) -> LinkAction {
    LinkAction::WakeAt {
        socket: socket.socket,
        remote: socket.remote,
        gated: link.is_gated(),
        half_duplex: link.facts.half_duplex,
    }
}

fn drop_all(actions: &mut VecDeque<LinkAction>, sockets: impl IntoIterator<Item = LinkId>) {
    let dropped = sockets.into_iter();
    actions.extend(dropped.map(|socket| LinkAction::DropSocket { socket }));
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
