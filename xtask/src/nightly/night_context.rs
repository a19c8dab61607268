//! What every part of a night is told.

/// What all parts are told.
pub struct NightContext {
    /// Chooses scenarios, points and mutants.
    pub salt: u64,
    /// Random scenarios at most.
    pub seeds: u64,
    /// Random times at most of each scenario of networks that carry nothing.
    pub times: u64,
    /// Kill points at most.
    pub kill_points: u64,
    /// Whether instruction counts are kept.
    pub keep_counts: bool,
    /// Whether there is time to build programs optimised.
    pub is_long: bool,
}
