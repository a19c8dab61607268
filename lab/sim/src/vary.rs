//! A scenario with other times: a seed determines the times of link changes and flow starts.
//!
//! ```text
//!  the file   0 ──────── dead ──────────────────── lives ───────▶
//!  seed 1     0 ─── dead ─────── lives ─────────────────────────▶   each gap 0.2 to 1.2 times as long
//!  seed 2     0 ───────── dead ──────────────────────── lives ──▶
//! ```
//!
//! The file's expectations in seconds and bytes hold only for its own times. [`try_varied`] checks
//! the properties that hold for any times.

use cedos_lab_link::seeded;
use cedos_lab_scenario::Scenario;
use rand::Rng;

use crate::Coverage;
use crate::draw::{CONNECT_S_MAX, SILENCE_S_MAX};

/// The random stream from which times are drawn.
const TIMES_STREAM: u64 = 1 << 34;
/// The shortest and the longest gap between two changes, relative to the file's gap.
const GAPS: (f64, f64) = (0.2, 1.2);
/// The latest start of a flow after that of the file, in seconds.
const LATER_S_MAX: f64 = 3.0;

/// The scenario with the times of a seed.
pub fn varied(scenario: &Scenario, seed: u64) -> Scenario {
    let mut rng = seeded(seed, TIMES_STREAM);
    let mut varied = scenario.clone();
    varied.seed = seed;
    for link in &mut varied.links {
        link.at.sort_by(|a, b| a.t_s.total_cmp(&b.t_s));
        let (mut before, mut at) = (0.0, 0.0);
        for change in &mut link.at {
            at += (change.t_s - before) * rng.random_range(GAPS.0..GAPS.1);
            before = std::mem::replace(&mut change.t_s, at);
        }
    }
    for flow in &mut varied.flows {
        let later = rng.random_range(0.0..LATER_S_MAX);
        flow.start_s += later;
        flow.deadline_s = flow.deadline_s.map(|by| by + later);
    }
    varied.expectations.clear();
    for (number, flow) in varied.flows.iter().enumerate() {
        let connected = flow.start_s + CONNECT_S_MAX;
        let of_flow = [
            "sha256_ok".to_owned(),
            "deadline_met".to_owned(),
            format!("first_byte_s <= {connected}"),
            format!("silence_max_s <= {SILENCE_S_MAX}"),
        ];
        let texts = of_flow.map(|text| format!("flows[{number}].{text}"));
        (varied.expectations).extend(texts.map(|text| cedos_lab_scenario::Expect { text }));
    }
    varied
}

/// Runs the scenario with the times of a seed. It checks that every flow is complete, and in time
/// if it has a deadline; that its first byte arrives within 2.5 s of its start, and that no silence
/// lasts longer than 1.5 s.
///
/// # Errors
/// A description of the fault.
pub fn try_varied(scenario: &Scenario, seed: u64) -> Result<Coverage, String> {
    crate::fuzz::try_scenario(&varied(scenario, seed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_moves_changes_and_starts_and_keeps_their_order() {
        let text = "duration_s = 60
            [[link]]
            name = \"wlan0\"
            [[link.at]]
            t_s = 5
            dead = true
            [[link.at]]
            t_s = 20
            dead = false
            [[flow]]
            bytes = 1000
            deadline_s = 40";
        let scenario = Scenario::parse("file", text, &mut |_| unreachable!()).unwrap();
        let mut seen = Vec::new();
        for seed in 0..50 {
            let other = varied(&scenario, seed);
            let times: Vec<f64> = other.links[0].at.iter().map(|at| at.t_s).collect();
            assert!((1.0..6.0).contains(&times[0]), "{times:?}");
            assert!(times[1] > times[0] + 3.0 - 1e-9, "{times:?}");
            let flow = &other.flows[0];
            assert!((0.0..LATER_S_MAX).contains(&flow.start_s));
            assert_eq!(flow.deadline_s, Some(40.0 + flow.start_s));
            assert_eq!(other.expectations.len(), 4);
            seen.push(times[0].to_bits());
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 50);
        let again = varied(&scenario, 7);
        assert_eq!(
            again.links[0].at[0].t_s,
            varied(&scenario, 7).links[0].at[0].t_s
        );
    }
}
