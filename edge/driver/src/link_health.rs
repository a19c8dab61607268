//! Carries out requests of `d2tp-device` about the health of links: whether a link's first hop
//! answers, and the counters of its radio.

use std::sync::Arc;

use d2tp_session::SessionEvent;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;

use crate::device::DeviceInner;

/// Reports to the links when paths come up, become quiet or fall silent.
pub(crate) fn watch_first_hops(body: Arc<DeviceInner>) -> JoinHandle<()> {
    let mut events = body.shared.events.subscribe();
    tokio::spawn(async move {
        loop {
            match events.recv().await {
                Ok((_, SessionEvent::PathQuiet { link, .. })) => {
                    body.input(|links, now, _| links.on_path_quiet(now, link));
                }
                Ok((_, SessionEvent::PathUp { link, .. })) => {
                    body.input(|links, now, session| links.on_path_up(now, session, link));
                }
                Ok((_, SessionEvent::PathSilent { .. })) | Err(RecvError::Lagged(_)) => {
                    body.input(|links, now, session| links.on_path_silent(now, session));
                    // The time at which the link counts as silent has changed.
                    body.shared.notify_activity();
                }
                Ok(_) => {}
                Err(RecvError::Closed) => return,
            }
        }
    })
}

/// Probes a link's first hop.
pub(crate) async fn ask(body: Arc<DeviceInner>, name: String, ticket: u64) {
    let link = body.state.lock().described.get(&name).cloned();
    let answer = match link {
        Some(link) => body.link_probe.probe_first_hop(&link).await,
        None => None,
    };
    tracing::debug!(link = name, ?answer, "asked its first hop");
    body.input(|links, _, _| links.on_hop_answer(&name, ticket, answer));
}

/// Reads the statistics of a link's radio. `first`: earlier values belong to another attachment.
pub(crate) async fn read_radio(body: Arc<DeviceInner>, name: String, first: bool) {
    let link = body.state.lock().described.get(&name).cloned();
    let station = match link {
        Some(link) => body.link_probe.station_stats(&link).await,
        None => None,
    };
    let before = match station {
        Some(station) => body.state.lock().stations.insert(name.clone(), station),
        None => body.state.lock().stations.remove(&name),
    };
    let before = before.filter(|_| !first);
    let fails = station.map(|now| before.is_some_and(|before| now.fails_since(&before)));
    body.input(|links, now, _| links.on_radio(now, &name, fails));
}
