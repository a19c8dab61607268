//! Bytes of a flow that a store keeps before the peer learns that they arrived.
//!
//! ```text
//!  datagrams ─▶ core ─▶ in order ─▶ ReceivedStore ─▶ then ACK, or the application reads
//! ```
//!
//! So nothing that the peer let go is lost with this process: the next one claims the flow from the end of the store on
//! ([`crate::Device::resume_lease`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use d2tp_session::{Endpoint, FlowId, SessionId};

use crate::driver_core::DriverCore;

/// Keeps the bytes of a flow beyond this process. It is called with the core locked, so it must not call the driver.
pub trait ReceivedStore: Send + Sync {
    /// Keeps bytes from this offset of the flow on. Offsets ascend without a gap.
    fn keep(&self, offset: u64, bytes: &[u8]);
    /// Records that everything below `offset` is kept, or was read before, and whether the peer's direction ends there.
    fn commit(&self, offset: u64, is_end: bool);
}

/// The stores of a driver's flows.
pub(crate) type StoredFlows = BTreeMap<(SessionId, FlowId), StoredFlow>;

/// A flow with a store, and how far the store has it.
pub(crate) struct StoredFlow {
    store: Arc<dyn ReceivedStore>,
    kept_to: u64,
    is_ended: bool,
}

impl StoredFlow {
    /// A store that is to begin at this offset.
    pub(crate) fn new(store: Arc<dyn ReceivedStore>, from: u64) -> StoredFlow {
        // The application has what is below.
        store.commit(from, false);
        StoredFlow {
            store,
            kept_to: from,
            is_ended: false,
        }
    }
}

impl StoredFlow {
    /// Stores what arrived of the flow and is not stored.
    fn catch_up(&mut self, core: &Endpoint, (session, flow): (SessionId, FlowId)) {
        let Some(session) = core.session(session) else {
            return;
        };
        let Some((to, is_end)) = session.arrived_to(flow) else {
            return;
        };
        if to <= self.kept_to && is_end == self.is_ended {
            return;
        }
        session.visit_unread(flow, self.kept_to, |offset, bytes| {
            self.store.keep(offset, bytes);
        });
        self.kept_to = self.kept_to.max(to);
        self.is_ended |= is_end;
        self.store.commit(self.kept_to, self.is_ended);
    }
}

impl DriverCore {
    /// Stores what arrived of each flow that has a store. What is acknowledged after that is kept.
    pub(crate) fn store_received(&mut self) {
        for (flow, stored) in &mut self.stored {
            stored.catch_up(&self.core, *flow);
        }
    }

    /// Stores what arrived of one flow, if it has a store: bytes that were read are not found any more.
    pub(crate) fn store_received_of(&mut self, flow: (SessionId, FlowId)) {
        if let Some(stored) = self.stored.get_mut(&flow) {
            stored.catch_up(&self.core, flow);
        }
    }
}
