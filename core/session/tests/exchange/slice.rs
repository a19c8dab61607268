//! The architecture in a dozen exchanges: one download over two paths, grant and revoke, a path
//! cut, a path moved, hours asleep, either end crashed and restarted from its record.

use crate::pair::*;
use d2tp_session::*;

fn sleeps() -> FlowOptions {
    FlowOptions {
        hibernates: true,
        ..FlowOptions::default()
    }
}

#[test]
fn an_answer_that_takes_longer_than_the_first_interval_is_taken() {
    // R-HS-14: by then the device has knocked again.
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().delay = MS.times(500);
    let began = p.now;
    p.open_path(0, false);
    let established = |p: &Pair| {
        let session = p.device.session(p.session);
        session.is_some_and(|s| s.state() == SessionState::Established)
    };
    assert!(p.run_until(Span::from_secs(5), established));
    assert_eq!(p.now.since(began), MS.times(1000), "one round trip");
    p.run_for(Span::from_secs(5));
    assert_eq!(p.server.counts(), (1, 0, 0));
    assert!(established(&p));
}

#[test]
fn a_download_over_one_path_is_whole() {
    let mut p = Pair::new();
    let flow = p.request(3_000_000, sleeps());
    p.open_path(0, false);
    assert!(
        p.run_until(Span::from_secs(20), |p| p.is_whole(flow)),
        "{:?}",
        p.got[&flow].len()
    );
    p.assert_right(flow);
    assert_eq!(p.device.session(p.session).unwrap().duplicate_bytes(), 0);
}

#[test]
fn a_download_over_a_lossy_path_is_whole() {
    for n in [7, 20, 50] {
        let mut p = Pair::new();
        p.wires.get_mut(&0).unwrap().lose_every = n;
        let flow = p.request(1_000_000, sleeps());
        p.open_path(0, false);
        assert!(
            p.run_until(Span::from_secs(120), |p| p.is_whole(flow)),
            "{n} {:?}",
            p.got[&flow].len()
        );
        p.assert_right(flow);
    }
}

#[test]
fn two_paths_are_used_at_once_and_either_may_go() {
    // R-PATH-8
    let mut p = Pair::new();
    for w in p.wires.values_mut() {
        w.rate = 500_000;
    }
    let flow = p.request(4_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.open_path(1, false);
    p.run_for(Span::from_secs(2));
    assert!(p.wires[&0].bytes_down > 500_000 && p.wires[&1].bytes_down > 500_000);
    p.cut(0);
    assert!(
        p.run_until(Span::from_secs(30), |p| p.is_whole(flow)),
        "{:?}",
        p.got[&flow].len()
    );
    p.assert_right(flow);
}

#[test]
fn a_gated_path_carries_what_was_granted_and_not_a_byte_more() {
    // R-GRANT-4
    let mut p = Pair::new();
    p.wires.get_mut(&1).unwrap().rate = 1_000_000;
    let flow = p.request(2_000_000, sleeps());
    p.open_path(1, true);
    p.run_for(Span::from_secs(3));
    assert_eq!(p.got[&flow].len(), 0, "nothing was granted");
    let session = p.session;
    p.device
        .with(session, |s| s.grant(flow, LinkId(1), 100_000))
        .unwrap();
    p.pump();
    p.run_for(Span::from_secs(3));
    assert_eq!(p.got[&flow].len(), 100_000);
    assert_eq!(
        p.device
            .session(session)
            .unwrap()
            .grant_left(flow, LinkId(1)),
        Some((0, 100_000))
    );
    // Grant more, revoke in the middle: what still arrives is what had been sent by then.
    p.device
        .with(session, |s| s.grant(flow, LinkId(1), 1_000_000))
        .unwrap();
    p.pump();
    p.run_for(Span::from_millis(300));
    p.device
        .with(session, |s| s.grant(flow, LinkId(1), 0))
        .unwrap();
    p.pump();
    p.run_for(Span::from_secs(3));
    let stopped = p.got[&flow].len();
    assert!(stopped > 100_000 && stopped < 1_100_000, "{stopped}");
    let (left, spent) = p
        .device
        .session(session)
        .unwrap()
        .grant_left(flow, LinkId(1))
        .unwrap();
    assert_eq!(
        (left, spent as usize),
        (0, stopped),
        "the sender answered with what it spent"
    );
    // The free path finishes it.
    p.open_path(0, false);
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn a_cut_and_a_new_address_cost_two_round_trips_at_most() {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 1_000_000;
    let flow = p.request(4_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.cut(0);
    p.run_for(Span::from_millis(500));
    let before = p.got[&flow].len();
    p.attach(0, "192.0.2.99:5000");
    p.open_path(0, false);
    let at = p.now;
    assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() > before));
    let silence = p.now.since(at);
    assert!(silence <= MS.times(2 * 20 + 10), "{silence:?}");
    assert!(p.run_until(Span::from_secs(30), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn an_unannounced_silence_moves_the_data_elsewhere() {
    // R-PATH-6
    let mut p = Pair::new();
    for w in p.wires.values_mut() {
        w.rate = 500_000;
    }
    let flow = p.request(3_000_000, sleeps());
    p.open_path(0, false);
    p.open_path(1, false);
    p.run_for(Span::from_secs(1));
    p.silence(0);
    assert!(
        p.run_until(Span::from_secs(20), |p| p.is_whole(flow)),
        "{:?}",
        p.got[&flow].len()
    );
    p.assert_right(flow);
}

#[test]
fn a_nat_that_rebinds_is_followed_and_proved() {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(3_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.wires.get_mut(&0).unwrap().address = "192.0.2.1:4001".parse().unwrap();
    assert!(
        p.run_until(Span::from_secs(20), |p| p.is_whole(flow)),
        "{:?}",
        p.got[&flow].len()
    );
    p.assert_right(flow);
    let server = p.server_session().unwrap();
    let stats = p.server.session(server).unwrap().path_stats();
    assert_eq!(stats[0].addresses.remote, "192.0.2.1:4001".parse().unwrap());
}

#[test]
fn three_minutes_without_a_network_send_nothing_and_end_within_a_round_trip() {
    // R-SUSPEND-1, R-SUSPEND-2
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(3_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.cut(0);
    p.run_for(Span::from_secs(180));
    assert_eq!(p.wires[&0].packets_while_down, 0);
    assert_eq!(
        p.device.session(p.session).unwrap().state(),
        SessionState::Suspended
    );
    let before = p.got[&flow].len();
    p.attach(0, "192.0.2.7:4000");
    p.open_path(0, false);
    let at = p.now;
    assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() > before));
    assert!(p.now.since(at) <= MS.times(25), "{:?}", p.now.since(at));
    assert!(p.run_until(Span::from_secs(30), |p| p.is_whole(flow)));
    p.assert_right(flow);
    assert_eq!(p.got[&flow].len(), 3_000_000);
}

#[test]
fn six_hours_asleep_as_records_on_both_ends() {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(3_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(2));
    p.cut(0);
    p.run_for(Span::from_secs(60));
    let now = p.now;
    let server = p.server_session().unwrap();
    let record = p.server.hibernate(now, server).unwrap();
    assert!(record.len() <= 256, "{}", record.len());
    let record = p.device.hibernate(now, p.session).unwrap();
    assert!(record.len() <= 256);
    assert_eq!(p.server.counts(), (0, 1, 0));
    assert_eq!(p.device.next_timeout(), Time::NEVER);
    // Nothing but the day after which nobody is expected any more.
    assert!(p.server.next_timeout() >= p.now + Span::from_secs(24 * 3600));
    p.run_for(Span::from_secs(6 * 3600));
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.attach(0, "192.0.2.200:4000");
    p.open_path(0, false);
    assert!(
        p.run_until(Span::from_secs(60), |p| p.is_whole(flow)),
        "{:?} {:?}",
        p.got[&flow].len(),
        p.ended
    );
    p.assert_right(flow);
}

/// A download under way, then an hour and a half without a network: both ends are records.
fn asleep(p: &mut Pair) -> FlowId {
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(1_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    put_to_sleep(p);
    flow
}

/// Both ends become records, and the device's is brought back.
fn put_to_sleep(p: &mut Pair) {
    p.cut(0);
    p.run_for(Span::from_secs(60));
    let server = p.server_session().unwrap();
    p.server.hibernate(p.now, server).unwrap();
    let session = p.session;
    let record = p.device.hibernate(p.now, session).unwrap();
    p.run_for(Span::from_secs(5400));
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.attach(0, "192.0.2.200:4000");
}

#[test]
fn a_hibernated_flow_gets_its_first_byte_one_round_trip_after_waking() {
    // R-RESUME-6, R-RESUME-7
    let mut p = Pair::new();
    let flow = asleep(&mut p);
    let before = p.got[&flow].len();
    let (at, down) = (p.now, p.wires[&0].bytes_down);
    p.open_path(0, false);
    assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() > before));
    // 20 ms there and back, and the time 1,200 bytes each way take at this rate.
    assert!(p.now.since(at) <= MS.times(26), "{:?}", p.now.since(at));
    // R-PATH-2: what came back is no more than the SYN.
    assert!(p.wires[&0].bytes_down - down <= 1200);
    assert!(p.run_until(Span::from_secs(30), |p| p.is_whole(flow)));
    p.assert_right(flow);
    let device = p.device.session(p.session).unwrap();
    assert_eq!(device.duplicate_bytes(), 0, "nothing came twice");
    assert_eq!(p.asked, [(flow, before as u64)], "asked for once");
}

#[test]
fn a_gated_link_wakes_a_session_without_a_byte_of_payload() {
    // R-RESUME-7
    let mut p = Pair::new();
    let flow = asleep(&mut p);
    let before = p.got[&flow].len();
    p.open_path(0, true);
    p.run_for(Span::from_secs(5));
    assert_eq!(p.got[&flow].len(), before, "nothing was granted");
    let session = p.session;
    p.device
        .with(session, |s| s.grant(flow, LinkId(0), 2_000_000))
        .unwrap();
    p.pump();
    assert!(p.run_until(Span::from_secs(30), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn an_upload_goes_on_behind_the_packet_that_confirms() {
    // R-RESUME-3, R-RESUME-7
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    let session = p.session;
    let flow = p
        .device
        .with(session, |s| {
            let id = s.open(sleeps()).unwrap();
            s.write(id, vec![7; 100_000].into()).unwrap();
            id
        })
        .unwrap();
    p.pump();
    p.run_for(Span::from_secs(2));
    let server = p.server_session().unwrap();
    p.server
        .with(server, |s| {
            while let Ok(ReadOutcome::Chunk(_)) = s.read(flow, 1 << 20) {}
        })
        .unwrap();
    put_to_sleep(&mut p);
    let at = p.now;
    p.open_path(0, false);
    let asked = |p: &Pair| {
        let mut events = p.device_events.iter();
        events.any(|(_, id, e)| *id == p.session && matches!(e, SessionEvent::SendFrom { .. }))
    };
    assert!(p.run_until(Span::from_secs(5), asked));
    assert!(p.now.since(at) <= MS.times(26), "{:?}", p.now.since(at));
    let session = p.session;
    p.device
        .with(session, |s| s.write(flow, vec![8; 1000].into()).unwrap())
        .unwrap();
    p.pump();
    let arrived = |p: &Pair| {
        let server = p.server_session().and_then(|id| p.server.session(id));
        server.is_some_and(|s| s.path_stats().iter().any(|p| p.payload_in >= 1000))
    };
    assert!(p.run_until(Span::from_secs(5), arrived));
    assert!(p.now.since(at) <= MS.times(40), "{:?}", p.now.since(at));
}

#[test]
fn an_answer_lost_behind_the_syn_ack_costs_time_and_no_byte() {
    // R-RESUME-7
    for lose_every in 2..8 {
        let mut p = Pair::new();
        let flow = asleep(&mut p);
        let wire = p.wires.get_mut(&0).unwrap();
        (wire.lose_every, wire.count) = (lose_every, 0);
        p.open_path(0, false);
        p.run_for(Span::from_millis(500));
        p.wires.get_mut(&0).unwrap().lose_every = 0;
        assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
        p.assert_right(flow);
    }
}

#[test]
fn of_many_flows_the_most_urgent_are_claimed_in_the_syn_and_the_rest_behind_it() {
    // R-RESUME-6
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.open_path(0, false);
    let flows: Vec<FlowId> = (0..150)
        .map(|n| {
            let priority = if n == 149 { 0 } else { 4 };
            p.request(
                20_000,
                FlowOptions {
                    priority,
                    ..sleeps()
                },
            )
        })
        .collect();
    p.run_for(Span::from_millis(300));
    put_to_sleep(&mut p);
    let at = p.now;
    let had: Vec<usize> = flows.iter().map(|f| p.got[f].len()).collect();
    assert!(had.iter().all(|n| *n < 20_000) || had[149] == 20_000);
    p.open_path(0, false);
    let urgent = flows[149];
    if had[149] < 20_000 {
        assert!(p.run_until(Span::from_secs(5), |p| p.got[&urgent].len() > had[149]));
        assert!(p.now.since(at) <= MS.times(26), "{:?}", p.now.since(at));
    }
    let all = |p: &Pair| flows.iter().all(|f| p.is_whole(*f));
    assert!(p.run_until(Span::from_secs(60), all));
    for flow in &flows {
        p.assert_right(*flow);
    }
}

#[test]
fn two_paths_that_carry_side_by_side_are_no_switch() {
    let mut p = Pair::new();
    for w in p.wires.values_mut() {
        w.rate = 500_000;
    }
    let flow = p.request(3_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.open_path(1, false);
    p.run_for(Span::from_secs(1));
    let switches = |p: &Pair| {
        let all = p.device_events.iter();
        all.filter(|(_, _, e)| matches!(e, SessionEvent::Switched { .. }))
            .count()
    };
    assert!(p.wires[&1].bytes_down > 200_000);
    assert_eq!(switches(&p), 0);
    p.cut(0);
    assert!(p.run_until(Span::from_secs(30), |p| p.is_whole(flow)));
    assert_eq!(switches(&p), 1);
}

#[test]
fn a_server_restarted_from_its_record_goes_on() {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(3_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(2));
    let server = p.server_session().unwrap();
    let record = p
        .server
        .session(server)
        .unwrap()
        .record(p.now, true)
        .encode();
    p.run_for(Span::from_millis(700));
    // The process dies; another one starts with the same key, the record and the source.
    p.server = Endpoint::new(config(), server_key(), Admission::Anybody, [9; 32], [4; 32]);
    p.server.adopt(&record).unwrap();
    assert!(
        p.run_until(Span::from_secs(60), |p| p.is_whole(flow)),
        "{:?} {:?}",
        p.got[&flow].len(),
        p.ended
    );
    p.assert_right(flow);
}

#[test]
fn a_device_that_only_receives_wakes_at_once_when_the_server_announces_its_restart() {
    // R-UNKNOWN-4
    let restart = |is_announced: bool| {
        let mut p = Pair::new();
        let flow = p.request(3_000_000, sleeps());
        p.open_path(0, false);
        p.run_for(Span::from_millis(100));
        // Nothing is under way that the device would acknowledge.
        p.silence(0);
        p.attach(0, "192.0.2.1:4000");
        let announced = match is_announced {
            true => p.server.announce_restart(),
            false => 0,
        };
        assert_eq!(announced, usize::from(is_announced));
        let server = p.server_session().unwrap();
        let record = p.server.hibernate(p.now, server).unwrap();
        p.pump();
        p.server = Endpoint::new(config(), server_key(), Admission::Anybody, [9; 32], [4; 32]);
        p.server.adopt(&record).unwrap();
        let began = p.now;
        let established = |p: &Pair| {
            let all = p.device_events.iter();
            all.filter(|(_, _, e)| matches!(e, SessionEvent::Established { .. }))
                .count()
        };
        assert!(p.run_until(Span::from_secs(10), |p| established(p) == 2));
        let silence = p.now.since(began);
        assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
        p.assert_right(flow);
        silence
    };
    let (announced, silent) = (restart(true), restart(false));
    // One way for the notice, and a round trip for the handshake, of 20 ms.
    assert!(announced <= Span::from_millis(40), "{announced:?}");
    assert!(silent > Span::from_millis(100), "{silent:?}");
}

#[test]
fn a_device_restarted_from_its_record_goes_on_and_its_old_packets_count_for_nothing() {
    // R-HS-2
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(3_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(2));
    let record = p
        .device
        .session(p.session)
        .unwrap()
        .record(p.now, true)
        .encode();
    let kept = p.got[&flow].len();
    p.run_for(Span::from_millis(700));
    p.device = Endpoint::new(config(), device_key(), Admission::Nobody, [8; 32], [2; 32]);
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    // The application, too, goes back to what the record says.
    p.got.get_mut(&flow).unwrap().truncate(kept);
    p.attach(0, "192.0.2.33:4000");
    p.open_path(0, false);
    assert!(
        p.run_until(Span::from_secs(60), |p| p.is_whole(flow)),
        "{:?} {:?}",
        p.got[&flow].len(),
        p.ended
    );
    p.assert_right(flow);
}

#[test]
fn a_server_that_lost_everything_refuses_and_says_so() {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(3_000_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(2));
    p.server = Endpoint::new(config(), server_key(), Admission::Anybody, [9; 32], [4; 32]);
    assert!(p.run_until(Span::from_secs(60), |p| p.ended.contains_key(&flow)));
    assert_eq!(p.ended[&flow], FlowEnd::Refused(ReasonCode::UnknownFlow));
}

#[test]
fn a_deadline_ends_the_flow_on_both_ends_without_a_word() {
    // R-DEADLINE-1
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 100_000;
    let deadline = p.now + Span::from_secs(5);
    let flow = p.request(
        3_000_000,
        FlowOptions {
            deadline: Some(deadline),
            ..sleeps()
        },
    );
    p.open_path(0, false);
    p.run_for(Span::from_secs(2));
    p.cut(0);
    p.run_for(Span::from_secs(10));
    assert_eq!(p.ended[&flow], FlowEnd::DeadlinePassed);
    assert!(p.server_events.iter().any(|(_, _, e)| matches!(
        e,
        SessionEvent::Ended {
            end: FlowEnd::DeadlinePassed,
            ..
        }
    )));
}

#[test]
fn many_flows_share_a_session_and_one_that_is_not_read_blocks_no_other() {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 2_000_000;
    let flows: Vec<FlowId> = (0..20)
        .map(|i| p.request(100_000 + i * 1000, sleeps()))
        .collect();
    p.open_path(0, false);
    let all = |p: &Pair| flows.iter().all(|f| p.is_whole(*f));
    assert!(p.run_until(Span::from_secs(60), all));
    for flow in flows {
        p.assert_right(flow);
    }
}

#[test]
fn the_same_seed_gives_the_same_datagrams() {
    let run = || {
        let mut p = Pair::new();
        p.keep_log = true;
        p.wires.get_mut(&0).unwrap().lose_every = 13;
        let flow = p.request(200_000, sleeps());
        p.open_path(0, false);
        assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
        p.log
    };
    assert!(run() == run());
}

#[test]
fn being_watched_changes_no_datagram_and_losses_are_told() {
    let run = |level| {
        let mut p = Pair::new();
        p.keep_log = true;
        p.device.set_trace(p.now, level);
        p.server.set_trace(p.now, level);
        p.wires.get_mut(&0).unwrap().lose_every = 13;
        let flow = p.request(200_000, sleeps());
        p.open_path(0, false);
        assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
        let told: Vec<TraceRecord> =
            std::iter::from_fn(|| p.server.poll_trace().map(|(_, _, record)| record)).collect();
        (p.log, told)
    };
    let (unwatched, nothing) = run(None);
    let (watched, told) = run(Some(TraceLevel::Packets));
    assert!(nothing.is_empty());
    assert!(watched == unwatched);
    let is_lost = |record: &TraceRecord| matches!(record, TraceRecord::Lost { .. });
    assert!(told.iter().any(is_lost));
}

#[test]
fn a_trace_that_nobody_takes_is_bounded_and_says_what_is_missing() {
    let mut p = Pair::new();
    p.server.set_trace(p.now, Some(TraceLevel::Packets));
    let flow = p.request(30_000_000, sleeps());
    p.open_path(0, false);
    assert!(p.run_until(Span::from_secs(600), |p| p.is_whole(flow)));
    let mut count = 0;
    while p.server.poll_trace().is_some() {
        count += 1;
    }
    assert!(count <= TRACE_RECORDS_MAX, "{count}");
    let server = p.server_session().unwrap();
    // The next thing that happens brings the count.
    let now = p.now;
    p.server.with(server, |s| s.close(0, "enough")).unwrap();
    let mut buffer = vec![0; 65_536];
    while p.server.poll_transmit(now, &mut buffer).is_some() {}
    let next = p.server.poll_trace().map(|(_, _, record)| record);
    assert!(
        matches!(next, Some(TraceRecord::Dropped(n)) if n > 1_000),
        "{next:?}"
    );
}

#[test]
fn when_keys_are_old_new_ones_are_agreed_and_the_transfer_goes_on() {
    // R-HS-9
    let mut p = Pair::with(EndpointConfig {
        keys_max: Span::from_secs(5),
        ..config()
    });
    p.wires.get_mut(&0).unwrap().rate = 1_000_000;
    let flow = p.request(12_000_000, sleeps());
    p.open_path(0, false);
    assert!(
        p.run_until(Span::from_secs(60), |p| p.is_whole(flow)),
        "{:?}",
        p.got[&flow].len()
    );
    p.assert_right(flow);
    let handshakes = p
        .device_events
        .iter()
        .filter(|(_, _, e)| matches!(e, SessionEvent::Established { .. }))
        .count();
    assert_eq!(handshakes, 3);
}

#[test]
fn flows_that_end_early_do_not_use_up_the_sessions_credit() {
    // R-FLOW-7
    let mut p = Pair::with(EndpointConfig {
        session_window: 300_000,
        ..config()
    });
    p.wires.get_mut(&0).unwrap().rate = 1_000_000;
    p.open_path(0, false);
    for round in 0..20 {
        let late = FlowOptions {
            deadline: Some(p.now + MS.times(150)),
            ..sleeps()
        };
        let lost = p.request(5_000_000, late);
        p.wires.get_mut(&0).unwrap().lose_every = 9;
        p.run_for(MS.times(400));
        assert_eq!(p.ended[&lost], FlowEnd::DeadlinePassed, "round {round}");
        let dropped = p.request(5_000_000, sleeps());
        p.run_for(MS.times(200));
        p.device
            .with(p.session, |s| {
                s.reset(dropped, 1);
                s.stop(dropped, 1);
            })
            .unwrap();
        p.run_for(MS.times(200));
    }
    p.wires.get_mut(&0).unwrap().lose_every = 0;
    let flow = p.request(1_000_000, sleeps());
    assert!(
        p.run_until(Span::from_secs(20), |p| p.is_whole(flow)),
        "{:?}",
        p.got[&flow].len()
    );
    p.assert_right(flow);
    assert_eq!(p.device.session(p.session).unwrap().flow_ids(), []);
    let server = p.server_session().unwrap();
    p.run_for(Span::from_secs(1));
    assert_eq!(p.server.session(server).unwrap().flow_ids(), []);
}

#[test]
fn a_flow_opened_while_the_device_wakes_never_gets_an_old_flows_name() {
    let mut p = Pair::new();
    p.open_path(0, false);
    let first = p.request(1_000, sleeps());
    assert!(p.run_until(Span::from_secs(5), |p| p.is_whole(first)));
    p.cut(0);
    let (now, session) = (p.now, p.session);
    let record = p.device.hibernate(now, session).unwrap();
    p.session = p.device.restore(now, &record, 500..600).unwrap();
    let second = p.request(2_000, sleeps());
    assert_ne!(first, second);
    p.attach(0, "192.0.2.9:4000");
    p.open_path(0, false);
    assert!(p.run_until(Span::from_secs(5), |p| p.is_whole(second)));
}

#[test]
fn whatever_an_application_opens_a_flow_with_its_record_can_be_read() {
    // R-REC-1: three bits for the priority, 62 for a size plus one.
    let mut p = Pair::new();
    let options = FlowOptions {
        priority: 255,
        size: Some(u64::MAX),
        ..sleeps()
    };
    let flow = p.device.with(p.session, |s| s.open(options)).unwrap();
    let flow = flow.unwrap();
    let record = p.device.hibernate(p.now, p.session).unwrap();
    let record = SessionRecord::decode(&record).expect("it is ours");
    assert_eq!(
        (record.flows[0].id, record.flows[0].options.priority),
        (flow, 7)
    );
}
