//! Streams: packets over TCP, where a network blocks UDP.

use cedos_lab_scenario::{RunReport, Scenario};
use cedos_lab_sim::run;

fn report(text: &str) -> RunReport {
    let scenario = Scenario::parse("test", text, &mut |_| unreachable!()).unwrap();
    run(&scenario, None).unwrap().report
}

/// A download over one link without UDP; returns the seconds from its first byte to its last.
fn download(bytes: u64, seed: u64, link: &str) -> f64 {
    let report = report(&format!(
        "seed = {seed}\nduration_s = 600\nstreams = true\n[[link]]\nname = \"wlan0\"\n{link}\n\
         [[link.at]]\nt_s = 0\nudp_blocked = true\n[[flow]]\nbytes = {bytes}\n"
    ));
    let flow = &report.flows[0];
    assert!(flow.sha256_ok, "{flow:?}");
    flow.finished_s.unwrap() - flow.first_byte_s.unwrap()
}

#[test]
fn a_stream_under_loss_carries_what_the_formula_for_reno_says() {
    let bytes = 10_000_000;
    let took: f64 = (0..4)
        .map(|seed| {
            let link = "down_mbps = 100\nup_mbps = 100\nrtt_ms = 50\nloss_down = 0.02";
            download(bytes, seed, link)
        })
        .sum();
    let segments = 4.0 * bytes as f64 / 1_448.0 / took;
    // √(3/2p) segments in a round trip (Mathis et al. 1997), to which CUBIC is bound on such a
    // path (RFC 9438 §4.3).
    let formula = (1.5f64 / 0.02).sqrt() / 0.050;
    let ratio = segments / formula;
    println!("{segments:.0} segments a second, the formula says {formula:.0}");
    assert!((0.8..1.15).contains(&ratio), "{ratio}");
}

#[test]
fn a_stream_without_loss_fills_its_link() {
    let took = download(25_000_000, 1, "down_mbps = 20\nup_mbps = 10\nrtt_ms = 30");
    let share = 25_000_000.0 * 8.0 / took / 20e6;
    assert!(share > 0.9, "{share}");
}

#[test]
fn a_stream_is_open_after_a_second_and_three_round_trips() {
    let report = report(
        "duration_s = 60\nstreams = true\n[[link]]\nname = \"wlan0\"\nrtt_ms = 100\n\
         down_mbps = 50\nup_mbps = 50\n[[link.at]]\nt_s = 0\nudp_blocked = true\n\
         [[flow]]\nbytes = 100000\n",
    );
    let first = report.flows[0].first_byte_s.unwrap();
    // TCP, TLS, the WebSocket; then the handshake, and the request.
    assert!(
        (1.0 + 5.0 * 0.1..1.0 + 6.0 * 0.1).contains(&first),
        "{first}"
    );
}
