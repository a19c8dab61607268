//! Datagram sockets that connect: the session and its end.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::sync::Notify;

use super::announcement::announce;
use super::dispatch::take_name;
use super::message_head::MessageHead;
use super::peer::{carry, read_all, send_remaining};
use super::registry::PeerCarrier;
use super::socket::{AgentDatagramPeer, LOOK, ProgramDatagrams, is_bound};
use crate::agent_connection::AgentConnection;
use crate::agent_delegation;
use crate::carried_flow::CarriedFlow;
use crate::connect_call::{ConnectCall, ConnectTarget, servers_of};
use crate::connection_status::ConnectionStatus;
use crate::engine_state::EngineState;
use crate::errno::{CallResult, SocketFault};
use crate::options::SocketOptions;
use crate::server_session::SessionUse;
use crate::table;

/// Stores the program's datagrams until the session exists.
async fn collect(engine: &EngineState, port: u16, name: Ipv4Addr, socket: &UdpSocket) {
    let mark = MessageHead {
        name,
        route: None,
        expiry: None,
    };
    loop {
        if socket.readable().await.is_ok() {
            let hear = |message: &[u8]| engine.datagrams.put_early((port, name), mark, message);
            read_all(|buffer| socket.try_recv(buffer), hear);
        }
        tokio::task::yield_now().await;
    }
}

/// How long a server may take to acknowledge a datagram socket in a session that was established before. Less than the 5 s
/// that a program waits at its exit for datagrams to be taken over.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(3); // a guess: some round trips, with a loss

/// The arguments of a connect call on a datagram socket.
pub(crate) struct DatagramCall {
    pub(crate) socket: Arc<ProgramDatagrams>,
    pub(crate) connect: ConnectCall,
}

/// Opens a session for a program's socket. Returns the loopback address that stands for the peer.
pub(crate) fn connect(engine: &Rc<EngineState>, call: DatagramCall) -> CallResult<Ipv4Addr> {
    let (name, socket) = take_name(engine, call.socket.port, call.socket.ports.plain)?;
    let key = (call.socket.port, name);
    engine
        .datagrams
        .early
        .borrow_mut()
        .insert(key, VecDeque::new());
    let look = Rc::new(Notify::new());
    let serial = call.connect.conn_status.serial;
    let before = engine
        .datagrams
        .clients
        .borrow_mut()
        .insert(call.socket.port, (serial, look.clone()));
    if let Some((_, before)) = before {
        // The socket was connected to another peer, which is over for it.
        before.notify_one();
    }
    tokio::task::spawn_local(call_out(engine.clone(), call, name, socket, look));
    Ok(name)
}

async fn call_out(
    engine: Rc<EngineState>,
    call: DatagramCall,
    name: Ipv4Addr,
    socket: UdpSocket,
    look: Rc<Notify>,
) {
    let (serial, port) = (call.connect.conn_status.serial, call.socket.port);
    let is_wanted = || {
        let clients = engine.datagrams.clients.borrow();
        clients.get(&port).is_some_and(|(now, _)| *now == serial) && is_bound(port)
    };
    let unwanted = || async {
        while is_wanted() {
            let _ = tokio::time::timeout(LOOK, look.notified()).await;
        }
    };
    let late = async {
        unwanted().await;
        // Datagrams that were sent before the close wait for the session until they expire.
        tokio::time::sleep(call.connect.options.expiry).await;
    };
    let far = AgentDatagramPeer {
        socket: call.socket.clone(),
        name,
    };
    let opened = tokio::select! {
        made = make(&engine, &call.connect, &far) => made.map(Some),
        () = collect(&engine, port, name, &socket) => Ok(None),
        () = late => Ok(None),
    };
    let (over, socket) = match opened {
        Ok(Some(DatagramCarrier::Local(held, context))) => {
            let held = engine.register(*held);
            // Before the check whether the program still has the socket, because it may have sent
            // and closed.
            let over = match engine.datagrams.begin_local(&held, &far, context) {
                Ok((end, inbox)) => tokio::select! {
                    over = carry(engine.leaving.subscribe(), &end, &inbox, &socket) => Some(over),
                    () = unwanted() => {
                        send_remaining(&end, Some(&socket)).await;
                        None
                    }
                },
                Err(fault) => Some(fault),
            };
            engine.unregister(&held);
            (over, socket.into_std())
        }
        Ok(Some(DatagramCarrier::Agent(handed))) => {
            let known = Rc::new(handed.share());
            let place = PeerCarrier::Agent(known.clone());
            engine
                .datagrams
                .begin((port, name), &place, latest(&call.connect).expiry);
            match socket.as_fd().try_clone_to_owned() {
                Ok(fd) => {
                    // From here on the agent reads the socket, so this process must not be woken by
                    // its data.
                    let socket = socket.into_std();
                    known.carry(port, fd);
                    let closed = async {
                        unwanted().await;
                        known.closed();
                        std::future::pending::<()>().await;
                    };
                    tokio::select! {
                        () = agent_delegation::follow(handed, &engine, &call.connect.conn_status, None, Some(&far)) => {}
                        () = closed => {}
                    }
                    (call.connect.conn_status.fault.get().cloned(), socket)
                }
                Err(error) => (
                    Some(SocketFault::new(libc::EMFILE, error)),
                    socket.into_std(),
                ),
            }
        }
        Ok(None) => (None, socket.into_std()),
        Err(fault) => (Some(fault), socket.into_std()),
    };
    engine.datagrams.peers.borrow_mut().remove(&(port, name));
    engine.datagrams.early.borrow_mut().remove(&(port, name));
    engine.agent_connections.borrow_mut().remove(&serial);
    call.socket.peers().remove(&name);
    if let Some(fault) = over {
        let _ = call.connect.conn_status.fault.set(fault);
        // The program's next read returns the error.
        let _ = socket.and_then(|socket| socket.send(&[]));
    }
    call.connect.conn_status.over.store(true, Ordering::Relaxed);
    let mut clients = engine.datagrams.clients.borrow_mut();
    if clients.get(&port).is_some_and(|(now, _)| *now == serial) {
        clients.remove(&port);
    }
}

/// The current options of the program's socket.
fn latest(call: &ConnectCall) -> SocketOptions {
    let known = table::change(call.cookie, |socket| socket.options.clone());
    known.unwrap_or_else(|| call.options.clone())
}

/// Where a socket's datagrams are carried.
enum DatagramCarrier {
    Local(Box<CarriedFlow>, u64),
    Agent(AgentConnection),
}

async fn make(
    engine: &Rc<EngineState>,
    call: &ConnectCall,
    far: &AgentDatagramPeer,
) -> Result<DatagramCarrier, SocketFault> {
    let (servers, through_proxy) = servers_of(&call.to, &call.options)?;
    if through_proxy {
        return Err(no_proxy());
    }
    if let Some(handed) = agent_delegation::call(engine, call, &servers, None, Some(far)).await? {
        return Ok(DatagramCarrier::Agent(handed));
    }
    let connect_target = ConnectTarget {
        servers,
        target: None,
        key: None,
        owner: None,
    };
    let (held, context) = open(
        engine,
        &connect_target,
        || latest(call),
        call.conn_status.clone(),
    )
    .await?;
    Ok(DatagramCarrier::Local(Box::new(held), context))
}

/// Begins a session, and a flow in it that names the context of the datagrams, which is also
/// returned.
///
/// An established session may be over without being known to be: its server ended a moment ago, and another one may
/// have its address now. Datagrams sent in it would be lost, so its server is to acknowledge the flow first. Without a
/// network nobody can, and the datagrams wait in the session.
pub(crate) async fn open(
    engine: &Rc<EngineState>,
    connect_target: &ConnectTarget,
    latest: impl Fn() -> SocketOptions,
    conn_status: Arc<ConnectionStatus>,
) -> Result<(CarriedFlow, u64), SocketFault> {
    loop {
        let session_use = engine
            .session(&connect_target.servers, connect_target.key.as_deref())
            .await?;
        let session = session_use.0.clone();
        let was_established = session.is_established();
        let opened = open_in(session_use, &latest, conn_status.clone(), was_established).await;
        match opened {
            // Nothing of the program's was sent, and a new session is with the server that is there now.
            Err(_) if was_established && session.is_over() => {}
            opened => return opened,
        }
    }
}

/// Opens a flow that names the context of the datagrams in this session; with `acknowledged`, waits some seconds for the
/// server to acknowledge it.
async fn open_in(
    session_use: SessionUse,
    latest: &impl Fn() -> SocketOptions,
    conn_status: Arc<ConnectionStatus>,
    acknowledged: bool,
) -> Result<(CarriedFlow, u64), SocketFault> {
    let options = latest();
    let flow = session_use.0.device.open(options.settings()?);
    let mut flow = flow.map_err(|error| SocketFault::new(libc::ENOBUFS, error))?;
    let context = session_use.0.next_context();
    let announced = announce(&mut flow, context).await;
    announced.map_err(|error| SocketFault::new(libc::ECONNRESET, error))?;
    let announced_bytes = flow.written();
    let flow = CarriedFlow::new(flow, Some(session_use), conn_status, options);
    if acknowledged {
        let acknowledged = flow.wait_for_peer(announced_bytes);
        if let Ok(Err(fault)) = tokio::time::timeout(ACKNOWLEDGED_WITHIN, acknowledged).await {
            return Err(fault);
        }
        // The program may have changed them in the meantime.
        flow.change(latest());
    }
    Ok((flow, context))
}

/// The error of a datagram socket that is connected without a server's key.
pub(crate) fn no_proxy() -> SocketFault {
    let why = "datagrams go to D2TP servers alone: give a key; the proxy carries streams";
    SocketFault::new(libc::EPROTONOSUPPORT, why)
}
