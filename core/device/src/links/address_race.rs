//! Sockets that compete for a link: those of its two address families, and those of another node of
//! the server.

use d2tp_time::{Span, Time};

use super::{DeviceLinks, active_sockets, drop_all, open_path, wake_at};
use crate::action::LinkAction;
use crate::facts::{AttachedSocket, SessionPaths};
use crate::tracked::TrackedLink;

impl DeviceLinks {
    /// Handles the choice of another node of the server: new sockets are attached from now on to that node.
    /// Links that answer ask the node beside the path that they have, and keep the path until the node has
    /// answered; others, and those that carry a stream, get new sockets at once. So do all where no flow is open:
    /// what is opened meanwhile begins at the new node.
    pub fn on_node_changed(
        &mut self,
        now: Time,
        session: &dyn SessionPaths,
        has_flows: bool,
        patience: Span,
    ) {
        self.observe(now, session);
        // A path that nothing pays for leads to the node before.
        self.kept_until = None;
        let pays = self.pays();
        for link in self.links.values_mut() {
            if !link.is_wanted(pays) || link.health.keeps_sockets() {
                continue;
            }
            let has_stream = link.stream.socket.is_some();
            if link.sockets.is_empty() || has_stream || session.is_over() || !has_flows {
                drop_all(&mut self.actions, link.take_sockets());
                continue;
            }
            // R-NODE-3: what was asked of the node before that is given up.
            if !link.answers.is_up() {
                drop_all(&mut self.actions, link.take_sockets());
            }
            let former = std::mem::take(&mut link.former_node);
            let asked = link.other_family.drain(..).map(|s| s.socket);
            drop_all(&mut self.actions, asked);
            if !former.is_empty() {
                let given_up = link.socket_ids().filter(|id| !former.contains(id));
                drop_all(&mut self.actions, given_up);
                link.sockets.retain(|s| former.contains(&s.socket));
            }
            self.last_ticket += 1;
            link.attaching = Some(self.last_ticket);
            link.node_patience = patience;
            link.changes_node = true;
            self.actions.push_back(LinkAction::Attach {
                link: link.facts.name.clone(),
                ticket: self.last_ticket,
            });
        }
        self.update_paths(now);
    }

    /// Tries the other address family of a link when the first does not answer, and keeps the one
    /// that answers.
    pub(super) fn try_other_family(&mut self, now: Time, session: &dyn SessionPaths) {
        if session.is_over() {
            return;
        }
        let active = active_sockets(&session.path_stats());
        let used =
            |link: &&mut TrackedLink| !link.sockets.is_empty() && !link.health.keeps_sockets();
        for link in self.links.values_mut().filter(used) {
            let answers = |s: &&AttachedSocket| active.contains(&s.socket);
            if !link.former_node.is_empty() {
                let of_node = |s: &&AttachedSocket| !link.former_node.contains(&s.socket);
                let found = link.sockets.iter().filter(of_node).find(answers).copied();
                let is_late = now.since(link.opened_at) >= link.node_patience;
                if let Some(found) = found {
                    // With the answer the paths to the node before have ended.
                    let rest = link.sockets.iter().filter(|s| **s != found);
                    let rest = rest.chain(&link.other_family).map(|s| s.socket);
                    drop_all(&mut self.actions, rest);
                    link.other_family.clear();
                    link.sockets = vec![found];
                    link.former_node.clear();
                    self.news.candidates = true;
                } else if is_late {
                    let late = link.sockets.iter().filter(of_node);
                    let late = late.chain(&link.other_family).map(|s| s.socket);
                    drop_all(&mut self.actions, late);
                    link.other_family.clear();
                    let former = std::mem::take(&mut link.former_node);
                    link.sockets.retain(|s| former.contains(&s.socket));
                } else if !link.other_family.is_empty()
                    && now.since(link.opened_at) >= link.race_delay()
                {
                    let next = link.other_family.remove(0);
                    link.sockets.push(next);
                    self.actions.push_back(wake_at(link, next));
                }
                continue;
            }
            let stream = link.stream.socket;
            // UDP is tried beside a stream.
            let tried = link.stream.trial_until.is_some_and(|until| now < until);
            let udp = |s: &&AttachedSocket| Some(s.socket) != stream;
            if tried && !link.sockets.iter().filter(udp).any(|s| answers(&s)) {
                continue;
            }
            // UDP first, where both answer.
            let first = link.sockets.iter().filter(udp).find(answers);
            let first = first.or_else(|| link.sockets.iter().find(answers)).copied();
            if let Some(first) = first {
                link.stream.trial_until = None;
                match stream {
                    None => self.blocked.forget(&link.facts),
                    Some(stream) if stream == first.socket => {
                        link.stream.on_answer();
                        self.blocked.note(now, &link.facts);
                    }
                    Some(stream) => {
                        // The peer is told on the stream itself, so that nothing is sent twice.
                        self.blocked.forget(&link.facts);
                        link.stream.end();
                        link.sockets.retain(|s| s.socket != stream);
                        link.closing.push(stream);
                        self.actions
                            .push_back(LinkAction::ClosePath { socket: stream });
                    }
                }
                let rest = link.sockets.iter().filter(|s| **s != first);
                let rest = rest.chain(&link.other_family).map(|s| s.socket);
                drop_all(&mut self.actions, rest);
                link.other_family.clear();
                link.sockets = vec![first];
            } else if !link.other_family.is_empty()
                && now.since(link.opened_at) >= link.race_delay()
            {
                let next = link.other_family.remove(0);
                link.opened_at = now;
                link.sockets.push(next);
                self.actions.push_back(open_path(link, next));
            }
        }
    }
}
