//! The properties of a link that a scenario may set at the start, per access point and at any time.
//!
//! The same keys appear in `[[link]]`, `[[link.access_point]]`, `[[link.at]]` and
//! `[[link.repeat]]`, so one macro gives each of those tables the fields and a `properties()`
//! method. [`Settings`] is the result: all values are known, and can be converted to a pair of
//! profiles.

use cedos_lab_link::{Burst, Loss, Medium, Profile, Queue, Rate, Span};
use serde::Deserialize;

/// The default rate towards the device, in Mb/s.
pub const DOWN_MBPS_DEFAULT: f64 = 50.0;
/// The default rate from the device, in Mb/s.
pub const UP_MBPS_DEFAULT: f64 = 10.0;
/// The default round-trip time without queueing, in milliseconds.
pub const RTT_MS_DEFAULT: f64 = 20.0;
/// The default queue: what the rate carries in this time, in milliseconds.
pub const QUEUE_MS_DEFAULT: f64 = 100.0;
/// The default MTU, in bytes.
pub const MTU_DEFAULT: u32 = 1500;
/// The smallest MTU: what every IPv4 host accepts. // RFC 791 §3.1
pub const MTU_MIN: u32 = 576;
/// The smallest MTU of a link with IPv6. // RFC 8200 §5
pub const MTU_V6_MIN: u32 = 1280;
/// The largest MTU: what a TUN device supports.
pub const MTU_MAX: u32 = 9000;
/// The default time by which a reordered packet is delayed, in milliseconds.
pub const REORDER_MS_DEFAULT: f64 = 5.0;
/// The highest rate of a link in Mb/s, for which the relay of the lab is designed.
pub const MBPS_MAX: f64 = 10_000.0;
/// The longest delay, one way or round trip.
pub const DELAY_MS_MAX: f64 = 3_600_000.0;

/// Losses in bursts.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BurstLoss {
    /// Share of packets lost in the long run, 0 to below 1.
    pub loss: f64,
    /// Mean number of packets lost in a row, at least 1.
    pub length: f64,
}

/// A table of the scenario file that carries the properties of a link among its keys.
macro_rules! table_with_properties {
    ($(#[$table:meta])* $name:ident { $($(#[$key:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$table])*
        #[derive(Clone, Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$key])* pub $field: $type,)*
            /// A medium that both directions share, instead of a rate for each.
            pub medium: Option<cedos_lab_link::Medium>,
            /// Mb/s towards the device; 0 stalls it.
            pub down_mbps: Option<f64>,
            /// Mb/s from the device; 0 stalls it.
            pub up_mbps: Option<f64>,
            /// Round-trip time without queueing, half of it each way.
            pub rtt_ms: Option<f64>,
            /// One-way delay towards the device, instead of half the round trip.
            pub delay_down_ms: Option<f64>,
            /// One-way delay from the device, instead of half the round trip.
            pub delay_up_ms: Option<f64>,
            /// Additional one-way delay, evenly between 0 and this; keeps the order.
            pub jitter_ms: Option<f64>,
            /// Share of packets lost at random, in both directions.
            pub loss: Option<f64>,
            /// Random loss towards the device only.
            pub loss_down: Option<f64>,
            /// Random loss from the device only.
            pub loss_up: Option<f64>,
            /// Losses in bursts, in both directions, in addition to random ones.
            pub burst: Option<$crate::properties::BurstLoss>,
            /// Queue limit in bytes, each way.
            pub queue_bytes: Option<u64>,
            /// Queue limit as time at the current rate, each way.
            pub queue_ms: Option<f64>,
            /// Largest IP packet in bytes.
            pub mtu: Option<u32>,
            /// Share of packets that are delayed and overtaken.
            pub reorder: Option<f64>,
            /// The delay of reordered packets, in milliseconds.
            pub reorder_ms: Option<f64>,
            /// Share of packets that arrive twice.
            pub duplicate: Option<f64>,
            /// Share of packets that arrive with a bit flipped.
            pub corrupt: Option<f64>,
        }

        impl $name {
            /// The link properties among the keys.
            pub(crate) fn properties(&self) -> $crate::properties::LinkProperties {
                $crate::properties::LinkProperties {
                    medium: self.medium,
                    down_mbps: self.down_mbps,
                    up_mbps: self.up_mbps,
                    rtt_ms: self.rtt_ms,
                    delay_down_ms: self.delay_down_ms,
                    delay_up_ms: self.delay_up_ms,
                    jitter_ms: self.jitter_ms,
                    loss: self.loss,
                    loss_down: self.loss_down,
                    loss_up: self.loss_up,
                    burst: self.burst,
                    queue_bytes: self.queue_bytes,
                    queue_ms: self.queue_ms,
                    mtu: self.mtu,
                    reorder: self.reorder,
                    reorder_ms: self.reorder_ms,
                    duplicate: self.duplicate,
                    corrupt: self.corrupt,
                }
            }
        }
    };
}
pub(crate) use table_with_properties;

/// Link properties as a table gave them; `None` leaves a property as it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LinkProperties {
    pub medium: Option<Medium>,
    pub down_mbps: Option<f64>,
    pub up_mbps: Option<f64>,
    pub rtt_ms: Option<f64>,
    pub delay_down_ms: Option<f64>,
    pub delay_up_ms: Option<f64>,
    pub jitter_ms: Option<f64>,
    pub loss: Option<f64>,
    pub loss_down: Option<f64>,
    pub loss_up: Option<f64>,
    pub burst: Option<BurstLoss>,
    pub queue_bytes: Option<u64>,
    pub queue_ms: Option<f64>,
    pub mtu: Option<u32>,
    pub reorder: Option<f64>,
    pub reorder_ms: Option<f64>,
    pub duplicate: Option<f64>,
    pub corrupt: Option<f64>,
}

impl LinkProperties {
    /// The error in a value, in words, if there is one.
    pub(crate) fn fault(&self) -> Option<String> {
        let range = |key: &str, value: Option<f64>, max: f64| match value {
            Some(v) if !(0.0..=max).contains(&v) => {
                Some(format!("{key} is {v}, expected 0 to {max}"))
            }
            _ => None,
        };
        let mtu = self.mtu.filter(|mtu| !(MTU_MIN..=MTU_MAX).contains(mtu));
        None.or_else(|| range("down_mbps", self.down_mbps, MBPS_MAX))
            .or_else(|| range("up_mbps", self.up_mbps, MBPS_MAX))
            .or_else(|| range("rtt_ms", self.rtt_ms, DELAY_MS_MAX))
            .or_else(|| range("delay_down_ms", self.delay_down_ms, DELAY_MS_MAX))
            .or_else(|| range("delay_up_ms", self.delay_up_ms, DELAY_MS_MAX))
            .or_else(|| range("jitter_ms", self.jitter_ms, DELAY_MS_MAX))
            .or_else(|| range("loss", self.loss, 1.0))
            .or_else(|| range("loss_down", self.loss_down, 1.0))
            .or_else(|| range("loss_up", self.loss_up, 1.0))
            .or_else(|| range("burst.loss", self.burst.map(|b| b.loss), 0.999))
            .or_else(|| range("burst.length", self.burst.map(|b| b.length), 1e9))
            .or_else(|| range("queue_ms", self.queue_ms, DELAY_MS_MAX))
            .or_else(|| range("reorder", self.reorder, 1.0))
            .or_else(|| range("reorder_ms", self.reorder_ms, DELAY_MS_MAX))
            .or_else(|| range("duplicate", self.duplicate, 1.0))
            .or_else(|| range("corrupt", self.corrupt, 1.0))
            .or_else(|| mtu.map(|mtu| format!("mtu is {mtu}, expected {MTU_MIN} to {MTU_MAX}")))
            .or_else(|| {
                (self.queue_bytes.is_some() && self.queue_ms.is_some())
                    .then(|| "queue_bytes and queue_ms are both given; keep one".to_owned())
            })
            .or_else(|| {
                let short = self.burst.filter(|b| b.length < 1.0)?;
                Some(format!(
                    "burst.length is {}, expected at least 1 packet",
                    short.length
                ))
            })
    }
}

/// All properties of a link.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub down: Rate,
    pub upward: Rate,
    pub delay_down: Span,
    pub delay_up: Span,
    pub jitter: Span,
    pub loss_down: f64,
    pub loss_up: f64,
    pub burst: Option<Burst>,
    pub queue: Queue,
    pub mtu: u32,
    pub reorder: f64,
    pub reorder_by: Span,
    pub duplicate: f64,
    pub corrupt: f64,
}

impl Default for Settings {
    fn default() -> Settings {
        let half_rtt = Span::from_millis_f64(RTT_MS_DEFAULT / 2.0);
        Settings {
            down: Rate::from_mbps(DOWN_MBPS_DEFAULT),
            upward: Rate::from_mbps(UP_MBPS_DEFAULT),
            delay_down: half_rtt,
            delay_up: half_rtt,
            jitter: Span::ZERO,
            loss_down: 0.0,
            loss_up: 0.0,
            burst: None,
            queue: Queue::Time(Span::from_millis_f64(QUEUE_MS_DEFAULT)),
            mtu: MTU_DEFAULT,
            reorder: 0.0,
            reorder_by: Span::from_millis_f64(REORDER_MS_DEFAULT),
            duplicate: 0.0,
            corrupt: 0.0,
        }
    }
}

impl Settings {
    /// Applies the properties of `p`. A round-trip time or a loss without direction is applied
    /// first, so that keys with a direction take precedence.
    pub(crate) fn apply(&mut self, p: &LinkProperties) {
        fn set<T>(slot: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *slot = value;
            }
        }
        let shared = p.medium.map(Rate::Shared);
        set(&mut self.down, shared.clone());
        set(&mut self.upward, shared);
        set(&mut self.down, p.down_mbps.map(Rate::from_mbps));
        set(&mut self.upward, p.up_mbps.map(Rate::from_mbps));
        let half_rtt = p.rtt_ms.map(|rtt| Span::from_millis_f64(rtt / 2.0));
        set(
            &mut self.delay_down,
            p.delay_down_ms.map(Span::from_millis_f64).or(half_rtt),
        );
        set(
            &mut self.delay_up,
            p.delay_up_ms.map(Span::from_millis_f64).or(half_rtt),
        );
        set(&mut self.jitter, p.jitter_ms.map(Span::from_millis_f64));
        set(&mut self.loss_down, p.loss_down.or(p.loss));
        set(&mut self.loss_up, p.loss_up.or(p.loss));
        if let Some(burst) = p.burst {
            self.burst = (burst.loss > 0.0).then(|| Burst::of(burst.loss, burst.length));
        }
        set(&mut self.queue, p.queue_bytes.map(Queue::Bytes));
        set(
            &mut self.queue,
            p.queue_ms.map(|ms| Queue::Time(Span::from_millis_f64(ms))),
        );
        set(&mut self.mtu, p.mtu);
        set(&mut self.reorder, p.reorder);
        set(
            &mut self.reorder_by,
            p.reorder_ms.map(Span::from_millis_f64),
        );
        set(&mut self.duplicate, p.duplicate);
        set(&mut self.corrupt, p.corrupt);
    }

    /// Restores the properties that `p` names to their values in `other`.
    pub(crate) fn restore(&mut self, p: &LinkProperties, other: &Settings) {
        let mut both = |named: bool, copy: fn(&mut Settings, &Settings)| {
            if named {
                copy(self, other);
            }
        };
        both(p.medium.is_some(), |s, o| {
            (s.down, s.upward) = (o.down.clone(), o.upward.clone());
        });
        both(p.down_mbps.is_some(), |s, o| s.down = o.down.clone());
        both(p.up_mbps.is_some(), |s, o| s.upward = o.upward.clone());
        both(p.rtt_ms.or(p.delay_down_ms).is_some(), |s, o| {
            s.delay_down = o.delay_down
        });
        both(p.rtt_ms.or(p.delay_up_ms).is_some(), |s, o| {
            s.delay_up = o.delay_up
        });
        both(p.jitter_ms.is_some(), |s, o| s.jitter = o.jitter);
        both(p.loss.or(p.loss_down).is_some(), |s, o| {
            s.loss_down = o.loss_down
        });
        both(p.loss.or(p.loss_up).is_some(), |s, o| s.loss_up = o.loss_up);
        both(p.burst.is_some(), |s, o| s.burst = o.burst);
        both(p.queue_bytes.is_some() || p.queue_ms.is_some(), |s, o| {
            s.queue = o.queue
        });
        both(p.mtu.is_some(), |s, o| s.mtu = o.mtu);
        both(p.reorder.is_some(), |s, o| s.reorder = o.reorder);
        both(p.reorder_ms.is_some(), |s, o| s.reorder_by = o.reorder_by);
        both(p.duplicate.is_some(), |s, o| s.duplicate = o.duplicate);
        both(p.corrupt.is_some(), |s, o| s.corrupt = o.corrupt);
    }

    /// The profiles of both directions: towards the device, and from it.
    pub(crate) fn profiles(&self) -> (Profile, Profile) {
        let profile = |rate: &Rate, delay, loss| Profile {
            rate: rate.clone(),
            delay,
            jitter: self.jitter,
            loss: Loss {
                random: loss,
                burst: self.burst,
            },
            queue: self.queue,
            reorder: self.reorder,
            reorder_by: self.reorder_by,
            duplicate: self.duplicate,
            corrupt: self.corrupt,
            mtu_bytes: self.mtu,
        };
        (
            profile(&self.down, self.delay_down, self.loss_down),
            profile(&self.upward, self.delay_up, self.loss_up),
        )
    }

    /// Round-trip time without queueing, in milliseconds.
    pub(crate) fn rtt_ms(&self) -> f64 {
        (self.delay_down + self.delay_up).as_millis_f64()
    }
}
