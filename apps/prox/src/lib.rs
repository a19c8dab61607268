//! D2Prox: the proxy between D2TP devices and the web of today.
//!
//! A flow carries one ordinary HTTP/1.1 proxy request and its answer. GET and HEAD of a full URL
//! are fetched here, once, into a *pinned copy* that the device reads at its own pace, hours later
//! if need be; PUT and POST are spooled here and sent on when they are whole; CONNECT is a tunnel.
//!
//! What may be shared between clients (RFC 9111) is fetched once for all of them (`shared_cache.rs`).
//!
//! ```text
//!  device ══ D2TP flow ══▶ flow.rs ─▶ request.rs    copy_fetcher.rs ◀── origin.rs ◀── dial.rs ── egress.rs
//!                            │                           │ append
//!                            └── answer.rs ◀── read ── spooled_body.rs ── quota_ledger.rs
//!                                                        ▲ kept after a broken flow
//!                                                     retained_copies.rs
//! ```
//!
//! Who may use it is in `client_store.rs`; `enrolment.rs` admits devices that were invited, and the operator
//! changes it over the socket of `control.rs`.
//!
//! Podcast apps get links (`cedos prox feeds`), which `link_flow.rs` serves.
//!
//! Clients without D2TP come through a [`TcpFlowListener`] of TCP and MPTCP, if there is one.
//!
//! # The order of the files
//!
//! A file needs only files of its own row and of the rows below it.
//!
//! ```text
//!  programs    serve · listener · http2_conn · control · metrics · memory_bound · acme  flows come in, and the operator's requests
//!  flows       flow                                        one flow, from its first byte to its end
//!              link_flow · copy_answer                   links of podcast apps
//!              enrolment · shared_clients · client_use · relay · tunnel · packet_tunnel · upload · flow_hibernation · flow_answer · flow_watch · metered_flow
//!              restore · upload_sender                    what an earlier process left
//!  state       cached_fetch · linked_feeds · prox                         what all flows share:
//!              shared_cache · retained_copies · hibernated_copies · upload_table · copy_fetcher
//!              pinned_copy · copy_head · spooled_body · quota_ledger · copy_store · copy_bucket · upload_delivery · stored_upload
//!              client_store · client_directory · shared_usage · link_state
//!              access_log · packet_network · tunnel_dns · tunnel_rules · tunnel_helper
//!  origins     origin · origin_pool · dial · egress · tls · bucket_http
//!  facts       request · request_head · link_request · link_keys · feed_links · answer · flow_report · flow_memo · range · refusal · config
//!              stream_flow · http2_flow · tcp_flow · address_key · key_text · invitation · private_file
//!              packet_filter · inner_addresses · client_traffic · traffic_table · client_records · client_store_error · client_limits · usage_note · token_bucket · counters
//! ```
//!
//! [`run`] serves a [`FlowListener`]; [`serve_flow`] serves one flow. `docs/proxy.md` lists every
//! option, answer and reset code.

mod access_log;
mod acme;
mod address_key;
mod answer;
mod body_gate;
mod bucket_http;
mod cached_fetch;
mod charged_tcp;
mod client_directory;
mod client_limits;
mod client_records;
mod client_store;
mod client_store_error;
mod client_traffic;
mod client_use;
mod config;
mod control;
mod copy_answer;
mod copy_bucket;
mod copy_fetcher;
mod copy_head;
mod copy_store;
mod counters;
mod dial;
mod drain;
mod drain_state;
mod egress;
mod enrolment;
mod feed_links;
mod flow;
mod flow_answer;
mod flow_hibernation;
mod flow_memo;
mod flow_report;
mod flow_watch;
mod hibernated_copies;
mod hibernation_count;
mod http2_conn;
mod http2_flow;
mod inner_addresses;
mod invitation;
mod key_text;
mod link_flow;
mod link_keys;
mod link_request;
mod link_state;
mod linked_feeds;
mod listener;
mod mailbox;
mod mailbox_table;
mod memory_bound;
#[cfg(test)]
mod memory_notes;
mod metadata_services;
mod metered_flow;
mod metrics;
mod origin;
mod origin_pool;
mod packet_filter;
mod packet_network;
mod packet_tunnel;
mod pinned_copy;
mod private_file;
mod prox;
mod quota_ledger;
mod range;
mod refusal;
mod relay;
mod request;
mod request_head;
mod restore;
mod retained_copies;
mod retention_note;
mod serve;
mod service_announcement;
#[cfg(test)]
mod session_pair;
mod shared_cache;
mod shared_clients;
mod shared_copies;
mod shared_copy_work;
mod shared_uploads;
mod shared_usage;
mod sleeping_tunnels;
mod spooled_body;
mod stored_upload;
mod stream_flow;
mod supply_meter;
mod takeover;
mod tcp_flow;
mod tls;
mod token_bucket;
mod traffic_table;
mod tunnel;
mod tunnel_dns;
mod tunnel_handover;
mod tunnel_helper;
mod tunnel_keeper;
mod tunnel_pump;
mod tunnel_rest;
mod tunnel_rules;
mod upload;
mod upload_delivery;
mod upload_sender;
mod upload_table;
mod usage_note;

pub use access_log::{AccessDetail, check_access_log};
pub use acme::{ACME_DIRECTORY_DEFAULT, AcmeError, AcmeOptions, keep_certificate};
pub use client_limits::{ClientLimits, EffectiveLimits};
pub use client_records::{EnrolledClient, OpenInvitation};
pub use client_store::ClientStore;
pub use client_store_error::ClientStoreError;
pub use client_traffic::MonthBytes;
pub use client_use::ClientUse;
pub use config::{FeedsUrlError, ProxConfig, ReloadReport};
pub use control::{ControlClient, ControlError, ControlRequest, ControlServer};
pub use copy_bucket::{CopyBucketError, CopyBucketStatus};
pub use d2tp_driver::ResetCause;
pub use dial::{Resolve, SystemResolver};
pub use egress::{EgressFilter, SpecialAddress};
pub use enrolment::{ENROLLING_MAX, ENROLMENT_MAX};
pub use flow::{flow_task_bytes, serve_flow};
pub use flow_hibernation::KeptCopies;
pub use flow_memo::copy_of_memo;
pub use flow_report::{ProxFlowOutcome, ProxFlowReport, ServedFrom};
pub use invitation::{Invitation, InvitationError, InvitationSecret};
pub use key_text::{ParseKeyError, parse_key, show_key};
pub use linked_feeds::{LinkedFeed, LinksError};
pub use listener::TcpFlowListener;
pub use metrics::METRICS_TYPE;
pub use packet_network::PacketNetworkError;
pub use prox::{PreparedProx, Prox, ProxHoldings, ProxStartError};
pub use refusal::ProxRefusal;
pub use request::HEADERS_MAX;
#[doc(hidden)]
pub use request::check_head;
pub use request_head::HEAD_BYTES_MAX;
pub use serve::{FlowListener, accept_until, finish_within_grace, run, serve};
pub use service_announcement::ServiceAnnouncement;
pub use takeover::{
    ProxyTakeover, Standby, StandbyOutcome, TakeoverOffer, await_replacement, is_standby,
};
pub use tcp_flow::TcpFlow;
pub use tls::ProxTlsError;
pub use tunnel_handover::PassedTunnels;
pub use tunnel_helper::{TunnelHelper, serve_tunnel_helper};
pub use tunnel_keeper::TunnelKeeper;
pub use tunnel_pump::TUNNEL_BUFFER_BYTES;
