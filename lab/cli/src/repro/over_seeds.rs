//! One experiment with several seeds: means of the figures, and how each mark fared with each seed.

use super::mark;
use super::runner::{MarkBySeed, Measured};
use serde_json::{Map, Number, Value};

/// The measurements with several seeds as one: figures are means, conditions and marks those of the first.
pub fn combined(each: Vec<Measured>) -> Measured {
    let ours: Vec<&Value> = each.iter().map(|measured| &measured.ours).collect();
    let baseline: Vec<&Value> = each.iter().map(|measured| &measured.baseline).collect();
    let (ours, baseline) = (mean(&ours), mean(&baseline));
    let seeds = each.len();
    let ours_by_seed = each.iter().map(|measured| measured.ours.clone()).collect();
    let first = each.into_iter().next();
    Measured {
        ours,
        baseline,
        ours_by_seed,
        seeds,
        ..first.unwrap_or_default()
    }
}

/// How a mark fared with the figures of each seed.
///
/// # Errors
/// The mark names a figure that does not exist.
pub fn mark_by_seed(mark: &str, ours: &[Value]) -> anyhow::Result<MarkBySeed> {
    let mut held = 0;
    for figures in ours {
        held += usize::from(mark::one_holds(mark, figures)?);
    }
    let sides = ours
        .iter()
        .filter_map(|figures| mark::sides(mark, figures))
        .map(|(left, _)| left);
    Ok(MarkBySeed {
        held,
        least: sides.clone().reduce(f64::min),
        most: sides.reduce(f64::max),
    })
}

/// The mean of each number in values of one form. What is no number stays where all agree, and is `null` elsewhere, as is a
/// number that one of them lacks.
fn mean(each: &[&Value]) -> Value {
    let Some(first) = each.first() else {
        return Value::Null;
    };
    let part = |pick: &dyn Fn(&Value) -> Option<Value>| {
        let parts: Vec<Value> = each
            .iter()
            .map(|value| pick(value).unwrap_or(Value::Null))
            .collect();
        mean(&parts.iter().collect::<Vec<_>>())
    };
    match first {
        Value::Object(map) => {
            let named = map
                .keys()
                .map(|key| (key.clone(), part(&|value| value.get(key).cloned())));
            Value::Object(named.collect::<Map<_, _>>())
        }
        Value::Array(list) => (0..list.len())
            .map(|n| part(&|value| value.get(n).cloned()))
            .collect(),
        _ if each.iter().all(|value| value == first) => (*first).clone(),
        _ => {
            let numbers: Option<Vec<f64>> = each.iter().map(|value| value.as_f64()).collect();
            let mean = numbers.map(|numbers| numbers.iter().sum::<f64>() / each.len() as f64);
            mean.and_then(Number::from_f64)
                .map_or(Value::Null, Value::Number)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn measured(ours: Value) -> Measured {
        Measured {
            ours,
            seeds: 1,
            ..Measured::default()
        }
    }

    #[test]
    fn figures_are_means_and_marks_say_with_how_many_seeds_they_held() {
        let all = [1.0, 3.0, 5.0].map(|gain| {
            measured(json!({"gain": gain, "list": [gain, 1], "name": "b", "lost": null}))
        });
        let combined = combined(all.into());
        let mean = json!({"gain": 3.0, "list": [3.0, 1], "name": "b", "lost": null});
        assert_eq!((combined.ours, combined.seeds), (mean, 3));
        let mark = mark_by_seed("gain >= 2", &combined.ours_by_seed).unwrap();
        assert_eq!(
            (mark.held, mark.least, mark.most),
            (2, Some(1.0), Some(5.0))
        );
    }

    #[test]
    fn a_figure_that_one_seed_lacks_satisfies_no_mark() {
        let all = [json!({"gain": 3}), json!({"gain": null})].map(measured);
        let combined = combined(all.into());
        assert_eq!(combined.ours, json!({"gain": null}));
        let mark = mark_by_seed("gain >= 2", &combined.ours_by_seed).unwrap();
        assert_eq!((mark.held, mark.most), (1, Some(3.0)));
    }
}
