//! What each client transfers: how fast, and how much in a calendar month.
//!
//! ```text
//!  metered_flow.rs, answer.rs, relays ── bytes ──▶ FlowTraffic ─▶ ClientTraffic ── token buckets
//!                                                                      │
//!  DIR/traffic.json ◀── once a minute, and at the end ── TrafficTable ◀┘ bytes of this month
//! ```
//!
//! Counted is what flows carry, with heads and without retransmissions, and packets that are relayed. A month is one of
//! UTC, so that neither the machine's time zone nor daylight saving time moves its end.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker, ready};

use d2tp_driver::HostKey;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::client_limits::{ClientLimitTable, EffectiveLimits};
use crate::counters::{ProxCounters, TrafficDirection, TrafficKind};
use crate::private_file::replace_private;
use crate::refusal::ProxRefusal;
use crate::supply_meter::SupplyMeter;
use crate::token_bucket::{BucketWaiter, TokenBucket};

/// The name of the file in the state directory.
const FILE_NAME: &str = "traffic.json";
/// The most clients whose bytes are counted; of those without a flow, the ones that moved least are forgotten first.
const CLIENTS_MAX: usize = 100_000; // as many as can be enrolled

/// The bytes of a client in this month.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MonthBytes {
    /// Bytes to the client.
    pub down: u64,
    /// Bytes from the client.
    pub up: u64,
}

/// The traffic of one client.
#[derive(Debug)]
pub(crate) struct ClientTraffic {
    down: Arc<TokenBucket>,
    up: Arc<TokenBucket>,
    month_down: AtomicU64,
    month_up: AtomicU64,
    /// The most bytes in a month; 0: any number.
    month_max: AtomicU64,
    /// Whether this month's bytes are used up.
    is_used_up: watch::Sender<bool>,
    /// Who found nothing left of the month, and may go on if the limit is raised before its flow is reset.
    held: Mutex<HashMap<u64, Waker>>,
    /// The number of the next flow.
    next_flow: AtomicU64,
}

impl ClientTraffic {
    fn new(limits: &EffectiveLimits, month: MonthBytes) -> ClientTraffic {
        let traffic = ClientTraffic {
            down: Arc::new(TokenBucket::new(limits.down_bytes_per_s)),
            up: Arc::new(TokenBucket::new(limits.up_bytes_per_s)),
            month_down: AtomicU64::new(month.down),
            month_up: AtomicU64::new(month.up),
            month_max: AtomicU64::new(limits.month_bytes),
            is_used_up: watch::Sender::default(),
            held: Mutex::default(),
            next_flow: AtomicU64::new(0),
        };
        traffic.check_month();
        traffic
    }

    fn set_limits(&self, limits: &EffectiveLimits) {
        self.down.set_rate(limits.down_bytes_per_s);
        self.up.set_rate(limits.up_bytes_per_s);
        self.month_max.store(limits.month_bytes, Ordering::Relaxed);
        self.check_month();
    }

    fn bucket(&self, direction: TrafficDirection) -> &Arc<TokenBucket> {
        match direction {
            TrafficDirection::Down => &self.down,
            TrafficDirection::Up => &self.up,
        }
    }

    fn month(&self) -> MonthBytes {
        MonthBytes {
            down: self.month_down.load(Ordering::Relaxed),
            up: self.month_up.load(Ordering::Relaxed),
        }
    }

    fn add(&self, direction: TrafficDirection, bytes: u64) {
        let count = match direction {
            TrafficDirection::Down => &self.month_down,
            TrafficDirection::Up => &self.month_up,
        };
        count.fetch_add(bytes, Ordering::Relaxed);
        if self.month_max.load(Ordering::Relaxed) > 0 {
            self.check_month();
        }
    }

    fn check_month(&self) {
        self.is_used_up.send_if_modified(|known| {
            // Looked at in here, so that the last one to look is the last one to say.
            let is_used_up = self.month_left() == 0;
            let has_changed = *known != is_used_up;
            *known = is_used_up;
            has_changed
        });
        if self.month_left() > 0 {
            for waker in std::mem::take(&mut *self.held.lock()).into_values() {
                waker.wake();
            }
        }
    }

    /// The bytes that are left of the month.
    fn month_left(&self) -> u64 {
        let month = self.month();
        match self.month_max.load(Ordering::Relaxed) {
            0 => u64::MAX,
            max => max.saturating_sub(month.down.saturating_add(month.up)),
        }
    }

    /// How many bytes of the month a flow may use now. It waits while there are none: then it is reset, unless the limit
    /// is raised first.
    fn poll_month(&self, cx: &mut Context<'_>, flow: u64) -> Poll<usize> {
        let left = self.month_left();
        if left > 0 {
            return Poll::Ready(usize::try_from(left).unwrap_or(usize::MAX));
        }
        self.held.lock().insert(flow, cx.waker().clone());
        match self.month_left() {
            0 => Poll::Pending,
            // The limit was raised meanwhile.
            left => Poll::Ready(usize::try_from(left).unwrap_or(usize::MAX)),
        }
    }

    /// Whether a new entry for the client would say the same: no flow uses this one, no month is counted for a limit, and
    /// its buckets are full, so that short flows one after the other get no burst each.
    fn may_be_forgotten(self: &Arc<ClientTraffic>) -> bool {
        Arc::strong_count(self) == 1
            && self.month_max.load(Ordering::Relaxed) == 0
            && self.down.is_full()
            && self.up.is_full()
    }

    fn begin_month(&self) {
        self.month_down.store(0, Ordering::Relaxed);
        self.month_up.store(0, Ordering::Relaxed);
        self.check_month();
    }
}

/// The traffic of one flow, whose client's limits it obeys.
#[derive(Debug)]
pub(crate) struct FlowTraffic {
    client: Arc<ClientTraffic>,
    /// Its number among those of the client.
    number: u64,
    counters: Arc<ProxCounters>,
    kind: AtomicU8,
    /// Its places at the client's buckets: down and up.
    waiters: [Arc<BucketWaiter>; 2],
    bytes: [AtomicU64; 2],
    is_left_to_packets: AtomicBool,
    timers: Handle,
    /// Whether the flow waits for its server, or for the client's rate, which is no fault of a link either.
    pub(crate) supply: SupplyMeter,
}

impl FlowTraffic {
    /// Leaves counting and limits to who uses the flow: its bytes are packets, each of which is admitted by itself.
    pub(crate) fn leave_to_packets(&self) {
        self.is_left_to_packets.store(true, Ordering::Relaxed);
    }

    /// Records what the flow is for.
    pub(crate) fn set_kind(&self, kind: TrafficKind) {
        self.kind.store(kind as u8, Ordering::Relaxed);
    }

    /// What the flow is for.
    pub(crate) fn kind(&self) -> TrafficKind {
        TrafficKind::ALL[usize::from(self.kind.load(Ordering::Relaxed))]
    }

    /// How many bytes the flow may move now in this direction. [`FlowTraffic::moved`] follows. Flows that move bytes at
    /// the same moment may together pass the end of the month's bytes.
    pub(crate) fn poll(&self, cx: &mut Context<'_>, direction: TrafficDirection) -> Poll<usize> {
        if self.is_left_to_packets.load(Ordering::Relaxed) {
            return Poll::Ready(usize::MAX);
        }
        // What a refusal says is no more than a few bytes.
        let left = match self.kind() {
            TrafficKind::Other => usize::MAX,
            _ => ready!(self.client.poll_month(cx, self.number)),
        };
        let waiter = &self.waiters[direction as usize];
        let bucket = self.client.bucket(direction);
        let allowed = bucket.poll(cx, waiter, &self.timers);
        if allowed.is_pending() && direction == TrafficDirection::Down {
            self.supply.on_wait(tokio::time::Instant::now());
        }
        allowed.map(|allowed| allowed.min(left))
    }

    /// Counts bytes that the flow moved: also none, after [`FlowTraffic::poll`].
    pub(crate) fn moved(&self, direction: TrafficDirection, bytes: usize) {
        if self.is_left_to_packets.load(Ordering::Relaxed) {
            return;
        }
        self.client.bucket(direction).take(bytes);
        if bytes == 0 {
            return;
        }
        let bytes = bytes as u64;
        self.bytes[direction as usize].fetch_add(bytes, Ordering::Relaxed);
        self.counters.add_bytes(direction, self.kind(), bytes);
        self.client.add(direction, bytes);
    }

    /// The bytes that the flow moved in this direction.
    pub(crate) fn bytes(&self, direction: TrafficDirection) -> u64 {
        self.bytes[direction as usize].load(Ordering::Relaxed)
    }

    /// Ready when the client's bytes of this month are used up.
    pub(crate) async fn used_up(&self) {
        let mut is_used_up = self.client.is_used_up.subscribe();
        if is_used_up.wait_for(|is_used_up| *is_used_up).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for FlowTraffic {
    fn drop(&mut self) {
        self.client.held.lock().remove(&self.number);
    }
}

/// A calendar month (UTC), by its first day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Month(Date);

impl Month {
    pub(crate) fn now() -> Month {
        let now = Timestamp::now().to_zoned(TimeZone::UTC);
        Month(now.date().first_of_month())
    }

    fn end(self) -> Date {
        self.0.checked_add(1.month()).unwrap_or(Date::MAX)
    }

    /// Whether a wrong clock told this month, if it is `now` now: it is further ahead than a clock that is put right
    /// around the turn of a month explains. A clock that was never set knows nothing better.
    pub(crate) fn is_wrong(self, now: Month) -> bool {
        now >= EARLIEST && self > Month(now.end())
    }
}

/// The earliest month that a clock can tell that was set.
const EARLIEST: Month = Month(Date::constant(2026, 1, 1));

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct StoredTraffic {
    /// The first day of the month.
    month: Date,
    clients: Vec<StoredMonth>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredMonth {
    #[serde(with = "crate::key_text::one")]
    key: HostKey,
    down_bytes: u64,
    up_bytes: u64,
}

/// The traffic of all clients.
#[derive(Debug)]
pub(crate) struct TrafficTable {
    path: Option<PathBuf>,
    limits: Arc<ClientLimitTable>,
    counters: Arc<ProxCounters>,
    state: Mutex<TrafficState>,
    /// Held while the file is written.
    writing: Mutex<()>,
}

#[derive(Debug)]
struct TrafficState {
    month: Month,
    clients: HashMap<HostKey, Arc<ClientTraffic>>,
}

impl TrafficTable {
    /// The traffic of this month, as far as a file in `directory` has it.
    ///
    /// # Errors
    /// The file cannot be read, or was not written by the proxy.
    pub(crate) fn open(
        directory: Option<&Path>,
        limits: Arc<ClientLimitTable>,
        counters: Arc<ProxCounters>,
    ) -> io::Result<TrafficTable> {
        let path = directory.map(|directory| directory.join(FILE_NAME));
        let stored = path.as_deref().map(read).transpose()?.flatten();
        let mut state = TrafficState {
            month: Month::now(),
            clients: HashMap::new(),
        };
        // One of a later month was written before the clock was set back, or before it was set at all: it holds. If that
        // month is far ahead, its bytes are this one's.
        if let Some(stored) = stored.filter(|stored| Month(stored.month) >= state.month) {
            state.month = Month(stored.month);
            state.leave_wrong_month(Month::now());
            for one in stored.clients {
                let month = MonthBytes {
                    down: one.down_bytes,
                    up: one.up_bytes,
                };
                let traffic = ClientTraffic::new(&limits.of(&one.key), month);
                state.clients.insert(one.key, Arc::new(traffic));
            }
        }
        Ok(TrafficTable {
            path,
            limits,
            counters,
            state: Mutex::new(state),
            writing: Mutex::default(),
        })
    }

    /// The traffic of a client.
    pub(crate) fn of(&self, client: HostKey) -> Arc<ClientTraffic> {
        let mut state = self.state.lock();
        if let Some(known) = state.clients.get(&client) {
            return known.clone();
        }
        if state.clients.len() >= CLIENTS_MAX {
            state.forget_some();
        }
        let limits = self.limits.of(&client);
        let traffic = Arc::new(ClientTraffic::new(&limits, MonthBytes::default()));
        state.clients.insert(client, traffic.clone());
        traffic
    }

    /// The traffic of a new flow. Must be called on a runtime.
    pub(crate) fn flow(&self, client: HostKey) -> Arc<FlowTraffic> {
        let client = self.of(client);
        Arc::new(FlowTraffic {
            number: client.next_flow.fetch_add(1, Ordering::Relaxed),
            client,
            counters: self.counters.clone(),
            kind: AtomicU8::new(TrafficKind::Other as u8),
            waiters: Default::default(),
            bytes: Default::default(),
            is_left_to_packets: AtomicBool::new(false),
            timers: Handle::current(),
            supply: SupplyMeter::default(),
        })
    }

    /// Refuses a client whose bytes of this month are used up.
    pub(crate) fn check_month(&self, client: &HostKey) -> Result<(), ProxRefusal> {
        self.begin_month_if_due();
        let state = self.state.lock();
        match state.clients.get(client) {
            Some(traffic) if *traffic.is_used_up.borrow() => Err(ProxRefusal::MonthUsedUp {
                bytes: traffic.month_max.load(Ordering::Relaxed),
                until: state.month.end(),
            }),
            _ => Ok(()),
        }
    }

    /// The bytes of a client in this month.
    pub(crate) fn month(&self, client: &HostKey) -> MonthBytes {
        let state = self.state.lock();
        let traffic = state.clients.get(client);
        traffic.map_or_else(MonthBytes::default, |traffic| traffic.month())
    }

    /// The month, and what the client has transferred in it.
    pub(crate) fn this_month(&self, client: &HostKey) -> (Month, MonthBytes) {
        self.begin_month_if_due();
        let state = self.state.lock();
        let traffic = state.clients.get(client);
        let bytes = traffic.map_or_else(MonthBytes::default, |traffic| traffic.month());
        (state.month, bytes)
    }

    /// Counts what a client transferred at other nodes in a month, unless that is over.
    pub(crate) fn add_elsewhere(&self, client: &HostKey, month: Month, bytes: MonthBytes) {
        if bytes == MonthBytes::default() {
            return;
        }
        let traffic = self.of(*client);
        let state = self.state.lock();
        if state.month != month {
            return;
        }
        traffic.add(TrafficDirection::Down, bytes.down);
        traffic.add(TrafficDirection::Up, bytes.up);
    }

    /// Whether a packet of a client may be relayed, and counts it if so.
    pub(crate) fn relays(
        &self,
        client: HostKey,
        direction: TrafficDirection,
        bytes: usize,
    ) -> bool {
        let traffic = self.of(client);
        if *traffic.is_used_up.borrow() || !traffic.bucket(direction).try_take(bytes) {
            self.counters.on_relayed_packet_dropped();
            return false;
        }
        let bytes = bytes as u64;
        self.counters
            .add_bytes(direction, TrafficKind::Relay, bytes);
        traffic.add(direction, bytes);
        true
    }

    /// Whether a packet of a client's tunnel may pass, and counts it if so.
    pub(crate) fn admits_packet(
        &self,
        client: &ClientTraffic,
        direction: TrafficDirection,
        bytes: usize,
    ) -> bool {
        if *client.is_used_up.borrow() || !client.bucket(direction).try_take(bytes) {
            return false;
        }
        let bytes = bytes as u64;
        self.counters
            .add_bytes(direction, TrafficKind::Packets, bytes);
        client.add(direction, bytes);
        true
    }

    /// Applies the limits as they are now, of one client or of all.
    pub(crate) fn apply_limits(&self, client: Option<&HostKey>) {
        let state = self.state.lock();
        match client {
            Some(client) => {
                if let Some(traffic) = state.clients.get(client) {
                    traffic.set_limits(&self.limits.of(client));
                }
            }
            None => {
                for (client, traffic) in &state.clients {
                    traffic.set_limits(&self.limits.of(client));
                }
            }
        }
    }

    /// Forgets a client that was removed.
    pub(crate) fn forget(&self, client: &HostKey) {
        self.state.lock().clients.remove(client);
    }

    /// Forgets a client whose last flow ended, if it is not `known`, so that nobody asks for its bytes.
    pub(crate) fn on_flow_ended(&self, client: &HostKey, known: bool) {
        if known {
            return;
        }
        let mut state = self.state.lock();
        let traffic = state.clients.get(client);
        if traffic.is_some_and(ClientTraffic::may_be_forgotten) {
            state.clients.remove(client);
        }
    }

    /// Forgets clients that are not `known` and could not be forgotten when their last flow ended.
    pub(crate) fn sweep(&self, known: impl Fn(&HostKey) -> bool) {
        let mut state = self.state.lock();
        (state.clients).retain(|client, traffic| !traffic.may_be_forgotten() || known(client));
    }

    fn begin_month_if_due(&self) {
        let now = Month::now();
        let mut state = self.state.lock();
        state.leave_wrong_month(now);
        if now > state.month {
            state.month = now;
            state
                .clients
                .values()
                .for_each(|traffic| traffic.begin_month());
        }
    }

    /// Begins a new month if it is time, and writes down what clients have transferred in this one, except of those that
    /// are `counted_elsewhere`.
    pub(crate) fn save(&self, counted_elsewhere: impl Fn(&HostKey) -> bool) {
        self.begin_month_if_due();
        let Some(path) = &self.path else {
            return;
        };
        let _writing = self.writing.lock();
        let stored = {
            let state = self.state.lock();
            let clients = state.clients.iter().map(|(key, traffic)| {
                let month = traffic.month();
                StoredMonth {
                    key: *key,
                    down_bytes: month.down,
                    up_bytes: month.up,
                }
            });
            StoredTraffic {
                month: state.month.0,
                clients: clients
                    .filter(|one| one.down_bytes + one.up_bytes > 0)
                    .filter(|one| !counted_elsewhere(&one.key))
                    .collect(),
            }
        };
        let text = serde_json::to_vec_pretty(&stored).expect("plain data");
        if let Err(error) = replace_private(path, &text) {
            tracing::warn!(%error, "what clients have transferred this month is not kept");
        }
    }
}

impl TrafficState {
    /// Counts the bytes of a month that a wrong clock told as those of the present one: no month would begin for years.
    fn leave_wrong_month(&mut self, now: Month) {
        if self.month.is_wrong(now) {
            tracing::warn!(
                wrong = %self.month.0,
                present = %now.0,
                "the clock was wrong; what clients transferred counts for the present month"
            );
            self.month = now;
        }
    }

    /// Forgets half of the clients without a flow: those that have transferred least.
    fn forget_some(&mut self) {
        let idle = self
            .clients
            .iter()
            .filter(|(_, t)| Arc::strong_count(t) == 1);
        let sum = |month: MonthBytes| month.down.saturating_add(month.up);
        let mut idle: Vec<_> = idle.map(|(key, t)| (sum(t.month()), *key)).collect();
        idle.sort_unstable();
        idle.truncate(idle.len().div_ceil(2));
        for (_, key) in idle {
            self.clients.remove(&key);
        }
    }
}

fn read(path: &Path) -> io::Result<Option<StoredTraffic>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let stored = serde_json::from_str(&text).map_err(|error| {
        let text = format!(
            "{} is damaged: {error}; without it, what clients have transferred this month counts as nothing",
            path.display()
        );
        io::Error::new(ErrorKind::InvalidData, text)
    })?;
    Ok(Some(stored))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_limits::ClientLimits;
    use crate::config::ProxConfig;

    const ONE: HostKey = [1; 32];

    fn table(directory: &Path, month_bytes: u64) -> TrafficTable {
        let limits = Arc::new(ClientLimitTable::new(&ProxConfig {
            client_month_bytes_max: month_bytes,
            ..Default::default()
        }));
        TrafficTable::open(Some(directory), limits, Arc::default()).unwrap()
    }

    #[tokio::test]
    async fn the_bytes_of_a_month_survive_a_restart_and_end_with_it() {
        let directory = tempfile::tempdir().unwrap();
        let traffic = table(directory.path(), 1_000);
        let flow = traffic.flow(ONE);
        flow.moved(TrafficDirection::Down, 600);
        flow.moved(TrafficDirection::Up, 399);
        assert_eq!(traffic.check_month(&ONE), Ok(()));
        traffic.save(|_| false);
        let again = table(directory.path(), 1_000);
        assert_eq!(again.month(&ONE), MonthBytes { down: 600, up: 399 });
        let flow = again.flow(ONE);
        flow.moved(TrafficDirection::Up, 1);
        flow.used_up().await;
        let refused = again.check_month(&ONE).unwrap_err();
        assert!(matches!(
            refused,
            ProxRefusal::MonthUsedUp { bytes: 1_000, .. }
        ));
        // As if the last month were this one.
        let last = again.state.lock().month.0.checked_sub(1.month()).unwrap();
        again.state.lock().month = Month(last);
        again.save(|_| false);
        assert_eq!(again.month(&ONE), MonthBytes::default());
        assert!(!*again.of(ONE).is_used_up.borrow());
    }

    #[tokio::test]
    async fn a_new_month_begins_with_nothing_and_a_clock_set_back_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let traffic = table(directory.path(), 10);
        traffic.flow(ONE).moved(TrafficDirection::Down, 10);
        let now = traffic.state.lock().month;
        traffic.state.lock().month = Month(now.end());
        assert!(traffic.check_month(&ONE).is_err(), "the clock was set back");
        let last = now.0.checked_sub(1.month()).unwrap();
        traffic.state.lock().month = Month(last);
        assert_eq!(traffic.check_month(&ONE), Ok(()), "a month has begun");
        assert_eq!(traffic.month(&ONE), MonthBytes::default());
    }

    #[tokio::test]
    async fn a_clock_that_was_far_ahead_for_a_moment_stops_no_month_for_good() {
        let directory = tempfile::tempdir().unwrap();
        let traffic = table(directory.path(), 10);
        traffic.flow(ONE).moved(TrafficDirection::Down, 7);
        let now = traffic.state.lock().month;
        let far = Month(Date::constant(2140, 1, 1));
        traffic.state.lock().month = far;
        assert_eq!(traffic.check_month(&ONE), Ok(()));
        assert_eq!(traffic.state.lock().month, now);
        assert_eq!(traffic.month(&ONE), MonthBytes { down: 7, up: 0 });
        // One that an earlier process wrote down.
        traffic.save(|_| false);
        let path = directory.path().join(FILE_NAME);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace(&now.0.to_string(), "2140-01-01")).unwrap();
        let again = table(directory.path(), 10);
        assert_eq!(again.state.lock().month, now);
        assert_eq!(again.month(&ONE), MonthBytes { down: 7, up: 0 });
        assert!(!far.is_wrong(Month(Date::constant(1970, 1, 1))));
    }

    #[tokio::test]
    async fn a_limit_that_is_raised_lets_the_client_go_on() {
        let directory = tempfile::tempdir().unwrap();
        let traffic = table(directory.path(), 10);
        traffic.flow(ONE).moved(TrafficDirection::Down, 10);
        assert!(traffic.check_month(&ONE).is_err());
        let own = ClientLimits {
            month_bytes: Some(20),
            ..Default::default()
        };
        traffic.limits.set(ONE, own);
        traffic.apply_limits(Some(&ONE));
        assert_eq!(traffic.check_month(&ONE), Ok(()));
    }

    #[tokio::test]
    async fn a_flow_moves_no_more_than_what_is_left_of_the_month() {
        let directory = tempfile::tempdir().unwrap();
        let traffic = table(directory.path(), 10);
        let flow = traffic.flow(ONE);
        let ask = || std::future::poll_fn(|cx| flow.poll(cx, TrafficDirection::Down));
        assert!(ask().await > 10, "a refusal is not counted for the month");
        flow.set_kind(TrafficKind::Fetch);
        assert_eq!(ask().await, 10);
        flow.moved(TrafficDirection::Down, 10);
        let held = tokio::spawn({
            let flow = flow.clone();
            async move { std::future::poll_fn(|cx| flow.poll(cx, TrafficDirection::Down)).await }
        });
        tokio::task::yield_now().await;
        assert!(!held.is_finished(), "nothing is left");
        let own = ClientLimits {
            month_bytes: Some(15),
            ..Default::default()
        };
        traffic.limits.set(ONE, own);
        traffic.apply_limits(Some(&ONE));
        assert_eq!(held.await.unwrap(), 5, "the limit was raised");
    }

    #[tokio::test]
    async fn a_client_that_nobody_knows_is_forgotten_with_its_last_flow() {
        let directory = tempfile::tempdir().unwrap();
        let traffic = table(directory.path(), 0);
        let (first, second) = (traffic.flow(ONE), traffic.flow(ONE));
        drop(first);
        traffic.on_flow_ended(&ONE, false);
        assert_eq!(traffic.state.lock().clients.len(), 1);
        drop(second);
        traffic.on_flow_ended(&ONE, true);
        assert_eq!(traffic.state.lock().clients.len(), 1);
        traffic.on_flow_ended(&ONE, false);
        assert!(traffic.state.lock().clients.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn short_flows_one_after_the_other_share_one_burst() {
        let config = ProxConfig {
            client_down_bytes_per_s: 1_000,
            ..Default::default()
        };
        let limits = Arc::new(ClientLimitTable::new(&config));
        let traffic = TrafficTable::open(None, limits, Arc::default()).unwrap();
        traffic.flow(ONE).moved(TrafficDirection::Down, 1_000);
        traffic.on_flow_ended(&ONE, false);
        let flow = traffic.flow(ONE);
        let mut nobody = Context::from_waker(std::task::Waker::noop());
        assert!(flow.poll(&mut nobody, TrafficDirection::Down).is_pending());
        drop(flow);
        tokio::time::advance(std::time::Duration::from_secs(2)).await;
        traffic.sweep(|_| true);
        assert_eq!(traffic.state.lock().clients.len(), 1);
        traffic.sweep(|_| false);
        // The one that waits in the queue is gone, and with it the last use.
        assert!(traffic.state.lock().clients.is_empty());
    }

    #[test]
    fn the_file_is_its_owners_alone_and_a_damaged_one_is_an_error() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        table(directory.path(), 0).save(|_| false);
        let path = directory.path().join(FILE_NAME);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::write(&path, "{").unwrap();
        let limits = Arc::new(ClientLimitTable::new(&ProxConfig::default()));
        let opened = TrafficTable::open(Some(directory.path()), limits, Arc::default());
        assert!(opened.unwrap_err().to_string().contains("damaged"));
    }
}
