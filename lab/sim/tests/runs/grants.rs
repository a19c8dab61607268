//! Grants of the simulator's device: what they let through on a link that costs.

use cedos_lab_scenario::Scenario;
use cedos_lab_sim::run;

fn finished_s(text: &str) -> Option<f64> {
    let scenario = Scenario::parse("grants", text, &mut |_| unreachable!()).unwrap();
    let report = run(&scenario, None).unwrap().report;
    report.flows.last().unwrap().finished_s
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
    // The NAT has long forgotten the path, and Wi-Fi looks up and carries nothing.
    let idle = "duration_s = 2000\n\
                [[link]]\nname = \"wlan0\"\ndown_mbps = 5\nup_mbps = 5\n\
                [[link.at]]\nt_s = 30\ndead = true\n\
                [[link]]\nname = \"wwan0\"\nclass = \"metered\"\ndown_mbps = 8\nup_mbps = 4\nrtt_ms = 60\n\
                nat_idle_s = 60\n\
                [[flow]]\nbytes = 1000000\npolicy = \"any\"\n\
                [[flow]]\nbytes = 60000000\npolicy = \"free-first\"\ndeadline_s = 1900\n";
    assert!(finished_s(idle).is_some_and(|at| at < 1_900.0));
}
