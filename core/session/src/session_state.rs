//! The role and state of a session, and changes of the connection ids that lead to it.

use d2tp_wire::{Cid, PathId};

/// Which end began the session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The end that began the session: the device.
    Initiator,
    /// The other end: the server.
    Responder,
}

/// The state of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SessionState {
    /// The session sends nothing, because it has no path or none answers.
    Suspended,
    /// A handshake is under way.
    Handshaking,
    /// The session has keys and a working path.
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
