//! BBR, version 3 (draft-ietf-ccwg-bbr-04): sends at the rate the path delivers instead of until it
//! loses, so random loss costs no rate and a deep queue stays empty.
//!
//! ```text
//!  Startup ──pipe full──▶ Drain ──queue gone──▶ ProbeBw: Down ─▶ Cruise ─▶ Refill ─▶ Up ─┐
//!                                                  ▲  └──────────────◀──────────────────┘
//!                                                  └── ProbeRtt, every 5 s without a shorter round trip
//! ```
//!
//! Integers only: gains are hundredths, rates bytes per second.

use d2tp_time::{Span, Time};

use super::{AckEvent, Controller, SiblingPaths, WINDOW_INITIAL_DATAGRAMS};
use crate::delivery_rate::{PacketFate, RateSample};

/// Hundredths: 4·ln 2, which doubles the rate each round.
const STARTUP_PACING_GAIN: u64 = 277;
const DRAIN_PACING_GAIN: u64 = 50;
const STARTUP_WINDOW_GAIN: u64 = 200;
const WINDOW_GAIN: u64 = 200;
const UP_WINDOW_GAIN: u64 = 225;
const PROBE_RTT_WINDOW_GAIN: u64 = 50;
const DOWN_PACING_GAIN: u64 = 90;
const UP_PACING_GAIN: u64 = 125;
/// The pacing rate stays this many percent below the estimate, so that queues drain.
const PACING_MARGIN: u64 = 1;
/// The share of lost packets in a round above which the loss is excessive.
const LOSS_THRESHOLD: (u64, u64) = (2, 100);
/// The factor by which a bound is reduced after excessive loss.
const BETA: (u64, u64) = (70, 100);
/// The share of the inflight bound that is left free for other flows while cruising.
const HEADROOM: (u64, u64) = (15, 100);
/// The smallest window in datagrams, so that ACKs keep coming.
const PIPE_MIN_DATAGRAMS: u64 = 4;
/// Rounds without a quarter's growth of the rate after which Startup ends.
const FULL_RATE_ROUNDS: u8 = 3;
/// Loss events in one round after which Startup ends, if the round's loss was excessive.
const STARTUP_LOSSES: u32 = 6;
const RTT_MIN_KEPT: Span = Span::from_secs(10);
const PROBE_RTT_EVERY: Span = Span::from_secs(5);
const PROBE_RTT_FOR: Span = Span::from_millis(200);
/// Rounds over which the aggregation of ACKs is measured.
const EXTRA_ACKED_ROUNDS: u64 = 10;
/// The round trip that is assumed to pace the initial window.
const RTT_ASSUMED: Span = Span::from_millis(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BbrState {
    Startup,
    Drain,
    Down,
    Cruise,
    Refill,
    Up,
    ProbeRtt,
}

/// The phases of a probe for a higher rate, as ACKs show them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AckPhase {
    Init,
    Refilling,
    Starting,
    Feedback,
    Stopping,
}

/// Largest values of the current and the last probing cycle.
#[derive(Clone, Copy, Debug, Default)]
struct MaxFilter {
    now: u64,
    before: u64,
}

impl MaxFilter {
    fn best(self) -> u64 {
        self.now.max(self.before)
    }
    fn note(&mut self, value: u64) {
        self.now = self.now.max(value);
    }
    fn advance_cycle(&mut self) {
        // A cycle without measurements does not change the maximum.
        if self.now > 0 {
            self.before = std::mem::take(&mut self.now);
        }
    }
}

#[derive(Debug)]
pub(super) struct Bbr {
    datagram: u64,
    state: BbrState,
    window: u64,
    rate: u64,

    max_rate: MaxFilter,
    rtt_min: Option<Span>,
    rtt_min_at: Time,
    probe_rtt_min: Option<Span>,
    probe_rtt_min_at: Time,
    probe_rtt_done_at: Option<Time>,
    probe_rtt_round_done: bool,
    window_before: u64,

    // Limits learnt from losses: the long-term one, and one until the next probe.
    inflight_long: Option<u64>,
    /// The bound before losses lowered it, to be restored if those losses were spurious.
    undo: Option<Option<u64>>,
    inflight_short: Option<u64>,
    rate_short: Option<u64>,
    rate_latest: u64,
    inflight_latest: u64,

    rounds: u64,
    round_end: u64,
    round_start: bool,
    loss_round_end: u64,
    loss_round_start: bool,
    /// Bytes lost since the round began, and the bytes delivered until then.
    lost_in_round: u64,
    round_from: u64,
    losses_in_round: u32,

    full_rate: u64,
    full_rate_rounds: u8,
    full_rate_now: bool,
    full_rate_reached: bool,

    ack_phase: AckPhase,
    probe_samples: bool,
    cycle_at: Time,
    rounds_since_probe: u64,
    probe_wait: Span,
    up_rounds: u32,
    up_acked: u64,
    up_per_datagram: u64,

    extra_start: Option<Time>,
    extra_delivered: u64,
    extra_max: [(u64, u64); 2],

    delivered: u64,
    in_flight: u64,
    window_limited: bool,
}

impl Bbr {
    pub(super) fn new(datagram: u64) -> Self {
        let window = WINDOW_INITIAL_DATAGRAMS * datagram;
        Bbr {
            datagram,
            state: BbrState::Startup,
            window,
            rate: per_second(window, RTT_ASSUMED) * STARTUP_PACING_GAIN / 100,
            max_rate: MaxFilter::default(),
            rtt_min: None,
            rtt_min_at: Time::ZERO,
            probe_rtt_min: None,
            probe_rtt_min_at: Time::ZERO,
            probe_rtt_done_at: None,
            probe_rtt_round_done: false,
            window_before: 0,
            inflight_long: None,
            undo: None,
            inflight_short: None,
            rate_short: None,
            rate_latest: 0,
            inflight_latest: 0,
            rounds: 0,
            round_end: 0,
            round_start: false,
            loss_round_end: 0,
            loss_round_start: false,
            lost_in_round: 0,
            round_from: 0,
            losses_in_round: 0,
            full_rate: 0,
            full_rate_rounds: 0,
            full_rate_now: false,
            full_rate_reached: false,
            ack_phase: AckPhase::Init,
            probe_samples: false,
            cycle_at: Time::ZERO,
            rounds_since_probe: 0,
            probe_wait: Span::from_secs(2),
            up_rounds: 0,
            up_acked: 0,
            up_per_datagram: u64::MAX,
            extra_start: None,
            extra_delivered: 0,
            extra_max: [(0, 0); 2],
            delivered: 0,
            in_flight: 0,
            window_limited: false,
        }
    }

    // --- The path's capacity.

    /// The rate to send at: the largest one measured, within the bound that losses set since the last
    /// probe.
    fn path_rate(&self) -> u64 {
        let best = self.max_rate.best();
        self.rate_short.map_or(best, |short| best.min(short))
    }

    /// Bytes in flight at `gain` hundredths of what fills the pipe, at this rate.
    fn pipe(&self, rate: u64, gain: u64) -> u64 {
        let Some(rtt) = self.rtt_min else {
            return WINDOW_INITIAL_DATAGRAMS * self.datagram;
        };
        let bytes = u128::from(rate) * u128::from(rtt.as_nanos()) * u128::from(gain);
        u64::try_from(bytes / 100_000_000_000).unwrap_or(u64::MAX)
    }

    /// The window for a rate and a gain, with allowance for batches at both ends.
    fn quantized(&self, rate: u64, gain: u64) -> u64 {
        let batch = (rate / 1_000).clamp(2 * self.datagram, 64 * 1024);
        let mut bytes = self.pipe(rate, gain).max(3 * batch);
        bytes = bytes.max(self.pipe_min());
        if self.state == BbrState::Up {
            bytes += 2 * self.datagram;
        }
        bytes
    }

    fn pipe_min(&self) -> u64 {
        PIPE_MIN_DATAGRAMS * self.datagram
    }

    fn is_probing_rate(&self) -> bool {
        matches!(
            self.state,
            BbrState::Startup | BbrState::Refill | BbrState::Up
        )
    }

    fn is_in_cycle(&self) -> bool {
        matches!(
            self.state,
            BbrState::Down | BbrState::Cruise | BbrState::Refill | BbrState::Up
        )
    }

    fn with_headroom(&self) -> Option<u64> {
        let long = self.inflight_long?;
        let headroom = share(long, HEADROOM).max(self.datagram);
        Some(long.saturating_sub(headroom).max(self.pipe_min()))
    }

    // --- Rounds and loss.

    fn lost_too_much(&self, packet: &PacketFate) -> bool {
        is_too_much(packet.lost, packet.in_flight, self.datagram)
    }

    fn on_round(&mut self, sample: &RateSample) {
        self.delivered = sample.delivered_total;
        self.round_start = sample.prior_delivered >= self.round_end;
        if self.round_start {
            self.round_end = self.delivered;
            self.rounds += 1;
            self.rounds_since_probe += 1;
        }
    }

    fn on_signals(&mut self, sample: &RateSample) {
        self.loss_round_start = false;
        self.rate_latest = self.rate_latest.max(sample.rate.unwrap_or(0));
        self.inflight_latest = self.inflight_latest.max(sample.delivered);
        if sample.prior_delivered >= self.loss_round_end {
            self.loss_round_end = self.delivered;
            self.loss_round_start = true;
        }
        if let Some(rate) = sample.rate
            && (rate >= self.max_rate.best() || !sample.packet.app_limited)
        {
            self.max_rate.note(rate);
        }
        self.lost_in_round += sample.newly_lost;
        if !self.loss_round_start {
            return;
        }
        // The draft lowers its limits in every round with a loss. Random loss below the draft's own
        // threshold then reduces the rate slowly, so this code applies the threshold to rounds as
        // well.
        let delivered = self.delivered - self.round_from;
        let too_much = is_too_much(self.lost_in_round, delivered, self.datagram);
        if too_much && !self.is_probing_rate() {
            let rate = self.rate_short.unwrap_or(self.max_rate.best());
            let inflight = self.inflight_short.unwrap_or(self.window);
            self.rate_short = Some(self.rate_latest.max(share(rate, BETA)));
            self.inflight_short = Some(self.inflight_latest.max(share(inflight, BETA)));
        }
        self.lost_in_round = 0;
        self.round_from = self.delivered;
    }

    /// Replaces the signals of the previous round by those of this one.
    fn advance_signals(&mut self, sample: &RateSample) {
        if self.loss_round_start {
            self.rate_latest = sample.rate.unwrap_or(0);
            self.inflight_latest = sample.delivered;
            self.losses_in_round = 0;
        }
    }

    fn on_aggregation(&mut self, now: Time, bytes: u64) {
        let expected = |since: Time| {
            let span = now.since(since).as_nanos();
            let bytes = u128::from(self.path_rate()) * u128::from(span) / 1_000_000_000;
            u64::try_from(bytes).unwrap_or(u64::MAX)
        };
        let mut due = self.extra_start.map_or(0, expected);
        if self.extra_start.is_none() || self.extra_delivered <= due {
            (self.extra_start, self.extra_delivered, due) = (Some(now), 0, 0);
        }
        self.extra_delivered += bytes;
        let extra = self.extra_delivered.saturating_sub(due).min(self.window);
        let period = self.rounds / EXTRA_ACKED_ROUNDS;
        if self.extra_max[0].0 != period {
            self.extra_max[1] = self.extra_max[0];
            self.extra_max[0] = (period, 0);
        }
        self.extra_max[0].1 = self.extra_max[0].1.max(extra);
    }

    fn extra_acked(&self) -> u64 {
        self.extra_max[0].1.max(self.extra_max[1].1)
    }

    // --- Startup and Drain.

    fn check_full_rate(&mut self, sample: &RateSample) {
        if self.full_rate_now || sample.packet.app_limited || !self.round_start {
            return;
        }
        let rate = sample.rate.unwrap_or(0).max(self.max_rate.best());
        if rate >= self.full_rate + self.full_rate / 4 {
            self.full_rate = rate;
            self.full_rate_rounds = 0;
            return;
        }
        self.full_rate_rounds += 1;
        if self.full_rate_rounds >= FULL_RATE_ROUNDS {
            self.full_rate_now = true;
            self.full_rate_reached = true;
        }
    }

    fn forget_full_rate(&mut self) {
        self.full_rate = 0;
        self.full_rate_rounds = 0;
        self.full_rate_now = false;
    }

    fn check_startup(&mut self, now: Time, sample: &RateSample) {
        if self.state != BbrState::Startup {
            return;
        }
        if self.loss_round_start
            && self.losses_in_round >= STARTUP_LOSSES
            && self.lost_too_much(&sample.packet)
        {
            self.full_rate_reached = true;
            self.inflight_long = Some(
                self.pipe(self.max_rate.best(), 100)
                    .max(self.inflight_latest),
            );
        }
        if self.full_rate_reached {
            self.state = BbrState::Drain;
            self.cycle_at = now;
        }
    }

    // --- The cycle that probes for more bandwidth.

    fn start_down(&mut self, now: Time) {
        self.forget_signals();
        self.up_per_datagram = u64::MAX;
        // Flows that share a bottleneck must not probe together: 2 to 3 s, and not more often than
        // a loss-based flow would. The value is derived from the path's history, which no two flows
        // share.
        let draw = self
            .delivered
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23)
            ^ now.as_nanos();
        self.probe_wait = Span::from_millis(2_000 + draw % 1_000);
        self.rounds_since_probe = draw % 2;
        self.cycle_at = now;
        self.ack_phase = AckPhase::Stopping;
        self.round_end = self.delivered;
        self.state = BbrState::Down;
    }

    fn start_cruise(&mut self) {
        self.state = BbrState::Cruise;
    }

    fn start_refill(&mut self) {
        self.forget_short();
        self.up_rounds = 0;
        self.up_acked = 0;
        self.ack_phase = AckPhase::Refilling;
        self.round_end = self.delivered;
        self.state = BbrState::Refill;
    }

    fn start_up(&mut self, now: Time) {
        self.ack_phase = AckPhase::Starting;
        self.round_end = self.delivered;
        self.forget_full_rate();
        self.full_rate = self.max_rate.best();
        self.undo = None;
        self.state = BbrState::Up;
        self.cycle_at = now;
        self.raise_slope();
    }

    fn raise_slope(&mut self) {
        let growth = self.datagram << self.up_rounds.min(30);
        self.up_rounds = (self.up_rounds + 1).min(30);
        self.up_per_datagram = (self.window / growth.max(1)).max(1) * self.datagram;
    }

    fn forget_short(&mut self) {
        self.rate_short = None;
        self.inflight_short = None;
    }

    fn forget_signals(&mut self) {
        self.lost_in_round = 0;
        self.losses_in_round = 0;
        self.rate_latest = 0;
        self.inflight_latest = 0;
    }

    fn is_time_to_probe(&self, now: Time) -> bool {
        // As often as a NewReno flow would have recovered its window (§5.3.3.5.2).
        let reno_rounds =
            (self.pipe(self.path_rate(), 100).min(self.window) / self.datagram).min(63);
        now.since(self.cycle_at) > self.probe_wait || self.rounds_since_probe >= reno_rounds
    }

    fn adapt_long(&mut self, bytes: u64, sample: &RateSample) {
        if self.ack_phase == AckPhase::Starting && self.round_start {
            self.ack_phase = AckPhase::Feedback;
        }
        if self.ack_phase == AckPhase::Stopping && self.round_start {
            self.probe_samples = false;
            self.ack_phase = AckPhase::Init;
            if self.is_in_cycle() && !sample.packet.app_limited {
                self.max_rate.advance_cycle();
            }
        }
        if self.lost_too_much(&sample.packet) {
            if self.probe_samples {
                self.on_inflight_too_high(sample.packet.in_flight, sample.packet.app_limited);
            }
            return;
        }
        let Some(long) = self.inflight_long else {
            return;
        };
        if sample.packet.in_flight > long {
            self.inflight_long = Some(sample.packet.in_flight);
        }
        if self.state == BbrState::Up {
            self.grow_long(bytes);
        }
    }

    fn grow_long(&mut self, bytes: u64) {
        let Some(long) = self.inflight_long else {
            return;
        };
        if !self.window_limited || self.window < long {
            return;
        }
        self.up_acked += bytes;
        if self.up_acked >= self.up_per_datagram {
            let steps = self.up_acked / self.up_per_datagram;
            self.up_acked -= steps * self.up_per_datagram;
            self.inflight_long = Some(long + steps * self.datagram);
        }
        if self.round_start {
            self.raise_slope();
        }
    }

    fn on_inflight_too_high(&mut self, in_flight: u64, app_limited: bool) {
        self.probe_samples = false;
        if !app_limited {
            let target = self.pipe(self.path_rate(), 100).min(self.window);
            self.inflight_long = Some(in_flight.max(share(target, BETA)));
        }
    }

    fn cycle(&mut self, now: Time, bytes: u64, sample: &RateSample) {
        if !self.full_rate_reached {
            return;
        }
        self.adapt_long(bytes, sample);
        let pipe = self.quantized(self.max_rate.best(), 100);
        match self.state {
            BbrState::Drain if self.in_flight <= pipe => self.start_down(now),
            BbrState::Down => {
                if self.is_time_to_probe(now) {
                    self.start_refill();
                    return;
                }
                let room = self
                    .with_headroom()
                    .is_none_or(|bound| self.in_flight <= bound);
                if room && self.in_flight <= pipe {
                    self.start_cruise();
                }
            }
            BbrState::Cruise if self.is_time_to_probe(now) => self.start_refill(),
            BbrState::Refill if self.round_start => {
                self.probe_samples = true;
                self.start_up(now);
            }
            BbrState::Up => {
                if self.window_limited && self.inflight_long.is_some_and(|l| self.window >= l) {
                    // The rate is limited by the bound, so it does not show what the path can
                    // carry.
                    self.forget_full_rate();
                    self.full_rate = sample.rate.unwrap_or(0);
                } else {
                    self.check_full_rate(sample);
                }
                if self.full_rate_now || !self.probe_samples {
                    self.start_down(now);
                }
            }
            _ => {}
        }
    }

    // --- The shortest round trip.

    fn on_rtt(&mut self, now: Time, rtt: Span, fresh: bool) {
        let expired = now.since(self.probe_rtt_min_at) > PROBE_RTT_EVERY;
        if fresh && (expired || self.probe_rtt_min.is_none_or(|min| rtt < min)) {
            self.probe_rtt_min = Some(rtt);
            self.probe_rtt_min_at = now;
        }
        let aged = now.since(self.rtt_min_at) > RTT_MIN_KEPT;
        if let Some(probed) = self.probe_rtt_min
            && (aged || self.rtt_min.is_none_or(|min| probed < min))
        {
            self.rtt_min = Some(probed);
            self.rtt_min_at = self.probe_rtt_min_at;
        }
        if expired && self.state != BbrState::ProbeRtt && self.full_rate_reached {
            self.state = BbrState::ProbeRtt;
            self.window_before = self.window;
            self.probe_rtt_done_at = None;
            self.ack_phase = AckPhase::Stopping;
            self.round_end = self.delivered;
        }
        if self.state == BbrState::ProbeRtt {
            self.probe_rtt(now);
        }
    }

    fn probe_rtt_window(&self) -> u64 {
        self.pipe(self.path_rate(), PROBE_RTT_WINDOW_GAIN)
            .max(self.pipe_min())
    }

    fn probe_rtt(&mut self, now: Time) {
        match self.probe_rtt_done_at {
            None if self.in_flight <= self.probe_rtt_window() => {
                self.probe_rtt_done_at = Some(now + PROBE_RTT_FOR);
                self.probe_rtt_round_done = false;
                self.round_end = self.delivered;
            }
            None => {}
            Some(done_at) => {
                self.probe_rtt_round_done |= self.round_start;
                if self.probe_rtt_round_done && now >= done_at {
                    self.probe_rtt_min_at = now;
                    self.window = self.window.max(self.window_before);
                    self.forget_short();
                    self.start_down(now);
                    self.start_cruise();
                }
            }
        }
    }

    // --- Pacing rate and window.

    fn gains(&self) -> (u64, u64) {
        match self.state {
            BbrState::Startup => (STARTUP_PACING_GAIN, STARTUP_WINDOW_GAIN),
            BbrState::Drain => (DRAIN_PACING_GAIN, STARTUP_WINDOW_GAIN),
            BbrState::Down => (DOWN_PACING_GAIN, WINDOW_GAIN),
            BbrState::Cruise | BbrState::Refill => (100, WINDOW_GAIN),
            BbrState::Up => (UP_PACING_GAIN, UP_WINDOW_GAIN),
            BbrState::ProbeRtt => (100, PROBE_RTT_WINDOW_GAIN),
        }
    }

    fn set_rate(&mut self) {
        let (gain, _) = self.gains();
        let base = self.path_rate();
        if base == 0 {
            return;
        }
        let rate = (u128::from(base) * u128::from(gain * (100 - PACING_MARGIN)) / 10_000) as u64;
        if self.full_rate_reached || rate > self.rate {
            self.rate = rate.max(1);
        }
    }

    fn set_window(&mut self, bytes: u64) {
        let (_, gain) = self.gains();
        let most = self.quantized(self.path_rate(), gain) + self.extra_acked();
        if self.full_rate_reached {
            self.window = (self.window + bytes).min(most);
        } else if self.window < most || self.delivered < WINDOW_INITIAL_DATAGRAMS * self.datagram {
            self.window += bytes;
        }
        self.window = self.window.max(self.pipe_min());
        if self.state == BbrState::ProbeRtt {
            self.window = self.window.min(self.probe_rtt_window());
        }
        let bound = match self.state {
            BbrState::Down | BbrState::Refill | BbrState::Up => self.inflight_long,
            BbrState::ProbeRtt | BbrState::Cruise => self.with_headroom(),
            BbrState::Startup | BbrState::Drain => None,
        };
        let bound = bound
            .unwrap_or(u64::MAX)
            .min(self.inflight_short.unwrap_or(u64::MAX));
        self.window = self.window.min(bound.max(self.pipe_min()));
    }
}

/// Whether `lost` bytes out of `of` further bytes exceed the threshold by more than chance
/// explains. The draft compares with the threshold itself; then two losses in a hundred packets,
/// where one is expected, would already indicate congestion.
fn is_too_much(lost: u64, of: u64, datagram: u64) -> bool {
    let tolerated = share(of, LOSS_THRESHOLD);
    // Twice the standard deviation of the number of rare events, plus one event.
    let chance = 2 * (tolerated / datagram * 100 + tolerated % datagram * 100 / datagram).isqrt();
    lost > tolerated + chance * datagram / 10 + datagram
}

fn share(of: u64, (num, den): (u64, u64)) -> u64 {
    (u128::from(of) * u128::from(num) / u128::from(den)) as u64
}

fn per_second(bytes: u64, span: Span) -> u64 {
    (u128::from(bytes) * 1_000_000_000 / u128::from(span.as_nanos().max(1))) as u64
}

impl Controller for Bbr {
    fn on_ack(&mut self, a: AckEvent, _: SiblingPaths<'_>) {
        let Some(sample) = a.sample else { return };
        // Before this ACK as much was in flight as is allowed.
        let before = a.in_flight + a.bytes + sample.newly_lost;
        self.window_limited = before + self.datagram >= self.window;
        self.in_flight = a.in_flight;
        if self.rtt_min.is_none() && a.fresh {
            self.rate = per_second(self.window, a.rtt) * STARTUP_PACING_GAIN / 100;
        }
        self.on_round(&sample);
        self.on_signals(&sample);
        self.on_aggregation(a.now, a.bytes);
        if self.state == BbrState::Startup {
            self.check_full_rate(&sample);
        }
        self.check_startup(a.now, &sample);
        self.cycle(a.now, a.bytes, &sample);
        self.on_rtt(a.now, a.rtt, a.fresh);
        self.advance_signals(&sample);
        self.set_rate();
        self.set_window(a.bytes);
    }
    fn on_packet_lost(&mut self, packet: PacketFate) {
        self.losses_in_round = self.losses_in_round.saturating_add(1);
        if self.probe_samples && self.lost_too_much(&packet) {
            self.undo.get_or_insert(self.inflight_long);
            self.on_inflight_too_high(packet.in_flight, packet.app_limited);
        }
    }
    /// Losses are evaluated packet by packet, as a share of the bytes in flight.
    fn on_loss(&mut self, _: Time, _: Time) {}
    fn on_persistent_congestion(&mut self) {
        self.window = self.pipe_min();
    }
    fn on_blackout(&mut self, _: Span, _: bool) {
        // The rate is a measurement of the path, and is valid until there is a new one.
        self.undo = None;
    }
    fn on_spurious(&mut self) {
        self.forget_short();
        self.lost_in_round = 0;
        if let Some(long) = self.undo.take() {
            self.inflight_long = long;
        }
    }
    fn set_datagram(&mut self, bytes: u64) {
        self.datagram = bytes;
        self.window = self.window.max(self.pipe_min());
    }
    fn window(&self) -> u64 {
        self.window
    }
    fn in_slow_start(&self) -> bool {
        self.state == BbrState::Startup
    }
    fn pacing_rate(&self) -> Option<u64> {
        Some(self.rate)
    }
    fn wants_samples(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use crate::congestion::CongestionKind::{Bbr, Cubic};
    use crate::congestion::path_model::{PathModel, run};

    /// 20 Mb/s and 50 ms: a bandwidth-delay product of 125 kB.
    const PATH: PathModel = PathModel {
        bytes_per_s: 2_500_000,
        rtt_ms: 50,
        queue: 125_000,
        loss_of: 0,
    };

    #[test]
    fn it_fills_a_path() {
        let result = run(Bbr, PATH, 30);
        assert!(result.used >= 92, "{result:?}");
    }

    #[test]
    fn random_loss_of_one_percent_costs_it_little_where_it_costs_cubic_most() {
        let course = PathModel {
            loss_of: 100,
            ..PATH
        };
        let (bbr, cubic) = (run(Bbr, course, 30), run(Cubic, course, 30));
        assert!(bbr.used >= 85, "{bbr:?}");
        assert!(cubic.used < 50, "{cubic:?}");
    }

    #[test]
    fn a_deep_queue_stays_nearly_empty() {
        let course = PathModel {
            queue: 10 * PATH.queue,
            ..PATH
        };
        let (bbr, cubic) = (run(Bbr, course, 30), run(Cubic, course, 30));
        assert!(bbr.used >= 92 && bbr.wait_ms <= 40, "{bbr:?}");
        assert!(cubic.wait_ms >= 100, "{cubic:?}");
    }

    #[test]
    fn a_shallow_queue_does_not_starve_it() {
        let course = PathModel {
            queue: PATH.queue / 8,
            ..PATH
        };
        let result = run(Bbr, course, 30);
        assert!(result.used >= 75, "{result:?}");
    }

    #[test]
    fn slow_and_fast_paths_are_filled_alike() {
        for (bytes_per_s, rtt_ms) in [(60_000, 60), (12_500_000, 10), (2_500_000, 200)] {
            let course = PathModel {
                bytes_per_s,
                rtt_ms,
                queue: (bytes_per_s * rtt_ms / 1_000).max(20_000),
                loss_of: 0,
            };
            let result = run(Bbr, course, 40);
            assert!(
                result.used >= 88,
                "{bytes_per_s} B/s, {rtt_ms} ms: {result:?}"
            );
        }
    }
}
