//! From `connect` to a flow: the session, the flow, the proxy's tunnel where there is one, and then the
//! other end of the program's socket.
//!
//! Where an agent of the user runs, all that is its to do ([`agent_connection`]); where none does, it is done here.
//!
//! There is no time limit here: who waits for a network waits. A program that gave up is noticed by its
//! port, which somebody else may have then.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use d2tp_driver::{Flow, PublicKey, ServerAddress};

use crate::address::SocketName;
use crate::agent_carrier::SocketOwner;
use crate::agent_connection::{self, AgentConnection};
use crate::agent_message::ReopenOptions;
use crate::engine_state::{EngineState, ServerSessionState, SessionUse};
use crate::errno::SocketFault;
use crate::options::{PersistMode, SocketOptions};
use crate::pump::{self, CarriedFlow};
use crate::table::{self, ConnectionStatus};
use crate::{pair, policy, tunnel};

/// How often it is looked whether the program still wants the connection.
const LOOK: Duration = Duration::from_secs(1);

/// Where a socket is to lead, and by what.
pub(crate) struct ConnectCall {
    /// The program's socket in the table.
    pub(crate) cookie: u64,
    /// Its descriptor, when it was called with.
    pub(crate) fd: RawFd,
    /// The loopback port of the program's socket.
    pub(crate) from: u16,
    pub(crate) to: SocketName,
    pub(crate) options: SocketOptions,
    pub(crate) fate: Arc<ConnectionStatus>,
    /// By what it is opened again.
    pub(crate) keep: Option<ReopenOptions>,
}

/// The server to speak to, and whether it is a proxy on the way to `to`.
pub(crate) fn server_of(
    to: &SocketName,
    options: &SocketOptions,
) -> Result<(ServerAddress, bool), SocketFault> {
    let key: Option<PublicKey> = match to {
        SocketName::Host { key: Some(key), .. } => Some(*key),
        _ => options.peer_key,
    };
    if let Some(key) = key {
        return Ok((to.server(key), false));
    }
    let said = options.proxy.clone().or_else(|| {
        let text = std::env::var("CEDOS_PROX").ok();
        text.filter(|text| !text.is_empty())
    });
    let Some(text) = said else {
        let why = "no key of a D2TP server was given, and no proxy: set CEDOS_PROX";
        return Err(SocketFault::new(libc::ENETUNREACH, why));
    };
    let server = text.parse();
    let server = server.map_err(|error| SocketFault::new(libc::EINVAL, error))?;
    Ok((server, true))
}

/// Who carries a connection that was made.
enum ConnectionCarrier {
    Local(Box<CarriedFlow>),
    /// An agent does, and it says what becomes of it.
    Agent(AgentConnection),
}

/// Makes the connection, and carries it until it is over.
pub(crate) async fn run(home: Rc<EngineState>, call: ConnectCall) {
    let made = tokio::select! {
        made = make(&home, &call) => made,
        () = given_up(call.from) => {
            home.agent_connections.borrow_mut().remove(&call.fate.serial);
            return call.fate.over.store(true, Ordering::Relaxed);
        }
    };
    match made {
        Ok(ConnectionCarrier::Agent(handed)) => {
            handed
                .follow(&home, &call.fate, Some(call.from), None)
                .await
        }
        Ok(ConnectionCarrier::Local(held)) => {
            let held = pump::register(&home, *held);
            match home.port.connect_waiting(call.from).await {
                Ok(stream) => pump::run(home, held, stream).await,
                // The program closed its socket: so does the flow.
                Err(_) => pump::unregister(&home, &held),
            }
        }
        Err(fault) => {
            let _ = call.fate.fault.set(fault.while_connecting());
            call.fate.refused.store(true, Ordering::Release);
            // Elsewhere it is connected for a moment, and reset.
            if pair::refuse(call.fd, call.cookie).is_err()
                && let Ok(stream) = home.port.connect_waiting(call.from).await
            {
                pump::break_off(stream);
            }
            call.fate.over.store(true, Ordering::Relaxed);
        }
    }
}

async fn make(
    home: &Rc<EngineState>,
    call: &ConnectCall,
) -> Result<ConnectionCarrier, SocketFault> {
    let (server, through_proxy) = server_of(&call.to, &call.options)?;
    let target = through_proxy.then(|| call.to.authority());
    if let Some(handed) = agent_connection::call(home, call, &server, target.clone(), None).await? {
        return Ok(ConnectionCarrier::Agent(handed));
    }
    if call.options.persist != PersistMode::No {
        return Err(agent_connection::no_agent());
    }
    let way = ConnectTarget {
        server,
        target,
        key: None,
        owner: None,
    };
    // That may take hours, in which the program thinks again.
    let latest = || table::change(call.cookie, |socket| socket.options.clone());
    let held = open(home, &way, &call.options, call.fate.clone(), latest).await?;
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

/// By what server a connection is made.
pub(crate) struct ConnectTarget {
    pub(crate) server: ServerAddress,
    /// Where that is a proxy: what it is asked for.
    pub(crate) target: Option<String>,
    /// The file of the key to call with; none is this process's.
    pub(crate) key: Option<PathBuf>,
    /// The process that the socket belongs to, where that is another one.
    pub(crate) owner: Option<Rc<SocketOwner>>,
}

/// Makes a connection. `latest`: what its options are by the time it is made.
pub(crate) async fn open(
    home: &Rc<EngineState>,
    way: &ConnectTarget,
    begun: &SocketOptions,
    fate: Arc<ConnectionStatus>,
    latest: impl Fn() -> Option<SocketOptions>,
) -> Result<CarriedFlow, SocketFault> {
    let owner = way.owner.as_deref();
    let line = home.session(&way.server, way.key.as_deref());
    let line = policy::enforce_connecting(home, owner, line).await?;
    let settings = begun.settings()?;
    let flow = line.0.device.open(settings);
    let flow = RefCell::new(flow.map_err(|error| SocketFault::new(libc::ENOBUFS, error))?);
    let opened = async {
        until_open(&line, &flow).await?;
        if let Some(target) = &way.target {
            let told = tunnel::connect_through(&flow, target).await;
            told.map_err(|fault| with_session_end(fault, &line))?;
        }
        Ok(())
    };
    // Whatever is opened may have to pay for the proxy's answer.
    tokio::select! {
        opened = opened => opened?,
        fault = policy::enforce_opening(home, owner, &line.0, &flow, begun) => return Err(fault),
    }
    let flow = flow.into_inner();
    if line.0.links.is_some() {
        // Until it is decided for what it carries.
        line.0.device.allow_paid(&flow, false, None);
    }
    let options = latest().unwrap_or_else(|| begun.clone());
    if (options.deadline, options.if_late) != (begun.deadline, begun.if_late) {
        flow.set_deadline(options.within());
    }
    if options.route != begun.route {
        flow.set_route(options.route);
    }
    Ok(CarriedFlow::new(flow, Some(line), fate, options))
}

/// The session's end is the cause, where it has one.
fn with_session_end(fault: SocketFault, line: &SessionUse) -> SocketFault {
    match &*line.0.state.borrow() {
        ServerSessionState::Over(end) => SocketFault::of_session(end),
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
            Ok(ServerSessionState::Over(end)) => Err(SocketFault::of_session(end)),
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
