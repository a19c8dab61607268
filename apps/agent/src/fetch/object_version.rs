//! The version of an object as its origin names it, by which a later request asks for the object only if it
//! changed (RFC 9110 §13.1.2 and §13.1.3).
//!
//! ```text
//!  first run   GET /a                         ▶ 200, ETag: "v1"
//!  next run    GET /a, If-None-Match: "v1"    ▶ 304: nothing is transferred
//! ```
//!
//! A weak entity tag is good enough here, because no bytes are joined; see [`Validator`] for those that are.

use http::header::{ETAG, IF_MODIFIED_SINCE, IF_NONE_MATCH};
use http::{HeaderMap, HeaderName};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use url::Url;

use super::validator::Validator;

/// What an origin calls the version of an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum VersionName {
    /// An entity tag, weak or strong, as the origin wrote it.
    Tag(String),
    /// A Last-Modified date that is old enough to distinguish versions, as the origin wrote it.
    Since(String),
}

/// The version of an object as its origin names it, at the address where the redirects ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectVersion {
    name: VersionName,
    /// A digest of that address, which may itself contain what nobody else may know.
    address: String,
}

impl ObjectVersion {
    /// The version in the header of an answer from `url`, if it has one.
    pub fn from_headers(headers: &HeaderMap, url: &Url) -> Option<ObjectVersion> {
        let tag = headers.get(ETAG).and_then(|tag| tag.to_str().ok());
        let tag = tag.filter(|tag| tag.starts_with('"') || tag.starts_with("W/\""));
        let name = match (tag, Validator::from_headers(headers)) {
            (Some(tag), _) => VersionName::Tag(tag.to_owned()),
            (None, Some(Validator::Modified(date))) => VersionName::Since(date),
            (None, _) => return None,
        };
        let address = digest_of(url);
        Some(ObjectVersion { name, address })
    }

    /// The header field of a request to `url` for the object unless it still has this version. None if the version
    /// is that of what is at another address.
    pub fn condition(&self, url: &Url) -> Option<(HeaderName, &str)> {
        let condition = match &self.name {
            VersionName::Tag(tag) => (IF_NONE_MATCH, &**tag),
            VersionName::Since(date) => (IF_MODIFIED_SINCE, &**date),
        };
        (self.address == digest_of(url)).then_some(condition)
    }
}

fn digest_of(url: &Url) -> String {
    let mut plain = url.clone();
    // The password may change, and the object stays the same.
    let _ = plain.set_username("");
    let _ = plain.set_password(None);
    plain.set_fragment(None);
    hex::encode(&Sha256::digest(plain.as_str())[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_asked_by_also_if_it_is_weak_and_a_date_only_if_it_is_old() {
        let url: Url = "https://h.example/a".parse().expect("a URL");
        let version = |fields: &[(&'static str, &'static str)]| {
            let fields = fields.iter().map(|(name, value)| {
                let name: HeaderName = name.parse().expect("a name");
                (name, value.parse().expect("a value"))
            });
            ObjectVersion::from_headers(&fields.collect(), &url)
        };
        let changed = ("last-modified", "Sun, 06 Nov 1994 08:49:37 GMT");
        let later = ("date", "Sun, 06 Nov 1994 09:49:37 GMT");
        let weak = version(&[("etag", "W/\"a\""), changed, later]).expect("a version");
        assert_eq!(weak.condition(&url), Some((IF_NONE_MATCH, "W/\"a\"")));
        let dated = version(&[changed, later]).expect("a version");
        assert_eq!(dated.condition(&url), Some((IF_MODIFIED_SINCE, changed.1)));
        assert_eq!(
            version(&[changed, ("date", "Sun, 06 Nov 1994 08:49:40 GMT")]),
            None
        );
        assert_eq!(version(&[("etag", "v1")]), None);
        let with_password = "https://me:p@h.example/a#x".parse().expect("a URL");
        assert!(weak.condition(&with_password).is_some());
        let other = "https://h.example/b".parse().expect("a URL");
        assert_eq!(
            weak.condition(&other),
            None,
            "what is elsewhere has its own tags"
        );
    }
}
