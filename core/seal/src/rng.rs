//! Random numbers from a seed: the key stream of ChaCha20. A program draws the seed from the
//! operating system, a simulation takes it from its scenario.

use aws_lc_rs::aead;

/// A generator of unpredictable bytes. Equal seeds give equal bytes on every machine.
///
/// Every session has one and uses it about a dozen times, so it stores only its seed, which takes a
/// twentieth of the cipher's state.
pub struct Rng {
    seed: [u8; 32],
    blocks: u64,
}

impl Rng {
    /// A generator that starts from `seed`.
    pub fn new(seed: [u8; 32]) -> Self {
        Rng { seed, blocks: 0 }
    }

    /// Fills `out` with random bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        out.fill(0);
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.blocks.to_be_bytes());
        self.blocks += 1;
        let key = aead::UnboundKey::new(&aead::CHACHA20_POLY1305, &self.seed).expect("32 bytes");
        let _tag = aead::LessSafeKey::new(key)
            .seal_in_place_separate_tag(
                aead::Nonce::assume_unique_for_key(nonce),
                aead::Aad::empty(),
                out,
            )
            .expect("callers ask for a few bytes");
    }

    /// Returns the next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        self.fill(&mut out);
        out
    }

    /// Returns the next 64-bit number.
    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.array())
    }

    /// A new generator, seeded by this one.
    pub fn fork(&mut self) -> Rng {
        Rng::new(self.array())
    }
}

impl Drop for Rng {
    fn drop(&mut self) {
        self.seed.fill(0);
        // Keeps the compiler from removing the write above as a dead store.
        std::hint::black_box(&self.seed);
    }
}
