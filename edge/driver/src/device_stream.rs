//! A device's stream over one link: opened when nothing answers over UDP, a socket of the link while it
//! lasts.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use d2tp_device::{AttachedSocket, StreamFailure};
use d2tp_links::Link;
use d2tp_session::{Addresses, LinkId};
use d2tp_stream::{
    ConnectError, PacketReceiver, PacketSender, StreamTarget, connect, http_proxy_for,
};

use crate::attach::Attach;
use crate::driver_core::DriverShared;
use crate::open_stream::OpenStream;

/// What a device's stream needs to be opened.
pub(crate) struct DeviceStreamOrder {
    pub(crate) shared: Arc<DriverShared>,
    pub(crate) attach: Arc<dyn Attach>,
    /// The link that the stream is to use, by its name.
    pub(crate) name: String,
    /// The current description of the link, if it exists.
    pub(crate) link: Option<Link>,
    /// The server's addresses.
    pub(crate) remotes: Vec<SocketAddr>,
    /// The server's host and its port for streams, if it has one.
    pub(crate) target: Option<StreamTarget>,
    /// The number to return with the answer.
    pub(crate) ticket: u64,
}

/// Is informed when a stream is open, cannot be opened, or ended.
pub(crate) trait StreamOwner: Send + Sync {
    /// Handles the stream's socket, or the reason why there is none.
    fn on_stream(
        self: Arc<Self>,
        name: &str,
        ticket: u64,
        made: Result<AttachedSocket, StreamFailure>,
    );
    /// Handles the end of a stream.
    fn on_stream_closed(self: Arc<Self>, socket: LinkId);
}

/// Opens a stream over a link, informs its owner, and carries packets until the stream ends.
pub(crate) async fn run(order: DeviceStreamOrder, owner: Arc<dyn StreamOwner>) {
    let (name, ticket) = (&order.name, order.ticket);
    let (sender, receiver, peer) = match open(&order).await {
        Ok(opened) => opened,
        Err(failure) => return owner.on_stream(name, ticket, Err(failure)),
    };
    let open = {
        let mut inner = order.shared.inner.lock();
        if inner.stopped {
            return;
        }
        let link = inner.new_link();
        let (stream, signals) = inner.streams.insert(link, peer);
        if let Some(feed) = &inner.qlog {
            feed.name_link(link, name);
        }
        OpenStream {
            shared: Arc::downgrade(&order.shared),
            stream,
            addresses: Addresses {
                link,
                local: None,
                remote: stream.address(),
            },
            is_served: false,
            signals,
        }
    };
    let socket = open.addresses.link;
    let made = AttachedSocket {
        socket,
        remote: open.addresses.remote,
    };
    owner.clone().on_stream(name, ticket, Ok(made));
    // The task must not keep the device alive.
    let DeviceStreamOrder {
        name,
        shared,
        attach,
        ..
    } = order;
    drop((shared, attach));
    let owner = {
        let weak = Arc::downgrade(&owner);
        drop(owner);
        weak
    };
    let connection = sender.connection();
    let end = open.carry(sender, receiver).await;
    tracing::debug!(link = %name, %end, "the stream ends");
    open.end(connection);
    if let Some(owner) = owner.upgrade() {
        owner.on_stream_closed(socket);
    }
}

async fn open(
    order: &DeviceStreamOrder,
) -> Result<(PacketSender, PacketReceiver, SocketAddr), StreamFailure> {
    let unreachable = StreamFailure::Unreachable;
    let (Some(target), Some(link)) = (&order.target, &order.link) else {
        return Err(unreachable);
    };
    let (name, port) = (&order.name, target.port);
    let proxy = http_proxy_for(target);
    let mut failure = unreachable;
    for mut remote in order.attach.stream_addresses(link, &order.remotes) {
        remote.set_port(port);
        let socket = |to: SocketAddr| order.attach.stream_socket(link, to);
        match connect(target, remote, proxy.as_ref(), socket).await {
            Ok((sender, receiver)) => {
                tracing::info!(link = %name, host = %target.host, port, "a stream is open");
                return Ok((sender, receiver, remote));
            }
            Err(error) => {
                tracing::info!(link = %name, host = %target.host, port, %error, "no stream");
                // An answer is more informative than silence, and most of all one of another host.
                failure = match (error, failure) {
                    (ConnectError::Foreign(_), _) => StreamFailure::Foreign,
                    (ConnectError::Unreachable(error), StreamFailure::Unreachable)
                        if error.kind() == io::ErrorKind::ConnectionRefused =>
                    {
                        StreamFailure::Refused
                    }
                    (_, known) => known,
                };
            }
        }
    }
    Err(failure)
}
