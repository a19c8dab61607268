//! Datagram sockets that are bound: a server with a peer for each device.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{
    Admission, DriverError, EndpointConfig, Flow, FlowIo as _, Server, ServerOptions,
};
use tokio::sync::{Notify, Semaphore};

use super::announcement::context_of;
use super::dispatch::take_name;
use super::peer::{carry, finish};
use super::registry::DatagramServer;
use super::socket::{AgentDatagramPeer, LOOK, ProgramDatagrams, is_bound};
use crate::carried_flow::CarriedFlow;
use crate::connection_status::ConnectionStatus;
use crate::engine_state::EngineState;
use crate::errno::{CallResult, Errno};
use crate::options::SocketOptions;
use crate::pair;

/// The most peers of one bound socket, each of which has a kernel socket. Further devices are refused.
const ENDS_MAX: usize = 4096; // a guess: a quarter of the descriptors that the system gives a process
/// How long a flow may take to name its context before it is reset.
const LINE_WAIT: Duration = Duration::from_secs(10); // a guess
/// The reset code of a flow that is not for a datagram socket, or exceeds the limit.
const NOT_HERE: u64 = 0xd302;

/// Makes a program's socket a server at `address`. Returns the actual address.
pub(crate) async fn bind(
    engine: &Rc<EngineState>,
    grams: &Arc<ProgramDatagrams>,
    address: SocketAddr,
    options: SocketOptions,
) -> CallResult<SocketAddr> {
    let key = engine.key().map_err(|fault| Errno(fault.errno))?;
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
    let bound = Rc::new(DatagramServer {
        port: grams.port,
        at,
        options: RefCell::new(options),
        peer_count: Cell::new(0),
        recheck: Notify::new(),
        server: RefCell::new(Some(server.clone())),
        freed: Semaphore::new(0),
    });
    engine.datagrams.servers.borrow_mut().push(bound.clone());
    tokio::task::spawn_local(serve(engine.clone(), bound, grams.clone(), server));
    Ok(at)
}

async fn serve(
    engine: Rc<EngineState>,
    bound: Rc<DatagramServer>,
    grams: Arc<ProgramDatagrams>,
    server: Rc<Server>,
) {
    let unwanted = async {
        loop {
            let _ = tokio::time::timeout(LOOK, bound.recheck.notified()).await;
            if !is_bound(bound.port) {
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
                let answered = accept_peer(engine.clone(), bound.clone(), grams.clone(), flow);
                tokio::task::spawn_local(answered);
            }
            None => break,
        }
    }
    bound.server.take();
    server.close().await;
    drop(server);
    pair::until_free(bound.at).await;
    let all = &engine.datagrams.servers;
    all.borrow_mut().retain(|other| !Rc::ptr_eq(other, &bound));
    bound.freed.close();
}

/// Accepts the flow of a device.
async fn accept_peer(
    engine: Rc<EngineState>,
    bound: Rc<DatagramServer>,
    grams: Arc<ProgramDatagrams>,
    mut flow: Flow,
) {
    bound.peer_count.set(bound.peer_count.get() + 1);
    let named = tokio::time::timeout(LINE_WAIT, context_of(&mut flow)).await;
    let taken = match named {
        Ok(Some(context)) if bound.peer_count.get() <= ENDS_MAX => {
            let taken = take_name(&engine, grams.port, grams.ports.plain);
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
                bound.options.borrow().clone(),
            );
            let held = engine.register(held);
            // The program is not informed why a peer is over, because others continue.
            let far = AgentDatagramPeer {
                socket: grams.clone(),
                name,
            };
            if let Ok((end, inbox)) = engine.datagrams.begin_local(&held, &far, context) {
                carry(engine.leaving.subscribe(), &end, &inbox, &socket).await;
            }
            finish(&held);
            engine
                .datagrams
                .peers
                .borrow_mut()
                .remove(&(grams.port, name));
            grams.peers().remove(&name);
            engine.unregister(&held);
        }
        None => flow.reset(NOT_HERE),
    }
    bound.peer_count.set(bound.peer_count.get() - 1);
}

/// Stops serving at a bound socket, because the program connects it.
pub(crate) async fn unbind(engine: &Rc<EngineState>, port: u16) {
    if let Some(bound) = engine.datagrams.server_at(port) {
        let server = bound.server.take();
        if let Some(server) = server {
            server.close().await;
        }
        let _ = bound.freed.acquire().await;
    }
}
