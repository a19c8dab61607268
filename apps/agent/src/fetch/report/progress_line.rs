//! The progress of a transfer as one line for people, as long as the terminal is wide.
//!
//! ```text
//!  45 %, 12.3 MB of 27.0 MB, 12 s left, 1.2 MB/s on wlan0, 97 % likely by 07:30, mobile data 1.1 MB
//!  ───────────────────────── more important ◀──▶ less important: left out where it does not fit ────
//! ```

use std::time::Duration;

use d2tp_sched::{format_duration, likelihood};
use jiff::{SignedDuration, Unit, Zoned};

use super::{DeadlinePromise, TransferEvent, human_bytes, link_label};
use crate::fetch::deadline_text::describe_time;
use crate::fetch::mode::FetchMode;

/// The weight of the last second's rate in the average that the time left is computed from.
const LAST_SECOND_SHARE: f64 = 0.2; // a guess: a time left that can be read before it changes

/// The longest time left that is shown; with a slower network the number says nothing.
const TIME_LEFT_MAX: Duration = Duration::from_secs(100 * 3_600); // a guess

/// Makes lines of progress events.
#[derive(Debug, Default)]
pub(super) struct ProgressLine {
    /// The moving average of the rate, in bytes per second.
    rate: Option<f64>,
}

impl ProgressLine {
    /// The parts of the line for an event, the most important first; none if it is no progress.
    pub(super) fn parts(&mut self, event: &TransferEvent, now: &Zoned) -> Option<Vec<String>> {
        let TransferEvent::Progress {
            bytes,
            length,
            rate_bytes_per_s,
            link,
            why,
            mode,
            promise,
            metered_bytes,
            ..
        } = event
        else {
            return None;
        };
        let rate = match self.rate {
            Some(before) => before + LAST_SECOND_SHARE * (rate_bytes_per_s - before),
            None => *rate_bytes_per_s,
        };
        self.rate = (rate > 0.0).then_some(rate);
        let mut parts = Vec::new();
        match length {
            Some(length) => {
                parts.push(share(*bytes, *length));
                parts.push(format!(
                    "{} of {}",
                    human_bytes(*bytes),
                    human_bytes(*length)
                ));
                parts.extend(time_left(length.saturating_sub(*bytes), rate));
            }
            None => parts.push(human_bytes(*bytes)),
        }
        let on = match link.is_empty() {
            true => String::new(),
            false => format!(" on {}", link_names(link)),
        };
        parts.push(format!("{}/s{on}", human_bytes(rate as u64)));
        parts.extend(promise.map(|promise| likely_by(&promise, now)));
        if *metered_bytes > 0 {
            parts.push(format!("mobile data {}", human_bytes(*metered_bytes)));
        }
        if *mode == FetchMode::Sealed {
            parts.push("sealed".to_owned());
        }
        // That a free link is used needs no reason.
        if !why.is_empty() && !why.ends_with(" is free") {
            parts.push(why.clone());
        }
        Some(parts)
    }
}

/// The columns of the line with all parts.
pub(super) fn columns(parts: &[String]) -> usize {
    let text: usize = parts.iter().map(|part| part.chars().count()).sum();
    text + 2 * parts.len().saturating_sub(1)
}

/// The line with as many parts as fit into `width` columns.
pub(super) fn fit(parts: &[String], width: usize) -> String {
    let mut line = String::new();
    for part in parts {
        let comma = if line.is_empty() { "" } else { ", " };
        let wanted = line.chars().count() + comma.len() + part.chars().count();
        if wanted > width && !line.is_empty() {
            break;
        }
        line = line + comma + part;
    }
    line
}

/// The part that is there, in per cent: 100 only for all of it.
fn share(bytes: u64, length: u64) -> String {
    let percent = match length {
        0 => 100,
        length => u128::from(bytes.min(length)) * 100 / u128::from(length),
    };
    format!("{percent} %")
}

fn time_left(bytes: u64, rate: f64) -> Option<String> {
    let left = Duration::try_from_secs_f64(bytes as f64 / rate).ok()?;
    let left = left.max(Duration::from_secs(1));
    (left <= TIME_LEFT_MAX).then(|| format!("{} left", format_duration(left)))
}

/// The links of an event, which joins several by `+`, for people.
fn link_names(links: &str) -> String {
    let names: Vec<&str> = links.split('+').map(link_label).collect();
    names.join(" and ")
}

/// The forecast for the deadline: `97 % likely by 07:30`.
fn likely_by(promise: &DeadlinePromise, now: &Zoned) -> String {
    let left = SignedDuration::try_from_secs_f64(promise.left_s).unwrap_or_default();
    let by = now.timestamp().saturating_add(left);
    let by = by.ok().and_then(|by| by.round(Unit::Second).ok());
    let by = by.unwrap_or_else(|| now.timestamp());
    format!(
        "{} likely by {}",
        likelihood(promise.p),
        describe_time(by, now)
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn progress(bytes: u64, rate: f64, promise: Option<DeadlinePromise>) -> TransferEvent {
        TransferEvent::Progress {
            t_s: 1.0,
            bytes,
            length: Some(27_000_000),
            rate_bytes_per_s: rate,
            link: "wlan0+wwan0".into(),
            bytes_by_link: BTreeMap::new(),
            metered_bytes: 1_500_000,
            why: "both are needed".into(),
            mode: FetchMode::ProxyFetch,
            promise,
        }
    }

    fn noon() -> Zoned {
        let now = Zoned::now().with().hour(12).minute(0).second(0);
        now.subsec_nanosecond(0).build().expect("noon")
    }

    #[test]
    fn a_line_says_how_far_how_long_how_fast_by_when_and_at_what_cost() {
        let promise = DeadlinePromise {
            p: 0.97,
            infeasible: false,
            metered_bytes_expected: 0,
            metered_bytes_95: 0,
            metered_bytes_worst: 0,
            left_s: 7_199.999,
        };
        let event = progress(13_500_000, 1_350_000.0, Some(promise));
        let parts = ProgressLine::default().parts(&event, &noon());
        let line = fit(&parts.expect("progress"), 200);
        assert_eq!(
            line,
            "50 %, 13.50 MB of 27.00 MB, 10 s left, 1.35 MB/s on wlan0 and wwan0, 97 % likely by 14:00, \
             mobile data 1.50 MB, both are needed"
        );
    }

    #[test]
    fn a_narrow_line_ends_with_a_whole_part() {
        let event = progress(13_500_000, 1_350_000.0, None);
        let parts = ProgressLine::default().parts(&event, &noon());
        let parts = parts.expect("progress");
        assert_eq!(fit(&parts, 30), "50 %, 13.50 MB of 27.00 MB");
        assert_eq!(fit(&parts, 10), "50 %");
        assert_eq!(fit(&parts, 1), "50 %");
        assert_eq!(columns(&parts), fit(&parts, usize::MAX).chars().count());
    }

    #[test]
    fn what_is_not_known_is_not_said() {
        let mut line = ProgressLine::default();
        let event = progress(13_500_000, 0.0, None);
        let parts = line.parts(&event, &noon()).expect("progress");
        assert!(!parts.iter().any(|part| part.contains("left")), "{parts:?}");
        assert_eq!(share(26_999_999, 27_000_000), "99 %");
        assert_eq!(share(0, 0), "100 %");
    }

    #[test]
    fn one_slow_second_changes_the_time_left_a_little() {
        let mut line = ProgressLine::default();
        line.parts(&progress(0, 1_000_000.0, None), &noon());
        let parts = line.parts(&progress(7_000_000, 500_000.0, None), &noon());
        let parts = parts.expect("progress");
        assert_eq!(parts[2], "22 s left");
    }
}
