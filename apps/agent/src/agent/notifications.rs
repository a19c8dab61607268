//! Shows desktop notifications, if there is a desktop, and handles the user's answers.
//!
//! ```text
//!  a transfer left alone ended, or will hardly be in time; a cap is reached
//!       └▶ org.freedesktop.Notifications ─▶ the user ─▶ ActionInvoked ─▶ retry, edit
//! ```
//!
//! Only transfers that no command follows cause notifications. Without a session bus, or without a
//! notification service on it, nothing is shown.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use d2tp_sched::CostPolicy;
use futures_util::StreamExt;
use zbus::{Connection, Proxy, Variant};

use super::api::TermsChange;
use super::desktop_notifier::{DesktopNotification, NotificationQueue};
use super::state::Agent;

const NAME: &str = "org.freedesktop.Notifications";
const PATH: &str = "/org/freedesktop/Notifications";
const APP: &str = "Cedos";

/// How long the bus may take to answer before it counts as absent.
const BUS_ANSWERS: Duration = Duration::from_secs(5); // a guess: a session that starts

/// Notifications whose action is awaited; when there are more, the oldest is forgotten.
const ASKED_MAX: usize = 64;

/// Shows notifications and performs the chosen actions while the agent runs.
pub(super) async fn serve(agent: Arc<Agent>, inbox: NotificationQueue) {
    let bus = tokio::time::timeout(BUS_ANSWERS, Connection::session()).await;
    let bus = match bus {
        Ok(Ok(bus)) => bus,
        Ok(Err(error)) => return tracing::debug!(%error, "no desktop notifications"),
        Err(_) => {
            return tracing::warn!("the session bus does not answer; no desktop notifications");
        }
    };
    if let Err(error) = notify_on(&agent, &bus, inbox).await {
        tracing::warn!(%error, "desktop notifications have stopped");
    }
}

async fn notify_on(
    agent: &Arc<Agent>,
    bus: &Connection,
    inbox: NotificationQueue,
) -> zbus::Result<()> {
    let NotificationQueue(mut inbox) = inbox;
    let desktop = Proxy::new(bus, NAME, PATH, NAME).await?;
    let mut actions = desktop.receive_signal("ActionInvoked").await?;
    let mut closed = desktop.receive_signal("NotificationClosed").await?;
    // By the desktop's number: the transfer it is about.
    let mut asked: BTreeMap<u32, u64> = BTreeMap::new();
    loop {
        tokio::select! {
            news = inbox.recv() => {
                let Some(news) = news else { return Ok(()) };
                let about = match &news {
                    DesktopNotification::Ended { id, .. } | DesktopNotification::Hardly { id, .. } => Some(*id),
                    DesktopNotification::Cap(_) => None,
                };
                match notify(&desktop, &news).await {
                    Ok(number) => {
                        asked.extend(about.map(|id| (number, id)));
                        if asked.len() > ASKED_MAX {
                            asked.pop_first();
                        }
                    }
                    Err(error) => tracing::debug!(%error, "cannot show a notification"),
                }
            }
            action = actions.next() => {
                let Some(action) = action else { return Ok(()) };
                if let Ok((number, key)) = action.body().deserialize::<(u32, String)>()
                    && let Some(id) = asked.remove(&number)
                {
                    agent.do_as_answered(id, &key);
                }
            }
            gone = closed.next() => {
                let Some(gone) = gone else { return Ok(()) };
                // Some desktops close before they tell the action: it was told then, or never will be.
                if let Ok((number, reason)) = gone.body().deserialize::<(u32, u32)>()
                    && reason == DISMISSED
                {
                    asked.remove(&number);
                }
            }
        }
    }
}

/// The reason code of NotificationClosed for a dismissal by the user (Desktop Notifications
/// Specification).
const DISMISSED: u32 = 2;

async fn notify(desktop: &Proxy<'_>, news: &DesktopNotification) -> zbus::Result<u32> {
    let (summary, body, actions): (String, String, Vec<&str>) = match news {
        DesktopNotification::Cap(text) => ("A limit is reached".into(), text.clone(), Vec::new()),
        DesktopNotification::Ended {
            name, fault: None, ..
        } => (format!("{name} has finished"), String::new(), Vec::new()),
        DesktopNotification::Ended {
            name,
            fault: Some(fault),
            ..
        } => (
            format!("{name} failed"),
            fault.clone(),
            vec!["retry", "Try again"],
        ),
        DesktopNotification::Hardly { name, text, .. } => (
            format!("{name} will probably be late"),
            text.clone(),
            vec!["any", "Use any network", "cancel", "Cancel"],
        ),
    };
    let hints: HashMap<&str, Variant<'_>> = HashMap::new();
    let note = (
        APP,
        0u32,
        "network-transmit-receive",
        summary,
        plain(&body),
        actions,
        hints,
        -1i32,
    );
    desktop.call("Notify", &note).await
}

/// Escapes text for a body that may be interpreted as markup.
fn plain(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

impl Agent {
    fn do_as_answered(self: &Arc<Agent>, id: u64, key: &str) {
        let done = match key {
            "retry" => self.resume(id, true).map(drop),
            "cancel" => self
                .set_intent(id, super::queue::TransferIntent::Cancel)
                .map(drop),
            "any" => {
                let any = TermsChange {
                    policy: Some(CostPolicy::Any.as_str().to_owned()),
                    ..TermsChange::default()
                };
                self.edit(id, &any).map(drop)
            }
            // That it was clicked on at all.
            _ => return,
        };
        if let Err(failure) = done {
            tracing::info!(
                id,
                key,
                text = failure.text,
                "cannot carry out the notification's action"
            );
        }
    }
}
