//! What transfers spend, taken down, and what follows from it: the budget of all, and the caps of
//! networks.

use std::collections::BTreeSet;

use d2tp_links::{CapCutoff, CostClass, Link, LinkKind, NetworkRule};
use tokio::sync::watch;

use super::roads::Spent;
use super::task::GRANTED_BEFORE;
use super::{Agent, lock};
use crate::fetch::clock::Moment;
use crate::fetch::report::human_bytes;
use crate::proxy::{Carried, Purse};

impl Agent {
    /// Takes down what devices carried. Those of them whose network's cap was reached so lately that what
    /// was granted before may still come.
    pub(super) fn spend(&self, more: &[(String, CostClass, u64)]) -> BTreeSet<String> {
        let links = self.roads.links().borrow().clone();
        let around = self.roads.around().borrow().clone();
        let now = Moment::now();
        let mut reached = Vec::new();
        {
            let mut ledger = lock(&self.ledger);
            let was_over = ledger.is_over();
            for (device, class, bytes) in more {
                let link = links.iter().find(|link| link.name == *device);
                let rule = link.and_then(|link| self.roads.rule(link));
                let name = around.name(device);
                if *class != CostClass::Free {
                    ledger.spend(*bytes);
                }
                if let Some(rule) = rule
                    && ledger.spend_on(&name, rule, *bytes)
                {
                    reached.push(words(&name, rule));
                }
            }
            if ledger.is_over() && !was_over && ledger.cutoff == CapCutoff::Soft {
                reached.push("the month's budget is used up; transfers go on paying".to_owned());
            }
        }
        for text in reached {
            tracing::info!("{text}");
            self.notices.cap_reached(&text);
        }
        self.allow();
        let capped = lock(&self.capped_at);
        let lately = |device: &&String| {
            let at = capped.get(&around.name(device));
            at.is_some_and(|at| now.since(*at) <= GRANTED_BEFORE)
        };
        let devices = more.iter().map(|(device, ..)| device);
        devices.filter(lately).cloned().collect()
    }

    /// Has transfers know what may still be spent, and links carry nothing whose network's cap is used up.
    pub(super) fn allow(&self) {
        let links = self.roads.links().borrow().clone();
        let around = self.roads.around().borrow().clone();
        let mut spent = Spent::new();
        let known = self.roads.spent();
        let left = {
            let ledger = lock(&self.ledger);
            let mut left = ledger.left();
            for link in links.iter().filter(|link| link.kind != LinkKind::Loopback) {
                let name = around.name(&link.name);
                let Some(rule) = self.roads.rule(link) else {
                    continue;
                };
                match ledger.on(&name, rule).1 {
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
            let now = Moment::now();
            let mut capped = lock(&self.capped_at);
            capped.retain(|name, _| spent.contains_key(name));
            for name in spent.keys() {
                capped.entry(name.clone()).or_insert(now);
            }
        }
        self.left
            .send_if_modified(|before| std::mem::replace(before, left) != left);
        self.dispatcher.allow(left);
        self.roads.spend(spent);
    }
}

/// Programs behind the local proxy spend what transfers do.
impl Purse for Agent {
    fn spent(&self, more: &[Carried]) {
        if more.is_empty() {
            return;
        }
        let of = |one: &Carried| (one.link.clone(), one.class, one.down + one.up);
        self.spend(&more.iter().map(of).collect::<Vec<_>>());
        let mut meter = lock(&self.meter);
        for one in more {
            meter.carried(one.class, true, one.down);
            meter.carried(one.class, false, one.up);
        }
    }

    fn left(&self) -> watch::Receiver<Option<u64>> {
        self.left.subscribe()
    }
}

fn is_used(link: &Link) -> bool {
    link.is_usable() && link.class.class == CostClass::Metered
}

fn words(name: &str, rule: &NetworkRule) -> String {
    let cap = human_bytes(rule.cap.unwrap_or(0));
    match rule.cutoff {
        CapCutoff::Hard => format!("{name} carried its cap of {cap} this month"),
        CapCutoff::Cautious => format!("{name} carried nine tenths of its cap of {cap} this month"),
        CapCutoff::Soft => format!("{name} carried its cap of {cap} this month, and goes on"),
    }
}
