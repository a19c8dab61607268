//! Sockets for programs that query a name server themselves.
//!
//! A resolver takes an answer only from the address that it asked, and a stub at another address
//! cannot pretend to be it. So the program's socket is replaced by one of another network
//! namespace. There every address belongs to the loopback, and our name server listens at all of
//! them:
//!
//! ```text
//!  program ── connect(fd, 192.0.2.53:53) ──▶ held
//!                                            fd becomes a socket of the other namespace
//!          ── connect(fd, 192.0.2.53:53) ──▶ carried out there
//!          ── send, sendmsg, recvfrom … ───▶ our name server, as 192.0.2.53
//! ```
//!
//! The kernel does the rest: `recvfrom` and `getpeername` return the address that was asked, and
//! packets to other ports reach no process. The namespace is created at the first query. A process
//! that was forked before this one had threads stays in it and creates the sockets.

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

/// A network namespace in which our name server has every address.
pub struct LookupNamespace {
    sockets: NamespaceSockets,
    names: Arc<NameStandIns>,
    served: OnceCell<()>,
    /// The identifier of this process's own namespace.
    here: Option<u64>,
}

impl LookupNamespace {
    /// Uses the channel to the process that will enter the namespace. Must be called on a tokio
    /// runtime.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(channel: OwnedFd, names: Arc<NameStandIns>) -> io::Result<LookupNamespace> {
        let own = socket2::Socket::new(Domain::UNIX, Type::DGRAM, None)?;
        Ok(LookupNamespace {
            sockets: NamespaceSockets::new(channel)?,
            names,
            served: OnceCell::new(),
            here: namespace_of(&own.into()),
        })
    }

    /// Whether a socket belongs to another namespace than this process, so that it was already
    /// replaced.
    pub fn contains(&self, socket: &OwnedFd) -> bool {
        self.here.is_some() && namespace_of(socket) != self.here
    }

    /// Creates a socket in the namespace, of this family and type.
    ///
    /// # Errors
    /// This system does not permit such a namespace, or cannot distinguish its sockets from others.
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

    /// Creates a socket in the namespace to replace a program's own; it blocks if that does.
    ///
    /// # Errors
    /// The same as those of [`LookupNamespace::socket`].
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

/// Creates a socket in this process's namespace to replace a program's own.
///
/// # Errors
/// The system's error.
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

/// The identifier of a socket's network namespace; `None` on kernels that do not report it.
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
