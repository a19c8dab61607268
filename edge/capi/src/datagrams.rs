//! Datagram sockets: from a program's UDP socket on loopback to DATAGRAM frames, and back.
//!
//! ```text
//!  program's socket                engine
//!  127.0.0.1:A ── send ─────────▶ 127.1.x.y:P    one socket for each far end, whose name that is
//!              ◀────── recv ─────
//!              ── with a cmsg ──▶ 127.0.0.1:M    one for all: a head says which far end, which way, how long
//! ```
//!
//! The kernel keeps messages apart, cuts what a reader has no room for and says so (MSG_TRUNC). A socket
//! that connects is an end of a session with a server; one that is bound is a server, and has an end for
//! each device. An end is announced by a flow, which then stays silent: its first line names the context
//! of the datagrams, both ways, and its end is theirs.
//!
//! Where an agent of the user runs it has the socket named 127.1.x.y and the session ([`crate::agent_connection`]); heads are
//! still read here, and their messages passed on.
//!
//! Nobody else can speak to either side: P is bound on every address by this user, the program's filter
//! looks at the port, and the engine's sockets are connected.
//!
//! [`socket`] is the program's side and [`message_head`] a head; [`client`] and [`server`] begin and end what connects and
//! what is bound, [`peer`] carries, and this file finds the end that a message is for.

mod client;
mod message_head;
mod peer;
mod server;
mod socket;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket as Plain};
use std::os::fd::AsRawFd as _;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use d2tp_driver::{DATAGRAMS_MAX, PathSelection};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::sync::Notify;

use crate::agent_carrier::SocketOwner;
use crate::agent_connection::AgentConnection;
use crate::engine_state::EngineState;
use crate::errno::{CallResult, SocketFault};
use crate::options::{EXPIRY, SocketOptions};
use crate::pump::CarriedFlow;
use crate::{pair, policy};

pub(crate) use client::{DatagramCall, connect, no_proxy, open};
pub(crate) use message_head::{MessageHead, ROUTES};
pub(crate) use peer::DatagramPeer;
pub(crate) use server::{bind, say_goodbye, unbind};
pub(crate) use socket::{
    AgentDatagramPeer, DatagramPorts, ProgramDatagrams, may_be_datagram_socket, program_socket,
};
use {
    peer::{carry, open_peer, send_remaining, until_over},
    server::{DatagramServer, server_at},
    socket::is_bound,
};

/// The word before the context.
const LINE_WORD: &str = "DATAGRAMS";
/// How often it is looked whether a program still has its socket, if nothing else tells.
const LOOK: Duration = Duration::from_secs(5);
/// The largest message that loopback carries.
const MESSAGE_BYTES_MAX: usize = 65_536;

/// What every session takes in one message, before its paths are known: of the least datagram that D2TP needs.
pub(crate) const SURE_BYTES: usize = 1100;
/// The names of far ends begin so ([`EngineState::name`]).
pub(crate) const NAMES: [u8; 2] = [127, 1];

fn shared_socket(at: SocketAddrV4) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_port(true)?;
    socket.bind(&at.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Where a far end is.
#[derive(Clone)]
enum PeerCarrier {
    Local(Rc<DatagramPeer>),
    /// At the agent.
    Agent(Rc<AgentConnection>),
}

impl PeerCarrier {
    fn send(&self, route: Option<PathSelection>, expiry: Option<Duration>, message: &[u8]) {
        match self {
            PeerCarrier::Local(end) => end.send(route, expiry, message),
            PeerCarrier::Agent(handed) => handed.send_datagram(message, route, expiry),
        }
    }
}

/// A message that waits for its end.
struct EarlyDatagram {
    received_at: Instant,
    head: MessageHead,
    message: Bytes,
}

/// All datagram sockets' ends.
#[derive(Default)]
pub(crate) struct DatagramRegistry {
    ports: OnceLock<(DatagramPorts, Socket)>,
    peers: RefCell<HashMap<(u16, Ipv4Addr), PeerCarrier>>,
    /// What was said before there was an end, where there will be one; the oldest first.
    early: RefCell<HashMap<(u16, Ipv4Addr), VecDeque<EarlyDatagram>>>,
    /// Sockets that connect or are connected, by port: told when it is to be looked for them.
    clients: RefCell<HashMap<u16, (u64, Rc<Notify>)>>,
    servers: RefCell<Vec<Rc<DatagramServer>>>,
}

/// The engine's ports, taken at the first datagram socket.
pub(crate) fn ports(home: &Rc<EngineState>) -> CallResult<DatagramPorts> {
    if let Some((ports, _)) = home.datagrams.ports.get() {
        return Ok(*ports);
    }
    let reserved = shared_socket(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0))?;
    pair::mute(reserved.as_raw_fd())?;
    let number = |socket: &Socket| {
        let address = socket.local_addr()?.as_socket_ipv4();
        let address = address.ok_or(io::ErrorKind::AddrNotAvailable)?;
        io::Result::Ok(address.port())
    };
    let plain = number(&reserved)?;
    let marked = Plain::bind((Ipv4Addr::LOCALHOST, 0))?;
    marked.set_nonblocking(true)?;
    let ports = DatagramPorts {
        plain,
        with_head: marked.local_addr()?.port(),
    };
    tokio::task::spawn_local(dispatch_with_head(
        home.clone(),
        UdpSocket::from_std(marked)?,
    ));
    let _ = home.datagrams.ports.set((ports, reserved));
    Ok(ports)
}

/// Hands messages with a head to their ends.
async fn dispatch_with_head(home: Rc<EngineState>, marked: UdpSocket) {
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    loop {
        let Ok((bytes, from)) = marked.recv_from(&mut buffer).await else {
            // The kernel's word on what we never sent: nothing to do with the next message.
            tokio::task::yield_now().await;
            continue;
        };
        let Some((mark, message)) = MessageHead::read(&buffer[..bytes]) else {
            continue;
        };
        if from.ip() != Ipv4Addr::LOCALHOST {
            continue;
        }
        let key = (from.port(), mark.name);
        let end = home.datagrams.peers.borrow().get(&key).cloned();
        match end {
            Some(place) => place.send(mark.route, mark.expiry, message),
            None => home.datagrams.put_early(key, mark, message),
        }
    }
}

impl DatagramRegistry {
    fn put_early(&self, key: (u16, Ipv4Addr), mark: MessageHead, message: &[u8]) {
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
    fn begin(&self, key: (u16, Ipv4Addr), end: &PeerCarrier, expiry: Duration) {
        self.peers.borrow_mut().insert(key, end.clone());
        let early = self.early.borrow_mut().remove(&key);
        for one in early.into_iter().flatten() {
            let worth = one.head.expiry.unwrap_or(expiry);
            if let Some(left) = worth.checked_sub(one.received_at.elapsed()) {
                end.send(one.head.route, Some(left), &one.message);
            }
        }
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

/// Takes a name for a far end of the program's socket at `port`, and its socket.
fn take_name(home: &EngineState, port: u16, plain: u16) -> io::Result<(Ipv4Addr, UdpSocket)> {
    // All of them, if need be.
    for _ in 0..=u16::MAX {
        let name = home.name();
        if home.datagrams.peers.borrow().contains_key(&(port, name)) {
            continue;
        }
        let socket = shared_socket(SocketAddrV4::new(name, plain))?;
        socket.connect(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, port).into())?;
        return Ok((name, UdpSocket::from_std(socket.into())?));
    }
    Err(io::ErrorKind::AddrNotAvailable.into())
}

/// Carries a socket of another process until its flow is over; why it is, if the program did not close it.
pub(crate) async fn carry_for_agent(
    home: &EngineState,
    owner: &SocketOwner,
    held: &Rc<CarriedFlow>,
    context: u64,
) -> Option<SocketFault> {
    let (end, inbox) = match open_peer(held, context) {
        Ok(begun) => begun,
        Err(fault) => return Some(fault),
    };
    let told = Cell::new(None);
    let look = || {
        let room = end.connection.datagram_max();
        if let Some(bytes) = room.filter(|_| told.replace(room) != room) {
            owner.has_room(bytes);
        }
    };
    look();
    let passed = owner.opened(end.clone());
    let served = async {
        let fd = tokio::select! {
            // First: a program that closes its socket at once has passed it before, with what it said in it.
            biased;
            fd = passed => fd.ok(),
            over = until_over(held) => return Some(over),
            () = owner.gone() => None,
        };
        let socket = fd.map(|fd| {
            let socket = Socket::from(fd);
            socket.set_nonblocking(true)?;
            UdpSocket::from_std(socket.into())
        });
        let socket = match socket.transpose() {
            Ok(socket) => socket,
            Err(error) => return Some(SocketFault::new(libc::EINVAL, error)),
        };
        if let Some(socket) = &socket {
            tokio::select! {
                over = carry(home, &end, &inbox, socket) => return Some(over),
                () = owner.gone() => {}
            }
        }
        send_remaining(&end, socket.as_ref()).await;
        None
    };
    let over = tokio::select! {
        over = served => over,
        never = policy::watch_datagrams(home, held, &look) => never,
    };
    policy::account_datagrams(home, held);
    over
}

/// The program changed an option of its socket; the agent that is told, if there is one.
pub(crate) fn on_options(
    home: &EngineState,
    port: u16,
    deadline_too: bool,
    options: &SocketOptions,
) -> Option<Rc<AgentConnection>> {
    for hall in home
        .datagrams
        .servers
        .borrow()
        .iter()
        .filter(|h| h.port == port)
    {
        *hall.options.borrow_mut() = options.clone();
    }
    for ((at, _), place) in home.datagrams.peers.borrow().iter() {
        if *at == port
            && let PeerCarrier::Local(end) = place
        {
            if deadline_too {
                end.held.flow.borrow().set_deadline(options.within());
            }
            *end.held.options.borrow_mut() = options.clone();
        }
    }
    let calls = home
        .datagrams
        .clients
        .borrow()
        .get(&port)
        .map(|(serial, _)| *serial);
    let handed = home.agent_connections.borrow().get(&calls?).cloned()?;
    handed.change(options);
    Some(handed)
}

/// The program closed a socket, perhaps for the last time.
pub(crate) async fn on_close(home: &Rc<EngineState>, port: u16) {
    if let Some((_, look)) = home.datagrams.clients.borrow().get(&port) {
        look.notify_one();
    }
    if let Some(hall) = server_at(home, port) {
        hall.recheck.notify_one();
        if !is_bound(port) {
            // Closed is all that ever happens to it.
            let _ = hall.freed.acquire().await;
        }
    }
}
