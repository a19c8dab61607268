//! The device's scheduler saves energy in virtual time, by the code of the product.

use cedos_lab_scenario::{RunReport, Scenario};

/// Runs a download over Wi-Fi of 8 Mb/s and 3G of 1 Mb/s, both free, on the radios of the i997.
fn report(energy: &str, links: &str, flow: &str) -> RunReport {
    let text = format!(
        "duration_s = 3000\n[energy]\nwifi = \"i997-wifi\"\ncellular = \"i997-3g\"\n{energy}\n\
         {links}\n[[flow]]\npolicy = \"any\"\n{flow}\n"
    );
    let scenario =
        Scenario::parse("energy", &text, &mut |_| unreachable!()).expect("the scenario is right");
    cedos_lab_sim::run(&scenario, None).expect("it runs").report
}

const BOTH: &str = "[[link]]\nname = \"wlan0\"\ndown_mbps = 8\nrtt_ms = 40\n\
                    [[link]]\nname = \"wwan0\"\ndown_mbps = 1\nrtt_ms = 120\n";

fn share_of_cell(report: &RunReport) -> f64 {
    let flow = &report.flows[0];
    let cell = flow.bytes_by_link.get("wwan0").copied().unwrap_or(0);
    cell as f64 / flow.bytes as f64
}

#[test]
fn on_battery_with_time_left_the_hungry_radio_sleeps_and_on_mains_it_carries() {
    let flow = "bytes = 40_000_000\ndeadline_s = 2_900\n";
    let saved = report("save = \"auto\"", BOTH, flow);
    let on_mains = report("save = \"auto\"\nbattery = false", BOTH, flow);
    for report in [&saved, &on_mains] {
        assert!(report.flows[0].sha256_ok && report.flows[0].deadline_met);
    }
    assert!(share_of_cell(&saved) < 0.02, "{saved:?}");
    assert!(share_of_cell(&on_mains) > 0.08, "{on_mains:?}");
    let joules = |report: &RunReport| report.energy.as_ref().expect("it has radios").joules;
    assert!(
        joules(&saved) < 0.75 * joules(&on_mains),
        "{saved:?} {on_mains:?}"
    );
}

#[test]
fn a_deadline_that_needs_both_radios_is_met_on_battery() {
    // Wi-Fi alone takes 40 s, both together 36.
    let saved = report(
        "save = \"always\"",
        BOTH,
        "bytes = 40_000_000\ndeadline_s = 39\n",
    );
    assert!(saved.flows[0].deadline_met, "{saved:?}");
    assert!(share_of_cell(&saved) > 0.05, "{saved:?}");
}

#[test]
fn a_download_waits_for_wifi_with_the_hungry_radio_asleep() {
    let links = "[[link]]\nname = \"wlan0\"\ndown_mbps = 8\nrtt_ms = 40\n\
                 [[link.at]]\nt_s = 1\nup = false\n[[link.at]]\nt_s = 200\nup = true\n\
                 [[link]]\nname = \"wwan0\"\ndown_mbps = 1\nrtt_ms = 120\n";
    let flow = "bytes = 8_000_000\ndeadline_s = 2_900\n";
    let saved = report("save = \"auto\"", links, flow);
    let finished = saved.flows[0].finished_s.expect("it is whole");
    assert!((200.0..230.0).contains(&finished), "{finished}");
    assert!(share_of_cell(&saved) < 0.1, "{saved:?}");
    let fast = report("save = \"never\"", links, flow);
    assert!(fast.flows[0].finished_s < Some(80.0), "{fast:?}");
}
