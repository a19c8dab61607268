//! What a hostile peer makes a server hold in memory, where the server has a limit.

use bytes::Bytes;
use d2tp_session::*;
use d2tp_wire::Frame;

use super::rogue::{MS, Rogue, data, flow};

const LIMIT: u64 = 4 << 20;

/// A peer inside a server that has [`LIMIT`] bytes for all its peers.
fn limited() -> (Rogue, MemoryPool) {
    let memory = MemoryPool::new(LIMIT);
    let config = EndpointConfig {
        memory: memory.clone(),
        flow_window_first: 8 << 20,
        ..EndpointConfig::default()
    };
    (Rogue::inside(config), memory)
}

/// The memory that honest clients may still use beside the hostile peer.
fn room_of_another(memory: &MemoryPool) -> u64 {
    memory.account(PublicKey([99; 32])).room()
}

#[test]
fn one_byte_at_the_end_of_every_block_costs_a_piece_not_a_block() {
    let (mut r, memory) = limited();
    let mut pieces = 0;
    for n in 0..7 {
        r.say(&[data(flow(n), 0, b"x")]);
        for block in 0..128u64 {
            r.say(&[data(flow(n), (block + 1) * 16 * 1024 - 1, &[7])]);
            pieces += 1;
        }
    }
    assert!(r.is_alive(), "{:?}", r.verdict());
    assert_eq!(memory.refusals(), 0);
    assert!(memory.used() <= pieces * 300, "{} bytes", memory.used());
}

#[test]
fn sparse_bytes_in_every_flow_stay_within_the_keys_share_and_are_given_back() {
    // Every 64th byte: as many pieces as a block keeps, each at its highest cost for a byte.
    let (mut r, memory) = limited();
    for n in 0..16 {
        for start in (0..4096u64).step_by(64) {
            let piece = |k: u64| data(flow(n), (start + k) * 64 + 1, &[7]);
            r.say(&(0..64).map(piece).collect::<Vec<_>>());
        }
    }
    assert!(r.is_alive(), "{:?}", r.verdict());
    assert!(memory.refusals() > 0, "the limit was never reached");
    assert!(memory.used() <= LIMIT / 4, "{} bytes", memory.used());
    assert!(room_of_another(&memory) >= LIMIT / 8);
    // Who falls silent goes to sleep, and what nobody read is given back.
    let id = r.session().unwrap();
    r.wait(Span::from_secs(20));
    let _ = r.server.with(id, |s| s.close(0, ""));
    r.wait(Span::from_secs(2 * 3600));
    assert!(r.session().is_none());
    r.wait(MS);
    assert!(memory.used() < 64 * 1024, "{} bytes", memory.used());
}

#[test]
fn bytes_that_a_peer_never_acknowledges_stay_within_its_share_and_the_writer_goes_on_later() {
    let (mut r, memory) = limited();
    for n in 0..16 {
        r.say(&[data(flow(n), 0, b"GET")]);
    }
    let mut written = 0;
    for n in 0..16 {
        while let Ok(room @ 1..) = r.with_session(|s| s.write_room(flow(n))) {
            let piece = vec![0; room.min(64 * 1024) as usize];
            written += piece.len() as u64;
            r.with_session(|s| s.write(flow(n), Bytes::from(piece)))
                .unwrap();
        }
    }
    assert!(written > LIMIT / 16, "{written} bytes");
    assert!(memory.used() <= LIMIT / 4, "{} bytes", memory.used());
    assert!(room_of_another(&memory) >= LIMIT / 8);
    // The last flow wrote nothing and has nothing to be acknowledged: only the check wakes it.
    r.events.clear();
    for n in 0..15 {
        r.with_session(|s| s.reset(flow(n), 1));
        r.with_session(|s| s.stop(flow(n), 1));
        let code = 2;
        r.say(&[d2tp_wire::Frame::Reset {
            flow: flow(n),
            code,
            final_size: 3,
        }]);
    }
    for _ in 0..20 {
        r.acknowledge();
        r.wait(MS.times(30));
    }
    let writable = SessionEvent::Writable(flow(15));
    assert!(r.events.contains(&writable), "{} used", memory.used());
}

#[test]
fn a_flow_without_room_for_what_its_application_holds_is_refused() {
    // R-QUOTA-2
    let memory = MemoryPool::new(LIMIT);
    let mut r = Rogue::inside(EndpointConfig {
        memory: memory.clone(),
        flow_memory: 100_000,
        ..EndpointConfig::default()
    });
    let share = memory.account(PublicKey([99; 32])).room();
    for n in 0..100 {
        r.say(&[data(flow(n), 0, b"x")]);
    }
    let opened = r.with_session(|s| s.flow_ids().len()) as u64;
    assert!((6..=share / 100_000).contains(&opened), "{opened} flows");
    assert!(r.is_alive(), "{:?}", r.verdict());
    // The session itself counts in all, and in nobody's share.
    let used = memory.account(r.secret.public()).used();
    assert!(used <= share, "{used} of {share}");
    let refused = r.heard_frames(|f| matches!(f, Frame::Refused { .. }).then_some(()));
    assert!(!refused.is_empty(), "the peer hears it");
}

#[test]
fn without_memory_a_new_session_is_refused_and_a_sleeping_one_waits() {
    // R-QUOTA-4
    let (mut r, memory) = limited();
    let id = r.session().unwrap();
    r.server.hibernate(r.now, id).unwrap();
    let first = r.instance;
    let mut held = memory.account(PublicKey([99; 32])).charge();
    held.resize(LIMIT - 4096);
    r.inbox.clear();
    let syn = r.syn(2, None);
    r.throw(r.home, syn);
    assert!(r.inbox.is_empty(), "no refusal: that would end what sleeps");
    r.instance = first + 1;
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    assert_eq!(r.inbox.len(), 1, "refused, and told");
    assert_eq!(r.server.counts(), (0, 1, 0));
    drop(held);
    r.instance = first;
    r.inbox.clear();
    r.enter(2);
}

#[test]
fn hibernated_sessions_fill_half_of_the_memory_and_each_still_wakes() {
    // R-QUOTA-4
    let memory = MemoryPool::new(64 * 1024);
    let mut r = Rogue::inside(EndpointConfig {
        memory: memory.clone(),
        ..EndpointConfig::default()
    });
    let first = r.instance;
    let mut count = 1;
    loop {
        let id = r.session().unwrap();
        r.server.hibernate(r.now, id).unwrap();
        if !r.server.has_room_hibernated() {
            break;
        }
        r.instance += 1;
        r.inbox.clear();
        r.enter(1);
        count += 1;
    }
    assert_eq!(count, 64 * 1024 / 2 / 256);
    r.wait(MS);
    assert!((32 * 1024..40 * 1024).contains(&memory.used()));
    r.instance += 1;
    r.inbox.clear();
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    assert_eq!(r.inbox.len(), 1, "refused, and told");
    assert_eq!(r.server.counts(), (0, count, 0));
    r.instance = first;
    r.inbox.clear();
    r.enter(2);
}
