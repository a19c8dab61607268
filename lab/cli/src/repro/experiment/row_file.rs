//! The format of `lab/repro/ID.toml`: one result of a paper.
//!
//! The top level of a file applies to every venue; `[sim]`, `[lab]` and `[tunnel]` contain the differences.
//! Files are strict: an unknown key is an error, which suggests a similar key.

use crate::repro::runner::RowVenue;
use anyhow::{Context, anyhow, bail, ensure};
use cedos_lab_scenario::{Expression, explain};
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::{Table, Value};

use super::chart_template::ChartTemplate;
use super::template;

/// A result of one of the papers, and how it is measured in each venue.
#[derive(Debug)]
pub struct ResultRow {
    /// `C`: Cedos, `M`: multipath mobility, `D`: DRWA, `E`: Epsilon, `S`: super-aggregation; a
    /// word: a measurement beside the papers.
    pub id: String,
    /// The claim of the paper.
    pub claim: String,
    /// The authors' measurements, and contradictions among their own figures.
    pub paper: String,
    /// The venues where it can be run; the first one is the default of `cedos repro ID`.
    pub venues: Vec<(RowVenue, RowExperiment)>,
}

/// How a row is measured in one venue.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowExperiment {
    /// The name of a function that measures the row; without it the row is a scenario.
    #[serde(default)]
    pub runner: Option<String>,
    /// Whether the runner computes a model, without the protocol's code.
    #[serde(default)]
    pub model: bool,
    /// Arguments of the bench program, whose JSON is then the report.
    #[serde(default)]
    pub bench: Vec<String>,
    /// The scenario in the form of scenario files; `file` names one to start from.
    #[serde(default)]
    pub scenario: Option<Table>,
    /// In the simulator: settings of the two ends that scenario files do not have.
    #[serde(default)]
    pub ends: Table,
    /// Names with values: numbers, texts, booleans or lists.
    #[serde(default)]
    pub values: Table,
    /// Names with expressions.
    #[serde(default)]
    pub computed: BTreeMap<String, String>,
    /// In the simulator: with how many seeds, from 1 on, the whole is run. Figures are means; the scenario's own seed does not
    /// count.
    #[serde(default = "one_seed")]
    pub seeds: u32,
    /// The axes: lists of equal length that vary together. All combinations of axes are run.
    #[serde(default, rename = "axis")]
    pub axes: Vec<Table>,
    /// On real sockets: whether all variants of a case run at once.
    #[serde(default)]
    pub together: bool,
    /// The variants that are run in every case.
    #[serde(default, rename = "variant")]
    pub variants: Vec<RowVariant>,
    /// Metrics of a run, by name: expressions over its report.
    #[serde(default)]
    pub run: BTreeMap<String, String>,
    /// Conditions that each run must satisfy for the row to be valid.
    #[serde(default)]
    pub require: Vec<String>,
    /// Our figures: a tree of expressions.
    #[serde(default)]
    pub ours: Option<Value>,
    /// The figures for comparison: a tree of expressions.
    #[serde(default)]
    pub baseline: Option<Value>,
    /// The marks: conditions that our figures must satisfy.
    #[serde(default)]
    pub marks: Vec<MarkTemplate>,
    /// Expressions over our figures: if all are true and the marks hold, our result is better than
    /// the authors'.
    #[serde(default)]
    pub better: Vec<String>,
    /// Expressions over our figures: if any is true, they contradict the authors' claim.
    #[serde(default)]
    pub contradicts: Vec<String>,
    /// Conditions and assumptions.
    #[serde(default)]
    pub conditions: Vec<ConditionTemplate>,
    /// The charts of the row.
    #[serde(default, rename = "chart")]
    pub charts: Vec<ChartTemplate>,
}

/// A variant, which is run in every case.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowVariant {
    /// The variant's name in expressions.
    pub name: String,
    /// Values that differ in this variant.
    #[serde(default)]
    pub set: Table,
    /// On real sockets: `--over` of `cedos lab run`.
    #[serde(default)]
    pub over: Option<String>,
    /// In the simulator: settings of the two ends.
    #[serde(default)]
    pub ends: Table,
    /// The condition for the cases in which the variant is run; all if absent.
    #[serde(default, rename = "if")]
    pub condition: Option<String>,
}

/// A mark, with or without a condition.
#[derive(Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum MarkTemplate {
    /// A comparison of figures.
    Always(String),
    /// A mark that counts only if this is true of the runs.
    If {
        /// An expression over the runs, or over the figures of a runner.
        #[serde(rename = "if")]
        condition: String,
        /// The comparison that must hold.
        mark: String,
    },
}

impl MarkTemplate {
    /// The comparison that must hold.
    pub fn text(&self) -> &str {
        match self {
            MarkTemplate::Always(mark) | MarkTemplate::If { mark, .. } => mark,
        }
    }

    /// Whether the mark counts: its condition, if it has one, is true of these values.
    ///
    /// # Errors
    /// The condition is invalid, or names a value that `facts` does not have.
    pub fn counts(&self, facts: &serde_json::Value) -> anyhow::Result<bool> {
        self.condition()
            .map_or(Ok(true), |condition| template::is_true(condition, facts))
    }

    /// The condition of the mark; `None`: it always counts.
    pub fn condition(&self) -> Option<&str> {
        match self {
            MarkTemplate::Always(_) => None,
            MarkTemplate::If { condition, .. } => Some(condition),
        }
    }
}

/// A sentence about the conditions of a measurement, or an assumption.
#[derive(Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum ConditionTemplate {
    /// A sentence with expressions in braces.
    Always(String),
    /// A sentence that is left out unless an expression is true.
    If {
        /// An expression over the runs, or over the figures of a runner.
        #[serde(rename = "if")]
        condition: String,
        /// The sentence, with expressions in braces.
        text: String,
    },
}

impl ConditionTemplate {
    /// The sentence with the values of its expressions; `None` if it is to be left out.
    ///
    /// # Errors
    /// An expression is invalid, or names a value that `facts` does not have.
    pub fn sentence(&self, facts: &serde_json::Value) -> anyhow::Result<Option<String>> {
        let text = match self {
            ConditionTemplate::Always(text) => text,
            ConditionTemplate::If { condition, text } => {
                if !template::is_true(condition, facts)? {
                    return Ok(None);
                }
                text
            }
        };
        template::text(text, facts).map(Some)
    }
}

/// The names of the venues in a file, in order of preference.
const VENUES: [(&str, RowVenue); 3] = [
    ("sim", RowVenue::Sim),
    ("lab", RowVenue::Lab),
    ("tunnel", RowVenue::Tunnel),
];

impl ResultRow {
    /// Parses the row in this text; `file` is for messages.
    ///
    /// # Errors
    /// The text is not a valid row: the error has the file, the key, and a suggestion.
    pub fn parse(file: &str, text: &str) -> anyhow::Result<ResultRow> {
        let mut shared: Table = text
            .parse()
            .map_err(|fault: toml::de::Error| anyhow!("{file}: {}", explain(&fault)))?;
        let mut own = Vec::new();
        for (name, venue) in VENUES {
            match shared.remove(name) {
                None => {}
                Some(Value::Table(table)) => own.push((name, venue, table)),
                Some(_) => bail!("{file}: {name} is a table: [{name}]"),
            }
        }
        let mut known = |key: &str| match shared.remove(key) {
            Some(Value::String(text)) => Ok(text),
            _ => Err(anyhow!(
                "{file}: `{key}` is missing; a row has id, claim and paper, each a text"
            )),
        };
        let mut row = ResultRow {
            id: known("id")?,
            claim: known("claim")?,
            paper: known("paper")?,
            venues: Vec::new(),
        };
        ensure!(
            !own.is_empty() || shared.is_empty(),
            "{file}: has neither [sim] nor [lab] nor [tunnel], so what else it has says nothing"
        );
        for (name, venue, table) in own {
            let at = || format!("{file}: [{name}]");
            let whole = merged(&shared, table);
            let experiment: RowExperiment = Value::Table(whole)
                .try_into()
                .map_err(|fault| anyhow!("{}", explain(&fault)))
                .with_context(at)?;
            experiment.check(venue).with_context(at)?;
            row.venues.push((venue, experiment));
        }
        Ok(row)
    }

    /// The measurement in this venue.
    pub fn at(&self, venue: RowVenue) -> Option<&RowExperiment> {
        let mut venues = self.venues.iter();
        venues.find(|(at, _)| *at == venue).map(|(_, how)| how)
    }
}

/// Merges the settings of a venue into the shared ones: names are added, conditions are appended,
/// everything else replaces the shared value.
fn merged(shared: &Table, own: Table) -> Table {
    let mut whole = shared.clone();
    for (key, value) in own {
        match (whole.get_mut(&key), value) {
            (Some(Value::Table(whole)), Value::Table(own))
                if ["values", "computed", "run"].contains(&key.as_str()) =>
            {
                whole.extend(own);
            }
            (Some(Value::Array(whole)), Value::Array(own)) if key == "conditions" => {
                whole.extend(own);
            }
            (_, value) => {
                whole.insert(key, value);
            }
        }
    }
    whole
}

/// Without `seeds` the scenario's own is the only one.
const fn one_seed() -> u32 {
    1
}

impl RowExperiment {
    fn check(&self, venue: RowVenue) -> anyhow::Result<()> {
        let data = self.scenario.is_some() || !self.bench.is_empty();
        ensure!(
            data != self.runner.is_some(),
            "a row has either a `scenario` (or `bench`) or a `runner`"
        );
        ensure!(
            !self.model || self.runner.is_some() && venue == RowVenue::Sim,
            "`model` is of a `runner` in [sim]"
        );
        if self.runner.is_some() {
            let unused = [
                ("axis", self.axes.is_empty()),
                ("variant", self.variants.is_empty()),
                ("run", self.run.is_empty()),
                ("ours", self.ours.is_none()),
                ("baseline", self.baseline.is_none()),
            ];
            for (name, absent) in unused {
                ensure!(
                    absent,
                    "a row with a `runner` has no `{name}`: the runner measures it"
                );
            }
        } else {
            ensure!(
                !self.variants.is_empty(),
                "no `variant`: nothing would be run"
            );
            ensure!(self.ours.is_some(), "no `ours`: nothing would be shown");
            ensure!(!self.marks.is_empty(), "no `marks`: it would never hold");
        }
        let has_seeds = self.seeds > 1;
        ensure!(
            self.seeds > 0 && (!has_seeds || venue == RowVenue::Sim && self.scenario.is_some()),
            "`seeds` is of a `scenario` in [sim], 1 at least"
        );
        for (n, variant) in self.variants.iter().enumerate() {
            let name = &variant.name;
            let twice = self.variants[..n].iter().any(|other| other.name == *name);
            ensure!(!twice, "two variants are called {name}");
            let is_real = venue != RowVenue::Sim || variant.over.is_none();
            ensure!(is_real, "variant {name}: `over` is of [lab] and [tunnel]");
        }
        for axis in &self.axes {
            let lengths: Vec<_> = axis
                .values()
                .map(|list| list.as_array().map(Vec::len))
                .collect();
            ensure!(
                lengths
                    .iter()
                    .all(|length| length.is_some_and(|n| n > 0) && *length == lengths[0]),
                "an axis has lists of the same length, one value each at least"
            );
        }
        let conditions = self
            .variants
            .iter()
            .filter_map(|variant| variant.condition.as_ref());
        let named = self.computed.iter().chain(&self.run);
        let texts = named
            .map(|(_, text)| text)
            .chain(conditions)
            .chain(&self.require);
        for text in texts {
            Expression::parse(text).map_err(|fault| anyhow!("`{text}`: {fault}"))?;
        }
        for chart in &self.charts {
            chart.check()?;
        }
        Ok(())
    }
}
