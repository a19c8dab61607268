//! Passes descriptors between processes, with a few bytes (unix(7), SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use tokio::io::unix::AsyncFd;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// The most bytes beside the descriptors.
const BYTES_MAX: usize = 64 * 1024;

/// The most descriptors in one message.
const PASSED_MAX: usize = 12;

/// Registers a descriptor with the reactor, to wait for its readiness.
pub(crate) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd stays the same open descriptor as long as it exists.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}

/// Sends bytes and descriptors.
pub(crate) fn give(channel: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let fds: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
    let slices = [IoSlice::new(bytes)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(channel.as_raw_fd(), &slices, rights, flags, None)?;
    Ok(())
}

/// Receives bytes and descriptors. No bytes mean that the other end is closed.
pub(crate) fn take(channel: &OwnedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; BYTES_MAX];
    let mut space = nix::cmsg_space!([libc::c_int; PASSED_MAX]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(channel.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(passed) = control {
            // SAFETY: the kernel has just created them for this process.
            fds.extend(
                passed
                    .into_iter()
                    .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
            );
        }
    }
    let n = message.bytes;
    bytes.truncate(n);
    Ok((bytes, fds))
}
