//! The state of the engine: sessions with servers, listening addresses, and flows of sockets.
//!
//! A session begins when a socket first connects to its server, is shared by all sockets that
//! connect there, and ends some time after the last of them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use d2tp_driver::{PublicKey, SecretKey, ServerList, SessionEvent};
use d2tp_links::{ClassRules, Link, LinkMonitor};
use tokio::sync::{OnceCell, broadcast, watch};

use crate::agent_connection::AgentConnection;
use crate::carried_flow::CarriedFlow;
use crate::connect_call::ConnectTarget;
use crate::connect_wait::ConnectWait;
use crate::datagrams::DatagramRegistry;
use crate::errno::SocketFault;
use crate::flow_info::last_info;
use crate::identity;
use crate::listen_address::ListenAddresses;
use crate::options::SocketOptions;
use crate::pair::PairPort;
use crate::proxy_choice::{choose_proxy, silent_proxy_left};
use crate::read_ahead::ReadAheadMemory;
use crate::server_session::{ServerSession, SessionUse};
use crate::socket_scheduler::{OwnScheduler, SocketScheduler};
use crate::wake_registry::WakeRegistry;

/// The state of an engine, on its own thread.
pub(crate) struct EngineState {
    pub(crate) port: PairPort,
    key: RefCell<Option<SecretKey>>,
    /// Sessions by the addresses of their servers and key file.
    sessions: RefCell<HashMap<String, Rc<OnceCell<Rc<ServerSession>>>>>,
    /// The keys of servers that refuse this device, by the addresses of the server and the key file.
    refusing: RefCell<HashMap<String, Vec<PublicKey>>>,
    monitor: OnceCell<watch::Receiver<Arc<Vec<Link>>>>,
    pub(crate) listeners: ListenAddresses,
    pub(crate) datagrams: DatagramRegistry,
    pub(crate) flows: RefCell<HashMap<u64, Rc<CarriedFlow>>>,
    /// Connections that an agent carries for this process.
    pub(crate) agent_connections: RefCell<HashMap<u64, Rc<AgentConnection>>>,
    /// The scheduler of all sockets.
    pub(crate) scheduler: Rc<dyn SocketScheduler>,
    /// Whether this is an agent's engine, whose sockets are other programs'.
    pub(crate) is_agent: bool,
    /// The memory used by data that sockets read ahead of their programs.
    pub(crate) read_ahead: ReadAheadMemory,
    /// The wake-up needs of sockets.
    pub(crate) wake_registry: Rc<WakeRegistry>,
    next_name: Cell<u16>,
    /// Set when the process ends: data that sockets hold is sent, and nothing else is waited for.
    pub(crate) leaving: watch::Sender<bool>,
    /// Set when this agent ends, and the next one goes on with connections.
    pub(crate) handing_over: watch::Sender<bool>,
}

impl EngineState {
    pub(crate) fn new(port: PairPort) -> EngineState {
        EngineState {
            port,
            key: RefCell::default(),
            sessions: RefCell::default(),
            refusing: RefCell::default(),
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
            handing_over: watch::channel(false).0,
        }
    }

    /// The engine of an agent, over the agent's links and its scheduler.
    pub(crate) fn of_agent(
        port: PairPort,
        links: watch::Receiver<Arc<Vec<Link>>>,
        scheduler: Rc<dyn SocketScheduler>,
    ) -> EngineState {
        EngineState {
            monitor: OnceCell::new_with(Some(links)),
            scheduler,
            is_agent: true,
            ..EngineState::new(port)
        }
    }

    /// The key of this process.
    pub(crate) fn key(&self) -> Result<SecretKey, SocketFault> {
        if let Some(key) = &*self.key.borrow() {
            return Ok(key.clone());
        }
        let key = identity::key()?;
        *self.key.borrow_mut() = Some(key.clone());
        Ok(key)
    }

    /// The next loopback address from which a flow connects to a listener: 127.1.0.0 to
    /// 127.1.255.255.
    pub(crate) fn name(&self) -> Ipv4Addr {
        let next = self.next_name.get().wrapping_add(1);
        self.next_name.set(next);
        let [c, d] = next.to_be_bytes();
        Ipv4Addr::new(127, 1, c, d)
    }

    /// The session with one of these servers, under the key in this file; `None` for this process's own key.
    pub(crate) async fn session(
        self: &Rc<EngineState>,
        servers: &ServerList,
        key: Option<&Path>,
    ) -> Result<SessionUse, SocketFault> {
        let place = session_name(servers, key);
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
            let links = self.links().await;
            let refusing = self.refusing.borrow().get(&place).cloned();
            let server = choose_proxy(servers, &refusing.unwrap_or_default(), links.as_ref()).await;
            let line = Rc::new(ServerSession::begin(&server, key, links).await?);
            self.keep_session(place.clone(), line.clone(), servers.clone());
            Ok(line)
        };
        let line = cell.get_or_try_init(begin).await?.clone();
        Ok(line.join())
    }

    /// Ends the session when it is not needed any more. Until then an agent's has a record.
    fn keep_session(self: &Rc<Self>, place: String, line: Rc<ServerSession>, servers: ServerList) {
        if self.is_agent {
            tokio::task::spawn_local(renew_record(line.device.events(), Rc::downgrade(&line)));
        }
        let kept = keep(Rc::downgrade(self), place, line, servers);
        tokio::task::spawn_local(kept);
    }

    /// Adds a session that another agent had. New sockets use it, too, unless they have another one already.
    pub(crate) fn adopt(
        self: &Rc<Self>,
        servers: &ServerList,
        key: Option<&Path>,
        line: &Rc<ServerSession>,
    ) {
        let place = session_name(servers, key);
        let mut lines = self.sessions.borrow_mut();
        let cell = lines.entry(place.clone()).or_default();
        if cell.get().is_some_and(|line| line.is_over()) {
            *cell = Rc::default();
        }
        // It fails if there is another one, or one begins.
        let _ = cell.set(line.clone());
        drop(lines);
        self.keep_session(place, line.clone(), servers.clone());
    }

    /// Leaves a server out from now on if it does not let this device in; false if it does, or if there is no other.
    pub(crate) fn leave_refusing_server(
        &self,
        session: &ServerSession,
        connect_target: &ConnectTarget,
    ) -> bool {
        if !session.is_refused() {
            return false;
        }
        let servers = &connect_target.servers;
        let place = session_name(servers, connect_target.key.as_deref());
        let mut refusing = self.refusing.borrow_mut();
        let refusing = refusing.entry(place).or_default();
        if !refusing.contains(&session.server.key) {
            refusing.push(session.server.key);
        }
        let is_other_left = refusing.len() < servers.servers().len();
        if !is_other_left {
            // The operator may have added this device by the next time.
            refusing.clear();
        }
        is_other_left
    }

    /// The machine's links; `None` if they cannot be watched.
    pub(crate) async fn links(&self) -> Option<watch::Receiver<Arc<Vec<Link>>>> {
        let start = || async {
            let (_, monitor) = LinkMonitor::start(ClassRules::default()).await?;
            Ok::<_, d2tp_links::LinkError>(monitor.subscribe())
        };
        self.monitor.get_or_try_init(start).await.ok().cloned()
    }

    /// What a connection attempt with these options waits for now.
    pub(crate) async fn waits_for(&self, options: &SocketOptions) -> ConnectWait {
        let links = self.links().await;
        let links = links.map(|links| links.borrow().clone());
        ConnectWait::of(&links.unwrap_or_default(), options)
    }

    /// Registers a flow before its program's socket is connected, so that calls on the socket find it.
    pub(crate) fn register(&self, held: CarriedFlow) -> Rc<CarriedFlow> {
        let held = Rc::new(held);
        let serial = held.status.serial;
        self.flows.borrow_mut().insert(serial, held.clone());
        held
    }

    /// Removes a flow that is over.
    pub(crate) fn unregister(&self, held: &CarriedFlow) {
        let _ = held.status.last.set(last_info(held));
        held.status.over.store(true, Ordering::Relaxed);
        self.flows.borrow_mut().remove(&held.status.serial);
        held.forget_waiting();
    }

    /// Removes a flow that the next agent goes on with.
    pub(crate) fn forget(&self, held: &CarriedFlow) {
        self.flows.borrow_mut().remove(&held.status.serial);
    }

    /// Handles a change of whether the process holds a D-Lock. It reads the current state, so two quick
    /// changes may report the same state twice.
    pub(crate) fn on_dlock_changed(&self) {
        for handed in self.agent_connections.borrow().values() {
            handed.send_dlock();
        }
        self.wake_registry.reconsider();
        self.wake_registry.changed.notify_one();
    }

    /// Handles a notice that the networks changed.
    pub(crate) fn network_changed(&self) {
        self.try_links();
        for handed in self.agent_connections.borrow().values() {
            handed.network_changed();
        }
    }

    /// Makes every session try all links at once.
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

    /// Informs all peers that this process ends, but for those whose sessions go on in the next agent. Returns whether
    /// there were any.
    pub(crate) fn say_goodbye(&self) -> bool {
        let lines = self.sessions.borrow();
        let lines: Vec<_> = lines.values().filter_map(|cell| cell.get()).collect();
        for line in &lines {
            match line.is_waited_for() {
                true => line.leave_to_next_agent(),
                false => line.device.say_goodbye(),
            }
        }
        let halls = self.datagrams.say_goodbye();
        self.listeners.say_goodbye() || halls || !lines.is_empty()
    }
}

/// The name of a session with one of these servers, under the key in this file.
fn session_name(servers: &ServerList, key: Option<&Path>) -> String {
    match key {
        Some(key) => format!("{servers} as {}", key.display()),
        None => servers.to_string(),
    }
}

/// Writes the session's record again when what it needs to go on has changed.
async fn renew_record<T: Clone>(
    mut events: broadcast::Receiver<(T, SessionEvent)>,
    line: Weak<ServerSession>,
) {
    loop {
        match events.recv().await {
            Ok((_, SessionEvent::Established { .. } | SessionEvent::HybridKeys))
            | Err(broadcast::error::RecvError::Lagged(_)) => match line.upgrade() {
                Some(line) => line.write_record(),
                None => return,
            },
            Ok(_) => {}
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

/// Ends a session that has been unused for a while, and one whose server is silent while another one answers.
async fn keep(
    home: Weak<EngineState>,
    place: String,
    line: Rc<ServerSession>,
    servers: ServerList,
) {
    tokio::select! {
        () = line.until_unused() => {}
        why = silent_proxy_left(&line, &servers) => {
            line.leave(why);
            line.until_unused().await;
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
