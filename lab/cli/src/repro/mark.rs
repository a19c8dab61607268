//! Marks: comparisons over the figures of a run, `"wifi_to_lte_ms.mean <= 581"`.
//!
//! The left side is a path into the figures; the right side is a number, or a path, or a number
//! times a path (`"aggregate_mbps >= 0.9 * sum_mbps"`). Nothing else: a mark is to be read at a
//! glance and computed by anybody.

use anyhow::{Context, bail};
use serde_json::Value;

/// Whether every mark is true of `figures`. A figure that is `null` fulfils nothing: it was not
/// measured.
///
/// # Errors
/// A mark is not of the form above, or names a figure that is not there: our own mistake.
pub fn holds(marks: &[String], figures: &Value) -> anyhow::Result<bool> {
    let mut all = !marks.is_empty();
    for mark in marks {
        all &= one_holds(mark, figures).with_context(|| format!("mark `{mark}`"))?;
    }
    Ok(all)
}

/// Both sides of a mark, and the comparison.
type Sides<'a> = (Option<f64>, &'a str, Option<f64>);

/// What each mark asks for, and the figure as a percentage of it; those that were not measured, or ask
/// for nothing, are left out.
pub fn reached(marks: &[String], figures: &Value) -> Vec<(String, f64)> {
    let percent = |mark: &String| match sides(mark, figures) {
        Ok((Some(left), _, Some(right))) if right != 0.0 => {
            Some((mark.clone(), 100.0 * left / right))
        }
        _ => None,
    };
    marks.iter().filter_map(percent).collect()
}

fn sides<'a>(mark: &'a str, figures: &Value) -> anyhow::Result<Sides<'a>> {
    let words: Vec<&str> = mark.split_whitespace().collect();
    let (left, comparison, right) = match words[..] {
        [left, comparison, right] => (left, comparison, side(right, figures)?),
        [left, comparison, factor, "*", right] => {
            let factor: f64 = factor.parse().context("the factor is no number")?;
            let right = side(right, figures)?.map(|right| factor * right);
            (left, comparison, right)
        }
        _ => bail!("is no comparison"),
    };
    Ok((side(left, figures)?, comparison, right))
}

fn one_holds(mark: &str, figures: &Value) -> anyhow::Result<bool> {
    let (Some(left), comparison, Some(right)) = sides(mark, figures)? else {
        return Ok(false);
    };
    Ok(match comparison {
        "<=" => left <= right,
        ">=" => left >= right,
        "<" => left < right,
        ">" => left > right,
        "==" => left == right,
        other => bail!("`{other}` is no comparison"),
    })
}

/// A number or a figure; `None` if the figure was not measured. A truth counts as 1 or 0.
fn side(word: &str, figures: &Value) -> anyhow::Result<Option<f64>> {
    if let Ok(number) = word.parse::<f64>() {
        return Ok(Some(number));
    }
    let mut at = figures;
    for name in word.split('.') {
        at = at
            .get(name)
            .with_context(|| format!("no figure `{word}`"))?;
    }
    Ok(match at {
        Value::Bool(truth) => Some(f64::from(u8::from(*truth))),
        Value::Null => None,
        other => Some(
            other
                .as_f64()
                .with_context(|| format!("`{word}` is no number"))?,
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::{holds, reached};
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
        let figures =
            json!({"ms": {"mean": 40.0}, "sum": 10, "part": 9.5, "whole": true, "none": null});
        holds(&[mark.to_owned()], &figures).ok()
    }

    #[test]
    fn comparisons_are_judged_by_the_figures_alone() {
        assert_eq!(judged("ms.mean <= 45"), Some(true));
        assert_eq!(judged("ms.mean < 40"), Some(false));
        assert_eq!(judged("part >= 0.9 * sum"), Some(true));
        assert_eq!(judged("part >= 0.96 * sum"), Some(false));
        assert_eq!(judged("whole == 1"), Some(true));
    }

    #[test]
    fn what_was_not_measured_holds_of_nothing() {
        assert_eq!(judged("none <= 45"), Some(false));
        assert_eq!(judged("none >= 45"), Some(false));
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
}
