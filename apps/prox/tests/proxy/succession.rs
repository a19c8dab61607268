//! A proxy that leaves its flows to the next process: what it still asks of origins, and what it waits for.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use crate::support::*;
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_prox::{Prox, ProxConfig, ProxFlowOutcome, SystemResolver};
use d2tp_driver::{CommitReport, Journal, JournalBatch, JournalError, RecordStore};
use parking_lot::{Condvar, Mutex};

const OBJECT: &str = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nETag: \"e\"\r\n\r\nabc";

/// A journal on a disk that writes nothing until it is told to.
#[derive(Debug)]
struct SlowJournal {
    journal: Journal,
    writes: Mutex<bool>,
    told: Condvar,
}

impl SlowJournal {
    fn begin_to_write(&self) {
        *self.writes.lock() = true;
        self.told.notify_all();
    }
}

impl RecordStore for SlowJournal {
    fn place(&self) -> String {
        self.journal.place()
    }

    fn commit(&self, batch: &JournalBatch) -> Result<CommitReport, JournalError> {
        self.told
            .wait_while(&mut self.writes.lock(), |writes| !*writes);
        RecordStore::commit(&self.journal, batch)
    }

    fn note(&self, name: &[u8]) -> Result<Option<Vec<u8>>, JournalError> {
        self.journal.note(name)
    }

    fn replace_note(
        &self,
        name: &[u8],
        expected: Option<&[u8]>,
        value: Option<&[u8]>,
    ) -> Result<bool, JournalError> {
        self.journal.replace_note(name, expected, value)
    }

    fn as_journal(&self) -> Option<&Journal> {
        Some(&self.journal)
    }
}

#[tokio::test]
async fn an_answer_is_waited_for_until_the_journal_has_its_copy() {
    let state = tempfile::tempdir().unwrap();
    let journal = Arc::new(SlowJournal {
        journal: Journal::open(&state.path().join("journal")).unwrap(),
        writes: Mutex::default(),
        told: Condvar::new(),
    });
    let config = ProxConfig {
        state_dir: state.path().to_owned(),
        ..config()
    };
    let resolver = Arc::new(SystemResolver);
    let prox = Prox::with_journal(config, resolver, Some(journal.clone())).unwrap();
    let origin = ScriptedOrigin::fixed(OBJECT).await;
    let (_serving, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    assert_eq!(device.read_head().await.status, 200);
    prox.until_answered(PATIENCE).await;
    let mut recorded = pin!(prox.until_recorded(PATIENCE));
    let is_waiting =
        std::future::poll_fn(|cx| Poll::Ready(recorded.as_mut().poll(cx).is_pending()));
    assert!(is_waiting.await);
    assert!(!device.may_sleep());
    journal.begin_to_write();
    recorded.await;
    assert!(device.may_sleep());
}

#[tokio::test]
async fn a_request_that_comes_when_the_next_process_takes_over_is_sent_to_no_origin() {
    let prox = prox();
    let origin = ScriptedOrigin::fixed(OBJECT).await;
    prox.until_answered(PATIENCE).await;
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    // Time for the request to be read, measured in another flow, which is served.
    let (_tunnel, mut other) = start(&prox, CLIENT);
    let to = origin.address;
    other
        .send(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n"))
        .await;
    assert_eq!(other.read_head().await.status, 200);
    device.crash_with_reset();
    let report = ended(serving).await;
    assert!(report.asked.starts_with("GET "), "{}", report.asked);
    assert!(matches!(report.outcome, ProxFlowOutcome::Broken(_)));
    assert_eq!(origin.requests().len(), 0);
    // Nothing is waited for on its account.
    prox.until_recorded(PATIENCE).await;
}
