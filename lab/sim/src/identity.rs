//! Keys, seeds and settings of both ends: all from the scenario's seed.

use cedos_lab_scenario::{Acks, Offload, OffloadWhere, Scenario};
use d2tp_session::{AckOffload, Config};
use sha2::{Digest, Sha256};

/// Who an end is, and which life of it this is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub seed: u64,
    /// Restarts so far: a process that starts again draws other randomness.
    pub lives: u64,
    acks: Acks,
}

impl Identity {
    pub(crate) fn new(scenario: &Scenario) -> Identity {
        Identity {
            seed: scenario.seed,
            lives: 0,
            acks: scenario.acks,
        }
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

    pub(crate) fn config(self) -> Config {
        Config {
            early_data: true,
            thin_acks: self.acks.thin,
            ack_offload: match self.acks.offload {
                Offload::Where(OffloadWhere::Never) => AckOffload::Never,
                Offload::Where(OffloadWhere::Free) => AckOffload::Free,
                Offload::Paid(bytes_per_second) => AckOffload::Paid { bytes_per_second },
            },
            ..Config::default()
        }
    }
}
