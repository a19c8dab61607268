//! How exposed the packaged services are, by systemd's own measure (systemd-analyze(1), `security`): from 0.0 to 10.0.
//!
//! The agent's unit is a user's: what would need namespaces is in a drop-in, for some systems give users none.

use std::fmt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// A unit, the drop-in that it is measured with, and the most it may have, in tenths.
const UNITS: [(&str, Option<&str>, u32); 4] = [
    ("cedos-prox.service", None, 20),
    ("cedos-queues.service", None, 20),
    ("cedos-agent.service", Some("cedos-agent-hardened.conf"), 20),
    // Without a umask: downloads are for whom the user has them.
    ("cedos-agent.service", None, 63),
];

/// What was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitExposure {
    /// The unit: `cedos-agent.service with cedos-agent-hardened.conf`.
    pub unit: String,
    /// The exposure of the unit, in tenths.
    pub tenths: u32,
    /// The most it may be.
    pub tenths_max: u32,
}

impl UnitExposure {
    /// The unit and its figures, from 0.0 to 10.0.
    pub fn to_json(&self) -> Value {
        json!({
            "unit": self.unit,
            "exposure": f64::from(self.tenths) / 10.0,
            "at_most": f64::from(self.tenths_max) / 10.0,
        })
    }
}

impl fmt::Display for UnitExposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.tenths > self.tenths_max {
            "FAILED"
        } else {
            "ok    "
        };
        let (tenths, most) = (
            f64::from(self.tenths) / 10.0,
            f64::from(self.tenths_max) / 10.0,
        );
        write!(
            f,
            "{verdict}  {tenths:>5.1}  exposure of {} (at most {most:.1})",
            self.unit
        )
    }
}

/// Measures all units; none where systemd's tool is missing.
pub fn check(root: &Path) -> Result<Option<Vec<UnitExposure>>> {
    let is_there = Command::new("systemd-analyze")
        .arg("--version")
        .output()
        .is_ok();
    if !is_there {
        return Ok(None);
    }
    let units = root.join("packaging/systemd");
    let measured = UNITS.iter().map(|(unit, more, tenths_max)| {
        let mut text = std::fs::read_to_string(units.join(unit)).context(*unit)?;
        let mut name = (*unit).to_owned();
        if let Some(more) = more {
            name = format!("{unit} with {more}");
            text = with_drop_in(
                &text,
                &std::fs::read_to_string(units.join(more)).context(*more)?,
            );
        }
        Ok(UnitExposure {
            unit: name,
            tenths: exposure(unit, &text)?,
            tenths_max: *tenths_max,
        })
    });
    measured.collect::<Result<_>>().map(Some)
}

/// The unit as systemd reads it with the drop-in: a section may come twice.
fn with_drop_in(unit: &str, more: &str) -> String {
    format!("{unit}\n{more}")
}

/// Measures a unit.
fn exposure(unit: &str, text: &str) -> Result<u32> {
    let folder = std::env::temp_dir().join(format!("cedos-units-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let file = folder.join(unit);
    std::fs::write(&file, text)?;
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager"])
        .arg(&file)
        .output();
    std::fs::remove_dir_all(&folder)?;
    let output = output?;
    let told = String::from_utf8_lossy(&output.stdout);
    tenths_of(&told).with_context(|| {
        let error = String::from_utf8_lossy(&output.stderr);
        format!("systemd-analyze says nothing of {unit}: {error}")
    })
}

/// The figure in the last line: `→ Overall exposure level for cedos-prox.service: 1.5 OK 🙂`.
fn tenths_of(told: &str) -> Option<u32> {
    let (_, level) = told.lines().last()?.rsplit_once(": ")?;
    let figure: f64 = level.split_whitespace().next()?.parse().ok()?;
    Some((figure * 10.0).round() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figure_is_read_from_the_last_line() {
        let told =
            "✗ PrivateNetwork= …\n\n→ Overall exposure level for cedos-prox.service: 1.5 OK 🙂\n";
        assert_eq!(tenths_of(told), Some(15));
        assert_eq!(tenths_of("Failed"), None);
    }
}
