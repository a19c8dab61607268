//! The JSON objects for transfers, links and the allowance.

use std::collections::BTreeMap;

use d2tp_driver::{TriedHint, local_hints};
use d2tp_links::{Connectivity, Link, LinkKind, NetworkInfo};
use d2tp_sched::UdpObstacle;
use serde_json::{Value, json};

use super::link_view::network_name;
use super::state::{Agent, lock};
use super::transfer_task::TransferTask;
use crate::fetch::jobs;
use crate::fetch::report::DeadlinePromise;
use crate::fetch::transfer::may_cost;

impl Agent {
    /// All transfers in the background, the agent's and those of processes of their own.
    pub(super) fn list(&self) -> Vec<Value> {
        let others = jobs::list().unwrap_or_default();
        let mut all: BTreeMap<u64, Value> =
            others.iter().map(|job| (job.id, job.to_json())).collect();
        for (id, task) in lock(&self.tasks).iter() {
            all.insert(*id, self.transfer_json(*id, task));
        }
        all.into_values().collect()
    }

    /// A transfer as JSON.
    pub(super) fn transfer_json(&self, id: u64, task: &TransferTask) -> Value {
        let order = &task.saved.order;
        let event = &task.event;
        let promise = self.scheduler.promise_of(id).map(|(promise, left)| {
            let costs = may_cost(&self.link_view.links().borrow());
            DeadlinePromise::of(&promise, left, costs)
        });
        json!({
            "id": id,
            "standing": task.state_name(),
            "reason": event["reason"],
            "verb": order.verb,
            "url": task.request.url,
            "file": task.request.file,
            "since": task.request.since,
            "deadline": task.request.deadline,
            "policy": order.policy,
            "if_late": order.if_late,
            "max_cell": order.max_cell,
            "priority": order.priority,
            "every": order.every,
            "mirror": order.mirror,
            "mode": event["mode"],
            "bytes": event["bytes"],
            "length": event["length"],
            "metered_bytes": event["metered_bytes"],
            // Each file of a folder is a client of the scheduler, so the folder is none.
            "promise": promise.map_or_else(|| promise_of_files(task), |promise| json!(promise)),
            "vigil": is_under_way(task).then(|| lock(&self.wake_status).to_json()),
            "last": event,
        })
    }

    /// The number of transfers in each state.
    pub(super) fn state_counts(&self) -> BTreeMap<&'static str, u64> {
        let mut statuses = BTreeMap::new();
        for task in lock(&self.tasks).values() {
            *statuses.entry(task.state_name()).or_default() += 1;
        }
        statuses
    }

    /// The links as JSON.
    pub(super) fn net(&self) -> Vec<Value> {
        let links = self.link_view.links().borrow().clone();
        let around = self.link_view.nearby().borrow().clone();
        let tasks = lock(&self.tasks);
        let ledger = lock(&self.ledger);
        let show = |link: &Link| {
            let seen = self.scheduler.link_rate(&link.name);
            let on_it =
                |(_, task): &(&u64, &TransferTask)| task.running && is_on(&task.event, link);
            let carries: Vec<u64> = tasks.iter().filter(on_it).map(|(id, _)| *id).collect();
            let name = around.name(&link.name);
            let cap = self.link_view.rule(link).filter(|rule| rule.cap.is_some());
            let cap = cap.map(|rule| {
                let (used, left) = ledger.network_usage(&name, rule);
                json!({"cap": rule.cap, "used": used, "left": left, "cutoff": rule.cutoff})
            });
            let trip = self.scheduler.round_trip(&link.name);
            let mut object = link_json(link, around.networks.of(&link.name));
            if let Some(fields) = object.as_object_mut() {
                fields.insert("rate_bytes_per_s".into(), json!(seen.map(|s| s.0)));
                fields.insert(
                    "rtt_ms".into(),
                    json!(trip.map(|trip| trip.as_secs_f64() * 1e3)),
                );
                let obstacle = self.scheduler.udp_obstacle(&link.name);
                fields.insert("udp".into(), json!(obstacle.map(UdpObstacle::as_str)));
                fields.insert("carries".into(), json!(seen.map(|s| s.1)));
                fields.insert("cap".into(), json!(cap));
                fields.insert("transfers".into(), json!(carries));
            }
            object
        };
        links.iter().map(show).collect()
    }

    /// The allowance as JSON.
    pub(super) fn budget(&self) -> Value {
        let ledger = lock(&self.ledger);
        json!({
            "cap": ledger.cap,
            "used": ledger.used,
            "left": ledger.left(),
            "over": ledger.is_over(),
            "cutoff": ledger.cutoff,
            "since": ledger.since,
            "reset_day": ledger.reset_day,
        })
    }
}

/// The promise for the files of a folder, of which the last progress tells.
fn promise_of_files(task: &TransferTask) -> Value {
    match task.saved.order.mirror.is_some() && is_under_way(task) {
        true => task.event["promise"].clone(),
        false => Value::Null,
    }
}

/// Whether the machine is woken, or kept awake, for the transfer.
fn is_under_way(task: &TransferTask) -> bool {
    task.running && matches!(task.state_name(), "waiting" | "running")
}

fn is_on(event: &Value, link: &Link) -> bool {
    let told = event["link"].as_str().unwrap_or_default();
    told.split('+').any(|name| name == link.name)
}

/// A link as JSON, with the network behind it if that is known.
pub fn link_json(link: &Link, network: Option<&NetworkInfo>) -> Value {
    let point = network.and_then(|network| network.access_point.as_ref());
    json!({
        "link": link.name,
        "network": network_name(link, network),
        "kind": link.kind,
        "class": link.class.class,
        "because": link.class.because,
        "usable": link.is_usable() && link.kind != LinkKind::Loopback,
        "ssid": point.map(|point| &point.ssid),
        "bssid": point.map(|point| &point.bssid),
        "signal_percent": point.map(|point| point.signal_percent),
        "operator": network.and_then(|network| network.operator.as_ref()),
        "connectivity": network.map(|network| network.connectivity),
        "portal": network.is_some_and(|network| network.connectivity == Connectivity::Portal),
        "addresses": link.addresses,
        "proxy_hints": proxy_hints(link),
    })
}

/// What the network of a link says of where proxies are, as far as this process has asked, and whether it is true.
fn proxy_hints(link: &Link) -> Vec<Value> {
    let hint = |tried: TriedHint| {
        json!({
            "address": tried.hint.address,
            "source": tried.hint.source.as_str(),
            "holds_key": tried.is_true,
        })
    };
    local_hints(link).into_iter().map(hint).collect()
}
