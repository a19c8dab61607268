//! The functions of `d2tp.h`. Each behaves like the BSD function of that name. Calls on other
//! descriptors are passed to the kernel unchanged, so that programs may use one set of calls for
//! all descriptors.
//!
//! | file | |
//! |---|---|
//! | `open` | socket, bind, listen, accept, connect, shutdown, close |
//! | `transfer` | send, recv, sendmsg, recvmsg, read, write, flush |
//! | `datagram` | the same for datagram sockets |
//! | `names` | getsockname, getpeername, getaddrinfo |
//! | `sockopt` | getsockopt, setsockopt, fcntl |
//! | `wait` | select, poll, network_changed, dlock |

mod datagram;
mod names;
mod open;
mod sockopt;
mod transfer;
mod wait;

pub use names::*;
pub use open::*;
pub use sockopt::*;
pub use transfer::*;
pub use wait::*;

use libc::{c_int, ssize_t};

use crate::errno::{CallResult, Errno};

/// The result of a call as C expects it. A panic must not unwind into C's frames.
fn answer(call: impl FnOnce() -> CallResult<c_int>) -> c_int {
    let call = std::panic::AssertUnwindSafe(call);
    let said = std::panic::catch_unwind(call).unwrap_or(Err(Errno(libc::EIO)));
    said.unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}

/// The result of a call that counts bytes, as C expects it.
fn counted(call: impl FnOnce() -> CallResult<ssize_t>) -> ssize_t {
    let call = std::panic::AssertUnwindSafe(call);
    let said = std::panic::catch_unwind(call).unwrap_or(Err(Errno(libc::EIO)));
    said.unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}
