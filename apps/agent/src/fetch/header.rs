//! Fields the user adds to the request: `--header 'Name: value'`.

use http::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, HOST, IF_RANGE, RANGE, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderName, HeaderValue};

/// One field of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderField {
    /// Name of the header field.
    pub name: HeaderName,
    /// Value of the field; marked sensitive, so that it is never logged.
    pub value: HeaderValue,
}

/// Substrings of field names that suggest credentials.
const CREDENTIAL_WORDS: [&str; 8] = [
    "auth",
    "cookie",
    "token",
    "key",
    "secret",
    "session",
    "password",
    "signature",
];

impl HeaderField {
    /// Whether the field may carry credentials: it is sent to no other origin, and no proxy sees it.
    pub fn is_credential(&self) -> bool {
        let name = self.name.as_str();
        CREDENTIAL_WORDS.iter().any(|word| name.contains(word))
    }
}

/// Reads `Name: value`.
///
/// # Errors
/// A sentence that says what a field looks like, or whose business this one is. It does not repeat
/// the value, which may be a secret.
pub fn parse(text: &str) -> Result<HeaderField, String> {
    let Some((name, value)) = text.split_once(':') else {
        return Err("a header is `Name: value`, for example 'Accept: audio/mpeg'".into());
    };
    let name: HeaderName = name.parse().map_err(|_| {
        format!("`{name}` is not the name of a header field: use letters, digits and -")
    })?;
    let ours = [
        HOST,
        RANGE,
        IF_RANGE,
        ACCEPT_ENCODING,
        CONTENT_LENGTH,
        TRANSFER_ENCODING,
        CONNECTION,
        TE,
        TRAILER,
        UPGRADE,
    ];
    if ours.contains(&name) {
        return Err(format!(
            "{name} is set by the download itself, so that it can resume; leave it out"
        ));
    }
    let mut value = HeaderValue::from_str(value.trim()).map_err(|_| {
        format!("the value of {name} has a line break or another control character")
    })?;
    value.set_sensitive(true);
    Ok(HeaderField { name, value })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_and_those_of_the_download_refused() {
        let field = parse("Accept:  audio/mpeg ").expect("a field");
        assert_eq!(field.value, "audio/mpeg");
        for wrong in ["Accept", "a b: c", "Range: bytes=0-", "X: a\nY: b", ": x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_proves_who_we_are_is_known_by_its_name() {
        let secret = |text| parse(text).expect("a field").is_credential();
        assert!(secret("Authorization: Bearer x"));
        assert!(secret("Cookie: a=b"));
        assert!(secret("X-API-Key: k"));
        assert!(secret("PRIVATE-TOKEN: t"));
        assert!(!secret("Accept: audio/mpeg"));
        assert!(!secret("User-Agent: me"));
        assert!(!secret("Referer: https://x.example/"));
    }

    #[test]
    fn a_mistake_does_not_repeat_what_may_be_a_secret() {
        let said = parse("Authorization: hush\u{7}").expect_err("a control character");
        assert!(!said.contains("hush"), "{said}");
        assert!(!parse("Bearer hush").expect_err("no colon").contains("hush"));
    }
}
