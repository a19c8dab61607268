//! UDP addresses that are bound or listened at. An address outlives its listener while flows use
//! it, and another socket that listens there takes it over.

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
    /// The listener's loopback port.
    pub(crate) port: u16,
    pub(crate) domain: c_int,
    pub(crate) options: SocketOptions,
}

/// A UDP address that accepts flows, and the program's socket that gets them.
pub(crate) struct ListenAddress {
    /// The server that accepts flows; `None` once the listener is closing.
    pub(crate) server: RefCell<Option<Rc<Server>>>,
    pub(crate) at: SocketAddr,
    pub(crate) listener: RefCell<Option<ProgramListener>>,
    pub(crate) flows: Cell<usize>,
    /// Notified when the listener or the last flow is gone.
    pub(crate) unused: Notify,
    /// Closed when the address can be bound again.
    pub(crate) freed: Semaphore,
}

/// Addresses in use: bound, or with a listener.
#[derive(Default)]
pub(crate) struct ListenAddresses {
    /// Bound UDP sockets, each with the loopback port of the program's socket, by its cookie.
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

    /// Binds an address for the socket `cookie` at loopback port `port`. Returns the actual address.
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

    /// Handles a close call on the socket, perhaps for its last descriptor.
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

    /// Informs every device that this process ends. Returns whether there was an address.
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
    /// Whether no listener or flow uses the address.
    pub(crate) fn is_unused(&self) -> bool {
        self.listener.borrow().is_none() && self.flows.get() == 0
    }

    /// Waits until the address is free.
    pub(crate) async fn until_gone(&self) {
        // The semaphore is only ever closed.
        let _ = self.freed.acquire().await;
    }

    /// Checks whether the listener still exists.
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
