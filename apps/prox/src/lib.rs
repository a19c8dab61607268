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
//! # The order of the files
//!
//! A file needs only files of its own row and of the rows below it.
//!
//! ```text
//!  programs    serve · listener                            flows come in
//!  flows       flow                                        one flow, from its first byte to its end
//!              relay · tunnel · upload · upload_sender · flow_hibernation · flow_answer · flow_watch
//!  state       prox                                        what all flows share:
//!              retained_copies · hibernated_copies · upload_table · copy_fetcher
//!              pinned_copy · spooled_body · quota_ledger · copy_store · upload_delivery
//!  origins     origin · dial · egress · tls
//!  facts       request · request_head · answer · flow_report · flow_memo · range · refusal · config
//!              stream_flow · address_key · key_text
//! ```
//!
//! [`run`] serves a [`FlowListener`]; [`serve_flow`] serves one flow. `docs/proxy.md` lists every
//! option, answer and reset code.

mod address_key;
mod answer;
mod config;
mod copy_fetcher;
mod copy_store;
mod dial;
mod egress;
mod flow;
mod flow_answer;
mod flow_hibernation;
mod flow_memo;
mod flow_report;
mod flow_watch;
mod hibernated_copies;
mod key_text;
mod listener;
mod metadata_services;
mod origin;
mod pinned_copy;
mod prox;
mod quota_ledger;
mod range;
mod refusal;
mod relay;
mod request;
mod request_head;
mod retained_copies;
mod serve;
mod spooled_body;
mod stream_flow;
mod tls;
mod tunnel;
mod upload;
mod upload_delivery;
mod upload_sender;
mod upload_table;

pub use config::ProxConfig;
pub use d2tp_driver::ResetCause;
pub use dial::{Resolve, SystemResolver};
pub use egress::{EgressFilter, SpecialAddress};
pub use flow::serve_flow;
pub use flow_report::{ProxFlowOutcome, ProxFlowReport, ServedFrom};
pub use key_text::{ParseKeyError, parse_key, show_key};
pub use listener::TcpFlowListener;
pub use prox::{Prox, ProxHoldings, ProxStartError};
pub use refusal::ProxRefusal;
pub use request::HEADERS_MAX;
#[doc(hidden)]
pub use request::check_head;
pub use request_head::HEAD_BYTES_MAX;
pub use serve::{FlowListener, run, serve};
pub use stream_flow::StreamFlow;
pub use tls::ProxTlsError;
pub use tunnel::TUNNEL_BUFFER_BYTES;
