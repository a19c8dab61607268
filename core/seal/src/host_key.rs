//! A host's static key pair. The public key is the host's identity.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::agreement;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// A host's public key, which is its identity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey(pub [u8; 32]);

/// A host's private key. Any process that has it can act as that host. Copies share one place in
/// memory.
#[derive(Clone)]
pub struct SecretKey(Arc<KeyPair>);

struct KeyPair {
    secret: [u8; 32],
    public: PublicKey,
    /// The key in the form that X25519 needs. Computing it costs a point multiplication, so it is
    /// kept.
    key: agreement::PrivateKey,
}

/// A text is not a valid key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key is 43 letters, digits, '-' or '_' (32 bytes in base64url); this is not")]
pub struct KeyTextError;

fn bytes_of(text: &str) -> Result<[u8; 32], KeyTextError> {
    let text = text.trim().trim_end_matches('=');
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| KeyTextError)?;
    bytes.try_into().map_err(|_| KeyTextError)
}

impl SecretKey {
    /// The private key with these 32 secret bytes.
    pub fn from_bytes(secret: [u8; 32]) -> Self {
        let key = agreement::PrivateKey::from_private_key(&agreement::X25519, &secret)
            .expect("any 32 bytes are an X25519 private key");
        let public = key
            .compute_public_key()
            .expect("X25519 public keys always exist");
        let public = PublicKey(
            public
                .as_ref()
                .try_into()
                .expect("X25519 keys have 32 bytes"),
        );
        SecretKey(Arc::new(KeyPair {
            secret,
            public,
            key,
        }))
    }
    /// The public key that belongs to this private key.
    pub fn public(&self) -> PublicKey {
        self.0.public
    }
    /// The private key as a type of aws-lc-rs.
    pub(crate) fn key(&self) -> &agreement::PrivateKey {
        &self.0.key
    }
    pub(crate) fn public_bytes(&self) -> &[u8; 32] {
        &self.0.public.0
    }
    pub(crate) fn secret_bytes(&self) -> &[u8; 32] {
        &self.0.secret
    }
    /// Whether `secret` holds the bytes of this key, compared in constant time.
    pub(crate) fn is(&self, secret: &[u8]) -> bool {
        verify_slices_are_equal(&self.0.secret, secret).is_ok()
    }
    /// The secret bytes, to be stored in a file that only its owner can read.
    pub fn to_bytes(&self) -> [u8; 32] {
        self.0.secret
    }
    /// The secret key as text, as key files contain it.
    pub fn to_text(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.0.secret)
    }
    /// Reads what [`SecretKey::to_text`] wrote.
    ///
    /// # Errors
    /// The text is not 32 bytes in base64url.
    pub fn from_text(text: &str) -> Result<Self, KeyTextError> {
        bytes_of(text).map(SecretKey::from_bytes)
    }
}

impl PublicKey {
    /// Reads the text form shown by `Display`.
    ///
    /// # Errors
    /// The text is not 32 bytes in base64url.
    pub fn from_text(text: &str) -> Result<Self, KeyTextError> {
        bytes_of(text).map(PublicKey)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}…", &self.to_string()[..8])
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey of {:?}", self.0.public)
    }
}

impl Drop for KeyPair {
    fn drop(&mut self) {
        self.secret.fill(0);
        // Keeps the compiler from removing the write above as a dead store.
        std::hint::black_box(&self.secret);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_their_text_form() {
        let key = SecretKey::from_bytes([7; 32]);
        assert_eq!(
            SecretKey::from_text(&key.to_text()).unwrap().public(),
            key.public()
        );
        assert_eq!(
            PublicKey::from_text(&key.public().to_string()),
            Ok(key.public())
        );
        assert_eq!(PublicKey::from_text("short"), Err(KeyTextError));
    }

    #[test]
    fn x25519_matches_rfc_7748_section_6_1() {
        let alice = SecretKey::from_bytes([
            0x77, 0x07, 0x6d, 0x0a, 0x73, 0x18, 0xa5, 0x7d, 0x3c, 0x16, 0xc1, 0x72, 0x51, 0xb2,
            0x66, 0x45, 0xdf, 0x4c, 0x2f, 0x87, 0xeb, 0xc0, 0x99, 0x2a, 0xb1, 0x77, 0xfb, 0xa5,
            0x1d, 0xb9, 0x2c, 0x2a,
        ]);
        assert_eq!(alice.public().0[..4], [0x85, 0x20, 0xf0, 0x09]);
    }
}
