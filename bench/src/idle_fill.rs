//! Sleepers made in bulk: a server's journal of hibernated hosts, written as the driver writes it,
//! without handshakes.

use std::path::Path;

use anyhow::Result;
use bytes::Bytes;
use d2tp_driver::{
    Journal, JournalBatch, JournalFlowKey, JournalSessionKey, StoredRecord, TICKET_SEED_NOTE,
};
use d2tp_session::{PublicKey, Role};

use crate::handshake_hosts::{TICKET_SEED, flow_id, key_of, record_of};

/// Sessions written in one transaction.
const BATCH: u64 = 50_000;

/// Writes the sleepers of these hosts to a journal.
///
/// # Errors
/// The journal cannot be written.
pub fn fill(path: &Path, hosts: std::ops::Range<u64>) -> Result<()> {
    let journal = Journal::open(path)?;
    let mut seed = JournalBatch::default();
    let made_of = Bytes::from_static(&TICKET_SEED);
    seed.notes.insert(TICKET_SEED_NOTE.into(), Some(made_of));
    journal.commit(&seed)?;
    let mut next = hosts.start;
    while next < hosts.end {
        let end = (next + BATCH).min(hosts.end);
        let mut batch = JournalBatch::default();
        for (number, peer) in publics(next..end) {
            let session = JournalSessionKey {
                peer,
                instance: number,
            };
            let record = record_of(Role::Responder, peer, number).encode();
            batch
                .sessions
                .insert(session, Some(StoredRecord::now(record)));
            let flow = flow_id();
            let memo = Bytes::copy_from_slice(&number.to_be_bytes());
            batch
                .memos
                .insert(JournalFlowKey { session, flow }, Some(memo));
        }
        journal.commit(&batch)?;
        next = end;
    }
    Ok(())
}

/// The public keys of hosts, computed on two cores.
fn publics(hosts: std::ops::Range<u64>) -> Vec<(u64, PublicKey)> {
    let of =
        |hosts: std::ops::Range<u64>| hosts.map(|n| (n, key_of(n).public())).collect::<Vec<_>>();
    let middle = hosts.start + (hosts.end - hosts.start) / 2;
    let (first, second) = (hosts.start..middle, middle..hosts.end);
    std::thread::scope(|scope| {
        let second = scope.spawn(move || of(second));
        let mut all = of(first);
        all.extend(second.join().expect("it only computes"));
        all
    })
}
