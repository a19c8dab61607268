//! What the tests of several crates share, so that there is one of each.
//!
//! ```text
//!  cedos get, put, run, agent, prox    processes of the built program    program.rs
//!  an HTTP origin that misbehaves      by a script, over TCP or TLS      origin.rs
//!  a device between two links          in a network namespace            namespace.rs
//!  NetworkManager, logind, a desktop   stand-ins on a bus                bus.rs
//!  tests that measure the machine      beside each other, or alone       share.rs
//!  a condition that comes true         waited for, with a limit          wait.rs
//! ```
//!
//! It needs no other crate of the workspace. A failure panics with what was expected: only tests
//! call this.

pub mod bus;
pub mod namespace;
pub mod origin;
pub mod program;
pub mod share;
pub mod wait;

pub use wait::PATIENCE;
