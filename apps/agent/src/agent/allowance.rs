//! Records the bytes that transfers spend on metered links, and enforces the budget and the caps of
//! networks.

use std::collections::BTreeSet;

use std::sync::Arc;

use d2tp_driver::SchedulerHandle;
use d2tp_links::{CapCutoff, CostClass, Link, LinkKind, NetworkRule};
use tokio::sync::watch;

use super::link_view::ExhaustedCaps;
use super::state::{Agent, lock};
use super::transfer_task::GRANTED_BEFORE;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::report::human_bytes;
use crate::proxy::{LinkPayload, SpendingBudget};

impl Agent {
    /// Records what devices carried. Returns those whose network reached its cap so recently that bytes
    /// granted before may still arrive.
    pub(super) fn record_spending(&self, more: &[(String, CostClass, u64)]) -> BTreeSet<String> {
        let links = self.link_view.links().borrow().clone();
        let around = self.link_view.nearby().borrow().clone();
        let now = BootInstant::now();
        let mut reached = Vec::new();
        {
            let mut ledger = lock(&self.ledger);
            let was_over = ledger.is_over();
            for (device, class, bytes) in more {
                let link = links.iter().find(|link| link.name == *device);
                let rule = link.and_then(|link| self.link_view.rule(link));
                let name = around.name(device);
                if *class != CostClass::Free {
                    ledger.record(*bytes);
                }
                if let Some(rule) = rule
                    && ledger.record_on_network(&name, rule, *bytes)
                {
                    reached.push(words(&name, rule));
                }
            }
            if ledger.is_over() && !was_over && ledger.cutoff == CapCutoff::Soft {
                reached.push(
                    "the month's budget is used up; transfers continue (cutoff soft)".to_owned(),
                );
            }
        }
        for text in reached {
            tracing::info!("{text}");
            self.notifier.cap_reached(&text);
        }
        self.update_allowance();
        let capped = lock(&self.capped_at);
        let lately = |device: &&String| {
            let at = capped.get(&around.name(device));
            at.is_some_and(|at| now.since(*at) <= GRANTED_BEFORE)
        };
        let devices = more.iter().map(|(device, ..)| device);
        devices.filter(lately).cloned().collect()
    }

    /// Informs transfers of what may still be spent, and blocks links whose network's cap is used up.
    pub(super) fn update_allowance(&self) {
        let links = self.link_view.links().borrow().clone();
        let around = self.link_view.nearby().borrow().clone();
        let mut spent = ExhaustedCaps::new();
        let known = self.link_view.exhausted();
        let left = {
            let ledger = lock(&self.ledger);
            let mut left = ledger.left();
            for link in links.iter().filter(|link| link.kind != LinkKind::Loopback) {
                let name = around.name(&link.name);
                let Some(rule) = self.link_view.rule(link) else {
                    continue;
                };
                match ledger.network_usage(&name, rule).1 {
                    Some(0) => {
                        spent.insert(name.clone(), words(&name, rule));
                    }
                    // The least of those that may cost: whichever carries it, it is not too much.
                    Some(bytes) if is_used(link) && !known.contains_key(&name) => {
                        left = Some(left.map_or(bytes, |left| left.min(bytes)));
                    }
                    Some(_) | None => {}
                }
            }
            left
        };
        {
            let now = BootInstant::now();
            let mut capped = lock(&self.capped_at);
            capped.retain(|name, _| spent.contains_key(name));
            for name in spent.keys() {
                capped.entry(name.clone()).or_insert(now);
            }
        }
        self.left
            .send_if_modified(|before| std::mem::replace(before, left) != left);
        self.scheduler.set_metered_limit(left);
        self.link_view.set_exhausted(spent);
    }
}

/// The device's budget, which programs behind the local proxy share with transfers.
impl SpendingBudget for Agent {
    fn scheduler(&self) -> &Arc<SchedulerHandle> {
        &self.scheduler
    }

    fn record_spent(&self, more: &[LinkPayload]) {
        if more.is_empty() {
            return;
        }
        let of = |one: &LinkPayload| (one.link.clone(), one.class, one.down + one.up);
        self.record_spending(&more.iter().map(of).collect::<Vec<_>>());
        let mut meter = lock(&self.meter);
        for one in more {
            meter.carried(one.class, true, one.down);
            meter.carried(one.class, false, one.up);
        }
    }

    fn watch_left(&self) -> watch::Receiver<Option<u64>> {
        self.left.subscribe()
    }
}

fn is_used(link: &Link) -> bool {
    link.is_usable() && link.class.class == CostClass::Metered
}

fn words(name: &str, rule: &NetworkRule) -> String {
    let cap = human_bytes(rule.cap.unwrap_or(0));
    match rule.cutoff {
        CapCutoff::Hard => format!("{name} used its cap of {cap} this month"),
        CapCutoff::Cautious => format!("{name} used nine tenths of its cap of {cap} this month"),
        CapCutoff::Soft => {
            format!("{name} used its cap of {cap} this month and continues (cutoff soft)")
        }
    }
}
