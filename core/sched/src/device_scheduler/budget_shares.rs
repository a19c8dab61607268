//! The rest of the device's budget, shared by all clients that pay at the same time.
//!
//! ```text
//!  rest of the budget, as far as carried bytes were reported
//!  ├──── granted to others, and not yet reported as used ────┼── what may be granted now ──┤
//! ```
//!
//! A paying client reports each second what it has used, and its new grant replaces the previous
//! one. All grants together therefore never exceed what is left, except by the smallest grants
//! ([`GRANT_MIN_BYTES`]).

use std::collections::BTreeMap;

use d2tp_time::{Span, Time};

use super::ClientId;

/// The smallest grant of a paying client while anything is left, so that no client counts the budget as
/// used up only because others hold unused grants. Higher: the budget may be exceeded by more; lower:
/// its last bytes take longer.
pub(super) const GRANT_MIN_BYTES: u64 = 16 * 1024; // a guess: a round trip's worth of a slow link

/// How long a client may move nothing before it gets no more than the smallest grant.
const MOVES_WITHIN: Span = Span::from_secs(5); // a guess, equal to that of the transfer queue

/// The grants of all paying clients.
#[derive(Debug, Default)]
pub(super) struct BudgetShares {
    /// Bytes left of the device's budget; `None` means no limit.
    left: Option<u64>,
    grants: BTreeMap<ClientId, BudgetGrant>,
}

#[derive(Debug, Clone, Copy)]
struct BudgetGrant {
    bytes: u64,
    /// Bytes that links had carried for the client, and when that last grew.
    carried: u64,
    moved_at: Time,
}

impl BudgetShares {
    pub(super) fn set_limit(&mut self, left: Option<u64>) {
        self.left = left;
    }

    /// The bytes that may be granted to a client for which links have carried `carried` bytes;
    /// `None` means no limit.
    pub(super) fn offer(&mut self, now: Time, payer: ClientId, carried: u64) -> Option<u64> {
        let left = self.left?;
        let known = self.grants.get_mut(&payer);
        let moves = match known {
            Some(grant) => {
                if grant.carried != carried {
                    (grant.carried, grant.moved_at) = (carried, now);
                }
                now.since(grant.moved_at) < MOVES_WITHIN
            }
            None => true,
        };
        let others = || self.grants.iter().filter(|(other, _)| **other != payer);
        let granted: u64 = others().map(|(_, grant)| grant.bytes).sum();
        let moving = others().filter(|(_, grant)| now.since(grant.moved_at) < MOVES_WITHIN);
        let least = GRANT_MIN_BYTES.min(left);
        let share = match moves {
            true => left / (1 + moving.count() as u64),
            false => least,
        };
        Some(share.min(left.saturating_sub(granted)).max(least))
    }

    /// Records that a client pays, and the bytes it is granted.
    pub(super) fn start_paying(&mut self, now: Time, payer: ClientId, carried: u64, bytes: u64) {
        let grant = self.grants.entry(payer).or_insert(BudgetGrant {
            bytes,
            carried,
            moved_at: now,
        });
        grant.bytes = bytes;
    }

    /// Withdraws a client's grant.
    pub(super) fn stop_paying(&mut self, payer: ClientId) {
        self.grants.remove(&payer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use super::super::TransferDirection;

    fn client(number: u64) -> ClientId {
        ClientId {
            direction: TransferDirection::Down,
            number,
        }
    }

    const BUDGET: u64 = 3_000_000;

    /// Simulates flows that use all they may at this rate and report one after another. Returns
    /// what links carried for all, after this many seconds. `hungry`: whether a flow uses anything
    /// in a second.
    fn carried(flows: u64, seconds: u64, rate: u64, hungry: impl Fn(u64, u64) -> bool) -> u64 {
        let mut shares = BudgetShares::default();
        let begun = Time::ZERO + Span::from_secs(1_000);
        let mut used = vec![0_u64; flows as usize];
        let mut told = used.clone();
        let mut may = used.clone();
        for second in 0..seconds {
            for flow in 0..flows {
                let n = flow as usize;
                let now = begun + Span::from_millis(1_000 * second + 1_000 * flow / flows);
                told[n] = used[n];
                let spent: u64 = told.iter().sum();
                shares.set_limit(Some(BUDGET.saturating_sub(spent)));
                let payer = client(flow);
                let offer = shares.offer(now, payer, used[n]).expect("a budget");
                match offer {
                    0 => shares.stop_paying(payer),
                    bytes => shares.start_paying(now, payer, used[n], bytes),
                }
                may[n] = offer;
                if hungry(flow, second) {
                    used[n] += may[n].min(rate);
                }
            }
        }
        used.iter().sum()
    }

    #[test]
    fn flows_that_pay_at_once_share_what_is_left() {
        for flows in [1, 2, 3, 7, 40] {
            for rate in [100_000, 2_500_000, u64::MAX / 2] {
                let all = carried(flows, 400, rate, |_, _| true);
                let most = BUDGET + flows * GRANT_MIN_BYTES;
                assert!(all >= BUDGET && all <= most, "{all} by {flows} at {rate}");
            }
        }
    }

    #[test]
    fn what_one_does_not_use_is_anothers() {
        // The second flow never carries a byte, the third only at first.
        let hungry = |flow, second| flow == 0 || flow == 2 && second < 2;
        let all = carried(3, 400, 100_000, hungry);
        assert!(
            (BUDGET..=BUDGET + 3 * GRANT_MIN_BYTES).contains(&all),
            "{all}"
        );
        // The others are idle after some seconds, so the first soon gets all.
        let soon = carried(3, 40, 2_500_000, |flow, _| flow == 0);
        assert!(soon > BUDGET * 9 / 10, "{soon}");
    }

    #[test]
    fn without_a_budget_there_is_no_limit_and_with_none_left_nothing() {
        let mut shares = BudgetShares::default();
        assert_eq!(shares.offer(Time::ZERO, client(1), 0), None);
        shares.set_limit(Some(0));
        assert_eq!(shares.offer(Time::ZERO, client(1), 0), Some(0));
    }
}
