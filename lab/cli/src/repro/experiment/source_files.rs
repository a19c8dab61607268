//! Files to which rows refer: scenarios and their traces, beside a row's own file or in this
//! program.

use anyhow::Context;
use cedos_lab_scenario::ScenarioFault;
use std::path::PathBuf;

macro_rules! scenarios {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../../../scenarios/", $name)))),*]
    };
}

macro_rules! traces {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../../../traces/", $name)))),*]
    };
}

/// Built-in scenarios to which rows refer.
const SCENARIOS: &[(&str, &str)] = scenarios![
    "bloat-evdo-a.toml"
    "bloat-evdo-b.toml"
    "bloat-hspa.toml"
    "bloat-lte.toml"
    "readycast-week.toml"
    "two-paths-even-far.toml"
    "two-paths-even.toml"
    "two-paths-uneven-far.toml"
    "two-paths-uneven-near.toml"
    "two-paths-uneven.toml"
];

/// Traces that the included scenarios name.
const TRACES: &[(&str, &str)] = traces![
    "cell-evdo-a.csv"
    "cell-evdo-b.csv"
    "cell-hspa.csv"
    "cell-lte.csv"
];

/// The places where a row's files are searched.
#[derive(Debug, Default)]
pub struct SourceFiles {
    /// The folder of the row's own file; `None` for rows of this program.
    pub folder: Option<PathBuf>,
}

impl SourceFiles {
    /// The text of a scenario or a trace: from the row's folder, or the built-in one of this name.
    ///
    /// # Errors
    /// There is no such file.
    pub fn read(&self, name: &str) -> anyhow::Result<String> {
        let beside = self.folder.as_ref().map(|folder| folder.join(name));
        if let Some(path) = beside.filter(|path| path.exists()) {
            return std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()));
        }
        let last = name.rsplit('/').next().unwrap_or(name);
        let known = SCENARIOS.iter().chain(TRACES);
        let found = known.clone().find(|(file, _)| *file == last);
        found.map(|(_, text)| (*text).to_owned()).with_context(|| {
            let names: Vec<_> = known.map(|(file, _)| *file).collect();
            let nearest = cedos_lab_scenario::suggestion(last, names.iter().copied());
            format!(
                "there is no file {name} beside the row's file{nearest}; this program has {}",
                names.join(", ")
            )
        })
    }

    /// The text of a trace, with the error type that scenario readers expect.
    ///
    /// # Errors
    /// There is no such file.
    pub fn open(&self, name: &str) -> Result<String, ScenarioFault> {
        self.read(name).map_err(|fault| ScenarioFault {
            file: name.to_owned(),
            fault: fault.to_string(),
        })
    }
}
