//! A datagram socket of another process, carried by an agent's engine.

use std::cell::Cell;
use std::rc::Rc;

use socket2::Socket;
use tokio::net::UdpSocket;

use super::peer::{carry, open_peer, send_remaining, until_over};
use crate::agent_socket::AgentSocket;
use crate::carried_flow::CarriedFlow;
use crate::engine_state::EngineState;
use crate::errno::SocketFault;
use crate::policy;

/// Carries a socket of another process until its flow is over. Returns the fault, unless the program
/// closed the socket.
pub(crate) async fn carry_for_agent(
    engine: &EngineState,
    agent_socket: &AgentSocket,
    held: &Rc<CarriedFlow>,
    context: u64,
) -> Option<SocketFault> {
    let (end, inbox) = match open_peer(held, context) {
        Ok(begun) => begun,
        Err(fault) => return Some(fault),
    };
    let owner = &agent_socket.owner;
    let told = Cell::new(None);
    let look = || {
        let room = end.connection.datagram_max();
        if let Some(bytes) = room.filter(|_| told.replace(room) != room) {
            owner.has_room(bytes);
        }
    };
    look();
    let passed = agent_socket.opened(end.clone());
    let served = async {
        let fd = tokio::select! {
            // First, because a program that closes its socket at once has passed it before, with
            // its datagrams.
            biased;
            fd = passed => fd.ok(),
            over = until_over(held) => return Some(over),
            () = owner.gone() => None,
        };
        let socket = fd.map(|fd| {
            let socket = Socket::from(fd);
            socket.set_nonblocking(true)?;
            UdpSocket::from_std(socket.into())
        });
        let socket = match socket.transpose() {
            Ok(socket) => socket,
            Err(error) => return Some(SocketFault::new(libc::EINVAL, error)),
        };
        if let Some(socket) = &socket {
            tokio::select! {
                over = carry(engine.leaving.subscribe(), &end, &inbox, socket) => return Some(over),
                () = owner.gone() => {}
            }
        }
        send_remaining(&end, socket.as_ref()).await;
        None
    };
    let over = tokio::select! {
        over = served => over,
        never = policy::watch_datagrams(engine, held, &look) => never,
    };
    policy::account_datagrams(engine, held);
    over
}
