//! Tickets: with one, a device repeats a handshake without the long-term keys.
//!
//! ```text
//!  server:  Noise message 2 holds     ticket, secret ───▶  device keeps both
//!  device:  WAKE: ticket, Noise NNpsk0 with the secret ───▶  server reads the device's identity from the ticket
//! ```
//!
//! The server seals a ticket for itself, so tickets need no memory there. When one is presented,
//! the server derives the secret again from the ticket's number and its own key.

use aws_lc_rs::{aead, hmac};

use crate::SealError;
use crate::host_key::PublicKey;

/// Bytes of the random number at the start of a ticket.
const NUMBER_BYTES: usize = 16;
/// Bytes of an encoded [`TicketHolder`].
const HOLDER_BYTES: usize = 32 + 8 + 4;
/// Bytes of a ticket.
pub const TICKET_BYTES: usize = NUMBER_BYTES + HOLDER_BYTES + 16;

/// The device and the instance that a ticket was issued to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TicketHolder {
    /// The device's public key.
    pub peer: PublicKey,
    /// The device's instance number.
    pub instance: u64,
    /// The epoch of the handshake that issued the ticket.
    pub epoch: u32,
}

/// A ticket and its secret.
#[derive(Clone, PartialEq, Eq)]
pub struct SessionTicket {
    /// The ticket itself, which the device sends to the server.
    pub bytes: [u8; TICKET_BYTES],
    /// The shared secret of the ticket, which is never sent in the clear.
    pub secret: [u8; 32],
}

impl Drop for SessionTicket {
    fn drop(&mut self) {
        self.secret.fill(0);
        // Keeps the compiler from removing the write above as a dead store.
        std::hint::black_box(&self.secret);
    }
}

impl std::fmt::Debug for SessionTicket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ticket")
    }
}

/// The server's keys for issuing and opening tickets.
pub struct TicketIssuer {
    key: hmac::Key,
}

impl TicketIssuer {
    /// An issuer with the keys of this seed. The seed must survive restarts, because tickets do.
    pub fn new(seed: [u8; 32]) -> Self {
        let seed = hmac::Key::new(hmac::HMAC_SHA256, &seed);
        let key = hmac::sign(&seed, b"d2tp ticket");
        TicketIssuer {
            key: hmac::Key::new(hmac::HMAC_SHA256, key.as_ref()),
        }
    }

    fn derived(&self, label: u8, number: &[u8]) -> [u8; 32] {
        let mut context = hmac::Context::with_key(&self.key);
        context.update(&[label]);
        context.update(number);
        let tag = context.sign();
        tag.as_ref().try_into().expect("HMAC-SHA-256 has 32 bytes")
    }

    /// The key that seals one ticket, derived from the ticket's number.
    fn sealing(&self, number: &[u8]) -> aead::LessSafeKey {
        let key = self.derived(b'k', number);
        let key = aead::UnboundKey::new(&aead::CHACHA20_POLY1305, &key).expect("32 bytes");
        aead::LessSafeKey::new(key)
    }

    /// Issues a ticket. `number` must be random, so that an observer cannot tell that two tickets
    /// belong to the same device.
    pub fn issue(&self, number: [u8; NUMBER_BYTES], holder: &TicketHolder) -> SessionTicket {
        let mut bytes = [0; TICKET_BYTES];
        bytes[..NUMBER_BYTES].copy_from_slice(&number);
        let (text, tag) = bytes[NUMBER_BYTES..].split_at_mut(HOLDER_BYTES);
        text[..32].copy_from_slice(&holder.peer.0);
        text[32..40].copy_from_slice(&holder.instance.to_be_bytes());
        text[40..].copy_from_slice(&holder.epoch.to_be_bytes());
        let sum = self
            .sealing(&number)
            .seal_in_place_separate_tag(
                aead::Nonce::assume_unique_for_key([0; 12]),
                aead::Aad::empty(),
                text,
            )
            .expect("44 bytes are below every limit");
        tag.copy_from_slice(sum.as_ref());
        SessionTicket {
            bytes,
            secret: self.derived(b's', &number),
        }
    }

    /// Opens a ticket: returns its holder and its secret.
    ///
    /// # Errors
    /// This server did not issue the ticket, or it was altered.
    pub fn open(
        &self,
        ticket: &[u8; TICKET_BYTES],
    ) -> Result<(TicketHolder, SessionTicket), SealError> {
        let (number, sealed) = ticket.split_at(NUMBER_BYTES);
        let mut buf = [0; HOLDER_BYTES + 16];
        buf.copy_from_slice(sealed);
        let nonce = aead::Nonce::assume_unique_for_key([0; 12]);
        let text = self
            .sealing(number)
            .open_in_place(nonce, aead::Aad::empty(), &mut buf)
            .map_err(|_| SealError::NotAuthentic)?;
        let array = |range: std::ops::Range<usize>| &text[range];
        let holder = TicketHolder {
            peer: PublicKey(array(0..32).try_into().expect("32 bytes")),
            instance: u64::from_be_bytes(array(32..40).try_into().expect("8 bytes")),
            epoch: u32::from_be_bytes(array(40..44).try_into().expect("4 bytes")),
        };
        let ticket = SessionTicket {
            bytes: *ticket,
            secret: self.derived(b's', number),
        };
        Ok((holder, ticket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLDER: TicketHolder = TicketHolder {
        peer: PublicKey([5; 32]),
        instance: 0x0102_0304_0506_0708,
        epoch: 9,
    };

    #[test]
    fn a_ticket_comes_back_and_only_to_who_made_it() {
        let press = TicketIssuer::new([1; 32]);
        let ticket = press.issue([7; 16], &HOLDER);
        let (holder, again) = press.open(&ticket.bytes).unwrap();
        assert_eq!((holder, &again), (HOLDER, &ticket));
        let (_, after_restart) = TicketIssuer::new([1; 32]).open(&ticket.bytes).unwrap();
        assert_eq!(after_restart, ticket);
        assert!(TicketIssuer::new([2; 32]).open(&ticket.bytes).is_err());
        for at in 0..TICKET_BYTES {
            let mut bent = ticket.bytes;
            bent[at] ^= 1;
            assert!(press.open(&bent).is_err(), "byte {at}");
        }
    }

    #[test]
    fn tickets_of_one_device_have_nothing_in_common() {
        let press = TicketIssuer::new([1; 32]);
        let (a, b) = (press.issue([7; 16], &HOLDER), press.issue([8; 16], &HOLDER));
        let same = std::iter::zip(a.bytes, b.bytes).filter(|(a, b)| a == b);
        assert!(same.count() < 8, "60 random bytes have 0.2 in common");
        assert_ne!(a.secret, b.secret);
    }
}
