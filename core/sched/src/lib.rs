//! D2Sched: which flow goes over which link now, or waits, and why.
//!
//! ```text
//!  Flow (bytes, time left, policy) ──────┐
//!  History (a link: class, rates, spells) ┴─▶ Scheduler ─▶ Roster: who is on which link, and who pays
//!                                                └──▶ Why, Promise
//! ```
//!
//! Pure functions of plain facts: no packet, no clock, no socket is seen here. The device asks
//! again every second and at every change. Where energy counts, [`thrift`] says which links are worth
//! their joules.

mod buffer;
mod choice;
mod diary;
mod forecast;
mod history;
mod lock;
mod outlook;
mod pace;
mod promise;
mod published;
mod roster;
mod scheduler;
pub mod thrift;
mod why;
mod written;

pub use buffer::{Buffer, Stream, Switching, Thresholds};
pub use choice::{
    Choice, Class, FREE_RATE_FIRST_BYTES_PER_S, Hold, IfLate, METERED_RATE_FIRST_BYTES_PER_S, Need,
    Policy, SIZE_UNKNOWN_BYTES, UnknownWord, Way, fastest_working, in_words,
};
pub use forecast::{Diary, Forecast, GRID_M, Hint, Lengths, Place, Spot};
pub use history::{History, Past, Rates, Sight, Spell};
pub use lock::{Lock, Periods, Standby, Vigil};
pub use outlook::Outlook;
pub use pace::{Pace, RATE_FIRST};
pub use promise::Promise;
pub use roster::{Flow, Roster, Share};
pub use scheduler::{Mode, PROBE_BYTES, Scheduler};
pub use why::Why;
pub use written::NotAForecast;
