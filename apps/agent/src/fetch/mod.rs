//! `cedos get`: one download that moves between links, waits when it may, and is whole or absent.
//!
//! ```text
//!            links (watched)     deadline, policy, budget
//!                 └──────┬──────────────┘
//!              scheduler ── use this link / wait, and why
//!                        │
//!   dial (a byte stream to the origin: TCP and TLS bound to the link, a flow to it or to a proxy,
//!        │                                         or TLS in a tunnel in such a flow)
//!                        │
//!   exchange (one GET, redirects, Range and If-Range) ──▶ transfer ──▶ sink (FILE.part → FILE)
//!                                                            └──────▶ report (bar, lines, JSON)
//! ```
//!
//! `cedos put` is the same the other way round, through a proxy only: `upload_body` is what it sends.
//!
//! `transfer` is the order of things and knows neither sockets nor files. What stands in the
//! destination is always one whole object: bytes go to `FILE.part`, a later request continues it
//! only if the origin's validator *and* the last bytes we hold agree, and anything else starts
//! again from zero and says so.

pub mod alt_svc;
pub mod alt_svc_upgrade;
pub mod boot_clock;
pub mod cookie_file;
pub mod deadline_text;
pub mod dial;
pub mod direct;
mod drwa_stream;
pub mod exchange;
pub mod file_stamp;
pub mod filename;
pub mod forget;
pub mod header;
pub mod jobs;
pub mod local_hosts;
mod local_origin;
pub mod measured_rates;
pub mod mode;
pub mod netrc_file;
pub mod object_version;
pub mod older_versions;
pub mod option_parsers;
pub mod origin;
pub mod outcome;
pub(crate) mod own_file;
pub mod partial;
pub mod partial_reader;
pub mod pending_rename;
pub mod proxy;
mod proxy_status;
pub mod rate_limiter;
pub mod report;
pub mod request_method;
pub mod secret_file;
pub mod session_refusal;
pub mod sink;
pub mod state_directory;
mod stream_ports;
pub mod tls;
pub mod transfer;
pub mod tunnel;
mod unanswered_connects;
pub mod upload_body;
mod upload_ticket;
pub mod validator;
