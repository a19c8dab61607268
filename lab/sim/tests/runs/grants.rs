//! Tests of the scheduler's grants in the simulator: what they permit on a metered link.

use cedos_lab_scenario::{RunReport, Scenario};
use cedos_lab_sim::{run, run_watched};

fn report(text: &str) -> RunReport {
    let scenario = Scenario::parse("grants", text, &mut |_| unreachable!()).unwrap();
    run(&scenario, None).unwrap().report
}

fn finished_s(text: &str) -> Option<f64> {
    report(text).flows.last().unwrap().finished_s
}

#[test]
fn grants_do_not_hold_back_a_link_whose_round_trip_is_longer_than_a_second() {
    let far = "duration_s = 300\n\
               [[link]]\nname = \"wwan0\"\nclass = \"metered\"\ndown_mbps = 8\nup_mbps = 4\nrtt_ms = 1200\n\
               [[flow]]\nbytes = 10000000\npolicy = \"any\"\n";
    let took = finished_s(far).expect("10 MB in five minutes");
    // Ten seconds at its rate; the rest is the handshake, slow start and the grants that grow with it.
    assert!(took < 60.0, "{took}");
}

#[test]
fn a_link_that_cost_nothing_for_half_an_hour_carries_as_soon_as_it_is_needed() {
    // The NAT has long dropped the path's mapping, and Wi-Fi is up but carries nothing.
    let idle = "duration_s = 2000\n\
                [[link]]\nname = \"wlan0\"\ndown_mbps = 5\nup_mbps = 5\n\
                [[link.at]]\nt_s = 30\ndead = true\n\
                [[link]]\nname = \"wwan0\"\nclass = \"metered\"\ndown_mbps = 8\nup_mbps = 4\nrtt_ms = 60\n\
                nat_idle_s = 60\n\
                [[flow]]\nbytes = 1000000\npolicy = \"any\"\n\
                [[flow]]\nbytes = 60000000\npolicy = \"free-first\"\ndeadline_s = 1900\n";
    assert!(finished_s(idle).is_some_and(|at| at < 1_900.0));
}

#[test]
fn a_flow_with_time_in_hand_waits_for_a_free_link_and_only_measures_the_other() {
    let patient = "duration_s = 4000\n\
                   [[link]]\nname = \"wlan0\"\nup = false\ndown_mbps = 8\nup_mbps = 4\n\
                   [[link.at]]\nt_s = 600\nup = true\n\
                   [[link]]\nname = \"wwan0\"\nclass = \"metered\"\ndown_mbps = 8\nup_mbps = 4\nrtt_ms = 60\n\
                   [[flow]]\nbytes = 10000000\ndeadline_s = 3600\n";
    let flow = report(patient).flows.remove(0);
    assert!(flow.finished_s.is_some_and(|at| at > 600.0), "{flow:?}");
    let paid = flow.bytes_by_link.get("wwan0").copied().unwrap_or(0);
    // One probe of 100 kB, before there is an estimate for the link.
    assert!((1..=100_000).contains(&paid), "{paid}");
}

#[test]
fn what_metered_links_carry_is_within_a_flows_budget_through_outages_and_a_crash() {
    let broke = "duration_s = 600\nhibernate_after_s = 2\n\
                 [[link]]\nname = \"wlan0\"\nup = false\ndown_mbps = 8\nup_mbps = 4\n\
                 [[link.at]]\nt_s = 60\nup = true\n\
                 [[link]]\nname = \"wwan0\"\nclass = \"metered\"\ndown_mbps = 8\nup_mbps = 4\nrtt_ms = 60\n\
                 [[link.repeat]]\nevery_s = 7\nfor_s = 5\nup = false\nuntil_s = 40\n\
                 [[crash]]\nwho = \"device\"\nt_s = 9\nfor_s = 2\n\
                 [[flow]]\nbytes = 20000000\npolicy = \"fast\"\nmetered_bytes_max = 3000000\n";
    let flow = report(broke).flows.remove(0);
    assert!(flow.finished_s.is_some_and(|at| at > 60.0), "{flow:?}");
    let paid = flow.bytes_by_link["wwan0"];
    assert!((2_500_000..=3_000_000).contains(&paid), "{paid}");
}

#[test]
fn where_time_is_short_the_earlier_deadline_goes_first_either_way() {
    for direction in ["down", "up"] {
        let flow = |deadline_s: u32| {
            format!(
                "[[flow]]\nbytes = 16000000\ndirection = \"{direction}\"\ndeadline_s = {deadline_s}\n"
            )
        };
        let link = "[[link]]\nname = \"wlan0\"\ndown_mbps = 17.6\nup_mbps = 17.6\nrtt_ms = 20\n";
        // In parallel both would take 16 s. Bytes that an upload has passed to its session, 4 MiB,
        // are sent in any case.
        let text = format!("duration_s = 60\n{link}{}{}", flow(25), flow(12));
        let flows = report(&text).flows;
        assert!(flows.iter().all(|flow| flow.deadline_met), "{flows:?}");
    }
}

/// Cellular alone for an hour, on which a download is paid for, while a connection of a program that may not pay is open.
fn paid_download(reachable: bool) -> String {
    format!(
        "duration_s = 4200\n\
         [energy]\nwifi = \"thunderbolt-wifi\"\ncellular = \"thunderbolt-lte\"\n\
         [[link]]\nname = \"wwan0\"\nclass = \"metered\"\ndown_mbps = 8\nup_mbps = 4\nrtt_ms = 60\n\
         [[link]]\nname = \"wlan0\"\nup = false\ndown_mbps = 8\nup_mbps = 8\n\
         [[link.at]]\nt_s = 3900\nup = true\n\
         [[flow]]\nbytes = 2000000\npolicy = \"fast\"\n\
         [[flow]]\nbytes = 100000\npolicy = \"free-only\"\nreachable = {reachable}\n"
    )
}

#[test]
fn in_the_hour_after_a_paid_download_the_metered_link_carries_the_end_of_its_path_and_no_more() {
    for reachable in [true, false] {
        let text = paid_download(reachable);
        let scenario = Scenario::parse("hour", &text, &mut |_| unreachable!()).unwrap();
        let (outcome, packets) = run_watched(&scenario).unwrap();
        let flows = &outcome.report.flows;
        let ended_s = flows[0].finished_s.expect("it is paid for");
        let between = |from_s: f64, to_s: f64| {
            let within = packets.iter().filter(|packet| {
                let after_s = packet.at.as_secs_f64() - ended_s;
                packet.link == 0 && after_s > from_s && after_s <= to_s
            });
            within.fold((0, 0), |(packets, bytes), packet| {
                (packets + 1, bytes + packet.bytes)
            })
        };
        let pause = between(0.5, 9.5);
        let (closing, closing_bytes) = between(9.5, 11.0);
        let hour = between(11.0, 3_600.0);
        let joules = outcome.report.energy.as_ref().map(|energy| energy.joules);
        println!("{pause:?}, {closing} of {closing_bytes} B, {hour:?}, {joules:?} J");
        assert_eq!(pause, (0, 0));
        assert!(closing == 1 && closing_bytes <= 100, "{closing_bytes}");
        assert_eq!(hour, (0, 0));
        // What the proxy has for the device arrives as soon as a free link is there.
        let waited = &flows[1];
        assert!(
            waited.finished_s.is_some_and(|at| at < 3_905.0),
            "{waited:?}"
        );
        assert_eq!(waited.bytes_by_link.get("wwan0"), None);
    }
}

#[test]
fn fifty_small_paid_requests_a_second_apart_open_one_path() {
    let flows: String = (0..50)
        .map(|n| format!("[[flow]]\nbytes = 2000\npolicy = \"any\"\nstart_s = {n}\n"))
        .collect();
    let text = format!(
        "duration_s = 120\n[[link]]\nname = \"wwan0\"\nclass = \"metered\"\ndown_mbps = 8\nup_mbps = 4\nrtt_ms = 60\n{flows}"
    );
    let scenario = Scenario::parse("requests", &text, &mut |_| unreachable!()).unwrap();
    let mut log = Vec::new();
    let report = run(&scenario, Some(&mut log)).unwrap().report;
    assert!(report.flows.iter().all(|flow| flow.sha256_ok));
    let log = String::from_utf8(log).unwrap();
    let opened = log
        .lines()
        .filter(|line| line.contains("OpenPath {"))
        .count();
    let link = &report.links[0];
    println!(
        "{opened} paths, {} bytes of packets, finished {:?}",
        link.bytes_down + link.bytes_up,
        report.flows.last().unwrap().finished_s
    );
    assert_eq!(opened, 1);
}
