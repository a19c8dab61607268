//! Who began a session, where it is in its life, and what changes about the connection ids that lead to it.

use d2tp_wire::{Cid, PathId};

/// Who began the session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The device.
    Initiator,
    /// The server.
    Responder,
}

/// The state of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SessionState {
    /// The session has no path, or none answers: it sends nothing.
    Suspended,
    /// A handshake is under way.
    Handshaking,
    /// The session works.
    Established,
    /// The session is over.
    Closed,
}

/// A change to the connection ids that lead to this session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CidChange {
    Add {
        cid: Cid,
        path: PathId,
        generation: u32,
    },
    Remove(Cid),
}
