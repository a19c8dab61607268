//! Passes a transfer to the agent, and follows it from the command line.

use std::time::Duration;

use cedos_agent::agent::api::AgentRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::fetch::deadline_text::describe_time;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::report::{
    DeadlinePromise, ON_TRACK, TransferEvent, TransferObserver, print_stderr, print_stdout,
};
use cedos_agent::order::{TransferOrder, TransferVerb};
use d2tp_sched::{format_duration, likelihood};
use jiff::Zoned;
use serde_json::Value;
use tokio::sync::watch;

use super::agent_unit;
use super::transfer_args::stop_except_on_hangup;

/// The exit code if a transfer has not ended yet.
pub const STILL_WAITING: u8 = 75; // EX_TEMPFAIL of sysexits.h

/// How long who leaves a transfer waits to hear whether it can be in time: as long as an origin that is
/// well takes to tell the size.
pub const SIZE_KNOWN_WITHIN: Duration = Duration::from_secs(1); // a guess

/// How a transfer that was followed ended; none if it goes on without us.
pub type FollowResult = Result<Option<TransferExit>, TransferFailure>;

/// The number that a command ends with.
pub fn exit_number(exit: Option<TransferExit>) -> u8 {
    exit.map_or(STILL_WAITING, |exit| exit as u8)
}

/// Hands it over and returns; prints its number.
///
/// # Errors
/// The agent does not take it.
pub async fn submit(
    mut agent: AgentApiClient,
    order: TransferOrder,
    json: bool,
) -> Result<TransferExit, TransferFailure> {
    let due = order.deadline.is_some();
    let kind = match (order.verb, &order.mirror) {
        (_, Some(_)) => "mirror",
        (TransferVerb::Get, None) => "download",
        (TransferVerb::Put, None) => "upload",
    };
    let answer = add(&mut agent, order, true, true).await?;
    let id = answer["id"].as_u64().unwrap_or(0);
    if json {
        let promise = match due {
            true => first_promise(&mut agent).await,
            false => None,
        };
        let mut event = serde_json::json!({"event": "detached", "id": id, "file": answer["file"],
                                      "agent": true, "promise": promise});
        if answer["starts"].is_string() {
            (event["starts"], event["due"]) = (answer["starts"].clone(), answer["due"].clone());
        }
        print_stdout(&event.to_string());
    } else {
        print_stdout(&id.to_string());
        print_stderr(&format!(
            "The agent carries out {kind} {id}. See also: cedos why {id}, cedos wait {id}, cedos cancel {id}, \
             cedos ls"
        ));
        if let Some(text) = next_run_text(&answer, &Zoned::now()) {
            print_stderr(&format!("The first run {text}"));
            if !agent_unit::starts_with_session() {
                print_stderr(
                    "note: runs need the agent, which does not start by itself when you log in: cedos agent \
                     --install changes that",
                );
            }
        }
        if due && let Some(promised) = first_promise(&mut agent).await {
            warn_if_unlikely(&promised);
        }
    }
    Ok(TransferExit::Done)
}

/// When the next run of a transfer that recurs begins, and its deadline: `begins Mon 01:30, and is complete by Mon
/// 07:30`.
pub fn next_run_text(scheduled: &Value, now: &Zoned) -> Option<String> {
    let time = |field: &str| scheduled[field].as_str()?.parse().ok();
    let (starts, due): (jiff::Timestamp, jiff::Timestamp) = (time("starts")?, time("due")?);
    let due = describe_time(due, now);
    Some(match starts <= now.timestamp() {
        true => format!("begins now, and is to be complete by {due}"),
        false => format!(
            "begins {}, and is to be complete by {due}",
            describe_time(starts, now)
        ),
    })
}

/// The promise to meet the deadline of a transfer that was just begun, if its size becomes known soon.
async fn first_promise(agent: &mut AgentApiClient) -> Option<DeadlinePromise> {
    let size_known = async {
        loop {
            let event = agent.next().await?;
            if matches!(
                event["event"].as_str(),
                Some("progress" | "waiting" | "paused" | "scheduled" | "done" | "error")
            ) {
                return serde_json::from_value(event["promise"].clone()).ok();
            }
        }
    };
    tokio::time::timeout(SIZE_KNOWN_WITHIN, size_known)
        .await
        .ok()?
}

/// Says so if it may not be in time.
pub fn warn_if_unlikely(promised: &DeadlinePromise) {
    if !promised.infeasible && promised.p < ON_TRACK {
        print_stderr(&format!("note: {}", promised.chance()));
    }
    if promised.infeasible {
        let left = format_duration(Duration::from_secs_f64(promised.left_s));
        let likely = likelihood(promised.p);
        print_stderr(&format!(
            "note: it will probably be late: {likely} likely to finish in {left}"
        ));
    }
}

/// Hands it over and follows it to its end. Ctrl-C and SIGTERM cancel it; if the terminal is closed or
/// this process is killed, it goes on.
///
/// # Errors
/// The agent does not take it.
pub async fn submit_and_follow(
    agent: AgentApiClient,
    order: TransferOrder,
    observer: &mut dyn TransferObserver,
    json: bool,
) -> FollowResult {
    submit_and_watch(agent, order, &mut show_by(observer, json)).await
}

/// Hands it over and passes its events to `show` until it ends; signals as in [`submit_and_follow`].
///
/// # Errors
/// The agent does not take it.
pub async fn submit_and_watch(
    mut agent: AgentApiClient,
    order: TransferOrder,
    show: &mut dyn FnMut(&Value),
) -> FollowResult {
    let answer = add(&mut agent, order, false, true).await?;
    let id = answer["id"].as_u64().unwrap_or(0);
    let (stop, stopped) = watch::channel(false);
    stop_except_on_hangup(stop)
        .map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
    attend(agent, id, show, Some(stopped)).await
}

/// Follows a transfer that the agent has.
///
/// # Errors
/// The agent does not know it.
pub async fn follow_existing(
    mut agent: AgentApiClient,
    id: u64,
    observer: &mut dyn TransferObserver,
    json: bool,
) -> FollowResult {
    agent.ask(&AgentRequest::Watch { id: Some(id) }).await?;
    attend(agent, id, &mut show_by(observer, json), None).await
}

/// Adds a transfer to the agent's queue. Returns the agent's answer, with its number and its file.
pub async fn add(
    agent: &mut AgentApiClient,
    order: TransferOrder,
    patient: bool,
    follow: bool,
) -> Result<Value, TransferFailure> {
    let order = order
        .with_absolute_paths()
        .map_err(|error| TransferFailure::error(format!("the working directory: {error}")))?;
    let request = AgentRequest::Add {
        order: Box::new(order),
        patient,
        follow,
    };
    agent.ask(&request).await
}

/// Shows events as JSON lines, or by an observer.
fn show_by(observer: &mut dyn TransferObserver, json: bool) -> impl FnMut(&Value) {
    move |event: &Value| {
        if json {
            print_stdout(&event.to_string());
        } else if let Ok(event) = serde_json::from_value::<TransferEvent>(event.clone()) {
            observer.on_event(&event);
        }
    }
}

async fn attend(
    mut agent: AgentApiClient,
    id: u64,
    show: &mut dyn FnMut(&Value),
    mut stop: Option<watch::Receiver<bool>>,
) -> FollowResult {
    let mut waited_for = Value::Null;
    loop {
        let asked = async {
            match &mut stop {
                Some(stop) => drop(stop.wait_for(|stop| *stop).await),
                None => std::future::pending().await,
            }
        };
        let event = tokio::select! {
            event = agent.next() => event,
            () = asked => {
                stop = None;
                cancel(id).await?;
                continue;
            }
        };
        let Some(event) = event else {
            print_stderr(&format!(
                "the agent has stopped; the transfer resumes when it runs again (cedos status {id})"
            ));
            return Ok(None);
        };
        let waits = event["event"] == "waiting";
        // The agent says it again and again, for those who come to look.
        if waits && event["reason"] == waited_for {
            continue;
        }
        if event["event"] != "note" {
            waited_for = event["reason"].clone();
        }
        show(&event);
        if event["event"] == "paused" {
            print_stderr(&format!("paused; resume it with `cedos resume {id}`"));
        }
        if matches!(event["event"].as_str(), Some("done" | "error")) {
            let exit = event["exit"].as_u64().and_then(TransferExit::of);
            return Ok(Some(exit.unwrap_or(TransferExit::Error)));
        }
    }
}

async fn cancel(id: u64) -> Result<(), TransferFailure> {
    let gone = || TransferFailure::error("the agent is gone");
    let mut agent = AgentApiClient::connect().await.ok_or_else(gone)?;
    // It may have ended this very moment.
    let _ = agent.ask(&AgentRequest::Cancel { id }).await;
    Ok(())
}
