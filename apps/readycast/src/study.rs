//! The questions of the paper's field study, answered from a log of downloads: how much was moved to Wi-Fi, what
//! resumption saved, how long people let a download wait.
//!
//! ```text
//!  transfer_log ─┬─▶ StudySummary::of       shares of all downloads, and by the delay that was allowed
//!                └─▶ propose_delay          the most patient rule that would still have been in time for what was played
//! ```
//!
//! Pure functions: a log that another device exported serves as well.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::civil::{Time, Weekday};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::rule::{DownloadSchedule, WeekdaySet};
use crate::transfer_log::{AcceptedDelay, TransferLogEntry};

/// Hours of a delay in seconds.
const HOUR: u64 = 3_600;

/// The classes of delay of the paper's figure 9: a name, and the longest delay in seconds. The last has none.
// Cedos V.B.3: "on the spot", "a few tens of minutes", "exceeds three hours"; one to three hours is between them.
pub const DELAY_CLASSES: [(&str, Option<u64>); 4] = [
    ("none", Some(0)),
    ("tens_of_minutes", Some(HOUR)),
    ("one_to_three_hours", Some(3 * HOUR)),
    ("above_three_hours", None),
];

/// Figures of the downloads in a log that were wanted after about the same delay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DelayClassSummary {
    /// Name of the class; see [`DELAY_CLASSES`].
    pub delay: String,
    /// Downloads that are whole.
    pub downloads: u64,
    /// Bytes that networks carried.
    pub carried_bytes: u64,
    /// Share of the bytes that Wi-Fi carried; none without bytes.
    pub wifi_share: Option<f64>,
    /// Share of the downloads with a deadline that were whole by it; none if none had one.
    pub in_time_share: Option<f64>,
}

/// Figures of all downloads in a log. Shares are 0 to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StudySummary {
    /// Downloads that are whole.
    pub downloads: u64,
    /// Downloads that ended without a whole file; they are in no share but the one that says so.
    pub unfinished: u64,
    /// Bytes of the files that are whole.
    pub bytes: u64,
    /// Bytes that networks carried for them.
    pub carried_bytes: u64,
    /// Share of the downloads that might wait.
    pub delayed_share: Option<f64>,
    /// Share of the bytes that Wi-Fi carried.
    pub wifi_share: Option<f64>,
    /// Share of the bytes that mobile networks carried.
    pub cellular_share: Option<f64>,
    /// Share of the bytes that networks carried which are not free.
    pub metered_share: Option<f64>,
    /// Downloads with a deadline, except unfinished ones that ended before it.
    pub with_deadline: u64,
    /// Share of the downloads with a deadline that were whole by it.
    pub in_time_share: Option<f64>,
    /// Bytes that a client without resumption would fetch again after each loss of its network.
    pub restart_bytes: u64,
    /// Bytes that were fetched again here.
    pub wasted_bytes: u64,
    /// Bytes that were saved against such a client.
    pub saved_bytes: u64,
    /// Saved bytes as a share of the bytes of the files.
    pub saved_share: Option<f64>,
    /// Share of the downloads that changed networks.
    pub switching_share: Option<f64>,
    /// Mean number of switches of a download that changed networks.
    pub switches_each: Option<f64>,
    /// Downloads that were played.
    pub played: u64,
    /// Share of the played downloads that were whole when they were first played.
    pub ready_when_played_share: Option<f64>,
    /// Downloads by the delay that was allowed.
    pub by_delay: Vec<DelayClassSummary>,
}

/// A part of a whole; none if there is no whole.
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn count<'a>(
    entries: impl IntoIterator<Item = &'a TransferLogEntry>,
    is_counted: impl Fn(&TransferLogEntry) -> bool,
) -> u64 {
    entries
        .into_iter()
        .filter(|entry| is_counted(entry))
        .count() as u64
}

fn sum<'a>(
    entries: impl IntoIterator<Item = &'a TransferLogEntry>,
    of: impl Fn(&TransferLogEntry) -> u64,
) -> u64 {
    entries.into_iter().map(of).sum()
}

/// The class of an entry in [`DELAY_CLASSES`].
fn delay_class(entry: &TransferLogEntry) -> usize {
    let delay_s = match entry.accepted_delay() {
        AcceptedDelay::Immediate => 0,
        AcceptedDelay::Within(delay) => delay.as_secs(),
        AcceptedDelay::Unlimited => u64::MAX,
    };
    let fits = |(_, most): &(&str, Option<u64>)| most.is_none_or(|most| delay_s <= most);
    let found = DELAY_CLASSES.iter().position(fits);
    found.unwrap_or(DELAY_CLASSES.len() - 1)
}

/// Downloads with a deadline, and how many of them were whole by it.
fn in_time(entries: &[&TransferLogEntry]) -> (u64, u64) {
    let judged: Vec<bool> = entries
        .iter()
        .filter(|entry| entry.is_whole || entry.deadline.is_some_and(|at| entry.ended_at >= at))
        .filter_map(|entry| entry.is_in_time())
        .collect();
    let met = judged.iter().filter(|met| **met).count();
    (judged.len() as u64, met as u64)
}

impl StudySummary {
    /// Summarises a log of transfers.
    pub fn of(entries: &[TransferLogEntry]) -> StudySummary {
        let all: Vec<&TransferLogEntry> = entries.iter().collect();
        let whole: Vec<&TransferLogEntry> = entries.iter().filter(|e| e.is_whole).collect();
        let each = || whole.iter().copied();
        let downloads = whole.len() as u64;
        let bytes = sum(each(), |e| e.bytes);
        let carried_bytes = sum(each(), TransferLogEntry::carried_bytes);
        let by_kind = |kind: &str| share(sum(each(), |e| e.carried_by_kind(kind)), carried_bytes);
        let metered = sum(each(), |e| {
            let paid = e.carried.iter().filter(|c| c.network.class != "free");
            paid.map(|carried| carried.bytes).sum()
        });
        let (with_deadline, met) = in_time(&all);
        let restart_bytes = sum(each(), TransferLogEntry::restart_bytes);
        let wasted_bytes = sum(each(), |e| e.wasted_bytes);
        let saved_bytes = restart_bytes.saturating_sub(wasted_bytes);
        let switching = count(each(), |e| !e.switches.is_empty());
        let switches = sum(each(), |e| e.switches.len() as u64);
        let played = count(each(), |e| e.played_at.is_some());
        let ready = count(each(), |e| e.played_at.is_some_and(|at| whole_at(e) <= at));
        StudySummary {
            downloads,
            unfinished: all.len() as u64 - downloads,
            bytes,
            carried_bytes,
            delayed_share: share(count(each(), |e| delay_class(e) > 0), downloads),
            wifi_share: by_kind("wifi"),
            cellular_share: by_kind("cellular"),
            metered_share: share(metered, carried_bytes),
            with_deadline,
            in_time_share: share(met, with_deadline),
            restart_bytes,
            wasted_bytes,
            saved_bytes,
            saved_share: share(saved_bytes, bytes),
            switching_share: share(switching, downloads),
            switches_each: share(switches, switching),
            played,
            ready_when_played_share: share(ready, played),
            by_delay: by_delay(&whole),
        }
    }
}

/// When a file was whole, to the second: plays are stored so.
fn whole_at(entry: &TransferLogEntry) -> Timestamp {
    let at = entry.last_byte_at.unwrap_or(entry.ended_at);
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

fn by_delay(whole: &[&TransferLogEntry]) -> Vec<DelayClassSummary> {
    let classes = DELAY_CLASSES.iter().enumerate();
    let of_class = |(n, (name, _)): (usize, &(&str, Option<u64>))| {
        let of: Vec<&TransferLogEntry> = whole
            .iter()
            .copied()
            .filter(|e| delay_class(e) == n)
            .collect();
        let carried_bytes = sum(of.iter().copied(), TransferLogEntry::carried_bytes);
        let wifi = sum(of.iter().copied(), |e| e.carried_by_kind("wifi"));
        let (with_deadline, met) = in_time(&of);
        DelayClassSummary {
            delay: (*name).to_owned(),
            downloads: of.len() as u64,
            carried_bytes,
            wifi_share: share(wifi, carried_bytes),
            in_time_share: share(met, with_deadline),
        }
    };
    classes.map(of_class).collect()
}

/// The fewest plays from which a rule is proposed.
pub const PROPOSAL_PLAYS_MIN: usize = 5; // a guess: a week's commutes

/// The most plays that are looked at: the newest, since habits change.
pub const PROPOSAL_PLAYS_MAX: usize = 40; // a guess: eight weeks' commutes

/// Share of plays for which a proposed rule would have been in time.
pub const PROPOSAL_MET_SHARE: f64 = 0.9; // a guess: one day in ten is unlike the others

/// Time between a proposed deadline and the plays that it is in time for.
const PROPOSAL_MARGIN: SignedDuration = SignedDuration::from_mins(15); // a guess

/// Minutes between the times of day that are proposed.
const PROPOSAL_STEP_MIN: i8 = 30;

/// A rule is proposed only if it lets downloads wait for this much longer than the one that is set.
const PROPOSAL_GAIN_MIN: Duration = Duration::from_secs(30 * 60); // a guess

/// Hours of the proposed `in 2h`.
const PROPOSAL_HOURS: [u64; 8] = [1, 2, 3, 4, 6, 8, 12, 24];

/// A rule that fits how a channel is listened to. It is shown, and never set by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DelayProposal {
    /// The rule, as a person writes it.
    pub schedule: String,
    /// Plays that it is learnt from.
    pub plays: usize,
    /// Plays for which the rule would have been in time.
    pub met: usize,
    /// Plays for which the present rule would have been in time; none if it has no deadline.
    pub met_now: Option<usize>,
    /// Mean time that a download might wait, in seconds.
    pub mean_delay_s: u64,
    /// Mean time that the present rule lets a download wait, in seconds; none if it has no deadline.
    pub mean_delay_now_s: Option<u64>,
}

/// When an episode was asked for, and when it was first played.
type FirstPlay = (Timestamp, Timestamp);

/// The most patient rule that would have been in time for nine of ten plays in the log; none if there are too few
/// plays, if none is, or if the present rule does as well.
pub fn propose_delay(
    entries: &[TransferLogEntry],
    present: DownloadSchedule,
    zone: &TimeZone,
) -> Option<DelayProposal> {
    // An episode may have been tried several times before it was whole: it is one play, wanted since the first.
    let mut by_play = BTreeMap::new();
    for entry in entries {
        let Some(played_at) = entry.played_at.filter(|at| *at > entry.started_at) else {
            continue;
        };
        let play = by_play
            .entry((entry.episode, played_at))
            .or_insert((entry.started_at, false));
        *play = (play.0.min(entry.started_at), play.1 || entry.is_whole);
    }
    let whole = by_play.into_iter().filter(|(_, (_, is_whole))| *is_whole);
    let mut plays: Vec<FirstPlay> = whole
        .map(|((_, played_at), (started_at, _))| (started_at, played_at))
        .collect();
    plays.sort_by_key(|(_, played_at)| *played_at);
    plays.drain(..plays.len().saturating_sub(PROPOSAL_PLAYS_MAX));
    if plays.len() < PROPOSAL_PLAYS_MIN {
        return None;
    }
    let needed = (PROPOSAL_MET_SHARE * plays.len() as f64).ceil() as usize;
    let fits = |schedule: &DownloadSchedule| {
        let (met, delay) = judge(*schedule, &plays, zone, PROPOSAL_MARGIN)?;
        (met >= needed).then_some((*schedule, met, delay))
    };
    let candidates = candidates(&plays, zone);
    // Of equals the first: it is the simplest.
    let (schedule, met, delay) = candidates
        .iter()
        .filter_map(fits)
        .reduce(|best, next| if next.2 > best.2 { next } else { best })?;
    let now = judge(present, &plays, zone, SignedDuration::ZERO);
    if let Some((met_now, delay_now)) = now {
        let is_met = met_now >= needed;
        if schedule == present || (is_met && delay < delay_now + PROPOSAL_GAIN_MIN) {
            return None;
        }
    }
    Some(DelayProposal {
        schedule: schedule.to_string(),
        plays: plays.len(),
        met,
        met_now: now.map(|(met, _)| met),
        mean_delay_s: delay.as_secs(),
        mean_delay_now_s: now.map(|(_, delay)| delay.as_secs()),
    })
}

/// How many plays a rule would have been in time for, and how long it lets downloads wait on average; none if it has
/// no deadlines.
fn judge(
    schedule: DownloadSchedule,
    plays: &[FirstPlay],
    zone: &TimeZone,
    margin: SignedDuration,
) -> Option<(usize, Duration)> {
    let mut met = 0;
    let mut waits = Duration::ZERO;
    for (asked_at, played_at) in plays {
        let deadline = schedule.deadline(*asked_at, &asked_at.to_zoned(zone.clone()))?;
        met += usize::from(
            deadline
                .checked_add(margin)
                .is_ok_and(|by| by <= *played_at),
        );
        waits += Duration::try_from(deadline.duration_since(*asked_at)).unwrap_or_default();
    }
    Some((
        met,
        waits / u32::try_from(plays.len()).unwrap_or(u32::MAX).max(1),
    ))
}

/// Rules that could fit: spans, and the times of day at which something was played, rounded down.
fn candidates(plays: &[FirstPlay], zone: &TimeZone) -> Vec<DownloadSchedule> {
    let spans =
        PROPOSAL_HOURS.map(|hours| DownloadSchedule::Within(Duration::from_secs(hours * HOUR)));
    let mut times: Vec<Time> = plays
        .iter()
        .filter_map(|(_, played_at)| {
            let latest = played_at.checked_sub(PROPOSAL_MARGIN).ok()?;
            let latest = latest.to_zoned(zone.clone()).time();
            Time::new(
                latest.hour(),
                latest.minute() / PROPOSAL_STEP_MIN * PROPOSAL_STEP_MIN,
                0,
                0,
            )
            .ok()
        })
        .collect();
    times.sort_unstable();
    times.dedup();
    let sets = [
        WeekdaySet::DAILY,
        WeekdaySet::WEEKDAYS,
        WeekdaySet::WEEKENDS,
    ];
    let days = sets
        .into_iter()
        .chain(Weekday::Monday.cycle_forward().take(7).map(WeekdaySet::one));
    let at = days.flat_map(|days| {
        times
            .iter()
            .map(move |time| DownloadSchedule::At { days, time: *time })
    });
    spans.into_iter().chain(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EpisodeId;
    use crate::transfer_log::{CarriedBytes, LoggedLoss, LoggedNetwork, LoggedSwitch};

    fn at(text: &str) -> Timestamp {
        text.parse().expect("a time")
    }

    /// A download of 1000 bytes that was asked for at noon, with this many bytes by Wi-Fi.
    fn entry(delay_s: i64, wifi: u64) -> TransferLogEntry {
        let started_at = at("2030-06-03T12:00:00Z");
        let carried = |kind: &str, class: &str, bytes| CarriedBytes {
            network: LoggedNetwork {
                name: None,
                kind: kind.to_owned(),
                class: class.to_owned(),
            },
            bytes,
        };
        TransferLogEntry {
            started_at,
            ended_at: started_at + Duration::from_secs(50),
            deadline: (delay_s > 0).then(|| started_at + SignedDuration::from_secs(delay_s)),
            is_whole: true,
            bytes: 1000,
            carried: vec![
                carried("wifi", "free", wifi),
                carried("cellular", "metered", 1000 - wifi),
            ],
            ..TransferLogEntry::default()
        }
    }

    fn loses_at(bytes: u64, entry: TransferLogEntry) -> TransferLogEntry {
        let at = entry.started_at;
        let switch = LoggedSwitch {
            at,
            bytes,
            from: LoggedNetwork::default(),
            to: LoggedNetwork::default(),
        };
        TransferLogEntry {
            losses: vec![LoggedLoss { at, bytes }],
            switches: vec![switch.clone(), switch],
            ..entry
        }
    }

    #[test]
    fn the_shares_of_the_study_are_of_whole_downloads() {
        let failed = TransferLogEntry {
            is_whole: false,
            bytes: 7,
            ended_at: at("2030-06-03T20:00:00Z"),
            ..entry(4 * 3_600, 7)
        };
        let log = [
            entry(0, 500),
            entry(1_800, 900),
            loses_at(600, entry(2 * 3_600, 1000)),
            TransferLogEntry {
                wasted_bytes: 100,
                ..loses_at(300, entry(5 * 3_600, 1000))
            },
            failed,
        ];
        let summary = StudySummary::of(&log);
        assert_eq!((summary.downloads, summary.unfinished), (4, 1));
        assert_eq!(summary.delayed_share, Some(0.75));
        assert_eq!(summary.wifi_share, Some(0.85));
        assert_eq!(summary.metered_share, Some(0.15));
        assert_eq!((summary.restart_bytes, summary.saved_bytes), (900, 800));
        assert_eq!(summary.saved_share, Some(0.2));
        assert_eq!(summary.switching_share, Some(0.5));
        assert_eq!(summary.switches_each, Some(2.0));
        // The one that failed and was late is one of four with a deadline.
        assert_eq!(
            (summary.with_deadline, summary.in_time_share),
            (4, Some(0.75))
        );
        let classes: Vec<_> = summary
            .by_delay
            .iter()
            .map(|class| (&*class.delay, class.downloads, class.wifi_share))
            .collect();
        assert_eq!(
            classes,
            [
                ("none", 1, Some(0.5)),
                ("tens_of_minutes", 1, Some(0.9)),
                ("one_to_three_hours", 1, Some(1.0)),
                ("above_three_hours", 1, Some(1.0)),
            ]
        );
    }

    #[test]
    fn a_log_without_downloads_has_no_shares() {
        let summary = StudySummary::of(&[]);
        assert_eq!(summary.wifi_share, None);
        assert_eq!(summary.in_time_share, None);
        assert_eq!(summary.by_delay.len(), DELAY_CLASSES.len());
    }

    #[test]
    fn what_was_cancelled_before_its_deadline_is_not_late() {
        let cancelled = TransferLogEntry {
            is_whole: false,
            ..entry(1_800, 0)
        };
        assert_eq!(StudySummary::of(&[cancelled]).with_deadline, 0);
    }

    #[test]
    fn an_episode_was_ready_if_its_last_byte_came_before_the_first_play() {
        let played = |s| TransferLogEntry {
            played_at: Some(at("2030-06-03T12:00:00Z") + Duration::from_secs(s)),
            ..entry(1_800, 0)
        };
        let summary = StudySummary::of(&[played(50), played(49), entry(0, 0)]);
        assert_eq!(
            (summary.played, summary.ready_when_played_share),
            (2, Some(0.5))
        );
    }

    fn zone() -> TimeZone {
        TimeZone::get("Asia/Seoul").expect("a time zone")
    }

    /// An episode that came out at 18:00 in Seoul and was played at this time on a day of June 2030.
    fn play(asked_day: i8, played: &str) -> TransferLogEntry {
        let asked = jiff::civil::date(2030, 6, asked_day).at(18, 0, 0, 0);
        let started_at = asked.to_zoned(zone()).expect("a time").timestamp();
        let played: jiff::civil::DateTime = played.parse().expect("a time");
        let played_at = played.to_zoned(zone()).expect("a time").timestamp();
        TransferLogEntry {
            started_at,
            played_at: Some(played_at),
            ..entry(0, 0)
        }
    }

    /// The evenings of Monday to Friday, each heard at ten to eight on the next working day.
    fn commutes() -> Vec<TransferLogEntry> {
        vec![
            play(3, "2030-06-04T07:50"),
            play(4, "2030-06-05T07:52"),
            play(5, "2030-06-06T07:47"),
            play(6, "2030-06-07T07:55"),
            play(7, "2030-06-10T07:51"),
        ]
    }

    fn rule(text: &str) -> DownloadSchedule {
        text.parse().expect("a schedule")
    }

    #[test]
    fn the_most_patient_rule_that_is_in_time_is_proposed() {
        let proposal = propose_delay(&commutes(), rule("in 1h"), &zone()).expect("a proposal");
        // Weekdays wait longer than every day, for the weekend.
        assert_eq!(proposal.schedule, "weekdays 07:30");
        assert_eq!((proposal.plays, proposal.met), (5, 5));
        assert_eq!(proposal.met_now, Some(5));
        assert!(Some(proposal.mean_delay_s) > proposal.mean_delay_now_s);
        // Who has that already is told nothing; who has none yet is.
        assert_eq!(
            propose_delay(&commutes(), rule("weekdays 07:30"), &zone()),
            None
        );
        let whenever = propose_delay(&commutes(), rule("whenever it is free"), &zone());
        assert_eq!(whenever.expect("a proposal").mean_delay_now_s, None);
    }

    #[test]
    fn a_rule_that_comes_too_late_is_met_by_an_earlier_one() {
        let proposal = propose_delay(&commutes(), rule("weekdays 09:00"), &zone());
        let proposal = proposal.expect("a proposal");
        assert_eq!(proposal.schedule, "weekdays 07:30");
        assert_eq!(proposal.met_now, Some(0));
    }

    #[test]
    fn few_plays_propose_nothing_and_one_odd_day_in_ten_is_left_out() {
        let mut log = commutes();
        log.pop();
        assert_eq!(propose_delay(&log, rule("in 1h"), &zone()), None);
        let mut log = commutes();
        log.extend([
            play(10, "2030-06-11T07:50"),
            play(11, "2030-06-12T07:50"),
            play(12, "2030-06-13T07:50"),
            play(13, "2030-06-14T07:50"),
        ]);
        // On one evening it was played at once.
        log.push(play(14, "2030-06-14T18:20"));
        let proposal = propose_delay(&log, rule("in 1h"), &zone()).expect("a proposal");
        assert_eq!((&*proposal.schedule, proposal.met), ("weekdays 07:30", 9));
        // Two of eleven are more than one in ten.
        log.push(play(15, "2030-06-15T18:20"));
        let proposal = propose_delay(&log, rule("in 1h"), &zone());
        assert_ne!(
            proposal.map(|p| p.schedule).as_deref(),
            Some("weekdays 07:30")
        );
    }

    #[test]
    fn only_the_newest_plays_count() {
        // Years of nights, then weeks of mornings.
        let mut log = vec![play(1, "2030-06-01T23:50"); 500];
        log.extend((0..PROPOSAL_PLAYS_MAX / 5).flat_map(|_| commutes()));
        for (number, entry) in log.iter_mut().enumerate() {
            entry.episode = Some(EpisodeId(number as i64));
        }
        // Each was tried before in vain.
        let tried = log.iter().map(|entry| TransferLogEntry {
            is_whole: false,
            started_at: entry.started_at + Duration::from_secs(60),
            ..entry.clone()
        });
        log.extend(tried.collect::<Vec<_>>());
        let proposal = propose_delay(&log, rule("in 1h"), &zone()).expect("a proposal");
        assert_eq!(proposal.schedule, "weekdays 07:30");
        assert_eq!(proposal.plays, PROPOSAL_PLAYS_MAX);
    }
}
