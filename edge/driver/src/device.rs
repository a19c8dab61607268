//! A host that calls a server and moves between its links.
//!
//! The device says which link may be used for what ([`LinkUse`]); the engine keeps paths in line
//! with it: a free link has a path as long as it is up, a paid one only while some flow may spend
//! there, and then with grants of at most a second's worth of bytes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use d2tp_links::{Class, Kind, Link, Signs};
use d2tp_session::{
    AckOffload, Addresses, Admission, Config, Endpoint, Event, FlowId, LinkId, Mirroring,
    PathStats, PathStatus, PublicKey, Reason, SecretKey, Session, SessionEnd, SessionId, Span,
    Time,
};
use d2tp_udp::{BindOptions, LinkSocket};
use parking_lot::Mutex;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;

use crate::address::ServerAddress;
use crate::attach::{Attach, KernelLinks};
use crate::clock;
use crate::datagrams::Connection;
use crate::engine::{DriverError, Shared};
use crate::flow::{Flow, FlowSettings};
use crate::hop::{self, KnownSigns};
use crate::payer::{OnLink, Payer};
use crate::peer::ToServer;
use crate::qlog::{self, Qlog};
use crate::relaying;
use crate::renew::Renewal;
use crate::server::{CLOSE_GRACE, seed};
use crate::standby::Standby;

/// Epochs reserved for one process: an instance is new for each, so none was used before.
pub(crate) const EPOCHS: std::ops::Range<u32> = 1..u32::MAX;
/// How often grants, rates and paths are looked at while something moves.
const TICK: Duration = Duration::from_millis(100);
/// The least that is granted at once on a paid link: less would stop and go.
const GRANT_MIN_BYTES: u64 = 64 * 1024;
/// Weight of a new rate sample, in tenths.
const RATE_WEIGHT_TENTHS: u64 = 3;

/// What a link may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkUse {
    /// Not a packet.
    Off,
    /// As much as it carries.
    Free,
    /// By flows that may pay, up to their budgets.
    Paid,
}

/// How a device calls.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// The server.
    pub server: ServerAddress,
    /// Who the device is.
    pub key: SecretKey,
    /// Protocol settings.
    pub config: Config,
}

/// A link as the device uses it now.
#[derive(Clone, Debug, PartialEq)]
pub struct Way {
    /// The device's name of the link.
    pub name: String,
    /// What it costs.
    pub class: Class,
    /// What it may be used for.
    pub usage: LinkUse,
    /// Payload bytes received and sent over it since the device started.
    pub payload: (u64, u64),
    /// For how long payload came in, in steps of 0.1 s: what came in that time says how fast the link is, also
    /// where little came.
    pub busy: Span,
    /// Bytes per second received and sent lately, once something was.
    pub rate: Option<u64>,
    /// Its path, if it has one that works.
    pub path: Option<PathStats>,
}

pub(crate) struct Known {
    pub(crate) link: Link,
    usage: LinkUse,
    /// Its sockets that are in use.
    pub(crate) ids: Vec<LinkId>,
    /// Of its other address family, to be tried if those do not answer.
    pub(crate) later: Vec<(LinkId, SocketAddr)>,
    /// When the last of its sockets was taken into use.
    pub(crate) opened: Time,
    /// Of paths that are gone.
    payload_before: (u64, u64),
    last_payload: (u64, u64),
    busy: Span,
    looked_at: Time,
    rate: Option<u64>,
    sampled: (Time, u64),
    /// When it lost its path, or was given another try since.
    pub(crate) healed: Time,
    /// It had no path when it was last looked at.
    pub(crate) pathless: bool,
    /// Tries since anybody answered.
    pub(crate) tries: u32,
    pub(crate) signs: KnownSigns,
}

impl Known {
    fn new(link: &Link, usage: LinkUse) -> Known {
        let now = clock::now();
        Known {
            usage,
            link: link.clone(),
            ids: Vec::new(),
            later: Vec::new(),
            opened: now,
            payload_before: (0, 0),
            last_payload: (0, 0),
            busy: Span::ZERO,
            looked_at: now,
            rate: None,
            sampled: (now, 0),
            healed: now,
            pathless: true,
            tries: 0,
            signs: KnownSigns::default(),
        }
    }

    /// Whether it should have a path now; `pays`: some flow may spend on paid links.
    pub(crate) fn is_wanted(&self, pays: bool) -> bool {
        let there = self.link.is_usable() || self.signs.is_held();
        match self.usage {
            LinkUse::Off => false,
            LinkUse::Free => there,
            LinkUse::Paid => there && pays,
        }
    }

    pub(crate) fn is_gated(&self) -> bool {
        self.usage == LinkUse::Paid
    }

    pub(crate) fn take_sockets(&mut self) -> Vec<LinkId> {
        self.signs.forget();
        let mut ids = std::mem::take(&mut self.ids);
        ids.extend(self.later.drain(..).map(|(id, _)| id));
        ids
    }
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) links: BTreeMap<String, Known>,
    names: BTreeMap<LinkId, String>,
    /// Flows that may pay, with what is left of their budgets.
    pub(crate) payers: BTreeMap<FlowId, Payer>,
    /// ACKs of Wi-Fi may, whatever flows may.
    acks_pay: bool,
    /// What flows that do not pay lend of paid links to losses on free ones, in bytes a second.
    lends: Option<u64>,
    pub(crate) renewal: Renewal,
    /// Payload moved when rates were last looked at.
    moving: bool,
}

impl State {
    /// Whether something may spend on paid links: flows, ACKs of a Wi-Fi that is in use, or what a free
    /// link in use loses.
    pub(crate) fn pays(&self) -> bool {
        let carries = |k: &Known| k.usage == LinkUse::Free && !k.ids.is_empty();
        let relieves = |k: &Known| carries(k) && k.link.kind == Kind::Wifi;
        !self.payers.is_empty()
            || (self.acks_pay && self.links.values().any(relieves))
            || (self.lends.is_some() && self.links.values().any(carries))
    }
}

pub(crate) struct Body {
    pub(crate) shared: Arc<Shared>,
    pub(crate) session: SessionId,
    remotes: Vec<SocketAddr>,
    attach: Arc<dyn Attach>,
    pub(crate) signs: Arc<dyn Signs>,
    /// Held while sockets are made, before the others.
    aligning: Mutex<()>,
    /// Taken after the core's lock where both are needed.
    pub(crate) state: Mutex<State>,
    /// Announced whenever payload was seen to move.
    moved: watch::Sender<()>,
}

/// A device with a session to one server.
pub struct Device {
    body: Arc<Body>,
    peer: [u8; 32],
    ticker: JoinHandle<()>,
    /// Asks first hops.
    asker: JoinHandle<()>,
    watcher: Option<JoinHandle<()>>,
    /// Its instance's journal, if it has one.
    pub(crate) keeping: Option<crate::instance::Keeping>,
    /// Its instance, where that is the next process's when it ends.
    pub(crate) lease: Option<Arc<crate::lease::Lease>>,
}

impl Device {
    /// A device that will call `options.server` as soon as it is given a link. Must be called on
    /// a tokio runtime.
    ///
    /// # Errors
    /// The server's name has no address.
    pub async fn new(options: DeviceOptions) -> Result<Device, DriverError> {
        Device::attached_by(options, Arc::new(KernelLinks)).await
    }

    /// A device whose links get their sockets from `attach`: from [`crate::GivenLinks`], where the
    /// links are not the kernel's.
    ///
    /// # Errors
    /// The server's name has no address.
    pub async fn attached_by(
        options: DeviceOptions,
        attach: Arc<dyn Attach>,
    ) -> Result<Device, DriverError> {
        let number = u64::from_be_bytes(seed()[..8].try_into().expect("eight of 32 bytes"));
        let server = options.server.key;
        let connect = |core: &mut Endpoint| Ok(core.connect(clock::now(), server, number, EPOCHS));
        Device::begin(options, attach, connect).await
    }

    /// A device whose session `make` puts into the core.
    pub(crate) async fn begin(
        options: DeviceOptions,
        attach: Arc<dyn Attach>,
        make: impl FnOnce(&mut Endpoint) -> Result<SessionId, DriverError>,
    ) -> Result<Device, DriverError> {
        let DeviceOptions {
            server,
            key,
            config,
        } = options;
        let resolve = |cause| DriverError::Resolve {
            host: server.host.clone(),
            cause,
        };
        let remotes: Vec<SocketAddr> = tokio::net::lookup_host((server.host.as_str(), server.port))
            .await
            .map_err(resolve)?
            .collect();
        let acks_pay = matches!(config.ack_offload, AckOffload::Paid { .. });
        let lends = match config.mirroring {
            Mirroring::Paid { bytes_per_second } => Some(bytes_per_second),
            Mirroring::Never | Mirroring::Free => None,
        };
        let mut core = Endpoint::new(config, key, Admission::Nobody, seed(), seed());
        let session = make(&mut core)?;
        let shared = Shared::start(core, false);
        shared.inner.lock().relaying.main = Some(session);
        let body = Arc::new(Body {
            shared,
            session,
            remotes,
            signs: attach.signs(),
            attach,
            aligning: Mutex::default(),
            state: Mutex::new(State {
                acks_pay,
                lends,
                ..State::default()
            }),
            moved: watch::Sender::default(),
        });
        let ticker = tokio::spawn(tick(body.clone()));
        let asker = hop::watch(body.clone());
        Ok(Device {
            body,
            peer: server.key.0,
            ticker,
            asker,
            watcher: None,
            keeping: None,
            lease: None,
        })
    }

    /// What [`crate::instance`] needs of it.
    pub(crate) fn parts(&self) -> (&Arc<Shared>, SessionId, [u8; 32]) {
        (&self.body.shared, self.body.session, self.peer)
    }

    /// What tasks need to speak with the server.
    pub(crate) fn to_server(&self) -> ToServer {
        ToServer {
            shared: Arc::downgrade(&self.body.shared),
            session: self.body.session,
            peer: self.peer,
        }
    }

    /// Follows the machine's links: what `usage` says of each is done now and at every change.
    pub fn follow(
        &mut self,
        mut links: watch::Receiver<Arc<Vec<Link>>>,
        usage: impl Fn(&Link) -> LinkUse + Send + 'static,
    ) {
        let body = self.body.clone();
        self.watcher = Some(tokio::spawn(async move {
            loop {
                let now: Arc<Vec<Link>> = links.borrow_and_update().clone();
                body.update(&now, &usage);
                if links.changed().await.is_err() {
                    return;
                }
            }
        }));
    }

    /// Uses whatever route the system has, as one free link named `any`: for hosts that do not
    /// move, and for tests on loopback.
    ///
    /// # Errors
    /// No socket could be bound.
    pub fn use_default_route(&self) -> Result<(), DriverError> {
        let Some(remote) = self.body.remotes.first().copied() else {
            return Ok(());
        };
        let local: IpAddr = if remote.is_ipv6() {
            std::net::Ipv6Addr::UNSPECIFIED.into()
        } else {
            std::net::Ipv4Addr::UNSPECIFIED.into()
        };
        let socket = LinkSocket::bind(&BindOptions::at(SocketAddr::new(local, 0)))?;
        let link = self.body.shared.add_socket(socket, false);
        self.body.state.lock().names.insert(link, "any".into());
        let addresses = Addresses {
            link,
            local: None,
            remote,
        };
        self.body.shared.with(self.body.session, |s| {
            s.open_path(clock::now(), addresses, false)
        });
        Ok(())
    }

    /// Opens a flow. It may be written to at once, with or without a network.
    ///
    /// # Errors
    /// The session is over, or too many flows are open.
    pub fn open(&self, settings: FlowSettings) -> Result<Flow, DriverError> {
        self.body
            .shared
            .open(self.body.session, self.peer, settings)
    }

    /// Whether a flow may spend on paid links, and how many bytes in all. Takes effect at once,
    /// both ways.
    pub fn allow_paid(&self, flow: &Flow, allowed: bool, budget: Option<u64>) {
        let id = flow.flow_id();
        let links = self.body.paid_links();
        let before = self.body.on_links(id, &links);
        {
            let mut state = self.body.state.lock();
            if allowed {
                let payer = state.payers.entry(id);
                payer.or_insert_with(|| Payer::new(budget, &before)).budget = budget;
            } else {
                state.payers.remove(&id);
            }
        }
        if !allowed {
            for link in links {
                self.body
                    .shared
                    .with(self.body.session, |s| s.grant(id, link, 0));
            }
        }
        self.body.align();
        self.body.grant();
    }

    /// Bytes that the flow has had on links that cost since it was last allowed to pay.
    pub fn paid_bytes(&self, flow: &Flow) -> u64 {
        self.body.grant();
        let state = self.body.state.lock();
        let payer = state.payers.get(&flow.flow_id());
        payer.map_or(0, Payer::spent)
    }

    /// Says what one link may be used for from now on.
    pub fn set_use(&self, name: &str, usage: LinkUse) {
        if let Some(known) = self.body.state.lock().links.get_mut(name) {
            known.usage = usage;
        }
        self.body.align();
    }

    /// Leaves a link alone until [`Device::thaw`], and keeps its place: not a packet leaves there, what was in
    /// flight travels elsewhere, and its window stays. For who knows of a hole before it comes, or wants to be
    /// still for a moment; whoever does not want the link at all sets its use ([`Device::set_use`]).
    pub fn freeze(&self, name: &str) {
        if let Some(known) = self.body.state.lock().links.get_mut(name) {
            known.signs.told_still = true;
        }
        self.body.hold();
    }

    /// Goes on with a link that was frozen by [`Device::freeze`].
    pub fn thaw(&self, name: &str) {
        if let Some(known) = self.body.state.lock().links.get_mut(name) {
            known.signs.told_still = false;
        }
        self.body.hold();
        self.body.align();
    }

    /// Something about the networks changed that we may not see: every link gets a new socket, and
    /// a probe on it at once. For platforms that tell programs of a wake or of another network and
    /// do not let them watch; where the links are followed it is not needed. Calling it often costs
    /// at most one renewal a second.
    pub fn network_changed(&self) {
        self.body.want_renewal();
    }

    /// Writes what the session does from now on to `log`.
    pub fn log_to(&self, log: &Arc<Qlog>) {
        self.body.shared.log_to(log);
        let names = self.body.state.lock().names.clone();
        if let Some(feed) = &self.body.shared.inner.lock().feed {
            for (id, name) in &names {
                feed.name_link(*id, name);
            }
        }
    }

    /// Adds a line of the program's own to the session's log, if there is one: why it chose a link,
    /// say. `name` is `schema:event`.
    pub fn note(&self, name: &str, data: impl FnOnce() -> serde_json::Value) {
        let mut inner = self.body.shared.inner.lock();
        qlog::drain(&mut inner);
        let Some(mut feed) = inner.feed.take() else {
            return;
        };
        let session = self.body.session;
        if let Some(s) = inner.core.session(session) {
            feed.begin(session, s.role(), s.peer().to_string());
        }
        feed.note(session, clock::now(), name.to_owned(), data());
        inner.feed = Some(feed);
    }

    /// The session as a whole: its datagrams.
    pub fn connection(&self) -> Connection {
        let peer = PublicKey(self.peer);
        Connection::new(self.body.shared.clone(), self.body.session, peer)
    }

    /// Links as they are used now.
    pub fn ways(&self) -> Vec<Way> {
        self.body.ways()
    }

    /// Tells, at most ten times a second, that links carried payload: for who looks at [`Device::ways`] as long as they
    /// do and would rest with them.
    pub fn moves(&self) -> watch::Receiver<()> {
        self.body.moved.subscribe()
    }

    /// Figures of every path, whatever its link.
    pub fn paths(&self) -> Vec<PathStats> {
        self.body.paths()
    }

    /// The name of a link in an event.
    pub fn link_name(&self, link: LinkId) -> Option<String> {
        self.body.state.lock().names.get(&link).cloned()
    }

    /// Payload bytes that arrived more than once.
    pub fn duplicate_bytes(&self) -> u64 {
        let inner = self.body.shared.inner.lock();
        inner
            .core
            .session(self.body.session)
            .map_or(0, |s| s.duplicate_bytes())
    }

    /// What happens in the session, from now on, with the time of each.
    pub fn events(&self) -> broadcast::Receiver<(Time, Event)> {
        self.body.shared.events.subscribe()
    }

    /// Why the session ended, if it has.
    pub fn ended(&self) -> Option<SessionEnd> {
        self.body
            .shared
            .inner
            .lock()
            .ended
            .get(&self.body.session)
            .cloned()
    }

    /// Tells the server that the device leaves: for who cannot wait for [`Device::close`].
    pub fn say_goodbye(&self) {
        self.body
            .shared
            .with(self.body.session, |s| s.close(0, "done"));
    }

    /// Tells the server that the device leaves, and ends.
    pub async fn close(self) {
        self.say_goodbye();
        tokio::time::sleep(CLOSE_GRACE).await;
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.ticker.abort();
        self.asker.abort();
        if let Some(watcher) = &self.watcher {
            watcher.abort();
        }
        self.body.shared.stop();
    }
}

impl Body {
    pub(crate) fn moves(&self) -> bool {
        self.state.lock().moving
    }

    fn paid_links(&self) -> Vec<LinkId> {
        let state = self.state.lock();
        state
            .links
            .values()
            .filter(|k| k.usage == LinkUse::Paid)
            .flat_map(|k| k.ids.clone())
            .collect()
    }

    /// Takes in a new state of the machine's links.
    fn update(&self, links: &[Link], usage: &impl Fn(&Link) -> LinkUse) {
        // Before paths are given up: what they carried until now is counted.
        self.sample();
        let mut lost: Vec<LinkId> = Vec::new();
        {
            let mut state = self.state.lock();
            let State {
                links: known,
                names,
                ..
            } = &mut *state;
            for (name, k) in known.iter_mut() {
                let now = links.iter().find(|l| l.name == *name);
                let same = now.is_some_and(|l| {
                    l.index == k.link.index
                        && k.link.source_addresses().eq(l.source_addresses())
                        && l.is_usable()
                });
                if now.is_some_and(|l| k.stays(l)) {
                    // The same attachment, without a carrier for a while.
                } else if !same {
                    lost.extend(k.take_sockets());
                    k.tries = 0;
                }
                match now {
                    Some(link) => k.link = link.clone(),
                    None => {
                        k.link.up = false;
                        k.link.addresses.clear();
                    }
                }
                k.usage = usage(&k.link);
            }
            for link in links {
                known
                    .entry(link.name.clone())
                    .or_insert_with(|| Known::new(link, usage(link)));
            }
            // Names of links that went stay known: events about them may still be on their way.
            let _ = names;
        }
        self.drop_links(&lost);
        self.hold();
        self.look_for_sleep();
        self.align();
    }

    /// These sockets are of no use any more.
    pub(crate) fn drop_links(&self, links: &[LinkId]) {
        for link in links {
            let mut inner = self.shared.inner.lock();
            relaying::lose_link(&mut inner, clock::now(), *link);
            inner.sockets.remove(link);
            inner.parting.remove(link);
        }
        self.shared.wake();
    }

    /// Begins to use a link's socket.
    pub(crate) fn open_path(&self, link: LinkId, remote: SocketAddr, gated: bool) {
        let addresses = Addresses {
            link,
            local: None,
            remote,
        };
        self.shared.with(self.session, |s| {
            s.open_path(clock::now(), addresses, gated)
        });
    }

    /// Opens and closes paths until they are what [`LinkUse`] and the payers ask for.
    ///
    /// Sockets are made with no lock of links held: the core's lock may be held by who waits for it.
    pub(crate) fn align(&self) {
        let _one_at_a_time = self.aligning.lock();
        self.sample();
        let mut open: Vec<(LinkId, SocketAddr, bool)> = Vec::new();
        let mut close: Vec<LinkId> = Vec::new();
        let mut bare: Vec<(Link, bool)> = Vec::new();
        let mut half_duplex: Vec<LinkId> = Vec::new();
        {
            let mut state = self.state.lock();
            let pays = state.pays();
            for known in state.links.values_mut() {
                if !known.is_wanted(pays) {
                    close.extend(known.take_sockets());
                } else if known.ids.is_empty() && !known.signs.is_held() {
                    bare.push((known.link.clone(), known.is_gated()));
                }
            }
        }
        for (link, gated) in bare {
            let found = match self.attach.attach(&link, &self.remotes) {
                Ok(found) => found,
                Err(error) => {
                    tracing::warn!(link = %link.name, %error, "cannot use this link");
                    continue;
                }
            };
            let mut sockets: Vec<(LinkId, SocketAddr)> = Vec::new();
            for attachment in found {
                let id = self.shared.add_socket(attachment.socket, false);
                if let Some(feed) = &self.shared.inner.lock().feed {
                    feed.name_link(id, &link.name);
                }
                sockets.push((id, attachment.remote));
            }
            let mut state = self.state.lock();
            let State { links, names, .. } = &mut *state;
            names.extend(sockets.iter().map(|(id, _)| (*id, link.name.clone())));
            let known = links.get_mut(&link.name);
            let Some(known) = known.filter(|k| k.link == link && k.ids.is_empty()) else {
                // It changed meanwhile, and whoever changed it aligns again.
                close.extend(sockets.iter().map(|(id, _)| *id));
                continue;
            };
            known.opened = clock::now();
            known.later = sockets;
            if !known.later.is_empty() {
                let (id, remote) = known.later.remove(0);
                known.ids.push(id);
                open.push((id, remote, gated));
                if known.link.kind == Kind::Wifi {
                    half_duplex.push(id);
                }
            }
        }
        for link in close {
            self.shared.with(self.session, |s| {
                s.close_path(clock::now(), link, Reason::PathCost)
            });
            self.shared.inner.lock().closing.push(link);
        }
        for (link, remote, gated) in open {
            self.open_path(link, remote, gated);
        }
        for link in half_duplex {
            self.shared.with(self.session, |s| s.set_half_duplex(link));
        }
        self.shared.stir();
    }

    fn paths(&self) -> Vec<PathStats> {
        let inner = self.shared.inner.lock();
        inner
            .core
            .session(self.session)
            .map(|s| s.path_stats())
            .unwrap_or_default()
    }

    /// Brings byte counts and rates up to date.
    fn sample(&self) {
        let paths = self.paths();
        let parting = self.shared.inner.lock().parting.clone();
        let now = clock::now();
        let mut state = self.state.lock();
        let was_moving = state.moving;
        let mut moving = false;
        for known in state.links.values_mut() {
            let mine = paths
                .iter()
                .filter(|p| known.ids.contains(&p.addresses.link));
            // What a lent link carries says nothing of its rate.
            let lent = mine.clone().any(|p| p.status == PathStatus::Standby);
            let parting = known.ids.iter().filter_map(|id| parting.get(id).copied());
            let (down, up) = mine
                .map(|p| (p.payload_in, p.payload_out))
                .chain(parting)
                .fold((0, 0), |(d, u), (down, up)| (d + down, u + up));
            if (down, up) < known.last_payload || down < known.last_payload.0 {
                // The path was replaced: what the old one carried is kept.
                known.payload_before.0 += known.last_payload.0;
                known.payload_before.1 += known.last_payload.1;
            }
            moving |= known.last_payload != (down, up);
            if known.last_payload.0 != down {
                let looked = now.since(known.looked_at);
                // Where nothing moved, nobody looked for as long.
                let moved = match was_moving {
                    true => looked,
                    false => looked.min(Span::from(TICK)),
                };
                known.busy = known.busy + moved;
            }
            known.looked_at = now;
            known.last_payload = (down, up);
            let before = known.payload_before;
            let total = before.0 + before.1 + down + up;
            let (then, before) = known.sampled;
            let span = now.since(then);
            if span >= Span::from_millis(250) {
                let bytes = total.saturating_sub(before);
                if bytes > 0 && !lent {
                    let rate =
                        (u128::from(bytes) * 1_000_000_000 / u128::from(span.as_nanos())) as u64;
                    known.rate = Some(match known.rate {
                        Some(r) => (r * (10 - RATE_WEIGHT_TENTHS) + rate * RATE_WEIGHT_TENTHS) / 10,
                        None => rate,
                    });
                }
                known.sampled = (now, total);
            }
        }
        state.moving = moving;
        if moving {
            self.moved.send_replace(());
        }
    }

    /// When the links are to be looked at again if nothing stirs before: in a tick while payload
    /// moves, when something waits for its time, or never.
    fn next_look(&self) -> Option<Time> {
        let beside = self.shared.inner.lock().relaying.next_at();
        let state = self.state.lock();
        if state.moving {
            return Some(clock::now());
        }
        let pays = state.pays();
        let used = |k: &&Known| k.is_wanted(pays) && !k.signs.is_held();
        let links = state.links.values().filter(used);
        links
            .filter_map(Known::next_try)
            .chain(state.links.values().filter_map(|k| k.signs.given_up_at()))
            .chain(state.renewal.next_at())
            .chain(beside)
            .min()
    }

    fn ways(&self) -> Vec<Way> {
        self.sample();
        let paths = self.paths();
        let state = self.state.lock();
        state
            .links
            .iter()
            .filter(|(_, k)| {
                k.link.is_usable() || k.payload_before != (0, 0) || k.last_payload != (0, 0)
            })
            .map(|(name, k)| Way {
                name: name.clone(),
                class: k.link.class.class,
                usage: if k.link.is_usable() {
                    k.usage
                } else {
                    LinkUse::Off
                },
                payload: (
                    k.payload_before.0 + k.last_payload.0,
                    k.payload_before.1 + k.last_payload.1,
                ),
                busy: k.busy,
                rate: k.rate,
                path: paths
                    .iter()
                    .find(|p| k.ids.contains(&p.addresses.link))
                    .cloned(),
            })
            .collect()
    }

    /// How a flow stands on links.
    fn on_links(&self, flow: FlowId, links: &[LinkId]) -> Vec<OnLink> {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.map_or(Vec::new(), |session| links_of(session, flow, links))
    }

    /// Keeps the grants of paying flows a second ahead, within their budgets; where none pays, lends.
    fn grant(&self) {
        let links = self.paid_links();
        if links.is_empty() {
            return;
        }
        let (lends, flows_pay) = {
            let state = self.state.lock();
            (state.lends, !state.payers.is_empty())
        };
        if let Some(rate) = lends {
            for link in &links {
                self.shared.with(self.session, |s| match flows_pay {
                    true => s.end_lending(*link),
                    false => s.lend_path(clock::now(), *link, rate),
                });
            }
        }
        let mut grants: Vec<(FlowId, LinkId, u64)> = Vec::new();
        {
            let inner = self.shared.inner.lock();
            let Some(session) = inner.core.session(self.session) else {
                return;
            };
            let mut state = self.state.lock();
            let State {
                links: known,
                payers,
                ..
            } = &mut *state;
            for (flow, payer) in payers.iter_mut() {
                let mut on = links_of(session, *flow, &links);
                payer.look(&on);
                for at in 0..on.len() {
                    let link = on[at].link;
                    let rate = known.values().find(|k| k.ids.contains(&link));
                    let ahead = rate.and_then(|k| k.rate).unwrap_or(0).max(GRANT_MIN_BYTES);
                    let may = payer.may(link, &on);
                    let want = ahead.min(may);
                    // The one direction in use runs low.
                    if on[at].least * 2 < want || on[at].granted > may {
                        grants.push((*flow, link, want));
                        on[at].granted = want;
                    }
                }
            }
        }
        for (flow, link, more) in grants {
            self.shared
                .with(self.session, |s| s.grant(flow, link, more));
        }
    }
}

fn links_of(session: &Session, flow: FlowId, links: &[LinkId]) -> Vec<OnLink> {
    let on = |link: &LinkId| {
        let (theirs, got) = session.grant_left(flow, *link)?;
        let (ours, sent) = session.own_grant_left(flow, *link)?;
        Some(OnLink {
            link: *link,
            spent: got + sent,
            granted: theirs.max(ours),
            least: theirs.min(ours),
        })
    };
    links.iter().filter_map(on).collect()
}

/// Looks after links for as long as something moves, and then not until something does: an idle
/// device wakes for nothing.
async fn tick(body: Arc<Body>) {
    let standby = Standby::watch()
        .inspect_err(|error| tracing::warn!(%error, "a sleep of the machine is noticed late"))
        .ok();
    loop {
        body.look_for_sleep();
        body.renew_if_due();
        body.give_up_carriers();
        body.sample();
        body.read_radios().await;
        body.heal();
        body.race();
        body.grant();
        let tended = relaying::tend(&mut body.shared.inner.lock(), clock::now());
        if tended {
            body.shared.wake();
        }
        let stirred = async {
            match &standby {
                Some(standby) => tokio::select! {
                    () = body.shared.stirred.notified() => {}
                    () = standby.over() => {}
                },
                None => body.shared.stirred.notified().await,
            }
        };
        let wait = body
            .next_look()
            .map(|at| Duration::from(at.since(clock::now())));
        let moved = match wait {
            None => {
                stirred.await;
                true
            }
            Some(wait) if wait <= TICK => true,
            Some(wait) => tokio::time::timeout(wait, stirred).await.is_ok(),
        };
        // Not at every packet: a tick later.
        if moved {
            tokio::time::sleep(TICK).await;
            // What stirred in that time is seen now.
            tokio::select! {
                biased;
                () = body.shared.stirred.notified() => {}
                () = std::future::ready(()) => {}
            }
        }
    }
}
