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
//! Where an agent of the user runs it has the socket named 127.1.x.y and the session ([`handed`]); heads are
//! still read here, and their messages passed on.
//!
//! Nobody else can speak to either side: P is bound on every address by this user, the program's filter
//! looks at the port, and the engine's sockets are connected.
//!
//! [`socket`] is the program's side and [`mark`] a head; [`client`] and [`hall`] begin and end what connects and
//! what is bound, [`end`] carries, and this file finds the end that a message is for.

mod client;
mod end;
mod hall;
mod mark;
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

use crate::carrier::Owner;
use crate::errno::{Answer, Fault};
use crate::handed::Handed;
use crate::home::Home;
use crate::options::{EXPIRY, Options};
use crate::pump::Held;
use crate::{pair, policy};

pub(crate) use client::{Call, connect, no_proxy, open};
pub(crate) use end::End;
pub(crate) use hall::{bind, say_goodbye, unbind};
pub(crate) use mark::{Mark, ROUTES};
pub(crate) use socket::{Far, Grams, Ports, may_be, program_socket};
use {
    end::{carry, end_of, say_last, until_over},
    hall::{Hall, hall_at},
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
/// The names of far ends begin so ([`Home::name`]).
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
enum Place {
    Here(Rc<End>),
    /// At the agent.
    There(Rc<Handed>),
}

impl Place {
    fn send(&self, route: Option<PathSelection>, expiry: Option<Duration>, message: &[u8]) {
        match self {
            Place::Here(end) => end.send(route, expiry, message),
            Place::There(handed) => handed.pass(message, route, expiry),
        }
    }
}

/// A message that waits for its end.
struct Early {
    said: Instant,
    mark: Mark,
    message: Bytes,
}

/// All datagram sockets' ends.
#[derive(Default)]
pub(crate) struct Desk {
    ports: OnceLock<(Ports, Socket)>,
    ends: RefCell<HashMap<(u16, Ipv4Addr), Place>>,
    /// What was said before there was an end, where there will be one; the oldest first.
    early: RefCell<HashMap<(u16, Ipv4Addr), VecDeque<Early>>>,
    /// Sockets that connect or are connected, by port: told when it is to be looked for them.
    clients: RefCell<HashMap<u16, (u64, Rc<Notify>)>>,
    halls: RefCell<Vec<Rc<Hall>>>,
}

/// The engine's ports, taken at the first datagram socket.
pub(crate) fn ports(home: &Rc<Home>) -> Answer<Ports> {
    if let Some((ports, _)) = home.desk.ports.get() {
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
    let ports = Ports {
        plain,
        marked: marked.local_addr()?.port(),
    };
    tokio::task::spawn_local(sort(home.clone(), UdpSocket::from_std(marked)?));
    let _ = home.desk.ports.set((ports, reserved));
    Ok(ports)
}

/// Hands messages with a head to their ends.
async fn sort(home: Rc<Home>, marked: UdpSocket) {
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    loop {
        let Ok((bytes, from)) = marked.recv_from(&mut buffer).await else {
            // The kernel's word on what we never sent: nothing to do with the next message.
            tokio::task::yield_now().await;
            continue;
        };
        let Some((mark, message)) = Mark::read(&buffer[..bytes]) else {
            continue;
        };
        if from.ip() != Ipv4Addr::LOCALHOST {
            continue;
        }
        let key = (from.port(), mark.name);
        let end = home.desk.ends.borrow().get(&key).cloned();
        match end {
            Some(place) => place.send(mark.route, mark.expiry, message),
            None => home.desk.put_early(key, mark, message),
        }
    }
}

impl Desk {
    fn put_early(&self, key: (u16, Ipv4Addr), mark: Mark, message: &[u8]) {
        if let Some(early) = self.early.borrow_mut().get_mut(&key) {
            if early.len() == DATAGRAMS_MAX {
                early.pop_front();
            }
            early.push_back(Early {
                said: Instant::now(),
                mark,
                message: Bytes::copy_from_slice(message),
            });
        }
    }

    /// The end is there, of a socket whose messages are worth so much.
    fn begin(&self, key: (u16, Ipv4Addr), end: &Place, expiry: Duration) {
        self.ends.borrow_mut().insert(key, end.clone());
        let early = self.early.borrow_mut().remove(&key);
        for one in early.into_iter().flatten() {
            let worth = one.mark.expiry.unwrap_or(expiry);
            if let Some(left) = worth.checked_sub(one.said.elapsed()) {
                end.send(one.mark.route, Some(left), &one.message);
            }
        }
    }

    /// Whether a socket calls, or has called: its program may have said what is not read yet.
    pub(crate) fn has_clients(&self) -> bool {
        !self.clients.borrow().is_empty()
    }

    /// Whether something waits for a session that is still worth saying.
    pub(crate) fn owes(&self) -> bool {
        let is_worth = |one: &Early| one.mark.expiry.unwrap_or(EXPIRY) > one.said.elapsed();
        self.early.borrow().values().flatten().any(is_worth)
    }
}

/// Takes a name for a far end of the program's socket at `port`, and its socket.
fn take_name(home: &Home, port: u16, plain: u16) -> io::Result<(Ipv4Addr, UdpSocket)> {
    // All of them, if need be.
    for _ in 0..=u16::MAX {
        let name = home.name();
        if home.desk.ends.borrow().contains_key(&(port, name)) {
            continue;
        }
        let socket = shared_socket(SocketAddrV4::new(name, plain))?;
        socket.connect(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, port).into())?;
        return Ok((name, UdpSocket::from_std(socket.into())?));
    }
    Err(io::ErrorKind::AddrNotAvailable.into())
}

/// Carries a socket of another process until its flow is over; why it is, if the program did not close it.
pub(crate) async fn serve_other(
    home: &Home,
    owner: &Owner,
    held: &Rc<Held>,
    context: u64,
) -> Option<Fault> {
    let (end, inbox) = match end_of(held, context) {
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
            Err(error) => return Some(Fault::new(libc::EINVAL, error)),
        };
        if let Some(socket) = &socket {
            tokio::select! {
                over = carry(home, &end, &inbox, socket) => return Some(over),
                () = owner.gone() => {}
            }
        }
        say_last(&end, socket.as_ref()).await;
        None
    };
    let over = tokio::select! {
        over = served => over,
        never = policy::watch_messages(home, held, &look) => never,
    };
    policy::take_down_messages(home, held);
    over
}

/// The program changed an option of its socket; the agent that is told, if there is one.
pub(crate) fn on_options(
    home: &Home,
    port: u16,
    deadline_too: bool,
    options: &Options,
) -> Option<Rc<Handed>> {
    for hall in home.desk.halls.borrow().iter().filter(|h| h.port == port) {
        *hall.options.borrow_mut() = options.clone();
    }
    for ((at, _), place) in home.desk.ends.borrow().iter() {
        if *at == port
            && let Place::Here(end) = place
        {
            if deadline_too {
                end.held.flow.borrow().set_deadline(options.within());
            }
            *end.held.options.borrow_mut() = options.clone();
        }
    }
    let calls = home
        .desk
        .clients
        .borrow()
        .get(&port)
        .map(|(serial, _)| *serial);
    let handed = home.handed.borrow().get(&calls?).cloned()?;
    handed.change(options);
    Some(handed)
}

/// The program closed a socket, perhaps for the last time.
pub(crate) async fn on_close(home: &Rc<Home>, port: u16) {
    if let Some((_, look)) = home.desk.clients.borrow().get(&port) {
        look.notify_one();
    }
    if let Some(hall) = hall_at(home, port) {
        hall.look.notify_one();
        if !is_bound(port) {
            // Closed is all that ever happens to it.
            let _ = hall.gone.acquire().await;
        }
    }
}
