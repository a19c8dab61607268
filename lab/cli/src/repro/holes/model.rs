//! A model of TCP's behaviour in outages, averaged over the round trips that it may have had when
//! an outage began.

use cedos_lab_link::{Disruption, Holes, Span, Time};

use super::{SESSION, WIFI_QUEUE_MS, WIFI_RTT_MS};

/// Linux: the variance term of the RTO is at least this (net/ipv4/tcp_input.c; RFC 6298 has a
/// minimum of 1 s in total).
const RTO_VARIANCE_MIN: Span = Span::from_millis(200);
/// Linux's longest timeout.
const RTO_MAX: Span = Span::from_secs(120);
/// Payload bytes of a TCP segment with timestamps.
const SEGMENT: u64 = 1_448;
/// The number of round trips over which the model is averaged, from an empty queue to a full one.
const ROUND_TRIPS: u64 = 11;

/// The model of TCP with these outages, for each of those round trips.
pub(super) struct TcpHoleModel(Vec<Disruption>);

impl TcpHoleModel {
    pub(super) fn of(rate: f64) -> TcpHoleModel {
        let of = |n: u64| {
            let queued = Span::from_millis(WIFI_QUEUE_MS).scaled(n, ROUND_TRIPS - 1);
            Disruption {
                rate,
                rtt: Span::from_millis(WIFI_RTT_MS),
                segment: SEGMENT,
                timeout: Span::from_millis(WIFI_RTT_MS) + queued + RTO_VARIANCE_MIN,
                timeout_max: RTO_MAX,
                probe: RTO_VARIANCE_MIN,
            }
        };
        TcpHoleModel((0..ROUND_TRIPS).map(of).collect())
    }

    pub(super) fn carries(&self, holes: &Holes, from_s: f64) -> f64 {
        let part = holes.part(Time::from_secs_f64(from_s), SESSION);
        let sum: f64 = self.0.iter().map(|tcp| tcp.carries(&part)).sum();
        sum / self.0.len() as f64
    }
}
