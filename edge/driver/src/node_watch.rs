//! The nodes of a device's server: measures and changes them as `d2tp-device` decides.
//!
//! ```text
//!  paths, answers of links, time ─▶ NodeChoice ─▶ Probe ─▶ a probe of versions over each link in use ─┐
//!                                       ▲    ├──▶ Switch ─▶ new sockets, a handshake at the node       │
//!                                       │    └──▶ AskToMove ─▶ a DATAGRAM to the node in use            │
//!                                       └─────────────── round trips ◀─────────────────────────────────┘
//! ```

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use d2tp_device::{LinkAnswers, NODE_ANSWER_MAX, NodeAction, NodeView};
use d2tp_links::Link;
use d2tp_session::{Addresses, FlowId, LinkId, PathSelection, PathState, Span, Time};
use d2tp_udp::{BindError, BindOptions, LinkSocket};
use tokio::net::UdpSocket;
use tokio::sync::broadcast::error::RecvError;

use crate::clock;
use crate::device::DeviceInner;
use crate::device_nodes::UnheardTime;
use crate::driver_core::MOVE_CONTEXT;
use crate::local_hints::{self, LocalNetwork, named_by_all};
use crate::server_nodes::ServerNode;
use crate::version_probe::{VersionProbeAnswer, probe_version_from};

/// The shortest interval between two looks at the paths while packets arrive.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The interval of looks at paths while data is in flight and no packet arrives.
const OWED_LOOK_EVERY: Span = Span::from_millis(250);
/// How long after the last packet the paths are still looked at while a flow waits. A silent path is probed after two
/// probe timeouts (R-PATH-9), of which no event tells.
const QUIET_LOOKED_AT_FOR: Span = Span::from_secs(4); // a guess: probe timeouts of slow links
/// How long a path on which data is in flight may hear nothing before its node counts as silent, although the
/// path does not yet.
const UNHEARD_MAX: Span = Span::from_millis(500); // as `SILENCE_MIN` of links in `d2tp-device`
/// How long a question whether the session can go on at a nearer node waits for a path that takes it. The nodes are
/// compared again in a minute.
const MOVE_QUESTION_EXPIRY: Span = Span::from_secs(1);

/// What the choice of a node needs to know of a session's flows.
#[derive(Clone, Copy, Debug, Default)]
struct DeviceFlows {
    are_open: bool,
    /// Whether one has received nothing yet.
    is_unanswered: bool,
    /// The newest one that this device has opened.
    newest: Option<FlowId>,
    /// Whether no node knows anything of the session.
    is_new: bool,
}

impl DeviceInner {
    /// The number of the session's instance, for logs.
    fn instance(&self) -> Option<u64> {
        let inner = self.shared.inner.lock();
        Some(inner.core.session(self.session)?.instance())
    }

    /// Adds what a lookup found later: a node, or other addresses of a known one.
    pub(crate) fn on_node_found(self: &Arc<Self>, found: ServerNode) {
        let is_current = {
            let mut nodes = self.nodes.lock();
            match nodes.list.iter().position(|node| node.name == found.name) {
                Some(n) if n == nodes.choice.current() => true,
                Some(n) => {
                    nodes.list[n] = found.clone();
                    false
                }
                None => {
                    nodes.list.push(found.clone());
                    let count = nodes.list.len();
                    nodes.choice.set_count(count);
                    false
                }
            }
        };
        if is_current {
            self.replace_remotes(found.addresses);
        }
        self.nodes_changed.notify_one();
    }

    /// Asks the networks of the free links in use where the server is, adds the nodes that they named truly, and removes
    /// those of networks that were left.
    ///
    /// R-NODE-7: a hint is a node only once its host has proved the server's key in a session of its own.
    pub(crate) fn ask_local_networks(self: &Arc<Self>) {
        let Some(trial) = &self.hint_trial else {
            return;
        };
        let in_use: Vec<Link> = {
            let state = self.state.lock();
            let in_use = state.described.values();
            let in_use = in_use.filter(|link| state.links.is_in_use(&link.name));
            in_use.cloned().collect()
        };
        let named = named_by_all(&in_use, &trial.server);
        let networks: BTreeSet<LocalNetwork> = in_use.iter().map(LocalNetwork::of).collect();
        let has_changed = {
            let mut nodes = self.nodes.lock();
            let mut has_changed = nodes.remove_hinted(&networks, &named);
            if let Some(network) = networks.first() {
                for hint in &named {
                    has_changed |= nodes.add_hinted(network, *hint);
                }
            }
            has_changed
        };
        if has_changed {
            self.nodes_changed.notify_one();
        }
        // Nothing allows bytes on metered links for this.
        for link in in_use.into_iter().filter(Link::is_free) {
            let network = LocalNetwork::of(&link);
            let now = std::time::Instant::now();
            let is_due = local_hints::with_memory(|memory| {
                memory.begin_question(&network, &trial.server, now)
            });
            if is_due {
                self.runtime.spawn(trial.clone().ask_network(link, network));
            }
        }
    }

    /// Opens a path over the system's route to the node in use.
    pub(crate) fn open_default_route(self: &Arc<Self>) -> Result<(), crate::DriverError> {
        let (node, remote) = {
            let nodes = self.nodes.lock();
            (nodes.choice.current(), nodes.remotes().first().copied())
        };
        let Some(remote) = remote else {
            return Ok(());
        };
        let link = self.bind_default_route(node, remote)?;
        let addresses = Addresses {
            link,
            local: None,
            remote,
        };
        self.shared.with(self.session, |s| {
            s.open_path(clock::now(), addresses, false);
        });
        self.nodes_changed.notify_one();
        Ok(())
    }

    fn bind_default_route(&self, node: usize, remote: SocketAddr) -> Result<LinkId, BindError> {
        let local = unspecified(remote);
        let socket = LinkSocket::bind(&BindOptions::at(local))?;
        let link = self.shared.add_socket(socket, false);
        self.state.lock().links.name_socket(link, "any");
        self.nodes.lock().default_route.push((link, node));
        Ok(link)
    }

    /// What the choice of a node needs to know now.
    pub(crate) fn node_view(&self) -> NodeView {
        let paths = self.paths();
        let statuses = self.link_statuses();
        let flows = self.session_flows();
        let mut nodes = self.nodes.lock();
        let now = clock::now();
        let active = || paths.iter().filter(|path| path.state == PathState::Active);
        // All paths together: some data may be in flight on one and be answered on another.
        let owes = active().any(|path| path.in_flight > 0);
        let heard = active().map(|path| path.heard_at).max();
        nodes.is_quiet =
            flows.are_open && heard.is_some_and(|heard| now.since(heard) < QUIET_LOOKED_AT_FOR);
        let heard = heard.filter(|_| owes);
        let due = nodes.look_due;
        nodes.unheard = heard.map(|heard| UnheardTime::after(nodes.unheard, now, heard, due));
        nodes.note_active_links(active().map(|path| path.addresses.link).collect());
        let longest = active().map(|path| path.rtt.times(3)).max();
        let patience = longest.map_or(UNHEARD_MAX, |longest| longest.max(UNHEARD_MAX));
        let patience = match (flows.is_unanswered, nodes.handshake_took) {
            (true, Some(took)) => patience.max(took.min(NODE_ANSWER_MAX)),
            _ => patience,
        };
        let unheard = nodes
            .unheard
            .filter(|unheard| now.since(unheard.since) >= patience);
        let current = nodes.choice.current();
        // A stream's path has an address of its own, and is to the node that was asked for it.
        let node_of = |remote| nodes.node_at(remote).unwrap_or(current);
        let answering = active().map(|path| node_of(path.addresses.remote)).next();
        if answering == Some(current) && nodes.handshake_took.is_none() {
            nodes.handshake_took = Some(now.since(nodes.asked_at));
        }
        let answering = answering.filter(|_| unheard.is_none());
        let silent_since = match answering {
            Some(_) => None,
            None if unheard.is_some() => unheard.map(|unheard| unheard.since),
            None if !nodes.default_route.is_empty() => {
                let heard = paths.iter().map(|path| path.heard_at).max();
                Some(heard.unwrap_or(nodes.started_at))
            }
            None => {
                let asked = statuses.iter().filter_map(|link| match link.answers {
                    LinkAnswers::Asked { since, .. } | LinkAnswers::Silent { since } => Some(since),
                    LinkAnswers::Unasked | LinkAnswers::Answering => None,
                });
                asked.max()
            }
        };
        let payload = paths
            .iter()
            .map(|path| path.payload_in + path.payload_out)
            .sum();
        let is_busy = std::mem::replace(&mut nodes.payload, payload) != payload;
        let round_trip = active().map(|path| path.rtt).max();
        NodeView {
            answering,
            silent_since,
            is_busy,
            has_flows: flows.are_open,
            is_unanswered: flows.is_unanswered,
            newest_flow: flows.newest,
            handshake_took: nodes.handshake_took.unwrap_or(Span::ZERO),
            is_new: flows.is_new,
            round_trip: round_trip.unwrap_or(Span::ZERO),
        }
    }

    fn session_flows(&self) -> DeviceFlows {
        let inner = self.shared.inner.lock();
        let Some(session) = inner.core.session(self.session) else {
            return DeviceFlows::default();
        };
        let flows = session.flow_ids();
        let has_nothing = |flow: &FlowId| session.received(*flow).is_some_and(|r| r.0 == 0);
        DeviceFlows {
            are_open: !flows.is_empty(),
            is_unanswered: flows.iter().any(has_nothing),
            newest: flows
                .iter()
                .copied()
                .filter(|flow| flow.by_initiator())
                .max(),
            is_new: session.is_new(),
        }
    }

    /// Carries out what the choice of a node decided.
    pub(crate) fn carry_out_node_actions(self: &Arc<Self>, view: &NodeView) {
        loop {
            let action = self.nodes.lock().choice.poll_action();
            match action {
                None => return,
                Some(NodeAction::Probe) => {
                    self.probe_nodes(view.probe_patience());
                    self.ask_local_networks();
                }
                Some(NodeAction::Switch(to)) => self.switch_node(to),
                Some(NodeAction::AskToMove(to)) => self.ask_to_move(to),
            }
        }
    }

    /// Asks the node in use whether the session can go on at node `to` (R-NODE-5).
    fn ask_to_move(&self, to: usize) {
        let address = self.nodes.lock().address_of(to);
        let Some(address) = address else {
            return;
        };
        tracing::debug!(instance = self.instance(), to = %address, "asks to go on at a nearer node");
        {
            let mut inner = self.shared.inner.lock();
            let question = Bytes::from(address.to_string());
            let expires = clock::now() + MOVE_QUESTION_EXPIRY;
            let _ = inner.core.with(self.session, |s| {
                s.send_datagram_on(PathSelection::Any, MOVE_CONTEXT, question, expires);
            });
        }
        self.shared.wake();
    }

    fn switch_node(self: &Arc<Self>, to: usize) {
        let (name, remote, is_default_route, back) = {
            let nodes = self.nodes.lock();
            let node = &nodes.list[to];
            let back = nodes.default_route.iter().any(|(_, node)| *node == to);
            (
                node.name.clone(),
                node.addresses.first().copied(),
                !nodes.default_route.is_empty(),
                back,
            )
        };
        let instance = self.instance();
        tracing::info!(instance, node = %name, "the session goes on at this node");
        {
            let mut nodes = self.nodes.lock();
            (nodes.asked_at, nodes.handshake_took) = (clock::now(), None);
        }
        let has_flows = self.session_flows().are_open;
        if !is_default_route {
            let patience = self.nodes.lock().choice.handshake_patience(to);
            self.input(|links, now, session| {
                links.on_node_changed(now, session, has_flows, patience);
            });
            return;
        }
        // Nothing but the node differs: what was asked of others is given up.
        if back {
            return self.drop_default_routes(|node| node != to);
        }
        let Some(remote) = remote else {
            return;
        };
        // R-NODE-3: a node that does not answer is asked no more.
        let answers = self
            .paths()
            .iter()
            .any(|path| path.state == PathState::Active);
        if !answers || !has_flows {
            self.drop_default_routes(|_| true);
        }
        match self.bind_default_route(to, remote) {
            Ok(link) => {
                let addresses = Addresses {
                    link,
                    local: None,
                    remote,
                };
                self.shared.with(self.session, |s| {
                    s.wake_at(clock::now(), addresses, false);
                });
            }
            Err(error) => tracing::warn!(%error, "no socket for another node"),
        }
    }

    /// Whether the system's route is used.
    pub(crate) fn has_default_route(&self) -> bool {
        !self.nodes.lock().default_route.is_empty()
    }

    /// Closes the paths over the system's route to nodes for which `dropped` is true.
    pub(crate) fn drop_default_routes(&self, dropped: impl Fn(usize) -> bool) {
        let old: Vec<LinkId> = {
            let mut nodes = self.nodes.lock();
            let (old, kept) = nodes.default_route.iter().partition(|(_, n)| dropped(*n));
            nodes.default_route = kept;
            let old: Vec<(LinkId, usize)> = old;
            old.into_iter().map(|(link, _)| link).collect()
        };
        let mut inner = self.shared.inner.lock();
        for link in old {
            for session in inner.core.ids() {
                let _ = inner
                    .core
                    .with(session, |s| s.on_link_down(clock::now(), link));
            }
            inner.sockets.remove(&link);
        }
        drop(inner);
        self.shared.wake();
    }

    /// Measures the round trip to every node over the links in use.
    fn probe_nodes(self: &Arc<Self>, patience: Span) {
        let (nodes, answers, default_route) = {
            let nodes = self.nodes.lock();
            let list: Vec<Vec<SocketAddr>> = nodes
                .list
                .iter()
                .map(|node| node.addresses.clone())
                .collect();
            (list, nodes.answers.clone(), !nodes.default_route.is_empty())
        };
        let in_use: Vec<_> = {
            let state = self.state.lock();
            let described = state.described.values();
            let in_use = described.filter(|link| state.links.is_in_use(&link.name));
            in_use.cloned().collect()
        };
        for (n, addresses) in nodes.into_iter().enumerate() {
            let mut sockets: Vec<(UdpSocket, SocketAddr)> = Vec::new();
            if default_route && let Some(remote) = addresses.first().copied() {
                let bound = std::net::UdpSocket::bind(unspecified(remote));
                sockets.extend(bound.ok().and_then(to_tokio).map(|socket| (socket, remote)));
            }
            for link in &in_use {
                for remote in self.attach.probe_addresses(link, &addresses) {
                    let socket = self.attach.probe_socket(link, remote);
                    let socket = socket.ok().and_then(to_tokio);
                    sockets.extend(socket.map(|socket| (socket, remote)));
                }
            }
            for (socket, remote) in sockets {
                let answers = answers.clone();
                self.runtime.spawn(async move {
                    let probed = probe_version_from(socket, remote, patience.into()).await;
                    if let Ok(VersionProbeAnswer::Answered { round_trip, .. }) = probed {
                        let _ = answers.send((n, Span::from(round_trip)));
                    }
                });
            }
        }
    }
}

fn to_tokio(socket: std::net::UdpSocket) -> Option<UdpSocket> {
    socket.set_nonblocking(true).ok()?;
    UdpSocket::from_std(socket).ok()
}

fn unspecified(remote: SocketAddr) -> SocketAddr {
    match remote.is_ipv6() {
        true => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
        false => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
    }
}

impl DeviceInner {
    /// Chooses among the nodes until the device ends. A device whose server has one node only asks local networks for
    /// others.
    pub(crate) async fn watch_nodes(body: Weak<DeviceInner>) {
        let Some(mut answered) = body.upgrade().and_then(|b| b.nodes.lock().answered.take()) else {
            return;
        };
        let (mut events, mut candidates, changed, move_asked) = match body.upgrade() {
            Some(body) => (
                body.shared.events.subscribe(),
                body.candidates.subscribe(),
                body.nodes_changed.clone(),
                body.shared.move_asked.clone(),
            ),
            None => return,
        };
        let mut hints = local_hints::watch_hints();
        loop {
            let wait = {
                let Some(body) = body.upgrade() else { return };
                body.ask_local_networks();
                let is_one = body.nodes.lock().list.len() < 2;
                match is_one {
                    true => None,
                    false => body.look_at_nodes(None),
                }
            };
            let timer = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            let has_one = wait.is_none() && {
                let Some(body) = body.upgrade() else { return };
                let nodes = body.nodes.lock();
                nodes.list.len() < 2
            };
            tokio::select! {
                () = timer => {}
                () = changed.notified() => {}
                () = move_asked.notified() => {
                    let Some(body) = body.upgrade() else { return };
                    body.on_move_asked();
                }
                _ = hints.changed() => {}
                moved = candidates.changed() => if moved.is_err() { return },
                answer = answered.recv() => {
                    let Some(body) = body.upgrade() else { return };
                    body.look_at_nodes(answer);
                }
                event = events.recv(), if !has_one => {
                    if let Err(RecvError::Closed) = event {
                        return;
                    }
                    // Events come with every batch of packets.
                    tokio::time::sleep(LOOK_EVERY).await;
                    events = events.resubscribe();
                }
            }
        }
    }

    /// Looks at the paths, and does what the choice of a node says. Returns when to look again.
    fn look_at_nodes(self: &Arc<Self>, answer: Option<(usize, Span)>) -> Option<Duration> {
        let view = self.node_view();
        let now = clock::now();
        {
            let mut nodes = self.nodes.lock();
            match answer {
                Some((n, round_trip)) => nodes.choice.on_answer(now, n, round_trip, &view),
                None => nodes.choice.on_time(now, &view),
            }
        }
        self.carry_out_node_actions(&view);
        if let Some(at) = view.answering {
            let current = self.nodes.lock().choice.current();
            if at == current {
                self.drop_default_routes(|node| node != current);
            }
        }
        let mut nodes = self.nodes.lock();
        let is_due = (nodes.unheard.is_some() || nodes.is_quiet) && view.answering.is_some();
        let owed = is_due.then(|| clock::now() + OWED_LOOK_EVERY);
        let next = nodes.choice.next_timeout(&view);
        let next = next.into_iter().chain(owed).min();
        nodes.look_due = next.unwrap_or(Time::NEVER);
        let next = next?;
        Some(Duration::from(next.since(clock::now())) + Duration::from_millis(1))
    }
}

impl DeviceInner {
    /// Handles a request of the server to go on at another node (R-NODE-4).
    pub(crate) fn on_move_asked(self: &Arc<Self>) {
        let Some(request) = self.shared.inner.lock().move_request.take() else {
            return;
        };
        let to = std::str::from_utf8(&request).ok();
        let to: Option<SocketAddr> = to.and_then(|text| text.parse().ok());
        let instance = self.instance();
        tracing::debug!(instance, ?to, "the node asks to go on at another one");
        let view = self.node_view();
        {
            let mut nodes = self.nodes.lock();
            let preferred = to.and_then(|to| nodes.node_or_new(to));
            nodes.choice.on_leave_asked(clock::now(), preferred, &view);
        }
        self.carry_out_node_actions(&view);
    }
}
