//! `[acks]`: how often D2TP acknowledges, and where those of Wi-Fi may travel.

use serde::Deserialize;

/// Settings of both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Acks {
    /// Fewer as the window grows; else one for every second packet (simulator only).
    pub thin: bool,
    /// Where those of a link with a medium may travel besides.
    pub offload: Offload,
}

impl Default for Acks {
    fn default() -> Acks {
        Acks {
            thin: true,
            offload: Offload::Where(AcksPlacement::Free),
        }
    }
}

/// Where ACKs may travel besides the link they belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Offload {
    /// Nowhere, or on free links.
    Where(AcksPlacement),
    /// On those that cost something too, so many bytes a second of them.
    Paid(u64),
}

/// The word for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AcksPlacement {
    /// Nowhere.
    Never,
    /// On free links.
    Free,
}

impl Offload {
    /// The value as the command line of `cedos get` and `cedos prox` has it.
    pub fn word(self) -> String {
        match self {
            Offload::Where(AcksPlacement::Never) => "never".to_owned(),
            Offload::Where(AcksPlacement::Free) => "free".to_owned(),
            Offload::Paid(bytes) => bytes.to_string(),
        }
    }
}
