//! Options from `index.js`: numbers of `d2tp.h`; absent options are not set.

use std::time::Duration;

use d2tp_sockets::{
    BufferThresholds, ConnectSettings, ConnectionPersist, D2tpConnection, D2tpStream, LatePolicy,
    PayPolicy, ThresholdUnit,
};
use napi_derive::napi;
use nix::errno::Errno;

use crate::fault::CallFault;

/// Options of a connection; `index.js` has converted names to numbers and checked that none is
/// negative.
#[napi(object)]
pub struct NodeOptions {
    /// Seconds from now, 0 for none.
    pub deadline: Option<f64>,
    /// Bytes, 0 if unknown.
    pub size: Option<f64>,
    pub policy: Option<u32>,
    pub budget: Option<f64>,
    pub priority: Option<f64>,
    pub if_late: Option<u32>,
    pub persist: Option<u32>,
    /// Low, high, unit, rate.
    pub buffer: Option<Vec<f64>>,
}

/// Finds the value with this number.
fn numbered<T: Copy>(option: &str, all: &[T], number: u32) -> Result<T, CallFault> {
    let invalid = || CallFault::new(Errno::EINVAL, format!("{option}: Invalid argument"));
    all.get(number as usize).copied().ok_or_else(invalid)
}

fn policy(number: u32) -> Result<PayPolicy, CallFault> {
    use PayPolicy::*;
    numbered(
        "policy",
        &[FreeOnly, FreeFirst, Balanced, Fast, Any],
        number,
    )
}

fn if_late(number: u32) -> Result<LatePolicy, CallFault> {
    use LatePolicy::*;
    numbered("ifLate", &[Cell, Wait, Fail], number)
}

fn within(seconds: f64) -> Option<Duration> {
    (seconds > 0.0).then(|| Duration::from_secs(seconds as u64))
}

fn buffer(numbers: &[f64]) -> Result<Option<BufferThresholds>, CallFault> {
    let [low, high, unit, rate] = *numbers else {
        return Err(CallFault::new(Errno::EINVAL, "buffer: Invalid argument"));
    };
    let unit = numbered(
        "buffer",
        &[ThresholdUnit::Bytes, ThresholdUnit::Ms],
        unit as u32,
    )?;
    let thresholds = BufferThresholds {
        low: low as u64,
        high: high as u64,
        unit,
        rate: rate as u32,
    };
    Ok((thresholds.low > 0 || thresholds.high > 0).then_some(thresholds))
}

impl NodeOptions {
    /// The settings of a new connection.
    pub fn settings(&self, proxy: &str) -> Result<ConnectSettings, CallFault> {
        let mut settings = ConnectSettings {
            deadline: self.deadline.and_then(within),
            size: self.size.map(|bytes| bytes as u64),
            budget: self.budget.map(|bytes| bytes as u64),
            // The socket refuses too large a number.
            priority: self.priority.unwrap_or(0.0) as u8,
            proxy: (!proxy.is_empty()).then(|| proxy.to_owned()),
            ..ConnectSettings::default()
        };
        if let Some(number) = self.policy {
            settings.policy = policy(number)?;
        }
        if let Some(number) = self.if_late {
            settings.if_late = if_late(number)?;
        }
        if let Some(number) = self.persist {
            use ConnectionPersist::*;
            settings.persist = numbered("persist", &[No, Written, Open], number)?;
        }
        if let Some(numbers) = &self.buffer {
            settings.buffer = buffer(numbers)?;
        }
        Ok(settings)
    }

    /// Changes options of an existing connection.
    pub fn set(&self, stream: &D2tpStream) -> Result<(), CallFault> {
        if self.priority.is_some() || self.persist.is_some() {
            let words = "priority and persist are set before a connection is made";
            return Err(CallFault::new(Errno::EISCONN, words));
        }
        if let Some(seconds) = self.deadline {
            stream.set_deadline(within(seconds))?;
        }
        if let Some(bytes) = self.size {
            stream.set_size(Some(bytes as u64))?;
        }
        if let Some(number) = self.policy {
            stream.set_policy(policy(number)?)?;
        }
        if let Some(bytes) = self.budget {
            stream.set_budget(Some(bytes as u64))?;
        }
        if let Some(number) = self.if_late {
            stream.set_if_late(if_late(number)?)?;
        }
        if let Some(numbers) = &self.buffer {
            stream.set_buffer(buffer(numbers)?)?;
        }
        Ok(())
    }
}
