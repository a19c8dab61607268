//! The queue of transfers: which ones run at the same time, and which ones wait.
//!
//! ```text
//!  earliest deadline first   A  B  C │ D  E  F        │ moves with the unused capacity of links
//!                            go      │ wait behind
//! ```
//!
//! While there is time, two things are put before the deadline: among transfers with the same deadline the highest priority
//! goes first, and among those that want their beginning first (`ObjectStart`), those whose beginning is missing.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use d2tp_time::{Span, Time};

use super::client_state::{ClientPhase, ClientState, last_phase};
use crate::{ObjectStart, ScheduledFlow};

/// The load from which only the transfer with the earliest deadline runs.
const PRESSED: f64 = 0.35; // a guess: rates fall to a third

/// How many transfers run at once while there is time.
const ABREAST: usize = 4; // a guess: what download managers do

/// The used share of the links' capacity below which another transfer starts.
const IDLE_BELOW: f64 = 0.5; // a guess
/// The used share of the links' capacity above which one transfer less runs.
const FULL_ABOVE: f64 = 0.8; // a guess

/// How many consecutive updates must find unused capacity before another transfer starts, because a
/// new transfer is slow at first.
const IDLE_LOOKS: u32 = 3; // a guess

/// Deadlines that are nearer to each other count as the same: they are one moment that clients state at different times.
const SAME_DEADLINE: Span = Span::from_secs(1); // a guess: clocks that are read one after the other

/// How long a transfer may carry nothing before others no longer wait for it.
const MOVES_WITHIN: Span = Span::from_secs(5); // a guess: a slow start over a long path

/// Decides how many transfers run at once.
#[derive(Debug, Default)]
pub(super) struct TransferQueue {
    /// Transfers that run in addition to [`ABREAST`].
    pub(super) extra: usize,
    /// Consecutive updates that found unused capacity.
    idle_looks: u32,
}

impl TransferQueue {
    /// Handles a new client: unused capacity goes first to the first client in order.
    pub(super) fn on_join(&mut self) {
        *self = TransferQueue::default();
    }

    /// Allows one transfer more or less, by the used share of the links' capacity.
    pub(super) fn on_use(&mut self, share: f64, clients: usize) {
        self.idle_looks = match share < IDLE_BELOW {
            true => self.idle_looks + 1,
            false => 0,
        };
        if self.idle_looks >= IDLE_LOOKS {
            self.idle_looks = 0;
            self.extra = (self.extra + 1).min(clients);
        } else if share > FULL_ABOVE {
            self.extra = self.extra.saturating_sub(1);
        }
    }

    /// Whether a client must wait for others: as many as may run at once are moving, or have just been
    /// allowed to. `order`: the order in which links carry `flows`; `load`: see
    /// [`Scheduler::load`](crate::Scheduler::load); `leaves_room`: whether a flow's server is too slow to fill
    /// the links, so that others need not wait for it.
    pub(super) fn is_behind(
        &self,
        now: Time,
        number: u64,
        clients: &mut BTreeMap<u64, ClientState>,
        (order, flows): (&[usize], &[ScheduledFlow]),
        load: impl FnOnce() -> f64,
        leaves_room: impl Fn(usize) -> bool,
    ) -> bool {
        let is_interactive = |client: &ClientState| client.is_interactive;
        if clients.len() < 2 || clients.get(&number).is_some_and(is_interactive) {
            return false;
        }
        let numbers: Vec<u64> = last_phase(clients).collect();
        let (abreast, order) = match load() >= PRESSED {
            true => (1, order.to_vec()),
            false => {
                let of = |n: usize| clients.get(&numbers[n]);
                (ABREAST, with_time(order, flows, &of))
            }
        };
        let has_time = abreast > 1;
        let (mut going, mut starting, mut asking) = (0, 0, 0);
        for n in &order {
            let Some(client) = clients.get_mut(&numbers[*n]) else {
                continue;
            };
            if client.is_interactive {
                continue;
            }
            // A transfer of unknown size must ask the origin for it before there is an estimate.
            let asks = flows[*n].need.remaining_bytes.is_none() && asking < ABREAST;
            asking += usize::from(asks);
            let yields = has_time && starting > 0 && client.start == Some(ObjectStart::Here);
            let room = if yields {
                self.extra
            } else {
                abreast + self.extra
            };
            let goes = going < room || asks;
            client.goes_since = match goes {
                true => client.goes_since.or(Some(now)),
                false => None,
            };
            let lately = |moment: &Time| now.since(*moment) < MOVES_WITHIN;
            let begins = client.goes_since.as_ref().is_some_and(lately);
            let begins = begins && client.last_phase != Some(ClientPhase::Waits);
            let fills = (begins || lately(&client.moved_at)) && !leaves_room(*n);
            going += usize::from(fills);
            starting += usize::from(fills && client.start == Some(ObjectStart::Missing));
            if numbers[*n] == number {
                return !goes;
            }
        }
        false
    }
}

/// The order in which transfers have their turns while there is time. `order` is that of the links; `of`: the client of a flow.
fn with_time<'a>(
    order: &[usize],
    flows: &[ScheduledFlow],
    of: &dyn Fn(usize) -> Option<&'a ClientState>,
) -> Vec<usize> {
    let due_at = |n: usize| of(n).and_then(|client| client.due_at);
    let is_same = |one: &usize, next: &usize| match (due_at(*one), due_at(*next)) {
        (Some(one), Some(next)) => one.since(next).max(next.since(one)) < SAME_DEADLINE,
        (one, next) => one == next,
    };
    let mut turns = Vec::with_capacity(order.len());
    for same in order.chunk_by(is_same) {
        let mut same = same.to_vec();
        same.sort_by_key(|n| (Reverse(flows[*n].priority), *n));
        turns.extend(same);
    }
    // Those that want their beginning first change places among themselves, and with nobody else.
    let start = |n: usize| of(n).and_then(|client| client.start);
    let mut wanted: Vec<usize> = turns
        .iter()
        .copied()
        .filter(|n| start(*n).is_some())
        .collect();
    wanted.sort_by_key(|n| start(*n) == Some(ObjectStart::Here));
    let mut wanted = wanted.into_iter();
    for turn in turns.iter_mut().filter(|turn| start(**turn).is_some()) {
        *turn = wanted.next().unwrap_or(*turn);
    }
    turns
}
