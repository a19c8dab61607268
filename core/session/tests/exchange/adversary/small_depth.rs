//! Every mixture of few messages: from each of several states all sequences of a client's moves are tried, and an
//! address that has not answered gets no more bytes than came from it. Longer ones are drawn at random
//! (`amplification.rs`).
//!
//! ```text
//!  nothing │ a SYN or WAKE from both addresses │ a session, its keys by ML-KEM agreed or not, with relays │ one asleep
//!     └─ every move, and after it every move ─▶ the server has more to say, and time passes: bytes to ≤ bytes from
//! ```

use d2tp_session::*;
use d2tp_wire::{Cid, DATAGRAM_FIRST_BYTES, Frame, WireWriter};

use super::amplification::{Attacker, SHORT_SYN_BYTES, claim, search_part, victim};
use super::rogue::*;

/// The number of frames that [`write_frame`] knows.
pub(super) const FRAMES: usize = 31;
/// The frames with the halves of the attacker's key of ML-KEM.
const KEY_SHARES: [usize; 2] = [28, 29];
/// The frames that are sent where hybrid keys or relays are the subject: PING, ACK, DATA, FLOW_CREDIT, SESSION_CREDIT,
/// PATH_STATUS, CHG, RSP, RESUME, CLOSE. All others are sent in sessions without them.
const FRAMES_OF_LATER_STARTS: [usize; 10] = [0, 1, 4, 8, 9, 15, 18, 19, 22, 30];
/// The frames that are sent on a path that the server does not know yet, too: PING, DATA, CHG.
const FRAMES_OF_NEW_PATHS: [usize; 3] = [0, 4, 18];
const MUCH: u64 = 1 << 40;

/// Writes each frame there is, about a flow of epoch 1 or a path.
pub(super) fn write_frame(w: &mut WireWriter<'_>, nth: usize, path: u32, nonce: [u8; 16]) {
    let flow = flow(0);
    let path = PathId(path);
    let reason = ReasonCode::None;
    let frame = match nth {
        0 => Frame::Ping,
        1 => {
            // An ACK of what it cannot have seen, too.
            Frame::encode_ack(w, path, 0, std::iter::once((0, 30)));
            return;
        }
        2 => Frame::AckRate {
            path,
            every: 1,
            delay_us: 0,
        },
        3 => Frame::KeyShare {
            half: 0,
            bytes: &[7; 800],
        },
        4 => data(flow, 0, b"x"),
        5 => Frame::Open {
            flow,
            flags: 0,
            priority: 0,
            size: None,
            deadline_ms: None,
        },
        6 => Frame::Reset {
            flow,
            code: 1,
            final_size: 1,
        },
        7 => Frame::Stop { flow, code: 1 },
        8 => Frame::FlowCredit { flow, max: MUCH },
        9 => Frame::SessionCredit { max: MUCH },
        10 => Frame::Deadline {
            flow,
            seq: 1,
            remaining_ms: Some(1),
        },
        11 => Frame::Durable { flow, offset: 1 },
        12 => Frame::Committed { flow, offset: 1 },
        13 => Frame::Grant {
            seq: 1,
            flow,
            path,
            max_sent: MUCH,
        },
        14 => Frame::Spent {
            flow,
            path,
            sent: 0,
        },
        15 => status(path.0, 9, false),
        16 => Frame::PathLimit {
            path,
            seq: 1,
            bytes: MUCH,
        },
        17 => Frame::FlowPause {
            flow,
            seq: 1,
            paused: false,
            reason,
        },
        18 => {
            for _ in 0..2 {
                Frame::Chg { nonce: [9; 16] }.encode(w);
            }
            Frame::Chg { nonce: [9; 16] }
        }
        19 => Frame::Rsp { nonce },
        20 => Frame::Auth { path },
        21 => Frame::PathCid {
            path: PathId(path.0 + 1),
            cid: Cid([8; 8]),
            token: [0; 16],
        },
        22 => Frame::Resume {
            flow,
            received: 0,
            flags: 0,
        },
        23 => Frame::Resumed { flow, received: 0 },
        24 => Frame::Refused { flow, reason },
        25 => Frame::ResumeEnd { flows: 0 },
        26 => Frame::Datagram {
            context: 0,
            bytes: b"x",
        },
        27 => Frame::Suspend { reason },
        28 => key_share(0),
        29 => key_share(1),
        _ => Frame::Close { code: 0, text: b"" },
    };
    frame.encode(w);
}

/// What the attacker begins with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Start {
    Nothing,
    /// The server demands a cookie of everybody.
    NothingUnderLoad,
    /// One SYN came from the victim and from its own address, which the answer went to.
    SynFromBoth,
    /// A session with a flow for which the server has much to send.
    Session,
    /// A session with such a flow that the server has let sleep.
    Asleep,
    /// A session with such a flow in which half of the attacker's key of ML-KEM arrived.
    HybridPending,
    /// A session with half of that key, in which nothing of flows may be sent before the hybrid keys.
    HybridRequired,
    /// A session with such a flow, and a session secret, that the server has let sleep.
    HybridAsleep,
    /// A WAKE of that session, with its secret, came from the victim and from its own address.
    WakeFromBoth,
    /// A session with such a flow, and relays to a host outside and to itself.
    Relaying,
}

pub(super) const STARTS: [Start; 10] = [
    Start::Nothing,
    Start::NothingUnderLoad,
    Start::SynFromBoth,
    Start::Session,
    Start::Asleep,
    Start::HybridPending,
    Start::HybridRequired,
    Start::HybridAsleep,
    Start::WakeFromBoth,
    Start::Relaying,
];

/// What it does next; the address is where it pretends to be.
#[derive(Clone, Copy, Debug)]
enum Move {
    Syn,
    /// A SYN without padding.
    ShortSyn,
    /// A SYN with a claim of a flow, and much credit.
    SynWithClaim,
    Wake,
    /// A SYN that offers an exchange by ML-KEM.
    SynHybrid,
    /// A SYN with a claim that names the session secret.
    SynWithSecret,
    /// A WAKE with a claim that names the session secret.
    WakeWithSecret,
    CopyOfNewest,
    CopyOfFirst,
    HalfOfNewest,
    OtherVersion,
    UnknownId,
    /// A frame on a path.
    Packet(usize, u32),
    /// A packet to one of its relays.
    Relayed(usize),
    /// A packet of the host outside to its relay.
    FromOutside,
    Pass(u64),
    Sleep,
}

/// Each move that is tried after a start, and whether it comes from the victim.
fn moves(start: Start) -> Vec<(Move, bool)> {
    let mut sent = vec![
        Move::Syn,
        Move::ShortSyn,
        Move::SynWithClaim,
        Move::Wake,
        Move::CopyOfNewest,
        Move::CopyOfFirst,
        Move::HalfOfNewest,
        Move::OtherVersion,
        Move::UnknownId,
    ];
    sent.extend(FRAMES_OF_NEW_PATHS.map(|frame| Move::Packet(frame, 1)));
    match start {
        Start::Nothing
        | Start::NothingUnderLoad
        | Start::SynFromBoth
        | Start::Session
        | Start::Asleep => {
            let frames = (0..FRAMES).filter(|frame| !KEY_SHARES.contains(frame));
            sent.extend(frames.map(|frame| Move::Packet(frame, 0)));
        }
        Start::HybridPending
        | Start::HybridRequired
        | Start::HybridAsleep
        | Start::WakeFromBoth => {
            let frames = FRAMES_OF_LATER_STARTS.into_iter().chain(KEY_SHARES);
            sent.extend(frames.map(|frame| Move::Packet(frame, 0)));
            sent.extend([Move::SynHybrid, Move::SynWithSecret, Move::WakeWithSecret]);
        }
        Start::Relaying => {
            sent.extend(FRAMES_OF_LATER_STARTS.map(|frame| Move::Packet(frame, 0)));
            sent.extend([Move::Relayed(0), Move::Relayed(1)]);
        }
    }
    let mut moves: Vec<_> = sent
        .into_iter()
        .flat_map(|m| [(m, false), (m, true)])
        .collect();
    let others = [Move::Pass(300), Move::Pass(11_000), Move::Sleep];
    moves.extend(others.map(|m| (m, false)));
    if let Start::Relaying = start {
        moves.push((Move::FromOutside, false));
    }
    moves
}

impl Attacker {
    fn at(start: Start) -> Attacker {
        let mut attacker = Attacker::with_config(EndpointConfig {
            cookie_above: match start {
                Start::NothingUnderLoad => 0,
                _ => u32::MAX,
            },
            ..EndpointConfig::default()
        });
        attacker.begin(start);
        attacker
    }

    /// Does what leads to a start, by handshakes without cookies.
    pub(super) fn begin(&mut self, start: Start) {
        self.log.push(format!("{start:?}"));
        match start {
            Start::Nothing | Start::NothingUnderLoad => {}
            Start::SynFromBoth => {
                let syn = self.next_syn();
                self.throw_handshake("SYN", victim(), syn.clone());
                self.throw_handshake("SYN", self.r.home, syn);
            }
            Start::Session | Start::Asleep | Start::Relaying => {
                self.make((Move::Syn, false));
                self.make((Move::Packet(4, 0), false));
                self.server_writes();
                match start {
                    Start::Asleep => self.make((Move::Sleep, false)),
                    Start::Relaying => {
                        self.open_relays();
                        // One more may go to the host outside before it answers.
                        for _ in 1..UNANSWERED_MAX {
                            self.make((Move::Relayed(0), false));
                        }
                    }
                    _ => {}
                }
            }
            Start::HybridPending | Start::HybridRequired => {
                self.begin_exchange(matches!(start, Start::HybridRequired));
            }
            Start::HybridAsleep | Start::WakeFromBoth => {
                self.begin_exchange(false);
                self.make((Move::Packet(KEY_SHARES[1], 0), false));
                // The first packet under the hybrid keys: the server keeps the secret.
                self.make((Move::Packet(0, 0), false));
                assert_eq!(self.r.session_secrets.len(), 1);
                self.make((Move::Sleep, false));
                if let Start::WakeFromBoth = start {
                    self.make((Move::WakeWithSecret, true));
                    self.make((Move::CopyOfNewest, false));
                    assert!(self.r.initiator.is_none(), "the copy is answered");
                }
            }
        }
    }

    /// A session with a flow for which the server has much to send, and the first half of its key of ML-KEM.
    fn begin_exchange(&mut self, required: bool) {
        self.offer(None, required);
        let syn = self.next_syn();
        self.throw_handshake("SYN", self.r.home, syn);
        self.make((Move::Packet(4, 0), false));
        self.server_writes();
        self.make((Move::Packet(KEY_SHARES[0], 0), false));
        assert!(self.r.is_alive());
    }

    /// Offers keys of ML-KEM in the next SYNs.
    fn offer(&mut self, secret: Option<[u8; 8]>, required: bool) {
        self.r.hybrid = Some(HybridOffer { secret, required });
    }

    fn next_syn(&mut self) -> Vec<u8> {
        self.next_syn_of(DATAGRAM_FIRST_BYTES)
    }

    fn next_syn_of(&mut self, len: usize) -> Vec<u8> {
        self.epoch += 1;
        let cookie = self.cookies.last().copied();
        self.r.syn_of(len, self.epoch, cookie)
    }

    fn make(&mut self, (step, is_forged): (Move, bool)) {
        let from = match is_forged {
            true => victim(),
            false => self.r.home,
        };
        let copied = match step {
            Move::CopyOfFirst => self.sent.first(),
            _ => self.sent.last(),
        };
        let copied = copied.cloned();
        let name = format!("{step:?}");
        match step {
            Move::Syn
            | Move::ShortSyn
            | Move::SynWithClaim
            | Move::SynHybrid
            | Move::SynWithSecret => {
                let secret = self.r.session_secrets.last().map(|s| s.id);
                (self.r.claims, self.r.hybrid) = (Vec::new(), None);
                match step {
                    Move::SynWithClaim => self.r.claims = claim(flow(0)),
                    Move::SynHybrid => self.offer(None, false),
                    Move::SynWithSecret => {
                        self.r.claims = claim(flow(0));
                        self.offer(secret, false);
                    }
                    _ => {}
                }
                let len = match step {
                    Move::ShortSyn => SHORT_SYN_BYTES,
                    _ => DATAGRAM_FIRST_BYTES,
                };
                let syn = self.next_syn_of(len);
                self.throw_handshake(&name, from, syn);
            }
            Move::Wake | Move::WakeWithSecret => {
                if let Some(ticket) = self.r.tickets.last().cloned() {
                    self.epoch += 1;
                    (self.r.claims, self.r.hybrid) = (Vec::new(), None);
                    if let Move::WakeWithSecret = step {
                        self.r.claims = claim(flow(0));
                        let secret = self.r.session_secrets.last().map(|s| s.id);
                        self.offer(secret, false);
                    }
                    let cookie = self.cookies.last().copied();
                    let wake = self.r.wake(self.epoch, &ticket, cookie);
                    self.throw_handshake(&name, from, wake);
                }
            }
            Move::CopyOfNewest | Move::CopyOfFirst | Move::HalfOfNewest => {
                if let Some(mut bytes) = copied {
                    if let Move::HalfOfNewest = step {
                        bytes.truncate(bytes.len() / 2);
                    }
                    self.throw(&name, from, bytes);
                }
            }
            Move::OtherVersion => {
                if let Some(mut bytes) = copied {
                    if let Some(first) = bytes.first_mut() {
                        *first = 0b100 << 5 | 9;
                    }
                    self.throw(&name, from, bytes);
                }
            }
            Move::UnknownId => {
                if let Some(mut bytes) = copied {
                    // Of what was halved often, only a part of the id is left.
                    bytes.iter_mut().skip(1).take(8).for_each(|b| *b = 0xa5);
                    self.throw(&name, from, bytes);
                }
            }
            Move::Packet(nth, path) => {
                if self.r.keys.is_some() && self.r.theirs.contains_key(&path) {
                    let mut text = [0; 1100];
                    let mut w = WireWriter::new(&mut text);
                    let nonce = self.nonces.last().copied().unwrap_or_default();
                    write_frame(&mut w, nth, path, nonce);
                    let len = w.written();
                    let number = self.r.numbers.entry(path).or_default();
                    *number += 1;
                    let number = *number - 1;
                    let packet = self.r.packet_of(path, number, &text[..len]);
                    self.throw(&name, from, packet);
                }
            }
            Move::Relayed(nth) => self.throw_relayed(from, nth, &Attacker::any_packet()),
            Move::FromOutside => self.answer_from_outside(&Attacker::any_packet()),
            Move::Pass(ms) => {
                self.log.push(name);
                self.r.wait(MS.times(ms));
                self.read();
            }
            Move::Sleep => {
                if let Some(id) = self.r.session() {
                    self.log.push(name);
                    let _ = self.r.server.hibernate(self.r.now, id);
                    self.r.pump();
                    self.read();
                }
            }
        }
    }
}

/// What a search has tried.
#[derive(Debug, Default)]
struct SequenceCounts {
    tried: usize,
    /// Sequences in which the victim got anything.
    reached: usize,
    /// Sequences that ended with hybrid keys.
    hybrid: usize,
}

/// Tries the sequences of `depth` moves from every start of which this is one in `parts`: those whose number leaves
/// the rest `part`.
fn try_all(depth: u32, (part, parts): (u64, u64)) -> SequenceCounts {
    let mut counts = SequenceCounts::default();
    for start in STARTS {
        let moves = moves(start);
        let sequences = (moves.len() as u64).pow(depth);
        for sequence in (part..sequences).step_by(parts as usize) {
            let mut attacker = Attacker::at(start);
            let mut rest = sequence as usize;
            for _ in 0..depth {
                attacker.make(moves[rest % moves.len()]);
                rest /= moves.len();
                attacker.server_writes();
            }
            // What is repeated counts, too.
            attacker.make((Move::Pass(3_000), false));
            counts.tried += 1;
            counts.reached += usize::from(attacker.sent_to(victim()) > 0);
            counts.hybrid += usize::from(!attacker.r.session_secrets.is_empty());
        }
    }
    counts
}

#[test]
fn every_mixture_of_two_messages_gives_an_address_no_more_than_it_sent() {
    // R-PATH-2, R-PATH-16, R-UNKNOWN-2, R-RELAY-1, R-RELAY-3
    let counts = try_all(2, (0, 1));
    assert!(counts.tried > 45_000, "{counts:?}");
    assert!(
        counts.reached * 5 > counts.tried && counts.hybrid * 8 > counts.tried,
        "{counts:?}"
    );
}

#[test]
#[ignore = "long: the nightly run"]
fn every_mixture_of_three_messages_gives_an_address_no_more_than_it_sent() {
    // R-PATH-2, R-PATH-16, R-UNKNOWN-2, R-RELAY-1, R-RELAY-3
    try_all(3, search_part());
}
