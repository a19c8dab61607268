//! What flows may spend on metered links: budgets, grants, and what was spent.

use d2tp_session::{FlowId, LinkId};
use d2tp_time::{Span, Time};

use super::DeviceLinks;
use crate::action::LinkAction;
use crate::facts::SessionPaths;
use crate::grants::{LinkSpend, PaidLinks, PayingFlow, grant_ahead};
use crate::tracked::TrackedLink;

/// How long metered paths stay open after the last flow that paid for them has ended, so that many small requests in a
/// row need one path: opening one costs a round trip and some hundred bytes, and an idle path costs nothing.
///
/// The packet that closes the path is to leave in the tail of a cellular radio, so that it wakes none: the tail is 11.6 s
/// long for LTE, and 8.9 to 14 s for 3G (`edge/power/radios.toml`). By then a server that hears nothing has not suspended
/// the session (15 s, R-SUSPEND-2), and no keepalive is due (25 s, R-ALIVE-1). Lower: more requests open a path of their
/// own. Higher: the last packet wakes the radio, or a keepalive is sent.
pub const PAID_PATH_KEPT: Span = Span::from_secs(10); // as long as clients keep a path between two payments of one flow

/// The number of ended flows whose spending is still known: as many as a session has flows (docs/protocol.md §15).
const ENDED_PAYERS_MAX: usize = 1_024;

impl DeviceLinks {
    /// Allows a flow to spend on `links`, up to `budget` payload bytes in total since it was first
    /// allowed to, until it is forbidden or nothing of it remains to be carried. Takes effect at once. For a flow that has
    /// ended, nothing changes.
    pub fn allow_paid(
        &mut self,
        now: Time,
        session: &dyn SessionPaths,
        flow: FlowId,
        budget: Option<u64>,
        links: PaidLinks,
    ) {
        if session.is_carried(flow) {
            self.observe(now, session);
            return;
        }
        self.kept_until = None;
        let before = self.spends(session, flow, &PaidLinks::All);
        let payer = self.payers.entry(flow);
        let payer = payer.or_insert_with(|| PayingFlow::new(&before));
        payer.budget = budget;
        let changed = std::mem::replace(&mut payer.links, links) != payer.links;
        if changed {
            let allowed = payer.links.clone();
            let paid = self.links.values().filter(|link| link.is_gated());
            let not = paid.filter(|link| !allowed.contain(&link.facts.name));
            let not: Vec<LinkId> = not.flat_map(TrackedLink::socket_ids).collect();
            self.revoke(flow, &not);
        }
        self.observe(now, session);
        self.update_paths(now);
        self.update_grants(session);
    }

    /// Forbids a flow to spend. Takes effect at once: if no other flow pays, metered paths are closed. A flow that has ended
    /// pays no more without this; then its path is kept for [`PAID_PATH_KEPT`].
    pub fn forbid_paid(&mut self, now: Time, session: &dyn SessionPaths, flow: FlowId) {
        self.observe(now, session);
        self.ended_payers.retain(|(ended, _)| *ended != flow);
        if self.payers.remove(&flow).is_some() {
            let paid: Vec<LinkId> = self.paid_sockets(&PaidLinks::All).collect();
            self.revoke(flow, &paid);
        }
        self.update_paths(now);
        self.update_grants(session);
    }

    /// Payload bytes of a flow on metered links since it was allowed to pay. They are still known when it has ended.
    pub fn paid_bytes(&self, flow: FlowId) -> u64 {
        let payer = self.payers.get(&flow).map(PayingFlow::spent);
        payer.or_else(|| self.spent_at_end(flow)).unwrap_or(0)
    }

    /// Payload bytes of a flow on metered links since it was allowed to pay, with those since the last count.
    pub fn paid_bytes_now(&self, session: &dyn SessionPaths, flow: FlowId) -> u64 {
        let payer = self
            .payers
            .get(&flow)
            .map(|payer| payer.spent_with(&self.spends(session, flow, &PaidLinks::All)));
        payer.or_else(|| self.spent_at_end(flow)).unwrap_or(0)
    }

    /// What a flow had spent when it ended.
    fn spent_at_end(&self, flow: FlowId) -> Option<u64> {
        let mut ended = self.ended_payers.iter().rev();
        ended.find(|(id, _)| *id == flow).map(|(_, spent)| *spent)
    }

    /// Extends the grants of paying flows to one second ahead, within their budgets. If no flow
    /// pays, lends metered paths.
    pub(super) fn update_grants(&mut self, session: &dyn SessionPaths) {
        let paid: Vec<LinkId> = self.paid_sockets(&PaidLinks::All).collect();
        if paid.is_empty() || session.is_over() {
            return;
        }
        // A path that is only kept for a while has nothing to repair.
        if let Some(bytes_per_second) = self.settings.lend_rate.filter(|_| self.pays()) {
            let flows_pay = !self.payers.is_empty();
            let lend = |socket: &LinkId| match flows_pay {
                true => LinkAction::EndLending { socket: *socket },
                false => LinkAction::Lend {
                    socket: *socket,
                    bytes_per_second,
                },
            };
            self.actions.extend(paid.iter().map(lend));
        }
        if self.payers.is_empty() {
            return;
        }
        self.count_spending(session);
        let paths = session.path_stats();
        let ahead = |socket: LinkId| {
            let mut links = self.links.values();
            let rate = links
                .find(|l| l.has_socket(socket))
                .and_then(|l| l.meter.rate);
            let of_socket = paths.iter().filter(|p| p.addresses.link == socket);
            let round_trip = of_socket.map(|p| p.rtt).max();
            grant_ahead(rate, round_trip.unwrap_or(Span::ZERO))
        };
        let mut grants = Vec::new();
        for (flow, payer) in &self.payers {
            let on = self.spends(session, *flow, &payer.links);
            let more = payer.grants(on, ahead);
            grants.extend(more.into_iter().map(|(socket, bytes)| LinkAction::Grant {
                flow: *flow,
                socket,
                bytes,
            }));
        }
        self.actions.extend(grants);
    }

    pub(super) fn count_spending(&mut self, session: &dyn SessionPaths) {
        let mut payers = std::mem::take(&mut self.payers);
        for (flow, payer) in &mut payers {
            payer.update(&self.spends(session, *flow, &PaidLinks::All));
        }
        self.payers = payers;
    }

    /// Lets flows pay no more of which nothing remains to be carried. With the last of them begins the time for which their
    /// paths are still kept.
    pub(super) fn release_ended(&mut self, now: Time, session: &dyn SessionPaths) {
        let paying = self.payers.keys().copied();
        let ended: Vec<FlowId> = paying.filter(|flow| session.is_carried(*flow)).collect();
        if ended.is_empty() {
            return;
        }
        for flow in ended {
            if let Some(payer) = self.payers.remove(&flow) {
                self.ended_payers.push_back((flow, payer.spent()));
            }
        }
        let surplus = self.ended_payers.len().saturating_sub(ENDED_PAYERS_MAX);
        self.ended_payers.drain(..surplus);
        if self.payers.is_empty() {
            self.kept_until = Some(now + PAID_PATH_KEPT);
            self.news.unpaid = true;
        }
    }

    /// Sockets of the metered links that `allowed` contains.
    fn paid_sockets<'a>(&'a self, allowed: &'a PaidLinks) -> impl Iterator<Item = LinkId> + 'a {
        let paid = self.links.values().filter(|link| link.is_gated());
        let allowed = paid.filter(|link| allowed.contain(&link.facts.name));
        allowed.flat_map(TrackedLink::socket_ids)
    }

    /// What a flow spent and was granted on metered links.
    fn spends(
        &self,
        session: &dyn SessionPaths,
        flow: FlowId,
        allowed: &PaidLinks,
    ) -> Vec<LinkSpend> {
        let sockets = self.paid_sockets(allowed);
        sockets.filter_map(|s| session.spend(flow, s)).collect()
    }

    fn revoke(&mut self, flow: FlowId, sockets: &[LinkId]) {
        let revoke = |socket: &LinkId| LinkAction::Grant {
            flow,
            socket: *socket,
            bytes: 0,
        };
        self.actions.extend(sockets.iter().map(revoke));
    }
}
