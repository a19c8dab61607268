//! Links and networks around a device, and the clients for which it is woken.

use std::collections::{BTreeMap, BTreeSet};

use crate::LinkClass;

/// The state of a link in one direction, as the scheduler knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct KnownLink {
    /// Name of the network device.
    pub device: String,
    /// Key under which the link's history is saved, such as `Wi-Fi`, because the name of a device
    /// may change.
    pub slot: String,
    /// What a byte on the link costs.
    pub class: LinkClass,
    /// Whether the link is up and carries data, as far as is known.
    pub carries: bool,
    /// Long-term rate of the network behind the link in bytes per second, once it was used.
    pub rate: Option<f64>,
}

/// The links and networks around a device, independent of any client.
#[derive(Debug, Clone, Default)]
pub struct LinkSurroundings {
    /// The links that can be used.
    pub links: Vec<KnownLink>,
    /// The network behind each device.
    pub networks: BTreeMap<String, String>,
    /// Key under which the history of each device's link is saved.
    pub slots: BTreeMap<String, String>,
    /// Devices on networks whose cap is used up.
    pub capped: BTreeSet<String>,
}

impl LinkSurroundings {
    /// Key under which the history of a device's link is saved.
    pub(super) fn slot(&self, device: &str) -> String {
        let known = self.slots.get(device).cloned();
        known.unwrap_or_else(|| device.to_owned())
    }
}

/// The clients for which the machine is woken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WakingClients {
    /// Numbers of the clients that wait for a link.
    pub waiting: Vec<u64>,
    /// Numbers of the clients that are moving data on a link they were given.
    pub running: Vec<u64>,
}
