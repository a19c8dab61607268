//! D2Prox: the proxy between D2TP devices and the web of today.
//!
//! A flow carries one ordinary HTTP/1.1 proxy request and its answer. GET and HEAD of a full URL
//! are fetched here, once, into a *pinned copy* that the device reads at its own pace, hours later
//! if need be; PUT and POST are spooled here and sent on when they are whole; CONNECT is a tunnel.
//!
//! ```text
//!  device ══ D2TP flow ══▶ flow.rs ─▶ request.rs    copy_fetcher.rs ◀── origin.rs ◀── dial.rs ── egress.rs
//!                            │                           │ append
//!                            └── answer.rs ◀── read ── spooled_body.rs ── quota_ledger.rs
//!                                                        ▲ kept after a broken flow
//!                                                     retained_copies.rs
//! ```
//!
//! Clients without D2TP come through a [`TcpFlowListener`] of TCP and MPTCP, if there is one.
//!
//! [`run`] serves a [`FlowListener`]; [`serve_flow`] serves one flow. `docs/proxy.md` lists every
//! option, answer and reset code.

mod answer;
mod config;
mod copy_fetcher;
mod copy_store;
mod dial;
mod egress;
mod flow;
mod flow_hibernation;
mod flow_watch;
mod hibernated_copies;
mod key_text;
mod listener;
mod origin;
mod pinned_copy;
mod prox;
mod quota_ledger;
mod range;
mod refusal;
mod relay;
mod request;
mod retained_copies;
mod serve;
mod spooled_body;
mod stream_flow;
mod tls;
mod tunnel;
mod upload;
mod upload_delivery;
mod upload_table;

pub use answer::ServedFrom;
pub use config::ProxConfig;
pub use d2tp_driver::ResetCause;
pub use dial::{Resolve, SystemResolver};
pub use egress::{EgressFilter, SpecialAddress};
pub use flow::{ProxFlowOutcome, ProxFlowReport, serve_flow};
pub use key_text::{ParseKeyError, parse_key, show_key};
pub use listener::TcpFlowListener;
pub use prox::{Prox, ProxHoldings, ProxStartError};
pub use refusal::ProxRefusal;
#[doc(hidden)]
pub use request::judge_head;
pub use request::{HEAD_BYTES_MAX, HEADERS_MAX};
pub use serve::{FlowListener, run, serve};
pub use stream_flow::StreamFlow;
pub use tls::ProxTlsError;
pub use tunnel::TUNNEL_BUFFER_BYTES;
