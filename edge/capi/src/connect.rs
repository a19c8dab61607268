//! From `connect` to a flow: the session, the flow, the proxy's tunnel where there is one, and then the
//! other end of the program's socket.
//!
//! Where an agent of the user runs, all that is its to do ([`handed`]); where none does, it is done here.
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

use crate::address::Name;
use crate::carrier::Owner;
use crate::errno::Fault;
use crate::handed::{self, Handed};
use crate::home::{Home, LineState, OnLine};
use crate::message::Keep;
use crate::options::{Options, Persist};
use crate::pump::{self, Held};
use crate::table::{self, Fate};
use crate::{pair, policy, tunnel};

/// How often it is looked whether the program still wants the connection.
const LOOK: Duration = Duration::from_secs(1);

/// Where a socket is to lead, and by what.
pub(crate) struct Call {
    /// The program's socket in the table.
    pub(crate) cookie: u64,
    /// Its descriptor, when it was called with.
    pub(crate) fd: RawFd,
    /// The loopback port of the program's socket.
    pub(crate) from: u16,
    pub(crate) to: Name,
    pub(crate) options: Options,
    pub(crate) fate: Arc<Fate>,
    /// By what it is opened again.
    pub(crate) keep: Option<Keep>,
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

/// Who carries a connection that was made.
enum Made {
    Here(Box<Held>),
    /// An agent does, and it says what becomes of it.
    There(Handed),
}

/// Makes the connection, and carries it until it is over.
pub(crate) async fn run(home: Rc<Home>, call: Call) {
    let made = tokio::select! {
        made = make(&home, &call) => made,
        () = given_up(call.from) => {
            home.handed.borrow_mut().remove(&call.fate.serial);
            return call.fate.over.store(true, Ordering::Relaxed);
        }
    };
    match made {
        Ok(Made::There(handed)) => {
            handed
                .follow(&home, &call.fate, Some(call.from), None)
                .await
        }
        Ok(Made::Here(held)) => {
            let held = pump::enter(&home, *held);
            match home.port.meet(call.from).await {
                Ok(stream) => pump::run(home, held, stream).await,
                // The program closed its socket: so does the flow.
                Err(_) => pump::leave(&home, &held),
            }
        }
        Err(fault) => {
            let _ = call.fate.fault.set(fault.while_connecting());
            call.fate.refused.store(true, Ordering::Release);
            // Elsewhere it is connected for a moment, and reset.
            if pair::refuse(call.fd, call.cookie).is_err()
                && let Ok(stream) = home.port.meet(call.from).await
            {
                pump::break_off(stream);
            }
            call.fate.over.store(true, Ordering::Relaxed);
        }
    }
}

async fn make(home: &Rc<Home>, call: &Call) -> Result<Made, Fault> {
    let (server, through_proxy) = server_of(&call.to, &call.options)?;
    let target = through_proxy.then(|| call.to.authority());
    if let Some(handed) = handed::call(home, call, &server, target.clone(), None).await? {
        return Ok(Made::There(handed));
    }
    if call.options.persist != Persist::No {
        return Err(handed::no_agent());
    }
    let way = Way {
        server,
        target,
        key: None,
        owner: None,
    };
    // That may take hours, in which the program thinks again.
    let latest = || table::change(call.cookie, |socket| socket.options.clone());
    let held = open(home, &way, &call.options, call.fate.clone(), latest).await?;
    Ok(Made::Here(Box::new(held)))
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
pub(crate) struct Way {
    pub(crate) server: ServerAddress,
    /// Where that is a proxy: what it is asked for.
    pub(crate) target: Option<String>,
    /// The file of the key to call with; none is this process's.
    pub(crate) key: Option<PathBuf>,
    /// Whose it is, where that is another process.
    pub(crate) owner: Option<Rc<Owner>>,
}

/// Makes a connection. `latest`: what its options are by the time it is made.
pub(crate) async fn open(
    home: &Rc<Home>,
    way: &Way,
    begun: &Options,
    fate: Arc<Fate>,
    latest: impl Fn() -> Option<Options>,
) -> Result<Held, Fault> {
    let owner = way.owner.as_deref();
    let line = home.line(&way.server, way.key.as_deref());
    let line = policy::steer_calling(home, owner, line).await?;
    let settings = begun.settings()?;
    let flow = line.0.device.open(settings);
    let flow = RefCell::new(flow.map_err(|error| Fault::new(libc::ENOBUFS, error))?);
    let opened = async {
        until_open(&line, &flow).await?;
        if let Some(target) = &way.target {
            let told = tunnel::through(&flow, target).await;
            told.map_err(|fault| because(fault, &line))?;
        }
        Ok(())
    };
    // Whatever is opened may have to pay for the proxy's answer.
    tokio::select! {
        opened = opened => opened?,
        fault = policy::steer_opening(home, owner, &line.0, &flow, begun) => return Err(fault),
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
    Ok(Held::new(flow, Some(line), fate, options))
}

/// The session's end is the cause, where it has one.
fn because(fault: Fault, line: &OnLine) -> Fault {
    match &*line.0.state.borrow() {
        LineState::Over(end) => Fault::of_session(end),
        _ => fault,
    }
}

async fn until_open(line: &OnLine, flow: &RefCell<Flow>) -> Result<(), Fault> {
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
            if let Some(end) = flow.borrow().end() {
                return Fault::of_flow(end);
            }
        }
    };
    tokio::select! {
        opened = opened => opened,
        fault = ended => Err(fault),
    }
}
