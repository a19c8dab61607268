//! Which of several proxies, each with a key of its own, a session goes to, and when another one is used instead.
//!
//! ```text
//!  no session ──▶ all are asked, the nearest of before first ──▶ the nearest that answers
//!  no path answers for 4 s ──▶ all are asked ── another answers, and this one does not ──▶ a session at that one
//!  the proxy does not let this device in ──▶ the others are asked
//! ```
//!
//! A session cannot move to a proxy of another key, and what the one holds the other does not have: flows begin anew.

use std::time::Duration;

use d2tp_driver::{
    AskedServer, PublicKey, ServerAddress, ServerChoice, ServerList, choose_server, free_links,
    measure_servers,
};
use d2tp_links::Link;
use tokio::sync::oneshot;

use super::ProxyClient;
use super::round_trip_store::RoundTripStore;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::session_refusal::host_and_port;

/// How long a proxy may be silent although a network is up before others are asked.
pub const SILENT_MAX: Duration = Duration::from_secs(4); // five handshake tries on a fast link
/// How long answers are awaited.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1); // as `ANSWERS_WITHIN` of nodes in `d2tp-device`
/// How old answers may be when they are used: longer ago another proxy may have fallen silent.
const ANSWERS_FRESH: Duration = Duration::from_secs(3); // `ANSWERS_WITHIN`, and two calls
/// The pause before others are asked again while no proxy answers.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(2); // a guess

/// The choice among a client's proxies.
#[derive(Debug, Default)]
pub(super) struct ServerSelection {
    current: usize,
    /// Whether the next session goes to the current one without a question.
    is_settled: bool,
    /// The places of proxies that do not let this device in.
    refused: Vec<usize>,
    /// The round trip to each, as measured last on this network.
    round_trips: Vec<Option<Duration>>,
    /// Answers that are awaited because the current one is silent.
    search: Option<oneshot::Receiver<ServerChoice>>,
    searched_at: Option<BootInstant>,
    /// How often a silent proxy was left.
    moves: u64,
}

impl ServerSelection {
    /// The place in the list of the proxy in use.
    pub(super) fn current(&self) -> usize {
        self.current
    }

    fn round_trip(&self, place: usize) -> Option<Duration> {
        self.round_trips.get(place).copied().flatten()
    }
}

/// A proxy of a client's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyStatus {
    /// The proxy's address.
    pub address: ServerAddress,
    /// Whether the proxy is the one in use.
    pub is_current: bool,
    /// The round trip to it, as measured last on this network.
    pub round_trip: Option<Duration>,
}

impl ProxyClient {
    /// Has the next session go to whichever proxy is the nearest then.
    pub fn select_anew(&self) {
        self.state().selection.is_settled = false;
    }

    /// The proxies of the list, in its order.
    pub fn proxies(&self) -> Vec<ProxyStatus> {
        let state = self.state();
        let status = |(place, address): (usize, &ServerAddress)| ProxyStatus {
            address: address.clone(),
            is_current: place == state.selection.current,
            round_trip: state.selection.round_trip(place),
        };
        self.servers
            .servers()
            .iter()
            .enumerate()
            .map(status)
            .collect()
    }

    /// How long the proxy may be silent before a transfer leaves it: one that never answered is left at once.
    pub fn silent_max(&self) -> Duration {
        match self.state().selection.is_settled {
            true => SILENT_MAX,
            false => Duration::ZERO,
        }
    }

    /// Whether there is another proxy to go to.
    pub fn has_alternatives(&self) -> bool {
        self.servers.servers().len() > 1 && self.given.is_none()
    }

    /// How often a silent proxy was left for another one.
    pub fn moves(&self) -> u64 {
        self.state().selection.moves
    }

    /// Which of several proxies is in use and why: `near:4433 (14 ms; far:4433 82 ms)`.
    pub fn describe_proxy(&self) -> Option<String> {
        let proxies = self.proxies();
        match proxies.len() {
            0 | 1 => None,
            _ => describe_proxies(&proxies),
        }
    }

    /// Chooses the proxy of the next session.
    pub(super) async fn select_server(&self) {
        let (is_settled, is_claimed) = {
            let state = self.state();
            (state.selection.is_settled, state.claim.is_some())
        };
        if !self.has_alternatives() || is_settled || is_claimed {
            return;
        }
        let network = self.network_name();
        let known = RoundTripStore::read().of_network(&network);
        let asked = self.asked_servers(|key| known.get(&key.to_string()).copied());
        let choice = match asked.iter().all(is_unreachable) {
            true => ServerChoice::default(),
            false => choose_server(asked, ANSWERS_WITHIN).await,
        };
        let measured = self.remember(&network, &choice);
        let mut state = self.state();
        let servers = self.servers.servers();
        let nearest = choice.nearest.unwrap_or_else(|| {
            let refused = &state.selection.refused;
            let mut allowed = (0..servers.len()).filter(|place| !refused.contains(place));
            allowed.next().unwrap_or(0)
        });
        state.selection.round_trips = servers
            .iter()
            .zip(measured)
            .map(|(server, measured)| {
                measured.or_else(|| known.get(&server.key.to_string()).copied())
            })
            .collect();
        // Without an answer the choice is only where to begin.
        state.selection.is_settled = choice.nearest.is_some();
        if state.selection.current != nearest {
            state.selection.current = nearest;
            state.instance = None;
        }
    }

    /// Selects the proxy that has a flow which an earlier process began; false if it is not in the list. `proxy`: its
    /// key, if it was noted.
    pub(super) fn select_claimed(&self, proxy: Option<PublicKey>) -> bool {
        let Some(key) = proxy else {
            return true;
        };
        let place = self
            .servers
            .servers()
            .iter()
            .position(|server| server.key == key);
        let Some(place) = place else {
            return false;
        };
        let mut state = self.state();
        (state.selection.current, state.selection.is_settled) = (place, true);
        true
    }

    /// Asks all proxies if no path to the current one answers, and moves to another one that answers while this one
    /// does not. Returns what happened, for users; there is no session then. To be called once a second at least while
    /// an answer is due.
    pub fn leave_silent_proxy(&self) -> Option<String> {
        if !self.has_alternatives() {
            return None;
        }
        if self.has_answering_path() {
            self.state().selection.search = None;
            return None;
        }
        let now = BootInstant::now();
        let mut state = self.state();
        let selection = &mut state.selection;
        let again = selection.searched_at.map(|at| now.since(at));
        if again.is_none_or(|again| again >= ANSWERS_FRESH) {
            selection.search = None;
        }
        let Some(search) = &mut selection.search else {
            if again.is_none_or(|again| again >= ASKED_AGAIN_AFTER) {
                selection.searched_at = Some(now);
                drop(state);
                self.search();
            }
            return None;
        };
        let choice = match search.try_recv() {
            Ok(choice) => choice,
            Err(oneshot::error::TryRecvError::Empty) => return None,
            Err(oneshot::error::TryRecvError::Closed) => {
                selection.search = None;
                return None;
            }
        };
        selection.search = None;
        let place = selection.current;
        let is_there = choice.round_trips.get(place).copied().flatten().is_some();
        drop(state);
        let measured = self.remember(&self.network_name(), &choice);
        let nearest = choice
            .nearest
            .filter(|nearest| *nearest != place && !is_there)?;
        let before = self.address_text();
        self.state().selection.moves += 1;
        if let Some(device) = self.device() {
            // Ends its flows here, and there if the packet arrives.
            device.say_goodbye();
        }
        self.drop_session();
        let mut state = self.state();
        state.selection.current = nearest;
        state.selection.is_settled = true;
        for (place, measured) in measured.into_iter().enumerate() {
            if let Some(known) = state.selection.round_trips.get_mut(place) {
                *known = measured;
            }
        }
        // What an earlier process began is at the other one.
        (state.claim, state.instance, state.claimed) = (None, None, false);
        drop(state);
        let after = self.address_text();
        Some(format!(
            "{before} does not answer; going on through {after}"
        ))
    }

    /// Has the next session go to another proxy, because this one does not let the device in; false if there is none.
    pub(super) fn leave_refusing_proxy(&self, failure: &TransferFailure) -> bool {
        let mut state = self.state();
        let selection = &mut state.selection;
        if !selection.refused.contains(&selection.current) {
            selection.refused.push(selection.current);
        }
        let count = self.servers.servers().len();
        let other = (0..count).find(|place| !selection.refused.contains(place));
        let Some(other) = other else {
            return false;
        };
        tracing::debug!(why = %failure.text, "another proxy of the list is used");
        selection.current = other;
        selection.is_settled = false;
        state.instance = None;
        true
    }

    fn search(&self) {
        let (sender, receiver) = oneshot::channel();
        let asked = self.asked_servers(|_| None);
        tokio::spawn(async move {
            let _ = sender.send(measure_servers(asked, ANSWERS_WITHIN).await);
        });
        self.state().selection.search = Some(receiver);
    }

    /// The proxies with what they are asked over. Metered links are left out: nothing has allowed bytes on them yet.
    fn asked_servers(&self, known: impl Fn(&PublicKey) -> Option<Duration>) -> Vec<AskedServer> {
        let refused = self.state().selection.refused.clone();
        let links = self.free_links();
        let servers = self.servers.servers().iter().enumerate();
        let asked = servers.map(|(place, address)| AskedServer {
            over: match self.is_reached_without_link(address) {
                _ if refused.contains(&place) => Some(Vec::new()),
                true => None,
                false => Some(links.clone()),
            },
            known: known(&address.key),
            address: address.clone(),
        });
        asked.collect()
    }

    fn free_links(&self) -> Vec<Link> {
        free_links(&self.links.borrow())
    }

    /// What tells the networks that carry probes from others: devices with their gateways.
    fn network_name(&self) -> String {
        network_name(&self.free_links())
    }

    /// Records what was measured, and returns it: silence of a proxy that was asked is forgetting it, so that the next
    /// choice does not wait for its turn.
    fn remember(&self, network: &str, choice: &ServerChoice) -> Vec<Option<Duration>> {
        let servers = self.servers.servers();
        let mut measured = choice.round_trips.clone();
        measured.resize(servers.len(), None);
        let is_any = choice.nearest.is_some();
        let by_key = servers.iter().zip(&measured).filter(|_| is_any);
        let by_key = by_key.filter_map(|(server, trip)| Some((server.key.to_string(), (*trip)?)));
        let silent = choice.silent.iter().filter_map(|place| servers.get(*place));
        let silent = silent
            .map(|server| server.key.to_string())
            .filter(|_| is_any);
        RoundTripStore::record(network, by_key.collect(), silent.collect());
        measured
    }
}

/// The round trip to each proxy of a list, as earlier transfers measured it on the network of these links; none of one
/// that was not measured.
pub fn remembered_round_trips(servers: &ServerList, links: &[Link]) -> Vec<Option<Duration>> {
    let known = RoundTripStore::read().of_network(&network_name(&free_links(links)));
    let known = |server: &ServerAddress| known.get(&server.key.to_string()).copied();
    servers.servers().iter().map(known).collect()
}

fn is_unreachable(server: &AskedServer) -> bool {
    server.over.as_ref().is_some_and(Vec::is_empty)
}

/// The name of the networks that these links lead to.
pub(super) fn network_name(links: &[Link]) -> String {
    let mut names: Vec<String> = links
        .iter()
        .map(|link| {
            let gateway = link.routes.iter().find_map(|route| route.gateway);
            let gateway = gateway.map(|gateway| format!(" via {gateway}"));
            format!("{}{}", link.name, gateway.unwrap_or_default())
        })
        .collect();
    names.sort();
    match names.is_empty() {
        true => "any".to_owned(),
        false => names.join(" + "),
    }
}

/// Says which of several proxies is in use and why; `None` without one.
pub fn describe_proxies(proxies: &[ProxyStatus]) -> Option<String> {
    let current = proxies.iter().find(|proxy| proxy.is_current)?;
    let ms = |trip: Duration| format!("{:.0} ms", trip.as_secs_f64() * 1e3);
    let others = proxies.iter().filter(|proxy| !proxy.is_current);
    let others = others.map(|proxy| {
        let name = host_and_port(&proxy.address);
        match proxy.round_trip {
            Some(trip) => format!("{name} {}", ms(trip)),
            None => format!("{name} not measured"),
        }
    });
    let mut why: Vec<String> = current.round_trip.map(ms).into_iter().collect();
    why.extend(others);
    Some(format!(
        "{} ({})",
        host_and_port(&current.address),
        why.join("; ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_driver::SecretKey;

    fn proxies(trips: [Option<u64>; 2], current: usize) -> Vec<ProxyStatus> {
        let status = |(place, trip): (usize, Option<u64>)| ProxyStatus {
            address: format!("d2tp://proxy{place}:4433/{}", key(place as u8))
                .parse()
                .unwrap(),
            is_current: place == current,
            round_trip: trip.map(Duration::from_millis),
        };
        trips.into_iter().enumerate().map(status).collect()
    }

    fn key(n: u8) -> PublicKey {
        SecretKey::from_bytes([n + 1; 32]).public()
    }

    #[test]
    fn the_proxy_in_use_is_described_with_the_others() {
        for (trips, current, text) in [
            (
                [Some(14), Some(82)],
                0,
                "proxy0:4433 (14 ms; proxy1:4433 82 ms)",
            ),
            (
                [None, Some(82)],
                1,
                "proxy1:4433 (82 ms; proxy0:4433 not measured)",
            ),
            ([None, None], 0, "proxy0:4433 (proxy1:4433 not measured)"),
        ] {
            let told = describe_proxies(&proxies(trips, current));
            assert_eq!(told.as_deref(), Some(text));
        }
    }

    #[test]
    fn a_flow_is_claimed_at_the_proxy_that_has_it() {
        let (one, two) = (key(1), key(2));
        let list = format!("d2tp://127.0.0.1:1/{one} d2tp://127.0.0.1:2/{two}");
        let list: d2tp_driver::ServerList = list.parse().unwrap();
        let links = tokio::sync::watch::Sender::default();
        let client = ProxyClient::new(
            list,
            SecretKey::from_bytes([9; 32]),
            links.subscribe(),
            None,
        );
        assert!(client.select_claimed(Some(two)));
        assert_eq!(client.address().key, two);
        assert!(!client.select_claimed(Some(key(7))));
        assert_eq!(client.address().key, two);
        // A note of a version that had one proxy only.
        assert!(client.select_claimed(None));
    }
}
