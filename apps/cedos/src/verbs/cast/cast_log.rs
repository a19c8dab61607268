//! `cedos cast log` and `cedos cast export`: what downloads of episodes cost and saved, and when they were whole.
//!
//! ```text
//!  agent ── log, in parts ──┐
//!  exported logs of others ─┴─▶ entries ─▶ a line each, the summary of the study, or a file
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use cedos_agent::agent::api::PodcastRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::fetch::deadline_text::describe_time;
use cedos_agent::fetch::outcome::TransferFailure;
use cedos_agent::fetch::report::human_bytes;
use cedos_readycast::{
    AcceptedDelay, StudySummary, TransferLogEntry, TransferLogPage, anonymous_log,
};
use cedos_terminal::{print_stderr, print_stdout};
use cedos_text::{escape_controls, parse_span};
use clap::Args;
use jiff::civil::Date;
use jiff::{SignedDuration, Timestamp, Zoned};
use serde_json::{Value, json};

use super::super::agent_start;
use super::{CastOutput, ask, failed};

/// The version of an exported log.
const EXPORT_VERSION: u64 = 1;

/// The maximum number of bytes of an exported log that is read.
const EXPORT_BYTES_MAX: u64 = 1 << 30; // a guess: a full log with many switches is 20 MB

/// What `cedos cast log` shows.
#[derive(Debug, Args)]
pub struct LogArgs {
    /// Show what ended since then: 2026-11-01, 2026-11-01T07:30Z, or that long ago: 7d, 12h
    #[arg(long, value_name = "WHEN", value_parser = parse_since)]
    since: Option<Timestamp>,
    /// Show shares of all downloads instead: with a delay, by Wi-Fi, saved, in time
    #[arg(long)]
    summary: bool,
    /// Read this log, which `cedos cast export` wrote, instead of the agent's; several are taken as one
    #[arg(long = "from", value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    output: CastOutput,
}

/// What `cedos cast export` writes.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The file to write
    file: PathBuf,
    /// Leave out titles, addresses, numbers of episodes, names of networks and dates
    #[arg(long)]
    anonymous: bool,
    /// Write what ended since then: 2026-11-01, or that long ago: 7d
    #[arg(long, value_name = "WHEN", value_parser = parse_since)]
    since: Option<Timestamp>,
    #[command(flatten)]
    output: CastOutput,
}

fn parse_since(text: &str) -> Result<Timestamp, String> {
    since_at(text, &Zoned::now())
}

fn since_at(text: &str, now: &Zoned) -> Result<Timestamp, String> {
    if let Ok(at) = text.parse::<Timestamp>() {
        return Ok(at);
    }
    if let Ok(date) = text.parse::<Date>() {
        let start = date.to_zoned(now.time_zone().clone());
        return start
            .map(|start| start.timestamp())
            .map_err(|error| error.to_string());
    }
    let ago = parse_span(text)
        .ok()
        .and_then(|span| SignedDuration::try_from(span).ok());
    let at = ago.and_then(|ago| now.timestamp().checked_sub(ago).ok());
    at.ok_or_else(|| {
        format!("`{text}` is no time: write 2026-11-01, 2026-11-01T07:30Z, or 7d for the last seven days")
    })
}

/// Runs `cedos cast log`.
///
/// # Errors
/// The agent cannot be started.
pub async fn log(args: LogArgs) -> anyhow::Result<ExitCode> {
    let entries = match args.files.is_empty() {
        true => match log_of_agent(args.since).await? {
            Ok(entries) => entries,
            Err(failure) => return Ok(failed(&failure)),
        },
        false => match log_of_files(&args.files) {
            Ok(entries) => since(entries, args.since),
            Err(text) => return Ok(failed(&TransferFailure::error(text))),
        },
    };
    match (args.summary, args.output.json) {
        (true, true) => print_stdout(&json!(StudySummary::of(&entries)).to_string()),
        (true, false) => {
            for line in summary_lines(&StudySummary::of(&entries)) {
                print_stdout(&line);
            }
        }
        (false, true) => {
            let entries: Vec<Value> = entries.iter().map(entry_json).collect();
            print_stdout(&json!({ "entries": entries }).to_string());
        }
        (false, false) => {
            let now = Zoned::now();
            for line in table(&entries, &now) {
                print_stdout(&line);
            }
        }
    }
    if entries.is_empty() {
        print_stderr("No downloads of episodes have ended yet");
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `cedos cast export`.
///
/// # Errors
/// The agent cannot be started.
pub async fn export(args: ExportArgs) -> anyhow::Result<ExitCode> {
    let mut entries = match log_of_agent(args.since).await? {
        Ok(entries) => entries,
        Err(failure) => return Ok(failed(&failure)),
    };
    if args.anonymous {
        entries = anonymous_log(&entries);
    }
    let count = entries.len();
    let entries: Vec<Value> = entries.iter().map(entry_json).collect();
    let exported =
        json!({"version": EXPORT_VERSION, "anonymous": args.anonymous, "entries": entries});
    std::fs::write(&args.file, format!("{exported}\n"))
        .with_context(|| format!("cannot write {}", args.file.display()))?;
    match args.output.json {
        true => {
            let told = json!({"file": args.file, "entries": count, "anonymous": args.anonymous});
            print_stdout(&told.to_string());
        }
        false => print_stderr(&format!("{count} downloads are in {}", args.file.display())),
    }
    Ok(ExitCode::SUCCESS)
}

async fn log_of_agent(
    since: Option<Timestamp>,
) -> anyhow::Result<Result<Vec<TransferLogEntry>, TransferFailure>> {
    let mut agent = agent_start::connect_or_start().await?;
    let mut entries = Vec::new();
    let mut next = Some(0);
    while let Some(after) = next {
        let page = match page(&mut agent, since, after).await {
            Ok(page) => page,
            Err(failure) => return Ok(Err(failure)),
        };
        entries.extend(page.entries);
        next = page.next;
    }
    Ok(Ok(entries))
}

async fn page(
    agent: &mut AgentApiClient,
    since: Option<Timestamp>,
    after: i64,
) -> Result<TransferLogPage, TransferFailure> {
    let answer = ask(agent, &PodcastRequest::Log { since, after }).await?;
    serde_json::from_value(answer)
        .map_err(|error| TransferFailure::error(format!("the agent's log cannot be read: {error}")))
}

/// The entries of exported logs.
fn log_of_files(files: &[PathBuf]) -> Result<Vec<TransferLogEntry>, String> {
    let mut entries = Vec::new();
    for file in files {
        let read = read_export(file);
        entries.extend(read.map_err(|why| format!("cannot read {}: {why}", file.display()))?);
    }
    Ok(entries)
}

fn read_export(file: &Path) -> Result<Vec<TransferLogEntry>, String> {
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    if length > EXPORT_BYTES_MAX {
        return Err("it is too large for a log of downloads".to_owned());
    }
    let text = std::fs::read(file).map_err(|error| error.to_string())?;
    let mut exported: Value = serde_json::from_slice(&text)
        .map_err(|_| "it is no log that `cedos cast export` wrote".to_owned())?;
    match exported["version"].as_u64() {
        Some(EXPORT_VERSION) => {}
        Some(_) => return Err("a newer version of Cedos wrote it; install that one".to_owned()),
        None => return Err("it is no log that `cedos cast export` wrote".to_owned()),
    }
    let entries = serde_json::from_value(exported["entries"].take());
    entries.map_err(|error| format!("an entry is damaged: {error}"))
}

fn since(entries: Vec<TransferLogEntry>, since: Option<Timestamp>) -> Vec<TransferLogEntry> {
    let is_since = |entry: &TransferLogEntry| since.is_none_or(|since| entry.ended_at >= since);
    entries.into_iter().filter(is_since).collect()
}

/// An entry with what follows from it: the delay in seconds, 0 for none and null for as long as it takes.
fn entry_json(entry: &TransferLogEntry) -> Value {
    let delay_s = match entry.accepted_delay() {
        AcceptedDelay::Immediate => Some(0),
        AcceptedDelay::Within(delay) => Some(delay.as_secs()),
        AcceptedDelay::Unlimited => None,
    };
    let mut value = json!(entry);
    if let Some(fields) = value.as_object_mut() {
        fields.insert("accepted_delay_s".into(), json!(delay_s));
        fields.insert("in_time".into(), json!(entry.is_in_time()));
        fields.insert("restart_bytes".into(), json!(entry.restart_bytes()));
    }
    value
}

/// The log as a table: a head, then a line for each download.
fn table(entries: &[TransferLogEntry], now: &Zoned) -> Vec<String> {
    if entries.is_empty() {
        return Vec::new();
    }
    const HEAD: [&str; 8] = [
        "ENDED", "SIZE", "WI-FI", "WANTED", "IN TIME", "SWITCHES", "PLAYED", "EPISODE",
    ];
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(entries.iter().map(|entry| row(entry, now)));
    let widths: [usize; HEAD.len()] = std::array::from_fn(|n| {
        let widths = rows.iter().map(|row| row[n].chars().count());
        widths.max().unwrap_or(0)
    });
    let line = |row: &[String; HEAD.len()]| {
        let cells = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn row(entry: &TransferLogEntry, now: &Zoned) -> [String; 8] {
    let carried = entry.carried_bytes();
    let wifi = match carried {
        0 => "-".to_owned(),
        all => percent(entry.carried_by_kind("wifi") as f64 / all as f64),
    };
    let wanted = match (entry.deadline, entry.accepted_delay()) {
        (Some(at), _) => describe_time(at, now),
        (None, AcceptedDelay::Unlimited) => "when free".to_owned(),
        (None, _) => "at once".to_owned(),
    };
    let in_time = match entry.is_in_time() {
        _ if !entry.is_whole => "not whole",
        Some(true) => "yes",
        Some(false) => "no",
        None => "-",
    };
    let played = entry
        .played_at
        .map_or("-".to_owned(), |at| describe_time(at, now));
    let episode = match &entry.labels {
        Some(labels) => format!("{} ({})", labels.title, labels.channel_title),
        None => "-".to_owned(),
    };
    [
        describe_time(entry.ended_at, now),
        human_bytes(entry.bytes),
        wifi,
        wanted,
        in_time.to_owned(),
        entry.switches.len().to_string(),
        played,
        escape_controls(&episode).into_owned(),
    ]
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A share for a person, such as `92.4 %`.
fn share(share: Option<f64>) -> String {
    share.map_or("-".to_owned(), percent)
}

fn summary_lines(summary: &StudySummary) -> Vec<String> {
    let mut lines = vec![
        format!(
            "Downloads          {} whole, {}; {} not whole",
            summary.downloads,
            human_bytes(summary.bytes),
            summary.unfinished
        ),
        format!("With a delay       {}", share(summary.delayed_share)),
        format!(
            "By Wi-Fi           {} of {}",
            share(summary.wifi_share),
            human_bytes(summary.carried_bytes)
        ),
        format!("By mobile networks {}", share(summary.cellular_share)),
        format!("On metered ones    {}", share(summary.metered_share)),
        format!(
            "In time            {} of {} with a deadline",
            share(summary.in_time_share),
            summary.with_deadline
        ),
        format!(
            "Saved              {} of the bytes ({}), against a client that begins again when it loses its network",
            share(summary.saved_share),
            human_bytes(summary.saved_bytes)
        ),
        format!(
            "Changed networks   {}, {:.1} times each",
            share(summary.switching_share),
            summary.switches_each.unwrap_or(0.0)
        ),
        format!(
            "Ready when played  {} of {} played",
            share(summary.ready_when_played_share),
            summary.played
        ),
    ];
    for class in &summary.by_delay {
        lines.push(format!(
            "Delay {:<20} {} downloads, {} by Wi-Fi, {} in time",
            delay_words(&class.delay),
            class.downloads,
            share(class.wifi_share),
            share(class.in_time_share)
        ));
    }
    lines
}

fn delay_words(class: &str) -> &str {
    match class {
        "none" => "none",
        "tens_of_minutes" => "up to an hour",
        "one_to_three_hours" => "1 to 3 hours",
        "above_three_hours" => "above 3 hours",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Zoned {
        "2030-06-03T06:00:00[Asia/Seoul]".parse().expect("a time")
    }

    #[test]
    fn since_is_a_date_a_time_or_a_while_ago() {
        let since = |text: &str| since_at(text, &now()).map(|at| at.to_string());
        assert_eq!(since("2030-06-01").as_deref(), Ok("2030-05-31T15:00:00Z"));
        assert_eq!(
            since("2030-06-01T07:30Z").as_deref(),
            Ok("2030-06-01T07:30:00Z")
        );
        assert_eq!(since("7d").as_deref(), Ok("2030-05-26T21:00:00Z"));
        for bad in ["", "yesterday", "7", "-7d"] {
            assert!(since_at(bad, &now()).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_table_has_a_line_for_each_download_and_no_control_characters() {
        let entry: TransferLogEntry = serde_json::from_value(json!({
            "episode": 4,
            "labels": {"channel": 1, "channel_title": "News", "title": "One\u{1b}[2J", "url": null},
            "started_at": "2030-06-02T09:00:00Z", "ended_at": "2030-06-02T20:50:00Z",
            "deadline": "2030-06-02T22:30:00Z", "is_whole": true, "bytes": 1_000_000, "wasted_bytes": 0,
            "first_byte_at": null, "played_at": "2030-06-02T20:55:00Z",
            "carried": [{"name": "wifi:Home", "kind": "wifi", "class": "free", "bytes": 750_000},
                        {"name": "wwan0", "kind": "cellular", "class": "metered", "bytes": 250_000}],
        }))
        .expect("an entry");
        let lines = table(&[entry], &now());
        assert_eq!(lines.len(), 2);
        for part in ["75.0 %", "1.00 MB", "yes", "05:50", "07:30", "(News)"] {
            assert!(lines[1].contains(part), "{part}: {lines:?}");
        }
        assert!(!lines[1].contains('\u{1b}'));
        assert_eq!(lines[0].find("WI-FI"), lines[1].find("75.0 %"));
        assert!(table(&[], &now()).is_empty());
    }

    #[test]
    fn files_that_are_no_exported_log_are_refused_in_words() {
        let folder = tempfile::tempdir().expect("a folder");
        let why = |text: &str| {
            let file = folder.path().join("log.json");
            std::fs::write(&file, text).expect("written");
            log_of_files(&[file]).expect_err("a refusal")
        };
        assert!(why("<opml/>").contains("no log"));
        assert!(why("{}").contains("no log"));
        assert!(why(r#"{"version": 2, "entries": []}"#).contains("newer"));
        assert!(why(r#"{"version": 1, "entries": [{}]}"#).contains("damaged"));
    }
}
