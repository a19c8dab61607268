//! Tests of two devices, a relay between them, and every pair of NATs.

use cedos_lab_link::Behaviour::{self, AddressRestricted, PortRestricted, Symmetric};
use cedos_lab_sim::peers::{PeerSimulation, SimPeer};
use d2tp_session::Span;

const S: Span = Span::from_secs(1);

/// Whether a direct path is impossible: neither NAT accepts an unknown port, and one uses a new
/// port for each destination.
fn must_stay_relayed(pair: (Behaviour, Behaviour)) -> bool {
    matches!(
        pair,
        (Symmetric, Symmetric | PortRestricted) | (PortRestricted, Symmetric)
    )
}

#[test]
fn every_pair_of_nats_talks_at_once_and_directly_where_that_can_be() {
    for caller in Behaviour::ALL {
        for listener in Behaviour::ALL {
            let mut m = PeerSimulation::new(caller, listener);
            let first = m.ask(1_000);
            let begun = m.now();
            let what = format!("{} × {}", caller.word(), listener.word());
            assert!(m.run_until(S, |m| m.is_whole(first)), "{what}: not at once");
            let direct = m.run_until(S.times(10), PeerSimulation::is_direct);
            assert_eq!(direct, !must_stay_relayed((caller, listener)), "{what}");
            eprintln!("{what}: {} after {:?}", direct, m.now().since(begun));
            let flow = m.ask(3_000_000);
            let before = m.relayed_bytes;
            assert!(m.run_until(S.times(60), |m| m.is_whole(flow)), "{what}");
            let by_relay = m.relayed_bytes - before;
            assert_eq!(by_relay > 3_000_000, !direct, "{what}: {by_relay} bytes");
            if direct {
                assert_eq!(m.paths(), (1, 0), "{what}: the relayed path is given up");
            }
        }
    }
}

#[test]
fn when_both_move_at_the_same_moment_the_relay_keeps_the_session() {
    for (caller, listener) in [
        (AddressRestricted, PortRestricted),
        (PortRestricted, PortRestricted),
        (Symmetric, Symmetric),
    ] {
        let mut m = PeerSimulation::new(caller, listener);
        let flow = m.ask(20_000_000);
        let direct = !must_stay_relayed((caller, listener));
        assert_eq!(m.run_until(S.times(5), PeerSimulation::is_direct), direct);
        m.run_for(S.times(1));
        let before = m.got(flow);
        assert!(
            before < 20_000_000,
            "{before} bytes: there is nothing left to show"
        );
        m.detach(SimPeer::Caller);
        m.detach(SimPeer::Listener);
        m.run_for(S.times(2));
        m.attach(SimPeer::Caller);
        m.attach(SimPeer::Listener);
        let moved = m.now();
        assert!(m.run_until(S.times(5), |m| m.got(flow) > before + 100_000));
        eprintln!("goes on after {:?}", m.now().since(moved));
        assert_eq!(m.run_until(S.times(20), PeerSimulation::is_direct), direct);
        assert!(m.run_until(S.times(200), |m| m.is_whole(flow)));
        assert!(m.stands());
    }
}
