//! Listening: flows that peers open become connections for `accept`. There is a [`ListenAddress`]
//! for each UDP address, and a listening socket that gets its flows.
//!
//! ```text
//!  flow ─▶ address ─ announces 127.1.x.y in the table, connects to the listener from there ─▶ accept, getpeername
//!                    └ the kernel has the listener's backlog: a connection waits until there is room
//! ```

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use d2tp_driver::{Admission, EndpointConfig, Flow, FlowIo as _, Server, ServerOptions};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::address::SocketName;
use crate::carried_flow::CarriedFlow;
use crate::connection_status::ConnectionStatus;
use crate::engine_state::EngineState;
use crate::errno::{CallResult, Errno};
use crate::flow_info;
use crate::listen_address::{ListenAddress, ProgramListener};
use crate::pair;
use crate::pump;
use crate::table::{self, SocketEntry};

/// The most incoming flows of one address that connect to their listener at once; others wait. Each
/// costs a kernel socket.
const CALLS_MAX: usize = 128; // a guess
/// Loopback addresses to connect from that are tried: one may still be in use by a connection that
/// ended.
const NAMES_TRIED: usize = 16;
/// The reset code of a flow without a listener.
const NOBODY: u64 = 0xd301;

/// Connects flows to `address` to the program's `listener`.
pub(crate) async fn listen(
    engine: &Rc<EngineState>,
    address: SocketAddr,
    listener: ProgramListener,
) -> CallResult<()> {
    let cookie = listener.cookie;
    if let Some(listen_address) = engine.listeners.at(address) {
        if !listen_address.is_unused() {
            *listen_address.listener.borrow_mut() = Some(listener);
            return Ok(());
        }
        listen_address.until_gone().await;
    }
    let key = engine.key().map_err(|fault| Errno(fault.errno))?;
    // From here on the server can use the address.
    engine.listeners.bound.borrow_mut().remove(&cookie);
    let server = Server::bind(ServerOptions {
        listen: address,
        key,
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    })
    .map_err(|_| Errno(libc::EADDRINUSE))?;
    let server = Rc::new(server);
    let listen_address = Rc::new(ListenAddress {
        server: RefCell::new(Some(server.clone())),
        at: address,
        listener: RefCell::new(Some(listener)),
        flows: Cell::new(0),
        unused: Notify::new(),
        freed: Semaphore::new(0),
    });
    engine
        .listeners
        .addresses
        .borrow_mut()
        .push(listen_address.clone());
    tokio::task::spawn_local(serve(engine.clone(), listen_address, server));
    Ok(())
}

async fn serve(engine: Rc<EngineState>, listen_address: Rc<ListenAddress>, server: Rc<Server>) {
    let calls = Arc::new(Semaphore::new(CALLS_MAX));
    loop {
        let next = async {
            let permit = calls.clone().acquire_owned().await;
            let permit = permit.expect("nobody closes it");
            Some((server.accept().await?, permit))
        };
        let next = tokio::select! {
            next = next => next,
            () = listen_address.unused.notified() => {
                if listen_address.is_unused() {
                    break;
                }
                continue;
            }
        };
        let Some((mut flow, permit)) = next else {
            break;
        };
        let listener = listen_address.listener.borrow().clone();
        match listener {
            Some(listener) => {
                let called = call(
                    engine.clone(),
                    listen_address.clone(),
                    flow,
                    listener,
                    permit,
                );
                tokio::task::spawn_local(called);
            }
            None => flow.reset(NOBODY),
        }
    }
    server.close().await;
    listen_address.server.take();
    drop(server);
    pair::until_free(listen_address.at).await;
    let all = &engine.listeners.addresses;
    all.borrow_mut()
        .retain(|other| !Rc::ptr_eq(other, &listen_address));
    listen_address.freed.close();
}

/// Connects a flow to the listener, and carries it until it is over.
async fn call(
    engine: Rc<EngineState>,
    listen_address: Rc<ListenAddress>,
    flow: Flow,
    listener: ProgramListener,
    permit: OwnedSemaphorePermit,
) {
    listen_address.flows.set(listen_address.flows.get() + 1);
    let conn_status = ConnectionStatus::new();
    let held = CarriedFlow::new(flow, None, conn_status.clone(), listener.options.clone());
    let socket = SocketEntry {
        options: listener.options.clone(),
        peer: flow_info::far_end(&held).map(SocketName::Ip),
        local: Some(SocketName::Ip(listen_address.at)),
        status: Some(conn_status),
        ..SocketEntry::new(listener.domain)
    };
    let held = engine.register(held);
    let mut reached = Err(std::io::ErrorKind::AddrInUse.into());
    for _ in 0..NAMES_TRIED {
        let name = engine.name();
        table::announce(name, socket.clone());
        reached = engine.port.call_listener(name, listener.port).await;
        match &reached {
            Ok(_) => break,
            Err(_) => table::arrive(name),
        };
        let in_use = [Some(libc::EADDRINUSE), Some(libc::EADDRNOTAVAIL)];
        if !reached
            .as_ref()
            .is_err_and(|e| in_use.contains(&e.raw_os_error()))
        {
            break;
        }
    }
    drop(permit);
    match reached {
        Ok(stream) => pump::run(engine, held, stream).await,
        Err(_) => {
            listen_address.remove_listener(&listener);
            held.flow.borrow_mut().reset(NOBODY);
            engine.unregister(&held);
        }
    }
    listen_address.flows.set(listen_address.flows.get() - 1);
    if listen_address.flows.get() == 0 {
        listen_address.unused.notify_one();
    }
}
