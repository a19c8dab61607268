//! Which node of the server a device uses. All nodes have the server's key, and a session can continue at
//! any of them.
//!
//! ```text
//!  before the first handshake ──▶ Probe ── another answers 25 ms before this one ──▶ Switch
//!  silent for 250 ms ──▶ Probe ── another answers, and this one does not ──▶ Switch     (failover)
//!  payload moved, once a minute ──▶ Probe ── another is clearly nearer ──▶ Switch, or with flows: AskToMove
//!  the node asks to be left ──▶ Probe ── another answers ──▶ Switch, with flows too
//!  the node does not complete the handshake ──▶ Switch back; for a minute it is tried only where nothing else is left
//!  the network of the node in use is left ──▶ Switch to the one before
//! ```
//!
//! A node may not have the session's record, and never has its tunnels and uploads. A session with flows is
//! therefore moved only where they would be lost otherwise, or where its node asks for it. A device that finds a nearer
//! node asks the one in use, which knows what the other one could go on with; if all of it, that node asks to be left. A
//! session is at one node at a time: two that were asked at once would both take it up.

use std::collections::VecDeque;

use d2tp_session::FlowId;
use d2tp_time::{Span, Time};

use crate::tracked::NODE_ANSWER_MAX;

/// How long the node in use may be silent before others are asked. Paths count as silent after at least 250 ms
/// without an answer, so the first other node is used within a second.
const SILENT_MIN: Span = Span::from_millis(250); // RFC 8305 §5
/// The interval between probes of a silent node's alternatives, at first and at most.
const PROBE_FIRST: Span = Span::from_millis(250);
const PROBE_MAX: Span = Span::from_secs(30);
/// How much longer than another node the first one may take to answer before the other is asked instead.
const FIRST_LATER_BY: Span = Span::from_millis(25); // a guess: worth a second handshake
/// How much longer than its round trip a silent node is given to answer a probe once another has answered:
/// the same link carried both probes.
const LAST_ANSWER_WITHIN: Span = Span::from_millis(100); // a guess: jitter of a Wi-Fi
/// The interval between comparisons of nodes, and between two changes to a nearer one. Lower: a route that
/// flaps moves the session often. Higher: a device that moved stays at a far node for longer.
const COMPARE_EVERY: Span = Span::from_secs(60);
/// How long an answer of the node in use may take: it waits for 30 s until copies are whole, and a second for a path.
const MOVE_ANSWER_WITHIN: Span = Span::from_secs(32);
/// The interval between comparisons once the device is in another network: it may be in another city.
const COMPARE_MOVED_EVERY: Span = Span::from_secs(10); // a guess: a device that changes networks every few seconds
/// How long a node that did not complete a handshake is not tried again, unless the one in use is silent, or asks to be
/// left, and no other answers: a host that was busy for a moment must not hold a session for a minute.
const FAILED_FOR: Span = Span::from_secs(60); // a guess
/// How long a request to be left waits for the first byte of a flow at most: a flow whose answer takes longer, as that of a
/// long poll, must not hold the others of its session.
const LEAVE_HELD_MAX: Span = Span::from_secs(10); // a guess
/// After how long without a request to be left the next one is the first of others: they come each second, and some are
/// lost.
const LEAVE_REQUESTS_APART_MAX: Span = Span::from_secs(5); // a guess
/// A node is nearer if its round trip is shorter by this, and by a fifth. Both are guesses: jitter of a
/// Wi-Fi must not move a session.
const NEARER_BY: Span = Span::from_millis(5);
/// How many round trips a handshake at another node may take: one for a proof of address (R-HS-7), one for the SYN, one
/// for a copy of it that was lost, and one for what the node itself has to do.
const HANDSHAKE_ROUND_TRIPS: u64 = 4; // a guess
/// The least time in which answers to probes are awaited.
const ANSWERS_WITHIN: Span = Span::from_secs(1);

/// What the choice of a node needs to know of the session.
#[derive(Clone, Copy, Debug, Default)]
pub struct NodeView {
    /// The node to which a path leads that answers.
    pub answering: Option<usize>,
    /// Since when nothing answers, if packets were sent.
    pub silent_since: Option<Time>,
    /// Whether payload moves, or flows wait for some.
    pub is_busy: bool,
    /// Whether flows are open, some of which another node may not have.
    pub has_flows: bool,
    /// Whether an open flow has received nothing yet: its node may be asking an origin for it, and another one, which
    /// does not know the flow, would ask again.
    pub is_unanswered: bool,
    /// The newest flow that the device has opened, as far as it is open.
    pub newest_flow: Option<FlowId>,
    /// How long the node in use took to complete the session's handshake.
    pub handshake_took: Span,
    /// Whether no node knows anything of the session: no handshake has completed.
    pub is_new: bool,
    /// The longest round trip of the paths that answer; zero if there is none.
    pub round_trip: Span,
}

impl NodeView {
    /// How long the node in use may be silent while a flow waits for its first byte: as long as its handshake took, since
    /// a busy node asks an origin when it comes to that, and another one would ask again. Otherwise zero.
    pub fn first_byte_patience(&self) -> Span {
        match self.is_unanswered {
            // The time before a network came counts there, too.
            true => self.handshake_took.min(NODE_ANSWER_MAX),
            false => Span::ZERO,
        }
    }

    /// How long answers to probes are awaited.
    pub fn probe_patience(&self) -> Span {
        self.round_trip.times(3).max(ANSWERS_WITHIN)
    }
}

/// What the owner of a [`NodeChoice`] has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeAction {
    /// Measure the round trip to every node, and report each answer with [`NodeChoice::on_answer`].
    Probe,
    /// Use this node from now on: [`crate::DeviceLinks::on_node_changed`].
    Switch(usize),
    /// Ask the node in use whether the session, with its flows, can go on at this nearer one. If it can, the answer comes
    /// as a request to be left ([`NodeChoice::on_leave_asked`]); otherwise none comes.
    AskToMove(usize),
}

#[derive(Clone, Copy, Debug, Default)]
struct NodeState {
    round_trip: Option<Span>,
    /// When the node answered last.
    answered_at: Option<Time>,
    /// The time until which the node is tried only if no other answers, because it did not complete a handshake.
    failed_until: Option<Time>,
    /// The time until which the node is used only if the current one is silent and no other answers, because it asked to
    /// be left.
    asked_until: Option<Time>,
}

impl NodeState {
    fn has_failed(&self, now: Time) -> bool {
        self.failed_until.is_some_and(|until| until > now)
    }

    fn asked_to_be_left(&self, now: Time) -> bool {
        self.asked_until.is_some_and(|until| until > now)
    }
}

/// A request of the node in use to be left.
#[derive(Clone, Copy, Debug)]
struct LeaveRequest {
    /// The node that is to be used instead, if it answers.
    preferred: Option<usize>,
    /// When the nodes were probed for it.
    probed_at: Time,
    /// Whether the device asked for it, because `preferred` is nearer: then no other node is used instead.
    is_answer: bool,
    /// The newest flow when the request came.
    newest_flow: Option<FlowId>,
}

/// The time in which requests to be left have waited.
#[derive(Clone, Copy, Debug)]
struct LeaveHold {
    since: Time,
    /// When a request last found a flow without its first byte.
    until: Time,
}

/// The choice among a server's nodes.
#[derive(Debug)]
pub struct NodeChoice {
    nodes: Vec<NodeState>,
    current: usize,
    /// The node before, and when it is used again unless the current one answers earlier.
    leaving: Option<(usize, Time)>,
    /// The first answers to probes, of the node in use and of another, since all paths are silent.
    alive_at: Option<Time>,
    other_alive_at: Option<Time>,
    /// Whether the session came to another network since nodes were compared.
    is_elsewhere: bool,
    /// Whether payload has moved since nodes were compared.
    was_busy: bool,
    /// When the session last moved to a nearer node.
    moved_at: Option<Time>,
    /// The request of the node in use to be left.
    leave_request: Option<LeaveRequest>,
    /// The nearer nodes to which the node in use was asked to let the session go, and until when its answers may come.
    move_questions: Vec<(usize, Time)>,
    /// How long requests to be left have waited for the first byte of a flow.
    leave_hold: Option<LeaveHold>,
    probed_at: Option<Time>,
    /// Probes since anything answered.
    silent_probes: u32,
    /// The time until which the current comparison waits for answers.
    compares_until: Option<Time>,
    actions: VecDeque<NodeAction>,
}

impl NodeChoice {
    /// A choice among `count` nodes, the first of which is in use.
    pub fn new(count: usize) -> NodeChoice {
        NodeChoice {
            nodes: vec![NodeState::default(); count.max(1)],
            current: 0,
            leaving: None,
            alive_at: None,
            other_alive_at: None,
            is_elsewhere: false,
            was_busy: false,
            moved_at: None,
            leave_request: None,
            move_questions: Vec::new(),
            leave_hold: None,
            probed_at: None,
            silent_probes: 0,
            compares_until: None,
            actions: VecDeque::new(),
        }
    }

    /// The node in use.
    pub fn current(&self) -> usize {
        self.current
    }

    /// The round trip to each node, where one was measured.
    pub fn round_trips(&self) -> Vec<Option<Span>> {
        self.nodes.iter().map(|node| node.round_trip).collect()
    }

    /// Sets how many nodes there are, because a lookup found others. The node in use keeps its number.
    pub fn set_count(&mut self, count: usize) {
        self.nodes.resize(count.max(1), NodeState::default());
        self.current = self.current.min(self.nodes.len() - 1);
    }

    /// The next action.
    pub fn poll_action(&mut self) -> Option<NodeAction> {
        self.actions.pop_front()
    }

    /// Handles a node's answer to a probe.
    pub fn on_answer(&mut self, now: Time, node: usize, round_trip: Span, view: &NodeView) {
        let Some(state) = self.nodes.get_mut(node) else {
            return;
        };
        (state.round_trip, state.answered_at) = (Some(round_trip), Some(now));
        if let (None, Some(since)) = (view.answering, view.silent_since) {
            let first = match node == self.current {
                true => &mut self.alive_at,
                false => &mut self.other_alive_at,
            };
            *first = first.filter(|at| *at >= since).or(Some(now));
        }
        self.on_time(now, view);
    }

    /// Handles a request of the node in use to be left: for `preferred`, if that answers, else for the nearest other
    /// one. It comes again while the session is still there; so it waits for some seconds while a flow has received
    /// nothing yet.
    pub fn on_leave_asked(&mut self, now: Time, preferred: Option<usize>, view: &NodeView) {
        // While the session moves, the request may be one that was sent before.
        if self.nodes.len() < 2 || self.leaving.is_some() {
            return;
        }
        // A question is answered once. What comes again is a request of the node itself.
        self.move_questions.retain(|(_, until)| now < *until);
        let mut questions = self.move_questions.iter();
        let question = questions.position(|(node, _)| Some(*node) == preferred);
        let is_answer = question.is_some();
        if let Some(question) = question {
            self.move_questions.remove(question);
        } else {
            self.nodes[self.current].asked_until = Some(now + FAILED_FOR);
            if let Some(pending) = &mut self.leave_request {
                pending.is_answer = false;
            }
        }
        if self.holds_leave(now, view) {
            return;
        }
        let is_probed = self
            .leave_request
            .is_some_and(|asked| now.since(asked.probed_at) < view.probe_patience());
        if is_probed {
            return;
        }
        self.compares_until = None;
        let preferred = preferred.filter(|node| *node < self.nodes.len() && *node != self.current);
        self.leave_request = Some(LeaveRequest {
            preferred,
            probed_at: now,
            is_answer,
            newest_flow: view.newest_flow,
        });
        self.probe(now);
    }

    /// Whether a request to be left waits for the first byte of a flow.
    fn holds_leave(&mut self, now: Time, view: &NodeView) -> bool {
        if !view.is_unanswered {
            self.leave_hold = None;
            return false;
        }
        let hold = self.leave_hold;
        let hold = hold.filter(|hold| now.since(hold.until) < LEAVE_REQUESTS_APART_MAX);
        let since = hold.map_or(now, |hold| hold.since);
        self.leave_hold = Some(LeaveHold { since, until: now });
        now.since(since) < LEAVE_HELD_MAX
    }

    /// Leaves the node in use as it asked, once another has answered.
    fn leave(&mut self, now: Time, asked: LeaveRequest, view: &NodeView) {
        let since = asked.probed_at;
        let is_late = now >= since + view.probe_patience();
        // The node has looked at the flows that there were. A tunnel or an upload that was opened since would be lost.
        let has_unknown = asked.is_answer && view.newest_flow > asked.newest_flow;
        if has_unknown || self.holds_leave(now, view) {
            // A flow was opened meanwhile. The node asks again, or the device does when it compares nodes again.
            self.leave_request = None;
            return;
        }
        let heard = |n: &usize| {
            let node = &self.nodes[*n];
            node.answered_at.is_some_and(|at| at >= since) && !node.asked_to_be_left(now)
        };
        let to = match asked.preferred {
            // What was nearer when the question was asked may not be so any more.
            Some(preferred) if asked.is_answer => self
                .nearer(now, since)
                .filter(|nearer| *nearer == preferred),
            Some(preferred) if heard(&preferred) => Some(preferred),
            Some(_) if !is_late => None,
            _ => self.nearest_other(now, since).filter(heard),
        };
        match to {
            Some(to) => {
                if asked.is_answer {
                    self.moved_at = Some(now);
                }
                self.switch(now, to, self.handshake_patience(to));
            }
            // It asks again.
            None if is_late => self.leave_request = None,
            None => {}
        }
    }

    /// Notes that the session uses a network that it did not use before.
    pub fn on_other_network(&mut self) {
        self.is_elsewhere = true;
    }

    /// Notes that another node is known now: nodes are probed as soon as there is a reason to, however long ago the last
    /// probe was.
    pub fn on_node_found(&mut self) {
        self.silent_probes = 0;
        if self.compares_until.is_none() {
            self.probed_at = None;
        }
    }

    /// Notes that a node cannot be reached any more, because the network that it is on was left. It keeps its number. If
    /// it is in use, the node before it is used instead, or the first other one.
    pub fn on_node_gone(&mut self, node: usize) {
        let Some(state) = self.nodes.get_mut(node) else {
            return;
        };
        *state = NodeState::default();
        self.move_questions.retain(|(to, _)| *to != node);
        let before = self.leaving.map(|(before, _)| before);
        if before == Some(node) {
            self.leaving = None;
        }
        if node != self.current || self.nodes.len() < 2 {
            return;
        }
        let other = before.unwrap_or(usize::from(node == 0));
        self.forget_questions();
        self.leaving = None;
        self.current = other;
        self.actions.push_back(NodeAction::Switch(other));
    }

    /// Handles the passing of time and a changed view.
    pub fn on_time(&mut self, now: Time, view: &NodeView) {
        if self.nodes.len() < 2 {
            return;
        }
        if let Some((before, until)) = self.leaving {
            if view.answering == Some(self.current) {
                self.leaving = None;
                self.nodes[self.current].failed_until = None;
            } else if now >= until {
                self.leaving = None;
                // A node that asked to be left ends soon: then the other one is all there is.
                if !self.nodes[before].asked_to_be_left(now) {
                    self.nodes[self.current].failed_until = Some(now + FAILED_FOR);
                }
                self.current = before;
                self.actions.push_back(NodeAction::Switch(before));
                return;
            } else {
                return;
            }
        }
        match (view.answering, view.silent_since) {
            (Some(_), _) => {
                self.silent_probes = 0;
                (self.alive_at, self.other_alive_at) = (None, None);
                self.was_busy |= view.is_busy;
                match self.leave_request {
                    Some(asked) => self.leave(now, asked, view),
                    None => self.compare(now, view),
                }
            }
            (None, Some(since)) => self.fail_over(now, since, view),
            (None, None) => {}
        }
    }

    fn fail_over(&mut self, now: Time, since: Time, view: &NodeView) {
        if now.since(since) < self.silent_min(view) {
            return;
        }
        if let Some(nearest) = self.nearest_other(now, since)
            && self.leave_at(since, view).is_some_and(|at| at <= now)
        {
            // What was measured before the silence says nothing of the node now.
            self.nodes[self.current].round_trip = None;
            let patience = match view.is_new {
                // Nothing is lost by asking the first node again, and a host without the key answers probes, too.
                true => self.first_patience(nearest),
                false => self.handshake_patience(nearest),
            };
            return self.switch(now, nearest, patience);
        }
        if self.probe_at(since, view) <= now {
            self.silent_probes += 1;
            self.probe(now);
        }
    }

    /// The nearest of the other nodes that answered since `since`; if there is no other, of those that failed lately the one
    /// that did so first; at last, of those that asked to be left.
    fn nearest_other(&self, now: Time, since: Time) -> Option<usize> {
        let failed = |node: &NodeState| node.failed_until.filter(|until| *until > now);
        let asked = |node: &NodeState| node.asked_until.filter(|until| *until > now);
        let heard = |node: &NodeState| node.answered_at.is_some_and(|at| at >= since);
        let others = self.nodes.iter().enumerate();
        let others = others.filter(|(n, node)| *n != self.current && heard(node));
        others
            .min_by_key(|(_, node)| (asked(node), failed(node), node.round_trip))
            .map(|f| f.0)
    }

    /// When a node that is silent since `since` is left, if another has answered a probe.
    fn leave_at(&self, since: Time, view: &NodeView) -> Option<Time> {
        let other = self.other_alive_at.filter(|at| *at >= since)?;
        if let Some(alive) = self.alive_at.filter(|at| *at >= since) {
            // It is there: the link was interrupted. By then the transport has repeated what it sent, as its
            // probe timeout has doubled to about the length of the silence at most.
            return Some(match view.is_new {
                true => alive + self.first_patience(self.current),
                false => alive + alive.since(since).max(NODE_ANSWER_MAX),
            });
        }
        let ours = self.nodes[self.current].round_trip.unwrap_or(Span::ZERO);
        Some(match view.is_new {
            true => {
                let nearest = self.nearest_other(other, since)?;
                let theirs = self.nodes[nearest].round_trip.unwrap_or(Span::ZERO);
                other + FIRST_LATER_BY.max(theirs.divided(4))
            }
            false => other + ours.max(view.round_trip) + LAST_ANSWER_WITHIN,
        })
    }

    /// How long the handshake of a new session may take at a node that answered a probe.
    fn first_patience(&self, node: usize) -> Span {
        let round_trip = self.nodes[node].round_trip.unwrap_or(Span::ZERO);
        round_trip.times(HANDSHAKE_ROUND_TRIPS) + SILENT_MIN
    }

    /// How long the handshake of a session with flows may take at another node: a network that is slow, or a host that is
    /// busy, as the last probe measured it, is no reason to give it up.
    pub fn handshake_patience(&self, node: usize) -> Span {
        let state = self.nodes.get(node);
        let round_trip = state
            .and_then(|state| state.round_trip)
            .unwrap_or(Span::ZERO);
        round_trip.times(HANDSHAKE_ROUND_TRIPS).max(NODE_ANSWER_MAX)
    }

    /// When the alternatives of a node that is silent since `since` are to be probed.
    fn probe_at(&self, since: Time, view: &NodeView) -> Time {
        let first = since + self.silent_min(view);
        let pause = PROBE_FIRST
            .times(1 << self.silent_probes.min(7))
            .min(PROBE_MAX);
        match self.probed_at {
            Some(at) if self.silent_probes > 0 => first.max(at + pause),
            _ => first,
        }
    }

    fn compare(&mut self, now: Time, view: &NodeView) {
        let since = self.probed_at.unwrap_or(now);
        if let Some(until) = self.compares_until {
            let answered = |node: &NodeState| node.answered_at.is_some_and(|at| at >= since);
            if now < until && !self.nodes.iter().all(answered) {
                return;
            }
            self.compares_until = None;
            match self.nearer(now, since) {
                // What a flow waits for may have been passed on by its node already.
                Some(nearer) if view.has_flows && !view.is_unanswered => {
                    self.move_questions.push((nearer, now + MOVE_ANSWER_WITHIN));
                    self.actions.push_back(NodeAction::AskToMove(nearer));
                }
                Some(nearer) if !view.has_flows => {
                    self.moved_at = Some(now);
                    self.switch(now, nearer, self.handshake_patience(nearer));
                }
                _ => {}
            }
            return;
        }
        if self.may_compare(view) && self.compare_at().is_none_or(|at| at <= now) {
            self.compares_until = Some(now + view.probe_patience());
            self.is_elsewhere = false;
            self.was_busy = false;
            self.probe(now);
        }
    }

    fn may_compare(&self, view: &NodeView) -> bool {
        self.was_busy || view.is_busy
    }

    /// When the nodes are to be compared again; `None`: at once.
    fn compare_at(&self) -> Option<Time> {
        let every = match self.is_elsewhere {
            true => COMPARE_MOVED_EVERY,
            false => COMPARE_EVERY,
        };
        let probed = self.probed_at.map(|at| at + every);
        let moved = self.moved_at.map(|at| at + COMPARE_EVERY);
        probed.into_iter().chain(moved).max()
    }

    /// A node that answered since `since` and is clearly nearer than the one in use.
    fn nearer(&self, now: Time, since: Time) -> Option<usize> {
        let fresh = |node: &&NodeState| node.answered_at.is_some_and(|at| at >= since);
        let ours = self.nodes[self.current];
        let ours = Some(&ours).filter(fresh)?.round_trip?;
        let is_nearer =
            |theirs: Span| theirs + NEARER_BY <= ours && theirs.times(5) <= ours.times(4);
        let tried = |node: &NodeState| !node.has_failed(now) && !node.asked_to_be_left(now);
        let others = self.nodes.iter().enumerate();
        let others = others.filter(|(n, node)| *n != self.current && fresh(node) && tried(node));
        let nearest = others.min_by_key(|(_, node)| node.round_trip)?;
        is_nearer(nearest.1.round_trip?).then_some(nearest.0)
    }

    fn probe(&mut self, now: Time) {
        self.probed_at = Some(now);
        self.actions.push_back(NodeAction::Probe);
    }

    fn switch(&mut self, now: Time, to: usize, patience: Span) {
        self.leaving = Some((self.current, now + patience));
        self.forget_questions();
        self.current = to;
        self.actions.push_back(NodeAction::Switch(to));
    }

    /// Drops what was asked of the node in use, and of the others because of it.
    fn forget_questions(&mut self) {
        (self.alive_at, self.other_alive_at) = (None, None);
        (self.compares_until, self.leave_request) = (None, None);
        self.move_questions.clear();
        self.leave_hold = None;
    }

    /// When to call [`NodeChoice::on_time`] if nothing happens before.
    pub fn next_timeout(&self, view: &NodeView) -> Option<Time> {
        if self.nodes.len() < 2 {
            return None;
        }
        if let Some((_, until)) = self.leaving {
            return Some(until);
        }
        match (view.answering, view.silent_since) {
            (Some(_), _) => match self.compares_until {
                _ if self.leave_request.is_some() => {
                    let asked = self.leave_request?;
                    Some(asked.probed_at + view.probe_patience())
                }
                Some(until) => Some(until),
                None => self.compare_at().filter(|_| self.may_compare(view)),
            },
            (None, Some(since)) => {
                let leave_at = self.leave_at(since, view);
                // Nothing is done before, see `fail_over`.
                let leave_at = leave_at.map(|at| at.max(since + self.silent_min(view)));
                let probe_at = self.probe_at(since, view);
                Some(leave_at.map_or(probe_at, |at| at.min(probe_at)))
            }
            (None, None) => None,
        }
    }

    /// How long the node in use may be silent before others are probed.
    fn silent_min(&self, view: &NodeView) -> Span {
        let current = &self.nodes[self.current];
        let ends_soon = view
            .silent_since
            .is_some_and(|since| current.asked_to_be_left(since));
        match (view.is_new, ends_soon) {
            (true, _) => Span::ZERO,
            (false, true) => SILENT_MIN,
            (false, false) => SILENT_MIN.max(view.first_byte_patience()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    fn ms(n: u64) -> Span {
        Span::from_millis(n)
    }

    fn answering(node: usize) -> NodeView {
        NodeView {
            answering: Some(node),
            is_busy: true,
            round_trip: ms(40),
            ..NodeView::default()
        }
    }

    fn silent(since: u64) -> NodeView {
        NodeView {
            silent_since: Some(at(since)),
            is_busy: true,
            has_flows: true,
            round_trip: ms(40),
            ..NodeView::default()
        }
    }

    /// A session that has asked its first node at `since`.
    fn new_session(since: u64) -> NodeView {
        NodeView {
            is_new: true,
            round_trip: Span::ZERO,
            ..silent(since)
        }
    }

    /// Lets a choice compare at `now`: the nodes answer with these round trips.
    fn compare(choice: &mut NodeChoice, now: u64, round_trips: &[u64]) -> Option<NodeAction> {
        let view = answering(choice.current());
        choice.on_time(at(now), &view);
        if choice.poll_action() != Some(NodeAction::Probe) {
            return None;
        }
        for (node, round_trip) in round_trips.iter().enumerate() {
            choice.on_answer(at(now + round_trip), node, ms(*round_trip), &view);
        }
        choice.poll_action()
    }

    #[test]
    fn a_silent_node_is_left_for_one_that_answered_since_and_for_no_other() {
        let mut choice = NodeChoice::new(3);
        choice.on_answer(at(0), 2, ms(1), &answering(0));
        while choice.poll_action().is_some() {}
        choice.on_time(at(10_249), &silent(10_000));
        assert_eq!(choice.poll_action(), None);
        choice.on_time(at(10_250), &silent(10_000));
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        assert_eq!(choice.next_timeout(&silent(10_000)), Some(at(10_750)));
        choice.on_answer(at(10_290), 1, ms(40), &silent(10_000));
        assert_eq!(
            choice.poll_action(),
            None,
            "the node in use may answer, too"
        );
        assert_eq!(choice.next_timeout(&silent(10_000)), Some(at(10_430)));
        choice.on_time(at(10_430), &silent(10_000));
        assert_eq!(choice.poll_action(), Some(NodeAction::Switch(1)));
        choice.on_time(at(10_500), &answering(1));
        assert_eq!((choice.current(), choice.poll_action()), (1, None));
    }

    #[test]
    fn where_no_node_answers_probes_become_rare_and_nothing_changes() {
        let mut choice = NodeChoice::new(2);
        let mut probes = 0;
        for now in (0..60_000).step_by(50) {
            choice.on_time(at(now), &silent(0));
            probes += usize::from(choice.poll_action() == Some(NodeAction::Probe));
        }
        assert!((5..=10).contains(&probes), "{probes}");
        assert_eq!(choice.current(), 0);
    }

    #[test]
    fn a_nearer_node_is_used_at_once_and_then_at_most_once_a_minute() {
        let mut choice = NodeChoice::new(2);
        assert_eq!(
            compare(&mut choice, 0, &[80, 12]),
            Some(NodeAction::Switch(1))
        );
        choice.on_time(at(100), &answering(1));
        for now in (200..60_000).step_by(100) {
            assert_eq!(compare(&mut choice, now, &[1, 90]), None, "at {now} ms");
        }
        assert_eq!(
            compare(&mut choice, 60_200, &[1, 90]),
            Some(NodeAction::Switch(0))
        );
    }

    #[test]
    fn a_node_that_is_hardly_nearer_is_no_reason_to_move() {
        for round_trips in [[80, 70], [10, 6], [3, 1]] {
            let mut choice = NodeChoice::new(2);
            assert_eq!(compare(&mut choice, 0, &round_trips), None);
            assert_eq!(choice.current(), 0);
        }
    }

    #[test]
    fn a_node_that_answers_probes_and_completes_no_handshake_is_left_again_for_a_minute() {
        let mut choice = NodeChoice::new(2);
        assert_eq!(
            compare(&mut choice, 0, &[80, 12]),
            Some(NodeAction::Switch(1))
        );
        choice.on_time(at(1_000), &answering(0));
        assert_eq!(choice.poll_action(), None, "it may still answer");
        choice.on_time(at(2_100), &answering(0));
        assert_eq!(choice.poll_action(), Some(NodeAction::Switch(0)));
        assert_eq!(compare(&mut choice, 62_000, &[80, 12]), None);
        let later = compare(&mut choice, 123_000, &[80, 12]);
        assert_eq!(later, Some(NodeAction::Switch(1)));
    }

    /// A session with an open flow, whose node is asked to let it go to node 1 at `now`.
    fn asks_to_move(now: u64) -> (NodeChoice, NodeView) {
        let mut choice = NodeChoice::new(3);
        let view = NodeView {
            has_flows: true,
            ..answering(0)
        };
        choice.on_time(at(now), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        choice.on_answer(at(now + 2), 1, ms(2), &view);
        choice.on_answer(at(now + 9), 2, ms(9), &view);
        assert_eq!(choice.poll_action(), None);
        choice.on_answer(at(now + 80), 0, ms(80), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::AskToMove(1)));
        (choice, view)
    }

    #[test]
    fn a_session_with_flows_moves_to_a_nearer_node_only_with_leave_of_the_one_in_use() {
        let (mut refused, view) = asks_to_move(0);
        for now in (81..60_000).step_by(100) {
            refused.on_time(at(now), &view);
            assert_eq!(refused.poll_action(), None, "at {now} ms");
        }
        refused.on_time(at(60_001), &view);
        let again = refused.poll_action();
        assert_eq!(again, Some(NodeAction::Probe), "once a minute");
        let (mut granted, view) = asks_to_move(0);
        granted.on_leave_asked(at(160), Some(1), &view);
        assert_eq!(granted.poll_action(), Some(NodeAction::Probe));
        granted.on_answer(at(162), 1, ms(2), &view);
        assert_eq!(granted.poll_action(), None, "it may not be nearer any more");
        granted.on_answer(at(240), 0, ms(80), &view);
        assert_eq!(granted.poll_action(), Some(NodeAction::Switch(1)));
        // It does not complete the handshake: the node before is still there, and not about to end.
        granted.on_time(at(2_240), &view);
        assert_eq!(granted.poll_action(), Some(NodeAction::Switch(0)));
        granted.on_time(at(2_300), &view);
        assert!(granted.nodes[1].has_failed(at(2_300)));
        assert!(!granted.nodes[0].asked_to_be_left(at(2_300)));
    }

    #[test]
    fn a_session_that_opens_a_flow_after_its_node_let_it_go_stays() {
        for opened in [None, Some(FlowId(2))] {
            let (mut choice, view) = asks_to_move(0);
            let view = NodeView {
                newest_flow: Some(FlowId(0)),
                ..view
            };
            choice.on_leave_asked(at(160), Some(1), &view);
            assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
            // A tunnel that is open, and of which the other node knows nothing.
            let later = NodeView {
                newest_flow: opened.or(view.newest_flow),
                ..view
            };
            choice.on_answer(at(162), 1, ms(2), &later);
            choice.on_answer(at(240), 0, ms(80), &later);
            assert_eq!(choice.current(), usize::from(opened.is_none()));
            if opened.is_some() {
                choice.on_time(at(60_161), &later);
                assert_eq!(
                    choice.poll_action(),
                    Some(NodeAction::Probe),
                    "it asks again"
                );
            }
        }
    }

    #[test]
    fn a_node_that_is_not_nearer_any_more_when_the_answer_comes_is_not_used() {
        let (mut choice, view) = asks_to_move(0);
        choice.on_leave_asked(at(20_000), Some(1), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        choice.on_answer(at(20_010), 0, ms(10), &view);
        choice.on_answer(at(20_090), 1, ms(90), &view);
        choice.on_time(at(21_000), &view);
        assert_eq!((choice.current(), choice.poll_action()), (0, None));
        assert!(!choice.nodes[0].asked_to_be_left(at(21_000)));
    }

    #[test]
    fn a_node_that_ends_is_left_although_it_names_the_silent_node_that_the_device_asked_for() {
        let (mut choice, view) = asks_to_move(0);
        for (second, current) in [(1, 0), (3, 2)] {
            choice.on_leave_asked(at(second * 1_000), Some(1), &view);
            assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
            choice.on_answer(at(second * 1_000 + 9), 2, ms(9), &view);
            choice.on_time(at(second * 1_000 + 1_000), &view);
            assert_eq!(choice.current(), current, "{second}");
        }
    }

    #[test]
    fn an_answer_that_comes_after_the_device_has_asked_again_is_no_request_to_be_left() {
        let (mut choice, view) = asks_to_move(0);
        choice.on_other_network();
        choice.on_time(at(10_000), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        choice.on_answer(at(10_009), 2, ms(9), &view);
        choice.on_answer(at(10_080), 0, ms(80), &view);
        choice.on_answer(at(10_085), 1, ms(85), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::AskToMove(2)));
        choice.on_leave_asked(at(12_000), Some(1), &view);
        choice.on_time(at(13_100), &view);
        assert_eq!(choice.current(), 0);
        assert!(!choice.nodes[0].asked_to_be_left(at(13_100)));
    }

    #[test]
    fn a_nearer_node_that_fell_silent_is_not_replaced_by_another() {
        let (mut choice, view) = asks_to_move(0);
        choice.on_leave_asked(at(160), Some(1), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        choice.on_answer(at(169), 2, ms(9), &view);
        choice.on_time(at(1_160), &view);
        assert_eq!((choice.current(), choice.poll_action()), (0, None));
        // A node that ends asks for itself.
        choice.on_leave_asked(at(2_000), Some(2), &view);
        choice.on_answer(at(2_009), 2, ms(9), &view);
        assert_eq!(choice.current(), 2);
        assert!(choice.nodes[0].asked_to_be_left(at(2_009)));
    }

    #[test]
    fn no_node_is_asked_while_a_flow_waits_for_its_first_byte_or_nothing_moves() {
        let mut choice = NodeChoice::new(2);
        let idle = NodeView {
            is_busy: false,
            has_flows: true,
            ..answering(0)
        };
        choice.on_time(at(0), &idle);
        assert_eq!(choice.poll_action(), None);
        assert_eq!(choice.next_timeout(&idle), None);
        let waiting = NodeView {
            is_unanswered: true,
            has_flows: true,
            ..answering(0)
        };
        choice.on_time(at(0), &waiting);
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        let quiet = NodeView {
            is_busy: false,
            ..waiting
        };
        choice.on_answer(at(2), 1, ms(2), &quiet);
        choice.on_answer(at(80), 0, ms(80), &quiet);
        assert_eq!((choice.current(), choice.poll_action()), (0, None));
        choice.on_time(at(100_000), &idle);
        assert_eq!(choice.poll_action(), None, "no payload has moved since");
    }

    #[test]
    fn nodes_are_compared_sooner_once_the_device_is_in_another_network() {
        let (mut choice, view) = asks_to_move(0);
        choice.on_time(at(1_000), &view);
        assert_eq!(choice.next_timeout(&view), Some(at(60_000)));
        choice.on_other_network();
        assert_eq!(choice.next_timeout(&view), Some(at(10_000)));
        choice.on_time(at(9_999), &view);
        assert_eq!(choice.poll_action(), None);
        choice.on_time(at(10_000), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        choice.on_time(at(11_000), &view);
        assert_eq!(choice.next_timeout(&view), Some(at(70_000)));
        // A session that has moved stays for a minute, wherever it is.
        let mut moved = NodeChoice::new(2);
        let moves = compare(&mut moved, 0, &[80, 12]);
        assert_eq!(moves, Some(NodeAction::Switch(1)));
        moved.on_time(at(100), &answering(1));
        moved.on_other_network();
        assert_eq!(compare(&mut moved, 50_000, &[12, 80]), None);
        let back = compare(&mut moved, 60_200, &[12, 80]);
        assert_eq!(back, Some(NodeAction::Switch(0)));
    }

    #[test]
    fn a_new_session_is_begun_at_a_node_that_answers_earlier_than_the_first() {
        let mut choice = NodeChoice::new(2);
        choice.on_time(at(5), &new_session(5));
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        choice.on_answer(at(7), 1, ms(2), &new_session(5));
        assert_eq!(choice.poll_action(), None);
        assert_eq!(choice.next_timeout(&new_session(5)), Some(at(32)));
        choice.on_time(at(32), &new_session(5));
        assert_eq!(choice.poll_action(), Some(NodeAction::Switch(1)));
        // It does not hold the key.
        let until = choice.next_timeout(&new_session(32)).unwrap();
        assert_eq!(until, at(32 + 8 + 250));
        choice.on_time(until, &new_session(32));
        assert_eq!(choice.poll_action(), Some(NodeAction::Switch(0)));
        let mut near = NodeChoice::new(2);
        near.on_time(at(5), &new_session(5));
        near.on_answer(at(17), 1, ms(12), &new_session(5));
        near.on_answer(at(35), 0, ms(30), &new_session(5));
        near.on_time(at(60), &new_session(5));
        assert_eq!(near.poll_action(), Some(NodeAction::Probe));
        assert_eq!((near.current(), near.poll_action()), (0, None));
    }

    #[test]
    fn a_node_that_is_found_while_nothing_answers_is_probed_at_once() {
        let mut choice = NodeChoice::new(2);
        for now in (250..20_000).step_by(50) {
            choice.on_time(at(now), &silent(0));
        }
        while choice.poll_action().is_some() {}
        choice.on_time(at(20_000), &silent(0));
        assert_eq!(choice.poll_action(), None, "probes have become rare");
        choice.set_count(3);
        choice.on_node_found();
        choice.on_time(at(20_001), &silent(0));
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
    }

    #[test]
    fn a_node_that_is_found_is_compared_with_the_one_in_use_at_once() {
        let mut choice = NodeChoice::new(2);
        assert_eq!(compare(&mut choice, 0, &[40, 45]), None);
        choice.set_count(3);
        choice.on_node_found();
        let moves = compare(&mut choice, 2_000, &[40, 45, 1]);
        assert_eq!(moves, Some(NodeAction::Switch(2)));
    }

    #[test]
    fn a_node_whose_network_was_left_is_left_for_the_one_before_and_not_used_again() {
        let mut choice = NodeChoice::new(3);
        assert_eq!(
            compare(&mut choice, 0, &[80, 80, 1]),
            Some(NodeAction::Switch(2))
        );
        choice.on_time(at(200), &answering(2));
        choice.on_node_gone(2);
        assert_eq!(choice.poll_action(), Some(NodeAction::Switch(0)));
        assert_eq!(choice.round_trips()[2], None);
        // It does not answer, and another does: nothing leads back.
        let mut used = BTreeSet::new();
        for now in (300..9_000).step_by(100) {
            choice.on_time(at(now), &silent(200));
            choice.on_answer(at(now + 1), 1, ms(1), &silent(200));
            used.insert(choice.current());
        }
        assert_eq!(used, [0, 1].into());
        // While the session is on its way to it.
        let mut moving = NodeChoice::new(2);
        assert_eq!(
            compare(&mut moving, 0, &[80, 1]),
            Some(NodeAction::Switch(1))
        );
        moving.on_node_gone(1);
        assert_eq!(moving.poll_action(), Some(NodeAction::Switch(0)));
        moving.on_time(at(60_000), &answering(0));
        assert_eq!(moving.current(), 0);
        // And from it.
        let mut left = NodeChoice::new(2);
        left.switch(at(0), 1, ms(100));
        left.on_node_gone(0);
        left.on_time(at(1_000), &silent(0));
        assert_eq!(left.current(), 1);
    }

    #[test]
    fn a_node_that_answers_after_an_interruption_of_the_link_is_kept() {
        for interrupted_ms in [600, 10_000] {
            let mut choice = NodeChoice::new(2);
            let back = 1_000 + interrupted_ms;
            choice.on_time(at(back), &silent(1_000));
            assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
            // The other is nearer, and answers first.
            choice.on_answer(at(back + 2), 1, ms(2), &silent(1_000));
            choice.on_answer(at(back + 40), 0, ms(40), &silent(1_000));
            let patience = interrupted_ms.max(2_000);
            let last = back + 40 + patience;
            for now in (back + 40..last).step_by(50) {
                choice.on_time(at(now), &silent(1_000));
                let action = choice.poll_action();
                assert!(matches!(action, None | Some(NodeAction::Probe)), "{now}");
            }
            // It answers probes and nothing else.
            choice.on_time(at(last + 40), &silent(1_000));
            let mut actions = std::iter::from_fn(|| choice.poll_action());
            assert!(actions.any(|action| action == NodeAction::Switch(1)));
        }
    }

    #[test]
    fn a_node_that_asks_to_be_left_is_left_with_flows_for_the_first_that_answers() {
        let mut choice = NodeChoice::new(3);
        let view = NodeView {
            has_flows: true,
            ..answering(0)
        };
        choice.on_leave_asked(at(0), None, &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        choice.on_answer(at(1), 0, ms(1), &view);
        assert_eq!(choice.poll_action(), None, "it asked to be left");
        choice.on_answer(at(9), 2, ms(9), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::Switch(2)));
        // Its request comes again while the session moves.
        choice.on_leave_asked(at(10), None, &view);
        choice.on_time(at(20), &answering(2));
        assert_eq!((choice.current(), choice.poll_action()), (2, None));
    }

    #[test]
    fn the_node_that_is_named_is_awaited_and_another_is_used_if_it_does_not_answer() {
        for answers in [true, false] {
            let mut choice = NodeChoice::new(3);
            let view = NodeView {
                has_flows: true,
                ..answering(0)
            };
            choice.on_leave_asked(at(0), Some(2), &view);
            assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
            choice.on_answer(at(1), 1, ms(1), &view);
            assert_eq!(choice.poll_action(), None);
            assert_eq!(choice.next_timeout(&view), Some(at(1_000)));
            if answers {
                choice.on_answer(at(50), 2, ms(50), &view);
                assert_eq!(choice.poll_action(), Some(NodeAction::Switch(2)));
            } else {
                choice.on_time(at(1_000), &view);
                assert_eq!(choice.poll_action(), Some(NodeAction::Switch(1)));
            }
        }
    }

    #[test]
    fn a_slow_node_is_tried_again_when_the_one_that_asked_to_be_left_has_ended() {
        let mut choice = NodeChoice::new(2);
        let view = NodeView {
            has_flows: true,
            ..answering(0)
        };
        choice.on_leave_asked(at(0), None, &view);
        choice.on_answer(at(5), 1, ms(5), &view);
        choice.on_time(at(2_005), &view);
        assert_eq!(choice.current(), 0, "it did not complete the handshake");
        while choice.poll_action().is_some() {}
        // Nothing answers from now on but the other one's probes.
        choice.on_time(at(2_300), &silent(2_010));
        choice.on_answer(at(2_305), 1, ms(5), &silent(2_010));
        choice.on_time(at(2_500), &silent(2_010));
        let mut actions = std::iter::from_fn(|| choice.poll_action());
        assert!(actions.any(|action| action == NodeAction::Switch(1)));
    }

    #[test]
    fn two_nodes_that_both_ask_to_be_left_do_not_pass_a_session_to_and_fro() {
        let mut choice = NodeChoice::new(2);
        let view = |at_node| NodeView {
            has_flows: true,
            ..answering(at_node)
        };
        choice.on_leave_asked(at(0), None, &view(0));
        choice.on_answer(at(5), 1, ms(5), &view(0));
        assert_eq!(choice.current(), 1);
        choice.on_time(at(50), &view(1));
        for second in 1..50 {
            choice.on_leave_asked(at(second * 1_000), Some(0), &view(1));
            choice.on_answer(at(second * 1_000 + 5), 0, ms(5), &view(1));
            choice.on_time(at(second * 1_000 + 999), &view(1));
            assert_eq!(choice.current(), 1, "the other one ends as well");
        }
        // Until this one is gone.
        let gone = NodeView {
            has_flows: true,
            ..silent(50_000)
        };
        choice.on_time(at(50_300), &gone);
        choice.on_answer(at(50_305), 0, ms(5), &gone);
        choice.on_time(at(50_600), &gone);
        assert_eq!(choice.current(), 0);
    }

    #[test]
    fn a_flow_that_is_never_answered_does_not_hold_a_session_at_a_node_that_ends() {
        let mut choice = NodeChoice::new(2);
        let waiting = NodeView {
            has_flows: true,
            is_unanswered: true,
            handshake_took: Span::from_secs(3_600),
            ..answering(0)
        };
        for second in 0..12 {
            choice.on_leave_asked(at(second * 1_000), None, &waiting);
            choice.on_answer(at(second * 1_000 + 5), 1, ms(5), &waiting);
            assert_eq!(choice.current(), usize::from(second >= 10), "{second} s");
        }
    }

    #[test]
    fn a_request_long_after_others_waits_for_a_first_byte_as_they_did() {
        let mut choice = NodeChoice::new(2);
        let waiting = NodeView {
            has_flows: true,
            is_unanswered: true,
            ..answering(0)
        };
        for now in [0, 3_600_000] {
            choice.on_leave_asked(at(now), None, &waiting);
            assert_eq!(choice.poll_action(), None, "at {now} ms");
        }
    }

    #[test]
    fn a_node_that_asked_to_be_left_long_ago_is_given_time_for_a_first_byte_as_any() {
        let mut choice = NodeChoice::new(2);
        choice.on_leave_asked(at(0), None, &answering(0));
        while choice.poll_action().is_some() {}
        let busy = |since| NodeView {
            is_unanswered: true,
            handshake_took: ms(1_500),
            ..silent(since)
        };
        assert_eq!(choice.next_timeout(&busy(30_000)), Some(at(30_250)));
        assert_eq!(choice.next_timeout(&busy(90_000)), Some(at(91_500)));
    }

    #[test]
    fn the_next_look_is_never_due_already() {
        // Another node has answered, and a request is opened while the paths are silent.
        let mut choice = NodeChoice::new(2);
        choice.on_time(at(300), &silent(0));
        choice.on_answer(at(305), 1, ms(5), &silent(0));
        let waiting = NodeView {
            is_unanswered: true,
            handshake_took: Span::from_secs(3_600),
            ..silent(0)
        };
        for now in (310..1_990).step_by(20) {
            choice.on_time(at(now), &waiting);
            let next = choice.next_timeout(&waiting).unwrap();
            assert!(next > at(now), "at {now}");
        }
        choice.on_time(at(2_001), &waiting);
        assert_eq!(
            choice.current(),
            1,
            "an hour without a network is no patience"
        );
    }

    #[test]
    fn a_busy_node_is_given_as_long_for_the_first_byte_as_its_handshake_took() {
        for (is_unanswered, left_at) in [(true, 1_500), (false, 300)] {
            let view = NodeView {
                is_unanswered,
                handshake_took: ms(1_500),
                ..silent(0)
            };
            let mut choice = NodeChoice::new(2);
            let mut probed_at = None;
            for now in (0..3_000).step_by(50) {
                choice.on_time(at(now), &view);
                let is_probe = choice.poll_action() == Some(NodeAction::Probe);
                probed_at = probed_at.or(is_probe.then_some(now));
            }
            let probed_at = probed_at.unwrap();
            assert!((left_at - 50..=left_at).contains(&probed_at), "{probed_at}");
        }
    }

    #[test]
    fn a_node_that_failed_a_moment_ago_is_tried_again_where_nothing_else_is_left() {
        // It was busy when the device left its node for a moment.
        let busy = || {
            let mut choice = NodeChoice::new(2);
            choice.on_time(at(300), &silent(0));
            choice.on_answer(at(305), 1, ms(5), &silent(0));
            choice.on_time(at(500), &silent(0));
            assert_eq!(choice.current(), 1);
            choice.on_time(at(2_500), &silent(0));
            assert_eq!(choice.current(), 0, "it did not complete the handshake");
            while choice.poll_action().is_some() {}
            choice
        };
        let view = NodeView {
            has_flows: true,
            ..answering(0)
        };
        let mut asked = busy();
        asked.on_time(at(2_600), &view);
        asked.on_leave_asked(at(3_000), None, &view);
        asked.on_answer(at(3_005), 1, ms(5), &view);
        assert_eq!(asked.current(), 1, "the node in use ends soon");
        let mut dead = busy();
        dead.on_time(at(3_000), &silent(2_700));
        dead.on_answer(at(3_005), 1, ms(5), &silent(2_700));
        dead.on_time(at(3_300), &silent(2_700));
        assert_eq!(dead.current(), 1, "the node in use is gone");
        // A third one that has not failed comes first, although it is further away.
        let mut third = NodeChoice::new(3);
        third.nodes[1].failed_until = Some(at(60_000));
        third.on_leave_asked(at(0), None, &view);
        third.on_answer(at(5), 2, ms(50), &view);
        assert_eq!(third.current(), 2);
    }

    #[test]
    fn a_node_that_asks_to_be_left_is_kept_while_no_other_answers() {
        let mut choice = NodeChoice::new(2);
        let view = NodeView {
            has_flows: true,
            ..answering(0)
        };
        let mut probes = 0;
        for now in (0..10_000).step_by(100) {
            if now % 1_000 == 0 {
                choice.on_leave_asked(at(now), None, &view);
            }
            choice.on_time(at(now), &view);
            probes += usize::from(choice.poll_action() == Some(NodeAction::Probe));
        }
        assert!((5..=10).contains(&probes), "{probes}");
        assert_eq!(choice.current(), 0);
        // The other one answers at last.
        choice.on_leave_asked(at(10_000), None, &view);
        choice.on_answer(at(10_005), 1, ms(5), &view);
        let mut actions = std::iter::from_fn(|| choice.poll_action());
        assert!(actions.any(|action| action == NodeAction::Switch(1)));
    }

    #[test]
    fn a_handshake_over_a_slow_network_is_given_four_round_trips() {
        for round_trip in [100, 1_500] {
            let mut choice = NodeChoice::new(2);
            let view = NodeView {
                has_flows: true,
                round_trip: ms(round_trip),
                ..answering(0)
            };
            choice.on_leave_asked(at(0), None, &view);
            choice.on_answer(at(round_trip), 1, ms(round_trip), &view);
            assert_eq!(choice.current(), 1);
            let patience = (4 * round_trip).max(2_000);
            assert_eq!(choice.handshake_patience(1), ms(patience));
            choice.on_time(at(round_trip + patience - 1), &view);
            assert_eq!(choice.current(), 1, "it may still answer");
            choice.on_time(at(round_trip + patience), &view);
            assert_eq!(choice.current(), 0);
        }
    }

    #[test]
    fn a_node_that_asks_to_be_left_is_kept_while_a_flow_waits_for_its_first_byte() {
        let mut choice = NodeChoice::new(2);
        let waiting = NodeView {
            has_flows: true,
            is_unanswered: true,
            ..answering(0)
        };
        choice.on_leave_asked(at(0), None, &waiting);
        assert_eq!(choice.poll_action(), None);
        // It is opened while another node is probed.
        let answered = NodeView {
            is_unanswered: false,
            ..waiting
        };
        choice.on_leave_asked(at(1_000), None, &answered);
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        choice.on_answer(at(1_005), 1, ms(5), &waiting);
        assert_eq!((choice.current(), choice.poll_action()), (0, None));
        choice.on_leave_asked(at(2_000), None, &answered);
        choice.on_answer(at(2_005), 1, ms(5), &answered);
        let mut actions = std::iter::from_fn(|| choice.poll_action());
        assert!(actions.any(|action| action == NodeAction::Switch(1)));
    }

    #[test]
    fn answers_over_a_slow_network_are_awaited_for_three_round_trips() {
        let view = NodeView {
            round_trip: ms(1_500),
            ..answering(0)
        };
        assert_eq!(view.probe_patience(), ms(4_500));
        let mut choice = NodeChoice::new(2);
        choice.on_time(at(0), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::Probe));
        choice.on_answer(at(600), 1, ms(600), &view);
        choice.on_time(at(1_400), &view);
        choice.on_answer(at(1_500), 0, ms(1_500), &view);
        assert_eq!(choice.poll_action(), Some(NodeAction::Switch(1)));
    }
}
