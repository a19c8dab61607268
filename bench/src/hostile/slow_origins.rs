//! Requests to ten thousand origins at once, each of which sends a byte per second.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use d2tp_session::{EndpointConfig, FlowId, FlowOptions, Session, SessionEvent};

use super::answer_start::AnswerStart;
use super::attack_context::{AttackContext, AttackTally, FIRST};
use super::hostile_kind::SLOW_ORIGIN_KEYS;
use crate::handshake_hosts::{HandshakeHosts, key_of};

/// Requests that are made: as many origins are slow at once.
const REQUESTS: u64 = 10_000;
/// Requests that are made at once, so that connections to the origin find room in its backlog.
const BATCH: u64 = 100;
/// How soon the next are made: all have been after a second.
const BATCH_EVERY: Duration = Duration::from_millis(10);

/// Makes the requests, and reads what comes until the time is over.
pub fn slow_origins(context: &AttackContext) -> Result<AttackTally> {
    let config = EndpointConfig::default();
    let mut crowd = HandshakeHosts::with_config(context.proxy, context.proxy_key, 4, config)?;
    let keys = context.keys.max(SLOW_ORIGIN_KEYS);
    let (mut tally, mut told) = (AttackTally::default(), Vec::new());
    let places: Vec<usize> = (0..keys)
        .map(|key| crowd.begin(key, key_of(FIRST + key), |_| {}))
        .collect();
    let mut answers: HashMap<(usize, FlowId), AnswerStart> = HashMap::new();
    let mut next = Instant::now();
    while Instant::now() < context.until {
        crowd.turn(Duration::from_millis(5), &mut told)?;
        for (place, event) in told.drain(..) {
            if let SessionEvent::Ended { flow, end } = &event
                && let Some(answer) = answers.get_mut(&(place, *flow))
            {
                answer.note_end(end);
            }
            match event {
                SessionEvent::Established { .. } => tally.sessions += 1,
                SessionEvent::Readable(flow) | SessionEvent::Ended { flow, .. } => {
                    let answer = answers.get_mut(&(place, flow));
                    if let Some((answer, host)) = answer.zip(crowd.host(place)) {
                        host.with(|session| answer.read(session, flow));
                        let now = crowd.now();
                        crowd.pump(place, now);
                    }
                }
                _ => {}
            }
        }
        let are_connected = tally.sessions >= keys;
        if !are_connected || tally.flows >= REQUESTS || Instant::now() < next {
            continue;
        }
        next = Instant::now() + BATCH_EVERY;
        for number in tally.flows..(tally.flows + BATCH).min(REQUESTS) {
            let place = places[(number % keys) as usize];
            let opened = crowd
                .host(place)
                .and_then(|host| host.with(|session| request(session, context, number)));
            if let Some(flow) = opened.flatten() {
                answers.insert((place, flow), AnswerStart::default());
            }
        }
        tally.flows = (tally.flows + BATCH).min(REQUESTS);
        for place in &places {
            let now = crowd.now();
            crowd.pump(*place, now);
        }
    }
    ensure!(tally.sessions > 0, "no hostile client got in");
    tally.flows = answers.len() as u64;
    for answer in answers.values().filter(|answer| !answer.is_accepted()) {
        match answer.is_refusal_in_words() {
            true => tally.refused += 1,
            // What is not over waits for its head.
            false => tally.unexplained += u64::from(answer.is_over()),
        }
    }
    Ok(tally)
}

fn request(session: &mut Session, context: &AttackContext, number: u64) -> Option<FlowId> {
    let http = context.http;
    let head = format!("GET http://{http}/slow/{number} HTTP/1.1\r\nHost: {http}\r\n\r\n");
    let flow = session.open(FlowOptions::default()).ok()?;
    session.write(flow, head.into()).ok()?;
    session.finish(flow).ok()?;
    Some(flow)
}
