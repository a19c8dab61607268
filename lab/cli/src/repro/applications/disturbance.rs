//! Disturbances of the network in the middle of a transfer. `lab/repro/C10.toml` describes each in a
//! sentence.

use std::fmt::Write as _;

/// The seed of the objects' content and of all random values.
pub const SEED: u64 = 10;
/// The rate of both links in both directions, in Mb/s.
pub const MBPS: u32 = 2;

/// A way to lose the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturbance {
    /// The interface is switched off.
    Off,
    /// The access point, which is also the device's router, loses power.
    Power,
    /// The network behind the access point fails.
    Cut,
    /// The interface is switched off, and another network is available all the time.
    Cellular,
}

impl Disturbance {
    /// Every disturbance, in the order of the table.
    pub const ALL: [Disturbance; 4] = [
        Disturbance::Off,
        Disturbance::Power,
        Disturbance::Cut,
        Disturbance::Cellular,
    ];

    /// The disturbance's name in the name of a cell.
    pub fn word(self) -> &'static str {
        match self {
            Disturbance::Off => "off",
            Disturbance::Power => "power",
            Disturbance::Cut => "cut",
            Disturbance::Cellular => "cellular",
        }
    }

    /// The lab's scenario: disturbed from `from_s` on, for `for_s` seconds.
    pub fn scenario(self, from_s: u32, for_s: u32, duration_s: u32) -> String {
        let (lost, back) = match self {
            Disturbance::Off | Disturbance::Cellular => ("up = false", "up = true"),
            Disturbance::Power => ("dead = true", "dead = false\nrebind = true"),
            Disturbance::Cut => ("cut = true", "cut = false"),
        };
        let mut text = links(self == Disturbance::Cellular, duration_s);
        let wifi = text.find("[[link]]\nname = \"wwan0\"");
        let mut changes = String::new();
        for (at_s, what) in [(from_s, lost), (from_s + for_s, back)] {
            let _ = writeln!(changes, "[[link.at]]\nt_s = {at_s}\n{what}");
        }
        text.insert_str(wifi.unwrap_or(text.len()), &changes);
        text
    }
}

/// A scenario with Wi-Fi and optionally another link, without events.
pub fn links(cellular: bool, duration_s: u32) -> String {
    let mut text = format!(
        "seed = {seed}\nduration_s = {duration_s}\norigin = \"builtin\"\n",
        seed = SEED
    );
    let metered = "class = \"metered\"\nrtt_ms = 60\n";
    for (name, more) in [("wlan0", "rtt_ms = 20\n"), ("wwan0", metered)] {
        if cellular || name == "wlan0" {
            let _ = write!(
                text,
                "[[link]]\nname = \"{name}\"\ndown_mbps = {MBPS}\nup_mbps = {MBPS}\n{more}"
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use cedos_lab_scenario::{EventKind, Scenario};

    fn kinds(disturbance: Disturbance) -> Vec<(usize, f64, EventKind)> {
        let text = disturbance.scenario(14, 10, 60);
        let scenario = Scenario::parse("cell", &text, &mut |_| unreachable!()).expect("a scenario");
        let told = |event: cedos_lab_scenario::ScenarioLinkEvent| {
            (event.link, event.at.as_secs_f64(), event.kind)
        };
        let happens = scenario.timeline();
        happens
            .map(told)
            .filter(|(.., kind)| *kind != EventKind::Attaching)
            .collect()
    }

    #[test]
    fn wifi_goes_and_comes_back_with_another_address_and_cellular_stays() {
        let up = |address| EventKind::Up { address };
        let wifi = [(0, 14.0, EventKind::Down), (0, 24.0, up(1))];
        assert_eq!(
            kinds(Disturbance::Off),
            [&[(0, 0.0, up(0))], &wifi[..]].concat()
        );
        assert_eq!(
            kinds(Disturbance::Cellular),
            [&[(0, 0.0, up(0)), (1, 0.0, up(0))], &wifi[..]].concat()
        );
    }

    #[test]
    fn neither_power_nor_a_cut_takes_the_address() {
        for disturbance in [Disturbance::Power, Disturbance::Cut] {
            let kinds = kinds(disturbance);
            assert!(kinds.iter().any(|(_, at_s, _)| *at_s == 14.0), "{kinds:?}");
            let lost = kinds.iter().any(|(_, at_s, kind)| {
                *kind == EventKind::Down || *at_s > 0.0 && matches!(kind, EventKind::Up { .. })
            });
            assert!(!lost, "{kinds:?}");
        }
    }
}
