//! A socket of another process that an agent carries: its call, its flow, and its process's
//! messages.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;

use crate::agent_message::{AgentCall, MessageFromAgent, MessageReader, MessageToAgent};
use crate::carried_flow::CarriedFlow;
use crate::connect_wait::ConnectWait;
use crate::datagrams::DatagramPeer;
use crate::errno::SocketFault;
use crate::flow_info::{info_of, last_info};
use crate::info::D2tpInfo;
use crate::options::SocketOptions;
use crate::socket_owner::{HEARD_WITHIN, SocketOwner};

/// The most pending flush requests of one socket; further ones are answered "not yet".
const ASKS_MAX: usize = 64;

/// A socket of another process that this agent carries.
pub(crate) struct AgentSocket {
    /// The process that owns the socket.
    pub(crate) owner: Rc<SocketOwner>,
    /// The task that reads the process's messages.
    receiver: RefCell<Option<AbortHandle>>,
    /// The call that the socket was opened with.
    call: AgentCall,
    /// The options, if they changed since the call.
    pub(crate) options: RefCell<Option<SocketOptions>>,
    pub(crate) held: RefCell<Option<Rc<CarriedFlow>>>,
    /// Pending flush requests.
    pending_flushes: RefCell<HashMap<u64, AbortHandle>>,
    /// The receiver of the program's datagrams, once the session of a datagram socket exists.
    inlet: RefCell<Option<DatagramInlet>>,
}

/// The receiver of a program's datagrams and of its descriptor.
struct DatagramInlet {
    end: Rc<DatagramPeer>,
    descriptor: Option<oneshot::Sender<OwnedFd>>,
}

impl AgentSocket {
    pub(crate) fn new(call: &AgentCall) -> Rc<AgentSocket> {
        Rc::new(AgentSocket {
            owner: SocketOwner::new(),
            receiver: RefCell::default(),
            call: call.clone(),
            options: RefCell::new(None),
            held: RefCell::default(),
            pending_flushes: RefCell::default(),
            inlet: RefCell::default(),
        })
    }

    #[cfg(test)]
    pub(crate) fn of_test() -> Rc<AgentSocket> {
        let options = (&SocketOptions::default()).into();
        AgentSocket::new(&AgentCall {
            version: crate::agent_message::VERSION,
            server: String::new(),
            target: None,
            key: "/".into(),
            options,
            keep: None,
            datagrams: false,
            resumes: None,
        })
    }

    /// Makes the process at the other end of `stream` the owner of the socket.
    pub(crate) fn attach(self: &Rc<AgentSocket>, stream: Rc<UnixStream>, reader: MessageReader) {
        self.detach();
        self.owner.attach(stream);
        let listening = tokio::task::spawn_local(listen(reader, self.clone()));
        self.receiver.replace(Some(listening.abort_handle()));
    }

    /// Informs the process that the socket is over.
    pub(crate) async fn end(self: Rc<AgentSocket>) {
        let info = self.held.borrow().as_deref().map(last_info);
        self.owner.enqueue(MessageFromAgent::Over {
            info: info.map(Box::new),
        });
        // Tasks that wait for an answer hold the socket.
        self.held.take();
        self.inlet.take();
        self.owner.let_go();
        let sender = self.detach();
        drop(self);
        if let Some(sender) = sender {
            let _ = timeout(HEARD_WITHIN, sender).await;
        }
    }

    /// Whether the next agent goes on with the connection.
    pub(crate) fn is_left(&self) -> bool {
        self.held
            .borrow()
            .as_ref()
            .is_some_and(|held| held.is_left())
    }

    /// Leaves the process to the next agent, which it looks for once this agent's end of the messages is closed.
    pub(crate) fn leave(&self) {
        self.held.take();
        self.detach();
    }

    /// Disconnects from the owning process.
    fn detach(&self) -> Option<JoinHandle<()>> {
        let sender = self.owner.detach();
        for (_, flushing) in self.pending_flushes.take() {
            flushing.abort();
        }
        if let Some(receiver) = self.receiver.take() {
            receiver.abort();
        }
        sender
    }

    /// Handles the end of the owning process, or its release of the connection.
    fn on_process_left(&self) {
        // A descriptor that is not connected yet cannot be given to another process.
        let may_return = self.held.borrow().is_some();
        self.owner.on_process_left(may_return);
    }

    /// The message to a process that reopened the connection.
    pub(crate) fn reopened_message(&self) -> MessageFromAgent {
        let held = self.held.borrow();
        let options = match (&*held, &*self.options.borrow()) {
            (Some(held), _) => (&*held.options.borrow()).into(),
            (None, Some(options)) => options.into(),
            (None, None) => self.call.options.clone(),
        };
        MessageFromAgent::Reopened {
            server: self.call.server.clone(),
            target: self.call.target.clone(),
            ipv6: self.call.keep.as_ref().is_some_and(|keep| keep.ipv6),
            options,
        }
    }

    /// Records that the session of a datagram socket exists; its descriptor comes later.
    pub(crate) fn opened(&self, end: Rc<DatagramPeer>) -> oneshot::Receiver<OwnedFd> {
        let (give, given) = oneshot::channel();
        let descriptor = Some(give);
        self.inlet.replace(Some(DatagramInlet { end, descriptor }));
        self.owner.enqueue(MessageFromAgent::Open { claim: None });
        given
    }

    fn change(&self, options: SocketOptions) {
        if let Some(held) = &*self.held.borrow() {
            held.change(options.clone());
        }
        self.options.replace(Some(options));
    }

    fn answer(&self, ask: u64, fault: Option<SocketFault>, info: Option<D2tpInfo>) {
        self.owner.enqueue(MessageFromAgent::Answer {
            ask,
            fault: fault.map(|fault| (fault.errno, fault.text)),
            info: info.map(Box::new),
        });
    }
}

async fn listen(mut reader: MessageReader, socket: Rc<AgentSocket>) {
    loop {
        match reader.next().await {
            Ok(Some(MessageToAgent::Options { options })) => {
                // The program's library has already checked the options.
                if let Ok(options) = SocketOptions::try_from(&options) {
                    socket.change(options);
                }
            }
            Ok(Some(MessageToAgent::Info { ask })) => {
                let held = socket.held.borrow().clone();
                let info = held.map_or_else(
                    // The program's library knows the reason.
                    || D2tpInfo::opening(ConnectWait::Answer),
                    |held| info_of(&held),
                );
                socket.answer(ask, None, Some(info));
            }
            Ok(Some(MessageToAgent::Flush { ask, bytes })) => {
                if socket.pending_flushes.borrow().len() >= ASKS_MAX {
                    let fault = SocketFault::new(libc::EAGAIN, "too many wait for it");
                    socket.answer(ask, Some(fault), None);
                    continue;
                }
                let held = socket.held.borrow().clone();
                let asker = socket.clone();
                let flushing = tokio::task::spawn_local(async move {
                    let socket = asker;
                    let flushed = async {
                        match held {
                            Some(held) => held.flush(bytes).await.err(),
                            None => {
                                Some(SocketFault::new(libc::ENOTCONN, "it is not connected yet"))
                            }
                        }
                    };
                    tokio::select! {
                        fault = flushed => socket.answer(ask, fault, None),
                        () = socket.owner.gone() => {}
                    }
                    socket.pending_flushes.borrow_mut().remove(&ask);
                });
                let asks = &socket.pending_flushes;
                asks.borrow_mut().insert(ask, flushing.abort_handle());
            }
            Ok(Some(MessageToAgent::Forget { ask })) => {
                if let Some(flushing) = socket.pending_flushes.borrow_mut().remove(&ask) {
                    flushing.abort();
                }
            }
            Ok(Some(MessageToAgent::Message(message))) => {
                if let Some(inlet) = &*socket.inlet.borrow()
                    && let Some(bytes) = message.bytes()
                {
                    inlet.end.send(message.route(), message.expiry(), &bytes);
                }
            }
            Ok(Some(MessageToAgent::Carry { .. })) => {
                if let Some(inlet) = &mut *socket.inlet.borrow_mut()
                    && let (Some(give), Some(fd)) =
                        (inlet.descriptor.take(), reader.take_descriptor())
                {
                    // Otherwise the socket is over.
                    let _ = give.send(fd);
                }
            }
            Ok(Some(MessageToAgent::Closed)) => {
                socket.owner.end();
            }
            Ok(Some(MessageToAgent::DLock { held })) => socket.owner.set_locked(held),
            Ok(Some(MessageToAgent::Heard)) => socket.owner.on_fault_heard(),
            Ok(Some(MessageToAgent::NetworkChanged)) => {
                if let Some(held) = &*socket.held.borrow()
                    && let Some(line) = &held.session
                {
                    line.0.device.network_changed();
                }
            }
            Ok(Some(MessageToAgent::Release { ask })) => {
                socket.owner.let_go();
                socket.answer(ask, None, None);
            }
            Ok(Some(
                MessageToAgent::Socket(_)
                | MessageToAgent::Store
                | MessageToAgent::Keep(_)
                | MessageToAgent::Left
                | MessageToAgent::Reopen(_)
                | MessageToAgent::Descriptor(_),
            )) => {}
            Ok(None) | Err(_) => return socket.on_process_left(),
        }
    }
}
