//! Connections that the user's agent carries: its links, sessions and scheduler are then all programs'.
//!
//! ```text
//!  program's socket ══ kernel ══ our end, made here, joined and pumped by the agent ── flow ══ links ══▶
//!        options, flush, info ──▶ [`Handed`] ── a Unix socket, one for each connection ──▶ agent
//!                       errno ◀── fault, before the descriptor breaks ◀──────────────────────┘
//! ```
//!
//! Of a datagram socket the agent has the far end's kernel socket, and this engine a copy, to say the end by. What is
//! said before there is a session, and messages with a head, go by the Unix socket.
//!
//! No agent, one that does not answer, one that speaks another version: then the engine of this process
//! carries. An agent that dies takes its descriptors along, and each is reset by the kernel, for so it was
//! made (`Port::handed_end`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use d2tp_driver::{DATAGRAMS_MAX, PathSelection, ServerAddress};
use tokio::net::UnixStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::agent_message::{
    self, AgentDatagram, FromAgent, LINE_BYTES_MAX, MessageReader, ToAgent, VERSION, send_message,
};
use crate::connect::ConnectCall;
use crate::datagrams::AgentDatagramPeer;
use crate::dlock;
use crate::engine_state::EngineState;
use crate::errno::SocketFault;
use crate::identity;
use crate::info::D2tpInfo;
use crate::options::{PersistMode, SocketOptions};
use crate::pump;
use crate::reopen_token::{ReopenClaim, ReopenToken};
use crate::table::{self, ConnectionStatus};

/// Names the agent's socket where it is elsewhere; `none`: there is to be no agent.
const SOCKET_VARIABLE: &str = "CEDOS_AGENT";

/// How long an agent may take to answer: it is on this machine, and does nothing for long.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(2); // a guess

/// The largest message that is passed on: in base64, and with what is around it, it is to be a line.
const PASSED_BYTES_MAX: usize = LINE_BYTES_MAX / 2;

/// What was asked of an agent.
pub(crate) struct AgentReply {
    pub(crate) fault: Option<SocketFault>,
    pub(crate) info: Option<Box<D2tpInfo>>,
}

/// Replies that are waited for, by number; none once the connection is over.
type PendingReplies = RefCell<Option<HashMap<u64, oneshot::Sender<AgentReply>>>>;

/// A connection that an agent carries.
pub(crate) struct AgentConnection {
    messages: UnboundedSender<(ToAgent, Option<OwnedFd>)>,
    pending: Rc<PendingReplies>,
    next: Rc<Cell<u64>>,
    /// This process does not have it after all.
    released: Rc<Notify>,
    /// The agent hears of networks.
    notices: bool,
    /// Whether the agent understands notices of D-Locks.
    locks: bool,
    /// Messages of a datagram socket that the agent does not have yet.
    unsent: Rc<Cell<usize>>,
    /// Only of the one that follows it.
    reader: Option<MessageReader>,
}

/// Where an agent's socket is, if there is to be one: as `cedos` finds it.
pub(crate) fn socket() -> Option<PathBuf> {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(none) if none == "none" => return None,
        Some(path) if !path.is_empty() => return Some(path.into()),
        _ => {}
    }
    let folder = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let place = folder("XDG_RUNTIME_DIR")
        .or_else(|| folder("XDG_STATE_HOME"))
        .or_else(|| Some(folder("HOME")?.join(".local/state")))?;
    Some(place.join("cedos").join("agent.sock"))
}

/// What a persistent socket hears where there is nobody who would carry it on.
pub(crate) fn no_agent() -> SocketFault {
    let text = "a connection that outlives its program needs an agent that carries it, and none answers: \
                start `cedos agent`";
    SocketFault::new(libc::EOPNOTSUPP, text)
}

/// The agent of this user, if it answers and knows of sockets.
async fn agent(at: &Path) -> Option<Rc<UnixStream>> {
    let stream = timeout(ANSWER_WITHIN, UnixStream::connect(at)).await;
    let stream = stream.ok()?.ok()?;
    // Another user's socket in a place of ours: it is to know nothing of us.
    let peer = stream.peer_cred().ok()?;
    // SAFETY: a call without arguments.
    let is_ours = peer.uid() == unsafe { libc::geteuid() };
    is_ours.then(|| Rc::new(stream))
}

/// Whether an agent is there.
pub(crate) async fn is_agent_running() -> bool {
    match socket() {
        Some(at) => agent(&at).await.is_some(),
        None => false,
    }
}

/// Has an agent make the connection; returns when it is made. None: no agent does it. `far`: of a datagram socket, whose
/// descriptor is not passed yet.
///
/// # Errors
/// Why the connection is not made, as the agent says.
pub(crate) async fn call(
    home: &Rc<EngineState>,
    call: &ConnectCall,
    server: &ServerAddress,
    target: Option<String>,
    far: Option<&AgentDatagramPeer>,
) -> Result<Option<AgentConnection>, SocketFault> {
    let Some(at) = socket() else {
        return Ok(None);
    };
    let Some(stream) = agent(&at).await else {
        return Ok(None);
    };
    let asked = agent_message::AgentCall {
        version: VERSION,
        server: server.to_string(),
        target,
        key: identity::file()?,
        options: (&call.options).into(),
        keep: call.keep.clone(),
        datagrams: far.is_some(),
    };
    let mut ear = MessageReader::new(stream.clone());
    let taken = async {
        let socket = ToAgent::Socket(Box::new(asked));
        send_message(&stream, &socket, None).await?;
        ear.next::<FromAgent>().await
    };
    let taken = timeout(ANSWER_WITHIN, taken).await;
    let hears = match taken {
        Ok(Ok(Some(FromAgent::Taken {
            ok: true,
            version: VERSION,
            notices,
            locks,
        }))) => (notices, locks),
        _ => return Ok(None),
    };
    let mut handed = AgentConnection::begin(stream, hears);
    if far.is_none() {
        let Ok(end) = home.port.detachable_end() else {
            return Ok(None);
        };
        handed.carry(call.from, end.into());
    }
    if dlock::is_held() {
        handed.send_dlock();
    }
    // From now on the program's second thoughts are told.
    let known = Rc::new(handed.share());
    home.agent_connections
        .borrow_mut()
        .insert(call.fate.serial, known.clone());
    // Those before it are not.
    let latest = table::change(call.cookie, |socket| socket.options.clone());
    if let Some(options) = latest.filter(|options| *options != call.options) {
        known.change(&options);
    }
    loop {
        match ear.next().await {
            Ok(Some(FromAgent::Open)) => break,
            Ok(Some(FromAgent::Fault { errno, text })) => {
                home.agent_connections
                    .borrow_mut()
                    .remove(&call.fate.serial);
                return Err(SocketFault { errno, text });
            }
            Ok(Some(FromAgent::Answer { ask, fault, info })) => known.hear(ask, fault, info),
            Ok(Some(FromAgent::Room { bytes })) => {
                if let Some(far) = far {
                    far.has_room(bytes);
                }
            }
            Ok(Some(FromAgent::Taken { .. } | FromAgent::Reopened { .. })) => {}
            // It went before there was anything to lose.
            Ok(Some(FromAgent::Over { .. }) | None) | Err(_) => {
                home.agent_connections
                    .borrow_mut()
                    .remove(&call.fate.serial);
                return Ok(None);
            }
        }
    }
    handed.reader = Some(ear);
    Ok(Some(handed))
}

/// A connection as an agent has it.
pub(crate) struct ReopenedConnection {
    pub(crate) server: String,
    pub(crate) target: Option<String>,
    pub(crate) ipv6: bool,
    pub(crate) options: SocketOptions,
}

/// Takes up a connection that another process had.
///
/// # Errors
/// EOPNOTSUPP: no agent does that. ENOENT, EBUSY, or why it is over.
pub(crate) async fn reopen(
    home: &Rc<EngineState>,
    token: ReopenToken,
    fate: &Arc<ConnectionStatus>,
) -> Result<ReopenedConnection, SocketFault> {
    let stream = match socket() {
        Some(at) => agent(&at).await,
        None => None,
    };
    let stream = stream.ok_or_else(no_agent)?;
    let mut ear = MessageReader::new(stream.clone());
    let asked = async {
        send_message(&stream, &ToAgent::Reopen(ReopenClaim::to(token)), None).await?;
        match ear.next().await? {
            Some(FromAgent::Taken {
                ok: true,
                version: VERSION,
                notices,
                locks,
            }) => std::io::Result::Ok((ear.next().await?, (notices, locks))),
            _ => Ok((None, (false, false))),
        }
    };
    let (reopened, hears) = match timeout(ANSWER_WITHIN, asked).await {
        Ok(Ok((
            Some(FromAgent::Reopened {
                server,
                target,
                ipv6,
                options,
            }),
            hears,
        ))) => {
            let options = SocketOptions {
                persist: PersistMode::Open,
                ..SocketOptions::try_from(&options)?
            };
            let reopened = ReopenedConnection {
                server,
                target,
                ipv6,
                options,
            };
            (reopened, hears)
        }
        Ok(Ok((Some(FromAgent::Fault { errno, text }), _))) => {
            return Err(SocketFault { errno, text });
        }
        _ => return Err(no_agent()),
    };
    let mut handed = AgentConnection::begin(stream, hears);
    handed.reader = Some(ear);
    if dlock::is_held() {
        handed.send_dlock();
    }
    let known = Rc::new(handed.share());
    home.agent_connections
        .borrow_mut()
        .insert(fate.serial, known);
    let (home, fate) = (home.clone(), fate.clone());
    tokio::task::spawn_local(async move { handed.follow(&home, &fate, None, None).await });
    Ok(reopened)
}

async fn send_all(
    stream: Rc<UnixStream>,
    mut to_tell: UnboundedReceiver<(ToAgent, Option<OwnedFd>)>,
    unsaid: Rc<Cell<usize>>,
) {
    while let Some((what, fd)) = to_tell.recv().await {
        // That it is gone is heard by who listens.
        if send_message(&stream, &what, fd).await.is_err() {
            return unsaid.set(0);
        }
        if matches!(what, ToAgent::Message(_)) {
            unsaid.set(unsaid.get() - 1);
        }
    }
}

/// Somebody waits for an answer.
struct ReplyWaiter<'a> {
    connection: &'a AgentConnection,
    ask: u64,
}

impl Drop for ReplyWaiter<'_> {
    fn drop(&mut self) {
        if self.connection.taken_out(self.ask).is_some() {
            let forget = ToAgent::Forget { ask: self.ask };
            let _ = self.connection.messages.send((forget, None));
        }
    }
}

impl AgentConnection {
    fn begin(stream: Rc<UnixStream>, (notices, locks): (bool, bool)) -> AgentConnection {
        let (tell, to_tell) = unbounded_channel();
        let unsaid = Rc::default();
        tokio::task::spawn_local(send_all(stream, to_tell, Rc::clone(&unsaid)));
        AgentConnection {
            messages: tell,
            pending: Rc::new(RefCell::new(Some(HashMap::new()))),
            next: Rc::default(),
            released: Rc::default(),
            notices,
            locks,
            unsent: unsaid,
            reader: None,
        }
    }

    pub(crate) fn share(&self) -> AgentConnection {
        AgentConnection {
            messages: self.messages.clone(),
            pending: self.pending.clone(),
            next: self.next.clone(),
            released: self.released.clone(),
            notices: self.notices,
            locks: self.locks,
            unsent: self.unsent.clone(),
            reader: None,
        }
    }

    /// The agent is to carry by this, whose other end is at port `from`.
    pub(crate) fn carry(&self, from: u16, fd: OwnedFd) {
        let _ = self.messages.send((ToAgent::Carry { from }, Some(fd)));
    }

    /// Passes a message on. One too many for an agent that does not take them is lost, as what no packet carries is.
    pub(crate) fn send_datagram(
        &self,
        bytes: &[u8],
        route: Option<PathSelection>,
        expiry: Option<Duration>,
    ) {
        if self.unsent.get() < DATAGRAMS_MAX && bytes.len() <= PASSED_BYTES_MAX {
            let message = AgentDatagram::new(bytes, route, expiry);
            let told = self.messages.send((ToAgent::Message(message), None));
            self.unsent
                .set(self.unsent.get() + usize::from(told.is_ok()));
        }
    }

    /// Whether it is still to be told of messages.
    pub(crate) fn has_unsent(&self) -> bool {
        self.unsent.get() > 0
    }

    /// The program has closed its datagram socket.
    pub(crate) fn closed(&self) {
        let _ = self.messages.send((ToAgent::Closed, None));
    }

    /// The program thought again.
    pub(crate) fn change(&self, options: &SocketOptions) {
        let options = options.into();
        let _ = self.messages.send((ToAgent::Options { options }, None));
    }

    /// How it stands; nothing when it is over or the agent is gone.
    pub(crate) async fn info(&self) -> Option<AgentReply> {
        let told = timeout(ANSWER_WITHIN, self.ask(|ask| ToAgent::Info { ask }));
        told.await.ok()?
    }

    /// Waits until the peer has the first `bytes` of the program's.
    pub(crate) async fn flush(&self, bytes: u64) -> Option<AgentReply> {
        self.ask(|ask| ToAgent::Flush { ask, bytes }).await
    }

    /// The networks changed in a way that the agent may not have seen.
    pub(crate) fn network_changed(&self) {
        if self.notices {
            let _ = self.messages.send((ToAgent::NetworkChanged, None));
        }
    }

    /// The process holds a D-Lock, or none any more.
    pub(crate) fn send_dlock(&self) {
        if self.locks {
            let held = dlock::is_held();
            let _ = self.messages.send((ToAgent::DLock { held }, None));
        }
    }

    /// Tells the agent that the connection is not to be opened again.
    pub(crate) async fn release(&self) {
        let told = self.ask(|ask| ToAgent::Release { ask });
        // One that does not answer keeps nothing.
        let _ = timeout(ANSWER_WITHIN, told).await;
    }

    /// Leaves it to others who know its token.
    pub(crate) fn abandon(&self) {
        self.released.notify_one();
    }

    async fn ask(&self, what: impl FnOnce(u64) -> ToAgent) -> Option<AgentReply> {
        let ask = self.next.get();
        self.next.set(ask + 1);
        let (reply, answer) = oneshot::channel();
        self.pending.borrow_mut().as_mut()?.insert(ask, reply);
        let _waits = ReplyWaiter {
            connection: self,
            ask,
        };
        self.messages.send((what(ask), None)).ok()?;
        answer.await.ok()
    }

    fn taken_out(&self, ask: u64) -> Option<oneshot::Sender<AgentReply>> {
        self.pending.borrow_mut().as_mut()?.remove(&ask)
    }

    fn hear(&self, ask: u64, fault: Option<(libc::c_int, String)>, info: Option<Box<D2tpInfo>>) {
        let fault = fault.map(|(errno, text)| SocketFault { errno, text });
        if let Some(reply) = self.taken_out(ask) {
            let _ = reply.send(AgentReply { fault, info });
        }
    }

    /// Hears what becomes of it, until it is over; `from`: the port of the program's socket, which may not be joined
    /// yet. `far`: of a datagram socket.
    pub(crate) async fn follow(
        mut self,
        home: &EngineState,
        fate: &Arc<ConnectionStatus>,
        from: Option<u16>,
        far: Option<&AgentDatagramPeer>,
    ) {
        let mut ear = self.reader.take().expect("of the one that was called with");
        let mut is_lost = false;
        let left = self.released.clone();
        loop {
            let heard = tokio::select! {
                heard = ear.next() => heard,
                () = left.notified() => break,
            };
            match heard {
                Ok(Some(FromAgent::Answer { ask, fault, info })) => self.hear(ask, fault, info),
                Ok(Some(FromAgent::Fault { errno, text })) => {
                    let _ = fate.fault.set(SocketFault { errno, text });
                    let _ = self.messages.send((ToAgent::Heard, None));
                }
                Ok(Some(FromAgent::Over { info })) => {
                    if let Some(info) = info {
                        let _ = fate.last.set(*info);
                    }
                    break;
                }
                Ok(Some(FromAgent::Room { bytes })) => {
                    if let Some(far) = far {
                        far.has_room(bytes);
                    }
                }
                Ok(Some(
                    FromAgent::Open | FromAgent::Taken { .. } | FromAgent::Reopened { .. },
                )) => {}
                Ok(None) | Err(_) => {
                    let text = "the agent that carried this connection is gone";
                    let _ = fate.fault.set(SocketFault::new(libc::ECONNRESET, text));
                    is_lost = true;
                    break;
                }
            }
        }
        fate.over.store(true, Ordering::Relaxed);
        home.agent_connections.borrow_mut().remove(&fate.serial);
        // Whoever still waits for an answer asks the fate.
        self.pending.borrow_mut().take();
        // The kernel reset what was joined. What was not waits yet.
        if is_lost
            && let Some(from) = from
            && let Ok(stream) = home.port.connect_waiting(from).await
        {
            pump::break_off(stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_messages_that_no_agent_takes_a_bounded_number_waits() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async {
            let (here, there) = UnixStream::pair().unwrap();
            let handed = AgentConnection::begin(Rc::new(here), (true, true));
            assert!(!handed.has_unsent());
            handed.send_datagram(&vec![0; PASSED_BYTES_MAX + 1], None, None);
            assert!(!handed.has_unsent(), "it would be no line");
            for _ in 0..3 * DATAGRAMS_MAX {
                handed.send_datagram(&vec![0; PASSED_BYTES_MAX], None, None);
            }
            handed.closed();
            let mut ear = MessageReader::new(Rc::new(there));
            let mut messages = 0;
            while let Ok(Some(ToAgent::Message(message))) = ear.next().await {
                assert_eq!(message.bytes().map(|b| b.len()), Some(PASSED_BYTES_MAX));
                messages += 1;
            }
            assert_eq!(messages, DATAGRAMS_MAX);
            assert!(!handed.has_unsent());
            handed.send_datagram(b"again", None, None);
            assert!(handed.has_unsent());
            // Nobody is there any more to be told.
            drop(ear);
            tokio::time::timeout(ANSWER_WITHIN, async {
                while handed.has_unsent() {
                    handed.send_datagram(b"x", None, None);
                    tokio::task::yield_now().await;
                }
            })
            .await
            .unwrap();
        });
    }
}
