//! Scenario files and the report of a run, for both the lab and the simulator.
//!
//! ```text
//!  scenario.toml ─▶ Scenario ─▶ Timeline ─▶ lab (real time) ────▶ Report ─▶ judge ─▶ JSON
//!  traces/*.csv  ─┘     │                └▶ simulator (virtual) ─┘    ▲
//!                       └── flows, expectations ── SwitchMeter ───────┘
//! ```
//!
//! ```
//! # use cedos_lab_scenario::{EventKind, Scenario};
//! let text = r#"
//!     duration_s = 60
//!     [[link]]
//!     name = "wlan0"
//!     [[link.at]]
//!     t_s = 30
//!     up = false
//! "#;
//! let scenario = Scenario::parse("example.toml", text, &mut |_| unreachable!()).unwrap();
//! let kinds: Vec<_> = scenario.timeline().map(|event| event.kind).collect();
//! assert_eq!(kinds, [EventKind::Up { address: 0 }, EventKind::Down]);
//! ```
#![forbid(unsafe_code)]

mod acks;
mod bounds;
mod check;
pub mod content;
mod crash;
mod energy;
mod expect;
mod expression;
mod file;
mod functions;
mod origin;
mod podcasts;
mod properties;
mod report;
mod state;
mod suggest;
mod summary;
mod switches;
mod text_table;
mod timeline;
mod transport;

pub use acks::{Acks, AcksPlacement as OffloadWhere, Offload};
pub use crash::{
    CRASH_FOR_S_DEFAULT, CRASHES_MAX, Crash, CrashKind, CrashedEnd, HIBERNATE_AFTER_S_DEFAULT,
    NodeDistance, REPLAYED_MAX, Replay, StoreOutage, StoreStop,
};
pub use energy::{SaveEnergy, ScenarioEnergy};
pub use expression::Expression;
pub use file::{
    AccessPoint, At, Class, DURATION_S_MAX, Direction, Expect, FLOWS_MAX, Family, Handover,
    LINK_NAME_BYTES_MAX, LINKS_MAX, Link, NatKind, Policy, RecordedTraces, Repeat, Scenario,
    ScenarioFault, ScenarioFlow,
};
pub use origin::OriginKind;
pub use podcasts::{
    PODCAST_EPISODE_BYTES_MAX, PODCAST_EPISODES_MAX, PODCAST_FEEDS_MAX, PodcastEpisode,
    PodcastFeed, Podcasts,
};
pub use properties::{
    BurstLoss, DELAY_MS_MAX, DOWN_MBPS_DEFAULT, MBPS_MAX, MTU_DEFAULT, MTU_MAX, MTU_MIN,
    MTU_V6_MIN, QUEUE_MS_DEFAULT, REORDER_MS_DEFAULT, RTT_MS_DEFAULT, UP_MBPS_DEFAULT,
};
pub use report::{
    DataSwitch, EnergyReport, EpisodeReport, Expectation, FlowReport, LinkReport, PodcastReport,
    RunReport, SwitchKind,
};
pub use state::ScenarioState;
pub use suggest::{explain, suggestion};
pub use summary::SampleSummary;
pub use switches::SwitchMeter;
pub use text_table::TextTable;
pub use timeline::{EventKind, ScenarioLinkEvent, Timeline};
pub use transport::{Congestion, Mirror, ScenarioPathScheduler, ScenarioRates, Transport};
