//! `cedos ls`, `status`, `why`, `pause`, `resume`, `cancel`, `retry`, `edit`, `wait`: transfers in the
//! background. The agent answers if it runs; without it the first two and `cancel` handle downloads
//! of `cedos get --detach`.

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use cedos_agent::agent::api::{AgentRequest, TermsChange};
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::fetch::deadline_text::{describe_deadline, describe_time, parse_deadline};
use cedos_agent::fetch::jobs::{self, BackgroundJob};
use cedos_agent::fetch::option_parsers;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use cedos_agent::fetch::report::{
    BarObserver, LineObserver, ON_TRACK, TransferObserver, human_bytes, print_stderr, print_stdout,
};
use cedos_agent::order::Deadline;
use cedos_agent::transfer_text::{
    carried_by_link, deadline_of, networks_used, promise_of, wake_plan_text,
};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use d2tp_sched::{CostPolicy, DeadlineFallback, EnergySaving};
use jiff::Zoned;
use serde_json::Value;

use super::agent_start;
use super::handover::{STILL_WAITING, follow_existing, next_run_text};
use super::power_line::PowerLine;

/// List transfers in the background: those that run, and those that ended lately
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Forget those that have ended, after showing them; files and partial files stay
    #[arg(long)]
    clear: bool,
    /// Print one JSON object per transfer
    #[arg(long)]
    json: bool,
}

/// Some transfers in the background.
#[derive(Debug, Args)]
pub struct JobsArgs {
    /// Their numbers, from `cedos get --detach` or `cedos ls`
    #[arg(value_name = "ID", required = true, value_parser = parse_id)]
    ids: Vec<u64>,
    /// Print one JSON object per transfer
    #[arg(long)]
    json: bool,
}

/// Transfers to wait for.
#[derive(Debug, Args)]
pub struct WaitArgs {
    /// Their numbers, from `cedos get --detach` or `cedos ls` [default: all that have not ended]
    #[arg(value_name = "ID", value_parser = parse_id)]
    ids: Vec<u64>,
    /// Print one JSON object per line: the events of the transfers
    #[arg(long)]
    json: bool,
}

/// One transfer in the background.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// Its number, from `cedos get --detach` or `cedos ls`
    #[arg(value_parser = parse_id)]
    id: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Change deadline, policy, limit or priority of a transfer, also while it runs
///
/// Prints what holds from now on. Exit codes: 0 done, 1 not a transfer of the agent, or it is complete,
/// 2 usage.
#[derive(Debug, Args)]
pub struct EditArgs {
    #[command(flatten)]
    one: JobArgs,

    /// Finish by TIME: 07:30 (the next one), 7pm, tomorrow 07:30, friday 16:00, 2030-01-31 07:30, +45m
    #[arg(long, value_name = "TIME", group = "when")]
    by: Option<String>,

    /// Finish within this time from now: 2h, 45m
    #[arg(long, value_name = "SPAN", group = "when", value_parser = option_parsers::parse_span)]
    within: Option<Duration>,

    /// No deadline
    #[arg(long, group = "when")]
    when_free: bool,

    /// When to use metered networks
    #[arg(long, value_parser = PossibleValuesParser::new(CostPolicy::ALL.map(CostPolicy::as_str)).map(|word| word))]
    policy: Option<String>,

    /// What to do when free networks alone will miss the deadline
    #[arg(long, value_parser = PossibleValuesParser::new(DeadlineFallback::ALL.map(DeadlineFallback::as_str)).map(|word| word))]
    if_late: Option<String>,

    /// Use at most this much metered data in all: 50M, 1.5G
    #[arg(long, value_name = "SIZE", value_parser = option_parsers::parse_bytes, group = "cell")]
    max_cell: Option<u64>,

    /// No limit for metered data
    #[arg(long, group = "cell", action = ArgAction::SetTrue)]
    no_max_cell: bool,

    /// Priority when not all transfers can be on time: 0 to 7, 7 goes first
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=7))]
    priority: Option<u8>,

    /// When to save energy
    #[arg(long, value_name = "WHEN", value_parser = PossibleValuesParser::new(EnergySaving::ALL.map(EnergySaving::as_str)).map(|word| word))]
    save_energy: Option<String>,
}

fn parse_id(text: &str) -> Result<u64, String> {
    text.trim_start_matches('#')
        .parse()
        .map_err(|_| format!("`{text}` is not the number of a transfer; `cedos ls` lists them"))
}

fn said(failure: TransferFailure) -> anyhow::Error {
    anyhow!(failure.text)
}

/// Lists the transfers in the background.
pub async fn ls(args: LsArgs) -> anyhow::Result<ExitCode> {
    let transfers = match args.clear {
        true => clear().await?,
        false => all().await?,
    };
    for transfer in &transfers {
        print_stdout(&match args.json {
            true => transfer.to_string(),
            false => listed(transfer, &Zoned::now()),
        });
    }
    if !args.json && !transfers.is_empty() {
        let power = PowerLine::read()?;
        power
            .into_iter()
            .for_each(|power| print_stderr(&power.to_line()));
    }
    if !args.json {
        match (args.clear, transfers.len()) {
            (true, 0) => print_stderr("No transfer has ended, so the list stays as it is"),
            (true, n) => print_stderr(&format!("Removed from the list: {n}")),
            (false, 0) => {
                print_stderr("No transfers in the background. `cedos get URL --detach` starts one");
            }
            (false, _) => {}
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn all() -> anyhow::Result<Vec<Value>> {
    Ok(match AgentApiClient::connect().await {
        Some(mut agent) => transfers_in(&agent.ask(&AgentRequest::List).await.map_err(said)?),
        None => jobs::list()?.iter().map(BackgroundJob::to_json).collect(),
    })
}

/// Makes the agent forget the transfers that have ended, and returns them.
async fn clear() -> anyhow::Result<Vec<Value>> {
    Ok(match AgentApiClient::connect().await {
        Some(mut agent) => transfers_in(&agent.ask(&AgentRequest::Clear).await.map_err(said)?),
        None => jobs::clear()?.iter().map(BackgroundJob::to_json).collect(),
    })
}

fn transfers_in(answer: &Value) -> Vec<Value> {
    answer["transfers"].as_array().cloned().unwrap_or_default()
}

/// Shows one transfer in the background.
pub async fn status(args: JobArgs) -> anyhow::Result<ExitCode> {
    let transfer = one(&args, |id| AgentRequest::Status { id }).await?;
    show(&transfer, args.json, true);
    Ok(ExitCode::from(code_of(&transfer)))
}

/// Says why one is where it is, on one screen.
pub async fn why(args: JobArgs) -> anyhow::Result<ExitCode> {
    let transfer = one(&args, |id| AgentRequest::Why { id }).await?;
    show(&transfer, args.json, false);
    Ok(ExitCode::SUCCESS)
}

/// Carries a verb out for each transfer. One that fails does not keep the others from it; the exit code is
/// that of the first that failed.
async fn for_each(
    verb: &str,
    ids: &[u64],
    mut act: impl AsyncFnMut(u64) -> anyhow::Result<u8>,
) -> ExitCode {
    let mut code = 0;
    for id in ids {
        let ended = act(*id).await.unwrap_or_else(|error| {
            print_stderr(&format!("cedos {verb}: {error:#}"));
            TransferExit::Error as u8
        });
        if code == 0 {
            code = ended;
        }
    }
    ExitCode::from(code)
}

/// Cancels transfers in the background.
pub async fn cancel(args: JobsArgs) -> anyhow::Result<ExitCode> {
    let stop = async |id| cancel_one(id, args.json).await;
    Ok(for_each("cancel", &args.ids, stop).await)
}

async fn cancel_one(id: u64, json: bool) -> anyhow::Result<u8> {
    let runs_alone = |job: &BackgroundJob| !job.belongs_to_agent() && job.pid.is_some();
    let mut agent = match AgentApiClient::connect().await {
        Some(agent) => agent,
        None if jobs::find(id)?.belongs_to_agent() && agent_start::is_allowed() => {
            connect().await?
        }
        None => return cancel_process(id, json),
    };
    match agent.ask(&AgentRequest::Cancel { id }).await {
        Ok(_) => {}
        Err(_) if jobs::find(id).is_ok_and(|job| runs_alone(&job)) => {
            return cancel_process(id, json);
        }
        Err(failure) => return Err(said(failure)),
    }
    let transfer = when_settled(&mut agent, id, STOP_MAX, has_stopped).await?;
    show_line(&transfer, json);
    Ok(0)
}

/// How long a transfer may take to stop: it saves its part first.
const STOP_MAX: Duration = Duration::from_secs(60); // a guess: a sync on a slow disk

/// How long a transfer that was resumed is awaited before its state is shown.
const RESUME_MAX: Duration = Duration::from_secs(1); // a guess: longer than it takes without a network

/// Whether a transfer has stopped, for now or for good.
fn has_stopped(state: &str) -> bool {
    matches!(state, "paused" | "cancelled" | "done" | "failed")
}

/// Whether a transfer is under way again, or has ended.
fn has_resumed(state: &str) -> bool {
    !matches!(state, "paused" | "queued")
}

/// The transfer once its state is settled, or as it is after `at_most`.
async fn when_settled(
    agent: &mut AgentApiClient,
    id: u64,
    at_most: Duration,
    is_settled: fn(&str) -> bool,
) -> anyhow::Result<Value> {
    let begun = Instant::now();
    loop {
        let transfer = agent
            .ask(&AgentRequest::Status { id })
            .await
            .map_err(said)?;
        if is_settled(state_of(&transfer)) || begun.elapsed() > at_most {
            return Ok(transfer);
        }
        tokio::time::sleep(SETTLED_EVERY).await;
    }
}

/// The interval at which the agent is asked whether a transfer's state is settled.
const SETTLED_EVERY: Duration = Duration::from_millis(20);

fn cancel_process(id: u64, json: bool) -> anyhow::Result<u8> {
    jobs::find(id)?.cancel()?;
    show_line(&jobs::find(id)?.to_json(), json);
    Ok(0)
}

/// Stops some for now.
pub async fn pause(args: JobsArgs) -> anyhow::Result<ExitCode> {
    let request = |id| AgentRequest::Pause { id };
    ask_for_each("pause", &args, request, STOP_MAX, has_stopped).await
}

/// Goes on with some.
pub async fn resume(args: JobsArgs) -> anyhow::Result<ExitCode> {
    let request = |id| AgentRequest::Resume { id };
    ask_for_each("resume", &args, request, RESUME_MAX, has_resumed).await
}

/// Begins again with some that failed or were cancelled, and runs those now that recur.
pub async fn retry(args: JobsArgs) -> anyhow::Result<ExitCode> {
    let request = |id| AgentRequest::Retry { id };
    ask_for_each("retry", &args, request, RESUME_MAX, has_resumed).await
}

async fn ask_for_each(
    verb: &str,
    args: &JobsArgs,
    request: impl Fn(u64) -> AgentRequest,
    at_most: Duration,
    is_settled: fn(&str) -> bool,
) -> anyhow::Result<ExitCode> {
    let mut agent = connect().await?;
    let ask = async |id| {
        agent.ask(&request(id)).await.map_err(said)?;
        let transfer = when_settled(&mut agent, id, at_most, is_settled).await?;
        show_line(&transfer, args.json);
        Ok(0)
    };
    Ok(for_each(verb, &args.ids, ask).await)
}

/// Changes the terms of a transfer in the background.
pub async fn edit(args: EditArgs) -> anyhow::Result<ExitCode> {
    let deadline = match (&args.by, args.within) {
        (Some(by), _) => match parse_deadline(by, &Zoned::now()) {
            Ok(deadline) => Some(deadline),
            Err(why) => {
                print_stderr(&format!("cedos edit: {why}"));
                return Ok(ExitCode::from(2));
            }
        },
        (None, Some(span)) => Some(Deadline::WithinS(span.as_secs_f64())),
        (None, None) => None,
    };
    let terms = TermsChange {
        deadline,
        no_deadline: args.when_free,
        policy: args.policy,
        if_late: args.if_late,
        max_cell: args.max_cell,
        no_max_cell: args.no_max_cell,
        priority: args.priority,
        start_bytes: None,
        save_energy: args.save_energy,
    };
    if terms.is_empty() {
        print_stderr("cedos edit: say what to change: --by, --policy, --max-cell …");
        return Ok(ExitCode::from(2));
    }
    let id = args.one.id;
    let mut agent = connect().await?;
    let mut transfer = agent
        .ask(&AgentRequest::Edit { id, terms })
        .await
        .map_err(said)?;
    if transfer["promise"].is_object() {
        // What was promised on the other terms is of no interest.
        tokio::time::sleep(EPOCH).await;
        if let Ok(now) = agent.ask(&AgentRequest::Status { id }).await {
            transfer = now;
        }
    }
    if args.one.json {
        show_line(&transfer, true);
        return Ok(ExitCode::SUCCESS);
    }
    print_stdout(&headline(&transfer));
    for (label, text) in terms_of(&transfer, &Zoned::now()) {
        print_stdout(&format!("  {label:9} {text}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The time until changed terms take effect.
const EPOCH: Duration = Duration::from_millis(1_200); // a scheduling epoch, and a little

/// The terms as they are now, and what is promised on them.
fn terms_of(transfer: &Value, now: &Zoned) -> Vec<(&'static str, String)> {
    let mut lines = vec![
        (
            "Deadline",
            deadline_of(transfer).map_or("none".to_owned(), |at| describe_deadline(at, now)),
        ),
        ("Networks", networks_used(transfer)),
    ];
    if let Some(bytes) = transfer["max_cell"].as_u64() {
        lines.push(("Metered", format!("{} at most", human_bytes(bytes))));
    }
    let promised = promise_of(transfer);
    lines.extend(promised.map(|promised| ("Promise", promised.describe())));
    lines
}

/// Follows some to their ends; the exit code is that of the first that failed.
pub async fn wait(args: WaitArgs) -> anyhow::Result<ExitCode> {
    let mut ids = args.ids;
    if ids.is_empty() {
        let goes_on = |transfer: &&Value| {
            !matches!(
                state_of(transfer),
                "done" | "failed" | "cancelled" | "gone" | "paused" | "scheduled"
            )
        };
        let known = all().await?;
        let going_on = known.iter().filter(goes_on);
        ids = going_on
            .filter_map(|transfer| transfer["id"].as_u64())
            .collect();
    }
    let follow = async |id| wait_for_one(id, args.json).await;
    Ok(for_each("wait", &ids, follow).await)
}

async fn wait_for_one(id: u64, json: bool) -> anyhow::Result<u8> {
    // A process of its own is not the agent's to follow, and what has ended needs none.
    let by_itself = jobs::find(id).is_ok_and(|job| !job.belongs_to_agent());
    let runs = by_itself && jobs::find(id).is_ok_and(|job| job.pid.is_some());
    let agent = match AgentApiClient::connect().await {
        Some(agent) if !runs => agent,
        None if !by_itself => connect().await?,
        _ => return wait_for_process(id, json).await,
    };
    let mut observer: Box<dyn TransferObserver> = match std::io::stderr().is_terminal() {
        true => Box::new(BarObserver::on_stderr()),
        false => Box::new(LineObserver::with_progress()),
    };
    let ended = follow_existing(agent, id, observer.as_mut(), json).await;
    Ok(match ended.map_err(said)? {
        Some(exit) => exit as u8,
        None => STILL_WAITING,
    })
}

async fn wait_for_process(id: u64, json: bool) -> anyhow::Result<u8> {
    loop {
        let job = jobs::find(id)?;
        if job.has_ended() || job.pid.is_none() {
            let transfer = job.to_json();
            show_line(&transfer, json);
            return Ok(code_of(&transfer));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The interval at which a process in the background is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);

async fn connect() -> anyhow::Result<AgentApiClient> {
    agent_start::connect_or_start().await
}

async fn one(args: &JobArgs, request: impl Fn(u64) -> AgentRequest) -> anyhow::Result<Value> {
    match AgentApiClient::connect().await {
        Some(mut agent) => agent.ask(&request(args.id)).await.map_err(said),
        None => Ok(jobs::find(args.id)?.to_json()),
    }
}

fn state_of(transfer: &Value) -> &str {
    transfer["standing"].as_str().unwrap_or("?")
}

fn code_of(transfer: &Value) -> u8 {
    match state_of(transfer) {
        "done" | "failed" | "cancelled" => {
            let exit = transfer["last"]["exit"].as_u64();
            exit.unwrap_or(TransferExit::Error as u64) as u8
        }
        "gone" => TransferExit::Error as u8,
        _ => STILL_WAITING,
    }
}

fn show_line(transfer: &Value, json: bool) {
    match json {
        true => print_stdout(&bare(transfer).to_string()),
        false => print_stdout(&headline(transfer)),
    }
}

fn show(transfer: &Value, json: bool, all: bool) {
    if json {
        return print_stdout(&bare(transfer).to_string());
    }
    print_stdout(&headline(transfer));
    for (label, text) in details(transfer, all) {
        print_stdout(&format!("  {label:9} {text}"));
    }
}

/// Without what only the agent and its client say to each other.
fn bare(transfer: &Value) -> Value {
    let mut transfer = transfer.clone();
    if let Some(fields) = transfer.as_object_mut() {
        fields.remove("ok");
    }
    transfer
}

fn headline(transfer: &Value) -> String {
    let file = transfer["file"].as_str().unwrap_or_default();
    let name = Path::new(file).file_name().unwrap_or_default();
    let name = name.to_string_lossy();
    let size = match (transfer["bytes"].as_u64(), transfer["length"].as_u64()) {
        (Some(bytes), Some(length)) => {
            format!("   {} / {}", human_bytes(bytes), human_bytes(length))
        }
        (Some(bytes), None) => format!("   {}", human_bytes(bytes)),
        _ => String::new(),
    };
    let state_of = state_of(transfer);
    let reason: Option<TransferReason> = serde_json::from_value(transfer["reason"].clone()).ok();
    let reason = reason.filter(|_| matches!(state_of, "waiting" | "failed"));
    let reason = reason.and_then(TransferReason::words);
    let reason = reason.map(|words| format!(": {words}")).unwrap_or_default();
    let up = if transfer["verb"] == "put" {
        " ↑"
    } else {
        ""
    };
    format!(
        "#{}{up} {name}{size}   {}{reason}",
        transfer["id"],
        state_of.to_uppercase()
    )
}

/// A transfer of the list as text, with what its deadline comes to.
fn listed(transfer: &Value, now: &Zoned) -> String {
    let mut line = headline(transfer);
    if code_of(transfer) == STILL_WAITING {
        if let Some(at) = deadline_of(transfer) {
            line += &format!("   by {}", describe_time(at, now));
        }
        if let Some(promised) = promise_of(transfer).filter(|promised| promised.p < ON_TRACK) {
            line += &format!("   {}", promised.chance());
        }
        if let Some(text) = last_run_text(transfer, now) {
            line += &format!("   last run {text}");
        }
    } else if transfer["last"]["deadline_met"] == false && state_of(transfer) != "cancelled" {
        line += "   late";
    }
    if state_of(transfer) == "failed"
        && let Some(why) = transfer["last"]["text"].as_str()
    {
        line += &format!("   {}", why.lines().next().unwrap_or_default());
    }
    line
}

/// How the last run of a transfer that recurs ended, while it waits for the next one.
fn last_run_text(transfer: &Value, now: &Zoned) -> Option<String> {
    let run = &transfer["last"]["last_run"];
    let ended = run["ended"].as_str()?.parse().ok()?;
    let outcome = run["outcome"].as_str()?;
    let late = if run["late"] == true { ", late" } else { "" };
    let why = run["text"].as_str().and_then(|text| text.lines().next());
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    Some(format!(
        "{}: {outcome}{late}{why}",
        describe_time(ended, now)
    ))
}

/// The lines about the schedule of a transfer that waits for its next run.
fn schedule_of(transfer: &Value, now: &Zoned) -> Vec<(&'static str, String)> {
    let (event, id) = (&transfer["last"], &transfer["id"]);
    let mut lines = Vec::new();
    lines.extend(
        event["every"]
            .as_str()
            .map(|every| ("Recurs", every.to_owned())),
    );
    lines.extend(next_run_text(event, now).map(|text| ("Next run", text)));
    lines.extend(last_run_text(transfer, now).map(|text| ("Last run", text)));
    if let Some(missed) = event["missed"].as_u64().filter(|missed| *missed > 0) {
        let times = if missed == 1 { "time" } else { "times" };
        let text = format!(
            "{missed} {times}, while the machine or the agent was off; one run made up for all"
        );
        lines.push(("Missed", text));
    }
    lines.push(("Run now", format!("cedos retry {id}")));
    lines
}

fn details(transfer: &Value, all: bool) -> Vec<(&'static str, String)> {
    let event = &transfer["last"];
    let id = &transfer["id"];
    let text = |field: &str| event[field].as_str().map(str::to_owned);
    let deadline = deadline_of(transfer);
    let mut lines = Vec::new();
    if let Some(promised) = promise_of(transfer).filter(|_| code_of(transfer) == STILL_WAITING) {
        let by = deadline.map(|at| format!("ready by {}, ", describe_time(at, &Zoned::now())));
        let words = promised.describe();
        lines.push(("Promise", by.unwrap_or_default() + &words));
    }
    lines.extend(text("why").map(|why| ("Because", why)));
    let unblocks = text("unblocks").map(|what| {
        // As one would write it here.
        what.replace("--policy any", &format!("cedos edit {id} --policy any"))
            .replace(
                "a larger --max-cell or budget",
                &format!("cedos edit {id} --max-cell SIZE, or cedos budget set SIZE"),
            )
    });
    lines.extend(unblocks.map(|what| ("Ends with", what.replace(" | ", ", or "))));
    lines.extend(text("text").map(|text| ("Because", text)));
    lines.extend(wake_plan_text(&transfer["vigil"]).map(|text| ("Sleep", text)));
    match state_of(transfer) {
        "gone" => {
            let text = "its process was killed, or the machine restarted. Run the same command to \
                resume";
            lines.push(("Because", text.into()));
        }
        // Only the agent tells the priority; without it the queue was read from the disk.
        "queued" if transfer["priority"].is_null() => lines.push((
            "Because",
            format!("the agent is not running; `cedos wait {id}` starts it"),
        )),
        "queued" => lines.push(("Because", "it is about to start".to_owned())),
        "paused" => lines.push(("Ends with", format!("cedos resume {id}"))),
        "scheduled" => lines.extend(schedule_of(transfer, &Zoned::now())),
        _ => {}
    }
    if !all {
        return lines;
    }
    let shown = |field: &str| transfer[field].as_str().map(str::to_owned);
    lines.extend(carried_by_link(transfer).map(|text| ("Carried", text)));
    lines.extend(shown("mode").map(|mode| ("Mode", mode)));
    let (url, file) = (shown("url"), shown("file"));
    let (from, to) = match transfer["verb"] == "put" {
        true => (file, url),
        false => (url, file),
    };
    lines.extend(from.map(|from| ("From", from)));
    lines.extend(to.map(|to| ("To", to)));
    if let Some(at) = deadline {
        lines.push(("Deadline", describe_deadline(at, &Zoned::now())));
    }
    if transfer["policy"].is_string() {
        lines.push(("Networks", networks_used(transfer)));
    }
    lines.extend(shown("log").map(|log| ("Log", log)));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;
    use serde_json::json;

    #[test]
    fn why_fits_one_screen_and_says_what_would_end_the_wait() {
        let transfer = json!({
            "id": 42, "standing": "waiting", "reason": "path_cost", "verb": "get",
            "file": "/home/me/episode-118.mp3", "bytes": 61_000_000, "length": 94_000_000,
            "promise": {"p": 0.97, "infeasible": false, "metered_bytes_expected": 0,
                        "metered_bytes_95": 0, "metered_bytes_worst": 33_000_000, "left_s": 60.0},
            "deadline": Timestamp::now().to_string(),
            "last": {"why": "only lte0 (metered) is up",
                     "unblocks": "a free network | --policy any"},
        });
        let head = headline(&transfer);
        assert_eq!(
            head,
            "#42 episode-118.mp3   61.00 MB / 94.00 MB   WAITING: only metered networks are up"
        );
        let lines = details(&transfer, false);
        let of = |label: &str| {
            let found = lines.iter().find(|(known, _)| *known == label);
            found.map(|(_, text)| text.as_str()).unwrap_or_default()
        };
        assert!(of("Promise").contains(
            "on track, 97 % likely to be on time; metered data: 0 B expected, 33.00 MB at most"
        ));
        assert!(of("Promise").starts_with("ready by "), "{lines:?}");
        assert_eq!(
            of("Ends with"),
            "a free network, or cedos edit 42 --policy any"
        );
        assert_eq!(code_of(&transfer), 75);
    }

    #[test]
    fn a_list_says_by_when_and_what_is_at_risk_or_late() {
        let now = Zoned::now().with().hour(12).build().expect("a noon");
        let at = now.timestamp() + jiff::SignedDuration::from_hours(2);
        let mut transfer = json!({
            "id": 1, "standing": "running", "file": "/a", "deadline": at.to_string(),
            "promise": {"p": 0.9, "infeasible": false, "metered_bytes_expected": 0,
                        "metered_bytes_95": 0, "metered_bytes_worst": 0, "left_s": 60.0},
        });
        let by = format!("#1 a   RUNNING   by {}", describe_time(at, &now));
        assert_eq!(listed(&transfer, &now), by);
        transfer["promise"]["p"] = json!(0.3);
        assert_eq!(
            listed(&transfer, &now),
            format!("{by}   at risk, 30 % likely to be on time")
        );
        transfer["promise"]["infeasible"] = json!(true);
        let clock_text = format!("{by}   not feasible, 30 % likely to be on time");
        assert_eq!(listed(&transfer, &now), clock_text);
        transfer["standing"] = json!("done");
        transfer["last"] = json!({"deadline_met": false, "exit": 10});
        assert_eq!(listed(&transfer, &now), "#1 a   DONE   late");
        transfer["standing"] = json!("failed");
        let text = "origin.example answers 404 Not Found for /a";
        transfer["last"] = json!({"deadline_met": null, "exit": 1, "text": text});
        assert_eq!(listed(&transfer, &now), format!("#1 a   FAILED   {text}"));
    }

    #[test]
    fn a_transfer_that_recurs_says_when_it_runs_next_and_how_the_last_run_went() {
        let now: Zoned = "2030-06-07T12:00:00[Europe/Berlin]"
            .parse()
            .expect("a time");
        let transfer = json!({
            "id": 3, "standing": "scheduled", "file": "/a.pdf", "deadline": "2030-06-10T05:30:00Z",
            "last": {"event": "scheduled", "every": "weekdays 07:30", "missed": 2,
                     "starts": "2030-06-09T23:30:00Z", "due": "2030-06-10T05:30:00Z",
                     "last_run": {"ended": "2030-06-07T05:12:00Z", "outcome": "failed", "late": false,
                                  "text": "h answers 404"}},
        });
        assert_eq!(
            listed(&transfer, &now),
            "#3 a.pdf   SCHEDULED   by Mon 10 Jun 07:30   last run 07:12: failed: h answers 404"
        );
        assert_eq!(code_of(&transfer), STILL_WAITING);
        let lines = schedule_of(&transfer, &now);
        let text = "begins Mon 10 Jun 01:30, and is to be complete by Mon 10 Jun 07:30";
        assert!(lines.contains(&("Next run", text.to_owned())), "{lines:?}");
        let missed = "2 times, while the machine or the agent was off; one run made up for all";
        assert!(lines.contains(&("Missed", missed.to_owned())), "{lines:?}");
    }

    #[test]
    fn what_is_used_up_is_unblocked_by_commands() {
        let transfer = json!({
            "id": 3, "standing": "waiting", "file": "/a",
            "last": {"unblocks": "a free network | a larger --max-cell or budget"},
        });
        let lines = details(&transfer, false);
        assert_eq!(
            lines,
            [(
                "Ends with",
                "a free network, or cedos edit 3 --max-cell SIZE, or cedos budget set SIZE"
                    .to_owned()
            )]
        );
    }
}
