//! Chooses links by energy: a device uses those that carry enough bits per joule.
//!
//! ```text
//!                           ┌ the best of them ────────────────▶ use: data always moves
//!  bits per joule of a link ┼ at least `share` of the mean ────▶ use: it raises the speed, and the
//!                           │                                    mean of the transfer so far
//!                           └ less ─▶ leave, if that lasts longer than a tail is worth;
//!                                     try again when a try costs little beside the energy spent since
//! ```
//!
//! Why the mean: a link that carries more bits per joule than the transfer did so far raises the
//! result of the whole transfer, and its speed; one that carries less lowers it (Dinkelbach, *On
//! Nonlinear Fractional Programming*, 1967, for the ratio of two sums). Raciu et al. (MobiArch
//! 2011) probe all links for 10 s and stay with the best one for 100 s; here a link is taken or
//! left whenever its measurements say so, the wake-up and the tail of its radio count, and a link
//! is tried only if its best known rate would be worth it.
//!
//! The power of a radio is given as a model ([`RadioPowerModel`]); this module does not distinguish
//! Wi-Fi and cellular.

use d2tp_time::{Span, Time};

/// The interval of measurements and decisions. // a guess: several round trips
pub const SAMPLE: Span = Span::from_millis(500);

/// How long a link is not measured after it was taken, because its path opens and slow start runs.
/// Higher: the rates are more accurate. Lower: a try costs less, so there are more of them.
// Chosen over 1 s, on other walks than those of `cedos repro M2`.
const SETTLE: Span = Span::from_millis(500);

/// A pause between observations that ends a stretch of traffic. // a guess: longer than radios' tails
const PAUSE: Span = Span::from_secs(30);

/// The number of measurements of a link before it is judged. // chosen over two, on the same walks
const SAMPLES_MIN: u32 = 1;

/// How long no bytes may arrive before a link counts as stalled. // a guess: a long round trip
const STALL: Span = Span::from_millis(1_500);

/// The share of all energy that may be spent on trying unused links. Higher: an improved link is found
/// sooner; lower: less is wasted on others.
const TRY_SHARE: f64 = 0.2; // chosen over 0.1 and 0.3, on the same walks

/// The length that is assumed at first for a period in which a link stays wanted or unwanted. It
/// counts as one observation. // a guess
const SPELL_FIRST: Span = Span::from_secs(30);

/// The energy in joules up to which the mean is ignored, and the best link is the reference
/// instead. // a guess: seconds
const JOULES_MIN: f64 = 3.0;

/// The share by which the remembered best rate of a link decays with each lower measurement. // a guess
const FORGET: f64 = 0.01;

/// The hysteresis of leaving a link, relative to the threshold of taking it. // a guess
const STAY: f64 = 0.85;

/// The energy consumption of a link's radio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RadioPowerModel {
    /// Energy to wake the radio from sleep.
    pub wake_joules: f64,
    /// Power while it carries.
    pub work_watts: f64,
    /// Additional energy per byte.
    pub byte_joules: f64,
    /// Energy from the last byte until the radio sleeps.
    pub tail_joules: f64,
}

impl RadioPowerModel {
    /// Bits per joule at a rate, without wake-up and tail.
    pub fn bits_per_joule(&self, bits_per_s: f64) -> f64 {
        bits_per_s / (self.work_watts + self.byte_joules * bits_per_s / 8.0)
    }

    /// The energy of taking and leaving the link once.
    fn turn_joules(&self) -> f64 {
        self.wake_joules + self.tail_joules
    }
}

/// The current state of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkSample {
    /// Whether the link is attached.
    pub up: bool,
    /// The number of the attachment. Another attachment may be to another access point.
    pub attachment: u64,
    /// Payload bytes received over the link so far.
    pub bytes: u64,
}

/// Decides which links to use.
///
/// ```
/// use d2tp_sched::energy_policy::{EnergyPolicy, LinkSample, RadioPowerModel, SAMPLE};
/// use d2tp_time::{Span, Time};
/// let watts = |work_watts| RadioPowerModel { wake_joules: 0.0, work_watts, byte_joules: 0.0, tail_joules: 0.0 };
/// // Two radios that draw the same; the first is taken to be the faster.
/// let mut policy = EnergyPolicy::new(1.0, [(watts(1.0), 10e6), (watts(1.0), 2e6)]);
/// let mut links = [LinkSample { up: true, attachment: 0, bytes: 0 }; 2];
/// let mut now = Time::ZERO;
/// for _ in 0..40 {
///     let used = policy.pick(now, &links);
///     // The first one carries 4 Mb/s.
///     links[0].bytes += if used[0] { 250_000 } else { 0 };
///     now += SAMPLE;
/// }
/// assert_eq!(policy.pick(now, &links), [true, false]);
/// ```
#[derive(Debug, Clone)]
pub struct EnergyPolicy {
    share: f64,
    lines: Vec<LinkEnergyState>,
    at: Time,
    bits: f64,
    joules: f64,
    /// Bits and joules when the present stretch of traffic began: the mean is taken since then.
    began: (f64, f64),
}

/// The policy's state for one link.
#[derive(Debug, Clone)]
struct LinkEnergyState {
    draw: RadioPowerModel,
    observation: LinkSample,
    /// Since when the link is in use.
    used_since: Option<Time>,
    /// When the current measurement began, and the bytes until then.
    sample: (Time, u64),
    /// The rate in bits per second, measured or assumed.
    rate: f64,
    /// The number of measurements since the link was taken.
    samples: u32,
    /// The rate in bits per second that the link may reach: assumed first, then the best measured.
    best: f64,
    /// When bytes last arrived.
    moved_at: Time,
    /// The attachment of the last measurement, and the energy of all links until then.
    measured: Option<(u64, f64)>,
    /// Whether the link is worth using.
    wanted: bool,
    /// Since when `wanted` has its value; `None` before anything is known.
    turned_at: Option<Time>,
    /// The mean lengths of periods in which the link stays unwanted, and wanted.
    spells: [MeanDuration; 2],
}

/// A mean of durations, updated one by one.
#[derive(Debug, Clone, Copy)]
struct MeanDuration {
    sum_s: f64,
    count: f64,
}

impl MeanDuration {
    const FIRST: MeanDuration = MeanDuration {
        sum_s: SPELL_FIRST.as_nanos() as f64 / 1e9,
        count: 1.0,
    };

    fn add(&mut self, span: Span) {
        self.sum_s += span.as_secs_f64();
        self.count += 1.0;
    }

    fn mean_s(&self) -> f64 {
        self.sum_s / self.count
    }
}

impl LinkEnergyState {
    fn new(draw: RadioPowerModel, bits_per_s: f64) -> LinkEnergyState {
        LinkEnergyState {
            draw,
            observation: LinkSample::default(),
            used_since: None,
            sample: (Time::ZERO, 0),
            rate: bits_per_s,
            samples: 0,
            best: bits_per_s,
            moved_at: Time::ZERO,
            measured: None,
            wanted: false,
            turned_at: None,
            spells: [MeanDuration::FIRST; 2],
        }
    }

    /// Begins to use the link. Returns the energy that this costs.
    fn take(&mut self, now: Time) -> f64 {
        self.used_since = Some(now);
        self.sample = (now + SETTLE, self.observation.bytes);
        self.moved_at = now;
        // The previous measurements may be old, so the first new ones count in full.
        self.samples = 0;
        self.draw.wake_joules
    }

    /// Stops using the link, if it is in use. Returns the energy that this costs.
    fn leave(&mut self) -> f64 {
        match self.used_since.take() {
            Some(_) => self.draw.tail_joules,
            None => 0.0,
        }
    }

    /// Handles the link's current state. Returns the energy spent over `span`.
    fn look(&mut self, now: Time, span: Span, observation: LinkSample) -> f64 {
        let came = observation.bytes - self.observation.bytes;
        if came > 0 {
            self.moved_at = now;
        }
        let mut joules = self.draw.byte_joules * came as f64;
        if self.used_since.is_some() {
            joules += self.draw.work_watts * span.as_secs_f64();
        }
        let anew = observation.attachment != self.observation.attachment;
        if !observation.up || (anew && self.observation.up) {
            joules += self.leave();
            self.turn(now, false);
        }
        if !observation.up || anew {
            // While the link is not attached, it is unknown whether it would be wanted.
            self.turned_at = None;
        }
        self.observation = observation;
        joules
    }

    /// Completes a measurement that is long enough. `spent`: the energy of all links so far.
    fn measure(&mut self, now: Time, spent: f64) {
        let (began, at_bytes) = self.sample;
        if now < began {
            self.sample.1 = self.observation.bytes;
        }
        if self.used_since.is_none() || now < began + SAMPLE {
            return;
        }
        let span = now.since(began);
        let bits = (self.observation.bytes - at_bytes) as f64 * 8.0 / span.as_secs_f64();
        self.samples += 1;
        // The energy of taking and leaving is regained over some time. Shorter ups and downs do not
        // count.
        let earned_s = (self.draw.turn_joules() / self.draw.work_watts).max(1.0);
        let weight = (span.as_secs_f64() / earned_s).max(1.0 / f64::from(self.samples));
        self.rate += weight.min(1.0) * (bits - self.rate);
        self.best = (self.best - FORGET * (self.best - self.rate)).max(self.rate);
        self.measured = Some((self.observation.attachment, spent));
        self.sample = (now, self.observation.bytes);
    }

    /// Whether the link is in use and its trial time is not over yet.
    fn is_tried(&self) -> bool {
        self.used_since.is_some() && self.samples < SAMPLES_MIN
    }

    fn is_stalled(&self, now: Time) -> bool {
        self.used_since.is_some() && now.since(self.moved_at) >= STALL
    }

    /// Bits per joule while in use, or as expected if the link were used at this rate for its usual
    /// time.
    fn worth(&self, now: Time, rate: f64) -> f64 {
        if self.is_stalled(now) {
            return 0.0;
        }
        let worth = self.draw.bits_per_joule(rate);
        if self.used_since.is_some() || rate == 0.0 {
            return worth;
        }
        let bits = rate * self.spells[1].mean_s();
        bits / (bits / worth + self.draw.turn_joules())
    }

    /// The energy of a trial.
    fn try_joules(&self) -> f64 {
        let span = SETTLE + SAMPLE.times(u64::from(SAMPLES_MIN));
        self.draw.turn_joules() + self.draw.work_watts * span.as_secs_f64()
    }

    /// Records whether the link is worth using.
    fn turn(&mut self, now: Time, wanted: bool) {
        if wanted == self.wanted && self.turned_at.is_some() {
            return;
        }
        if let Some(at) = self.turned_at {
            self.spells[usize::from(self.wanted)].add(now.since(at));
        }
        (self.wanted, self.turned_at) = (wanted, Some(now));
    }

    /// Whether stopping saves more than the link's bits are worth at `price` bits per joule. The saving
    /// grows with time, less the tail and the later wake-up.
    fn is_worth_leaving(&self, now: Time, price: f64) -> bool {
        let saved = 1.0 - self.draw.bits_per_joule(self.rate) / price;
        if saved <= 0.0 {
            return false;
        }
        let even_s = self.draw.turn_joules() / (self.draw.work_watts * saved);
        let already = self.turned_at.map_or(Span::ZERO, |at| now.since(at));
        // If the duration is unknown, waiting until the costs are even loses at most as much again.
        self.spells[0].mean_s() > even_s || already.as_secs_f64() >= even_s
    }

    /// Whether the link may reach `bar` bits per joule, and a trial costs little beside the energy
    /// spent since the last one.
    fn is_worth_a_try(&self, now: Time, bar: f64, spent: f64) -> bool {
        let since = match self.measured {
            Some((attachment, then)) if attachment == self.observation.attachment => spent - then,
            _ => f64::INFINITY,
        };
        self.worth(now, self.best) >= bar && since >= self.try_joules() / TRY_SHARE
    }
}

impl EnergyPolicy {
    /// A policy for these links, each with the rate in bits per second that is assumed until it is
    /// measured.
    ///
    /// `share`: a link is used if its bits per joule are at least this share of the mean. 1: the
    /// most bits per joule that are possible while data always moves. Lower: faster. 0: all links
    /// at all times.
    pub fn new(
        share: f64,
        links: impl IntoIterator<Item = (RadioPowerModel, f64)>,
    ) -> EnergyPolicy {
        let lines = links
            .into_iter()
            .map(|(draw, rate)| LinkEnergyState::new(draw, rate));
        EnergyPolicy {
            share,
            lines: lines.collect(),
            at: Time::ZERO,
            bits: 0.0,
            joules: 0.0,
            began: (0.0, 0.0),
        }
    }

    /// Adds a link that is down, with the rate in bits per second that is assumed until it is measured.
    /// Returns its place among the observations.
    pub fn add_link(&mut self, draw: RadioPowerModel, bits_per_s: f64) -> usize {
        self.lines.push(LinkEnergyState::new(draw, bits_per_s));
        self.lines.len() - 1
    }

    /// Replaces the power model of a link's radio.
    pub fn set_draw(&mut self, link: usize, draw: RadioPowerModel) {
        self.lines[link].draw = draw;
    }

    /// Bits per joule of a link at the rate that was measured last, or is assumed.
    pub fn bits_per_joule(&self, link: usize) -> f64 {
        let line = &self.lines[link];
        line.draw.bits_per_joule(line.rate)
    }

    /// The links to use now, one entry per observation. Call it again after [`SAMPLE`], and when a link
    /// comes or goes.
    pub fn pick(&mut self, now: Time, observations: &[LinkSample]) -> Vec<bool> {
        self.look(now, observations);
        if let Some((best, worth)) = self.best(now) {
            let (bits, joules) = (self.bits - self.began.0, self.joules - self.began.1);
            let mean = if joules < JOULES_MIN {
                worth
            } else {
                bits / joules
            };
            for n in 0..self.lines.len() {
                self.decide(now, n, n == best, self.share * mean);
            }
        }
        self.used()
    }

    /// Handles the same observations as [`EnergyPolicy::pick`] while energy does not count: every link
    /// that is up is used.
    pub fn use_all(&mut self, now: Time, observations: &[LinkSample]) -> Vec<bool> {
        self.look(now, observations);
        for line in &mut self.lines {
            if line.observation.up && line.used_since.is_none() {
                self.joules += line.take(now);
            }
        }
        self.used()
    }

    fn used(&self) -> Vec<bool> {
        let uses = self.lines.iter().map(|line| line.used_since.is_some());
        uses.collect()
    }

    fn look(&mut self, now: Time, observations: &[LinkSample]) {
        let mut span = now.since(self.at);
        self.at = now;
        if span >= PAUSE {
            // Nothing was carried meanwhile, so the radios slept, and a new stretch begins.
            span = Span::ZERO;
            self.joules += self
                .lines
                .iter_mut()
                .map(LinkEnergyState::leave)
                .sum::<f64>();
            self.began = (self.bits, self.joules);
        }
        for (line, observation) in self.lines.iter_mut().zip(observations) {
            self.bits += (observation.bytes - line.observation.bytes) as f64 * 8.0;
            self.joules += line.look(now, span, *observation);
        }
        for line in &mut self.lines {
            line.measure(now, self.joules);
        }
    }

    /// The link with the most bits per joule, and that value.
    fn best(&self, now: Time) -> Option<(usize, f64)> {
        let there = self
            .lines
            .iter()
            .enumerate()
            .filter(|(_, l)| l.observation.up);
        let worth = |line: &LinkEnergyState| {
            let turn = if line.used_since.is_some() { 1.0 } else { STAY };
            turn * line.worth(now, line.rate)
        };
        there
            .map(|(n, line)| (n, worth(line)))
            .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
    }

    fn decide(&mut self, now: Time, n: usize, best: bool, price: f64) {
        let line = &mut self.lines[n];
        let stalled = line.is_stalled(now);
        if !line.observation.up || (line.is_tried() && !stalled) {
            return;
        }
        let used = line.used_since.is_some();
        let bar = if used { STAY * price } else { price };
        let wanted = best || (line.worth(now, line.rate) >= bar && !stalled);
        line.turn(now, wanted);
        self.joules += if used && !wanted && (stalled || line.is_worth_leaving(now, price)) {
            line.leave()
        } else if !used && (wanted || line.is_worth_a_try(now, bar, self.joules)) {
            line.take(now)
        } else {
            0.0
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A radio that wakes and sleeps at once, much like Wi-Fi.
    const NIMBLE: RadioPowerModel = RadioPowerModel {
        wake_joules: 0.0,
        work_watts: 1.0,
        byte_joules: 0.0,
        tail_joules: 0.2,
    };
    /// A radio with a tail of ten seconds.
    const HEAVY: RadioPowerModel = RadioPowerModel {
        wake_joules: 1.0,
        tail_joules: 9.0,
        ..NIMBLE
    };

    /// A simulated device whose links carry given rates.
    struct Walk {
        policy: EnergyPolicy,
        now: Time,
        observations: [LinkSample; 2],
        used_s: [f64; 2],
        turns: u32,
        used: Vec<bool>,
    }

    impl Walk {
        /// A device with a nimble link, assumed to carry 10 Mb/s, and a heavy one, assumed to carry
        /// 2.
        fn new(share: f64) -> Walk {
            Walk {
                policy: EnergyPolicy::new(share, [(NIMBLE, 10e6), (HEAVY, 2e6)]),
                now: Time::ZERO,
                observations: [LinkSample {
                    up: true,
                    ..LinkSample::default()
                }; 2],
                used_s: [0.0; 2],
                turns: 0,
                used: vec![false; 2],
            }
        }

        /// Simulates some seconds in which the links carry these rates in Mb/s.
        fn on(&mut self, seconds: f64, mbps: [f64; 2]) {
            for _ in 0..(seconds / SAMPLE.as_secs_f64()) as u32 {
                let used = self.policy.pick(self.now, &self.observations);
                self.turns += u32::from(used != self.used);
                for n in 0..2 {
                    if used[n] {
                        self.used_s[n] += SAMPLE.as_secs_f64();
                        self.observations[n].bytes += (mbps[n] * 1e6 / 16.0) as u64;
                    }
                }
                self.used = used;
                self.now += SAMPLE;
            }
        }

        fn turn_wifi(&mut self, up: bool) {
            self.observations[0].up = up;
            self.observations[0].attachment += u64::from(up);
        }
    }

    #[test]
    fn a_link_that_cannot_be_worth_it_is_never_woken() {
        let mut walk = Walk::new(1.0);
        walk.on(300.0, [8.0, 2.0]);
        assert_eq!(walk.used_s, [300.0, 0.0]);
    }

    #[test]
    fn a_poor_link_is_left_and_tried_again_for_a_fifth_of_what_is_spent() {
        let mut walk = Walk::new(1.0);
        walk.on(600.0, [0.2, 1.5]);
        assert!(walk.used_s[1] > 590.0, "{:?}", walk.used_s);
        assert!((30.0..130.0).contains(&walk.used_s[0]), "{:?}", walk.used_s);
    }

    #[test]
    fn a_link_that_gets_better_is_found_and_the_other_left() {
        let mut walk = Walk::new(1.0);
        walk.on(100.0, [0.2, 1.5]);
        walk.used_s = [0.0; 2];
        walk.on(200.0, [9.0, 1.5]);
        assert!(walk.used_s[0] > 170.0, "{:?}", walk.used_s);
        assert!(walk.used_s[1] < 80.0, "{:?}", walk.used_s);
        assert_eq!(walk.used, [true, false]);
    }

    #[test]
    fn a_second_link_above_the_mean_is_used_beside_the_best_one() {
        let mut walk = Walk::new(1.0);
        walk.on(200.0, [0.2, 1.0]);
        walk.used_s = [0.0; 2];
        // Both links are now better than the transfer was so far.
        walk.on(60.0, [3.0, 2.0]);
        assert!(walk.used_s[0] > 30.0, "{:?}", walk.used_s);
        assert_eq!(walk.used_s[1], 60.0);
    }

    #[test]
    fn a_dear_radio_is_not_put_to_sleep_for_a_moment() {
        let mut walk = Walk::new(1.0);
        // Wi-Fi for 8 s, none for 22 s: the cellular tail would outlast the Wi-Fi.
        for _ in 0..20 {
            walk.turn_wifi(false);
            walk.on(22.0, [0.0, 1.0]);
            walk.turn_wifi(true);
            walk.on(8.0, [4.0, 1.0]);
        }
        walk.used_s = [0.0; 2];
        walk.turn_wifi(false);
        walk.on(22.0, [0.0, 1.0]);
        walk.turn_wifi(true);
        walk.on(8.0, [4.0, 1.0]);
        assert_eq!(walk.used_s, [8.0, 30.0]);
    }

    #[test]
    fn a_link_that_stalls_is_left_within_seconds() {
        let mut walk = Walk::new(1.0);
        walk.on(60.0, [8.0, 1.0]);
        assert_eq!(walk.used, [true, false]);
        walk.on(3.0, [0.0, 1.0]);
        assert_eq!(walk.used, [false, true]);
    }

    #[test]
    fn something_always_moves_however_poor() {
        let mut walk = Walk::new(1.0);
        walk.on(100.0, [9.0, 1.0]);
        walk.turn_wifi(false);
        walk.on(60.0, [0.0, 0.05]);
        assert_eq!(walk.used, [false, true]);
        assert!(walk.turns < 6, "{}", walk.turns);
    }

    #[test]
    fn where_power_is_no_matter_all_links_are_used() {
        let mut walk = Walk::new(0.0);
        walk.on(100.0, [9.0, 0.1]);
        assert_eq!(walk.used_s, [100.0, 100.0]);
    }

    proptest! {
        #[test]
        fn whatever_the_links_do_one_that_is_there_is_used(
            share in 0.0..2.0_f64,
            steps in proptest::collection::vec(
                (any::<[bool; 2]>(), any::<[bool; 2]>(), [0..2_000_000_u64, 0..2_000_000], 0..3_000_u64),
                1..200,
            ),
        ) {
            let mut policy = EnergyPolicy::new(share, [(NIMBLE, 10e6), (HEAVY, 2e6)]);
            let (mut now, mut observations) = (Time::ZERO, [LinkSample::default(); 2]);
            for (up, anew, bytes, millis) in steps {
                now += Span::from_millis(millis);
                for n in 0..2 {
                    observations[n].up = up[n];
                    observations[n].attachment += u64::from(anew[n]);
                    observations[n].bytes += bytes[n];
                }
                let used = policy.pick(now, &observations);
                prop_assert_eq!(used.iter().any(|u| *u), up.iter().any(|u| *u));
                prop_assert!((0..2).all(|n| up[n] || !used[n]));
            }
        }
    }

    #[test]
    fn the_worth_of_a_link_counts_its_bytes() {
        let draw = RadioPowerModel {
            byte_joules: 8e-7,
            ..NIMBLE
        };
        // 1 Mb/s: 1 W, and 0.1 W for its bytes.
        assert!((draw.bits_per_joule(1e6) - 1e6 / 1.1).abs() < 1e-6);
    }
}
