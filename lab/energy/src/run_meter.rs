//! The energy of a run: the radios of a scenario's links, from the times of the packets that passed the
//! device's end of each link.

use std::collections::BTreeMap;

use cedos_lab_scenario::{EnergyReport, Scenario};
use d2tp_time::{Span, Time};

use crate::{RadioDirection, RadioEnergyMeter, radios};

/// The time after which every radio sleeps again: the last tail counts.
const AFTER: Span = Span::from_secs(60); // the longest stage of a profile

/// Computes the energy of a run as its packets pass.
#[derive(Clone, Debug)]
pub struct RunEnergyMeter {
    /// The name of each link, and the meter of its radio; `None` if the scenario names none.
    meters: Vec<(String, Option<RadioEnergyMeter>)>,
    latest: Vec<Time>,
}

impl RunEnergyMeter {
    /// The meter for a scenario, if that says which radios the links have.
    pub fn of(scenario: &Scenario) -> Option<RunEnergyMeter> {
        let energy = scenario.energy.as_ref()?;
        let meter = |link: &cedos_lab_scenario::Link| {
            let radio = energy.radio(&link.name).map(radios::radio);
            let meter = radio.map(|radio| RadioEnergyMeter::new(radio, Time::ZERO));
            (link.name.clone(), meter)
        };
        let meters: Vec<_> = scenario.links.iter().map(meter).collect();
        Some(RunEnergyMeter {
            latest: vec![Time::ZERO; meters.len()],
            meters,
        })
    }

    /// Records a packet on a link.
    pub fn on_packet(&mut self, at: Time, link: usize, way: RadioDirection, bytes: u32) {
        let Some((_, Some(meter))) = self.meters.get_mut(link) else {
            return;
        };
        // The two directions are counted apart, so a packet may be told a little late.
        self.latest[link] = self.latest[link].max(at);
        meter.on_bytes(self.latest[link], u64::from(bytes), way);
    }

    /// The energy above idle until the radios slept after `end`, in which flows got these bytes.
    pub fn report(&self, end: Time, bytes: u64) -> EnergyReport {
        let mut joules_by_link = BTreeMap::new();
        for (name, meter) in &self.meters {
            if let Some(meter) = meter {
                let energy = meter.clone().until(end + AFTER);
                joules_by_link.insert(name.clone(), energy.total() - energy.idle);
            }
        }
        let joules: f64 = joules_by_link.values().sum();
        let mbit = bytes as f64 * 8e-6;
        EnergyReport {
            joules,
            joules_by_link,
            mbit_per_joule: (joules > 0.0).then(|| mbit / joules),
            mbps: (end > Time::ZERO).then(|| mbit / end.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_radio_counts_from_the_packets_of_its_link_alone() {
        let text = "duration_s = 100\n[energy]\nwifi = \"i997-wifi\"\ncellular = \"i997-3g\"\n\
                    [[link]]\nname = \"wlan0\"\n[[link]]\nname = \"wwan0\"\n[[link]]\nname = \"eth0\"\n";
        let scenario = Scenario::parse("test", text, &mut |_| unreachable!()).expect("it is right");
        let mut meter = RunEnergyMeter::of(&scenario).expect("it has radios");
        let at = Time::from_secs_f64(1.0);
        meter.on_packet(at, 1, RadioDirection::Down, 1_000);
        meter.on_packet(Time::ZERO, 1, RadioDirection::Up, 1_000);
        meter.on_packet(at, 2, RadioDirection::Up, 1_000);
        let report = meter.report(Time::from_secs_f64(10.0), 1_000_000);
        assert_eq!(report.joules_by_link["wlan0"], 0.0);
        assert!(!report.joules_by_link.contains_key("eth0"), "{report:?}");
        // 1.3 J to wake, 4 s at 1.3 W, 10 s at 0.3 W.
        assert!((report.joules - 9.5).abs() < 1e-9, "{report:?}");
        assert!((report.mbit_per_joule.unwrap() - 8.0 / 9.5).abs() < 1e-9);
        assert_eq!(report.mbps, Some(0.8));
    }
}
