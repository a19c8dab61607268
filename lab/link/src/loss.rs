//! Packet loss on a link: independent losses, or bursts after Gilbert and Elliott.
//!
//! ```text
//!          enter                    In each state a packet is lost with that state's
//!   good ─────────▶ bad             probability; the state may change before each packet.
//!        ◀─────────                 Mean burst = 1 / leave packets.
//!          leave
//! ```

use rand::Rng;
use rand_pcg::Pcg32;

/// How a pipe loses packets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// The probability of losing a packet, independently of others.
    pub random: f64,
    /// Losses in bursts, in addition to the independent ones.
    pub burst: Option<Burst>,
}

/// Losses in bursts: a two-state Markov chain stepped once per packet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Burst {
    /// The probability of changing from good to bad before a packet.
    pub enter: f64,
    /// The probability of changing from bad to good before a packet.
    pub leave: f64,
    /// Loss probability while good.
    pub loss_good: f64,
    /// Loss probability while bad.
    pub loss_bad: f64,
}

impl Burst {
    /// Bursts of `length` lost packets on average (at least 1) that lose the share `loss` of all
    /// packets (0 to below 1) in the long run: the simple Gilbert model.
    pub fn of(loss: f64, length: f64) -> Burst {
        let leave = 1.0 / length.max(1.0);
        let enter = (loss * leave / (1.0 - loss).max(f64::EPSILON)).min(1.0);
        Burst {
            enter,
            leave,
            loss_good: 0.0,
            loss_bad: 1.0,
        }
    }
}

/// The state of a loss process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LossState {
    bad: bool,
}

impl LossState {
    /// Whether the next packet is lost.
    pub(crate) fn loses(&mut self, loss: &Loss, rng: &mut Pcg32) -> bool {
        let mut lost = chance(rng, loss.random);
        if let Some(b) = &loss.burst {
            let turn = if self.bad { b.leave } else { b.enter };
            if chance(rng, turn) {
                self.bad = !self.bad;
            }
            lost |= chance(rng, if self.bad { b.loss_bad } else { b.loss_good });
        }
        lost
    }
}

/// Returns true with probability `p`; draws nothing if the result is certain.
pub(crate) fn chance(rng: &mut Pcg32, p: f64) -> bool {
    p > 0.0 && (p >= 1.0 || rng.random::<f64>() < p)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(loss: Loss) -> (f64, f64) {
        let mut rng = Pcg32::new(7, 1);
        let mut state = LossState::default();
        let (mut lost, mut bursts, mut before) = (0u32, 0u32, false);
        const PACKETS: u32 = 200_000;
        for _ in 0..PACKETS {
            let now = state.loses(&loss, &mut rng);
            lost += u32::from(now);
            bursts += u32::from(now && !before);
            before = now;
        }
        (
            f64::from(lost) / f64::from(PACKETS),
            f64::from(lost) / f64::from(bursts.max(1)),
        )
    }

    #[test]
    fn random_loss_is_as_asked_and_hardly_bursty() {
        let (share, burst) = shares(Loss {
            random: 0.02,
            burst: None,
        });
        assert!((share - 0.02).abs() < 0.002, "{share}");
        assert!(burst < 1.1, "{burst}");
    }

    #[test]
    fn burst_loss_has_the_share_and_the_length_asked_for() {
        let (share, burst) = shares(Loss {
            random: 0.0,
            burst: Some(Burst::of(0.05, 8.0)),
        });
        assert!((share - 0.05).abs() < 0.005, "{share}");
        assert!((burst - 8.0).abs() < 0.6, "{burst}");
    }

    #[test]
    fn certain_loss_loses_everything() {
        assert_eq!(
            shares(Loss {
                random: 1.0,
                burst: None
            })
            .0,
            1.0
        );
    }
}
