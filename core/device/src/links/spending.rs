//! What flows may spend on metered links: budgets, grants, and what was spent.

use d2tp_session::{FlowId, LinkId};
use d2tp_time::{Span, Time};

use super::DeviceLinks;
use crate::action::LinkAction;
use crate::facts::SessionPaths;
use crate::grants::{LinkSpend, PaidLinks, PayingFlow, grant_ahead};
use crate::tracked::TrackedLink;

impl DeviceLinks {
    /// Allows a flow to spend on `links`, up to `budget` payload bytes in total since it was first
    /// allowed to. Takes effect at once.
    pub fn allow_paid(
        &mut self,
        now: Time,
        session: &dyn SessionPaths,
        flow: FlowId,
        budget: Option<u64>,
        links: PaidLinks,
    ) {
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

    /// Forbids a flow to spend. Takes effect at once.
    pub fn forbid_paid(&mut self, now: Time, session: &dyn SessionPaths, flow: FlowId) {
        self.payers.remove(&flow);
        let paid: Vec<LinkId> = self.paid_sockets(&PaidLinks::All).collect();
        self.revoke(flow, &paid);
        self.observe(now, session);
        self.update_paths(now);
        self.update_grants(session);
    }

    /// Payload bytes of a flow on metered links since it was allowed to pay.
    pub fn paid_bytes(&self, flow: FlowId) -> u64 {
        self.payers.get(&flow).map_or(0, PayingFlow::spent)
    }

    /// Payload bytes of a flow on metered links since it was allowed to pay, with those since the last count.
    pub fn paid_bytes_now(&self, session: &dyn SessionPaths, flow: FlowId) -> u64 {
        self.payers.get(&flow).map_or(0, |payer| {
            payer.spent_with(&self.spends(session, flow, &PaidLinks::All))
        })
    }

    /// Extends the grants of paying flows to one second ahead, within their budgets. If no flow
    /// pays, lends metered paths.
    pub(super) fn update_grants(&mut self, session: &dyn SessionPaths) {
        let paid: Vec<LinkId> = self.paid_sockets(&PaidLinks::All).collect();
        if paid.is_empty() || session.is_over() {
            return;
        }
        if let Some(bytes_per_second) = self.settings.lend_rate {
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
