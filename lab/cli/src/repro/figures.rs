//! Formats figures for people: groups with the same figures are the rows of one table.
//!
//! ```text
//!  {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 4}, "z": 5}       x  y
//!                                                           a   1  2        z = 5
//!                                                           b   3  4
//! ```
//!
//! A table that is wider than a line is transposed and, if that does not help, split.

use cedos_lab_scenario::TextTable;
use serde_json::Value;

/// The width of a line in columns.
const WIDTH_MAX: usize = 100;

/// The most points that are printed; longer lists are for programs.
const POINTS_MAX: usize = 20;

/// The names and values of one group's figures.
type Leaves = Vec<(String, String)>;

/// The lines that show these figures.
pub fn lines(figures: &Value) -> Vec<String> {
    let Value::Object(_) = figures else {
        return match figures {
            Value::Null => Vec::new(),
            other => vec![in_words(other)],
        };
    };
    let mut groups: Vec<(String, Leaves)> = Vec::new();
    let mut lists = Vec::new();
    gather("", figures, &mut groups, &mut lists);
    let mut lines = Vec::new();
    while !groups.is_empty() {
        let names: Vec<String> = groups[0].1.iter().map(|(name, _)| name.clone()).collect();
        let (alike, others): (Vec<_>, Vec<_>) = groups
            .into_iter()
            .partition(|(_, leaves)| leaves.iter().map(|(name, _)| name).eq(&names));
        groups = others;
        if let [(of, leaves)] = &alike[..] {
            let before = if of.is_empty() { "" } else { "." };
            let all = leaves.iter();
            lines.extend(all.map(|(name, value)| format!("{of}{before}{name} = {value}")));
        } else {
            lines.extend(table(&names, &alike));
        }
    }
    lines.extend(lists);
    lines
}

/// Collects nested figures by their group, and lists separately.
fn gather(at: &str, value: &Value, groups: &mut Vec<(String, Leaves)>, lists: &mut Vec<String>) {
    let Some(fields) = value.as_object() else {
        return;
    };
    let below = |name: &str| match at {
        "" => name.to_owned(),
        at => format!("{at}.{name}"),
    };
    let mut leaves = Vec::new();
    let mut nested = Vec::new();
    for (name, value) in fields {
        match value {
            Value::Object(_) => nested.push((below(name), value)),
            Value::Array(_) => lists.push(format!("{} = {}", below(name), in_words(value))),
            leaf => leaves.push((name.clone(), in_words(leaf))),
        }
    }
    if !leaves.is_empty() {
        groups.push((at.to_owned(), leaves));
    }
    for (at, value) in nested {
        gather(&at, value, groups, lists);
    }
}

fn table(names: &[String], rows: &[(String, Leaves)]) -> Vec<String> {
    let mut cells = vec![vec![String::new()]];
    cells[0].extend(names.iter().cloned());
    for (of, leaves) in rows {
        let values = leaves.iter().map(|(_, value)| value.clone());
        cells.push([of.clone()].into_iter().chain(values).collect());
    }
    let turned: Vec<Vec<String>> = (0..cells[0].len())
        .map(|column| cells.iter().map(|row| row[column].clone()).collect())
        .collect();
    if width(&cells) > WIDTH_MAX && width(&turned) <= WIDTH_MAX {
        cells = turned;
    }
    cut(&cells).iter().flat_map(|part| aligned(part)).collect()
}

/// The smallest width of each column, with its gap to the previous one.
fn widths(cells: &[Vec<String>]) -> Vec<usize> {
    let column = |n: usize| cells.iter().map(|row| row[n].chars().count()).max();
    let gap = |n: usize| if n == 0 { 0 } else { 2 };
    (0..cells[0].len())
        .map(|n| column(n).unwrap_or(0) + gap(n))
        .collect()
}

fn width(cells: &[Vec<String>]) -> usize {
    widths(cells).iter().sum()
}

/// The table in parts that fit into a line, each with the first column.
fn cut(cells: &[Vec<String>]) -> Vec<Vec<Vec<String>>> {
    let widths = widths(cells);
    let mut parts: Vec<Vec<usize>> = Vec::new();
    let mut used = WIDTH_MAX;
    for (n, width) in widths.iter().enumerate().skip(1) {
        if used + width > WIDTH_MAX {
            parts.push(vec![0]);
            used = widths[0];
        }
        if let Some(part) = parts.last_mut() {
            part.push(n);
            used += width;
        }
    }
    let pick = |part: &Vec<usize>| {
        let row = |row: &Vec<String>| part.iter().map(|n| row[*n].clone()).collect();
        cells.iter().map(row).collect()
    };
    parts.iter().map(pick).collect()
}

fn aligned(cells: &[Vec<String>]) -> Vec<String> {
    let mut table = TextTable::new(&cells[0]);
    for row in &cells[1..] {
        table.row(row);
    }
    table.to_text().lines().map(str::to_owned).collect()
}

fn in_words(value: &Value) -> String {
    match value {
        Value::Array(points) if points.len() > POINTS_MAX => format!("{} points", points.len()),
        Value::Array(points) => points.iter().map(in_words).collect::<Vec<_>>().join(" "),
        Value::Number(number) if number.is_f64() => {
            let number = number.as_f64().unwrap_or(f64::NAN);
            let short = format!("{number:.4}");
            short.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn groups_of_the_same_figures_are_rows_of_a_table() {
        let figures = json!({
            "walk": {"error_s": 4.33291, "holes": 2313, "over": {"missed": 0.5}},
            "bus": {"error_s": 5.5, "holes": null, "over": {"missed": 1.25}},
            "ratio": 2,
            "within": [1.0, 2.5],
        });
        assert_eq!(
            lines(&figures),
            [
                "ratio = 2",
                "      error_s  holes",
                "bus       5.5      -",
                "walk   4.3329   2313",
                "           missed",
                "bus.over     1.25",
                "walk.over     0.5",
                "within = 1 2.5",
            ]
        );
        assert_eq!(lines(&Value::Null), Vec::<String>::new());
    }

    #[test]
    fn a_table_that_is_too_wide_is_turned_or_cut() {
        let group = |width: usize, figures: usize| {
            let figure = |n: usize| (format!("{n:0width$}"), json!(n));
            Value::Object((0..figures).map(figure).collect())
        };
        let turned = lines(&json!({"a": group(20, 9), "b": group(20, 9)}));
        assert_eq!(turned.len(), 10, "{turned:#?}");
        let names: serde_json::Map<_, _> =
            (0..9).map(|n| (format!("{n:020}"), group(20, 9))).collect();
        let wide = lines(&Value::Object(names));
        assert!(wide.len() > 10);
        assert!(wide.iter().all(|line| line.len() <= WIDTH_MAX), "{wide:#?}");
    }
}
