//! What the operator sees of a client, and changes: its limits, its flows, its bytes.

use d2tp_driver::HostKey;

use crate::client_limits::{ClientLimits, EffectiveLimits};
use crate::client_records::EnrolledClient;
use crate::client_store_error::ClientStoreError;
use crate::client_traffic::MonthBytes;
use crate::prox::Prox;

/// What one client may do, and what it does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientUse {
    /// The limits that hold for it.
    pub limits: EffectiveLimits,
    /// The flows of the client now, those that are hibernated included; where nodes share a store, of this node.
    pub flows: u32,
    /// The flows of the client at other nodes that share a store with this one.
    pub flows_elsewhere: u32,
    /// Bytes of copies and uploads that the proxy holds for it.
    pub pinned_bytes: u64,
    /// What it has transferred in this calendar month (UTC), at all nodes that share a store.
    pub month: MonthBytes,
}

impl Prox {
    /// Changes the limits of a client: those that `newer` names, or all to those of all clients if it is none. They hold
    /// at once, for running flows too; what is beyond a smaller one stays. Returns the client as it is now.
    ///
    /// # Errors
    /// There is no such client, or the change cannot be written down.
    pub fn set_client_limits(
        &self,
        text: &str,
        newer: Option<&ClientLimits>,
    ) -> Result<EnrolledClient, ClientStoreError> {
        let client = self.clients.set_limits(text, newer)?;
        self.apply_client_limits(client.key, client.limits);
        Ok(client)
    }

    /// Applies the limits of a client from now on.
    pub(crate) fn apply_client_limits(&self, client: HostKey, own: ClientLimits) {
        self.limits.set(client, own);
        self.traffic.apply_limits(Some(&client));
        self.ledger.on_limits_changed();
    }

    /// What a client may do and does.
    pub fn client_usage(&self, client: &HostKey) -> ClientUse {
        ClientUse {
            limits: self.limits.of(client),
            flows: self.ledger.flows_of(client),
            flows_elsewhere: self
                .usage
                .as_ref()
                .map_or(0, |usage| usage.flows_elsewhere(client)),
            pinned_bytes: self.ledger.pinned_by(*client),
            month: self.traffic.month(client),
        }
    }
}
