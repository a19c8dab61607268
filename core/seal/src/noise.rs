//! The cryptographic primitives that `snow` uses for Noise handshakes, all from `aws-lc-rs`.
//!
//! `snow`'s own primitives take 262 µs for each side of a handshake; an X25519 product takes 31 µs
//! here (measured: LAB).

use std::cell::Cell;

use aws_lc_rs::{aead, agreement, digest};
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher, Dh, Hash, Random};

use crate::host_key::SecretKey;

/// Noise pattern of a first handshake: IK, in which the initiator knows the responder's key.
pub(crate) const PATTERN: &str = "Noise_IK_25519_ChaChaPoly_SHA256";
/// Noise pattern of a handshake by ticket: both ends know the ticket's secret.
pub(crate) const PATTERN_BY_TICKET: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";

/// Supplies `snow` with the primitives and with one seed of the caller as its randomness. It has
/// the host's own key pair, so that no handshake computes the public key again.
pub(crate) struct NoiseResolver {
    pub(crate) seed: [u8; 32],
    pub(crate) local: SecretKey,
}

/// A random source that returns its seed once: a handshake message draws only one ephemeral key.
struct SingleSeedRng(Option<[u8; 32]>);

impl Random for SingleSeedRng {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), snow::Error> {
        let seed = self.0.take().ok_or(snow::Error::Rng)?;
        if dest.len() != seed.len() {
            return Err(snow::Error::Rng);
        }
        dest.copy_from_slice(&seed);
        Ok(())
    }
}

thread_local! {
    static X25519_OPERATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The number of X25519 operations that this thread has computed for handshakes: public keys and
/// products. It shows the cost of a flood without a clock.
pub fn x25519_operations() -> u64 {
    X25519_OPERATIONS.get()
}

fn count_x25519() {
    X25519_OPERATIONS.set(X25519_OPERATIONS.get() + 1);
}

pub(crate) struct X25519 {
    host: SecretKey,
    held: DhKey,
}

enum DhKey {
    Nothing,
    /// The static key of this host.
    Host,
    Ephemeral(Box<EphemeralKey>),
}

struct EphemeralKey {
    private: [u8; 32],
    public: [u8; 32],
    key: agreement::PrivateKey,
}

impl Drop for EphemeralKey {
    fn drop(&mut self) {
        self.private.fill(0);
        // Keeps the compiler from removing the write above as a dead store.
        std::hint::black_box(&self.private);
    }
}

impl X25519 {
    /// A resolver for handshakes of this host.
    pub(crate) fn of(host: &SecretKey) -> Self {
        X25519 {
            host: host.clone(),
            held: DhKey::Nothing,
        }
    }
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }
    fn pub_len(&self) -> usize {
        32
    }
    fn priv_len(&self) -> usize {
        32
    }
    fn set(&mut self, privkey: &[u8]) {
        if self.host.is(privkey) {
            self.held = DhKey::Host;
            return;
        }
        let key = agreement::PrivateKey::from_private_key(&agreement::X25519, privkey)
            .expect("any 32 bytes are an X25519 private key");
        count_x25519();
        let public = key
            .compute_public_key()
            .expect("X25519 public keys always exist");
        let bytes = |b: &[u8]| b.try_into().expect("X25519 keys have 32 bytes");
        self.held = DhKey::Ephemeral(Box::new(EphemeralKey {
            private: bytes(privkey),
            public: bytes(public.as_ref()),
            key,
        }));
    }
    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), snow::Error> {
        let mut private = [0; 32];
        rng.try_fill_bytes(&mut private)?;
        self.set(&private);
        Ok(())
    }
    fn pubkey(&self) -> &[u8] {
        match &self.held {
            DhKey::Nothing => &[0; 32],
            DhKey::Host => self.host.public_bytes(),
            DhKey::Ephemeral(pair) => &pair.public,
        }
    }
    fn privkey(&self) -> &[u8] {
        match &self.held {
            DhKey::Nothing => &[0; 32],
            DhKey::Host => self.host.secret_bytes(),
            DhKey::Ephemeral(pair) => &pair.private,
        }
    }
    fn dh(&self, pubkey: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        let key = match &self.held {
            DhKey::Nothing => return Err(snow::Error::Dh),
            DhKey::Host => self.host.key(),
            DhKey::Ephemeral(pair) => &pair.key,
        };
        let peer = agreement::UnparsedPublicKey::new(&agreement::X25519, &pubkey[..32]);
        count_x25519();
        // R-HS-3: aws-lc refuses an all-zero result, so a peer cannot choose the secret.
        agreement::agree(key, peer, snow::Error::Dh, |shared| {
            out[..32].copy_from_slice(shared);
            Ok(())
        })
    }
}

#[derive(Default)]
pub(crate) struct ChaChaPoly(Option<aead::LessSafeKey>);

impl ChaChaPoly {
    fn nonce(n: u64) -> aead::Nonce {
        let mut bytes = [0; 12];
        bytes[4..].copy_from_slice(&n.to_le_bytes());
        aead::Nonce::assume_unique_for_key(bytes)
    }
    fn key(&self) -> &aead::LessSafeKey {
        self.0
            .as_ref()
            .expect("snow sets a key before it uses a cipher")
    }
}

impl Cipher for ChaChaPoly {
    fn name(&self) -> &'static str {
        "ChaChaPoly"
    }
    fn set(&mut self, key: &[u8; 32]) {
        let key = aead::UnboundKey::new(&aead::CHACHA20_POLY1305, key).expect("32 bytes");
        self.0 = Some(aead::LessSafeKey::new(key));
    }
    fn encrypt(&self, nonce: u64, authtext: &[u8], plaintext: &[u8], out: &mut [u8]) -> usize {
        let n = plaintext.len();
        out[..n].copy_from_slice(plaintext);
        let (text, rest) = out.split_at_mut(n);
        let tag = self
            .key()
            .seal_in_place_separate_tag(Self::nonce(nonce), aead::Aad::from(authtext), text)
            .expect("handshake messages are far below the AEAD's limit");
        rest[..16].copy_from_slice(tag.as_ref());
        n + 16
    }
    fn decrypt(
        &self,
        nonce: u64,
        authtext: &[u8],
        ciphertext: &[u8],
        out: &mut [u8],
    ) -> Result<usize, snow::Error> {
        let n = ciphertext
            .len()
            .checked_sub(16)
            .ok_or(snow::Error::Decrypt)?;
        let (text, tag) = ciphertext.split_at(n);
        self.key()
            .open_separate_gather(
                Self::nonce(nonce),
                aead::Aad::from(authtext),
                text,
                tag,
                &mut out[..n],
            )
            .map_err(|_| snow::Error::Decrypt)?;
        Ok(n)
    }
}

struct Sha256(digest::Context);

impl Hash for Sha256 {
    fn name(&self) -> &'static str {
        "SHA256"
    }
    fn block_len(&self) -> usize {
        64
    }
    fn hash_len(&self) -> usize {
        32
    }
    fn reset(&mut self) {
        self.0 = digest::Context::new(&digest::SHA256);
    }
    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }
    fn result(&mut self, out: &mut [u8]) {
        out[..32].copy_from_slice(self.0.clone().finish().as_ref());
    }
}

impl CryptoResolver for NoiseResolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(SingleSeedRng(Some(self.seed))))
    }
    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        let dh = || X25519::of(&self.local);
        matches!(choice, DHChoice::Curve25519).then(|| Box::new(dh()) as Box<dyn Dh>)
    }
    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        matches!(choice, HashChoice::SHA256)
            .then(|| Box::new(Sha256(digest::Context::new(&digest::SHA256))) as Box<dyn Hash>)
    }
    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        matches!(choice, CipherChoice::ChaChaPoly)
            .then(|| Box::new(ChaChaPoly::default()) as Box<dyn Cipher>)
    }
}
