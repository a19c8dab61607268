//! The bindings, each by its example, against servers and proxies written in C and an agent. Where a language's
//! tools are missing, its test says so and ends.

mod agent;
mod examples;
mod fetch;
mod kotlin;
mod python;
mod reopen;
#[path = "../../../edge/capi/tests/support/mod.rs"]
mod support;
mod surroundings;
