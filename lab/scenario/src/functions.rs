//! The functions of expressions.
//!
//! | function | is |
//! |---|---|
//! | `min max sum mean count pNN` | of a list, of an object's values, or of several numbers; `p95`: nearest rank |
//! | `summary(list)` | count, mean, median, 95th percentile, least and most, as an object |
//! | `abs floor` | of a number |
//! | `list(a, b, …)` | the list of these values |
//! | `values(object)` | its values, in the order of their names |
//! | `index(list)` | 1, 2, … for as many elements |
//! | `airtime_s(medium, bytes)` | the time that a single sender's packet occupies a Wi-Fi channel, waiting included |
//! | `airtime_s(medium, bytes, back, every)` | the same, with a packet of `back` bytes in the other direction for `every` packets |

use crate::summary::SampleSummary;
use cedos_lab_link::Medium;
use serde::Deserialize;
use serde_json::{Value, json};

/// The names of the functions, for messages.
pub(crate) const NAMES: &str =
    "min max sum mean count summary abs floor list values index airtime_s and pNN (p50, p95)";

pub(crate) fn is_function(name: &str) -> bool {
    let named = NAMES.split(' ').any(|word| word == name);
    (named && name != "and") || percentile(name).is_some()
}

fn percentile(name: &str) -> Option<f64> {
    let share: f64 = name.strip_prefix('p')?.parse().ok()?;
    (0.0..=100.0).contains(&share).then_some(share / 100.0)
}

pub(crate) fn call(name: &str, arguments: &[Value]) -> Result<Value, String> {
    let [first, more @ ..] = arguments else {
        return Err(format!("{name} wants an argument"));
    };
    match name {
        "abs" => return Ok(json!(number(first)?.abs())),
        "floor" => return Ok(json!(number(first)?.floor())),
        "list" => return Ok(arguments.into()),
        "airtime_s" => return airtime_s(first, more),
        _ => {}
    }
    let list = match first {
        _ if !more.is_empty() => arguments.to_vec(),
        Value::Array(list) => list.clone(),
        Value::Object(fields) => fields.values().cloned().collect(),
        other => return Err(format!("{name} wants a list, not {other}")),
    };
    match name {
        "count" => return Ok(json!(list.len() as f64)),
        "values" => return Ok(Value::Array(list)),
        "index" => return Ok((1..=list.len()).map(|n| json!(n)).collect()),
        _ => {}
    }
    let mut numbers = list.iter().map(number).collect::<Result<Vec<_>, _>>()?;
    match name {
        "sum" => return Ok(json!(numbers.iter().sum::<f64>())),
        "summary" => return Ok(json!(SampleSummary::of(numbers))),
        _ => numbers.sort_by(f64::total_cmp),
    }
    let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else {
        return Err(format!("{name} of an empty list: nothing was measured"));
    };
    Ok(json!(match name {
        "min" => *first,
        "max" => *last,
        "mean" => numbers.iter().sum::<f64>() / numbers.len() as f64,
        // Nearest rank: the smallest value that at least this share does not exceed.
        _ => {
            let share = percentile(name).ok_or_else(|| format!("no function `{name}`"))?;
            let rank = (share * numbers.len() as f64).ceil() as usize;
            numbers[rank.clamp(1, numbers.len()) - 1]
        }
    }))
}

fn airtime_s(medium: &Value, more: &[Value]) -> Result<Value, String> {
    let medium = Medium::deserialize(medium)
        .map_err(|fault| format!("airtime_s: {medium} is no Wi-Fi standard: {fault}"))?;
    let whole = |value: &Value| {
        let number = number(value)?;
        let fits = number.fract() == 0.0 && (1.0..=f64::from(u32::MAX)).contains(&number);
        fits.then_some(number as u32)
            .ok_or_else(|| format!("airtime_s: {number} is no whole number from 1 on"))
    };
    let span = match more {
        [bytes] => medium.cycle(whole(bytes)?),
        [bytes, back, every] => medium.cycle_answered(whole(bytes)?, whole(back)?, whole(every)?),
        _ => return Err("airtime_s wants a standard and 1 or 3 numbers".to_owned()),
    };
    Ok(json!(span.as_secs_f64()))
}

pub(crate) fn truth(value: &Value) -> Result<bool, String> {
    value
        .as_bool()
        .ok_or_else(|| format!("{value} is neither true nor false"))
}

/// The value as a number; true and false count as 1 and 0.
pub(crate) fn number(value: &Value) -> Result<f64, String> {
    match value {
        Value::Bool(truth) => Some(f64::from(u8::from(*truth))),
        value => value.as_f64(),
    }
    .ok_or_else(|| format!("{value} is not a number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_air_is_taken_for_as_long_as_the_medium_says() {
        let of = |arguments: Value| {
            let arguments = arguments.as_array().unwrap().clone();
            call("airtime_s", &arguments).map(|s| s.as_f64().unwrap())
        };
        let alone = of(json!(["802.11g", 1500])).unwrap();
        assert_eq!(alone, Medium::Dot11g.cycle(1500).as_secs_f64());
        assert!(of(json!(["802.11g", 1500, 52, 1])).unwrap() > alone);
        assert!(
            of(json!(["802.11z", 1500]))
                .unwrap_err()
                .contains("802.11z")
        );
        assert!(
            of(json!(["802.11b", 0]))
                .unwrap_err()
                .contains("whole number")
        );
    }

    #[test]
    fn what_is_counted_is_a_list_an_objects_values_or_several_numbers() {
        let list = json!([3, 1, 2]);
        assert_eq!(call("max", std::slice::from_ref(&list)), Ok(json!(3.0)));
        assert_eq!(call("min", &[json!(3), json!(2)]), Ok(json!(2.0)));
        assert_eq!(call("sum", &[json!({"a": 1, "b": 2})]), Ok(json!(3.0)));
        assert_eq!(
            call("index", std::slice::from_ref(&list)),
            Ok(json!([1, 2, 3]))
        );
        assert_eq!(call("summary", &[list]).unwrap()["p50"], json!(2.0));
        assert!(
            call("mean", &[json!([])])
                .unwrap_err()
                .contains("empty list")
        );
        assert!(!is_function("and") && is_function("p99.9"));
    }
}
