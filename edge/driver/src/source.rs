//! Sources that flows send from, and the type of host keys.

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;

/// A host's static public key (X25519), which identifies the host.
pub type HostKey = [u8; 32];

/// Bytes that can be read again at any offset: a file, a cached object, even one that still grows.
///
/// A flow that sends from a source needs no send buffer while it hibernates; when it resumes, it
/// reads from the offset that the peer has reached.
pub trait SendSource: Send + Sync + 'static {
    /// Reads at most `max` bytes at `offset`.
    ///
    /// `Ready(Ok(empty))` is the end. `Pending` means that the bytes at `offset` do not exist
    /// *yet*; the waker is called when they do, when the end is known, or when the source fails. An
    /// error resets the flow, so that the peer never takes a part for the whole.
    fn poll_read_at(
        &self,
        cx: &mut Context<'_>,
        offset: u64,
        max: usize,
    ) -> Poll<io::Result<Bytes>>;
}
