//! `Cache-Control` of a request or a response (RFC 9111 §5.2), and dates as caches read them.

use std::time::{Duration, SystemTime};

use http::header::{HeaderMap, HeaderName};
use serde::{Deserialize, Serialize};

/// The longest time that is counted; longer ones are cut to it (RFC 9111 §1.2.2).
const SECONDS_MAX: u64 = 1 << 31;

/// The directives of a `Cache-Control` field, names in lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CacheControl {
    directives: Vec<Directive>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Directive {
    name: String,
    argument: Argument,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Argument {
    None,
    Text(String),
    /// Not of the form that the grammar allows.
    Malformed,
}

impl CacheControl {
    /// Parses all lines of the field `name`.
    pub(crate) fn of(headers: &HeaderMap, name: HeaderName) -> CacheControl {
        let lines = headers.get_all(name);
        let directives = lines
            .iter()
            .map(|line| String::from_utf8_lossy(line.as_bytes()))
            .flat_map(|line| list_members(&line))
            .filter_map(|member| Directive::parse(&member))
            .collect();
        CacheControl { directives }
    }

    /// Whether the directive is there, with or without an argument.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.directives.iter().any(|known| known.name == name)
    }

    /// Whether the directive is there without an argument, which then concerns the whole response.
    pub(crate) fn has_unqualified(&self, name: &str) -> bool {
        let of_name = |known: &&Directive| known.name == name;
        let mut all = self.directives.iter().filter(of_name);
        all.any(|known| !matches!(known.argument, Argument::Text(_)))
    }

    /// The field names in the arguments of a directive, such as `no-cache="a, b"`.
    pub(crate) fn field_names(&self, name: &str) -> Vec<HeaderName> {
        let mut names = Vec::new();
        for known in self.directives.iter().filter(|known| known.name == name) {
            if let Argument::Text(text) = &known.argument {
                names.extend(text.split(',').filter_map(|name| name.trim().parse().ok()));
            }
        }
        names
    }

    /// The time in a directive: the shortest if it is there more than once, zero if it cannot be read, since a
    /// response whose freshness is invalid counts as stale (RFC 9111 §4.2.1).
    pub(crate) fn span(&self, name: &str) -> Option<Duration> {
        let of_name = self.directives.iter().filter(|known| known.name == name);
        let read = of_name.map(|known| match &known.argument {
            Argument::Text(text) => seconds(text).unwrap_or_default(),
            Argument::None | Argument::Malformed => Duration::ZERO,
        });
        read.min()
    }
}

impl Directive {
    fn parse(member: &str) -> Option<Directive> {
        let (name, argument) = match member.split_once('=') {
            None => (member, Argument::None),
            Some((name, text)) => {
                let argument = match unquoted(text) {
                    Some(text) if name.trim_end() == name => Argument::Text(text),
                    _ => Argument::Malformed,
                };
                (name, argument)
            }
        };
        let name = name.trim().to_ascii_lowercase();
        (!name.is_empty()).then_some(Directive { name, argument })
    }
}

/// A token, or the inside of a quoted string.
fn unquoted(text: &str) -> Option<String> {
    let Some(inside) = text.strip_prefix('"') else {
        let is_token = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\'' | ',' | ';');
        return (!text.is_empty() && text.chars().all(is_token)).then(|| text.to_owned());
    };
    let inside = inside.strip_suffix('"')?;
    let mut plain = String::new();
    let mut chars = inside.chars();
    while let Some(c) = chars.next() {
        plain.push(if c == '\\' { chars.next()? } else { c });
    }
    Some(plain)
}

/// The members of a comma-separated list; a comma inside a quoted string separates nothing.
fn list_members(line: &str) -> Vec<String> {
    let mut members = Vec::new();
    let mut member = String::new();
    let (mut is_quoted, mut is_escaped) = (false, false);
    for c in line.chars() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => {
                members.push(std::mem::take(&mut member).trim().to_owned());
                continue;
            }
            _ => {}
        }
        member.push(c);
    }
    members.push(member.trim().to_owned());
    members.retain(|member| !member.is_empty());
    members
}

/// A count of seconds (RFC 9111 §1.2.2).
fn seconds(text: &str) -> Option<Duration> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count = text.parse().unwrap_or(SECONDS_MAX).min(SECONDS_MAX);
    Some(Duration::from_secs(count))
}

/// The `Age` of a response: the first member if it is a list, and nothing if it cannot be read (RFC 9111 §5.1).
pub(crate) fn age_field(headers: &HeaderMap) -> Duration {
    let line = headers.get(http::header::AGE);
    let text = line.and_then(|line| line.to_str().ok()).unwrap_or_default();
    let first = text.split(',').next().unwrap_or_default();
    seconds(first.trim()).unwrap_or_default()
}

/// A date field, which must be there once. Words are read in any case; senders err in it.
pub(crate) fn date_field(headers: &HeaderMap, name: HeaderName) -> Option<SystemTime> {
    let mut lines = headers.get_all(name).iter();
    let line = lines.next().filter(|_| lines.next().is_none())?;
    http_date(line.to_str().ok()?)
}

/// Reads a date in one of the three forms of RFC 9110 §5.6.7.
pub(crate) fn http_date(text: &str) -> Option<SystemTime> {
    if let Ok(date) = httpdate::parse_http_date(text) {
        return Some(date);
    }
    let mut in_case = String::with_capacity(text.len());
    for c in text.chars() {
        let begins = !in_case.ends_with(|before: char| before.is_ascii_alphabetic());
        in_case.push(match begins {
            true => c.to_ascii_uppercase(),
            false => c.to_ascii_lowercase(),
        });
    }
    let in_case = match in_case.strip_suffix("Gmt") {
        Some(rest) => format!("{rest}GMT"),
        None => in_case,
    };
    httpdate::parse_http_date(&in_case).ok()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use http::header::{AGE, CACHE_CONTROL, EXPIRES};

    use super::*;

    fn parsed(lines: &[&str]) -> CacheControl {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(CACHE_CONTROL, HeaderValue::from_str(line).unwrap());
        }
        CacheControl::of(&headers, CACHE_CONTROL)
    }

    fn max_age(line: &str) -> Option<u64> {
        parsed(&[line]).span("max-age").map(|span| span.as_secs())
    }

    #[test]
    fn names_have_no_case_and_unknown_directives_do_no_harm() {
        let parsed = parsed(&["foo, No-StOrE", "PRIVATE, bar=\"a,b\""]);
        assert!(parsed.has("no-store") && parsed.has("private") && !parsed.has("b"));
        assert_eq!(max_age("foobar, MaX-aGe=3600"), Some(3600));
    }

    #[test]
    fn a_time_is_read_as_the_grammar_says_and_is_zero_otherwise() {
        assert_eq!(max_age("max-age=003600"), Some(3600));
        assert_eq!(max_age("max-age=\"3600\""), Some(3600));
        assert_eq!(max_age("max-age=99999999999999999999"), Some(SECONDS_MAX));
        assert_eq!(max_age("max-age=1800, max-age=1"), Some(1));
        assert_eq!(max_age("extension=\"max-age=3600\", max-age=1"), Some(1));
        assert_eq!(max_age("extension=\"a\\\",max-age=3600\""), None);
        for text in [
            "-1", "'3600'", "3600.0", "a3600", "3600a", "", " 3600", "\"1",
        ] {
            assert_eq!(max_age(&format!("max-age={text}")), Some(0), "{text}");
        }
        assert_eq!(max_age("max-age"), Some(0));
        assert_eq!(max_age("max-age =3600"), Some(0));
        assert_eq!(max_age("s-maxage=5"), None);
    }

    #[test]
    fn a_directive_may_concern_only_some_fields() {
        let some = parsed(&["no-cache=\"A, b\", max-age=5"]);
        assert!(some.has("no-cache") && !some.has_unqualified("no-cache"));
        assert_eq!(some.field_names("no-cache"), ["a", "b"]);
        assert!(parsed(&["no-cache=\"a\", no-cache"]).has_unqualified("no-cache"));
        // What cannot be read must not weaken it.
        assert!(parsed(&["no-cache=\"a"]).has_unqualified("no-cache"));
    }

    #[test]
    fn an_age_that_cannot_be_read_is_none() {
        let age = |line| {
            let mut headers = HeaderMap::new();
            headers.insert(AGE, HeaderValue::from_static(line));
            age_field(&headers).as_secs()
        };
        assert_eq!(
            (age("7200"), age("7200, 0"), age("0, 7200")),
            (7200, 7200, 0)
        );
        assert_eq!((age("abc"), age("-7200"), age("7200.0")), (0, 0, 0));
        assert_eq!(age("2147483649"), SECONDS_MAX);
    }

    #[test]
    fn dates_are_read_in_any_case_and_in_no_other_form() {
        let read = |text| http_date(text).is_some();
        for text in [
            "Thu, 18 Aug 2050 02:01:18 GMT",
            "THU, 18 Aug 2050 02:01:18 GMT",
            "Thu, 18 AUG 2050 02:01:18 gMT",
            "Thu Aug 18 02:01:18 2050",
            "Thursday, 18-Aug-50 02:01:18 GMT",
        ] {
            assert!(read(text), "{text}");
        }
        for text in [
            "Thu, 18 Aug 2050 02:01:18 UTC",
            "Thu, 18 Aug 2050 02:01:18 AEST",
            "Thu, 18 Aug 50 02:01:18 GMT",
            "Thu 18 Aug 2050 02:01:18 GMT",
            "Thu, 18  Aug  2050 02:01:18 GMT",
            "Thu, 18-Aug-2050 02:01:18 GMT",
            "Thu, 18 Aug 2050 02.01.18 GMT",
            "Thu, 18 Aug 2050 2:01:18 GMT",
            "0",
            "",
        ] {
            assert!(!read(text), "{text}");
        }
        let mut twice = HeaderMap::new();
        for _ in 0..2 {
            let date = HeaderValue::from_static("Thu, 18 Aug 2050 02:01:18 GMT");
            twice.append(EXPIRES, date);
        }
        assert_eq!(date_field(&twice, EXPIRES), None);
    }

    proptest::proptest! {
        #[test]
        fn no_field_makes_the_parser_panic(line in "[ -~]{0,60}") {
            let parsed = parsed(&[&line]);
            let _ = (parsed.span("max-age"), parsed.has_unqualified("no-cache"), http_date(&line));
        }
    }
}
