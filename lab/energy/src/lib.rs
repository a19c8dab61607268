//! Energy models of radios: a state machine that is given the times of bytes, and computes joules.
//!
//! ```text
//!         first byte       bytes keep coming        none for a while
//!  idle ──────────────▶ ramp ─────▶ stage 0 ─────▶ stage 1 ─────▶ … ─────▶ idle
//!                                      ▲  a byte     │              │
//!                                      └─────────────┴──────────────┘
//! ```
//!
//! The stages after the last byte are the radio's tail: a cellular radio stays awake for seconds,
//! so a little traffic can cost as much as a download. The constants were measured by others
//! ([`radios`]); they differ between phones more than between ways to use them. A [`Phone`] models
//! the rest of the device while it waits: asleep, awake, or scanning for Wi-Fi.
#![forbid(unsafe_code)]

mod meter;
mod phone;
pub mod phones;
pub mod radios;
mod run_meter;

pub use d2tp_time::{Span, Time};
pub use meter::{Energy, RadioEnergyMeter};
pub use phone::Phone;
pub use run_meter::RunEnergyMeter;

/// A constant power for some time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerStage {
    /// The length of the stage.
    pub span: Span,
    /// The power during the stage.
    pub milliwatts: f64,
}

/// The power model of a radio.
#[derive(Clone, Debug, PartialEq)]
pub struct Radio {
    /// The name of its profile.
    pub name: String,
    /// The power when it has carried nothing for long.
    pub idle_milliwatts: f64,
    /// The stage from the first byte in idle until it carries data. It does not delay the byte
    /// here; a link's model has the delay.
    pub ramp: PowerStage,
    /// The stages after a byte, one after the other, as long as no other byte follows. The first
    /// one is the radio at work, the others are its tail.
    pub stages: Vec<PowerStage>,
    /// Energy for each byte sent by the device.
    pub up_nanojoules: f64,
    /// Energy for each byte received by the device.
    pub down_nanojoules: f64,
}

/// The direction of bytes on a radio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RadioDirection {
    /// Bytes from the device.
    Up,
    /// Bytes to the device.
    Down,
}
