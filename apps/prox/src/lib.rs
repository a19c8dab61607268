//! D2Prox: the proxy between D2TP devices and the web of today.
//!
//! A flow carries one ordinary HTTP/1.1 proxy request and its answer. GET and HEAD of a full URL
//! are fetched here, once, into a *pinned copy* that the device reads at its own pace, hours later
//! if need be; PUT and POST are spooled here and sent on when they are whole; CONNECT is a tunnel.
//!
//! ```text
//!  device ══ D2TP flow ══▶ flow.rs ─▶ request.rs      fill.rs ◀── origin.rs ◀── dial.rs ── egress.rs
//!                            │                           │ append
//!                            └── answer.rs ◀── read ── pin.rs ── ledger.rs (quotas)
//!                                                        ▲ kept after a broken flow
//!                                                     shelf.rs
//! ```
//!
//! Clients without D2TP come through a [`Door`] of TCP and MPTCP, if there is one.
//!
//! [`run`] serves a [`FlowListener`]; [`serve_flow`] serves one flow. `docs/proxy.md` lists every
//! option, answer and reset code.

mod answer;
mod config;
mod copy;
mod delivery;
mod dial;
mod door;
mod dormant;
mod egress;
mod fill;
mod flow;
mod keytext;
mod ledger;
mod origin;
mod pin;
mod prox;
mod range;
mod refusal;
mod relay;
mod request;
mod reset;
mod serve;
mod shelf;
mod stream_flow;
mod tls;
mod tunnel;
mod upload;
mod uploads;
mod vault;
mod waking;
mod watch;

pub use answer::Served;
pub use config::ProxConfig;
pub use dial::{Resolve, SystemResolver};
pub use door::Door;
pub use egress::{EgressFilter, Special};
pub use flow::{FlowReport, Outcome, serve_flow};
pub use keytext::{NotAKey, parse_key, show_key};
pub use prox::{Holdings, Prox, StartFault};
pub use refusal::Refusal;
#[doc(hidden)]
pub use request::judge_head;
pub use request::{HEAD_BYTES_MAX, HEADERS_MAX};
pub use reset::ResetCause;
pub use serve::{FlowListener, run, serve};
pub use stream_flow::StreamFlow;
pub use tls::TlsFault;
pub use tunnel::TUNNEL_BUFFER_BYTES;
