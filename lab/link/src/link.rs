//! A link: two pipes that share their fate, and on Wi-Fi their medium.

use crate::air::Air;
use crate::pipe::{Packet, Pipe, Profile, PushOutcome};
use crate::rate::Rate;
use d2tp_time::Time;
use rand_pcg::Pcg32;

/// Where the draws of a shared medium come from, away from those of the pipes.
const AIR_STREAM: u64 = 1 << 34;

/// What passes between a link's first hop, which answers, and the network behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkReach {
    /// Every packet.
    #[default]
    All,
    /// Every packet but UDP.
    NoUdp,
    /// HTTP, to a captive portal which answers for every host; nothing else.
    Portal,
    /// No packet.
    FirstHop,
}

impl LinkReach {
    /// Whether datagrams of UDP pass.
    pub fn passes_udp(self) -> bool {
        self == LinkReach::All
    }

    /// Whether TCP passes to the host that it is meant for.
    pub fn passes_tcp(self) -> bool {
        matches!(self, LinkReach::All | LinkReach::NoUdp)
    }
}

/// The whole condition of a link at an instant.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkCondition {
    /// Attached, with an address.
    pub up: bool,
    /// Attached but carrying nothing: every packet is lost after its airtime.
    pub dead: bool,
    /// Serving nothing for now; the queues are kept.
    pub stalled: bool,
    /// What passes beyond its first hop.
    pub reach: LinkReach,
    /// From the network to the device.
    pub down: Profile,
    /// From the device to the network.
    pub upward: Profile,
}

/// A direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkDirection {
    /// From the network to the device.
    Down,
    /// From the device to the network.
    Up,
}

/// Both directions of a link.
pub struct LinkModel<P> {
    down: Pipe<P>,
    upward: Pipe<P>,
    air: Option<Air>,
    reach: LinkReach,
    /// Random numbers of the air: a medium that the link joins later draws anew.
    rng: Pcg32,
}

impl<P: Packet> LinkModel<P> {
    /// A link in this condition at the beginning. `seed` and the link's `number` in its scenario
    /// decide all its chance, so links do not disturb each other's draws.
    pub fn new(condition: &LinkCondition, seed: u64, number: u64) -> LinkModel<P> {
        let mut link = LinkModel {
            down: Pipe::new(condition.down.clone(), seeded(seed, 2 * number)),
            upward: Pipe::new(condition.upward.clone(), seeded(seed, 2 * number + 1)),
            air: None,
            reach: LinkReach::All,
            rng: seeded(seed, AIR_STREAM + number),
        };
        link.apply(Time::ZERO, condition);
        link
    }

    /// The direction towards the device.
    pub fn down(&self) -> &Pipe<P> {
        &self.down
    }

    /// The direction from the device.
    pub fn upward(&self) -> &Pipe<P> {
        &self.upward
    }

    /// What passes beyond the link's first hop, both ways. The owner of the link's far end drops the rest: the
    /// link itself knows neither hops nor protocols.
    pub fn reach(&self) -> LinkReach {
        self.reach
    }

    /// Offer a packet of `bytes` to a direction at `now`.
    pub fn push(&mut self, way: LinkDirection, now: Time, bytes: u32, packet: P) -> PushOutcome {
        // Packets of the lab are noted a moment late, and not in the order of both directions: the
        // air is worked out no further than must be, so that none of them comes too late for it.
        if self.pipe(way).is_full_for(bytes) {
            self.contend(now);
        }
        self.pipe(way).push(now, bytes, packet)
    }

    /// The next packet of a direction that has arrived by `now`. Call again until it answers `None`.
    pub fn pop(&mut self, way: LinkDirection, now: Time) -> Option<P> {
        self.contend(now);
        self.pipe(way).pop(now)
    }

    /// Put the link into this condition at `now`.
    pub fn apply(&mut self, now: Time, condition: &LinkCondition) {
        self.contend(now);
        self.reach = condition.reach;
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
        let medium = match (&condition.down.rate, &condition.upward.rate) {
            (Rate::Shared(medium), Rate::Shared(_)) => Some(*medium),
            _ => None,
        };
        if self.air.as_ref().map(Air::medium) != medium {
            self.air = medium.map(|medium| Air::new(medium, now, self.rng.clone()));
        }
        if let Some(air) = &mut self.air {
            air.hold(now);
        }
    }

    /// When something next happens in either direction.
    pub fn next_event(&self) -> Option<Time> {
        let air = self.air.as_ref();
        let exchange = air.and_then(|air| air.next([self.down.head(), self.upward.head()]));
        [
            self.down.next_event(),
            self.upward.next_event(),
            exchange.map(|exchange| exchange.ends),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Frames that met in the air so far, on a shared medium.
    pub fn collisions(&self) -> u64 {
        self.air.as_ref().map_or(0, |air| air.collisions)
    }

    fn pipe(&mut self, way: LinkDirection) -> &mut Pipe<P> {
        match way {
            LinkDirection::Down => &mut self.down,
            LinkDirection::Up => &mut self.upward,
        }
    }

    /// Lets the directions take turns on their medium, if they share one, up to `now`.
    fn contend(&mut self, now: Time) {
        let Some(air) = &mut self.air else { return };
        while let Some(exchange) = air.next([self.down.head(), self.upward.head()])
            && exchange.ends <= now
        {
            let collided = exchange.sends == [true, true];
            let done = air.take(&exchange);
            for (pipe, done) in [&mut self.down, &mut self.upward].into_iter().zip(done) {
                if done {
                    pipe.take_head(exchange.ends, !collided);
                }
            }
        }
    }
}

/// Randomness number `stream` of a run with this seed.
pub fn seeded(seed: u64, stream: u64) -> Pcg32 {
    Pcg32::new(seed, stream)
}
