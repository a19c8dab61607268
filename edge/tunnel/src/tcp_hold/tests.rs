use super::*;
use crate::tcp_segment::{
    acknowledgement, segment, selective_acknowledgement, timestamped_segment,
};

const SECOND: Duration = Duration::from_secs(1);

fn sequences(hold: &mut TcpHold) -> Vec<u32> {
    std::iter::from_fn(|| hold.next_released())
        .map(|packet| InnerSegment::parse(&packet).expect("TCP").sequence)
        .collect()
}

fn sent(hold: &mut TcpHold, sequence: u32) {
    hold.on_leaving(Instant::now(), segment(sequence, &[7; 100]).into());
}

fn blocked(hold: &mut TcpHold, packet: Vec<u8>) -> BlockedPacket {
    hold.on_blocked(Instant::now(), &packet.into())
}

fn received(hold: &mut TcpHold, packet: Vec<u8>) -> Option<InnerSegment> {
    let passed = hold.on_received(Instant::now(), packet.into())?;
    InnerSegment::parse(&passed)
}

#[test]
fn a_loss_is_repaired_before_the_sender_knows() {
    let mut hold = TcpHold::default();
    for n in 0..8 {
        sent(&mut hold, n * 100);
    }
    // 200 to 299 is lost. Two later ones could have overtaken it; the third shows the loss.
    let first = received(&mut hold, acknowledgement(200));
    assert_eq!(first.and_then(|ack| ack.acknowledged), Some(200));
    for (end, repaired) in [(400, &[][..]), (500, &[]), (600, &[200])] {
        let ack = selective_acknowledgement(200, &[(300, end)]);
        assert_eq!(received(&mut hold, ack), None, "up to {end}");
        assert_eq!(sequences(&mut hold), repaired, "up to {end}");
    }
    // Once is enough.
    let ack = selective_acknowledgement(200, &[(300, 700)]);
    assert_eq!(received(&mut hold, ack), None);
    assert!(sequences(&mut hold).is_empty());
    let ack = received(&mut hold, acknowledgement(700)).expect("it passes");
    assert_eq!(ack.acknowledged, Some(700));
}

#[test]
fn an_acknowledgement_of_more_passes_without_what_it_says_of_losses() {
    let mut hold = TcpHold::default();
    for n in 0..9 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(100));
    received(&mut hold, selective_acknowledgement(100, &[(200, 300)]));
    // The first hole is filled, and there is another one.
    let ack = selective_acknowledgement(300, &[(400, 700)]);
    let passed = received(&mut hold, ack).expect("it passes");
    assert_eq!(passed.acknowledged, Some(300));
    assert_eq!(passed.sack.above(0).count(), 0);
    assert_eq!(sequences(&mut hold), [300]);
}

#[test]
fn a_copy_that_is_lost_is_sent_again_once_later_ones_arrived() {
    let mut hold = TcpHold::default();
    for n in 0..5 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(100));
    received(&mut hold, selective_acknowledgement(100, &[(200, 500)]));
    assert_eq!(sequences(&mut hold), [100]);
    for n in 5..8 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, selective_acknowledgement(100, &[(200, 700)]));
    assert!(sequences(&mut hold).is_empty());
    received(&mut hold, selective_acknowledgement(100, &[(200, 800)]));
    assert_eq!(sequences(&mut hold), [100]);
}

#[test]
fn the_last_but_one_segment_is_repaired_though_only_one_follows() {
    let mut hold = TcpHold::default();
    for n in 0..3 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(100));
    received(&mut hold, selective_acknowledgement(100, &[(200, 300)]));
    assert_eq!(sequences(&mut hold), [100]);
}

#[test]
fn a_loss_without_a_copy_is_reported_to_the_sender() {
    let mut hold = TcpHold::default();
    for n in [0, 100, 300, 400, 500] {
        sent(&mut hold, n);
    }
    received(&mut hold, acknowledgement(200));
    let ack = selective_acknowledgement(200, &[(300, 600)]);
    let passed = received(&mut hold, ack).expect("it passes");
    assert_eq!(passed.sack.above(200).count(), 1);
    assert!(sequences(&mut hold).is_empty());
}

#[test]
fn a_loss_that_is_not_repaired_in_time_is_reported_to_the_sender() {
    let mut hold = TcpHold::default();
    for n in 0..9 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(100));
    let ack = || Bytes::from(selective_acknowledgement(100, &[(200, 600)]));
    let now = Instant::now();
    assert_eq!(hold.on_received(now, ack()), None);
    let later = now + std::time::Duration::from_secs(1);
    assert!(hold.on_received(later, ack()).is_some());
}

#[test]
fn what_was_under_way_and_what_came_meanwhile_leaves_again_in_order() {
    let mut hold = TcpHold::default();
    for sequence in [0, 100, 200] {
        sent(&mut hold, sequence);
    }
    received(&mut hold, acknowledgement(100));
    hold.block();
    let new = blocked(&mut hold, segment(300, &[7; 100]));
    let BlockedPacket::Held(Some(answer)) = new else {
        panic!("{new:?}");
    };
    let answer = InnerSegment::parse(&answer).expect("TCP");
    assert_eq!(answer.acknowledged, Some(100));
    assert_eq!(answer.timestamps.map(|stamps| stamps.value), Some(21));
    // The sender's own timer: it is kept once.
    let again = blocked(&mut hold, segment(100, &[7; 100]));
    assert!(matches!(again, BlockedPacket::Held(Some(_))));
    assert!(hold.has_waiting());
    hold.unblock(Instant::now());
    assert_eq!(sequences(&mut hold), [100, 200, 300]);
    assert!(!hold.has_waiting());
    received(&mut hold, acknowledgement(400));
    assert_eq!(hold.bytes(), 0);
}

#[test]
fn what_is_lost_again_after_an_outage_is_not_waited_for() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    for n in 0..3 {
        sent(&mut hold, n * 100);
    }
    hold.block();
    hold.unblock(now);
    assert_eq!(sequences(&mut hold), [0, 100, 200]);
    for (seconds, again) in [(0, &[][..]), (1, &[0]), (2, &[]), (3, &[0]), (7, &[0])] {
        hold.unblock(now + seconds * SECOND);
        assert_eq!(sequences(&mut hold), again, "after {seconds} s");
    }
    received(&mut hold, acknowledgement(300));
    hold.unblock(now + 60 * SECOND);
    assert!(sequences(&mut hold).is_empty());
}

#[test]
fn what_a_sender_repeats_leaves_before_others_and_is_kept() {
    let mut hold = TcpHold::default();
    for n in [0, 100, 300] {
        sent(&mut hold, n);
    }
    // A queue dropped 200.
    assert!(hold.take_repeated(Instant::now(), &segment(200, &[7; 100])));
    assert!(
        !hold.take_repeated(Instant::now(), &segment(400, &[7; 100])),
        "it is new"
    );
    assert!(
        !hold.take_repeated(Instant::now(), &segment(400, &[])),
        "it has no data"
    );
    assert_eq!(sequences(&mut hold), [200]);
    hold.block();
    hold.unblock(Instant::now());
    assert_eq!(sequences(&mut hold), [0, 100, 200, 300]);
}

#[test]
fn what_a_sender_repeated_before_an_outage_was_noticed_leaves_after_it() {
    let mut hold = TcpHold::default();
    for n in [0, 100, 300, 400, 500] {
        sent(&mut hold, n);
    }
    // A queue dropped 200, and its repetition finds no room in the session.
    assert!(hold.take_repeated(Instant::now(), &segment(200, &[7; 100])));
    hold.block();
    hold.unblock(Instant::now());
    assert_eq!(sequences(&mut hold), [0, 100, 200, 300, 400, 500]);
}

#[test]
fn the_copy_of_what_a_sender_repeated_is_sent_again_if_it_is_lost() {
    let mut hold = TcpHold::default();
    for n in [0, 100, 300, 400, 500] {
        sent(&mut hold, n);
    }
    received(&mut hold, acknowledgement(200));
    received(&mut hold, selective_acknowledgement(200, &[(300, 600)]));
    assert!(hold.take_repeated(Instant::now(), &segment(200, &[7; 100])));
    assert_eq!(sequences(&mut hold), [200]);
    for n in 6..9 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, selective_acknowledgement(200, &[(300, 900)]));
    assert_eq!(sequences(&mut hold), [200]);
}

#[test]
fn what_waited_behind_a_repetition_is_not_older_than_it() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    for (sequence, timestamp) in [(0, 50), (200, 52)] {
        let packet = timestamped_segment(sequence, &[7; 100], timestamp);
        hold.on_leaving(now, packet.into());
    }
    let repeated = timestamped_segment(100, &[7; 100], 90);
    assert!(hold.take_repeated(now, &repeated));
    assert_eq!(hold.next_released(), Some(repeated.into()));
    // It fills a hole, so that the receiver discards what has an older timestamp.
    for packet in [
        hold.on_leaving(now, timestamped_segment(300, &[7; 100], 53).into()),
        hold.on_leaving_reliably(now, timestamped_segment(400, &[7; 100], 54).into()),
        hold.on_leaving(now, timestamped_segment(400, &[], 54).into()),
    ] {
        let read = InnerSegment::parse(&packet).expect("TCP");
        assert_eq!(read.timestamps.map(|stamps| stamps.value), Some(90));
    }
    let newer: Bytes = timestamped_segment(500, &[7; 100], 91).into();
    assert_eq!(hold.on_leaving(now, newer.clone()), newer);
}

#[test]
fn a_hole_is_filled_though_its_copy_is_lost_and_nothing_leaves_after_it() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    for n in 0..5 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(100));
    received(&mut hold, selective_acknowledgement(100, &[(200, 500)]));
    assert_eq!(sequences(&mut hold), [100]);
    hold.unblock(now + SECOND / 2);
    assert!(sequences(&mut hold).is_empty());
    hold.unblock(now + 2 * SECOND);
    assert_eq!(sequences(&mut hold), [100]);
    received(&mut hold, acknowledgement(500));
    assert!(!hold.is_waiting());
    hold.unblock(now + 60 * SECOND);
    assert_eq!(hold.look_at(), None);
}

#[test]
fn what_a_queue_dropped_is_reported_and_leaves_only_if_the_connection_stops() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    sent(&mut hold, 0);
    hold.block();
    hold.unblock(now);
    assert_eq!(sequences(&mut hold), [0]);
    hold.on_dropped(now, &segment(100, &[7; 100]).into());
    for n in 2..9 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(100));
    let ack = selective_acknowledgement(100, &[(200, 900)]);
    let passed = received(&mut hold, ack).expect("the sender has to slow down");
    assert_eq!(passed.sack.above(100).count(), 1);
    hold.unblock(now + SECOND / 2);
    assert!(sequences(&mut hold).is_empty());
    hold.unblock(now + 2 * SECOND);
    assert_eq!(sequences(&mut hold), [100]);
}

#[test]
fn a_hole_behind_progress_after_an_outage_is_filled_without_the_sender() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    for n in 0..5 {
        sent(&mut hold, n * 100);
    }
    hold.block();
    hold.unblock(now);
    assert_eq!(sequences(&mut hold).len(), 5);
    // The copy of 300 is lost, and one later segment alone shows it; so is the second copy.
    received(&mut hold, selective_acknowledgement(300, &[(400, 500)]));
    assert_eq!(sequences(&mut hold), [300]);
    hold.unblock(now + 2 * SECOND);
    assert_eq!(sequences(&mut hold), [300]);
}

#[test]
fn what_was_reported_as_arrived_does_not_leave_again_after_an_outage() {
    let mut hold = TcpHold::default();
    for n in 0..8 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(100));
    let blocks = [(200, 300), (500, 600)];
    received(&mut hold, selective_acknowledgement(100, &blocks));
    hold.block();
    hold.unblock(Instant::now());
    assert_eq!(sequences(&mut hold), [100, 300, 400, 600, 700]);
}

#[test]
fn what_is_acknowledged_while_it_waits_does_not_leave_again() {
    let mut hold = TcpHold::default();
    for n in 0..5 {
        sent(&mut hold, n * 100);
    }
    hold.block();
    hold.unblock(Instant::now());
    assert!(hold.next_released().is_some());
    // It had arrived before the outage, and its ACK was lost in it.
    received(&mut hold, acknowledgement(400));
    assert_eq!(sequences(&mut hold), [400]);
    hold.block();
    hold.unblock(Instant::now());
    let mut reset = acknowledgement(400);
    reset[33] = 0x14; // RST and ACK
    received(&mut hold, reset);
    assert!(sequences(&mut hold).is_empty());
    assert_eq!(hold.memory(), 0);
}

#[test]
fn a_window_that_was_closed_is_opened_by_an_acknowledgement_that_says_nothing_else() {
    let mut hold = TcpHold::default();
    for n in 0..5 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(100));
    hold.block();
    let held = blocked(&mut hold, segment(500, &[7; 100]));
    assert!(matches!(held, BlockedPacket::Held(Some(_))));
    hold.unblock(Instant::now());
    let ack = selective_acknowledgement(100, &[(200, 300)]);
    let opens = received(&mut hold, ack).expect("the sender has to know the window");
    assert_eq!((opens.window, opens.sack.above(100).count()), (400, 0));
    let ack = selective_acknowledgement(100, &[(200, 400)]);
    assert_eq!(received(&mut hold, ack), None);
    let mut grows = selective_acknowledgement(100, &[(200, 500)]);
    grows[34] += 1;
    let grows = received(&mut hold, grows).expect("the window is another one");
    assert_eq!((grows.window, grows.sack.above(100).count()), (656, 0));
}

#[test]
fn a_keep_alive_in_an_outage_does_not_close_the_window() {
    let mut hold = TcpHold::default();
    sent(&mut hold, 0);
    received(&mut hold, acknowledgement(100));
    hold.block();
    // Nothing would open the window again: nothing is kept that could be acknowledged after the outage.
    for (sequence, payload, window) in [(99, &[][..], 400), (100, b"x", 0), (99, b"", 0)] {
        let answered = blocked(&mut hold, segment(sequence, payload));
        let BlockedPacket::Held(Some(answer)) = answered else {
            panic!("{answered:?}");
        };
        let answer = InnerSegment::parse(&answer).expect("TCP");
        assert_eq!((answer.acknowledged, answer.window), (Some(100), window));
    }
}

#[test]
fn an_acknowledgement_of_what_was_not_sent_or_that_is_old_changes_nothing() {
    let mut hold = TcpHold::default();
    for n in 0..8 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(200));
    let kept = hold.bytes();
    assert!(received(&mut hold, acknowledgement(900)).is_some());
    assert_eq!(hold.bytes(), kept);
    received(&mut hold, selective_acknowledgement(200, &[(300, 500)]));
    // One that another one overtook says nothing of what arrived later.
    assert!(received(&mut hold, acknowledgement(100)).is_some());
    received(&mut hold, selective_acknowledgement(200, &[(300, 600)]));
    assert_eq!(sequences(&mut hold), [200]);
}

#[test]
fn a_sender_that_has_gone_is_forgotten_and_one_that_waits_is_not() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    sent(&mut hold, 0);
    hold.unblock(now);
    hold.block();
    // Linux probes a closed window each two minutes.
    for minutes in [2, 4, 6] {
        let later = now + minutes * 60 * SECOND;
        hold.on_blocked(later, &segment(0, &[7; 100]).into());
    }
    hold.unblock(now + 7 * 60 * SECOND);
    assert_eq!(sequences(&mut hold), [0]);
    hold.unblock(now + 12 * 60 * SECOND);
    assert!(!hold.is_waiting() && sequences(&mut hold).is_empty());
}

#[test]
fn what_nobody_acknowledges_leaves_again_only_some_times() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    sent(&mut hold, 0);
    hold.block();
    let mut repeats = 0;
    for seconds in 0..250 {
        hold.unblock(now + seconds * SECOND);
        repeats += sequences(&mut hold).len();
    }
    assert_eq!((repeats, hold.look_at()), (9, None));
}

#[test]
fn a_repetition_of_several_segments_at_once_takes_the_place_of_their_copies() {
    let mut hold = TcpHold::default();
    for n in 0..4 {
        sent(&mut hold, n * 100);
    }
    let repeated = segment(100, &[7; 200]);
    assert!(hold.take_repeated(Instant::now(), &repeated));
    assert_eq!(hold.next_released(), Some(repeated.into()));
    hold.block();
    hold.unblock(Instant::now());
    assert_eq!(sequences(&mut hold), [0, 100, 300]);
    received(&mut hold, acknowledgement(300));
    received(&mut hold, acknowledgement(400));
    assert_eq!(hold.bytes(), 0);
}

#[test]
fn a_syn_that_is_repeated_ends_no_connection() {
    let mut hold = TcpHold::default();
    let mut syn = segment(100, &[]);
    syn[33] = 0x12; // SYN and ACK
    hold.on_leaving(Instant::now(), syn.clone().into());
    received(&mut hold, acknowledgement(101));
    sent(&mut hold, 101);
    hold.on_leaving(Instant::now(), syn.into());
    hold.block();
    hold.unblock(Instant::now());
    assert_eq!(sequences(&mut hold), [101]);
}

#[test]
fn a_probe_of_the_window_is_answered_and_an_acknowledgement_passes() {
    let mut hold = TcpHold::default();
    sent(&mut hold, 0);
    received(&mut hold, acknowledgement(100));
    hold.block();
    // Linux probes with an empty segment from before what is acknowledged.
    let probe = blocked(&mut hold, segment(99, &[]));
    assert!(matches!(probe, BlockedPacket::Held(Some(_))), "{probe:?}");
    let acknowledges = blocked(&mut hold, segment(100, &[]));
    assert_eq!(acknowledges, BlockedPacket::Passed);
    assert_eq!(hold.bytes(), 0);
}

fn held(hold: &mut TcpHold, packet: Vec<u8>) -> BlockedPacket {
    hold.on_held(Instant::now(), &packet.into())
}

fn window_of(held: BlockedPacket) -> Option<u16> {
    let BlockedPacket::Held(answer) = held else {
        panic!("it passed")
    };
    let answer = answer?;
    InnerSegment::parse(&answer).map(|answer| answer.window)
}

#[test]
fn what_waits_for_slow_paths_leaves_in_order_and_closes_and_opens_the_window() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    for n in 0..3 {
        sent(&mut hold, n * 1_000);
    }
    received(&mut hold, acknowledgement(1_000));
    hold.set_slow(now, true);
    // What left by the fast path goes first. The sender may fill what is kept, and no more.
    let mut closed_at = None;
    for n in 3..100 {
        let window = window_of(held(&mut hold, segment(n * 1_000, &[7; 1_000])));
        assert_eq!(window.unwrap_or(0), 0);
        closed_at = closed_at.or(window.map(|_| n));
    }
    assert!(
        closed_at.is_some_and(|n| (60..70).contains(&n)),
        "{closed_at:?}"
    );
    let first: Vec<u32> = (0..4)
        .filter_map(|_| hold.next_released())
        .map(|packet| InnerSegment::parse(&packet).expect("TCP").sequence)
        .collect();
    assert_eq!(first, [1_000, 2_000, 3_000, 4_000]);
    let ack = received(&mut hold, acknowledgement(1_100)).expect("it passes");
    assert_eq!((ack.acknowledged, ack.window), (Some(1_100), 0));
    while hold.next_released().is_some() {}
    let ack = received(&mut hold, acknowledgement(3_000)).expect("it passes");
    assert_eq!(ack.window, 400);
}

#[test]
fn all_that_slow_paths_left_leaves_at_once_when_a_fast_one_is_back() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    sent(&mut hold, 0);
    hold.set_slow(now, true);
    for n in 1..5 {
        held(&mut hold, segment(n * 100, &[7; 100]));
    }
    assert!(hold.next_released().is_some());
    received(&mut hold, acknowledgement(100));
    hold.set_slow(now, false);
    assert_eq!(sequences(&mut hold), [100, 200, 300, 400]);
    assert!(!hold.holds_senders());
}

#[test]
fn a_sender_learns_on_slow_paths_that_its_timer_was_wrong() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    for n in 0..4 {
        sent(&mut hold, n * 100);
    }
    received(&mut hold, acknowledgement(100));
    assert!(hold.take_repeated(now, &segment(100, &[7; 100])));
    hold.set_slow(now, true);
    // An ACK of what it repeated alone would have it repeat everything.
    assert_eq!(received(&mut hold, acknowledgement(200)), None);
    let kept = hold.bytes();
    let ack = received(&mut hold, acknowledgement(300)).expect("it passes");
    assert_eq!(ack.acknowledged, Some(300));
    assert!(hold.bytes() < kept);
    // The last one passes, because nothing more would come.
    assert_eq!(
        held(&mut hold, segment(300, &[7; 100])),
        BlockedPacket::Held(None)
    );
    let ack = received(&mut hold, acknowledgement(400)).expect("it passes");
    assert_eq!(ack.acknowledged, Some(400));
}

#[test]
fn what_a_sender_repeats_does_not_leave_again_while_its_copy_is_under_way_on_a_slow_path() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    hold.set_slow(now, true);
    for n in 0..3 {
        held(&mut hold, segment(n * 100, &[7; 100]));
    }
    assert!(hold.next_released().is_some());
    for n in [0, 0, 1] {
        let repeated = held(&mut hold, segment(n * 100, &[7; 100]));
        assert_eq!(repeated, BlockedPacket::Held(None));
    }
    assert_eq!(sequences(&mut hold), [100, 200]);
    // A copy that was lost leaves again here.
    for (seconds, again) in [(3, &[][..]), (5, &[0]), (9, &[]), (14, &[0])] {
        hold.unblock(now + seconds * SECOND);
        assert_eq!(sequences(&mut hold), again, "after {seconds} s");
    }
}

#[test]
fn a_probe_passes_on_slow_paths_unless_its_sender_is_held() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    sent(&mut hold, 0);
    received(&mut hold, acknowledgement(100));
    hold.set_slow(now, true);
    let probe = || segment(99, &[]);
    assert_eq!(held(&mut hold, probe()), BlockedPacket::Passed);
    for n in 0..100 {
        held(&mut hold, segment(100 + n * 1_000, &[7; 1_000]));
    }
    assert_eq!(window_of(held(&mut hold, probe())), Some(0));
}

#[test]
fn connections_take_turns_on_slow_paths() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    hold.set_slow(now, true);
    for n in 0..4 {
        held(&mut hold, segment(n * 100, &[7; 100]));
    }
    for n in 0..2 {
        let mut other = segment(50_000 + n * 100, &[7; 100]);
        other[20..22].copy_from_slice(&2_000_u16.to_be_bytes());
        held(&mut hold, other);
    }
    assert_eq!(sequences(&mut hold), [0, 50_000, 100, 50_100, 200, 300]);
}

#[test]
fn a_connection_that_is_reset_is_forgotten() {
    let mut hold = TcpHold::default();
    sent(&mut hold, 0);
    let mut reset = acknowledgement(0);
    reset[33] = 0x14; // RST and ACK
    received(&mut hold, reset);
    assert_eq!(hold.bytes(), 0);
    hold.block();
    hold.unblock(Instant::now());
    assert!(sequences(&mut hold).is_empty());
}

#[test]
fn a_new_connection_of_the_same_ports_is_no_continuation_of_the_old_one() {
    let mut hold = TcpHold::default();
    sent(&mut hold, 50_000);
    received(&mut hold, acknowledgement(50_100));
    let mut syn = segment(100, &[]);
    syn[33] = 0x02;
    hold.block();
    assert_eq!(blocked(&mut hold, syn), BlockedPacket::Held(None));
    hold.unblock(Instant::now());
    assert_eq!(sequences(&mut hold), [100]);
    sent(&mut hold, 101);
    received(&mut hold, acknowledgement(201));
    assert_eq!(hold.bytes(), 0);
}

#[test]
fn memory_is_bounded_and_an_outage_keeps_the_oldest() {
    let mut hold = TcpHold::default();
    for n in 0..3_000_u32 {
        hold.on_leaving(Instant::now(), segment(n * 1_000, &[7; 1_000]).into());
        assert!(hold.bytes() <= BYTES_MAX);
    }
    hold.clear();
    assert_eq!(hold.bytes(), 0);
    sent(&mut hold, 0);
    hold.block();
    for n in 1..3_000_u32 {
        blocked(&mut hold, segment(n * 1_000, &[7; 1_000]));
    }
    hold.unblock(Instant::now());
    let released = sequences(&mut hold);
    assert_eq!(released[..3], [0, 1_000, 2_000]);
    assert!(released.len() < 2_000, "{}", released.len());
}

#[test]
fn more_connections_than_are_followed_are_left_alone() {
    let mut hold = TcpHold::default();
    for port in 0..=CONNECTIONS_MAX as u16 {
        let mut packet = segment(0, b"x");
        packet[20..22].copy_from_slice(&port.to_be_bytes());
        hold.on_leaving(Instant::now(), packet.into());
    }
    hold.block();
    hold.unblock(Instant::now());
    assert_eq!(sequences(&mut hold).len(), CONNECTIONS_MAX);
}

/// A connection of ten segments, of which 200 to 299 is lost, and leaves over another link.
fn repaired_elsewhere(hold: &mut TcpHold, now: Instant, due: Instant) {
    for n in 0..10 {
        hold.on_leaving(now, segment(n * 100, &[7; 100]).into());
    }
    hold.on_received(now, acknowledgement(200).into());
    let ack = selective_acknowledgement(200, &[(300, 600)]);
    assert_eq!(hold.on_received(now, ack.into()), None);
    assert!(hold.has_repair());
    let repair = hold.next_repair(due, true, |_| true).expect("one is lost");
    let sequence = InnerSegment::parse(&repair).map(|segment| segment.sequence);
    assert_eq!(sequence, Some(200));
    assert!(!hold.has_repair() && sequences(hold).is_empty());
}

#[test]
fn a_copy_under_way_on_another_link_is_not_lost_because_later_segments_overtake_it() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    let due = now + SECOND / 4;
    repaired_elsewhere(&mut hold, now, due);
    for n in 10..20 {
        hold.on_leaving(now, segment(n * 100, &[7; 100]).into());
        let ack = selective_acknowledgement(200, &[(300, n * 100 + 100)]);
        assert_eq!(
            hold.on_received(now, ack.into()),
            None,
            "the sender is told"
        );
        assert!(sequences(&mut hold).is_empty(), "it is sent twice");
    }
    let ack = hold.on_received(now, acknowledgement(2_000).into());
    assert!(ack.is_some() && !hold.is_waiting());
    hold.unblock(due);
    assert!(sequences(&mut hold).is_empty());
}

#[test]
fn a_copy_that_another_link_loses_leaves_by_the_usual_way() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    let due = now + SECOND / 2;
    repaired_elsewhere(&mut hold, now, due);
    hold.unblock(due - SECOND / 100);
    assert!(sequences(&mut hold).is_empty());
    // Longer than the sender is kept in the dark without such a copy.
    let ack = selective_acknowledgement(200, &[(300, 1_000)]);
    assert_eq!(hold.on_received(due - SECOND / 100, ack.into()), None);
    hold.unblock(due);
    assert!(!hold.has_repair(), "not there again");
    assert_eq!(sequences(&mut hold), [200]);
}

#[test]
fn what_arrived_over_another_link_says_nothing_of_what_left_before_it() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    repaired_elsewhere(&mut hold, now, now + SECOND);
    // 100 to 199 had arrived, 600 to 999 are under way.
    for n in 10..13 {
        hold.on_leaving(now, segment(n * 100, &[7; 100]).into());
    }
    let ack = hold.on_received(now, acknowledgement(600).into());
    assert!(ack.is_some());
    assert!(sequences(&mut hold).is_empty());
    let ack = selective_acknowledgement(600, &[(700, 900)]);
    assert_eq!(hold.on_received(now, ack.into()), None);
    assert!(sequences(&mut hold).is_empty(), "two may have overtaken it");
}

#[test]
fn only_losses_that_may_pay_leave_over_another_link() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    for n in 0..6 {
        hold.on_leaving(now, segment(n * 100, &[7; 100]).into());
    }
    hold.on_received(now, acknowledgement(200).into());
    let ack = selective_acknowledgement(200, &[(300, 600)]);
    hold.on_received(now, ack.into());
    assert_eq!(hold.next_repair(now + SECOND, true, |_| false), None);
    assert_eq!(sequences(&mut hold), [200], "it leaves by the usual way");
    // What its sender repeats is for its sender's own reasons.
    assert!(hold.take_repeated(now, &segment(200, &[7; 100])));
    assert!(!hold.has_repair());
    // After an outage all of it leaves by the usual way.
    hold.block();
    hold.unblock(now);
    assert!(!hold.has_repair() && !sequences(&mut hold).is_empty());
}

#[test]
fn a_slower_link_carries_what_was_lost_twice_or_stops_a_connection() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    for n in 0..6 {
        hold.on_leaving(now, segment(n * 100, &[7; 100]).into());
    }
    hold.on_received(now, acknowledgement(100).into());
    let ack = selective_acknowledgement(100, &[(200, 500)]);
    hold.on_received(now, ack.into());
    assert_eq!(hold.next_repair(now + SECOND, false, |_| true), None);
    assert_eq!(sequences(&mut hold), [100], "the usual way is shorter");
    for n in 6..9 {
        hold.on_leaving(now, segment(n * 100, &[7; 100]).into());
    }
    let ack = selective_acknowledgement(100, &[(200, 900)]);
    hold.on_received(now, ack.into());
    assert!(hold.next_repair(now + SECOND, false, |_| true).is_some());
    // The other link loses it, and so does the usual way.
    hold.unblock(now + SECOND);
    assert_eq!(hold.next_repair(now + SECOND, true, |_| true), None);
    assert_eq!(sequences(&mut hold), [100]);
    hold.unblock(now + 3 * SECOND);
    assert!(
        hold.next_repair(now + 4 * SECOND, false, |_| true)
            .is_some()
    );
}

#[test]
fn what_overtakes_a_copy_on_another_link_and_is_before_it_has_no_newer_timestamp() {
    let (mut hold, now) = (TcpHold::default(), Instant::now());
    let leaves = |hold: &mut TcpHold, n: u32| {
        hold.on_leaving(
            now,
            timestamped_segment(n * 100, &[7; 100], 1_000 + n).into(),
        )
    };
    let stamp = |packet: &Bytes| {
        let segment = InnerSegment::parse(packet).expect("TCP");
        (segment.sequence, segment.timestamps.expect("set").value)
    };
    for n in 0..10 {
        leaves(&mut hold, n);
    }
    // 100 and 300 are lost.
    hold.on_received(now, acknowledgement(100).into());
    let ack = selective_acknowledgement(100, &[(200, 300), (400, 900)]);
    hold.on_received(now, ack.into());
    let second = |packet: &Bytes| stamp(packet).0 == 300;
    let there = hold.next_repair(now + SECOND, true, second);
    assert_eq!(there.as_ref().map(stamp), Some((300, 1_009)));
    assert_eq!(stamp(&leaves(&mut hold, 20)), (2_000, 1_020));
    let first = hold.next_released();
    assert_eq!(first.as_ref().map(stamp), Some((100, 1_009)));
    // Once it has come, others have the newest.
    let ack = selective_acknowledgement(100, &[(200, 900)]);
    hold.on_received(now, ack.into());
    hold.unblock(now + 2 * SECOND);
    let again = hold.next_released();
    assert_eq!(again.as_ref().map(stamp), Some((100, 1_020)));
}
