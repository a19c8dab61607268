//! A client that fills the cache which all clients share.
//!
//! ```text
//!  churn      objects of a megabyte, each another one, read to their end
//!  unread     as many as the client may have flows, and none is read
//!  variants   small answers with large heads, each another variant of some URL
//! ```

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use d2tp_session::{EndpointConfig, FlowId, FlowOptions, ReadOutcome, Session, SessionEvent};

use super::attack_context::{AttackContext, AttackTally, FIRST};
use crate::handshake_hosts::{HandshakeHosts, key_of};

/// The size of an object.
const OBJECT_BYTES: u64 = 1_000_000;
/// Flows of each key, where objects are read.
const READING_FLOWS: usize = 32;
/// Flows of each key, where they are not: all that the proxy allows.
const UNREAD_FLOWS: usize = 1_024;
/// Variants of one URL that are asked for before the next URL: more than the cache keeps of one.
const VARIANTS: u64 = 40;

/// How the cache is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheAttack {
    /// More than it has room for, each object read once.
    Churn,
    /// Objects that are not read.
    Unread,
    /// Variants with large heads.
    Variants,
}

impl CacheAttack {
    fn flows(self) -> usize {
        match self {
            CacheAttack::Churn | CacheAttack::Variants => READING_FLOWS,
            CacheAttack::Unread => UNREAD_FLOWS,
        }
    }

    /// The request with this number, which no other is like.
    fn request(self, context: &AttackContext, number: u64) -> String {
        let http = context.http;
        let (path, field) = match self {
            CacheAttack::Churn | CacheAttack::Unread => {
                (format!("/cached/{OBJECT_BYTES}/{number}"), String::new())
            }
            CacheAttack::Variants => {
                let variant = format!("x-variant: {number}\r\n");
                (format!("/varied/{}", number / VARIANTS), variant)
            }
        };
        format!("GET http://{http}{path} HTTP/1.1\r\nHost: {http}\r\n{field}\r\n")
    }
}

/// Asks for one object after the other until the time is over.
pub fn attack_cache(attack: CacheAttack, context: &AttackContext) -> Result<AttackTally> {
    let config = EndpointConfig::default();
    let mut crowd = HandshakeHosts::with_config(context.proxy, context.proxy_key, 4, config)?;
    let (mut tally, mut told) = (AttackTally::default(), Vec::new());
    let places: Vec<usize> = (0..context.keys)
        .map(|key| crowd.begin(key, key_of(FIRST + key), |_| {}))
        .collect();
    let mut open: Vec<HashSet<FlowId>> = vec![HashSet::new(); places.len()];
    while Instant::now() < context.until {
        crowd.turn(Duration::from_millis(5), &mut told)?;
        for (place, event) in told.drain(..) {
            match event {
                SessionEvent::Established { .. } => tally.sessions += 1,
                SessionEvent::Readable(flow) | SessionEvent::Ended { flow, .. } => {
                    let is_over = match crowd.host(place) {
                        Some(_) if attack == CacheAttack::Unread => Some(false),
                        Some(host) => host.with(|session| read(session, flow)),
                        None => None,
                    };
                    let at = places.iter().position(|known| *known == place);
                    if let (Some(at), Some(true)) = (at, is_over) {
                        open[at].remove(&flow);
                    }
                    let now = crowd.now();
                    crowd.pump(place, now);
                }
                _ => {}
            }
        }
        if tally.sessions < context.keys {
            continue;
        }
        for (at, place) in places.iter().enumerate() {
            while open[at].len() < attack.flows() {
                let request = attack.request(context, tally.flows);
                let Some(host) = crowd.host(*place) else {
                    break;
                };
                let Some(flow) = host.with(|session| begin(session, request)).flatten() else {
                    break;
                };
                open[at].insert(flow);
                tally.flows += 1;
            }
            let now = crowd.now();
            crowd.pump(*place, now);
        }
    }
    ensure!(tally.sessions > 0, "no hostile client got in");
    Ok(tally)
}

fn begin(session: &mut Session, request: String) -> Option<FlowId> {
    let flow = session.open(FlowOptions::default()).ok()?;
    session.write(flow, request.into()).ok()?;
    session.finish(flow).ok()?;
    Some(flow)
}

/// Reads what has come. Returns whether the answer has ended.
fn read(session: &mut Session, flow: FlowId) -> bool {
    loop {
        match session.read(flow, usize::MAX) {
            Ok(ReadOutcome::Chunk(_)) => {}
            Ok(ReadOutcome::Pending) => return false,
            Ok(ReadOutcome::End) | Err(_) => return true,
        }
    }
}
