//! A client that is at all of its limits at once.
//!
//! ```text
//!  tunnels     read and written as fast as they go   bytes a second each way, bytes in a month
//!              never read                            memory of sessions
//!  objects     never read, or given up in the middle pinned bytes, kept copies
//!  uploads     that never end                        pinned bytes
//!  relays, mailboxes, far deadlines                  more than it may have
//!  all of it                                         flows at once
//! ```
//!
//! What is refused is asked for again, a hundred times a second.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use cedos_terminal::print_stderr;
use d2tp_session::{EndpointConfig, FlowId, FlowOptions, Session, SessionEvent, Span, Time};

use super::answer_start::AnswerStart;
use super::attack_context::{AttackContext, AttackTally, FIRST};
use crate::handshake_hosts::{HandshakeHosts, key_of};

/// What each client may have at once.
const CLIENT_FLOWS_MAX: u64 = 64;
/// The bytes that the proxy holds for a client: four objects.
const CLIENT_PINNED_BYTES_MAX: u64 = 17_000_000;
/// Bytes a second, each way: four times what an honest client takes.
const CLIENT_BYTES_PER_S: u64 = 1_000_000;
/// Bytes of an object, and of an upload.
const OBJECT_BYTES: u64 = 4_000_000;
/// Beyond the furthest deadline, which is a week.
const FAR: Span = Span::from_secs(8 * 86_400);
/// How often a key opens a flow.
const OPEN_EVERY: Duration = Duration::from_millis(10);
/// The device's own code for flows that it gives up.
const GIVEN_UP: u64 = 0xd101;
/// Bytes written to a flow at once.
static ZEROS: [u8; 32 * 1024] = [0; 32 * 1024];

/// The limits that refuse, and what the proxy says then.
const LIMITS: [(&str, &str); 6] = [
    ("flows", "flows open, which is its limit"),
    ("pinned bytes", "objects already fill its"),
    ("relays", "relays, which is its limit"),
    ("mailboxes", "too many wait under a number"),
    ("deadline", "the deadline is further away"),
    ("bytes in a month", "may transfer here in a month"),
];

/// The settings of a proxy whose clients can reach all limits in an attack of this length. Honest clients reach none.
pub fn settings(attack_s: f64) -> String {
    // The attacker moves two seconds' worth at once and as much in each second: reached after 0.6 of the attack.
    let month = 2.0e6 + 1.2e6 * attack_s;
    format!(
        "client_flows_max = {CLIENT_FLOWS_MAX}\nclient_pinned_bytes_max = {CLIENT_PINNED_BYTES_MAX}\n\
         client_down_bytes_per_s = {CLIENT_BYTES_PER_S}\nclient_up_bytes_per_s = {CLIENT_BYTES_PER_S}\n\
         client_month_bytes_max = {month:.0}\n"
    )
}

/// What a flow of the attacker is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QuotaUse {
    ReadTunnel,
    WrittenTunnel,
    UnreadTunnel,
    UnreadObject,
    GivenUpObject,
    Upload,
    Relay,
    Mailbox,
    FarDeadline,
}

/// All uses, and how many flows the attacker wants to have of each. The first three come first, alone: answers to them would wait for
/// the attacker's share of bytes a second behind those of tunnels.
const USES: [(QuotaUse, usize); 9] = [
    (QuotaUse::Relay, 20),
    (QuotaUse::Mailbox, 12),
    (QuotaUse::FarDeadline, 4),
    (QuotaUse::ReadTunnel, 4),
    (QuotaUse::WrittenTunnel, 4),
    (QuotaUse::UnreadTunnel, 40),
    (QuotaUse::UnreadObject, 12),
    (QuotaUse::GivenUpObject, 4),
    (QuotaUse::Upload, 12),
];
/// How many flows each key opens of the first three.
const FIRST_FLOWS: u64 = 60;

impl QuotaUse {
    fn head(self, context: &AttackContext) -> String {
        let (http, blast, silent) = (context.http, context.blast, context.silent);
        match self {
            QuotaUse::ReadTunnel | QuotaUse::UnreadTunnel => {
                format!("CONNECT {blast} HTTP/1.1\r\nHost: {blast}\r\n\r\n")
            }
            QuotaUse::WrittenTunnel => {
                format!("CONNECT {silent} HTTP/1.1\r\nHost: {silent}\r\n\r\n")
            }
            QuotaUse::UnreadObject | QuotaUse::GivenUpObject | QuotaUse::FarDeadline => {
                format!("GET http://{http}/object/{OBJECT_BYTES} HTTP/1.1\r\nHost: {http}\r\n\r\n")
            }
            QuotaUse::Upload => format!(
                "PUT http://{http}/upload HTTP/1.1\r\nHost: {http}\r\nContent-Length: {OBJECT_BYTES}\r\n\r\n"
            ),
            QuotaUse::Relay => format!("RELAY {http} HTTP/1.1\r\nHost: {http}\r\n\r\n"),
            QuotaUse::Mailbox => format!("MAILBOX * HTTP/1.1\r\nHost: {http}\r\n\r\n"),
        }
    }

    /// Whether nothing follows the head.
    fn is_only_head(self) -> bool {
        use QuotaUse::{FarDeadline, GivenUpObject, UnreadObject};
        matches!(self, UnreadObject | GivenUpObject | FarDeadline)
    }

    /// The bytes that follow the head, as credit allows.
    fn body_bytes(self) -> u64 {
        match self {
            // All but the end.
            QuotaUse::Upload => OBJECT_BYTES - 1,
            QuotaUse::WrittenTunnel => u64::MAX,
            _ => 0,
        }
    }

    fn begin(self, session: &mut Session, now: Time, head: String) -> Option<FlowId> {
        let options = FlowOptions {
            deadline: (self == QuotaUse::FarDeadline).then(|| now + FAR),
            ..FlowOptions::default()
        };
        let flow = session.open(options).ok()?;
        session.write(flow, head.into()).ok()?;
        if self.is_only_head() {
            session.finish(flow).ok()?;
        }
        Some(flow)
    }
}

/// An open flow of the attacker.
struct UsedFlow {
    what: QuotaUse,
    answer: AnswerStart,
    /// Bytes that are still to be written.
    left: u64,
}

impl UsedFlow {
    /// Reads what has come, as far as this flow is read. Returns whether the flow is over.
    fn read(&mut self, session: &mut Session, flow: FlowId) -> bool {
        match self.what {
            // Enough to see a refusal.
            QuotaUse::UnreadTunnel | QuotaUse::UnreadObject | QuotaUse::GivenUpObject => {
                self.answer.read_beginning(session, flow);
            }
            _ => self.answer.read(session, flow),
        }
        if self.what == QuotaUse::GivenUpObject && self.answer.is_accepted() {
            session.reset(flow, GIVEN_UP);
            return true;
        }
        self.answer.is_over()
    }

    fn write(&mut self, session: &mut Session, flow: FlowId) {
        if self.left == 0 {
            return;
        }
        let room = session.write_room(flow).unwrap_or(0).min(self.left);
        let piece = room.min(ZEROS.len() as u64);
        let bytes = Bytes::from_static(&ZEROS[..piece as usize]);
        if piece > 0 && session.write(flow, bytes).is_ok() {
            self.left -= piece;
        }
    }
}

/// The attacker's flows, and what the proxy refused.
struct QuotaAttack {
    flows: HashMap<(usize, FlowId), UsedFlow>,
    reached: BTreeSet<&'static str>,
    tally: AttackTally,
    /// The use of which the next flow is opened, if more of it are wanted.
    next: usize,
}

impl QuotaAttack {
    /// Opens a flow of the next use of which more are wanted.
    fn open(&mut self, crowd: &mut HandshakeHosts, place: usize, context: &AttackContext) {
        let now = crowd.now();
        let Some(host) = crowd.host(place) else {
            return;
        };
        let uses = match self.tally.flows < FIRST_FLOWS * context.keys {
            true => &USES[..3],
            false => &USES[..],
        };
        for _ in uses {
            let (what, wanted) = uses[self.next % uses.len()];
            self.next += 1;
            let mine = self.flows.iter().filter(|((at, _), _)| *at == place);
            if mine.filter(|(_, flow)| flow.what == what).count() >= wanted {
                continue;
            }
            let head = what.head(context);
            let opened = host.with(|session| what.begin(session, now, head));
            if let Some(flow) = opened.flatten() {
                let used = UsedFlow {
                    what,
                    answer: AnswerStart::default(),
                    left: what.body_bytes(),
                };
                self.flows.insert((place, flow), used);
                self.tally.flows += 1;
            }
            return;
        }
    }

    fn on_event(&mut self, crowd: &mut HandshakeHosts, place: usize, event: &SessionEvent) {
        let flow = match event {
            SessionEvent::Established { .. } => {
                self.tally.sessions += 1;
                return;
            }
            SessionEvent::Readable(flow) | SessionEvent::Ended { flow, .. } => *flow,
            _ => return,
        };
        let (Some(used), Some(host)) = (self.flows.get_mut(&(place, flow)), crowd.host(place))
        else {
            return;
        };
        if let SessionEvent::Ended { end, .. } = event {
            used.answer.note_end(end);
        }
        let is_over = host.with(|session| used.read(session, flow)) == Some(true);
        // The reason for a reset comes with the flow's end.
        let is_told = is_over && !used.answer.text().is_empty();
        if !is_told && !matches!(event, SessionEvent::Ended { .. }) {
            return;
        }
        if let Some(used) = self.flows.remove(&(place, flow)) {
            self.judge(&used);
        }
    }

    /// Counts a flow that is over.
    fn judge(&mut self, used: &UsedFlow) {
        let UsedFlow { what, answer, .. } = used;
        if answer.is_accepted() {
            return;
        }
        let text = answer.text();
        if answer.is_refusal_in_words() {
            self.tally.refused += 1;
        } else {
            self.tally.unexplained += 1;
            print_stderr(&format!("{what:?} ended without a reason: {text:?}"));
        }
        let said = LIMITS.iter().filter(|(_, words)| text.contains(words));
        self.reached.extend(said.map(|(limit, _)| *limit));
    }

    /// Writes what the flows of a host accept.
    fn write(&mut self, crowd: &mut HandshakeHosts, place: usize) {
        if let Some(host) = crowd.host(place) {
            let mine = self.flows.iter_mut().filter(|((at, _), _)| *at == place);
            for ((_, flow), used) in mine {
                host.with(|session| used.write(session, *flow));
            }
        }
    }
}

/// Reaches for all limits of a client until the time is over.
///
/// # Errors
/// No hostile client got in.
pub fn be_at_every_quota(context: &AttackContext) -> Result<AttackTally> {
    let config = EndpointConfig {
        flow_window: 8 << 20,
        session_window: 1 << 30,
        ..EndpointConfig::default()
    };
    let mut crowd = HandshakeHosts::with_config(context.proxy, context.proxy_key, 4, config)?;
    let places: Vec<usize> = (0..context.keys)
        .map(|key| crowd.begin(key, key_of(FIRST + key), |_| {}))
        .collect();
    let mut attack = QuotaAttack {
        flows: HashMap::new(),
        reached: BTreeSet::new(),
        tally: AttackTally::default(),
        next: 0,
    };
    let (mut told, mut next_open) = (Vec::new(), Instant::now());
    while Instant::now() < context.until {
        crowd.turn(Duration::from_millis(5), &mut told)?;
        for (place, event) in told.drain(..) {
            attack.on_event(&mut crowd, place, &event);
        }
        if attack.tally.sessions < context.keys {
            continue;
        }
        let opens = Instant::now() >= next_open;
        if opens {
            next_open = Instant::now() + OPEN_EVERY;
        }
        for place in &places {
            if opens {
                attack.open(&mut crowd, *place, context);
            }
            attack.write(&mut crowd, *place);
            let now = crowd.now();
            crowd.pump(*place, now);
        }
    }
    ensure!(attack.tally.sessions > 0, "no hostile client got in");
    let missed = LIMITS
        .iter()
        .filter(|(limit, _)| !attack.reached.contains(limit));
    let missed: Vec<&str> = missed.map(|(limit, _)| *limit).collect();
    if !missed.is_empty() {
        print_stderr(&format!(
            "limits that the attack did not reach: {}",
            missed.join(", ")
        ));
    }
    attack.tally.limits_left = missed.len() as u64;
    Ok(attack.tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attacker_wants_more_flows_than_a_client_may_have() {
        let wanted: usize = USES.iter().map(|(_, wanted)| wanted).sum();
        assert!(wanted as u64 > CLIENT_FLOWS_MAX);
        assert!(settings(10.0).contains("client_month_bytes_max = 14000000\n"));
    }
}
