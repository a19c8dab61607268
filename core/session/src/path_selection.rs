//! Which paths an application wants its messages or a flow's bytes on, where a session has several.
//!
//! ```text
//!  reports   ── steadiest ─▶ the path that has had no hole, though others may be faster
//!  commands  ── each ──────▶ every path: the first copy to arrive counts
//!  the rest  ── any ───────▶ as the path scheduler has it
//! ```
//!
//! These are the generic principles of Super-aggregation (Tsao and Sivakumar, CoNEXT 2009, §5.1): what is small
//! and must come in time leaves by the link that is there, what must not be lost by all of them. Each end
//! decides for what it sends; no path carries more than it may.

/// Which paths carry a flow's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathSelection {
    /// The path scheduler chooses.
    #[default]
    Any,
    /// The path that is least likely to fail: no outage in the last minute, not half duplex, few
    /// losses, then the shortest round trip.
    Steadiest,
    /// A copy on every path.
    Each,
}
