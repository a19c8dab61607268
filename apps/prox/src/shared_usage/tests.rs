use d2tp_driver::RecordStore as _;

use super::*;
use crate::client_limits::ClientLimitTable;
use crate::config::ProxConfig;
use crate::counters::TrafficDirection;
use crate::memory_notes::{MemoryNotes, SharedNotes};
use crate::quota_ledger::FlowPermit;

const ONE: HostKey = [1; 32];

/// A process of a node.
struct TestNode {
    store: Arc<MemoryNotes>,
    usage: Arc<SharedUsage>,
    ledger: Arc<QuotaLedger>,
    traffic: Arc<TrafficTable>,
}

impl TestNode {
    fn new(notes: &Arc<SharedNotes>, node: &str) -> TestNode {
        let config = ProxConfig::default();
        let limits = Arc::new(ClientLimitTable::new(&config));
        let store = notes.at(node);
        TestNode {
            usage: Arc::new(SharedUsage::new(store.clone())),
            store,
            ledger: Arc::new(QuotaLedger::new(&config, limits.clone(), true)),
            traffic: Arc::new(TrafficTable::open(None, limits, Arc::default()).unwrap()),
        }
    }

    fn carry(&self, bytes: usize) {
        let flow = self.traffic.flow(ONE);
        flow.moved(TrafficDirection::Down, bytes);
    }

    fn begin_flow(&self) -> FlowPermit {
        self.ledger.admit(ONE, 0).unwrap()
    }

    async fn tell(&self) {
        let _ = self.usage.tell_one(ONE, &self.ledger, &self.traffic).await;
    }

    /// What the client has carried, after a look at the store.
    async fn month(&self) -> u64 {
        assert!(self.usage.read(ONE, &self.traffic).await);
        self.counted()
    }

    /// What the client has carried, as far as this node knows.
    fn counted(&self) -> u64 {
        self.traffic.month(&ONE).down
    }

    fn note(&self) -> UsageNote {
        let raw = self.store.note(&name_of(&ONE)).unwrap().unwrap();
        serde_json::from_slice(&raw).unwrap()
    }
}

#[tokio::test]
async fn bytes_whose_reply_was_lost_count_once() {
    let notes = Arc::new(SharedNotes::default());
    let (a, b) = (TestNode::new(&notes, "a"), TestNode::new(&notes, "b"));
    assert_eq!(a.month().await, 0);
    a.carry(100);
    a.store.loses_replies.store(true, Ordering::Relaxed);
    a.tell().await;
    assert!(a.note().without_run("").down == 100, "the store took it");
    a.store.loses_replies.store(false, Ordering::Relaxed);
    assert_eq!(a.month().await, 100);
    a.carry(50);
    a.tell().await;
    assert_eq!((a.month().await, b.month().await), (150, 150));
    b.carry(7);
    b.tell().await;
    assert_eq!((a.month().await, b.month().await), (157, 157));
}

#[tokio::test]
async fn bytes_that_are_read_while_they_are_told_count_once() {
    let notes = Arc::new(SharedNotes::default());
    let (a, b) = (TestNode::new(&notes, "a"), TestNode::new(&notes, "b"));
    assert_eq!(a.month().await, 0);
    a.carry(100);
    let reply = a.store.hold_reply();
    let reading = async {
        assert_eq!(
            a.note().without_run("").down,
            100,
            "the store has it already"
        );
        assert_eq!(a.month().await, 100);
        b.carry(7);
        b.tell().await;
        assert_eq!(a.month().await, 107);
        reply.add_permits(1);
    };
    tokio::join!(biased; a.tell(), reading);
    assert_eq!(a.counted(), 107);
    a.carry(1);
    a.tell().await;
    assert_eq!((a.month().await, b.month().await), (108, 108));
}

#[tokio::test]
async fn an_older_note_that_comes_late_changes_nothing() {
    let notes = Arc::new(SharedNotes::default());
    let (a, b) = (TestNode::new(&notes, "a"), TestNode::new(&notes, "b"));
    b.carry(10);
    b.tell().await;
    let reply = a.store.hold_reply();
    let meanwhile = async {
        b.carry(10);
        b.tell().await;
        assert_eq!(a.month().await, 20);
        a.carry(5);
        a.tell().await;
        reply.add_permits(1);
    };
    let (older, ()) = tokio::join!(biased; a.month(), meanwhile);
    assert_eq!(older, 25);
    a.tell().await;
    assert_eq!((a.month().await, b.month().await), (25, 25));
}

#[tokio::test]
async fn a_note_with_one_sum_is_read_and_an_earlier_process_is_added_to_it() {
    let notes = Arc::new(SharedNotes::default());
    let month = serde_json::to_string(&Month::now()).unwrap();
    let older = format!(r#"{{"month":{month},"down":1000,"up":0}}"#);
    notes.put(&name_of(&ONE), older.as_bytes());
    let first = TestNode::new(&notes, "a");
    first.carry(10);
    first.tell().await;
    let next = TestNode::new(&notes, "a");
    next.carry(1);
    next.tell().await;
    assert_eq!(next.note().base().down, 1010);
    assert_eq!(next.month().await, 1011);
    // The first ends, and has something to say yet.
    first.carry(100);
    first.tell().await;
    assert_eq!((first.month().await, next.month().await), (1111, 1111));
    next.carry(1);
    next.tell().await;
    assert_eq!((first.month().await, next.month().await), (1112, 1112));
}

#[tokio::test]
async fn a_note_that_the_store_lost_is_written_again() {
    let notes = Arc::new(SharedNotes::default());
    let (a, b) = (TestNode::new(&notes, "a"), TestNode::new(&notes, "b"));
    a.carry(100);
    a.tell().await;
    notes.empty();
    assert_eq!(a.month().await, 100);
    a.tell().await;
    assert_eq!(b.month().await, 100);
}

#[tokio::test(start_paused = true)]
async fn a_silent_node_has_no_flows_in_the_note_and_its_bytes_count_once_when_it_is_back() {
    let notes = Arc::new(SharedNotes::default());
    let (a, b) = (TestNode::new(&notes, "a"), TestNode::new(&notes, "b"));
    let _flow = b.begin_flow();
    b.carry(100);
    b.usage.look_at_nodes().await.unwrap();
    b.tell().await;
    a.carry(1);
    a.tell().await;
    a.usage.look_at_nodes().await.unwrap();
    assert_eq!(a.usage.flows_elsewhere(&ONE), 1);
    tokio::time::advance(NODE_SILENT_MAX).await;
    a.usage.look_at_nodes().await.unwrap();
    a.carry(1);
    a.tell().await;
    assert_eq!(a.usage.flows_elsewhere(&ONE), 0);
    let note = a.note();
    assert!(note.flows.is_empty(), "{note:?}");
    assert_eq!((note.base().down, note.without_run("").down), (100, 102));
    // It was only unreachable.
    b.carry(10);
    b.usage.look_at_nodes().await.unwrap();
    b.tell().await;
    a.usage.look_at_nodes().await.unwrap();
    assert_eq!((a.month().await, b.month().await), (112, 112));
    assert_eq!(a.usage.flows_elsewhere(&ONE), 1);
}

#[tokio::test]
async fn flows_that_begin_at_once_wait_for_the_same_answer() {
    let notes = Arc::new(SharedNotes::default());
    let (a, b) = (TestNode::new(&notes, "a"), TestNode::new(&notes, "b"));
    b.carry(100);
    b.tell().await;
    notes.reads.store(0, Ordering::Relaxed);
    let reply = a.store.hold_reply();
    let second = async {
        let mut second = std::pin::pin!(a.usage.refresh(ONE, &a.traffic));
        assert!(futures_util::poll!(second.as_mut()).is_pending());
        reply.add_permits(1);
        second.await;
        assert_eq!(a.counted(), 100);
    };
    tokio::join!(biased; a.usage.refresh(ONE, &a.traffic), second);
    assert_eq!(notes.reads.load(Ordering::Relaxed), 1);
}
