//! Algorithm 1 of the Cedos paper for several flows, as published. It uses one link at a time and
//! assumes that each link keeps the rate measured last.
//!
//! ```text
//!  τ of a flow = Σ ⌈bytes ÷ metered rate⌉ of the flows up to it
//!  every τ is within its deadline ─▶ the first flow, over Wi-Fi or not at all
//!  else                           ─▶ the first flow, over the faster link
//! ```

use crate::history::LinkHistory;
use crate::link_assignment::{LinkAssignment, LinkShare, ScheduledFlow};
use crate::link_choice::LinkClass;
use d2tp_time::Span;

/// The interval between decisions in the paper.
const EPOCH: Span = Span::from_secs(1);

/// The share of each link. `margin`: the reserve of time, as a share of the time needed; 0 as
/// published.
pub(crate) fn assign(
    links: &[LinkHistory],
    flows: &[ScheduledFlow],
    order: Vec<usize>,
    margin: f64,
) -> LinkAssignment {
    let fastest = |class| {
        let of_class = |n: &usize| links[*n].class() == class && links[*n].is_up();
        (0..links.len())
            .filter(of_class)
            .max_by(|a, b| rate(&links[*a]).total_cmp(&rate(&links[*b])))
    };
    let (free, metered) = (fastest(LinkClass::Free), fastest(LinkClass::Metered));
    let metered_rate = metered.map_or(0.0, |n| rate(&links[n]));
    let mut needed_s = 0.0;
    let urgent = order.iter().map(|n| &flows[*n]).any(|flow| {
        needed_s += (flow.bytes() / metered_rate.max(1.0)).ceil();
        let left_s = flow.left_s().filter(|_| flow.may_pay());
        left_s.is_some_and(|left_s| needed_s * (1.0 + margin) > left_s)
    });
    let free_rate = free.map_or(0.0, |n| rate(&links[n]));
    let pays = urgent && (free.is_none() || metered_rate > free_rate);
    let used = if pays { metered.or(free) } else { free };
    // The next flow begins within the second in which the first one completes.
    let share = |n| match used {
        Some(used) if used == n && Some(n) == metered => LinkShare::Paid,
        Some(used) if used == n => LinkShare::All,
        _ => LinkShare::Nothing,
    };
    let payers = order.iter().copied().filter(|n| flows[*n].may_pay());
    LinkAssignment {
        payers: payers.collect(),
        order,
        probed: None,
        shares: (0..links.len()).map(share).collect(),
        valid_for: EPOCH,
    }
}

/// The rate of a link as measured last, in bytes per second; an assumed rate before any
/// measurement.
fn rate(link: &LinkHistory) -> f64 {
    link.recent_rate().unwrap_or(link.long_term_rate())
}
