//! Transfers, links and the allowance as they are shown: one JSON object each.

use std::collections::BTreeMap;

use d2tp_links::{Kind, Link};
use serde_json::{Value, json};

use super::task::Task;
use super::{Agent, lock};
use crate::fetch::jobs;
use crate::fetch::report::Promised;

impl Agent {
    /// All transfers in the background, the agent's and those of processes of their own.
    pub(super) fn list(&self) -> Vec<Value> {
        let others = jobs::list().unwrap_or_default();
        let mut all: BTreeMap<u64, Value> =
            others.iter().map(|job| (job.id, job.object())).collect();
        for (id, task) in lock(&self.tasks).iter() {
            all.insert(*id, self.object(*id, task));
        }
        all.into_values().collect()
    }

    /// One of the agent's.
    pub(super) fn object(&self, id: u64, task: &Task) -> Value {
        let order = &task.kept.order;
        let event = &task.event;
        let promise = self
            .dispatcher
            .promise_of(id)
            .map(|(promise, left)| Promised::of(&promise, left));
        json!({
            "id": id,
            "standing": task.standing(),
            "reason": event["reason"],
            "verb": order.verb,
            "url": task.asked.url,
            "file": task.asked.file,
            "since": task.asked.since,
            "deadline": task.asked.deadline,
            "policy": order.policy,
            "if_late": order.if_late,
            "max_cell": order.max_cell,
            "priority": order.priority,
            "mode": event["mode"],
            "bytes": event["bytes"],
            "length": event["length"],
            "metered_bytes": event["metered_bytes"],
            "promise": promise,
            "last": event,
        })
    }

    /// How many stand how.
    pub(super) fn standings(&self) -> BTreeMap<&'static str, u64> {
        let mut standings = BTreeMap::new();
        for task in lock(&self.tasks).values() {
            *standings.entry(task.standing()).or_default() += 1;
        }
        standings
    }

    /// The links.
    pub(super) fn net(&self) -> Vec<Value> {
        let links = self.roads.links().borrow().clone();
        let tasks = lock(&self.tasks);
        links
            .iter()
            .map(|link| {
                let seen = self.dispatcher.seen(&link.name);
                let carries: Vec<u64> = tasks
                    .iter()
                    .filter(|(_, task)| task.running && is_on(&task.event, link))
                    .map(|(id, _)| *id)
                    .collect();
                let mut object = net_object(link);
                if let Some(fields) = object.as_object_mut() {
                    fields.insert("rate_bytes_per_s".into(), json!(seen.map(|s| s.0)));
                    fields.insert("carries".into(), json!(seen.map(|s| s.1)));
                    fields.insert("transfers".into(), json!(carries));
                }
                object
            })
            .collect()
    }

    /// The allowance.
    pub(super) fn budget(&self) -> Value {
        let ledger = lock(&self.ledger);
        json!({
            "cap": ledger.cap,
            "used": ledger.used,
            "left": ledger.left(),
            "since": ledger.since,
            "reset_day": ledger.reset_day,
        })
    }
}

fn is_on(event: &Value, link: &Link) -> bool {
    let told = event["link"].as_str().unwrap_or_default();
    told.split('+').any(|name| name == link.name)
}

/// A link as anybody sees it.
pub fn net_object(link: &Link) -> Value {
    json!({
        "link": link.name,
        "kind": link.kind,
        "class": link.class.class,
        "because": link.class.because,
        "usable": link.is_usable() && link.kind != Kind::Loopback,
        "addresses": link.addresses,
    })
}
