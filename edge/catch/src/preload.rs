//! The requests of preload.c and exec.c: one SOCK_SEQPACKET connection each, to an abstract
//! address.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind, getsockopt,
    listen, send, socket,
};
use tokio::io::unix::AsyncFd;

use crate::caught_call::{CallAnswer, CallVerdict, CaughtCall, UncaughtReason, address};
use crate::children::descends_from_here;
use crate::fd_passing;
use crate::notify::{self, SeccompSupervisor};
use crate::stand_ins::NameStandIns;

/// The library for LD_PRELOAD, as file content.
pub const PRELOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

/// The environment variable with the address of this process's socket.
pub const VARIABLE: &str = "CEDOS_RUN";

/// The code by which preload.c is told to carry out the call itself; preload.c has the same value.
const GO_ON: i32 = -1;

/// The delay after a request could not be accepted, in which descriptors may become free.
const ACCEPT_AGAIN: std::time::Duration = std::time::Duration::from_millis(20); // a guess

/// The most requests that wait to be accepted.
const BACKLOG: i32 = 128;

/// Binds an abstract address, in the network namespace of this thread.
pub(crate) fn bind_abstract(name: &[u8]) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let place = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    bind(place.as_raw_fd(), &UnixAddr::new_abstract(name)?)?;
    listen(&place, Backlog::new(BACKLOG)?)?;
    Ok(place)
}

/// Receives the requests.
pub struct PreloadListener {
    socket: AsyncFd<OwnedFd>,
    names: Arc<NameStandIns>,
    /// The port of our name server on 127.0.0.1.
    dns_port: u16,
    /// If other users can reach the socket: the only user whose processes may send requests, beside
    /// descendants of this process.
    only: Option<u32>,
}

impl PreloadListener {
    pub(crate) fn new(
        place: OwnedFd,
        names: Arc<NameStandIns>,
        dns_port: u16,
        only: Option<u32>,
    ) -> io::Result<PreloadListener> {
        Ok(PreloadListener {
            socket: fd_passing::watch(place)?,
            names,
            dns_port,
            only,
        })
    }

    /// The next call. Requests for names are answered meanwhile.
    ///
    /// # Errors
    /// The socket failed.
    pub async fn next(&self) -> io::Result<CaughtCall> {
        loop {
            let mut ready = self.socket.readable().await?;
            let flags = SockFlag::SOCK_CLOEXEC;
            let took = ready.try_io(|place| {
                let fd = accept4(place.as_raw_fd(), flags)?;
                // SAFETY: the kernel has just created it for this process.
                Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) })
            });
            let question: OwnedFd = match took {
                Ok(Ok(took)) => took,
                // No descriptor is free, so the program waits in the kernel meanwhile.
                Ok(Err(error)) if is_passing(&error) => {
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                    continue;
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => continue,
            };
            // A program sends its request together with the connection; otherwise it is not waited
            // for.
            if let Some(caught) = self.hear(question).await {
                return Ok(caught);
            }
        }
    }

    async fn hear(&self, question: OwnedFd) -> Option<CaughtCall> {
        if let Some(only) = self.only {
            let who = getsockopt(&question, PeerCredentials).ok()?;
            // A program may have changed its user, as apt's downloads do.
            if who.uid() != only && !descends_from_here(who.pid()) {
                tracing::warn!(pid = who.pid(), "refused a process of another user");
                return None;
            }
        }
        socket2::SockRef::from(&question)
            .set_nonblocking(true)
            .ok()?;
        let question = fd_passing::watch(question).ok()?;
        let read = async {
            loop {
                let mut ready = question.readable().await?;
                if let Ok(took) = ready.try_io(|question| fd_passing::take(question.get_ref())) {
                    return took;
                }
            }
        };
        let (bytes, mut fds) = tokio::time::timeout(PATIENCE, read).await.ok()?.ok()?;
        let question = question.into_inner();
        let (what, said) = bytes.split_first()?;
        match what {
            b'n' => {
                let (family, name) = said.split_first()?;
                let name = std::str::from_utf8(name).ok()?;
                let ip = match family {
                    b'6' => self.names.stand_in_v6(name).map(|ip| ip.to_string()),
                    _ => self.names.stand_in(name).map(|ip| ip.to_string()),
                };
                match ip {
                    Some(ip) => answer(&question, CallVerdict::Done, ip.as_bytes()),
                    None => answer(&question, CallVerdict::Failed(libc::EINVAL), b""),
                }
                None
            }
            b'r' => {
                let name = address(said).map(|at| self.names.name_of(at.ip()));
                match name {
                    Some(Ok(Some(name))) => answer(&question, CallVerdict::Done, name.as_bytes()),
                    _ => answer(&question, CallVerdict::Failed(libc::ENOENT), b""),
                }
                None
            }
            b'c' => {
                let answer = CallAnswer::to_question(question);
                let Some(to) = address(said) else {
                    answer.give(CallVerdict::Continue);
                    return None;
                };
                let socket = fds.pop()?;
                Some(CaughtCall::Connect { socket, to, answer })
            }
            b's' => {
                let answer = CallAnswer::to_question(question);
                let Some(to) = address(said) else {
                    answer.give(CallVerdict::Continue);
                    return None;
                };
                let socket = fds.pop()?;
                Some(CaughtCall::Send { socket, to, answer })
            }
            b'd' => {
                answer(&question, CallVerdict::Done, &self.dns_port.to_ne_bytes());
                None
            }
            b'l' => Some(CaughtCall::Listen {
                socket: fds.pop()?,
                answer: CallAnswer::to_question(question),
            }),
            b'f' => {
                answer(&question, CallVerdict::Done, &notify::filter_bytes());
                None
            }
            b'h' => {
                let answer = CallAnswer::to_question(question);
                match SeccompSupervisor::of(fds.pop()?) {
                    Ok(supervisor) => Some(CaughtCall::Supervised { supervisor, answer }),
                    Err(error) => {
                        answer.give(CallVerdict::of(&error));
                        None
                    }
                }
            }
            b'u' => {
                let (because, said) = said.split_first()?;
                let (errno, path) = said.split_first_chunk()?;
                let error = io::Error::from_raw_os_error(i32::from_ne_bytes(*errno));
                // The same values as in exec.c.
                let because = match because {
                    b'p' => UncaughtReason::Privileged,
                    b'a' => UncaughtReason::Foreign,
                    b'h' => UncaughtReason::Unheard(error),
                    _ => UncaughtReason::System(error),
                };
                Some(CaughtCall::Unsupervised {
                    program: String::from_utf8_lossy(path).into_owned(),
                    because,
                    answer: CallAnswer::to_question(question),
                })
            }
            _ => None,
        }
    }
}

/// Whether a request cannot be accepted now, but can be later.
fn is_passing(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    matches!(
        errno,
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS | libc::EINTR)
    )
}

/// How long a request may follow its connection.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(1); // a guess

/// Answers a request.
pub(crate) fn answer(question: &OwnedFd, verdict: CallVerdict, text: &[u8]) {
    let number: i32 = match verdict {
        CallVerdict::Continue => GO_ON,
        CallVerdict::Done => 0,
        CallVerdict::Failed(errno) => errno,
    };
    let mut said = number.to_ne_bytes().to_vec();
    said.extend(text);
    let _ = send(question.as_raw_fd(), &said, MsgFlags::MSG_NOSIGNAL);
}

/// Answers a request with a socket that replaces the program's own.
pub(crate) fn answer_with_socket(question: &OwnedFd, socket: &OwnedFd) {
    let _ = fd_passing::give(question, &GO_ON.to_ne_bytes(), &[socket.as_fd()]);
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{connect, recv};

    use super::*;

    /// The filter of the capture mode `notify` and the one that exec.c requests are equal.
    #[test]
    fn the_filter_that_is_asked_for_is_the_one_that_is_installed_here() {
        let name = format!("cedos-test-filter-{}", std::process::id());
        let at = UnixAddr::new_abstract(name.as_bytes()).unwrap();
        let ask = move || {
            let flags = SockFlag::SOCK_CLOEXEC;
            let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
            connect(fd.as_raw_fd(), &at).unwrap();
            send(fd.as_raw_fd(), b"f", MsgFlags::MSG_NOSIGNAL).unwrap();
            let mut reply = vec![0; 4096];
            let n = recv(fd.as_raw_fd(), &mut reply, MsgFlags::empty()).unwrap();
            reply.truncate(n);
            reply
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let reply = runtime.unwrap().block_on(async {
            let asked = PreloadListener::new(
                bind_abstract(name.as_bytes()).unwrap(),
                Arc::default(),
                0,
                None,
            )
            .unwrap();
            tokio::select! {
                _ = asked.next() => panic!("it is answered here"),
                reply = tokio::task::spawn_blocking(ask) => reply.unwrap(),
            }
        });
        let filter = notify::filter();
        let (number, bytes) = reply.split_at(size_of::<i32>());
        assert_eq!(number, 0_i32.to_ne_bytes());
        // SAFETY: plain numbers without padding, as the kernel reads them.
        let wanted = unsafe {
            let bytes = size_of_val(&filter[..]);
            std::slice::from_raw_parts(filter.as_ptr().cast::<u8>(), bytes)
        };
        assert_eq!(bytes, wanted);
        let room = include_str!("preload.h").lines().find_map(|line| {
            let room = line.strip_prefix("#define REPLY_TEXT_BYTES_MAX ")?;
            room.parse().ok()
        });
        assert!(room > Some(bytes.len()), "{room:?}");
        // exec.c has no filter of its own.
        let source = include_str!("exec.c");
        assert!(!source.contains("BPF_") && !source.contains("SECCOMP_RET"));
    }
}
