//! D2Sched, the scheduler: decides which flow uses which link now, or waits, and why.
//!
//! ```text
//!  ScheduledFlow (bytes, time left, policy) ─┐
//!  LinkHistory (class, rates, up periods) ────┴─▶ Scheduler ─▶ LinkAssignment: who is on which link,
//!                                                    │          and who pays
//!                                                    └──▶ FlowExplanation, CompletionEstimate
//! ```
//!
//! [`DeviceScheduler`] is what a device uses: it decides for all clients (downloads, streams,
//! sockets, programs) together, by a [`Scheduler`] for each direction, and shares out the device's
//! budget.
//!
//! Everything here is computed from plain values, without packets, clocks or sockets. The device
//! calls it every second and at every change. Where energy counts, [`energy_policy`] chooses the
//! links.

mod algorithm_one;
mod capacity_forecast;
mod completion_estimate;
mod daily_rates;
mod device_scheduler;
mod energy_odds;
pub mod energy_policy;
mod energy_saving;
mod explanation;
mod forecast;
mod forecast_codec;
mod history;
mod link_assignment;
mod link_choice;
mod paid_share;
mod playback;
mod scheduler;
mod source_limit;
mod source_supply;
mod stream_buffer;
mod wake_plan;

pub use capacity_forecast::CapacityForecast;
pub use completion_estimate::CompletionEstimate;
pub use device_scheduler::{
    CarriedByLink, CarryingLink, ClientDecision, ClientId, ClientReport, DeviceScheduler,
    DuplexClient, DuplexReport, FlowSpending, Grant, KnownLink, LinkSurroundings, ObjectStart,
    REPORT_EVERY, SavedLinkHistory, SchedulerKind, SpendingChange, TransferDirection, UdpObstacle,
    WakingClients,
};
pub use energy_saving::{EnergySaving, PowerSource};
pub use explanation::{FlowExplanation, likelihood};
pub use forecast::{
    DailyRates, DeviceLocation, DurationDistribution, ForecastHint, GRID_M, LinkForecast,
    LocationCell,
};
pub use forecast_codec::ForecastDecodeError;
pub use history::{LinkHistory, LinkObservation, NetworkRates, SavedHistory, UpPeriod};
pub use link_assignment::{LinkAssignment, LinkShare, ScheduledFlow};
pub use link_choice::{
    CostPolicy, DeadlineFallback, FREE_RATE_FIRST_BYTES_PER_S, FlowDemand, LinkCandidate,
    LinkChoice, LinkClass, LinkWaitReason, METERED_RATE_FIRST_BYTES_PER_S, ParsePolicyError,
    SIZE_UNKNOWN_BYTES, fastest_working, format_duration,
};
pub use playback::{PlaybackMeter, RATE_FIRST};
pub use scheduler::{PROBE_BYTES, Scheduler, SchedulerMode};
pub use source_supply::SourceSupply;
pub use stream_buffer::{BufferedStream, RefillThresholds, StreamBuffer, SwitchDelay};
pub use wake_plan::{ScanPeriods, WakeNeeds, WakePlan, WakePlanner};
