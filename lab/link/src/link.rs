//! A link: two pipes that go up and down together, and on Wi-Fi share a medium.

use crate::air::SharedMedium;
use crate::pipe::{Packet, Pipe, Profile, PushOutcome};
use crate::rate::Rate;
use d2tp_time::Time;
use rand_pcg::Pcg32;
use serde::Deserialize;

/// The random stream of a shared medium, apart from those of the pipes.
const AIR_STREAM: u64 = 1 << 34;

/// The packets that pass between a link's first hop, which always answers, and the network behind
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkReach {
    /// Every packet passes.
    #[default]
    All,
    /// Every packet but UDP.
    NoUdp,
    /// Only TCP to the network's HTTP proxy, which connects to the hosts that it is asked for.
    HttpProxy,
    /// Only HTTP to a captive portal, which answers for every host.
    Portal,
    /// No packet passes beyond the first hop.
    FirstHop,
}

impl LinkReach {
    /// Whether UDP datagrams pass.
    pub fn passes_udp(self) -> bool {
        self == LinkReach::All
    }

    /// Whether TCP reaches the host that it is addressed to.
    pub fn passes_tcp(self) -> bool {
        matches!(self, LinkReach::All | LinkReach::NoUdp)
    }
}

/// What happens to TCP connections beyond a link's first hop, where [`LinkReach`] passes TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TcpPassage {
    /// TCP segments pass.
    #[default]
    Pass,
    /// A host of the network answers new ones in place of every host, with TLS and a page of its
    /// own, and resets others.
    Intercept,
    /// A host of the network resets them.
    Reset,
}

/// The whole condition of a link at an instant.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkCondition {
    /// Whether the link is attached and has an address.
    pub up: bool,
    /// Whether the link is attached but carries nothing: every packet is lost after its
    /// transmission time.
    pub dead: bool,
    /// Whether the link sends nothing for now; the queues are kept.
    pub stalled: bool,
    /// The packets that pass beyond its first hop.
    pub reach: LinkReach,
    /// What happens to TCP connections beyond its first hop.
    pub tcp: TcpPassage,
    /// The direction from the network to the device.
    pub down: Profile,
    /// The direction from the device to the network.
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
    air: Option<SharedMedium>,
    reach: LinkReach,
    /// The random generator for a medium that the link joins later.
    rng: Pcg32,
}

impl<P: Packet> LinkModel<P> {
    /// A link in this condition at the beginning. `seed` and the link's `number` in its scenario
    /// determine all random values, so that links do not affect each other's draws.
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

    /// The packets that pass beyond the link's first hop, in both directions. The owner of the
    /// link's far end drops the others, because the link knows neither hops nor protocols.
    pub fn reach(&self) -> LinkReach {
        self.reach
    }

    /// Offers a packet of `bytes` to a direction at `now`.
    pub fn push(&mut self, way: LinkDirection, now: Time, bytes: u32, packet: P) -> PushOutcome {
        // Packets of the lab are recorded a moment late, and not in the order of both directions.
        // The medium is computed no further than necessary, so that none of them arrives too late
        // for it.
        if self.pipe(way).is_full_for(bytes) {
            self.contend(now);
        }
        self.pipe(way).push(now, bytes, packet)
    }

    /// Takes the next packet of a direction that has arrived by `now`. Call again until it returns
    /// `None`.
    pub fn pop(&mut self, way: LinkDirection, now: Time) -> Option<P> {
        self.contend(now);
        self.pipe(way).pop(now)
    }

    /// Changes the link's condition at `now`.
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
        if self.air.as_ref().map(SharedMedium::medium) != medium {
            self.air = medium.map(|medium| SharedMedium::new(medium, now, self.rng.clone()));
        }
        if let Some(air) = &mut self.air {
            air.hold(now);
        }
    }

    /// The time of the next event in either direction.
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

    /// The number of collisions so far, on a shared medium.
    pub fn collisions(&self) -> u64 {
        self.air.as_ref().map_or(0, |air| air.collisions)
    }

    fn pipe(&mut self, way: LinkDirection) -> &mut Pipe<P> {
        match way {
            LinkDirection::Down => &mut self.down,
            LinkDirection::Up => &mut self.upward,
        }
    }

    /// Lets the directions take turns on their medium up to `now`, if they share one.
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

/// The random generator number `stream` of a run with this seed.
pub fn seeded(seed: u64, stream: u64) -> Pcg32 {
    Pcg32::new(seed, stream)
}
