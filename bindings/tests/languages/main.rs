//! The bindings, each tested by its example, with servers and proxies written in C and an agent. If
//! a language's tools are missing, its test prints a message and ends.

mod agent;
mod examples;
mod fetch;
mod kotlin;
mod python;
mod reopen;
#[path = "../../../edge/capi/tests/support/mod.rs"]
mod support;
mod surroundings;
