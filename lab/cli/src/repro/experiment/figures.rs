//! The figures of all runs of a row: the trees `ours` and `baseline`, and the marks.
//!
//! ```text
//!  [ours."{medium}"]          one entry for each medium; in it, the cases of this medium
//!  [ours."{medium}".…]        …
//!  [[ours.cases]]             one element for each case
//!  gain = "a.mbps / b.mbps"   a and b: variants. With one case left, the metrics of its runs;
//!                             with several, lists of them
//! ```

use super::cases::{NamedValues, resolve};
use super::row_file::{MarkTemplate, RowExperiment};
use super::runs::CaseRuns;
use super::template;
use anyhow::{Context, bail};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The key that stands for each variant.
const VARIANT: &str = "variant";

/// Some of the cases, and the values that are known for them.
pub struct CaseScope<'a> {
    experiment: &'a RowExperiment,
    cases: Vec<&'a CaseRuns>,
    variant: Option<&'a str>,
}

impl<'a> CaseScope<'a> {
    /// The figures of all cases.
    pub fn all(experiment: &'a RowExperiment, cases: &'a [CaseRuns]) -> CaseScope<'a> {
        CaseScope {
            experiment,
            cases: cases.iter().collect(),
            variant: None,
        }
    }

    fn with_cases(&self, cases: Vec<&'a CaseRuns>) -> CaseScope<'a> {
        CaseScope { cases, ..*self }
    }

    /// The different values of a name, in the order of the cases.
    fn values(&self, name: &str) -> anyhow::Result<Vec<&'a Value>> {
        let mut values: Vec<&Value> = Vec::new();
        for case in &self.cases {
            let value = case.named.get(name).with_context(|| {
                let names = case.named.keys().map(String::as_str);
                let nearest = cedos_lab_scenario::suggestion(name, names);
                format!("`{{{name}}}`: no axis has this name{nearest}")
            })?;
            if !values.contains(&value) {
                values.push(value);
            }
        }
        Ok(values)
    }

    fn where_is(&self, name: &str, value: &Value) -> CaseScope<'a> {
        let cases = self.cases.iter().copied();
        self.with_cases(
            cases
                .filter(|case| case.named.get(name) == Some(value))
                .collect(),
        )
    }

    /// The values of names: those equal in all cases, and lists of those that differ.
    pub fn facts(&self) -> NamedValues {
        let mut facts = Map::new();
        let Some(first) = self.cases.first() else {
            return facts;
        };
        for name in first.named.keys() {
            let values: Vec<Value> = (self.cases.iter())
                .filter_map(|case| case.named.get(name).cloned())
                .collect();
            facts.insert(name.clone(), alike_or_list(values));
        }
        for variant in &self.experiment.variants {
            let of = |case: &&CaseRuns| case.metrics.get(&variant.name).cloned();
            let mut metrics: Vec<Value> = self.cases.iter().filter_map(of).collect();
            let metrics = match (self.cases.len(), metrics.len()) {
                (_, 0) => continue,
                (1, _) => metrics.remove(0),
                _ => Value::Array(metrics),
            };
            if self.variant == Some(variant.name.as_str()) {
                facts.insert("run".to_owned(), metrics.clone());
                facts.insert(VARIANT.to_owned(), variant.name.clone().into());
            }
            facts.insert(variant.name.clone(), metrics);
        }
        facts
    }

    /// The value of a template; if its `if` is false, that of its `else`, or `None`.
    pub fn figures(&self, template: &toml::Value) -> anyhow::Result<Option<Value>> {
        match template {
            toml::Value::String(text) => {
                Ok(Some(template::value(text, &Value::Object(self.facts()))?))
            }
            toml::Value::Table(table) => self.object(table),
            toml::Value::Array(items) => self.list(items).map(Some),
            other => Ok(Some(serde_json::to_value(other)?)),
        }
    }

    /// One element for each case if the template is one table; otherwise one for each element of
    /// the template.
    fn list(&self, items: &[toml::Value]) -> anyhow::Result<Value> {
        let scopes: Vec<CaseScope<'a>> = match items {
            [toml::Value::Table(_)] => {
                let cases = self.cases.iter();
                cases.map(|case| self.with_cases(vec![case])).collect()
            }
            _ => vec![self.with_cases(self.cases.clone())],
        };
        let mut list = Vec::new();
        for scope in scopes {
            for item in items {
                list.extend(scope.figures(item)?);
            }
        }
        Ok(Value::Array(list))
    }

    fn object(&self, table: &toml::Table) -> anyhow::Result<Option<Value>> {
        let mut facts = self.facts();
        if let Some(condition) = table.get("if") {
            let condition = condition.as_str().context("`if` is an expression")?;
            if !template::is_true(condition, &Value::Object(facts.clone()))? {
                return match table.get("else") {
                    Some(other) => self.figures(other),
                    None => Ok(None),
                };
            }
        }
        if let (Some(value), true) = (table.get("value"), table.contains_key("if")) {
            return self.figures(value);
        }
        let mut object = Map::new();
        let mut leaves = BTreeMap::new();
        let figures = |key: &str| !["if", "else"].contains(&key);
        for (key, template) in table.iter().filter(|(key, _)| figures(key)) {
            match (
                template,
                key.strip_prefix('{').and_then(|key| key.strip_suffix('}')),
            ) {
                (template, Some(name)) => {
                    for (key, scope) in self.each(name)? {
                        let value = scope.figures(template).with_context(|| key.clone())?;
                        object.extend(value.map(|value| (key, value)));
                    }
                }
                (toml::Value::String(text), None) => {
                    leaves.insert(key.clone(), text.clone());
                }
                (template, None) => {
                    let value = self.figures(template).with_context(|| key.clone())?;
                    object.extend(value.map(|value| (key.clone(), value)));
                }
            }
        }
        // Leaves may refer to values below, and to each other.
        facts.extend(object.clone());
        object.extend(resolve(&leaves, &mut facts, false)?);
        Ok(Some(Value::Object(object)))
    }

    /// A key in braces: each value of the name with the cases that have it, or each variant.
    fn each(&self, name: &str) -> anyhow::Result<Vec<(String, CaseScope<'a>)>> {
        if name == VARIANT {
            let experiment = self.experiment;
            let ran = experiment
                .variants
                .iter()
                .map(|variant| variant.name.as_str());
            let ran = ran.filter(|name| {
                self.cases
                    .iter()
                    .any(|case| case.metrics.contains_key(*name))
            });
            let scope = |name: &'a str| CaseScope {
                experiment,
                cases: self.cases.clone(),
                variant: Some(name),
            };
            return Ok(ran.map(|name| (name.to_owned(), scope(name))).collect());
        }
        let values = self.values(name)?.into_iter();
        Ok(values
            .map(|value| (template::words(value), self.where_is(name, value)))
            .collect())
    }

    /// The marks; those with names in braces once for each of their values. Adjacent marks with the
    /// same names stay together: all of them for the first values, then for the next.
    pub fn marks(&self, templates: &[MarkTemplate]) -> anyhow::Result<Vec<String>> {
        let mut marks = Vec::new();
        for group in templates.chunk_by(|a, b| names_of(a.text()) == names_of(b.text())) {
            let mut scopes = vec![self.with_cases(self.cases.clone())];
            for name in names_of(group[0].text()) {
                if name == VARIANT {
                    bail!("`{}`: a mark is not for each variant", group[0].text());
                }
                let mut narrower = Vec::new();
                for scope in &scopes {
                    let values = scope.values(name)?.into_iter();
                    narrower.extend(values.map(|value| scope.where_is(name, value)));
                }
                scopes = narrower;
            }
            for scope in scopes {
                let facts = Value::Object(scope.facts());
                for template in group {
                    if template.counts(&facts)? {
                        marks.push(template::text(template.text(), &facts)?);
                    }
                }
            }
        }
        Ok(marks)
    }
}

/// The names in a mark's braces, each once.
fn names_of(mark: &str) -> Vec<&str> {
    let mut names = template::braces(mark);
    let mut seen = Vec::new();
    names.retain(|name| {
        let new = !seen.contains(name);
        seen.push(*name);
        new
    });
    names
}

fn alike_or_list(values: Vec<Value>) -> Value {
    match values.first() {
        Some(first) if values.iter().all(|value| value == first) => first.clone(),
        _ => Value::Array(values),
    }
}

#[cfg(test)]
mod tests {
    use crate::repro::experiment::row_file::{MarkTemplate, ResultRow};
    use crate::repro::experiment::runs::CaseRuns;
    use crate::repro::runner::RowVenue;
    use serde_json::{Value, json};

    use super::CaseScope;

    const HEAD: &str = "id = 'X'\nclaim = ''\npaper = ''\n[sim]\nscenario.duration_s = 1\nmarks = ['a > 1']\n\
                        [[sim.variant]]\nname = 'ours'\n[[sim.variant]]\nname = 'theirs'\n";

    fn row(ours: &str) -> ResultRow {
        ResultRow::parse("X.toml", &format!("{HEAD}{ours}")).unwrap()
    }

    /// Cases for tests: two media, two directions; `theirs` only down.
    fn cases() -> Vec<CaseRuns> {
        let mut cases = Vec::new();
        for (medium, mbps) in [("b", 5), ("g", 25)] {
            for (direction, factor) in [("down", 1), ("up", 2)] {
                let named = json!({"medium": medium, "direction": direction, "ceiling": 2 * mbps});
                let mut metrics = json!({"ours": {"mbps": mbps * factor}});
                if direction == "down" {
                    metrics["theirs"] = json!({"mbps": mbps - 1});
                }
                cases.push(CaseRuns {
                    named: named.as_object().unwrap().clone(),
                    metrics: serde_json::from_value(metrics).unwrap(),
                });
            }
        }
        cases
    }

    fn figures(ours: &str) -> anyhow::Result<Value> {
        let row = row(ours);
        let (experiment, cases) = (row.at(RowVenue::Sim).unwrap(), cases());
        let scope = CaseScope::all(experiment, &cases);
        Ok(scope
            .figures(experiment.ours.as_ref().unwrap())?
            .unwrap_or_default())
    }

    #[test]
    fn a_key_in_braces_is_an_entry_for_each_value_and_narrows_the_cases() {
        let got = figures(
            "[sim.ours]\nworst = 'min(b.least, g.least)'\n[sim.ours.'{medium}']\nleast = 'min(ours.mbps)'\n\
             [sim.ours.'{medium}'.'{direction}']\nshare = 'ours.mbps / ceiling'\n",
        );
        let wanted = json!({
            "worst": 5.0,
            "b": {"least": 5.0, "down": {"share": 0.5}, "up": {"share": 1.0}},
            "g": {"least": 25.0, "down": {"share": 0.5}, "up": {"share": 1.0}},
        });
        assert_eq!(got.unwrap(), wanted);
    }

    #[test]
    fn a_table_in_a_list_is_an_element_for_each_case_unless_its_if_is_false() {
        let got = figures(
            "[sim.ours]\nmost = 'max(cases.gain)'\n[[sim.ours.cases]]\nif = \"direction == 'down'\"\n\
             medium = 'medium'\ngain = 'ours.mbps - theirs.mbps'\n",
        );
        let wanted = json!({"most": 1.0, "cases": [
            {"medium": "b", "gain": 1.0}, {"medium": "g", "gain": 1.0},
        ]});
        assert_eq!(got.unwrap(), wanted);
    }

    #[test]
    fn each_variant_that_ran_has_its_entry() {
        let got = figures(
            "[sim.ours.'{medium}'.'{direction}'.'{variant}']\nmbps = 'run.mbps'\nof = 'variant'\n\
             high = { if = 'run.mbps > 20', value = 'true' }\n",
        );
        let got = got.unwrap();
        assert_eq!(
            got["b"]["down"]["theirs"],
            json!({"mbps": 4, "of": "theirs"})
        );
        assert_eq!(
            got["g"]["up"],
            json!({"ours": {"mbps": 50, "of": "ours", "high": true}})
        );
    }

    #[test]
    fn marks_are_repeated_for_each_value_in_their_braces() {
        let row = row("[sim.ours]\na = '1'");
        let cases = cases();
        let scope = CaseScope::all(row.at(RowVenue::Sim).unwrap(), &cases);
        let marks = |texts: &[&str]| -> Vec<MarkTemplate> {
            texts
                .iter()
                .map(|text| MarkTemplate::Always((*text).to_owned()))
                .collect()
        };
        let mut wanted = marks(&["{medium}.a > 1", "{medium}.b > 1", "least > 0"]);
        wanted.push(MarkTemplate::If {
            condition: "max(ceiling) < 1".to_owned(),
            mark: "most > 0".to_owned(),
        });
        let got = scope.marks(&wanted).unwrap();
        assert_eq!(
            got,
            ["b.a > 1", "b.b > 1", "g.a > 1", "g.b > 1", "least > 0"]
        );
        let fault = scope.marks(&marks(&["{medum}.a > 1"])).unwrap_err();
        assert!(
            fault.to_string().contains("did you mean `medium`?"),
            "{fault}"
        );
    }
}
