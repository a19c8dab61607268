//! What the state machine wants done.

use std::net::SocketAddr;
use std::sync::Arc;

use d2tp_session::{Addresses, FirstHopStatus, FlowId, LinkId, ReasonCode, Session, Time};

/// Something to be carried out, in the order in which the actions are handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkAction {
    /// Make sockets on this link, at most one for each address family, and answer with
    /// [`crate::DeviceLinks::on_socket`], also when there are none.
    Attach {
        /// The link's name.
        link: Arc<str>,
        /// To be given back with the answer.
        ticket: u64,
    },
    /// Begin to use a socket: open a path over it.
    OpenPath {
        /// The socket that the path is to use.
        socket: LinkId,
        /// The server's address.
        remote: SocketAddr,
        /// Payload on the path needs grants.
        gated: bool,
        /// Both directions of the link contend for one medium.
        half_duplex: bool,
    },
    /// Tell the peer that the path is no more; the socket goes as soon as that is said.
    ClosePath {
        /// The socket whose path is closed.
        socket: LinkId,
    },
    /// The socket is of no use any more: its paths are lost in every session, and it is closed.
    DropSocket {
        /// The socket to drop.
        socket: LinkId,
    },
    /// The link of a path that stays open costs now, or costs no more.
    SetGated {
        /// The socket whose path changes its price.
        socket: LinkId,
        /// Payload on the path needs grants.
        gated: bool,
    },
    /// Lets a flow spend so many payload bytes from now on; zero revokes.
    Grant {
        /// The flow that may spend.
        flow: FlowId,
        /// The socket of the link that costs.
        socket: LinkId,
        /// Bytes each way.
        bytes: u64,
    },
    /// Lend a path that costs to what other paths lose.
    Lend {
        /// The socket of the path that is lent.
        socket: LinkId,
        /// At most so many bytes a second.
        bytes_per_second: u64,
    },
    /// A path that was lent carries flows of its own.
    EndLending {
        /// The socket of the path that was lent.
        socket: LinkId,
    },
    /// Send nothing over a socket, in any session, and keep its paths.
    Freeze {
        /// The socket to send nothing over.
        socket: LinkId,
    },
    /// Go on with the paths of a socket that was frozen.
    Unfreeze {
        /// The socket that may be sent over again.
        socket: LinkId,
    },
    /// Ask whether the link's first hop answers; the answer goes to [`crate::DeviceLinks::on_hop_answer`].
    AskFirstHop {
        /// The link's name.
        link: Arc<str>,
        /// To be given back with the answer.
        ticket: u64,
    },
    /// Tell every session what came of asking a first hop.
    FirstHopSaid {
        /// The socket whose link's first hop was asked.
        socket: LinkId,
        /// When the first hop was asked.
        since: Time,
        /// Whether the first hop answered.
        hop: FirstHopStatus,
    },
    /// Read what the link's radio counted; the answer goes to [`crate::DeviceLinks::on_radio`].
    ReadRadio {
        /// The link's name.
        link: Arc<str>,
        /// The first reading of this attachment: what was read before is of another.
        first: bool,
    },
}

/// Who carries an action out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionScope {
    /// Whoever holds the sockets.
    Sockets,
    /// The session with the server, by [`LinkAction::apply`].
    Session,
    /// Every session that may use the device's sockets, by [`LinkAction::apply`]. For
    /// [`LinkAction::DropSocket`] the socket goes after that.
    EverySession,
}

impl LinkAction {
    /// Who carries the action out.
    pub fn scope(&self) -> ActionScope {
        match self {
            LinkAction::Attach { .. }
            | LinkAction::AskFirstHop { .. }
            | LinkAction::ReadRadio { .. } => ActionScope::Sockets,
            LinkAction::OpenPath { .. }
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

    /// Does to a session what the action says of it; nothing, if it says nothing of sessions.
    pub fn apply(&self, now: Time, session: &mut Session) {
        match *self {
            LinkAction::Attach { .. }
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
