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
//! process carries the connection. If an agent dies, the kernel resets its sockets, because they
//! were created so (`PairPort::detachable_end`).

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
type PendingReplies = RefCell<Option<HashMap<u64, oneshot::Sender<AgentReply>>>>;

/// A connection that an agent carries for this process.
pub(crate) struct AgentConnection {
    messages: UnboundedSender<(MessageToAgent, Option<OwnedFd>)>,
    pending: Rc<PendingReplies>,
    next: Rc<Cell<u64>>,
    /// Notified when this process gives the connection up.
    released: Rc<Notify>,
    /// Whether the agent understands notices of changed networks.
    notices: bool,
    /// Whether the agent understands notices of D-Locks.
    locks: bool,
    /// The number of datagrams that are queued for the agent.
    unsent: Rc<Cell<usize>>,
    /// The reader of the agent's messages, until the task that follows the connection takes it.
    pub(crate) reader: Option<MessageReader>,
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
            let _ = self.connection.messages.send((forget, None));
        }
    }
}

impl AgentConnection {
    /// Creates a connection over `stream`; the flags say whether the agent understands notices of
    /// networks and of D-Locks.
    pub(crate) fn begin(stream: Rc<UnixStream>, (notices, locks): (bool, bool)) -> AgentConnection {
        let (sender, outgoing) = unbounded_channel();
        let unsaid = Rc::default();
        tokio::task::spawn_local(send_all(stream, outgoing, Rc::clone(&unsaid)));
        AgentConnection {
            messages: sender,
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

    /// Asks the agent to carry the connection over `fd`, whose other end is at port `from`.
    pub(crate) fn carry(&self, from: u16, fd: OwnedFd) {
        let _ = self
            .messages
            .send((MessageToAgent::Carry { from }, Some(fd)));
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
            let sent = self.messages.send((MessageToAgent::Message(message), None));
            self.unsent
                .set(self.unsent.get() + usize::from(sent.is_ok()));
        }
    }

    /// Whether datagrams wait to be passed to the agent.
    pub(crate) fn has_unsent(&self) -> bool {
        self.unsent.get() > 0
    }

    /// Informs the agent that the program has closed its datagram socket.
    pub(crate) fn closed(&self) {
        let _ = self.messages.send((MessageToAgent::Closed, None));
    }

    /// Informs the agent of changed options.
    pub(crate) fn change(&self, options: &SocketOptions) {
        let options = options.into();
        let _ = self
            .messages
            .send((MessageToAgent::Options { options }, None));
    }

    /// The socket's status from the agent; `None` when the socket is over or the agent is gone.
    pub(crate) async fn info(&self) -> Option<AgentReply> {
        let sent = timeout(ANSWER_WITHIN, self.ask(|ask| MessageToAgent::Info { ask }));
        sent.await.ok()?
    }

    /// Waits until the peer has the first `bytes` that the program wrote.
    pub(crate) async fn flush(&self, bytes: u64) -> Option<AgentReply> {
        self.ask(|ask| MessageToAgent::Flush { ask, bytes }).await
    }

    /// Informs the agent that the networks changed.
    pub(crate) fn network_changed(&self) {
        if self.notices {
            let _ = self.messages.send((MessageToAgent::NetworkChanged, None));
        }
    }

    /// Informs the agent whether this process holds a D-Lock.
    pub(crate) fn send_dlock(&self) {
        if self.locks {
            let held = dlock::is_held();
            let _ = self.messages.send((MessageToAgent::DLock { held }, None));
        }
    }

    /// Tells the agent that the connection is not to be opened again.
    pub(crate) async fn release(&self) {
        let sent = self.ask(|ask| MessageToAgent::Release { ask });
        // If the agent does not answer, it keeps nothing.
        let _ = timeout(ANSWER_WITHIN, sent).await;
    }

    /// Gives up the connection, which the holder of its token can still open again.
    pub(crate) fn abandon(&self) {
        self.released.notify_one();
    }

    async fn ask(&self, what: impl FnOnce(u64) -> MessageToAgent) -> Option<AgentReply> {
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

    /// Follows the connection's status until it is over. Returns whether the agent was lost. `far`: the
    /// peer of a datagram socket.
    pub(crate) async fn hear_until_over(
        &mut self,
        conn_status: &ConnectionStatus,
        far: Option<&AgentDatagramPeer>,
    ) -> bool {
        let mut reader = self.reader.take().expect("of the one that was called with");
        let left = self.released.clone();
        loop {
            let message = tokio::select! {
                message = reader.next() => message,
                () = left.notified() => return false,
            };
            match message {
                Ok(Some(MessageFromAgent::Answer { ask, fault, info })) => {
                    self.hear(ask, fault, info)
                }
                Ok(Some(MessageFromAgent::Fault { errno, text })) => {
                    let _ = conn_status.fault.set(SocketFault { errno, text });
                    let _ = self.messages.send((MessageToAgent::Heard, None));
                }
                Ok(Some(MessageFromAgent::Over { info })) => {
                    if let Some(info) = info {
                        let _ = conn_status.last.set(*info);
                    }
                    return false;
                }
                Ok(Some(MessageFromAgent::Room { bytes })) => {
                    if let Some(far) = far {
                        far.has_room(bytes);
                    }
                }
                Ok(Some(
                    MessageFromAgent::Open
                    | MessageFromAgent::Taken { .. }
                    | MessageFromAgent::Reopened { .. },
                )) => {}
                Ok(None) | Err(_) => {
                    let text = "the agent that carried this connection is gone";
                    let _ = conn_status
                        .fault
                        .set(SocketFault::new(libc::ECONNRESET, text));
                    return true;
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
            let handed = AgentConnection::begin(Rc::new(here), (true, true));
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
