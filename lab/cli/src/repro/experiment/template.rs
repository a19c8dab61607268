//! Scenarios and texts with `{expressions}` in them.
//!
//! A text that is one expression in braces becomes its value, a number or text; in other texts the
//! value replaces the braces. In a list of tables, an element whose `if` is false is left out; one
//! with `copies` is repeated that often, and `copy` counts from 0.

use anyhow::{Context, anyhow};
use cedos_lab_scenario::Expression;
use serde_json::{Map, Value};
use toml::Table;

/// The value of an expression.
pub fn value(text: &str, facts: &Value) -> anyhow::Result<Value> {
    let expression = Expression::parse(text).and_then(|expression| expression.value(facts));
    expression.map_err(|fault| anyhow!("`{text}`: {fault}"))
}

/// Whether an expression is true.
pub fn is_true(text: &str, facts: &Value) -> anyhow::Result<bool> {
    let value = value(text, facts)?;
    value
        .as_bool()
        .with_context(|| format!("`{text}` is {value}, not true or false"))
}

/// The text with the values of its expressions.
pub fn text(template: &str, facts: &Value) -> anyhow::Result<String> {
    let mut out = String::new();
    let mut rest = template;
    while let Some((before, more)) = rest.split_once('{') {
        let (inner, after) = more
            .split_once('}')
            .with_context(|| format!("a brace is not closed: {template}"))?;
        out.push_str(before);
        out.push_str(&words(&value(inner, facts)?));
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

/// The expressions in the braces of a text.
pub fn braces(template: &str) -> Vec<&str> {
    let inner = template.split('{').skip(1);
    inner.filter_map(|part| part.split('}').next()).collect()
}

/// A value as people write it.
pub fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(list) => {
            let items: Vec<_> = list.iter().map(words).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => float.to_string(),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}

/// Merges the table of `template` into that of a file, or into an empty one.
pub fn built(mut base: Table, template: &Table, facts: &Value) -> anyhow::Result<Table> {
    for (key, value) in template {
        if ["if", "copies"].contains(&key.as_str()) {
            continue;
        }
        let before = base.remove(key);
        let built = value_built(before, value, facts).with_context(|| key.clone())?;
        base.insert(key.clone(), built);
    }
    Ok(base)
}

fn value_built(
    before: Option<toml::Value>,
    template: &toml::Value,
    facts: &Value,
) -> anyhow::Result<toml::Value> {
    Ok(match (template, before) {
        (toml::Value::String(template), _) => filled(template, facts)?,
        (toml::Value::Table(template), Some(toml::Value::Table(before))) => {
            built(before, template, facts)?.into()
        }
        (toml::Value::Table(template), _) => built(Table::new(), template, facts)?.into(),
        (toml::Value::Array(items), before) => {
            let before = match before {
                Some(toml::Value::Array(before)) => before,
                _ => Vec::new(),
            };
            list_built(before, items, facts)?.into()
        }
        (other, _) => other.clone(),
    })
}

/// Merges the elements of a template into those of a file, one by one; further elements of the file
/// stay.
fn list_built(
    before: Vec<toml::Value>,
    items: &[toml::Value],
    facts: &Value,
) -> anyhow::Result<Vec<toml::Value>> {
    let tables = items.iter().any(toml::Value::is_table);
    let mut before = before.into_iter().filter(|_| tables);
    let mut out = Vec::new();
    for item in items {
        let old = before.next();
        let toml::Value::Table(table) = item else {
            out.push(value_built(None, item, facts)?);
            continue;
        };
        let told = |key: &str| table.get(key).and_then(toml::Value::as_str);
        if let Some(condition) = told("if")
            && !is_true(condition, facts)?
        {
            continue;
        }
        let Some(copies) = table.get("copies") else {
            out.push(value_built(old, item, facts)?);
            continue;
        };
        let copies = copies.as_integer().context("`copies` is a whole number")?;
        for copy in 0..copies {
            let mut facts = facts.clone();
            facts["copy"] = copy.into();
            out.push(value_built(old.clone(), item, &facts)?);
        }
    }
    out.extend(before);
    Ok(out)
}

fn filled(template: &str, facts: &Value) -> anyhow::Result<toml::Value> {
    let inner = template
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'));
    match inner.filter(|inner| !inner.contains(['{', '}'])) {
        Some(expression) => toml_of(&value(expression, facts)?),
        None => Ok(text(template, facts)?.into()),
    }
}

/// Whole numbers become integers, because keys for counts accept only those, and other keys accept
/// both.
fn toml_of(value: &Value) -> anyhow::Result<toml::Value> {
    Ok(match value {
        Value::Null => return Err(anyhow!("null cannot stand in a scenario")),
        Value::Number(number) => {
            let float = number.as_f64().unwrap_or(f64::NAN);
            if float.fract() == 0.0 && float.abs() < 1e15 {
                (float as i64).into()
            } else {
                float.into()
            }
        }
        Value::Array(list) => list
            .iter()
            .map(toml_of)
            .collect::<anyhow::Result<Vec<_>>>()?
            .into(),
        Value::Object(fields) => table_of(fields)?.into(),
        Value::String(text) => text.clone().into(),
        Value::Bool(truth) => (*truth).into(),
    })
}

fn table_of(fields: &Map<String, Value>) -> anyhow::Result<Table> {
    let field = |(name, value): (&String, &Value)| Ok((name.clone(), toml_of(value)?));
    fields.iter().map(field).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn table(text: &str) -> Table {
        text.parse().unwrap()
    }

    #[test]
    fn expressions_become_values_and_words() {
        let facts = json!({"loss": 0.01, "other": "never", "n": 3, "holes": [30, 62]});
        let got = built(
            Table::new(),
            &table("a = '{loss}'\nb = '{other}'\nc = 'x-{n * 2}'\nd = '{n / 3}'\ne = [1, '{n}']"),
            &facts,
        );
        let wanted = table("a = 0.01\nb = 'never'\nc = 'x-6'\nd = 1\ne = [1, 3]");
        assert_eq!(got.unwrap(), wanted);
        assert_eq!(text("at {holes} s", &facts).unwrap(), "at [30, 62] s");
        assert!(text("at {holes", &facts).is_err());
    }

    #[test]
    fn tables_of_a_list_are_left_out_or_copied() {
        let template = table(
            "[[link]]\nname = 'a'\n[[link]]\nif = 'n > 3'\nname = 'b'\n\
             [[flow]]\ncopies = 2\nid = 'f-{copy}'",
        );
        let got = built(Table::new(), &template, &json!({"n": 3})).unwrap();
        let wanted = table("[[link]]\nname = 'a'\n[[flow]]\nid = 'f-0'\n[[flow]]\nid = 'f-1'");
        assert_eq!(got, wanted);
    }

    #[test]
    fn what_is_not_named_stays_as_the_file_has_it() {
        let file =
            table("seed = 1\nexpect = [1]\n[[link]]\nname = 'a'\nrtt_ms = 5\n[[link]]\nname = 'b'");
        let template = table("seed = 2\nexpect = []\n[[link]]\nrtt_ms = 9\n[[link]]\nif = 'false'");
        let got = built(file, &template, &json!({})).unwrap();
        let wanted = table("seed = 2\nexpect = []\n[[link]]\nname = 'a'\nrtt_ms = 9");
        assert_eq!(got, wanted);
    }
}
