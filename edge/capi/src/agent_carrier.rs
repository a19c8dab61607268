//! The engine of an agent: it carries sockets of other programs that use this library, with one device's
//! links, sessions and scheduler for all of them (`docs/agent.md`, "Sockets of programs").
//!
//! The same tasks carry as in a program's own engine (`connect`, `pump`, `policy`); only who decides about
//! links that cost is another, and whoever the socket belongs to is told by messages.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use d2tp_links::Link;
use tokio::net::UnixStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{Instant, timeout};

pub use crate::agent_message::{AgentCall, VERSION};
use crate::agent_message::{FromAgent, MessageReader, ToAgent, send_message};
use crate::connect;
use crate::datagrams::{self, DatagramPeer};
use crate::engine_state::{ConnectWait, EngineState};
use crate::errno::SocketFault;
use crate::info::D2tpInfo;
use crate::kept_connections::{KEPT_FOR, KeptConnections, LEFT_FOR};
use crate::options::SocketOptions;
use crate::pair::{self, PairPort};
use crate::pump::{self, CarriedFlow};
pub use crate::reopen_token::ReopenClaim;
pub use crate::socket_scheduler::{SchedulerClient, SocketScheduler};
use crate::table::ConnectionStatus;

/// Sockets that are carried at a time; further ones are their own processes' to carry. Each takes two
/// descriptors, of which a process has a thousand unless it is given more.
pub const SOCKETS_MAX: usize = 384;

/// Flushes of one socket that are waited for at a time; others are answered "not yet".
const ASKS_MAX: usize = 64;

/// How long a program may take to hear of a fault before its socket breaks without it.
const HEARD_WITHIN: Duration = Duration::from_secs(1); // a guess: it is on this machine

/// How long what programs wrote before they ended is waited for when the agent ends.
const LAST_WORDS: Duration = Duration::from_secs(5); // as `exit` of a program

/// For the last packets.
const GRACE: Duration = Duration::from_millis(20); // as the driver's own

/// What an agent carries for programs.
pub struct AgentCarrier {
    engine: Rc<EngineState>,
    sockets: Cell<usize>,
    kept_connections: KeptConnections,
}

impl AgentCarrier {
    /// Over these links, as `judge` decides. Must be called on a runtime, in a set of local tasks.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(
        links: watch::Receiver<Arc<Vec<Link>>>,
        judge: Rc<dyn SocketScheduler>,
    ) -> std::io::Result<AgentCarrier> {
        Ok(AgentCarrier {
            engine: Rc::new(EngineState::of_agent(
                PairPort::without_programs()?,
                links,
                judge,
            )),
            sockets: Cell::new(0),
            kept_connections: KeptConnections::default(),
        })
    }

    /// Why this is not carried, if it is not.
    pub fn refusal(&self, call: &AgentCall) -> Option<String> {
        if let Some(why) = version_mismatch(call.version) {
            return Some(why);
        }
        if self.sockets.get() >= SOCKETS_MAX {
            return Some(format!("{SOCKETS_MAX} sockets are carried already"));
        }
        None
    }

    /// Carries what was asked for on `stream`, and tells there what becomes of it.
    pub async fn carry(&self, stream: UnixStream, call: AgentCall) {
        self.sockets.set(self.sockets.get() + 1);
        let _place = SocketSlot(&self.sockets);
        let stream = Rc::new(stream);
        if send_message(&stream, &TAKEN, None).await.is_err() {
            return;
        }
        let mut ear = MessageReader::new(stream.clone());
        let owner = SocketOwner::new(&call);
        if call.datagrams {
            owner.attach(stream, ear);
            if let Some(fault) = self.make_datagrams(&owner, &call).await {
                owner.enqueue(FromAgent::fault(&fault));
            }
            return owner.end().await;
        }
        let Ok(Some(ToAgent::Carry { from })) = ear.next().await else {
            return;
        };
        let Some(end) = ear.take_descriptor() else {
            return;
        };
        owner.attach(stream, ear);
        let token = call.keep.as_ref().map(|keep| keep.token);
        let kept = token.map_or(Ok(()), |token| self.kept_connections.keep(token, &owner));
        let fault = match kept {
            Ok(()) => self.make(&owner, &call, end, from).await,
            Err(fault) => {
                owner.enqueue(FromAgent::fault(&fault));
                None
            }
        };
        if let Some(token) = token {
            let nobody_has_it = owner.away_since().is_some();
            self.kept_connections
                .end(&token, fault.filter(|_| nobody_has_it));
        }
        owner.end().await;
    }

    /// Takes a program's descriptor, whose connection is called for next.
    pub async fn keep(&self, stream: UnixStream, claim: ReopenClaim) {
        let stream = Rc::new(stream);
        if send_message(&stream, &TAKEN, None).await.is_err() {
            return;
        }
        let mut ear = MessageReader::new(stream.clone());
        let left = timeout(LEFT_FOR, ear.next()).await;
        let (Ok(Ok(Some(ToAgent::Left))), Some(fd)) = (left, ear.take_descriptor()) else {
            return;
        };
        let said = match self.kept_connections.deposit(claim.token, fd) {
            Ok(()) => FromAgent::Open,
            Err(fault) => FromAgent::fault(&fault),
        };
        let is_left = matches!(said, FromAgent::Open);
        let _ = send_message(&stream, &said, None).await;
        if !is_left {
            return;
        }
        tokio::time::sleep(LEFT_FOR).await;
        self.kept_connections.forget(&claim.token);
    }

    /// Gives a connection to another process than had it.
    pub async fn reopen(&self, stream: UnixStream, claim: ReopenClaim) {
        let stream = Rc::new(stream);
        if send_message(&stream, &TAKEN, None).await.is_err() {
            return;
        }
        match self.kept_connections.find(&claim.token) {
            Ok(owner) if owner.wait_until_away().await => {
                let ear = MessageReader::new(stream.clone());
                owner.attach(stream, ear);
                owner.enqueue(owner.reopened_message());
            }
            Ok(_) => {
                let fault = SocketFault::new(libc::EBUSY, "another process has this connection");
                let _ = send_message(&stream, &FromAgent::fault(&fault), None).await;
            }
            Err(fault) => {
                let _ = send_message(&stream, &FromAgent::fault(&fault), None).await;
            }
        }
    }

    /// Gives the process that opened a connection again its descriptor.
    pub async fn descriptor(&self, stream: UnixStream, claim: ReopenClaim) {
        if send_message(&stream, &TAKEN, None).await.is_err() {
            return;
        }
        let owner = self.kept_connections.find(&claim.token);
        let fd = owner.and_then(|owner| {
            let none = || SocketFault::new(libc::ENOENT, "nobody opened this connection again");
            owner.descriptor().ok_or_else(none)
        });
        let _ = match fd {
            Ok(fd) => send_message(&stream, &FromAgent::Open, Some(fd)).await,
            Err(fault) => send_message(&stream, &FromAgent::fault(&fault), None).await,
        };
    }

    /// Makes one and carries it; says why it broke.
    async fn make(
        &self,
        owner: &Rc<SocketOwner>,
        call: &AgentCall,
        end: OwnedFd,
        from: u16,
    ) -> Option<SocketFault> {
        let fate = ConnectionStatus::new();
        let opened = async {
            let options = SocketOptions::try_from(&call.options)?;
            let server = call.server.parse();
            let way = connect::ConnectTarget {
                server: server.map_err(|error| SocketFault::new(libc::EINVAL, error))?,
                target: call.target.clone(),
                key: Some(call.key.clone()),
                owner: Some(owner.clone()),
            };
            let latest = || owner.options.borrow().clone();
            connect::open(&self.engine, &way, &options, fate.clone(), latest).await
        };
        let opened = tokio::select! {
            opened = opened => opened,
            // Nobody waits for it any more.
            () = owner.gone() => return None,
        };
        let held = match opened {
            Ok(held) => pump::register(&self.engine, held.owned_by(owner.clone())),
            Err(fault) => {
                owner.enqueue(FromAgent::fault(&fault));
                return Some(fault);
            }
        };
        // From now on the program's second thoughts are for the flow.
        owner.held.borrow_mut().replace(held.clone());
        // First, so that its library never takes a connection that was made for one to be made again.
        owner.send(FromAgent::Open).await;
        // Otherwise the program closed its socket: so does the flow.
        match pair::join(end.into(), from).await {
            Ok(stream) => pump::run(self.engine.clone(), held, stream).await,
            Err(_) => pump::unregister(&self.engine, &held),
        }
        fate.fault.get().cloned()
    }

    /// Makes a datagram socket, which is never connected to anything but its session.
    async fn make_datagrams(
        &self,
        owner: &Rc<SocketOwner>,
        call: &AgentCall,
    ) -> Option<SocketFault> {
        let fate = ConnectionStatus::new();
        let opened = async {
            let begun = SocketOptions::try_from(&call.options)?;
            let server = call.server.parse();
            let way = connect::ConnectTarget {
                server: server.map_err(|error| SocketFault::new(libc::EINVAL, error))?,
                target: None,
                key: Some(call.key.clone()),
                owner: Some(owner.clone()),
            };
            let latest = || owner.options.borrow().clone().unwrap_or(begun.clone());
            datagrams::open(&self.engine, &way, latest, fate.clone()).await
        };
        let opened = tokio::select! {
            opened = opened => opened,
            () = owner.gone() => return None,
        };
        let (held, context) = match opened {
            Ok((held, context)) => (held.owned_by(owner.clone()), context),
            Err(fault) => return Some(fault),
        };
        let held = pump::register(&self.engine, held);
        owner.held.borrow_mut().replace(held.clone());
        let over = datagrams::carry_for_agent(&self.engine, owner, &held, context).await;
        pump::unregister(&self.engine, &held);
        over
    }

    /// Ends: what programs wrote before they ended is sent, and servers hear that this device goes.
    pub async fn close(&self) {
        self.kept_connections.clear();
        let is_left = |held: &Rc<CarriedFlow>| held.is_orphan() && !held.is_delivered();
        let delivered = async {
            while self.engine.flows.borrow().values().any(is_left) {
                tokio::time::sleep(GRACE).await;
            }
        };
        let _ = timeout(LAST_WORDS, delivered).await;
        if self.engine.say_goodbye() {
            tokio::time::sleep(GRACE).await;
        }
    }
}

struct SocketSlot<'a>(&'a Cell<usize>);

impl Drop for SocketSlot<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// What is to be told, and who waits until it is.
type QueuedMessage = (FromAgent, Option<oneshot::Sender<()>>);

/// The answer that a call is carried.
const TAKEN: FromAgent = FromAgent::Taken {
    ok: true,
    version: VERSION,
    notices: true,
    locks: true,
};

/// Why messages of this version are not understood, if they are not.
pub fn version_mismatch(version: u32) -> Option<String> {
    let ours = format!("this agent carries sockets by version {VERSION} of these messages");
    (version != VERSION).then(|| format!("{ours}, not {version}"))
}

/// How long a process that ended may take to be missed, by another that would have its connection.
const MISSED_WITHIN: Duration = Duration::from_secs(1); // a guess: it is on this machine

/// Whether the process is there whose connection it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OwnerPresence {
    Here,
    /// Since then, and it may be opened again.
    Away(Instant),
}

/// The tasks that speak with a process.
struct OwnerTasks {
    sender: JoinHandle<()>,
    receiver: AbortHandle,
}

/// The process that a carried socket belongs to, at the other end of its messages.
pub(crate) struct SocketOwner {
    /// Where messages to the process go; none while no process has the socket.
    messages: RefCell<Option<UnboundedSender<QueuedMessage>>>,
    tasks: RefCell<Option<OwnerTasks>>,
    fault_acked: Notify,
    /// Whether the socket ended, and no process can have the connection any more.
    ended: watch::Sender<bool>,
    presence: watch::Sender<OwnerPresence>,
    /// Its program's descriptor, of a connection that may be opened again.
    kept: RefCell<Option<OwnedFd>>,
    /// The call that the socket was opened with.
    call: AgentCall,
    /// Other options than those it began with.
    options: RefCell<Option<SocketOptions>>,
    held: RefCell<Option<Rc<CarriedFlow>>>,
    /// Flushes that are waited for.
    pending_flushes: RefCell<HashMap<u64, AbortHandle>>,
    /// Where messages go of a datagram socket whose session is there.
    inlet: RefCell<Option<DatagramInlet>>,
    /// Its process holds a D-Lock.
    locked: watch::Sender<bool>,
}

/// Where messages of a program go, and its descriptor when it comes.
struct DatagramInlet {
    end: Rc<DatagramPeer>,
    socket: Option<oneshot::Sender<OwnedFd>>,
}

impl SocketOwner {
    fn new(call: &AgentCall) -> Rc<SocketOwner> {
        Rc::new(SocketOwner {
            messages: RefCell::default(),
            tasks: RefCell::default(),
            fault_acked: Notify::new(),
            ended: watch::channel(false).0,
            presence: watch::channel(OwnerPresence::Here).0,
            kept: RefCell::default(),
            call: call.clone(),
            options: RefCell::new(None),
            held: RefCell::default(),
            pending_flushes: RefCell::default(),
            inlet: RefCell::default(),
            locked: watch::channel(false).0,
        })
    }

    /// A process has it from now on, which is spoken with there.
    fn attach(self: &Rc<SocketOwner>, stream: Rc<UnixStream>, ear: MessageReader) {
        let (tell, to_tell) = unbounded_channel();
        self.detach();
        self.messages.replace(Some(tell));
        self.presence.send_replace(OwnerPresence::Here);
        let telling = tokio::task::spawn_local(send_all(stream, to_tell));
        let listening = tokio::task::spawn_local(listen(ear, self.clone())).abort_handle();
        self.tasks.replace(Some(OwnerTasks {
            sender: telling,
            receiver: listening,
        }));
    }

    /// Says that nothing is carried any more.
    async fn end(self: Rc<SocketOwner>) {
        let info = self.held.borrow().as_deref().map(D2tpInfo::last_of);
        self.enqueue(FromAgent::Over {
            info: info.map(Box::new),
        });
        // Whatever waits for an answer holds the owner.
        self.held.take();
        self.inlet.take();
        self.let_go();
        let telling = self.detach();
        drop(self);
        if let Some(telling) = telling {
            let _ = timeout(HEARD_WITHIN, telling).await;
        }
    }

    /// Nobody is spoken with any more.
    fn detach(&self) -> Option<JoinHandle<()>> {
        self.messages.take();
        for (_, flushing) in self.pending_flushes.take() {
            flushing.abort();
        }
        let line = self.tasks.take()?;
        line.receiver.abort();
        Some(line.sender)
    }

    fn set_locked(&self, held: bool) {
        self.locked.send_replace(held);
    }

    /// Whether its process holds a D-Lock.
    pub(crate) fn is_locked(&self) -> bool {
        *self.locked.borrow()
    }

    /// Until that is otherwise.
    pub(crate) async fn lock_changed(&self, than: bool) {
        let mut locked = self.locked.subscribe();
        // Whoever says it is here.
        let _ = locked.wait_for(|locked| *locked != than).await;
    }

    /// Its process has ended, or let go of the connection.
    fn on_process_left(self: &Rc<SocketOwner>) {
        self.set_locked(false);
        if !self.is_kept() || self.held.borrow().is_none() {
            // A descriptor that is not connected yet is no other process's to have.
            self.kept.take();
            self.ended.send_replace(true);
            return;
        }
        let since = OwnerPresence::Away(Instant::now());
        self.presence.send_replace(since);
        let owner = self.clone();
        tokio::task::spawn_local(async move {
            let mut presence = owner.presence.subscribe();
            let back = presence.wait_for(|presence| *presence != since);
            let mut gone = owner.ended.subscribe();
            tokio::select! {
                _ = back => {}
                _ = gone.wait_for(|gone| *gone) => {}
                () = tokio::time::sleep(KEPT_FOR) => owner.let_go(),
            }
        });
    }

    #[cfg(test)]
    pub(crate) fn of_test() -> Rc<SocketOwner> {
        let options = (&SocketOptions::default()).into();
        SocketOwner::new(&AgentCall {
            version: VERSION,
            server: String::new(),
            target: None,
            key: "/".into(),
            options,
            keep: None,
            datagrams: false,
        })
    }

    #[cfg(test)]
    pub(crate) fn is_away(&self, since: Instant) {
        self.presence.send_replace(OwnerPresence::Away(since));
    }

    pub(crate) fn keep(&self, fd: OwnedFd) {
        self.kept.replace(Some(fd));
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.kept.borrow().is_some()
    }

    /// Since when nobody has it who could.
    pub(crate) fn away_since(&self) -> Option<Instant> {
        match *self.presence.borrow() {
            OwnerPresence::Away(since) => Some(since),
            OwnerPresence::Here => None,
        }
    }

    /// Ends the claim of later processes: the connection is not to be opened again.
    pub(crate) fn let_go(&self) {
        self.kept.take();
        if self.away_since().is_some() {
            self.ended.send_replace(true);
        }
    }

    /// Whether its process is missed soon, if it is not yet.
    async fn wait_until_away(&self) -> bool {
        let mut presence = self.presence.subscribe();
        let away = presence.wait_for(|presence| matches!(presence, OwnerPresence::Away(_)));
        let _ = timeout(MISSED_WITHIN, away).await;
        // Others waited too.
        self.away_since().is_some() && self.is_kept()
    }

    /// For the process that has it now.
    fn descriptor(&self) -> Option<OwnedFd> {
        let kept = self.kept.borrow();
        let kept = kept.as_ref().filter(|_| self.away_since().is_none())?;
        kept.try_clone().ok()
    }

    /// For a process that does not know it.
    fn reopened_message(&self) -> FromAgent {
        let held = self.held.borrow();
        let options = match (&*held, &*self.options.borrow()) {
            (Some(held), _) => (&*held.options.borrow()).into(),
            (None, Some(options)) => options.into(),
            (None, None) => self.call.options.clone(),
        };
        FromAgent::Reopened {
            server: self.call.server.clone(),
            target: self.call.target.clone(),
            ipv6: self.call.keep.as_ref().is_some_and(|keep| keep.ipv6),
            options,
        }
    }

    fn enqueue(&self, what: FromAgent) {
        // One that is gone needs no words.
        if let Some(tell) = &*self.messages.borrow() {
            let _ = tell.send((what, None));
        }
    }

    /// A datagram socket's session is there; its descriptor comes later.
    pub(crate) fn opened(&self, end: Rc<DatagramPeer>) -> oneshot::Receiver<OwnedFd> {
        let (give, given) = oneshot::channel();
        let socket = Some(give);
        self.inlet.replace(Some(DatagramInlet { end, socket }));
        self.enqueue(FromAgent::Open);
        given
    }

    /// Messages of so many bytes fit.
    pub(crate) fn has_room(&self, bytes: usize) {
        self.enqueue(FromAgent::Room { bytes });
    }

    /// Sends a message; returns when the kernel has it.
    async fn send(&self, what: FromAgent) {
        let (done, told) = oneshot::channel();
        match &*self.messages.borrow() {
            Some(tell) => drop(tell.send((what, Some(done)))),
            None => return,
        }
        let _ = told.await;
    }

    /// Tells why its socket is about to break, so that it knows when it does.
    pub(crate) async fn send_fault(&self, fault: &SocketFault) {
        if self.away_since().is_some() {
            return;
        }
        self.enqueue(FromAgent::fault(fault));
        let heard = async {
            tokio::select! {
                () = self.fault_acked.notified() => {}
                () = self.gone() => {}
            }
        };
        let _ = timeout(HEARD_WITHIN, heard).await;
    }

    /// Waits until its process has ended, or let go of the connection.
    pub(crate) async fn gone(&self) {
        let mut gone = self.ended.subscribe();
        // Whoever says it is here.
        let _ = gone.wait_for(|gone| *gone).await;
    }

    pub(crate) fn is_gone(&self) -> bool {
        *self.ended.borrow()
    }

    fn change(&self, options: SocketOptions) {
        if let Some(held) = &*self.held.borrow() {
            held.change(options.clone());
        }
        self.options.replace(Some(options));
    }

    fn answer(&self, ask: u64, fault: Option<SocketFault>, info: Option<D2tpInfo>) {
        self.enqueue(FromAgent::Answer {
            ask,
            fault: fault.map(|fault| (fault.errno, fault.text)),
            info: info.map(Box::new),
        });
    }
}

async fn send_all(stream: Rc<UnixStream>, mut to_tell: UnboundedReceiver<QueuedMessage>) {
    while let Some((what, waits)) = to_tell.recv().await {
        if send_message(&stream, &what, None).await.is_err() {
            return;
        }
        if let Some(waits) = waits {
            let _ = waits.send(());
        }
    }
}

async fn listen(mut ear: MessageReader, owner: Rc<SocketOwner>) {
    loop {
        match ear.next().await {
            Ok(Some(ToAgent::Options { options })) => {
                // What its library took is no nonsense.
                if let Ok(options) = SocketOptions::try_from(&options) {
                    owner.change(options);
                }
            }
            Ok(Some(ToAgent::Info { ask })) => {
                let held = owner.held.borrow().clone();
                let info = held.map_or_else(
                    // The program's library knows what for.
                    || D2tpInfo::opening(ConnectWait::Answer),
                    |held| D2tpInfo::of(&held),
                );
                owner.answer(ask, None, Some(info));
            }
            Ok(Some(ToAgent::Flush { ask, bytes })) => {
                if owner.pending_flushes.borrow().len() >= ASKS_MAX {
                    let fault = SocketFault::new(libc::EAGAIN, "too many wait for it");
                    owner.answer(ask, Some(fault), None);
                    continue;
                }
                let held = owner.held.borrow().clone();
                let asker = owner.clone();
                let flushing = tokio::task::spawn_local(async move {
                    let owner = asker;
                    let flushed = async {
                        match held {
                            Some(held) => held.flush(bytes).await.err(),
                            None => {
                                Some(SocketFault::new(libc::ENOTCONN, "it is not connected yet"))
                            }
                        }
                    };
                    tokio::select! {
                        fault = flushed => owner.answer(ask, fault, None),
                        () = owner.gone() => {}
                    }
                    owner.pending_flushes.borrow_mut().remove(&ask);
                });
                let asks = &owner.pending_flushes;
                asks.borrow_mut().insert(ask, flushing.abort_handle());
            }
            Ok(Some(ToAgent::Forget { ask })) => {
                if let Some(flushing) = owner.pending_flushes.borrow_mut().remove(&ask) {
                    flushing.abort();
                }
            }
            Ok(Some(ToAgent::Message(message))) => {
                if let Some(inlet) = &*owner.inlet.borrow()
                    && let Some(bytes) = message.bytes()
                {
                    inlet.end.send(message.route(), message.expiry(), &bytes);
                }
            }
            Ok(Some(ToAgent::Carry { .. })) => {
                if let Some(inlet) = &mut *owner.inlet.borrow_mut()
                    && let (Some(give), Some(fd)) = (inlet.socket.take(), ear.take_descriptor())
                {
                    // Otherwise it is over.
                    let _ = give.send(fd);
                }
            }
            Ok(Some(ToAgent::Closed)) => {
                owner.ended.send_replace(true);
            }
            Ok(Some(ToAgent::DLock { held })) => owner.set_locked(held),
            Ok(Some(ToAgent::Heard)) => owner.fault_acked.notify_one(),
            Ok(Some(ToAgent::NetworkChanged)) => {
                if let Some(held) = &*owner.held.borrow()
                    && let Some(line) = &held.session
                {
                    line.0.device.network_changed();
                }
            }
            Ok(Some(ToAgent::Release { ask })) => {
                owner.let_go();
                owner.answer(ask, None, None);
            }
            Ok(Some(
                ToAgent::Socket(_)
                | ToAgent::Keep(_)
                | ToAgent::Left
                | ToAgent::Reopen(_)
                | ToAgent::Descriptor(_),
            )) => {}
            Ok(None) | Err(_) => return owner.on_process_left(),
        }
    }
}
