//! Keys, seeds and settings of both ends: all from the scenario's seed.

use cedos_lab_scenario::{Scenario, Transport};
use d2tp_session::{Config, CongestionKind, PathSchedulerKind};
use sha2::{Digest, Sha256};

/// Who an end is, and which life of it this is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub seed: u64,
    /// Restarts so far: a process that starts again draws other randomness.
    pub lives: u64,
    transport: Transport,
}

impl Identity {
    pub(crate) fn new(scenario: &Scenario) -> Identity {
        Identity {
            seed: scenario.seed,
            lives: 0,
            transport: scenario.transport,
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
        let Transport {
            congestion,
            paths,
            reinjection,
        } = self.transport;
        let mut config = Config {
            early_data: true,
            ..Config::default()
        };
        let congestion = congestion.and_then(|wanted| {
            let mut all = CongestionKind::ALL.into_iter();
            all.find(|kind| kind.word() == wanted.word())
        });
        let paths = paths.and_then(|wanted| {
            let mut all = PathSchedulerKind::ALL.into_iter();
            all.find(|kind| kind.word() == wanted.word())
        });
        config.congestion = congestion.unwrap_or(config.congestion);
        config.path_scheduler = paths.unwrap_or(config.path_scheduler);
        config.reinjection = reinjection.unwrap_or(config.reinjection);
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_a_scenario_reaches_the_core() {
        for congestion in CongestionKind::ALL {
            for paths in PathSchedulerKind::ALL {
                let text = format!(
                    "duration_s = 1\n[transport]\ncongestion = \"{}\"\npaths = \"{}\"\n\
                     reinjection = false\n[[link]]\nname = \"wlan0\"\n",
                    congestion.word(),
                    paths.word()
                );
                let scenario =
                    Scenario::parse("test", &text, &mut |_| unreachable!()).expect("it is right");
                let config = Identity::new(&scenario).config();
                assert_eq!(
                    (config.congestion, config.path_scheduler, config.reinjection),
                    (congestion, paths, false)
                );
            }
        }
    }
}
