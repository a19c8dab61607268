//! Paths over serial lines: link 0 is a line to a bridge, link 1 an ordinary one.

use crate::pair::*;
use d2tp_session::*;

const LINE: u32 = 0;
const OTHER: u32 = 1;

/// A device that reaches its server by a line of this rate in bytes per second.
fn by_line(bytes_per_second: u32) -> Pair {
    let mut p = Pair::new();
    p.keep_log = true;
    p.make_serial(LINE, bytes_per_second);
    p.open_path(LINE, false);
    p
}

fn duplicates(p: &Pair) -> u64 {
    p.device.session(p.session).unwrap().duplicate_bytes()
}

fn path(p: &Pair) -> PathStats {
    p.device.session(p.session).unwrap().path_stats()[0].clone()
}

/// The share of the line's rate that payload had.
fn efficiency(p: &mut Pair, rate: u64, bytes: u64) -> f64 {
    assert!(p.run_until(Span::from_secs(120), |p| !p.device_events.is_empty()));
    p.run_for(Span::from_secs(30));
    let began = p.now;
    let flow = p.request(bytes, FlowOptions::default());
    let whole = p.run_until(Span::from_secs(3 * bytes / rate + 60), |p| p.is_whole(flow));
    assert!(whole, "{} of {bytes}", p.got[&flow].len());
    p.assert_right(flow);
    bytes as f64 / rate as f64 / p.now.since(began).as_secs_f64()
}

// R-SERIAL-2
#[test]
fn a_line_of_any_rate_is_used_well_and_hardly_anything_is_sent_twice() {
    // Of a datagram of 160 bytes 35 are no content, and the first one takes the request's time besides.
    for (rate, bytes, least) in [
        (11_520, 300_000, 0.93),
        (960, 30_000, 0.85),
        (30, 3_000, 0.6),
    ] {
        let mut p = by_line(rate);
        let efficiency = efficiency(&mut p, u64::from(rate), bytes);
        assert!(
            efficiency > least,
            "{efficiency} at {rate} bytes per second"
        );
        // The first packets of a window wait longer than any did before: a probe may repeat one or two.
        let twice = duplicates(&p);
        assert!(twice <= 1_000, "{twice} at {rate} bytes per second");
        assert_eq!(path(&p).lost, 0);
    }
}

// R-SERIAL-1, R-HS-5
#[test]
fn a_handshake_on_a_line_has_no_padding_and_its_answer_is_no_larger() {
    let mut p = by_line(960);
    let (_, _, syn) = &p.log[0];
    let syn = syn.len() as u64;
    assert!((160..300).contains(&syn), "{syn} bytes");
    assert_eq!(p.wires[&LINE].bytes_down, 0);
    p.run_until(Span::from_secs(5), |p| p.wires[&LINE].bytes_down > 0);
    let answer = p.wires[&LINE].bytes_down;
    assert!(answer <= syn, "{answer} bytes for {syn}");
    p.run_for(Span::from_secs(20));
    assert!(p.log.iter().all(|(_, _, packet)| packet.len() < 300));
}

// R-SERIAL-3, R-HS-17
#[test]
fn at_300_bit_per_second_one_syn_is_enough() {
    let mut p = by_line(30);
    assert!(p.run_until(Span::from_secs(60), |p| p.server_session().is_some()));
    p.run_for(Span::from_secs(60));
    let syns = p.log.iter().filter(|(_, _, packet)| packet[0] == 0x81);
    assert_eq!(syns.count(), 1);
    // A line that is idle stays so.
    let sent = p.log.len();
    p.run_for(Span::from_secs(600));
    assert_eq!(p.log.len(), sent);
}

// R-SERIAL-1
#[test]
fn a_second_path_over_a_line_begins_with_a_small_packet_and_takes_over_in_a_hole() {
    let mut p = Pair::new();
    p.keep_log = true;
    p.make_serial(LINE, 960);
    p.open_path(OTHER, false);
    p.run_for(Span::from_secs(2));
    p.open_path(LINE, false);
    p.run_for(Span::from_secs(5));
    let on_line = |(link, _, _): &&(u32, std::net::SocketAddr, Vec<u8>)| *link == LINE;
    let sizes: Vec<usize> = p.log.iter().filter(on_line).map(|l| l.2.len()).collect();
    assert!(sizes[0] < 160, "{sizes:?}");
    p.cut(OTHER);
    let flow = p.request(5_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn what_a_line_loses_is_sent_again() {
    let mut p = by_line(960);
    p.wires.get_mut(&LINE).unwrap().lose_every = 7;
    let flow = p.request(20_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(120), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

// R-SERIAL-4
#[test]
fn a_limit_below_four_datagrams_makes_them_smaller_until_it_is_lifted() {
    let mut p = Pair::new();
    p.open_path(OTHER, false);
    p.run_for(Span::from_secs(1));
    let session = p.session;
    let at = LinkId(OTHER);
    let mtu = |p: &Pair| {
        let session = p.server.session(p.server_session().unwrap()).unwrap();
        session.path_stats()[0].mtu
    };
    p.device.set_path_limit(session, at, Some(2_000)).unwrap();
    p.pump();
    p.run_for(Span::from_secs(1));
    assert_eq!(mtu(&p), 500);
    p.device.set_path_limit(session, at, Some(1)).unwrap();
    p.pump();
    p.run_for(Span::from_secs(1));
    assert_eq!(mtu(&p), 160);
    let flow = p.request(20_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(10), |p| p.is_whole(flow)));
    p.device.set_path_limit(session, at, None).unwrap();
    p.pump();
    p.run_for(Span::from_secs(1));
    assert_eq!(mtu(&p), 1_472);
}
