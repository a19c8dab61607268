//! Connecting: the session, the flow, the proxy's tunnel if there is one, and then the other end of
//! the program's socket.
//!
//! If an agent of the user runs, it does all this ([`agent_delegation`]); otherwise the engine
//! does.
//!
//! There is no time limit: a connection may wait for a network. If the program gives up, its port
//! shows that, which another socket may have then.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use d2tp_driver::Flow;

use crate::agent_address::no_agent;
use crate::agent_connection::AgentConnection;
use crate::carried_flow::CarriedFlow;
use crate::connect_call::{ConnectCall, ConnectTarget, servers_of};
use crate::connection_status::ConnectionStatus;
use crate::engine_state::EngineState;
use crate::errno::SocketFault;
use crate::options::{PersistMode, SocketOptions};
use crate::program_stream::break_off;
use crate::pump;
use crate::server_session::{ServerSessionState, SessionUse};
use crate::table;
use crate::{agent_delegation, pair, policy, tunnel};

/// How often to check whether the program still wants the connection.
const LOOK: Duration = Duration::from_secs(1);

/// How long a connection waits for a place where its process or its device has as many connections to the server
/// as it may have.
const PLACE_WAIT: Duration = Duration::from_secs(60); // as connections of the local proxy do
/// The interval of attempts to get a place.
const PLACE_RETRY: Duration = Duration::from_secs(1); // a guess: each costs the server a refusal

/// Where an established connection is carried.
enum ConnectionCarrier {
    Local(Box<CarriedFlow>),
    /// An agent carries the connection, and reports its status.
    Agent(AgentConnection),
}

/// Opens the connection, and carries it until it is over.
pub(crate) async fn run(engine: Rc<EngineState>, call: ConnectCall) {
    let made = tokio::select! {
        made = make(&engine, &call) => made,
        () = given_up(call.from) => {
            engine.agent_connections.borrow_mut().remove(&call.conn_status.serial);
            return call.conn_status.over.store(true, Ordering::Relaxed);
        }
    };
    match made {
        Ok(ConnectionCarrier::Agent(handed)) => {
            agent_delegation::follow(handed, &engine, &call.conn_status, Some(call.from), None)
                .await
        }
        Ok(ConnectionCarrier::Local(held)) => {
            let held = engine.register(*held);
            match engine.port.connect_waiting(call.from).await {
                Ok(stream) => pump::run(engine, held, stream).await,
                // The program has closed its socket, so the flow is closed as well.
                Err(_) => engine.unregister(&held),
            }
        }
        Err(fault) => {
            let _ = call.conn_status.fault.set(fault.while_connecting());
            call.conn_status.refused.store(true, Ordering::Release);
            // The other kind of socket is connected for a moment, and reset.
            if pair::refuse(call.fd, call.cookie).is_err()
                && let Ok(stream) = engine.port.connect_waiting(call.from).await
            {
                break_off(stream);
            }
            call.conn_status.over.store(true, Ordering::Relaxed);
        }
    }
}

async fn make(
    engine: &Rc<EngineState>,
    call: &ConnectCall,
) -> Result<ConnectionCarrier, SocketFault> {
    let (servers, through_proxy) = servers_of(&call.to, &call.options)?;
    let target = through_proxy.then(|| call.to.authority());
    if let Some(handed) =
        agent_delegation::call(engine, call, &servers, target.clone(), None).await?
    {
        return Ok(ConnectionCarrier::Agent(handed));
    }
    if call.options.persist != PersistMode::No {
        return Err(no_agent());
    }
    let connect_target = ConnectTarget {
        servers,
        target,
        key: None,
        owner: None,
    };
    // That may take hours, in which the program may change its options.
    let latest = || table::change(call.cookie, |socket| socket.options.clone());
    let held = open(
        engine,
        &connect_target,
        &call.options,
        call.conn_status.clone(),
        latest,
    )
    .await?;
    Ok(ConnectionCarrier::Local(Box::new(held)))
}

async fn given_up(port: u16) {
    loop {
        tokio::time::sleep(LOOK).await;
        if !pair::is_bound(port) {
            return;
        }
    }
}

/// Opens a connection, and waits for a place if there is none. `latest` returns the options at the time when the flow
/// opens.
pub(crate) async fn open(
    engine: &Rc<EngineState>,
    connect_target: &ConnectTarget,
    begun: &SocketOptions,
    conn_status: Arc<ConnectionStatus>,
    latest: impl Fn() -> Option<SocketOptions>,
) -> Result<CarriedFlow, SocketFault> {
    let began = Instant::now();
    let owner = connect_target.owner.as_deref();
    loop {
        let status = conn_status.clone();
        let line = engine.session(&connect_target.servers, connect_target.key.as_deref());
        let line = policy::enforce_connecting(engine, owner, line).await?;
        let session = line.0.clone();
        let was_established = session.is_established();
        let opened = try_open(engine, line, connect_target, begun, status, &latest).await;
        match opened {
            Err(fault) if fault.errno == libc::ENOBUFS && began.elapsed() < PLACE_WAIT => {
                tokio::time::sleep(PLACE_RETRY).await;
            }
            // Nothing of the program's has been sent.
            Err(_) if session.is_left() => {}
            Err(_) if engine.leave_refusing_server(&session, connect_target) => {}
            // The server ended before this connection, or while it was made, and may be there again.
            Err(_) if was_established && session.is_over() => {}
            opened => return opened,
        }
    }
}

async fn try_open(
    engine: &Rc<EngineState>,
    line: SessionUse,
    connect_target: &ConnectTarget,
    begun: &SocketOptions,
    conn_status: Arc<ConnectionStatus>,
    latest: &impl Fn() -> Option<SocketOptions>,
) -> Result<CarriedFlow, SocketFault> {
    let owner = connect_target.owner.as_deref();
    let settings = begun.settings()?;
    let flow = line.0.device.open(settings);
    let flow = RefCell::new(flow.map_err(|error| SocketFault::new(libc::ENOBUFS, error))?);
    let opened = async {
        until_open(&line, &flow).await?;
        if let Some(target) = &connect_target.target {
            let connected = tunnel::connect_through(&flow, target).await;
            connected.map_err(|fault| with_session_end(fault, &line))?;
        }
        Ok(())
    };
    // The flow may have to pay for the proxy's answer.
    tokio::select! {
        opened = opened => opened?,
        fault = policy::enforce_opening(engine, owner, &line.0, &flow, begun) => return Err(fault),
    }
    let flow = flow.into_inner();
    let options = latest().unwrap_or_else(|| begun.clone());
    if (options.deadline, options.if_late) != (begun.deadline, begun.if_late) {
        flow.set_deadline(options.within());
    }
    if options.route != begun.route {
        flow.set_route(options.route);
    }
    Ok(CarriedFlow::new(flow, Some(line), conn_status, options))
}

/// Replaces a fault by the end of the session, if that is its cause.
fn with_session_end(fault: SocketFault, line: &SessionUse) -> SocketFault {
    match &*line.0.state.borrow() {
        ServerSessionState::Over(end) => line.0.fault_of_end(end),
        _ => fault,
    }
}

async fn until_open(line: &SessionUse, flow: &RefCell<Flow>) -> Result<(), SocketFault> {
    let mut state = line.0.state.clone();
    let opened = async {
        let there = state
            .wait_for(|state| *state != ServerSessionState::Opening)
            .await;
        match there.as_deref() {
            Ok(ServerSessionState::Over(end)) => Err(line.0.fault_of_end(end)),
            _ => Ok(()),
        }
    };
    let ended = async {
        loop {
            tokio::time::sleep(LOOK).await;
            if let Some(end) = flow.borrow().end() {
                return SocketFault::of_flow(end);
            }
        }
    };
    tokio::select! {
        opened = opened => opened,
        fault = ended => Err(fault),
    }
}
