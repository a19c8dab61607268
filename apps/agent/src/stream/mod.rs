//! A local link that any player can read, regardless of changes of network.
//!
//! ```text
//!  player ◀── local_server ◀── response_body ◀── StreamObject: stored spans ◀── feed ◀── stream_transport ◀══ networks
//!               │                    └─ taken ─▶ StreamTitle: the viewer's position ─┤
//!               └─ link_catalog: which link is which object                          └── D2BufMgr (core/sched)
//! ```
//!
//! D2BufMgr decides what is fetched, over which links and when, from the amount of data ahead of
//! the viewer: from free links as much as the quota allows, from metered ones only enough to avoid
//! a pause.

mod dash;
pub mod feed;
pub mod link_catalog;
pub mod local_server;
pub mod object;
pub mod playlist;
pub mod response_body;
pub mod spans;
pub mod store;
pub mod stream_service;
pub mod stream_transport;
pub mod title;
