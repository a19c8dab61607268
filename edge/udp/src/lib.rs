//! UDP sockets, one per link, in batches (GSO, GRO, ECN).
//!
//! A [`LinkSocket`] is bound to a local address and, where asked, to the network device behind
//! it, so that what is sent on it leaves by that link and no other. It sends one contiguous
//! buffer that the kernel cuts into equal datagrams (GSO) and receives runs of datagrams from one
//! sender joined in one buffer (GRO):
//!
//! ```text
//! try_send(contents = |d0|d1|d2|d3|e|, segment_size = len(d))  ──▶  5 datagrams, one system call
//! try_recv(batch)  ──▶  batch[0] = |d0|d1|d2|d3|e|, stride = len(d), from, dst_ip, ecn
//! ```
//!
//! Nothing here retries, queues or judges: an error of the system call reaches the caller, who
//! asks [`is_link_gone`] and [`is_too_big`] what it means. Don't-fragment is always set, so that
//! path-MTU discovery sees the truth.

mod batch;
mod bind;
mod socket;
mod socket_error;

pub use batch::{RECV_BATCH_DATAGRAMS_MAX, RECV_BUFFER_BYTES, ReceivedRun, RecvBatch};
pub use bind::{BindError, BindOptions, DeviceConfinement, SOCKET_BUFFER_BYTES};
pub use quinn_udp::EcnCodepoint as Ecn;
pub use socket::{LinkSocket, UdpTransmit};
pub use socket_error::{is_link_gone, is_socket_unfit, is_too_big};
