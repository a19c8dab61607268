//! Expectations: small expressions over the report.
//!
//! ```text
//! either  = both { "or" both }            both = not { "and" not }      not = [ "not" ] compare
//! compare = sum [ (== != <= >= < >) sum ] sum  = product { (+ -) product }
//! product = value { (* /) value }
//! value   = number | "text" | true | false | null | -value | (either) | name(either) | path
//! path    = name { .name | [number] | [name op value] }
//! ```
//!
//! A path walks the report as printed; on a list, `.name` takes that member of each element and
//! `[kind=make-before-break]` keeps the elements that match. `min max sum mean count p50 p95 p99`
//! (any `pNN`) turn a list into a number. Besides the report there are `rtt_ms` (the largest
//! round-trip time of any link as the run begins) and `duration_s`. Comparing `null` (a flow that
//! never finished) with a number is false, not an error.

use crate::file::Scenario;
use crate::report::{Expectation, RunReport};
use serde_json::{Map, Value, json};

/// How deep an expression may nest.
const DEPTH_MAX: usize = 64;

impl Scenario {
    /// Judge the scenario's expectations of `report` and write them into it.
    pub fn judge(&self, report: &mut RunReport) {
        let mut facts = serde_json::to_value(&*report).unwrap_or_default();
        if let Value::Object(facts) = &mut facts {
            facts.insert("rtt_ms".to_owned(), json!(self.rtt_ms()));
            facts.insert("duration_s".to_owned(), json!(self.duration_s));
        }
        report.expectations = self
            .expectations
            .iter()
            .map(|expect| {
                let verdict = evaluate(&expect.text, &facts);
                let (holds, why) = match verdict {
                    Ok(ExpectationOutcome {
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
}

/// Whether `text` is an expression at all; what its paths lead to is seen only with a report.
pub(crate) fn check(text: &str) -> Result<(), String> {
    parse(text).map(drop)
}

struct ExpectationOutcome {
    value: Value,
    /// The two sides of the last comparison, for the reader of a failure.
    seen: String,
}

fn evaluate(text: &str, facts: &Value) -> Result<ExpectationOutcome, String> {
    let mut seen = String::new();
    let value = parse(text)?.value(facts, &mut seen)?;
    Ok(ExpectationOutcome { value, seen })
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Number(f64),
    Text(String),
    Name(String),
    Sign(&'static str),
}

const SIGNS: [&str; 17] = [
    "==", "!=", "<=", ">=", "<", ">", "=", "+", "-", "*", "/", "(", ")", "[", "]", ".", ",",
];

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut out = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let taken = if first.is_ascii_digit() {
            let mut end = span(rest, |c| c.is_ascii_digit() || c == '.');
            let exponent = rest[end..]
                .strip_prefix(['e', 'E'])
                .map(|r| r.trim_start_matches(['+', '-']));
            if exponent.is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit())) {
                let sign = usize::from(rest[end + 1..].starts_with(['+', '-']));
                end += 1 + sign + span(&rest[end + 1 + sign..], |c| c.is_ascii_digit());
            }
            let number = rest[..end]
                .parse()
                .map_err(|_| format!("`{}` is not a number", &rest[..end]))?;
            out.push(Token::Number(number));
            end
        } else if first.is_alphabetic() || first == '_' {
            // A hyphen belongs to the name only inside a word: make-before-break.
            let mut end = span(rest, |c| c.is_alphanumeric() || c == '_');
            while rest[end..].starts_with('-')
                && rest[end + 1..].starts_with(|c: char| c.is_alphabetic())
            {
                end += 1 + span(&rest[end + 1..], |c| c.is_alphanumeric() || c == '_');
            }
            out.push(Token::Name(rest[..end].to_owned()));
            end
        } else if first == '"' || first == '\'' {
            let end = rest[1..].find(first).ok_or("a quote is not closed")?;
            out.push(Token::Text(rest[1..1 + end].to_owned()));
            end + 2
        } else {
            let sign = SIGNS.iter().find(|sign| rest.starts_with(**sign));
            let sign = sign.ok_or_else(|| format!("`{first}` means nothing here"))?;
            out.push(Token::Sign(sign));
            sign.len()
        };
        rest = rest[taken..].trim_start();
    }
    Ok(out)
}

fn span(text: &str, belongs: impl Fn(char) -> bool) -> usize {
    text.find(|c| !belongs(c)).unwrap_or(text.len())
}

#[derive(Clone, Debug)]
enum Expr {
    Constant(Value),
    Path(String, Vec<Step>),
    Call(String, Box<Expr>),
    Not(Box<Expr>),
    Minus(Box<Expr>),
    Both(Box<Expr>, Box<Expr>),
    Either(Box<Expr>, Box<Expr>),
    Compare(Box<Expr>, &'static str, Box<Expr>),
    Arithmetic(Box<Expr>, &'static str, Box<Expr>),
}

#[derive(Clone, Debug)]
enum Step {
    Member(String),
    Index(usize),
    Where(String, &'static str, Value),
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
}

fn parse(text: &str) -> Result<Expr, String> {
    let mut parser = Parser {
        tokens: tokens(text)?,
        at: 0,
        depth: 0,
    };
    let expr = parser.either()?;
    match parser.tokens.get(parser.at) {
        None => Ok(expr),
        Some(more) => Err(format!("{} is one too many", show(more))),
    }
}

fn show(token: &Token) -> String {
    match token {
        Token::Number(n) => format!("`{n}`"),
        Token::Text(t) => format!("`\"{t}\"`"),
        Token::Name(n) => format!("`{n}`"),
        Token::Sign(s) => format!("`{s}`"),
    }
}

impl Parser {
    fn takes(&mut self, sign: &str) -> bool {
        let takes = matches!(self.tokens.get(self.at), Some(Token::Sign(s)) if *s == sign);
        self.at += usize::from(takes);
        takes
    }

    fn takes_word(&mut self, word: &str) -> bool {
        let takes = matches!(self.tokens.get(self.at), Some(Token::Name(n)) if n == word);
        self.at += usize::from(takes);
        takes
    }

    fn one_of(&mut self, signs: &[&'static str]) -> Option<&'static str> {
        signs.iter().copied().find(|sign| self.takes(sign))
    }

    fn wants(&mut self, sign: &str) -> Result<(), String> {
        if self.takes(sign) {
            Ok(())
        } else {
            Err(self.fault(&format!("`{sign}`")))
        }
    }

    fn fault(&self, wanted: &str) -> String {
        match self.tokens.get(self.at) {
            Some(token) => format!("expected {wanted}, found {}", show(token)),
            None => format!("expected {wanted} at the end"),
        }
    }

    fn either(&mut self) -> Result<Expr, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(format!("nested deeper than {DEPTH_MAX}"));
        }
        let mut left = self.both()?;
        while self.takes_word("or") {
            left = Expr::Either(Box::new(left), Box::new(self.both()?));
        }
        self.depth -= 1;
        Ok(left)
    }

    fn both(&mut self) -> Result<Expr, String> {
        let mut left = self.not()?;
        while self.takes_word("and") {
            left = Expr::Both(Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expr, String> {
        if self.takes_word("not") {
            return Ok(Expr::Not(Box::new(self.compare()?)));
        }
        self.compare()
    }

    fn compare(&mut self) -> Result<Expr, String> {
        let left = self.sum()?;
        match self.one_of(&["==", "!=", "<=", ">=", "<", ">"]) {
            Some(op) => Ok(Expr::Compare(Box::new(left), op, Box::new(self.sum()?))),
            None => Ok(left),
        }
    }

    fn sum(&mut self) -> Result<Expr, String> {
        let mut left = self.product()?;
        while let Some(op) = self.one_of(&["+", "-"]) {
            left = Expr::Arithmetic(Box::new(left), op, Box::new(self.product()?));
        }
        Ok(left)
    }

    fn product(&mut self) -> Result<Expr, String> {
        let mut left = self.value()?;
        while let Some(op) = self.one_of(&["*", "/"]) {
            left = Expr::Arithmetic(Box::new(left), op, Box::new(self.value()?));
        }
        Ok(left)
    }

    fn value(&mut self) -> Result<Expr, String> {
        if self.takes("-") {
            self.depth += 1;
            if self.depth > DEPTH_MAX {
                return Err(format!("nested deeper than {DEPTH_MAX}"));
            }
            let value = self.value()?;
            self.depth -= 1;
            return Ok(Expr::Minus(Box::new(value)));
        }
        if self.takes("(") {
            let inner = self.either()?;
            self.wants(")")?;
            return Ok(inner);
        }
        let fault = self.fault("a value");
        let token = self
            .tokens
            .get(self.at)
            .cloned()
            .ok_or_else(|| fault.clone())?;
        self.at += 1;
        match token {
            Token::Number(n) => Ok(Expr::Constant(json!(n))),
            Token::Text(t) => Ok(Expr::Constant(json!(t))),
            Token::Name(n) if n == "true" => Ok(Expr::Constant(json!(true))),
            Token::Name(n) if n == "false" => Ok(Expr::Constant(json!(false))),
            Token::Name(n) if n == "null" => Ok(Expr::Constant(Value::Null)),
            Token::Name(n) if ["and", "or", "not"].contains(&n.as_str()) => Err(fault),
            Token::Name(name) if self.takes("(") => {
                if !is_function(&name) {
                    return Err(format!(
                        "no function `{name}`; there are min max sum mean count abs and pNN (p50, p95)"
                    ));
                }
                let inner = self.either()?;
                self.wants(")")?;
                Ok(Expr::Call(name, Box::new(inner)))
            }
            Token::Name(name) => Ok(Expr::Path(name, self.steps()?)),
            Token::Sign(_) => Err(fault),
        }
    }

    fn steps(&mut self) -> Result<Vec<Step>, String> {
        let mut steps = Vec::new();
        loop {
            if self.takes(".") {
                let Some(Token::Name(name)) = self.tokens.get(self.at).cloned() else {
                    return Err(self.fault("a name after `.`"));
                };
                self.at += 1;
                steps.push(Step::Member(name));
            } else if self.takes("[") {
                steps.push(self.bracket()?);
                self.wants("]")?;
            } else {
                return Ok(steps);
            }
        }
    }

    fn bracket(&mut self) -> Result<Step, String> {
        let fault = self.fault("a number, or name = value");
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        match token {
            Some(Token::Number(n)) if n.fract() == 0.0 => Ok(Step::Index(n as usize)),
            Some(Token::Text(name)) => Ok(Step::Member(name)),
            Some(Token::Name(name)) => {
                let op = self
                    .one_of(&["==", "!=", "<=", ">=", "<", ">", "="])
                    .ok_or_else(|| self.fault("a comparison"))?;
                let minus = self.takes("-");
                let value = match self.tokens.get(self.at) {
                    Some(Token::Number(n)) => json!(if minus { -n } else { *n }),
                    Some(Token::Name(n)) if n == "true" => json!(true),
                    Some(Token::Name(n)) if n == "false" => json!(false),
                    Some(Token::Name(n)) if n == "null" => Value::Null,
                    Some(Token::Name(word) | Token::Text(word)) => json!(word),
                    _ => return Err(self.fault("a value to compare with")),
                };
                self.at += 1;
                Ok(Step::Where(name, if op == "=" { "==" } else { op }, value))
            }
            _ => Err(fault),
        }
    }
}

impl Expr {
    fn value(&self, facts: &Value, seen: &mut String) -> Result<Value, String> {
        Ok(match self {
            Expr::Constant(value) => value.clone(),
            Expr::Path(name, steps) => follow(facts, name, steps)?,
            Expr::Call(name, inner) => call(name, &inner.value(facts, seen)?)?,
            Expr::Not(inner) => json!(!truth(&inner.value(facts, seen)?)?),
            Expr::Minus(inner) => json!(-number(&inner.value(facts, seen)?)?),
            Expr::Both(a, b) => {
                json!(truth(&a.value(facts, seen)?)? && truth(&b.value(facts, seen)?)?)
            }
            Expr::Either(a, b) => {
                json!(truth(&a.value(facts, seen)?)? || truth(&b.value(facts, seen)?)?)
            }
            Expr::Compare(a, op, b) => {
                let (a, b) = (a.value(facts, seen)?, b.value(facts, seen)?);
                *seen = format!("{a} {op} {b}");
                json!(compare(&a, op, &b)?)
            }
            Expr::Arithmetic(a, op, b) => {
                let (a, b) = (
                    number(&a.value(facts, seen)?)?,
                    number(&b.value(facts, seen)?)?,
                );
                json!(match *op {
                    "+" => a + b,
                    "-" => a - b,
                    "*" => a * b,
                    _ if b == 0.0 => return Err("division by zero".to_owned()),
                    _ => a / b,
                })
            }
        })
    }
}

fn follow(facts: &Value, name: &str, steps: &[Step]) -> Result<Value, String> {
    let object = facts.as_object().ok_or("there is no report")?;
    let mut here = member(object, name)?.clone();
    let mut walked = name.to_owned();
    for step in steps {
        here = match (step, &here) {
            (Step::Member(name), Value::Object(object)) => member(object, name)?.clone(),
            (Step::Member(name), Value::Array(list)) => list
                .iter()
                .map(|item| match item {
                    Value::Object(object) => member(object, name).cloned(),
                    _ => Err(format!("the elements of {walked} have no members")),
                })
                .collect::<Result<Vec<_>, _>>()?
                .into(),
            (Step::Index(index), Value::Array(list)) => {
                list.get(*index).cloned().ok_or_else(|| {
                    format!(
                        "{walked} has {} elements, there is no [{index}]",
                        list.len()
                    )
                })?
            }
            (Step::Where(name, op, wanted), Value::Array(list)) => {
                let mut kept = Vec::new();
                for item in list {
                    let object = item
                        .as_object()
                        .ok_or("only lists of objects can be filtered")?;
                    if compare(member(object, name)?, op, wanted)? {
                        kept.push(item.clone());
                    }
                }
                kept.into()
            }
            (Step::Member(name), _) => return Err(format!("{walked} has no member `{name}`")),
            (Step::Index(_) | Step::Where(..), _) => return Err(format!("{walked} is not a list")),
        };
        match step {
            Step::Member(name) => walked.push_str(&format!(".{name}")),
            Step::Index(index) => walked.push_str(&format!("[{index}]")),
            Step::Where(name, op, value) => walked.push_str(&format!("[{name} {op} {value}]")),
        }
    }
    Ok(here)
}

fn member<'a>(object: &'a Map<String, Value>, name: &str) -> Result<&'a Value, String> {
    object.get(name).ok_or_else(|| {
        let names = object
            .keys()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(" ");
        format!("no `{name}`; there are: {names}")
    })
}

fn percentile(name: &str) -> Option<f64> {
    let share: f64 = name.strip_prefix('p')?.parse().ok()?;
    (0.0..=100.0).contains(&share).then_some(share / 100.0)
}

fn is_function(name: &str) -> bool {
    ["min", "max", "sum", "mean", "count", "abs"].contains(&name) || percentile(name).is_some()
}

fn call(name: &str, argument: &Value) -> Result<Value, String> {
    if name == "abs" {
        return Ok(json!(number(argument)?.abs()));
    }
    let list = argument
        .as_array()
        .ok_or_else(|| format!("{name} wants a list, not {argument}"))?;
    if name == "count" {
        return Ok(json!(list.len() as f64));
    }
    let mut numbers = list.iter().map(number).collect::<Result<Vec<_>, _>>()?;
    numbers.sort_by(f64::total_cmp);
    let sum: f64 = numbers.iter().sum();
    if name == "sum" {
        return Ok(json!(sum));
    }
    let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else {
        return Err(format!("{name} of an empty list: nothing was measured"));
    };
    Ok(json!(match name {
        "min" => *first,
        "max" => *last,
        "mean" => sum / numbers.len() as f64,
        // Nearest rank: the smallest value that at least this share does not exceed.
        _ => {
            let share = percentile(name).ok_or_else(|| format!("no function `{name}`"))?;
            let rank = (share * numbers.len() as f64).ceil() as usize;
            numbers[rank.clamp(1, numbers.len()) - 1]
        }
    }))
}

fn truth(value: &Value) -> Result<bool, String> {
    value
        .as_bool()
        .ok_or_else(|| format!("{value} is neither true nor false"))
}

fn number(value: &Value) -> Result<f64, String> {
    value
        .as_f64()
        .ok_or_else(|| format!("{value} is not a number"))
}

fn compare(a: &Value, op: &str, b: &Value) -> Result<bool, String> {
    let equal = match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    };
    match op {
        "==" => return Ok(equal),
        "!=" => return Ok(!equal),
        _ if a.is_null() || b.is_null() => return Ok(false),
        _ => {}
    }
    let (a, b) = (number(a)?, number(b)?);
    Ok(match op {
        "<=" => a <= b,
        ">=" => a >= b,
        "<" => a < b,
        _ => a > b,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Value {
        json!({
            "flows": [{"id": "a", "bytes": 1000, "sha256_ok": true, "finished_s": null,
                       "duplicate_bytes": 10, "bytes_by_link": {"wlan0": 7}}],
            "links": [{"name": "wlan0", "packets_while_down": 0}],
            "switches": [
                {"kind": "make-before-break", "silence_ms": 10.0},
                {"kind": "break-before-make", "silence_ms": 300.0},
                {"kind": "make-before-break", "silence_ms": 30.0},
            ],
            "rtt_ms": 20.0,
        })
    }

    fn holds(text: &str) -> Result<bool, String> {
        truth(&evaluate(text, &facts())?.value)
    }

    #[test]
    fn the_forms_of_the_documentation_mean_what_they_say() {
        for (text, expected) in [
            ("flows[0].sha256_ok == true", true),
            ("flows[0].sha256_ok", true),
            ("flows[0].duplicate_bytes <= 0.01 * flows[0].bytes", true),
            ("flows[0].duplicate_bytes < 0.01 * flows[0].bytes", false),
            ("max(switches.silence_ms) <= 120", false),
            (
                "p95(switches[kind=make-before-break].silence_ms) <= rtt_ms + 20",
                true,
            ),
            (
                "p50(switches[kind=make-before-break].silence_ms) == 10",
                true,
            ),
            ("count(switches[silence_ms > 20]) == 2", true),
            (
                "mean(switches[kind == \"make-before-break\"].silence_ms) == 20",
                true,
            ),
            (
                "sum(links.packets_while_down) == 0 and not flows[0].bytes == 1",
                true,
            ),
            ("flows[0].finished_s <= 60", false),
            ("flows[0].finished_s == null", true),
            ("flows[id=a].bytes[0] == 1000", true),
            ("flows[0].bytes_by_link.wlan0 == 7", true),
            ("2 + 3 * 4 - 6 / 2 == 11 or false", true),
            ("-(2 - 3) == 1e0", true),
            ("abs(-2.5e-1) == 0.25", true),
        ] {
            assert_eq!(holds(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_an_error_in_words() {
        for (text, says) in [
            ("flows[3].bytes == 1", "has 1 elements, there is no [3]"),
            ("flow[0].bytes == 1", "no `flow`; there are: "),
            ("max(switches[kind=none].silence_ms) < 1", "empty list"),
            ("median(switches.silence_ms) < 1", "no function `median`"),
            ("flows[0].id < 3", "not a number"),
            ("1 / 0 == 1", "division by zero"),
            ("1 +", "expected a value at the end"),
            ("1 1", "one too many"),
            ("(1", "expected `)`"),
            ("\"open", "not closed"),
            ("5 $ 3", "`$` means nothing"),
        ] {
            let fault = holds(text).unwrap_err();
            assert!(fault.contains(says), "{text}: {fault}");
        }
        assert!(
            holds(&"(".repeat(1000))
                .unwrap_err()
                .contains("nested deeper")
        );
    }
}
