//! ML-KEM-768 (FIPS 203) of `aws-lc`: keys and ciphertexts from seeds, which are arguments.
//!
//! ```text
//!  device                                    server
//!   seed ─▶ encapsulation key  ──────────▶   encapsulate(key, seed) ─▶ ciphertext, shared secret
//!   decapsulate(seed, ciphertext)  ◀──────   ciphertext
//!     └─▶ the same shared secret
//! ```
//!
//! `aws-lc-rs` draws the randomness of both operations itself, so two calls of `aws-lc-sys` take its
//! place here: with a seed, a simulation replays. The bindings of `aws-lc-sys` declare these calls
//! only with its feature `all-bindings`, which needs bindgen on some targets. They are declared here
//! instead. After an update of `aws-lc-sys` they must have its new prefix, or the program does not
//! link.

use std::ffi::c_int;
use std::ptr::{NonNull, null_mut};

use aws_lc_rs::kem::{Ciphertext, DecapsulationKey, ML_KEM_768};
use aws_lc_sys as ffi;

use crate::SealError;

/// Bytes of the seed of a key pair: *d* and *z* of FIPS 203.
pub const KEM_SEED_BYTES: usize = 64;
/// Bytes of an encapsulation key.
pub const KEM_KEY_BYTES: usize = 1184;
/// Bytes of a ciphertext.
pub const KEM_CIPHERTEXT_BYTES: usize = 1088;
/// Bytes of a decapsulation key in its expanded form.
const EXPANDED_BYTES: usize = 2400;

unsafe extern "C" {
    #[link_name = "aws_lc_0_47_0_EVP_PKEY_keygen_deterministic"]
    fn keygen_deterministic(
        context: *mut ffi::EVP_PKEY_CTX,
        out_key: *mut *mut ffi::EVP_PKEY,
        seed: *const u8,
        seed_len: *mut usize,
    ) -> c_int;
    #[link_name = "aws_lc_0_47_0_EVP_PKEY_encapsulate_deterministic"]
    fn encapsulate_deterministic(
        context: *mut ffi::EVP_PKEY_CTX,
        ciphertext: *mut u8,
        ciphertext_len: *mut usize,
        secret: *mut u8,
        secret_len: *mut usize,
        seed: *const u8,
        seed_len: *mut usize,
    ) -> c_int;
}

/// The shared secret of an encapsulation. It is erased when it is dropped.
pub struct KemSecret(pub(crate) [u8; 32]);

impl Drop for KemSecret {
    fn drop(&mut self) {
        self.0.fill(0);
        // Keeps the compiler from removing the write above as a dead store.
        std::hint::black_box(&self.0);
    }
}

/// An `EVP_PKEY` of this module. It is freed when it is dropped.
struct KemKey(NonNull<ffi::EVP_PKEY>);

impl Drop for KemKey {
    fn drop(&mut self) {
        // SAFETY: the pointer came from aws-lc, is owned here alone, and is not used afterwards.
        unsafe { ffi::EVP_PKEY_free(self.0.as_ptr()) }
    }
}

/// An `EVP_PKEY_CTX` of this module. It is freed when it is dropped.
struct KemContext(NonNull<ffi::EVP_PKEY_CTX>);

impl Drop for KemContext {
    fn drop(&mut self) {
        // SAFETY: the pointer came from aws-lc, is owned here alone, and is not used afterwards.
        unsafe { ffi::EVP_PKEY_CTX_free(self.0.as_ptr()) }
    }
}

/// The key pair of a seed.
fn key_pair(seed: &[u8; KEM_SEED_BYTES]) -> KemKey {
    let mut key = null_mut();
    let mut len = seed.len();
    // SAFETY: the context is a new one of the right type, and the seed has the length that is passed.
    // aws-lc writes `key` only if it succeeds.
    let made = unsafe {
        let context = ffi::EVP_PKEY_CTX_new_id(ffi::EVP_PKEY_KEM, null_mut());
        NonNull::new(context)
            .map(KemContext)
            .is_some_and(|context| {
                let context = context.0.as_ptr();
                ffi::EVP_PKEY_CTX_kem_set_params(context, ffi::NID_MLKEM768) == 1
                    && ffi::EVP_PKEY_keygen_init(context) == 1
                    && keygen_deterministic(context, &mut key, seed.as_ptr(), &mut len) == 1
            })
    };
    let key = NonNull::new(key).filter(|_| made);
    KemKey(key.expect("every seed of this length has a key pair, and memory is there"))
}

/// The encapsulation key of a seed.
pub fn kem_encapsulation_key(seed: &[u8; KEM_SEED_BYTES]) -> [u8; KEM_KEY_BYTES] {
    let key = key_pair(seed);
    let (mut out, mut len) = ([0; KEM_KEY_BYTES], KEM_KEY_BYTES);
    // SAFETY: the key is valid, and the buffer has the length that is passed.
    let done =
        unsafe { ffi::EVP_PKEY_get_raw_public_key(key.0.as_ptr(), out.as_mut_ptr(), &mut len) };
    assert!(
        done == 1 && len == KEM_KEY_BYTES,
        "ML-KEM-768 has one size of keys"
    );
    out
}

/// Makes a shared secret and the ciphertext that brings it to the owner of an encapsulation key.
///
/// # Errors
/// The bytes are no encapsulation key.
pub fn kem_encapsulate(
    key: &[u8; KEM_KEY_BYTES],
    seed: &[u8; 32],
) -> Result<([u8; KEM_CIPHERTEXT_BYTES], KemSecret), SealError> {
    let mut ciphertext = [0; KEM_CIPHERTEXT_BYTES];
    let mut secret = KemSecret([0; 32]);
    let mut lengths = (ciphertext.len(), secret.0.len(), seed.len());
    // SAFETY: all buffers have the lengths that are passed, and aws-lc copies the key.
    let done = unsafe {
        let key = ffi::EVP_PKEY_kem_new_raw_public_key(ffi::NID_MLKEM768, key.as_ptr(), key.len());
        let key = NonNull::new(key)
            .map(KemKey)
            .ok_or(SealError::NotAuthentic)?;
        let context = ffi::EVP_PKEY_CTX_new(key.0.as_ptr(), null_mut());
        let context = NonNull::new(context).map(KemContext);
        let context = context.ok_or(SealError::NotAuthentic)?;
        encapsulate_deterministic(
            context.0.as_ptr(),
            ciphertext.as_mut_ptr(),
            &mut lengths.0,
            secret.0.as_mut_ptr(),
            &mut lengths.1,
            seed.as_ptr(),
            &mut lengths.2,
        )
    };
    match done {
        1 => Ok((ciphertext, secret)),
        _ => Err(SealError::NotAuthentic),
    }
}

/// The shared secret that a ciphertext brings. A ciphertext that was not made for the key of this
/// seed gives an unpredictable secret instead of an error.
///
/// # Errors
/// The ciphertext has the wrong length.
pub fn kem_decapsulate(
    seed: &[u8; KEM_SEED_BYTES],
    ciphertext: &[u8],
) -> Result<KemSecret, SealError> {
    let key = key_pair(seed);
    let (mut expanded, mut len) = ([0; EXPANDED_BYTES], EXPANDED_BYTES);
    // SAFETY: the key is valid, and the buffer has the length that is passed.
    let done = unsafe {
        ffi::EVP_PKEY_get_raw_private_key(key.0.as_ptr(), expanded.as_mut_ptr(), &mut len)
    };
    assert!(
        done == 1 && len == EXPANDED_BYTES,
        "ML-KEM-768 has one size of keys"
    );
    let key = DecapsulationKey::new(&ML_KEM_768, &expanded);
    expanded.fill(0);
    // Keeps the compiler from removing the write above as a dead store.
    std::hint::black_box(&expanded);
    let key = key.map_err(|_| SealError::BadLength)?;
    let secret = key.decapsulate(Ciphertext::from(ciphertext));
    let secret = secret.map_err(|_| SealError::BadLength)?;
    let secret = secret
        .as_ref()
        .try_into()
        .map_err(|_| SealError::BadLength)?;
    Ok(KemSecret(secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_get_the_same_secret_and_seeds_give_the_same_bytes_again() {
        let seed = [7; KEM_SEED_BYTES];
        let key = kem_encapsulation_key(&seed);
        assert_eq!(key, kem_encapsulation_key(&seed));
        let (ciphertext, theirs) = kem_encapsulate(&key, &[3; 32]).unwrap();
        assert_eq!(ciphertext, kem_encapsulate(&key, &[3; 32]).unwrap().0);
        let ours = kem_decapsulate(&seed, &ciphertext).unwrap();
        assert_eq!(ours.0, theirs.0);
        let mut bent = ciphertext;
        bent[500] ^= 1;
        assert_ne!(kem_decapsulate(&seed, &bent).unwrap().0, theirs.0);
        assert!(kem_decapsulate(&seed, &ciphertext[1..]).is_err());
    }

    #[test]
    fn what_is_no_encapsulation_key_is_refused() {
        // R-KEM-5
        assert!(kem_encapsulate(&[0xff; KEM_KEY_BYTES], &[3; 32]).is_err());
    }
}
