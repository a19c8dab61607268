//! Received datagrams of a session that were not read yet.

use std::collections::{BTreeMap, VecDeque};
use std::task::Waker;

use bytes::Bytes;
use d2tp_session::{MemoryAccount, MemoryCharge};

/// The most received datagrams of a session that wait to be read. When there are more, the oldest
/// is dropped and counted. Two or three suffice for a reader that keeps up; more only delays
/// reading.
pub const DATAGRAMS_UNREAD_MAX: usize = 256;

/// A datagram from the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The context number that the peer gave; 0 unless the two ends use contexts.
    pub context: u64,
    /// The payload.
    pub bytes: Bytes,
}

/// Datagrams of one session that were not read yet.
#[derive(Debug)]
pub(crate) struct DatagramInbox {
    pub(crate) unread: VecDeque<Datagram>,
    /// How many datagrams wait at most.
    unread_max: usize,
    pub(crate) unread_dropped: u64,
    pub(crate) reader: Option<Waker>,
    /// Inboxes of the contexts that have their own reader.
    pub(crate) context_inboxes: BTreeMap<u64, DatagramInbox>,
    account: MemoryAccount,
    charge: MemoryCharge,
}

/// The memory that a datagram takes beside its payload: its entry in the list, which doubles as it
/// grows, and its allocation.
const DATAGRAM_OVERHEAD_BYTES: u64 = 128;

impl Default for DatagramInbox {
    fn default() -> DatagramInbox {
        DatagramInbox {
            unread: VecDeque::new(),
            unread_max: DATAGRAMS_UNREAD_MAX,
            unread_dropped: 0,
            reader: None,
            context_inboxes: BTreeMap::new(),
            account: MemoryAccount::default(),
            charge: MemoryCharge::default(),
        }
    }
}

impl DatagramInbox {
    /// An empty inbox whose datagrams are charged to `account`.
    pub(crate) fn new(account: MemoryAccount) -> DatagramInbox {
        DatagramInbox {
            charge: account.charge(),
            account,
            ..DatagramInbox::default()
        }
    }

    /// The oldest unread datagram.
    pub(crate) fn pop(&mut self) -> Option<Datagram> {
        let datagram = self.unread.pop_front()?;
        self.release(&datagram);
        Some(datagram)
    }

    fn release(&mut self, datagram: &Datagram) {
        let cost = datagram.bytes.len() as u64 + DATAGRAM_OVERHEAD_BYTES;
        self.charge.resize(self.charge.bytes().saturating_sub(cost));
    }

    pub(crate) fn push(&mut self, context: u64, bytes: Bytes) {
        if let Some(own) = self.context_inboxes.get_mut(&context) {
            return own.push(context, bytes);
        }
        if self.unread.len() >= self.unread_max {
            self.pop();
            self.unread_dropped += 1;
        }
        let cost = bytes.len() as u64 + DATAGRAM_OVERHEAD_BYTES;
        if !self.charge.try_resize(self.charge.bytes() + cost) {
            self.unread_dropped += 1;
            return;
        }
        self.unread.push_back(Datagram { context, bytes });
        self.wake();
    }

    /// Gives a context its own inbox for at most `unread_max` datagrams, with those that have already arrived. Returns false
    /// if it has one.
    pub(crate) fn separate_context(&mut self, context: u64, unread_max: usize) -> bool {
        if self.context_inboxes.contains_key(&context) {
            return false;
        }
        let all = std::mem::take(&mut self.unread);
        let (theirs, rest): (VecDeque<_>, _) = all.into_iter().partition(|d| d.context == context);
        self.unread = rest;
        let mut own = DatagramInbox::new(self.account.clone());
        own.unread_max = unread_max;
        for datagram in theirs {
            self.release(&datagram);
            own.push(context, datagram.bytes);
        }
        self.context_inboxes.insert(context, own);
        true
    }

    pub(crate) fn wake(&mut self) {
        if let Some(waker) = self.reader.take() {
            waker.wake();
        }
        for own in self.context_inboxes.values_mut() {
            own.wake();
        }
    }
}
