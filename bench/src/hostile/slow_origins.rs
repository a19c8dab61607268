//! Requests to ten thousand origins at once, each of which sends a byte per second.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use d2tp_session::{
    EndpointConfig, FlowEnd, FlowId, FlowOptions, ReadOutcome, Session, SessionEvent,
};

use super::attack_context::{AttackContext, AttackTally, FIRST};
use super::hostile_kind::SLOW_ORIGIN_KEYS;
use crate::handshake_hosts::{HandshakeHosts, key_of};

/// Requests that are made: as many origins are slow at once.
const REQUESTS: u64 = 10_000;
/// Requests that are made at once, so that connections to the origin find room in its backlog.
const BATCH: u64 = 100;
/// How soon the next are made: all have been after a second.
const BATCH_EVERY: Duration = Duration::from_millis(10);
/// Bytes of an answer that are kept: a refusal is shorter.
const KEPT_BYTES: usize = 1_024;

/// What has come of an answer, from its beginning on.
#[derive(Default)]
struct AnswerStart {
    bytes: Vec<u8>,
    is_over: bool,
    /// Whether the protocol refused the flow with a reason, for which devices have a sentence.
    is_refused_flow: bool,
}

impl AnswerStart {
    fn read(&mut self, session: &mut Session, flow: FlowId) {
        while !self.is_over {
            match session.read(flow, usize::MAX) {
                Ok(ReadOutcome::Chunk(chunk)) => {
                    let room = KEPT_BYTES.saturating_sub(self.bytes.len());
                    self.bytes
                        .extend_from_slice(&chunk[..chunk.len().min(room)]);
                }
                Ok(ReadOutcome::Pending) => return,
                Ok(ReadOutcome::End) | Err(_) => self.is_over = true,
            }
        }
    }

    fn is_accepted(&self) -> bool {
        self.bytes.starts_with(b"HTTP/1.1 200 ")
    }

    /// Whether the proxy refused the request, with words for whoever made it.
    fn is_refusal_in_words(&self) -> bool {
        if self.is_refused_flow {
            return true;
        }
        let text = String::from_utf8_lossy(&self.bytes);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            return false;
        };
        let status = head.split(' ').nth(1).unwrap_or_default();
        status.starts_with(['4', '5']) && body.trim().split(' ').count() > 2
    }
}

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
                answer.is_refused_flow = matches!(end, FlowEnd::Refused(_));
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
            false => tally.unexplained += u64::from(answer.is_over),
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

#[cfg(test)]
mod tests {
    use super::AnswerStart;

    #[test]
    fn only_an_answer_with_a_sentence_is_a_refusal_in_words() {
        for (text, is_one) in [
            (
                "HTTP/1.1 503 Busy\r\nx: y\r\n\r\nthe proxy is full now\n",
                true,
            ),
            ("HTTP/1.1 403 Forbidden\r\n\r\nno", false),
            ("HTTP/1.1 503 Busy\r\n\r\n", false),
            ("HTTP/1.1 200 OK\r\n\r\nthe body of an answer", false),
            ("", false),
        ] {
            let answer = AnswerStart {
                bytes: text.into(),
                is_over: true,
                is_refused_flow: false,
            };
            assert_eq!(answer.is_refusal_in_words(), is_one, "{text:?}");
        }
    }
}
