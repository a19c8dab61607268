//! Actions that the state machine asks the driver to carry out.

use std::net::SocketAddr;
use std::sync::Arc;

use d2tp_session::{Addresses, FirstHopStatus, FlowId, LinkId, ReasonCode, Session, Time};

/// An action that the driver must carry out, in the given order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkAction {
    /// Create sockets on this link, at most one for each address family, and answer with
    /// [`crate::DeviceLinks::on_socket`], even if there are none.
    Attach {
        /// The link's name.
        link: Arc<str>,
        /// The number to return with the answer.
        ticket: u64,
    },
    /// Open a stream to the server over this link, and answer with [`crate::DeviceLinks::on_stream`].
    OpenStream {
        /// The link's name.
        link: Arc<str>,
        /// The number to return with the answer.
        ticket: u64,
    },
    /// Begin to use a socket: open a path over it.
    OpenPath {
        /// The socket that the path is to use.
        socket: LinkId,
        /// The server's address.
        remote: SocketAddr,
        /// Whether payload on the path needs grants.
        gated: bool,
        /// Whether both directions of the link share one medium.
        half_duplex: bool,
    },
    /// Begin to use a socket to another node of the server: resume the session there by a handshake, while
    /// the paths to the node before carry on.
    WakeAt {
        /// The socket by which the node is reached.
        socket: LinkId,
        /// The node's address.
        remote: SocketAddr,
        /// Whether payload on the path needs grants.
        gated: bool,
        /// Whether both directions of the link share one medium.
        half_duplex: bool,
    },
    /// Inform the peer that the path is closed; the socket is closed after that.
    ClosePath {
        /// The socket whose path is closed.
        socket: LinkId,
    },
    /// Close the socket. Every session loses its paths over it.
    DropSocket {
        /// The socket to drop.
        socket: LinkId,
    },
    /// Change whether the path of a link is metered.
    SetGated {
        /// The socket whose path changes its price.
        socket: LinkId,
        /// Whether payload on the path needs grants.
        gated: bool,
    },
    /// Allow a flow to spend this many payload bytes from now on; zero revokes.
    Grant {
        /// The flow that may spend.
        flow: FlowId,
        /// The socket of the metered link.
        socket: LinkId,
        /// Bytes in each direction.
        bytes: u64,
    },
    /// Lend a metered path to repair losses of other paths.
    Lend {
        /// The socket of the path that is lent.
        socket: LinkId,
        /// The most bytes per second.
        bytes_per_second: u64,
    },
    /// End the loan of a path, which then carries flows of its own.
    EndLending {
        /// The socket of the path that was lent.
        socket: LinkId,
    },
    /// Send nothing over a socket, in any session, and keep its paths.
    Freeze {
        /// The socket to send nothing over.
        socket: LinkId,
    },
    /// Resume the paths of a frozen socket.
    Unfreeze {
        /// The socket that may be sent over again.
        socket: LinkId,
    },
    /// Ask whether the link's first hop answers; the answer goes to [`crate::DeviceLinks::on_hop_answer`].
    AskFirstHop {
        /// The link's name.
        link: Arc<str>,
        /// The number to return with the answer.
        ticket: u64,
    },
    /// Inform every session whether a first hop answered.
    FirstHopSaid {
        /// The socket whose link's first hop was asked.
        socket: LinkId,
        /// When the first hop was asked.
        since: Time,
        /// Whether the first hop answered.
        hop: FirstHopStatus,
    },
    /// Read the statistics of the link's radio; the result goes to [`crate::DeviceLinks::on_radio`].
    ReadRadio {
        /// The link's name.
        link: Arc<str>,
        /// Whether this is the first reading of this attachment: earlier values belong to another one.
        first: bool,
    },
}

/// Which component carries an action out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionScope {
    /// The owner of the sockets.
    Sockets,
    /// The session with the server, by [`LinkAction::apply`].
    Session,
    /// Every session that may use the device's sockets, by [`LinkAction::apply`]. The socket of
    /// [`LinkAction::DropSocket`] is closed afterwards.
    EverySession,
}

impl LinkAction {
    /// Which component carries the action out.
    pub fn scope(&self) -> ActionScope {
        match self {
            LinkAction::Attach { .. }
            | LinkAction::OpenStream { .. }
            | LinkAction::AskFirstHop { .. }
            | LinkAction::ReadRadio { .. } => ActionScope::Sockets,
            LinkAction::OpenPath { .. }
            | LinkAction::WakeAt { .. }
            | LinkAction::ClosePath { .. }
            | LinkAction::SetGated { .. }
            | LinkAction::Grant { .. }
            | LinkAction::Lend { .. }
            | LinkAction::EndLending { .. } => ActionScope::Session,
            LinkAction::DropSocket { .. }
            | LinkAction::Freeze { .. }
            | LinkAction::Unfreeze { .. }
            | LinkAction::FirstHopSaid { .. } => ActionScope::EverySession,
        }
    }

    /// Applies the action to a session; does nothing if the action does not concern sessions.
    pub fn apply(&self, now: Time, session: &mut Session) {
        match *self {
            LinkAction::Attach { .. }
            | LinkAction::OpenStream { .. }
            | LinkAction::AskFirstHop { .. }
            | LinkAction::ReadRadio { .. } => {}
            LinkAction::OpenPath {
                socket,
                remote,
                gated,
                half_duplex,
            } => {
                let addresses = Addresses {
                    link: socket,
                    local: None,
                    remote,
                };
                session.open_path(now, addresses, gated);
                if half_duplex {
                    session.set_half_duplex(socket);
                }
            }
            LinkAction::WakeAt {
                socket,
                remote,
                gated,
                half_duplex,
            } => {
                let addresses = Addresses {
                    link: socket,
                    local: None,
                    remote,
                };
                session.wake_at(now, addresses, gated);
                if half_duplex {
                    session.set_half_duplex(socket);
                }
            }
            LinkAction::ClosePath { socket } => {
                session.close_path(now, socket, ReasonCode::PathCost)
            }
            LinkAction::DropSocket { socket } => session.on_link_down(now, socket),
            LinkAction::SetGated { socket, gated } => {
                let paths = session.path_stats();
                if let Some(path) = paths.iter().find(|p| p.addresses.link == socket) {
                    session.set_path_status(socket, path.status, gated, ReasonCode::None);
                }
            }
            LinkAction::Grant {
                flow,
                socket,
                bytes,
            } => session.grant(flow, socket, bytes),
            LinkAction::Lend {
                socket,
                bytes_per_second,
            } => session.lend_path(now, socket, bytes_per_second),
            LinkAction::EndLending { socket } => session.end_lending(socket),
            LinkAction::Freeze { socket } => session.freeze_path(now, socket),
            LinkAction::Unfreeze { socket } => session.unfreeze_path(socket),
            LinkAction::FirstHopSaid { socket, since, hop } => {
                session.on_link_silent(now, socket, since, hop);
            }
        }
    }
}
