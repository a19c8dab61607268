//! Sockets for programs that ask a name server themselves.
//!
//! A resolver takes an answer only from the address that it asked, and a stub at another address cannot
//! pretend to be it. So the program's socket is replaced by one of another network namespace. There every
//! address is the loopback's, and a name server of ours listens under all of them:
//!
//! ```text
//!  program ── connect(fd, 192.0.2.53:53) ──▶ held
//!                                            fd becomes a socket of the other namespace
//!          ── connect(fd, 192.0.2.53:53) ──▶ carried out there
//!          ── send, sendmsg, recvfrom … ───▶ our name server, as 192.0.2.53
//! ```
//!
//! The kernel does the rest: `recvfrom` and `getpeername` say the address that was asked, and what the
//! program sends to any other address reaches nobody. The namespace is created when the first program asks.
//! A process that was forked before this one had threads stays in it and creates the sockets.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use socket2::{Domain, SockRef, Type};
use tokio::sync::OnceCell;

use crate::dns;
use crate::pair::{NamespaceSockets, SocketRequest};
use crate::stand_ins::NameStandIns;

/// asm-generic/socket.h: SO_NETNS_COOKIE, since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The network namespace in which every address is our name server's.
pub struct LookupNamespace {
    sockets: NamespaceSockets,
    names: Arc<NameStandIns>,
    served: OnceCell<()>,
    /// The number of this process's own namespace.
    here: Option<u64>,
}

impl LookupNamespace {
    /// Over the channel to the process that will enter it. Must be called on a runtime.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(channel: OwnedFd, names: Arc<NameStandIns>) -> io::Result<LookupNamespace> {
        let own = socket2::Socket::new(Domain::UNIX, Type::DGRAM, None)?;
        Ok(LookupNamespace {
            sockets: NamespaceSockets::new(channel)?,
            names,
            served: OnceCell::new(),
            here: namespace_of(&own.into()),
        })
    }

    /// Whether a socket is of another namespace than this process, so that it was replaced before.
    pub fn contains(&self, socket: &OwnedFd) -> bool {
        self.here.is_some() && namespace_of(socket) != self.here
    }

    /// A socket there, of this family and type.
    ///
    /// # Errors
    /// This system has no such namespace for us, or cannot tell its sockets from others.
    pub async fn socket(&self, domain: Domain, kind: Type) -> io::Result<OwnedFd> {
        if self.here.is_none() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.served.get_or_try_init(|| self.serve()).await?;
        let request = match (domain, kind) {
            (Domain::IPV4, Type::DGRAM) => SocketRequest::Udp4,
            (Domain::IPV6, Type::DGRAM) => SocketRequest::Udp6,
            (Domain::IPV4, Type::STREAM) => SocketRequest::Tcp4,
            (Domain::IPV6, Type::STREAM) => SocketRequest::Tcp6,
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        let mut made = self.sockets.request(request).await?;
        made.pop().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// A socket there in place of a program's own, which waits or not as that does.
    ///
    /// # Errors
    /// As [`LookupNamespace::socket`].
    pub async fn replacement(&self, of: &OwnedFd) -> io::Result<OwnedFd> {
        let (domain, kind, waits) = properties(of)?;
        let made = self.socket(domain, kind).await?;
        SockRef::from(&made).set_nonblocking(!waits)?;
        Ok(made)
    }

    async fn serve(&self) -> io::Result<()> {
        let sockets = self.sockets.request(SocketRequest::NameServer).await?;
        if sockets.is_empty() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        dns::serve(sockets, &self.names)
    }
}

/// A socket of this process's namespace in place of a program's own.
///
/// # Errors
/// What the system says.
pub fn host_replacement(of: &OwnedFd) -> io::Result<OwnedFd> {
    let (domain, kind, waits) = properties(of)?;
    let made = socket2::Socket::new(domain, kind, None)?;
    made.set_nonblocking(!waits)?;
    Ok(made.into())
}

fn properties(of: &OwnedFd) -> io::Result<(Domain, Type, bool)> {
    let of = SockRef::from(of);
    Ok((of.domain()?, of.r#type()?, !of.nonblocking()?))
}

/// The number of a socket's network namespace; none on kernels that do not say it.
fn namespace_of(socket: &OwnedFd) -> Option<u64> {
    let mut cookie = 0_u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: a place of the size that is said.
    let told = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    (told == 0).then_some(cookie)
}
