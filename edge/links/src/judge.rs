//! What a byte on a link costs, from all that speaks for it.
//!
//! ```text
//!  a flag ▶ a rule of the settings ▶ the network manager, where it is sure ▶ kind and gateway
//!  a VPN: as what it runs over, the dearest of it
//! ```

use std::net::IpAddr;

use crate::class::{Class, ClassRules, Judgement};
use crate::kind::Kind;
use crate::link::Link;
use crate::network::{Metered, Network, Networks};
use crate::rules::NetworkRules;

/// The user's words: flags win over rules.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Judge {
    /// Given with the command.
    pub flags: ClassRules,
    /// From the settings.
    pub rules: NetworkRules,
}

impl Judge {
    /// The class of one link by itself.
    pub(crate) fn judge(
        &self,
        device: &str,
        kind: Kind,
        gateways: &[IpAddr],
        network: Option<&Network>,
    ) -> Judgement {
        if let Some(told) = self.told(device, kind, network) {
            return told;
        }
        let says = |class, because: &str| Judgement {
            class,
            because: because.into(),
        };
        match network.map(|network| network.metered) {
            Some(Metered::Yes) => says(Class::Metered, "the network's settings say metered"),
            Some(Metered::No) => says(Class::Free, "the network's settings say not metered"),
            Some(Metered::GuessYes) if kind != Kind::Cellular => {
                says(Class::Metered, "the network says that it is a phone's")
            }
            _ => self.flags.judge(device, kind, gateways),
        }
    }

    /// What the user says.
    fn told(&self, device: &str, kind: Kind, network: Option<&Network>) -> Option<Judgement> {
        if let Some(told) = self.flags.told(device) {
            return Some(told);
        }
        let rule = self.rules.of(device, kind, network)?;
        Some(Judgement {
            class: rule.class()?,
            because: format!("your settings say so of {}", rule.about()),
        })
    }

    /// Gives tunnels the class of what they run over: the links that the manager names, else the one the
    /// system prefers.
    pub(crate) fn look_through(&self, links: &mut [Link], networks: &Networks) {
        let below: Vec<Link> = (links.iter())
            .filter(|link| !matches!(link.kind, Kind::Vpn | Kind::Loopback) && link.is_usable())
            .cloned()
            .collect();
        let named = below
            .iter()
            .filter(|link| networks.under_vpns.contains(&link.name));
        let preferred = below.iter().min_by_key(|link| link.metric());
        let dearest = named.max_by_key(|link| link.class.class).or(preferred);
        let Some(dearest) = dearest else {
            return;
        };
        for tunnel in links.iter_mut().filter(|link| link.kind == Kind::Vpn) {
            let network = networks.of(&tunnel.name);
            if self.told(&tunnel.name, tunnel.kind, network).is_none() {
                tunnel.class = Judgement {
                    class: dearest.class.class,
                    because: format!("a tunnel over {}: {}", dearest.name, dearest.class.because),
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::tests::wifi;
    use crate::network::AccessPoint;

    fn network(metered: Metered) -> Network {
        Network {
            device: "wlan0".into(),
            metered,
            access_point: Some(AccessPoint {
                ssid: "Train".into(),
                bssid: "02:00:00:00:00:01".into(),
                signal_percent: 50,
                frequency_mhz: 2_412,
                known: true,
            }),
            ..Network::default()
        }
    }

    fn judge(flag: Option<&str>, rules: &str) -> Judge {
        let flags = ClassRules {
            rules: flag.into_iter().map(|flag| flag.parse().unwrap()).collect(),
        };
        let rules = NetworkRules::parse(rules).unwrap();
        Judge { flags, rules }
    }

    const RULE: &str = "[[network]]\nssid = \"Train\"\nclass = \"roaming\"\n";

    #[test]
    fn a_flag_wins_over_a_rule_and_a_rule_over_the_manager() {
        let class = |judge: Judge, metered| {
            let network = network(metered);
            judge.judge("wlan0", Kind::Wifi, &[], Some(&network)).class
        };
        let both = judge(Some("wlan0=free"), RULE);
        assert_eq!(class(both, Metered::Yes), Class::Free);
        assert_eq!(class(judge(None, RULE), Metered::No), Class::Roaming);
        let auto = RULE.replace("roaming", "auto");
        assert_eq!(class(judge(None, &auto), Metered::Yes), Class::Metered);
    }

    #[test]
    fn the_manager_wins_over_the_kind_where_it_is_sure() {
        let class = |kind, metered| {
            let network = network(metered);
            Judge::default()
                .judge("x0", kind, &[], Some(&network))
                .class
        };
        assert_eq!(class(Kind::Ethernet, Metered::Yes), Class::Metered);
        assert_eq!(class(Kind::Cellular, Metered::No), Class::Free);
        assert_eq!(class(Kind::Wifi, Metered::GuessYes), Class::Metered);
        assert_eq!(class(Kind::Cellular, Metered::GuessNo), Class::Metered);
        let hotspot: IpAddr = "172.20.10.1".parse().unwrap();
        let unsure = network(Metered::GuessNo);
        let judged = Judge::default().judge("wlan0", Kind::Wifi, &[hotspot], Some(&unsure));
        assert_eq!(judged.class, Class::Metered);
    }

    #[test]
    fn a_tunnel_costs_what_the_dearest_link_below_it_does() {
        let cell = Link {
            name: "wwan0".into(),
            index: 4,
            kind: Kind::Cellular,
            class: Judgement {
                class: Class::Metered,
                because: "cellular is taken as metered".into(),
            },
            routes: wifi()
                .routes
                .into_iter()
                .map(|r| crate::DefaultRoute { metric: 700, ..r })
                .collect(),
            ..wifi()
        };
        let tunnel = Link {
            name: "tun0".into(),
            index: 5,
            kind: Kind::Vpn,
            ..wifi()
        };
        let class = |judge: Judge, under: &[&str]| {
            let mut links = [wifi(), cell.clone(), tunnel.clone()];
            let networks = Networks {
                under_vpns: under.iter().map(|name| (*name).to_owned()).collect(),
                ..Networks::default()
            };
            judge.look_through(&mut links, &networks);
            assert_eq!(links[0], wifi());
            links[2].class.clone()
        };
        // The system prefers Wi-Fi; the manager knows better.
        assert_eq!(class(Judge::default(), &[]).class, Class::Free);
        let over_both = class(Judge::default(), &["wwan0", "wlan0"]);
        assert_eq!(over_both.class, Class::Metered);
        assert!(over_both.because.contains("wwan0"), "{}", over_both.because);
        let told = judge(Some("tun*=free"), "");
        assert_eq!(class(told, &["wwan0"]), tunnel.class);
    }
}
