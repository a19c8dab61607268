//! The score of a policy: recorded links, jobs with deadlines, and the least that anybody could have
//! paid who knew the future.
//!
//! ```text
//!  trace ─▶ course.rs ─┬─▶ player.rs ◀─▶ d2tp_sched::Scheduler   met, metered, late
//!  jobs.rs ────────────┴─▶ optimum.rs (a linear program)         the least metered bytes
//! ```
//!
//! A fluid: no packet, no round trip, no handshake. A link carries what its trace says, at once, and
//! what it carries when nothing is given to it is lost. The policy is the device's own code, and is
//! told what a device can measure: which links are up, and what those in use carried.

pub mod altered;
pub mod course;
pub mod jobs;
pub mod optimum;
pub mod player;
pub mod pledge;
pub mod sheet;
