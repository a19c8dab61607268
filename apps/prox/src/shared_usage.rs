//! What clients do at all nodes of a proxy together: bytes of the month, flows at once, when they were seen.
//!
//! ```text
//!  note U KEY    bytes of the month · when seen · flows at each node      replaced by compare-and-swap
//!  note N NODE   a number that changes while the node runs
//!
//!  this node's flows and bytes ── within 0.5 s, bytes every 5 s ──▶ U KEY ── at a client's next flow ──▶ other nodes
//! ```
//!
//! Each node adds what it has counted since it added last, so the order does not matter and nothing is counted twice. A
//! client with flows at several nodes may pass a limit by what they admit before they hear of each other. While the store
//! does not answer, each node holds clients to what it knows; what it counted is added when the store is back.
//!
//! Only known clients are counted together: a key that anybody may make up would fill the store.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use d2tp_driver::{HostKey, JournalError, SharedRecords};
use futures_util::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::client_traffic::{Month, MonthBytes, TrafficTable};
use crate::quota_ledger::QuotaLedger;

/// How often other nodes are told of flows that began and ended. Higher: a client can have more flows than its limit for
/// longer. Lower: more operations of the store.
const TELL_EVERY: Duration = Duration::from_millis(500); // a guess
/// How often other nodes are told of the bytes of clients with flows. A node that is killed has not told of the last.
const TELL_BYTES_EVERY: Duration = Duration::from_secs(5); // a guess
/// How old what is known of a client's use of other nodes may be when it opens a flow.
const FRESH_FOR: Duration = Duration::from_secs(1);
/// How long a flow waits for the store before its client is held to what this node knows.
const ANSWER_WITHIN: Duration = Duration::from_millis(250); // a guess: hundreds of round trips to a store nearby
/// How long a node counts as running whose number has not changed.
const NODE_SILENT_MAX: Duration = Duration::from_secs(30); // as its name stays taken in the store
/// How many clients are written at once.
const WRITES_AT_ONCE: usize = 64; // as copies
/// How often a note is written that other nodes change at this moment.
const WRITE_TRIES: usize = 16; // a guess: each is one change of another node

/// The flows of a client at one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct NodeFlows {
    /// The process that has them.
    run: String,
    flows: u32,
}

/// What the store has of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct UsageNote {
    month: Month,
    down: u64,
    up: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seen_s: Option<u64>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    flows: BTreeMap<String, NodeFlows>,
}

impl UsageNote {
    fn new(month: Month) -> UsageNote {
        UsageNote {
            month,
            down: 0,
            up: 0,
            seen_s: None,
            flows: BTreeMap::new(),
        }
    }

    /// The note in this month: one of an earlier month, or of one that a wrong clock told, counts nothing.
    fn in_month(mut self, month: Month) -> UsageNote {
        if self.month < month || self.month.is_wrong(month) {
            (self.month, self.down, self.up) = (month, 0, 0);
        }
        self
    }
}

/// What this node knows of a client.
#[derive(Debug, Default)]
struct KnownUsage {
    /// The note, as it was read or written last; none if there is none.
    raw: Option<Vec<u8>>,
    /// When it was asked for last.
    asked_at: Option<Instant>,
    /// The bytes of the note that this node's count includes, and their month.
    counted: Option<(Month, MonthBytes)>,
}

impl KnownUsage {
    fn note(&self) -> Option<UsageNote> {
        serde_json::from_slice(self.raw.as_ref()?).ok()
    }
}

/// What is known of another node.
#[derive(Debug, Default)]
struct NodeLife {
    /// The process and the number that it told last.
    told: Option<(String, u64)>,
    /// When the number changed; none before the first look.
    changed_at: Option<Instant>,
}

/// What clients do at all nodes together.
#[derive(Debug)]
pub(crate) struct SharedUsage {
    store: Arc<dyn SharedRecords>,
    /// This process, as other nodes see it.
    run: String,
    clients: Mutex<HashMap<HostKey, KnownUsage>>,
    nodes: Mutex<HashMap<String, NodeLife>>,
    /// What this node told of itself last.
    beat: Mutex<(u64, Option<Vec<u8>>)>,
    /// Clients of which the store has yet to hear.
    untold: Mutex<HashSet<HostKey>>,
    /// Whether clients are held to what this node alone knows.
    is_alone: AtomicBool,
}

impl SharedUsage {
    pub(crate) fn new(store: Arc<dyn SharedRecords>) -> SharedUsage {
        let random = getrandom::u64().expect("the system has randomness");
        SharedUsage {
            store,
            run: format!("{random:016x}"),
            clients: Mutex::default(),
            nodes: Mutex::default(),
            beat: Mutex::default(),
            untold: Mutex::default(),
            is_alone: AtomicBool::new(false),
        }
    }

    /// Whether clients are held to what this node alone knows, because the store does not answer.
    pub(crate) fn is_alone(&self) -> bool {
        self.is_alone.load(Ordering::Relaxed)
    }

    fn set_alone(&self, is_alone: bool) {
        if self.is_alone.swap(is_alone, Ordering::Relaxed) == is_alone {
            return;
        }
        match is_alone {
            true => tracing::warn!(
                "what clients do at other nodes is not known: until the store answers, this node holds them to what it \
                 has heard and counts itself"
            ),
            false => tracing::info!("clients are held to what they do at all nodes again"),
        }
    }

    /// Asks what a client does at other nodes, unless that is known, and counts it. Waits no longer than a moment.
    pub(crate) async fn refresh(&self, client: HostKey, traffic: &TrafficTable) {
        {
            let mut clients = self.clients.lock();
            let known = clients.entry(client).or_default();
            if known.asked_at.is_some_and(|at| at.elapsed() < FRESH_FOR) {
                return;
            }
            known.asked_at = Some(Instant::now());
        }
        self.read_within(client, traffic, ANSWER_WITHIN).await;
    }

    /// Asks what a client does at other nodes, for the operator.
    pub(crate) async fn read(&self, client: HostKey, traffic: &TrafficTable) {
        self.read_within(client, traffic, ANSWER_WITHIN).await;
    }

    async fn read_within(&self, client: HostKey, traffic: &TrafficTable, max: Duration) {
        match timeout(max, self.store.read_note(&name_of(&client))).await {
            Ok(Ok(raw)) => {
                self.set_alone(false);
                self.take(client, raw, traffic);
            }
            // What kind of error it is says the store's own log.
            Ok(Err(_)) | Err(_) => self.set_alone(true),
        }
    }

    /// Takes a note that was read, and counts the bytes of it that this node's count does not include.
    fn take(&self, client: HostKey, raw: Option<Vec<u8>>, traffic: &TrafficTable) {
        let (month, ours) = traffic.this_month(&client);
        let mut clients = self.clients.lock();
        let known = clients.entry(client).or_default();
        known.raw = raw;
        let told = match known.note().map(|note| note.in_month(month)) {
            Some(note) if note.month == month => MonthBytes {
                down: note.down,
                up: note.up,
            },
            // None, or one whose month has not begun here.
            _ => MonthBytes::default(),
        };
        let counted = known.counted.filter(|(of, _)| *of == month);
        let counted = counted.map_or_else(MonthBytes::default, |(_, bytes)| bytes);
        known.counted = Some((month, told));
        drop(clients);
        let missing = |ours: u64, counted: u64, told: u64| {
            let untold = ours.saturating_sub(counted);
            told.saturating_add(untold).saturating_sub(ours)
        };
        let missing = MonthBytes {
            down: missing(ours.down, counted.down, told.down),
            up: missing(ours.up, counted.up, told.up),
        };
        traffic.add_elsewhere(&client, missing);
    }

    /// The flows of a client at other nodes that run.
    pub(crate) fn flows_elsewhere(&self, client: &HostKey) -> u32 {
        let note = self.clients.lock().get(client).and_then(KnownUsage::note);
        let Some(note) = note else { return 0 };
        let mut nodes = self.nodes.lock();
        let others = note
            .flows
            .iter()
            .filter(|(node, _)| *node != self.store.node());
        let flows = others.map(|(node, at)| {
            let life = nodes.entry(node.clone()).or_default();
            let Some(changed_at) = life.changed_at else {
                return at.flows; // It is looked at soon.
            };
            let is_same = life.told.as_ref().is_some_and(|(run, _)| *run == at.run);
            let runs = is_same && changed_at.elapsed() < NODE_SILENT_MAX;
            if runs { at.flows } else { 0 }
        });
        flows.fold(0, u32::saturating_add)
    }

    /// When a client was seen at any node, as far as this one has heard.
    pub(crate) fn seen_s(&self, client: &HostKey) -> Option<u64> {
        let clients = self.clients.lock();
        clients.get(client)?.note()?.seen_s
    }

    /// Tells other nodes what clients do here, until the proxy stops. `is_known`: whether a client is counted at all.
    pub(crate) async fn tell_other_nodes(
        self: Arc<Self>,
        ledger: Arc<QuotaLedger>,
        traffic: Arc<TrafficTable>,
        is_known: impl Fn(&HostKey) -> bool,
        stop: CancellationToken,
    ) {
        let mut told_bytes_at: Option<Instant> = None;
        loop {
            let mut due = ledger.take_changed();
            if told_bytes_at.is_none_or(|at| at.elapsed() >= TELL_BYTES_EVERY) {
                told_bytes_at = Some(Instant::now());
                due.extend(ledger.clients_with_flows());
                due.extend(std::mem::take(&mut *self.untold.lock()));
                let _ = self.look_at_nodes().await;
            }
            due.retain(|client| is_known(client));
            self.tell(due, &ledger, &traffic).await;
            tokio::select! {
                () = sleep(TELL_EVERY) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Tells the store of these clients; those of which it could not hear are told later.
    async fn tell(&self, due: HashSet<HostKey>, ledger: &QuotaLedger, traffic: &TrafficTable) {
        let is_away = AtomicBool::new(false);
        let work = due.into_iter().map(|client| {
            let is_away = &is_away;
            async move {
                // After a failure no more are tried.
                if is_away.load(Ordering::Relaxed) {
                    self.untold.lock().insert(client);
                } else if let Err(error) = self.tell_one(client, ledger, traffic).await {
                    tracing::debug!(%error, "what a client does here waits for the store");
                    is_away.store(true, Ordering::Relaxed);
                    self.set_alone(true);
                    self.untold.lock().insert(client);
                }
            }
        });
        let mut work = stream::iter(work).buffer_unordered(WRITES_AT_ONCE);
        while work.next().await.is_some() {}
    }

    async fn tell_one(
        &self,
        client: HostKey,
        ledger: &QuotaLedger,
        traffic: &TrafficTable,
    ) -> Result<(), JournalError> {
        let name = name_of(&client);
        let is_read = |known: &KnownUsage| known.counted.is_some();
        if !self.clients.lock().get(&client).is_some_and(is_read) {
            let raw = self.store.read_note(&name).await?;
            self.take(client, raw, traffic);
        }
        for _ in 0..WRITE_TRIES {
            // A month may have begun since.
            let raw = self
                .clients
                .lock()
                .get(&client)
                .and_then(|known| known.raw.clone());
            self.take(client, raw.clone(), traffic);
            let (month, ours) = traffic.this_month(&client);
            let Some(written) = self.changed_note(client, month, ours, ledger.flows_of(&client))
            else {
                return Ok(());
            };
            let value = serde_json::to_vec(&written).expect("plain data");
            if self
                .store
                .exchange_note(&name, raw.as_deref(), Some(&value))
                .await?
            {
                self.set_alone(false);
                let mut clients = self.clients.lock();
                let known = clients.entry(client).or_default();
                known.raw = Some(value);
                if written.month == month {
                    known.counted = Some((month, ours));
                }
                return Ok(());
            }
            let raw = self.store.read_note(&name).await?;
            self.take(client, raw, traffic);
        }
        // Told with the next bytes.
        self.untold.lock().insert(client);
        Ok(())
    }

    /// The note with what this node has to tell; none if it says all of that.
    fn changed_note(
        &self,
        client: HostKey,
        month: Month,
        ours: MonthBytes,
        flows: u32,
    ) -> Option<UsageNote> {
        let clients = self.clients.lock();
        let known = clients.get(&client);
        let before = known.and_then(KnownUsage::note);
        let counted = known.and_then(|known| known.counted);
        drop(clients);
        let mut note = match before.clone() {
            Some(note) => note.in_month(month),
            None => UsageNote::new(month),
        };
        // Where the next month has begun at other nodes, the bytes of the last one are not asked for any more.
        if note.month == month {
            let counted = counted.filter(|(of, _)| *of == month);
            let counted = counted.map_or_else(MonthBytes::default, |(_, bytes)| bytes);
            note.down = note
                .down
                .saturating_add(ours.down.saturating_sub(counted.down));
            note.up = note.up.saturating_add(ours.up.saturating_sub(counted.up));
        }
        let here = NodeFlows {
            run: self.run.clone(),
            flows,
        };
        let node = self.store.node().to_owned();
        let was_here = note.flows.get(&node).cloned();
        match flows {
            0 => note.flows.remove(&node),
            _ => note.flows.insert(node, here.clone()),
        };
        let is_told = match flows {
            0 => was_here.is_none(),
            _ => was_here == Some(here),
        };
        let has_bytes = |note: &UsageNote| (note.month, note.down, note.up);
        let is_same = before.as_ref().map(has_bytes) == Some(has_bytes(&note));
        if is_told && is_same {
            return None;
        }
        note.seen_s = Some(unix_seconds());
        Some(note)
    }

    /// Says that this node runs, and looks whether others do whose flows are counted.
    async fn look_at_nodes(&self) -> Result<(), JournalError> {
        self.tell_own_life().await?;
        let names: Vec<String> = self.nodes.lock().keys().cloned().collect();
        for name in names {
            let raw = self.store.read_note(&name_of_node(&name)).await?;
            let told = raw.and_then(|raw| serde_json::from_slice::<(String, u64)>(&raw).ok());
            let mut nodes = self.nodes.lock();
            let life = nodes.entry(name).or_default();
            if life.changed_at.is_none() || life.told != told {
                *life = NodeLife {
                    told,
                    changed_at: Some(Instant::now()),
                };
            }
        }
        Ok(())
    }

    async fn tell_own_life(&self) -> Result<(), JournalError> {
        let name = name_of_node(self.store.node());
        let (number, mut before) = self.beat.lock().clone();
        let value = serde_json::to_vec(&(&self.run, number + 1)).expect("plain data");
        for _ in 0..WRITE_TRIES {
            if self
                .store
                .exchange_note(&name, before.as_deref(), Some(&value))
                .await?
            {
                *self.beat.lock() = (number + 1, Some(value));
                return Ok(());
            }
            // An earlier process of this node.
            before = self.store.read_note(&name).await?;
        }
        Ok(())
    }

    /// Tells what has not been told, and that this process has no flows any more: it ends.
    pub(crate) async fn finish(
        &self,
        ledger: &QuotaLedger,
        traffic: &TrafficTable,
        is_known: impl Fn(&HostKey) -> bool,
    ) {
        let mut due = ledger.take_changed();
        due.extend(ledger.clients_with_flows());
        due.extend(std::mem::take(&mut *self.untold.lock()));
        due.retain(|client| is_known(client));
        self.tell(due, ledger, traffic).await;
        let before = self.beat.lock().1.take();
        if let Some(before) = before {
            let name = name_of_node(self.store.node());
            // The next process of this node has another; a store that is away finds out by the number.
            let _ = self.store.exchange_note(&name, Some(&before), None).await;
        }
    }

    /// Forgets a client that was removed, here and in the store.
    pub(crate) fn forget(self: &Arc<Self>, client: HostKey) {
        self.clients.lock().remove(&client);
        self.untold.lock().remove(&client);
        let usage = self.clone();
        tokio::spawn(async move {
            let name = name_of(&client);
            // What stays, if the store is away now, counts if the client is invited again.
            if let Ok(Some(raw)) = usage.store.read_note(&name).await {
                let _ = usage.store.exchange_note(&name, Some(&raw), None).await;
            }
        });
    }
}

fn name_of(client: &HostKey) -> Vec<u8> {
    [b"U", &client[..]].concat()
}

fn name_of_node(node: &str) -> Vec<u8> {
    [b"N", node.as_bytes()].concat()
}

fn unix_seconds() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
