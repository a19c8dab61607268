//! The accounting of resources: flows per client, pinned bytes per client, bytes of memory and of
//! disk.
//!
//! One lock and a few numbers; resources are charged before they are allocated and released after
//! they are freed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use d2tp_driver::HostKey;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::client_limits::ClientLimitTable;
use crate::config::ProxConfig;
use crate::flow_report::ProxFlowOutcome;
use crate::refusal::ProxRefusal;

/// The key that copies are charged to which all clients share. No host has it.
pub(crate) const SHARED: HostKey = *b"copies that all clients share  \0";

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
    clients: Arc<ClientLimitTable>,
    used: Mutex<QuotaUsage>,
    left: Notify,
    /// Clients whose number of flows has changed, if other nodes are told.
    changed: Option<Mutex<HashSet<HostKey>>>,
}

#[derive(Clone, Copy, Debug)]
struct QuotaLimits {
    memory: u64,
    disk: u64,
    /// The most bytes of copies that all clients share.
    shared: u64,
    flows: u32,
}

#[derive(Debug)]
struct QuotaUsage {
    limits: QuotaLimits,
    memory: u64,
    disk: u64,
    flows: u32,
    /// The number of hibernated flows, which `flows` includes.
    hibernated: u32,
    clients: HashMap<HostKey, ClientUsage>,
}

#[derive(Debug, Default)]
struct ClientUsage {
    flows: u32,
    pinned: u64,
}

impl QuotaLedger {
    /// A ledger with the limits of these settings; `tells_changes`: clients whose flows change are noted, for
    /// [`QuotaLedger::take_changed`].
    pub(crate) fn new(
        config: &ProxConfig,
        clients: Arc<ClientLimitTable>,
        tells_changes: bool,
    ) -> QuotaLedger {
        QuotaLedger {
            changed: tells_changes.then(Mutex::default),
            clients,
            used: Mutex::new(QuotaUsage {
                limits: QuotaLimits::of(config),
                memory: 0,
                disk: 0,
                flows: 0,
                hibernated: 0,
                clients: HashMap::new(),
            }),
            left: Notify::new(),
        }
    }

    /// Changes the limits. What is beyond a smaller one stays, and nothing is added to it.
    pub(crate) fn set_limits(&self, config: &ProxConfig) {
        self.used.lock().limits = QuotaLimits::of(config);
        self.left.notify_waiters();
    }

    /// Wakes those that wait for room, because a client's limits have changed.
    pub(crate) fn on_limits_changed(&self) {
        self.left.notify_waiters();
    }

    /// The most bytes that one object of this client can have.
    pub(crate) fn object_max(&self, client: &HostKey) -> u64 {
        let limits = self.used.lock().limits;
        self.client_pinned_max(client)
            .min(limits.disk.max(limits.memory))
    }

    /// The most bytes this client may pin.
    pub(crate) fn client_pinned_max(&self, client: &HostKey) -> u64 {
        self.clients.of(client).pinned_bytes
    }

    /// The most bytes that are charged to a client, or to [`SHARED`].
    fn pinned_max(&self, used: &QuotaUsage, client: &HostKey) -> u64 {
        match *client == SHARED {
            true => used.limits.shared,
            false => self.client_pinned_max(client),
        }
    }

    /// The clients that have flows now.
    pub(crate) fn clients_with_flows(&self) -> Vec<HostKey> {
        let used = self.used.lock();
        let with_flows = used.clients.iter().filter(|(_, entry)| entry.flows > 0);
        with_flows.map(|(client, _)| *client).collect()
    }

    /// The flows of a client now.
    pub(crate) fn flows_of(&self, client: &HostKey) -> u32 {
        let used = self.used.lock();
        used.clients.get(client).map_or(0, |entry| entry.flows)
    }

    /// The clients whose number of flows has changed since the last call.
    pub(crate) fn take_changed(&self) -> HashSet<HostKey> {
        let changed = self.changed.as_ref();
        changed.map_or_else(HashSet::new, |changed| std::mem::take(&mut changed.lock()))
    }

    fn note_change(&self, client: HostKey) {
        if let Some(changed) = &self.changed {
            changed.lock().insert(client);
        }
    }

    /// Counts a flow until the permit is dropped. The client has so many `elsewhere`, at other nodes.
    pub(crate) fn admit(
        self: &Arc<QuotaLedger>,
        client: HostKey,
        elsewhere: u32,
    ) -> Result<FlowPermit, ProxRefusal> {
        let own_max = self.clients.of(&client).flows;
        let mut used = self.used.lock();
        if used.flows >= used.limits.flows {
            return Err(ProxRefusal::FlowsFull(used.limits.flows));
        }
        let mine = used.clients.get(&client).map_or(0, |client| client.flows);
        if mine.saturating_add(elsewhere) >= own_max {
            return Err(ProxRefusal::ClientFlowsFull(own_max));
        }
        used.flows += 1;
        used.clients.entry(client).or_default().flows += 1;
        drop(used);
        self.note_change(client);
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
        used.hibernated += 1;
        used.clients.entry(client).or_default().flows += 1;
        drop(used);
        self.note_change(client);
    }

    /// The permit of a restored flow, which was counted while it was hibernated.
    pub(crate) fn readmit_hibernated(self: &Arc<QuotaLedger>, client: HostKey) -> FlowPermit {
        let mut used = self.used.lock();
        used.hibernated = used.hibernated.saturating_sub(1);
        drop(used);
        FlowPermit {
            ledger: self.clone(),
            client,
        }
    }

    /// The bytes that are charged to a client, or to [`SHARED`].
    pub(crate) fn pinned_by(&self, client: HostKey) -> u64 {
        let used = self.used.lock();
        used.clients.get(&client).map_or(0, |entry| entry.pinned)
    }

    /// Charges bytes that are charged to `from` to `to` instead.
    pub(crate) fn transfer(
        &self,
        from: HostKey,
        to: HostKey,
        bytes: u64,
    ) -> Result<(), QuotaExceeded> {
        let mut used = self.used.lock();
        let pinned = used.clients.get(&to).map_or(0, |entry| entry.pinned);
        if pinned.saturating_add(bytes) > self.pinned_max(&used, &to) {
            return Err(QuotaExceeded::Client);
        }
        used.clients.entry(to).or_default().pinned += bytes;
        if let Some(entry) = used.clients.get_mut(&from) {
            entry.pinned -= bytes;
        }
        used.forget_idle(from);
        Ok(())
    }

    /// Reserves `bytes` for a client.
    pub(crate) fn reserve(
        &self,
        client: HostKey,
        place: StorageTier,
        bytes: u64,
    ) -> Result<(), QuotaExceeded> {
        if bytes == 0 {
            return Ok(()); // What is counted already stays beyond a limit that was made smaller since.
        }
        let mut used = self.used.lock();
        let pinned = used.clients.get(&client).map_or(0, |client| client.pinned);
        if pinned.saturating_add(bytes) > self.pinned_max(&used, &client) {
            return Err(QuotaExceeded::Client);
        }
        used.occupy(place, bytes)?;
        used.clients.entry(client).or_default().pinned += bytes;
        Ok(())
    }

    /// Reserves `bytes` on disk for a copy that flows of an earlier process read: also beyond a bound that the shared
    /// cache has had since.
    pub(crate) fn reserve_restored(
        &self,
        client: HostKey,
        bytes: u64,
    ) -> Result<(), QuotaExceeded> {
        if client != SHARED {
            return self.reserve(client, StorageTier::Disk, bytes);
        }
        let mut used = self.used.lock();
        used.occupy(StorageTier::Disk, bytes)?;
        used.clients.entry(client).or_default().pinned += bytes;
        Ok(())
    }

    /// Charges bytes on disk that an earlier process had reserved, also beyond a bound that is smaller since.
    pub(crate) fn charge_restored(&self, client: HostKey, bytes: u64) {
        let mut used = self.used.lock();
        used.disk = used.disk.saturating_add(bytes);
        used.clients.entry(client).or_default().pinned += bytes;
    }

    /// Moves counted bytes from memory to disk.
    pub(crate) fn spill(&self, bytes: u64) -> Result<(), QuotaExceeded> {
        let mut used = self.used.lock();
        used.occupy(StorageTier::Disk, bytes)?;
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

    /// The number of hibernated flows.
    pub(crate) fn hibernated_flows(&self) -> u32 {
        self.used.lock().hibernated
    }

    /// The number of flows, those that are hibernated included.
    pub(crate) fn flows(&self) -> u32 {
        self.used.lock().flows
    }
}

impl QuotaLimits {
    fn of(config: &ProxConfig) -> QuotaLimits {
        QuotaLimits {
            memory: config.memory_quota_bytes,
            disk: config.disk_quota_bytes,
            shared: config.cache_bytes_max,
            flows: config.flows_max,
        }
    }
}

impl QuotaUsage {
    fn occupy(&mut self, place: StorageTier, bytes: u64) -> Result<(), QuotaExceeded> {
        let (count, max, full) = match place {
            StorageTier::Memory => (&mut self.memory, self.limits.memory, QuotaExceeded::Memory),
            StorageTier::Disk => (&mut self.disk, self.limits.disk, QuotaExceeded::Disk),
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
            self.ledger.used.lock().hibernated += 1;
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
        self.ledger.note_change(self.client);
        self.ledger.left.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_limits::ClientLimits;

    fn ledger() -> Arc<QuotaLedger> {
        let config = ProxConfig {
            memory_quota_bytes: 100,
            disk_quota_bytes: 200,
            client_pinned_bytes_max: 150,
            client_flows_max: 2,
            flows_max: 3,
            ..Default::default()
        };
        let clients = Arc::new(ClientLimitTable::new(&config));
        Arc::new(QuotaLedger::new(&config, clients, false))
    }

    #[test]
    fn a_client_with_limits_of_its_own_is_held_to_those() {
        let ledger = ledger();
        let own = ClientLimits {
            flows: Some(1),
            pinned_bytes: Some(20),
            ..Default::default()
        };
        ledger.clients.set([1; 32], own);
        let _a = ledger.admit([1; 32], 0).unwrap();
        assert_eq!(
            ledger.admit([1; 32], 0).unwrap_err(),
            ProxRefusal::ClientFlowsFull(1)
        );
        let full = ledger.reserve([1; 32], StorageTier::Memory, 21);
        assert_eq!(full, Err(QuotaExceeded::Client));
        assert_eq!(ledger.object_max(&[1; 32]), 20);
        ledger.reserve([2; 32], StorageTier::Memory, 21).unwrap();
    }

    #[test]
    fn flows_are_limited_per_client_and_in_all() {
        let ledger = ledger();
        let a = ledger.admit([1; 32], 0).unwrap();
        let _b = ledger.admit([1; 32], 0).unwrap();
        assert_eq!(
            ledger.admit([1; 32], 0).unwrap_err(),
            ProxRefusal::ClientFlowsFull(2)
        );
        let _c = ledger.admit([2; 32], 0).unwrap();
        assert_eq!(
            ledger.admit([3; 32], 0).unwrap_err(),
            ProxRefusal::FlowsFull(3)
        );
        drop(a);
        assert!(ledger.admit([1; 32], 0).is_ok());
    }

    #[test]
    fn what_is_counted_already_goes_on_beyond_a_smaller_limit() {
        let ledger = ledger();
        ledger.reserve([1; 32], StorageTier::Memory, 80).unwrap();
        let smaller = ProxConfig {
            memory_quota_bytes: 10,
            client_pinned_bytes_max: 10,
            ..Default::default()
        };
        ledger.clients.set_defaults(&smaller);
        ledger.set_limits(&smaller);
        assert_eq!(ledger.reserve([1; 32], StorageTier::Memory, 0), Ok(()));
        assert_eq!(
            ledger.reserve([1; 32], StorageTier::Memory, 1),
            Err(QuotaExceeded::Client)
        );
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
