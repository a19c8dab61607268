//! Invitations: one line with the address and key of a proxy and a secret with which a device is
//! enrolled, once.
//!
//! ```text
//!  d2tp://proxy.example:4433/KEY#SECRET
//!                            │   └─ 16 random bytes, then 4 with the second when it expires
//!                            └───── the proxy's public key
//! ```
//!
//! The proxy keeps the hash of the secret. The secret itself is in the line, in one sealed packet, and
//! nowhere else. The expiry in it lets a refused device report the reason; the proxy uses its
//! stored expiry.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use d2tp_driver::{AddressError, ServerAddress};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// Random bytes of a secret: as many bits as a key of AES-128.
const RANDOM_BYTES: usize = 16;
/// Bytes of a secret.
const SECRET_BYTES: usize = RANDOM_BYTES + 4;

/// The secret of an invitation.
#[derive(Clone, PartialEq, Eq)]
pub struct InvitationSecret([u8; SECRET_BYTES]);

/// Never shows the secret.
impl fmt::Debug for InvitationSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InvitationSecret(…)")
    }
}

impl InvitationSecret {
    /// A new secret; `expires_s`: when it expires, in seconds since 1970.
    pub fn generate(expires_s: u64) -> InvitationSecret {
        let mut secret = [0; SECRET_BYTES];
        getrandom::fill(&mut secret[..RANDOM_BYTES]).expect("the system has randomness");
        let expires_s = u32::try_from(expires_s).unwrap_or(u32::MAX);
        secret[RANDOM_BYTES..].copy_from_slice(&expires_s.to_be_bytes());
        InvitationSecret(secret)
    }

    /// When the invitation expires, in seconds since 1970.
    pub fn expires_s(&self) -> u64 {
        let (_, bytes) = self.0.split_last_chunk().expect("it has four and more");
        u64::from(u32::from_be_bytes(*bytes))
    }

    /// The secret as it stands in the line.
    pub fn to_text(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.0)
    }

    /// Reads what [`InvitationSecret::to_text`] wrote.
    pub fn from_text(text: &str) -> Option<InvitationSecret> {
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        bytes.try_into().ok().map(InvitationSecret)
    }

    /// The hash that a proxy stores. The secret is random, so nothing slower is needed.
    pub(crate) fn hash(&self) -> InvitationHash {
        let text = [b"d2prox invitation ".as_slice(), &self.0].concat();
        let hash = digest(&SHA256, &text);
        InvitationHash(hash.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

/// The hash of an invitation's secret.
#[derive(Clone, Debug)]
pub(crate) struct InvitationHash([u8; 32]);

/// Bytes of a hash that an invitation is called by.
const ID_BYTES: usize = 4; // a guess: a thousand are open at most, and a clash is told

impl InvitationHash {
    /// What the operator calls the invitation by: the beginning of the hash, which opens nothing.
    pub(crate) fn id(&self) -> String {
        let bytes = self.0[..ID_BYTES].iter();
        bytes.map(|byte| format!("{byte:02x}")).collect()
    }

    /// Compares in constant time.
    pub(crate) fn is(&self, other: &InvitationHash) -> bool {
        verify_slices_are_equal(&self.0, &other.0).is_ok()
    }
}

impl Serialize for InvitationHash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl<'de> Deserialize<'de> for InvitationHash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<InvitationHash, D::Error> {
        let text = String::deserialize(from)?;
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(D::Error::custom)?;
        let bytes = bytes.try_into();
        bytes
            .map(InvitationHash)
            .map_err(|_| D::Error::custom("a hash has 32 bytes"))
    }
}

/// An invitation to a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invitation {
    /// The proxy's address and key.
    pub proxy: ServerAddress,
    /// The secret of the invitation.
    pub secret: InvitationSecret,
}

/// Why a text is no invitation. It does not repeat the text, which may hold a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Each variant's message is its documentation.
pub enum InvitationError {
    #[error(
        "this is a proxy's address without an invitation: the line that `cedos prox invite` prints \
         has a # and a secret at its end"
    )]
    NoSecret,
    #[error("the secret after the # is not whole; copy the line that `cedos prox invite` printed")]
    BadSecret,
    #[error(
        "this is no invitation; it looks like d2tp://HOST:PORT/KEY#SECRET, as `cedos prox invite` prints it"
    )]
    BadAddress,
}

impl FromStr for Invitation {
    type Err = InvitationError;

    fn from_str(text: &str) -> Result<Invitation, InvitationError> {
        let text = text.trim();
        let (address, secret) = match text.split_once('#') {
            Some((address, secret)) => (address, Some(secret)),
            None => (text, None),
        };
        let proxy = address
            .parse()
            .map_err(|_: AddressError| InvitationError::BadAddress)?;
        let secret = secret.ok_or(InvitationError::NoSecret)?;
        let secret = InvitationSecret::from_text(secret).ok_or(InvitationError::BadSecret)?;
        Ok(Invitation { proxy, secret })
    }
}

impl Invitation {
    /// The line that a device joins with. Whoever has it can be enrolled instead.
    pub fn to_line(&self) -> String {
        format!("{}#{}", self.proxy, self.secret.to_text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_driver::PublicKey;

    #[test]
    fn a_line_comes_back_and_mistakes_are_named_without_the_secret() {
        let secret = InvitationSecret::generate(1_900_000_000);
        assert_eq!(secret.expires_s(), 1_900_000_000);
        let invitation = Invitation {
            proxy: ServerAddress {
                stream: Some(8443),
                ..ServerAddress::new("2001:db8::1", 4433, PublicKey([7; 32]))
            },
            secret,
        };
        let line = invitation.to_line();
        assert_eq!(line.parse(), Ok(invitation.clone()));
        assert_eq!(format!("  {line}\n").parse(), Ok(invitation.clone()));
        let secret = invitation.secret.to_text();
        for (text, error) in [
            (invitation.proxy.to_string(), InvitationError::NoSecret),
            (
                line[..line.len() - 1].to_owned(),
                InvitationError::BadSecret,
            ),
            (format!("x{line}"), InvitationError::BadAddress),
        ] {
            assert_eq!(text.parse::<Invitation>(), Err(error), "{text}");
            assert!(!error.to_string().contains(&secret[..8]));
        }
        assert!(!format!("{invitation:?}").contains(&secret[..8]));
    }

    #[test]
    fn secrets_differ_and_only_the_same_one_has_the_same_hash() {
        let (one, two) = (InvitationSecret::generate(1), InvitationSecret::generate(1));
        assert_ne!(one, two);
        assert!(one.hash().is(&one.clone().hash()));
        assert!(!one.hash().is(&two.hash()));
    }
}
