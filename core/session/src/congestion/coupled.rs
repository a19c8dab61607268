//! Coupled congestion control: the paths of a session take together what one connection would take
//! where they share a bottleneck, and move to the path that is less crowded where they do not.
//!
//! | method | grows a window `w` by, for each byte acknowledged | gives back on loss |
//! |---|---|---|
//! | LIA (RFC 6356) | `min(α/Σw, 1/w)`, with `α = Σw · max(w/rtt²) / (Σ w/rtt)²` | half |
//! | OLIA (Khalili et al., CoNEXT 2012) | `w/rtt² / (Σ w/rtt)² + α/w`, α moving window to the best paths | half |
//! | BALIA (Peng et al., ToN 2016) | `x/rtt / (Σx)² · (1+a)/2 · (4+a)/5`, with `x = w/rtt`, `a = max(x)/x` | `w/2 · min(a, 3/2)` |
//!
//! all in datagrams. Only the growth once slow start is over is coupled; everything else is NewReno's.
//! Floating point here is sums, products and quotients, which IEEE 754 makes the same everywhere.

use d2tp_time::{Span, Time};

use super::hystart::HyStart;
use super::{
    AckEvent, Controller, SiblingPath, SiblingPaths, WINDOW_INITIAL_DATAGRAMS,
    WINDOW_MIN_DATAGRAMS, resumed,
};

/// The ratio from which two windows count as equally large (OLIA).
const ALIKE: f64 = 0.99;

/// The coupled method: LIA, OLIA or BALIA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CouplingMethod {
    Lia,
    Olia,
    Balia,
}

#[derive(Debug)]
pub(super) struct Coupled {
    method: CouplingMethod,
    datagram: u64,
    window: u64,
    threshold: u64,
    /// Growth of less than a byte, carried over to the next ACK.
    fraction: f64,
    hystart: HyStart,
    recovery_start: Option<Time>,
    before: Option<(u64, u64)>,
    /// OLIA: bytes acknowledged since the last loss.
    since_loss: u64,
    /// OLIA: bytes acknowledged between the two previous losses.
    between_losses: u64,
    /// BALIA: how much faster the best path is, as of the last ACK.
    lag: f64,
}

impl Coupled {
    pub(super) fn new(method: CouplingMethod, datagram: u64) -> Self {
        Coupled {
            method,
            datagram,
            window: WINDOW_INITIAL_DATAGRAMS * datagram,
            threshold: u64::MAX,
            fraction: 0.0,
            hystart: HyStart::new(),
            recovery_start: None,
            before: None,
            since_loss: 0,
            between_losses: 0,
            lag: 1.0,
        }
    }

    /// The number of datagrams by which the window grows for each datagram acknowledged.
    fn growth(&mut self, own: &SiblingPath, all: SiblingPaths<'_>) -> f64 {
        let d = self.datagram as f64;
        let window = |s: &SiblingPath| s.window as f64 / d;
        let w = window(own);
        let speed = |s: &SiblingPath| window(s) / seconds(s.rtt);
        let total_speed: f64 = all.iter().map(speed).sum();
        let square = total_speed * total_speed;
        match self.method {
            CouplingMethod::Lia => {
                let total: f64 = all.iter().map(window).sum();
                let best = largest(all, |s| window(s) / (seconds(s.rtt) * seconds(s.rtt)));
                (total * best / square / total).min(1.0 / w)
            }
            CouplingMethod::Olia => {
                let alone = w / (seconds(own.rtt) * seconds(own.rtt)) / square;
                alone + olia_alpha(own, all) / w
            }
            CouplingMethod::Balia => {
                self.lag = largest(all, speed) / speed(own);
                let a = self.lag;
                speed(own) / seconds(own.rtt) / square * (1.0 + a) / 2.0 * (4.0 + a) / 5.0
            }
        }
    }
}

fn seconds(span: Span) -> f64 {
    span.max(Span::from_micros(1)).as_secs_f64()
}

fn largest(all: SiblingPaths<'_>, of: impl Fn(&SiblingPath) -> f64) -> f64 {
    all.iter().map(of).fold(f64::MIN_POSITIVE, f64::max)
}

/// OLIA's α: moves window from the paths with the largest window to the best paths that have a
/// smaller one.
fn olia_alpha(own: &SiblingPath, all: SiblingPaths<'_>) -> f64 {
    let quality = |s: &SiblingPath| (s.interval as f64) * (s.interval as f64) / seconds(s.rtt);
    let window = |s: &SiblingPath| s.window as f64;
    let (best, most) = (largest(all, quality), largest(all, window));
    let is_best = |s: &SiblingPath| quality(s) >= ALIKE * best;
    let is_most = |s: &SiblingPath| window(s) >= ALIKE * most;
    let wanting = all.iter().filter(|s| is_best(s) && !is_most(s)).count();
    let paths = all.len() as f64;
    if wanting == 0 {
        0.0
    } else if is_best(own) && !is_most(own) {
        1.0 / (paths * wanting as f64)
    } else if is_most(own) {
        let most = all.iter().filter(|s| is_most(s)).count();
        -1.0 / (paths * most as f64)
    } else {
        0.0
    }
}

impl Controller for Coupled {
    fn on_ack(&mut self, a: AckEvent, siblings: SiblingPaths<'_>) {
        self.since_loss += a.bytes;
        if a.app_limited || self.recovery_start.is_some_and(|t| a.sent_at <= t) {
            return;
        }
        if self.in_slow_start() {
            let (gain, done) = self.hystart.on_ack(&a);
            self.window += gain;
            if done {
                self.threshold = self.window;
            }
            return;
        }
        let own = SiblingPath {
            window: self.window,
            rtt: a.smoothed,
            interval: self.interval(),
        };
        let alone = [own];
        let all = if siblings.is_empty() {
            &alone
        } else {
            siblings
        };
        let growth = self.growth(&own, all);
        self.fraction += growth * a.bytes as f64;
        let whole = self.fraction.trunc();
        self.fraction -= whole;
        self.window = self
            .window
            .saturating_add_signed(whole as i64)
            .max(WINDOW_MIN_DATAGRAMS * self.datagram);
    }
    fn on_loss(&mut self, now: Time, sent_at: Time) {
        if self.recovery_start.is_some_and(|t| sent_at <= t) {
            return;
        }
        self.before = Some((self.window, self.threshold));
        self.recovery_start = Some(now);
        let share = match self.method {
            CouplingMethod::Lia | CouplingMethod::Olia => 0.5,
            CouplingMethod::Balia => 0.5 * self.lag.min(1.5),
        };
        let less = (self.window as f64 * share) as u64;
        self.window = (self.window - less).max(WINDOW_MIN_DATAGRAMS * self.datagram);
        self.threshold = self.window;
        self.fraction = 0.0;
        self.between_losses = std::mem::take(&mut self.since_loss);
    }
    fn on_persistent_congestion(&mut self) {
        self.window = WINDOW_MIN_DATAGRAMS * self.datagram;
        self.recovery_start = None;
        self.before = None;
        self.hystart = HyStart::new();
    }
    fn on_blackout(&mut self, _: Span, careful: bool) {
        self.before = None;
        self.hystart = HyStart::new();
        if careful {
            (self.window, self.threshold) = resumed(self.window, self.threshold, self.datagram);
        }
    }
    fn resume(&mut self, window: u64, threshold: u64) {
        let window = window.max(WINDOW_INITIAL_DATAGRAMS * self.datagram);
        (self.window, self.threshold) = (window, threshold);
        self.hystart = HyStart::new();
    }
    fn retreat(&mut self, window: u64) {
        self.before = None;
        self.window = window.max(WINDOW_MIN_DATAGRAMS * self.datagram);
        self.threshold = self.window;
    }
    fn on_spurious(&mut self) {
        if let Some((window, threshold)) = self.before.take() {
            self.window = self.window.max(window);
            self.threshold = threshold;
            self.recovery_start = None;
            self.since_loss += std::mem::take(&mut self.between_losses);
        }
    }
    fn set_datagram(&mut self, bytes: u64) {
        self.datagram = bytes;
        self.window = self.window.max(WINDOW_MIN_DATAGRAMS * bytes);
    }
    fn window(&self) -> u64 {
        self.window
    }
    fn resumed_window(&self) -> u64 {
        if self.in_slow_start() {
            self.threshold
        } else {
            u64::MAX
        }
    }
    fn in_slow_start(&self) -> bool {
        self.window < self.threshold
    }
    fn interval(&self) -> u64 {
        self.since_loss.max(self.between_losses)
    }
}

#[cfg(test)]
mod tests {
    use crate::congestion::CongestionKind::{Balia, Lia, NewReno, Olia};
    use crate::congestion::path_model::{PathModel, share};

    /// 20 Mb/s, 40 ms, and a queue of one bandwidth-delay product.
    const PATH: PathModel = PathModel {
        bytes_per_s: 2_500_000,
        rtt_ms: 40,
        queue: 100_000,
        loss_of: 0,
    };

    #[test]
    fn two_paths_through_one_bottleneck_take_about_as_much_as_one_connection() {
        for kind in [Lia, Olia, Balia] {
            let got = share(&[PATH], &[(kind, &[0, 0]), (NewReno, &[0])], 40);
            let ratio = got[0] as f64 / got[1] as f64;
            assert!((0.5..=1.6).contains(&ratio), "{kind:?}: {got:?}");
        }
        // Two uncoupled paths take about twice as much.
        let got = share(&[PATH], &[(NewReno, &[0, 0]), (NewReno, &[0])], 40);
        assert!(got[0] as f64 >= 1.65 * got[1] as f64, "{got:?}");
    }

    #[test]
    fn paths_of_their_own_are_filled() {
        for kind in [Lia, Olia, Balia] {
            let got = share(&[PATH, PATH], &[(kind, &[0, 1])], 40);
            assert!(
                got[0] >= 2 * PATH.bytes_per_s * 80 / 100,
                "{kind:?}: {got:?}"
            );
        }
    }

    #[test]
    fn the_crowded_path_is_left_to_others() {
        // One path is shared with three other connections. A fair share of everything is 12.5 Mb/s
        // each; the uncoupled session takes a quarter of the crowded path besides the free one.
        let others: (_, &[usize]) = (NewReno, &[0]);
        for kind in [Lia, Olia, Balia] {
            let flows = [(kind, &[0usize, 1][..]), others, others, others];
            let got = share(&[PATH, PATH], &flows, 40);
            let taken = got[0].saturating_sub(PATH.bytes_per_s);
            assert!(taken <= PATH.bytes_per_s / 5, "{kind:?}: {got:?}");
        }
    }
}
