//! `[transport]`: how D2TP sends at both ends of the run.

use crate::acks::AcksPlacement;
use serde::Deserialize;

/// Settings of both ends; what is absent is as the programs have it by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transport {
    /// How many bytes a path may have in flight.
    pub congestion: Option<Congestion>,
    /// Which path carries which bytes.
    pub paths: Option<ScenarioPathScheduler>,
    /// Whether a fast path repeats what a slow one holds up.
    pub reinjection: Option<bool>,
    /// Where what was lost at random is fetched.
    pub mirror: Option<Mirror>,
    /// Whether silent paths are frozen.
    pub freezing: Option<bool>,
}

/// Where what one link loses at random may be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Mirror {
    /// Nowhere, or on free links.
    Where(AcksPlacement),
    /// On those that cost something too, so many bytes a second.
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

/// A congestion control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Congestion {
    /// CUBIC, each path for itself.
    Cubic,
    /// NewReno, each path for itself.
    NewReno,
    /// BBR, each path for itself.
    Bbr,
    /// LIA: paths coupled.
    Lia,
    /// OLIA: paths coupled.
    Olia,
    /// BALIA: paths coupled.
    Balia,
}

/// How a session spreads what it sends over its paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScenarioPathScheduler {
    /// Free paths first, then by round trip.
    FreeFirst,
    /// By round trip.
    LowestRtt,
    /// Earliest completion first.
    Ecf,
    /// Everything on every path.
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
        assert_eq!(transport("").unwrap().len(), 0);
        assert!(transport("congestion = \"vegas\"").is_err());
    }
}
