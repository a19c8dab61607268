//! The UDP addresses that are bound or listened at. An address outlives its listener while flows of it live, and a
//! socket that listens there again takes it over.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::rc::Rc;

use d2tp_driver::Server;
use libc::c_int;
use tokio::sync::{Notify, Semaphore};

use crate::errno::{CallResult, Errno};
use crate::options::SocketOptions;
use crate::pair;

/// A program's listening socket.
#[derive(Clone)]
pub(crate) struct ProgramListener {
    pub(crate) cookie: u64,
    /// Its loopback port.
    pub(crate) port: u16,
    pub(crate) domain: c_int,
    pub(crate) options: SocketOptions,
}

/// A UDP address where flows come, and the socket that hears of them.
pub(crate) struct ListenAddress {
    /// The server that accepts; none once the listener is closing.
    pub(crate) server: RefCell<Option<Rc<Server>>>,
    pub(crate) at: SocketAddr,
    pub(crate) listener: RefCell<Option<ProgramListener>>,
    pub(crate) flows: Cell<usize>,
    /// Notified when the listener or the last flow went.
    pub(crate) unused: Notify,
    /// Closed when the address is free again.
    pub(crate) freed: Semaphore,
}

/// Addresses that are taken: bound, or listened at.
#[derive(Default)]
pub(crate) struct ListenAddresses {
    /// By the cookie of the bound socket, with its loopback port.
    pub(crate) bound: RefCell<HashMap<u64, (UdpSocket, u16)>>,
    pub(crate) addresses: RefCell<Vec<Rc<ListenAddress>>>,
}

impl ListenAddresses {
    pub(crate) fn at(&self, address: SocketAddr) -> Option<Rc<ListenAddress>> {
        let addresses = self.addresses.borrow();
        addresses
            .iter()
            .find(|listen_address| listen_address.at == address)
            .cloned()
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
        if let Some(listen_address) = self.at(address) {
            listen_address.look().await;
            if listen_address.listener.borrow().is_some() {
                return Err(Errno(libc::EADDRINUSE));
            }
            if !listen_address.is_unused() {
                return Ok(address);
            }
            listen_address.until_gone().await;
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
        let hears = |listen_address: &&Rc<ListenAddress>| {
            listen_address
                .listener
                .borrow()
                .as_ref()
                .is_some_and(|e| e.cookie == cookie)
        };
        let listen_address = self.addresses.borrow().iter().find(hears).cloned();
        if let Some(listen_address) = listen_address {
            listen_address.look().await;
            if listen_address.is_unused() {
                listen_address.until_gone().await;
            }
        }
    }

    /// Tells every device that this process leaves; says whether there was an address.
    pub(crate) fn say_goodbye(&self) -> bool {
        let addresses = self.addresses.borrow();
        for listen_address in addresses.iter() {
            if let Some(server) = &*listen_address.server.borrow() {
                server.say_goodbye();
            }
        }
        !addresses.is_empty()
    }
}

impl ListenAddress {
    /// Whether nobody needs it any more.
    pub(crate) fn is_unused(&self) -> bool {
        self.listener.borrow().is_none() && self.flows.get() == 0
    }

    /// Waits until its address is free.
    pub(crate) async fn until_gone(&self) {
        // Closed is all that ever happens to it.
        let _ = self.freed.acquire().await;
    }

    /// Looks whether its listener is still there.
    pub(crate) async fn look(&self) {
        let Some(listener) = self.listener.borrow().clone() else {
            return;
        };
        if !pair::is_listening(listener.port).await {
            self.remove_listener(&listener);
        }
    }

    pub(crate) fn remove_listener(&self, listener: &ProgramListener) {
        let mut now = self.listener.borrow_mut();
        if now
            .as_ref()
            .is_some_and(|now| now.cookie == listener.cookie)
        {
            *now = None;
            self.unused.notify_one();
        }
    }
}
