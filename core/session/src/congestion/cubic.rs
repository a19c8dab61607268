//! CUBIC (RFC 9438) with HyStart++. Only integers are used, so that every machine computes the same
//! window.
//!
//! Windows are in bytes, times in microseconds; the cubic W(t) = C·(t − K)³ + W_max is computed
//! with C = 0.4 datagrams/s³.

use d2tp_time::{Span, Time};

use super::hystart::HyStart;
use super::{
    AckEvent, Controller, SiblingPaths, WINDOW_INITIAL_DATAGRAMS, WINDOW_MIN_DATAGRAMS, resumed,
};

/// β = 0.7 (RFC 9438 §4.6), as a fraction.
const BETA: (u64, u64) = (7, 10);
/// C = 0.4 (RFC 9438 §5.1), as a fraction.
const C: (i128, i128) = (2, 5);

/// The most paths that count as sharing a bottleneck.
const SHARERS_MAX: u32 = 8;

#[derive(Debug, Clone)]
struct CubicState {
    window: u64,
    threshold: u64,
    w_max: u64,
    k_us: u64,
    epoch_start: Option<Time>,
    reno_window: u64,
    reno_acked: u64,
    fraction: u64,
}

#[derive(Debug)]
pub(super) struct Cubic {
    datagram: u64,
    state: CubicState,
    hystart: HyStart,
    recovery_start: Option<Time>,
    before: Option<Box<CubicState>>,
    /// When the last ACK arrived.
    acked_at: Time,
    /// Whether nothing was in flight any more after that ACK.
    is_idle: bool,
    /// The number of paths that together grow as one connection does.
    sharers: u32,
}

/// The largest r with r³ ≤ n.
fn cube_root(n: u128) -> u64 {
    let (mut low, mut high) = (0u64, 1u64 << 42);
    while low < high {
        let mid = (low + high).div_ceil(2);
        let cube = u128::from(mid).checked_pow(3);
        if cube.is_some_and(|c| c <= n) {
            low = mid;
        } else {
            high = mid - 1;
        }
    }
    low
}

impl Cubic {
    pub(super) fn new(datagram: u64) -> Self {
        Cubic {
            datagram,
            state: CubicState {
                window: WINDOW_INITIAL_DATAGRAMS * datagram,
                threshold: u64::MAX,
                w_max: 0,
                k_us: 0,
                epoch_start: None,
                reno_window: 0,
                reno_acked: 0,
                fraction: 0,
            },
            hystart: HyStart::new(),
            recovery_start: None,
            before: None,
            acked_at: Time::ZERO,
            is_idle: false,
            sharers: 1,
        }
    }

    /// RFC 9438 §4.2 and §5.8: leaves the time from an ACK at `acked_at` to `until`, in which the window was not used, out
    /// of the time of the cubic function.
    fn leave_out(&mut self, acked_at: Time, until: Time) {
        if let Some(start) = &mut self.state.epoch_start {
            *start += until.since(acked_at.max(*start));
        }
    }

    /// K = cbrt((W_max − cwnd) / C) with windows in datagrams, in microseconds.
    fn k_us(&self) -> u64 {
        let s = &self.state;
        let missing = u128::from(s.w_max.saturating_sub(s.window));
        // What shares a bottleneck grows by its part of C, and so in the time in which one connection grows by all.
        let missing = missing * u128::from(self.sharers);
        // K³ s³ = missing/datagram · 5/2, so K³ in µs³ is that times 10^18.
        cube_root(missing * 5 * 1_000_000_000_000_000_000 / (2 * u128::from(self.datagram)))
    }

    /// W_cubic after `t` of this epoch, in bytes.
    fn w_cubic(&self, t: Span) -> u64 {
        let s = &self.state;
        let d = i128::from(t.as_micros()) - i128::from(s.k_us);
        // After some hours the cube would overflow; the window is limited long before.
        let d = d.clamp(-10_000_000_000, 10_000_000_000);
        let grown =
            d * d * d / 1_000_000_000 * C.0 * i128::from(self.datagram) / C.1 / 1_000_000_000;
        let grown = grown / i128::from(self.sharers);
        (i128::from(s.w_max) + grown).clamp(0, i128::from(u64::MAX / 4)) as u64
    }
}

impl Controller for Cubic {
    fn on_ack(&mut self, a: AckEvent, _: SiblingPaths<'_>) {
        let acked_at = std::mem::replace(&mut self.acked_at, a.now);
        let was_idle = std::mem::replace(&mut self.is_idle, a.in_flight == 0);
        if self.recovery_start.is_some_and(|t| a.sent_at <= t) {
            return;
        }
        if a.app_limited {
            self.leave_out(acked_at, a.now);
            return;
        }
        if was_idle {
            self.leave_out(acked_at, a.sent_at);
        }
        if self.in_slow_start() {
            let (gain, done) = self.hystart.on_ack(&a);
            self.state.window += gain;
            if done {
                self.state.threshold = self.state.window;
            }
            return;
        }
        let datagram = self.datagram;
        let begins = self.state.epoch_start.is_none();
        let start = *self.state.epoch_start.get_or_insert(a.now);
        if begins {
            let s = &mut self.state;
            s.w_max = s.w_max.max(s.window);
            s.reno_window = s.window;
            s.reno_acked = 0;
            self.state.k_us = self.k_us();
        }
        let t = a.now.since(start);
        let target = self
            .w_cubic(t + a.rtt)
            .clamp(self.state.window, self.state.window * 3 / 2);
        let s = &mut self.state;
        // Reno-friendly region, RFC 9438 §4.3: α = 3(1−β)/(1+β) = 9/17 until W_max, then 1; of what shares a bottleneck
        // its part.
        s.reno_acked += a.bytes;
        let (num, den) = if s.reno_window < s.w_max {
            (9, 17)
        } else {
            (1, 1)
        };
        let need = s.reno_window * den / num * u64::from(self.sharers);
        if s.reno_acked >= need {
            s.reno_acked -= need;
            s.reno_window += datagram;
        }
        s.fraction += (target - s.window) * a.bytes;
        let step = s.fraction / s.window;
        s.fraction -= step * s.window;
        s.window = (s.window + step).max(s.reno_window);
    }

    fn on_loss(&mut self, now: Time, sent_at: Time) {
        if self.recovery_start.is_some_and(|t| sent_at <= t) {
            return;
        }
        self.before = Some(Box::new(self.state.clone()));
        self.recovery_start = Some(now);
        let s = &mut self.state;
        // Fast convergence, RFC 9438 §4.7.
        s.w_max = if s.window < s.w_max {
            s.window * (BETA.1 + BETA.0) / (2 * BETA.1)
        } else {
            s.window
        };
        s.window = (s.window * BETA.0 / BETA.1).max(WINDOW_MIN_DATAGRAMS * self.datagram);
        s.threshold = s.window;
        s.epoch_start = Some(now);
        s.reno_window = s.window;
        s.reno_acked = 0;
        s.fraction = 0;
        self.state.k_us = self.k_us();
    }

    fn on_persistent_congestion(&mut self) {
        let s = &mut self.state;
        s.w_max = s.window;
        s.threshold = (s.window * BETA.0 / BETA.1).max(WINDOW_MIN_DATAGRAMS * self.datagram);
        s.window = WINDOW_MIN_DATAGRAMS * self.datagram;
        s.epoch_start = None;
        self.recovery_start = None;
        self.before = None;
        self.hystart = HyStart::new();
    }

    fn on_blackout(&mut self, hole: Span, careful: bool) {
        let s = &mut self.state;
        // The clock of the cubic function stands still during an outage (RFC 9438 §5.8).
        if let Some(start) = &mut s.epoch_start {
            *start += hole;
        }
        self.acked_at += hole;
        self.before = None;
        self.hystart = HyStart::new();
        if careful {
            (s.window, s.threshold) = resumed(s.window, s.threshold, self.datagram);
        }
    }

    fn resume(&mut self, window: u64, threshold: u64) {
        let window = window.max(WINDOW_INITIAL_DATAGRAMS * self.datagram);
        (self.state.window, self.state.threshold) = (window, threshold);
        self.hystart = HyStart::new();
    }

    fn retreat(&mut self, window: u64) {
        self.before = None;
        let s = &mut self.state;
        s.window = window.max(WINDOW_MIN_DATAGRAMS * self.datagram);
        (s.threshold, s.w_max, s.reno_window) = (s.window, s.window, s.window);
        self.state.k_us = 0;
    }

    fn on_spurious(&mut self) {
        if let Some(before) = self.before.take() {
            if before.window > self.state.window {
                self.state = *before;
            }
            self.recovery_start = None;
        }
    }

    fn raise_reduced_window(&mut self, window: u64) {
        let s = &mut self.state;
        if window > s.window {
            s.window = window;
            s.threshold = window;
            s.reno_window = window;
            s.w_max = s.w_max.max(window);
            self.state.k_us = self.k_us();
        }
    }

    fn on_random_loss_only(&mut self) {
        self.state.threshold = u64::MAX;
        self.state.w_max = 0;
        self.state.epoch_start = None;
        self.before = None;
        self.hystart = HyStart::new();
    }

    fn set_share(&mut self, paths: u32) {
        let sharers = paths.clamp(1, SHARERS_MAX);
        if std::mem::replace(&mut self.sharers, sharers) != sharers {
            // The function of time begins anew where it has come to.
            self.state.epoch_start = None;
            self.state.w_max = self.state.window;
        }
    }

    fn on_shared_loss(&mut self, now: Time, sent_at: Time) {
        let before = self.before.take();
        self.on_loss(now, sent_at);
        // That the packet arrived after all is not learnt here. Where nothing was reduced, its own response may be undone.
        self.before = before.filter(|_| self.before.is_none());
    }

    fn set_datagram(&mut self, bytes: u64) {
        self.datagram = bytes;
        self.state.window = self.state.window.max(WINDOW_MIN_DATAGRAMS * bytes);
    }
    fn window(&self) -> u64 {
        self.state.window
    }
    fn resumed_window(&self) -> u64 {
        if self.in_slow_start() {
            self.state.threshold
        } else {
            u64::MAX
        }
    }
    fn in_slow_start(&self) -> bool {
        self.state.window < self.state.threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u64 = 1_000;

    fn acked(now: Time, bytes: u64) -> AckEvent {
        let rtt = Span::from_millis(50);
        AckEvent {
            smoothed: Span::from_millis(50),
            now,
            bytes,
            sent_at: now - rtt,
            rtt,
            fresh: true,
            app_limited: false,
            largest: 0,
            next_number: u64::MAX,
            in_flight: 0,
            sample: None,
        }
    }

    #[test]
    fn cube_roots_are_exact() {
        for n in [0u64, 1, 2, 7, 12_345, 4_000_000_000] {
            let c = u128::from(n).pow(3);
            assert_eq!(cube_root(c), n);
            if n > 0 {
                assert_eq!(cube_root(c - 1), n - 1);
            }
        }
    }

    #[test]
    fn after_a_loss_the_window_returns_to_its_maximum_after_k_and_then_probes() {
        let mut cubic = Cubic::new(MSS);
        cubic.state.window = 1_000 * MSS;
        let start = Time::from_nanos(1_000_000_000);
        cubic.on_loss(start, start);
        assert_eq!(cubic.window(), 700 * MSS);
        // K = cbrt(300 / 0.4) = 9.086 s.
        assert!(
            (9_080_000..9_090_000).contains(&cubic.state.k_us),
            "{}",
            cubic.state.k_us
        );
        let mut now = start + Span::from_millis(60);
        let mut at_k = 0;
        while now < start + Span::from_secs(14) {
            cubic.on_ack(acked(now, cubic.window()), &[]);
            now += Span::from_millis(50);
            if now.since(start) <= Span::from_micros(9_086_000) {
                at_k = cubic.window();
            }
        }
        assert!((985..1_015).contains(&(at_k / MSS)), "{at_k}");
        assert!(cubic.window() > 1_040 * MSS, "{}", cubic.window());
    }

    /// A controller that had a loss, grew for 5 s, did `pause`, and grew for another second. Returns its window in
    /// datagrams.
    fn grown_around(pause: impl FnOnce(&mut Cubic, &mut Time)) -> u64 {
        let mut cubic = Cubic::new(MSS);
        cubic.state.window = 1_000 * MSS;
        let mut now = Time::from_nanos(1_000_000_000);
        cubic.on_loss(now, now);
        now += Span::from_millis(60);
        let grow = |cubic: &mut Cubic, now: &mut Time, acks: u64| {
            for _ in 0..10 * acks {
                cubic.on_ack(acked(*now, cubic.window() / 10), &[]);
                *now += Span::from_millis(5);
            }
        };
        grow(&mut cubic, &mut now, 100);
        pause(&mut cubic, &mut now);
        grow(&mut cubic, &mut now, 20);
        cubic.window() / MSS
    }

    #[test]
    fn after_a_time_limited_by_the_application_the_window_grows_on_from_where_it_was() {
        let steady = grown_around(|_, _| ());
        assert!((980..990).contains(&steady), "{steady}");
        // Ten ACKs in each round trip.
        let limited = grown_around(|cubic, now| {
            let window = cubic.window();
            for _ in 0..6_000 {
                let limited = AckEvent {
                    app_limited: true,
                    ..acked(*now, MSS)
                };
                cubic.on_ack(limited, &[]);
                *now += Span::from_millis(5);
            }
            assert_eq!(cubic.window(), window);
        });
        assert!(limited.abs_diff(steady) <= 1, "{limited}, not {steady}");
        // Nothing is sent, and then a whole window at once.
        let idle = grown_around(|_, now| *now += Span::from_secs(30));
        assert!(idle.abs_diff(steady) <= 1, "{idle}, not {steady}");
    }

    /// The mean sum of the windows, in datagrams, of paths that share a bottleneck where one packet of `one_of` is lost.
    fn mean_windows(sharers: u32, rtt_ms: u64, one_of: u64) -> f64 {
        let mut now = Time::from_nanos(1_000_000_000);
        let mut paths: Vec<Cubic> = (0..sharers).map(|_| Cubic::new(MSS)).collect();
        for path in &mut paths {
            path.on_loss(now, now);
            path.set_share(sharers);
        }
        let (mut sent, mut sum, mut rounds) = (0, 0.0, 0.0);
        for round in 0..40_000 {
            now += Span::from_millis(rtt_ms);
            let mut is_lost = false;
            for path in &mut paths {
                let window = path.window();
                let ack = AckEvent {
                    rtt: Span::from_millis(rtt_ms),
                    sent_at: now - Span::from_millis(rtt_ms),
                    ..acked(now, window)
                };
                path.on_ack(ack, &[]);
                sent += window / MSS;
                if round > 10_000 {
                    sum += window as f64 / MSS as f64;
                }
            }
            if sent >= one_of {
                (sent, is_lost) = (0, true);
            }
            for (n, path) in paths.iter_mut().enumerate().filter(|_| is_lost) {
                match n {
                    0 => path.on_loss(now, now),
                    _ => path.on_shared_loss(now, now),
                }
            }
            rounds += f64::from(u8::from(round > 10_000));
        }
        sum / rounds
    }

    #[test]
    fn paths_that_share_a_bottleneck_have_together_the_window_of_one_connection() {
        // As Reno, in between, and where the cubic function alone counts.
        for (rtt_ms, one_of) in [(20, 500), (50, 5_000), (100, 100_000)] {
            let alone = mean_windows(1, rtt_ms, one_of);
            for sharers in [2, 3] {
                let together = mean_windows(sharers, rtt_ms, one_of) / alone;
                assert!(
                    (0.9..1.1).contains(&together),
                    "{sharers} at {rtt_ms} ms and 1 of {one_of}: {together}"
                );
            }
        }
    }

    #[test]
    fn a_response_to_the_loss_of_another_path_is_not_undone_by_what_arrived_here() {
        let mut cubic = Cubic::new(MSS);
        cubic.state.window = 100 * MSS;
        cubic.on_shared_loss(Time::from_nanos(100), Time::from_nanos(50));
        assert_eq!(cubic.window(), 70 * MSS);
        cubic.on_shared_loss(Time::from_nanos(110), Time::from_nanos(60));
        assert_eq!(cubic.window(), 70 * MSS, "one round is one response");
        cubic.on_spurious();
        assert_eq!(cubic.window(), 70 * MSS);
    }

    #[test]
    fn a_mistaken_response_is_undone() {
        let mut cubic = Cubic::new(MSS);
        cubic.state.window = 100 * MSS;
        cubic.on_loss(Time::from_nanos(5), Time::from_nanos(5));
        cubic.on_spurious();
        assert_eq!(cubic.window(), 100 * MSS);
    }

    #[test]
    fn a_softened_response_leaves_what_it_is_told_and_never_less() {
        let mut cubic = Cubic::new(MSS);
        cubic.state.window = 100 * MSS;
        cubic.on_loss(Time::from_nanos(5), Time::from_nanos(5));
        cubic.raise_reduced_window(60 * MSS);
        assert_eq!(cubic.window(), 70 * MSS);
        cubic.raise_reduced_window(90 * MSS);
        assert_eq!(cubic.window(), 90 * MSS);
        assert!(!cubic.in_slow_start());
    }

    #[test]
    fn where_all_was_chance_the_search_for_the_rate_goes_on() {
        let mut cubic = Cubic::new(MSS);
        cubic.on_loss(Time::from_nanos(5), Time::from_nanos(5));
        assert!(!cubic.in_slow_start());
        let window = cubic.window();
        cubic.on_random_loss_only();
        assert!(cubic.in_slow_start());
        cubic.on_ack(acked(Time::from_nanos(1_000_000_000), window), &[]);
        assert_eq!(cubic.window(), 2 * window);
    }

    #[test]
    fn one_round_of_losses_is_one_response() {
        let mut cubic = Cubic::new(MSS);
        cubic.state.window = 100 * MSS;
        cubic.on_loss(Time::from_nanos(100), Time::from_nanos(50));
        let once = cubic.window();
        cubic.on_loss(Time::from_nanos(110), Time::from_nanos(60));
        assert_eq!(cubic.window(), once);
    }
}
