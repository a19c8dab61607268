//! What D-Lock asks of a machine: to be woken at a time, and not to sleep while data flows.
//!
//! ```text
//!  Lock::vigil (d2tp-sched) ─▶ Keeper ─▶ Machine ─▶ alarms: CLOCK_BOOTTIME_ALARM
//!                                │          │        hold:  an inhibitor of logind's
//!        the device's agent ◀─ Notice ◀─────┘        sleep: logind's PrepareForSleep
//! ```
//!
//! Whoever has flows asks [`Lock::vigil`](d2tp_sched::WakePlanner::plan) at every change, gives what it says
//! to [`WakeController::apply`], and awaits [`WakeController::next_event`]: on [`PowerEvent::AlarmFired`] it looks for links or begins.
//! [`LinuxMachine`] is one [`SleepingMachine`]; the trait says what another has to do.

mod alarm;
mod linux;
mod logind;
mod machine;
mod wake_controller;

pub use alarm::{Alarm, WakeSupport};
pub use linux::LinuxMachine;
pub use logind::{Inhibitor, Logind, LogindError};
pub use machine::{PowerEvent, SleepingMachine, WakeReason};
pub use wake_controller::WakeController;
