//! `cedos sync`: makes one folder what another one is, by a deadline.
//!
//! ```text
//!  download   listing of SRC ─▶ remote_tree ─┐
//!                                            ├─ what differs ─▶ transfers, 8 at a time ─▶ .cedos-sync/ ─▶ DST
//!             local_tree of DST ─────────────┘                                             (rename)
//!  upload     local_tree of SRC, less what sync_memory knows ─▶ transfers ─▶ PUT DST/…
//! ```
//!
//! A file of the mirror is the old or the new one and never a part: parts are in `.cedos-sync`, where another run goes on
//! with them. Names and links that lead out of the folder are refused.

mod file_transfers;
mod local_tree;
mod mirror;
mod path_filter;
mod relative_path;
mod remote_tree;
mod sync_memory;
mod sync_reporter;

pub use file_transfers::FileTransfers;
pub use mirror::{FolderMirror, SyncDirection};
pub use path_filter::PathFilter;
pub use sync_reporter::SyncReporter;
