//! What a radio consumes: a state machine that is told when bytes passed, and answers in joules.
//!
//! ```text
//!         first byte       bytes keep coming        none for a while
//!  idle ──────────────▶ ramp ─────▶ stage 0 ─────▶ stage 1 ─────▶ … ─────▶ idle
//!                                      ▲  a byte     │              │
//!                                      └─────────────┴──────────────┘
//! ```
//!
//! The stages after the last byte are the radio's tail: a cellular radio stays awake for seconds, so
//! a trickle can cost as much as a download. Constants are those that others measured
//! ([`radios`]); they differ between phones by more than between ways to use them. A [`Phone`] is what is
//! around the radio while it waits: asleep, awake, or looking for Wi-Fi.
#![forbid(unsafe_code)]

mod meter;
mod phone;
pub mod phones;
pub mod radios;

pub use d2tp_time::{Span, Time};
pub use meter::{Energy, RadioEnergyMeter};
pub use phone::Phone;

/// Power for a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerStage {
    /// How long.
    pub span: Span,
    /// How much.
    pub milliwatts: f64,
}

/// The power model of a radio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Radio {
    /// Which radio was measured, and by whom.
    pub name: &'static str,
    /// What it consumes when it has carried nothing for long.
    pub idle_milliwatts: f64,
    /// From the first byte in idle until it carries. The byte is not delayed by it here: a link's
    /// model has the delay.
    pub ramp: PowerStage,
    /// From a byte on, one after the other, as long as no other comes: the first is the radio at work,
    /// the others its tail.
    pub stages: &'static [PowerStage],
    /// For each byte from the device.
    pub up_nanojoules: f64,
    /// For each byte to the device.
    pub down_nanojoules: f64,
}

/// Which way bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RadioDirection {
    /// From the device.
    Up,
    /// To the device.
    Down,
}
