//! A link: two pipes that share their fate.

use crate::pipe::{Packet, Pipe, Profile};
use d2tp_time::Time;
use rand_pcg::Pcg32;

/// The whole condition of a link at an instant.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    /// Attached, with an address.
    pub up: bool,
    /// Attached but carrying nothing: every packet is lost after its airtime.
    pub dead: bool,
    /// Serving nothing for now; the queues are kept.
    pub stalled: bool,
    /// From the network to the device.
    pub down: Profile,
    /// From the device to the network.
    pub upward: Profile,
}

/// Both directions of a link.
pub struct Link<P> {
    /// From the network to the device.
    pub down: Pipe<P>,
    /// From the device to the network.
    pub upward: Pipe<P>,
}

impl<P: Packet> Link<P> {
    /// A link in this condition at the beginning. `seed` and the link's `number` in its scenario
    /// decide all its chance, so links do not disturb each other's draws.
    pub fn new(condition: &Condition, seed: u64, number: u64) -> Link<P> {
        let mut link = Link {
            down: Pipe::new(condition.down.clone(), seeded(seed, 2 * number)),
            upward: Pipe::new(condition.upward.clone(), seeded(seed, 2 * number + 1)),
        };
        link.apply(Time::ZERO, condition);
        link
    }

    /// Put the link into this condition at `now`.
    pub fn apply(&mut self, now: Time, condition: &Condition) {
        for (pipe, profile) in [
            (&mut self.down, &condition.down),
            (&mut self.upward, &condition.upward),
        ] {
            if pipe.profile() != profile {
                pipe.change(now, profile.clone());
            }
            pipe.turn(now, condition.up);
            pipe.deaden(now, condition.dead);
            pipe.stall(now, condition.stalled);
        }
    }

    /// When something next happens in either direction.
    pub fn next_event(&self) -> Option<Time> {
        [self.down.next_event(), self.upward.next_event()]
            .into_iter()
            .flatten()
            .min()
    }
}

/// Randomness number `stream` of a run with this seed.
pub fn seeded(seed: u64, stream: u64) -> Pcg32 {
    Pcg32::new(seed, stream)
}
