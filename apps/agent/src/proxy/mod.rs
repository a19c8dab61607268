//! A proxy on this machine, for programs that know nothing of D2TP: SOCKS5 and HTTP on one port.
//!
//! ```text
//!  program ── TCP ──▶ door.rs: is it this user? ─┬─ 5 ──▶ socks.rs ─┐
//!                     the first byte says which  └─ else ▶ http.rs ─┴─▶ line.rs: one flow each,
//!                                                                       CONNECT inside ──▶ D2Prox
//! ```
//!
//! Names are looked up by D2Prox, and it is D2Prox that refuses addresses: what it says is passed on. By
//! when a connection must be over and what it may cost is the line's default, unless the program says
//! otherwise ([`Wish`]).

mod carry;
mod door;
mod hasty;
mod http;
mod line;
mod owner;
mod refusal;
mod socks;
mod target;
mod wish;

pub use carry::{break_off, carry};
pub use door::{CONNECTIONS_MAX, Door, Strangers};
pub use hasty::{Hasty, Why};
pub use line::{Carried, Far, Line, Open, Purse};
pub use owner::owner_of;
pub use refusal::{Cause, Refusal};
pub use target::{Names, Target};
pub use wish::Wish;
