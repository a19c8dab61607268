//! Carries out the device's policy: opens paths, grants, revokes, wakes the session.
//!
//! It looks when something happened to a link or a flow, and every [`TICK`] while a link that costs
//! something is up and its use may change; otherwise not at all, so hours of waiting cost nothing.

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::{Class, Direction};
use d2tp_session::{Addresses, FirstHop, LinkId, PathState, PathStats, PathStatus, Session};

use crate::device::Device;
use crate::fault::SimFault;
use crate::log::Log;
use crate::network::Network;
use crate::policy::{GRANT_RENEWED, Need, Offer, Verdict, decide};
use crate::transfer::Progress;

/// How long a first hop is waited for, as the driver does.
const HOP_PATIENCE: Span = Span::from_millis(100);
/// How often it is looked whether grants are to be renewed.
const TICK: Span = GRANT_RENEWED;

impl Device {
    /// Looks at links and flows, and acts. True if some permitted link carries packets.
    pub(crate) fn conduct(
        &mut self,
        now: Time,
        network: &Network,
        log: &mut Log,
    ) -> Result<bool, SimFault> {
        self.look_at = Time::NEVER;
        if self.host.is_away() {
            return Ok(false);
        }
        self.hear_hops(now, network);
        let links = self.classes.len();
        let active: Vec<usize> = (0..self.transfers.len())
            .filter(|n| self.transfers[*n].progress == Progress::Active)
            .collect();
        self.measure(now, network, !active.is_empty());
        let free_rate = (0..links)
            .filter(|l| self.classes[*l] == Class::Free && network.is_up(*l))
            // Waiting a moment for the first figure loses no deadline, but may save paid bytes.
            .map(|l| self.meters[l].rate().unwrap_or(u64::MAX / 1024))
            .sum();
        let (picked, mut again) = if active.is_empty() {
            (vec![true; links], Time::NEVER)
        } else {
            self.picked(now, network)
        };
        self.show(now);
        if self.viewer.is_some() && !active.is_empty() {
            again = again.min(now + TICK);
        }
        let mut usable = false;
        for link in (0..links).filter(|l| network.is_up(*l)) {
            if !picked[link] {
                self.leave(now, link, &picked, log);
                continue;
            }
            let offer = Offer {
                class: self.classes[link],
                rate: self.meters[link].rate(),
                round_trip: self.round_trip(link),
            };
            let viewed = match offer.class {
                Class::Free => None,
                _ => self.viewed(link, TICK),
            };
            let verdict = |n: usize| match viewed {
                Some(verdict) if n == 0 => verdict,
                _ => decide(&self.need(now, n), &offer, free_rate),
            };
            let verdicts: Vec<(usize, Verdict)> =
                active.iter().map(|n| (*n, verdict(*n))).collect();
            let used = verdicts
                .iter()
                .any(|(_, v)| matches!(v, Verdict::Use { .. }));
            if offer.class != Class::Free {
                self.park(now, link, used);
            }
            let carries_acks = self.acks_pay && !active.is_empty() && self.contends();
            let lends = self.lends.filter(|_| !used && !active.is_empty());
            let lends = lends.filter(|_| offer.class != Class::Free);
            if used || carries_acks || lends.is_some() {
                usable |= used && network.is_good(link);
                self.open(now, link, network, log)?;
            }
            if offer.class == Class::Free {
                continue;
            }
            if let Some(bytes_per_second) = lends {
                self.lend(now, link, bytes_per_second);
                again = again.min(now + TICK);
                continue;
            }
            self.end_lending(link);
            again = again.min(self.grant(now, link, &verdicts, log));
            // While a free link is in use, its rate decides too, and may change at any moment.
            if used || (free_rate > 0 && !active.is_empty()) {
                again = again.min(now + TICK);
            }
        }
        self.look_at = self.look_at.min(again);
        Ok(usable)
    }

    /// Tells the session what the first hops of quiet links said, as the driver does.
    fn hear_hops(&mut self, now: Time, network: &Network) {
        for link in 0..self.asked.len() {
            let Some(since) = self.asked[link] else {
                continue;
            };
            // At once, or when the hole is over by then.
            let hop = if (now == since || now >= since + HOP_PATIENCE)
                && network.hop_answers(now, link)
            {
                FirstHop::Answers
            } else if now >= since + HOP_PATIENCE {
                FirstHop::Silent
            } else {
                self.look_at = self.look_at.min(since + HOP_PATIENCE);
                continue;
            };
            self.asked[link] = None;
            let (core_now, core_since) = (self.host.clock.core(now), self.host.clock.core(since));
            if let Some(id) = self.session {
                let number = LinkId(link as u32);
                let _ = (self.host.endpoint).with(id, |s| {
                    s.on_link_silent(core_now, number, core_since, hop);
                });
            }
        }
    }

    /// Whether a half-duplex link carries: only then there are ACKs to be relieved of.
    fn contends(&self) -> bool {
        let paths = self.core().map(Session::path_stats).unwrap_or_default();
        let carries = |p: &PathStats| {
            p.state == PathState::Active && self.half_duplex[p.addresses.link.0 as usize]
        };
        paths.iter().any(carries)
    }

    fn need(&self, now: Time, number: usize) -> Need {
        let spec = &self.specs[number];
        let spent: u64 = (0..self.classes.len())
            .filter(|l| self.classes[*l] != Class::Free)
            .map(|l| self.accounts[number].of_link(l))
            .sum();
        Need {
            remaining: self.remaining(number),
            left: spec.deadline_s.map(|by| Time::from_secs_f64(by).since(now)),
            policy: spec.policy,
            budget: spec.metered_bytes_max.map(|max| max.saturating_sub(spent)),
        }
    }

    /// The smoothed round trip over a link; zero before there is one.
    fn round_trip(&self, link: usize) -> Span {
        let stats = self.core().map(Session::path_stats).unwrap_or_default();
        let on_link = |path: &&PathStats| path.addresses.link == LinkId(link as u32);
        let longest = stats.iter().filter(on_link).map(|path| path.rtt).max();
        longest.unwrap_or(Span::ZERO)
    }

    /// Meters run while their link is in use.
    fn measure(&mut self, now: Time, network: &Network, active: bool) {
        for link in 0..self.classes.len() {
            let granted = self.core().is_some_and(|s| {
                let mut ids = self.transfers.iter().filter_map(|t| t.id);
                s.has_path(LinkId(link as u32))
                    && (self.classes[link] == Class::Free
                        || ids.any(|id| {
                            s.grant_left(id, LinkId(link as u32))
                                .is_some_and(|(left, _)| left > 0)
                        }))
            });
            if active && network.is_up(link) && granted && !self.is_lent(link) {
                let round_trip = self.round_trip(link);
                self.meters[link].tick(now, round_trip);
            } else {
                self.meters[link].rest();
            }
        }
    }

    fn open(
        &mut self,
        now: Time,
        link: usize,
        network: &Network,
        log: &mut Log,
    ) -> Result<(), SimFault> {
        self.wake(now, log)?;
        let Some(id) = self.session else {
            return Ok(());
        };
        let number = LinkId(link as u32);
        if self.core().is_none_or(|s| s.has_path(number)) {
            return Ok(());
        }
        let remote = network.proxy_address(link);
        let gated = self.classes[link] != Class::Free;
        log.note(now, "device", || {
            format!("opens a path on link {link}, gated {gated}")
        });
        let addresses = Addresses {
            link: number,
            local: None,
            remote,
        };
        let core_now = self.host.clock.core(now);
        let half_duplex = self.half_duplex[link];
        let _ = self.host.endpoint.with(id, |s| {
            s.open_path(core_now, addresses, gated);
            if half_duplex {
                s.set_half_duplex(number);
            }
        });
        Ok(())
    }

    /// Whether a link carries but what others lose: that says nothing of its rate.
    fn is_lent(&self, link: usize) -> bool {
        let is_it =
            |p: &PathStats| p.addresses.link.0 as usize == link && p.status == PathStatus::Standby;
        self.lends.is_some() && (self.core()).is_some_and(|s| s.path_stats().iter().any(is_it))
    }

    /// Lends a link that costs something to what others lose.
    fn lend(&mut self, now: Time, link: usize, bytes_per_second: u64) {
        let (core_now, number) = (self.host.clock.core(now), LinkId(link as u32));
        if let Some(id) = self.session {
            let lend = |s: &mut Session| s.lend_path(core_now, number, bytes_per_second);
            let _ = self.host.endpoint.with(id, lend);
        }
    }

    /// A link that was lent carries flows of its own again.
    fn end_lending(&mut self, link: usize) {
        let (number, lends) = (LinkId(link as u32), self.lends.is_some());
        if let Some(id) = self.session.filter(|_| lends) {
            let _ = (self.host.endpoint).with(id, |s| s.end_lending(number));
        }
    }

    /// Grants and revokes on a gated path. When to look again.
    fn grant(
        &mut self,
        now: Time,
        link: usize,
        verdicts: &[(usize, Verdict)],
        log: &mut Log,
    ) -> Time {
        let mut look_at = Time::NEVER;
        let number = LinkId(link as u32);
        for (flow, verdict) in verdicts {
            let id = self.transfers[*flow].id;
            let grant = match verdict {
                Verdict::Use { grant } => *grant,
                Verdict::Hold { again, .. } => {
                    if let Some(again) = again {
                        look_at = look_at.min(now + Span::from_nanos(again.as_nanos()));
                    }
                    0
                }
            };
            let (Some(session), Some(id)) = (self.session, id) else {
                continue;
            };
            let left = self.core().and_then(|s| s.grant_left(id, number));
            let Some((left, _)) = left else { continue };
            // What is left of an upload's grant is the session's own business, and not told.
            let upload = self.specs[*flow].direction == Direction::Up;
            let renew = if grant == 0 {
                left > 0
            } else {
                upload || left < grant - grant / 10
            };
            if renew {
                log.note(now, "device", || {
                    format!("grants {grant} on link {link}: {verdict:?}")
                });
                let _ = self
                    .host
                    .endpoint
                    .with(session, |s| s.grant(id, number, grant));
            }
        }
        look_at
    }
}
