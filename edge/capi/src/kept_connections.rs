//! Connections that an agent keeps to be opened again by a token. It has copies of the programs'
//! descriptors, so that the kernel does not close the sockets when the programs end.
//!
//! ```text
//!  keep ─▶ left ── the call with its token ─▶ kept ── its program ended ─▶ away ── reopened ─▶ kept
//!           └ 10 s                             └ closed by d2tp_close       └ KEPT_FOR, or room is needed ─▶ dropped
//! ```
//!
//! A dropped connection ends as if its program ended at that time.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use crate::agent_socket::AgentSocket;
use crate::errno::SocketFault;
use crate::reopen_token::ReopenToken;

/// The most connections that are kept at a time, and the most descriptors that wait for a
/// connection. More would take descriptors and sockets of the agent. If necessary, the connection
/// that has had no process for the longest time is dropped for another one.
pub(crate) const KEPT_MAX: usize = 64; // a guess
/// How long a descriptor waits for the request for its connection.
pub(crate) const LEFT_FOR: Duration = Duration::from_secs(10); // a guess
/// The most ended connections without an owner that are remembered, so that the reason can be
/// reported.
const ENDED_MAX: usize = 64; // a guess

#[derive(Default)]
pub(crate) struct KeptConnections {
    deposited: RefCell<HashMap<ReopenToken, OwnedFd>>,
    kept: RefCell<HashMap<ReopenToken, Rc<AgentSocket>>>,
    ended: RefCell<VecDeque<(ReopenToken, SocketFault)>>,
}

impl KeptConnections {
    /// Stores a program's descriptor, until its connection is requested.
    ///
    /// # Errors
    /// Too many descriptors wait, or the token is in use.
    pub(crate) fn deposit(&self, token: ReopenToken, fd: OwnedFd) -> Result<(), SocketFault> {
        let mut left = self.deposited.borrow_mut();
        if left.len() >= KEPT_MAX || left.contains_key(&token) {
            return Err(SocketFault::new(
                libc::EAGAIN,
                "too many connections wait to be made",
            ));
        }
        left.insert(token, fd);
        Ok(())
    }

    /// Drops the descriptor of a connection that was not made.
    pub(crate) fn forget(&self, token: &ReopenToken) {
        self.deposited.borrow_mut().remove(token);
    }

    /// Keeps the requested connection with its stored descriptor.
    ///
    /// # Errors
    /// No descriptor was stored, or all places are in use.
    pub(crate) fn keep(
        &self,
        token: ReopenToken,
        socket: &Rc<AgentSocket>,
    ) -> Result<(), SocketFault> {
        let fd = self.deposited.borrow_mut().remove(&token);
        let fd =
            fd.ok_or_else(|| SocketFault::new(libc::ENOENT, "its descriptor was not left here"))?;
        let mut kept = self.kept.borrow_mut();
        kept.retain(|_, socket| socket.owner.is_kept());
        if kept.len() >= KEPT_MAX {
            let away = kept.values().map(|socket| &socket.owner);
            let away = away.filter_map(|owner| Some((owner.away_since()?, owner)));
            let Some((_, longest)) = away.min_by_key(|(since, _)| *since) else {
                let text = format!("{KEPT_MAX} connections that outlive their programs are in use");
                return Err(SocketFault::new(libc::ENOBUFS, text));
            };
            longest.let_go();
        }
        socket.owner.keep(fd);
        kept.insert(token, socket.clone());
        Ok(())
    }

    /// The socket for a token.
    ///
    /// # Errors
    /// The token is unknown, or the connection is over; the error says why.
    pub(crate) fn find(&self, token: &ReopenToken) -> Result<Rc<AgentSocket>, SocketFault> {
        let kept = self.kept.borrow().get(token).cloned();
        if let Some(socket) = kept.filter(|socket| socket.owner.is_kept()) {
            return Ok(socket);
        }
        let ended = self.ended.borrow();
        let fault = ended.iter().find(|(of, _)| of == token);
        Err(match fault {
            Some((_, fault)) => fault.clone(),
            None => SocketFault::new(libc::ENOENT, "no connection of this token is kept here"),
        })
    }

    /// Ends a kept connection; `fault`: why, if it broke and no process was informed.
    pub(crate) fn end(&self, token: &ReopenToken, fault: Option<SocketFault>) {
        self.kept.borrow_mut().remove(token);
        if let Some(fault) = fault {
            let mut ended = self.ended.borrow_mut();
            if ended.len() >= ENDED_MAX {
                ended.pop_front();
            }
            ended.push_back((*token, fault));
        }
    }

    /// Drops all kept connections.
    pub(crate) fn clear(&self) {
        for socket in self.kept.take().values() {
            socket.owner.let_go();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    fn token(number: usize) -> ReopenToken {
        let mut token = [0; 32];
        token[..8].copy_from_slice(&number.to_ne_bytes());
        ReopenToken(token)
    }

    fn fd() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn of_too_many_the_one_is_let_go_that_nobody_had_for_longest() {
        let kept = KeptConnections::default();
        let socket = AgentSocket::of_test();
        assert_eq!(
            kept.keep(token(0), &socket).unwrap_err().errno,
            libc::ENOENT
        );
        let keep = |number: usize| {
            let socket = AgentSocket::of_test();
            kept.deposit(token(number), fd()).unwrap();
            kept.keep(token(number), &socket).map(|()| socket)
        };
        let sockets: Vec<Rc<AgentSocket>> = (0..KEPT_MAX).map(|n| keep(n).unwrap()).collect();
        // All places are in use.
        assert_eq!(
            keep(100).err().map(|fault| fault.errno),
            Some(libc::ENOBUFS)
        );
        let now = Instant::now();
        sockets[9].owner.is_away(now);
        sockets[7].owner.is_away(now - Duration::from_secs(5));
        keep(101).unwrap();
        assert!(sockets[7].owner.is_gone() && !sockets[7].owner.is_kept());
        assert!(kept.find(&token(7)).is_err() && kept.find(&token(9)).is_ok());
        // A connection that was closed frees its place.
        sockets[3].owner.let_go();
        assert!(!sockets[3].owner.is_gone(), "its process is there");
        keep(102).unwrap();
        assert!(sockets[9].owner.is_kept());
    }

    #[test]
    fn no_more_descriptors_wait_than_may_and_none_is_replaced() {
        let kept = KeptConnections::default();
        for number in 0..KEPT_MAX {
            kept.deposit(token(number), fd()).unwrap();
        }
        assert!(kept.deposit(token(KEPT_MAX), fd()).is_err());
        kept.forget(&token(5));
        assert!(kept.deposit(token(6), fd()).is_err(), "somebody has it");
        assert!(kept.deposit(token(5), fd()).is_ok());
    }

    #[test]
    fn why_it_broke_is_remembered_for_some_time() {
        let kept = KeptConnections::default();
        for number in 0..=ENDED_MAX {
            kept.end(&token(number), Some(SocketFault::new(libc::ETIME, "late")));
        }
        let errno = |number| kept.find(&token(number)).err().map(|fault| fault.errno);
        assert_eq!(errno(0), Some(libc::ENOENT));
        assert_eq!(errno(1), Some(libc::ETIME));
    }
}
