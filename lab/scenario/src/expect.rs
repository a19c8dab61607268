//! Expectations: expressions over the report of a run that must be true.

use crate::expression::{Expression, ExpressionResult};
use crate::file::Scenario;
use crate::report::{Expectation, RunReport};
use serde_json::{Value, json};

impl Scenario {
    /// Evaluates the scenario's expectations on `report`, and writes the results into it.
    pub fn judge(&self, report: &mut RunReport) {
        let facts = self.facts(report);
        report.expectations = self
            .expectations
            .iter()
            .map(|expect| {
                let verdict = Expression::parse(&expect.text).and_then(|text| text.outcome(&facts));
                let (holds, why) = match verdict {
                    Ok(ExpressionResult {
                        value: Value::Bool(holds),
                        seen,
                    }) => (holds, seen),
                    Ok(other) => (false, format!("is {}, not true or false", other.value)),
                    Err(fault) => (false, fault),
                };
                let why = if holds { String::new() } else { why };
                Expectation {
                    text: expect.text.clone(),
                    holds,
                    why,
                }
            })
            .collect();
    }

    /// The values that expressions about a run can use: the report as it is printed, `rtt_ms` (the
    /// largest round-trip time of any link at the start of the run) and `duration_s`.
    pub fn facts(&self, report: &RunReport) -> Value {
        let mut facts = serde_json::to_value(report).unwrap_or_default();
        if let Value::Object(facts) = &mut facts {
            facts.insert("rtt_ms".to_owned(), json!(self.rtt_ms()));
            facts.insert("duration_s".to_owned(), json!(self.duration_s));
        }
        facts
    }
}
