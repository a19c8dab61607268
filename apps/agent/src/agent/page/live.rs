//! What changes on a page while somebody looks at it, as server-sent events: the new HTML of its live part.

use std::convert::Infallible;
use std::time::Duration;

use askama::Template;
use axum::response::sse::{Event, Sse};
use futures_util::stream::{self, Stream};
use tokio::sync::broadcast::error::RecvError;
use tokio::time::sleep;

use super::super::idle::ConnectionCount;
use super::frame::PageContext;

/// The shortest interval between updates.
const PACE: Duration = Duration::from_millis(500); // a guess: people see no more

/// The interval at which what reports no changes is looked at: rates, round trips, processes of their own.
const LOOK_EVERY: Duration = Duration::from_secs(5); // a guess

/// Sends the live part of a page now, and whenever it has changed. The agent stays while this lasts.
pub(super) fn updates<T: Template, F: Future<Output = Option<T>> + Send + 'static>(
    context: &PageContext,
    view: impl Fn() -> F + Send + 'static,
) -> Sse<impl Stream<Item = Result<Event, Infallible>> + Send + 'static> {
    let counted = ConnectionCount::new(context.agent.clone());
    let events = context.agent.events.subscribe();
    let links = context.agent.link_view.links();
    let left = context.agent.left.subscribe();
    let state = (view, events, links, left, counted, None::<String>);
    Sse::new(stream::unfold(
        state,
        |(view, mut events, mut links, mut left, counted, mut shown)| async move {
            loop {
                if shown.is_some() {
                    let changed = tokio::select! {
                        event = events.recv() => !matches!(event, Err(RecvError::Closed)),
                        changed = links.changed() => changed.is_ok(),
                        changed = left.changed() => changed.is_ok(),
                        () = sleep(LOOK_EVERY) => true,
                    };
                    if !changed {
                        return None;
                    }
                    sleep(PACE).await;
                    // What happened meanwhile is in what is shown now.
                    events = events.resubscribe();
                }
                // Without it the page's subject is gone: the browser asks again and hears so.
                let html = view().await?.render().ok()?;
                if shown.as_ref() == Some(&html) {
                    continue;
                }
                let event = Event::default().data(serde_json::Value::from(&*html).to_string());
                shown = Some(html);
                let state = (view, events, links, left, counted, shown);
                return Some((Ok(event), state));
            }
        },
    ))
}
