//! When the episodes of a channel are wanted, and how many are kept; as people write it.
//!
//! | written | is |
//! |---|---|
//! | `by hand` | nothing is fetched unless asked for |
//! | `whenever it is free` | without a deadline, by free networks only |
//! | `in 2h` | within two hours of being published |
//! | `07:30`, `daily 07:30`, `weekdays 07:30`, `weekends 9am`, `mon,fri 16:00` | by the next such time |

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use cedos_text::{parse_span, parse_time_of_day, parse_weekday};
use jiff::civil::{Time, Weekday};
use jiff::{Timestamp, ToSpan, Zoned};
use serde::{Deserialize, Serialize};

use crate::enclosure_choice::EnclosureChoice;

/// The policy of downloads that wait for a free network for as long as it takes.
pub(crate) const WHEN_FREE_POLICY: &str = "free-only";

/// Episodes of a channel that are kept if its rule says nothing else.
pub const KEEP_LATEST_DEFAULT: u32 = 3; // a guess: a week's commutes of a daily podcast are five

/// The least time between now and a deadline: for what is due already.
pub(crate) const NOTICE_MIN: Duration = Duration::from_secs(60); // a guess: a short episode's download

/// Days of the week.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WeekdaySet(u8);

impl WeekdaySet {
    /// The set of all days of the week.
    pub const DAILY: WeekdaySet = WeekdaySet(0b111_1111);
    /// Monday to Friday.
    pub const WEEKDAYS: WeekdaySet = WeekdaySet(0b001_1111);
    /// Saturday and Sunday.
    pub const WEEKENDS: WeekdaySet = WeekdaySet(0b110_0000);

    /// The set of one day.
    pub fn one(day: Weekday) -> WeekdaySet {
        WeekdaySet(1 << day.to_monday_zero_offset())
    }

    /// Whether `day` is in the set.
    pub fn contains(self, day: Weekday) -> bool {
        self.0 & WeekdaySet::one(day).0 != 0
    }
}

impl FromStr for WeekdaySet {
    type Err = String;

    fn from_str(text: &str) -> Result<WeekdaySet, String> {
        let named = |name: &str| match name {
            "daily" | "day" => Some(WeekdaySet::DAILY),
            "weekdays" | "weekday" => Some(WeekdaySet::WEEKDAYS),
            "weekends" | "weekend" => Some(WeekdaySet::WEEKENDS),
            name => parse_weekday(name.strip_suffix('s').unwrap_or(name))
                .or_else(|| parse_weekday(name))
                .map(WeekdaySet::one),
        };
        let text = text.strip_prefix("every ").unwrap_or(text);
        let mut days = WeekdaySet(0);
        for name in text.split(',') {
            let name = name.trim();
            let set = named(name).ok_or_else(|| {
                format!("`{name}` is no day: write daily, weekdays, weekends or mon,fri")
            })?;
            days.0 |= set.0;
        }
        Ok(days)
    }
}

impl fmt::Display for WeekdaySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            WeekdaySet::DAILY => return f.write_str("daily"),
            WeekdaySet::WEEKDAYS => return f.write_str("weekdays"),
            WeekdaySet::WEEKENDS => return f.write_str("weekends"),
            _ => {}
        }
        let mut separator = "";
        for day in Weekday::Monday
            .cycle_forward()
            .take(7)
            .filter(|day| self.contains(*day))
        {
            let name = match day {
                Weekday::Monday => "mon",
                Weekday::Tuesday => "tue",
                Weekday::Wednesday => "wed",
                Weekday::Thursday => "thu",
                Weekday::Friday => "fri",
                Weekday::Saturday => "sat",
                Weekday::Sunday => "sun",
            };
            write!(f, "{separator}{name}")?;
            separator = ",";
        }
        Ok(())
    }
}

/// When the new episodes of a channel are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownloadSchedule {
    /// Only what is asked for by hand.
    Manual,
    /// All, without a deadline, by free networks only.
    WhenFree,
    /// Within this time of being published.
    Within(Duration),
    /// The deadline is the next such time of day on one of these days.
    At {
        /// Days on which it is wanted.
        days: WeekdaySet,
        /// The time of day, in local time.
        time: Time,
    },
}

impl DownloadSchedule {
    /// The deadline of an episode that was published at `published`; none if it has none.
    pub fn deadline(&self, published: Timestamp, now: &Zoned) -> Option<Timestamp> {
        let soonest = now.timestamp() + NOTICE_MIN;
        match *self {
            DownloadSchedule::Manual | DownloadSchedule::WhenFree => None,
            DownloadSchedule::Within(span) => {
                let due = published.checked_add(span).unwrap_or(soonest);
                Some(due.max(soonest))
            }
            DownloadSchedule::At { days, time } => (0..8).find_map(|ahead: i64| {
                let date = now.date().saturating_add(ahead.days());
                let at = date.to_datetime(time).to_zoned(now.time_zone().clone());
                let at = at.ok()?.timestamp();
                (days.contains(date.weekday()) && at >= soonest).then_some(at)
            }),
        }
    }
}

impl FromStr for DownloadSchedule {
    type Err = String;

    fn from_str(text: &str) -> Result<DownloadSchedule, String> {
        let lower = text.trim().to_lowercase();
        match lower.as_str() {
            "by hand" | "manual" => return Ok(DownloadSchedule::Manual),
            "whenever it is free" | "when free" | "free" => return Ok(DownloadSchedule::WhenFree),
            _ => {}
        }
        if let Some(span) = lower
            .strip_prefix("in ")
            .or_else(|| lower.strip_prefix('+'))
        {
            return parse_span(span.trim()).map(DownloadSchedule::Within);
        }
        if let Some(time) = parse_time_of_day(&lower) {
            let days = WeekdaySet::DAILY;
            return Ok(DownloadSchedule::At { days, time });
        }
        // The time may have a blank of its own: `7:30 pm`.
        for (blank, _) in lower.match_indices(' ') {
            let (days, time) = lower.split_at(blank);
            let (Ok(days), Some(time)) = (days.parse(), parse_time_of_day(time.trim())) else {
                continue;
            };
            return Ok(DownloadSchedule::At { days, time });
        }
        Err(format!(
            "`{text}` says no time: write \"weekdays 07:30\", \"fri 16:00\", \"in 2h\", \
             \"whenever it is free\" or \"by hand\""
        ))
    }
}

impl fmt::Display for DownloadSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DownloadSchedule::Manual => f.write_str("by hand"),
            DownloadSchedule::WhenFree => f.write_str("whenever it is free"),
            DownloadSchedule::Within(span) => {
                let s = span.as_secs();
                match (s.is_multiple_of(3_600), s.is_multiple_of(60)) {
                    (true, _) => write!(f, "in {}h", s / 3_600),
                    (false, true) => write!(f, "in {}m", s / 60),
                    (false, false) => write!(f, "in {s}s"),
                }
            }
            DownloadSchedule::At { days, time } => {
                write!(f, "{days} {:02}:{:02}", time.hour(), time.minute())
            }
        }
    }
}

/// How much of a channel is kept on this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepRule {
    /// The number of newest episodes that are kept.
    pub latest: u32,
    /// Only those that were not played.
    pub unplayed_only: bool,
    /// The maximum number of bytes of files; none if only the number counts.
    pub bytes_max: Option<u64>,
}

impl Default for KeepRule {
    fn default() -> KeepRule {
        KeepRule {
            latest: KEEP_LATEST_DEFAULT,
            unplayed_only: true,
            bytes_max: None,
        }
    }
}

impl fmt::Display for KeepRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the latest {}", self.latest)?;
        if self.unplayed_only {
            f.write_str(" not played")?;
        }
        match self.bytes_max {
            Some(bytes) => write!(f, ", at most {} MB", bytes / 1_000_000),
            None => Ok(()),
        }
    }
}

/// Which episodes of a channel are fetched, by when, and how many are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelRule {
    /// When new episodes are wanted.
    #[serde(with = "as_text")]
    pub schedule: DownloadSchedule,
    /// Policy of the downloads, as `--policy` takes it; none for the device's own.
    pub policy: Option<String>,
    /// How much is kept.
    pub keep: KeepRule,
    /// Which enclosure of an episode is downloaded.
    #[serde(default)]
    pub enclosure: EnclosureChoice,
}

impl ChannelRule {
    /// The policy of downloads: that of the rule, or the one that its schedule asks for; none for the device's own.
    pub fn download_policy(&self) -> Option<String> {
        match (&self.policy, self.schedule) {
            (None, DownloadSchedule::WhenFree) => Some(WHEN_FREE_POLICY.to_owned()),
            (policy, _) => policy.clone(),
        }
    }
}

impl Default for ChannelRule {
    fn default() -> ChannelRule {
        ChannelRule {
            schedule: DownloadSchedule::WhenFree,
            policy: None,
            keep: KeepRule::default(),
            enclosure: EnclosureChoice::Original,
        }
    }
}

/// Values that are stored as people write them.
mod as_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err = String>,
        D: Deserializer<'de>,
    {
        String::deserialize(from)?
            .parse()
            .map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A Saturday, at noon.
    fn noon() -> Zoned {
        "2030-06-01T12:00:00[Asia/Seoul]"
            .parse()
            .expect("a zoned time")
    }

    fn deadline(schedule: &str) -> Option<String> {
        let schedule: DownloadSchedule = schedule.parse().expect("a schedule");
        let at = schedule.deadline("2030-06-01T02:00:00Z".parse().expect("a time"), &noon())?;
        let at = at.to_zoned(noon().time_zone().clone());
        Some(at.strftime("%a %H:%M").to_string())
    }

    #[test]
    fn a_schedule_is_the_next_such_time() {
        assert_eq!(deadline("weekdays 07:30").as_deref(), Some("Mon 07:30"));
        assert_eq!(deadline("daily 13:00").as_deref(), Some("Sat 13:00"));
        assert_eq!(deadline("7:30 pm").as_deref(), Some("Sat 19:30"));
        assert_eq!(deadline("sat 12:00").as_deref(), Some("Sat 12:00"));
        assert_eq!(deadline("sat,sun 9am").as_deref(), Some("Sun 09:00"));
        assert_eq!(deadline("fridays 16:00").as_deref(), Some("Fri 16:00"));
        assert_eq!(deadline("weekday 07:30").as_deref(), Some("Mon 07:30"));
        assert_eq!(deadline("every day 13:00").as_deref(), Some("Sat 13:00"));
        assert_eq!(deadline("every weekend 9am").as_deref(), Some("Sun 09:00"));
        assert_eq!(deadline("whenever it is free"), None);
        assert_eq!(deadline("by hand"), None);
    }

    #[test]
    fn within_counts_from_publication_and_is_never_past() {
        // Published at 11:00 in Seoul.
        assert_eq!(deadline("in 2h").as_deref(), Some("Sat 13:00"));
        assert_eq!(deadline("in 30m").as_deref(), Some("Sat 12:01"));
    }

    #[test]
    fn what_is_written_is_read_again() {
        for text in [
            "by hand",
            "whenever it is free",
            "in 2h",
            "in 90m",
            "daily 07:30",
            "weekdays 07:30",
            "weekends 09:00",
            "mon,fri 16:00",
        ] {
            let schedule: DownloadSchedule = text.parse().expect(text);
            assert_eq!(schedule.to_string(), text);
        }
        for bad in ["", "soon", "weekdays", "07", "someday 07:30", "in", "25:00"] {
            assert!(bad.parse::<DownloadSchedule>().is_err(), "{bad}");
        }
    }
}
