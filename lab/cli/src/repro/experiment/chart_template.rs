//! Charts of a row: the figures on each axis.

use super::template;
use crate::repro::plot::{Chart, Series};
use anyhow::{Context, anyhow, ensure};
use cedos_lab_scenario::Expression;
use serde::Deserialize;
use serde_json::Value;

/// Two axes and the series on them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChartTemplate {
    title: String,
    x: String,
    y: String,
    series: Vec<SeriesTemplate>,
}

/// A series of points: two lists, or one list of pairs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SeriesTemplate {
    name: String,
    x: Option<String>,
    y: Option<String>,
    points: Option<String>,
    /// Whether each point is a dot, instead of a line through all points.
    #[serde(default)]
    dots: bool,
    /// Whether the series is left out if its figures are missing.
    #[serde(default)]
    optional: bool,
}

impl ChartTemplate {
    /// Checks the syntax of its expressions.
    ///
    /// # Errors
    /// An expression is invalid.
    pub fn check(&self) -> anyhow::Result<()> {
        for series in &self.series {
            let SeriesTemplate {
                name, x, y, points, ..
            } = series;
            let at = || format!("chart {}, series {name}", self.title);
            ensure!(
                x.is_some() == y.is_some() && x.is_some() != points.is_some(),
                "{}: a series has x and y, or points",
                at()
            );
            for text in [x, y, points].into_iter().flatten() {
                let parsed = Expression::parse(text);
                parsed.map_err(|fault| anyhow!("{}: `{text}`: {fault}", at()))?;
            }
        }
        Ok(())
    }

    /// The chart of these figures.
    ///
    /// # Errors
    /// A series needs figures that are missing.
    pub fn drawn(&self, facts: &Value) -> anyhow::Result<Chart> {
        let mut series = Vec::new();
        for template in &self.series {
            match template.points(facts) {
                Ok(points) => series.push(Series {
                    name: template.name.clone(),
                    points,
                    line: !template.dots,
                }),
                Err(_) if template.optional => {}
                Err(fault) => {
                    let at = || format!("chart {}, series {}", self.title, template.name);
                    return Err(fault).with_context(at);
                }
            }
        }
        Ok(Chart {
            title: self.title.clone(),
            x: self.x.clone(),
            y: self.y.clone(),
            series,
        })
    }
}

impl SeriesTemplate {
    /// The points for which both figures were measured.
    fn points(&self, facts: &Value) -> anyhow::Result<Vec<(f64, f64)>> {
        let list = |text: &Option<String>| -> anyhow::Result<Vec<Value>> {
            let text = text.as_deref().unwrap_or_default();
            Ok(match template::value(text, facts)? {
                Value::Array(list) => list,
                one => vec![one],
            })
        };
        if self.points.is_some() {
            let pair = |pair: &Value| Some((pair.get(0)?.as_f64()?, pair.get(1)?.as_f64()?));
            return Ok(list(&self.points)?.iter().filter_map(pair).collect());
        }
        let (x, y) = (list(&self.x)?, list(&self.y)?);
        ensure!(
            x.len() == y.len(),
            "{} values of x and {} of y",
            x.len(),
            y.len()
        );
        let pairs = x.iter().zip(&y);
        Ok(pairs
            .filter_map(|(x, y)| Some((x.as_f64()?, y.as_f64()?)))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::ChartTemplate;
    use serde_json::json;

    const TEMPLATE: &str = "title = 't'\nx = 's'\ny = '%'\n\
        [[series]]\nname = 'a'\nx = 'ours.cases[rtt=50].s'\ny = '100 * ours.cases[rtt=50].share'\n\
        [[series]]\nname = 'b'\npoints = 'ours.levels'\ndots = true\n\
        [[series]]\nname = 'c'\nx = 'baseline.s'\ny = 'baseline.s'\noptional = true\n";

    #[test]
    fn points_are_the_figures_that_were_measured() {
        let template: ChartTemplate = toml::from_str(TEMPLATE).unwrap();
        template.check().unwrap();
        let ours = json!({
            "cases": [{"rtt": 50, "s": 1, "share": 0.5}, {"rtt": 60, "s": 2, "share": 0.25},
                      {"rtt": 50, "s": 3, "share": 1}],
            "levels": [[1, 2], [3, null]],
        });
        let chart = template
            .drawn(&json!({"ours": ours, "baseline": null}))
            .unwrap();
        let names: Vec<_> = chart
            .series
            .iter()
            .map(|series| series.name.as_str())
            .collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(chart.series[0].points, [(1.0, 50.0), (3.0, 100.0)]);
        assert_eq!(chart.series[1].points, [(1.0, 2.0)]);
        assert!(chart.series[0].line && !chart.series[1].line);
        assert!(
            template
                .drawn(&json!({"ours": {}, "baseline": null}))
                .is_err()
        );
    }
}
