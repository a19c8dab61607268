//! The seed of a server's tickets, which is stored in the journal with its sessions.
//!
//! It is not derived from the host's key, so that whoever learns that key later cannot connect as
//! one of its devices.

use crate::journal::JournalError;
use crate::record_store::RecordStore;
use crate::secrets::seed;

/// The journal's note with the seed of a server's tickets.
pub const TICKET_SEED_NOTE: &[u8] = b"d2tp ticket seed";

/// The seed from the journal, which is created if it is missing.
pub(crate) fn load_or_create(journal: Option<&dyn RecordStore>) -> Result<[u8; 32], JournalError> {
    let Some(journal) = journal else {
        // Sessions do not survive the process, so tickets need not survive it either.
        return Ok(seed());
    };
    let held = journal.note(TICKET_SEED_NOTE)?;
    if let Some(seed) = held.and_then(|held| held.try_into().ok()) {
        return Ok(seed);
    }
    let seed = seed();
    if journal.replace_note(TICKET_SEED_NOTE, None, Some(&seed))? {
        return Ok(seed);
    }
    // Another node was faster.
    let held = journal.note(TICKET_SEED_NOTE)?;
    Ok(held.and_then(|held| held.try_into().ok()).unwrap_or(seed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_keeps_its_seed_and_no_two_have_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| {
            let journal = crate::Journal::open(&dir.path().join(name)).unwrap();
            load_or_create(Some(&journal)).unwrap()
        };
        assert_eq!(of("a"), of("a"));
        assert_ne!(of("a"), of("b"));
        assert_ne!(load_or_create(None).unwrap(), load_or_create(None).unwrap());
    }
}
