//! Packets under rules: which may leave over metered networks, and how many of each rule did.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use d2tp_tunnel::{InnerPacket, MeteredFilter};
use serde::{Deserialize, Serialize};

use super::rule_set::{RuleNumber, RuleSet};

/// Packets of one rule, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RulePackets {
    /// Packets that were sent.
    pub sent: u64,
    /// Packets that came from the proxy.
    pub received: u64,
    /// Packets that were dropped because only metered networks were up.
    pub refused: u64,
    /// Bytes over free networks, in both directions.
    pub free_bytes: u64,
    /// Bytes over metered networks, in both directions.
    pub metered_bytes: u64,
}

#[derive(Debug, Default)]
struct RuleCounters {
    sent: AtomicU64,
    received: AtomicU64,
    refused: AtomicU64,
    free_bytes: AtomicU64,
    metered_bytes: AtomicU64,
}

impl RuleCounters {
    fn count_bytes(&self, bytes: usize, is_metered: bool) {
        let counter = match is_metered {
            true => &self.metered_bytes,
            false => &self.free_bytes,
        };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The rules as they apply to packets, with the counts of each.
#[derive(Debug)]
pub struct PacketRules {
    rules: Arc<RuleSet>,
    counters: Vec<RuleCounters>,
}

impl PacketRules {
    /// Applies these rules to packets.
    pub fn new(rules: Arc<RuleSet>) -> PacketRules {
        PacketRules {
            counters: rules.numbers().map(|_| RuleCounters::default()).collect(),
            rules,
        }
    }

    /// Packets of a rule, so far.
    pub fn counts(&self, rule: RuleNumber) -> RulePackets {
        let counters = &self.counters[usize::from(rule)];
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RulePackets {
            sent: load(&counters.sent),
            received: load(&counters.received),
            refused: load(&counters.refused),
            free_bytes: load(&counters.free_bytes),
            metered_bytes: load(&counters.metered_bytes),
        }
    }

    /// Packets of all rules that were dropped because only metered networks were up.
    pub fn refused(&self) -> u64 {
        let all = self.counters.iter();
        all.map(|counters| counters.refused.load(Ordering::Relaxed))
            .sum()
    }

    /// Counts a packet from the proxy.
    pub fn on_received(&self, packet: &InnerPacket, bytes: usize, is_metered: bool) {
        let counters = &self.counters[usize::from(self.rules.of_received(packet))];
        counters.received.fetch_add(1, Ordering::Relaxed);
        counters.count_bytes(bytes, is_metered);
    }

    /// The rule of a packet that this machine sends. What cannot be read, as fragments, is everything else.
    fn of_sent(&self, packet: &[u8]) -> RuleNumber {
        match InnerPacket::parse(packet) {
            Ok(parsed) => self.rules.of_sent(&parsed),
            Err(_) => self.rules.rest(),
        }
    }
}

impl MeteredFilter for PacketRules {
    fn admits(&self, packet: &[u8]) -> bool {
        let rule = self.of_sent(packet);
        let may_pay = self.rules.lets_packets_pay(rule);
        if !may_pay {
            let counters = &self.counters[usize::from(rule)];
            counters.refused.fetch_add(1, Ordering::Relaxed);
        }
        may_pay
    }

    fn lets_pay(&self, packet: &[u8]) -> bool {
        self.rules.lets_packets_pay(self.of_sent(packet))
    }

    fn on_left(&self, packet: &[u8], is_metered: bool) {
        let counters = &self.counters[usize::from(self.of_sent(packet))];
        counters.sent.fetch_add(1, Ordering::Relaxed);
        counters.count_bytes(packet.len(), is_metered);
    }
}
