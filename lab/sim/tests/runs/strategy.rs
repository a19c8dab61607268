//! Tests that the device uses only the links that its strategy chooses.

use cedos_lab_scenario::Scenario;
use cedos_lab_sim::PassedPacket;
use cedos_lab_sim::strategy::{FixedStrategy, Forecast, ForesightStrategy, Strategy};
use d2tp_sched::energy_policy::RadioPowerModel;
use d2tp_session::Time;

fn run(strategy: Box<dyn Strategy>) -> (u64, Vec<PassedPacket>) {
    let text = r#"
        duration_s = 20
        [[link]]
        name = "wlan0"
        down_mbps = 4
        [[link]]
        name = "wwan0"
        down_mbps = 2
        [[flow]]
        bytes = 50_000_000
        policy = "any"
    "#;
    let scenario =
        Scenario::parse("strategy", text, &mut |_| unreachable!()).expect("the scenario is right");
    let (outcome, passages) = cedos_lab_sim::run_by(&scenario, strategy).expect("it runs");
    (outcome.report.flows[0].bytes, passages)
}

#[test]
fn nothing_passes_a_link_that_was_not_picked() {
    let (bytes, passages) = run(Box::new(FixedStrategy(vec![false, true])));
    // 2 Mb/s for 20 s, less than 4 Mb/s.
    assert!((4_000_000..5_000_000).contains(&bytes), "{bytes}");
    assert!(passages.iter().all(|passage| passage.link == 1));
}

#[test]
fn a_link_that_is_left_is_silent_a_moment_later_and_taken_again() {
    let watt = RadioPowerModel {
        wake_joules: 0.0,
        work_watts: 1.0,
        byte_joules: 0.0,
        tail_joules: 0.0,
    };
    let from = |seconds: f64, bits_per_s: [f64; 2]| Forecast {
        from: Time::from_secs_f64(seconds),
        bits_per_s: bits_per_s.to_vec(),
    };
    // The strategy's choices: the first link, the second from 5 s on, the first again from 15 s on.
    let told = vec![
        from(0.0, [4e6, 2e6]),
        from(5.0, [1e6, 2e6]),
        from(15.0, [4e6, 2e6]),
    ];
    let damping = d2tp_session::Span::ZERO;
    let (bytes, passages) = run(Box::new(ForesightStrategy::new(
        vec![watt; 2],
        told,
        damping,
    )));
    let between = |link: usize, from: f64, until: f64| {
        let here = |p: &&PassedPacket| {
            let at = p.at.as_secs_f64();
            p.link == link && at >= from && at < until
        };
        passages.iter().filter(here).count()
    };
    // It looks half a second ahead, so a link may be taken that much before it becomes the better
    // one.
    assert_eq!(between(1, 0.0, 4.5), 0);
    assert!(between(0, 0.0, 5.0) > 1_000);
    assert_eq!(between(0, 7.0, 14.5), 0);
    assert!(between(1, 7.0, 15.0) > 1_000);
    assert_eq!(between(1, 17.0, 20.0), 0);
    assert!(between(0, 17.0, 20.0) > 500);
    // 4 Mb/s for 10 s, 2 for 10.
    assert!(bytes > 6_500_000, "{bytes}");
}
