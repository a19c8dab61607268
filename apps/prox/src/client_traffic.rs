//! What each client transfers: how fast, and how much in a calendar month.
//!
//! ```text
//!  metered_flow.rs, answer.rs, relays ── bytes ──▶ FlowTraffic ─▶ ClientTraffic ── token buckets
//!                                                                      └ bytes of this month, for traffic_table.rs
//! ```
//!
//! Counted is what flows carry, with heads and without retransmissions, and packets that are relayed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker, ready};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::client_limits::EffectiveLimits;
use crate::counters::{ProxCounters, TrafficDirection, TrafficKind};
use crate::supply_meter::SupplyMeter;
use crate::token_bucket::{BucketWaiter, TokenBucket};

/// The bytes of a client in this month.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MonthBytes {
    /// Bytes to the client.
    pub down: u64,
    /// Bytes from the client.
    pub up: u64,
}

impl MonthBytes {
    /// The bytes of both directions.
    pub(crate) fn sum(self) -> u64 {
        self.down.saturating_add(self.up)
    }
}

/// The traffic of one client that has flows, or had some a moment ago.
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
    pub(crate) fn new(limits: &EffectiveLimits, month: MonthBytes) -> ClientTraffic {
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

    pub(crate) fn set_limits(&self, limits: &EffectiveLimits) {
        self.down.set_rate(limits.down_bytes_per_s);
        self.up.set_rate(limits.up_bytes_per_s);
        self.month_max.store(limits.month_bytes, Ordering::Relaxed);
        self.check_month();
    }

    pub(crate) fn bucket(&self, direction: TrafficDirection) -> &Arc<TokenBucket> {
        match direction {
            TrafficDirection::Down => &self.down,
            TrafficDirection::Up => &self.up,
        }
    }

    pub(crate) fn month(&self) -> MonthBytes {
        MonthBytes {
            down: self.month_down.load(Ordering::Relaxed),
            up: self.month_up.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn add(&self, direction: TrafficDirection, bytes: u64) {
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
            max => max.saturating_sub(month.sum()),
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

    /// The most bytes in a month; 0: any number.
    pub(crate) fn month_max(&self) -> u64 {
        self.month_max.load(Ordering::Relaxed)
    }

    /// Whether this month's bytes are used up.
    pub(crate) fn is_used_up(&self) -> bool {
        *self.is_used_up.borrow()
    }

    /// Whether nothing but the bytes of the month would be lost with the entry: no flow uses it, and its buckets are full,
    /// so that consecutive short flows get no burst each.
    pub(crate) fn is_at_rest(self: &Arc<ClientTraffic>) -> bool {
        Arc::strong_count(self) == 1 && self.down.is_full() && self.up.is_full()
    }

    pub(crate) fn begin_month(&self) {
        self.month_down.store(0, Ordering::Relaxed);
        self.month_up.store(0, Ordering::Relaxed);
        self.check_month();
    }
}

/// The traffic of one flow, whose client's limits it obeys.
#[derive(Debug)]
pub(crate) struct FlowTraffic {
    client: Arc<ClientTraffic>,
    /// The flow's number among those of the client.
    number: u64,
    counters: Arc<ProxCounters>,
    kind: AtomicU8,
    /// The flow's waiters at the client's buckets: down and up.
    waiters: [Arc<BucketWaiter>; 2],
    bytes: [AtomicU64; 2],
    is_left_to_packets: AtomicBool,
    timers: Handle,
    /// Whether the flow waits for its server, or for the client's rate, which is no fault of a link either.
    pub(crate) supply: SupplyMeter,
}

impl FlowTraffic {
    /// The traffic of a new flow of this client. Must be called on a runtime.
    pub(crate) fn new(client: Arc<ClientTraffic>, counters: Arc<ProxCounters>) -> FlowTraffic {
        FlowTraffic {
            number: client.next_flow.fetch_add(1, Ordering::Relaxed),
            client,
            counters,
            kind: AtomicU8::new(TrafficKind::Other as u8),
            waiters: Default::default(),
            bytes: Default::default(),
            is_left_to_packets: AtomicBool::new(false),
            timers: Handle::current(),
            supply: SupplyMeter::default(),
        }
    }

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
