//! The score of a policy: recorded links, jobs with deadlines, and the clairvoyant optimum.
//!
//! ```text
//!  trace ─▶ course.rs ─┬─▶ player.rs ◀─▶ d2tp_sched::Scheduler   met, metered, late
//!  jobs.rs ────────────┴─▶ optimum.rs (a linear program)         the least metered bytes
//! ```
//!
//! The model is a fluid without packets, round trips and handshakes. A link carries the rate of its
//! trace at once, and unused capacity is lost. The policy is the device's own code, and gets what a
//! device can measure: which links are up, and what the links in use carried.

pub mod altered;
pub mod course;
pub mod jobs;
pub mod optimum;
pub mod player;
pub mod pledge;
pub mod sheet;
