//! The engine of an agent: it carries sockets of other programs that use this library, with the
//! links, sessions and scheduler of one device for all of them (`docs/agent.md`, "Sockets of
//! programs").
//!
//! The same tasks carry sockets as in a program's own engine (`connect`, `pump`, `policy`). Two
//! things differ: the agent's scheduler decides about metered links, and messages inform the
//! process that owns the socket.

use std::cell::Cell;
use std::os::fd::AsRawFd as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use d2tp_links::Link;
use socket2::Socket;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::time::timeout;

pub use crate::agent_message::{AgentCall, ReopenClaim, VERSION};
use crate::agent_message::{
    ConnectionClaim, MessageFromAgent, MessageReader, MessageToAgent, send_message,
};
use crate::agent_socket::AgentSocket;
use crate::carried_flow::CarriedFlow;
use crate::connect;
use crate::connect_call::ConnectTarget;
use crate::connection_status::ConnectionStatus;
use crate::connection_store::{ConnectionStore, KernelCounts};
use crate::datagrams;
use crate::engine_state::EngineState;
use crate::errno::SocketFault;
use crate::kept_connections::{KeptConnections, LEFT_FOR};
use crate::options::SocketOptions;
use crate::pair::{self, PairPort};
use crate::pump;
use crate::session_recovery::SessionRecovery;
use crate::socket_owner::SocketOwner;
pub use crate::socket_scheduler::{SchedulerClient, SocketScheduler};

/// The most sockets that an agent carries at once; processes carry further ones themselves. Each
/// takes two descriptors, of which a process has a thousand by default.
pub const SOCKETS_MAX: usize = 384;

/// How long an ending agent waits to send what programs wrote before they ended.
const LAST_WORDS: Duration = Duration::from_secs(5); // the same as at `exit` of a program

/// Time for the last packets to be sent.
const GRACE: Duration = Duration::from_millis(20); // the same as in the driver

/// Carries the sockets of other programs in an agent.
pub struct AgentCarrier {
    engine: Rc<EngineState>,
    sockets: Cell<usize>,
    kept_connections: KeptConnections,
    session_recovery: SessionRecovery,
}

impl AgentCarrier {
    /// Creates a carrier that uses these links and this scheduler. Must be called on a tokio
    /// runtime, in a set of local tasks.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(
        links: watch::Receiver<Arc<Vec<Link>>>,
        scheduler: Rc<dyn SocketScheduler>,
    ) -> std::io::Result<AgentCarrier> {
        Ok(AgentCarrier {
            engine: Rc::new(EngineState::of_agent(
                PairPort::without_programs()?,
                links,
                scheduler,
            )),
            sockets: Cell::new(0),
            kept_connections: KeptConnections::default(),
            session_recovery: SessionRecovery::default(),
        })
    }

    /// Why this call is refused; `None` if it is accepted.
    pub fn refusal(&self, call: &AgentCall) -> Option<String> {
        if let Some(why) = version_mismatch(call.version) {
            return Some(why);
        }
        if self.sockets.get() >= SOCKETS_MAX {
            return Some(format!("{SOCKETS_MAX} sockets are carried already"));
        }
        None
    }

    /// Carries the requested socket, and reports its status on `stream`.
    pub async fn carry(&self, stream: UnixStream, call: AgentCall) {
        self.sockets.set(self.sockets.get() + 1);
        let _place = SocketSlot(&self.sockets);
        let stream = Rc::new(stream);
        if send_message(&stream, &TAKEN, None).await.is_err() {
            return;
        }
        let mut reader = MessageReader::new(stream.clone());
        let socket = AgentSocket::new(&call);
        if call.datagrams {
            socket.attach(stream, reader);
            if let Some(fault) = self.make_datagrams(&socket, &call).await {
                socket.owner.enqueue(MessageFromAgent::fault(&fault));
            }
            return socket.end().await;
        }
        let mut store = None;
        let from = loop {
            match reader.next().await {
                Ok(Some(MessageToAgent::Store)) => store = reader.take_descriptor(),
                Ok(Some(MessageToAgent::Carry { from })) => break from,
                _ => return,
            }
        };
        let Some(end) = reader.take_descriptor() else {
            return;
        };
        let end = PassedSocket {
            socket: end.into(),
            from,
            store: store.map(|store| Arc::new(ConnectionStore::open(store))),
            process: stream.peer_cred().ok().and_then(|peer| peer.pid()),
        };
        socket.attach(stream, reader);
        socket.owner.set_continues(end.store.is_some());
        let token = call.keep.as_ref().map(|keep| keep.token);
        let kept = token.map_or(Ok(()), |token| self.kept_connections.keep(token, &socket));
        let fault = match kept {
            Ok(()) => self.make(&socket, &call, end).await,
            Err(fault) => {
                socket.owner.enqueue(MessageFromAgent::fault(&fault));
                None
            }
        };
        if socket.is_left() {
            return socket.leave();
        }
        if let Some(token) = token {
            let nobody_has_it = socket.owner.away_since().is_some();
            self.kept_connections
                .end(&token, fault.filter(|_| nobody_has_it));
        }
        socket.end().await;
    }

    /// Takes the descriptor of a program that requests its connection next.
    pub async fn keep(&self, stream: UnixStream, claim: ReopenClaim) {
        let stream = Rc::new(stream);
        if send_message(&stream, &TAKEN, None).await.is_err() {
            return;
        }
        let mut reader = MessageReader::new(stream.clone());
        let left = timeout(LEFT_FOR, reader.next()).await;
        let (Ok(Ok(Some(MessageToAgent::Left))), Some(fd)) = (left, reader.take_descriptor())
        else {
            return;
        };
        let said = match self.kept_connections.deposit(claim.token, fd) {
            Ok(()) => MessageFromAgent::Open { claim: None },
            Err(fault) => MessageFromAgent::fault(&fault),
        };
        let is_left = matches!(said, MessageFromAgent::Open { .. });
        let _ = send_message(&stream, &said, None).await;
        if !is_left {
            return;
        }
        tokio::time::sleep(LEFT_FOR).await;
        self.kept_connections.forget(&claim.token);
    }

    /// Gives a kept connection to another process.
    pub async fn reopen(&self, stream: UnixStream, claim: ReopenClaim) {
        let stream = Rc::new(stream);
        if send_message(&stream, &TAKEN, None).await.is_err() {
            return;
        }
        match self.kept_connections.find(&claim.token) {
            Ok(socket) if socket.owner.wait_until_away().await => {
                let reader = MessageReader::new(stream.clone());
                socket.attach(stream, reader);
                // Only the process that opened it has what the next agent needs.
                socket.owner.set_continues(false);
                if let Some(held) = &*socket.held.borrow() {
                    held.forget_waiting();
                }
                socket.owner.enqueue(socket.reopened_message());
            }
            Ok(_) => {
                let fault = SocketFault::new(libc::EBUSY, "another process has this connection");
                let _ = send_message(&stream, &MessageFromAgent::fault(&fault), None).await;
            }
            Err(fault) => {
                let _ = send_message(&stream, &MessageFromAgent::fault(&fault), None).await;
            }
        }
    }

    /// Returns the descriptor of a connection to the process that reopened it.
    pub async fn descriptor(&self, stream: UnixStream, claim: ReopenClaim) {
        if send_message(&stream, &TAKEN, None).await.is_err() {
            return;
        }
        let socket = self.kept_connections.find(&claim.token);
        let fd = socket.and_then(|socket| {
            let none = || SocketFault::new(libc::ENOENT, "nobody opened this connection again");
            socket.owner.descriptor().ok_or_else(none)
        });
        let _ = match fd {
            Ok(fd) => {
                let open = MessageFromAgent::Open { claim: None };
                send_message(&stream, &open, Some(fd)).await
            }
            Err(fault) => send_message(&stream, &MessageFromAgent::fault(&fault), None).await,
        };
    }

    /// Opens a connection or goes on with it, and carries it; returns why it broke.
    async fn make(
        &self,
        socket: &Rc<AgentSocket>,
        call: &AgentCall,
        end: PassedSocket,
    ) -> Option<SocketFault> {
        let conn_status = ConnectionStatus::new();
        let opened = async {
            if let Some(claim) = &call.resumes {
                let latest = || socket.options.borrow().clone();
                return self
                    .resume(
                        call,
                        claim,
                        &end,
                        (conn_status.clone(), &socket.owner),
                        latest,
                    )
                    .await;
            }
            let options = SocketOptions::try_from(&call.options)?;
            let servers = call.server.parse();
            let connect_target = ConnectTarget {
                servers: servers.map_err(|error| SocketFault::new(libc::EINVAL, error))?,
                target: call.target.clone(),
                key: Some(call.key.clone()),
                owner: Some(socket.owner.clone()),
            };
            let latest = || socket.options.borrow().clone();
            connect::open(
                &self.engine,
                &connect_target,
                &options,
                conn_status.clone(),
                latest,
            )
            .await
        };
        let opened = tokio::select! {
            opened = opened => opened,
            // The owner does not wait for the connection any more.
            () = socket.owner.gone() => return None,
        };
        let held = match opened {
            Ok(held) => {
                let held = held.owned_by(socket.owner.clone());
                self.engine.register(match &end.store {
                    Some(store) if call.resumes.is_none() => held.stored_in(store.clone()),
                    _ => held,
                })
            }
            Err(fault) => {
                socket.owner.enqueue(MessageFromAgent::fault(&fault));
                return Some(fault);
            }
        };
        let claim = held.claim();
        if let (Some(claim), Some(session)) = (&claim, &held.session) {
            session
                .0
                .wait_for(claim.flow, end.process.unwrap_or(0) as u32);
        }
        // From here on changed options of the program apply to the flow.
        socket.held.borrow_mut().replace(held.clone());
        // The message is sent first, so that the program's library never repeats a connection that
        // was made for one that waits.
        socket.owner.send(MessageFromAgent::Open { claim }).await;
        // Otherwise the program has closed its socket, and the flow is closed as well.
        match end.join().await {
            Ok(stream) => pump::run(self.engine.clone(), held, stream).await,
            Err(_) => self.engine.unregister(&held),
        }
        conn_status.fault.get().cloned()
    }

    /// Goes on with a connection that another agent carried.
    async fn resume(
        &self,
        call: &AgentCall,
        claim: &ConnectionClaim,
        end: &PassedSocket,
        (conn_status, owner): (Arc<ConnectionStatus>, &SocketOwner),
        latest: impl Fn() -> Option<SocketOptions>,
    ) -> Result<CarriedFlow, SocketFault> {
        let store = (end.store.clone())
            .ok_or_else(|| SocketFault::new(libc::EINVAL, "a claim without its store"))?;
        let counts = match store.is_joined() {
            true => store.resume(end.socket.as_raw_fd()),
            false => Ok(KernelCounts::default()),
        };
        let counts = counts.map_err(|error| SocketFault::new(libc::ECONNRESET, error))?;
        let recovery = &self.session_recovery;
        let (stored, owned) = ((store, counts), (conn_status, owner));
        recovery
            .resume(&self.engine, call, claim, stored, owned, latest)
            .await
    }

    /// Creates a datagram socket: a session, whose program's socket is not connected yet.
    async fn make_datagrams(
        &self,
        socket: &Rc<AgentSocket>,
        call: &AgentCall,
    ) -> Option<SocketFault> {
        let conn_status = ConnectionStatus::new();
        let opened = async {
            let begun = SocketOptions::try_from(&call.options)?;
            let servers = call.server.parse();
            let connect_target = ConnectTarget {
                servers: servers.map_err(|error| SocketFault::new(libc::EINVAL, error))?,
                target: None,
                key: Some(call.key.clone()),
                owner: Some(socket.owner.clone()),
            };
            let latest = || socket.options.borrow().clone().unwrap_or(begun.clone());
            datagrams::open(&self.engine, &connect_target, latest, conn_status.clone()).await
        };
        let opened = tokio::select! {
            opened = opened => opened,
            () = socket.owner.gone() => return None,
        };
        let (held, context) = match opened {
            Ok((held, context)) => (held.owned_by(socket.owner.clone()), context),
            Err(fault) => return Some(fault),
        };
        let held = self.engine.register(held);
        socket.held.borrow_mut().replace(held.clone());
        let over = datagrams::carry_for_agent(&self.engine, socket, &held, context).await;
        self.engine.unregister(&held);
        over
    }

    /// Sends what programs wrote before they ended.
    pub async fn flush(&self) {
        self.kept_connections.clear();
        let is_left = |held: &Rc<CarriedFlow>| held.is_orphan() && !held.is_delivered();
        let delivered = async {
            while self.engine.flows.borrow().values().any(is_left) {
                tokio::time::sleep(GRACE).await;
            }
        };
        let _ = timeout(LAST_WORDS, delivered).await;
    }

    /// Leaves connections to the next agent, and closes all others.
    pub async fn close(&self) {
        self.engine.handing_over.send_replace(true);
        let is_held = |held: &Rc<CarriedFlow>| held.continues();
        let left = async {
            while self.engine.flows.borrow().values().any(is_held) {
                tokio::task::yield_now().await;
            }
        };
        let _ = timeout(GRACE, left).await;
        if self.engine.say_goodbye() {
            tokio::time::sleep(GRACE).await;
        }
    }
}

/// The engine's end of a program's socket, as the program's process passed it.
struct PassedSocket {
    socket: Socket,
    /// The port at which the program's socket waits.
    from: u16,
    /// What outlives this agent of the connection.
    store: Option<Arc<ConnectionStore>>,
    process: Option<libc::pid_t>,
}

impl PassedSocket {
    /// Connects the program's socket, unless another agent has done that.
    async fn join(self) -> std::io::Result<TcpStream> {
        let Some(store) = self.store else {
            return pair::join(self.socket, self.from).await;
        };
        if store.is_joined() {
            return TcpStream::from_std(self.socket.into());
        }
        let stream = pair::join(self.socket, self.from).await?;
        if let Err(error) = store.on_joined(stream.as_raw_fd()) {
            tracing::warn!(%error, "a connection will not outlive this agent");
        }
        Ok(stream)
    }
}

struct SocketSlot<'a>(&'a Cell<usize>);

impl Drop for SocketSlot<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// The answer that a call is accepted.
const TAKEN: MessageFromAgent = MessageFromAgent::Taken {
    ok: true,
    version: VERSION,
    notices: true,
    locks: true,
    resumes: true,
};

/// The error for an unsupported version of the messages; `None` if it is supported.
pub fn version_mismatch(version: u32) -> Option<String> {
    let ours = format!("this agent carries sockets by version {VERSION} of these messages");
    (version != VERSION).then(|| format!("{ours}, not {version}"))
}
