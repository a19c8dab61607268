//! A scenario with other times: a seed determines the times of link changes and flow starts.
//!
//! ```text
//!  the file   0 ──────── dead ──────────────────── lives ───────▶
//!  seed 1     0 ─── dead ─────── lives ─────────────────────────▶   each gap 0.2 to 1.2 times as long
//!  seed 2     0 ───────── dead ──────────────────────── lives ──▶
//! ```
//!
//! The file's expectations in seconds and bytes hold only for its own times. [`try_varied`] checks
//! the properties that hold for any times. How long a flow may be silent then depends on when a
//! link carries packets at all, by UDP or in a stream:
//!
//! ```text
//!  wlan0   ├───────────────┤       lan0 (streams only)  ├──────────────
//!  must carry  ├───────────┤          1.5 s             ┊·····├────────
//!                          └────── longest silence ──────────▶┘
//! ```

use cedos_lab_link::{LinkReach, TcpPassage, seeded};
use cedos_lab_scenario::{EventKind, Scenario, ScenarioLinkEvent};
use rand::Rng;

use crate::Coverage;
use crate::draw::{CONNECT_S_MAX, SILENCE_S_MAX, STREAM_SILENCE_S_MAX};

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
    let silence_s = match varied.streams {
        true => STREAM_SILENCE_S_MAX,
        false => SILENCE_S_MAX,
    };
    // A stream beside a known HTTP proxy waits for that first. // edge/stream
    let http_proxy_s = if varied.has_http_proxy() { 0.5 } else { 0.0 };
    let silence_s = silence_s + http_proxy_s;
    let silence_s = longest_gap(&carrying(&varied, SILENCE_S_MAX)).max(silence_s);
    let connect_s = CONNECT_S_MAX + http_proxy_s;
    let connects = carrying(&varied, connect_s);
    for (number, flow) in varied.flows.iter().enumerate() {
        let connected = connected_by(&connects, flow.start_s + connect_s);
        let of_flow = [
            "sha256_ok".to_owned(),
            "deadline_met".to_owned(),
            format!("first_byte_s <= {connected}"),
            format!("silence_max_s <= {silence_s}"),
        ];
        let texts = of_flow.map(|text| format!("flows[{number}].{text}"));
        (varied.expectations).extend(texts.map(|text| cedos_lab_scenario::Expect { text }));
    }
    varied
}

/// Whether a link carries packets after this event, by UDP or in a stream.
fn is_usable(event: &ScenarioLinkEvent, streams: bool) -> bool {
    let at = &event.condition;
    let direct = at.reach.passes_tcp() && at.tcp == TcpPassage::Pass;
    let streams = streams && (direct || at.reach == LinkReach::HttpProxy);
    let passes = at.reach.passes_udp() || streams;
    let lost = at.down.loss.random.max(at.upward.loss.random);
    at.up && !at.dead && !at.stalled && passes && lost < 1.0
}

/// When links carry packets and have done so for `since_s`: from, until, in seconds.
fn carrying(scenario: &Scenario, since_s: f64) -> Vec<(f64, f64)> {
    let mut usable: Vec<Option<f64>> = vec![None; scenario.links.len()];
    let mut found = Vec::new();
    let mut end = |from: Option<f64>, until: f64| {
        let carries = from.map(|from| from + since_s).filter(|at| *at < until);
        found.extend(carries.map(|at| (at, until)));
    };
    for event in scenario.timeline() {
        let at = event.at.as_secs_f64();
        let renewed = matches!(
            event.kind,
            EventKind::Up { .. } | EventKind::NewAddress { .. }
        );
        let link = &mut usable[event.link];
        let is = is_usable(&event, scenario.streams);
        if renewed || !is {
            end(link.take(), at);
        }
        if is {
            link.get_or_insert(at);
        }
    }
    for link in usable {
        end(link, scenario.duration_s);
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found
}

/// The longest time in which no link carries, from the start or between two of these times.
fn longest_gap(carried: &[(f64, f64)]) -> f64 {
    let (mut longest, mut until) = (0.0f64, 0.0f64);
    for (from, to) in carried {
        longest = longest.max(from - until);
        until = until.max(*to);
    }
    longest
}

/// The first time from `earliest` on at which a link carries.
fn connected_by(carried: &[(f64, f64)], earliest: f64) -> f64 {
    let later = carried.iter().filter(|(_, until)| *until > earliest);
    let first = later.map(|(from, _)| from.max(earliest));
    first.min_by(f64::total_cmp).unwrap_or(earliest)
}

/// Runs the scenario with the times of a seed. It checks that every flow is complete, and in time
/// if it has a deadline; that its first byte arrives within 2.5 s of its start, or of when a link
/// carries; and that no silence lasts longer than 1.5 s beyond the time in which none does (2 s where the
/// proxy accepts streams).
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
            // Nothing carries while the only link is dead.
            let silence = &other.expectations[3].text;
            let longest: f64 = silence.rsplit(' ').next().unwrap().parse().unwrap();
            // What it carried in less than 1.5 s does not count.
            let carried_until = if times[0] > 1.5 { times[0] } else { 0.0 };
            let gap = times[1] + 1.5 - carried_until;
            assert!((longest - gap).abs() < 1e-6, "{silence}");
            seen.push(times[0].to_bits());
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 50);
        let streams = text.replace("dead =", "udp_blocked =");
        let parse = |text: &str| Scenario::parse("file", text, &mut |_| unreachable!()).unwrap();
        let blocked = carrying(&parse(&streams), 1.5);
        assert_eq!(blocked, [(1.5, 5.0), (21.5, 60.0)]);
        assert_eq!(connected_by(&blocked, 10.0), 21.5);
        assert_eq!(connected_by(&blocked, 30.0), 30.0);
        let streams = parse(&format!("streams = true\n{streams}"));
        assert_eq!(carrying(&streams, 1.5), [(1.5, 60.0)]);
        let again = varied(&scenario, 7);
        assert_eq!(
            again.links[0].at[0].t_s,
            varied(&scenario, 7).links[0].at[0].t_s
        );
    }
}
