//! Why an operator's change of clients was not made, in words for the operator.

use std::io;

use d2tp_driver::JournalError;

use crate::refusal::ProxRefusal;

/// Why the operator's change was not made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Each variant's message is its documentation.
pub enum ClientStoreError {
    #[error("there is no client {0}; `cedos prox client list` shows them")]
    NoSuchClient(String),
    #[error("{0} clients begin with {1}; write more of the key, or the name")]
    Ambiguous(usize, String),
    #[error("there is a client {0} already; choose another name")]
    NameTaken(String),
    #[error("a client's name has 1 to 64 printable characters, and no space at either end")]
    BadName,
    #[error("{0} is the name of a device, which needs no links; choose another one for the app")]
    NotOfLinks(String),
    #[error("this client was named by --allow-client: start the proxy without that to remove it")]
    NamedAtStart,
    #[error(
        "this client was named by --allow-client, so it has the limits of all clients; invite it instead to give it its own"
    )]
    NoOwnLimits,
    #[error("this proxy has as many clients as it can keep; remove some first")]
    ClientsFull,
    #[error("no open invitation is called {0}; `cedos prox invite --list` shows those there are")]
    NoSuchInvitation(String),
    #[error("{0} open invitations are called {1}; name one by its number")]
    AmbiguousInvitation(usize, String),
    #[error(
        "{0} invitations are open, which is the limit; wait until some are used or expire, or withdraw some"
    )]
    InvitationsFull(usize),
    #[error("this proxy has no --state-dir, so it cannot keep clients; start it with one")]
    NoStateDirectory,
    #[error("cannot write {path}: {cause}")]
    Unwritable { path: String, cause: io::Error },
    #[error(
        "{0}; once it answers, see in `cedos prox client list` what has changed, and try again"
    )]
    StoreUnreachable(JournalError),
    #[error("other nodes change clients all the time; try again")]
    Contended,
}

impl From<ClientStoreError> for ProxRefusal {
    fn from(error: ClientStoreError) -> ProxRefusal {
        tracing::error!(%error, "a client was not enrolled");
        ProxRefusal::StoreFailed
    }
}
