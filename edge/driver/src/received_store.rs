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

use d2tp_session::{FlowId, SessionId};

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

impl DriverCore {
    /// Stores what arrived of each flow that has a store. What is acknowledged after that is kept.
    pub(crate) fn store_received(&mut self) {
        let DriverCore { core, stored, .. } = self;
        for ((session, flow), stored) in stored {
            let Some(session) = core.session(*session) else {
                continue;
            };
            let Some((to, is_end)) = session.arrived_to(*flow) else {
                continue;
            };
            if to <= stored.kept_to && is_end == stored.is_ended {
                continue;
            }
            session.visit_unread(*flow, stored.kept_to, |offset, bytes| {
                stored.store.keep(offset, bytes);
            });
            stored.kept_to = stored.kept_to.max(to);
            stored.is_ended |= is_end;
            stored.store.commit(stored.kept_to, stored.is_ended);
        }
    }
}
