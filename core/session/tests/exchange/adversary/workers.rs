//! Several workers of one host: limits hold for the host, and copies of a handshake cost nothing at any worker.

use d2tp_seal::{SynMacs, open_cookie};
use d2tp_session::*;
use d2tp_wire::PacketKind;

use crate::adversary::rogue::*;

const SEED: u32 = 9;

/// A worker of a host, with the rogue's handshakes.
fn worker(index: u16, workers: u16, config: EndpointConfig) -> Rogue {
    let mut rogue = Rogue::with(EndpointConfig {
        worker: Some(CidShare::new(SEED, index, workers).unwrap()),
        ..config
    });
    rogue.server.set_cookie_seed([8; 32]);
    rogue
}

/// A client that belongs to another worker than the one at which it arrives.
fn secret_of(index: u16, workers: u16) -> SecretKey {
    let share = CidShare::new(SEED, index, workers).unwrap();
    let mut secrets = (1..).map(|n| SecretKey::from_bytes([n; 32]));
    let is_its = |secret: &SecretKey| share.contains(secret.public().0[..8].try_into().unwrap());
    secrets.find(is_its).unwrap()
}

fn kind(bytes: &[u8]) -> PacketKind {
    PacketKind::split(bytes).unwrap().0
}

fn unknown_data(n: u64) -> Vec<u8> {
    let mut bytes = vec![9; 26];
    bytes[0] = PacketKind::Data.first_byte();
    bytes[1..9].copy_from_slice(&n.to_be_bytes());
    bytes
}

#[test]
fn the_limits_of_a_host_are_divided_among_its_workers() {
    // R-UNKNOWN-2
    let mut r = worker(0, 4, EndpointConfig::default());
    for n in 0..2_000 {
        r.throw(r.home, unknown_data(n));
    }
    assert_eq!(r.inbox.len(), 200 / 4);
    // R-HS-8
    let config = EndpointConfig {
        cookie_above: u32::MAX,
        ..EndpointConfig::default()
    };
    let mut r = worker(0, 256, config);
    r.secret = secret_of(0, 256);
    for n in 0..40 {
        r.instance = n;
        let syn = r.syn(1, Some([0; 16]));
        r.throw(r.home, syn);
    }
    // Half of the part: then addresses must be proved.
    assert_eq!(r.server.counts().2, 4096 / 256 / 2);
}

#[test]
fn an_id_that_another_host_issued_is_not_answered() {
    // R-UNKNOWN-5
    let share = CidShare::new(SEED, 1, 3).unwrap();
    let mut r = Rogue::with(EndpointConfig {
        cid_share: Some(share),
        ..EndpointConfig::default()
    });
    let ids: Vec<u64> = (0..300).collect();
    for n in &ids {
        r.throw(r.home, unknown_data(*n));
    }
    let own = ids.iter().filter(|n| share.contains(n.to_be_bytes()));
    let own: Vec<_> = own.map(|n| n.to_be_bytes().to_vec()).collect();
    let answered: Vec<_> = r.inbox.iter().map(|(_, b)| b[1..9].to_vec()).collect();
    assert!(own.len() > 50, "{}", own.len());
    assert_eq!(answered, own);
}

#[test]
fn a_copy_of_a_passed_handshake_is_passed_without_being_read() {
    // R-HS-18
    let mut first = worker(0, 2, EndpointConfig::default());
    let mut owner = worker(1, 2, EndpointConfig::default());
    first.secret = secret_of(1, 2);
    let syn = first.syn(1, None);
    first.throw(first.home, syn.clone());
    let (index, packet) = first.server.poll_misdirected().unwrap();
    assert!(matches!(packet, Misdirected::Handshake(_)));
    assert_eq!(index, 1);
    owner.server.accept_misdirected(owner.now, packet);
    owner.pump();
    assert_eq!(owner.server.counts().2, 1);
    // Garbage behind the same cid would be dropped if this worker read it.
    let mut garbage = syn.clone();
    garbage[9..1168].fill(0);
    SynMacs::write(&mut garbage, &first.server_key, None);
    for copy in [garbage, syn] {
        first.throw(first.home, copy);
        let (index, packet) = first.server.poll_misdirected().unwrap();
        assert!(matches!(packet, Misdirected::Datagram(..)));
        assert_eq!(index, 1);
        owner.server.accept_misdirected(owner.now, packet);
        owner.pump();
    }
    assert_eq!(owner.inbox.len(), 3, "each copy gets the same answer");
    assert!(owner.inbox.iter().all(|answer| *answer == owner.inbox[0]));
    assert_eq!(owner.server.counts().2, 1);
    // Later it is a new handshake.
    first.now += Span::from_secs(10);
    let again = first.syn_again(2, None);
    first.throw(first.home, again);
    let (_, packet) = first.server.poll_misdirected().unwrap();
    assert!(matches!(packet, Misdirected::Handshake(_)));
}

#[test]
fn a_passed_handshake_counts_against_its_owners_load_and_both_accept_the_cookie() {
    // R-HS-7
    let loaded = EndpointConfig {
        cookie_above: 0,
        ..EndpointConfig::default()
    };
    let mut first = worker(0, 2, EndpointConfig::default());
    let mut owner = worker(1, 2, loaded);
    first.secret = secret_of(1, 2);
    let syn = first.syn(1, None);
    first.throw(first.home, syn.clone());
    let (_, packet) = first.server.poll_misdirected().unwrap();
    owner.server.accept_misdirected(owner.now, packet);
    owner.pump();
    let (_, answer) = owner.inbox.pop().unwrap();
    assert_eq!(kind(&answer), PacketKind::Cookie);
    assert_eq!(owner.server.counts().2, 0);
    let mac1 = SynMacs::mac1(&syn).unwrap();
    let nonce = answer[9..21].try_into().unwrap();
    let cookie = open_cookie(&first.server_key, mac1, nonce, &answer[21..]).unwrap();
    // A copy with the cookie goes to the owner as it is; another handshake is read first.
    let mut proved = syn;
    SynMacs::write(&mut proved, &first.server_key, Some(&cookie));
    let other = first.syn(2, Some(cookie));
    for (syn, is_read) in [(proved, false), (other, true)] {
        first.throw(first.home, syn);
        let (_, packet) = first.server.poll_misdirected().unwrap();
        assert_eq!(matches!(packet, Misdirected::Handshake(_)), is_read);
        owner.server.accept_misdirected(owner.now, packet);
        owner.pump();
        let (_, answer) = owner.inbox.pop().unwrap();
        assert_eq!(kind(&answer), PacketKind::SynAck);
    }
    assert_eq!(owner.server.counts().2, 2);
}
