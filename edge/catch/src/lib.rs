//! Catches the connections of programs that do not support D2TP.
//!
//! ```text
//!  program ── connect() ──┬─ LD_PRELOAD: preload.c ─ preload.rs ┐   (exec.c puts static programs below)
//!                         ├─ seccomp notification: notify.rs ──┴▶ CaughtCall: the socket and its
//!                         │                                       destination; pair.rs provides
//!                         │                                       the other end
//!                         └─ own namespace, a TUN: launch.rs ───▶ packets
//!  program ── name? ──────── preload.c, or DNS: dns.rs ─────────▶ stand_ins.rs: an address that stands
//!                             over lookup_namespace.rs             for the name
//! ```
//!
//! Caught calls are passed to the caller of this crate, which decides about them. A call without a
//! decision fails. The first two methods are no sandbox: a program can bypass them on purpose. It
//! cannot leave its own namespace ([`ProgramNamespace`]).

mod caught_call;
mod children;
mod dns;
mod executable;
mod fd_passing;
mod launch;
mod lookup_namespace;
mod notify;
mod pair;
mod preload;
mod stand_ins;

pub use caught_call::{CallAnswer, CallVerdict, CaughtCall, UncaughtReason, is_local};
pub use children::children;
pub use dns::{DNS_PORT, answer, serve};
pub use executable::{Executable, ExecutableKind};
pub use launch::{
    LaunchPlan, LaunchResources, PreparedProgram, ProgramNamespace, RunningProgram, launch,
};
pub use lookup_namespace::{LookupNamespace, host_replacement};
pub use notify::SeccompSupervisor;
pub use pair::{CatchPort, NamespaceSockets, PendingConnection};
pub use preload::{PRELOAD, PreloadListener, VARIABLE};
pub use stand_ins::{NameStandIns, STAND_INS};
