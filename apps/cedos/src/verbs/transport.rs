//! The transport options of every verb that uses D2TP.

use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use d2tp_driver::{CongestionKind, EndpointConfig, Mirroring, PathSchedulerKind};

use crate::help::EXPERT;
use cedos_agent::fetch::option_parsers;

/// How this end sends over its paths. Each end decides for what it sends: for a download, the proxy.
#[derive(Debug, Default, PartialEq, Args)]
pub struct TransportArgs {
    /// Congestion control; lia, olia and balia treat all paths of a session as one
    #[arg(long, value_name = "NAME", value_parser = congestion(), help_heading = EXPERT)]
    congestion: Option<CongestionKind>,

    /// How bytes are spread over several networks
    #[arg(long, value_name = "NAME", value_parser = paths(), help_heading = EXPERT)]
    paths: Option<PathSchedulerKind>,

    /// Do not send again on an idle network what is in flight on a slower one
    #[arg(long, help_heading = EXPERT)]
    no_reinjection: bool,

    /// Send random losses again over another network without slowing down: never, over free networks, or
    /// also over metered ones, up to this many bytes a second [default: free]
    #[arg(long, value_name = "never|free|BYTES", value_parser = parse_mirror, help_heading = EXPERT)]
    mirror: Option<Mirroring>,

    /// Treat a silent network as congested: start slowly when it answers again
    #[arg(long, help_heading = EXPERT)]
    no_freezing: bool,

    /// How long the other end takes to answer, where that is seconds to hours, waits for scheduled links included;
    /// both ends need it
    #[arg(long, value_name = "SPAN", value_parser = option_parsers::parse_span, help_heading = EXPERT)]
    round_trip: Option<Duration>,

    /// With --round-trip: send at this rate, bytes a second, instead of looking for one, on links that nobody else uses
    #[arg(long, value_name = "BYTES", value_parser = option_parsers::parse_bytes, requires_all = ["round_trip", "receive_rate"],
          help_heading = EXPERT)]
    send_rate: Option<u64>,

    /// With --send-rate: the rate at which the other end sends, for which this end has room
    #[arg(long, value_name = "BYTES", value_parser = option_parsers::parse_bytes, requires = "send_rate", help_heading = EXPERT)]
    receive_rate: Option<u64>,
}

fn parse_mirror(text: &str) -> Result<Mirroring, String> {
    match text {
        "never" => Ok(Mirroring::Never),
        "free" => Ok(Mirroring::Free),
        bytes => option_parsers::parse_bytes(bytes)
            .map(|bytes_per_second| Mirroring::Paid { bytes_per_second })
            .map_err(|_| "expected never, free, or bytes a second, such as 64k".to_owned()),
    }
}

fn congestion() -> impl TypedValueParser<Value = CongestionKind> {
    PossibleValuesParser::new(CongestionKind::ALL.map(CongestionKind::as_str)).map(|word| {
        let mut all = CongestionKind::ALL.into_iter();
        all.find(|kind| kind.as_str() == word).unwrap_or_default()
    })
}

fn paths() -> impl TypedValueParser<Value = PathSchedulerKind> {
    PossibleValuesParser::new(PathSchedulerKind::ALL.map(PathSchedulerKind::as_str)).map(|word| {
        let mut all = PathSchedulerKind::ALL.into_iter();
        all.find(|kind| kind.as_str() == word).unwrap_or_default()
    })
}

impl TransportArgs {
    /// Sets these options in a configuration.
    pub fn apply(&self, config: &mut EndpointConfig) {
        config.congestion = self.congestion.unwrap_or(config.congestion);
        config.path_scheduler = self.paths.unwrap_or(config.path_scheduler);
        config.reinjection &= !self.no_reinjection;
        config.mirroring = self.mirror.unwrap_or(config.mirroring);
        config.freezing &= !self.no_freezing;
        if let Some(round_trip) = self.round_trip {
            config.expect_round_trip(round_trip.into());
        }
        if let (Some(send), Some(receive)) = (self.send_rate, self.receive_rate) {
            config.expect_rates(send, receive);
        }
    }

    /// The round trip to expect, if it is long.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        transport: TransportArgs,
    }

    #[test]
    fn each_option_changes_what_it_names() {
        let mut config = EndpointConfig::default();
        Cli::parse_from(["x"]).transport.apply(&mut config);
        let untouched = EndpointConfig::default();
        assert!(config.freezing);
        assert_eq!(
            (config.congestion, config.path_scheduler, config.reinjection),
            (untouched.congestion, untouched.path_scheduler, true)
        );
        let told =
            "x --congestion lia --paths redundant --no-reinjection --mirror 64k --no-freezing";
        Cli::parse_from(told.split(' '))
            .transport
            .apply(&mut config);
        assert_eq!(
            (config.congestion, config.path_scheduler, config.reinjection),
            (CongestionKind::Lia, PathSchedulerKind::Redundant, false)
        );
        let bytes_per_second = 64_000;
        assert_eq!(config.mirroring, Mirroring::Paid { bytes_per_second });
        assert!(!config.freezing);
        assert!(Cli::try_parse_from(["x", "--paths", "fastest"]).is_err());
    }

    #[test]
    fn rates_are_known_only_where_the_round_trip_is() {
        let mut config = EndpointConfig::default();
        let told = "x --round-trip 40m --send-rate 8k --receive-rate 250k";
        Cli::parse_from(told.split(' '))
            .transport
            .apply(&mut config);
        assert!(config.has_long_round_trip());
        assert_eq!(config.known_rate, Some(8_000));
        assert!(config.flow_window >= 40 * 60 * 250_000);
        for part in [
            "--send-rate 8k --receive-rate 8k",
            "--round-trip 40m --send-rate 8k",
        ] {
            let told = ["x"].into_iter().chain(part.split(' '));
            assert!(Cli::try_parse_from(told).is_err(), "{part}");
        }
    }
}
