//! From `connect` to a flow: the session, the flow, the proxy's tunnel where there is one, and then the
//! other end of the program's socket.
//!
//! There is no time limit here: who waits for a network waits. A program that gave up is noticed by its
//! port, which somebody else may have then.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use d2tp_driver::{Flow, PublicKey, ServerAddress};

use crate::address::Name;
use crate::errno::Fault;
use crate::home::{Home, LineState, OnLine};
use crate::options::Options;
use crate::pump::{self, Held};
use crate::table::{self, Fate};
use crate::{pair, policy, tunnel};

/// How often it is looked whether the program still wants the connection.
const LOOK: Duration = Duration::from_secs(1);

/// Where a socket is to lead, and by what.
pub(crate) struct Call {
    /// The program's socket in the table.
    pub(crate) cookie: u64,
    /// The loopback port of the program's socket.
    pub(crate) from: u16,
    pub(crate) to: Name,
    pub(crate) options: Options,
    pub(crate) fate: Arc<Fate>,
}

/// The server to speak to, and whether it is a proxy on the way to `to`.
pub(crate) fn server_of(to: &Name, options: &Options) -> Result<(ServerAddress, bool), Fault> {
    let key: Option<PublicKey> = match to {
        Name::Host { key: Some(key), .. } => Some(*key),
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
        return Err(Fault::new(libc::ENETUNREACH, why));
    };
    let server = text.parse();
    let server = server.map_err(|error| Fault::new(libc::EINVAL, error))?;
    Ok((server, true))
}

/// Makes the connection, and carries it until it is over.
pub(crate) async fn run(home: Rc<Home>, call: Call) {
    let made = tokio::select! {
        made = open(&home, &call) => made,
        () = given_up(call.from) => return call.fate.over.store(true, Ordering::Relaxed),
    };
    match made {
        Ok(held) => {
            let held = pump::enter(&home, held);
            match home.port.meet(call.from).await {
                Ok(stream) => pump::run(home, held, stream).await,
                // The program closed its socket: so does the flow.
                Err(_) => pump::leave(&home, &held),
            }
        }
        Err(fault) => {
            let _ = call.fate.fault.set(fault.while_connecting());
            call.fate.refused.store(true, Ordering::Release);
            if let Ok(stream) = home.port.meet(call.from).await {
                pump::break_off(stream);
            }
            call.fate.over.store(true, Ordering::Relaxed);
        }
    }
}

async fn given_up(port: u16) {
    loop {
        tokio::time::sleep(LOOK).await;
        if !pair::is_bound(port) {
            return;
        }
    }
}

async fn open(home: &Rc<Home>, call: &Call) -> Result<Held, Fault> {
    let (server, through_proxy) = server_of(&call.to, &call.options)?;
    let line = home.line(&server).await?;
    let settings = call.options.settings()?;
    let flow = line.0.device.open(settings);
    let mut flow = flow.map_err(|error| Fault::new(libc::ENOBUFS, error))?;
    tokio::select! {
        opened = until_open(&line, &flow) => opened?,
        fault = policy::steer_opening(&line.0, &flow, &call.options) => return Err(fault),
    }
    if through_proxy {
        let told = tunnel::through(&mut flow, &call.to).await;
        told.map_err(|fault| because(fault, &line))?;
    }
    // That may have taken hours, in which the program thought again.
    let latest = table::change(call.cookie, |socket| socket.options.clone());
    let options = latest.unwrap_or_else(|| call.options.clone());
    if (options.deadline, options.if_late) != (call.options.deadline, call.options.if_late) {
        flow.set_deadline(options.within());
    }
    Ok(Held::new(flow, Some(line), call.fate.clone(), options))
}

/// The session's end is the cause, where it has one.
fn because(fault: Fault, line: &OnLine) -> Fault {
    match &*line.0.state.borrow() {
        LineState::Over(end) => Fault::of_session(end),
        _ => fault,
    }
}

async fn until_open(line: &OnLine, flow: &Flow) -> Result<(), Fault> {
    let mut state = line.0.state.clone();
    let opened = async {
        let there = state.wait_for(|state| *state != LineState::Opening).await;
        match there.as_deref() {
            Ok(LineState::Over(end)) => Err(Fault::of_session(end)),
            _ => Ok(()),
        }
    };
    let ended = async {
        loop {
            tokio::time::sleep(LOOK).await;
            if let Some(end) = flow.end() {
                return Fault::of_flow(end);
            }
        }
    };
    tokio::select! {
        opened = opened => opened,
        fault = ended => Err(fault),
    }
}
