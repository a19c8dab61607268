//! Which of several proxies a session of sockets goes to, and when it is left for another one.
//!
//! ```text
//!  no session ──▶ all are asked ──▶ the nearest that answers
//!  no path answers, for 30 s where connections are open ──▶ all are asked ── another answers ──▶ the session ends
//!  the proxy does not let this device in ──▶ the next session leaves it out
//! ```
//!
//! A session cannot move to a proxy of another key: connections end with it, and new ones are made at the other proxy.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{
    AskedServer, LinkStatus, PathState, PublicKey, ServerAddress, ServerList, asked_servers,
    choose_server, free_links, is_by_system_route, measure_servers,
};
use d2tp_links::Link;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::server_session::{ServerSession, ServerSessionState};

/// How long answers are awaited, and a handshake before others are asked.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1); // as for downloads
/// How long a proxy with open connections may be silent, although a network is up and another proxy answers, before the
/// session ends. Lower: a restart of the proxy ends connections. Higher: a program waits.
const SILENT_WITH_CONNECTIONS_MAX: Duration = Duration::from_secs(30); // as for the local proxy
/// The interval of checks while no path answers.
const SILENCE_CHECK: Duration = Duration::from_millis(500);
/// The pause before proxies are asked again while no other one answers.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(2); // a guess

/// The machine's links.
type LinkReceiver = watch::Receiver<Arc<Vec<Link>>>;

/// The proxy of the next session: the nearest that answers, and without an answer the first. Those in `refused` do not
/// let this device in.
pub(crate) async fn choose_proxy(
    servers: &ServerList,
    refused: &[PublicKey],
    links: Option<&LinkReceiver>,
) -> ServerAddress {
    let is_allowed = |server: &&ServerAddress| !refused.contains(&server.key);
    let allowed: Vec<&ServerAddress> = servers.servers().iter().filter(is_allowed).collect();
    let first = match allowed[..] {
        // All are tried again.
        [] => return servers.first().clone(),
        [only] => return only.clone(),
        [first, ..] => first.clone(),
    };
    let mut asked = asked(servers, links);
    asked.retain(|server| !refused.contains(&server.address.key));
    if !asked.iter().any(is_reachable) {
        return first;
    }
    let places: Vec<ServerAddress> = asked.iter().map(|server| server.address.clone()).collect();
    let choice = choose_server(asked, ANSWERS_WITHIN).await;
    choice.nearest.map_or(first, |place| places[place].clone())
}

/// Completes when no path of the session answers and another proxy does; returns what happened, for users.
pub(crate) async fn silent_proxy_left(session: &ServerSession, servers: &ServerList) -> String {
    if servers.servers().len() < 2 {
        return pending().await;
    }
    let mut candidates = session.device.watch_candidates();
    let mut silent_since = None;
    while !session.is_over() {
        if answers(session) || !can_ask(session) {
            silent_since = None;
            tokio::select! {
                _ = candidates.changed() => {}
                // Nothing is reported of the system's route.
                () = sleep(SILENCE_CHECK), if is_by_route(session) => {}
            }
            continue;
        }
        let silence = silent_since.get_or_insert_with(Instant::now).elapsed();
        let silent_max = match is_established(session) && session.is_used() {
            true => SILENT_WITH_CONNECTIONS_MAX,
            // Nothing is lost.
            false => ANSWERS_WITHIN,
        };
        if silence < silent_max {
            sleep(SILENCE_CHECK).await;
            continue;
        }
        if let Some(other) = answering_other(session, servers).await
            && !answers(session)
        {
            let before = &session.server;
            return format!(
                "the proxy {}:{} does not answer; new connections go through {}:{}",
                before.host, before.port, other.host, other.port
            );
        }
        sleep(ASKED_AGAIN_AFTER).await;
    }
    pending().await
}

/// The nearest proxy that answers, if the session's own does not.
async fn answering_other(session: &ServerSession, servers: &ServerList) -> Option<ServerAddress> {
    let asked = asked(servers, session.links.as_ref());
    if !asked.iter().any(is_reachable) {
        return None;
    }
    let choice = measure_servers(asked, ANSWERS_WITHIN).await;
    let servers = servers.servers();
    let answers = |place: usize| choice.round_trips.get(place).copied().flatten().is_some();
    let own = servers
        .iter()
        .position(|server| server.key == session.server.key);
    match own.is_some_and(answers) {
        true => None,
        false => choice.nearest.map(|place| servers[place].clone()),
    }
}

fn asked(servers: &ServerList, links: Option<&LinkReceiver>) -> Vec<AskedServer> {
    match links {
        Some(links) => asked_servers(servers, &links.borrow().clone()),
        None => asked_servers(servers, &[]),
    }
}

fn is_reachable(server: &AskedServer) -> bool {
    server.over.as_ref().is_none_or(|links| !links.is_empty())
}

/// Whether the server answers over any link.
fn answers(session: &ServerSession) -> bool {
    let device = &session.device;
    let is_up = |status: &LinkStatus| status.answers.is_up();
    device.link_statuses().iter().any(is_up)
        || is_by_route(session)
            && (device.paths().iter()).any(|path| path.state == PathState::Active)
}

/// Whether there is a network over which proxies are asked.
fn can_ask(session: &ServerSession) -> bool {
    is_by_route(session) || !free_links(&session.known_links()).is_empty()
}

fn is_by_route(session: &ServerSession) -> bool {
    session.links.is_none() || is_by_system_route(&session.server.host, &session.known_links())
}

fn is_established(session: &ServerSession) -> bool {
    *session.state.borrow() == ServerSessionState::Open
}
