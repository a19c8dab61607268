//! The rate at which a pipe serves its queue: a bit rate, or the delivery opportunities of a trace.
//!
//! A server sends the packet at the head of the queue. From the time when the packet reached the
//! head it computes when its last bit leaves. If the rate changes in the middle of a packet, the
//! bits already sent are kept.
//!
//! ```text
//! reached head          set_rate                departs
//!     |----- 3 Mb/s --------|------- 1 Mb/s -------|
//! ```

use crate::medium::Medium;
use d2tp_time::{Span, Time};
use std::sync::Arc;

const NANOS_PER_SEC: u128 = 1_000_000_000;

/// The bytes that one opportunity of a packet-delivery trace can carry. // the Mahimahi trace
/// format
pub const OPPORTUNITY_BYTES: u32 = 1500;

/// The rate at which a pipe serves its queue.
#[derive(Clone, Debug, PartialEq)]
pub enum Rate {
    /// Bits per second; 0 is a stall: the queue is kept and nothing leaves.
    BitsPerSecond(u64),
    /// No limit: packets leave as they arrive.
    Unlimited,
    /// Up to 1500 bytes at each of these times, repeatedly.
    Opportunities(Opportunities),
    /// Packets leave when the pipe has its turn on a medium that it shares with the other direction
    /// of its link ([`crate::LinkModel`]).
    Shared(Medium),
}

impl Rate {
    /// A rate in Mb/s, rounded to a whole bit per second.
    pub fn from_mbps(mbps: f64) -> Rate {
        Rate::BitsPerSecond((mbps * 1e6).round() as u64)
    }

    /// The mean rate in bits per second; `None` if it is unlimited. For a shared medium, the rate
    /// of full packets if the other direction is silent.
    pub fn bits_per_second(&self) -> Option<u64> {
        match self {
            Rate::BitsPerSecond(bps) => Some(*bps),
            Rate::Unlimited => None,
            Rate::Shared(medium) => {
                let bits = u64::from(OPPORTUNITY_BYTES) * 8;
                Some(
                    (u128::from(bits) * NANOS_PER_SEC
                        / u128::from(medium.cycle(OPPORTUNITY_BYTES).as_nanos()))
                        as u64,
                )
            }
            Rate::Opportunities(o) => Some(
                (o.offsets.len() as u128 * u128::from(OPPORTUNITY_BYTES) * 8 * NANOS_PER_SEC
                    / u128::from(o.period.as_nanos())) as u64,
            ),
        }
    }
}

/// Times at which one packet may leave, repeated with a period.
#[derive(Clone, Debug, PartialEq)]
pub struct Opportunities {
    offsets: Arc<[Span]>,
    period: Span,
}

impl Opportunities {
    /// Opportunities at `offsets` (ascending) after the beginning, repeated every `period`. `None`
    /// if there are none, if they are not in order, or if the last one is beyond the period.
    pub fn new(offsets: Vec<Span>, period: Span) -> Option<Opportunities> {
        let in_order = offsets.windows(2).all(|w| w[0] <= w[1]);
        let fits = offsets.last().is_some_and(|last| *last <= period) && period > Span::ZERO;
        (in_order && fits).then(|| Opportunities {
            offsets: offsets.into(),
            period,
        })
    }

    /// The number of the first opportunity at or after `t`.
    fn first_at_or_after(&self, t: Time) -> u64 {
        let round = t.as_nanos() / self.period.as_nanos();
        let within = Span::from_nanos(t.as_nanos() % self.period.as_nanos());
        // An opportunity at exactly the period's end belongs to the previous round.
        let len = self.offsets.len() as u64;
        let previous_end = if within == Span::ZERO && round > 0 {
            let tail = self.offsets.partition_point(|o| *o < self.period) as u64;
            len - tail
        } else {
            0
        };
        let index = self.offsets.partition_point(|o| *o < within) as u64;
        (round * len + index).saturating_sub(previous_end)
    }

    fn at(&self, number: u64) -> Time {
        let len = self.offsets.len() as u64;
        let round = Span::from_nanos(number / len * self.period.as_nanos());
        Time::ZERO + round + self.offsets[(number % len) as usize]
    }
}

/// The server at the head of a pipe's queue.
#[derive(Clone, Debug)]
pub(crate) struct PipeServer {
    rate: Rate,
    stalled: bool,
    /// The work left on the head packet in bits × 10⁹, at `as_of`.
    work_left: Option<u128>,
    as_of: Time,
    /// The next opportunity that is not used up.
    opportunity: u64,
    /// The bytes of `opportunity` that are left.
    opportunity_left: u32,
}

impl PipeServer {
    pub(crate) fn new(rate: Rate) -> PipeServer {
        PipeServer {
            rate,
            stalled: false,
            work_left: None,
            as_of: Time::ZERO,
            opportunity: 0,
            opportunity_left: OPPORTUNITY_BYTES,
        }
    }

    /// Records that a packet of `bytes` reached the head at `at`.
    pub(crate) fn begin(&mut self, at: Time, bytes: u32) {
        self.work_left = Some(u128::from(bytes) * 8 * NANOS_PER_SEC);
        self.as_of = self.as_of.max(at);
        self.meet_opportunity();
    }

    /// Records that the head packet left or was dropped.
    pub(crate) fn end(&mut self, at: Time) {
        if let Rate::Opportunities(o) = &self.rate
            && let Some(work) = self.work_left
        {
            let (last, left) = spend(o, self.opportunity, self.opportunity_left, work);
            if o.at(last) <= at {
                (self.opportunity, self.opportunity_left) = (last, left);
            }
        }
        self.work_left = None;
        self.as_of = self.as_of.max(at);
    }

    /// When the head packet's last bit leaves; `None` if there is none or the rate is 0.
    pub(crate) fn departure(&self) -> Option<Time> {
        let work = self.work_left?;
        if self.stalled {
            return None;
        }
        match &self.rate {
            Rate::Unlimited => Some(self.as_of),
            Rate::BitsPerSecond(0) | Rate::Shared(_) => None,
            Rate::BitsPerSecond(bps) => {
                let ns = work.div_ceil(u128::from(*bps));
                Some(self.as_of + Span::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX)))
            }
            Rate::Opportunities(o) => {
                let (last, _) = spend(o, self.opportunity, self.opportunity_left, work);
                Some(o.at(last).max(self.as_of))
            }
        }
    }

    /// Changes the rate at `now`; sent bits of the head packet stay sent.
    pub(crate) fn change(&mut self, now: Time, rate: Rate, stalled: bool) {
        if let (Rate::BitsPerSecond(bps), Some(work), false) =
            (&self.rate, self.work_left.as_mut(), self.stalled)
        {
            let sent = u128::from(*bps) * u128::from(now.since(self.as_of).as_nanos());
            *work = work.saturating_sub(sent);
        }
        self.as_of = self.as_of.max(now);
        self.rate = rate;
        self.stalled = stalled;
        self.meet_opportunity();
    }

    /// Skips opportunities that passed unused.
    fn meet_opportunity(&mut self) {
        if let Rate::Opportunities(o) = &self.rate {
            let next = o.first_at_or_after(self.as_of);
            if next > self.opportunity {
                self.opportunity = next;
                self.opportunity_left = OPPORTUNITY_BYTES;
            }
        }
    }
}

/// The opportunity at which `work` (bits × 10⁹) is done, and its remaining bytes.
fn spend(_: &Opportunities, first: u64, left: u32, work: u128) -> (u64, u32) {
    let bytes = work.div_ceil(8 * NANOS_PER_SEC) as u64;
    if bytes <= u64::from(left) {
        return (first, left - bytes as u32);
    }
    let more = bytes - u64::from(left);
    let each = u64::from(OPPORTUNITY_BYTES);
    let further = more.div_ceil(each);
    (first + further, (further * each - more) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    #[test]
    fn a_packet_leaves_when_its_last_bit_does() {
        let mut server = PipeServer::new(Rate::BitsPerSecond(12_000_000));
        server.begin(ms(5), 1500);
        assert_eq!(server.departure(), Some(ms(6)));
    }

    #[test]
    fn a_change_of_rate_keeps_what_was_sent() {
        let mut server = PipeServer::new(Rate::BitsPerSecond(12_000_000));
        server.begin(ms(0), 3000); // 2 ms at this rate
        server.change(ms(1), Rate::BitsPerSecond(6_000_000), false);
        assert_eq!(server.departure(), Some(ms(3)));
    }

    #[test]
    fn a_stall_keeps_the_packet_and_resumes_it() {
        let mut server = PipeServer::new(Rate::BitsPerSecond(12_000_000));
        server.begin(ms(0), 1500);
        server.change(ms(0), Rate::BitsPerSecond(0), false);
        assert_eq!(server.departure(), None);
        server.change(ms(100), Rate::BitsPerSecond(12_000_000), false);
        assert_eq!(server.departure(), Some(ms(101)));
    }

    #[test]
    fn opportunities_come_around_again() {
        let o = Opportunities::new(
            vec![
                Span::from_millis(3),
                Span::from_millis(7),
                Span::from_millis(10),
            ],
            Span::from_millis(10),
        )
        .unwrap();
        let mut server = PipeServer::new(Rate::Opportunities(o));
        let mut left = Vec::new();
        for _ in 0..5 {
            server.begin(ms(0), 1500);
            let at = server.departure().unwrap();
            server.end(at);
            left.push(at);
        }
        assert_eq!(left, [ms(3), ms(7), ms(10), ms(13), ms(17)]);
    }

    #[test]
    fn small_packets_share_an_opportunity_and_an_unused_one_is_lost() {
        let o = Opportunities::new(vec![Span::from_millis(1)], Span::from_millis(2)).unwrap();
        let mut server = PipeServer::new(Rate::Opportunities(o));
        let mut leave = |at, bytes| {
            server.begin(at, bytes);
            let t = server.departure().unwrap();
            server.end(t);
            t
        };
        assert_eq!(leave(ms(0), 700), ms(1));
        assert_eq!(leave(ms(1), 700), ms(1));
        assert_eq!(leave(ms(1), 700), ms(3));
        assert_eq!(leave(ms(8), 1500), ms(9));
    }
}
