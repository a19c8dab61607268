//! The secret that a session keeps from its exchange by ML-KEM, for the handshakes that follow.

/// Bytes of the number that names a session secret.
pub const SECRET_ID_BYTES: usize = 8;

/// A secret that both ends of a session have, and the number by which a SYN names it.
#[derive(Clone, PartialEq, Eq)]
pub struct SessionSecret {
    /// The number of the secret. It says nothing about the secret.
    pub id: [u8; SECRET_ID_BYTES],
    /// The secret itself, which is never sent.
    pub secret: [u8; 32],
}

impl Drop for SessionSecret {
    fn drop(&mut self) {
        self.secret.fill(0);
        // Keeps the compiler from removing the write above as a dead store.
        std::hint::black_box(&self.secret);
    }
}

impl std::fmt::Debug for SessionSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionSecret")
    }
}
