//! Marks: expressions over the figures of a run that must be true, `"wifi_to_lte_ms.mean <= 581"`.
//!
//! They use the language of scenarios' expectations. Whether a row holds, and its verdict on the
//! authors' claim, follow only from `ours` and the row's expressions, so that anybody can compute
//! them again.

use anyhow::anyhow;
use cedos_lab_scenario::Expression;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The verdict of a run on the authors' claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowVerdict {
    /// All marks hold, and also the row's conditions for a better result.
    Better,
    /// All marks hold.
    Reproduced,
    /// At least one mark does not hold.
    #[serde(rename = "not reproduced")]
    NotReproduced,
    /// An expression that would contradict the claim is true.
    Contradicts,
}

impl RowVerdict {
    /// The verdict in words.
    pub fn words(self) -> &'static str {
        match self {
            RowVerdict::Better => "better",
            RowVerdict::Reproduced => "reproduced",
            RowVerdict::NotReproduced => "not reproduced",
            RowVerdict::Contradicts => "contradicts",
        }
    }
}

/// Computes the verdict: `better` and `contradicts` are expressions like marks.
///
/// # Errors
/// An expression names a figure that does not exist.
pub fn verdict(
    holds: bool,
    better: &[String],
    contradicts: &[String],
    figures: &Value,
) -> anyhow::Result<RowVerdict> {
    for mark in contradicts {
        if one_holds(mark, figures)? {
            return Ok(RowVerdict::Contradicts);
        }
    }
    Ok(match holds {
        false => RowVerdict::NotReproduced,
        true if self::holds(better, figures)? => RowVerdict::Better,
        true => RowVerdict::Reproduced,
    })
}

/// Whether every mark is true of `figures`. A figure that is `null` was not measured and satisfies
/// no mark. Without marks the result is false.
///
/// # Errors
/// A mark is no valid expression, or names a figure that does not exist: an error in the row.
pub fn holds(marks: &[String], figures: &Value) -> anyhow::Result<bool> {
    let mut all = !marks.is_empty();
    for mark in marks {
        all &= one_holds(mark, figures)?;
    }
    Ok(all)
}

/// Whether a mark is true of `figures`.
///
/// # Errors
/// The same as those of [`holds`].
pub fn one_holds(mark: &str, figures: &Value) -> anyhow::Result<bool> {
    let value = || {
        let expression = Expression::parse(mark)?;
        if let Some((left, right)) = expression.sides(figures)?
            && (left.is_null() || right.is_null())
        {
            return Ok(false);
        }
        let value = expression.value(figures)?;
        value
            .as_bool()
            .ok_or_else(|| format!("is {value}, not true or false"))
    };
    value().map_err(|fault: String| anyhow!("mark `{mark}`: {fault}"))
}

/// The two sides of a mark's comparison, if both are numbers.
pub fn sides(mark: &str, figures: &Value) -> Option<(f64, f64)> {
    let (left, right) = Expression::parse(mark).ok()?.sides(figures).ok()??;
    let number = |side: Value| match side {
        Value::Bool(truth) => Some(f64::from(u8::from(truth))),
        side => side.as_f64(),
    };
    Some((number(left)?, number(right)?))
}

/// For each mark its text, and the figure as a percentage of the required one; marks that were not
/// measured, or require zero, are left out.
pub fn reached(marks: &[String], figures: &Value) -> Vec<(String, f64)> {
    let percent = |mark: &String| match sides(mark, figures) {
        Some((left, right)) if right != 0.0 => Some((mark.clone(), 100.0 * left / right)),
        _ => None,
    };
    marks.iter().filter_map(percent).collect()
}

#[cfg(test)]
mod tests {
    use super::{RowVerdict, holds, reached, verdict};
    use serde_json::json;

    #[test]
    fn a_figure_is_a_percentage_of_what_its_mark_asks_for() {
        let marks = ["a >= 2", "a >= 0.5 * b", "none >= 1", "a > 0"].map(str::to_owned);
        let reached = reached(&marks, &json!({"a": 3, "b": 12, "none": null}));
        assert_eq!(
            reached,
            [
                ("a >= 2".to_owned(), 150.0),
                ("a >= 0.5 * b".to_owned(), 50.0)
            ]
        );
    }

    fn judged(mark: &str) -> Option<bool> {
        let figures = json!({"ms": {"mean": 40.0}, "sum": 10, "part": 9.5, "whole": true, "none": null,
                             "even-far": {"of": 1}, "640_rescan": {"pauses": 0}});
        holds(&[mark.to_owned()], &figures).ok()
    }

    #[test]
    fn comparisons_are_judged_by_the_figures_alone() {
        assert_eq!(judged("ms.mean <= 45"), Some(true));
        assert_eq!(judged("ms.mean < 40"), Some(false));
        assert_eq!(judged("part >= 0.9 * sum"), Some(true));
        assert_eq!(judged("part >= 0.96 * sum"), Some(false));
        assert_eq!(judged("whole == 1"), Some(true));
        assert_eq!(judged("even-far.of == 1"), Some(true));
        assert_eq!(judged("640_rescan.pauses == 0"), Some(true));
    }

    #[test]
    fn what_was_not_measured_holds_of_nothing() {
        assert_eq!(judged("none <= 45"), Some(false));
        assert_eq!(judged("none >= 45"), Some(false));
        assert_eq!(judged("none == none"), Some(false));
    }

    #[test]
    fn a_mark_that_names_no_figure_is_our_mistake() {
        assert_eq!(judged("ms.median <= 45"), None);
        assert_eq!(judged("ms.mean"), None);
        assert_eq!(judged("ms.mean ~ 3"), None);
    }

    #[test]
    fn a_row_without_marks_does_not_hold() {
        assert!(!holds(&[], &json!({})).unwrap());
    }

    #[test]
    fn a_verdict_is_better_only_where_the_marks_hold_and_contradicts_in_any_case() {
        let of = |holds, better: &str, contradicts: &str| {
            let list = |text: &str| match text {
                "" => Vec::new(),
                text => vec![text.to_owned()],
            };
            verdict(holds, &list(better), &list(contradicts), &json!({"a": 3})).unwrap()
        };
        assert_eq!(of(true, "", ""), RowVerdict::Reproduced);
        assert_eq!(of(true, "a > 2", "a < 2"), RowVerdict::Better);
        assert_eq!(of(true, "a > 3", ""), RowVerdict::Reproduced);
        assert_eq!(of(false, "a > 2", ""), RowVerdict::NotReproduced);
        assert_eq!(of(true, "a > 2", "a == 3"), RowVerdict::Contradicts);
        assert_eq!(json!(RowVerdict::NotReproduced), "not reproduced");
    }
}
