mod pair;
use d2tp_session::*;
use pair::*;
#[test]
fn dbg3() {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(3_000_000, FlowOptions { hibernates: true, ..FlowOptions::default() });
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.cut(0);
    p.run_for(Span::from_secs(180));
    let before = p.got[&flow].len();
    p.attach(0, "192.0.2.7:4000");
    let n1 = p.device_events.len(); let n2 = p.server_events.len();
    p.open_path(0, false);
    for _ in 0..8 {
        let until = p.now + Span::from_secs(5);
        p.step(until);
        let ss = p.server_session().unwrap();
        eprintln!("{:?} up {} down {} got {} server {:?}", p.now, p.wires[&0].bytes_up, p.wires[&0].bytes_down, p.got[&flow].len() - before, p.server.session(ss).unwrap().path_stats().iter().map(|s| (s.id, s.state, s.in_flight, s.window, s.payload_out)).collect::<Vec<_>>());
    }
    eprintln!("{:#?}", &p.device_events[n1..]); eprintln!("{:#?}", &p.server_events[n2..]);
}
#[test]
fn dbg4() {
    let mut p = Pair::new();
    for w in p.wires.values_mut() {
        w.rate = 500_000;
    }
    let flow = p.request(3_000_000, FlowOptions { hibernates: true, ..FlowOptions::default() });
    p.open_path(0, false);
    p.open_path(1, false);
    p.run_for(Span::from_secs(1));
    eprintln!("{} {:?}\n{:?}", p.got[&flow].len(), p.device_events, p.server_events);
    let ss = p.server_session().unwrap();
    eprintln!("{:?}", p.server.session(ss).unwrap().path_stats());
    eprintln!("{:?}", p.device.session(p.session).unwrap().path_stats());
}
