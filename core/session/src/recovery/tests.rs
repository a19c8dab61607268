use super::*;
use crate::congestion::{CongestionKind, controller};
use crate::sent_packet::SentData;
use d2tp_wire::FlowId;
use d2tp_wire::{Frame, FrameIter, WireWriter};

const MS: Span = Span::from_millis(1);

fn at(ms: u64) -> Time {
    Time::ZERO + MS.times(ms)
}

struct RecoveryFixture {
    recovery: Recovery,
    arrived: Vec<u64>,
    lost: Vec<u64>,
}

impl RecoveryFixture {
    fn new() -> Self {
        let recovery = Recovery::new(MS.times(100), controller(CongestionKind::NewReno, 1_000));
        RecoveryFixture {
            recovery,
            arrived: vec![],
            lost: vec![],
        }
    }
    fn send(&mut self, now: Time) {
        let mut sent = SentPacket::new(now);
        sent.bytes = 1_000;
        sent.eliciting = true;
        let offset = self.recovery.next_number();
        sent.note(SentFrame::Data(SentData {
            flow: FlowId(0),
            offset,
            len: 1,
            fin: false,
        }));
        self.recovery.on_sent(sent);
    }
    fn ack(&mut self, now: Time, ranges: &[(u64, u64)]) -> Result<RecoveryOutcome, PeerFault> {
        self.ack_by(true, now, ranges)
    }
    /// Handles an ACK that arrived on the path itself, or on another one.
    fn ack_by(
        &mut self,
        on_own_path: bool,
        now: Time,
        ranges: &[(u64, u64)],
    ) -> Result<RecoveryOutcome, PeerFault> {
        let mut buf = [0; 100];
        let mut w = WireWriter::new(&mut buf);
        assert!(Frame::encode_ack(
            &mut w,
            PathId(0),
            0,
            ranges.iter().copied()
        ));
        let n = w.written();
        let Some(Ok(Frame::Ack { ranges, .. })) = FrameIter::new(&buf[..n]).next() else {
            panic!()
        };
        let RecoveryFixture {
            recovery,
            arrived,
            lost,
        } = self;
        recovery.on_ack(
            now,
            PathId(0),
            ranges,
            on_own_path,
            Span::ZERO,
            MS.times(20),
            &[],
            |said, ok| {
                if let SentFrame::Data(d) = said {
                    if ok {
                        arrived.push(d.offset)
                    } else {
                        lost.push(d.offset)
                    }
                }
            },
        )
    }
}

#[test]
fn an_ack_that_came_another_way_moves_timers_and_not_the_round_trip() {
    // R-ACK-6
    let mut bed = RecoveryFixture::new();
    bed.send(at(0));
    bed.ack(at(50), &[(0, 0)]).unwrap();
    for n in 1..50 {
        bed.send(at(100 * n));
        let outcome = bed.ack_by(false, at(100 * n + 200), &[(0, n)]).unwrap();
        assert!(outcome.progress && outcome.rtt.is_none());
    }
    assert_eq!(bed.recovery.rtt.smoothed(), MS.times(50));
    assert!(bed.recovery.return_rtt().smoothed() > MS.times(190));
    bed.send(at(10_000));
    let probe_at = bed.recovery.probe_at(Span::ZERO, MS.times(2_000));
    assert!(
        probe_at > at(10_200),
        "asked before the answer can be there"
    );
    assert!(
        bed.ack_by(true, at(10_050), &[(0, 50)])
            .unwrap()
            .rtt
            .is_some()
    );
}

#[test]
fn three_later_packets_make_one_lost() {
    let mut bed = RecoveryFixture::new();
    (0..5).for_each(|i| bed.send(at(i)));
    bed.ack(at(50), &[(1, 3)]).unwrap();
    assert_eq!(
        (bed.arrived.clone(), bed.lost.clone()),
        (vec![1, 2, 3], vec![0])
    );
    assert_eq!(bed.recovery.in_flight, 1_000);
}

#[test]
fn a_late_packet_is_noticed_and_the_response_undone() {
    let mut bed = RecoveryFixture::new();
    (0..5).for_each(|i| bed.send(at(i)));
    let before = bed.recovery.controller.window();
    bed.ack(at(50), &[(1, 3)]).unwrap();
    assert!(bed.recovery.controller.window() < before);
    bed.ack(at(55), &[(0, 3)]).unwrap();
    assert!(bed.recovery.controller.window() >= before);
    assert!(bed.recovery.packet_threshold > PACKET_THRESHOLD);
}

#[test]
fn the_tolerance_of_reordering_ends_after_sixteen_recoveries_without_any() {
    // RFC 8985 §6.2
    let mut bed = RecoveryFixture::new();
    (0..5).for_each(|i| bed.send(at(i)));
    bed.ack(at(50), &[(1, 4)]).unwrap();
    bed.ack(at(55), &[(0, 4)]).unwrap();
    let tolerance = |bed: &RecoveryFixture| {
        let recovery = &bed.recovery;
        (recovery.packet_threshold, recovery.reorder_eighths)
    };
    let raised = tolerance(&bed);
    assert!(raised > (PACKET_THRESHOLD, 1));
    // The seventeenth shows that the sixteenth is over.
    for n in 1..=17 {
        assert_eq!(tolerance(&bed), raised, "before recovery {n}");
        let first = bed.recovery.next_number();
        (0..10).for_each(|i| bed.send(at(1_000 * n + i)));
        bed.ack(at(1_000 * n + 50), &[(first + 1, first + 9)])
            .unwrap();
    }
    assert_eq!(bed.lost.len(), 18);
    assert_eq!(tolerance(&bed), (PACKET_THRESHOLD, 1));
    // Reordering raises it once more, for as long.
    let first = bed.recovery.next_number();
    (0..5).for_each(|i| bed.send(at(20_000 + i)));
    bed.ack(at(20_050), &[(first + 1, first + 4)]).unwrap();
    bed.ack(at(20_055), &[(first, first + 4)]).unwrap();
    assert_eq!(tolerance(&bed), raised);
}

#[test]
fn a_probe_of_the_datagram_size_that_arrives_late_does_not_undo_the_response_to_another_loss() {
    let mut bed = RecoveryFixture::new();
    let mut probe = SentPacket::new(at(0));
    (probe.bytes, probe.eliciting, probe.mtu_probe) = (1_400, true, true);
    bed.recovery.on_sent(probe);
    (1..6).for_each(|i| bed.send(at(i)));
    bed.ack(at(50), &[(2, 5)]).unwrap();
    let window = bed.recovery.controller.window();
    assert_eq!((window, bed.lost.clone()), (5_000, vec![1]));
    bed.ack(at(55), &[(2, 5), (0, 0)]).unwrap();
    assert_eq!(bed.recovery.controller.window(), window);
}

#[test]
fn what_was_abandoned_and_arrives_late_does_not_undo_the_response_to_another_loss() {
    let mut bed = RecoveryFixture::new();
    (0..3).for_each(|i| bed.send(at(100 + i)));
    bed.recovery.abandon(|_, _| {});
    (3..8).for_each(|i| bed.send(at(110 + i)));
    bed.ack(at(150), &[(4, 7)]).unwrap();
    let window = bed.recovery.controller.window();
    assert_eq!((window, bed.lost.clone()), (5_000, vec![3]));
    bed.ack(at(155), &[(4, 7), (0, 2)]).unwrap();
    assert_eq!(bed.recovery.controller.window(), window);
}

#[test]
fn losses_between_which_packets_arrived_are_no_persistent_congestion() {
    // RFC 9002 §7.6.2. ACKs are lost for a second; the next one shows two losses, far apart.
    let mut bed = RecoveryFixture::new();
    bed.send(at(0));
    bed.ack(at(50), &[(0, 0)]).unwrap();
    (1..11).for_each(|i| bed.send(at(100 * i)));
    (0..3).for_each(|_| bed.send(at(1_000)));
    let arrived = [(11, 13), (2, 9)];
    bed.ack(at(1_060), &arrived).unwrap();
    assert_eq!(bed.lost, [1, 10]);
    assert_eq!(bed.recovery.controller.window(), 5_500);
    // Here nothing arrived between.
    (0..10).for_each(|i| bed.send(at(2_000 + 100 * i)));
    (0..3).for_each(|_| bed.send(at(3_000)));
    bed.ack(at(3_060), &[(24, 26)]).unwrap();
    // Two datagrams, and slow start by the three that arrived.
    assert_eq!(bed.recovery.controller.window(), 5_000);
}

#[test]
fn a_probe_of_an_outage_that_arrives_is_noticed_behind_a_number_left_out() {
    // R-PATH-14
    let mut bed = RecoveryFixture::new();
    bed.recovery.skip(0);
    bed.send(at(0));
    bed.ack(at(50), &[(0, 0)]).unwrap();
    for ms in [1_100, 1_200] {
        bed.send(at(ms));
    }
    bed.recovery.skip(0);
    for ms in [1_400, 1_500] {
        bed.send(at(ms));
    }
    bed.recovery
        .on_blackout(at(2_000), at(1_000), WindowRestore::Half);
    bed.ack(at(2_010), &[(1, 1)]).unwrap();
    assert_eq!(bed.recovery.late_blackouts, 1);
}

#[test]
fn time_makes_the_last_but_one_lost() {
    let mut bed = RecoveryFixture::new();
    bed.send(at(0));
    bed.send(at(0));
    bed.ack(at(40), &[(1, 1)]).unwrap();
    assert!(bed.lost.is_empty());
    let fires = bed.recovery.loss_at();
    assert_eq!(fires, at(45));
    let RecoveryFixture { recovery, lost, .. } = &mut bed;
    recovery.on_loss_timeout(fires, MS.times(20), |said, _| {
        if let SentFrame::Data(d) = said {
            lost.push(d.offset);
        }
    });
    assert_eq!(bed.lost, [0]);
}

#[test]
fn one_answer_after_a_long_stall_does_not_make_the_next_question_wait() {
    let mut bed = RecoveryFixture::new();
    bed.send(at(0));
    bed.ack(at(40), &[(0, 0)]).unwrap();
    bed.send(at(100));
    bed.ack(at(17_100), &[(0, 1)]).unwrap();
    bed.send(at(20_000));
    let (delay, most) = (MS.times(20), MS.times(2_000));
    assert!(bed.recovery.probe_at(delay, most) <= at(22_000));
}

#[test]
fn an_ack_of_what_was_never_sent_is_a_fault() {
    let mut bed = RecoveryFixture::new();
    bed.send(at(0));
    assert_eq!(
        bed.ack(at(9), &[(0, 1)]),
        Err(PeerFault::BadAck {
            path: PathId(0),
            acked: 1,
            sent: 1
        })
    );
}

#[test]
fn an_abandoned_path_gives_back_everything_without_a_response() {
    let mut bed = RecoveryFixture::new();
    (0..4).for_each(|i| bed.send(at(i)));
    let window = bed.recovery.controller.window();
    let mut back = vec![];
    bed.recovery.abandon(|said, ok| back.push((said, ok)));
    assert_eq!(back.len(), 4);
    assert_eq!(
        (bed.recovery.in_flight, bed.recovery.controller.window()),
        (0, window)
    );
    assert_eq!(bed.recovery.probe_at(MS, MS), Time::NEVER);
}

#[test]
fn a_number_left_out_is_neither_lost_nor_waited_for_and_its_ack_is_a_fault() {
    // R-ACK-4
    let mut bed = RecoveryFixture::new();
    bed.recovery.skip(0);
    let mut skipped = 0;
    for n in 0..40 {
        if bed.recovery.is_skip_due() {
            skipped = bed.recovery.next_number();
            bed.recovery.skip(9);
        }
        bed.send(at(n));
    }
    assert_eq!(skipped, SKIP_AFTER_MIN);
    let last = bed.recovery.next_number() - 1;
    assert_eq!(
        bed.ack(at(90), &[(skipped - 2, last)]),
        Err(PeerFault::SkippedAck {
            path: PathId(0),
            number: skipped
        })
    );
    bed.ack(at(90), &[(skipped + 1, last), (0, skipped - 1)])
        .unwrap();
    assert_eq!((bed.recovery.lost_total, bed.recovery.in_flight), (0, 0));
    assert!(!bed.arrived.contains(&skipped) && bed.lost.is_empty());
    assert!(
        bed.recovery.skipped.is_empty(),
        "it is not remembered for ever"
    );
}

#[test]
fn an_ack_repeated_for_a_whole_window_costs_its_news_and_not_the_window() {
    // R-ACK-5
    let mut bed = RecoveryFixture::new();
    (0..20_000).for_each(|_| bed.send(at(0)));
    // The first packet is missing, so all packets of the window are still remembered.
    bed.ack(at(1_000), &[(1, 19_998)]).unwrap();
    assert!(bed.recovery.sent.len() >= 20_000);
    bed.ack(at(1_001), &[(1, 19_998)]).unwrap();
    // The number from which the next ACK begins to search, and the lost packets that it looks
    // up below.
    assert!(19_998 - bed.recovery.first_open <= PACKET_THRESHOLD_MAX);
    assert_eq!(bed.recovery.lost, [0]);
    bed.ack(at(1_002), &[(0, 19_999)]).unwrap();
    assert_eq!(bed.arrived.len(), 20_000);
    assert_eq!(bed.recovery.spurious_total, 1);
}

#[test]
fn a_peer_that_never_acknowledges_does_not_fill_our_memory() {
    // R-ACK-3
    let mut bed = RecoveryFixture::new();
    for n in 0..100_000 {
        bed.recovery.on_sent(SentPacket::new(at(n)));
    }
    assert!(bed.recovery.sent.len() <= 10_000);
    // One packet to be acknowledged, and then ACKs alone.
    bed.send(at(0));
    let mut given_up = 0;
    for n in 0..20_000 {
        bed.recovery.on_sent(SentPacket::new(at(n)));
        bed.recovery
            .give_up_oldest(|_, arrived| given_up += u64::from(!arrived));
    }
    assert!(bed.recovery.sent.len() <= ACK_ONLY_MAX + 1);
    assert_eq!((given_up, bed.recovery.in_flight), (1, 0));
    let mut given_up = 0;
    for n in 0..2 * SENT_MAX as u64 {
        bed.send(at(n));
        bed.recovery
            .give_up_oldest(|_, arrived| given_up += u64::from(!arrived));
    }
    assert_eq!(bed.recovery.sent.len(), SENT_MAX);
    assert_eq!(given_up, SENT_MAX as u64);
    assert_eq!(bed.recovery.in_flight, SENT_MAX as u64 * 1_000);
}
