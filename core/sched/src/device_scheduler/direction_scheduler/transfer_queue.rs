//! Which transfers go beside others, and which wait behind them.
//!
//! ```text
//!  earliest deadline first   A  B  C │ D  E  F        │ moves with the room that is left on links
//!                            go      │ wait behind
//! ```

use std::collections::BTreeMap;

use d2tp_time::{Span, Time};

use super::client_state::{ClientPhase, ClientState, last_phase};
use crate::ScheduledFlow;

/// From this load on there is no time to lose: the earliest deadline goes alone.
const PRESSED: f64 = 0.35; // a guess: rates fall to a third

/// How many transfers go side by side while there is time.
const ABREAST: usize = 4; // a guess: what download managers do

/// Another transfer starts beside the others while links carry less than this share of what they
/// could.
const IDLE_BELOW: f64 = 0.5; // a guess
/// One transfer less goes beside the others when links carry more than this share of what they
/// could.
const FULL_ABOVE: f64 = 0.8; // a guess

/// Another transfer starts only after this many looks in a row found links idle: a transfer that
/// begins is slow at first.
const IDLE_LOOKS: u32 = 3; // a guess

/// A transfer that carried nothing for so long does not keep those behind it waiting.
const MOVES_WITHIN: Span = Span::from_secs(5); // a guess: a slow start over a long way

/// How many transfers go beside those that would fill the links.
#[derive(Debug, Default)]
pub(super) struct TransferQueue {
    /// Transfers that go beside those that would fill the links.
    pub(super) extra: usize,
    /// Looks in a row that found room.
    idle_looks: u32,
}

impl TransferQueue {
    /// Another client came: room that others left is first for whoever is first now.
    pub(super) fn on_join(&mut self) {
        *self = TransferQueue::default();
    }

    /// Lets one more go beside the others, or one less, by the share of the links that was used.
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

    /// Whether others go first: as many as go side by side move, or have just been let go.
    /// `order`: the order in which links carry `flows`; `load`: see
    /// [`Scheduler::load`](crate::Scheduler::load).
    pub(super) fn is_behind(
        &self,
        now: Time,
        number: u64,
        clients: &mut BTreeMap<u64, ClientState>,
        (order, flows): (&[usize], &[ScheduledFlow]),
        load: impl FnOnce() -> f64,
    ) -> bool {
        let is_interactive = |client: &ClientState| client.is_interactive;
        if clients.len() < 2 || clients.get(&number).is_some_and(is_interactive) {
            return false;
        }
        let abreast = match load() >= PRESSED {
            true => 1,
            false => ABREAST,
        };
        let numbers: Vec<u64> = last_phase(clients).collect();
        let (mut going, mut asking) = (0, 0);
        for n in order {
            let Some(client) = clients.get_mut(&numbers[*n]) else {
                continue;
            };
            if client.is_interactive {
                continue;
            }
            // How much it is has to be asked before anything can be promised.
            let asks = flows[*n].need.remaining_bytes.is_none() && asking < ABREAST;
            asking += usize::from(asks);
            let goes = going < abreast + self.extra || asks;
            client.goes_since = match goes {
                true => client.goes_since.or(Some(now)),
                false => None,
            };
            let lately = |moment: &Time| now.since(*moment) < MOVES_WITHIN;
            let begins = client.goes_since.as_ref().is_some_and(lately);
            let begins = begins && client.last_phase != Some(ClientPhase::Waits);
            going += usize::from(begins || lately(&client.moved_at));
            if numbers[*n] == number {
                return !goes;
            }
        }
        false
    }
}
