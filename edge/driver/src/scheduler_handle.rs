//! The device's scheduler, shared by all of its clients, with one lock and one clock.
//!
//! ```text
//!  transfer, stream, socket ── SpendHandle ── report ──▶ SchedulerHandle ── time ──▶ DeviceScheduler
//!                                  ◀── ClientDecision ──       (d2tp-sched, no clock)
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use d2tp_links::{Link, LinkKind};
use d2tp_sched::energy_policy::RadioPowerModel;
use d2tp_sched::{
    ClientDecision, ClientId, ClientReport, CompletionEstimate, DeviceScheduler, EnergySaving,
    ForecastHint, KnownLink, LinkChoice, LinkSurroundings, PowerSource, SavedLinkHistory,
    SchedulerKind, TransferDirection, UdpObstacle, WakingClients,
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
    /// Changes when a client joins or leaves, or begins or ceases to wait.
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

    /// Adds a client, which leaves when the handle is dropped. `number` identifies it to others.
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

    /// A number for a flow that no transfer of a queue has.
    pub fn next_flow_number(&self) -> u64 {
        self.next_flow.fetch_sub(1, Ordering::Relaxed)
    }

    /// Observes the links of a machine whose networks are not distinguished: usable links count as
    /// up.
    pub fn observe_links(&self, links: &[Link]) {
        let away = links.iter().filter(|link| link.kind != LinkKind::Loopback);
        let links = away.filter(|link| link.is_usable()).map(|link| KnownLink {
            device: link.name.clone(),
            slot: link.name.clone(),
            class: link.class.class.into(),
            carries: true,
            rate: None,
        });
        self.observe(&LinkSurroundings {
            links: links.collect(),
            ..LinkSurroundings::default()
        });
    }

    /// Observes the links and networks around the device; see [`DeviceScheduler::observe`].
    pub fn observe(&self, around: &LinkSurroundings) {
        self.scheduler.lock().observe(now(), around);
    }

    /// Restores the saved history of links; see [`DeviceScheduler::restore`].
    pub fn restore(&self, saved: [SavedLinkHistory; 2]) {
        self.scheduler.lock().restore(now(), saved);
    }

    /// The history of links to be saved; see [`DeviceScheduler::saved`].
    pub fn saved(&self) -> [SavedLinkHistory; 2] {
        self.scheduler.lock().saved(now())
    }

    /// The links with their rates; see [`DeviceScheduler::known_links`].
    pub fn known_links(&self) -> Vec<KnownLink> {
        self.scheduler.lock().known_links()
    }

    /// The rates of free links together, in bytes per second; see [`DeviceScheduler::free_rates`].
    pub fn free_rates(&self) -> [f64; 2] {
        self.scheduler.lock().free_rates()
    }

    /// Sets the forecast of a link; see [`DeviceScheduler::set_hint`].
    pub fn set_hint(&self, slot: &str, hint: &ForecastHint) {
        self.scheduler.lock().set_hint(slot, hint);
    }

    /// Sets the links whose radios sleep; see [`DeviceScheduler::set_sleeping`].
    pub fn set_sleeping(&self, names: BTreeSet<String>) {
        self.scheduler.lock().set_sleeping(names);
    }

    /// The probability that a free link comes back within a span; see
    /// [`DeviceScheduler::free_link_chance`].
    pub fn free_link_chance(&self, span: Span) -> f64 {
        self.scheduler.lock().free_link_chance(now(), span)
    }

    /// The clients for which the machine is woken; see [`DeviceScheduler::waking_clients`].
    pub fn waking_clients(&self) -> WakingClients {
        self.scheduler.lock().waking_clients(now())
    }

    /// The time until a client must begin on a metered link; see [`DeviceScheduler::latest_start`].
    pub fn latest_start(&self) -> Option<Duration> {
        self.scheduler.lock().latest_start(now())
    }

    /// Records a measured round trip of a link; see [`DeviceScheduler::record_round_trip`].
    pub fn record_round_trip(&self, device: &str, round_trip: Duration) {
        self.scheduler.lock().record_round_trip(device, round_trip);
    }

    /// See [`DeviceScheduler::record_udp_obstacle`].
    pub fn record_udp_obstacle(&self, device: &str, obstacle: Option<UdpObstacle>) {
        (self.scheduler.lock()).record_udp_obstacle(device, obstacle);
    }

    /// See [`DeviceScheduler::udp_obstacle`].
    pub fn udp_obstacle(&self, device: &str) -> Option<UdpObstacle> {
        self.scheduler.lock().udp_obstacle(device)
    }

    /// The last measured round trip of a link; see [`DeviceScheduler::round_trip`].
    pub fn round_trip(&self, device: &str) -> Option<Duration> {
        self.scheduler.lock().round_trip(device)
    }

    /// See [`DeviceScheduler::set_energy_saving`].
    pub fn set_energy_saving(&self, saving: EnergySaving) {
        self.scheduler.lock().set_energy_saving(saving);
    }

    /// See [`DeviceScheduler::energy_saving`].
    pub fn energy_saving(&self) -> EnergySaving {
        self.scheduler.lock().energy_saving()
    }

    /// See [`DeviceScheduler::set_power_source`].
    pub fn set_power_source(&self, power: PowerSource) {
        self.scheduler.lock().set_power_source(power);
    }

    /// See [`DeviceScheduler::power_source`].
    pub fn power_source(&self) -> PowerSource {
        self.scheduler.lock().power_source()
    }

    /// See [`DeviceScheduler::set_radio_power`].
    pub fn set_radio_power(
        &self,
        radios: BTreeMap<String, RadioPowerModel>,
        expected: Option<RadioPowerModel>,
    ) {
        self.scheduler.lock().set_radio_power(radios, expected);
    }

    /// Sets the bytes that metered links may carry; see [`DeviceScheduler::set_metered_limit`].
    pub fn set_metered_limit(&self, metered_bytes: Option<u64>) {
        self.scheduler.lock().set_metered_limit(metered_bytes);
    }

    /// The estimate for a client, and its time left; see [`DeviceScheduler::promise_of`].
    pub fn promise_of(&self, number: u64) -> Option<(CompletionEstimate, Duration)> {
        self.scheduler.lock().promise_of(now(), number)
    }

    /// The rate of a link and whether it carries data; see [`DeviceScheduler::link_rate`].
    pub fn link_rate(&self, link: &str) -> Option<(f64, bool)> {
        self.scheduler.lock().link_rate(link)
    }

    /// Whether anything uses the scheduler at present.
    pub fn has_clients(&self) -> bool {
        self.scheduler.lock().has_clients()
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
    /// Reports, and returns what the client may use; see [`DeviceScheduler::decide`].
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

    /// See [`DeviceScheduler::record_udp_obstacle`].
    pub fn record_udp_obstacle(&self, device: &str, obstacle: Option<UdpObstacle>) {
        self.scheduler.record_udp_obstacle(device, obstacle);
    }

    /// Records a measured round trip of a link; see [`DeviceScheduler::record_round_trip`].
    pub fn record_round_trip(&self, device: &str, round_trip: Duration) {
        self.scheduler.record_round_trip(device, round_trip);
    }

    /// Records how long a link has carried the client; see [`DeviceScheduler::record_busy_time`].
    pub fn record_busy_time(&self, device: &str, busy: Duration) {
        let mut scheduler = self.scheduler.scheduler.lock();
        scheduler.record_busy_time(self.client, device, busy.into());
    }

    /// See [`DeviceScheduler::set_client_energy_saving`].
    pub fn set_energy_saving(&self, saving: Option<EnergySaving>) {
        (self.scheduler.scheduler.lock()).set_client_energy_saving(self.client, saving);
    }

    /// See [`DeviceScheduler::set_refused`].
    pub fn set_refused(&self, is_refused: bool) {
        (self.scheduler.scheduler.lock()).set_refused(self.client, is_refused);
    }

    /// The time until metered links would carry the client; see [`DeviceScheduler::pays_after`].
    pub fn pays_after(&self) -> Option<Duration> {
        (self.scheduler.scheduler.lock()).pays_after(now(), self.client)
    }

    /// The estimate of completion and cost; see [`DeviceScheduler::promise`].
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
