//! A member finished the handshake: its packets are authentic, what they say is not to be trusted.

use bytes::Bytes;
use d2tp_session::*;
use d2tp_wire::{AckRanges, Cid, Frame, FrameIter, VARINT_MAX, WireWriter};

use crate::adversary::rogue::*;

/// An ACK frame for `0..=largest` of a path, as bytes.
fn ack(path: u32, largest: u64) -> Vec<u8> {
    let mut buf = [0; 64];
    let mut w = WireWriter::new(&mut buf);
    Frame::encode_ack(&mut w, PathId(path), 0, [(0, largest)].into_iter());
    let n = w.written();
    buf[..n].to_vec()
}

fn ranges(bytes: &[u8]) -> AckRanges<'_> {
    match FrameIter::new(bytes).next() {
        Some(Ok(Frame::Ack { ranges, .. })) => ranges,
        other => panic!("not an ACK: {other:?}"),
    }
}

#[test]
fn an_ack_of_a_packet_never_sent_ends_the_session() {
    // R-ACK-2, R-CLOSE-2
    let mut r = Rogue::inside(EndpointConfig::default());
    let bytes = ack(0, 1000);
    let ranges = ranges(&bytes);
    r.inbox.clear();
    r.say(&[Frame::Ack {
        path: PathId(0),
        delay_us: 0,
        ranges,
    }]);
    assert!(matches!(fault(&r), PeerFault::BadAck { acked: 1000, .. }));
    let told = r.heard_frames(|f| match f {
        Frame::Close { code, .. } => Some(*code),
        _ => None,
    });
    assert_eq!(told, [u64::from(ReasonCode::Protocol as u8)]);
    assert!(r.session().is_none(), "nothing is kept");
}

#[test]
fn an_ack_for_a_path_that_is_not_there_changes_nothing() {
    let mut r = Rogue::inside(EndpointConfig::default());
    let bytes = ack(7, VARINT_MAX);
    let ranges = ranges(&bytes);
    r.say(&[Frame::Ack {
        path: PathId(7),
        delay_us: VARINT_MAX,
        ranges,
    }]);
    assert!(r.is_alive());
}

#[test]
fn bytes_beyond_the_flows_credit_end_the_session() {
    // R-FLOW-3
    let mut r = Rogue::inside(small());
    r.say(&[data(flow(0), 59_999, &[1])]);
    assert!(r.is_alive());
    r.say(&[data(flow(0), 60_000, &[1])]);
    assert!(matches!(
        fault(&r),
        PeerFault::OverCredit {
            flow: Some(_),
            end: 60_001,
            credit: 60_000
        }
    ));
}

#[test]
fn bytes_beyond_the_sessions_credit_end_the_session() {
    // R-FLOW-3
    let mut r = Rogue::inside(small());
    r.say(&[data(flow(0), 49_999, &[1]), data(flow(1), 49_999, &[1])]);
    assert!(r.is_alive());
    r.say(&[data(flow(2), 0, &[1])]);
    assert!(matches!(
        fault(&r),
        PeerFault::OverCredit {
            flow: None,
            end: 100_001,
            credit: 100_000
        }
    ));
}

#[test]
fn a_flow_id_that_is_the_servers_or_of_a_later_epoch_ends_the_session() {
    // R-FLOW-1
    for bad in [FlowId::new(1, 0, false), FlowId::new(2, 0, true)] {
        let mut r = Rogue::inside(small());
        r.say(&[data(bad, 0, b"x")]);
        assert_eq!(fault(&r), PeerFault::FlowId(bad));
    }
}

#[test]
fn a_flow_too_many_ends_the_session() {
    // R-FLOW-2
    let mut r = Rogue::inside(small());
    for n in 0..16 {
        r.say(&[data(flow(n), 0, b"x")]);
    }
    assert!(r.is_alive());
    r.say(&[data(flow(16), 0, b"x")]);
    assert_eq!(fault(&r), PeerFault::TooManyFlows(16));
}

#[test]
fn a_flow_that_changes_its_length_ends_the_session() {
    // R-FLOW-4
    let mut r = Rogue::inside(small());
    let end = Frame::Data {
        flow: flow(0),
        offset: 10,
        bytes: b"",
        fin: true,
    };
    r.say(&[end, data(flow(0), 10, b"x")]);
    assert!(matches!(
        fault(&r),
        PeerFault::FinalSize {
            was: 10,
            now: 11,
            ..
        }
    ));
}

#[test]
fn a_reset_below_what_was_sent_ends_the_session() {
    // R-FLOW-4
    let mut r = Rogue::inside(small());
    let reset = Frame::Reset {
        flow: flow(0),
        code: 1,
        final_size: 3,
    };
    r.say(&[data(flow(0), 0, b"12345"), reset]);
    assert!(matches!(
        fault(&r),
        PeerFault::FinalSize { was: 5, now: 3, .. }
    ));
}

#[test]
fn a_reset_and_an_end_of_different_lengths_end_the_session() {
    // R-FLOW-4
    let reset = Frame::Reset {
        flow: flow(0),
        code: 1,
        final_size: 5,
    };
    let end = |offset| Frame::Data {
        flow: flow(0),
        offset,
        bytes: b"",
        fin: true,
    };
    let begin = data(flow(0), 0, b"123");
    let longer = [begin, end(4), reset];
    let shorter = [begin, reset, end(4)];
    let beyond = [begin, reset, data(flow(0), 4, b"56")];
    for (frames, was, now) in [(longer, 4, 5), (shorter, 5, 4), (beyond, 5, 6)] {
        let mut r = Rogue::inside(small());
        r.say(&frames);
        let found = match fault(&r) {
            PeerFault::FinalSize { was, now, .. } => (was, now),
            other => panic!("{other:?}"),
        };
        assert_eq!(found, (was, now));
    }
}

#[test]
fn what_arrives_behind_a_reset_does_not_cost_an_honest_peer_its_session() {
    // R-FLOW-7: bytes that RESET counted are not counted again when they arrive late.
    let mut r = Rogue::inside(small());
    let reset = Frame::Reset {
        flow: flow(0),
        code: 1,
        final_size: 50_000,
    };
    r.say(&[data(flow(0), 0, b"x"), reset]);
    r.say(&[data(flow(0), 49_999, b"x")]);
    // That flow counts as read, so the session's credit is 150,000.
    r.say(&[data(flow(1), 49_999, b"x"), data(flow(2), 49_999, b"x")]);
    assert_eq!(r.verdict(), None);
    r.say(&[data(flow(3), 0, b"x")]);
    assert!(matches!(
        fault(&r),
        PeerFault::OverCredit {
            flow: None,
            end: 150_001,
            credit: 150_000
        }
    ));
}

#[test]
fn a_probe_of_the_datagram_size_that_a_silence_swallowed_is_sent_again() {
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), vec![1; 200_000].into()).unwrap());
    let large = |r: &mut Rogue| {
        let packets = r.open_inbox();
        let large = packets.iter().find(|(_, _, text)| text.len() > 1_300);
        large.map(|(_, number, _)| *number)
    };
    let probe = loop {
        match large(&mut r) {
            Some(probe) => break probe,
            None => r.acknowledge(),
        }
    };
    r.arrived.remove(&probe);
    // Longer than a server goes on without hearing from the device.
    r.wait(Span::from_secs(20));
    r.inbox.clear();
    r.say(&[Frame::Ping]);
    let again = (0..50).any(|_| {
        let again = large(&mut r).is_some();
        r.acknowledge();
        r.wait(MS.times(20));
        again
    });
    assert!(again);
}

#[test]
fn a_used_flow_id_opens_nothing_again() {
    // R-FLOW-5
    let mut r = Rogue::inside(small());
    let over = [
        data(flow(0), 0, b"x"),
        Frame::Reset {
            flow: flow(0),
            code: 1,
            final_size: 1,
        },
        Frame::Stop {
            flow: flow(0),
            code: 1,
        },
    ];
    r.say(&over);
    r.acknowledge();
    let opened = |r: &Rogue| {
        r.events
            .iter()
            .filter(|e| matches!(e, SessionEvent::Opened(_)))
            .count()
    };
    assert_eq!(opened(&r), 1);
    assert!(r.with_session(|s| s.flow_ids()).is_empty());
    r.say(&[data(flow(0), 0, b"x")]);
    assert_eq!(opened(&r), 1);
    assert!(r.is_alive() && r.with_session(|s| s.flow_ids()).is_empty());
}

#[test]
fn frames_that_do_not_decode_end_the_session_and_nothing_else() {
    // R-WIRE-2
    for bad in [&[0x3f][..], &[0x08, 0x40], &[0x1a, 0, 1, 9, 0, 0], &[0x07]] {
        let mut r = Rogue::inside(small());
        let packet = r.packet_of(0, 9, bad);
        r.throw(r.home, packet);
        assert!(matches!(fault(&r), PeerFault::BadFrame(_)), "{bad:?}");
        assert!(r.session().is_none());
    }
}

#[test]
fn a_flood_of_challenges_gets_four_answers() {
    // R-PATH-3
    let mut r = Rogue::inside(small());
    r.inbox.clear();
    let nonces: Vec<[u8; 16]> = (0..60).map(|n| [n; 16]).collect();
    let frames: Vec<Frame<'_>> = nonces.iter().map(|n| Frame::Chg { nonce: *n }).collect();
    r.say(&frames);
    let answers = r.heard_frames(|f| matches!(f, Frame::Rsp { .. }).then_some(()));
    assert_eq!(answers.len(), 4);
    assert!(r.is_alive());
}

#[test]
fn a_flood_of_connection_ids_is_not_kept() {
    // R-PATH-7
    let mut r = Rogue::inside(small());
    for n in 0..2000u32 {
        r.say(&[Frame::PathCid {
            path: PathId(n * 1000),
            cid: Cid([9; 8]),
            token: [0; 16],
        }]);
    }
    assert!(r.is_alive());
}

#[test]
fn what_is_said_of_path_ids_that_are_skipped_is_not_kept() {
    // R-PATH-7, R-PATH-11
    let mut r = Rogue::inside(small());
    let ids = |r: &Rogue, last: u32| {
        (last - 3..=last)
            .filter(|n| r.theirs.contains_key(n))
            .collect()
    };
    for path in (4..200).step_by(4) {
        let offered: Vec<u32> = ids(&r, path);
        for n in offered {
            let cid = Cid((u64::from(n) << 8 | 0xff).to_be_bytes());
            r.own.insert(n, cid);
            let id = PathId(n);
            let token = [0; 16];
            r.say(&[
                Frame::PathCid {
                    path: id,
                    cid,
                    token,
                },
                Frame::Grant {
                    seq: 1,
                    flow: flow(0),
                    path: id,
                    max_sent: 1,
                },
            ]);
        }
        let first = r.packet(path, &[status(path, 1, false)]);
        r.throw(r.home, first);
        r.open_inbox();
        r.say(&[Frame::PathStatus {
            path: PathId(path),
            seq: 9,
            status: PathStatus::Gone,
            gated: false,
            reason: ReasonCode::None,
        }]);
        r.acknowledge();
        assert_eq!(r.with_session(|s| s.violated_limit(0)), None, "path {path}");
    }
    assert!(r.is_alive());
}

#[test]
fn an_ack_for_which_an_unproved_address_has_no_room_keeps_no_timer_busy() {
    // R-PATH-2: the numbers are so high that an ACK takes 18 bytes, and there is room for 17.
    let mut r = Rogue::inside(small());
    let first = 1 << 30;
    for n in first..first + 100 {
        let packet = r.packet_numbered(0, n, &[]);
        r.throw(r.home, packet);
    }
    r.wait(Span::from_secs(1));
    let elsewhere = at("198.51.100.9:9");
    r.inbox.clear();
    let moved = r.packet_of(0, first + 100, &[0; 17]);
    let mut room = moved.len() as i64;
    r.throw(elsewhere, moved);
    let sent = r.inbox.iter().filter(|(to, _)| *to == elsewhere);
    room -= sent.map(|(_, bytes)| bytes.len() as i64).sum::<i64>();
    assert_eq!(room, 0, "a challenge was sent there");
    // PING, and zeros up to the 46 bytes that the smallest packet with 17 bytes of frames takes.
    let mut text = [0; 17];
    text[0] = 1;
    let asks = r.packet_of(0, first + 101, &text);
    r.throw(elsewhere, asks);
    r.wait(Span::from_secs(1));
    assert!(r.is_alive());
}

#[test]
fn a_path_the_server_did_not_offer_cannot_be_opened() {
    // R-PATH-1
    let mut r = Rogue::inside(small());
    let cid = r.theirs[&1];
    r.theirs.insert(77, cid);
    let packet = r.packet(77, &[Frame::Ping]);
    r.throw(r.home, packet);
    assert_eq!(r.with_session(|s| s.path_stats().len()), 1);
}

#[test]
fn a_path_that_is_gone_never_comes_back() {
    // R-SEAL-2
    let mut r = Rogue::inside(small());
    let packet = r.packet(1, &[status(1, 1, false)]);
    r.throw(r.home, packet);
    assert_eq!(r.with_session(|s| s.path_stats().len()), 2);
    r.say(&[Frame::PathStatus {
        path: PathId(1),
        seq: 2,
        status: PathStatus::Gone,
        gated: false,
        reason: ReasonCode::None,
    }]);
    assert_eq!(r.with_session(|s| s.path_stats().len()), 1);
    let tell = Frame::PathCid {
        path: PathId(1),
        cid: r.own[&1],
        token: [0; 16],
    };
    r.say(&[tell]);
    let packet = r.packet(1, &[status(1, 3, false)]);
    r.throw(r.home, packet);
    assert_eq!(r.with_session(|s| s.path_stats().len()), 1);
}

#[test]
fn a_deadline_passes_while_its_session_sleeps_as_a_record() {
    // R-DEADLINE-3
    let mut r = Rogue::inside(small());
    r.say(&[Frame::Open {
        flow: flow(0),
        flags: Frame::OPEN_HIBERNATES,
        priority: 0,
        size: None,
        deadline_ms: Some(10_000),
    }]);
    let id = r.session().unwrap();
    r.server.hibernate(r.now, id).unwrap();
    r.now += Span::from_secs(60);
    r.enter(2);
    r.wait(MS);
    assert!(r.events.contains(&SessionEvent::Ended {
        flow: flow(0),
        end: FlowEnd::DeadlinePassed
    }));
}

#[test]
fn an_older_status_that_comes_late_does_not_count() {
    // R-PATH-5
    let mut r = Rogue::inside(small());
    r.say(&[status(0, 9, true), status(0, 8, false)]);
    assert!(r.with_session(|s| s.path_stats()[0].gated));
}

#[test]
fn no_more_paths_are_opened_than_the_limit() {
    // R-PATH-1
    let mut r = Rogue::inside(small());
    for n in 1..20u32 {
        r.own.insert(n, Cid([n as u8 + 1; 8]));
        let tell = Frame::PathCid {
            path: PathId(n),
            cid: r.own[&n],
            token: [0; 16],
        };
        r.say(&[tell]);
        r.wait(MS.times(50));
        r.open_inbox();
        if !r.theirs.contains_key(&n) {
            break;
        }
        let packet = r.packet(n, &[status(n, 1, false)]);
        r.throw(r.home, packet);
    }
    let paths = r.with_session(|s| s.path_stats().len());
    assert!((5..=8).contains(&paths), "{paths}");
}

#[test]
fn ids_that_were_skipped_do_not_pile_up() {
    // R-PATH-11
    let mut r = Rogue::inside(small());
    let (mut told, mut used) = (5usize, 1usize);
    let mut next = 4u32;
    for _ in 0..100 {
        let n = next;
        r.own.insert(n, Cid([n as u8; 8]));
        let tell = Frame::PathCid {
            path: PathId(n),
            cid: r.own[&n],
            token: [0; 16],
        };
        r.say(&[tell]);
        let packet = r.packet(n, &[status(n, 1, false)]);
        r.throw(r.home, packet);
        used += 1;
        r.say(&[Frame::PathStatus {
            path: PathId(n),
            seq: 9,
            status: PathStatus::Gone,
            gated: false,
            reason: ReasonCode::None,
        }]);
        r.wait(MS.times(50));
        let more: Vec<u32> = r.heard_frames(|f| match f {
            Frame::PathCid { path, .. } => Some(path.0),
            _ => None,
        });
        told += more.len();
        let Some(last) = r.theirs.keys().max().copied().filter(|l| *l > n) else {
            break;
        };
        next = last;
    }
    assert!(told - used > 64, "the device skipped {} ids", told - used);
    // R-PATH-10: those skipped long ago were taken back and lead nowhere.
    let live = |r: &mut Rogue| {
        r.with_session(|s| s.path_stats().iter().map(|p| p.id.0).collect::<Vec<_>>())
    };
    for n in [1, 2, 3, 5] {
        r.own.insert(n, Cid([n as u8; 8]));
        let packet = r.packet(n, &[status(n, 1, false)]);
        r.throw(r.home, packet);
        assert!(!live(&mut r).contains(&n), "id {n} still leads here");
    }
}

#[test]
fn gaps_below_the_highest_are_bounded_too() {
    // R-FLOW-6: one byte at the end of the window first, then every other byte from the start.
    // A bounded receiver keeps 256 of them, so the bytes between fill the front, no more.
    let mut r = Rogue::inside(small());
    r.say(&[data(flow(0), 59_999, b"z")]);
    for n in 0..2_000u64 {
        r.say(&[data(flow(0), 1 + 2 * n, b"x")]);
    }
    for n in 0..2_000u64 {
        r.say(&[data(flow(0), 2 * n, b"y")]);
    }
    let n = r.with_session(|s| {
        let mut n = 0;
        while let Ok(ReadOutcome::Chunk(c)) = s.read(flow(0), 100_000) {
            n += c.len();
        }
        n
    });
    assert!(n <= 1024, "{n} bytes were kept in more than 256 pieces");
}

#[test]
fn what_one_gap_too_many_drops_is_not_acknowledged() {
    // R-FLOW-6
    let mut r = Rogue::inside(small());
    r.say(&[]);
    let before = r.numbers[&0];
    for n in 0..300u64 {
        r.say(&[data(flow(0), 1 + 2 * n, b"x")]);
    }
    let mut acked = std::collections::BTreeSet::new();
    for (_, _, text) in r.open_inbox() {
        for frame in FrameIter::new(&text) {
            if let Ok(Frame::Ack { ranges, .. }) = frame {
                for (low, high) in ranges.iter() {
                    acked.extend(low..=high);
                }
            }
        }
    }
    let fully = (before..before + 300).filter(|n| acked.contains(n)).count();
    assert!(
        fully <= 257,
        "{fully} of 300 pieces acknowledged, 256 can be held"
    );
}

#[test]
fn gaps_in_packet_numbers_cost_one_range_each_and_no_more_than_the_limit() {
    let mut r = Rogue::inside(small());
    r.inbox.clear();
    for n in 0..500u64 {
        let packet = r.packet_numbered(0, 10 + 2 * n, &[Frame::Ping]);
        r.throw(r.home, packet);
    }
    let most = r.heard_frames(|f| match f {
        Frame::Ack { ranges, .. } => Some(ranges.iter().count()),
        _ => None,
    });
    assert_eq!(most.iter().max(), Some(&64));
    assert!(r.is_alive());
}

#[test]
fn only_the_device_grants_and_only_for_paths_that_are_there() {
    // R-GRANT-1
    let mut r = Rogue::inside(small());
    r.say(&[
        data(flow(0), 0, b"x"),
        status(0, 2, true),
        Frame::Grant {
            seq: 1,
            flow: flow(0),
            path: PathId(44),
            max_sent: VARINT_MAX,
        },
    ]);
    r.inbox.clear();
    r.with_session(|s| s.write(flow(0), Bytes::from_static(&[7; 500])).unwrap());
    let sent = r.heard_frames(|f| matches!(f, Frame::Data { .. }).then_some(()));
    assert!(sent.is_empty(), "payload on a gated path without a grant");
}

#[test]
fn an_older_grant_that_comes_late_does_not_undo_a_revocation() {
    // R-GRANT-2, R-GRANT-3, R-GRANT-4
    let mut r = Rogue::inside(small());
    let grant = |seq, max_sent| Frame::Grant {
        seq,
        flow: flow(0),
        path: PathId(0),
        max_sent,
    };
    r.say(&[data(flow(0), 0, b"x"), status(0, 2, true), grant(1, 300)]);
    r.with_session(|s| s.write(flow(0), Bytes::from_static(&[7; 900])).unwrap());
    let sent: usize = r
        .heard_frames(|f| match f {
            Frame::Data { bytes, .. } => Some(bytes.len()),
            _ => None,
        })
        .iter()
        .sum();
    assert_eq!(sent, 300);
    r.say(&[grant(3, 0)]);
    let told = r.heard_frames(|f| match f {
        Frame::Spent { sent, .. } => Some(*sent),
        _ => None,
    });
    assert!(told.contains(&300), "a revocation is answered: {told:?}");
    r.say(&[grant(2, 100_000)]);
    r.wait(MS.times(20));
    let more = r.heard_frames(|f| matches!(f, Frame::Data { .. }).then_some(()));
    assert!(more.is_empty());
}

#[test]
fn a_path_whose_status_was_not_heard_carries_no_payload() {
    // R-PATH-10: the packet that says "gated" may be the one that is lost.
    let mut r = Rogue::with(small());
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    let (_, answer) = r.inbox.pop().unwrap();
    r.welcome(&answer);
    let lost = r.packet(0, &[status(0, 1, true)]);
    r.say(&[data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), Bytes::from_static(&[7; 500])).unwrap());
    let sent = r.heard_frames(|f| matches!(f, Frame::Data { .. }).then_some(()));
    assert!(
        sent.is_empty(),
        "payload on a path that turned out to be metered"
    );
    r.throw(r.home, lost);
    r.wait(MS.times(20));
    let sent = r.heard_frames(|f| matches!(f, Frame::Data { .. }).then_some(()));
    assert!(sent.is_empty(), "it was not granted either");
    r.say(&[status(0, 2, false)]);
    let sent = r.heard_frames(|f| matches!(f, Frame::Data { .. }).then_some(()));
    assert!(!sent.is_empty(), "free now");
}

#[test]
fn a_deadline_numbered_at_the_very_end_does_not_take_the_server_down() {
    // R-DEADLINE-2
    let mut r = Rogue::inside(small());
    r.say(&[
        data(flow(0), 0, b"x"),
        Frame::Deadline {
            flow: flow(0),
            seq: VARINT_MAX,
            remaining_ms: Some(VARINT_MAX - 1),
        },
    ]);
    let soon = r.now + MS.times(5000);
    r.with_session(|s| s.set_deadline(flow(0), Some(soon)).unwrap());
    assert!(r.is_alive());
    let record = r.with_session(|s| s.record(soon, true).encode());
    assert!(SessionRecord::decode(&record).is_ok());
}

#[test]
fn a_close_behind_a_flood_of_events_still_ends_the_session() {
    // R-CLOSE-1
    let mut r = Rogue::inside(small());
    r.say(&[data(flow(0), 0, b"x")]);
    let mut run = Vec::new();
    let mut seq = 1;
    let mut stride = 0;
    for _ in 0..40 {
        let frames: Vec<Frame<'_>> = (0..150)
            .map(|_| {
                seq += 1;
                Frame::Deadline {
                    flow: flow(0),
                    seq: (1 << 20) + seq,
                    remaining_ms: Some(1 << 20),
                }
            })
            .collect();
        let packet = r.packet(0, &frames);
        assert!(stride == 0 || stride == packet.len());
        stride = packet.len();
        run.extend(packet);
    }
    run.extend(r.packet(
        0,
        &[Frame::Close {
            code: 0,
            text: b"bye",
        }],
    ));
    r.throw_run(r.home, &mut run, stride);
    assert_eq!(r.server.counts().0, 0, "a session that is over is gone");
}

#[test]
fn a_flow_that_was_done_when_its_peer_closed_is_complete_though_nobody_had_read_its_end() {
    // R-CLOSE-1
    for acknowledged in [true, false] {
        let mut r = Rogue::inside(EndpointConfig::default());
        r.say(&[data(flow(0), 0, b"what?")]);
        r.with_session(|s| {
            let _ = s.write(flow(0), Bytes::from_static(b"this"));
            let _ = s.finish(flow(0));
        });
        r.pump();
        if acknowledged {
            r.acknowledge();
        }
        r.say(&[Frame::Data {
            flow: flow(0),
            offset: 5,
            bytes: b"",
            fin: true,
        }]);
        r.say(&[Frame::Close {
            code: 0,
            text: b"bye",
        }]);
        let ends: Vec<FlowEnd> = (r.events.iter())
            .filter_map(|event| match event {
                SessionEvent::Ended { end, .. } => Some(*end),
                _ => None,
            })
            .collect();
        let right = match acknowledged {
            true => FlowEnd::Complete,
            false => FlowEnd::SessionEnded,
        };
        assert_eq!(ends, [right]);
        let remains = |event: &SessionEvent| matches!(event, SessionEvent::Remains { pieces, .. } if pieces.concat() == b"what?");
        assert!(r.events.iter().any(remains), "{:?}", r.events);
    }
}

#[test]
fn a_broken_rule_is_reported_once() {
    // R-CLOSE-2
    let mut r = Rogue::inside(small());
    let bad = r.packet_of(0, 50, &[0x3f]);
    let worse = r.packet_of(0, 51, &[0x3f]);
    assert_eq!(bad.len(), worse.len());
    let stride = bad.len();
    let mut run = [bad, worse].concat();
    r.throw_run(r.home, &mut run, stride);
    let ends = r
        .events
        .iter()
        .filter(|e| matches!(e, SessionEvent::Closed(_)))
        .count();
    assert_eq!(ends, 1, "{:?}", r.events);
}

#[test]
fn a_peer_that_never_reads_holds_the_servers_writer_not_its_memory() {
    // R-FLOW-3: we send no more than the peer's credit and the window; the rest waits with the
    // application.
    let config = EndpointConfig {
        send_buffer: 200_000,
        ..EndpointConfig::default()
    };
    let mut r = Rogue::inside(config);
    r.say(&[data(flow(0), 0, b"x")]);
    let mut taken = 0;
    for _ in 0..100 {
        let room = r.with_session(|s| s.write_room(flow(0)).unwrap());
        if room == 0 {
            break;
        }
        taken += room;
        r.with_session(|s| s.write(flow(0), vec![1; room as usize].into()).unwrap());
    }
    assert_eq!(taken, 200_000);
    r.wait(Span::from_secs(3600));
    let sent: usize = r.inbox.iter().map(|(_, b)| b.len()).sum();
    assert!(sent < 100_000, "{sent} bytes at a peer that never answers");
}

#[test]
fn a_flow_that_is_stopped_does_not_cost_an_honest_peer_its_session() {
    // R-FLOW-7: what was received and thrown away counts once.
    let mut r = Rogue::inside(small());
    let piece = vec![5; 1000];
    for n in 0..50 {
        r.say(&[
            data(flow(0), n * 1000, &piece),
            data(flow(1), n * 1000, &piece),
        ]);
    }
    assert!(r.is_alive());
    // The application gives one up; a piece that was on its way a second time arrives.
    let id = r.session().unwrap();
    r.server.with(id, |s| s.stop(flow(0), 1)).unwrap();
    let late = r.packet(0, &[data(flow(0), 49_000, &piece)]);
    r.throw(r.home, late);
    assert_eq!(r.verdict(), None);
}

#[test]
fn credit_of_a_flow_that_ended_comes_back() {
    // R-FLOW-9
    let mut r = Rogue::inside(small());
    let piece = vec![5; 1000];
    for n in 0..50 {
        r.say(&[
            data(flow(0), n * 1000, &piece),
            data(flow(1), n * 1000, &piece),
        ]);
    }
    r.inbox.clear();
    r.with_session(|s| s.stop(flow(0), 1));
    r.wait(MS.times(100));
    let credit = r.heard_frames(|f| match f {
        Frame::SessionCredit { max } => Some(*max),
        _ => None,
    });
    assert!(
        credit.iter().any(|max| *max >= 150_000),
        "the peer may not send a byte more: {credit:?}"
    );
}

#[test]
fn an_unproved_place_gets_no_more_than_it_sent_wherever_the_peer_moves() {
    // R-PATH-2: the smallest packets there are, from addresses of victims.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), vec![1; 100_000].into()).unwrap());
    r.inbox.clear();
    let victims = [at("198.51.100.1:1"), at("198.51.100.2:2")];
    let mut thrown = [0usize; 2];
    for n in 0..40usize {
        let number = 100 + n as u64;
        let packet = r.packet_of(0, number, &[]);
        thrown[n % 2] += packet.len();
        r.throw(victims[n % 2], packet);
        r.now += MS.times(400);
        r.server.handle_timeouts(r.now);
        r.pump();
        for (victim, thrown) in victims.iter().zip(thrown) {
            let got: usize = r
                .inbox
                .iter()
                .filter(|(to, _)| to == victim)
                .map(|(_, b)| b.len())
                .sum();
            assert!(
                got <= thrown,
                "{got} bytes for {thrown} at {victim}, step {n}"
            );
        }
    }
}

#[test]
fn answers_to_a_late_packet_are_no_larger_than_it_was() {
    // R-PATH-2: an old number does not move the path, so answers go to where it came from.
    let mut r = Rogue::inside(EndpointConfig::default());
    let victim = at("198.51.100.1:1");
    let late = r.packet_numbered(0, 50, &[Frame::Ping]);
    r.throw(r.home, late);
    r.inbox.clear();
    let nonces = [[1; 16], [2; 16], [3; 16], [4; 16]];
    let frames: Vec<Frame<'_>> = nonces.iter().map(|n| Frame::Chg { nonce: *n }).collect();
    let packet = r.packet_numbered(0, 20, &frames);
    let thrown = packet.len();
    r.throw(victim, packet);
    let got: usize = r
        .inbox
        .iter()
        .filter(|(to, _)| *to == victim)
        .map(|(_, b)| b.len())
        .sum();
    assert!(got <= thrown, "{got} bytes for {thrown}");
}

#[test]
fn a_thousand_frames_of_every_kind_for_flows_that_are_not_there_change_nothing() {
    let mut r = Rogue::inside(small());
    let f = flow(9);
    let p = PathId(9);
    for seq in 1..200u64 {
        r.say(&[
            Frame::Stop { flow: f, code: seq },
            Frame::FlowCredit {
                flow: f,
                max: VARINT_MAX,
            },
            Frame::SessionCredit { max: VARINT_MAX },
            Frame::Deadline {
                flow: f,
                seq,
                remaining_ms: Some(0),
            },
            Frame::Durable {
                flow: f,
                offset: VARINT_MAX,
            },
            Frame::Committed {
                flow: f,
                offset: VARINT_MAX,
            },
            Frame::Grant {
                seq,
                flow: f,
                path: p,
                max_sent: VARINT_MAX,
            },
            Frame::Spent {
                flow: f,
                path: p,
                sent: VARINT_MAX,
            },
            Frame::PathLimit {
                path: p,
                seq,
                bytes: 0,
            },
            Frame::FlowPause {
                flow: f,
                seq,
                paused: true,
                reason: ReasonCode::None,
            },
            Frame::Rsp { nonce: [0; 16] },
            Frame::Auth { path: p },
            Frame::Resumed {
                flow: f,
                received: VARINT_MAX,
            },
            Frame::Refused {
                flow: f,
                reason: ReasonCode::UnknownFlow,
            },
            Frame::ResumeEnd { flows: 0 },
            Frame::AckRate {
                path: p,
                every: u32::MAX,
                delay_us: VARINT_MAX,
            },
        ]);
    }
    assert!(r.is_alive());
    assert!(r.with_session(|s| s.flow_ids()).is_empty());
}

#[test]
fn arbitrary_plaintext_never_takes_the_server_down() {
    // R-WIRE-2
    let mut rng = Rng::new([7; 32]);
    for _ in 0..60 {
        let mut r = Rogue::inside(small());
        let mut number = 10;
        for _ in 0..30 {
            let len = (rng.u64() % 80) as usize;
            let mut text = vec![0; len];
            rng.fill(&mut text);
            // Most random first bytes are no frame at all: steer towards those that are.
            const TYPES: &[u8] = &[
                0x01, 0x02, 0x03, 0x08, 0x09, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18,
                0x19, 0x1a, 0x1b, 0x1c, 0x20, 0x21, 0x22, 0x23, 0x28, 0x29, 0x2a, 0x2b, 0x30, 0x3c,
            ];
            if let Some(first) = text.first_mut() {
                *first = TYPES[usize::from(*first) % TYPES.len()];
            }
            if r.session().is_none() {
                break;
            }
            number += 1;
            let packet = r.packet_of(0, number, &text);
            r.throw(r.home, packet);
            r.wait(MS.times(rng.u64() % 100));
        }
    }
}

#[test]
fn copies_numbered_at_will_are_delivered_once_and_cost_no_memory() {
    // R-COPY-2
    let mut r = Rogue::inside(EndpointConfig::default());
    let context = |number: u64| (1 << 61) + (number << 32) + 5;
    let mut heard = 0;
    let far = 1 << 29;
    for n in [0, 1, 0, 1, far - 1, far - 1, 0, 77, 1 << 28, 77, 1 << 28] {
        let context = context(n);
        let bytes = b"x";
        r.say(&[Frame::Datagram { context, bytes }, Frame::Ping]);
        heard += 1;
    }
    let got = r.events.iter().filter_map(|event| match event {
        SessionEvent::Datagram { context, .. } => Some(*context),
        _ => None,
    });
    let got: Vec<u64> = got.collect();
    // 0, 1, far − 1; then further away than what is remembered: 77, 2^28, and both again.
    assert_eq!(got.len(), 7, "of {heard}: {got:?}");
    assert!(got.iter().all(|context| *context == 5));
    assert!(r.session().is_some());
}

#[test]
fn a_path_frozen_and_not_a_thousand_times_keeps_no_more_than_its_window() {
    // R-PATH-5, R-HOP-2
    let mut r = Rogue::inside(EndpointConfig::default());
    let window = |r: &mut Rogue| r.with_session(|s| s.path_stats()[0].window);
    let before = window(&mut r);
    for seq in 0..1_000 {
        r.say(&[Frame::PathStatus {
            path: PathId(0),
            seq: 2 + seq,
            status: PathStatus::Frozen,
            gated: false,
            reason: [ReasonCode::None, ReasonCode::NoPath][seq as usize % 2],
        }]);
    }
    assert!(window(&mut r) <= before);
    assert!(r.session().is_some());
}

#[test]
fn a_key_share_that_was_not_agreed_on_ends_the_session() {
    // R-KEM-1
    let mut r = Rogue::inside(EndpointConfig::default());
    let bytes = &[0; 592];
    r.say(&[Frame::KeyShare { half: 0, bytes }]);
    assert_eq!(fault(&r), PeerFault::KeyShare);
}
