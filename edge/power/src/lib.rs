//! The requests of D-Lock to a machine: to be woken at a time, and not to sleep while data moves.
//!
//! ```text
//!  WakePlanner (d2tp-sched) ─▶ WakeController ─▶ SleepingMachine ─▶ alarms: CLOCK_BOOTTIME_ALARM
//!        │                          │                         hold:  an inhibitor of logind
//!      the device's agent ◀── PowerEvent                      sleep: logind's PrepareForSleep
//! ```
//!
//! The agent calls [`WakePlanner::plan`](d2tp_sched::WakePlanner::plan) at every change, passes the
//! plan to [`WakeController::apply`], and awaits [`WakeController::next_event`]: on
//! [`PowerEvent::AlarmFired`] it scans for links or begins a flow. [`LinuxMachine`] implements
//! [`SleepingMachine`]; the trait describes what other platforms need.
//!
//! Beside that, what the scheduler needs to save energy: what the machine runs on
//! ([`read_power_source`]), and what radios take ([`RadioProfiles`]).

mod alarm;
mod linux;
mod logind;
mod machine;
mod power_supply;
mod radio_profile;
mod wake_controller;

pub use alarm::{Alarm, WakeSupport};
pub use linux::LinuxMachine;
pub use logind::{Inhibitor, Logind, LogindError};
pub use machine::{PowerEvent, SleepingMachine, WakeReason};
pub use power_supply::{POWER_SUPPLIES, read_power_source};
pub use radio_profile::{
    BUILT_IN_RADIOS, RadioKind, RadioProfile, RadioProfileError, RadioProfiles, RadioStage,
};
pub use wake_controller::WakeController;
