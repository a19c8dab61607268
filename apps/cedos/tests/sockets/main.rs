//! Programs with sockets of libd2tp beside a real `cedos agent`.

mod datagrams;
mod links;
mod next_agent;
mod streams;
#[path = "../../../../edge/capi/tests/support/mod.rs"]
mod support;
mod told;
