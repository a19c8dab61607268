//! Tests that measure wakes, alarms and bytes of processes in real time. Those that start hundreds of
//! sockets have the machine alone.

mod dead_wifi;
mod one_budget;
mod run_rests;
mod sockets_asleep;
mod sockets_killed;
#[path = "../../../../edge/capi/tests/support/mod.rs"]
mod support;
#[path = "../sockets/told.rs"]
mod told;
