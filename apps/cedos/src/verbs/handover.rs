//! Handing a transfer to the agent, and following it from the command line.

use std::time::Duration;

use cedos_agent::agent::api::Request;
use cedos_agent::agent::client::Client;
use cedos_agent::fetch::outcome::{Exit, Failure};
use cedos_agent::fetch::report::{Event, ON_TRACK, Observer, Promised, complain, say};
use cedos_agent::order::Order;
use d2tp_sched::format_duration;
use serde_json::Value;
use tokio::sync::watch;

use super::how::stop_but_for_hangup;

/// Exit code of what has not ended: come back later.
pub const STILL_WAITING: u8 = 75; // EX_TEMPFAIL of sysexits.h

/// How long who leaves a transfer waits to hear whether it can be in time: as long as an origin that is
/// well takes to tell the size.
pub const SIZE_KNOWN_WITHIN: Duration = Duration::from_secs(1); // a guess

/// How a transfer that was followed ended; none if it goes on without us.
pub type Followed = Result<Option<Exit>, Failure>;

/// Hands it over and returns; prints its number.
///
/// # Errors
/// The agent does not take it.
pub async fn leave(mut agent: Client, order: Order, json: bool) -> Result<Exit, Failure> {
    let (verb, due) = (order.verb, order.deadline.is_some());
    let answer = add(&mut agent, order, true, true).await?;
    let id = answer["id"].as_u64().unwrap_or(0);
    if json {
        let promise = match due {
            true => first_promise(&mut agent).await,
            false => None,
        };
        let told = serde_json::json!({"event": "detached", "id": id, "file": answer["file"],
                                      "agent": true, "promise": promise});
        say(&told.to_string());
    } else {
        say(&id.to_string());
        complain(&format!(
            "the agent has {} {id}; cedos why {id} | cedos ls | cedos wait {id} | cedos cancel {id}",
            verb.word()
        ));
        if due && let Some(promised) = first_promise(&mut agent).await {
            warn(&promised);
        }
    }
    Ok(Exit::Done)
}

/// What is promised of one that was just begun, if that is known soon.
async fn first_promise(agent: &mut Client) -> Option<Promised> {
    let heard = async {
        loop {
            let event = agent.next().await?;
            if matches!(
                event["event"].as_str(),
                Some("progress" | "waiting" | "paused" | "done" | "error")
            ) {
                return serde_json::from_value(event["promise"].clone()).ok();
            }
        }
    };
    tokio::time::timeout(SIZE_KNOWN_WITHIN, heard).await.ok()?
}

/// Says so if it may not be in time.
pub fn warn(promised: &Promised) {
    if !promised.infeasible && promised.p < ON_TRACK {
        complain(&format!("note: {}", promised.chance()));
    }
    if promised.infeasible {
        let left = format_duration(Duration::from_secs_f64(promised.left_s));
        let p = promised.p;
        complain(&format!(
            "note: it will hardly be ready in {left} (p={p:.2})"
        ));
    }
}

/// Hands it over and follows it to its end. Ctrl-C and SIGTERM cancel it; if the terminal is closed or
/// this process is killed, it goes on.
///
/// # Errors
/// The agent does not take it.
pub async fn follow(
    mut agent: Client,
    order: Order,
    observer: &mut dyn Observer,
    json: bool,
) -> Followed {
    let answer = add(&mut agent, order, false, true).await?;
    let id = answer["id"].as_u64().unwrap_or(0);
    let (stop, stopped) = watch::channel(false);
    stop_but_for_hangup(stop).map_err(|error| Failure::error(format!("signals: {error}")))?;
    attend(agent, id, observer, json, Some(stopped)).await
}

/// Follows a transfer that the agent has.
///
/// # Errors
/// The agent does not know it.
pub async fn look_on(
    mut agent: Client,
    id: u64,
    observer: &mut dyn Observer,
    json: bool,
) -> Followed {
    agent.ask(&Request::Watch { id: Some(id) }).await?;
    attend(agent, id, observer, json, None).await
}

async fn add(
    agent: &mut Client,
    order: Order,
    patient: bool,
    follow: bool,
) -> Result<Value, Failure> {
    let order = order
        .absolute()
        .map_err(|error| Failure::error(format!("the working directory: {error}")))?;
    let request = Request::Add {
        order: Box::new(order),
        patient,
        follow,
    };
    agent.ask(&request).await
}

async fn attend(
    mut agent: Client,
    id: u64,
    observer: &mut dyn Observer,
    json: bool,
    mut stop: Option<watch::Receiver<bool>>,
) -> Followed {
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
            complain(&format!(
                "the agent is gone; the transfer goes on when it runs again (cedos status {id})"
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
        if json {
            say(&event.to_string());
        } else if let Ok(event) = serde_json::from_value::<Event>(event.clone()) {
            observer.tell(&event);
        } else if event["event"] == "paused" {
            complain(&format!("paused; cedos resume {id} goes on"));
        }
        if matches!(event["event"].as_str(), Some("done" | "error")) {
            let exit = event["exit"].as_u64().and_then(Exit::of);
            return Ok(Some(exit.unwrap_or(Exit::Error)));
        }
    }
}

async fn cancel(id: u64) -> Result<(), Failure> {
    let gone = || Failure::error("the agent is gone");
    let mut agent = Client::connect().await.ok_or_else(gone)?;
    // It may have ended this very moment.
    let _ = agent.ask(&Request::Cancel { id }).await;
    Ok(())
}
