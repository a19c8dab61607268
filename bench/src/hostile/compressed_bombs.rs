//! Requests for bodies that are a thousand times as large when they are unpacked.
//!
//! D2Prox unpacks no body: what the origin sent must arrive as it is, and take no more memory than it has bytes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use d2tp_session::{EndpointConfig, FlowId, FlowOptions, Session, SessionEvent};

use super::answer_start::AnswerStart;
use super::attack_context::{AttackContext, AttackTally, FIRST};
use super::packed_body::bomb;
use crate::handshake_hosts::{HandshakeHosts, key_of};

/// Flows of each key.
const FLOWS: usize = 16;
/// URLs of bodies that the shared cache may keep.
const CACHED_URLS: u64 = 8;
/// Bytes of a body of which a range is asked for.
const RANGE_BYTES: u64 = 100_000;

/// How a body is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BombRequest {
    /// A browser asks like this, and unpacks the body.
    Accepted,
    /// The client says nothing of codings.
    Unasked,
    /// The client wants no coding.
    Identity,
    /// The shared cache may keep the body.
    Cached,
    /// The client asks for a range, for which a proxy that unpacks bodies would unpack this one.
    Range,
    /// The body is packed for the transfer, which RFC 9112 has a recipient unpack: D2Prox refuses that.
    TransferCoded,
}

impl BombRequest {
    const ALL: [BombRequest; 6] = [
        BombRequest::Accepted,
        BombRequest::Unasked,
        BombRequest::Identity,
        BombRequest::Cached,
        BombRequest::Range,
        BombRequest::TransferCoded,
    ];

    fn of(number: u64) -> BombRequest {
        BombRequest::ALL[(number % BombRequest::ALL.len() as u64) as usize]
    }

    fn text(self, context: &AttackContext, number: u64) -> String {
        let http = context.http;
        let (path, field) = match self {
            BombRequest::Accepted => (String::new(), "accept-encoding: gzip, deflate, br\r\n"),
            BombRequest::Unasked => (String::new(), ""),
            BombRequest::Identity => (String::new(), "accept-encoding: identity\r\n"),
            BombRequest::Cached => {
                let url = number / BombRequest::ALL.len() as u64 % CACHED_URLS;
                (format!("cached/{url}"), "accept-encoding: gzip\r\n")
            }
            BombRequest::Range => (String::new(), "range: bytes=0-99999\r\n"),
            BombRequest::TransferCoded => ("transfer".to_owned(), ""),
        };
        format!("GET http://{http}/bomb/{path} HTTP/1.1\r\nHost: {http}\r\n{field}\r\n")
    }

    /// Whether a complete answer is what the origin sent, or a refusal in words.
    fn is_as_sent(self, answer: &AnswerStart) -> bool {
        match self {
            BombRequest::TransferCoded => answer.is_refusal_in_words(),
            BombRequest::Range => answer.is_accepted() && answer.body_bytes() == RANGE_BYTES,
            _ => answer.is_accepted() && answer.body_bytes() == bomb().len() as u64,
        }
    }
}

/// Asks for bodies and reads them until the time is over.
///
/// # Errors
/// No hostile client got in, or no body arrived.
pub fn compressed_bombs(context: &AttackContext) -> Result<AttackTally> {
    let config = EndpointConfig::default();
    let mut crowd = HandshakeHosts::with_config(context.proxy, context.proxy_key, 4, config)?;
    let (mut tally, mut told) = (AttackTally::default(), Vec::new());
    let places: Vec<usize> = (0..context.keys)
        .map(|key| crowd.begin(key, key_of(FIRST + key), |_| {}))
        .collect();
    let mut answers: HashMap<(usize, FlowId), (BombRequest, AnswerStart)> = HashMap::new();
    let mut arrived = 0;
    while Instant::now() < context.until {
        crowd.turn(Duration::from_millis(5), &mut told)?;
        for (place, event) in told.drain(..) {
            if let SessionEvent::Ended { flow, end } = &event
                && let Some((_, answer)) = answers.get_mut(&(place, *flow))
            {
                answer.note_end(end);
            }
            match event {
                SessionEvent::Established { .. } => tally.sessions += 1,
                SessionEvent::Readable(flow) | SessionEvent::Ended { flow, .. } => {
                    let answer = answers.get_mut(&(place, flow));
                    if let Some(((_, answer), host)) = answer.zip(crowd.host(place)) {
                        host.with(|session| answer.read(session, flow));
                        let now = crowd.now();
                        crowd.pump(place, now);
                    }
                }
                _ => {}
            }
        }
        answers.retain(|_, (request, answer)| {
            let is_over = answer.is_over();
            if is_over {
                arrived += u64::from(answer.is_accepted());
                // Refusals for want of room are refusals, too.
                tally.refused += u64::from(answer.is_refusal_in_words());
                let is_explained = request.is_as_sent(answer) || answer.is_refusal_in_words();
                tally.unexplained += u64::from(!is_explained);
            }
            !is_over
        });
        if tally.sessions < context.keys {
            continue;
        }
        for place in &places {
            let mut open = answers.keys().filter(|(at, _)| at == place).count();
            while open < FLOWS {
                let request = BombRequest::of(tally.flows);
                let text = request.text(context, tally.flows);
                let opened = crowd
                    .host(*place)
                    .and_then(|host| host.with(|session| ask(session, text)));
                let Some(flow) = opened.flatten() else { break };
                answers.insert((*place, flow), (request, AnswerStart::default()));
                tally.flows += 1;
                open += 1;
            }
            let now = crowd.now();
            crowd.pump(*place, now);
        }
    }
    ensure!(tally.sessions > 0, "no hostile client got in");
    ensure!(arrived > 0, "no body arrived");
    Ok(tally)
}

fn ask(session: &mut Session, text: String) -> Option<FlowId> {
    let flow = session.open(FlowOptions::default()).ok()?;
    session.write(flow, text.into()).ok()?;
    session.finish(flow).ok()?;
    Some(flow)
}
