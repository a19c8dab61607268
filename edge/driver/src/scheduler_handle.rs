//! The device's scheduler, shared by all that carry data for it: one lock, one clock.
//!
//! ```text
//!  transfer, stream, socket ── SpendHandle ── report ──▶ SchedulerHandle ── time ──▶ DeviceScheduler
//!                                  ◀── ClientDecision ──       (d2tp-sched, no clock)
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use d2tp_links::{Link, LinkKind};
use d2tp_sched::{
    ClientDecision, ClientId, ClientReport, CompletionEstimate, DeviceScheduler, ForecastHint,
    LinkChoice, LinkSurroundings, RadioStatus, SavedLinkHistory, SchedulerKind, TransferDirection,
    WakingClients,
};
use d2tp_session::{Span, Time};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::clock::now;

/// The scheduler of a device, with the boot-time clock.
#[derive(Debug)]
pub struct SchedulerHandle {
    kind: SchedulerKind,
    scheduler: Mutex<DeviceScheduler>,
    /// The number of the next flow, counted down: transfers count up from 1.
    next_flow: AtomicU64,
    /// Counts arrivals and departures of clients, and changes of whether they wait.
    changed: watch::Sender<u64>,
}

impl SchedulerHandle {
    /// Creates a scheduler for a device whose links are not known yet.
    pub fn new(kind: SchedulerKind) -> Arc<SchedulerHandle> {
        Arc::new(SchedulerHandle {
            kind,
            scheduler: Mutex::new(DeviceScheduler::new(kind)),
            next_flow: AtomicU64::new(u64::MAX),
            changed: watch::channel(0).0,
        })
    }

    /// The scheduling algorithm.
    pub fn kind(&self) -> SchedulerKind {
        self.kind
    }

    /// Adds a client, which stays until the handle is dropped. `number` is what others know it by.
    pub fn join(
        self: &Arc<SchedulerHandle>,
        direction: TransferDirection,
        number: u64,
    ) -> SpendHandle {
        let client = self.scheduler.lock().join(now(), direction, number);
        self.announce_change();
        SpendHandle {
            scheduler: self.clone(),
            client,
            waited: AtomicBool::new(false),
            wakes: AtomicBool::new(false),
        }
    }

    /// Passes an input to the scheduler, with the time.
    pub(crate) fn with<R>(&self, input: impl FnOnce(Time, &mut DeviceScheduler) -> R) -> R {
        input(now(), &mut self.scheduler.lock())
    }

    /// A number for a flow that no transfer has.
    pub(crate) fn next_flow_number(&self) -> u64 {
        self.next_flow.fetch_sub(1, Ordering::Relaxed)
    }

    /// Takes in the links of a machine whose networks are not distinguished: usable ones count as up.
    pub fn observe_links(&self, links: &[Link]) {
        let away = links.iter().filter(|link| link.kind != LinkKind::Loopback);
        let radios = away
            .filter(|link| link.is_usable())
            .map(|link| RadioStatus {
                device: link.name.clone(),
                slot: link.name.clone(),
                class: link.class.class.into(),
                carries: true,
                rate: None,
            });
        self.observe(&LinkSurroundings {
            radios: radios.collect(),
            ..LinkSurroundings::default()
        });
    }

    /// See [`DeviceScheduler::observe`].
    pub fn observe(&self, around: &LinkSurroundings) {
        self.scheduler.lock().observe(now(), around);
    }

    /// See [`DeviceScheduler::restore`].
    pub fn restore(&self, saved: [SavedLinkHistory; 2]) {
        self.scheduler.lock().restore(now(), saved);
    }

    /// See [`DeviceScheduler::saved`].
    pub fn saved(&self) -> [SavedLinkHistory; 2] {
        self.scheduler.lock().saved(now())
    }

    /// See [`DeviceScheduler::radios`].
    pub fn radios(&self) -> Vec<RadioStatus> {
        self.scheduler.lock().radios()
    }

    /// See [`DeviceScheduler::free_rates`].
    pub fn free_rates(&self) -> [f64; 2] {
        self.scheduler.lock().free_rates()
    }

    /// See [`DeviceScheduler::set_hint`].
    pub fn set_hint(&self, slot: &str, hint: &ForecastHint) {
        self.scheduler.lock().set_hint(slot, hint);
    }

    /// See [`DeviceScheduler::free_link_chance`].
    pub fn free_link_chance(&self, span: Span) -> f64 {
        self.scheduler.lock().free_link_chance(now(), span)
    }

    /// See [`DeviceScheduler::waking_clients`].
    pub fn waking_clients(&self) -> WakingClients {
        self.scheduler.lock().waking_clients(now())
    }

    /// See [`DeviceScheduler::latest_start`].
    pub fn latest_start(&self) -> Option<Duration> {
        self.scheduler.lock().latest_start(now())
    }

    /// See [`DeviceScheduler::record_round_trip`].
    pub fn record_round_trip(&self, device: &str, round_trip: Duration) {
        self.scheduler.lock().record_round_trip(device, round_trip);
    }

    /// See [`DeviceScheduler::round_trip`].
    pub fn round_trip(&self, device: &str) -> Option<Duration> {
        self.scheduler.lock().round_trip(device)
    }

    /// See [`DeviceScheduler::set_metered_limit`].
    pub fn set_metered_limit(&self, metered_bytes: Option<u64>) {
        self.scheduler.lock().set_metered_limit(metered_bytes);
    }

    /// See [`DeviceScheduler::promise_of`].
    pub fn promise_of(&self, number: u64) -> Option<(CompletionEstimate, Duration)> {
        self.scheduler.lock().promise_of(now(), number)
    }

    /// See [`DeviceScheduler::link_rate`].
    pub fn link_rate(&self, link: &str) -> Option<(f64, bool)> {
        self.scheduler.lock().link_rate(link)
    }

    /// Changes whenever a client joins or leaves, or begins or ceases to wait.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(crate) fn announce_change(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}

/// A client of a device's scheduler. It leaves the scheduler when it is dropped.
#[derive(Debug)]
pub struct SpendHandle {
    scheduler: Arc<SchedulerHandle>,
    client: ClientId,
    /// Whether the last decision was to wait.
    waited: AtomicBool,
    /// Whether the machine is woken for the client, as it last reported.
    wakes: AtomicBool,
}

impl SpendHandle {
    /// Reports, and returns what the client may use. See [`DeviceScheduler::decide`].
    pub fn decide(&self, report: &ClientReport) -> ClientDecision {
        let decision = (self.scheduler.scheduler.lock()).decide(now(), self.client, report);
        let waits = matches!(decision.choice, LinkChoice::Wait { .. });
        let changed = [
            self.waited.swap(waits, Ordering::Relaxed) != waits,
            self.wakes.swap(report.keeps_awake, Ordering::Relaxed) != report.keeps_awake,
        ];
        if changed.contains(&true) {
            self.scheduler.announce_change();
        }
        decision
    }

    /// See [`DeviceScheduler::record_round_trip`].
    pub fn record_round_trip(&self, device: &str, round_trip: Duration) {
        self.scheduler.record_round_trip(device, round_trip);
    }

    /// See [`DeviceScheduler::record_busy_time`].
    pub fn record_busy_time(&self, device: &str, busy: Duration) {
        let mut scheduler = self.scheduler.scheduler.lock();
        scheduler.record_busy_time(self.client, device, busy.into());
    }

    /// See [`DeviceScheduler::pays_after`].
    pub fn pays_after(&self) -> Option<Duration> {
        (self.scheduler.scheduler.lock()).pays_after(now(), self.client)
    }

    /// See [`DeviceScheduler::promise`].
    pub fn promise(&self) -> Option<CompletionEstimate> {
        (self.scheduler.scheduler.lock()).promise(now(), self.client)
    }
}

impl Drop for SpendHandle {
    fn drop(&mut self) {
        self.scheduler.scheduler.lock().leave(self.client);
        self.scheduler.announce_change();
    }
}
