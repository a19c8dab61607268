//! Several endpoints of one host, the workers, each with a part of its clients.
//!
//! ```text
//!  SYN ──▶ any worker ──▶ decrypted: whose client is it? ── ours ─────▶ answered
//!                                         └ another's ─▶ poll_misdirected ─▶ accept_misdirected of that worker
//!  DATA ─▶ the worker that issued its connection id (cid_share.rs), else in the same way
//! ```
//!
//! All sessions of a client are in one worker, so its quotas, its records and its other sessions need no agreement
//! between workers.

use d2tp_seal::PublicKey;
use d2tp_time::{Span, Time};
use d2tp_wire::{Cid, PacketKind};

use super::{Endpoint, IncomingDatagram};
use crate::cid_share::CidShare;
use crate::link::Addresses;
use crate::pending_lookup::PendingLookup;

/// The most packets that wait for other workers. More are dropped, as if the network had lost them.
pub(super) const MISDIRECTED_MAX: usize = 1_024;

/// How long a copy of a handshake is passed on without being read.
const COPIES_FOR: Span = Span::from_secs(10); // as long as a handshake is half open
/// The maximum number of remembered handshakes of other workers' clients.
pub(super) const PASSED_HANDSHAKES_MAX: usize = 4_096;

/// A handshake that was passed to another worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassedHandshake {
    from: Addresses,
    worker: u16,
    until: Time,
}

/// What another worker has to handle.
#[derive(Debug)]
pub enum Misdirected {
    /// A handshake of another worker's client.
    Handshake(Box<PendingLookup>),
    /// A packet whose connection id that worker issues.
    Datagram(Addresses, Vec<u8>),
}

impl Misdirected {
    /// Where the packet came from.
    pub fn addresses(&self) -> Addresses {
        match self {
            Misdirected::Handshake(handshake) => handshake.origin.from,
            Misdirected::Datagram(addresses, _) => *addresses,
        }
    }
}

impl Endpoint {
    /// Whether sessions of this client belong to this worker. Without workers all do.
    pub fn owns(&self, client: &PublicKey) -> bool {
        let worker = self.config.worker;
        worker.is_none_or(|worker| worker.contains(part_of(client)))
    }

    /// The index of this worker; 0 if it is the only one.
    pub fn worker_index(&self) -> u16 {
        self.config.worker.map_or(0, |worker| worker.index())
    }

    /// The index of the worker that has all sessions of this client.
    pub fn worker_of(&self, client: &PublicKey) -> u16 {
        let worker = self.config.worker;
        worker.map_or(0, |worker| worker.index_of(part_of(client)))
    }

    /// The parts of connection ids that this host and this worker issue.
    pub(crate) fn cid_shares(&self) -> [Option<CidShare>; 2] {
        [self.config.cid_share, self.config.worker]
    }

    /// What arrived here and belongs to another worker, with that worker's index.
    pub fn poll_misdirected(&mut self) -> Option<(u16, Misdirected)> {
        self.misdirected.pop_front()
    }

    /// Handles what another worker received.
    pub fn accept_misdirected(&mut self, now: Time, packet: Misdirected) {
        match packet {
            Misdirected::Handshake(handshake) => self.accept_passed(now, *handshake),
            Misdirected::Datagram(addresses, mut bytes) => {
                if let Some((_, _, cid, _)) = PacketKind::split(&bytes) {
                    // It was passed once: it is read here.
                    self.passed_handshakes.remove(&cid);
                }
                let bytes = &mut bytes[..];
                self.handle_datagram(now, IncomingDatagram { addresses, bytes });
            }
        }
    }

    /// Passes a handshake of another worker's client on.
    pub(super) fn pass_handshake(&mut self, now: Time, handshake: PendingLookup) {
        if self.config.worker.is_some() {
            let index = self.worker_of(&handshake.peer());
            let passed = PassedHandshake {
                from: handshake.origin.from,
                worker: index,
                until: now + COPIES_FOR,
            };
            self.passed_handshakes.insert(handshake.origin.cid, passed);
            self.pass(index, Misdirected::Handshake(Box::new(handshake)));
        }
    }

    /// Passes a packet with an unknown id on, if another worker issues that. Returns whether it did.
    pub(super) fn pass_datagram(&mut self, from: Addresses, cid: Cid, bytes: &[u8]) -> bool {
        let Some(worker) = self.config.worker.filter(|w| !w.contains(cid.0)) else {
            return false;
        };
        let packet = Misdirected::Datagram(from, bytes.to_vec());
        self.pass(worker.index_of(cid.0), packet);
        true
    }

    /// R-HS-18: passes a copy of a handshake on that was passed on before, without a public-key operation. Returns
    /// whether it did.
    pub(super) fn pass_copy(&mut self, now: Time, from: Addresses, cid: Cid, bytes: &[u8]) -> bool {
        let passed = self.passed_handshakes.get(&cid).copied();
        let Some(passed) = passed.filter(|p| p.from == from && now < p.until) else {
            return false;
        };
        self.pass(passed.worker, Misdirected::Datagram(from, bytes.to_vec()));
        true
    }

    /// The number of workers of the host.
    pub(super) fn workers(&self) -> u16 {
        self.config.worker.map_or(1, |worker| worker.shares())
    }

    /// This worker's part of a limit of the host, at least 1 of a limit that is not 0.
    pub(super) fn part_of_host(&self, limit: usize) -> usize {
        limit.div_ceil(usize::from(self.workers()))
    }

    /// Sets the seed from which workers of one host derive their cookie secrets, so that each accepts the cookies of
    /// all. It must be fresh at every start.
    pub fn set_cookie_seed(&mut self, seed: [u8; 32]) {
        self.cookie_seed = Some(seed);
    }

    fn pass(&mut self, worker: u16, packet: Misdirected) {
        if self.misdirected.len() < MISDIRECTED_MAX {
            self.misdirected.push_back((worker, packet));
        }
    }
}

/// The part of a client's key by which it is assigned. The seed of the hash keeps clients from choosing their worker.
fn part_of(client: &PublicKey) -> [u8; 8] {
    let (part, _) = client.0.split_first_chunk().expect("a key has 32 bytes");
    *part
}
