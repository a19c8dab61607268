//! How many bytes the kernel may hold for a connection, and how many it holds.
//!
//! ```text
//!  peer ──▶ receive buffer: unread, and behind a gap ──▶ program ──▶ send buffer: unsent, and in flight ──▶ peer
//!           the kernel enlarges it as the program reads              as the peer acknowledges
//! ```
//!
//! A buffer whose limit a program sets is no longer enlarged by the kernel. The limit that can be set has a
//! maximum of its own (twice `net.core.rmem_max`, `net.core.wmem_max`), which may be less than what the kernel chose.

use std::io;
#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd;
use std::os::fd::BorrowedFd;

/// The words of SO_MEMINFO that are read (linux/sock_diag.h): SK_MEMINFO_RMEM_ALLOC, _RCVBUF, _WMEM_ALLOC, _SNDBUF,
/// _FWD_ALLOC, _WMEM_QUEUED.
#[cfg(target_os = "linux")]
const MEMINFO_WORDS: usize = 6;

/// The memory of a connection in the kernel, in bytes as the kernel counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelBuffers {
    /// The limit of what is received and not read.
    pub receive_max: u64,
    /// The limit of what is written and not acknowledged.
    pub send_max: u64,
    /// Bytes that are received and not read.
    pub received: u64,
    /// Bytes that are written and not acknowledged.
    pub sent: u64,
}

impl KernelBuffers {
    /// Reads how full a socket's kernel buffers are, and how large they may be.
    ///
    /// # Errors
    /// It is not a socket.
    #[cfg(target_os = "linux")]
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<KernelBuffers> {
        let mut words = [0u32; MEMINFO_WORDS];
        let mut length = size_of_val(&words) as libc::socklen_t;
        // SAFETY: the pointers are to a live buffer and its length.
        let failed = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MEMINFO,
                words.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
        let [received, receive_max, _, send_max, _, sent] = words.map(u64::from);
        Ok(KernelBuffers {
            receive_max,
            send_max,
            received,
            sent,
        })
    }

    /// Fails: this system does not report the buffers of sockets.
    ///
    /// # Errors
    /// There are none.
    #[cfg(not(target_os = "linux"))]
    pub fn of(_socket: BorrowedFd<'_>) -> io::Result<KernelBuffers> {
        Ok(KernelBuffers::default())
    }

    /// The most that the kernel holds with these limits.
    pub fn max(&self) -> u64 {
        self.receive_max + self.send_max
    }
}
