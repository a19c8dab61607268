//! How much data a program wants buffered ahead: `struct d2tp_rcvbufth`, the value of
//! `D2TP_SO_RCVBUFTH`.

use d2tp_sched::RefillThresholds;
use serde::{Deserialize, Serialize};

use crate::errno::{CallResult, Errno};
use crate::header::D2tpRcvbufth;

/// The most bytes that are buffered ahead for one socket. Higher: bridges longer outages, and takes
/// as much memory; twice as much if pieces are short.
pub(crate) const AHEAD_BYTES_MAX: u64 = 64 * 1024 * 1024; // a guess: 20 minutes of audio, 4 of video at 2 Mb/s

/// The largest threshold that is a time, in milliseconds: a day.
const SPAN_MS_MAX: u64 = 86_400_000;

/// Thresholds as the program set them: `struct d2tp_rcvbufth`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RcvbufThresholds {
    pub(crate) low: u64,
    pub(crate) high: u64,
    pub(crate) unit: RcvbufUnit,
    /// The rate at which the program reads, in bytes per second; 0: measured.
    pub(crate) rate: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RcvbufUnit {
    Bytes,
    Ms,
}

/// Units by number: `D2TP_RCVBUFTH_BYTES`, `D2TP_RCVBUFTH_MS`.
const UNITS: [RcvbufUnit; 2] = [RcvbufUnit::Bytes, RcvbufUnit::Ms];

/// The size of `struct d2tp_rcvbufth` in bytes.
const LEVELS_BYTES: usize = size_of::<D2tpRcvbufth>();

impl RcvbufThresholds {
    /// Parses the structure of C; `None`: no thresholds.
    pub(crate) fn of_bytes(value: &[u8]) -> CallResult<Option<RcvbufThresholds>> {
        let value: [u8; LEVELS_BYTES] = value.try_into().map_err(|_| Errno(libc::EINVAL))?;
        let long = |at: usize| u64::from_ne_bytes(value[at..at + 8].try_into().expect("eight"));
        let short = |at: usize| u32::from_ne_bytes(value[at..at + 4].try_into().expect("four"));
        let unit = UNITS.get(short(16) as usize).ok_or(Errno(libc::EINVAL))?;
        let levels = RcvbufThresholds {
            low: long(0),
            high: long(8),
            unit: *unit,
            rate: short(20),
        };
        if levels.high == 0 && levels.low == 0 {
            return Ok(None);
        }
        levels
            .is_valid()
            .then_some(Some(levels))
            .ok_or(Errno(libc::EINVAL))
    }

    pub(crate) fn is_valid(&self) -> bool {
        let most = match self.unit {
            RcvbufUnit::Bytes => AHEAD_BYTES_MAX,
            RcvbufUnit::Ms => SPAN_MS_MAX,
        };
        self.low <= self.high && (1..=most).contains(&self.high)
    }

    /// The structure for C.
    pub(crate) fn to_bytes(levels: Option<RcvbufThresholds>) -> Vec<u8> {
        let Some(levels) = levels else {
            return vec![0; LEVELS_BYTES];
        };
        let unit = UNITS.iter().position(|unit| *unit == levels.unit);
        let mut bytes = Vec::with_capacity(LEVELS_BYTES);
        bytes.extend(levels.low.to_ne_bytes());
        bytes.extend(levels.high.to_ne_bytes());
        bytes.extend((unit.unwrap_or(0) as u32).to_ne_bytes());
        bytes.extend(levels.rate.to_ne_bytes());
        bytes
    }

    /// The thresholds in bytes, for a program that reads at this rate.
    pub(crate) fn thresholds(&self, bytes_per_s: f64) -> RefillThresholds {
        let bytes = |level: u64| {
            let bytes = match self.unit {
                RcvbufUnit::Bytes => level,
                RcvbufUnit::Ms => (level as f64 / 1_000.0 * bytes_per_s) as u64,
            };
            bytes.min(AHEAD_BYTES_MAX)
        };
        RefillThresholds {
            low_bytes: bytes(self.low),
            // For a program that hardly reads, a time would be zero bytes.
            high_bytes: bytes(self.high).max(1),
        }
    }
}
