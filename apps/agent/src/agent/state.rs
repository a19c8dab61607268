//! The state of the agent, which its tasks share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use d2tp_driver::SchedulerHandle;
use d2tp_links::LinkKind;
use d2tp_sched::{KnownLink, LinkSurroundings};
use d2tp_session::DrwaLambda;
use serde_json::Value;
use tokio::sync::{broadcast, watch};

use super::budget_ledger::BudgetLedger;
use super::counters::AgentCounters;
use super::desktop_notifier::DesktopNotifier;
use super::link_history_store::LinkHistoryStore;
use super::link_view::{self, LinkView};
use super::podcasts::service::PodcastService;
use super::regret_meter::RegretMeter;
use super::transfer_task::TransferTask;
use super::wake_status::WakeStatus;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::rate_limiter::RateLimiters;
use crate::prepared_transfer::SessionTuning;

/// Sends events to subscribers: a transfer's id, and the event.
pub(super) type AgentEventSender = broadcast::Sender<(u64, Value)>;

/// Receives the events that [`AgentEventSender`] sends.
pub(super) type AgentEventReceiver = broadcast::Receiver<(u64, Value)>;

/// The state of the agent, which its tasks share.
pub(super) struct Agent {
    pub(super) scheduler: Arc<SchedulerHandle>,
    pub(super) link_view: LinkView,
    pub(super) tasks: Mutex<BTreeMap<u64, TransferTask>>,
    pub(super) events: AgentEventSender,
    pub(super) meter: Mutex<AgentCounters>,
    pub(super) ledger: Mutex<BudgetLedger>,
    /// Networks whose caps are used up, and when that happened.
    pub(super) capped_at: Mutex<BTreeMap<String, BootInstant>>,
    pub(super) link_history: Mutex<LinkHistoryStore>,
    pub(super) regret_meter: Mutex<RegretMeter>,
    pub(super) wake_status: Mutex<WakeStatus>,
    pub(super) notifier: DesktopNotifier,
    /// The lock held by the stream that scans for access points, on behalf of all.
    pub(super) scan_lock: tokio::sync::Mutex<()>,
    /// Bytes that metered links may still carry.
    pub(super) left: watch::Sender<Option<u64>>,
    /// The limits on the rates of downloads.
    pub(super) rate_limiters: RateLimiters,
    /// The factor of DRWA on bloated paths of transfers, if it is on.
    pub(super) path_drwa: Option<DrwaLambda>,
    pub(super) is_ending: AtomicBool,
    /// Connections to the agent's socket that are open.
    pub(super) open_connections: AtomicUsize,
    pub(super) podcasts: PodcastService,
    /// Whether podcasts are fetched by rules, so that the agent has work even while nothing runs.
    pub(super) has_subscriptions: AtomicBool,
}

/// Locks a mutex even if a task panicked while holding it, so that others can continue.
pub(super) fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agent {
    /// How the sessions of transfers are to send.
    pub(super) fn tuning(&self) -> SessionTuning {
        SessionTuning {
            path_drwa: self.path_drwa,
            ..SessionTuning::default()
        }
    }

    /// Whether transfers must save their state because the agent ends.
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// The device's surroundings; `seen`: including the usable links.
    pub(super) fn surroundings(&self, seen: bool) -> LinkSurroundings {
        let links = self.link_view.links().borrow().clone();
        let around = self.link_view.nearby().borrow().clone();
        let spent = self.link_view.exhausted();
        let slots = link_view::radio_slots(&links);
        let usable = links
            .iter()
            .filter(|link| seen && link.kind != LinkKind::Loopback && link.is_usable());
        let known = |link: &d2tp_links::Link| KnownLink {
            device: link.name.clone(),
            slot: slots.get(&link.name).unwrap_or(&link.name).clone(),
            class: link.class.class.into(),
            carries: true,
            rate: None,
        };
        let devices = links.iter().map(|link| &link.name);
        let capped = devices.filter(|device| spent.contains_key(&around.name(device)));
        LinkSurroundings {
            links: usable.map(known).collect(),
            networks: around.names.clone(),
            capped: capped.cloned().collect(),
            slots,
        }
    }

    /// Passes the surroundings to the scheduler, and learns from them.
    pub(super) fn look(&self) {
        let around = self.surroundings(true);
        self.scheduler.observe(&around);
        let place = self
            .link_view
            .nearby()
            .borrow()
            .location()
            .map(str::to_owned);
        lock(&self.link_history).observe(&self.scheduler, place.as_deref());
    }
}
