//! What a server's tickets are made of, kept where its sessions are.
//!
//! It does not follow from the host's key: who learns that later cannot come as one of its devices.

use bytes::Bytes;

use crate::journal::{Journal, JournalBatch, JournalError};
use crate::server::seed;

/// The journal's note with the seed of a server's tickets.
pub const TICKET_SEED_NOTE: &[u8] = b"d2tp ticket seed";

/// The seed from the journal, which is created if it is missing.
pub(crate) fn load_or_create(journal: Option<&Journal>) -> Result<[u8; 32], JournalError> {
    let Some(journal) = journal else {
        // Sessions do not survive the process, and neither need tickets.
        return Ok(seed());
    };
    let held = journal.note(TICKET_SEED_NOTE)?;
    if let Some(seed) = held.and_then(|held| held.try_into().ok()) {
        return Ok(seed);
    }
    let seed = seed();
    let mut batch = JournalBatch::default();
    let note = Bytes::copy_from_slice(&seed);
    batch.notes.insert(TICKET_SEED_NOTE.into(), Some(note));
    journal.commit(&batch)?;
    Ok(seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_keeps_its_seed_and_no_two_have_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| {
            let journal = Journal::open(&dir.path().join(name)).unwrap();
            load_or_create(Some(&journal)).unwrap()
        };
        assert_eq!(of("a"), of("a"));
        assert_ne!(of("a"), of("b"));
        assert_ne!(load_or_create(None).unwrap(), load_or_create(None).unwrap());
    }
}
