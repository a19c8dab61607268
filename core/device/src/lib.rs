//! Manages the links of a device: which sockets it creates, which paths it opens, keeps, renews and
//! closes, and how much flows may spend on metered links. It is sans-IO like the session: inputs
//! change state and queue actions, and the caller carries the actions out.
//!
//! ```text
//!  platform: on_links · on_slept ──────┐                     ┌─▶ Attach ──▶ on_socket
//!  program:  on_use · allow_paid ──────┤                     ├─▶ OpenPath · ClosePath · DropSocket
//!  session:  on_time(.., SessionPaths) ┼──▶ DeviceLinks ─────┼─▶ Grant · Lend · EndLending · SetGated
//!   on_path_up · _quiet · _silent ─────┤    poll_action      ├─▶ Freeze · Unfreeze
//!  time:     next_timeout ─────────────┘                     ├─▶ AskFirstHop · ReadRadio ──▶ on_…
//!                                                            └─▶ OpenStream ──▶ on_stream · on_stream_closed
//! ```
//!
//! One link, from the moment it is wanted:
//!
//! ```text
//!  Attach ─▶ sockets, the best address family first ─▶ OpenPath ─▶ Asked ──first answer──▶ Answering
//!              │ 250 ms without an answer: the other family too      │ 1 s                     │ ▲
//!              ▼                                                     ▼                         ▼ │
//!            the first to answer is kept                          Silent ◀─ 0.5 s ── probes unanswered
//!
//!  no path for 1 s, 2 s, … 32 s ─▶ other sockets        carrier lost, same addresses ─▶ frozen for 30 s
//!  metered, and the last flow that paid ended ─▶ kept for 10 s without payload ─▶ ClosePath
//! ```
//!
//! Where UDP is not answered, packets travel in a stream (`stream.rs`).
//!
//! The same code runs in `d2tp-driver` over real sockets and in the simulator over simulated ones.

mod action;
mod candidate;
mod facts;
mod grants;
mod health;
mod links;
mod meter;
mod node_choice;
mod renewal;
mod server_race;
mod stream;
mod tracked;

pub use action::{ActionScope, LinkAction};
pub use candidate::link_candidate;
pub use facts::{AttachedSocket, LinkFacts, LinkUse, SessionPaths};
pub use grants::{LinkSpend, PaidLinks};
pub use health::LinkAnswers;
pub use links::{DeviceLinkSettings, DeviceLinks, LinkNews, PAID_PATH_KEPT, TrackedStatus};
pub use meter::TICK;
pub use node_choice::{NodeAction, NodeChoice, NodeView};
pub use renewal::SleepMeter;
pub use server_race::{RACE_TIE, ServerRace, nearest_server};
pub use stream::{StreamFailure, StreamStatus};
pub use tracked::NODE_ANSWER_MAX;
