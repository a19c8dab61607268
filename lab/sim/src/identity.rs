//! The keys and seeds of both ends, which are derived from the scenario's seed.

use sha2::{Digest, Sha256};

/// The identity of an end, and the number of its current process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub seed: u64,
    /// The number of restarts: each process has other random values.
    pub lives: u64,
}

impl Identity {
    pub(crate) fn new(seed: u64) -> Identity {
        Identity { seed, lives: 0 }
    }

    fn derive(self, what: &str, life: u64) -> [u8; 32] {
        let mut digest = Sha256::new();
        digest.update(self.seed.to_be_bytes());
        digest.update(life.to_be_bytes());
        digest.update(what);
        digest.finalize().into()
    }

    pub(crate) fn device_key(self) -> [u8; 32] {
        self.derive("device key", 0)
    }

    pub(crate) fn proxy_key(self) -> [u8; 32] {
        self.derive("proxy key", 0)
    }

    pub(crate) fn token_seed(self) -> [u8; 32] {
        self.derive("token seed", 0)
    }

    /// The device's instance.
    pub(crate) fn instance(self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.derive("instance", 0);
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    pub(crate) fn fresh_seed(self, who: &str, life: u64) -> [u8; 32] {
        self.derive(who, life)
    }
}
