//! Points in time and spans of time, in nanoseconds, without a clock.
//!
//! The core never reads a clock: the time is an argument. A [`Time`] counts from a start that its
//! owner chose (boot in a program, zero in a simulation), so only differences have a meaning.

use std::fmt;
use std::num::NonZero;
use std::ops::{Add, AddAssign, Sub};

/// A point in time: nanoseconds since its owner's clock started. An `Option<Time>` takes no more
/// memory than a `Time`, because sessions have many.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(
    /// The nanoseconds and one more.
    NonZero<u64>,
);

/// A length of time in nanoseconds. Arithmetic saturates: a span never wraps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Span(u64);

impl Time {
    /// The start of the clock.
    pub const ZERO: Time = Time(NonZero::<u64>::MIN);
    /// Later than every other time: the state of a timer that is not armed.
    pub const NEVER: Time = Time(NonZero::<u64>::MAX);

    /// The point `ns` nanoseconds after the start of the clock. The last two values of `ns` both
    /// become [`Time::NEVER`].
    pub const fn from_nanos(ns: u64) -> Self {
        Time(NonZero::<u64>::MIN.saturating_add(ns))
    }
    /// The point `s` seconds after the start of the clock, to the nearest nanosecond. Negative
    /// values become zero.
    pub fn from_secs_f64(s: f64) -> Self {
        Time::from_nanos((s * 1e9).round() as u64)
    }
    /// Nanoseconds since the start of the clock.
    pub const fn as_nanos(self) -> u64 {
        self.0.get() - 1
    }
    /// The span from `earlier` to `self`; zero if `earlier` is in fact later.
    pub const fn since(self, earlier: Time) -> Span {
        Span(self.0.get().saturating_sub(earlier.0.get()))
    }
    /// Seconds since the start of the clock, with a fraction.
    pub fn as_secs_f64(self) -> f64 {
        self.as_nanos() as f64 / 1e9
    }
}

impl Span {
    /// The span of length zero.
    pub const ZERO: Span = Span(0);
    /// Longer than every other span.
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
    /// A span of seconds with a fraction, to the nearest nanosecond. Negative values become zero.
    pub fn from_secs_f64(s: f64) -> Self {
        Span((s * 1e9).round() as u64)
    }
    /// A span of milliseconds with a fraction, to the nearest nanosecond. Negative values become
    /// zero.
    pub fn from_millis_f64(ms: f64) -> Self {
        Span((ms * 1e6).round() as u64)
    }
    /// The span in nanoseconds.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }
    /// The span in whole microseconds, rounded down.
    pub const fn as_micros(self) -> u64 {
        self.0 / 1_000
    }
    /// The span in whole milliseconds, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }
    /// The span in milliseconds, with a fraction.
    pub fn as_millis_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }
    /// The span in seconds, with a fraction.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
    /// The span multiplied by a whole number.
    pub const fn times(self, n: u64) -> Span {
        Span(self.0.saturating_mul(n))
    }
    /// The span divided by a whole number.
    pub const fn divided(self, n: u64) -> Span {
        Span(self.0 / n)
    }
    /// The span multiplied by the fraction `num / den`.
    pub const fn scaled(self, num: u64, den: u64) -> Span {
        Span(((self.0 as u128 * num as u128) / den as u128) as u64)
    }
    /// `self` minus `other`; zero if `other` is longer.
    pub const fn saturating_sub(self, other: Span) -> Span {
        Span(self.0.saturating_sub(other.0))
    }
    /// The absolute difference of the two spans.
    pub const fn abs_diff(self, other: Span) -> Span {
        Span(self.0.abs_diff(other.0))
    }
}

impl Default for Time {
    fn default() -> Time {
        Time::ZERO
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
        Time::from_nanos(self.as_nanos().saturating_sub(span.0))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_optional_time_takes_no_more_memory_than_a_time() {
        assert_eq!(size_of::<Option<Time>>(), size_of::<u64>());
    }

    #[test]
    fn times_end_at_zero_and_at_never() {
        let (ns, second) = (Span::from_nanos(1), Span::from_secs(1));
        assert_eq!(Time::default(), Time::ZERO);
        for ns in [0, 1, 1_000_000_000, u64::MAX - 2] {
            assert_eq!(Time::from_nanos(ns).as_nanos(), ns);
            assert!(Time::from_nanos(ns) < Time::NEVER);
        }
        assert_eq!(Time::from_nanos(u64::MAX), Time::NEVER);
        assert_eq!(Time::from_nanos(Time::NEVER.as_nanos()), Time::NEVER);
        assert_eq!(Time::from_nanos(5) + ns, Time::from_nanos(6));
        assert_eq!(Time::from_nanos(5) - ns, Time::from_nanos(4));
        assert_eq!(Time::from_nanos(5) - second, Time::ZERO);
        assert_eq!(Time::NEVER + ns, Time::NEVER);
        assert_eq!(Time::from_nanos(7).since(Time::from_nanos(4)).as_nanos(), 3);
        assert_eq!(Time::ZERO.since(Time::NEVER), Span::ZERO);
    }
}
