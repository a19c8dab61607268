//! The state of an exchange of ML-KEM-768 ([`crate::key_exchange`]), and what SYN and SYN+ACK say about it.

use d2tp_seal::{
    KEM_CIPHERTEXT_BYTES, KEM_KEY_BYTES, KEM_SEED_BYTES, SECRET_ID_BYTES, SessionSecret,
};

use crate::event::PeerFault;

/// The number among the suites of a SYN by which a device offers the exchange.
pub(crate) const HYBRID_SUITE: u8 = 16;
/// Bytes at the end of the payload of a SYN that offers the exchange: flags and the name of a secret.
pub(crate) const SYN_TRAILER_BYTES: usize = 1 + SECRET_ID_BYTES;
/// The datagrams in which half of a share has room, beside the frames that packets have of their own.
pub(crate) const SHARE_DATAGRAM_MIN: u64 = KEM_KEY_BYTES as u64 / 2 + 160;
/// Trailer flag: the name of a secret follows.
const NAMES_SECRET: u8 = 1;
/// Trailer flag: nothing of flows may be sent before the hybrid keys.
const REQUIRES: u8 = 2;

/// Whether a host agrees keys by ML-KEM too, which a quantum computer does not break.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HybridPolicy {
    /// Never: sessions are protected by X25519 alone.
    Off,
    /// An exchange takes place with every peer that supports it.
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
            (NAMES_SECRET * u8::from(self.secret.is_some())) | (REQUIRES * u8::from(self.required));
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
    /// No exchange of ML-KEM keys takes place.
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
    pub(crate) fn add<const N: usize>(
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
    pub(crate) fn share(&self) -> &[u8] {
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
