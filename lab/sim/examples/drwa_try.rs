use cedos_lab_scenario::Scenario;
use cedos_lab_sim::{Ends, run_between};
use d2tp_session::*;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    for file in &args[1..] {
        let s = Scenario::load(std::path::Path::new(file)).unwrap();
        for (name, cc, drwa) in [
            ("cubic", CongestionKind::Cubic, None),
            ("cubic+drwa", CongestionKind::Cubic, Some("3")),
            ("cubic+2", CongestionKind::Cubic, Some("2")),
            ("bbr", CongestionKind::Bbr, None),
            ("bbr+drwa", CongestionKind::Bbr, Some("3")),
        ] {
            let mut ends = Ends::default();
            ends.proxy.congestion = cc;
            ends.device.drwa = drwa.map(|l| l.parse().unwrap());
            let o = run_between(&s, &ends, None).unwrap();
            let l = &o.report.links[0];
            let rtt = s.rtt_ms() + l.wait_down_ms + l.wait_up_ms;
            println!("{file} {name:12} {:.3} Mb/s of {:.3}  rtt {:.0} = {:.2} x  max {:.0} up {:.1}", o.report.flows[0].bytes as f64*8e-6/s.duration_s, l.bytes_down as f64*8e-6/s.duration_s, rtt, rtt/s.rtt_ms(), l.wait_down_max_ms, l.wait_up_ms);
        }
    }
}
