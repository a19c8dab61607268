//! One or more equal bottlenecks between two namespaces: the lab's links.
//!
//! ```text
//!  proxy namespace                relay                     device namespace
//!  senders ──▶ net0 ──TUN──▶ queue ▸ rate ▸ loss ▸ delay ──TUN──▶ lane0 ──▶ receivers
//!                       ◀───────────── delay, same rate ◀─────────────
//! ```
//!
//! The queue is in the router, not in the interface of either end, so senders fill it as on the
//! Internet. Only data is lost: no acknowledgement is.

use std::net::IpAddr;
use std::process::{Child, Command};

use anyhow::{Context, Result, bail};
use cedos_lab_emu::{Namespace, World, plan};
use cedos_lab_scenario::Scenario;

use crate::placement::ProcessPlacement;

/// The properties of a bottleneck.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BottleneckShape {
    /// Rate of whole IP packets, each way.
    pub mbps: f64,
    /// Round trip without queueing.
    pub rtt_ms: f64,
    /// The share of data packets that are lost at random.
    pub loss: f64,
    /// The capacity of the queue, in bandwidth-delay products.
    pub queue_bdp: f64,
}

impl BottleneckShape {
    /// The bytes in flight when the path is just full.
    pub fn bdp_bytes(&self) -> f64 {
        self.mbps * 1e6 / 8.0 * self.rtt_ms / 1e3
    }

    fn queue_bytes(&self) -> u64 {
        (self.bdp_bytes() * self.queue_bdp) as u64
    }

    /// A description for people.
    pub fn in_words(&self) -> String {
        format!(
            "{} Mb/s of IP packets each way, RTT {} ms, drop-tail queue of {} BDP ({} kB), {} % of \
             data packets lost at random",
            self.mbps,
            self.rtt_ms,
            self.queue_bdp,
            self.queue_bytes() / 1000,
            self.loss * 100.0,
        )
    }

    fn scenario(&self, lanes: usize, seed: u64) -> String {
        let mut text = format!("name = \"bottleneck\"\nduration_s = 86400\nseed = {seed}\n");
        for lane in 0..lanes {
            text += &format!(
                "[[link]]\nname = \"lane{lane}\"\nnat = \"none\"\ndown_mbps = {mbps}\nup_mbps = \
                 {mbps}\nrtt_ms = {rtt}\nloss_down = {loss}\nqueue_bytes = {queue}\n",
                mbps = self.mbps,
                rtt = self.rtt_ms,
                loss = self.loss,
                queue = self.queue_bytes(),
            );
        }
        text
    }
}

/// Equal bottlenecks that are used in parallel, made for one run.
pub struct Bottlenecks {
    world: World,
}

impl Bottlenecks {
    /// Makes this many bottlenecks. [`cedos_lab_emu::enter`] must be called before.
    pub fn make(shape: &BottleneckShape, lanes: usize, seed: u64) -> Result<Self> {
        let scenario = Scenario::parse("bottleneck", &shape.scenario(lanes, seed), &mut |name| {
            unreachable!("{name}: this scenario reads no files")
        })?;
        Self::of(scenario)
    }

    /// Makes the links of a scenario whose links have no NAT. [`cedos_lab_emu::enter`] must be
    /// called before.
    pub fn of(scenario: Scenario) -> Result<Self> {
        let mut world = World::build(scenario).context("the bottleneck cannot be built")?;
        world.start(|_| {})?;
        Ok(Self { world })
    }

    /// The namespace of senders.
    pub fn senders(&self) -> &Namespace {
        self.world.proxy()
    }

    /// The namespace of receivers.
    pub fn receivers(&self) -> &Namespace {
        self.world.device()
    }

    /// The address of senders that listen.
    pub fn sender_address() -> IpAddr {
        plan::PROXY_V4.into()
    }

    /// The bottleneck with this number, for its own flow.
    pub fn lane(&self, number: usize) -> BottleneckSlot<'_> {
        BottleneckSlot { all: self, number }
    }

    /// Checks that the relay dropped no packets in addition to the models' losses. Otherwise the
    /// run shows nothing.
    ///
    /// # Errors
    /// The relay dropped packets, or it could not keep up.
    pub fn check(&self) -> Result<()> {
        if let Some(fault) = self.world.fault() {
            bail!("the bottleneck failed: {fault}");
        }
        let strays: u64 = (self.world.seen().carried.iter())
            .map(|lane| lane.packets_misaddressed + lane.down.packets_too_big)
            .sum();
        // A few are allowed: for example resets of connections whose program has ended.
        if strays > 100 {
            bail!("{strays} packets found no way through the bottleneck");
        }
        Ok(())
    }

    /// How long packets of a link waited in its queues on average, in milliseconds, both directions
    /// added.
    pub fn waited_ms(&self, lane: usize) -> f64 {
        let carried = &self.world.seen().carried[lane];
        carried.down.waited_mean_ms() + carried.upward.waited_mean_ms()
    }

    /// The number of data packets offered to the queue, of those dropped by the full queue, and of
    /// those lost at random.
    pub fn dropped(&self) -> (u64, u64, u64) {
        let seen = self.world.seen();
        let sum = |f: fn(&cedos_lab_link::Counters) -> u64| {
            seen.carried.iter().map(|lane| f(&lane.down)).sum()
        };
        (
            sum(|c| c.packets_offered),
            sum(|c| c.packets_queue_full),
            sum(|c| c.packets_lost),
        )
    }
}

/// One bottleneck, as the placement of a flow.
pub struct BottleneckSlot<'a> {
    all: &'a Bottlenecks,
    number: usize,
}

impl ProcessPlacement for BottleneckSlot<'_> {
    fn receiver_address(&self) -> IpAddr {
        plan::link_addresses(self.number, 0).v4.into()
    }
    fn start_receiver(&self, command: Command) -> Result<Child> {
        self.all.receivers().spawn(command)
    }
    fn start_sender(&self, command: Command) -> Result<Child> {
        self.all.senders().spawn(command)
    }
    /// The relay needs every core.
    fn holds_cores(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_counted_in_what_fills_the_path() {
        let shape = BottleneckShape {
            mbps: 20.0,
            rtt_ms: 50.0,
            loss: 0.001,
            queue_bdp: 0.5,
        };
        assert_eq!(shape.bdp_bytes(), 125_000.0);
        let text = shape.scenario(2, 7);
        assert!(text.contains("queue_bytes = 62500"), "{text}");
        let scenario = Scenario::parse("bottleneck", &text, &mut |_| unreachable!()).unwrap();
        assert_eq!(scenario.links.len(), 2);
        let down = scenario.condition_at_start(1).down;
        assert_eq!(down.queue, cedos_lab_link::Queue::Bytes(62_500));
    }
}
