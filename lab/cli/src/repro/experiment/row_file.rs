//! `lab/repro/ID.toml`: one result of a paper.
//!
//! The top of a file holds for every venue; `[sim]` and `[lab]` say what is different there. Files are strict:
//! a key that is not known is an error that says which one was probably meant.

use crate::repro::runner::RowVenue;
use anyhow::{Context, anyhow, bail, ensure};
use cedos_lab_scenario::{Expression, explain};
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::{Table, Value};

use super::chart_template::ChartTemplate;

/// A result of one of the papers, and how it is measured in each venue.
#[derive(Debug)]
pub struct ResultRow {
    /// `C`: Cedos, `M`: multipath mobility, `D`: DRWA, `E`: Epsilon, `S`: super-aggregation; a word: none
    /// of them, and yet to be shown beside them.
    pub id: String,
    /// What is claimed.
    pub claim: String,
    /// What the authors measured, and where their own figures do not fit together.
    pub paper: String,
    /// Where it can be run; the first venue is that of `cedos repro ID`.
    pub venues: Vec<(RowVenue, RowExperiment)>,
}

/// How a row is measured in one venue.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowExperiment {
    /// A function of this program that measures the row; without it the row is a scenario.
    #[serde(default)]
    pub runner: Option<String>,
    /// Whether the runner computes a model, without the protocol's code.
    #[serde(default)]
    pub model: bool,
    /// Arguments of the bench program, whose JSON is then the report.
    #[serde(default)]
    pub bench: Vec<String>,
    /// The scenario, as scenario files have it, with `file` for one to begin with.
    #[serde(default)]
    pub scenario: Option<Table>,
    /// In the simulator: settings of the two ends that scenarios do not have.
    #[serde(default)]
    pub ends: Table,
    /// Names that stand for numbers, texts, truths or lists.
    #[serde(default)]
    pub values: Table,
    /// Names that stand for expressions.
    #[serde(default)]
    pub computed: BTreeMap<String, String>,
    /// What varies: lists of the same length that go together. All combinations of axes are run.
    #[serde(default, rename = "axis")]
    pub axes: Vec<Table>,
    /// On real sockets: whether all variants of a case run at once.
    #[serde(default)]
    pub together: bool,
    /// What is run in every case.
    #[serde(default, rename = "variant")]
    pub variants: Vec<RowVariant>,
    /// Metrics of a run, by name: expressions over its report.
    #[serde(default)]
    pub run: BTreeMap<String, String>,
    /// What must be true of each run, or the row says nothing.
    #[serde(default)]
    pub require: Vec<String>,
    /// Our figures: a tree of expressions.
    #[serde(default)]
    pub ours: Option<Value>,
    /// Figures of what we compare with, likewise.
    #[serde(default)]
    pub baseline: Option<Value>,
    /// What must hold of our figures.
    #[serde(default)]
    pub marks: Vec<MarkTemplate>,
    /// Expressions over our figures: where all are true, and the marks hold, we are better than the authors.
    #[serde(default)]
    pub better: Vec<String>,
    /// Expressions over our figures: where any is true, they contradict the authors' claim.
    #[serde(default)]
    pub contradicts: Vec<String>,
    /// Conditions and assumptions.
    #[serde(default)]
    pub conditions: Vec<String>,
    /// How it is drawn.
    #[serde(default, rename = "chart")]
    pub charts: Vec<ChartTemplate>,
}

/// A variant: what is run in every case, beside the others.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowVariant {
    /// Its name in expressions.
    pub name: String,
    /// Values that are different for it.
    #[serde(default)]
    pub set: Table,
    /// On real sockets: `--over` of `cedos lab run`.
    #[serde(default)]
    pub over: Option<String>,
    /// In the simulator: settings of the two ends.
    #[serde(default)]
    pub ends: Table,
    /// In which cases it is run; in all if absent.
    #[serde(default, rename = "if")]
    pub condition: Option<String>,
}

/// A mark, or one that counts under a condition.
#[derive(Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum MarkTemplate {
    /// A comparison of figures.
    Always(String),
    /// A mark for what was measured only where this is true of the runs.
    If {
        /// An expression over the runs.
        #[serde(rename = "if")]
        condition: String,
        /// The comparison.
        mark: String,
    },
}

impl MarkTemplate {
    /// The comparison.
    pub fn text(&self) -> &str {
        match self {
            MarkTemplate::Always(mark) | MarkTemplate::If { mark, .. } => mark,
        }
    }

    /// When it counts; always if `None`.
    pub fn condition(&self) -> Option<&str> {
        match self {
            MarkTemplate::Always(_) => None,
            MarkTemplate::If { condition, .. } => Some(condition),
        }
    }
}

/// The names of the venues in a file, in the order in which one is chosen.
const VENUES: [(&str, RowVenue); 2] = [("sim", RowVenue::Sim), ("lab", RowVenue::Lab)];

impl ResultRow {
    /// The row in this text; `file` is for messages.
    ///
    /// # Errors
    /// What is not a row: the file, the key, and which one was probably meant.
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
            "{file}: has neither [sim] nor [lab], so what else it has says nothing"
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

    /// How it is measured there.
    pub fn at(&self, venue: RowVenue) -> Option<&RowExperiment> {
        let mut venues = self.venues.iter();
        venues.find(|(at, _)| *at == venue).map(|(_, how)| how)
    }
}

/// What a venue has of a row: names are added to those of all venues, conditions follow theirs, all else
/// stands instead of theirs.
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
        for (n, variant) in self.variants.iter().enumerate() {
            let name = &variant.name;
            let twice = self.variants[..n].iter().any(|other| other.name == *name);
            ensure!(!twice, "two variants are called {name}");
            let of_lab = venue == RowVenue::Lab || variant.over.is_none();
            ensure!(of_lab, "variant {name}: `over` is of [lab]");
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
