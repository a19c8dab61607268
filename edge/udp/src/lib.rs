//! UDP sockets, one per link, in batches (GSO, GRO, ECN).
//!
//! A [`LinkSocket`] is bound to a local address and, if requested, to its network device, so that
//! its packets leave only by that link. It sends one contiguous buffer that the kernel cuts into
//! equal datagrams (GSO), and receives runs of datagrams from one sender joined in one buffer
//! (GRO):
//!
//! ```text
//! try_send(contents = |d0|d1|d2|d3|e|, segment_size = len(d))  ──▶  5 datagrams, one system call
//! try_recv(batch)  ──▶  batch[0] = |d0|d1|d2|d3|e|, stride = len(d), from, dst_ip, ecn
//! ```
//!
//! This crate does not retry, queue or interpret: an error of the system call is returned, and
//! [`is_link_gone`] and [`is_too_big`] classify it. Don't-fragment is always set, as path MTU
//! discovery needs it.

mod batch;
mod bind;
mod socket;
mod socket_error;
#[cfg(target_os = "linux")]
mod worker_steering;

pub use batch::{RECV_BATCH_DATAGRAMS_MAX, RECV_BUFFER_BYTES, ReceivedRun, RecvBatch};
pub use bind::{
    BindError, BindOptions, DeviceConfinement, SOCKET_BUFFER_BYTES, bind_tcp, bind_udp,
};
pub use quinn_udp::EcnCodepoint as Ecn;
pub use socket::{LinkSocket, UdpTransmit};
pub use socket_error::{is_link_gone, is_socket_unfit, is_too_big};
#[cfg(target_os = "linux")]
pub use worker_steering::{WORKERS_MAX, steer_to_workers};
