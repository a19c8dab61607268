//! What D-Lock asks of a machine: to be woken at a time, and not to sleep while data flows.
//!
//! ```text
//!  Lock::vigil (d2tp-sched) ─▶ Keeper ─▶ Machine ─▶ alarms: CLOCK_BOOTTIME_ALARM
//!                                │          │        hold:  an inhibitor of logind's
//!        the device's agent ◀─ Notice ◀─────┘        sleep: logind's PrepareForSleep
//! ```
//!
//! Whoever has flows asks [`Lock::vigil`](d2tp_sched::WakePlanner::plan) at every change, gives what it says
//! to [`Keeper::keep`], and awaits [`Keeper::next`]: on [`Notice::Rings`] it looks for links or begins.
//! [`Linux`] is one [`Machine`]; the trait says what another has to do.

mod alarm;
mod keeper;
mod linux;
mod logind;
mod machine;

pub use alarm::{Alarm, Wakes};
pub use keeper::Keeper;
pub use linux::Linux;
pub use logind::{Inhibitor, Logind, LogindError};
pub use machine::{Bell, Machine, Notice};
