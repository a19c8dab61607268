//! `cedos ls`, `cedos status ID`, `cedos cancel ID`: downloads in the background.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use cedos_agent::fetch::jobs::{self, Job, Standing};
use cedos_agent::fetch::report::{complain, human_bytes, say};

/// Exit code of `status` for a download that has not ended: come back later.
const STILL_WAITING: u8 = 75; // EX_TEMPFAIL of sysexits.h

/// List the downloads in the background that run, and those that ended lately
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Print one JSON object per download
    #[arg(long)]
    json: bool,
}

/// Show one download in the background
///
/// Exit codes: 75 while it runs or waits, then its own (see `cedos get --help`).
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Its number, from `cedos get --detach` or `cedos ls`
    #[arg(value_parser = parse_id)]
    id: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Stop a download in the background; it leaves a partial, which the same command continues
#[derive(Debug, Args)]
pub struct CancelArgs {
    /// Its number, from `cedos get --detach` or `cedos ls`
    #[arg(value_parser = parse_id)]
    id: u64,
    /// Print one JSON object: where it stood
    #[arg(long)]
    json: bool,
}

fn parse_id(text: &str) -> Result<u64, String> {
    text.trim_start_matches('#')
        .parse()
        .map_err(|_| format!("`{text}` is not the number of a download; `cedos ls` lists them"))
}

/// Lists them.
pub fn ls(args: &LsArgs) -> anyhow::Result<ExitCode> {
    let jobs = jobs::list()?;
    for job in &jobs {
        if args.json {
            say(&object(job).to_string());
        } else {
            say(&headline(job));
        }
    }
    if jobs.is_empty() && !args.json {
        complain("no downloads in the background; `cedos get --detach URL` starts one");
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows one.
pub fn status(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let job = jobs::find(args.id)?;
    if args.json {
        say(&object(&job).to_string());
    } else {
        say(&headline(&job));
        for (label, text) in details(&job) {
            say(&format!("  {label:9} {text}"));
        }
    }
    Ok(ExitCode::from(match job.standing() {
        Standing::Running | Standing::Waiting => STILL_WAITING,
        Standing::Done | Standing::Failed => job.event["exit"].as_u64().unwrap_or(1) as u8,
        Standing::Gone => 1,
    }))
}

/// Stops one.
pub fn cancel(args: &CancelArgs) -> anyhow::Result<ExitCode> {
    jobs::find(args.id)?.cancel()?;
    let job = jobs::find(args.id)?;
    if args.json {
        say(&object(&job).to_string());
    } else {
        say(&headline(&job));
    }
    Ok(ExitCode::SUCCESS)
}

fn object(job: &Job) -> Value {
    json!({
        "id": job.id,
        "standing": job.standing(),
        "url": job.asked.url,
        "file": job.asked.file,
        "since": job.asked.since,
        "deadline": job.asked.deadline,
        "log": job.log(),
        "pid": job.pid,
        "last": job.event,
    })
}

fn headline(job: &Job) -> String {
    let name = job.asked.file.file_name().unwrap_or_default();
    let name = name.to_string_lossy();
    let event = &job.event;
    let size = match (event["bytes"].as_u64(), event["length"].as_u64()) {
        (Some(bytes), Some(length)) => {
            format!("   {} / {}", human_bytes(bytes), human_bytes(length))
        }
        (Some(bytes), None) => format!("   {}", human_bytes(bytes)),
        _ => String::new(),
    };
    let reason = event["reason"].as_str();
    let reason = reason.map(|r| format!(" ({r})")).unwrap_or_default();
    let standing = match job.standing() {
        Standing::Running => "RUNNING",
        Standing::Waiting => "WAITING",
        Standing::Done => "DONE",
        Standing::Failed => "FAILED",
        Standing::Gone => "GONE",
    };
    format!("#{} {name}{size}   {standing}{reason}", job.id)
}

fn details(job: &Job) -> Vec<(&'static str, String)> {
    let event = &job.event;
    let text = |field: &str| event[field].as_str().map(str::to_owned);
    let mut lines = Vec::new();
    lines.extend(text("why").map(|why| ("Because", why)));
    lines.extend(text("unblocks").map(|what| ("Unblocks", what)));
    lines.extend(text("text").map(|text| ("Because", text)));
    if job.standing() == Standing::Gone {
        let text = "its process ended without a last word (killed, or the machine was restarted); \
                    the same command continues from what is on the disk";
        lines.push(("Because", text.into()));
    }
    lines.push(("From", job.asked.url.clone()));
    lines.push(("To", job.asked.file.display().to_string()));
    lines.extend(job.asked.deadline.clone().map(|at| ("Deadline", at)));
    lines.push(("Log", job.log().display().to_string()));
    lines
}
