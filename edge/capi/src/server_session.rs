//! A session with a server, which all sockets share that connect to it.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{
    Device, DeviceOptions, DriverError, EndpointConfig, Flow, InstanceLease, LeaseClaim,
    LeaseRecord, LinkStatus, LinkUse, PublicKey, ReasonCode, ResumedLease, SecretKey,
    ServerAddress, SessionEnd, SessionEvent, is_by_system_route, is_loopback_host,
};
use d2tp_links::{CostClass, Link, LinkKind};
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::sync::{Notify, watch};

use crate::connection_store::ConnectionStore;
use crate::datagram_accounting::DatagramAccounting;
use crate::errno::SocketFault;
use crate::settings_file;

/// How long an unused session is kept for the next socket: a handshake costs more than an idle session.
const IDLE_KEPT: Duration = Duration::from_secs(10); // a guess

/// The interval between attempts to resolve a server's name while the machine has a network.
const RESOLVE_AGAIN: Duration = Duration::from_secs(2); // a guess

/// How often a name is resolved over a network that is up before it counts as unknown.
const RESOLVE_TRIES: u32 = 2;

/// Context numbers reserved for each process that uses the instance, one after the other.
const CONTEXTS_EACH: u64 = 1024;

const CONTEXTS_APART: u64 = 8; // so that all contexts take two bytes

fn first_context(turn: u32) -> u64 {
    u64::from(turn) % CONTEXTS_APART * CONTEXTS_EACH
}

/// A session with a server.
pub(crate) struct ServerSession {
    pub(crate) device: Device,
    /// The address of the server that the session is with.
    pub(crate) server: ServerAddress,
    /// The device's own key, by which the server knows it.
    own_key: PublicKey,
    /// Whether the handshake is complete, or why it failed.
    pub(crate) state: watch::Receiver<ServerSessionState>,
    /// The links, which are used unless the system's route leads to the server; `None` if it is on this machine.
    pub(crate) links: Option<watch::Receiver<Arc<Vec<Link>>>>,
    /// The context number of the session's latest datagram socket.
    context: Cell<u64>,
    /// In an agent: what links carried for the session's datagram sockets, if it had any.
    pub(crate) accounting: RefCell<Option<DatagramAccounting>>,
    users: Cell<usize>,
    /// Why the session was left for another server, if it was.
    left: OnceCell<String>,
    /// Flows that go on in the next agent, each with the id of the process that waits for it.
    waiting: RefCell<BTreeMap<u64, u32>>,
    /// Notified when the last socket leaves the session.
    released: Notify,
}

/// The state of a session.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ServerSessionState {
    Opening,
    Open,
    Over(SessionEnd),
}

/// A socket's use of a session, which lives while there is any.
pub(crate) struct SessionUse(pub(crate) Rc<ServerSession>);

impl Drop for SessionUse {
    fn drop(&mut self) {
        self.0.users.set(self.0.users.get() - 1);
        if self.0.users.get() == 0 {
            self.0.released.notify_one();
        }
    }
}

impl ServerSession {
    /// Opens a session over these links; `None`: by the system's routes.
    pub(crate) async fn begin(
        server: &ServerAddress,
        key: SecretKey,
        links: Option<watch::Receiver<Arc<Vec<Link>>>>,
    ) -> Result<ServerSession, SocketFault> {
        let (ours, theirs) = (key.public(), server.key);
        let lease = tokio::task::spawn_blocking(move || InstanceLease::take(ours, theirs)).await;
        let lease = lease.ok().flatten().map(Arc::new);
        let call = |options| async {
            match &lease {
                Some(lease) => Device::with_lease(options, lease.clone()).await,
                None => Device::new(options).await,
            }
        };
        let device = ServerSession::call(server, &key, links.as_ref(), call).await?;
        // Datagrams in transit for the instance's previous process must not reach this process's sockets.
        let context = lease.map_or(0, |lease| first_context(lease.turn()));
        ServerSession::over(device, server, ours, links, context)
    }

    /// Goes on with a session that another process had, from its record, and with the flows that are claimed.
    pub(crate) async fn resume(
        server: &ServerAddress,
        key: SecretKey,
        links: Option<watch::Receiver<Arc<Vec<Link>>>>,
        (lease, record): (InstanceLease, LeaseRecord),
        claims: &[(LeaseClaim, Arc<ConnectionStore>)],
    ) -> Result<(ServerSession, Vec<(u64, Flow)>), SocketFault> {
        let ours = key.public();
        let lease = Arc::new(lease);
        let claimed: Vec<LeaseClaim> = claims.iter().map(|(claim, _)| *claim).collect();
        let call =
            |options| Device::resume_lease(options, lease.clone(), &record.session, &claimed);
        let ResumedLease { device, flows } =
            ServerSession::call(server, &key, links.as_ref(), call).await?;
        // Before anything arrives.
        for (id, flow) in &flows {
            let claim = claims.iter().find(|(claim, _)| claim.flow == *id);
            if let Some((_, store)) = claim {
                flow.store_received(store.clone());
            }
        }
        let context = first_context(lease.turn());
        let session = ServerSession::over(device, server, ours, links, context)?;
        let is_claimed = |id: &u64| flows.iter().any(|(flow, _)| flow == id);
        let waiting = record.waiting.iter().copied();
        let waiting = waiting.filter(|(flow, _)| is_claimed(flow));
        session.waiting.borrow_mut().extend(waiting);
        session.write_record();
        Ok((session, flows))
    }

    /// Creates a device by `call`, once the server's name is resolved.
    async fn call<T, C: Future<Output = Result<T, DriverError>>>(
        server: &ServerAddress,
        key: &SecretKey,
        links: Option<&watch::Receiver<Arc<Vec<Link>>>>,
        call: impl Fn(DeviceOptions) -> C,
    ) -> Result<T, SocketFault> {
        if let Err(fault) = settings_file::use_network_settings() {
            // The server may be reached without it.
            tracing::warn!(error = %fault.text, "no HTTP proxy is used");
        }
        let mut tries = 0;
        loop {
            let options = DeviceOptions {
                server: server.clone(),
                key: key.clone(),
                config: EndpointConfig::default(),
            };
            match call(options).await {
                Ok(called) => return Ok(called),
                Err(error @ DriverError::Resolve { .. }) => {
                    let online =
                        links.is_none_or(|links| links.borrow().iter().any(Link::is_usable));
                    tries = if online { tries + 1 } else { 0 };
                    if tries == RESOLVE_TRIES {
                        return Err(SocketFault::new(libc::EHOSTUNREACH, error));
                    }
                    tokio::time::sleep(RESOLVE_AGAIN).await;
                }
                Err(error) => return Err(SocketFault::new(libc::EIO, error)),
            }
        }
    }

    /// The session of a device without links yet. Its sockets of datagrams have the contexts after `context`.
    fn over(
        mut device: Device,
        server: &ServerAddress,
        own_key: PublicKey,
        links: Option<watch::Receiver<Arc<Vec<Link>>>>,
        context: u64,
    ) -> Result<ServerSession, SocketFault> {
        let events = device.events();
        let (sender, state) = watch::channel(ServerSessionState::Opening);
        tokio::task::spawn_local(forward_state(events, sender));
        let links = links.filter(|_| !is_loopback_host(&server.host));
        let by_route = |links: &watch::Receiver<Arc<Vec<Link>>>| {
            is_by_system_route(&server.host, &links.borrow())
        };
        if links.as_ref().is_none_or(by_route) {
            let used = device.use_default_route();
            used.map_err(|error| SocketFault::new(libc::ENETUNREACH, error))?;
        }
        if let Some(links) = &links {
            // A network may come up just now: its routes are known to the system before they are known here.
            let host = server.host.clone();
            let is_by_route = move |links: &[Link]| is_by_system_route(&host, links);
            device.follow_links_or_route(links.clone(), usage, is_by_route);
        }
        Ok(ServerSession {
            device,
            server: server.clone(),
            own_key,
            state,
            links,
            context: Cell::new(context),
            accounting: RefCell::default(),
            users: Cell::new(0),
            left: OnceCell::new(),
            waiting: RefCell::default(),
            released: Notify::new(),
        })
    }

    /// Has a flow go on in the next agent if this one ends: this process waits for it.
    pub(crate) fn wait_for(&self, flow: u64, process: u32) {
        self.waiting.borrow_mut().insert(flow, process);
        self.write_record();
    }

    /// Records that nobody waits for a flow any more.
    pub(crate) fn forget_waiting(&self, flow: u64) {
        if self.waiting.borrow_mut().remove(&flow).is_some() {
            self.write_record();
        }
    }

    /// Whether processes wait for flows of the session.
    pub(crate) fn is_waited_for(&self) -> bool {
        !self.waiting.borrow().is_empty()
    }

    /// Writes what the next agent needs to go on with the session.
    pub(crate) fn write_record(&self) {
        let waiting = self.waiting.borrow();
        let waiting = waiting.iter().map(|(flow, process)| (*flow, *process));
        if let Err(error) = self.device.write_lease_record(waiting.collect()) {
            tracing::debug!(%error, "no record for the next agent");
        }
    }

    /// Leaves the session to the next agent.
    pub(crate) fn leave_to_next_agent(&self) {
        self.write_record();
        self.device.pause();
    }

    /// The next context number for a datagram socket. Programs without contexts use 0.
    pub(crate) fn next_context(&self) -> u64 {
        let next = self.context.get() + 1;
        self.context.set(next);
        next
    }

    /// Statuses of the links with what they carried for streams; what they carried for datagrams is
    /// accounted for separately.
    pub(crate) fn account_datagrams(&self, statuses: &[LinkStatus]) -> Vec<LinkStatus> {
        match &mut *self.accounting.borrow_mut() {
            Some(tally) => {
                if let Some((stats, _)) = self.device.connection().datagram_stats() {
                    tally.update((stats.bytes_in, stats.bytes_out), statuses);
                }
                tally.stream_statuses(statuses)
            }
            None => statuses.to_vec(),
        }
    }

    /// Resolves some time after the last socket has left the session.
    pub(crate) async fn until_unused(&self) {
        loop {
            self.released.notified().await;
            tokio::time::sleep(IDLE_KEPT).await;
            if self.users.get() == 0 {
                return;
            }
        }
    }

    /// A socket's use of the session.
    pub(crate) fn join(self: &Rc<ServerSession>) -> SessionUse {
        self.users.set(self.users.get() + 1);
        SessionUse(self.clone())
    }

    /// Whether the session is over. Its state reports that a moment later.
    pub(crate) fn is_over(&self) -> bool {
        self.left.get().is_some() || self.device.ended().is_some()
    }

    /// Whether the handshake was complete before now, and the session is not known to be over.
    pub(crate) fn is_established(&self) -> bool {
        *self.state.borrow() == ServerSessionState::Open
    }

    /// Whether a socket uses the session.
    pub(crate) fn is_used(&self) -> bool {
        self.users.get() > 0
    }

    /// The links as they are known now; none if they are not watched.
    pub(crate) fn known_links(&self) -> Arc<Vec<Link>> {
        let known = |links: &watch::Receiver<Arc<Vec<Link>>>| links.borrow().clone();
        self.links.as_ref().map(known).unwrap_or_default()
    }

    /// Ends the session, because another server is used from now on.
    pub(crate) fn leave(&self, why: String) {
        tracing::warn!("{why}");
        let _ = self.left.set(why);
        self.device.say_goodbye();
    }

    /// Whether the session was left for another server.
    pub(crate) fn is_left(&self) -> bool {
        self.left.get().is_some()
    }

    /// Whether the server does not let this device in.
    pub(crate) fn is_refused(&self) -> bool {
        let state = self.state.borrow();
        matches!(
            *state,
            ServerSessionState::Over(SessionEnd::Refused(ReasonCode::NotAllowed))
        )
    }

    /// The fault of what the session carried, if it is over.
    pub(crate) fn fault_of_session(&self) -> Option<SocketFault> {
        match (&*self.state.borrow(), self.left.get()) {
            (ServerSessionState::Over(end), _) => Some(self.fault_of_end(end)),
            // The session's end is reported a moment later.
            (_, Some(why)) => Some(SocketFault::new(libc::ECONNRESET, why)),
            (_, None) => None,
        }
    }

    /// The fault of what the session carried when it ended like this.
    pub(crate) fn fault_of_end(&self, end: &SessionEnd) -> SocketFault {
        match self.left.get() {
            Some(why) => SocketFault::new(libc::ECONNRESET, why),
            None => SocketFault::of_session(end, &self.server, &self.own_key),
        }
    }
}

/// What a link may be used for. Use of metered links is decided for each flow.
fn usage(link: &Link) -> LinkUse {
    match (link.kind, link.class.class) {
        (LinkKind::Loopback, _) | (_, CostClass::Roaming) => LinkUse::Off,
        (_, CostClass::Free) => LinkUse::Free,
        (_, CostClass::Metered) => LinkUse::Paid,
    }
}

async fn forward_state<T: Clone>(
    mut events: Receiver<(T, SessionEvent)>,
    sender: watch::Sender<ServerSessionState>,
) {
    loop {
        match events.recv().await {
            Ok((_, SessionEvent::Established { .. })) => {
                sender.send_replace(ServerSessionState::Open);
            }
            Ok((_, SessionEvent::Closed(end))) => {
                sender.send_replace(ServerSessionState::Over(end));
                return;
            }
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
    }
}
