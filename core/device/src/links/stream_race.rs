//! Streams of links where UDP is not answered: when they are opened, given up, and tried against UDP.

use d2tp_session::LinkId;
use d2tp_time::Time;

use super::{DeviceLinks, drop_all};
use crate::action::LinkAction;
use crate::facts::{AttachedSocket, SessionPaths};
use crate::stream::StreamFailure;

impl DeviceLinks {
    /// Answers [`LinkAction::OpenStream`]: the stream as a socket, or why there is none.
    pub fn on_stream(
        &mut self,
        now: Time,
        name: &str,
        ticket: u64,
        made: Result<AttachedSocket, StreamFailure>,
    ) {
        if let Ok(made) = &made {
            self.name_socket(made.socket, name);
        }
        let pays = self.pays();
        let link = self.links.get_mut(name);
        let mut link = link.filter(|link| link.stream.opening == Some(ticket));
        if let Some(link) = link.take_if(|l| !l.is_wanted(pays) || l.health.keeps_sockets()) {
            link.stream.opening = None;
        }
        let Some(link) = link else {
            // The link changed meanwhile, or UDP was answered.
            let made = made.ok().map(|made| made.socket);
            drop_all(&mut self.actions, made);
            return;
        };
        self.news.candidates = true;
        match made {
            Err(failure) => link.stream.on_failure(now, failure),
            Ok(made) => {
                link.stream.on_open(now, made.socket);
                link.opened_gated = link.is_gated();
                link.sockets.push(made);
                self.actions.push_back(LinkAction::OpenPath {
                    socket: made.socket,
                    remote: made.remote,
                    gated: link.is_gated(),
                    // TCP sends its own ACKs there.
                    half_duplex: false,
                });
            }
        }
    }

    /// Handles the end of a stream that was not closed by [`LinkAction::DropSocket`] or
    /// [`LinkAction::ClosePath`].
    pub fn on_stream_closed(&mut self, now: Time, session: &dyn SessionPaths, socket: LinkId) {
        // Count the bytes of its path before the path is abandoned.
        self.observe(now, session);
        let mut links = self.links.values_mut();
        let Some(link) = links.find(|link| link.stream.socket == Some(socket)) else {
            return;
        };
        link.sockets.retain(|s| s.socket != socket);
        link.stream.on_closed(now);
        drop_all(&mut self.actions, [socket]);
        self.news.candidates = true;
        self.update_paths(now);
        self.race_streams(now, session);
    }

    /// Opens streams where UDP is not answered, and tries UDP again beside them.
    pub(super) fn race_streams(&mut self, now: Time, session: &dyn SessionPaths) {
        if session.is_over() {
            return;
        }
        let pays = self.pays();
        let moving = self.is_moving;
        let mut renew = false;
        for link in self.links.values_mut() {
            if !link.is_wanted(pays) || link.health.keeps_sockets() || link.attaching.is_some() {
                continue;
            }
            if link.stream.trial_until.is_some_and(|until| until <= now) {
                // Not answered: the stream goes on alone. What answered was dealt with before.
                link.stream.trial_until = None;
            }
            if moving && link.answers.is_up() && link.stream.is_trial_due(now) {
                link.stream.begin_trial(now);
                self.last_ticket += 1;
                link.attaching = Some(self.last_ticket);
                self.actions.push_back(LinkAction::Attach {
                    link: link.facts.name.clone(),
                    ticket: self.last_ticket,
                });
                continue;
            }
            let Some(since) = link.answers.unanswered_since() else {
                if link.answers.is_up() && link.stream.socket.is_none() {
                    link.stream.on_udp_answer();
                }
                continue;
            };
            if link.stream.socket.is_some() {
                if link.stream.replaced_at(since) <= now {
                    drop_all(&mut self.actions, link.take_sockets());
                    renew = true;
                }
                continue;
            }
            if link.facts.serial_rate.is_some() {
                // No TCP either.
                continue;
            }
            let blocked = self.blocked.contains(now, &link.facts);
            let asked = !link.sockets.is_empty();
            if asked
                && link.stream.may_open(now)
                && (blocked || now.since(since) >= link.stream_delay())
            {
                self.last_ticket += 1;
                link.stream.opening = Some(self.last_ticket);
                self.news.candidates = true;
                self.actions.push_back(LinkAction::OpenStream {
                    link: link.facts.name.clone(),
                    ticket: self.last_ticket,
                });
            }
        }
        if renew {
            self.update_paths(now);
        }
    }
}
