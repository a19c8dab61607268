//! A folder that is made what another one is, by a deadline: `cedos sync`, in a process of its own or in the agent.
//!
//! ```text
//!  download   server_folder of SRC ─┐
//!             (JSON, page, WebDAV)  ├─ what differs ─▶ transfers, 8 at a time ─▶ .cedos-sync/ ─▶ DST
//!             local_tree of DST ────┘                                             (rename)
//!  upload     local_tree of SRC, less what mirror_memory knows ─▶ transfers ─▶ PUT DST/…
//!             server_folder of DST, if it is one of WebDAV: MKCOL before, DELETE after
//!
//!  every transfer ─▶ mirror_reporter ─▶ observer: a terminal, JSON lines, or the agent's entry of the queue
//! ```
//!
//! A file of the mirror is the old or the new one and never a part: parts are in `.cedos-sync`, where another run goes on
//! with them. Names and links that lead out of the folder are refused.

mod file_transfers;
mod folder_mirror;
mod local_tree;
mod mirror_event;
mod mirror_memory;
mod mirror_plan;
mod mirror_reporter;
mod multistatus;
mod path_filter;
mod relative_path;
mod remote_tree;
mod server_folder;

pub use file_transfers::FileTransfers;
pub use folder_mirror::FolderMirror;
pub use mirror_event::{MirrorEvent, MirrorObserver};
pub use mirror_plan::MirrorPlan;
pub use mirror_reporter::MirrorReporter;
