//! Connections of programs that know nothing of D2TP, caught on their way out.
//!
//! ```text
//!  program ── connect() ──┬─ LD_PRELOAD: preload.c ─ preload.rs ┐   (exec.c puts static programs below)
//!                         ├─ seccomp notification: notify.rs ──┴▶ Caught: the socket and where it
//!                         │                                       wanted to go; pair.rs gives it
//!                         │                                       its other end
//!                         └─ own namespace, a TUN: launch.rs ───▶ packets
//!  program ── name? ──────── preload.c, or DNS: dns.rs ─────────▶ stand_ins.rs: an address that stands
//!                             over lookup_namespace.rs             for the name
//! ```
//!
//! What is caught is handed over; who carries it decides. What nobody decides fails: nothing goes past.
//! It is no prison: a program that wants to get past the first two can. Out of a namespace of its own
//! ([`ProgramNamespace`]) it cannot.

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
