//! How both ends are set, as the scenario says.

use cedos_lab_scenario::{Offload, OffloadWhere, Scenario};
use d2tp_session::{AckOffload, Config};

/// How both ends are set.
#[derive(Clone, Debug)]
pub struct Ends {
    /// The device.
    pub device: Config,
    /// The proxy: what it sends is under its congestion control.
    pub proxy: Config,
}

impl Ends {
    /// Both as the scenario says.
    pub fn of(scenario: &Scenario) -> Ends {
        let config = Config {
            early_data: true,
            thin_acks: scenario.acks.thin,
            ack_offload: match scenario.acks.offload {
                Offload::Where(OffloadWhere::Never) => AckOffload::Never,
                Offload::Where(OffloadWhere::Free) => AckOffload::Free,
                Offload::Paid(bytes_per_second) => AckOffload::Paid { bytes_per_second },
            },
            ..Config::default()
        };
        Ends::both(config)
    }

    fn both(config: Config) -> Ends {
        Ends {
            device: config.clone(),
            proxy: config,
        }
    }
}

/// Both as they are where a scenario says nothing of it.
impl Default for Ends {
    fn default() -> Ends {
        Ends::both(Config {
            early_data: true,
            ..Config::default()
        })
    }
}
