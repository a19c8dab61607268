//! A host that calls a server and moves between its links.
//!
//! The device says which link may be used for what ([`LinkUse`]); the engine keeps paths in line
//! with it: a free link has a path as long as it is up, a paid one only while some flow may spend
//! there, and then with grants of at most a second's worth of bytes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use d2tp_links::{Class, Link};
use d2tp_session::{
    Addresses, Admission, Config, Endpoint, Event, FlowId, LinkId, PathStats, Reason, SecretKey,
    SessionEnd, SessionId, Span, Time,
};
use d2tp_udp::{BindOptions, LinkSocket};
use parking_lot::Mutex;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;

use crate::address::ServerAddress;
use crate::clock;
use crate::engine::{DriverError, Entry, Shared};
use crate::flow::{Flow, FlowSettings};
use crate::server::{CLOSE_GRACE, seed};

/// Epochs reserved for one process: an instance is new for each, so none was used before.
const EPOCHS: std::ops::Range<u32> = 1..u32::MAX / 2;
/// How often grants and rates are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How long a link stays without a path before it gets another socket.
const HEAL_AFTER: Span = Span::from_secs(1);
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
    /// Bytes per second received lately, once something was.
    pub rate: Option<u64>,
    /// Its path, if it has one that works.
    pub path: Option<PathStats>,
}

struct Known {
    link: Link,
    usage: LinkUse,
    ids: Vec<LinkId>,
    /// Of paths that are gone.
    payload_before: (u64, u64),
    last_payload: (u64, u64),
    rate: Option<u64>,
    sampled: (Time, u64),
    /// When it last had a path, or was given another try.
    healed: Time,
}

#[derive(Default)]
struct State {
    links: BTreeMap<String, Known>,
    names: BTreeMap<LinkId, String>,
    /// Flows that may pay, with what is left of their budgets.
    payers: BTreeMap<FlowId, Payer>,
}

#[derive(Clone, Copy, Debug)]
struct Payer {
    budget: Option<u64>,
    spent: u64,
    last_seen: u64,
}

pub(crate) struct Body {
    shared: Arc<Shared>,
    session: SessionId,
    remotes: Vec<SocketAddr>,
    state: Mutex<State>,
}

/// A device with a session to one server.
pub struct Device {
    body: Arc<Body>,
    peer: [u8; 32],
    ticker: JoinHandle<()>,
    watcher: Option<JoinHandle<()>>,
    /// Its instance's journal, if it has one.
    pub(crate) keeping: Option<crate::instance::Keeping>,
}

impl Device {
    /// A device that will call `options.server` as soon as it is given a link. Must be called on
    /// a tokio runtime.
    ///
    /// # Errors
    /// The server's name has no address.
    pub async fn new(options: DeviceOptions) -> Result<Device, DriverError> {
        let number = u64::from_be_bytes(seed()[..8].try_into().expect("eight of 32 bytes"));
        let server = options.server.key;
        let connect = |core: &mut Endpoint| Ok(core.connect(clock::now(), server, number, EPOCHS));
        Device::begin(options, connect).await
    }

    /// A device whose session `make` puts into the core.
    pub(crate) async fn begin(
        options: DeviceOptions,
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
        let mut core = Endpoint::new(config, key, Admission::Nobody, seed(), seed());
        let session = make(&mut core)?;
        let shared = Shared::start(core, false);
        let body = Arc::new(Body {
            shared,
            session,
            remotes,
            state: Mutex::default(),
        });
        let ticker = tokio::spawn(tick(body.clone()));
        Ok(Device {
            body,
            peer: server.key.0,
            ticker,
            watcher: None,
            keeping: None,
        })
    }

    /// What [`crate::instance`] needs of it.
    pub(crate) fn parts(&self) -> (&Arc<Shared>, SessionId, [u8; 32]) {
        (&self.body.shared, self.body.session, self.peer)
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
        let shared = &self.body.shared;
        let mut inner = shared.inner.lock();
        let session = self.body.session;
        let opened = inner.core.with(session, |s| s.open(settings.options()));
        match opened {
            Ok(Ok(id)) => {
                inner.flows.insert((session, id), Entry::default());
                drop(inner);
                shared.wake();
                Ok(Flow::new(shared.clone(), session, id, self.peer))
            }
            Ok(Err(error)) => Err(DriverError::Flow(error)),
            Err(_) => Err(DriverError::Session(
                inner
                    .ended
                    .get(&session)
                    .cloned()
                    .unwrap_or(SessionEnd::Local),
            )),
        }
    }

    /// Whether a flow may spend on paid links, and how many bytes in all. Takes effect at once,
    /// both ways.
    pub fn allow_paid(&self, flow: &Flow, allowed: bool, budget: Option<u64>) {
        let id = flow.flow_id();
        {
            let mut state = self.body.state.lock();
            if allowed {
                let payer = state.payers.entry(id).or_insert(Payer {
                    budget,
                    spent: 0,
                    last_seen: 0,
                });
                payer.budget = budget;
            } else {
                state.payers.remove(&id);
            }
        }
        if !allowed {
            for link in self.body.paid_links() {
                self.body
                    .shared
                    .with(self.body.session, |s| s.grant(id, link, 0));
            }
        }
        self.body.align();
        self.body.grant();
    }

    /// Says what one link may be used for from now on.
    pub fn set_use(&self, name: &str, usage: LinkUse) {
        if let Some(known) = self.body.state.lock().links.get_mut(name) {
            known.usage = usage;
        }
        self.body.align();
    }

    /// Links as they are used now.
    pub fn ways(&self) -> Vec<Way> {
        self.body.ways()
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

    /// Tells the server that the device leaves, and ends.
    pub async fn close(self) {
        self.body
            .shared
            .with(self.body.session, |s| s.close(0, "done"));
        tokio::time::sleep(CLOSE_GRACE).await;
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.ticker.abort();
        if let Some(watcher) = &self.watcher {
            watcher.abort();
        }
        self.body.shared.stop();
    }
}

impl Body {
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
                if !same {
                    lost.append(&mut k.ids);
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
                known.entry(link.name.clone()).or_insert_with(|| Known {
                    usage: usage(link),
                    link: link.clone(),
                    ids: Vec::new(),
                    payload_before: (0, 0),
                    last_payload: (0, 0),
                    rate: None,
                    sampled: (clock::now(), 0),
                    healed: clock::now(),
                });
            }
            // Names of links that went stay known: events about them may still be on their way.
            let _ = names;
        }
        for link in lost {
            self.shared
                .with(self.session, |s| s.on_link_down(clock::now(), link));
            let mut inner = self.shared.inner.lock();
            inner.sockets.remove(&link);
            inner.parting.remove(&link);
        }
        self.align();
    }

    /// Opens and closes paths until they are what [`LinkUse`] and the payers ask for.
    fn align(&self) {
        self.sample();
        let mut open: Vec<(LinkId, bool)> = Vec::new();
        let mut close: Vec<LinkId> = Vec::new();
        {
            let mut state = self.state.lock();
            let pays = !state.payers.is_empty();
            let State { links, names, .. } = &mut *state;
            for (name, known) in links.iter_mut() {
                let wanted = match known.usage {
                    LinkUse::Off => false,
                    LinkUse::Free => known.link.is_usable(),
                    LinkUse::Paid => known.link.is_usable() && pays,
                };
                let gated = known.usage == LinkUse::Paid;
                if !wanted {
                    close.append(&mut known.ids);
                } else if known.ids.is_empty() {
                    match self.bind(name, &known.link) {
                        Ok(Some(id)) => {
                            names.insert(id, name.clone());
                            known.ids.push(id);
                            open.push((id, gated));
                        }
                        Ok(None) => {}
                        Err(error) => tracing::warn!(link = %name, %error, "cannot use this link"),
                    }
                }
            }
        }
        for link in close {
            self.shared.with(self.session, |s| {
                s.close_path(clock::now(), link, Reason::PathCost)
            });
            self.shared.inner.lock().closing.push(link);
        }
        for (link, gated) in open {
            let Some(remote) = self.remote_of(link) else {
                continue;
            };
            let addresses = Addresses {
                link,
                local: None,
                remote,
            };
            self.shared.with(self.session, |s| {
                s.open_path(clock::now(), addresses, gated)
            });
        }
    }

    fn bind(&self, name: &str, link: &Link) -> Result<Option<LinkId>, DriverError> {
        let source = self.remotes.iter().find_map(|r| {
            // An IPv6-only link reaches an IPv4 server through its network's NAT64.
            let through = nat64(*r).and_then(|r| link.source_for(r.ip()));
            link.source_for(r.ip()).or(through)
        });
        let Some(source) = source else {
            return Ok(None);
        };
        let options = BindOptions::at(SocketAddr::new(source, 0)).on_device(name);
        Ok(Some(
            self.shared.add_socket(LinkSocket::bind(&options)?, false),
        ))
    }

    /// The server's address in the family of a link's socket.
    fn remote_of(&self, link: LinkId) -> Option<SocketAddr> {
        let inner = self.shared.inner.lock();
        let local = inner.sockets.get(&link)?.io.local_addr();
        let same = self
            .remotes
            .iter()
            .find(|r| r.is_ipv6() == local.is_ipv6())
            .copied();
        same.or_else(|| self.remotes.iter().find_map(|r| nat64(*r)))
    }

    /// A link that is up but lost its path (a socket error, a new handshake) gets another one.
    fn heal(&self) {
        let now = clock::now();
        let mut lost = Vec::new();
        {
            let inner = self.shared.inner.lock();
            let Some(session) = inner.core.session(self.session) else {
                return;
            };
            let mut state = self.state.lock();
            for known in state.links.values_mut().filter(|k| !k.ids.is_empty()) {
                if known.ids.iter().any(|id| session.has_path(*id)) {
                    known.healed = now;
                } else if now.since(known.healed) >= HEAL_AFTER {
                    known.healed = now;
                    lost.append(&mut known.ids);
                }
            }
        }
        if lost.is_empty() {
            return;
        }
        for link in lost {
            let mut inner = self.shared.inner.lock();
            inner.sockets.remove(&link);
            inner.parting.remove(&link);
        }
        self.align();
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
        for known in state.links.values_mut() {
            let mine = paths
                .iter()
                .filter(|p| known.ids.contains(&p.addresses.link));
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
            known.last_payload = (down, up);
            let total = known.payload_before.0 + down;
            let (then, before) = known.sampled;
            let span = now.since(then);
            if span >= Span::from_millis(250) {
                let bytes = total.saturating_sub(before);
                if bytes > 0 {
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
                rate: k.rate,
                path: paths
                    .iter()
                    .find(|p| k.ids.contains(&p.addresses.link))
                    .cloned(),
            })
            .collect()
    }

    /// Keeps the grants of paying flows a second ahead, within their budgets.
    fn grant(&self) {
        let links = self.paid_links();
        if links.is_empty() {
            return;
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
            for link in links {
                let rate = known
                    .values()
                    .find(|k| k.ids.contains(&link))
                    .and_then(|k| k.rate)
                    .unwrap_or(0);
                let ahead = rate.max(GRANT_MIN_BYTES);
                for (flow, payer) in payers.iter_mut() {
                    let Some((left, spent)) = session.grant_left(*flow, link) else {
                        continue;
                    };
                    if spent < payer.last_seen {
                        payer.last_seen = 0;
                    }
                    payer.spent += spent - payer.last_seen;
                    payer.last_seen = spent;
                    let may = payer
                        .budget
                        .map_or(u64::MAX, |b| b.saturating_sub(payer.spent));
                    let want = ahead.min(may);
                    if left * 2 < want || left > may {
                        grants.push((*flow, link, want));
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

/// An IPv4 address as it is reached through NAT64 with the well-known prefix (RFC 6052 §2.1).
fn nat64(remote: SocketAddr) -> Option<SocketAddr> {
    let SocketAddr::V4(v4) = remote else {
        return None;
    };
    let [a, b, c, d] = v4.ip().octets();
    let low = [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])];
    let ip = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, low[0], low[1]);
    Some((ip, v4.port()).into())
}

async fn tick(body: Arc<Body>) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        // Nothing to count and nothing to grant: do not wake for it.
        if body.state.lock().links.is_empty() {
            continue;
        }
        body.sample();
        body.heal();
        body.grant();
    }
}
