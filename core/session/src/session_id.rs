//! The ids by which an endpoint names its sessions.

/// The id of a session of an endpoint. An id is never used again for another session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionId {
    /// The place in the endpoint's table.
    pub(crate) index: u32,
    /// The number of sessions that the endpoint had before this one.
    pub(crate) serial: u32,
}
