//! Helpers that the tests of several crates share.
//!
//! ```text
//!  cedos get, put, run, agent, prox    processes of the built program    program.rs
//!  an HTTP origin with faults          by a script, over TCP or TLS      origin.rs
//!  a client of HTTP/2, or its frames   by a test's own words           http2.rs
//!  a device between two links          in a network namespace            namespace.rs
//!  Chromium, Firefox                   by WebDriver BiDi                browser.rs
//!  NetworkManager, logind, a desktop   stand-ins on a bus                bus.rs
//!  TCP ports                           held until a server listens    port.rs
//!  serial devices                      pseudo-terminals, with a rate     serial.rs
//!  redis-server                        killed, paused, filled             redis.rs
//!  a server that is far away           connections with a latency      latency_proxy.rs
//!  tests that need the machine         beside each other, or alone       share.rs
//!  a tool that is missing              skipped, or required            missing_tool.rs
//!  waiting for a processor             how long processes did             processor_wait.rs
//!  waiting for a condition             with a limit                      wait.rs
//! ```
//!
//! It needs no other crate of the workspace. A failure panics with what was expected: only tests
//! call this.

pub mod browser;
pub mod bus;
pub mod http2;
pub mod latency_proxy;
pub mod missing_tool;
pub mod namespace;
pub mod origin;
pub mod port;
pub mod processor_wait;
pub mod program;
pub mod redis;
pub mod serial;
pub mod share;
pub mod wait;

pub use wait::PATIENCE;
