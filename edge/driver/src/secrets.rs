//! Random seeds, and secrets that are derived from others.

/// 32 random bytes of the system.
pub(crate) fn seed() -> [u8; 32] {
    let mut seed = [0; 32];
    // A program that is started for a single connection has to wait for this.
    getrandom::fill(&mut seed).expect("the system has randomness");
    seed
}

/// A secret for one purpose, derived from another.
pub(crate) fn derive(purpose: &[u8], secret: &[u8; 32]) -> [u8; 32] {
    let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
    context.update(purpose);
    context.update(secret);
    context
        .finish()
        .as_ref()
        .try_into()
        .expect("SHA-256 has 32 bytes")
}
