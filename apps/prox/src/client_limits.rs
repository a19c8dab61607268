//! The limits on what one client may do: the proxy's defaults, and those that the operator set for a client.
//!
//! ```text
//!  --config FILE ─────▶ defaults  ┐
//!                                 ├─▶ ClientLimitTable::of(client) ─▶ ledger, traffic, deadlines
//!  clients.json ──────▶ overrides ┘
//! ```

use std::collections::HashMap;
use std::time::Duration;

use d2tp_driver::HostKey;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use crate::config::ProxConfig;

/// The limits that the operator set for one client. What is none is as for all clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientLimits {
    /// The maximum number of simultaneous flows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flows: Option<u32>,
    /// Bytes of copies and uploads that the proxy holds for the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_bytes: Option<u64>,
    /// Bytes a second to the client; 0: as many as possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub down_bytes_per_s: Option<u64>,
    /// Bytes a second from the client; 0: as many as possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub up_bytes_per_s: Option<u64>,
    /// Bytes in a calendar month (UTC), both directions together; 0: any number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub month_bytes: Option<u64>,
    /// The furthest deadline that is accepted, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_s: Option<u64>,
}

impl ClientLimits {
    /// Whether every limit is as for all clients.
    pub fn is_default(&self) -> bool {
        *self == ClientLimits::default()
    }

    /// The client's limits after a change: those that `newer` names, the rest as before.
    pub(crate) fn changed_to(&self, newer: &ClientLimits) -> ClientLimits {
        ClientLimits {
            flows: newer.flows.or(self.flows),
            pinned_bytes: newer.pinned_bytes.or(self.pinned_bytes),
            down_bytes_per_s: newer.down_bytes_per_s.or(self.down_bytes_per_s),
            up_bytes_per_s: newer.up_bytes_per_s.or(self.up_bytes_per_s),
            month_bytes: newer.month_bytes.or(self.month_bytes),
            deadline_s: newer.deadline_s.or(self.deadline_s),
        }
    }
}

/// The limits that hold for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EffectiveLimits {
    /// The maximum number of simultaneous flows.
    pub flows: u32,
    /// Bytes of copies and uploads that the proxy holds for the client.
    pub pinned_bytes: u64,
    /// Bytes a second to the client; 0: as many as possible.
    pub down_bytes_per_s: u64,
    /// Bytes a second from the client; 0: as many as possible.
    pub up_bytes_per_s: u64,
    /// Bytes in a calendar month (UTC), both directions together; 0: any number.
    pub month_bytes: u64,
    /// The furthest deadline that is accepted, in seconds.
    #[serde(rename = "deadline_s", serialize_with = "whole_seconds")]
    pub deadline: Duration,
}

fn whole_seconds<S: serde::Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(span.as_secs())
}

impl EffectiveLimits {
    fn of_all(config: &ProxConfig) -> EffectiveLimits {
        EffectiveLimits {
            flows: config.client_flows_max,
            pinned_bytes: config.client_pinned_bytes_max,
            down_bytes_per_s: config.client_down_bytes_per_s,
            up_bytes_per_s: config.client_up_bytes_per_s,
            month_bytes: config.client_month_bytes_max,
            deadline: config.deadline_horizon,
        }
    }

    fn changed_by(&self, own: &ClientLimits) -> EffectiveLimits {
        EffectiveLimits {
            flows: own.flows.unwrap_or(self.flows),
            pinned_bytes: own.pinned_bytes.unwrap_or(self.pinned_bytes),
            down_bytes_per_s: own.down_bytes_per_s.unwrap_or(self.down_bytes_per_s),
            up_bytes_per_s: own.up_bytes_per_s.unwrap_or(self.up_bytes_per_s),
            month_bytes: own.month_bytes.unwrap_or(self.month_bytes),
            deadline: own.deadline_s.map_or(self.deadline, Duration::from_secs),
        }
    }
}

/// The limits of all clients, as they are now.
#[derive(Debug)]
pub(crate) struct ClientLimitTable {
    state: RwLock<LimitState>,
}

#[derive(Debug)]
struct LimitState {
    defaults: EffectiveLimits,
    overrides: HashMap<HostKey, ClientLimits>,
}

impl ClientLimitTable {
    pub(crate) fn new(config: &ProxConfig) -> ClientLimitTable {
        ClientLimitTable {
            state: RwLock::new(LimitState {
                defaults: EffectiveLimits::of_all(config),
                overrides: HashMap::new(),
            }),
        }
    }

    /// The limits that hold for a client.
    pub(crate) fn of(&self, client: &HostKey) -> EffectiveLimits {
        let state = self.state.read();
        match state.overrides.get(client) {
            Some(own) => state.defaults.changed_by(own),
            None => state.defaults,
        }
    }

    /// Changes the limits of all clients that have none of their own.
    pub(crate) fn set_defaults(&self, config: &ProxConfig) {
        self.state.write().defaults = EffectiveLimits::of_all(config);
    }

    /// Changes the limits of one client.
    pub(crate) fn set(&self, client: HostKey, own: ClientLimits) {
        let overrides = &mut self.state.write().overrides;
        match own.is_default() {
            true => overrides.remove(&client),
            false => overrides.insert(client, own),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_its_own_limits_and_the_defaults_for_the_rest() {
        let config = ProxConfig {
            client_flows_max: 5,
            client_down_bytes_per_s: 1_000,
            ..Default::default()
        };
        let table = ClientLimitTable::new(&config);
        let own = ClientLimits {
            flows: Some(2),
            down_bytes_per_s: Some(0),
            ..Default::default()
        };
        table.set([1; 32], own);
        let limits = table.of(&[1; 32]);
        assert_eq!((limits.flows, limits.down_bytes_per_s), (2, 0));
        assert_eq!(table.of(&[2; 32]).down_bytes_per_s, 1_000);
        table.set_defaults(&ProxConfig {
            client_month_bytes_max: 7,
            ..config
        });
        assert_eq!(table.of(&[1; 32]).month_bytes, 7);
        assert_eq!(table.of(&[1; 32]).flows, 2);
        table.set([1; 32], ClientLimits::default());
        assert_eq!(table.of(&[1; 32]).flows, 5);
    }

    #[test]
    fn what_a_change_does_not_name_stays() {
        let old = ClientLimits {
            flows: Some(2),
            month_bytes: Some(9),
            ..Default::default()
        };
        let newer = ClientLimits {
            month_bytes: Some(0),
            ..Default::default()
        };
        let changed = old.changed_to(&newer);
        assert_eq!((changed.flows, changed.month_bytes), (Some(2), Some(0)));
    }
}
