//! The datagrams between one program's socket and one session, carried in both directions.

use std::cell::RefCell;
use std::future::{Future as _, poll_fn};
use std::io::{self, Read as _};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{Connection, ContextInbox, FlowIo as _, PathSelection};
use socket2::SockRef;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UdpSocket;
use tokio::sync::watch;

use crate::carried_flow::CarriedFlow;
use crate::errno::SocketFault;

/// The largest message that loopback carries.
pub(super) const MESSAGE_BYTES_MAX: usize = 65_536;

/// The datagrams between one program's socket and one session.
pub(crate) struct DatagramPeer {
    pub(super) held: Rc<CarriedFlow>,
    pub(super) connection: Connection,
    context: u64,
}

impl DatagramPeer {
    pub(crate) fn send(
        &self,
        route: Option<PathSelection>,
        expiry: Option<Duration>,
        message: &[u8],
    ) {
        let options = self.held.options.borrow();
        let route = route.unwrap_or(options.route);
        let expiry = expiry.unwrap_or(options.expiry);
        let bytes = Bytes::copy_from_slice(message);
        // A datagram that is too large or late is lost, as on a network. The library's calls have
        // checked before.
        let sent = self
            .connection
            .send_datagram_on(route, self.context, bytes, expiry);
        let held = &self.held;
        match sent {
            Ok(()) => held.count(&held.sent, message.len() as u64),
            // Another process checked, by the size that it was told.
            Err(_) => held.changed.notify_one(),
        }
    }
}

/// Creates a peer whose flow exists, and its receiver of datagrams.
pub(super) fn open_peer(
    held: &Rc<CarriedFlow>,
    context: u64,
) -> Result<(Rc<DatagramPeer>, ContextInbox), SocketFault> {
    let connection = held.flow.borrow().connection();
    let Some(inbox) = connection.context(context) else {
        let why = format!("context {context} is in use");
        return Err(SocketFault::new(libc::EADDRINUSE, why));
    };
    let end = Rc::new(DatagramPeer {
        held: held.clone(),
        connection,
        context,
    });
    Ok((end, inbox))
}

/// Carries datagrams until the flow is over. Returns why it is. `leaving`: whether the process ends.
pub(super) async fn carry(
    mut leaving: watch::Receiver<bool>,
    end: &DatagramPeer,
    inbox: &ContextInbox,
    socket: &UdpSocket,
) -> SocketFault {
    let left = async {
        let _ = leaving.wait_for(|leaving| *leaving).await;
        drain_last(end, socket);
        finish(&end.held);
        std::future::pending().await
    };
    tokio::select! {
        over = deliver(&end.held, inbox, socket) => over,
        never = forward(end, socket) => never,
        never = left => never,
    }
}

/// The result of a future, if it is ready at once.
fn at_once<T>(future: impl std::future::Future<Output = T>) -> Option<T> {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match pin!(future).poll(&mut cx) {
        std::task::Poll::Ready(ready) => Some(ready),
        std::task::Poll::Pending => None,
    }
}

/// Waits for the end of the flow, which carries nothing more. Returns its fault.
pub(super) async fn until_over(held: &CarriedFlow) -> SocketFault {
    let ended = poll_fn(|cx| {
        let mut flow = held.flow.borrow_mut();
        loop {
            match pin!(flow.read_chunk()).poll(cx) {
                std::task::Poll::Ready(Ok(Some(_))) => {}
                std::task::Poll::Ready(Ok(None)) => return std::task::Poll::Ready(None),
                std::task::Poll::Ready(Err(error)) => return std::task::Poll::Ready(Some(error)),
                std::task::Poll::Pending => return std::task::Poll::Pending,
            }
        }
    });
    match ended.await {
        Some(error) => held.fault(&error),
        None => SocketFault::new(libc::ECONNRESET, "the other end closed its socket"),
    }
}

/// Carries datagrams from the peer to the program until the flow is over. Returns why it is.
async fn deliver(held: &CarriedFlow, inbox: &ContextInbox, socket: &UdpSocket) -> SocketFault {
    // The future is not dropped between a message and its socket, which may need time when it is
    // new.
    let pass = async |message: Bytes| {
        // An ICMP error says that the program closed its socket; another task checks that.
        if let Ok(bytes) = socket.send(&message).await {
            held.count(&held.received, bytes as u64);
        }
    };
    let mut over = pin!(until_over(held));
    let over = loop {
        let message = tokio::select! {
            Some(message) = inbox.recv() => message,
            over = &mut over => break over,
        };
        pass(message).await;
    };
    // Datagrams that arrived with the end were sent before it.
    while let Some(message) = at_once(inbox.recv()).flatten() {
        pass(message).await;
    }
    over
}

/// Carries datagrams from the program to the peer.
async fn forward(end: &DatagramPeer, socket: &UdpSocket) -> SocketFault {
    loop {
        // A pending error is taken by the reads.
        if socket.readable().await.is_ok() {
            drain(end, socket);
        }
        tokio::task::yield_now().await;
    }
}

/// Sends all datagrams that the program's socket holds.
fn drain(end: &DatagramPeer, socket: &UdpSocket) {
    read_all(
        |buffer| socket.try_recv(buffer),
        |message| end.send(None, None, message),
    );
}

/// Sends the rest at the end, with a new registration of the socket: it may hold datagrams that the old
/// one did not report.
fn drain_last(end: &DatagramPeer, socket: &UdpSocket) {
    let socket = SockRef::from(socket);
    read_all(
        |buffer| (&*socket).read(buffer),
        |message| end.send(None, None, message),
    );
}

pub(super) fn read_all(
    mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    mut hear: impl FnMut(&[u8]),
) {
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; MESSAGE_BYTES_MAX]);
    }
    BUFFER.with_borrow_mut(|buffer| {
        loop {
            match read(buffer) {
                Ok(bytes) => hear(&buffer[..bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {}
            }
        }
    });
}

/// Sends what the program sent before it closed its socket, until the datagrams expire.
pub(super) async fn send_remaining(end: &DatagramPeer, socket: Option<&UdpSocket>) {
    if let Some(socket) = socket {
        drain_last(end, socket);
    }
    let held = &end.held;
    finish(held);
    let gone = poll_fn(|cx| held.flow.borrow_mut().poll_finished(cx));
    let expiry = held.options.borrow().expiry;
    let _ = tokio::time::timeout(expiry, gone).await;
}

/// Ends this end's direction of the flow.
pub(super) fn finish(held: &CarriedFlow) {
    let _ = at_once(held.flow.borrow_mut().shutdown());
    held.finished();
}
