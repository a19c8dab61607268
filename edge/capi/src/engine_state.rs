//! What the engine has: sessions with servers, posts that listen, and the flows of sockets.
//!
//! A session is begun when a socket first connects to its server, is shared by all that connect there,
//! and ends some time after the last of them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{
    Device, DeviceOptions, DriverError, EndpointConfig, InstanceLease, LinkStatus, LinkUse,
    SecretKey, ServerAddress, SessionEnd, SessionEvent,
};
use d2tp_links::{ClassRules, CostClass, Link, LinkKind, LinkMonitor};
use d2tp_sched::CostPolicy;
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::sync::{Notify, OnceCell, watch};

use crate::agent_connection::AgentConnection;
use crate::datagram_accounting::DatagramAccounting;
use crate::datagrams::{self, DatagramRegistry};
use crate::dlock::WakeRegistry;
use crate::errno::SocketFault;
use crate::identity;
use crate::listen::ListenAddresses;
use crate::options::SocketOptions;
use crate::pair::PairPort;
use crate::pump::CarriedFlow;
use crate::read_ahead::ReadAheadMemory;
use crate::socket_scheduler::OwnScheduler;
use crate::socket_scheduler::SocketScheduler;

/// How long a session is kept for the next socket: a handshake costs more than a quiet session.
const IDLE_KEPT: Duration = Duration::from_secs(10); // a guess
/// Between two looks for a server's name while the machine has a network and no answer.
const RESOLVE_AGAIN: Duration = Duration::from_secs(2); // a guess
/// How often a name is looked for on a network that is up before it counts as unknown.
const RESOLVE_TRIES: u32 = 2;

/// Contexts of one process, before those of the next one to call as the same instance; as many processes apart they
/// are the same again.
const CONTEXTS_EACH: u64 = 1024;
const CONTEXTS_APART: u64 = 8; // so that all take two bytes

fn first_context(turn: u32) -> u64 {
    u64::from(turn) % CONTEXTS_APART * CONTEXTS_EACH
}

/// A session with a server.
pub(crate) struct ServerSession {
    pub(crate) device: Device,
    /// Whether the handshake is complete, or why it never will be.
    pub(crate) state: watch::Receiver<ServerSessionState>,
    /// The links that are followed; none where the server is on this machine.
    pub(crate) links: Option<watch::Receiver<Arc<Vec<Link>>>>,
    /// The context number of the session's latest datagram socket.
    context: Cell<u64>,
    /// In an agent that has had any: what links carried for them.
    pub(crate) accounting: RefCell<Option<DatagramAccounting>>,
    users: Cell<usize>,
    /// Notified when the last socket leaves the session.
    released: Notify,
}

/// What a connection that is being made waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectWait {
    Network,
    /// A network that costs is up, and it may not be paid for.
    FreeNetwork,
    Answer,
}

impl ConnectWait {
    /// In words, for people.
    pub(crate) fn why(self) -> &'static str {
        match self {
            ConnectWait::Network => "not connected yet: no network is up; it connects when one is",
            ConnectWait::FreeNetwork => {
                "not connected yet: only metered networks are up, and policy, deadline and budget \
                 do not allow them. It connects on a free one; D2TP_SO_POLICY any allows metered \
                 ones"
            }
            ConnectWait::Answer => {
                "not connected yet: the server does not answer; trying again. Are its address and \
                 key right?"
            }
        }
    }
}

/// How far a session got.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ServerSessionState {
    Opening,
    Open,
    Over(SessionEnd),
}

/// A socket's use of a session, which lives as long as there are any.
pub(crate) struct SessionUse(pub(crate) Rc<ServerSession>);

impl Drop for SessionUse {
    fn drop(&mut self) {
        self.0.users.set(self.0.users.get() - 1);
        if self.0.users.get() == 0 {
            self.0.released.notify_one();
        }
    }
}

/// Everything.
pub(crate) struct EngineState {
    pub(crate) port: PairPort,
    key: RefCell<Option<SecretKey>>,
    /// By the servers' addresses.
    sessions: RefCell<HashMap<String, Rc<OnceCell<Rc<ServerSession>>>>>,
    monitor: OnceCell<watch::Receiver<Arc<Vec<Link>>>>,
    pub(crate) listeners: ListenAddresses,
    pub(crate) datagrams: DatagramRegistry,
    pub(crate) flows: RefCell<HashMap<u64, Rc<CarriedFlow>>>,
    /// Sockets that an agent carries.
    pub(crate) agent_connections: RefCell<HashMap<u64, Rc<AgentConnection>>>,
    /// Decides for all sockets together.
    pub(crate) scheduler: Rc<dyn SocketScheduler>,
    /// Whether this is an agent's engine, whose sockets are other programs'.
    pub(crate) is_agent: bool,
    /// What sockets keep ahead of their programs.
    pub(crate) read_ahead: ReadAheadMemory,
    /// How they stand towards the machine's sleep.
    pub(crate) wake_registry: Rc<WakeRegistry>,
    next_name: Cell<u16>,
    /// The process ends: what sockets still hold is sent, and no more is waited for.
    pub(crate) leaving: watch::Sender<bool>,
}

impl EngineState {
    pub(crate) fn new(port: PairPort) -> EngineState {
        EngineState {
            port,
            key: RefCell::default(),
            sessions: RefCell::default(),
            monitor: OnceCell::new(),
            agent_connections: RefCell::default(),
            scheduler: Rc::new(OwnScheduler::default()),
            is_agent: false,
            listeners: ListenAddresses::default(),
            datagrams: DatagramRegistry::default(),
            flows: RefCell::default(),
            read_ahead: ReadAheadMemory::default(),
            wake_registry: Rc::default(),
            next_name: Cell::new(0),
            leaving: watch::channel(false).0,
        }
    }

    /// The engine of an agent, over the agent's links, which decides.
    pub(crate) fn of_agent(
        port: PairPort,
        links: watch::Receiver<Arc<Vec<Link>>>,
        judge: Rc<dyn SocketScheduler>,
    ) -> EngineState {
        EngineState {
            monitor: OnceCell::new_with(Some(links)),
            scheduler: judge,
            is_agent: true,
            ..EngineState::new(port)
        }
    }

    /// Who this process is.
    pub(crate) fn key(&self) -> Result<SecretKey, SocketFault> {
        if let Some(key) = &*self.key.borrow() {
            return Ok(key.clone());
        }
        let key = identity::key()?;
        *self.key.borrow_mut() = Some(key.clone());
        Ok(key)
    }

    /// The next address for a flow to call a listener from: 127.1.0.0 to 127.1.255.255.
    pub(crate) fn name(&self) -> Ipv4Addr {
        let next = self.next_name.get().wrapping_add(1);
        self.next_name.set(next);
        let [c, d] = next.to_be_bytes();
        Ipv4Addr::new(127, 1, c, d)
    }

    /// The session with a server, as whoever's key is in this file; none is this process's.
    pub(crate) async fn session(
        self: &Rc<EngineState>,
        server: &ServerAddress,
        key: Option<&Path>,
    ) -> Result<SessionUse, SocketFault> {
        let place = match key {
            Some(key) => format!("{server} as {}", key.display()),
            None => server.to_string(),
        };
        let cell = {
            let mut lines = self.sessions.borrow_mut();
            let cell = lines.entry(place.clone()).or_default();
            if cell.get().is_some_and(|line| line.is_over()) {
                *cell = Rc::default();
            }
            cell.clone()
        };
        let begin = || async {
            let key = match key {
                Some(file) => identity::read(file)?,
                None => self.key()?,
            };
            let line = Rc::new(self.begin(server, key).await?);
            let kept = keep(Rc::downgrade(self), place.clone(), line.clone());
            tokio::task::spawn_local(kept);
            Ok(line)
        };
        let line = cell.get_or_try_init(begin).await?.clone();
        line.users.set(line.users.get() + 1);
        Ok(SessionUse(line))
    }

    async fn begin(
        &self,
        server: &ServerAddress,
        key: SecretKey,
    ) -> Result<ServerSession, SocketFault> {
        let links = self.links().await;
        let (ours, theirs) = (key.public(), server.key);
        let lease = tokio::task::spawn_blocking(move || InstanceLease::take(ours, theirs)).await;
        let lease = lease.ok().flatten().map(Arc::new);
        let mut tries = 0;
        let mut device = loop {
            let options = DeviceOptions {
                server: server.clone(),
                key: key.clone(),
                config: EndpointConfig::default(),
            };
            let called = match &lease {
                Some(lease) => Device::with_lease(options, lease.clone()).await,
                None => Device::new(options).await,
            };
            match called {
                Ok(device) => break device,
                Err(error @ DriverError::Resolve { .. }) => {
                    let online = links
                        .as_ref()
                        .is_none_or(|links| links.borrow().iter().any(Link::is_usable));
                    tries = if online { tries + 1 } else { 0 };
                    if tries == RESOLVE_TRIES {
                        return Err(SocketFault::new(libc::EHOSTUNREACH, error));
                    }
                    tokio::time::sleep(RESOLVE_AGAIN).await;
                }
                Err(error) => return Err(SocketFault::new(libc::EIO, error)),
            }
        };
        let events = device.events();
        let (tell, state) = watch::channel(ServerSessionState::Opening);
        tokio::task::spawn_local(tell_state(events, tell));
        let links = links.filter(|links| !uses_system_routes(&server.host, &links.borrow()));
        match &links {
            Some(links) => device.follow_links(links.clone(), usage),
            None => {
                let used = device.use_default_route();
                used.map_err(|error| SocketFault::new(libc::ENETUNREACH, error))?;
            }
        }
        Ok(ServerSession {
            device,
            state,
            links,
            // What is under way for who had the instance before is for none of ours.
            context: Cell::new(lease.map_or(0, |lease| first_context(lease.turn()))),
            accounting: RefCell::default(),
            users: Cell::new(0),
            released: Notify::new(),
        })
    }

    /// The machine's links; none where they cannot be watched.
    pub(crate) async fn links(&self) -> Option<watch::Receiver<Arc<Vec<Link>>>> {
        let start = || async {
            let (_, monitor) = LinkMonitor::start(ClassRules::default()).await?;
            Ok::<_, d2tp_links::LinkError>(monitor.subscribe())
        };
        self.monitor.get_or_try_init(start).await.ok().cloned()
    }

    /// What a connection with these options may wait for while it is being made.
    pub(crate) async fn waits_for(&self, options: &SocketOptions) -> ConnectWait {
        let links = self.links().await;
        let links = links.map(|links| links.borrow().clone());
        waits_for(&links.unwrap_or_default(), options)
    }

    /// The networks changed in a way that we may not have seen.
    pub(crate) fn network_changed(&self) {
        self.try_links();
        for handed in self.agent_connections.borrow().values() {
            handed.network_changed();
        }
    }

    /// Every session tries all links at once.
    pub(crate) fn try_links(&self) {
        for line in self
            .sessions
            .borrow()
            .values()
            .filter_map(|cell| cell.get())
        {
            line.device.network_changed();
        }
    }

    /// Tells everybody that this process leaves; says whether there was anybody.
    pub(crate) fn say_goodbye(&self) -> bool {
        let lines = self.sessions.borrow();
        let lines: Vec<_> = lines.values().filter_map(|cell| cell.get()).collect();
        for line in &lines {
            line.device.say_goodbye();
        }
        let halls = datagrams::say_goodbye(self);
        self.listeners.say_goodbye() || halls || !lines.is_empty()
    }
}

impl ServerSession {
    /// A context for a datagram socket. What other programs send without one is 0.
    pub(crate) fn next_context(&self) -> u64 {
        let next = self.context.get() + 1;
        self.context.set(next);
        next
    }

    /// Links as they are, with what they carried for streams; what they did for datagrams is taken down.
    pub(crate) fn account_datagrams(&self, ways: &[LinkStatus]) -> Vec<LinkStatus> {
        match &mut *self.accounting.borrow_mut() {
            Some(tally) => {
                if let Some((stats, _)) = self.device.connection().datagram_stats() {
                    tally.update((stats.bytes_in, stats.bytes_out), ways);
                }
                tally.stream_statuses(ways)
            }
            None => ways.to_vec(),
        }
    }

    fn is_over(&self) -> bool {
        matches!(*self.state.borrow(), ServerSessionState::Over(_))
    }
}

/// What a link may be used for at all. Whether links that cost are, is said for each flow.
fn usage(link: &Link) -> LinkUse {
    match (link.kind, link.class.class) {
        (LinkKind::Loopback, _) | (_, CostClass::Roaming) => LinkUse::Off,
        (_, CostClass::Free) => LinkUse::Free,
        (_, CostClass::Metered) => LinkUse::Paid,
    }
}

fn waits_for(links: &[Link], options: &SocketOptions) -> ConnectWait {
    let leads_away = |link: &&Link| link.kind != LinkKind::Loopback;
    if links.iter().all(|link| !leads_away(&link)) {
        return ConnectWait::Answer;
    }
    let usable: Vec<&Link> = links
        .iter()
        .filter(leads_away)
        .filter(|link| link.is_usable())
        .collect();
    let pays = match options.policy {
        _ if options.budget == Some(0) => false,
        CostPolicy::Fast | CostPolicy::Any => true,
        CostPolicy::FreeFirst | CostPolicy::Balanced => options.deadline.is_some(),
        CostPolicy::FreeOnly => false,
    };
    match usable
        .iter()
        .all(|link| link.class.class != CostClass::Free)
    {
        _ if usable.is_empty() => ConnectWait::Network,
        true if !pays => ConnectWait::FreeNetwork,
        _ => ConnectWait::Answer,
    }
}

/// Whether a server is on this machine, or where no link leads: the system's routes are all there is.
fn uses_system_routes(host: &str, links: &[Link]) -> bool {
    let Ok(ip) = host.parse::<IpAddr>() else {
        return host == "localhost";
    };
    let leads_away = |link: &Link| link.kind != LinkKind::Loopback && link.is_usable();
    ip.is_loopback()
        || links.iter().any(|link| link.addresses.contains(&ip))
        || !links.iter().any(leads_away)
            && std::net::UdpSocket::bind(match ip {
                IpAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
                IpAddr::V6(_) => SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, 0)),
            })
            .is_ok_and(|socket| socket.connect((ip, 9)).is_ok())
}

async fn tell_state<T: Clone>(
    mut events: Receiver<(T, SessionEvent)>,
    tell: watch::Sender<ServerSessionState>,
) {
    loop {
        match events.recv().await {
            Ok((_, SessionEvent::Established { .. })) => {
                tell.send_replace(ServerSessionState::Open);
            }
            Ok((_, SessionEvent::Closed(end))) => {
                tell.send_replace(ServerSessionState::Over(end));
                return;
            }
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
    }
}

/// Ends a session that nobody has used for a while.
async fn keep(home: Weak<EngineState>, place: String, line: Rc<ServerSession>) {
    loop {
        line.released.notified().await;
        tokio::time::sleep(IDLE_KEPT).await;
        if line.users.get() == 0 {
            break;
        }
    }
    let Some(home) = home.upgrade() else { return };
    let is_ours =
        |cell: &Rc<OnceCell<Rc<ServerSession>>>| cell.get().is_some_and(|l| Rc::ptr_eq(l, &line));
    home.sessions
        .borrow_mut()
        .retain(|at, cell| *at != place || !is_ours(cell));
    if let Some(line) = Rc::into_inner(line) {
        line.device.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::since_boot;
    use d2tp_links::{CostAssessment, DefaultRoute};

    fn link(class: CostClass, up: bool) -> Link {
        Link {
            name: "wlan0".into(),
            index: 3,
            kind: LinkKind::Wifi,
            class: CostAssessment {
                class,
                because: "test".into(),
            },
            up,
            carrier: up,
            mtu_bytes: 1500,
            addresses: vec![IpAddr::from([192, 0, 2, 7])],
            routes: vec![DefaultRoute {
                metric: 1,
                ipv6: false,
                gateway: None,
                table: 254,
            }],
        }
    }

    #[test]
    fn what_a_connection_waits_for_follows_from_links_and_what_may_be_paid() {
        let (free, dear) = (link(CostClass::Free, true), link(CostClass::Metered, true));
        let gone = link(CostClass::Free, false);
        let options = |policy, deadline, budget| SocketOptions {
            policy,
            deadline,
            budget,
            ..SocketOptions::default()
        };
        let plain = |policy| options(policy, None, None);
        let hour = Some(since_boot() + Duration::from_secs(3600));
        for (links, options, waits) in [
            (
                vec![gone.clone()],
                plain(CostPolicy::Any),
                ConnectWait::Network,
            ),
            (
                vec![dear.clone(), gone.clone()],
                plain(CostPolicy::FreeOnly),
                ConnectWait::FreeNetwork,
            ),
            (
                vec![dear.clone()],
                plain(CostPolicy::FreeFirst),
                ConnectWait::FreeNetwork,
            ),
            (
                vec![dear.clone()],
                options(CostPolicy::FreeFirst, hour, None),
                ConnectWait::Answer,
            ),
            (
                vec![dear.clone()],
                options(CostPolicy::Fast, None, Some(0)),
                ConnectWait::FreeNetwork,
            ),
            (
                vec![dear.clone()],
                plain(CostPolicy::Any),
                ConnectWait::Answer,
            ),
            (
                vec![dear, free],
                plain(CostPolicy::FreeOnly),
                ConnectWait::Answer,
            ),
            (vec![], plain(CostPolicy::FreeOnly), ConnectWait::Answer),
        ] {
            assert_eq!(waits_for(&links, &options), waits, "{links:?} {options:?}");
        }
    }
}
