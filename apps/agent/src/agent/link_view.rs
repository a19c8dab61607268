//! The links as seen by transfers: the system's state, the user's costs, and whether the network's
//! cap is used up.
//!
//! ```text
//!  LinkMonitor ── links and costs ──┐
//!  NetworkManager ── networks ──────┼─▶ NearbyNetworks: which network is behind which interface
//!  cedos net set ── CostOverrides ──┤
//!  caps ── spent ───────────────────┴─▶ links with their final costs
//! ```
//!
//! A link is identified by its network: by the SSID, or by the operator of a mobile network. The
//! cost set for a network applies wherever the device meets it again, and not to the next network
//! of the same interface. If the network is unknown, the interface's name identifies it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use d2tp_links::{
    ChangeHandle, CostClass, Link, LinkKind, LinkMonitor, NetworkInfo, NetworkManager, NetworkRule,
    NetworkRules, Networks,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::fetch::jobs;

/// Cost classes that the user set for networks, by name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct CostOverrides(BTreeMap<String, String>);

/// Networks whose caps are used up, each with the reason in words.
pub type ExhaustedCaps = BTreeMap<String, String>;

/// The networks in reach, and which of them is behind which device.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NearbyNetworks {
    /// The networks according to NetworkManager; none if it does not run.
    pub networks: Networks,
    /// The name of the network behind each device.
    pub names: BTreeMap<String, String>,
}

impl NearbyNetworks {
    fn of(links: &[Link], networks: Networks) -> NearbyNetworks {
        let name = |link: &Link| {
            let name = network_name(link, networks.of(&link.name));
            (link.name.clone(), name)
        };
        let names = links.iter().map(name).collect();
        NearbyNetworks { networks, names }
    }

    /// The name of the network behind a device; the device's own name if that is unknown.
    pub fn name(&self, device: &str) -> String {
        let known = self.names.get(device).cloned();
        known.unwrap_or_else(|| device.to_owned())
    }

    /// The device's location: the SSID of its network, if it is on Wi-Fi.
    pub fn location(&self) -> Option<&str> {
        let on = self.networks.networks.iter();
        let on = on.filter_map(|network| network.access_point.as_ref());
        on.max_by_key(|point| point.signal_percent)
            .map(|point| &*point.ssid)
    }
}

/// The name of a link's network: `wifi:SSID`, `carrier:CODE`, else the device.
pub fn network_name(link: &Link, network: Option<&NetworkInfo>) -> String {
    let point = network.and_then(|network| network.access_point.as_ref());
    let operator = network.and_then(|network| network.operator.as_ref());
    match (point, operator) {
        (Some(point), _) if !point.ssid.is_empty() => format!("wifi:{}", point.ssid),
        (_, Some(code)) => format!("carrier:{code}"),
        _ => link.name.clone(),
    }
}

/// The links, and the networks behind them.
pub struct LinkView {
    said: watch::Sender<CostOverrides>,
    spent: watch::Sender<ExhaustedCaps>,
    links: watch::Receiver<Arc<Vec<Link>>>,
    around: watch::Receiver<Arc<NearbyNetworks>>,
    rules: NetworkRules,
    manager: Option<NetworkManager>,
    hint: ChangeHandle,
    file: Option<PathBuf>,
}

fn class_of(word: &str) -> Option<CostClass> {
    [CostClass::Free, CostClass::Metered, CostClass::Roaming]
        .into_iter()
        .find(|class| class.to_string() == word)
}

fn apply(
    links: &[Link],
    around: &NearbyNetworks,
    said: &CostOverrides,
    spent: &ExhaustedCaps,
) -> Arc<Vec<Link>> {
    let mut links = links.to_vec();
    for link in &mut links {
        let name = around.name(&link.name);
        let word = said.0.get(&name).or_else(|| said.0.get(&link.name));
        if let Some(class) = word.and_then(|word| class_of(word)) {
            link.class.class = class;
            link.class.because = "set by you (cedos net set)".into();
        }
        if let Some(why) = spent.get(&name) {
            // Nothing goes over such a link unasked.
            link.class.class = CostClass::Roaming;
            link.class.because.clone_from(why);
        }
    }
    Arc::new(links)
}

impl LinkView {
    /// Creates a view over the system's links. Must be called on a runtime.
    pub fn new(
        monitor: &LinkMonitor,
        manager: Option<NetworkManager>,
        rules: NetworkRules,
    ) -> LinkView {
        let file = jobs::state_directory()
            .ok()
            .map(|state| state.join("links.json"));
        let text = file.as_ref().and_then(|file| std::fs::read(file).ok());
        let known: CostOverrides = text
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        let mut system = monitor.subscribe();
        let networks = |manager: &Option<NetworkManager>| {
            manager
                .as_ref()
                .map(NetworkManager::networks)
                .unwrap_or_default()
        };
        let first = NearbyNetworks::of(&system.borrow(), networks(&manager));
        let judged = apply(&system.borrow(), &first, &known, &ExhaustedCaps::default());
        let (publish, links) = watch::channel(judged);
        let (sender, around) = watch::channel(Arc::new(first));
        let (said, mut flags_receiver) = watch::channel(known);
        let (spent, mut out) = watch::channel(ExhaustedCaps::default());
        let mut asked = manager.clone();
        tokio::spawn(async move {
            loop {
                let manager_changed = async {
                    match &mut asked {
                        Some(manager) => manager.changed().await,
                        None => std::future::pending().await,
                    }
                };
                let going = tokio::select! {
                    changed = system.changed() => changed.is_ok(),
                    changed = flags_receiver.changed() => changed.is_ok(),
                    changed = out.changed() => changed.is_ok(),
                    () = manager_changed => true,
                };
                if !going {
                    return;
                }
                let now = NearbyNetworks::of(&system.borrow_and_update(), networks(&asked));
                let judged = {
                    let (said, spent) =
                        (flags_receiver.borrow_and_update(), out.borrow_and_update());
                    apply(&system.borrow(), &now, &said, &spent)
                };
                // Who hears of a link asks which network it is.
                sender.send_if_modified(|around| {
                    let changed = **around != now;
                    *around = Arc::new(now);
                    changed
                });
                publish.send_if_modified(|links| {
                    let changed = **links != *judged;
                    *links = judged;
                    changed
                });
            }
        });
        LinkView {
            said,
            spent,
            links,
            around,
            rules,
            manager,
            hint: monitor.handle(),
            file,
        }
    }

    /// The links now and as they change.
    pub fn links(&self) -> watch::Receiver<Arc<Vec<Link>>> {
        self.links.clone()
    }

    /// The networks in reach, now and as they change.
    pub fn nearby(&self) -> watch::Receiver<Arc<NearbyNetworks>> {
        self.around.clone()
    }

    /// NetworkManager, where it runs.
    pub fn manager(&self) -> Option<NetworkManager> {
        self.manager.clone()
    }

    /// Triggers a new read of the links.
    pub fn refresh(&self) {
        self.hint.network_changed();
    }

    /// The user's rule for the network behind a link.
    pub fn rule(&self, link: &Link) -> Option<&NetworkRule> {
        let around = self.around.borrow();
        let network = around.networks.of(&link.name);
        self.rules.of(&link.name, link.kind, network)
    }

    /// Sets the networks whose caps are used up.
    pub fn set_exhausted(&self, spent: ExhaustedCaps) {
        self.spent.send_if_modified(|known| {
            let changed = *known != spent;
            *known = spent;
            changed
        });
    }

    /// Networks whose caps are used up.
    pub fn exhausted(&self) -> ExhaustedCaps {
        self.spent.borrow().clone()
    }

    /// Takes the user's word for what the network behind a device, or one of this SSID, costs, or takes
    /// it back (`auto`). Which network that is.
    ///
    /// # Errors
    /// The word is none, or nothing has this name.
    pub fn set_cost(&self, name: &str, word: &str) -> Result<String, String> {
        if word != "auto" && class_of(word).is_none() {
            return Err(format!(
                "`{word}` is not one of free, metered, roaming, auto"
            ));
        }
        let named = self.find(name)?;
        self.said.send_modify(|said| {
            if word == "auto" {
                said.0.remove(&named);
                // What was said of the device before its network was known.
                said.0.remove(name);
            } else {
                said.0.insert(named.clone(), word.to_owned());
            }
        });
        let Some(file) = &self.file else {
            return Ok(named);
        };
        let written = file
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| jobs::replace(file, &*self.said.borrow()));
        match written {
            Ok(()) => Ok(named),
            Err(error) => Err(format!("it holds until the agent exits: {error}")),
        }
    }

    fn find(&self, name: &str) -> Result<String, String> {
        let around = self.around.borrow();
        if let Some(named) = around.names.get(name) {
            return Ok(named.clone());
        }
        let in_reach = around.networks.networks.iter().flat_map(|n| &n.in_sight);
        let ssid = format!("wifi:{name}");
        let said = self.said.borrow();
        let known = |wanted: &str| {
            said.0.contains_key(wanted) || around.names.values().any(|known| known == wanted)
        };
        if known(&ssid) || in_reach.clone().any(|point| point.ssid == name) {
            return Ok(ssid);
        }
        if known(name) || name.starts_with("wifi:") || name.starts_with("carrier:") {
            return Ok(name.to_owned());
        }
        Err(format!(
            "there is no device or network `{name}`; `cedos net` lists them. For one that is not \
             in range, use wifi:SSID or carrier:CODE"
        ))
    }
}

/// A name for each kind of radio of which there is one, so that its history survives a change of the
/// device's name.
pub fn radio_slots(links: &[Link]) -> BTreeMap<String, String> {
    let alike = |kind: LinkKind| links.iter().filter(|link| link.kind == kind).count();
    let slot = |link: &Link| match (link.kind, alike(link.kind)) {
        (LinkKind::Wifi | LinkKind::Cellular, 1) => link.kind.to_string(),
        _ => link.name.clone(),
    };
    links
        .iter()
        .map(|link| (link.name.clone(), slot(link)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_links::{AccessPoint, CostAssessment};

    fn link(name: &str, kind: LinkKind) -> Link {
        Link {
            name: name.into(),
            index: 1,
            kind,
            class: CostAssessment {
                class: CostClass::Free,
                because: "test".into(),
            },
            up: true,
            carrier: true,
            mtu_bytes: 1_500,
            dhcp_proxy: None,
            addresses: Vec::new(),
            routes: Vec::new(),
        }
    }

    fn on(device: &str, ssid: &str) -> Networks {
        let point = AccessPoint {
            ssid: ssid.into(),
            bssid: "02:00:00:00:00:01".into(),
            signal_percent: 50,
            frequency_mhz: 2_412,
            known: true,
        };
        let network = NetworkInfo {
            device: device.into(),
            access_point: Some(point),
            ..NetworkInfo::default()
        };
        Networks {
            networks: vec![network],
            under_vpns: Vec::new(),
        }
    }

    #[test]
    fn what_was_said_of_a_network_holds_on_any_device_and_not_of_the_next_network() {
        let said = CostOverrides([("wifi:Train".to_owned(), "metered".to_owned())].into());
        let class = |device: &str, ssid: &str| {
            let links = [link(device, LinkKind::Wifi)];
            let around = NearbyNetworks::of(&links, on(device, ssid));
            apply(&links, &around, &said, &ExhaustedCaps::new())[0]
                .class
                .class
        };
        assert_eq!(class("wlan0", "Train"), CostClass::Metered);
        assert_eq!(class("wlx0c9d", "Train"), CostClass::Metered);
        assert_eq!(class("wlan0", "Home"), CostClass::Free);
    }

    #[test]
    fn a_network_whose_cap_is_used_up_carries_nothing_unasked() {
        let links = [link("wlan0", LinkKind::Wifi)];
        let around = NearbyNetworks::of(&links, on("wlan0", "Train"));
        let spent =
            ExhaustedCaps::from([("wifi:Train".to_owned(), "its cap is used up".to_owned())]);
        let judged = apply(&links, &around, &CostOverrides::default(), &spent);
        assert_eq!(judged[0].class.class, CostClass::Roaming);
        assert_eq!(judged[0].class.because, "its cap is used up");
    }

    #[test]
    fn a_radio_keeps_its_past_when_its_device_gets_another_name() {
        let slot = |names: &[&str]| {
            let links: Vec<Link> = names
                .iter()
                .map(|name| link(name, LinkKind::Wifi))
                .collect();
            radio_slots(&links)[names[0]].clone()
        };
        assert_eq!(slot(&["wlan0"]), slot(&["wlp3s0"]));
        assert_ne!(slot(&["wlan0", "wlan1"]), slot(&["wlan1", "wlan0"]));
    }
}
