//! The text form of keys: base64url without padding, 43 characters.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use d2tp_driver::HostKey;

/// A text that is not a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a key: expected 43 characters of base64url (32 bytes), as `cedos key show` prints")]
pub struct ParseKeyError;

/// Writes a key as base64url without padding.
///
/// ```
/// assert_eq!(cedos_prox::show_key(&[0; 32]).len(), 43);
/// ```
pub fn show_key(key: &HostKey) -> String {
    URL_SAFE_NO_PAD.encode(key)
}

/// Reads a key written by [`show_key`].
///
/// # Errors
/// [`ParseKeyError`] when the text is anything else.
pub fn parse_key(text: &str) -> Result<HostKey, ParseKeyError> {
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| ParseKeyError)?;
    bytes.try_into().map_err(|_| ParseKeyError)
}

/// Serde for a key.
pub(crate) mod one {
    use d2tp_driver::HostKey;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(key: &HostKey, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&super::show_key(key))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<HostKey, D::Error> {
        let text = String::deserialize(from)?;
        super::parse_key(&text).map_err(D::Error::custom)
    }
}

/// Serde for a key that may be absent.
pub(crate) mod option {
    use d2tp_driver::HostKey;
    use serde::{Deserializer, Serializer};

    pub(crate) fn serialize<S>(key: &Option<HostKey>, to: S) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
    {
        match key {
            Some(key) => super::one::serialize(key, to),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D>(from: D) -> Result<Option<HostKey>, D::Error>
    where
        D: Deserializer<'de>,
    {
        super::one::deserialize(from).map(Some)
    }
}

/// Serde for lists of keys.
pub(crate) mod list {
    use d2tp_driver::HostKey;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(keys: &[HostKey], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(keys.iter().map(super::show_key))
    }

    pub(crate) fn deserialize<'de, D>(from: D) -> Result<Vec<HostKey>, D::Error>
    where
        D: Deserializer<'de>,
    {
        Vec::<String>::deserialize(from)?
            .iter()
            .map(|text| super::parse_key(text).map_err(D::Error::custom))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_survives_being_written_and_read() {
        let key: HostKey = std::array::from_fn(|i| i as u8 * 7);
        assert_eq!(parse_key(&show_key(&key)), Ok(key));
    }

    #[test]
    fn a_short_key_and_a_padded_key_are_refused() {
        assert_eq!(parse_key("AAAA"), Err(ParseKeyError));
        assert_eq!(
            parse_key(&format!("{}=", show_key(&[1; 32]))),
            Err(ParseKeyError)
        );
    }
}
