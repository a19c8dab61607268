//! Clients that wait for another one in mailboxes, each under a number that works once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use d2tp_driver::HostKey;
use tokio::io::{DuplexStream, duplex};
use tokio::sync::oneshot;

use crate::refusal::ProxRefusal;

/// The most clients that wait at once.
const MAILBOXES_MAX: usize = 1_024; // a guess
/// The most mailboxes in which one client waits.
const CLIENT_MAILBOXES_MAX: usize = 8; // a guess
/// Bytes between two that are not read yet.
pub(crate) const UNREAD_BYTES_MAX: usize = 4_096;
/// Numbers are below this while few wait, so that they are short to say.
const NUMBERS: u32 = 10_000;

/// Clients that wait for another one, by number.
#[derive(Debug, Default)]
pub(crate) struct MailboxTable {
    waiting: Mutex<BTreeMap<u32, WaitingClient>>,
}

#[derive(Debug)]
struct WaitingClient {
    client: HostKey,
    partner: oneshot::Sender<DuplexStream>,
}

/// A mailbox in which only its owner waits. Its number is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct OpenMailbox {
    table: Arc<MailboxTable>,
    pub(crate) number: u32,
    /// The partner, once it has come.
    pub(crate) partner: oneshot::Receiver<DuplexStream>,
}

impl Drop for OpenMailbox {
    fn drop(&mut self) {
        // Once a partner has come, the number may be another client's.
        self.partner.close();
        let mut waiting = self.table.waiting();
        if (waiting.get(&self.number)).is_some_and(|waiting| waiting.partner.is_closed()) {
            waiting.remove(&self.number);
        }
    }
}

impl MailboxTable {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<u32, WaitingClient>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a mailbox with a number that `draw` gives.
    pub(crate) fn open(
        self: &Arc<Self>,
        client: HostKey,
        draw: impl Fn() -> u32,
    ) -> Result<OpenMailbox, ProxRefusal> {
        let mut waiting = self.waiting();
        let own = waiting.values().filter(|other| other.client == client);
        if waiting.len() >= MAILBOXES_MAX || own.count() >= CLIENT_MAILBOXES_MAX {
            return Err(ProxRefusal::MailboxesFull);
        }
        // A tenth of the numbers is taken at most.
        let number = loop {
            let number = draw() % NUMBERS;
            if !waiting.contains_key(&number) {
                break number;
            }
        };
        let (sender, partner) = oneshot::channel();
        let one = WaitingClient {
            client,
            partner: sender,
        };
        waiting.insert(number, one);
        Ok(OpenMailbox {
            table: self.clone(),
            number,
            partner,
        })
    }

    /// Joins the client that waits in a mailbox, which is closed by that.
    pub(crate) fn join(&self, number: u32) -> Result<DuplexStream, ProxRefusal> {
        let waiting = self.waiting().remove(&number);
        let (own, other) = duplex(UNREAD_BYTES_MAX);
        let met = waiting.is_some_and(|waiting| waiting.partner.send(other).is_ok());
        met.then_some(own).ok_or(ProxRefusal::NoMailbox)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const ONE: HostKey = [1; 32];

    #[test]
    fn a_number_works_once_and_only_while_somebody_waits() {
        let table = Arc::new(MailboxTable::default());
        let mut open = table.open(ONE, || 4_271).unwrap();
        assert_eq!(open.number, 4_271);
        assert!(matches!(table.join(4_272), Err(ProxRefusal::NoMailbox)));
        let _one = table.join(4_271).unwrap();
        assert!(open.partner.try_recv().is_ok());
        assert!(matches!(table.join(4_271), Err(ProxRefusal::NoMailbox)));
        drop(table.open(ONE, || 4_271).unwrap());
        assert!(matches!(table.join(4_271), Err(ProxRefusal::NoMailbox)));
    }

    #[test]
    fn an_owner_that_leaves_late_does_not_close_the_next_ones_mailbox() {
        let table = Arc::new(MailboxTable::default());
        let first = table.open(ONE, || 7).unwrap();
        let _partner = table.join(7).unwrap();
        let _second = table.open(ONE, || 7).unwrap();
        drop(first);
        assert!(table.join(7).is_ok());
    }

    #[test]
    fn a_number_that_is_taken_is_drawn_again_and_a_client_has_only_some() {
        let table = Arc::new(MailboxTable::default());
        let drawn = Cell::new(0);
        let draw = || {
            drawn.set(drawn.get() + 1);
            drawn.get() / 2
        };
        let mut open = Vec::new();
        for _ in 0..CLIENT_MAILBOXES_MAX {
            open.push(table.open(ONE, draw).unwrap());
        }
        assert_eq!(open[3].number, 3);
        let refused = table.open(ONE, draw).unwrap_err();
        assert_eq!(refused, ProxRefusal::MailboxesFull);
        assert!(table.open([2; 32], draw).is_ok());
        drop(open);
        assert!(table.open(ONE, draw).is_ok());
    }
}
