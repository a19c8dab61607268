//! What clients do at all nodes of a proxy together: bytes of the month, flows at once, when they were seen.
//!
//! ```text
//!  note U KEY    bytes of each process · when seen · flows at each node   replaced by compare-and-swap (usage_note.rs)
//!  note N NODE   a number that changes while the node runs
//!
//!  this node's flows and bytes ── within 0.5 s, bytes every 5 s ──▶ U KEY ── at a client's next flow ──▶ other nodes
//! ```
//!
//! Each process says all that it has counted, and counts what the others say: whatever is lost, late or repeated, nothing is
//! counted twice. What a process counted that is gone is part of the sum of those that are. A client with flows at several nodes may pass a limit by what they admit before they hear of each other. While the store
//! does not answer, each node holds clients to what it knows; what it counted is added when the store is back.
//!
//! Only known clients are counted together: a key that anybody may make up would fill the store.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use d2tp_driver::{HostKey, JournalError, SharedRecords};
use futures_util::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::client_traffic::MonthBytes;
use crate::quota_ledger::QuotaLedger;
use crate::traffic_table::{Month, TrafficTable};
use crate::usage_note::{NodeFlows, UsageNote};

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

/// What this process has counted of a client in a month, and what others have.
#[derive(Debug)]
struct MonthCount {
    month: Month,
    own: MonthBytes,
    /// What was counted elsewhere, and was added to the client's traffic here.
    elsewhere: MonthBytes,
    /// The most that this process has written of its own; whether the store took it may be unknown.
    sent: MonthBytes,
    /// Whether the note has had an entry of this process.
    is_in_note: bool,
    /// What other nodes have added to the base of the note, because this process seemed to be gone.
    folded: MonthBytes,
}

impl MonthCount {
    /// A count that begins with what the note has of this process: of a client that was removed and is back.
    fn new(month: Month, own: MonthBytes) -> MonthCount {
        MonthCount {
            month,
            own,
            elsewhere: MonthBytes::default(),
            sent: own,
            is_in_note: false,
            folded: MonthBytes::default(),
        }
    }

    /// The bytes that this process has counted in the month.
    fn entry(&self) -> MonthBytes {
        each(self.own, self.folded, u64::saturating_sub)
    }

    /// Counts what the client's traffic is now: it includes what was added of other nodes.
    fn count_own(&mut self, total: MonthBytes) {
        let known = each(self.own, self.elsewhere, u64::saturating_add);
        self.own = match covers(total, known) {
            true => each(total, self.elsewhere, u64::saturating_sub),
            // The traffic of the client was forgotten, and began again.
            false => each(self.own, total, u64::saturating_add),
        };
    }

    /// Takes what a note of the month has.
    fn take_note(&mut self, note: &UsageNote, run: &str) {
        if let Some(entry) = note.of_run(run) {
            self.is_in_note = true;
            self.sent = each(self.sent, entry, u64::max);
        } else if self.is_in_note {
            let told = each(self.folded, self.sent, u64::saturating_add);
            self.folded = match covers(note.base(), told) {
                true => told,
                // The store has lost the note.
                false => MonthBytes::default(),
            };
            (self.sent, self.is_in_note) = (MonthBytes::default(), false);
        }
        let elsewhere = each(note.without_run(run), self.folded, u64::saturating_sub);
        self.elsewhere = each(self.elsewhere, elsewhere, u64::max);
    }
}

fn each(a: MonthBytes, b: MonthBytes, of: impl Fn(u64, u64) -> u64) -> MonthBytes {
    MonthBytes {
        down: of(a.down, b.down),
        up: of(a.up, b.up),
    }
}

/// Whether `all` is no less than `part`, in both directions.
fn covers(all: MonthBytes, part: MonthBytes) -> bool {
    all.down >= part.down && all.up >= part.up
}

/// What this node knows of a client.
#[derive(Debug, Default)]
struct KnownUsage {
    /// The note, as it was read or written last; none if there is none.
    raw: Option<Vec<u8>>,
    /// Whether `raw` is what the store had, as far as this node can know.
    is_read: bool,
    /// Counts the notes that were taken and written. One that was asked for before the last of them may be older.
    age: u64,
    /// When the note was last asked for.
    asked_at: Option<Instant>,
    /// Held by the flow that asks, for all flows that begin meanwhile.
    asking: Arc<tokio::sync::Mutex<()>>,
    count: Option<MonthCount>,
}

impl KnownUsage {
    fn note(&self) -> Option<UsageNote> {
        serde_json::from_slice(self.raw.as_ref()?).ok()
    }

    fn is_fresh(&self) -> bool {
        self.asked_at.is_some_and(|at| at.elapsed() < FRESH_FOR)
    }

    /// Counts what this process and others have counted since.
    fn count(&mut self, client: &HostKey, run: &str, traffic: &TrafficTable) -> &mut MonthCount {
        let (month, total) = traffic.this_month(client);
        // One of the next month says nothing of this one.
        let note = self.note().map(|note| note.in_month(month));
        let note = note.filter(|note| note.month == month);
        if self.count.as_ref().is_none_or(|count| count.month != month) {
            let of_run = note.as_ref().and_then(|note| note.of_run(run));
            self.count = Some(MonthCount::new(month, of_run.unwrap_or_default()));
        }
        let count = self.count.as_mut().expect("made above");
        count.count_own(total);
        if self.is_read {
            let note = note.unwrap_or_else(|| UsageNote::new(month));
            count.take_note(&note, run);
        }
        let sum = each(count.own, count.elsewhere, u64::saturating_add);
        traffic.add_elsewhere(client, month, each(sum, total, u64::saturating_sub));
        count
    }
}

/// The last sign of life of another node.
#[derive(Debug, Default)]
struct NodeLife {
    /// The process and the number in the latest note.
    told: Option<(String, u64)>,
    /// When the number changed; none before the first look.
    changed_at: Option<Instant>,
}

impl NodeLife {
    fn is_silent(&self) -> bool {
        let changed_at = self.changed_at;
        changed_at.is_some_and(|at| at.elapsed() >= NODE_SILENT_MAX)
    }
}

/// A note that is to be written.
#[derive(Debug)]
struct NoteChange {
    before: Option<Vec<u8>>,
    after: Vec<u8>,
    /// The age of what is known, with this change.
    age: u64,
    month: Month,
    /// Whether the note has bytes of this process.
    has_own: bool,
    /// What had been sent before, which is so again if the store does not take the note.
    sent_before: MonthBytes,
}

/// What this node tells of itself: that it runs.
#[derive(Clone, Debug, Default)]
struct Heartbeat {
    number: u64,
    /// The note, as it was written last.
    raw: Option<Vec<u8>>,
    at: Option<Instant>,
}

/// What clients do at all nodes together.
#[derive(Debug)]
pub(crate) struct SharedUsage {
    store: Arc<dyn SharedRecords>,
    /// The identity of this process, as other nodes see it.
    run: String,
    clients: Mutex<HashMap<HostKey, KnownUsage>>,
    nodes: Mutex<HashMap<String, NodeLife>>,
    /// What this node told of itself last.
    heartbeat: Mutex<Heartbeat>,
    /// Clients of which the store has yet to hear.
    unreported: Mutex<HashSet<HostKey>>,
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
            heartbeat: Mutex::default(),
            unreported: Mutex::default(),
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

    /// Asks what a client does at other nodes, unless that is known, and counts it. Waits no longer than a moment. Flows
    /// that begin meanwhile wait for the same answer.
    pub(crate) async fn refresh(&self, client: HostKey, traffic: &TrafficTable) {
        let asking = {
            let mut clients = self.clients.lock();
            let known = clients.entry(client).or_default();
            if known.is_fresh() {
                return;
            }
            known.asking.clone()
        };
        let asked_at = Instant::now();
        let work = async {
            let _asking = asking.lock().await;
            if self
                .clients
                .lock()
                .get(&client)
                .is_some_and(KnownUsage::is_fresh)
            {
                return;
            }
            self.read(client, traffic).await;
            self.clients.lock().entry(client).or_default().asked_at = Some(asked_at);
        };
        if timeout(ANSWER_WITHIN, work).await.is_err() {
            // Those that begin within a second do not wait for it.
            self.clients.lock().entry(client).or_default().asked_at = Some(asked_at);
            self.set_alone(true);
        }
    }

    /// Asks what a client does at other nodes, and counts it. Returns whether the store answered in time.
    pub(crate) async fn read(&self, client: HostKey, traffic: &TrafficTable) -> bool {
        let reading = timeout(ANSWER_WITHIN, self.read_and_merge(client, traffic));
        // What kind of error it is says the store's own log.
        let is_answered = matches!(reading.await, Ok(Ok(())));
        self.set_alone(!is_answered);
        is_answered
    }

    async fn read_and_merge(
        &self,
        client: HostKey,
        traffic: &TrafficTable,
    ) -> Result<(), JournalError> {
        let age = self.clients.lock().entry(client).or_default().age;
        let raw = self.store.read_note(&name_of(&client)).await?;
        self.merge(client, raw, age, traffic);
        Ok(())
    }

    /// Takes a note that was asked for at this `age` of what was known, and counts what it says, unless what is known now
    /// may be newer.
    fn merge(&self, client: HostKey, raw: Option<Vec<u8>>, age: u64, traffic: &TrafficTable) {
        let mut clients = self.clients.lock();
        let known = clients.entry(client).or_default();
        if known.age != age {
            return;
        }
        known.age += 1;
        (known.raw, known.is_read) = (raw, true);
        known.count(&client, &self.run, traffic);
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
            if life.changed_at.is_none() {
                return at.flows; // It is looked at soon.
            }
            let is_same = life.told.as_ref().is_some_and(|(run, _)| *run == at.run);
            let runs = is_same && !life.is_silent();
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
                due.extend(std::mem::take(&mut *self.unreported.lock()));
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

    /// Writes the usage of these clients to the store; clients whose usage could not be written are
    /// tried again later.
    async fn tell(&self, due: HashSet<HostKey>, ledger: &QuotaLedger, traffic: &TrafficTable) {
        let is_unreachable = AtomicBool::new(false);
        let work = due.into_iter().map(|client| {
            let is_unreachable = &is_unreachable;
            async move {
                // After a failure no more are tried.
                if is_unreachable.load(Ordering::Relaxed) {
                    self.unreported.lock().insert(client);
                } else if let Err(error) = self.tell_one(client, ledger, traffic).await {
                    tracing::debug!(%error, "what a client does here waits for the store");
                    is_unreachable.store(true, Ordering::Relaxed);
                    self.set_alone(true);
                    self.unreported.lock().insert(client);
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
        let is_read = |known: &KnownUsage| known.is_read;
        if !self.clients.lock().get(&client).is_some_and(is_read) {
            self.read_and_merge(client, traffic).await?;
        }
        for _ in 0..WRITE_TRIES {
            let Some(change) = self.changed_note(client, ledger.flows_of(&client), traffic) else {
                self.set_alone(false);
                return Ok(());
            };
            let (before, after) = (change.before.as_deref(), &change.after);
            if self.store.exchange_note(&name, before, Some(after)).await? {
                self.set_alone(false);
                self.on_written(client, change);
                return Ok(());
            }
            self.on_contended(client, &change);
            self.read_and_merge(client, traffic).await?;
        }
        // Told with the next bytes.
        self.unreported.lock().insert(client);
        Ok(())
    }

    /// Records that the store took a note.
    fn on_written(&self, client: HostKey, change: NoteChange) {
        let mut clients = self.clients.lock();
        // It may have been forgotten.
        let Some(known) = clients.get_mut(&client) else {
            return;
        };
        if let Some(count) = &mut known.count
            && count.month == change.month
        {
            count.is_in_note |= change.has_own;
        }
        // Else a note was taken that was asked for later.
        if known.age == change.age {
            known.age += 1;
            known.raw = Some(change.after);
        }
    }

    /// Records that the store has another note, and did not take this one.
    fn on_contended(&self, client: HostKey, change: &NoteChange) {
        let mut clients = self.clients.lock();
        let count = clients
            .get_mut(&client)
            .and_then(|known| known.count.as_mut());
        if let Some(count) = count.filter(|count| count.month == change.month) {
            count.sent = change.sent_before;
        }
    }

    /// The note with what this node has to tell; none if it says all of that.
    fn changed_note(
        &self,
        client: HostKey,
        flows: u32,
        traffic: &TrafficTable,
    ) -> Option<NoteChange> {
        let mut clients = self.clients.lock();
        let known = clients.entry(client).or_default();
        let before = known.note();
        let count = known.count(&client, &self.run, traffic);
        let month = count.month;
        let mut note = match before.clone() {
            Some(note) => note.in_month(month),
            None => UsageNote::new(month),
        };
        let node = self.store.node();
        let silent: HashSet<String> = {
            let mut nodes = self.nodes.lock();
            let others = note.nodes().filter(|other| *other != node);
            let silent = others.filter(|other| {
                // One that is not known yet is looked at soon.
                nodes.entry((*other).clone()).or_default().is_silent()
            });
            silent.cloned().collect()
        };
        // Where the next month has begun at other nodes, the bytes of the last one are not asked for any more.
        let own = count.entry();
        let has_own = note.month == month && own != MonthBytes::default();
        if has_own {
            note.set_run(&self.run, node, own);
        }
        // Also those of earlier processes of this node.
        note.fold(|run, of| silent.contains(of) || (of == node && run != self.run));
        note.flows.retain(|other, _| !silent.contains(other));
        let here = NodeFlows {
            run: self.run.clone(),
            flows,
        };
        match flows {
            0 => note.flows.remove(node),
            _ => note.flows.insert(node.to_owned(), here),
        };
        if before.as_ref() == Some(&note) {
            return None;
        }
        note.seen_s = Some(unix_seconds());
        let sent_before = count.sent;
        if has_own {
            count.sent = each(count.sent, own, u64::max);
        }
        known.age += 1;
        Some(NoteChange {
            before: known.raw.clone(),
            after: serde_json::to_vec(&note).expect("plain data"),
            age: known.age,
            month,
            has_own,
            sent_before,
        })
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
        let last = self.heartbeat.lock().clone();
        let number = last.number + 1;
        let mut before = last.raw;
        let value = serde_json::to_vec(&(&self.run, number)).expect("plain data");
        for _ in 0..WRITE_TRIES {
            if self
                .store
                .exchange_note(&name, before.as_deref(), Some(&value))
                .await?
            {
                *self.heartbeat.lock() = Heartbeat {
                    number,
                    raw: Some(value),
                    at: Some(Instant::now()),
                };
                if last
                    .at
                    .is_some_and(|at| at.elapsed() >= NODE_SILENT_MAX / 2)
                {
                    self.on_back();
                }
                return Ok(());
            }
            // An earlier process of this node, or this one, whose reply was lost.
            before = self.store.read_note(&name).await?;
        }
        Ok(())
    }

    /// Other nodes may have taken this one for gone: the notes are read before the next is written.
    fn on_back(&self) {
        for known in self.clients.lock().values_mut() {
            known.is_read = false;
            if let Some(count) = &mut known.count {
                count.is_in_note |= count.sent != MonthBytes::default();
            }
        }
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
        due.extend(std::mem::take(&mut *self.unreported.lock()));
        due.retain(|client| is_known(client));
        self.tell(due, ledger, traffic).await;
        let before = self.heartbeat.lock().raw.take();
        if let Some(before) = before {
            let name = name_of_node(self.store.node());
            // The next process of this node has another; where the store is unreachable, others find out by the number.
            let _ = self.store.exchange_note(&name, Some(&before), None).await;
        }
    }

    /// Forgets a client that was removed, here and in the store.
    pub(crate) fn forget(self: &Arc<Self>, client: HostKey) {
        self.clients.lock().remove(&client);
        self.unreported.lock().remove(&client);
        let usage = self.clone();
        tokio::spawn(async move {
            let name = name_of(&client);
            // What stays, if the store is unreachable now, counts if the client is invited again.
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

#[cfg(test)]
mod tests;
