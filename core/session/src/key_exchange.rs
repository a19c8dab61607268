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
    KEM_CIPHERTEXT_BYTES, KEM_KEY_BYTES, KEM_SEED_BYTES, SessionSecret, kem_decapsulate,
    kem_encapsulate, kem_encapsulation_key,
};
use d2tp_wire::{Frame, WireWriter};

use crate::event::{PeerFault, SessionEvent};
use crate::key_exchange_state::{
    HybridAnswer, HybridKeys, HybridPolicy, KeyExchange, SHARE_DATAGRAM_MIN, ShareHalves,
    SynTrailer,
};
use crate::sent_packet::{SentFrame, SentPacket};
use crate::session::{Session, say};
use crate::session_state::Role;

/// Room that a KEY_SHARE frame needs beside its bytes.
const SHARE_HEAD_BYTES: usize = 4;

impl Session {
    /// Whether this host seals packets of the session with keys that ML-KEM protects too.
    pub fn has_hybrid_keys(&self) -> bool {
        self.hybrid == HybridKeys::InForce
    }

    /// The end of the payload of the next SYN; `None` if the exchange is not offered.
    pub(crate) fn syn_trailer(&self) -> Option<SynTrailer> {
        let offered = self.config.hybrid != HybridPolicy::Off;
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
                let mut seed = Box::new([0; KEM_SEED_BYTES]);
                self.rng.fill(&mut seed[..]);
                self.wants |= say::SHARE_FIRST | say::SHARE_SECOND;
                KeyExchange::Offered {
                    key: Box::new(kem_encapsulation_key(&seed)),
                    seed,
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
        let answered = |e: &KeyExchange| matches!(e, KeyExchange::Answered { .. });
        if let Some(exchange) = self.key_exchange.take_if(|e| answered(e))
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

    /// The frames of the session that are to be sent and have room on a path. R-SERIAL-5: half of a share has none on a
    /// slow line.
    pub(crate) fn wants_with_room(&self, slot: usize) -> u16 {
        match self.paths[slot].mtu.current() as u64 >= SHARE_DATAGRAM_MIN {
            true => self.wants,
            false => self.wants & !(say::SHARE_FIRST | say::SHARE_SECOND),
        }
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
