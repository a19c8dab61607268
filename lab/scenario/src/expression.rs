//! The expression language of expectations, metrics and marks, evaluated over one or several
//! reports.
//!
//! ```text
//! either  = both { "or" both }            both = not { "and" not }      not = [ "not" ] compare
//! compare = sum [ (== != <= >= < >) sum ] sum  = product { (+ -) product }
//! product = value { (* /) value }
//! value   = number | "text" | true | false | null | -value | (either) | name(either, …) steps | name steps
//! steps   = { .name | [number] | [name op word] | [name op (either)] }
//! ```
//!
//! A path selects from the report as printed; on a list, `.name` selects that member of each
//! element, and `[kind=make-before-break]` keeps the elements that match. Arithmetic with a list
//! applies to each of its elements, with two lists element by element. The functions are in
//! `functions.rs`; two more evaluate only the arguments that they need: `otherwise(a, b)` is `b` if
//! `a` is missing or `null` (also in the elements of a list), `if(condition, a, b)` is `a` or `b`.
//! Comparing `null` (a flow that never finished) with a number is false, not an error. A name may
//! begin with digits if it has an underscore: `640_rescan`.

use crate::functions::{self, is_function, number, truth};
use crate::suggest::suggestion;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Functions that evaluate only the arguments they need.
const LAZY: [&str; 2] = ["if", "otherwise"];

/// The deepest nesting of an expression.
const DEPTH_MAX: usize = 64;

/// An expression, which is parsed once and can be evaluated on any values.
#[derive(Clone, Debug)]
pub struct Expression(Expr);

/// The result of evaluating an expression.
pub(crate) struct ExpressionResult {
    pub(crate) value: Value,
    /// The two sides of the last comparison, for failure messages.
    pub(crate) seen: String,
}

impl Expression {
    /// Parses an expression.
    ///
    /// # Errors
    /// The text is no valid expression. Paths are only checked when it is evaluated.
    pub fn parse(text: &str) -> Result<Expression, String> {
        parse(text).map(Expression)
    }

    /// Evaluates the expression; `facts` is the object in which its paths begin.
    ///
    /// # Errors
    /// A path leads nowhere, or a function or operator got an unsupported value.
    pub fn value(&self, facts: &Value) -> Result<Value, String> {
        self.0.value(facts, &mut String::new())
    }

    /// Evaluates both sides, if the expression is a comparison; `None` if it is not.
    ///
    /// # Errors
    /// The same as those of [`Expression::value`].
    pub fn sides(&self, facts: &Value) -> Result<Option<(Value, Value)>, String> {
        let Expr::Compare(left, _, right) = &self.0 else {
            return Ok(None);
        };
        let value = |side: &Expr| side.value(facts, &mut String::new());
        Ok(Some((value(left)?, value(right)?)))
    }

    /// The names at the beginning of its paths.
    pub fn names(&self) -> BTreeSet<&str> {
        let mut names = BTreeSet::new();
        self.0.gather_names(&mut names);
        names
    }

    pub(crate) fn outcome(&self, facts: &Value) -> Result<ExpressionResult, String> {
        let mut seen = String::new();
        let value = self.0.value(facts, &mut seen)?;
        Ok(ExpressionResult { value, seen })
    }
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
            let word = span(rest, |c| c.is_alphanumeric() || c == '_');
            if word > end && rest[..word].contains('_') {
                out.push(Token::Name(rest[..word].to_owned()));
                rest = rest[word..].trim_start();
                continue;
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
    Call(String, Vec<Expr>),
    /// Steps from the result of a call.
    Of(Box<Expr>, Vec<Step>),
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
    Where(String, &'static str, Box<Expr>),
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
                if !is_function(&name) && !LAZY.contains(&name.as_str()) {
                    return Err(format!(
                        "no function `{name}`; there are {} {}",
                        LAZY.join(" "),
                        functions::NAMES
                    ));
                }
                let mut arguments = vec![self.either()?];
                while self.takes(",") {
                    arguments.push(self.either()?);
                }
                self.wants(")")?;
                let call = Expr::Call(name, arguments);
                let steps = self.steps()?;
                Ok(match steps.is_empty() {
                    true => call,
                    false => Expr::Of(Box::new(call), steps),
                })
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
                if self.takes("(") {
                    let wanted = self.either()?;
                    self.wants(")")?;
                    let op = if op == "=" { "==" } else { op };
                    return Ok(Step::Where(name, op, Box::new(wanted)));
                }
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
                let op = if op == "=" { "==" } else { op };
                Ok(Step::Where(name, op, Box::new(Expr::Constant(value))))
            }
            _ => Err(fault),
        }
    }
}

impl Expr {
    fn value(&self, facts: &Value, seen: &mut String) -> Result<Value, String> {
        Ok(match self {
            Expr::Constant(value) => value.clone(),
            Expr::Path(name, steps) => {
                let object = facts.as_object().ok_or("there is no report")?;
                follow(facts, member(object, name)?.clone(), name, steps)?
            }
            Expr::Of(call, steps) => follow(facts, call.value(facts, seen)?, "(…)", steps)?,
            Expr::Call(name, arguments) => match (name.as_str(), &arguments[..]) {
                ("if", [condition, yes, no]) => match truth(&condition.value(facts, seen)?)? {
                    true => yes.value(facts, seen)?,
                    false => no.value(facts, seen)?,
                },
                ("if", _) => return Err("if wants a condition and two values".to_owned()),
                ("otherwise", [value, other]) => {
                    let value = value.value(facts, seen).unwrap_or_default();
                    filled(value, &other.value(facts, seen)?)
                }
                ("otherwise", _) => return Err("otherwise wants two values".to_owned()),
                _ => {
                    let values = arguments.iter().map(|one| one.value(facts, seen));
                    functions::call(name, &values.collect::<Result<Vec<_>, _>>()?)?
                }
            },
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
                arithmetic(&a.value(facts, seen)?, op, &b.value(facts, seen)?)?
            }
        })
    }

    fn gather_names<'a>(&'a self, names: &mut BTreeSet<&'a str>) {
        match self {
            Expr::Constant(_) => {}
            Expr::Path(name, steps) => {
                names.insert(name);
                gather_names_of_steps(steps, names);
            }
            Expr::Of(call, steps) => {
                call.gather_names(names);
                gather_names_of_steps(steps, names);
            }
            Expr::Call(_, arguments) => arguments.iter().for_each(|one| one.gather_names(names)),
            Expr::Not(inner) | Expr::Minus(inner) => inner.gather_names(names),
            Expr::Both(a, b)
            | Expr::Either(a, b)
            | Expr::Compare(a, _, b)
            | Expr::Arithmetic(a, _, b) => {
                a.gather_names(names);
                b.gather_names(names);
            }
        }
    }
}

fn gather_names_of_steps<'a>(steps: &'a [Step], names: &mut BTreeSet<&'a str>) {
    for step in steps {
        if let Step::Where(_, _, wanted) = step {
            wanted.gather_names(names);
        }
    }
}

/// A value, with the other one in place of `null`, also in its elements.
fn filled(value: Value, other: &Value) -> Value {
    match value {
        Value::Null => other.clone(),
        Value::Array(list) => list.into_iter().map(|item| filled(item, other)).collect(),
        value => value,
    }
}

/// Arithmetic with numbers, a list and a number, or two lists of equal length.
fn arithmetic(a: &Value, op: &str, b: &Value) -> Result<Value, String> {
    let each = |list: &[Value], of: &dyn Fn(&Value) -> Result<Value, String>| {
        list.iter().map(of).collect::<Result<Vec<_>, _>>()
    };
    Ok(match (a, b) {
        (Value::Array(left), Value::Array(right)) => {
            if left.len() != right.len() {
                let (left, right) = (left.len(), right.len());
                return Err(format!("lists of {left} and {right} elements do not pair"));
            }
            let pairs = left.iter().zip(right);
            pairs
                .map(|(a, b)| arithmetic(a, op, b))
                .collect::<Result<Vec<_>, _>>()?
                .into()
        }
        (Value::Array(left), b) => each(left, &|a| arithmetic(a, op, b))?.into(),
        (a, Value::Array(right)) => each(right, &|b| arithmetic(a, op, b))?.into(),
        (a, b) => {
            let (a, b) = (number(a)?, number(b)?);
            json!(match op {
                "+" => a + b,
                "-" => a - b,
                "*" => a * b,
                _ if b == 0.0 => return Err("division by zero".to_owned()),
                _ => a / b,
            })
        }
    })
}

/// Follows the steps of a path from a value; `name` is for messages.
fn follow(facts: &Value, mut here: Value, name: &str, steps: &[Step]) -> Result<Value, String> {
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
                let wanted = &wanted.value(facts, &mut String::new())?;
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
            Step::Where(name, op, _) => walked.push_str(&format!("[{name} {op} …]")),
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
        let nearest = suggestion(name, object.keys().map(String::as_str));
        format!("no `{name}`; there are: {names}{nearest}")
    })
}

fn compare(a: &Value, op: &str, b: &Value) -> Result<bool, String> {
    let equal = match (number(a), number(b)) {
        (Ok(a), Ok(b)) => a == b,
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
            "640_rescan": {"pauses": 0},
        })
    }

    fn holds(text: &str) -> Result<bool, String> {
        truth(&Expression::parse(text)?.value(&facts())?)
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
            ("max(switches.silence_ms - 10) == 290", true),
            ("sum(switches.silence_ms / switches.silence_ms) == 3", true),
            ("otherwise(flows[0].bytes_by_link.wwan0, 0) == 0", true),
            ("max(otherwise(flows.finished_s, 60)) == 60", true),
            ("if(rtt_ms > 10, floor(2.9), nothing) == 2", true),
            ("640_rescan.pauses == 0", true),
            ("max(values(640_rescan)) == 0", true),
            (
                "sum(list(links[0], links[0]).packets_while_down) == 0",
                true,
            ),
            ("count(switches[silence_ms > (rtt_ms / 2)]) == 2", true),
            ("flows[0].sha256_ok == 1", true),
        ] {
            assert_eq!(holds(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_an_error_in_words() {
        for (text, says) in [
            ("flows[3].bytes == 1", "has 1 elements, there is no [3]"),
            ("flow[0].bytes == 1", "no `flow`; there are: "),
            ("flow[0].bytes == 1", "did you mean `flows`?"),
            (
                "switches.silence_ms + flows.bytes == 1",
                "lists of 3 and 1 elements",
            ),
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

    #[test]
    fn an_expression_says_which_names_it_needs_and_what_it_compares() {
        let expression = Expression::parse("max(links.packets_while_down) * 2 <= 3 + rtt_ms");
        let expression = expression.unwrap();
        assert_eq!(
            expression.names().into_iter().collect::<Vec<_>>(),
            ["links", "rtt_ms"]
        );
        assert_eq!(
            expression.sides(&facts()),
            Ok(Some((json!(0.0), json!(23.0))))
        );
        let sum = Expression::parse("1 + 2").unwrap();
        assert_eq!(sum.sides(&facts()), Ok(None));
    }
}
