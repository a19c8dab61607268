//! Devices that nobody invited, while an invitation is open: the proxy lets some of those it does not know ask.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use d2tp_session::{EndpointConfig, FlowOptions, Session, SessionEvent};

use super::attack_context::{AttackContext, AttackTally, STRANGERS};
use crate::handshake_hosts::{HandshakeHosts, key_of};

/// Devices that ask at once: four times as many as there are places.
const GUESTS: u64 = 64;
/// How long each stays; then others come in its place.
const STAY: Duration = Duration::from_millis(500);
/// A secret that opens nothing: 20 bytes in Base64.
const WRONG_SECRET: &str = "AAAAAAAAAAAAAAAAAAAAAP____8";
/// Flows that a guest opens.
const FLOWS: usize = 64;

/// Asks without an invitation until the time is over. A quarter of the guests stay for as long as they are let.
pub fn enrolment_guests(context: &AttackContext) -> Result<AttackTally> {
    let config = EndpointConfig {
        flow_window: 8 << 20,
        session_window: 1 << 30,
        ..EndpointConfig::default()
    };
    let mut crowd = HandshakeHosts::with_config(context.proxy, context.proxy_key, 4, config)?;
    let (mut tally, mut told) = (AttackTally::default(), Vec::new());
    let mut guests: Vec<(usize, Instant)> = Vec::new();
    let mut number = 0;
    while Instant::now() < context.until {
        while (guests.len() as u64) < GUESTS {
            number += 1;
            let mut opened = 0;
            let key = key_of(STRANGERS + number);
            let place = crowd.begin(number, key, |session| opened = ask(session, number));
            tally.flows += opened;
            guests.push((place, Instant::now() + stay(number)));
        }
        crowd.turn(Duration::from_millis(5), &mut told)?;
        for (_, event) in told.drain(..) {
            tally.sessions += u64::from(matches!(event, SessionEvent::Established { .. }));
        }
        guests.retain(|(place, leaves)| {
            let stays = Instant::now() < *leaves;
            if !stays {
                crowd.drop_host(*place);
            }
            stays
        });
    }
    ensure!(tally.sessions > 0, "no guest was let in to ask");
    Ok(tally)
}

fn stay(number: u64) -> Duration {
    match number % 4 {
        0 => Duration::from_secs(15),
        _ => STAY,
    }
}

/// Opens flows that ask wrongly, ask for something else, or never finish asking. Returns how many.
fn ask(session: &mut Session, number: u64) -> u64 {
    let (head, ends) = match number % 4 {
        0 => {
            let field = format!("x-filler: {}\r\n", "f".repeat(1_000));
            let half = format!("ENROL * HTTP/1.1\r\nInvitation: {WRONG_SECRET}\r\n");
            (half + &field.repeat(60), false)
        }
        1 => (
            "GET http://127.0.0.1/ HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(),
            true,
        ),
        2 => (
            "ENROL * HTTP/1.1\r\nInvitation: none\r\n\r\n".to_owned(),
            true,
        ),
        _ => {
            let name = "n".repeat(10_000);
            let head = format!(
                "ENROL * HTTP/1.1\r\nInvitation: {WRONG_SECRET}\r\nDevice-Name: {name}\r\n\r\n"
            );
            (head, true)
        }
    };
    let head = Bytes::from(head);
    let mut opened = 0;
    for _ in 0..FLOWS {
        let Ok(flow) = session.open(FlowOptions::default()) else {
            break;
        };
        let _ = session.write(flow, head.clone());
        if ends {
            let _ = session.finish(flow);
        }
        opened += 1;
    }
    opened
}
