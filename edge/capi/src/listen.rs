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
use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::rc::Rc;
use std::sync::Arc;

use d2tp_driver::{Admission, EndpointConfig, Flow, FlowIo as _, Server, ServerOptions};
use libc::c_int;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::address::SocketName;
use crate::engine_state::EngineState;
use crate::errno::{CallResult, Errno};
use crate::info;
use crate::options::SocketOptions;
use crate::pair;
use crate::pump::{self, CarriedFlow};
use crate::table::{self, ConnectionStatus, SocketEntry};

/// Flows of one post that call their listener at once; the others wait where flows wait. Each costs a
/// kernel socket.
const CALLS_MAX: usize = 128; // a guess
/// Addresses to call from that are tried: one may still be in use by a connection that ended.
const NAMES_TRIED: usize = 16;
/// Reset code of a flow that nobody listens for.
const NOBODY: u64 = 0xd301;

/// A program's listening socket.
#[derive(Clone)]
pub(crate) struct ProgramListener {
    pub(crate) cookie: u64,
    /// Its loopback port.
    pub(crate) port: u16,
    pub(crate) domain: c_int,
    pub(crate) options: SocketOptions,
}

struct ListenAddress {
    /// The server that accepts; none once the listener is closing.
    server: RefCell<Option<Rc<Server>>>,
    at: SocketAddr,
    listener: RefCell<Option<ProgramListener>>,
    flows: Cell<usize>,
    /// The ear or the last flow went.
    unused: Notify,
    /// Closed when the address is free again.
    freed: Semaphore,
}

/// Addresses that are taken: bound, or listened at.
#[derive(Default)]
pub(crate) struct ListenAddresses {
    /// By the cookie of the bound socket, with its loopback port.
    bound: RefCell<HashMap<u64, (UdpSocket, u16)>>,
    addresses: RefCell<Vec<Rc<ListenAddress>>>,
}

impl ListenAddresses {
    fn at(&self, address: SocketAddr) -> Option<Rc<ListenAddress>> {
        let posts = self.addresses.borrow();
        posts.iter().find(|post| post.at == address).cloned()
    }

    /// Takes an address for the socket `cookie` at loopback port `port`; says which it is.
    pub(crate) async fn bind(
        &self,
        cookie: u64,
        port: u16,
        address: SocketAddr,
    ) -> CallResult<SocketAddr> {
        // Sockets that were closed by the kernel's call.
        self.bound
            .borrow_mut()
            .retain(|_, (_, port)| pair::is_bound(*port));
        if let Some(post) = self.at(address) {
            post.look().await;
            if post.listener.borrow().is_some() {
                return Err(Errno(libc::EADDRINUSE));
            }
            if !post.is_unused() {
                return Ok(address);
            }
            post.until_gone().await;
        }
        let socket = UdpSocket::bind(address)?;
        let address = socket.local_addr()?;
        self.bound.borrow_mut().insert(cookie, (socket, port));
        Ok(address)
    }

    /// The socket was closed, perhaps for the last time.
    pub(crate) async fn on_close(&self, cookie: u64) {
        self.bound
            .borrow_mut()
            .retain(|bound, (_, port)| *bound != cookie || pair::is_bound(*port));
        let hears = |post: &&Rc<ListenAddress>| {
            post.listener
                .borrow()
                .as_ref()
                .is_some_and(|e| e.cookie == cookie)
        };
        let post = self.addresses.borrow().iter().find(hears).cloned();
        if let Some(post) = post {
            post.look().await;
            if post.is_unused() {
                post.until_gone().await;
            }
        }
    }

    /// Tells every device that this process leaves; says whether there was a post.
    pub(crate) fn say_goodbye(&self) -> bool {
        let posts = self.addresses.borrow();
        for post in posts.iter() {
            if let Some(server) = &*post.server.borrow() {
                server.say_goodbye();
            }
        }
        !posts.is_empty()
    }
}

impl ListenAddress {
    /// Whether nobody needs it any more.
    fn is_unused(&self) -> bool {
        self.listener.borrow().is_none() && self.flows.get() == 0
    }

    /// Waits until its address is free.
    async fn until_gone(&self) {
        // Closed is all that ever happens to it.
        let _ = self.freed.acquire().await;
    }

    /// Looks whether its listener is still there.
    async fn look(&self) {
        let Some(ear) = self.listener.borrow().clone() else {
            return;
        };
        if !pair::is_listening(ear.port).await {
            self.remove_listener(&ear);
        }
    }

    fn remove_listener(&self, ear: &ProgramListener) {
        let mut now = self.listener.borrow_mut();
        if now.as_ref().is_some_and(|now| now.cookie == ear.cookie) {
            *now = None;
            self.unused.notify_one();
        }
    }
}

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
        peer: info::far_end(&held).map(SocketName::Ip),
        local: Some(SocketName::Ip(post.at)),
        status: Some(fate),
        ..SocketEntry::new(ear.domain)
    };
    let held = pump::register(&home, held);
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
            pump::unregister(&home, &held);
        }
    }
    post.flows.set(post.flows.get() - 1);
    if post.flows.get() == 0 {
        post.unused.notify_one();
    }
}
