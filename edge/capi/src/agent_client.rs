//! Connections that can be opened again by a token: the requests for descriptors between a program
//! and its agent, beside the messages of each connection.
//!
//! ```text
//!  connect    program ── keep, token, a copy of its descriptor ──▶ agent     then the engine's call contains the token
//!  kill -9            ✗                                            agent     has the socket with all that is unread
//!  reopen     engine  ── reopen, token ──────────────────────────▶ agent     the connection is that process's now
//!             program ── descriptor, token ──────────────────────▶ agent
//!                     ◀────────────────────── the very descriptor
//! ```
//!
//! The program's own thread sends descriptors by a separate connection, because the engine's thread
//! has another descriptor table.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, getsockopt, recvmsg, sendmsg, sockopt,
};

use crate::agent_address::{ANSWER_WITHIN, no_agent, socket_path};
use crate::agent_message::{
    LINE_BYTES_MAX, MessageFromAgent, MessageToAgent, PASSED_MAX, ReopenClaim, VERSION,
};
use crate::errno::SocketFault;
use crate::reopen_token::ReopenToken;

/// A blocking connection to the agent: each request waits for its answer.
struct AgentClient {
    stream: UnixStream,
    received: Vec<u8>,
    passed: Option<OwnedFd>,
}

impl AgentClient {
    fn begin() -> Result<AgentClient, SocketFault> {
        let begun = || {
            let stream = UnixStream::connect(socket_path()?).ok()?;
            let peer = getsockopt(&stream, sockopt::PeerCredentials).ok()?;
            // An agent of another user must not get descriptors. SAFETY: a call without arguments.
            let is_ours = peer.uid() == unsafe { libc::geteuid() };
            stream.set_read_timeout(Some(ANSWER_WITHIN)).ok()?;
            stream.set_write_timeout(Some(ANSWER_WITHIN)).ok()?;
            is_ours.then_some(stream)
        };
        Ok(AgentClient {
            stream: begun().ok_or_else(no_agent)?,
            received: Vec::new(),
            passed: None,
        })
    }

    fn say(&self, what: &MessageToAgent, fd: Option<RawFd>) -> io::Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        let mut rest = &line[..];
        let mut fds: Vec<RawFd> = fd.into_iter().collect();
        while !rest.is_empty() {
            let rights = [ControlMessage::ScmRights(&fds)];
            let rights = if fds.is_empty() { &[][..] } else { &rights };
            let slices = [IoSlice::new(rest)];
            let flags = MsgFlags::MSG_NOSIGNAL;
            let sent = sendmsg::<()>(self.stream.as_raw_fd(), &slices, rights, flags, None)?;
            rest = &rest[sent..];
            fds.clear();
        }
        Ok(())
    }

    fn hear(&mut self) -> io::Result<MessageFromAgent> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(serde_json::from_slice(&line)?);
            }
            let mut bytes = [0; 4096];
            let mut space = nix::cmsg_space!([RawFd; PASSED_MAX]);
            let mut slices = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let fd = self.stream.as_raw_fd();
            let message = recvmsg::<()>(fd, &mut slices, Some(&mut space), flags)?;
            for control in message.cmsgs()? {
                if let ControlMessageOwned::ScmRights(passed) = control {
                    for fd in passed {
                        // SAFETY: the kernel has just created it for this process.
                        self.passed = Some(unsafe { OwnedFd::from_raw_fd(fd) });
                    }
                }
            }
            let len = message.bytes;
            if len == 0 || self.received.len() > LINE_BYTES_MAX {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.received.extend(&bytes[..len]);
        }
    }

    /// Sends a request that older agents do not support.
    fn ask(&mut self, what: &MessageToAgent, fd: Option<RawFd>) -> Result<(), SocketFault> {
        let older = |_| no_agent();
        self.say(what, fd).map_err(older)?;
        match self.hear().map_err(older)? {
            MessageFromAgent::Taken {
                ok: true,
                version: VERSION,
                ..
            } => Ok(()),
            MessageFromAgent::Open { .. } => Ok(()),
            MessageFromAgent::Fault { errno, text } => Err(SocketFault { errno, text }),
            _ => Err(no_agent()),
        }
    }
}

/// Leaves a copy of a program's descriptor with the agent. Returns the token by which its
/// connection is opened again.
///
/// # Errors
/// No agent answers that supports this.
pub(crate) fn deposit_descriptor(fd: RawFd) -> Result<ReopenToken, SocketFault> {
    let token = ReopenToken::new()?;
    let mut talk = AgentClient::begin()?;
    talk.ask(&MessageToAgent::Keep(ReopenClaim::to(token)), None)?;
    talk.ask(&MessageToAgent::Left, Some(fd))?;
    Ok(token)
}

/// Requests the descriptor of a connection that this process has just opened again.
///
/// # Errors
/// The agent is gone, or the process has no free descriptor.
pub(crate) fn fetch_descriptor(token: ReopenToken) -> Result<OwnedFd, SocketFault> {
    let mut talk = AgentClient::begin()?;
    talk.ask(&MessageToAgent::Descriptor(ReopenClaim::to(token)), None)?;
    // The agent has accepted, and sends the descriptor next.
    if talk.passed.is_none() {
        let said = talk.hear();
        if let Ok(MessageFromAgent::Fault { errno, text }) = said {
            return Err(SocketFault { errno, text });
        }
    }
    let full = || SocketFault::new(libc::EMFILE, "there is no room for another descriptor");
    talk.passed.ok_or_else(full)
}
