//! The application's choice of paths for its messages or a flow, if a session has several.
//!
//! ```text
//!  reports   ── steadiest ─▶ the path without outages, although others may be faster
//!  commands  ── each ──────▶ every path: the first copy to arrive counts
//!  the rest  ── any ───────▶ as the path scheduler decides
//! ```
//!
//! These are the generic principles of Super-aggregation (Tsao and Sivakumar, CoNEXT 2009, §5.1):
//! small and urgent data uses the most reliable link, and data that must not be lost uses all of
//! them. Each end decides for the data that it sends; grants and path status still apply.

/// The paths that carry a flow's data or a message.
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
