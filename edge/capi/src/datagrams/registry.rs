//! All datagram sockets of an engine and their far ends.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use d2tp_driver::{ContextInbox, DATAGRAMS_MAX, PathSelection, Server};
use socket2::Socket;
use tokio::sync::{Notify, Semaphore};

use super::message_head::MessageHead;
use super::peer::{DatagramPeer, open_peer};
use super::socket::{AgentDatagramPeer, DatagramPorts, DatagramSession};
use crate::agent_connection::AgentConnection;
use crate::carried_flow::CarriedFlow;
use crate::errno::SocketFault;
use crate::options::{EXPIRY, SocketOptions};

/// Where a far end is.
#[derive(Clone)]
pub(super) enum PeerCarrier {
    Local(Rc<DatagramPeer>),
    /// At the agent.
    Agent(Rc<AgentConnection>),
}

impl PeerCarrier {
    pub(super) fn send(
        &self,
        route: Option<PathSelection>,
        expiry: Option<Duration>,
        message: &[u8],
    ) {
        match self {
            PeerCarrier::Local(end) => end.send(route, expiry, message),
            PeerCarrier::Agent(handed) => handed.send_datagram(message, route, expiry),
        }
    }
}

/// A message that waits for its end.
pub(super) struct EarlyDatagram {
    received_at: Instant,
    head: MessageHead,
    message: Bytes,
}

/// All datagram sockets' ends.
#[derive(Default)]
pub(crate) struct DatagramRegistry {
    pub(super) ports: OnceLock<(DatagramPorts, Socket)>,
    pub(super) peers: RefCell<HashMap<(u16, Ipv4Addr), PeerCarrier>>,
    /// What was said before there was an end, where there will be one; the oldest first.
    pub(super) early: RefCell<HashMap<(u16, Ipv4Addr), VecDeque<EarlyDatagram>>>,
    /// Sockets that connect or are connected, by port: told when it is to be looked for them.
    pub(super) clients: RefCell<HashMap<u16, (u64, Rc<Notify>)>>,
    pub(super) servers: RefCell<Vec<Rc<DatagramServer>>>,
}

impl DatagramRegistry {
    /// Keeps a message for an end that there will be.
    pub(super) fn put_early(&self, key: (u16, Ipv4Addr), mark: MessageHead, message: &[u8]) {
        if let Some(early) = self.early.borrow_mut().get_mut(&key) {
            if early.len() == DATAGRAMS_MAX {
                early.pop_front();
            }
            early.push_back(EarlyDatagram {
                received_at: Instant::now(),
                head: mark,
                message: Bytes::copy_from_slice(message),
            });
        }
    }

    /// The end is there, of a socket whose messages are worth so much.
    pub(super) fn begin(&self, key: (u16, Ipv4Addr), end: &PeerCarrier, expiry: Duration) {
        self.peers.borrow_mut().insert(key, end.clone());
        let early = self.early.borrow_mut().remove(&key);
        for one in early.into_iter().flatten() {
            let worth = one.head.expiry.unwrap_or(expiry);
            if let Some(left) = worth.checked_sub(one.received_at.elapsed()) {
                end.send(one.head.route, Some(left), &one.message);
            }
        }
    }

    /// Begins to carry a socket of this process; messages that it sent before go out.
    ///
    /// # Errors
    /// The context is in use.
    pub(super) fn begin_local(
        &self,
        held: &Rc<CarriedFlow>,
        far: &AgentDatagramPeer,
        context: u64,
    ) -> Result<(Rc<DatagramPeer>, ContextInbox), SocketFault> {
        let (end, inbox) = open_peer(held, context)?;
        let session = DatagramSession::Local(end.connection.clone());
        far.socket.peers().insert(far.name, session);
        let expiry = held.options.borrow().expiry;
        let key = (far.socket.port, far.name);
        self.begin(key, &PeerCarrier::Local(end.clone()), expiry);
        Ok((end, inbox))
    }

    /// The server that a program's socket at `port` is.
    pub(super) fn server_at(&self, port: u16) -> Option<Rc<DatagramServer>> {
        let servers = self.servers.borrow();
        servers.iter().find(|server| server.port == port).cloned()
    }

    /// Tells every device that this process leaves; says whether there was a server.
    pub(crate) fn say_goodbye(&self) -> bool {
        let servers = self.servers.borrow();
        for bound in servers.iter() {
            if let Some(server) = &*bound.server.borrow() {
                server.say_goodbye();
            }
        }
        !servers.is_empty()
    }

    /// Whether a socket calls, or has called: its program may have said what is not read yet.
    pub(crate) fn has_clients(&self) -> bool {
        !self.clients.borrow().is_empty()
    }

    /// Whether something waits for a session that is still worth saying.
    pub(crate) fn has_unsent(&self) -> bool {
        let is_worth =
            |one: &EarlyDatagram| one.head.expiry.unwrap_or(EXPIRY) > one.received_at.elapsed();
        self.early.borrow().values().flatten().any(is_worth)
    }
}

/// A bound socket.
pub(super) struct DatagramServer {
    pub(super) port: u16,
    pub(super) at: SocketAddr,
    pub(super) options: RefCell<SocketOptions>,
    pub(super) peer_count: Cell<usize>,
    /// Wakes the check whether the program still has the socket.
    pub(super) recheck: Notify,
    pub(super) server: RefCell<Option<Rc<Server>>>,
    /// Closed when the address is free again.
    pub(super) freed: Semaphore,
}
