//! The traffic of all clients in this month.
//!
//! ```text
//!  a flow ──▶ ClientTraffic (client_traffic.rs) ── no flow, full buckets ──▶ the bytes of the month alone
//!                  ▲                                                                   │
//!                  └───────────────────────────── the next flow ◀──────────────────────┘
//!  DIR/traffic.json ◀── once a minute, and at the end ── the bytes of both
//! ```
//!
//! A month is one of UTC, so that neither the machine's time zone nor daylight saving time moves its end.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use d2tp_driver::HostKey;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::client_limits::ClientLimitTable;
use crate::client_traffic::{ClientTraffic, FlowTraffic, MonthBytes};
use crate::counters::{ProxCounters, TrafficDirection, TrafficKind};
use crate::private_file::replace_private;
use crate::refusal::ProxRefusal;

/// The name of the file in the state directory.
const FILE_NAME: &str = "traffic.json";
/// The most clients whose bytes are counted; of those without a flow, the ones that moved least are forgotten first.
const CLIENTS_MAX: usize = 100_000; // as many as can be enrolled

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
    /// The lock held while the file is written.
    writing: Mutex<()>,
}

#[derive(Debug)]
struct TrafficState {
    month: Month,
    /// Clients with flows, and those whose buckets are not full yet.
    active: HashMap<HostKey, Arc<ClientTraffic>>,
    /// The bytes of all others: most clients of a proxy are asleep, and buckets take twenty times as much memory.
    resting: HashMap<HostKey, MonthBytes>,
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
            active: HashMap::new(),
            resting: HashMap::new(),
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
                state.resting.insert(one.key, month);
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
        if let Some(known) = state.active.get(&client) {
            return known.clone();
        }
        let month = match state.resting.remove(&client) {
            Some(month) => month,
            None => {
                if state.active.len() + state.resting.len() >= CLIENTS_MAX {
                    state.forget_some();
                }
                MonthBytes::default()
            }
        };
        let traffic = Arc::new(ClientTraffic::new(&self.limits.of(&client), month));
        state.active.insert(client, traffic.clone());
        traffic
    }

    /// The traffic of a new flow. Must be called on a runtime.
    pub(crate) fn flow(&self, client: HostKey) -> Arc<FlowTraffic> {
        Arc::new(FlowTraffic::new(self.of(client), self.counters.clone()))
    }

    /// Refuses a client whose bytes of this month are used up.
    pub(crate) fn check_month(&self, client: &HostKey) -> Result<(), ProxRefusal> {
        self.begin_month_if_due();
        let state = self.state.lock();
        let max = match state.active.get(client) {
            Some(traffic) => traffic.month_max(),
            None => self.limits.of(client).month_bytes,
        };
        match max > 0 && state.month_bytes(client).sum() >= max {
            true => Err(ProxRefusal::MonthUsedUp {
                bytes: max,
                until: state.month.end(),
            }),
            false => Ok(()),
        }
    }

    /// The bytes of a client in this month.
    pub(crate) fn month(&self, client: &HostKey) -> MonthBytes {
        self.state.lock().month_bytes(client)
    }

    /// The month, and what the client has transferred in it.
    pub(crate) fn this_month(&self, client: &HostKey) -> (Month, MonthBytes) {
        self.begin_month_if_due();
        let state = self.state.lock();
        (state.month, state.month_bytes(client))
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
        if traffic.is_used_up() || !traffic.bucket(direction).try_take(bytes) {
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
        if client.is_used_up() || !client.bucket(direction).try_take(bytes) {
            return false;
        }
        let bytes = bytes as u64;
        self.counters
            .add_bytes(direction, TrafficKind::Packets, bytes);
        client.add(direction, bytes);
        true
    }

    /// Applies the limits as they are now, of one client or of all, to flows that run.
    pub(crate) fn apply_limits(&self, client: Option<&HostKey>) {
        let state = self.state.lock();
        match client {
            Some(client) => {
                if let Some(traffic) = state.active.get(client) {
                    traffic.set_limits(&self.limits.of(client));
                }
            }
            None => {
                for (client, traffic) in &state.active {
                    traffic.set_limits(&self.limits.of(client));
                }
            }
        }
    }

    /// Forgets a client that was removed.
    pub(crate) fn forget(&self, client: &HostKey) {
        let mut state = self.state.lock();
        state.active.remove(client);
        state.resting.remove(client);
    }

    /// Keeps no more than the bytes of the month of a client whose last flow ended, and not even those if the client is not
    /// `known`, so that nobody asks for them.
    pub(crate) fn on_flow_ended(&self, client: &HostKey, known: bool) {
        let mut state = self.state.lock();
        let traffic = state.active.get(client);
        if traffic.is_some_and(ClientTraffic::is_at_rest) {
            let month = state.active.remove(client).map(|traffic| traffic.month());
            state.set_resting(*client, month.unwrap_or_default());
            if !known && !self.is_limited(client) {
                state.resting.remove(client);
            }
        }
    }

    /// Does the same for all clients whose buckets were not full when their last flow ended, and forgets those that are
    /// not `known` any more.
    pub(crate) fn sweep(&self, known: impl Fn(&HostKey) -> bool) {
        let mut state = self.state.lock();
        let at_rest = (state.active).extract_if(|_, traffic| traffic.is_at_rest());
        let at_rest: Vec<_> = at_rest.map(|(key, one)| (key, one.month())).collect();
        for (client, month) in at_rest {
            state.set_resting(client, month);
        }
        (state.resting).retain(|client, _| known(client) || self.is_limited(client));
    }

    /// Whether the bytes of a month are limited for this client, so that they must be remembered.
    fn is_limited(&self, client: &HostKey) -> bool {
        self.limits.of(client).month_bytes > 0
    }

    fn begin_month_if_due(&self) {
        let now = Month::now();
        let mut state = self.state.lock();
        state.leave_wrong_month(now);
        if now > state.month {
            state.month = now;
            state.resting.clear();
            for traffic in state.active.values() {
                traffic.begin_month();
            }
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
            let active = state.active.iter().map(|(key, one)| (key, one.month()));
            let resting = state.resting.iter().map(|(key, month)| (key, *month));
            let clients = active.chain(resting).map(|(key, month)| StoredMonth {
                key: *key,
                down_bytes: month.down,
                up_bytes: month.up,
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

    /// The bytes of a client.
    fn month_bytes(&self, client: &HostKey) -> MonthBytes {
        match self.active.get(client) {
            Some(traffic) => traffic.month(),
            None => self.resting.get(client).copied().unwrap_or_default(),
        }
    }

    /// Records the bytes of a client that is not active any more.
    fn set_resting(&mut self, client: HostKey, month: MonthBytes) {
        if month != MonthBytes::default() {
            self.resting.insert(client, month);
        }
    }

    /// Forgets half of the clients without a flow: those that have transferred least.
    fn forget_some(&mut self) {
        let idle = self.active.iter();
        let idle = idle.filter(|(_, traffic)| Arc::strong_count(traffic) == 1);
        let idle = idle.map(|(key, traffic)| (traffic.month().sum(), *key));
        let resting = self.resting.iter().map(|(key, month)| (month.sum(), *key));
        let mut idle: Vec<_> = idle.chain(resting).collect();
        idle.sort_unstable();
        idle.truncate(idle.len().div_ceil(2));
        for (_, key) in idle {
            self.active.remove(&key);
            self.resting.remove(&key);
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
    use std::task::Context;

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
        assert!(!again.of(ONE).is_used_up());
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

    /// How many clients have buckets, and of how many the bytes of the month alone are known.
    fn lengths(traffic: &TrafficTable) -> (usize, usize) {
        let state = traffic.state.lock();
        (state.active.len(), state.resting.len())
    }

    #[tokio::test]
    async fn a_client_that_nobody_knows_is_forgotten_with_its_last_flow() {
        let directory = tempfile::tempdir().unwrap();
        let traffic = table(directory.path(), 0);
        let (first, second) = (traffic.flow(ONE), traffic.flow(ONE));
        second.moved(TrafficDirection::Up, 1);
        drop(first);
        traffic.on_flow_ended(&ONE, false);
        assert_eq!(lengths(&traffic), (1, 0));
        drop(second);
        traffic.on_flow_ended(&ONE, true);
        assert_eq!(lengths(&traffic), (0, 1));
        drop(traffic.flow(ONE));
        traffic.on_flow_ended(&ONE, false);
        assert_eq!(lengths(&traffic), (0, 0));
    }

    #[tokio::test]
    async fn of_a_client_without_flows_the_bytes_of_the_month_count_on() {
        let directory = tempfile::tempdir().unwrap();
        let traffic = table(directory.path(), 10);
        let flow = traffic.flow(ONE);
        flow.moved(TrafficDirection::Down, 6);
        drop(flow);
        traffic.on_flow_ended(&ONE, true);
        assert_eq!(lengths(&traffic), (0, 1));
        assert_eq!(traffic.month(&ONE), MonthBytes { down: 6, up: 0 });
        assert_eq!(traffic.check_month(&ONE), Ok(()));
        // A limit that is set meanwhile holds at once, and for the next flow.
        let own = ClientLimits {
            month_bytes: Some(7),
            ..Default::default()
        };
        traffic.limits.set(ONE, own);
        traffic.apply_limits(Some(&ONE));
        traffic.flow(ONE).moved(TrafficDirection::Up, 1);
        // Nobody may forget it: the month is used up.
        traffic.sweep(|_| false);
        assert_eq!(lengths(&traffic), (0, 1));
        let refused = traffic.check_month(&ONE).unwrap_err();
        assert!(matches!(refused, ProxRefusal::MonthUsedUp { bytes: 7, .. }));
        traffic.save(|_| false);
        let again = table(directory.path(), 10);
        assert_eq!(again.month(&ONE), MonthBytes { down: 6, up: 1 });
        traffic.forget(&ONE);
        assert_eq!(lengths(&traffic), (0, 0));
    }

    #[tokio::test]
    async fn those_that_moved_least_are_forgotten_first_with_flows_or_not() {
        let traffic = table(tempfile::tempdir().unwrap().path(), 0);
        let client = |n: u8| [n; 32];
        let mut running = None;
        for n in 1..=6 {
            let flow = traffic.flow(client(n));
            flow.moved(TrafficDirection::Down, usize::from(n));
            match n {
                1 => running = Some(flow),
                // No flow any more, and not told yet.
                2 | 5 => drop(flow),
                _ => {
                    drop(flow);
                    traffic.on_flow_ended(&client(n), true);
                }
            }
        }
        assert_eq!(lengths(&traffic), (3, 3));
        traffic.state.lock().forget_some();
        let known = |n: &u8| traffic.month(&client(*n)) != MonthBytes::default();
        let known: Vec<u8> = (1..=6).filter(known).collect();
        assert_eq!(known, [1, 5, 6]);
        drop(running);
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
        traffic.sweep(|_| false);
        let flow = traffic.flow(ONE);
        let mut nobody = Context::from_waker(std::task::Waker::noop());
        assert!(flow.poll(&mut nobody, TrafficDirection::Down).is_pending());
        drop(flow);
        tokio::time::advance(std::time::Duration::from_secs(2)).await;
        traffic.sweep(|_| true);
        assert_eq!(lengths(&traffic), (0, 1));
        traffic.sweep(|_| false);
        // The one that waits in the queue is gone, and with it the last use.
        assert_eq!(lengths(&traffic), (0, 0));
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
