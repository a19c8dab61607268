//! `[acks]`: how often D2TP acknowledges, and which links may carry ACKs of Wi-Fi.

use serde::Deserialize;

/// The ACK settings of both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Acks {
    /// Whether there are fewer ACKs as the window grows; otherwise one for every second packet
    /// (simulator only).
    pub thin: bool,
    /// The other links that may carry ACKs of a link with a shared medium.
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

/// The links that may carry ACKs of another link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Offload {
    /// No link, or free links.
    Where(AcksPlacement),
    /// Metered links as well, with this many bytes of ACKs per second.
    Paid(u64),
}

/// The placement as a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AcksPlacement {
    /// ACKs use their own link only.
    Never,
    /// ACKs use their own link and free links.
    Free,
}

impl Offload {
    /// The value for the command lines of `cedos get` and `cedos prox`.
    pub fn word(self) -> String {
        match self {
            Offload::Where(AcksPlacement::Never) => "never".to_owned(),
            Offload::Where(AcksPlacement::Free) => "free".to_owned(),
            Offload::Paid(bytes) => bytes.to_string(),
        }
    }
}
