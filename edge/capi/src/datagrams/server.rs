//! A socket that is bound: a server, and an end for each device.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{
    Admission, DriverError, EndpointConfig, Flow, FlowIo as _, Server, ServerOptions,
};
use tokio::io::AsyncReadExt as _;
use tokio::sync::{Notify, Semaphore};

use super::peer::{begin, carry, finish};
use super::socket::is_bound;
use super::{AgentDatagramPeer, LINE_WORD, LOOK, ProgramDatagrams, take_name};
use crate::engine_state::EngineState;
use crate::errno::{CallResult, Errno};
use crate::options::SocketOptions;
use crate::pair;
use crate::pump::{self, CarriedFlow};
use crate::table::ConnectionStatus;

/// Far ends of one bound socket; each has a kernel socket. Further devices are refused.
const ENDS_MAX: usize = 4096; // a guess: a quarter of the descriptors that the system gives a process
/// A flow that has not named its context after so long is nobody's.
const LINE_WAIT: Duration = Duration::from_secs(10); // a guess
/// Bytes of that line.
const LINE_BYTES_MAX: usize = 32;
/// Reset code of a flow that is not of a datagram socket, or one too many.
const NOT_HERE: u64 = 0xd302;

/// A bound socket.
pub(super) struct DatagramServer {
    pub(super) port: u16,
    at: SocketAddr,
    pub(super) options: RefCell<SocketOptions>,
    peer_count: Cell<usize>,
    /// Wakes the check whether the program still has the socket.
    pub(super) recheck: Notify,
    server: RefCell<Option<Rc<Server>>>,
    /// Closed when the address is free again.
    pub(super) freed: Semaphore,
}

/// Makes a program's socket a server at `address`; says which that is.
pub(crate) async fn bind(
    home: &Rc<EngineState>,
    grams: &Arc<ProgramDatagrams>,
    address: SocketAddr,
    options: SocketOptions,
) -> CallResult<SocketAddr> {
    let key = home.key().map_err(|fault| Errno(fault.errno))?;
    let bound = Server::bind(ServerOptions {
        listen: address,
        key,
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    });
    let server = bound.map_err(|error| match error {
        DriverError::Bind(error) => error.cause.into(),
        _ => Errno(libc::EADDRINUSE),
    })?;
    let server = Rc::new(server);
    let at = server.local_addr();
    let hall = Rc::new(DatagramServer {
        port: grams.port,
        at,
        options: RefCell::new(options),
        peer_count: Cell::new(0),
        recheck: Notify::new(),
        server: RefCell::new(Some(server.clone())),
        freed: Semaphore::new(0),
    });
    home.datagrams.servers.borrow_mut().push(hall.clone());
    tokio::task::spawn_local(serve(home.clone(), hall, grams.clone(), server));
    Ok(at)
}

async fn serve(
    home: Rc<EngineState>,
    hall: Rc<DatagramServer>,
    grams: Arc<ProgramDatagrams>,
    server: Rc<Server>,
) {
    let unwanted = async {
        loop {
            let _ = tokio::time::timeout(LOOK, hall.recheck.notified()).await;
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
                let answered = accept_peer(home.clone(), hall.clone(), grams.clone(), flow);
                tokio::task::spawn_local(answered);
            }
            None => break,
        }
    }
    hall.server.take();
    server.close().await;
    drop(server);
    pair::until_free(hall.at).await;
    let all = &home.datagrams.servers;
    all.borrow_mut().retain(|other| !Rc::ptr_eq(other, &hall));
    hall.freed.close();
}

/// A device's end.
async fn accept_peer(
    home: Rc<EngineState>,
    hall: Rc<DatagramServer>,
    grams: Arc<ProgramDatagrams>,
    mut flow: Flow,
) {
    hall.peer_count.set(hall.peer_count.get() + 1);
    let named = tokio::time::timeout(LINE_WAIT, context_of(&mut flow)).await;
    let taken = match named {
        Ok(Some(context)) if hall.peer_count.get() <= ENDS_MAX => {
            let taken = take_name(&home, grams.port, grams.ports.plain);
            taken.ok().map(|taken| (context, taken))
        }
        _ => None,
    };
    match taken {
        Some((context, (name, socket))) => {
            let held = CarriedFlow::new(
                flow,
                None,
                ConnectionStatus::new(),
                hall.options.borrow().clone(),
            );
            let held = pump::register(&home, held);
            // Why it is over the program is not told: others go on.
            let far = AgentDatagramPeer {
                socket: grams.clone(),
                name,
            };
            if let Ok((end, inbox)) = begin(&home, &held, &far, context) {
                carry(&home, &end, &inbox, &socket).await;
            }
            finish(&held);
            home.datagrams
                .peers
                .borrow_mut()
                .remove(&(grams.port, name));
            grams.peers().remove(&name);
            pump::unregister(&home, &held);
        }
        None => flow.reset(NOT_HERE),
    }
    hall.peer_count.set(hall.peer_count.get() - 1);
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

pub(super) fn server_at(home: &EngineState, port: u16) -> Option<Rc<DatagramServer>> {
    let halls = home.datagrams.servers.borrow();
    halls.iter().find(|hall| hall.port == port).cloned()
}

/// A bound socket is to be connected: it is no server any more.
pub(crate) async fn unbind(home: &Rc<EngineState>, port: u16) {
    if let Some(hall) = server_at(home, port) {
        let server = hall.server.take();
        if let Some(server) = server {
            server.close().await;
        }
        let _ = hall.freed.acquire().await;
    }
}

/// Tells every device that this process leaves; says whether there was a server.
pub(crate) fn say_goodbye(home: &EngineState) -> bool {
    let halls = home.datagrams.servers.borrow();
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
