//! Flows that may pay: what each has spent on metered links, and what more it may be granted on
//! each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use d2tp_session::LinkId;
use d2tp_time::Span;

use crate::meter::TICK;

/// The smallest grant: smaller ones would make a flow stop and start.
pub(crate) const GRANT_MIN_BYTES: u64 = 64 * 1024;

/// What a flow spent and was granted on one metered link, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSpend {
    /// The socket of the metered link.
    pub socket: LinkId,
    /// Payload bytes the flow has carried on the path in total.
    pub spent: u64,
    /// The larger unused grant of the two directions.
    pub granted_max: u64,
    /// The smaller unused grant of the two directions.
    pub granted_min: u64,
}

/// The links that a flow may pay for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PaidLinks {
    /// Every link whose use is [`crate::LinkUse::Paid`].
    #[default]
    All,
    /// Only the links with these names, of those that cost.
    Only(BTreeSet<Arc<str>>),
}

impl PaidLinks {
    /// Whether a flow may pay for the link with this name.
    pub fn contain(&self, link: &str) -> bool {
        match self {
            PaidLinks::All => true,
            PaidLinks::Only(names) => names.contains(link),
        }
    }
}

/// What a flow has spent since it was allowed to pay.
#[derive(Debug)]
pub(crate) struct PayingFlow {
    pub(crate) budget: Option<u64>,
    pub(crate) links: PaidLinks,
    spent: u64,
    /// What the flow had spent on each socket at the last update.
    seen: BTreeMap<LinkId, u64>,
}

impl PayingFlow {
    /// Starts the count; bytes spent before do not count.
    pub(crate) fn new(before: &[LinkSpend]) -> PayingFlow {
        PayingFlow {
            budget: None,
            links: PaidLinks::All,
            spent: 0,
            seen: before.iter().map(|on| (on.socket, on.spent)).collect(),
        }
    }

    /// Payload bytes spent.
    pub(crate) fn spent(&self) -> u64 {
        self.spent
    }

    /// Counts what was spent since the last update.
    pub(crate) fn update(&mut self, links: &[LinkSpend]) {
        self.spent = self.spent_with(links);
        self.seen
            .extend(links.iter().map(|on| (on.socket, on.spent)));
    }

    /// Payload bytes spent, with what was spent since the last update.
    pub(crate) fn spent_with(&self, links: &[LinkSpend]) -> u64 {
        let since = links.iter().map(|on| {
            let before = self.seen.get(&on.socket).copied().unwrap_or(0);
            // A new path over the same socket counts from zero again.
            on.spent.checked_sub(before).unwrap_or(on.spent)
        });
        self.spent + since.sum::<u64>()
    }

    /// The most bytes that may be granted on a socket, in addition to the unused grants on other
    /// sockets.
    fn grantable(&self, socket: LinkId, links: &[LinkSpend]) -> u64 {
        let Some(budget) = self.budget else {
            return u64::MAX;
        };
        let elsewhere = links.iter().filter(|on| on.socket != socket);
        let elsewhere: u64 = elsewhere.map(|on| on.granted_max).sum();
        budget.saturating_sub(self.spent).saturating_sub(elsewhere)
    }

    /// The grants to make now. `ahead` is the number of bytes that each socket uses until the next
    /// grant can arrive.
    pub(crate) fn grants(
        &self,
        mut links: Vec<LinkSpend>,
        ahead: impl Fn(LinkId) -> u64,
    ) -> Vec<(LinkId, u64)> {
        let mut grants = Vec::new();
        for at in 0..links.len() {
            let on = links[at];
            let most = self.grantable(on.socket, &links);
            let want = ahead(on.socket).min(most);
            // Only one direction is in use, and its grant runs low.
            if on.granted_min.saturating_mul(2) < want || on.granted_max > most {
                grants.push((on.socket, want));
                links[at].granted_max = want;
            }
        }
        grants
    }
}

/// The bytes that a grant should hold for a link of this rate (bytes per second) and round trip:
/// one second's worth, or what three round trips carry. A grant is renewed when half of it is left;
/// until the renewal arrives, the peer uses another round trip's worth. With smaller grants the
/// measured rate would be that of the grants instead of the link's.
pub(crate) fn grant_ahead(rate: Option<u64>, round_trip: Span) -> u64 {
    let trips = (round_trip + round_trip.divided(2) + TICK).times(2);
    let lasts_ms = trips.max(Span::from_secs(1)).as_millis();
    let bytes = rate.unwrap_or(0).saturating_mul(lasts_ms) / 1_000;
    bytes.max(GRANT_MIN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(socket: u32, spent: u64, granted: u64) -> LinkSpend {
        LinkSpend {
            socket: LinkId(socket),
            spent,
            granted_max: granted,
            granted_min: granted,
        }
    }

    fn flow(budget: Option<u64>, before: &[LinkSpend]) -> PayingFlow {
        PayingFlow {
            budget,
            ..PayingFlow::new(before)
        }
    }

    #[test]
    fn what_it_has_had_on_each_link_counts_once() {
        let mut payer = flow(Some(100), &[]);
        for _ in 0..3 {
            payer.update(&[on(1, 10, 0), on(2, 30, 0)]);
        }
        assert_eq!(payer.spent(), 40);
        payer.update(&[on(1, 25, 0), on(2, 30, 0)]);
        assert_eq!(payer.spent(), 55);
        // A new path over the first socket.
        payer.update(&[on(1, 5, 0), on(2, 30, 0)]);
        assert_eq!(payer.spent(), 60);
        assert_eq!(payer.grantable(LinkId(1), &[]), 40);
    }

    #[test]
    fn what_it_had_before_it_was_allowed_does_not_count() {
        let mut payer = flow(Some(100), &[on(1, 70, 0)]);
        payer.update(&[on(1, 70, 0)]);
        assert_eq!(payer.spent(), 0);
        payer.update(&[on(1, 71, 0), on(2, 2, 0)]);
        assert_eq!(payer.spent(), 3);
    }

    #[test]
    fn what_is_granted_on_all_links_together_is_within_the_budget() {
        let links = [on(1, 0, 60), on(2, 0, 30)];
        let payer = flow(Some(100), &links);
        assert_eq!(payer.grantable(LinkId(1), &links), 70);
        assert_eq!(payer.grantable(LinkId(2), &links), 40);
        let broke = flow(Some(50), &links);
        assert_eq!(broke.grantable(LinkId(2), &links), 0);
        let rich = flow(None, &links);
        assert_eq!(rich.grantable(LinkId(2), &links), u64::MAX);
    }

    #[test]
    fn one_round_of_grants_never_exceeds_the_budget() {
        let payer = flow(Some(100), &[]);
        let grants = payer.grants(vec![on(1, 0, 0), on(2, 0, 0)], |_| 70);
        assert_eq!(grants, [(LinkId(1), 70), (LinkId(2), 30)]);
        // No grant is renewed while half of it is left.
        let again = payer.grants(vec![on(1, 0, 40), on(2, 0, 30)], |_| 70);
        assert_eq!(again, []);
        let cut = flow(Some(10), &[]);
        assert_eq!(
            cut.grants(vec![on(1, 0, 40), on(2, 0, 0)], |_| 70),
            [(LinkId(1), 10)]
        );
    }

    #[test]
    fn a_grant_outlasts_the_round_trip() {
        let bytes = |ms| grant_ahead(Some(1_000_000), Span::from_millis(ms));
        assert_eq!(bytes(20), 1_000_000);
        assert_eq!(bytes(250), 1_000_000);
        assert_eq!(bytes(2_000), 6_200_000);
        assert_eq!(grant_ahead(None, Span::ZERO), GRANT_MIN_BYTES);
    }
}
