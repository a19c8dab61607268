//! The bytes that each link has carried for a transfer, its cost, and the link used last.

use std::collections::{BTreeMap, HashMap};

use d2tp_links::CostClass;

/// A transfer's use of the device's links.
#[derive(Debug, Default)]
pub(super) struct LinkUsage {
    bytes_by_link: BTreeMap<String, u64>,
    classes: HashMap<String, CostClass>,
    last_link: Option<String>,
    switches: u32,
    /// Metered bytes that did not become part of the object: requests, and bytes lost on the way.
    pub(super) paid_besides: u64,
}

impl LinkUsage {
    /// Payload bytes by link.
    pub(super) fn bytes_by_link(&self) -> &BTreeMap<String, u64> {
        &self.bytes_by_link
    }

    /// Payload bytes of all links.
    pub(super) fn total_bytes(&self) -> u64 {
        self.bytes_by_link.values().sum()
    }

    /// Adds bytes that `link` has carried.
    pub(super) fn add(&mut self, link: &str, bytes: u64) {
        *self.bytes_by_link.entry(link.to_owned()).or_default() += bytes;
    }

    /// Sets the bytes that `link` has carried since the beginning.
    pub(super) fn set(&mut self, link: String, bytes: u64) {
        self.bytes_by_link.insert(link, bytes);
    }

    /// Sets the cost class of `link`.
    pub(super) fn set_class(&mut self, link: &str, class: CostClass) {
        self.classes.insert(link.to_owned(), class);
    }

    /// Whether `link` is metered.
    pub(super) fn is_metered(&self, link: &str) -> bool {
        self.classes
            .get(link)
            .is_some_and(|class| *class != CostClass::Free)
    }

    /// Bytes that metered links carried.
    pub(super) fn metered_bytes(&self) -> u64 {
        let links = self.bytes_by_link.iter();
        let metered = links.filter(|(link, _)| self.is_metered(link));
        metered.map(|(_, bytes)| bytes).sum()
    }

    /// The link that carried last; none before the first byte.
    pub(super) fn last_link(&self) -> Option<&str> {
        self.last_link.as_deref()
    }

    /// Sets the link that carries now; returns the previous one.
    pub(super) fn set_last_link(&mut self, link: &str) -> Option<String> {
        self.last_link.replace(link.to_owned())
    }

    /// Counts a switch from one link to another.
    pub(super) fn count_switch(&mut self) {
        self.switches += 1;
    }

    /// The number of switches between links.
    pub(super) fn switches(&self) -> u32 {
        self.switches
    }
}
