//! The papers' results, each of which can be repeated as a run.
//!
//! ```text
//!  lab/repro/ID.toml ─▶ rows.rs ─┬▶ experiment/: scenario × variants, metrics ─┐
//!                                └▶ runners.rs ─▶ podcasts.rs, …               ├─▶ figures
//!                                      measured.rs: by the bench program       │
//!                                      emulated.rs: by `cedos lab run`         │
//!                                                                              │
//!                                  mark.rs: conditions on the figures ─────────┴──▶ one JSON object
//!                                                               results.rs: docs/results.md of kept results
//! ```
//!
//! A row that cannot be run yet is listed as such; a run never makes up a figure.

pub mod applications;
mod emulated;
mod energy;
pub mod experiment;
pub mod figures;
pub mod holes;
pub mod mark;
mod measured;
mod mobility;
mod over_seeds;
mod plane;
pub mod plot;
mod podcast_commutes;
mod podcast_weeks;
mod podcasts;
pub mod prediction;
pub mod reproduced;
pub mod results;
pub mod rows;
pub mod runner;
pub mod runners;
mod schedules;
mod subway;
pub mod unmodified;
mod video;
mod waiting;
