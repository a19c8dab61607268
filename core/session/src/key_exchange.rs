//! The exchange of ML-KEM-768 inside a session, right after its handshake.
//!
//! ```text
//!  device                                             server
//!   SYN: offers it, may name the secret it has ──▶
//!                            ◀── SYN+ACK: exchange, or: the keys are made of that secret too
//!   KEY_SHARE 0, KEY_SHARE 1: encapsulation key ──▶
//!                            ◀── KEY_SHARE 0, KEY_SHARE 1: ciphertext
//!   packets under hybrid keys ──▶                     the secret counts: it is kept
//!                            ◀── packets under hybrid keys
//! ```
//!
//! A share has two halves of equal size, because a whole one does not fit into a packet. A half that
//! is lost is sent again.

use d2tp_seal::{
    KEM_CIPHERTEXT_BYTES, KEM_KEY_BYTES, KEM_SEED_BYTES, SECRET_ID_BYTES, SessionSecret,
    kem_decapsulate, kem_encapsulate, kem_encapsulation_key,
};
use d2tp_wire::{Frame, WireWriter};

use crate::event::{PeerFault, SessionEvent};
use crate::sent_packet::{SentFrame, SentPacket};
use crate::session::{Session, say};
use crate::session_state::Role;

/// The number among the suites of a SYN by which a device offers the exchange.
pub(crate) const HYBRID_SUITE: u8 = 16;
/// Bytes at the end of the payload of a SYN that offers the exchange: flags and the name of a secret.
pub(crate) const SYN_TRAILER_BYTES: usize = 1 + SECRET_ID_BYTES;
/// Trailer flag: the name of a secret follows.
const NAMES_SECRET: u8 = 1;
/// Trailer flag: nothing of flows may be sent before the hybrid keys.
const REQUIRES: u8 = 2;
/// Room that a KEY_SHARE frame needs beside its bytes.
const SHARE_HEAD_BYTES: usize = 4;

/// Whether a host agrees keys by ML-KEM too, which a quantum computer does not break.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HybridPolicy {
    /// Never: sessions are protected by X25519 alone.
    Off,
    /// With every peer that can.
    #[default]
    Offered,
    /// A device ends a session with a server that cannot, and nothing of flows is sent before such
    /// keys are in force (R-KEM-8). For a server it is the same as [`HybridPolicy::Offered`].
    Required,
}

/// The end of the payload of a SYN that offers the exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SynTrailer {
    /// The name of the secret that the device has.
    pub(crate) secret: Option<[u8; SECRET_ID_BYTES]>,
    pub(crate) required: bool,
}

impl SynTrailer {
    pub(crate) fn encode(self) -> [u8; SYN_TRAILER_BYTES] {
        let mut out = [0; SYN_TRAILER_BYTES];
        out[0] =
            NAMES_SECRET * u8::from(self.secret.is_some()) | REQUIRES * u8::from(self.required);
        out[1..].copy_from_slice(&self.secret.unwrap_or_default());
        out
    }

    /// Reads the trailer at the end of the padding of a SYN. Padding without room for it says nothing.
    pub(crate) fn decode(padding: &[u8]) -> SynTrailer {
        let none = [0; SYN_TRAILER_BYTES];
        let [flags, id @ ..] = padding.last_chunk().unwrap_or(&none);
        SynTrailer {
            secret: (flags & NAMES_SECRET != 0).then_some(*id),
            required: flags & REQUIRES != 0,
        }
    }
}

/// What a SYN+ACK says about keys of ML-KEM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum HybridAnswer {
    /// There are none.
    #[default]
    Unused,
    /// The device sends an encapsulation key.
    Exchange,
    /// The keys of this handshake are made of the secret that the SYN named.
    SecretUsed,
}

impl HybridAnswer {
    pub(crate) fn code(self) -> u8 {
        match self {
            HybridAnswer::Unused => 0,
            HybridAnswer::Exchange => 1,
            HybridAnswer::SecretUsed => 2,
        }
    }
    pub(crate) fn from_code(code: u8) -> HybridAnswer {
        match code {
            1 => HybridAnswer::Exchange,
            2 => HybridAnswer::SecretUsed,
            _ => HybridAnswer::Unused,
        }
    }
}

/// Whether the keys in force are hybrid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum HybridKeys {
    /// The handshake agreed on none.
    #[default]
    Unused,
    /// The exchange is going on.
    Pending,
    /// Packets are sealed with them.
    InForce,
}

/// A share that arrives in two halves.
#[derive(Debug, Default)]
pub(crate) struct ShareHalves([Option<Box<[u8]>>; 2]);

impl ShareHalves {
    /// Adds a half; returns the share of `N` bytes when it is whole. A copy changes nothing.
    fn add<const N: usize>(
        &mut self,
        half: usize,
        bytes: &[u8],
    ) -> Result<Option<Box<[u8; N]>>, PeerFault> {
        if bytes.len() * 2 != N {
            return Err(PeerFault::KeyShare);
        }
        self.0[half].get_or_insert_with(|| bytes.into());
        let [Some(first), Some(second)] = &self.0 else {
            return Ok(None);
        };
        let whole = [&first[..], &second[..]].concat().into_boxed_slice();
        Ok(Some(whole.try_into().expect("two halves of N bytes")))
    }
}

/// An exchange that is going on.
pub(crate) enum KeyExchange {
    /// A device sent its key and waits for the ciphertext.
    Offered {
        seed: Box<[u8; KEM_SEED_BYTES]>,
        key: Box<[u8; KEM_KEY_BYTES]>,
        answer: ShareHalves,
    },
    /// A server waits for the device's key.
    Awaited(ShareHalves),
    /// A server sent the ciphertext. Its secret counts once the device uses it.
    Answered {
        ciphertext: Box<[u8; KEM_CIPHERTEXT_BYTES]>,
        secret: SessionSecret,
    },
}

impl KeyExchange {
    /// The bytes that this end sends.
    fn share(&self) -> &[u8] {
        match self {
            KeyExchange::Offered { key, .. } => &key[..],
            KeyExchange::Awaited(_) => &[],
            KeyExchange::Answered { ciphertext, .. } => &ciphertext[..],
        }
    }
}

impl Drop for KeyExchange {
    fn drop(&mut self) {
        if let KeyExchange::Offered { seed, .. } = self {
            seed.fill(0);
            // Keeps the compiler from removing the write above as a dead store.
            std::hint::black_box(&**seed);
        }
    }
}

impl Session {
    /// Requires hybrid keys of this session (R-KEM-8), whatever the host's policy is.
    pub fn require_hybrid(&mut self) {
        self.requires_hybrid = true;
    }

    /// Whether this host seals packets of the session with keys that ML-KEM protects too.
    pub fn has_hybrid_keys(&self) -> bool {
        self.hybrid == HybridKeys::InForce
    }

    /// The end of the payload of the next SYN; `None` if the exchange is not offered.
    pub(crate) fn syn_trailer(&self) -> Option<SynTrailer> {
        let offered = self.config.hybrid != HybridPolicy::Off || self.requires_hybrid;
        offered.then(|| SynTrailer {
            secret: self.session_secret.as_ref().map(|secret| secret.id),
            required: self.requires_hybrid,
        })
    }

    /// R-KEM-8: whether flows wait for hybrid keys.
    pub(crate) fn awaits_hybrid(&self) -> bool {
        self.requires_hybrid && self.hybrid != HybridKeys::InForce
    }

    /// Begins what the SYN+ACK of a handshake agreed on.
    pub(crate) fn begin_key_exchange(&mut self, agreed: HybridAnswer) {
        self.key_exchange = None;
        self.wants &= !(say::SHARE_FIRST | say::SHARE_SECOND);
        self.hybrid = match agreed {
            HybridAnswer::Unused => HybridKeys::Unused,
            HybridAnswer::SecretUsed => HybridKeys::InForce,
            HybridAnswer::Exchange => HybridKeys::Pending,
        };
        if self.hybrid != HybridKeys::Pending {
            return;
        }
        let exchange = match self.role {
            Role::Responder => KeyExchange::Awaited(ShareHalves::default()),
            Role::Initiator => {
                // R-KEM-2
                let seed = self.rng.array();
                self.wants |= say::SHARE_FIRST | say::SHARE_SECOND;
                KeyExchange::Offered {
                    seed: Box::new(seed),
                    key: Box::new(kem_encapsulation_key(&seed)),
                    answer: ShareHalves::default(),
                }
            }
        };
        self.key_exchange = Some(Box::new(exchange));
    }

    /// Handles KEY_SHARE.
    pub(crate) fn on_key_share(&mut self, half: u8, bytes: &[u8]) -> Result<(), PeerFault> {
        // R-KEM-1: only a peer that agreed to the exchange may send shares.
        if self.hybrid == HybridKeys::Unused {
            return Err(PeerFault::KeyShare);
        }
        let (Some(exchange), Some(keys)) = (&mut self.key_exchange, &mut self.keys) else {
            // R-KEM-2: a late copy.
            return Ok(());
        };
        let half = usize::from(half);
        match &mut **exchange {
            KeyExchange::Offered { seed, key, answer } => {
                let Some(ciphertext) = answer.add::<KEM_CIPHERTEXT_BYTES>(half, bytes)? else {
                    return Ok(());
                };
                let shared =
                    kem_decapsulate(seed, &ciphertext[..]).map_err(|_| PeerFault::KeyShare)?;
                let secret = keys.mix_in(key, &ciphertext[..], &shared, true);
                self.sealed_packets = 0;
                self.finish_key_exchange(secret);
            }
            KeyExchange::Awaited(halves) => {
                let Some(key) = halves.add::<KEM_KEY_BYTES>(half, bytes)? else {
                    return Ok(());
                };
                let made = kem_encapsulate(&key, &self.rng.array());
                // R-KEM-5
                let (ciphertext, shared) = made.map_err(|_| PeerFault::KeyShare)?;
                if let Some(secret) = keys.mix_in(&key, &ciphertext, &shared, false) {
                    let ciphertext = Box::new(ciphertext);
                    **exchange = KeyExchange::Answered { ciphertext, secret };
                    self.wants |= say::SHARE_FIRST | say::SHARE_SECOND;
                }
            }
            // The device's key arrived twice.
            KeyExchange::Answered { .. } => {}
        }
        Ok(())
    }

    /// R-KEM-7: once the device has used the hybrid keys, both ends have the secret.
    pub(crate) fn on_keys_advanced(&mut self) {
        if !self.keys.as_ref().is_some_and(|keys| keys.are_hybrid().1) {
            return;
        }
        let is_answered = |e: &Box<KeyExchange>| matches!(**e, KeyExchange::Answered { .. });
        if let Some(exchange) = self.key_exchange.take_if(|e| is_answered(e))
            && let KeyExchange::Answered { secret, .. } = &*exchange
        {
            let secret = secret.clone();
            self.sealed_packets = 0;
            self.finish_key_exchange(Some(secret));
        }
    }

    fn finish_key_exchange(&mut self, secret: Option<SessionSecret>) {
        self.key_exchange = None;
        self.wants &= !(say::SHARE_FIRST | say::SHARE_SECOND);
        self.hybrid = HybridKeys::InForce;
        self.session_secret = secret.map(Box::new);
        self.emit(SessionEvent::HybridKeys);
    }

    /// Writes the halves of this end's share that are to be sent.
    pub(crate) fn write_key_shares(&mut self, w: &mut WireWriter<'_>, sent: &mut SentPacket) {
        let share = self.key_exchange.as_ref().map_or(&[][..], |e| e.share());
        let size = share.len() / 2;
        for (what, half) in [(say::SHARE_FIRST, 0), (say::SHARE_SECOND, 1)] {
            if self.wants & what == 0 {
                continue;
            }
            if size == 0 {
                // A half that counted as lost is not needed any more.
                self.wants &= !what;
                continue;
            }
            if w.room() < size + SHARE_HEAD_BYTES {
                return;
            }
            self.wants &= !what;
            let bytes = &share[usize::from(half) * size..][..size];
            Frame::KeyShare { half, bytes }.encode(w);
            sent.eliciting = true;
            sent.note(SentFrame::Session { what });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trailer_of_a_syn_comes_back_and_padding_is_none() {
        for secret in [None, Some([7; 8])] {
            for required in [false, true] {
                let trailer = SynTrailer { secret, required };
                let padding = [&[0; 20][..], &trailer.encode()].concat();
                assert_eq!(SynTrailer::decode(&padding), trailer);
            }
        }
        let none = SynTrailer {
            secret: None,
            required: false,
        };
        assert_eq!(SynTrailer::decode(&[0; 500]), none);
        assert_eq!(SynTrailer::decode(&[255; 8]), none);
    }

    #[test]
    fn halves_of_a_share_arrive_in_any_order_and_more_than_once() {
        let mut halves = ShareHalves::default();
        assert_eq!(halves.add::<4>(1, &[3, 4]), Ok(None));
        assert_eq!(halves.add::<4>(1, &[9, 9]), Ok(None));
        assert_eq!(halves.add::<4>(0, &[1]), Err(PeerFault::KeyShare));
        assert_eq!(
            halves.add::<4>(0, &[1, 2]),
            Ok(Some(Box::new([1, 2, 3, 4])))
        );
    }
}
