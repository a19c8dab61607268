//! Simulates every scenario of the repository, and checks that a run depends only on its seed.

use std::path::{Path, PathBuf};

use cedos_lab_scenario::Scenario;
use cedos_lab_sim::fuzz::{scenario_text, try_each};
use cedos_lab_sim::{run, vary};

/// Scenarios that do not hold yet, and what is missing. One that holds must leave the list.
const KNOWN_MISSES: [(&str, &str); 7] = [
    ("drain.toml", NO_STORE),
    ("nearer-node.toml", NO_STORE),
    ("node-killed.toml", NO_STORE),
    ("proxy-lost.toml", ONE_NODE),
    ("readycast-week.toml", NO_PODCASTS),
    ("store-killed.toml", NO_STORE),
    ("upgrade.toml", NO_STORE),
];
/// Scenarios of networks that carry nothing: their properties hold at any times.
const DEAD_NETWORKS: [&str; 5] = [
    "portal-at-start.toml",
    "slow-wifi-deadline.toml",
    "udp-blocked-midway.toml",
    "wifi-dead-at-start.toml",
    "wifi-dies-silently.toml",
];
/// The number of random times at which each of them is tried here; the nightly run tries thousands.
const TIMES: u64 = 12;
const ONE_NODE: &str = "a simulated proxy has one node";
const NO_STORE: &str = "a simulated proxy has one node, without a store, and no origin to ask";
const NO_PODCASTS: &str = "a simulated device has no podcast client";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios")
}

fn load(name: &str) -> Scenario {
    Scenario::load(&folder().join(name)).unwrap_or_else(|fault| panic!("{fault}"))
}

fn log_of(scenario: &Scenario) -> Vec<u8> {
    let mut log = Vec::new();
    run(scenario, Some(&mut log)).unwrap();
    log
}

#[test]
fn every_scenario_in_the_repository_holds() {
    let mut names: Vec<_> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 15, "{names:?}");
    let mut wrong = Vec::new();
    for name in &names {
        let scenario = load(name);
        let repeat = || {
            format!(
                "cedos sim run lab/scenarios/{name} --seed {}",
                scenario.seed
            )
        };
        let broken: Vec<String> = match run(&scenario, None) {
            Ok(outcome) => {
                let broken = outcome.report.expectations.iter().filter(|e| !e.holds);
                broken.map(|e| format!("{}: {}", e.text, e.why)).collect()
            }
            Err(fault) => vec![fault.to_string()],
        };
        let known = KNOWN_MISSES.iter().any(|(miss, _)| miss == name);
        match (broken.is_empty(), known) {
            (true, true) => wrong.push(format!("{name} holds now: take it off the list")),
            (false, false) => wrong.push(format!("{}\n  {}", repeat(), broken.join("\n  "))),
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn scenarios_of_dead_networks_hold_at_other_times() {
    for name in DEAD_NETWORKS {
        let scenario = load(name);
        let run = |seed| vary::try_varied(&scenario, seed);
        let tried = try_each(0..TIMES, 0, run, |_| {});
        let wrong: Vec<String> = (tried.failing.iter())
            .map(|failing| {
                let (seed, what) = (failing.seed, &failing.what);
                format!("cedos sim run lab/scenarios/{name} --times {seed}\n  {what}")
            })
            .collect();
        assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    }
}

#[test]
fn the_same_seed_gives_the_same_log_and_another_seed_another_one() {
    let mut scenario = load("crash-proxy.toml");
    let first = log_of(&scenario);
    assert!(first.len() > 100_000);
    assert!(first == log_of(&scenario));
    scenario.seed += 1;
    assert!(first != log_of(&scenario));
}

#[test]
fn a_drawn_scenario_gives_the_same_log_each_time() {
    for seed in [3, 41, 205] {
        let text = scenario_text(seed, 2);
        let scenario = Scenario::parse("drawn", &text, &mut |_| unreachable!()).unwrap();
        let first = log_of(&scenario);
        assert!(first.len() > 1_000);
        assert!(first == log_of(&scenario), "seed {seed}");
    }
}

#[test]
fn hours_asleep_cost_no_steps() {
    // The same transfers with six hours of outage and with twenty minutes.
    let long = run(&load("outage-6h.toml"), None).unwrap();
    let mut short = load("outage-6h.toml");
    short.links[0].at[1].t_s = 1_200.0;
    let short = run(&short, None).unwrap();
    assert!(
        long.steps < short.steps + 100,
        "{} {}",
        long.steps,
        short.steps
    );
}

#[test]
fn no_datagram_leaves_either_end_while_no_link_is_up() {
    let log = String::from_utf8(log_of(&load("outage-6h.toml"))).unwrap();
    let mut hibernated = 0;
    for line in log.lines() {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        let at_s = event["t_ns"].as_u64().unwrap() as f64 / 1e9;
        let what = event["what"].as_str().unwrap();
        // The proxy cannot know at once; it stops after 15 s of silence.
        let quiet_from = if event["who"] == "proxy" { 21.0 } else { 5.0 };
        let sends = what.starts_with("sends");
        assert!(!sends || at_s < quiet_from || at_s >= 21_605.0, "{line}");
        if what.starts_with("hibernates in ") {
            let bytes = what.split(' ').nth(2).and_then(|n| n.parse::<usize>().ok());
            assert!(bytes.unwrap() <= 256, "{what}");
            hibernated += 1;
        }
    }
    assert_eq!(hibernated, 2, "both ends");
}

#[test]
fn a_revoked_metered_link_carries_at_most_a_second_of_its_rate_more() {
    let log = String::from_utf8(log_of(&load("metered-revoke.toml"))).unwrap();
    let (mut revoked_at, mut after, mut before) = (None, 0u64, 0u64);
    for line in log.lines() {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        let what = event["what"].as_str().unwrap();
        if what.starts_with("grants 0 on link 1") {
            (revoked_at, before, after) = (event["t_ns"].as_u64(), before + after, 0);
        }
        // External addresses of link 1 begin with 198.18.16.
        if event["who"] == "proxy" && what.contains("to 198.18.16.") {
            let bytes = what.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok());
            after += bytes.unwrap();
        }
    }
    assert!(
        revoked_at.is_some_and(|ns| ns > 20_000_000_000),
        "{revoked_at:?}"
    );
    assert!(before > 1_000_000, "it had carried {before} B");
    // 8 Mb/s for a second, and headers.
    assert!(after < 1_100_000, "{after} B after the last revocation");
}
