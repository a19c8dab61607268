//! The two handshake messages. They authenticate both ends and give the session its own keys.
//!
//! ```text
//!  device                                     server (its key pinned in the address)
//!   SYN      e, es, s, ss, payload   ──────▶                          Noise IK
//!   WAKE     ticket, psk, e, payload ──────▶                          or NNpsk0
//!            ◀──────   e, ee (IK: se), payload     SYN+ACK
//!   DATA (the ACK: proves the device has the keys)  ──────▶
//! ```
//!
//! With a ticket each end computes one X25519 product instead of four. The handshake that issued
//! the ticket authenticated both ends.

use crate::SealError;
use crate::host_key::{PublicKey, SecretKey};
use crate::noise::{NoiseResolver, PATTERN, PATTERN_BY_TICKET};
use crate::ticket::SessionTicket;

/// Bytes that Noise message 1 adds to its payload: ephemeral key, sealed static key, tag.
pub const SYN_OVERHEAD_BYTES: usize = 32 + 48 + 16;
/// Bytes that message 1 of a handshake by ticket adds to its payload: ephemeral key and tag.
pub const WAKE_OVERHEAD_BYTES: usize = 32 + 16;
/// Bytes that Noise message 2 adds to its payload: ephemeral key and tag.
pub const SYN_ACK_OVERHEAD_BYTES: usize = 32 + 16;

/// The result of a finished handshake: a secret for each direction and the hash of the transcript.
#[derive(Clone)]
pub struct HandshakeSecrets {
    /// Secret of the packets that the initiator sends.
    pub(crate) initiator: [u8; 32],
    /// Secret of the packets that the responder sends.
    pub(crate) responder: [u8; 32],
    /// Hash of all handshake messages, which binds the packet keys to them.
    pub(crate) transcript: [u8; 32],
}

impl Drop for HandshakeSecrets {
    fn drop(&mut self) {
        self.initiator.fill(0);
        self.responder.fill(0);
        // Keeps the compiler from removing the writes above as dead stores.
        std::hint::black_box(&*self);
    }
}

/// An initiator that has sent message 1 and waits for message 2.
pub struct Initiator {
    state: Box<snow::HandshakeState>,
}

/// A responder that has read a valid message 1 and has not answered yet.
pub struct Responder {
    state: Box<snow::HandshakeState>,
    peer: PublicKey,
}

fn builder(pattern: &str, seed: [u8; 32], local: &SecretKey) -> snow::Builder<'static> {
    let params = pattern.parse().expect("the pattern is a constant");
    let local = local.clone();
    snow::Builder::with_resolver(params, Box::new(NoiseResolver { seed, local }))
}

/// The prologue of a handshake by ticket, equal at both ends: the server, the device and the
/// ticket.
fn by_ticket(
    prologue: &[u8],
    server: &PublicKey,
    device: &PublicKey,
    ticket: &SessionTicket,
) -> Vec<u8> {
    [prologue, &server.0, &device.0, &ticket.bytes].concat()
}

fn secrets_of(state: &mut snow::HandshakeState) -> HandshakeSecrets {
    // `snow` marks the export of split keys as dangerous, because it then cannot prevent the reuse
    // of nonces. Here it is safe: the keys only go into HKDF, a packet number never recurs within a
    // path id, and a path id never recurs within a handshake (R-SEAL-2).
    let (initiator, responder) = state.dangerously_get_raw_split();
    let mut transcript = [0; 32];
    transcript.copy_from_slice(&state.get_handshake_hash()[..32]);
    HandshakeSecrets {
        initiator,
        responder,
        transcript,
    }
}

impl Initiator {
    /// Writes message 1 with `payload` into `out`; returns its length. `seed` must be fresh for
    /// every message: it becomes the ephemeral key.
    pub fn start(
        local: &SecretKey,
        remote: &PublicKey,
        prologue: &[u8],
        seed: [u8; 32],
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(Initiator, usize), SealError> {
        let secret = local.to_bytes();
        let mut state = builder(PATTERN, seed, local)
            .prologue(prologue)
            .and_then(|b| b.local_private_key(&secret))
            .and_then(|b| b.remote_public_key(&remote.0))
            .and_then(|b| b.build_initiator())
            .map_err(|_| SealError::NotAuthentic)?;
        let n = state
            .write_message(payload, out)
            .map_err(|_| SealError::BadLength)?;
        Ok((
            Initiator {
                state: Box::new(state),
            },
            n,
        ))
    }

    /// Starts a handshake that uses a ticket of the server in place of long-term keys.
    pub fn start_by_ticket(
        local: &SecretKey,
        remote: &PublicKey,
        ticket: &SessionTicket,
        prologue: &[u8],
        seed: [u8; 32],
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(Initiator, usize), SealError> {
        let prologue = by_ticket(prologue, remote, &local.public(), ticket);
        let mut state = builder(PATTERN_BY_TICKET, seed, local)
            .prologue(&prologue)
            .and_then(|b| b.psk(0, &ticket.secret))
            .and_then(|b| b.build_initiator())
            .map_err(|_| SealError::NotAuthentic)?;
        let n = state
            .write_message(payload, out)
            .map_err(|_| SealError::BadLength)?;
        Ok((
            Initiator {
                state: Box::new(state),
            },
            n,
        ))
    }

    /// Reads message 2. Its payload goes into `payload`, and the length of the payload is returned.
    /// A message that fails to authenticate leaves the initiator unchanged, because anybody can
    /// send one.
    pub fn finish(
        &mut self,
        message: &[u8],
        payload: &mut [u8],
    ) -> Result<(HandshakeSecrets, usize), SealError> {
        let n = self
            .state
            .read_message(message, payload)
            .map_err(|_| SealError::NotAuthentic)?;
        Ok((secrets_of(&mut self.state), n))
    }
}

impl Responder {
    /// Reads message 1. Its payload goes into `payload`, and the length of the payload is returned.
    pub fn read(
        local: &SecretKey,
        prologue: &[u8],
        seed: [u8; 32],
        message: &[u8],
        payload: &mut [u8],
    ) -> Result<(Responder, usize), SealError> {
        let secret = local.to_bytes();
        let mut state = builder(PATTERN, seed, local)
            .prologue(prologue)
            .and_then(|b| b.local_private_key(&secret))
            .and_then(|b| b.build_responder())
            .map_err(|_| SealError::NotAuthentic)?;
        let n = state
            .read_message(message, payload)
            .map_err(|_| SealError::NotAuthentic)?;
        let peer = state.get_remote_static().ok_or(SealError::NotAuthentic)?;
        let peer = PublicKey(peer.try_into().map_err(|_| SealError::BadLength)?);
        Ok((
            Responder {
                state: Box::new(state),
                peer,
            },
            n,
        ))
    }

    /// Reads message 1 of `peer`, which came with this ticket. Its payload goes into `payload`.
    pub fn read_by_ticket(
        local: &SecretKey,
        peer: PublicKey,
        ticket: &SessionTicket,
        prologue: &[u8],
        seed: [u8; 32],
        message: &[u8],
        payload: &mut [u8],
    ) -> Result<(Responder, usize), SealError> {
        let prologue = by_ticket(prologue, &local.public(), &peer, ticket);
        let mut state = builder(PATTERN_BY_TICKET, seed, local)
            .prologue(&prologue)
            .and_then(|b| b.psk(0, &ticket.secret))
            .and_then(|b| b.build_responder())
            .map_err(|_| SealError::NotAuthentic)?;
        let n = state
            .read_message(message, payload)
            .map_err(|_| SealError::NotAuthentic)?;
        Ok((
            Responder {
                state: Box::new(state),
                peer,
            },
            n,
        ))
    }

    /// The public key of the host that sent message 1.
    pub fn peer(&self) -> PublicKey {
        self.peer
    }

    /// Writes message 2 with `payload` into `out`; returns its length and the session's secrets.
    pub fn answer(
        mut self,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(HandshakeSecrets, usize), SealError> {
        let n = self
            .state
            .write_message(payload, out)
            .map_err(|_| SealError::BadLength)?;
        Ok((secrets_of(&mut self.state), n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ticket::{TicketHolder, TicketIssuer};

    fn keys() -> (SecretKey, SecretKey) {
        (
            SecretKey::from_bytes([1; 32]),
            SecretKey::from_bytes([2; 32]),
        )
    }

    #[test]
    fn both_ends_reach_the_same_secrets_and_know_each_other() {
        let (device, server) = keys();
        let mut m1 = [0; 256];
        let (mut i, n1) =
            Initiator::start(&device, &server.public(), b"p", [3; 32], b"hello", &mut m1).unwrap();
        assert_eq!(n1, SYN_OVERHEAD_BYTES + 5);
        let mut p = [0; 256];
        let (r, n) = Responder::read(&server, b"p", [4; 32], &m1[..n1], &mut p).unwrap();
        assert_eq!(&p[..n], b"hello");
        assert_eq!(r.peer(), device.public());
        let mut m2 = [0; 256];
        let (sr, n2) = r.answer(b"welcome", &mut m2).unwrap();
        assert_eq!(n2, SYN_ACK_OVERHEAD_BYTES + 7);
        let mut garbled = m2;
        garbled[40] ^= 1;
        assert!(i.finish(&garbled[..n2], &mut p).is_err());
        let (si, n) = i
            .finish(&m2[..n2], &mut p)
            .expect("garbage before did no harm");
        assert_eq!(&p[..n], b"welcome");
        assert_eq!((si.initiator, si.responder), (sr.initiator, sr.responder));
        assert_eq!(si.transcript, sr.transcript);
    }

    #[test]
    fn a_server_with_another_key_or_another_version_cannot_read_it() {
        let (device, server) = keys();
        let mut m1 = [0; 256];
        let (_, n) =
            Initiator::start(&device, &server.public(), b"v1", [3; 32], b"", &mut m1).unwrap();
        let mut p = [0; 256];
        assert!(Responder::read(&device, b"v1", [4; 32], &m1[..n], &mut p).is_err());
        assert!(Responder::read(&server, b"v2", [4; 32], &m1[..n], &mut p).is_err());
        for cut in 0..n {
            assert!(Responder::read(&server, b"v1", [4; 32], &m1[..cut], &mut p).is_err());
        }
    }

    #[test]
    fn by_ticket_both_ends_reach_the_same_secrets_and_nobody_else_does() {
        let (device, server) = keys();
        let press = TicketIssuer::new([9; 32]);
        let holder = TicketHolder {
            peer: device.public(),
            instance: 1,
            epoch: 1,
        };
        let ticket = press.issue([7; 16], &holder);
        let start = |ticket: &SessionTicket, out: &mut [u8]| {
            let remote = server.public();
            Initiator::start_by_ticket(&device, &remote, ticket, b"p", [3; 32], b"hello", out)
        };
        let (mut m1, mut p) = ([0; 256], [0; 256]);
        let (mut i, n1) = start(&ticket, &mut m1).unwrap();
        assert_eq!(n1, WAKE_OVERHEAD_BYTES + 5);
        let read = |peer: &SecretKey, ticket: &SessionTicket, prologue: &[u8], p: &mut [u8]| {
            let (peer, seed) = (peer.public(), [4; 32]);
            Responder::read_by_ticket(&server, peer, ticket, prologue, seed, &m1[..n1], p)
        };
        let (r, n) = read(&device, &ticket, b"p", &mut p).unwrap();
        assert_eq!((&p[..n], r.peer()), (&b"hello"[..], device.public()));
        let mut m2 = [0; 256];
        let (sr, n2) = r.answer(b"welcome", &mut m2).unwrap();
        assert_eq!(n2, SYN_ACK_OVERHEAD_BYTES + 7);
        let (si, n) = i.finish(&m2[..n2], &mut p).unwrap();
        assert_eq!(&p[..n], b"welcome");
        assert_eq!((si.initiator, si.responder), (sr.initiator, sr.responder));
        assert_eq!(si.transcript, sr.transcript);

        // A ticket with another device, version, secret or number is refused.
        let mut forged = ticket.clone();
        forged.secret[0] ^= 1;
        assert!(read(&server, &ticket, b"p", &mut p).is_err());
        assert!(read(&device, &ticket, b"q", &mut p).is_err());
        assert!(read(&device, &forged, b"p", &mut p).is_err());
        assert!(read(&device, &press.issue([8; 16], &holder), b"p", &mut p).is_err());
    }

    #[test]
    fn a_key_of_low_order_is_refused() {
        // R-HS-3
        let (device, _) = keys();
        let mut m1 = [0; 256];
        assert!(
            Initiator::start(&device, &PublicKey([0; 32]), b"", [3; 32], b"", &mut m1).is_err()
        );
    }
}
