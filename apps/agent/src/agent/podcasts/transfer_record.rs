//! What the log of transfers will keep of a download that runs, from its events and from the device's links.
//!
//! ```text
//!  progress {bytes, carried_by_link} ─▶ bytes by network; the link that carries most is the carrier
//!  switch {from, to} ────────────────▶ a switch, if the network is another one
//!  links: the carrier's addresses are gone ─▶ a loss: here an ordinary connection broke
//! ```

use std::collections::BTreeMap;
use std::net::IpAddr;

use cedos_readycast::{LoggedLoss, LoggedNetwork, LoggedSwitch, SWITCHES_MAX, TransferRecord};
use jiff::Timestamp;
use serde_json::Value;

/// A link of the device, as the log knows it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LoggedLink {
    /// Name of the device.
    pub(super) device: String,
    /// The network behind it.
    pub(super) network: LoggedNetwork,
    /// Addresses from which it can be used now.
    pub(super) addresses: Vec<IpAddr>,
}

/// The record of a download that runs, and the link that carries it.
#[derive(Debug, Default)]
pub(super) struct RunningRecord {
    pub(super) record: TransferRecord,
    /// The link that carried most of the bytes that came last; none while it is lost.
    carrier: Option<LoggedLink>,
    /// Networks of devices that carried, also of those that are gone.
    known: BTreeMap<String, LoggedNetwork>,
}

impl RunningRecord {
    /// Takes up a record that an earlier agent stored.
    pub(super) fn of(record: TransferRecord) -> RunningRecord {
        RunningRecord {
            record,
            ..RunningRecord::default()
        }
    }

    /// Notes an event. Returns whether the record has something new that a killed agent should not lose.
    pub(super) fn on_event(&mut self, event: &Value, links: &[LoggedLink], now: Timestamp) -> bool {
        let mut is_new = self.on_links(links, now);
        is_new |= self.count(event, links);
        let bytes = event["bytes"].as_u64().unwrap_or(0);
        if bytes > self.record.bytes {
            self.record.bytes = bytes;
            self.record.last_byte_at = Some(now);
            is_new |= self.record.first_byte_at.is_none();
            self.record.first_byte_at.get_or_insert(now);
        }
        let switch = (
            &event["event"],
            event["from"].as_str(),
            event["to"].as_str(),
        );
        if let (Value::String(kind), Some(from), Some(to)) = switch
            && kind == "switch"
        {
            is_new |= self.note_switch(from, to, links, now);
        }
        is_new
    }

    /// Notes the links as they are now. Returns whether the network that carried the download was lost.
    pub(super) fn on_links(&mut self, links: &[LoggedLink], now: Timestamp) -> bool {
        let Some(carrier) = &self.carrier else {
            return false;
        };
        let link = links.iter().find(|link| link.device == carrier.device);
        let has_stayed = link.is_some_and(|link| {
            let mut addresses = link.addresses.iter();
            addresses.any(|address| carrier.addresses.contains(address))
        });
        if has_stayed {
            return false;
        }
        self.carrier = None;
        if self.record.bytes == 0 || self.record.losses.len() >= SWITCHES_MAX {
            return false;
        }
        self.record.losses.push(LoggedLoss {
            at: now,
            bytes: self.record.bytes,
        });
        true
    }

    /// Counts what devices carried since the last event. Returns whether a network carried for the first time.
    fn count(&mut self, event: &Value, links: &[LoggedLink]) -> bool {
        let networks = self.record.carried.len();
        let mut most = 0;
        let carried = event["carried_by_link"].as_object();
        for (device, total) in carried.into_iter().flatten() {
            let total = total.as_u64().unwrap_or(0);
            let counted = self.record.counted.entry(device.clone()).or_default();
            let more = total.saturating_sub(*counted);
            *counted = total.max(*counted);
            if more == 0 {
                continue;
            }
            let link = links.iter().find(|link| link.device == *device);
            if let Some(link) = link {
                // What still comes after a loss was carried by the network before.
                if !link.addresses.is_empty() || !self.known.contains_key(device) {
                    self.known.insert(device.clone(), link.network.clone());
                }
            }
            let network = self.network(device);
            self.record.add(&network, more);
            if let Some(link) = link.filter(|link| more > most && !link.addresses.is_empty()) {
                most = more;
                self.carrier = Some(link.clone());
            }
        }
        self.record.carried.len() > networks
    }

    /// The network that was last behind a device.
    fn network(&self, device: &str) -> LoggedNetwork {
        let unknown = || LoggedNetwork {
            name: Some(device.to_owned()),
            kind: "other".to_owned(),
            class: "free".to_owned(),
        };
        self.known.get(device).cloned().unwrap_or_else(unknown)
    }

    fn note_switch(&mut self, from: &str, to: &str, links: &[LoggedLink], now: Timestamp) -> bool {
        let before = self.network(from);
        let link = links.iter().find(|link| link.device == to);
        let after = link.map_or_else(|| self.network(to), |link| link.network.clone());
        self.known.insert(to.to_owned(), after.clone());
        if before == after || self.record.switches.len() >= SWITCHES_MAX {
            return false;
        }
        self.record.switches.push(LoggedSwitch {
            at: now,
            bytes: self.record.bytes,
            from: before,
            to: after,
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(s: i64) -> Timestamp {
        Timestamp::from_second(s).expect("a time")
    }

    fn link(device: &str, name: &str, address: Option<&str>) -> LoggedLink {
        let (kind, class) = match device {
            "wlan0" => ("wifi", "free"),
            _ => ("cellular", "metered"),
        };
        LoggedLink {
            device: device.to_owned(),
            network: LoggedNetwork {
                name: Some(name.to_owned()),
                kind: kind.to_owned(),
                class: class.to_owned(),
            },
            addresses: address
                .iter()
                .map(|a| a.parse().expect("an address"))
                .collect(),
        }
    }

    fn progress(bytes: u64, wlan0: u64, wwan0: u64) -> Value {
        json!({"event": "progress", "bytes": bytes, "carried_by_link": {"wlan0": wlan0, "wwan0": wwan0}})
    }

    fn carried(record: &TransferRecord) -> Vec<(&str, u64)> {
        let each = record.carried.iter();
        each.map(|c| (c.network.name.as_deref().unwrap_or_default(), c.bytes))
            .collect()
    }

    #[test]
    fn bytes_switches_and_losses_are_of_networks_and_not_of_devices() {
        let cell = || link("wwan0", "carrier:1", Some("198.51.100.1"));
        let home = [link("wlan0", "wifi:Home", Some("192.0.2.1")), cell()];
        let away = [link("wlan0", "wlan0", None), cell()];
        let work = [link("wlan0", "wifi:Work", Some("203.0.113.7")), cell()];
        let mut running = RunningRecord::default();
        assert!(running.on_event(&progress(100, 100, 0), &home, at(1)));
        assert!(!running.on_event(&progress(150, 150, 0), &home, at(2)));
        // Gone, and what was under way still trickles in.
        assert!(running.on_links(&away, at(3)));
        assert!(!running.on_links(&away, at(4)));
        running.on_event(&progress(160, 160, 0), &away, at(4));
        let switch = json!({"event": "switch", "from": "wlan0", "to": "wwan0", "bytes": 160});
        assert!(running.on_event(&switch, &away, at(5)));
        running.on_event(&progress(200, 160, 40), &away, at(6));
        // Back by choice: nothing was lost.
        let back = json!({"event": "switch", "from": "wwan0", "to": "wlan0", "bytes": 200});
        assert!(running.on_event(&back, &work, at(8)));
        running.on_event(&progress(500, 460, 40), &work, at(9));
        let record = &running.record;
        assert_eq!(
            carried(record),
            [("wifi:Home", 160), ("carrier:1", 40), ("wifi:Work", 300)]
        );
        let losses: Vec<_> = record
            .losses
            .iter()
            .map(|loss| (loss.at, loss.bytes))
            .collect();
        assert_eq!(losses, [(at(3), 150)]);
        let switches: Vec<_> = record
            .switches
            .iter()
            .map(|s| (s.from.kind.as_str(), s.to.name.as_deref(), s.bytes))
            .collect();
        assert_eq!(
            switches,
            [
                ("wifi", Some("carrier:1"), 160),
                ("cellular", Some("wifi:Work"), 200)
            ]
        );
        assert_eq!(record.first_byte_at, Some(at(1)));
        assert_eq!(record.last_byte_at, Some(at(9)));
    }

    #[test]
    fn another_address_of_the_same_device_is_a_loss_and_a_further_one_is_not() {
        let mut running = RunningRecord::default();
        let first = link("wlan0", "wifi:A", Some("192.0.2.1"));
        running.on_event(&progress(10, 10, 0), std::slice::from_ref(&first), at(1));
        let mut both = first.clone();
        both.addresses
            .push("2001:db8::1".parse().expect("an address"));
        assert!(!running.on_links(&[both], at(2)));
        let other = link("wlan0", "wifi:A", Some("192.0.2.99"));
        assert!(running.on_links(std::slice::from_ref(&other), at(3)));
        // The same network is no switch.
        let again = json!({"event": "switch", "from": "wlan0", "to": "wlan0", "bytes": 10});
        assert!(!running.on_event(&again, &[other], at(4)));
        assert_eq!(running.record.losses.len(), 1);
    }

    #[test]
    fn a_record_that_an_earlier_agent_stored_goes_on() {
        let links = [link("wlan0", "wifi:A", Some("192.0.2.1"))];
        let mut earlier = RunningRecord::default();
        earlier.on_event(&progress(100, 100, 0), &links, at(1));
        let mut later = RunningRecord::of(earlier.record);
        let work = [link("wlan0", "wifi:B", Some("192.0.2.2"))];
        later.on_event(&progress(130, 130, 0), &work, at(2));
        assert_eq!(carried(&later.record), [("wifi:A", 100), ("wifi:B", 30)]);
        assert_eq!(later.record.first_byte_at, Some(at(1)));
    }

    #[test]
    fn the_number_of_switches_and_losses_has_a_limit() {
        let mut running = RunningRecord::default();
        for n in 0..=SWITCHES_MAX as u64 {
            let here = [link("wlan0", &format!("wifi:{n}"), Some("192.0.2.1"))];
            running.on_event(&progress(n + 1, n + 1, 0), &here, at(n as i64));
            let there = json!({"event": "switch", "from": "wlan0", "to": "wwan0", "bytes": n + 1});
            running.on_event(
                &there,
                &[link("wwan0", "c", Some("192.0.2.3"))],
                at(n as i64),
            );
        }
        assert_eq!(running.record.switches.len(), SWITCHES_MAX);
        assert_eq!(running.record.losses.len(), SWITCHES_MAX);
    }
}
