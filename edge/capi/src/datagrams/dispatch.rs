//! The engine's common ports for datagram sockets: loopback names of peers, datagrams with a head,
//! and changed options.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket as Plain};
use std::os::fd::AsRawFd as _;
use std::rc::Rc;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;

use super::message_head::MessageHead;
use super::peer::MESSAGE_BYTES_MAX;
use super::registry::PeerCarrier;
use super::socket::{DatagramPorts, is_bound};
use crate::agent_connection::AgentConnection;
use crate::engine_state::EngineState;
use crate::errno::CallResult;
use crate::options::SocketOptions;
use crate::pair;

fn shared_socket(at: SocketAddrV4) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_port(true)?;
    socket.bind(&at.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// The engine's ports, which are opened for the first datagram socket.
pub(crate) fn ports(engine: &Rc<EngineState>) -> CallResult<DatagramPorts> {
    if let Some((ports, _)) = engine.datagrams.ports.get() {
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
        engine.clone(),
        UdpSocket::from_std(marked)?,
    ));
    let _ = engine.datagrams.ports.set((ports, reserved));
    Ok(ports)
}

/// Delivers datagrams with a head to their peers.
async fn dispatch_with_head(engine: Rc<EngineState>, marked: UdpSocket) {
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    loop {
        let Ok((bytes, from)) = marked.recv_from(&mut buffer).await else {
            // The kernel's error about an earlier packet, which does not concern the next one.
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
        let end = engine.datagrams.peers.borrow().get(&key).cloned();
        match end {
            Some(place) => place.send(mark.route, mark.expiry, message),
            None => engine.datagrams.put_early(key, mark, message),
        }
    }
}

/// Assigns a loopback address to a peer of the program's socket at `port`. Returns it and its socket.
pub(super) fn take_name(
    engine: &EngineState,
    port: u16,
    plain: u16,
) -> io::Result<(Ipv4Addr, UdpSocket)> {
    // Try all names, if necessary.
    for _ in 0..=u16::MAX {
        let name = engine.name();
        if engine.datagrams.peers.borrow().contains_key(&(port, name)) {
            continue;
        }
        let socket = shared_socket(SocketAddrV4::new(name, plain))?;
        socket.connect(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, port).into())?;
        return Ok((name, UdpSocket::from_std(socket.into())?));
    }
    Err(io::ErrorKind::AddrNotAvailable.into())
}

/// Handles a changed option of the program's socket. Returns the agent connection that must be
/// informed, if there is one.
pub(crate) fn on_options(
    engine: &EngineState,
    port: u16,
    deadline_too: bool,
    options: &SocketOptions,
) -> Option<Rc<AgentConnection>> {
    for bound in engine
        .datagrams
        .servers
        .borrow()
        .iter()
        .filter(|h| h.port == port)
    {
        *bound.options.borrow_mut() = options.clone();
    }
    for ((at, _), place) in engine.datagrams.peers.borrow().iter() {
        if *at == port
            && let PeerCarrier::Local(end) = place
        {
            if deadline_too {
                end.held.flow.borrow().set_deadline(options.within());
            }
            *end.held.options.borrow_mut() = options.clone();
        }
    }
    let calls = engine
        .datagrams
        .clients
        .borrow()
        .get(&port)
        .map(|(serial, _)| *serial);
    let handed = engine.agent_connections.borrow().get(&calls?).cloned()?;
    handed.change(options);
    Some(handed)
}

/// Handles a close call on one of the program's descriptors, perhaps the last one of the socket.
pub(crate) async fn on_close(engine: &Rc<EngineState>, port: u16) {
    if let Some((_, look)) = engine.datagrams.clients.borrow().get(&port) {
        look.notify_one();
    }
    if let Some(bound) = engine.datagrams.server_at(port) {
        bound.recheck.notify_one();
        if !is_bound(port) {
            // The semaphore is only ever closed.
            let _ = bound.freed.acquire().await;
        }
    }
}
