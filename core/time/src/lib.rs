//! Points in time and spans of it, in nanoseconds; no clock.
//!
//! The core never asks what time it is: it is told. A [`Time`] counts from wherever its owner
//! started counting (a boot-time clock in a program, zero in a simulation), so only differences
//! mean anything.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

/// A point in time: nanoseconds since its owner began to count.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(u64);

/// A length of time in nanoseconds. Arithmetic saturates: a span never wraps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Span(u64);

impl Time {
    /// Where counting began.
    pub const ZERO: Time = Time(0);
    /// Later than everything: a timer that is not armed.
    pub const NEVER: Time = Time(u64::MAX);

    /// The point `ns` nanoseconds after counting began.
    pub const fn from_nanos(ns: u64) -> Self {
        Time(ns)
    }
    /// The point `s` seconds after counting began, to the nearest nanosecond; negative values are
    /// clamped.
    pub fn from_secs_f64(s: f64) -> Self {
        Time((s * 1e9).round() as u64)
    }
    /// Nanoseconds since counting began.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }
    /// The span from `earlier` to here, zero if `earlier` is in fact later.
    pub const fn since(self, earlier: Time) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
    /// Seconds since counting began, for people.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

impl Span {
    /// Nothing.
    pub const ZERO: Span = Span(0);
    /// Longer than everything.
    pub const MAX: Span = Span(u64::MAX);

    /// A span of nanoseconds.
    pub const fn from_nanos(ns: u64) -> Self {
        Span(ns)
    }
    /// A span of microseconds.
    pub const fn from_micros(us: u64) -> Self {
        Span(us.saturating_mul(1_000))
    }
    /// A span of milliseconds.
    pub const fn from_millis(ms: u64) -> Self {
        Span(ms.saturating_mul(1_000_000))
    }
    /// A span of seconds.
    pub const fn from_secs(s: u64) -> Self {
        Span(s.saturating_mul(1_000_000_000))
    }
    /// A span of seconds with a fraction, to the nearest nanosecond; negative becomes zero.
    pub fn from_secs_f64(s: f64) -> Self {
        Span((s * 1e9).round() as u64)
    }
    /// A span of milliseconds with a fraction, to the nearest nanosecond; negative becomes zero.
    pub fn from_millis_f64(ms: f64) -> Self {
        Span((ms * 1e6).round() as u64)
    }
    /// Whole nanoseconds.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }
    /// Whole microseconds.
    pub const fn as_micros(self) -> u64 {
        self.0 / 1_000
    }
    /// Whole milliseconds, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }
    /// Milliseconds with a fraction.
    pub fn as_millis_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }
    /// Seconds with a fraction.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
    /// `self` times a whole number.
    pub const fn times(self, n: u64) -> Span {
        Span(self.0.saturating_mul(n))
    }
    /// `self` divided by a whole number.
    pub const fn divided(self, n: u64) -> Span {
        Span(self.0 / n)
    }
    /// `self` times the fraction `num / den`.
    pub const fn scaled(self, num: u64, den: u64) -> Span {
        Span(((self.0 as u128 * num as u128) / den as u128) as u64)
    }
    /// The difference, zero if `other` is longer.
    pub const fn saturating_sub(self, other: Span) -> Span {
        Span(self.0.saturating_sub(other.0))
    }
    /// The absolute difference.
    pub const fn abs_diff(self, other: Span) -> Span {
        Span(self.0.abs_diff(other.0))
    }
}

impl Add<Span> for Time {
    type Output = Time;
    fn add(self, span: Span) -> Time {
        Time(self.0.saturating_add(span.0))
    }
}

impl AddAssign<Span> for Time {
    fn add_assign(&mut self, span: Span) {
        *self = *self + span;
    }
}

impl Sub<Span> for Time {
    type Output = Time;
    fn sub(self, span: Span) -> Time {
        Time(self.0.saturating_sub(span.0))
    }
}

impl Add for Span {
    type Output = Span;
    fn add(self, other: Span) -> Span {
        Span(self.0.saturating_add(other.0))
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Time::NEVER {
            f.write_str("never")
        } else {
            write!(f, "{:.6}s", self.as_secs_f64())
        }
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1_000_000 {
            write!(f, "{}us", self.0 as f64 / 1e3)
        } else {
            write!(f, "{}ms", self.0 as f64 / 1e6)
        }
    }
}

impl From<std::time::Duration> for Span {
    fn from(d: std::time::Duration) -> Span {
        Span(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Span> for std::time::Duration {
    fn from(s: Span) -> Self {
        std::time::Duration::from_nanos(s.0)
    }
}
