//! Randomness from a seed: ChaCha20's key stream. The seed comes from the caller, so a program
//! draws it from the system and a simulation from its scenario.

use aws_lc_rs::aead;

/// A generator of unpredictable bytes; the same seed gives the same bytes on every machine.
///
/// Every session has one and asks it a dozen times in its life: it keeps its seed, a twentieth of
/// what the cipher's own state takes.
pub struct Rng {
    seed: [u8; 32],
    blocks: u64,
}

impl Rng {
    /// A generator that starts from `seed`.
    pub fn new(seed: [u8; 32]) -> Self {
        Rng { seed, blocks: 0 }
    }

    /// Fills `out`.
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

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        self.fill(&mut out);
        out
    }

    /// The next 64-bit number.
    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.array())
    }

    /// A generator of its own for somebody else.
    pub fn fork(&mut self) -> Rng {
        Rng::new(self.array())
    }
}

impl Drop for Rng {
    fn drop(&mut self) {
        self.seed.fill(0);
        // Keeps the compiler from dropping the write above as dead.
        std::hint::black_box(&self.seed);
    }
}
