//! Who sends next on a line: every station when it wants to, or, where the bridge polls, one after the other.
//!
//! ```text
//!  bridge  ─ packets ─ poll 01a7 ┐                    ┌─ packets ─ poll 2b3c ─ … ─ invitation ┐
//!  01a7                          └ packets ─ end ─────┘                                       │ slot │ slot │ slot │
//!  2b3c, which is not polled yet                                                              └────── end ─────────┘
//! ```
//!
//! A mobile that is polled sends as much as the poll says, and ends its turn with the number of bytes that wait. While some wait it is
//! polled again, in turn with others; else after pauses that double, and then no more, until it answers an invitation or the bridge has
//! a packet for it. So mobiles need not hear each other, none takes more than its turn, and one that is gone costs three polls.
//!
//! Nothing here reads a clock or a device.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::delimiter::delimit;
use crate::fair_queue::{FairQueue, STATIONS_MAX};
use crate::fragments::fragment;
use crate::frame::{FrameBody, LinkFrame, StationAddress};
use crate::line::SerialLine;
use crate::port::StationRole;

/// How long a turn takes. Longer: others wait longer. Shorter: polls take more of the line.
const TURN_TIME: Duration = Duration::from_millis(300); // a guess: a packet of 1,200 bytes at 40 kb/s
/// How long answers are expected to take before one was measured.
const ANSWER_FIRST: Duration = Duration::from_millis(250); // a guess: a radio with long frames
/// The longest answer that is waited for: a radio that takes longer is not polled well.
const ANSWER_MAX: Duration = Duration::from_secs(3);
/// How much later than usual an answer may come: hosts run tasks late.
const ANSWER_SLACK: Duration = Duration::from_millis(50); // a guess
/// The pause after which a mobile counts as silent in its turn, beside the time of a frame: a modem may hand over whole frames.
const QUIET_SLACK: Duration = Duration::from_millis(60); // a guess: a USB adapter collects for 16 ms
/// The pause before a mobile is polled again that had nothing to send; it doubles each time.
const PAUSE_FIRST: Duration = Duration::from_millis(50); // a guess: what a host needs to answer a packet
/// Turns without content after which a mobile is polled no more: three seconds after its last packet.
const EMPTY_MAX: u8 = 6;
/// Polls without an answer after which a mobile is polled no more.
const MISSED_MAX: u8 = 3;
/// The pause before a mobile is polled again that did not answer; it doubles each time.
const MISSED_PAUSE: Duration = Duration::from_millis(100); // a guess: noise of a moment
/// The slots of an invitation, and how many there are at most after answers collided.
const SLOTS_FIRST: u8 = 4;
const SLOTS_MAX: u8 = 16;
/// Invitations that follow each other at once because noise was heard: answers that collided.
const INVITED_AGAIN_MAX: u8 = 2;
/// What a slot has beside the time of its frame.
const SLOT_SLACK: Duration = Duration::from_millis(30); // a guess: how much later one host is than another
/// The time between invitations while mobiles are polled: at least this, and so many times what an invitation takes.
const INVITE_EVERY: Duration = Duration::from_secs(1); // a guess: how long a newcomer waits
const INVITE_SHARE: u32 = 10;
/// The time between invitations while nobody is polled.
const INVITE_IDLE_EVERY: Duration = Duration::from_millis(500); // a guess: how long a mobile waits that begins to send
/// How long a mobile sends nothing without a turn since it last heard that the bridge polls.
const LED_TIME: Duration = Duration::from_secs(30); // a guess: a bridge that starts again is back by then
/// How long a mobile that said that bytes wait relies on being polled: this many turns, and so many times what it waited last.
const EXPECTED_TURNS: u32 = 4; // a guess: two seconds, or what a bridge needs that began anew
const EXPECTED_WAITS: u32 = 2; // a guess: others have come meanwhile
/// Stations of this host, and mobiles whose packets are numbered.
const OWN_MAX: usize = 256;
/// The largest frame of turns.
const TURN_FRAME_BYTES: usize = 10;

/// A frame that leaves now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OutgoingFrame {
    /// What is written to the device.
    pub(crate) bytes: Vec<u8>,
    /// Whether a packet is complete with it.
    pub(crate) ends_packet: bool,
    /// Whether other stations may send at this time, so that this one listens first.
    pub(crate) listens_first: bool,
}

/// What a station does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LineStep {
    /// The station sends a frame.
    Send(OutgoingFrame),
    /// The station waits until something is heard or queued, or until this time.
    Wait(Option<Instant>),
}

/// What becomes of a frame that was heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameUse {
    /// The frame carries a packet, or a part of one.
    Packet,
    /// The frame was about turns.
    Turn,
    /// The frame carries a packet that the mobile was not allowed to send.
    OutOfTurn,
}

/// The turns of one station of a line.
#[derive(Debug)]
pub(crate) enum LineTurns {
    /// The turns of a bridge that polls.
    Leader(Box<TurnLeader>),
    /// The turns of every other station.
    Station(Box<StationTurns>),
}

impl LineTurns {
    pub(crate) fn new(line: &SerialLine, role: StationRole, now: Instant) -> LineTurns {
        match role == StationRole::Bridge && line.polled {
            true => LineTurns::Leader(Box::new(TurnLeader::new(line, now))),
            false => LineTurns::Station(Box::new(StationTurns::new(line, role))),
        }
    }

    /// What to do next, with these packets waiting.
    pub(crate) fn step(&mut self, now: Instant, queue: &mut FairQueue) -> LineStep {
        match self {
            LineTurns::Leader(leader) => leader.step(now, queue),
            LineTurns::Station(station) => station.step(now, queue),
        }
    }

    /// Records that a packet of this station was queued.
    pub(crate) fn on_queued(&mut self, address: StationAddress) {
        if let LineTurns::Station(station) = self {
            station.own(address);
        }
    }

    /// Records that bytes arrived.
    pub(crate) fn on_heard(&mut self, now: Instant) {
        if let LineTurns::Leader(leader) = self {
            leader.on_heard(now);
        }
    }

    /// Records that bytes arrived which are no frame.
    pub(crate) fn on_noise(&mut self) {
        if let LineTurns::Leader(leader) = self {
            leader.on_noise();
        }
    }

    /// Handles a frame from the other side that has so many bytes. `draw` is a random number.
    pub(crate) fn on_frame(
        &mut self,
        now: Instant,
        frame: &LinkFrame<'_>,
        bytes: usize,
        draw: u8,
    ) -> FrameUse {
        match self {
            LineTurns::Leader(leader) => leader.on_frame(now, frame, bytes),
            LineTurns::Station(station) => station.on_frame(now, frame, draw),
        }
    }

    /// The turns that were given, and those that were not answered.
    pub(crate) fn counts(&self) -> (u64, u64) {
        match self {
            LineTurns::Leader(leader) => (leader.turns, leader.unanswered),
            LineTurns::Station(_) => (0, 0),
        }
    }
}

/// Makes frames of packets.
#[derive(Debug)]
struct PacketFramer {
    line: SerialLine,
    from_bridge: bool,
    /// The number of the last packet of each station.
    numbers: BTreeMap<StationAddress, u8>,
}

impl PacketFramer {
    fn new(line: &SerialLine, role: StationRole) -> PacketFramer {
        PacketFramer {
            line: line.clone(),
            from_bridge: role == StationRole::Bridge,
            numbers: BTreeMap::new(),
        }
    }

    /// The frames of a packet, with their delimiters.
    fn frames(&mut self, address: StationAddress, packet: &[u8]) -> VecDeque<Vec<u8>> {
        if self.numbers.len() >= usize::from(u16::MAX) {
            self.numbers.clear();
        }
        let number = self.numbers.entry(address).or_default();
        *number = number.wrapping_add(1);
        let most = self.line.frame_bytes_max();
        let frames = fragment(packet, self.from_bridge, address, *number, most);
        frames.iter().map(|frame| self.delimited(frame)).collect()
    }

    /// A frame of turns, which leaves without listening.
    fn turn_frame(&self, address: StationAddress, body: FrameBody<'_>) -> OutgoingFrame {
        let frame = LinkFrame {
            from_bridge: self.from_bridge,
            address,
            body,
        };
        let mut bytes = Vec::with_capacity(TURN_FRAME_BYTES);
        frame.encode(&mut bytes);
        OutgoingFrame {
            bytes: self.delimited(&bytes),
            ends_packet: false,
            listens_first: false,
        }
    }

    fn delimited(&self, frame: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(frame.len() + 8);
        delimit(&self.line.framing, frame, &mut bytes);
        bytes
    }
}

/// The bytes that a mobile, or the bridge, sends in a turn: one frame at least.
fn turn_bytes(line: &SerialLine) -> usize {
    let in_time = u64::from(line.bytes_per_second()) * TURN_TIME.as_millis() as u64 / 1_000;
    (in_time as usize)
        .max(line.frame_bytes_max())
        .min(u16::MAX.into())
}

/// A mobile as the bridge polls it.
#[derive(Debug)]
struct PolledStation {
    /// When the mobile is polled next.
    due: Instant,
    /// When its last poll had left, until it is heard, however late.
    polled_at: Option<Instant>,
    /// Whether the mobile was heard since its last poll.
    has_answered: bool,
    /// Turns in a row without content.
    empty: u8,
    /// Polls in a row without an answer.
    missed: u8,
    /// Bytes of frames that it may still send.
    allowance: usize,
    /// Whether the mobile has sent something in this turn.
    has_sent: bool,
}

/// Who may use the line, as the bridge sees it.
#[derive(Clone, Copy, Debug)]
enum LeaderState {
    /// The bridge itself.
    Own,
    /// A mobile that was polled, until it has been silent for long, and at the latest until then.
    Polled {
        station: StationAddress,
        until: Instant,
        latest: Instant,
    },
    /// Mobiles that are not polled.
    Invited {
        began: Instant,
        until: Instant,
        heard_noise: bool,
    },
}

/// The turns of a bridge that polls: it sends, polls, and invites.
#[derive(Debug)]
pub(crate) struct TurnLeader {
    framer: PacketFramer,
    stations: BTreeMap<StationAddress, PolledStation>,
    state: LeaderState,
    /// How long answers took lately.
    answer: Duration,
    /// The slots of the next invitation.
    slots: u8,
    /// Invitations in a row during which noise was heard.
    invited_again: u8,
    invite_at: Instant,
    /// What is left of the bridge's own turn, in bytes.
    own_left: usize,
    /// The frames of the packet that was begun, and for whom they are.
    begun: VecDeque<Vec<u8>>,
    begun_for: StationAddress,
    turns: u64,
    unanswered: u64,
}

impl TurnLeader {
    fn new(line: &SerialLine, now: Instant) -> TurnLeader {
        TurnLeader {
            framer: PacketFramer::new(line, StationRole::Bridge),
            stations: BTreeMap::new(),
            state: LeaderState::Own,
            answer: ANSWER_FIRST,
            slots: SLOTS_FIRST,
            invited_again: 0,
            invite_at: now,
            own_left: turn_bytes(line),
            begun: VecDeque::new(),
            begun_for: StationAddress(0),
            turns: 0,
            unanswered: 0,
        }
    }

    fn line(&self) -> &SerialLine {
        &self.framer.line
    }

    /// How long to wait for an answer of so many bytes.
    fn answer_wait(&self, bytes: usize) -> Duration {
        self.answer * 2 + ANSWER_SLACK + self.line().time_of(bytes)
    }

    fn slot(&self) -> Duration {
        let body = FrameBody::TurnEnd { waiting: u16::MAX };
        let frame = self.framer.turn_frame(StationAddress(u16::MAX), body);
        self.line().time_of(frame.bytes.len()) + SLOT_SLACK
    }

    fn step(&mut self, now: Instant, queue: &mut FairQueue) -> LineStep {
        match self.state {
            LeaderState::Own => {}
            LeaderState::Polled { until, .. } | LeaderState::Invited { until, .. }
                if now < until =>
            {
                return LineStep::Wait(Some(until));
            }
            LeaderState::Polled { station, .. } => self.on_turn_over(now, station),
            LeaderState::Invited {
                began, heard_noise, ..
            } => self.on_invitation_over(now, now - began, heard_noise),
        }
        if self.own_left > 0
            && let Some(frame) = self.own_frame(now, queue)
        {
            return LineStep::Send(frame);
        }
        if now >= self.invite_at {
            return LineStep::Send(self.invite(now));
        }
        let next = self.stations.iter().min_by_key(|(_, s)| s.due);
        let next = next.map(|(address, station)| (*address, station.due));
        if let Some((station, _)) = next.filter(|(_, due)| *due <= now) {
            return LineStep::Send(self.poll(now, station));
        }
        self.own_left = turn_bytes(self.line());
        match self.own_frame(now, queue) {
            Some(frame) => LineStep::Send(frame),
            None => {
                let due = next.map_or(self.invite_at, |(_, due)| due);
                LineStep::Wait(Some(due.min(self.invite_at)))
            }
        }
    }

    /// The next frame for a mobile.
    fn own_frame(&mut self, now: Instant, queue: &mut FairQueue) -> Option<OutgoingFrame> {
        if self.begun.is_empty() {
            let (address, packet) = queue.pop()?;
            self.begun = self.framer.frames(address, &packet);
            self.begun_for = address;
        }
        let bytes = self.begun.pop_front()?;
        self.own_left = self.own_left.saturating_sub(bytes.len());
        let ends_packet = self.begun.is_empty();
        if ends_packet {
            // It will have something to say about that.
            let address = self.begun_for;
            if let Some(station) = self.station(now, address) {
                station.due = station.due.min(now);
                station.empty = 0;
            }
        }
        Some(OutgoingFrame {
            bytes,
            ends_packet,
            listens_first: false,
        })
    }

    /// The mobile of this address, which is polled from now on if it was not; none if there are too many.
    fn station(&mut self, now: Instant, address: StationAddress) -> Option<&mut PolledStation> {
        if !self.stations.contains_key(&address) && self.stations.len() >= STATIONS_MAX {
            return None;
        }
        let allowance = self.allowance();
        Some(self.stations.entry(address).or_insert(PolledStation {
            due: now,
            polled_at: None,
            has_answered: false,
            empty: 0,
            missed: 0,
            // One that does not know that the bridge polls has its first packets carried.
            allowance,
            has_sent: false,
        }))
    }

    /// The bytes of frames that a mobile may send in a turn: its last one may begin when hardly anything is left.
    fn allowance(&self) -> usize {
        turn_bytes(self.line()) + self.line().frame_bytes_max()
    }

    fn poll(&mut self, now: Instant, address: StationAddress) -> OutgoingFrame {
        let bytes = turn_bytes(self.line());
        let body = FrameBody::Poll {
            bytes: u16::try_from(bytes).unwrap_or(u16::MAX),
        };
        let frame = self.framer.turn_frame(address, body);
        let sent_at = now + self.line().time_of(frame.bytes.len());
        let until = sent_at + self.answer_wait(self.line().frame_bytes_max());
        // Byte stuffing may double what a mobile sends.
        let most = self.line().time_of(2 * self.allowance()) + QUIET_SLACK;
        let allowance = self.allowance();
        if let Some(station) = self.stations.get_mut(&address) {
            station.polled_at = Some(sent_at);
            (station.has_answered, station.has_sent) = (false, false);
            station.allowance = allowance;
        }
        self.state = LeaderState::Polled {
            station: address,
            until,
            latest: until + most,
        };
        self.own_left = bytes;
        self.turns += 1;
        frame
    }

    fn invite(&mut self, now: Instant) -> OutgoingFrame {
        let slot = self.slot();
        let body = FrameBody::Invitation {
            slots: self.slots,
            slot_ms: u16::try_from(slot.as_millis()).unwrap_or(u16::MAX),
        };
        let frame = self.framer.turn_frame(StationAddress(0), body);
        let takes = self.line().time_of(frame.bytes.len())
            + slot * u32::from(self.slots)
            + self.answer_wait(0);
        self.state = LeaderState::Invited {
            began: now,
            until: now + takes,
            heard_noise: false,
        };
        self.own_left = turn_bytes(self.line());
        frame
    }

    fn on_heard(&mut self, now: Instant) {
        let quiet = self.line().time_of(self.line().frame_bytes_max()) + QUIET_SLACK;
        if let LeaderState::Polled { until, latest, .. } = &mut self.state {
            *until = (*until).max(now + quiet).min(*latest);
        }
    }

    fn on_noise(&mut self) {
        if let LeaderState::Invited { heard_noise, .. } = &mut self.state {
            *heard_noise = true;
        }
    }

    fn on_frame(&mut self, now: Instant, frame: &LinkFrame<'_>, bytes: usize) -> FrameUse {
        let address = frame.address;
        let asked_at = self.stations.get(&address).and_then(|s| s.polled_at);
        if let Some(asked_at) = asked_at {
            // Longer ones count at once, shorter ones by and by.
            let took = now.saturating_duration_since(asked_at + self.line().time_of(bytes));
            let took = took.min(ANSWER_MAX);
            self.answer = took.max((self.answer * 7 + took) / 8);
        }
        let Some(station) = self.station(now, address) else {
            return FrameUse::OutOfTurn;
        };
        station.polled_at = None;
        station.has_answered = true;
        station.missed = 0;
        match frame.body {
            FrameBody::Whole(_) | FrameBody::Fragment(_) => {
                let Some(left) = station.allowance.checked_sub(bytes) else {
                    return FrameUse::OutOfTurn;
                };
                station.allowance = left;
                station.has_sent = true;
                FrameUse::Packet
            }
            FrameBody::TurnEnd { waiting } => {
                self.on_turn_end(now, address, waiting);
                FrameUse::Turn
            }
            FrameBody::Poll { .. } | FrameBody::Invitation { .. } => FrameUse::Turn,
        }
    }

    fn on_turn_end(&mut self, now: Instant, address: StationAddress, waiting: u16) {
        // What is left of the slots begins no later than the first answer was heard.
        let rest = self.slot() * u32::from(self.slots.saturating_sub(1)) + ANSWER_SLACK;
        if let LeaderState::Invited { until, .. } = &mut self.state {
            *until = (*until).min(now + rest);
        }
        if matches!(self.state, LeaderState::Polled { station, .. } if station == address) {
            self.state = LeaderState::Own;
        }
        self.set_due(now, address, waiting > 0);
    }

    /// Decides when a mobile is polled next that has ended its turn.
    fn set_due(&mut self, now: Instant, address: StationAddress, has_more: bool) {
        let Some(station) = self.stations.get_mut(&address) else {
            return;
        };
        if has_more || std::mem::take(&mut station.has_sent) {
            station.empty = 0;
        }
        if has_more {
            station.due = now;
            return;
        }
        if station.empty >= EMPTY_MAX {
            self.stations.remove(&address);
            return;
        }
        station.due = now + PAUSE_FIRST * (1 << station.empty);
        station.empty += 1;
    }

    /// Handles the end of a turn that its mobile did not end.
    fn on_turn_over(&mut self, now: Instant, address: StationAddress) {
        self.state = LeaderState::Own;
        let Some(station) = self.stations.get_mut(&address) else {
            return;
        };
        if station.has_answered {
            // The end of its turn was lost: there may be more.
            self.set_due(now, address, true);
            return;
        }
        self.unanswered += 1;
        station.missed += 1;
        if station.missed >= MISSED_MAX {
            self.stations.remove(&address);
        } else {
            station.due = now + MISSED_PAUSE * (1 << station.missed);
        }
    }

    fn on_invitation_over(&mut self, now: Instant, took: Duration, heard_noise: bool) {
        self.state = LeaderState::Own;
        if heard_noise && self.invited_again < INVITED_AGAIN_MAX {
            self.invited_again += 1;
            self.slots = (self.slots * 2).min(SLOTS_MAX);
            self.invite_at = now;
            return;
        }
        self.invited_again = 0;
        self.slots = SLOTS_FIRST;
        let every = match self.stations.is_empty() {
            true => INVITE_IDLE_EVERY,
            false => INVITE_EVERY.max(took * INVITE_SHARE),
        };
        self.invite_at = now + every;
    }
}

/// A station of this host: what of its packets was begun, and what the bridge knows.
#[derive(Debug, Default)]
struct OwnStation {
    begun: VecDeque<Vec<u8>>,
    polled_at: Option<Instant>,
    /// Whether the bridge was told that bytes wait, so that it will poll.
    has_told: bool,
    /// How long the station waited for its last poll after it had told so.
    waited: Duration,
}

/// The turn of a station.
#[derive(Debug)]
struct OwnTurn {
    address: StationAddress,
    /// Bytes that may still be sent.
    left: usize,
    /// Whether nothing was sent yet: one frame may be, whatever its size.
    is_first: bool,
}

/// The turns of a station that does not poll: it sends when it wants to, until it hears that a bridge polls.
#[derive(Debug)]
pub(crate) struct StationTurns {
    framer: PacketFramer,
    own: BTreeMap<StationAddress, OwnStation>,
    /// When a bridge that polls was last heard.
    led_at: Option<Instant>,
    turn: Option<OwnTurn>,
    /// When to answer an invitation.
    answer_at: Option<Instant>,
}

impl StationTurns {
    fn new(line: &SerialLine, role: StationRole) -> StationTurns {
        StationTurns {
            framer: PacketFramer::new(line, role),
            own: BTreeMap::new(),
            led_at: None,
            turn: None,
            answer_at: None,
        }
    }

    fn own(&mut self, address: StationAddress) -> &mut OwnStation {
        if self.own.len() >= OWN_MAX && !self.own.contains_key(&address) {
            let idle = self.own.iter().find(|(_, own)| own.begun.is_empty());
            if let Some(idle) = idle.map(|(address, _)| *address) {
                self.own.remove(&idle);
            }
        }
        self.own.entry(address).or_default()
    }

    /// Until when this station waits for its turn, if it does: `None` within stands for ever.
    fn led_until(&self, now: Instant) -> Option<Option<Instant>> {
        if self.framer.line.polled && !self.framer.from_bridge {
            return Some(None);
        }
        let until = self.led_at? + LED_TIME;
        (now < until).then_some(Some(until))
    }

    fn step(&mut self, now: Instant, queue: &mut FairQueue) -> LineStep {
        if let Some(step) = self.take_turn(queue) {
            return step;
        }
        if let Some(at) = self.answer_at {
            if now < at {
                return LineStep::Wait(Some(at));
            }
            self.answer_at = None;
            if let Some(address) = self.unasked(now, queue) {
                // If the answer is lost, the next invitation is answered, too.
                self.own(address).polled_at = None;
                return LineStep::Send(self.end_turn(address, queue));
            }
        }
        if let Some(until) = self.led_until(now) {
            return LineStep::Wait(until);
        }
        let begun = self.own.iter().find(|(_, own)| !own.begun.is_empty());
        let address = match begun.map(|(address, _)| *address) {
            Some(address) => address,
            None => {
                let Some((address, packet)) = queue.pop() else {
                    return LineStep::Wait(None);
                };
                let frames = self.framer.frames(address, &packet);
                self.own(address).begun = frames;
                address
            }
        };
        let listens_first = self.framer.line.half_duplex;
        let begun = &mut self.own(address).begun;
        let Some(bytes) = begun.pop_front() else {
            return LineStep::Wait(None);
        };
        LineStep::Send(OutgoingFrame {
            bytes,
            ends_packet: begun.is_empty(),
            listens_first,
        })
    }

    /// The next frame of this station's turn, if it has one.
    fn take_turn(&mut self, queue: &mut FairQueue) -> Option<LineStep> {
        let turn = self.turn.as_mut()?;
        let address = turn.address;
        let own = self.own.entry(address).or_default();
        if own.begun.is_empty()
            && let Some(packet) = queue.pop_of(address)
        {
            own.begun = self.framer.frames(address, &packet);
        }
        let next = own.begun.front();
        if next.is_some_and(|frame| turn.is_first || frame.len() <= turn.left)
            && let Some(bytes) = own.begun.pop_front()
        {
            turn.left = turn.left.saturating_sub(bytes.len());
            turn.is_first = false;
            return Some(LineStep::Send(OutgoingFrame {
                bytes,
                ends_packet: own.begun.is_empty(),
                listens_first: false,
            }));
        }
        self.turn = None;
        Some(LineStep::Send(self.end_turn(address, queue)))
    }

    /// The frame that ends a station's turn, or asks for one.
    fn end_turn(&mut self, address: StationAddress, queue: &FairQueue) -> OutgoingFrame {
        let own = self.own.entry(address).or_default();
        let waiting = waiting_bytes(address, own, queue);
        own.has_told = waiting > 0;
        let body = FrameBody::TurnEnd {
            waiting: u16::try_from(waiting).unwrap_or(u16::MAX),
        };
        self.framer.turn_frame(address, body)
    }

    /// A station with something to send that the bridge does not know of.
    fn unasked(&self, now: Instant, queue: &FairQueue) -> Option<StationAddress> {
        let turn = self.framer.line.time_of(turn_bytes(&self.framer.line));
        let expected = (turn + ANSWER_FIRST) * EXPECTED_TURNS;
        let expects = |own: &OwnStation| {
            let expected = expected.max(own.waited * EXPECTED_WAITS);
            let polled = own.polled_at.is_some_and(|at| now < at + expected);
            own.has_told && polled
        };
        for (address, own) in &self.own {
            if waiting_bytes(*address, own, queue) > 0 && !expects(own) {
                return Some(*address);
            }
        }
        None
    }

    fn on_frame(&mut self, now: Instant, frame: &LinkFrame<'_>, draw: u8) -> FrameUse {
        match frame.body {
            FrameBody::Whole(_) | FrameBody::Fragment(_) => return FrameUse::Packet,
            FrameBody::TurnEnd { .. } => {}
            FrameBody::Poll { bytes } => {
                self.led_at = Some(now);
                if let Some(own) = self.own.get_mut(&frame.address) {
                    let before = own.polled_at.replace(now).filter(|_| own.has_told);
                    own.waited = before.map_or(Duration::ZERO, |before| now - before);
                    self.turn = Some(OwnTurn {
                        address: frame.address,
                        left: bytes.into(),
                        is_first: true,
                    });
                }
            }
            FrameBody::Invitation { slots, slot_ms } => {
                self.led_at = Some(now);
                let slot = u32::from(draw) % u32::from(slots.max(1));
                self.answer_at = Some(now + Duration::from_millis(slot_ms.into()) * slot);
            }
        }
        FrameUse::Turn
    }
}

/// Bytes of a station that wait, begun packets included.
fn waiting_bytes(address: StationAddress, own: &OwnStation, queue: &FairQueue) -> usize {
    let begun: usize = own.begun.iter().map(Vec::len).sum();
    begun + queue.bytes_of(address)
}

#[cfg(test)]
mod tests;
