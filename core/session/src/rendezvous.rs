//! Rendezvous: two devices that communicate through a relay find a direct path.
//!
//! ```text
//!  caller                              through the relay                          listener
//!    at PUNCH seen, own addresses  ─────────────────────────────────────────────▶ stores them
//!                                  ◀───────────────────────── at – seen, own addresses
//!         ◀──────────────── punches, five times, to each address ───────────────────
//!    opens a path to each address ────────────────────────▶
//!    a punch came from elsewhere: opens a path there too ──▶
//!    a direct path answers: the relayed one is closed; it falls silent: opened again
//! ```
//!
//! Only the session's initiator opens paths. The listener makes its NAT accept their packets by
//! sending a datagram to the addresses they will come from (RFC 5128 §3.3 calls it hole punching;
//! RFC 8445 checks pairs of addresses in a similar way). A punch carries an id that only the two
//! devices know. It does not prove that a path leads to the peer; the session's own packets do.
//!
//! An origin has a known address: the caller needs no message from it, and tries that address.
//!
//! The lines travel in a flow of the session ([`Rendezvous::poll_line`],
//! [`Rendezvous::handle_line`]).

use std::collections::VecDeque;
use std::net::SocketAddr;

use d2tp_time::{Span, Time};

use crate::link::{Addresses, LinkId};
use crate::path::PathState;
use crate::relay::RelayId;
use crate::reserved_address::is_reserved_address;
use crate::session::{PathStats, Session};
use crate::session_state::SessionState;

/// The most addresses that are exchanged and tried: a few links, each with its own address and the
/// one that the relay sees.
pub const ADDRESSES_MAX: usize = 8;
/// R-PUNCH-3: the most paths that wait for their first answer at once.
const TRIES_MAX: usize = 3;
/// How long a path may wait for its first answer. // a guess: three of the core's probes
const TRY_FOR: Span = Span::from_secs(3);
/// The most addresses learnt from punches, for each received line: a NAT gives one for each link.
const REFLEXIVE_MAX: usize = 2;
/// When a listener punches each address, in milliseconds after the line that it received.
const PUNCH_AT_MS: [u64; 5] = [0, 100, 300, 700, 1500]; // a guess: during the caller's first probes
/// The shortest interval at which lines of a peer are acted on.
const HEAR_INTERVAL: Span = Span::from_millis(500);
/// How long a direct path may be silent before it is given up.
const SILENT_FOR: Span = Span::from_secs(10);
/// The interval before the second attempt for a direct path.
const AGAIN_FIRST: Span = Span::from_secs(15); // guesses: NATs change when networks do
/// The longest interval between attempts for a direct path.
const AGAIN_MAX: Span = Span::from_secs(480);
/// The size of a punch in bytes, equal to the shortest DATA packet, which it resembles.
pub const PUNCH_BYTES: usize = 29;
/// The longest line of a rendezvous message on the wire, in bytes.
pub const LINE_BYTES_MAX: usize = 512;

/// Where a link of this device leads without the relay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RendezvousReach {
    /// To IPv4 addresses.
    Ipv4,
    /// To IPv6 addresses.
    Ipv6,
    /// Nowhere: a stream, whose other end is the relay.
    RelayOnly,
}

impl RendezvousReach {
    /// The reach of a UDP socket with this address.
    pub fn of_socket(own: &SocketAddr) -> RendezvousReach {
        match own.is_ipv6() {
            true => RendezvousReach::Ipv6,
            false => RendezvousReach::Ipv4,
        }
    }

    fn leads_to(self, address: &SocketAddr) -> bool {
        self == RendezvousReach::of_socket(address)
    }
}

/// Moves a session with a peer from the relay to a direct path.
#[derive(Debug)]
pub struct Rendezvous {
    is_caller: bool,
    /// The id that the peer's punches must carry.
    punch: [u8; 8],
    relay: Option<RelayId>,
    /// Links that may be used, the best first, and where each leads without the relay.
    links: Vec<(LinkId, RendezvousReach)>,
    /// This device's addresses, as sent to the peer.
    ours: Vec<SocketAddr>,
    theirs: Vec<SocketAddr>,
    their_punch: Option<[u8; 8]>,
    unsaid: bool,
    /// A line that arrived too soon after the previous one.
    waiting: Option<String>,
    heard_at: Option<Time>,
    untried: VecDeque<(LinkId, SocketAddr)>,
    tries: Vec<(Addresses, Time)>,
    reflexive: usize,
    /// Punches to be sent now.
    punches: VecDeque<(LinkId, SocketAddr)>,
    /// When the next rounds of punches are due.
    rounds: VecDeque<Time>,
    silent: Vec<(Addresses, Time)>,
    again_at: Time,
    again_after: Span,
    direct: bool,
}

impl Rendezvous {
    /// The rendezvous of a session that this device opened with a listening device. `punch` must be
    /// fresh.
    pub fn caller(punch: [u8; 8]) -> Rendezvous {
        Rendezvous {
            is_caller: true,
            punch,
            relay: None,
            links: Vec::new(),
            ours: Vec::new(),
            theirs: Vec::new(),
            their_punch: None,
            unsaid: false,
            waiting: None,
            heard_at: None,
            untried: VecDeque::new(),
            tries: Vec::new(),
            reflexive: 0,
            punches: VecDeque::new(),
            rounds: VecDeque::new(),
            silent: Vec::new(),
            again_at: Time::NEVER,
            again_after: AGAIN_FIRST,
            direct: false,
        }
    }

    /// The rendezvous of a session that a caller opened with this device.
    pub fn listener() -> Rendezvous {
        Rendezvous {
            is_caller: false,
            ..Rendezvous::caller([0; 8])
        }
    }

    /// The rendezvous of a session with an origin, whose addresses are known.
    pub fn origin(addresses: Vec<SocketAddr>) -> Rendezvous {
        Rendezvous {
            theirs: addresses,
            ..Rendezvous::caller([0; 8])
        }
    }

    /// The id that the peer's punches must carry.
    pub fn punch(&self) -> [u8; 8] {
        self.punch
    }

    /// Sets the relay, or removes it.
    pub fn set_relay(&mut self, relay: Option<RelayId>) {
        self.relay = relay;
    }

    /// Whether a direct path answered at the last update.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Sets the current links, the best first, and where each leads without the relay; and this
    /// device's addresses, those that the relay sees first.
    pub fn set_local_addresses(
        &mut self,
        now: Time,
        links: Vec<(LinkId, RendezvousReach)>,
        mut addresses: Vec<SocketAddr>,
    ) {
        addresses.truncate(ADDRESSES_MAX);
        if addresses != self.ours {
            self.ours = addresses;
            self.unsaid = true;
        }
        if links != self.links {
            self.links = links;
            if self.is_caller {
                self.line_up(now);
            }
        }
    }

    /// The next line to send to the peer.
    pub fn poll_line(&mut self) -> Option<String> {
        if !std::mem::take(&mut self.unsaid) || self.ours.is_empty() {
            return None;
        }
        let mut line = if self.is_caller {
            format!("at {:016x}", u64::from_be_bytes(self.punch))
        } else {
            "at -".to_owned()
        };
        for address in &self.ours {
            line += &format!(" {address}");
        }
        Some(line + "\n")
    }

    /// Handles a line from the peer, without its line end. A line that is not understood changes
    /// nothing.
    pub fn handle_line(&mut self, now: Time, line: &str) {
        // R-PUNCH-2: frequent lines from a peer cause no more work.
        let early = self.heard_at.is_some_and(|at| now < at + HEAR_INTERVAL);
        if early {
            self.waiting = Some(line.to_owned());
            return;
        }
        self.heard_at = Some(now);
        let mut words = line.split(' ');
        let (Some("at"), Some(punch)) = (words.next(), words.next()) else {
            return;
        };
        let addresses: Vec<SocketAddr> = words
            .filter_map(|word| word.parse().ok())
            .filter(|address| self.may_be(address))
            .take(ADDRESSES_MAX)
            .collect();
        let changed = addresses != self.theirs;
        self.theirs = addresses;
        if self.is_caller {
            // A new address may mean that the peer moved. Its NAT must then learn of our addresses
            // again.
            self.unsaid |= changed;
            self.reflexive = 0;
            self.line_up(now);
        } else {
            self.their_punch = u64::from_str_radix(punch, 16).ok().map(u64::to_be_bytes);
            self.unsaid = true;
            self.rounds = PUNCH_AT_MS.map(|ms| now + Span::from_millis(ms)).into();
        }
    }

    /// R-PUNCH-1: whether an address may be a peer's: not a multicast address or the address of a
    /// relay or a stream, and a loopback address only if this host has no other network.
    fn may_be(&self, address: &SocketAddr) -> bool {
        let ip = address.ip().to_canonical();
        let broadcast = matches!(ip, std::net::IpAddr::V4(v4) if v4.is_broadcast());
        let odd = ip.is_unspecified() || ip.is_multicast() || broadcast;
        let here = ip.is_loopback() && !self.ours.iter().all(|own| own.ip().is_loopback());
        address.port() != 0 && !odd && !here && !is_reserved_address(address)
    }

    /// All pairs of a link and an address that may lead to the peer.
    fn pairs(&self) -> VecDeque<(LinkId, SocketAddr)> {
        let over = |to: SocketAddr| {
            let fitting = self
                .links
                .iter()
                .filter(move |(_, reach)| reach.leads_to(&to));
            fitting.map(move |(link, _)| (*link, to))
        };
        self.theirs.iter().flat_map(|to| over(*to)).collect()
    }

    /// Queues all pairs of addresses to be tried.
    fn line_up(&mut self, now: Time) {
        self.untried = self.pairs();
        self.again_at = now + self.again_after;
    }

    /// Handles a punch of the peer, from an address that may be unknown so far.
    pub fn on_punch(&mut self, link: LinkId, from: SocketAddr) {
        // R-PUNCH-2: a punch that is repeated from elsewhere causes probes there, but not often.
        if self.theirs.contains(&from) || self.reflexive >= REFLEXIVE_MAX {
            return;
        }
        self.reflexive += 1;
        self.theirs.push(from);
        self.untried.push_front((link, from));
    }

    /// The next punch that is due: the link, the destination, and the id it carries.
    pub fn poll_punch(&mut self, now: Time) -> Option<(LinkId, SocketAddr, [u8; 8])> {
        while self.rounds.front().is_some_and(|at| *at <= now) {
            self.rounds.pop_front();
            self.punches = self.pairs();
        }
        let punch = self.their_punch?;
        let (link, to) = self.punches.pop_front()?;
        Some((link, to, punch))
    }

    /// When the next timer is due.
    pub fn next_at(&self) -> Time {
        let rounds = self.rounds.front().copied();
        let tries = self.tries.iter().map(|(_, since)| *since + TRY_FOR).min();
        let silent = self
            .silent
            .iter()
            .map(|(_, since)| *since + SILENT_FOR)
            .min();
        let waiting = self.waiting.as_ref().and(self.heard_at);
        let waiting = waiting.map(|at| at + HEAR_INTERVAL);
        let due = [rounds, tries, silent, waiting];
        due.into_iter().flatten().fold(self.again_at, Time::min)
    }

    /// Updates the session's paths from our addresses and the peer's.
    pub fn update_paths(&mut self, now: Time, session: &mut Session) {
        if let Some(line) = self.waiting.take() {
            self.handle_line(now, &line);
        }
        if session.state() == SessionState::Closed || !self.is_caller {
            return;
        }
        for path in session.path_stats() {
            if !self.is_on(path.addresses.link) {
                session.on_link_down(now, path.addresses.link);
            }
        }
        let stats = session.path_stats();
        let relayed = |p: &&PathStats| RelayId::of(&p.addresses.remote).is_some();
        let direct = stats.iter().filter(|p| !relayed(p));
        let answering = direct.filter(|p| p.state == PathState::Active);
        let served: Vec<LinkId> = answering.map(|p| p.addresses.link).collect();
        self.direct = !served.is_empty();
        self.give_up(now, session, &stats, &served);
        if served.is_empty() {
            let has_relay = stats.iter().any(|p| relayed(&p));
            if let (false, Some(relay), Some(link)) = (has_relay, self.relay, self.links.first()) {
                session.open_path(now, addresses(link.0, relay.address()), false);
            }
            if self.again_at <= now {
                self.again_after = self.again_after.times(2).min(AGAIN_MAX);
                self.unsaid = true;
                self.line_up(now);
            } else if self.again_at == Time::NEVER {
                self.again_at = now + self.again_after;
            }
        } else {
            self.again_after = AGAIN_FIRST;
            self.again_at = Time::NEVER;
            for path in stats.iter().filter(relayed) {
                session.abandon_path_at(now, &path.addresses);
            }
        }
        self.try_on(now, session);
    }

    /// Gives up paths that did not answer in time, no longer answer, or whose link has a better one.
    fn give_up(
        &mut self,
        now: Time,
        session: &mut Session,
        stats: &[PathStats],
        served: &[LinkId],
    ) {
        let state = |addresses: &Addresses| {
            stats
                .iter()
                .find(|p| p.addresses == *addresses)
                .map(|p| p.state)
        };
        let mut lost = Vec::new();
        let knocking = session.state() != SessionState::Established;
        self.tries.retain(|(addresses, since)| {
            // A candidate of a handshake is no path yet.
            let opening = match state(addresses) {
                Some(state) => state == PathState::Opening,
                None => knocking,
            };
            let over = now >= *since + TRY_FOR || served.contains(&addresses.link);
            if opening && over {
                lost.push(*addresses);
            }
            opening && !over
        });
        self.silent
            .retain(|(addresses, _)| state(addresses) == Some(PathState::Silent));
        for path in stats.iter().filter(|p| p.state == PathState::Silent) {
            let known = self
                .silent
                .iter()
                .find(|(addresses, _)| *addresses == path.addresses);
            match known {
                None => self.silent.push((path.addresses, now)),
                Some((addresses, since)) if now >= *since + SILENT_FOR => lost.push(*addresses),
                Some(_) => {}
            }
        }
        for addresses in lost {
            // A path that only the relay carries is left to the session's own probes, however long
            // it is silent.
            if RelayId::of(&addresses.remote).is_none() {
                session.abandon_path_at(now, &addresses);
            }
        }
        self.untried.retain(|(link, _)| !served.contains(link));
    }

    fn is_on(&self, link: LinkId) -> bool {
        self.links.iter().any(|(on, _)| *on == link)
    }

    /// Opens further direct paths.
    fn try_on(&mut self, now: Time, session: &mut Session) {
        // A handshake tries one address of each link at a time; with a relay, that is the relay's.
        let knocking = session.state() != SessionState::Established;
        if knocking && self.relay.is_some() {
            return;
        }
        let most = if knocking { 1 } else { TRIES_MAX };
        while self.tries.len() < most
            && (knocking || session.spare_paths() > 1)
            && let Some((link, to)) = self.untried.pop_front()
        {
            let known = session.path_stats();
            let addresses = addresses(link, to);
            if !self.is_on(link) || known.iter().any(|p| p.addresses == addresses) {
                continue;
            }
            session.open_path(now, addresses, false);
            self.tries.push((addresses, now));
        }
    }
}

fn addresses(link: LinkId, remote: SocketAddr) -> Addresses {
    Addresses {
        link,
        local: None,
        remote,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::from_nanos(1_000_000_000);

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }

    #[test]
    fn a_line_says_where_one_is_and_is_said_again_only_when_that_changes() {
        let mut caller = Rendezvous::caller([1; 8]);
        assert_eq!(caller.poll_line(), None, "nowhere yet");
        let place = addresses(&["198.51.100.1:4000", "[2001:db8::1]:4000"]);
        caller.set_local_addresses(NOW, vec![(LinkId(0), RendezvousReach::Ipv4)], place.clone());
        let line = "at 0101010101010101 198.51.100.1:4000 [2001:db8::1]:4000\n";
        assert_eq!(caller.poll_line().as_deref(), Some(line));
        caller.set_local_addresses(NOW, vec![(LinkId(0), RendezvousReach::Ipv4)], place);
        assert_eq!(caller.poll_line(), None);
    }

    #[test]
    fn addresses_where_no_peer_can_be_are_not_tried() {
        // R-PUNCH-1
        let mut caller = Rendezvous::caller([1; 8]);
        caller.set_local_addresses(
            NOW,
            vec![(LinkId(0), RendezvousReach::Ipv4)],
            addresses(&["192.0.2.7:4000"]),
        );
        caller.handle_line(
            NOW,
            "at - 127.0.0.1:80 [::1]:80 [::ffff:127.0.0.1]:80 224.0.0.1:5 255.255.255.255:5 \
             0.0.0.0:5 192.0.2.1:0 [100::5]:0 nonsense 10.0.0.2:4000",
        );
        let tried: Vec<SocketAddr> = caller.untried.iter().map(|(_, to)| *to).collect();
        assert_eq!(tried, addresses(&["10.0.0.2:4000"]));
    }

    #[test]
    fn a_stream_leads_to_the_relay_and_to_no_address_that_a_peer_names() {
        let mut caller = Rendezvous::caller([1; 8]);
        let links = vec![
            (LinkId(0), RendezvousReach::Ipv4),
            (LinkId(1), RendezvousReach::RelayOnly),
            (LinkId(2), RendezvousReach::Ipv6),
        ];
        caller.set_local_addresses(NOW, links, addresses(&["192.0.2.7:4000"]));
        caller.handle_line(NOW, "at - 198.51.100.1:9 [2001:db8::1]:9");
        let tried: Vec<_> = caller.untried.iter().map(|(link, _)| link.0).collect();
        assert_eq!(tried, [0, 2]);
    }

    #[test]
    fn a_peer_that_talks_without_end_has_us_do_no_more() {
        // R-PUNCH-2
        let mut listener = Rendezvous::listener();
        listener.set_local_addresses(
            NOW,
            vec![(LinkId(0), RendezvousReach::Ipv4)],
            addresses(&["192.0.2.7:4000"]),
        );
        let many: String = (1..40).map(|n| format!(" 198.51.100.{n}:9")).collect();
        let (mut sent, mut now) = (0, NOW);
        for n in 0..1_000 {
            now = NOW + Span::from_millis(n);
            listener.handle_line(now, &format!("at 0000000000000005{many}"));
            while listener.poll_punch(now).is_some() {
                sent += 1;
            }
        }
        assert!(now < NOW + Span::from_secs(1));
        // Two lines counted; of the second one only the rounds that were due.
        assert_eq!(sent, ADDRESSES_MAX * (3 + 3));

        let mut caller = Rendezvous::caller([1; 8]);
        for port in 1..100 {
            caller.on_punch(LinkId(0), SocketAddr::from(([198, 51, 100, 9], port)));
        }
        assert_eq!(caller.untried.len(), REFLEXIVE_MAX);
    }
}
