//! The papers' results, each as a run that anybody can repeat.
//!
//! ```text
//!  lab/repro/ID.toml ─▶ rows.rs ─┬▶ experiment/: scenario × variants, metrics ─┐
//!                                └▶ runners.rs ─▶ podcasts.rs, …               ├─▶ figures
//!                                      measured.rs: by the bench program       │
//!                                      emulated.rs: by `cedos lab run`         │
//!                                                                              │
//!                                  mark.rs: what must hold of them ────────────┴──▶ one JSON object
//!                                                               results.rs: docs/results.md of those kept
//! ```
//!
//! A row that cannot be run yet is listed as such; a run never invents a figure.

pub mod applications;
mod emulated;
mod energy;
pub mod experiment;
pub mod figures;
mod holes;
pub mod mark;
mod measured;
mod mobility;
mod plane;
pub mod plot;
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
