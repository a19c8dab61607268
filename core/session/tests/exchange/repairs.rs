//! Datagrams that repair losses of other datagrams leave on another path.
//!
//! ```text
//!           25 ms, 1 MB/s: all other datagrams
//!  device ═══════════════════════════════ server
//!         ───────────────────────────────
//!           60 ms, 60 kB/s, a queue of 500 ms, metered, lent for 20 kB/s: repairs
//! ```

use crate::pair::{MS, Pair, Wire, config};
use d2tp_session::*;

const WIFI: u32 = 0;
const CELL: u32 = 1;
const LENT: u64 = 20_000;
/// The application's context of repairs, and their bytes.
const REPAIRS: u64 = 9;
const BYTES: usize = 1_000;

/// A pair of endpoints with a flow whose grants pay.
fn pair(mirroring: Mirroring, gated: bool) -> (Pair, FlowId) {
    let mut pair = Pair::with(EndpointConfig {
        mirroring,
        ..config()
    });
    let mut slow = Wire::new(60, "198.51.100.1:4000");
    (slow.rate, slow.queue) = (60_000, 30_000);
    let wifi = Wire::new(25, "192.0.2.1:4000");
    pair.wires = [(WIFI, wifi), (CELL, slow)].into();
    pair.open_path(WIFI, false);
    pair.run_for(MS.times(200));
    pair.open_path(CELL, gated);
    pair.run_for(MS.times(300));
    let open = |s: &mut Session| s.open(FlowOptions::default()).unwrap();
    let flow = pair.device.with(pair.session, open).unwrap();
    pair.run_for(MS.times(200));
    (pair, flow)
}

/// The server repairs a packet whenever it may, for so long; the device lends its cellular path meanwhile for `lent` bytes a second. Returns how
/// many it sent, how many the device got, and the bytes that each link carried to it.
fn repaired(
    pair: &mut Pair,
    flow: FlowId,
    span: Span,
    lent: Option<u64>,
) -> (usize, usize, [u64; 2]) {
    let server = pair.server_session().unwrap();
    let carried = |pair: &Pair| [WIFI, CELL].map(|link| pair.wires[&link].bytes_down);
    let is_repair = |event: &SessionEvent| {
        matches!(
            event,
            SessionEvent::Datagram {
                context: REPAIRS,
                ..
            }
        )
    };
    let (before, seen, end) = (carried(pair), pair.device_events.len(), pair.now + span);
    let mut sent = 0;
    while pair.now < end {
        let now = pair.now;
        let tenth = |at: Time| at.as_nanos() / 100_000_000;
        if let Some(lent) = lent.filter(|_| tenth(now) != tenth(now + MS.times(10))) {
            let lend = |s: &mut Session| s.lend_path(now, LinkId(CELL), lent);
            pair.device.with(pair.session, lend).unwrap();
        }
        let repair = |s: &mut Session| {
            s.send_datagram(8, vec![1; BYTES].into(), now + MS.times(500));
            let Some(offer) = s.repair_offer(now, flow) else {
                return;
            };
            s.send_repair_datagram(&offer, REPAIRS, vec![2; BYTES].into(), now + MS.times(500));
            sent += 1;
        };
        pair.server.with(server, repair).unwrap();
        pair.pump();
        pair.run_for(MS.times(10));
    }
    let after = carried(pair);
    let arrived = pair.device_events[seen..].iter();
    let arrived = arrived.filter(|(.., event)| is_repair(event)).count();
    (sent, arrived, [0, 1].map(|n| after[n] - before[n]))
}

#[test]
fn repairs_leave_on_a_lent_path_and_spend_no_more_than_was_lent() {
    // R-MIRROR-4
    for lent in [4_000, LENT] {
        let (mut pair, flow) = pair(Mirroring::Free, true);
        let seconds = 30;
        let (sent, arrived, [_, cell]) =
            repaired(&mut pair, flow, Span::from_secs(seconds), Some(lent));
        let spent = (sent * BYTES) as u64;
        assert!(arrived * 100 >= sent * 95, "{arrived} of {sent}");
        assert!(
            spent > lent * seconds / 2 && spent <= lent * (seconds + 1),
            "{spent} at {lent} bytes a second"
        );
        assert!(cell <= spent + spent / 4 + 10_000, "{cell} for {spent}");
        let stats = pair.device.session(pair.session).unwrap().datagram_stats();
        assert_eq!(stats.gated_received as usize, arrived);
        assert_eq!(stats.gated_bytes_in as usize, arrived * BYTES);
    }
}

#[test]
fn repairs_use_a_free_path_without_grants_and_a_metered_one_never_unless_it_is_lent() {
    // R-MIRROR-4
    let span = Span::from_secs(5);
    let (mut free, flow) = pair(Mirroring::Free, false);
    let (sent, arrived, _) = repaired(&mut free, flow, span, None);
    assert!(
        sent > 20 && arrived * 100 >= sent * 95,
        "{arrived} of {sent}"
    );
    let (mut dear, flow) = pair(Mirroring::Free, true);
    assert_eq!(repaired(&mut dear, flow, span, None).0, 0);
    let (mut off, flow) = pair(Mirroring::Never, false);
    assert_eq!(repaired(&mut off, flow, span, None).0, 0);
}

#[test]
fn repairs_end_when_the_path_is_lent_no_more_or_dies() {
    // R-MIRROR-4
    let (mut pair, flow) = pair(Mirroring::Free, true);
    repaired(&mut pair, flow, Span::from_secs(3), Some(LENT));
    let end = |s: &mut Session| s.end_lending(LinkId(CELL));
    pair.device.with(pair.session, end).unwrap();
    pair.run_for(MS.times(300));
    assert_eq!(repaired(&mut pair, flow, Span::from_secs(3), None).0, 0);
    repaired(&mut pair, flow, Span::from_secs(3), Some(LENT));
    pair.silence(CELL);
    let before = repaired(&mut pair, flow, Span::from_secs(2), Some(LENT)).0;
    assert_eq!(
        repaired(&mut pair, flow, Span::from_secs(3), Some(LENT)).0,
        0,
        "{before} before it was noticed"
    );
}

/// Bytes a second of datagrams that the device gets of a server that sends as many as it may, over a Wi-Fi that loses one packet of
/// `lose_every`; it loses none if that is zero. The other path is lent meanwhile, and repairs are asked for as often as packets are lost.
fn carried_with_losses(mirroring: Mirroring, lose_every: u64) -> u64 {
    const SECONDS: u64 = 10;
    let (mut pair, flow) = pair(mirroring, true);
    let wifi = pair.wires.get_mut(&WIFI).unwrap();
    (wifi.rate, wifi.queue, wifi.lose_every) = (1_000_000, 100_000, lose_every);
    let server = pair.server_session().unwrap();
    let fill = |pair: &mut Pair, until: Time| {
        while pair.now < until {
            let now = pair.now;
            let lend = |s: &mut Session| s.lend_path(now, LinkId(CELL), LENT);
            pair.device.with(pair.session, lend).unwrap();
            let fill = |s: &mut Session| {
                for _ in s.datagrams_waiting()..32 {
                    s.send_datagram(8, vec![1; BYTES].into(), now + MS.times(500));
                }
                if (now.as_nanos() / 1_000_000).is_multiple_of(50)
                    && let Some(offer) = s.repair_offer(now, flow)
                {
                    s.send_repair_datagram(
                        &offer,
                        REPAIRS,
                        vec![2; BYTES].into(),
                        now + MS.times(500),
                    );
                }
            };
            pair.server.with(server, fill).unwrap();
            pair.pump();
            pair.run_for(MS.times(5));
        }
    };
    let until = pair.now + Span::from_secs(3);
    fill(&mut pair, until);
    let seen = pair.device_events.len();
    let until = pair.now + Span::from_secs(SECONDS);
    fill(&mut pair, until);
    let usual = |event: &SessionEvent| matches!(event, SessionEvent::Datagram { context: 8, .. });
    let arrived = pair.device_events[seen..].iter();
    let arrived = arrived.filter(|(.., event)| usual(event)).count();
    arrived as u64 * BYTES as u64 / SECONDS
}

#[test]
fn random_losses_do_not_slow_down_datagrams_while_another_path_could_repair_them() {
    // R-MIRROR-1, R-MIRROR-4
    let whole = carried_with_losses(Mirroring::Free, 0);
    let mirrored = carried_with_losses(Mirroring::Free, 100);
    let plain = carried_with_losses(Mirroring::Never, 100);
    println!("{whole} B/s without loss, {mirrored} mirrored, {plain} not");
    assert!(mirrored * 100 >= whole * 90, "{mirrored} of {whole}");
    assert!(plain * 100 <= whole * 70, "{plain} of {whole}");
}
