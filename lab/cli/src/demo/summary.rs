//! The result of the demonstration: one object for scripts, a few lines for people.

use std::fmt;

use serde::Serialize;

use super::view::silence_text;

/// The mode with network namespaces as worlds.
pub(super) const NAMESPACES: &str = "namespaces";

/// The mode with sockets on the loopback interface as worlds.
pub(super) const LOOPBACK: &str = "loopback";

/// The share of the object that may be carried twice, in percent.
const WASTE_PERCENT_MAX: u64 = 1;

/// The object that `cedos demo --json` prints.
#[derive(Debug, Clone, Serialize)]
pub struct DemoSummary {
    /// `namespaces`, or `loopback` if the system forbids namespaces.
    pub mode: &'static str,
    /// Whether the file has the digest of the origin's object.
    pub sha256_ok: bool,
    /// Bytes of the file.
    pub bytes: u64,
    /// Payload bytes over the free link.
    pub wifi_bytes: u64,
    /// Payload bytes over the metered link.
    pub cell_bytes: u64,
    /// Payload bytes beyond one copy of the object.
    pub wasted_bytes: u64,
    /// How often the data moved to another link or address.
    pub handovers: usize,
    /// How often a link came back with another address.
    pub address_changes: usize,
    /// Seconds without any network.
    pub outage_s: f64,
    /// The deadline in seconds.
    pub deadline_s: f64,
    /// When the file was complete, in seconds; `None` if it was not.
    pub finished_s: Option<f64>,
    /// Whether the user ended the run before both downloads had ended.
    pub interrupted: bool,
    /// Whether the file was complete at its deadline.
    pub deadline_met: bool,
    /// The time without data at handovers.
    pub switch_ms: DemoSpread,
    /// The number of packets sent on a link that was down.
    pub packets_while_down: u64,
    /// The result of the download over plain TCP.
    pub tcp_baseline: Baseline,
}

/// The distribution of some figures.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct DemoSpread {
    /// The median of the switches, in milliseconds.
    pub p50: f64,
    /// The 95th percentile (nearest rank).
    pub p95: f64,
    /// The longest of the switches, in milliseconds.
    pub max: f64,
}

/// The result of the plain download.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Baseline {
    /// Whether the download was complete at the deadline.
    pub completed: bool,
    /// When the download was complete, in seconds; `None` if it was not during the run.
    pub finished_s: Option<f64>,
    /// Bytes that were fetched and discarded.
    pub bytes_refetched: u64,
    /// How often the download started from the first byte.
    pub starts: u64,
}

impl DemoSpread {
    /// The distribution of these values; all zero if there are none.
    pub(super) fn of(values: impl Iterator<Item = f64>) -> DemoSpread {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let rank = |percent: usize| {
            let rank = (values.len() * percent).div_ceil(100).max(1);
            values.get(rank - 1).copied().unwrap_or(0.0)
        };
        DemoSpread {
            p50: rank(50),
            p95: rank(95),
            max: rank(100),
        }
    }
}

impl DemoSummary {
    /// Whether the download was complete in time, with almost nothing carried twice, and without
    /// packets where there is no network.
    pub fn holds(&self) -> bool {
        self.sha256_ok
            && self.deadline_met
            && self.wasted_bytes * 100 <= self.bytes * WASTE_PERCENT_MAX
            && self.packets_while_down == 0
    }
}

impl fmt::Display for DemoSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
        let at = |finished: Option<f64>| {
            finished.map_or("not complete".to_owned(), |at| {
                format!("complete at {at:.1} s")
            })
        };
        let interrupted = |finished: Option<f64>| self.interrupted && finished.is_none();
        let at = |finished: Option<f64>| match interrupted(finished) {
            true => "interrupted".to_owned(),
            false => at(finished),
        };
        let promise = |finished: Option<f64>, met: bool| match met {
            true => "on time",
            false if interrupted(finished) => "interrupted",
            false => "MISSED",
        };
        writeln!(f)?;
        writeln!(
            f,
            "                         D2TP                  plain TCP, same events"
        )?;
        if self.mode == LOOPBACK {
            writeln!(
                f,
                "(links emulated between loopback sockets of this program)"
            )?;
        }
        let mut row =
            |what: &str, ours: String, theirs: String| writeln!(f, "{what:24} {ours:21} {theirs}");
        row(
            "finished",
            at(self.finished_s),
            at(self.tcp_baseline.finished_s),
        )?;
        row(
            &format!("deadline {:.0} s", self.deadline_s),
            promise(self.finished_s, self.deadline_met).into(),
            promise(self.tcp_baseline.finished_s, self.tcp_baseline.completed).into(),
        )?;
        row(
            "fetched again",
            mb(self.wasted_bytes),
            mb(self.tcp_baseline.bytes_refetched),
        )?;
        row(
            "started from zero",
            "never".into(),
            match self.tcp_baseline.starts.saturating_sub(1) {
                0 => "never".into(),
                1 => "once".into(),
                times => format!("{times} times"),
            },
        )?;
        row("over Wi-Fi, free", mb(self.wifi_bytes), "-".into())?;
        row("over mobile data", mb(self.cell_bytes), "-".into())?;
        row(
            "sha256",
            match self.sha256_ok {
                true => "correct".into(),
                false if interrupted(self.finished_s) => "-".into(),
                false => "WRONG".into(),
            },
            "-".into(),
        )?;
        write!(
            f,
            "{}, {}, {:.1} s without a network\n\
             without data at a handover: {} (median), {} (longest)",
            counted(self.handovers, "handover", "handovers"),
            counted(self.address_changes, "new address", "new addresses"),
            self.outage_s,
            silence_text(self.switch_ms.p50),
            silence_text(self.switch_ms.max)
        )
    }
}

fn counted(number: usize, one: &str, many: &str) -> String {
    let word = if number == 1 { one } else { many };
    format!("{number} {word}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_is_by_nearest_rank() {
        let spread = DemoSpread::of([5.0, 1.0, 3.0].into_iter());
        assert_eq!((spread.p50, spread.p95, spread.max), (3.0, 5.0, 5.0));
        assert_eq!(DemoSpread::of(std::iter::empty()).max, 0.0);
    }

    #[test]
    fn what_was_interrupted_is_called_that_and_not_wrong() {
        let summary = DemoSummary {
            mode: NAMESPACES,
            sha256_ok: false,
            bytes: 0,
            wifi_bytes: 5_000_000,
            cell_bytes: 0,
            wasted_bytes: 0,
            handovers: 0,
            address_changes: 0,
            outage_s: 0.0,
            deadline_s: 45.0,
            finished_s: None,
            interrupted: true,
            deadline_met: false,
            switch_ms: DemoSpread::default(),
            packets_while_down: 0,
            tcp_baseline: Baseline {
                completed: false,
                finished_s: None,
                bytes_refetched: 0,
                starts: 1,
            },
        };
        let text = summary.to_string();
        assert_eq!(text.matches("interrupted").count(), 4, "{text}");
        assert!(
            !text.contains("WRONG") && !text.contains("MISSED"),
            "{text}"
        );
        assert!(!summary.holds());
    }
}
