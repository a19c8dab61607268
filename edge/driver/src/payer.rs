//! A flow that may pay: what it has had on links that cost, and what more it may be granted on each.

use std::collections::BTreeMap;

use d2tp_session::LinkId;

/// How a flow stands on one link that costs, both directions together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnLink {
    pub(crate) link: LinkId,
    /// Payload bytes it ever had there.
    pub(crate) spent: u64,
    /// What it was granted there and has not used; the greater of the two directions, since one grant
    /// is for both.
    pub(crate) granted: u64,
    /// The lesser of them.
    pub(crate) least: u64,
}

/// What a flow has had since it was allowed to pay.
#[derive(Debug)]
pub(crate) struct Payer {
    pub(crate) budget: Option<u64>,
    spent: u64,
    /// What it had had on each link when that was last looked at.
    seen: BTreeMap<LinkId, u64>,
}

impl Payer {
    /// From now on: what it had before does not count.
    pub(crate) fn new(budget: Option<u64>, links: &[OnLink]) -> Payer {
        Payer {
            budget,
            spent: 0,
            seen: links.iter().map(|on| (on.link, on.spent)).collect(),
        }
    }

    /// Payload bytes.
    pub(crate) fn spent(&self) -> u64 {
        self.spent
    }

    /// Takes down what it has had meanwhile.
    pub(crate) fn look(&mut self, links: &[OnLink]) {
        for on in links {
            let before = self.seen.insert(on.link, on.spent).unwrap_or(0);
            // On another path over the same link it is counted anew.
            self.spent += on.spent.checked_sub(before).unwrap_or(on.spent);
        }
    }

    /// The most it may be granted on a link beside what it was granted on others.
    pub(crate) fn may(&self, link: LinkId, links: &[OnLink]) -> u64 {
        let Some(budget) = self.budget else {
            return u64::MAX;
        };
        let elsewhere = links.iter().filter(|on| on.link != link);
        let elsewhere: u64 = elsewhere.map(|on| on.granted).sum();
        budget.saturating_sub(self.spent).saturating_sub(elsewhere)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(link: u32, spent: u64, granted: u64) -> OnLink {
        OnLink {
            link: LinkId(link),
            spent,
            granted,
            least: granted,
        }
    }

    #[test]
    fn what_it_has_had_on_each_link_counts_once() {
        let mut payer = Payer::new(Some(100), &[]);
        for _ in 0..3 {
            payer.look(&[on(1, 10, 0), on(2, 30, 0)]);
        }
        assert_eq!(payer.spent(), 40);
        payer.look(&[on(1, 25, 0), on(2, 30, 0)]);
        assert_eq!(payer.spent(), 55);
        // A new path over the first.
        payer.look(&[on(1, 5, 0), on(2, 30, 0)]);
        assert_eq!(payer.spent(), 60);
        assert_eq!(payer.may(LinkId(1), &[]), 40);
    }

    #[test]
    fn what_it_had_before_it_was_allowed_does_not_count() {
        let mut payer = Payer::new(Some(100), &[on(1, 70, 0)]);
        payer.look(&[on(1, 70, 0)]);
        assert_eq!(payer.spent(), 0);
        payer.look(&[on(1, 71, 0), on(2, 2, 0)]);
        assert_eq!(payer.spent(), 3);
    }

    #[test]
    fn what_is_granted_on_all_links_together_is_within_the_budget() {
        let links = [on(1, 0, 60), on(2, 0, 30)];
        let payer = Payer::new(Some(100), &links);
        assert_eq!(payer.may(LinkId(1), &links), 70);
        assert_eq!(payer.may(LinkId(2), &links), 40);
        let broke = Payer::new(Some(50), &links);
        assert_eq!(broke.may(LinkId(2), &links), 0);
        let rich = Payer::new(None, &links);
        assert_eq!(rich.may(LinkId(2), &links), u64::MAX);
    }
}
