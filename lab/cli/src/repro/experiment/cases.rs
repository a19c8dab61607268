//! The cases of a row: every combination of its axes, with the values of all names.

use super::row_file::RowExperiment;
use super::source_files::SourceFiles;
use super::template;
use anyhow::{Context, anyhow};
use cedos_lab_scenario::Expression;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Names and their values.
pub type NamedValues = Map<String, Value>;

/// Every combination of the axes; the last axis changes first.
pub fn cases(experiment: &RowExperiment, files: &SourceFiles) -> anyhow::Result<Vec<NamedValues>> {
    let values = json_of(&experiment.values)?;
    let mut cases = vec![values];
    for axis in &experiment.axes {
        let axis = json_of(axis)?;
        let length = axis
            .values()
            .filter_map(Value::as_array)
            .map(Vec::len)
            .min();
        let mut combined = Vec::new();
        for case in &cases {
            for n in 0..length.unwrap_or(0) {
                let mut case = case.clone();
                case.extend(
                    axis.iter()
                        .map(|(name, list)| (name.clone(), list[n].clone())),
                );
                combined.push(case);
            }
        }
        cases = combined;
    }
    for case in &mut cases {
        add_file(experiment, files, case)?;
    }
    Ok(cases)
}

/// Adds the scenario file of a case as the name `file`, so that expressions can use its values.
fn add_file(
    experiment: &RowExperiment,
    files: &SourceFiles,
    case: &mut NamedValues,
) -> anyhow::Result<()> {
    let named = experiment
        .scenario
        .as_ref()
        .and_then(|table| table.get("file"));
    let Some(name) = named.and_then(toml::Value::as_str) else {
        return Ok(());
    };
    let name = template::text(name, &Value::Object(case.clone()))?;
    let table: toml::Table = files.read(&name)?.parse().with_context(|| name)?;
    case.insert("file".to_owned(), Value::Object(json_of(&table)?));
    Ok(())
}

/// The number of seeds of the cases: of different values of the name `seed`.
pub fn seeds(cases: &[NamedValues]) -> usize {
    let seeds = cases.iter().filter_map(|case| case.get("seed"));
    let seeds: BTreeSet<String> = seeds.map(Value::to_string).collect();
    seeds.len().max(1)
}

pub fn json_of(table: &toml::Table) -> anyhow::Result<NamedValues> {
    match serde_json::to_value(table)? {
        Value::Object(map) => Ok(map),
        _ => Ok(Map::new()),
    }
}

/// Evaluates expressions that may depend on each other, and adds them to `facts`.
///
/// With `some_suffice`, expressions that cannot be evaluated are left out.
pub fn resolve(
    expressions: &BTreeMap<String, String>,
    facts: &mut NamedValues,
    some_suffice: bool,
) -> anyhow::Result<NamedValues> {
    let mut parsed = BTreeMap::new();
    for (name, text) in expressions {
        let expression = Expression::parse(text).map_err(|fault| anyhow!("{name}: {fault}"))?;
        parsed.insert(name.as_str(), expression);
    }
    let mut resolver = Resolver {
        pending: parsed,
        under_way: Vec::new(),
        facts: Value::Object(std::mem::take(facts)),
        resolved: Map::new(),
        some_suffice,
    };
    for name in expressions.keys() {
        resolver.resolve(name)?;
    }
    if let Value::Object(all) = resolver.facts {
        *facts = all;
    }
    Ok(resolver.resolved)
}

struct Resolver<'a> {
    pending: BTreeMap<&'a str, Expression>,
    under_way: Vec<String>,
    facts: Value,
    resolved: NamedValues,
    some_suffice: bool,
}

impl Resolver<'_> {
    fn resolve(&mut self, name: &str) -> anyhow::Result<()> {
        if let Some(from) = self.under_way.iter().position(|other| other == name) {
            return Err(anyhow!(
                "{} need each other",
                self.under_way[from..].join(" and ")
            ));
        }
        let Some(expression) = self.pending.get(name).cloned() else {
            return Ok(());
        };
        self.under_way.push(name.to_owned());
        // A name in its own expression refers to the facts.
        for needed in expression
            .names()
            .into_iter()
            .filter(|needed| *needed != name)
        {
            self.resolve(needed)?;
        }
        self.under_way.pop();
        self.pending.remove(name);
        match expression.value(&self.facts) {
            Ok(value) => {
                self.facts[name] = value.clone();
                self.resolved.insert(name.to_owned(), value);
                Ok(())
            }
            Err(_) if self.some_suffice => Ok(()),
            Err(fault) => Err(anyhow!("{name}: {fault}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn resolved(expressions: &[(&str, &str)], some_suffice: bool) -> anyhow::Result<Value> {
        let named = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
        let expressions = expressions.iter().map(named).collect();
        let mut facts = Map::from_iter([("n".to_owned(), json!(2))]);
        Ok(resolve(&expressions, &mut facts, some_suffice)?.into())
    }

    #[test]
    fn names_are_computed_in_the_order_in_which_they_need_each_other() {
        let got = resolved(
            &[("a", "b + 1"), ("b", "c * n"), ("c", "3"), ("n", "n + 1")],
            false,
        );
        // `n` in its own expression is the fact; for others it is the result.
        assert_eq!(
            got.unwrap(),
            json!({"a": 10.0, "b": 9.0, "c": 3.0, "n": 3.0})
        );
    }

    #[test]
    fn a_circle_is_an_error_and_what_lacks_a_fact_may_be_left_out() {
        let circle = resolved(&[("a", "b"), ("b", "a")], false).unwrap_err();
        assert!(circle.to_string().contains("need each other"), "{circle}");
        assert!(resolved(&[("a", "elsewhere")], false).is_err());
        assert_eq!(
            resolved(&[("a", "elsewhere"), ("b", "n")], true).unwrap(),
            json!({"b": 2})
        );
    }
}
