//! Connections that the user's agent carries, so that all programs share its links, sessions and
//! scheduler.
//!
//! ```text
//!  program's socket ══ kernel ══ our end, created here, used by the agent ── flow ══ links ══▶
//!        options, flush, info ──▶ AgentConnection ── a Unix socket, one for each connection ──▶ agent
//!                       errno ◀── fault, before the descriptor breaks ◀──────────────────────┘
//! ```
//!
//! For a datagram socket the agent has the peer's kernel socket, and this engine a copy, with which
//! it can signal the end. Datagrams before there is a session, and datagrams with a head, are sent
//! by the Unix socket.
//!
//! Without an agent, or with one that does not answer or has another version, the engine of this
//! process carries the connection.
//!
//! If the agent ends, the next one goes on with a connection of which this process keeps the engine's end and what is
//! under way ([`LeftConnection`]). Requests wait until then. Others end: the kernel resets their sockets, because they were
//! created so (`PairPort::detachable_end`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use d2tp_driver::{DATAGRAMS_MAX, PathSelection};
use tokio::net::UnixStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::agent_address::ANSWER_WITHIN;
use crate::agent_message::{
    AgentDatagram, LINE_BYTES_MAX, MessageFromAgent, MessageReader, MessageToAgent, send_message,
};
use crate::connection_status::ConnectionStatus;
use crate::datagrams::AgentDatagramPeer;
use crate::dlock;
use crate::errno::SocketFault;
use crate::info::D2tpInfo;
use crate::left_connection::LeftConnection;
use crate::options::SocketOptions;

/// The largest datagram passed to an agent: encoded as base64 with its other fields, it must fit in one
/// line.
const PASSED_BYTES_MAX: usize = LINE_BYTES_MAX / 2;

/// The agent's answer to a request.
pub(crate) struct AgentReply {
    pub(crate) fault: Option<SocketFault>,
    pub(crate) info: Option<Box<D2tpInfo>>,
}

/// Requests that wait for a reply, by number; `None` once the connection is over.
type PendingReplies = RefCell<Option<HashMap<u64, PendingReply>>>;

/// A request that waits for a reply.
struct PendingReply {
    /// What is asked, which the next agent is asked again.
    question: AgentQuestion,
    reply: oneshot::Sender<AgentReply>,
}

/// A question to the agent.
#[derive(Clone, Copy)]
enum AgentQuestion {
    Flush { bytes: u64 },
    Info,
    Release,
}

impl AgentQuestion {
    fn message(self, ask: u64) -> MessageToAgent {
        match self {
            AgentQuestion::Flush { bytes } => MessageToAgent::Flush { ask, bytes },
            AgentQuestion::Info => MessageToAgent::Info { ask },
            AgentQuestion::Release => MessageToAgent::Release { ask },
        }
    }
}

/// What an agent understands beside the messages of the first version.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AgentAbilities {
    /// Notices of changed networks.
    pub(crate) notices: bool,
    /// Notices of D-Locks.
    pub(crate) locks: bool,
    /// Going on with connections of another agent.
    pub(crate) resumes: bool,
}

/// How an agent's part in a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AgentEnd {
    /// The connection is over, or this process gave it up.
    Over,
    /// The agent is gone.
    Lost,
}

type MessageSender = UnboundedSender<(MessageToAgent, Option<OwnedFd>)>;

/// A connection that an agent carries for this process.
pub(crate) struct AgentConnection {
    /// The queue of messages; `None` between two agents.
    messages: Rc<RefCell<Option<MessageSender>>>,
    pending: Rc<PendingReplies>,
    next: Rc<Cell<u64>>,
    /// Notified when this process gives the connection up.
    released: Rc<Notify>,
    abilities: Rc<Cell<AgentAbilities>>,
    /// The number of datagrams that are queued for the agent.
    unsent: Rc<Cell<usize>>,
    /// The reader of the agent's messages, until the task that follows the connection takes it.
    pub(crate) reader: Option<MessageReader>,
    /// What the next agent needs to go on with the connection, if it can.
    pub(crate) left: Option<Box<LeftConnection>>,
    /// A copy of the program's descriptor for the next agent, if the connection can be opened again.
    program: Rc<RefCell<Option<OwnedFd>>>,
}

async fn send_all(
    stream: Rc<UnixStream>,
    mut outgoing: UnboundedReceiver<(MessageToAgent, Option<OwnedFd>)>,
    unsaid: Rc<Cell<usize>>,
) {
    while let Some((what, fd)) = outgoing.recv().await {
        // The reader of the connection detects that the agent is gone.
        if send_message(&stream, &what, fd).await.is_err() {
            return unsaid.set(0);
        }
        if matches!(what, MessageToAgent::Message(_)) {
            unsaid.set(unsaid.get() - 1);
        }
    }
}

/// A pending reply, removed again when its waiter is dropped.
struct ReplyWaiter<'a> {
    connection: &'a AgentConnection,
    ask: u64,
}

impl Drop for ReplyWaiter<'_> {
    fn drop(&mut self) {
        if self.connection.taken_out(self.ask).is_some() {
            let forget = MessageToAgent::Forget { ask: self.ask };
            self.connection.send(forget, None);
        }
    }
}

impl AgentConnection {
    /// Creates a connection over `stream` to an agent with these abilities.
    pub(crate) fn begin(stream: Rc<UnixStream>, abilities: AgentAbilities) -> AgentConnection {
        let connection = AgentConnection {
            messages: Rc::default(),
            pending: Rc::new(RefCell::new(Some(HashMap::new()))),
            next: Rc::default(),
            released: Rc::default(),
            abilities: Rc::default(),
            unsent: Rc::default(),
            reader: None,
            left: None,
            program: Rc::default(),
        };
        connection.attach(stream, abilities);
        connection
    }

    /// Sends messages to an agent over `stream` from now on.
    fn attach(&self, stream: Rc<UnixStream>, abilities: AgentAbilities) {
        let (sender, outgoing) = unbounded_channel();
        tokio::task::spawn_local(send_all(stream, outgoing, Rc::clone(&self.unsent)));
        self.messages.replace(Some(sender));
        self.abilities.set(abilities);
    }

    /// Goes on at another agent, whose messages `reader` reads: asks it what the one before did not answer.
    pub(crate) fn resume(
        &mut self,
        (stream, reader): (Rc<UnixStream>, MessageReader),
        abilities: AgentAbilities,
        (from, store, end): (u16, OwnedFd, OwnedFd),
    ) {
        self.attach(stream, abilities);
        self.reader = Some(reader);
        self.send(MessageToAgent::Store, Some(store));
        self.carry(from, end);
        if dlock::is_held() {
            self.send_dlock();
        }
        let pending = self.pending.borrow();
        for (ask, pending) in pending.iter().flatten() {
            self.send(pending.question.message(*ask), None);
        }
    }

    /// Queues a message. Returns whether there is an agent that it can be sent to.
    fn send(&self, what: MessageToAgent, fd: Option<OwnedFd>) -> bool {
        let messages = self.messages.borrow();
        let sender = messages.as_ref();
        sender.is_some_and(|sender| sender.send((what, fd)).is_ok())
    }

    pub(crate) fn share(&self) -> AgentConnection {
        AgentConnection {
            messages: self.messages.clone(),
            pending: self.pending.clone(),
            next: self.next.clone(),
            released: self.released.clone(),
            abilities: self.abilities.clone(),
            unsent: self.unsent.clone(),
            reader: None,
            left: None,
            program: self.program.clone(),
        }
    }

    /// Keeps a copy of the program's descriptor for the next agent.
    pub(crate) fn keep_program(&self, fd: OwnedFd) {
        self.program.replace(Some(fd));
    }

    /// Another copy of the program's descriptor; none unless the connection can be opened again.
    pub(crate) fn program(&self) -> Option<OwnedFd> {
        self.program.borrow().as_ref()?.try_clone().ok()
    }

    /// Asks the agent to carry the connection over `fd`, whose other end is at port `from`.
    pub(crate) fn carry(&self, from: u16, fd: OwnedFd) {
        self.send(MessageToAgent::Carry { from }, Some(fd));
    }

    /// Gives the agent memory for what is under way, before [`AgentConnection::carry`].
    pub(crate) fn store(&self, fd: OwnedFd) {
        self.send(MessageToAgent::Store, Some(fd));
    }

    /// Passes a datagram to the agent. It is dropped if too many wait, as a network would.
    pub(crate) fn send_datagram(
        &self,
        bytes: &[u8],
        route: Option<PathSelection>,
        expiry: Option<Duration>,
    ) {
        if self.unsent.get() < DATAGRAMS_MAX && bytes.len() <= PASSED_BYTES_MAX {
            let message = AgentDatagram::new(bytes, route, expiry);
            let sent = self.send(MessageToAgent::Message(message), None);
            self.unsent.set(self.unsent.get() + usize::from(sent));
        }
    }

    /// Whether datagrams wait to be passed to the agent.
    pub(crate) fn has_unsent(&self) -> bool {
        self.unsent.get() > 0
    }

    /// Informs the agent that the program has closed its datagram socket.
    pub(crate) fn closed(&self) {
        self.send(MessageToAgent::Closed, None);
    }

    /// Informs the agent of changed options.
    pub(crate) fn change(&self, options: &SocketOptions) {
        let options = options.into();
        self.send(MessageToAgent::Options { options }, None);
    }

    /// The socket's status from the agent; `None` when the socket is over or the agent is gone.
    pub(crate) async fn info(&self) -> Option<AgentReply> {
        let sent = timeout(ANSWER_WITHIN, self.ask(AgentQuestion::Info));
        sent.await.ok()?
    }

    /// Waits until the peer has the first `bytes` that the program wrote.
    pub(crate) async fn flush(&self, bytes: u64) -> Option<AgentReply> {
        self.ask(AgentQuestion::Flush { bytes }).await
    }

    /// Informs the agent that the networks changed.
    pub(crate) fn network_changed(&self) {
        if self.abilities.get().notices {
            self.send(MessageToAgent::NetworkChanged, None);
        }
    }

    /// Informs the agent whether this process holds a D-Lock.
    pub(crate) fn send_dlock(&self) {
        if self.abilities.get().locks {
            let held = dlock::is_held();
            self.send(MessageToAgent::DLock { held }, None);
        }
    }

    /// Tells the agent that the connection is not to be opened again.
    pub(crate) async fn release(&self) {
        self.program.take();
        let sent = self.ask(AgentQuestion::Release);
        // If the agent does not answer, it keeps nothing.
        let _ = timeout(ANSWER_WITHIN, sent).await;
    }

    /// Gives up the connection, which the holder of its token can still open again.
    pub(crate) fn abandon(&self) {
        self.released.notify_one();
    }

    async fn ask(&self, question: AgentQuestion) -> Option<AgentReply> {
        let ask = self.next.get();
        self.next.set(ask + 1);
        let (reply, answer) = oneshot::channel();
        let pending = PendingReply { question, reply };
        self.pending.borrow_mut().as_mut()?.insert(ask, pending);
        let _waits = ReplyWaiter {
            connection: self,
            ask,
        };
        // Without an agent now, the next one is asked; if there is none, the pending replies are dropped.
        self.send(question.message(ask), None);
        answer.await.ok()
    }

    fn taken_out(&self, ask: u64) -> Option<oneshot::Sender<AgentReply>> {
        let pending = self.pending.borrow_mut().as_mut()?.remove(&ask);
        pending.map(|pending| pending.reply)
    }

    /// Handles the answer to a request.
    pub(crate) fn hear(
        &self,
        ask: u64,
        fault: Option<(libc::c_int, String)>,
        info: Option<Box<D2tpInfo>>,
    ) {
        let fault = fault.map(|(errno, text)| SocketFault { errno, text });
        if let Some(reply) = self.taken_out(ask) {
            let _ = reply.send(AgentReply { fault, info });
        }
    }

    /// Follows the connection's status until it is over or the agent is gone. `far`: the peer of a datagram socket.
    pub(crate) async fn hear_until_over(
        &mut self,
        conn_status: &ConnectionStatus,
        far: Option<&AgentDatagramPeer>,
    ) -> AgentEnd {
        let mut reader = self.reader.take().expect("of the one that was called with");
        let left = self.released.clone();
        loop {
            let message = tokio::select! {
                message = reader.next() => message,
                () = left.notified() => return AgentEnd::Over,
            };
            match message {
                Ok(Some(MessageFromAgent::Answer { ask, fault, info })) => {
                    self.hear(ask, fault, info)
                }
                Ok(Some(MessageFromAgent::Fault { errno, text })) => {
                    let _ = conn_status.fault.set(SocketFault { errno, text });
                    self.send(MessageToAgent::Heard, None);
                }
                Ok(Some(MessageFromAgent::Over { info })) => {
                    if let Some(info) = info {
                        let _ = conn_status.last.set(*info);
                    }
                    return AgentEnd::Over;
                }
                Ok(Some(MessageFromAgent::Room { bytes })) => {
                    if let Some(far) = far {
                        far.has_room(bytes);
                    }
                }
                Ok(Some(
                    MessageFromAgent::Open { .. }
                    | MessageFromAgent::Taken { .. }
                    | MessageFromAgent::Reopened { .. },
                )) => {}
                Ok(None) | Err(_) => {
                    self.messages.take();
                    return AgentEnd::Lost;
                }
            }
        }
    }

    /// Drops all pending replies, so that the waiting tasks check the connection's status.
    pub(crate) fn drop_pending(&self) {
        self.pending.borrow_mut().take();
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
            let handed = AgentConnection::begin(Rc::new(here), AgentAbilities::default());
            assert!(!handed.has_unsent());
            handed.send_datagram(&vec![0; PASSED_BYTES_MAX + 1], None, None);
            assert!(!handed.has_unsent(), "it would be no line");
            for _ in 0..3 * DATAGRAMS_MAX {
                handed.send_datagram(&vec![0; PASSED_BYTES_MAX], None, None);
            }
            handed.closed();
            let mut reader = MessageReader::new(Rc::new(there));
            let mut messages = 0;
            while let Ok(Some(MessageToAgent::Message(message))) = reader.next().await {
                assert_eq!(message.bytes().map(|b| b.len()), Some(PASSED_BYTES_MAX));
                messages += 1;
            }
            assert_eq!(messages, DATAGRAMS_MAX);
            assert!(!handed.has_unsent());
            handed.send_datagram(b"again", None, None);
            assert!(handed.has_unsent());
            // There is no process to inform any more.
            drop(reader);
            tokio::time::timeout(Duration::from_secs(60), async {
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
