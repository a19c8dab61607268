//! A member that claims what is not so: of flows it resumes, and of what is durable.

use bytes::Bytes;
use d2tp_session::*;
use d2tp_wire::{Frame, VARINT_MAX};

use crate::adversary::rogue::*;

#[test]
fn a_claim_below_what_was_durable_is_refused_and_others_are_taken_up() {
    // R-CRASH-1, R-RESUME-1, R-RESUME-3
    let mut r = Rogue::inside(small());
    for n in 0..2 {
        r.say(&[Frame::Open {
            flow: flow(n),
            flags: Frame::OPEN_DURABLE,
            priority: 0,
            size: None,
            deadline_ms: None,
        }]);
        r.with_session(|s| s.write(flow(n), vec![1; 5000].into()).unwrap());
        r.acknowledge();
        r.say(&[Frame::Durable {
            flow: flow(n),
            offset: 3000,
        }]);
    }
    r.enter(2);
    let early = r.heard_frames(|f| matches!(f, Frame::Data { .. }).then_some(()));
    assert!(early.is_empty(), "nothing is sent before it is claimed");
    let claim = |flow, received| Frame::Resume {
        flow,
        received,
        flags: 0,
    };
    r.say(&[claim(flow(0), 2000), claim(flow(1), 4000)]);
    let answers = r.heard_frames(|f| match f {
        Frame::Refused { flow, reason } => Some((*flow, Some(*reason), 0)),
        Frame::Data { flow, offset, .. } => Some((*flow, None, *offset)),
        _ => None,
    });
    assert_eq!(
        answers,
        [
            (flow(0), Some(ReasonCode::RolledBack), 0),
            (flow(1), None, 4000)
        ]
    );
}

#[test]
fn a_resume_claim_beyond_everything_does_not_take_the_server_down() {
    // R-RESUME-1
    let mut r = Rogue::inside(small());
    r.say(&[Frame::Open {
        flow: flow(0),
        flags: Frame::OPEN_HIBERNATES,
        priority: 0,
        size: None,
        deadline_ms: None,
    }]);
    r.say(&[Frame::Resume {
        flow: flow(0),
        received: VARINT_MAX,
        flags: 0,
    }]);
    r.with_session(|s| {
        let _ = s.write(flow(0), Bytes::from_static(&[7; 5000]));
        let _ = s.finish(flow(0));
    });
    r.wait(MS.times(100));
    let record = r.now;
    if r.session().is_some() {
        r.with_session(|s| s.record(record, true).encode());
    }
}

#[test]
fn a_resume_in_the_middle_of_a_flow_sends_nothing_twice() {
    // R-RESUME-4
    let mut r = Rogue::inside(small());
    r.say(&[data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), Bytes::from_static(&[7; 3000])).unwrap());
    r.inbox.clear();
    r.say(&[Frame::Resume {
        flow: flow(0),
        received: 0,
        flags: 0,
    }]);
    let again = r.heard_frames(|f| match f {
        Frame::Data { bytes, .. } => Some(bytes.len()),
        _ => None,
    });
    assert!(again.is_empty(), "sent again: {again:?}");
}

#[test]
fn claims_of_what_is_durable_are_cut_to_what_was_sent() {
    // R-DURABLE-2
    let mut r = Rogue::inside(small());
    r.say(&[Frame::Open {
        flow: flow(0),
        flags: Frame::OPEN_DURABLE,
        priority: 0,
        size: None,
        deadline_ms: None,
    }]);
    r.with_session(|s| s.write(flow(0), vec![1; 5000].into()).unwrap());
    r.say(&[Frame::Durable {
        flow: flow(0),
        offset: VARINT_MAX,
    }]);
    let told = r.events.iter().find_map(|e| match e {
        SessionEvent::PeerDurable { offset, .. } => Some(*offset),
        _ => None,
    });
    assert!(told.is_some_and(|o| o <= 5000), "{told:?}");
    let (end, acked) = r.with_session(|s| s.send_offsets(flow(0)).unwrap());
    assert_eq!((end, acked), (5000, 0), "durable is no acknowledgement");
}

fn open_frame(flow: FlowId, flags: u8) -> Frame<'static> {
    Frame::Open {
        flow,
        flags,
        priority: 0,
        size: None,
        deadline_ms: None,
    }
}

#[test]
fn durable_tells_what_a_flow_is_whose_open_is_late_and_nothing_of_others() {
    // R-DURABLE-2
    let is_durable = |r: &mut Rogue, flow: FlowId| {
        let record = r.with_session(|s| s.record(Time::ZERO, true));
        let mut flows = record.flows.iter();
        flows
            .find(|f| f.id == flow)
            .expect("it is kept")
            .options
            .durable
    };
    let durable = |flow| Frame::Durable { flow, offset: 0 };
    let mut r = Rogue::inside(small());
    // DATA came first, then DURABLE; OPEN says the rest, and nothing is taken back.
    r.say(&[data(flow(0), 0, b"x"), durable(flow(0))]);
    assert!(is_durable(&mut r, flow(0)));
    let opening = Frame::Open {
        flow: flow(0),
        flags: Frame::OPEN_HIBERNATES,
        priority: 3,
        size: None,
        deadline_ms: None,
    };
    r.say(&[opening]);
    assert!(is_durable(&mut r, flow(0)));
    let record = r.with_session(|s| s.record(Time::ZERO, true));
    assert_eq!(record.flows[0].options.priority, 3);
    // One whose OPEN said something else is what that said.
    r.say(&[
        open_frame(flow(1), Frame::OPEN_HIBERNATES),
        durable(flow(1)),
    ]);
    assert!(!is_durable(&mut r, flow(1)));
    // And one of the server's is what the server says.
    let own = r.with_session(|s| s.open(FlowOptions::default()).unwrap());
    r.say(&[durable(own)]);
    assert!(!is_durable(&mut r, own));
}

#[test]
fn what_was_called_durable_is_in_the_record_though_no_packet_was_acknowledged() {
    // R-DURABLE-2
    let mut r = Rogue::inside(small());
    r.say(&[open_frame(flow(0), Frame::OPEN_DURABLE)]);
    r.with_session(|s| s.write(flow(0), vec![1; 5000].into()).unwrap());
    r.say(&[Frame::Durable {
        flow: flow(0),
        offset: 3000,
    }]);
    let (_, acked) = r.with_session(|s| s.send_offsets(flow(0)).unwrap());
    let record = r.with_session(|s| s.record(Time::ZERO, true));
    assert_eq!((acked, record.flows[0].sent_to), (0, 3000));
}

#[test]
fn a_grant_makes_no_flow_known_that_a_claim_could_take_up() {
    // R-RESUME-2
    let mut r = Rogue::inside(small());
    let grant = |flow| Frame::Grant {
        seq: 1,
        flow,
        path: PathId(0),
        max_sent: 1000,
    };
    let claim = |flow| Frame::Resume {
        flow,
        received: 0,
        flags: 0,
    };
    let refused = |r: &mut Rogue| {
        r.heard_frames(|f| match f {
            Frame::Refused { flow, reason } => Some((*flow, *reason)),
            _ => None,
        })
    };
    r.say(&[grant(flow(0))]);
    assert_eq!(r.with_session(|s| s.flow_ids()), [flow(0)]);
    r.inbox.clear();
    r.say(&[claim(flow(0))]);
    assert_eq!(refused(&mut r), [(flow(0), ReasonCode::UnknownFlow)]);
    // A second GRANT is no more than the first; an OPEN or a byte is.
    r.say(&[grant(flow(1)), grant(flow(1)), claim(flow(1))]);
    r.say(&[
        grant(flow(2)),
        open_frame(flow(2), 0),
        grant(flow(2)),
        claim(flow(2)),
    ]);
    r.say(&[data(flow(3), 0, b"x"), grant(flow(3)), claim(flow(3))]);
    assert_eq!(refused(&mut r), [(flow(1), ReasonCode::UnknownFlow)]);
    assert!(r.is_alive());
}
