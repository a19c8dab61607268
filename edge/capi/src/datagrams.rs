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

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::{Future as _, poll_fn};
use std::io::{self, Read as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket as Plain};
use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use d2tp_driver::{
    Admission, Config, Connection, ContextInbox, DATAGRAMS_MAX, DriverError, Flow, FlowIo as _,
    Route, Server, ServerOptions,
};
use libc::c_int;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;
use tokio::sync::{Notify, Semaphore};

use crate::carrier::Owner;
use crate::connect::{self, server_of};
use crate::errno::{Answer, Errno, Fault};
use crate::handed::{self, Handed};
use crate::home::Home;
use crate::options::{EXPIRY, Options};
use crate::pump::{self, Held};
use crate::table::{self, Fate};
use crate::{pair, policy};

/// Far ends of one bound socket; each has a kernel socket. Further devices are refused.
const ENDS_MAX: usize = 4096; // a guess: a quarter of the descriptors that the system gives a process
/// A flow that has not named its context after so long is nobody's.
const LINE_WAIT: Duration = Duration::from_secs(10); // a guess
/// Bytes of that line.
const LINE_BYTES_MAX: usize = 32;
/// The word before the context.
const LINE_WORD: &str = "DATAGRAMS";
/// How often it is looked whether a program still has its socket, if nothing else tells.
const LOOK: Duration = Duration::from_secs(5);
/// The largest message that loopback carries.
const MESSAGE_BYTES_MAX: usize = 65_536;
/// Reset code of a flow that is not of a datagram socket, or one too many.
const NOT_HERE: u64 = 0xd302;

/// What every session takes in one message, before its paths are known: of the least datagram that D2TP needs.
pub(crate) const SURE_BYTES: usize = 1100;
/// The names of far ends begin so ([`Home::name`]).
pub(crate) const NAMES: [u8; 2] = [127, 1];

/// Some socket of this process is one for datagrams: until then nobody is asked.
static ANY: AtomicBool = AtomicBool::new(false);

/// Whether a descriptor is a datagram socket, perhaps of ours.
pub(crate) fn may_be(fd: RawFd) -> bool {
    if !ANY.load(Ordering::Relaxed) {
        return false;
    }
    let mut kind: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the place has the length that is said.
    let got = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_TYPE,
            (&raw mut kind).cast(),
            &mut len,
        )
    };
    got == 0 && kind == libc::SOCK_DGRAM
}

/// The engine's ports for datagrams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    /// Of every far end's name.
    pub(crate) plain: u16,
    /// Of messages with a head.
    pub(crate) marked: u16,
}

/// What the program's side knows of a datagram socket.
pub(crate) struct Grams {
    pub(crate) ports: Ports,
    /// Its loopback port.
    pub(crate) port: u16,
    /// Its far ends, by their names.
    ends: Mutex<HashMap<Ipv4Addr, Session>>,
    /// The far end that it is connected to.
    to: Mutex<Option<Ipv4Addr>>,
}

/// Whose session with a far end it is.
enum Session {
    Ours(Connection),
    /// An agent's: messages of so many bytes fit.
    Agents(usize),
}

/// A far end of a program's socket that an agent carries.
pub(crate) struct Far {
    grams: Arc<Grams>,
    name: Ipv4Addr,
}

impl Far {
    /// Messages of so many bytes fit.
    pub(crate) fn has_room(&self, bytes: usize) {
        let session = Session::Agents(bytes);
        self.grams.ends().insert(self.name, session);
    }
}

impl fmt::Debug for Grams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grams({})", self.port)
    }
}

impl Grams {
    /// The far end that it is connected to.
    pub(crate) fn to(&self) -> Option<Ipv4Addr> {
        *self.to.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_to(&self, name: Ipv4Addr) {
        *self.to.lock().unwrap_or_else(PoisonError::into_inner) = Some(name);
    }

    fn ends(&self) -> std::sync::MutexGuard<'_, HashMap<Ipv4Addr, Session>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The largest message that is taken for a far end now, if there is a session with it.
    pub(crate) fn max(&self, name: Ipv4Addr) -> Option<usize> {
        let connection = match self.ends().get(&name)? {
            Session::Ours(connection) => connection.clone(),
            Session::Agents(bytes) => return Some(*bytes),
        };
        connection.datagram_max()
    }
}

/// A message's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) name: Ipv4Addr,
    pub(crate) route: Option<Route>,
    pub(crate) expiry: Option<Duration>,
}

/// Bytes of it: name, route, expiry in milliseconds.
pub(crate) const MARK_BYTES: usize = 4 + 4 + 4;

pub(crate) const ROUTES: [Route; 3] = [Route::Any, Route::Steadiest, Route::Each];

impl Mark {
    pub(crate) fn to_bytes(self) -> [u8; MARK_BYTES] {
        let place = |route| ROUTES.iter().position(|r| *r == route);
        let route = self.route.and_then(place).map_or(u32::MAX, |n| n as u32);
        let expiry = self.expiry.map_or(0, |expiry| expiry.as_millis() as u32);
        let mut bytes = [0; MARK_BYTES];
        bytes[..4].copy_from_slice(&self.name.octets());
        bytes[4..8].copy_from_slice(&route.to_ne_bytes());
        bytes[8..].copy_from_slice(&expiry.to_ne_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Option<(Mark, &[u8])> {
        let (head, message) = bytes.split_first_chunk::<MARK_BYTES>()?;
        let word = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().expect("four"));
        let expiry = u64::from(word(8));
        let mark = Mark {
            name: Ipv4Addr::new(head[0], head[1], head[2], head[3]),
            route: ROUTES.get(word(4) as usize).copied(),
            expiry: (expiry > 0).then(|| Duration::from_millis(expiry)),
        };
        Some((mark, message))
    }
}

/// Makes a program's socket, and what is known of it.
pub(crate) fn program_socket(flags: c_int, ports: Ports) -> io::Result<(RawFd, Grams)> {
    // SAFETY: plain numbers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let set_up = || {
        // Before anybody can reach it.
        pair::guard_listener(fd, ports.plain)?;
        pair::bind_program(fd)
    };
    let port = set_up().inspect_err(|_| {
        // SAFETY: just made, and nobody knows it.
        unsafe { libc::close(fd) };
    })?;
    ANY.store(true, Ordering::Relaxed);
    let grams = Grams {
        ports,
        port,
        ends: Mutex::default(),
        to: Mutex::default(),
    };
    Ok((fd, grams))
}

/// Whether a program still has its datagram socket at `port`.
fn is_bound(port: u16) -> bool {
    Plain::bind((Ipv4Addr::LOCALHOST, port)).is_err()
}

fn shared_socket(at: SocketAddrV4) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_port(true)?;
    socket.bind(&at.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// One session's datagrams of one program's socket.
pub(crate) struct End {
    held: Rc<Held>,
    connection: Connection,
    context: u64,
}

impl End {
    pub(crate) fn send(&self, route: Option<Route>, expiry: Option<Duration>, message: &[u8]) {
        let options = self.held.options.borrow();
        let route = route.unwrap_or(options.route);
        let expiry = expiry.unwrap_or(options.expiry);
        let bytes = Bytes::copy_from_slice(message);
        // Too large, or too late: it is lost, as datagrams are. Calls of the library looked before.
        let sent = self
            .connection
            .send_datagram_by(route, self.context, bytes, expiry);
        let held = &self.held;
        match sent {
            Ok(()) => held.count(&held.sent, message.len() as u64),
            // Another process looked, by what it was told fits.
            Err(_) => held.changed.notify_one(),
        }
    }
}

/// Where a far end is.
#[derive(Clone)]
enum Place {
    Here(Rc<End>),
    /// At the agent.
    There(Rc<Handed>),
}

impl Place {
    fn send(&self, route: Option<Route>, expiry: Option<Duration>, message: &[u8]) {
        match self {
            Place::Here(end) => end.send(route, expiry, message),
            Place::There(handed) => handed.pass(message, route, expiry),
        }
    }
}

/// A bound socket.
struct Hall {
    port: u16,
    at: SocketAddr,
    options: RefCell<Options>,
    ends: Cell<usize>,
    /// It is to be looked whether the program still has it.
    look: Notify,
    server: RefCell<Option<Rc<Server>>>,
    /// Closed when the address is free again.
    gone: Semaphore,
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

/// Keeps what the program says while its session is not begun.
async fn collect(home: &Home, port: u16, name: Ipv4Addr, socket: &UdpSocket) {
    let mark = Mark {
        name,
        route: None,
        expiry: None,
    };
    loop {
        if socket.readable().await.is_ok() {
            let hear = |message: &[u8]| home.desk.put_early((port, name), mark, message);
            read_all(|buffer| socket.try_recv(buffer), hear);
        }
        tokio::task::yield_now().await;
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

/// Where a datagram socket is to lead.
pub(crate) struct Call {
    pub(crate) grams: Arc<Grams>,
    pub(crate) of: connect::Call,
}

/// Begins a session for a program's socket; says by which name the program speaks to its far end.
pub(crate) fn connect(home: &Rc<Home>, call: Call) -> Answer<Ipv4Addr> {
    let (name, socket) = take_name(home, call.grams.port, call.grams.ports.plain)?;
    let key = (call.grams.port, name);
    home.desk.early.borrow_mut().insert(key, VecDeque::new());
    let look = Rc::new(Notify::new());
    let serial = call.of.fate.serial;
    let before = home
        .desk
        .clients
        .borrow_mut()
        .insert(call.grams.port, (serial, look.clone()));
    if let Some((_, before)) = before {
        // It was connected elsewhere: its far end there is over.
        before.notify_one();
    }
    tokio::task::spawn_local(call_out(home.clone(), call, name, socket, look));
    Ok(name)
}

async fn call_out(home: Rc<Home>, call: Call, name: Ipv4Addr, socket: UdpSocket, look: Rc<Notify>) {
    let (serial, port) = (call.of.fate.serial, call.grams.port);
    let is_wanted = || {
        let clients = home.desk.clients.borrow();
        clients.get(&port).is_some_and(|(now, _)| *now == serial) && is_bound(port)
    };
    let unwanted = || async {
        while is_wanted() {
            let _ = tokio::time::timeout(LOOK, look.notified()).await;
        }
    };
    let late = async {
        unwanted().await;
        // What it said before it closed waits for the session as long as it is worth.
        tokio::time::sleep(call.of.options.expiry).await;
    };
    let far = Far {
        grams: call.grams.clone(),
        name,
    };
    let opened = tokio::select! {
        made = make(&home, &call.of, &far) => made.map(Some),
        () = collect(&home, port, name, &socket) => Ok(None),
        () = late => Ok(None),
    };
    let (over, socket) = match opened {
        Ok(Some(Made::Here(held, context))) => {
            let held = pump::enter(&home, *held);
            // Before it is looked whether the program is still there: it may have spoken and gone.
            let over = match begin(&home, &held, &far, context) {
                Ok((end, inbox)) => tokio::select! {
                    over = carry(&home, &end, &inbox, &socket) => Some(over),
                    () = unwanted() => {
                        say_last(&end, Some(&socket)).await;
                        None
                    }
                },
                Err(fault) => Some(fault),
            };
            pump::leave(&home, &held);
            (over, socket.into_std())
        }
        Ok(Some(Made::There(handed))) => {
            let known = Rc::new(handed.twin());
            let place = Place::There(known.clone());
            home.desk
                .begin((port, name), &place, latest(&call.of).expiry);
            match socket.as_fd().try_clone_to_owned() {
                Ok(fd) => {
                    // From here on the agent reads, and nobody is woken here by what it has.
                    let socket = socket.into_std();
                    known.carry(port, fd);
                    let closed = async {
                        unwanted().await;
                        known.closed();
                        std::future::pending::<()>().await;
                    };
                    tokio::select! {
                        () = handed.follow(&home, &call.of.fate, None, Some(&far)) => {}
                        () = closed => {}
                    }
                    (call.of.fate.fault.get().cloned(), socket)
                }
                Err(error) => (Some(Fault::new(libc::EMFILE, error)), socket.into_std()),
            }
        }
        Ok(None) => (None, socket.into_std()),
        Err(fault) => (Some(fault), socket.into_std()),
    };
    home.desk.ends.borrow_mut().remove(&(port, name));
    home.desk.early.borrow_mut().remove(&(port, name));
    home.handed.borrow_mut().remove(&serial);
    call.grams.ends().remove(&name);
    if let Some(fault) = over {
        let _ = call.of.fate.fault.set(fault);
        // Whoever reads looks why.
        let _ = socket.and_then(|socket| socket.send(&[]));
    }
    call.of.fate.over.store(true, Ordering::Relaxed);
    let mut clients = home.desk.clients.borrow_mut();
    if clients.get(&port).is_some_and(|(now, _)| *now == serial) {
        clients.remove(&port);
    }
}

/// What the program asks for now.
fn latest(call: &connect::Call) -> Options {
    let known = table::change(call.cookie, |socket| socket.options.clone());
    known.unwrap_or_else(|| call.options.clone())
}

/// Who carries a socket's datagrams.
enum Made {
    Here(Box<Held>, u64),
    There(Handed),
}

async fn make(home: &Rc<Home>, call: &connect::Call, far: &Far) -> Result<Made, Fault> {
    let (server, through_proxy) = server_of(&call.to, &call.options)?;
    if through_proxy {
        return Err(no_proxy());
    }
    if let Some(handed) = handed::call(home, call, &server, None, Some(far)).await? {
        return Ok(Made::There(handed));
    }
    let way = connect::Way {
        server,
        target: None,
        key: None,
        owner: None,
    };
    let (held, context) = open(home, &way, || latest(call), call.fate.clone()).await?;
    Ok(Made::Here(Box::new(held), context))
}

/// Begins a session, and a flow in it that names the context of the datagrams, which is returned too.
pub(crate) async fn open(
    home: &Rc<Home>,
    way: &connect::Way,
    latest: impl Fn() -> Options,
    fate: Arc<Fate>,
) -> Result<(Held, u64), Fault> {
    let line = home.line(&way.server, way.key.as_deref()).await?;
    let options = latest();
    let flow = line.0.device.open(options.settings()?);
    let mut flow = flow.map_err(|error| Fault::new(libc::ENOBUFS, error))?;
    let context = line.0.next_context();
    let announced = flow
        .write_all(format!("{LINE_WORD} {context}\n").as_bytes())
        .await;
    announced.map_err(|error| Fault::new(libc::ECONNRESET, error))?;
    Ok((Held::new(flow, Some(line), fate, options), context))
}

/// Why a datagram socket leads nowhere without a server's key.
pub(crate) fn no_proxy() -> Fault {
    let why = "datagrams go to D2TP servers alone: give a key; the proxy carries streams";
    Fault::new(libc::EPROTONOSUPPORT, why)
}

/// An end whose flow is there, and its datagrams.
fn end_of(held: &Rc<Held>, context: u64) -> Result<(Rc<End>, ContextInbox), Fault> {
    let connection = held.flow.borrow().connection();
    let Some(inbox) = connection.context(context) else {
        let why = format!("context {context} is in use");
        return Err(Fault::new(libc::EADDRINUSE, why));
    };
    let end = Rc::new(End {
        held: held.clone(),
        connection,
        context,
    });
    Ok((end, inbox))
}

/// The same of a socket of this process; what was said before goes out.
fn begin(
    home: &Rc<Home>,
    held: &Rc<Held>,
    far: &Far,
    context: u64,
) -> Result<(Rc<End>, ContextInbox), Fault> {
    let (end, inbox) = end_of(held, context)?;
    let session = Session::Ours(end.connection.clone());
    far.grams.ends().insert(far.name, session);
    let expiry = held.options.borrow().expiry;
    let key = (far.grams.port, far.name);
    home.desk.begin(key, &Place::Here(end.clone()), expiry);
    Ok((end, inbox))
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

/// Carries until the flow is over; why it is.
async fn carry(home: &Home, end: &End, inbox: &ContextInbox, socket: &UdpSocket) -> Fault {
    let mut leaving = home.leaving.subscribe();
    let left = async {
        let _ = leaving.wait_for(|leaving| *leaving).await;
        drain_last(end, socket);
        finish(&end.held);
        std::future::pending().await
    };
    tokio::select! {
        over = give(&end.held, inbox, socket) => over,
        never = take(end, socket) => never,
        never = left => never,
    }
}

/// What is there without waiting.
fn at_once<T>(future: impl std::future::Future<Output = T>) -> Option<T> {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match pin!(future).poll(&mut cx) {
        std::task::Poll::Ready(ready) => Some(ready),
        std::task::Poll::Pending => None,
    }
}

/// The flow says nothing more; its end is the end.
async fn until_over(held: &Held) -> Fault {
    let ended = poll_fn(|cx| {
        let mut flow = held.flow.borrow_mut();
        loop {
            match pin!(flow.read_chunk()).poll(cx) {
                std::task::Poll::Ready(Ok(Some(_))) => {}
                std::task::Poll::Ready(Ok(None)) => return std::task::Poll::Ready(None),
                std::task::Poll::Ready(Err(error)) => return std::task::Poll::Ready(Some(error)),
                std::task::Poll::Pending => return std::task::Poll::Pending,
            }
        }
    });
    match ended.await {
        Some(error) => held.fault(&error),
        None => Fault::new(libc::ECONNRESET, "the other end closed its socket"),
    }
}

/// From the far end to the program, until the flow is over; why it is.
async fn give(held: &Held, inbox: &ContextInbox, socket: &UdpSocket) -> Fault {
    // Not given up between a message and its socket, which may take its time when it is new.
    let pass = async |message: Bytes| {
        // An error is ICMP's word that the program closed its socket. Whoever looks after that looks itself.
        if let Ok(bytes) = socket.send(&message).await {
            held.count(&held.received, bytes as u64);
        }
    };
    let mut over = pin!(until_over(held));
    let over = loop {
        let message = tokio::select! {
            Some(message) = inbox.recv() => message,
            over = &mut over => break over,
        };
        pass(message).await;
    };
    // What came with the end was said before it.
    while let Some(message) = at_once(inbox.recv()).flatten() {
        pass(message).await;
    }
    over
}

/// From the program to the far end, for ever.
async fn take(end: &End, socket: &UdpSocket) -> Fault {
    loop {
        // An error that waits here is taken by the reads.
        if socket.readable().await.is_ok() {
            drain(end, socket);
        }
        tokio::task::yield_now().await;
    }
}

/// All that the program said so far.
fn drain(end: &End, socket: &UdpSocket) {
    read_all(
        |buffer| socket.try_recv(buffer),
        |message| end.send(None, None, message),
    );
}

/// The same at the end, when nothing waits for the socket any more: a new one may hold what its waker has not
/// heard of.
fn drain_last(end: &End, socket: &UdpSocket) {
    let socket = SockRef::from(socket);
    read_all(
        |buffer| (&*socket).read(buffer),
        |message| end.send(None, None, message),
    );
}

fn read_all(mut read: impl FnMut(&mut [u8]) -> io::Result<usize>, mut hear: impl FnMut(&[u8])) {
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; MESSAGE_BYTES_MAX]);
    }
    BUFFER.with_borrow_mut(|buffer| {
        loop {
            match read(buffer) {
                Ok(bytes) => hear(&buffer[..bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {}
            }
        }
    });
}

/// The program closed its socket: what it said before leaves, as long as it is worth it.
async fn say_last(end: &End, socket: Option<&UdpSocket>) {
    if let Some(socket) = socket {
        drain_last(end, socket);
    }
    let held = &end.held;
    finish(held);
    let gone = poll_fn(|cx| held.flow.borrow_mut().poll_finished(cx));
    let expiry = held.options.borrow().expiry;
    let _ = tokio::time::timeout(expiry, gone).await;
}

/// Says that no more will come.
fn finish(held: &Held) {
    let _ = at_once(held.flow.borrow_mut().shutdown());
    held.finished();
}

/// Makes a program's socket a server at `address`; says which that is.
pub(crate) async fn bind(
    home: &Rc<Home>,
    grams: &Arc<Grams>,
    address: SocketAddr,
    options: Options,
) -> Answer<SocketAddr> {
    let key = home.key().map_err(|fault| Errno(fault.errno))?;
    let bound = Server::bind(ServerOptions {
        listen: address,
        key,
        admission: Admission::Anybody,
        config: Config::default(),
    });
    let server = bound.map_err(|error| match error {
        DriverError::Bind(error) => error.cause.into(),
        _ => Errno(libc::EADDRINUSE),
    })?;
    let server = Rc::new(server);
    let at = server.local_addr();
    let hall = Rc::new(Hall {
        port: grams.port,
        at,
        options: RefCell::new(options),
        ends: Cell::new(0),
        look: Notify::new(),
        server: RefCell::new(Some(server.clone())),
        gone: Semaphore::new(0),
    });
    home.desk.halls.borrow_mut().push(hall.clone());
    tokio::task::spawn_local(serve(home.clone(), hall, grams.clone(), server));
    Ok(at)
}

async fn serve(home: Rc<Home>, hall: Rc<Hall>, grams: Arc<Grams>, server: Rc<Server>) {
    let unwanted = async {
        loop {
            let _ = tokio::time::timeout(LOOK, hall.look.notified()).await;
            if !is_bound(hall.port) {
                return;
            }
        }
    };
    let mut unwanted = pin!(unwanted);
    loop {
        let flow = tokio::select! {
            flow = server.accept() => flow,
            () = &mut unwanted => None,
        };
        match flow {
            Some(flow) => {
                let answered = answer(home.clone(), hall.clone(), grams.clone(), flow);
                tokio::task::spawn_local(answered);
            }
            None => break,
        }
    }
    hall.server.take();
    server.close().await;
    drop(server);
    pair::until_free(hall.at).await;
    let all = &home.desk.halls;
    all.borrow_mut().retain(|other| !Rc::ptr_eq(other, &hall));
    hall.gone.close();
}

/// A device's end.
async fn answer(home: Rc<Home>, hall: Rc<Hall>, grams: Arc<Grams>, mut flow: Flow) {
    hall.ends.set(hall.ends.get() + 1);
    let named = tokio::time::timeout(LINE_WAIT, context_of(&mut flow)).await;
    let taken = match named {
        Ok(Some(context)) if hall.ends.get() <= ENDS_MAX => {
            let taken = take_name(&home, grams.port, grams.ports.plain);
            taken.ok().map(|taken| (context, taken))
        }
        _ => None,
    };
    match taken {
        Some((context, (name, socket))) => {
            let held = Held::new(flow, None, Fate::new(), hall.options.borrow().clone());
            let held = pump::enter(&home, held);
            // Why it is over the program is not told: others go on.
            let far = Far {
                grams: grams.clone(),
                name,
            };
            if let Ok((end, inbox)) = begin(&home, &held, &far, context) {
                carry(&home, &end, &inbox, &socket).await;
            }
            finish(&held);
            home.desk.ends.borrow_mut().remove(&(grams.port, name));
            grams.ends().remove(&name);
            pump::leave(&home, &held);
        }
        None => flow.reset(NOT_HERE),
    }
    hall.ends.set(hall.ends.get() - 1);
}

/// What a flow of a datagram socket says first.
async fn context_of(flow: &mut Flow) -> Option<u64> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        if line.len() == LINE_BYTES_MAX {
            return None;
        }
        line.push(flow.read_u8().await.ok()?);
    }
    context_in(&line)
}

fn context_in(line: &[u8]) -> Option<u64> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let context = line.strip_prefix(LINE_WORD)?.strip_prefix(' ')?;
    let context = context.parse().ok()?;
    (context > 0 && context < d2tp_driver::CONTEXTS_OF_COPIES).then_some(context)
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

fn hall_at(home: &Home, port: u16) -> Option<Rc<Hall>> {
    let halls = home.desk.halls.borrow();
    halls.iter().find(|hall| hall.port == port).cloned()
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

/// A bound socket is to be connected: it is no server any more.
pub(crate) async fn unbind(home: &Rc<Home>, port: u16) {
    if let Some(hall) = hall_at(home, port) {
        let server = hall.server.take();
        if let Some(server) = server {
            server.close().await;
        }
        let _ = hall.gone.acquire().await;
    }
}

/// Tells every device that this process leaves; says whether there was a server.
pub(crate) fn say_goodbye(home: &Home) -> bool {
    let halls = home.desk.halls.borrow();
    for hall in halls.iter() {
        if let Some(server) = &*hall.server.borrow() {
            server.say_goodbye();
        }
    }
    !halls.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_back_and_what_is_cut_is_none() {
        let marks = [
            (None, None),
            (Some(Route::Each), None),
            (None, Some(Duration::from_millis(250))),
            (Some(Route::Any), Some(Duration::from_secs(9))),
        ];
        for (route, expiry) in marks {
            let mark = Mark {
                name: Ipv4Addr::new(127, 1, 2, 3),
                route,
                expiry,
            };
            let bytes = [&mark.to_bytes()[..], b"message"].concat();
            assert_eq!(Mark::read(&bytes), Some((mark, &b"message"[..])));
            assert_eq!(Mark::read(&bytes[..MARK_BYTES - 1]), None);
        }
    }

    #[test]
    fn a_flows_first_line_names_a_context_or_nothing() {
        assert_eq!(context_in(b"DATAGRAMS 7\n"), Some(7));
        for line in [
            &b"DATAGRAMS 7"[..],
            b"DATAGRAMS 0\n",
            b"DATAGRAMS 4294967296\n",
            b"DATAGRAMS x\n",
            b"GET / HTTP/1.1\n",
            b"\xff\n",
        ] {
            assert_eq!(context_in(line), None, "{line:?}");
        }
    }
}
