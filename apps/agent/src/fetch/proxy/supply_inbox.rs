//! The proxy's reports on the rates at which servers supply the flows of a session.

use std::sync::{Arc, Mutex, PoisonError};

use cedos_http::{SUPPLY_CONTEXT, SupplyReport};
use d2tp_driver::Connection;

use crate::fetch::boot_clock::BootInstant;

/// The last report of a session, with its moment.
#[derive(Debug, Default, Clone)]
pub(super) struct SupplyInbox {
    last: Arc<Mutex<Option<(SupplyReport, BootInstant)>>>,
}

impl SupplyInbox {
    /// Reads the reports of a session until it is over.
    pub(super) fn of_session(connection: &Connection) -> SupplyInbox {
        let inbox = SupplyInbox::default();
        if let Some(datagrams) = connection.context(SUPPLY_CONTEXT) {
            let last = Arc::downgrade(&inbox.last);
            tokio::spawn(async move {
                while let Some(bytes) = datagrams.recv().await {
                    let Some(last) = last.upgrade() else {
                        return;
                    };
                    if let Some(report) = SupplyReport::decode(&bytes) {
                        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                        *last = Some((report, BootInstant::now()));
                    }
                }
            });
        }
        inbox
    }

    /// The last report on a flow, with its moment.
    pub(super) fn last(&self, flow: u64) -> Option<(SupplyReport, BootInstant)> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.filter(|(report, _)| report.flow == flow)
    }
}
