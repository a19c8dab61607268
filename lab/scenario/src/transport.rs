//! `[transport]`: transport settings of D2TP at both ends of the run.

use crate::acks::AcksPlacement;
use serde::Deserialize;

/// Transport settings of both ends; absent ones have the programs' defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transport {
    /// The congestion controller.
    pub congestion: Option<Congestion>,
    /// The path scheduler.
    pub paths: Option<ScenarioPathScheduler>,
    /// Whether a fast path sends again what delays a slow one.
    pub reinjection: Option<bool>,
    /// The links that may repair random losses of another one.
    pub mirror: Option<Mirror>,
    /// Whether silent paths are frozen.
    pub freezing: Option<bool>,
    /// The round trip that both ends expect, in seconds.
    pub round_trip_s: Option<u32>,
    /// The rates that both ends know beforehand, in Mb/s; simulator only.
    pub known_rates: Option<ScenarioRates>,
}

/// Rates to and from the device, in Mb/s of whole IP packets.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioRates {
    /// The rate to the device.
    pub down_mbps: f64,
    /// The rate from the device.
    pub up_mbps: f64,
}

/// The links that may repair random losses of another link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Mirror {
    /// No link, or free links.
    Where(AcksPlacement),
    /// Metered links as well, with this many bytes per second.
    Paid(u64),
}

impl Mirror {
    /// The name as scenario files and options have it.
    pub fn word(self) -> String {
        match self {
            Mirror::Where(AcksPlacement::Never) => "never".to_owned(),
            Mirror::Where(AcksPlacement::Free) => "free".to_owned(),
            Mirror::Paid(bytes) => bytes.to_string(),
        }
    }
}

/// A congestion controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Congestion {
    /// CUBIC, for each path separately.
    Cubic,
    /// NewReno, for each path separately.
    NewReno,
    /// BBR, for each path separately.
    Bbr,
    /// LIA: coupled paths.
    Lia,
    /// OLIA: coupled paths.
    Olia,
    /// BALIA: coupled paths.
    Balia,
}

/// How a session distributes the data that it sends over its paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScenarioPathScheduler {
    /// Free paths first, then by round trip.
    FreeFirst,
    /// The path with the shortest round trip first.
    LowestRtt,
    /// Earliest completion first.
    Ecf,
    /// All data on every path.
    Redundant,
}

impl Congestion {
    /// The name as scenario files and options have it.
    pub fn word(self) -> &'static str {
        match self {
            Congestion::Cubic => "cubic",
            Congestion::NewReno => "new-reno",
            Congestion::Bbr => "bbr",
            Congestion::Lia => "lia",
            Congestion::Olia => "olia",
            Congestion::Balia => "balia",
        }
    }
}

impl ScenarioPathScheduler {
    /// The name as scenario files and options have it.
    pub fn word(self) -> &'static str {
        match self {
            ScenarioPathScheduler::FreeFirst => "free-first",
            ScenarioPathScheduler::LowestRtt => "lowest-rtt",
            ScenarioPathScheduler::Ecf => "ecf",
            ScenarioPathScheduler::Redundant => "redundant",
        }
    }
}

impl Transport {
    /// The transport as options of `cedos prox`, `cedos get` and `cedos put`.
    pub fn options(&self) -> Vec<String> {
        let mut options = Vec::new();
        if let Some(congestion) = self.congestion {
            options.extend(["--congestion".to_owned(), congestion.word().to_owned()]);
        }
        if let Some(paths) = self.paths {
            options.extend(["--paths".to_owned(), paths.word().to_owned()]);
        }
        if self.reinjection == Some(false) {
            options.push("--no-reinjection".to_owned());
        }
        if let Some(mirror) = self.mirror {
            options.extend(["--mirror".to_owned(), mirror.word()]);
        }
        if self.freezing == Some(false) {
            options.push("--no-freezing".to_owned());
        }
        if let Some(seconds) = self.round_trip_s {
            options.extend(["--round-trip".to_owned(), format!("{seconds}s")]);
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use crate::Scenario;

    fn transport(table: &str) -> Result<Vec<String>, String> {
        let text = format!("duration_s = 1\n[transport]\n{table}\n[[link]]\nname = \"wlan0\"\n");
        Scenario::parse("test", &text, &mut |_| unreachable!())
            .map(|s| s.transport.options())
            .map_err(|fault| fault.to_string())
    }

    #[test]
    fn what_is_written_becomes_options_and_nothing_else_is_taken() {
        let told = transport(
            "congestion = \"new-reno\"\npaths = \"ecf\"\nreinjection = false\nfreezing = false",
        );
        assert_eq!(
            told.unwrap().join(" "),
            "--congestion new-reno --paths ecf --no-reinjection --no-freezing"
        );
        for mirror in ["\"never\"", "\"free\"", "64000"] {
            let told = transport(&format!("mirror = {mirror}")).unwrap();
            assert_eq!(
                told.join(" "),
                format!("--mirror {mirror}").replace('"', "")
            );
        }
        let told = transport("round_trip_s = 2400");
        assert_eq!(told.unwrap().join(" "), "--round-trip 2400s");
        assert_eq!(transport("").unwrap().len(), 0);
        assert!(transport("congestion = \"vegas\"").is_err());
    }
}
