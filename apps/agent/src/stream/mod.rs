//! A link on this machine that any player can watch, whatever the networks do.
//!
//! ```text
//!  player ◀── door ◀── handing ◀── Object: held spans on the disk ◀── feed ◀── roads ◀══ networks
//!               │         │            ▲                               ▲
//!               │         └─ taken ─▶ Title: where the watcher is ─────┤
//!               └─ shelf: which link is which object                   └── D2BufMgr (core/sched)
//! ```
//!
//! What is fetched, over what and by when is D2BufMgr's to say, of what is held ahead of the watcher:
//! from free links as much as the disk may hold, from those that cost only so much that there is no
//! pause.

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
