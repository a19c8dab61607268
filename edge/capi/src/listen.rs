//! From flows that others open to `accept`: a post for each UDP address, and the listening socket that
//! hears of its flows.
//!
//! ```text
//!  flow ─▶ post ─ announces 127.1.x.y in the table, calls the listener from there ─▶ accept, getpeername
//!                 └ the listener's backlog is the kernel's: a call waits until there is room
//! ```
//!
//! A post outlives its listener while flows of it live, and a socket that listens there again takes it
//! over.

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

/// Flows of one post that call their listener at once; the others wait where flows wait. Each costs a
/// kernel socket.
const CALLS_MAX: usize = 128; // a guess
/// Addresses to call from that are tried: one may still be in use by a connection that ended.
const NAMES_TRIED: usize = 16;
/// Reset code of a flow that nobody listens for.
const NOBODY: u64 = 0xd301;

/// Has flows to `address` call the listener `ear`.
pub(crate) async fn listen(
    home: &Rc<EngineState>,
    address: SocketAddr,
    ear: ProgramListener,
) -> CallResult<()> {
    let cookie = ear.cookie;
    if let Some(post) = home.listeners.at(address) {
        if !post.is_unused() {
            *post.listener.borrow_mut() = Some(ear);
            return Ok(());
        }
        post.until_gone().await;
    }
    let key = home.key().map_err(|fault| Errno(fault.errno))?;
    // The server takes the address that is free from here on.
    home.listeners.bound.borrow_mut().remove(&cookie);
    let server = Server::bind(ServerOptions {
        listen: address,
        key,
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    })
    .map_err(|_| Errno(libc::EADDRINUSE))?;
    let server = Rc::new(server);
    let post = Rc::new(ListenAddress {
        server: RefCell::new(Some(server.clone())),
        at: address,
        listener: RefCell::new(Some(ear)),
        flows: Cell::new(0),
        unused: Notify::new(),
        freed: Semaphore::new(0),
    });
    home.listeners.addresses.borrow_mut().push(post.clone());
    tokio::task::spawn_local(serve(home.clone(), post, server));
    Ok(())
}

async fn serve(home: Rc<EngineState>, post: Rc<ListenAddress>, server: Rc<Server>) {
    let calls = Arc::new(Semaphore::new(CALLS_MAX));
    loop {
        let next = async {
            let permit = calls.clone().acquire_owned().await;
            let permit = permit.expect("nobody closes it");
            Some((server.accept().await?, permit))
        };
        let next = tokio::select! {
            next = next => next,
            () = post.unused.notified() => {
                if post.is_unused() {
                    break;
                }
                continue;
            }
        };
        let Some((mut flow, permit)) = next else {
            break;
        };
        let ear = post.listener.borrow().clone();
        match ear {
            Some(ear) => {
                let called = call(home.clone(), post.clone(), flow, ear, permit);
                tokio::task::spawn_local(called);
            }
            None => flow.reset(NOBODY),
        }
    }
    server.close().await;
    post.server.take();
    drop(server);
    pair::until_free(post.at).await;
    let all = &home.listeners.addresses;
    all.borrow_mut().retain(|other| !Rc::ptr_eq(other, &post));
    post.freed.close();
}

/// Calls the listener with a flow, and carries it until it is over.
async fn call(
    home: Rc<EngineState>,
    post: Rc<ListenAddress>,
    flow: Flow,
    ear: ProgramListener,
    permit: OwnedSemaphorePermit,
) {
    post.flows.set(post.flows.get() + 1);
    let fate = ConnectionStatus::new();
    let held = CarriedFlow::new(flow, None, fate.clone(), ear.options.clone());
    let socket = SocketEntry {
        options: ear.options.clone(),
        peer: flow_info::far_end(&held).map(SocketName::Ip),
        local: Some(SocketName::Ip(post.at)),
        status: Some(fate),
        ..SocketEntry::new(ear.domain)
    };
    let held = home.register(held);
    let mut reached = Err(std::io::ErrorKind::AddrInUse.into());
    for _ in 0..NAMES_TRIED {
        let name = home.name();
        table::announce(name, socket.clone());
        reached = home.port.call_listener(name, ear.port).await;
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
        Ok(stream) => pump::run(home, held, stream).await,
        Err(_) => {
            post.remove_listener(&ear);
            held.flow.borrow_mut().reset(NOBODY);
            home.unregister(&held);
        }
    }
    post.flows.set(post.flows.get() - 1);
    if post.flows.get() == 0 {
        post.unused.notify_one();
    }
}
