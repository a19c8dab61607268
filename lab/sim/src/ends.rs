//! The configurations of both ends, as the scenario sets them.

use cedos_lab_link::Span;
use cedos_lab_scenario::{Mirror, Offload, OffloadWhere, Scenario, Transport};
use d2tp_session::{AckOffload, CongestionKind, EndpointConfig, Mirroring, PathSchedulerKind};

/// The configurations of both ends.
#[derive(Clone, Debug)]
pub struct EndpointConfigs {
    /// Configuration of the device.
    pub device: EndpointConfig,
    /// Configuration of the proxy, with its congestion control.
    pub proxy: EndpointConfig,
}

impl EndpointConfigs {
    /// Both configurations, as the scenario sets them.
    pub fn of(scenario: &Scenario) -> EndpointConfigs {
        let Transport {
            congestion,
            paths,
            reinjection,
            mirror,
            freezing,
            round_trip_s,
            known_rates,
        } = scenario.transport;
        let congestion = congestion.and_then(|wanted| {
            let mut all = CongestionKind::ALL.into_iter();
            all.find(|kind| kind.as_str() == wanted.word())
        });
        let paths = paths.and_then(|wanted| {
            let mut all = PathSchedulerKind::ALL.into_iter();
            all.find(|kind| kind.as_str() == wanted.word())
        });
        let usual = EndpointConfig::default();
        let mut config = EndpointConfig {
            early_data: true,
            congestion: congestion.unwrap_or(usual.congestion),
            path_scheduler: paths.unwrap_or(usual.path_scheduler),
            reinjection: reinjection.unwrap_or(usual.reinjection),
            mirroring: match mirror {
                None => usual.mirroring,
                Some(Mirror::Where(OffloadWhere::Never)) => Mirroring::Never,
                Some(Mirror::Where(OffloadWhere::Free)) => Mirroring::Free,
                Some(Mirror::Paid(bytes_per_second)) => Mirroring::Paid { bytes_per_second },
            },
            freezing: freezing.unwrap_or(usual.freezing),
            thin_acks: scenario.acks.thin,
            ack_offload: match scenario.acks.offload {
                Offload::Where(OffloadWhere::Never) => AckOffload::Never,
                Offload::Where(OffloadWhere::Free) => AckOffload::Free,
                Offload::Paid(bytes_per_second) => AckOffload::Paid { bytes_per_second },
            },
            ..usual
        };
        if let Some(seconds) = round_trip_s {
            config.expect_round_trip(Span::from_secs(seconds.into()));
        }
        let mut ends = EndpointConfigs::both(config);
        if let Some(rates) = known_rates {
            let bytes = |mbps: f64| (mbps * 1e6 / 8.0) as u64;
            let (down, up) = (bytes(rates.down_mbps), bytes(rates.up_mbps));
            ends.device.expect_rates(up, down);
            ends.proxy.expect_rates(down, up);
        }
        ends
    }

    fn both(config: EndpointConfig) -> EndpointConfigs {
        EndpointConfigs {
            device: config.clone(),
            proxy: config,
        }
    }
}

/// Both configurations without any settings of a scenario.
impl Default for EndpointConfigs {
    fn default() -> EndpointConfigs {
        EndpointConfigs::both(EndpointConfig {
            early_data: true,
            ..EndpointConfig::default()
        })
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
                     reinjection = false\nmirror = \"never\"\nfreezing = false\n[[link]]\nname = \"wlan0\"\n",
                    congestion.as_str(),
                    paths.as_str()
                );
                let scenario =
                    Scenario::parse("test", &text, &mut |_| unreachable!()).expect("it is right");
                let config = EndpointConfigs::of(&scenario).proxy;
                assert_eq!(
                    (config.congestion, config.path_scheduler, config.reinjection),
                    (congestion, paths, false)
                );
                assert_eq!(
                    (config.mirroring, config.freezing),
                    (Mirroring::Never, false)
                );
            }
        }
    }

    #[test]
    fn each_end_expects_the_round_trip_and_its_own_rates() {
        let text = "duration_s = 1\n[transport]\nround_trip_s = 1200\n\
                    known_rates = { down_mbps = 0.8, up_mbps = 0.08 }\n[[link]]\nname = \"dsn0\"\n";
        let scenario = Scenario::parse("test", text, &mut |_| unreachable!()).unwrap();
        let ends = EndpointConfigs::of(&scenario);
        assert_eq!(ends.device.rtt_initial, Span::from_secs(1_200));
        assert_eq!(ends.device.known_rate, Some(10_000));
        assert_eq!(ends.proxy.known_rate, Some(100_000));
        assert_eq!(ends.device.flow_window, 4 * 1_200 * 100_000);
    }
}
