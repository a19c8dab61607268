//! The queue as a picture: from now to the last deadline, how far each download has come and how likely it is on time.
//!
//! ```text
//!  now        15 min        1 h            3 h           12 h
//!  Friday: a bridge that sings            by 07:30, 93 % likely, 40 % is here
//!  ██████████─────────────────────●
//! ```
//!
//! Near times are wider than distant ones, so that minutes and days fit into one picture. Screen readers have
//! the list below it, which lacks nothing of it.

use cedos_text::escape_controls;
use d2tp_sched::likelihood;
use jiff::{Timestamp, Zoned};

use crate::fetch::deadline_text::describe_time;
use crate::fetch::report::DeadlinePromise;

/// Downloads in the picture. More would be higher than a screen.
const ROWS_MAX: usize = 12; // a guess

/// The time up to which the picture is nearly even, in seconds.
const EVEN_S: f64 = 1_800.0; // a guess

/// The shortest time that the picture covers, in seconds.
const COVERED_MIN_S: f64 = 3_600.0;

/// The least distance between two marks of the axis, in percent: their labels fit a phone's width.
const MARKS_APART: f64 = 17.0;

/// Times that the axis may mark, in seconds.
const MARKS: [(f64, &str); 10] = [
    (900.0, "15 min"),
    (3_600.0, "1 h"),
    (10_800.0, "3 h"),
    (21_600.0, "6 h"),
    (43_200.0, "12 h"),
    (86_400.0, "1 day"),
    (259_200.0, "3 days"),
    (604_800.0, "1 week"),
    (2_592_000.0, "1 month"),
    (31_536_000.0, "1 year"),
];

/// A download with a deadline, as the picture needs it.
pub(super) struct ChartedDownload<'a> {
    pub(super) title: &'a str,
    pub(super) deadline: Timestamp,
    /// How much of the download has come.
    pub(super) percent: Option<u8>,
    pub(super) promise: Option<DeadlinePromise>,
}

/// A time that the axis marks.
pub(super) struct AxisMark {
    /// Its place from the left, in percent.
    pub(super) at: u8,
    pub(super) label: &'static str,
}

/// A download in the picture.
pub(super) struct ChartRow {
    pub(super) title: String,
    pub(super) text: String,
    /// The deadline's place from the left, in percent.
    pub(super) due: u8,
    /// How far the part that has come reaches, in percent.
    pub(super) came: u8,
    /// How likely the download is on time, as a class of the style.
    pub(super) chance: &'static str,
}

/// The picture of the downloads that have a deadline.
pub(super) struct DeadlineChart {
    /// What the picture shows, in a sentence.
    pub(super) label: String,
    pub(super) marks: Vec<AxisMark>,
    pub(super) rows: Vec<ChartRow>,
    /// Downloads that are in the list alone.
    pub(super) more: usize,
}

/// The place of a time between now and the end of the picture, from 0 to 100.
fn place(seconds: f64, covered_s: f64) -> f64 {
    let scale = |s: f64| (s.max(0.0) / EVEN_S).ln_1p();
    (100.0 * scale(seconds) / scale(covered_s)).min(100.0)
}

fn seconds_until(at: Timestamp, now: &Zoned) -> f64 {
    at.duration_since(now.timestamp()).as_secs_f64().max(0.0)
}

fn marks(covered_s: f64) -> Vec<AxisMark> {
    let mut marks: Vec<AxisMark> = Vec::new();
    let mut last = 0.0;
    for (seconds, label) in MARKS {
        let at = place(seconds, covered_s);
        if seconds <= covered_s && at - last >= MARKS_APART {
            last = at;
            marks.push(AxisMark {
                at: at.round() as u8,
                label,
            });
        }
    }
    marks
}

impl ChartRow {
    fn of(download: &ChartedDownload<'_>, covered_s: f64, now: &Zoned) -> ChartRow {
        // The deadline of a moment ago is seen at the very left.
        let due = place(seconds_until(download.deadline, now), covered_s).max(1.0);
        let mut words = vec![format!("by {}", describe_time(download.deadline, now))];
        let promise = download.promise.as_ref();
        words.extend(promise.map(|promise| format!("{} likely", likelihood(promise.p))));
        words.extend(
            download
                .percent
                .map(|percent| format!("{percent} % is here")),
        );
        ChartRow {
            title: escape_controls(download.title).into_owned(),
            text: words.join(", "),
            due: due.round() as u8,
            came: (due * f64::from(download.percent.unwrap_or(0)) / 100.0).round() as u8,
            chance: match promise {
                None => "unknown",
                Some(promise) if promise.is_on_track() => "likely",
                Some(promise) if promise.infeasible => "unlikely",
                Some(_) => "at-risk",
            },
        }
    }
}

impl DeadlineChart {
    /// The picture of these downloads, by their deadlines; none without any.
    pub(super) fn of(downloads: &[ChartedDownload<'_>], now: &Zoned) -> Option<DeadlineChart> {
        let shown = &downloads[..downloads.len().min(ROWS_MAX)];
        let last = shown.iter().map(|download| download.deadline).max()?;
        let covered_s = seconds_until(last, now).max(COVERED_MIN_S);
        let number = match shown.len() {
            1 => "one download".to_owned(),
            number => format!("{number} downloads"),
        };
        Some(DeadlineChart {
            label: format!(
                "Time line of {number} from now to {}. The list below says the same in words.",
                describe_time(last, now)
            ),
            marks: marks(covered_s),
            rows: (shown.iter())
                .map(|download| ChartRow::of(download, covered_s, now))
                .collect(),
            more: downloads.len() - shown.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_S: i64 = 3_600;

    fn download(after_s: i64, percent: Option<u8>) -> ChartedDownload<'static> {
        ChartedDownload {
            title: "Friday\u{202e}",
            deadline: Timestamp::from_second(after_s).expect("a time"),
            percent,
            promise: None,
        }
    }

    fn now() -> Zoned {
        Timestamp::UNIX_EPOCH.to_zoned(jiff::tz::TimeZone::UTC)
    }

    #[test]
    fn deadlines_are_in_their_order_from_left_to_right_and_nothing_is_outside() {
        assert!(DeadlineChart::of(&[], &now()).is_none());
        let downloads: Vec<ChartedDownload> = [-5, 600, 2 * HOUR_S, 20 * HOUR_S, 900 * HOUR_S]
            .map(|after_s| download(after_s, Some(50)))
            .into();
        let chart = DeadlineChart::of(&downloads, &now()).expect("a chart");
        let due: Vec<u8> = chart.rows.iter().map(|row| row.due).collect();
        assert!(due.is_sorted() && due[0] == 1 && due[4] == 100, "{due:?}");
        assert!(
            due[1] > 3,
            "ten minutes are seen beside five weeks: {due:?}"
        );
        assert!(chart.rows.iter().all(|row| row.came <= row.due));
        let at: Vec<u8> = chart.marks.iter().map(|mark| mark.at).collect();
        assert!(at.windows(2).all(|pair| pair[1] - pair[0] >= 16), "{at:?}");
        assert!(at.iter().all(|at| *at <= 100) && at.len() >= 3, "{at:?}");
        let row = &chart.rows[2];
        assert_eq!(row.text, "by 02:00, 50 % is here");
        assert_eq!(row.chance, "unknown");
        assert!(
            !row.title.chars().any(cedos_text::is_control),
            "{}",
            row.title
        );
    }

    #[test]
    fn a_long_queue_is_a_picture_of_its_first_and_says_how_many_follow() {
        let downloads: Vec<ChartedDownload> = (1..=40)
            .map(|hours| download(hours * HOUR_S, None))
            .collect();
        let chart = DeadlineChart::of(&downloads, &now()).expect("a chart");
        assert_eq!((chart.rows.len(), chart.more), (ROWS_MAX, 28));
        assert!(
            chart.label.contains("12 downloads from now to"),
            "{}",
            chart.label
        );
        assert_eq!(chart.rows.last().map(|row| row.due), Some(100));
    }
}
