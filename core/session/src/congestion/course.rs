//! A course the controllers are run over in tests: one sender, one bottleneck with a queue, random
//! loss, a receiver that acknowledges every packet.

use std::collections::VecDeque;

use d2tp_time::{Span, Time};
use d2tp_wire::{Frame, FrameIter, PathId, Writer};

use super::{CongestionKind, controller};
use crate::pacer::Pacer;
use crate::recovery::{Recovery, Sent};

const DATAGRAM: u64 = 1_200;
const ACK_DELAY_MAX: Span = Span::from_millis(25);

/// What the path is like.
#[derive(Clone, Copy)]
pub(super) struct Course {
    pub(super) bytes_per_s: u64,
    pub(super) rtt_ms: u64,
    /// Bytes the bottleneck holds back at most.
    pub(super) queue: u64,
    /// One packet of so many is lost at random; 0: none.
    pub(super) loss_of: u64,
}

/// What came of it, the first half left out.
#[derive(Debug)]
pub(super) struct Result {
    /// Share of the bottleneck's rate that was delivered, in hundredths.
    pub(super) used: u64,
    /// Mean wait in the queue.
    pub(super) wait_ms: u64,
}

/// Runs a sender with always something to send over `course` for `seconds`.
pub(super) fn run(kind: CongestionKind, course: Course, seconds: u64) -> Result {
    let mut recovery = Recovery::new(Span::from_millis(333), controller(kind, DATAGRAM));
    let mut pacer = Pacer::new(Time::ZERO, DATAGRAM);
    let half = Span::from_millis(course.rtt_ms).divided(2);
    let service = Span::from_nanos(DATAGRAM * 1_000_000_000 / course.bytes_per_s);
    let end = Time::ZERO + Span::from_secs(seconds);
    let counted_from = Time::ZERO + Span::from_secs(seconds).divided(2);

    let mut now = Time::ZERO;
    let mut free_at = Time::ZERO;
    let mut arrivals: VecDeque<(Time, u64)> = VecDeque::new(); // at the sender, as ACKs
    let mut received: Vec<(u64, u64)> = Vec::new();
    let (mut delivered, mut waited, mut count) = (0u64, Span::ZERO, 0u64);
    let mut dice = 0x1234_5678_9abc_def1u64;
    while now < end {
        while let Some((at, number)) = arrivals.front().copied()
            && at <= now
        {
            arrivals.pop_front();
            match received.last_mut() {
                Some((_, high)) if *high + 1 == number => *high = number,
                _ => received.push((number, number)),
            }
            let first = received.len().saturating_sub(8);
            let mut buf = [0; 200];
            let mut w = Writer::new(&mut buf);
            assert!(Frame::encode_ack(
                &mut w,
                PathId(0),
                0,
                received[first..].iter().rev().copied()
            ));
            let n = w.written();
            let Some(Ok(Frame::Ack { ranges, .. })) = FrameIter::new(&buf[..n]).next() else {
                panic!("an ACK of our own");
            };
            recovery
                .on_ack(
                    at,
                    PathId(0),
                    ranges,
                    Span::ZERO,
                    ACK_DELAY_MAX,
                    &[],
                    |_, _| {},
                )
                .expect("only what was sent is acknowledged");
        }
        if recovery.loss_at() <= now {
            recovery.on_loss_timeout(now, ACK_DELAY_MAX, |_, _| {});
        }
        let mut probe = false;
        if recovery.probe_at(ACK_DELAY_MAX, Span::from_secs(2)) <= now {
            recovery.on_probe_timeout(now);
            probe = true;
        }
        let rate = recovery.controller.pacing_rate().unwrap_or_else(|| {
            let rtt = recovery.rtt.smoothed().as_nanos().max(10_000);
            let gain = if recovery.controller.in_slow_start() {
                8
            } else {
                5
            };
            (u128::from(recovery.controller.window()) * gain * 250_000_000 / u128::from(rtt)) as u64
        });
        pacer.set_rate(now, rate, DATAGRAM);
        while std::mem::take(&mut probe)
            || recovery.room() >= DATAGRAM && pacer.allowance(now) >= DATAGRAM
        {
            let number = recovery.next_number();
            let mut sent = Sent::new(now);
            sent.bytes = DATAGRAM as u16;
            sent.eliciting = true;
            recovery.on_sent(sent);
            pacer.on_sent(DATAGRAM);
            let at_queue = now + half;
            let wait = free_at.since(at_queue);
            let queued = wait.as_nanos() * course.bytes_per_s / 1_000_000_000;
            if queued + DATAGRAM > course.queue {
                continue;
            }
            free_at = free_at.max(at_queue) + service;
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            // Airtime is spent on what is lost.
            if course.loss_of > 0 && dice.is_multiple_of(course.loss_of) {
                continue;
            }
            arrivals.push_back((free_at + half, number));
            if now >= counted_from {
                delivered += DATAGRAM;
                waited = waited + wait;
                count += 1;
            }
        }
        now += Span::from_micros(200);
    }
    let counted = end.since(counted_from);
    let could = course.bytes_per_s * counted.as_millis() / 1_000;
    Result {
        used: delivered * 100 / could,
        wait_ms: waited.as_millis() / count.max(1),
    }
}
