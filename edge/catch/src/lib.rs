//! Connections of programs that know nothing of D2TP, caught on their way out.
//!
//! ```text
//!  program ── connect() ──┬─ LD_PRELOAD: preload.c ── ask.rs ──┐   (exec.c puts static programs below)
//!                         ├─ seccomp notification: notify.rs ──┴▶ Caught: the socket and where it
//!                         │                                       wanted to go; pair.rs gives it
//!                         │                                       its other end
//!                         └─ own namespace, a TUN: launch.rs ───▶ packets
//!  program ── name? ──────── preload.c, or DNS: dns.rs ─────────▶ names.rs: an address that stands
//!                                                                 for the name
//! ```
//!
//! What is caught is handed over; who carries it decides. What nobody decides fails: nothing goes past.
//! It is no prison: a program that wants to get past the first two can. Out of a namespace of its own
//! ([`Namespace`]) it cannot.

mod ask;
mod caught;
mod children;
mod dns;
mod executable;
mod launch;
mod names;
mod notify;
mod pair;
mod passed;

pub use ask::{Asked, PRELOAD, VARIABLE};
pub use caught::{Answer, Caught, Missed, Verdict, is_near};
pub use children::children;
pub use dns::{answer, serve};
pub use executable::{Executable, Kind};
pub use launch::{Given, Launched, Namespace, Plan, Running, launch};
pub use names::{Names, STAND_INS};
pub use notify::Supervisor;
pub use pair::{Meeting, Port, Porter};
