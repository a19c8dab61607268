//! Who holds how much: flows per client, pinned bytes per client, bytes of memory and of disk.
//!
//! One lock, a few numbers; taken before the thing counted exists and given back when it is gone.

use std::collections::HashMap;
use std::sync::Arc;

use d2tp_driver::HostKey;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::config::ProxConfig;
use crate::flow_report::ProxFlowOutcome;
use crate::refusal::ProxRefusal;

/// Where pinned bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StorageTier {
    Memory,
    Disk,
}

/// The limit that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuotaExceeded {
    Memory,
    Disk,
    Client,
}

/// Counts of flows and bytes, and their limits.
#[derive(Debug)]
pub(crate) struct QuotaLedger {
    memory_max: u64,
    disk_max: u64,
    client_pinned_max: u64,
    client_flows_max: u32,
    flows_max: u32,
    used: Mutex<QuotaUsage>,
    left: Notify,
}

#[derive(Debug, Default)]
struct QuotaUsage {
    memory: u64,
    disk: u64,
    flows: u32,
    clients: HashMap<HostKey, ClientUsage>,
}

#[derive(Debug, Default)]
struct ClientUsage {
    flows: u32,
    pinned: u64,
}

impl QuotaLedger {
    pub(crate) fn new(config: &ProxConfig) -> QuotaLedger {
        QuotaLedger {
            memory_max: config.memory_quota_bytes,
            disk_max: config.disk_quota_bytes,
            client_pinned_max: config.client_pinned_bytes_max,
            client_flows_max: config.client_flows_max,
            flows_max: config.flows_max,
            used: Mutex::default(),
            left: Notify::new(),
        }
    }

    /// The most bytes that one object can have.
    pub(crate) fn object_max(&self) -> u64 {
        self.client_pinned_max
            .min(self.disk_max.max(self.memory_max))
    }

    /// The most bytes one client may pin.
    pub(crate) fn client_pinned_max(&self) -> u64 {
        self.client_pinned_max
    }

    /// Counts a flow until the permit is dropped.
    pub(crate) fn admit(
        self: &Arc<QuotaLedger>,
        client: HostKey,
    ) -> Result<FlowPermit, ProxRefusal> {
        let mut used = self.used.lock();
        if used.flows >= self.flows_max {
            return Err(ProxRefusal::FlowsFull(self.flows_max));
        }
        let mine = used.clients.get(&client).map_or(0, |client| client.flows);
        if mine >= self.client_flows_max {
            return Err(ProxRefusal::ClientFlowsFull(self.client_flows_max));
        }
        used.flows += 1;
        used.clients.entry(client).or_default().flows += 1;
        Ok(FlowPermit {
            ledger: self.clone(),
            client,
        })
    }

    /// Notified when a flow is no longer counted.
    pub(crate) fn flow_released(&self) -> Notified<'_> {
        self.left.notified()
    }

    /// Counts a hibernated flow that another process admitted.
    pub(crate) fn count_hibernated(&self, client: HostKey) {
        let mut used = self.used.lock();
        used.flows += 1;
        used.clients.entry(client).or_default().flows += 1;
    }

    /// The permit of a restored flow, which was counted while it was hibernated.
    pub(crate) fn readmit_hibernated(self: &Arc<QuotaLedger>, client: HostKey) -> FlowPermit {
        FlowPermit {
            ledger: self.clone(),
            client,
        }
    }

    /// Reserves `bytes` for a client.
    pub(crate) fn reserve(
        &self,
        client: HostKey,
        place: StorageTier,
        bytes: u64,
    ) -> Result<(), QuotaExceeded> {
        let mut used = self.used.lock();
        let pinned = used.clients.get(&client).map_or(0, |client| client.pinned);
        if pinned.saturating_add(bytes) > self.client_pinned_max {
            return Err(QuotaExceeded::Client);
        }
        used.occupy(self, place, bytes)?;
        used.clients.entry(client).or_default().pinned += bytes;
        Ok(())
    }

    /// Moves counted bytes from memory to disk.
    pub(crate) fn spill(&self, bytes: u64) -> Result<(), QuotaExceeded> {
        let mut used = self.used.lock();
        used.occupy(self, StorageTier::Disk, bytes)?;
        used.memory -= bytes;
        Ok(())
    }

    /// Reverts a [`QuotaLedger::spill`] that failed.
    pub(crate) fn unspill(&self, bytes: u64) {
        let mut used = self.used.lock();
        used.disk -= bytes;
        used.memory += bytes;
    }

    /// Releases what [`QuotaLedger::reserve`] reserved.
    pub(crate) fn release(&self, client: HostKey, place: StorageTier, bytes: u64) {
        let mut used = self.used.lock();
        match place {
            StorageTier::Memory => used.memory -= bytes,
            StorageTier::Disk => used.disk -= bytes,
        }
        if let Some(entry) = used.clients.get_mut(&client) {
            entry.pinned -= bytes;
        }
        used.forget_idle(client);
    }

    /// Bytes in memory and on disk.
    pub(crate) fn pinned(&self) -> (u64, u64) {
        let used = self.used.lock();
        (used.memory, used.disk)
    }

    /// The number of flows.
    pub(crate) fn flows(&self) -> u32 {
        self.used.lock().flows
    }
}

impl QuotaUsage {
    fn occupy(
        &mut self,
        ledger: &QuotaLedger,
        place: StorageTier,
        bytes: u64,
    ) -> Result<(), QuotaExceeded> {
        let (count, max, full) = match place {
            StorageTier::Memory => (&mut self.memory, ledger.memory_max, QuotaExceeded::Memory),
            StorageTier::Disk => (&mut self.disk, ledger.disk_max, QuotaExceeded::Disk),
        };
        let after = count
            .checked_add(bytes)
            .filter(|after| *after <= max)
            .ok_or(full)?;
        *count = after;
        Ok(())
    }

    /// Removes the entry of a client without flows and bytes.
    fn forget_idle(&mut self, client: HostKey) {
        if self
            .clients
            .get(&client)
            .is_some_and(|use_| use_.flows == 0 && use_.pinned == 0)
        {
            self.clients.remove(&client);
        }
    }
}

/// A permit of a counted flow.
#[derive(Debug)]
pub(crate) struct FlowPermit {
    ledger: Arc<QuotaLedger>,
    client: HostKey,
}

impl FlowPermit {
    /// Keeps counting a flow that hibernated, and stops counting any other.
    pub(crate) fn settle(self, outcome: &ProxFlowOutcome) {
        if *outcome == ProxFlowOutcome::Hibernated {
            std::mem::forget(self);
        }
    }
}

impl Drop for FlowPermit {
    fn drop(&mut self) {
        let mut used = self.ledger.used.lock();
        used.flows -= 1;
        if let Some(entry) = used.clients.get_mut(&self.client) {
            entry.flows -= 1;
        }
        used.forget_idle(self.client);
        drop(used);
        self.ledger.left.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> Arc<QuotaLedger> {
        Arc::new(QuotaLedger::new(&ProxConfig {
            memory_quota_bytes: 100,
            disk_quota_bytes: 200,
            client_pinned_bytes_max: 150,
            client_flows_max: 2,
            flows_max: 3,
            ..Default::default()
        }))
    }

    #[test]
    fn flows_are_limited_per_client_and_in_all() {
        let ledger = ledger();
        let a = ledger.admit([1; 32]).unwrap();
        let _b = ledger.admit([1; 32]).unwrap();
        assert_eq!(
            ledger.admit([1; 32]).unwrap_err(),
            ProxRefusal::ClientFlowsFull(2)
        );
        let _c = ledger.admit([2; 32]).unwrap();
        assert_eq!(
            ledger.admit([3; 32]).unwrap_err(),
            ProxRefusal::FlowsFull(3)
        );
        drop(a);
        assert!(ledger.admit([1; 32]).is_ok());
    }

    #[test]
    fn bytes_are_limited_per_place_and_per_client() {
        let ledger = ledger();
        assert_eq!(
            ledger.reserve([1; 32], StorageTier::Memory, 101),
            Err(QuotaExceeded::Memory)
        );
        ledger.reserve([1; 32], StorageTier::Memory, 100).unwrap();
        assert_eq!(
            ledger.reserve([1; 32], StorageTier::Disk, 51),
            Err(QuotaExceeded::Client)
        );
        ledger.reserve([2; 32], StorageTier::Disk, 150).unwrap();
        assert_eq!(ledger.spill(100), Err(QuotaExceeded::Disk));
        ledger.release([2; 32], StorageTier::Disk, 150);
        ledger.spill(100).unwrap();
        assert_eq!(ledger.pinned(), (0, 100));
        ledger.release([1; 32], StorageTier::Disk, 100);
        assert_eq!(ledger.pinned(), (0, 0));
        assert!(ledger.used.lock().clients.is_empty());
    }
}
