//! The encoding of a value in the journal: its bytes, then eight bytes of SHA-256 over table, key
//! and value.

use super::error::JournalErrorKind;

/// Size of a checksum in bytes: enough to detect damage, no protection against attackers.
const SUM_BYTES: usize = 8;

fn sum(table: u8, key: &[u8], value: &[u8]) -> [u8; SUM_BYTES] {
    let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
    context.update(&[table]);
    context.update(&(key.len() as u64).to_be_bytes());
    context.update(key);
    context.update(value);
    let digest = context.finish();
    digest.as_ref()[..SUM_BYTES]
        .try_into()
        .expect("SHA-256 has 32 bytes")
}

pub(super) fn seal(table: u8, key: &[u8], value: &[u8]) -> Vec<u8> {
    [value, &sum(table, key, value)].concat()
}

pub(super) fn unseal<'a>(
    table: u8,
    key: &[u8],
    sealed: &'a [u8],
) -> Result<&'a [u8], JournalErrorKind> {
    let at = sealed
        .len()
        .checked_sub(SUM_BYTES)
        .ok_or(JournalErrorKind::Damaged("a value"))?;
    let (value, told) = sealed.split_at(at);
    if told != sum(table, key, value) {
        return Err(JournalErrorKind::Damaged("a value"));
    }
    Ok(value)
}
