//! The token of a connection that outlives its program.

use std::fmt::Write as _;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::errno::SocketFault;

// As long as a key, so that it cannot be guessed.
pub(crate) use crate::header::TOKEN_BYTES;

/// A token for a connection that outlives its program. Any process of the same user that knows it may
/// open the connection again.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ReopenToken(pub(crate) [u8; TOKEN_BYTES]);

impl std::fmt::Debug for ReopenToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The token must not appear in logs.
        f.write_str("Token")
    }
}

impl ReopenToken {
    /// A fresh token.
    pub(crate) fn new() -> Result<ReopenToken, SocketFault> {
        let mut token = [0; TOKEN_BYTES];
        aws_lc_rs::rand::fill(&mut token)
            .map_err(|_| SocketFault::new(libc::EIO, "the system has no random numbers"))?;
        Ok(ReopenToken(token))
    }
}

impl Serialize for ReopenToken {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(2 * TOKEN_BYTES);
        for byte in self.0 {
            let _ = write!(text, "{byte:02x}");
        }
        to.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for ReopenToken {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<ReopenToken, D::Error> {
        let text = String::deserialize(from)?;
        let digits: Option<Vec<u8>> = text
            .chars()
            .map(|digit| digit.to_digit(16).map(|digit| digit as u8))
            .collect();
        let digits = digits.filter(|digits| digits.len() == 2 * TOKEN_BYTES);
        let digits = digits.ok_or_else(|| serde::de::Error::custom("not a token"))?;
        let mut token = [0; TOKEN_BYTES];
        for (byte, pair) in token.iter_mut().zip(digits.chunks(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
        Ok(ReopenToken(token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_back_and_what_is_none_is_an_error() {
        let token = ReopenToken::new().unwrap();
        assert!(token != ReopenToken::new().unwrap());
        let text = serde_json::to_string(&token).unwrap();
        assert_eq!(text.len(), 66);
        assert!(serde_json::from_str::<ReopenToken>(&text).unwrap() == token);
        assert_eq!(format!("{token:?}"), "Token");
        for nonsense in [
            "\"\"",
            "\"00\"",
            "7",
            &text.replace('"', "\"0"),
            &"\"é".repeat(32),
        ] {
            assert!(
                serde_json::from_str::<ReopenToken>(nonsense).is_err(),
                "{nonsense}"
            );
        }
        let not_hex = format!("\"{}\"", "g".repeat(64));
        assert!(serde_json::from_str::<ReopenToken>(&not_hex).is_err());
    }
}
