//! All datagram sockets of an engine, and their peers.

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

/// Where a peer is carried.
#[derive(Clone)]
pub(super) enum PeerCarrier {
    Local(Rc<DatagramPeer>),
    /// The agent carries the socket's datagrams.
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

/// A datagram that waits for its peer's session.
pub(super) struct EarlyDatagram {
    received_at: Instant,
    head: MessageHead,
    message: Bytes,
}

/// The peers of all datagram sockets.
#[derive(Default)]
pub(crate) struct DatagramRegistry {
    pub(super) ports: OnceLock<(DatagramPorts, Socket)>,
    pub(super) peers: RefCell<HashMap<(u16, Ipv4Addr), PeerCarrier>>,
    /// Datagrams sent before the session existed, the oldest first.
    pub(super) early: RefCell<HashMap<(u16, Ipv4Addr), VecDeque<EarlyDatagram>>>,
    /// Sockets that connect or are connected, by port, each with a notification to check whether the
    /// program still has it.
    pub(super) clients: RefCell<HashMap<u16, (u64, Rc<Notify>)>>,
    pub(super) servers: RefCell<Vec<Rc<DatagramServer>>>,
}

impl DatagramRegistry {
    /// Stores a datagram for a peer whose session does not exist yet.
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

    /// Begins to send for a peer, with the datagrams that waited; they expire as the socket's options
    /// say.
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

    /// Begins to carry a socket of this process, and sends the datagrams that waited.
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

    /// The server socket at the program's port.
    pub(super) fn server_at(&self, port: u16) -> Option<Rc<DatagramServer>> {
        let servers = self.servers.borrow();
        servers.iter().find(|server| server.port == port).cloned()
    }

    /// Informs every device that this process ends. Returns whether there was a server.
    pub(crate) fn say_goodbye(&self) -> bool {
        let servers = self.servers.borrow();
        for bound in servers.iter() {
            if let Some(server) = &*bound.server.borrow() {
                server.say_goodbye();
            }
        }
        !servers.is_empty()
    }

    /// Whether a socket is or was connected: datagrams of its program may still be unread.
    pub(crate) fn has_clients(&self) -> bool {
        !self.clients.borrow().is_empty()
    }

    /// Whether datagrams that have not expired wait for a session.
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
    /// Triggers the check whether the program still has the socket.
    pub(super) recheck: Notify,
    pub(super) server: RefCell<Option<Rc<Server>>>,
    /// Closed when the address can be bound again.
    pub(super) freed: Semaphore,
}
