//! Runners for measurements that are more than a scenario, its variants and metrics: models,
//! programs, random walks.
//!
//! A row's file names its runner, and contains the claim, the conditions, the marks and the charts.

use super::plot::Chart;
use super::runner::Measured;
use super::{
    applications, energy, holes, mobility, plane, podcast_commutes, podcast_weeks, podcasts,
    prediction, schedules, subway, unmodified, video, waiting,
};
use anyhow::anyhow;
use serde_json::Value;

/// A runner, with the name that row files use.
pub struct NamedRunner {
    name: &'static str,
    /// Measures the row.
    pub run: fn() -> anyhow::Result<Measured>,
    /// Draws charts of figures that are too many for a file: ours, and those for comparison.
    pub charts: Option<fn(&Value, &Value) -> Vec<Chart>>,
    /// Formats `ours.table` and `baseline.table` as a table for people.
    pub table: Option<fn(&Value, &Value) -> String>,
}

const fn runner(name: &'static str, run: fn() -> anyhow::Result<Measured>) -> NamedRunner {
    NamedRunner {
        name,
        run,
        charts: None,
        table: None,
    }
}

/// Every runner.
static RUNNERS: &[NamedRunner] = &[
    NamedRunner {
        table: Some(applications::table),
        ..runner("applications", applications::emulate)
    },
    runner("energy", energy::simulate),
    runner("holes", holes::simulate),
    runner("holes-lab", holes::emulate),
    runner("holes-patched", holes::emulate_patched),
    runner("holes-tunnel", holes::emulate_tunnel),
    runner("mobility", mobility::simulate),
    runner("mobility-lab", mobility::on_real_sockets),
    NamedRunner {
        charts: Some(plane::charts),
        ..runner("plane", plane::simulate)
    },
    runner("podcast-commutes", podcast_commutes::simulate),
    runner("podcast-weeks", podcast_weeks::simulate),
    runner("podcasts", podcasts::simulate),
    runner("prediction", prediction::simulate),
    runner("schedule-poor-wifi", schedules::poor_wifi),
    runner("schedule-poor-wifi-lab", schedules::lab::poor_wifi),
    runner("schedule-cellular", schedules::cellular_alone),
    runner("schedule-cellular-lab", schedules::lab::cellular_alone),
    runner("schedule-urgent", schedules::one_urgent),
    runner("schedule-urgent-lab", schedules::lab::one_urgent),
    runner("subway", subway::simulate),
    runner("subway-lab", subway::emulate),
    runner("unmodified", unmodified::emulate),
    runner("video", video::simulate),
    runner("waiting", waiting::simulate),
];

/// The runner of this name.
///
/// # Errors
/// There is no such runner.
pub fn find(name: &str) -> anyhow::Result<&'static NamedRunner> {
    RUNNERS.iter().find(|one| one.name == name).ok_or_else(|| {
        let names = || RUNNERS.iter().map(|one| one.name);
        let nearest = cedos_lab_scenario::suggestion(name, names());
        let all: Vec<_> = names().collect();
        anyhow!(
            "there is no runner `{name}`{nearest}; there are {}",
            all.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::{RUNNERS, find};
    use crate::repro::rows;

    #[test]
    fn every_runner_is_of_a_row_and_every_rows_runner_is_there() {
        let venues = rows::all().iter().flat_map(|row| &row.venues);
        let named: Vec<&str> = venues
            .filter_map(|(_, how)| how.runner.as_deref())
            .collect();
        for name in &named {
            find(name).unwrap();
        }
        for runner in RUNNERS {
            assert!(named.contains(&runner.name), "{}", runner.name);
        }
        let fault = find("subwey").err().unwrap().to_string();
        assert!(fault.contains("did you mean `subway`?"), "{fault}");
    }
}
