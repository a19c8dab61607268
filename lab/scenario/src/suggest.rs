//! Errors about unknown keys, with a suggestion of a similar key.

/// The most mistakes (letters changed, missing or additional) for which a key counts as misspelt.
const MISTAKES_MAX: usize = 3;

/// The parser's message, with a suggestion if the error is an unknown key.
pub fn explain(error: &toml::de::Error) -> String {
    let message = error.to_string();
    match nearest(error.message()) {
        Some(key) => format!("{}\ndid you mean `{key}`?", message.trim_end()),
        None => message.trim_end().to_owned(),
    }
}

/// From "unknown field `a`, expected one of `b`, `c`": the one of `b` and `c` that is closest to
/// `a`.
fn nearest(message: &str) -> Option<&str> {
    if !message.starts_with("unknown ") {
        return None;
    }
    let mut quoted = message.split('`').skip(1).step_by(2);
    let unknown = quoted.next()?;
    nearest_of(unknown, quoted)
}

fn nearest_of<'a>(unknown: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (mistakes, key) = known.map(|key| (distance(unknown, key), key)).min()?;
    (mistakes <= MISTAKES_MAX && mistakes < unknown.len()).then_some(key)
}

/// The end of a message about an unknown name: a suggestion, or nothing.
pub fn suggestion<'a>(unknown: &str, known: impl Iterator<Item = &'a str>) -> String {
    match nearest_of(unknown, known) {
        Some(key) => format!("; did you mean `{key}`?"),
        None => String::new(),
    }
}

/// The number of letters to insert, delete, change or swap with their neighbour to get from `a` to `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut least = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    least = least.min(rows[i - 2][j - 2] + 1);
                }
                least
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_key_is_suggested_and_a_far_one_is_not() {
        let message =
            |key: &str| format!("unknown field `{key}`, expected one of `rtt_ms`, `loss`");
        assert_eq!(nearest(&message("rtt_sm")), Some("rtt_ms"));
        assert_eq!(nearest(&message("los")), Some("loss"));
        assert_eq!(nearest(&message("bandwidth")), None);
        assert_eq!(nearest("missing field `a`"), None);
    }
}
