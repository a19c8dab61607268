//! Validators that distinguish two versions of an object: strong entity tags, and dates old enough
//! to trust.

use http::HeaderMap;
use http::header::{DATE, ETAG, LAST_MODIFIED};
use serde::{Deserialize, Serialize};

/// A date counts as strong when the object was at least this much older than the answer: within
/// one second it could have changed twice (RFC 9110 §8.8.2.2 leaves the margin to us).
const DATE_MARGIN_S: i64 = 60;

/// A strong validator: equal means equal bytes, if the origin keeps its word.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Validator {
    /// A strong entity tag, quotes included.
    Etag(String),
    /// A Last-Modified date, as the origin wrote it.
    Modified(String),
}

impl Validator {
    /// The strong validator in an answer's header, if it has one.
    pub fn from_headers(headers: &HeaderMap) -> Option<Validator> {
        let text = |name| headers.get(name).and_then(|v| v.to_str().ok());
        if let Some(etag) = text(ETAG)
            && etag.starts_with('"')
        {
            return Some(Validator::Etag(etag.to_owned()));
        }
        let modified = text(LAST_MODIFIED)?;
        let age = http_date(text(DATE)?)?.as_second() - http_date(modified)?.as_second();
        (age >= DATE_MARGIN_S).then(|| Validator::Modified(modified.to_owned()))
    }

    /// The validator as an `If-Range` header has it.
    pub fn as_str(&self) -> &str {
        match self {
            Validator::Etag(text) | Validator::Modified(text) => text,
        }
    }
}

fn http_date(text: &str) -> Option<jiff::Timestamp> {
    jiff::fmt::rfc2822::DateTimeParser::new()
        .parse_timestamp(text)
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(n, v)| (n.parse().expect("name"), v.parse().expect("value")))
            .collect()
    }

    #[test]
    fn only_strong_validators_count() {
        let of = |pairs: &[_]| Validator::from_headers(&headers(pairs));
        assert_eq!(
            of(&[("etag", "\"a\"")]),
            Some(Validator::Etag("\"a\"".into()))
        );
        assert_eq!(of(&[("etag", "W/\"a\"")]), None);
        assert_eq!(of(&[]), None);
        let old = ("last-modified", "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(of(&[old]), None, "no Date to compare with");
        assert_eq!(
            of(&[old, ("date", "Sun, 06 Nov 1994 09:49:37 GMT")]),
            Some(Validator::Modified(old.1.into()))
        );
        assert_eq!(
            of(&[old, ("date", "Sun, 06 Nov 1994 08:49:40 GMT")]),
            None,
            "three seconds old"
        );
    }
}
