//! Tests that measure wakes, alarms and bytes of processes in real time. Those that start hundreds of
//! sockets have the machine alone.

mod dead_wifi;
mod nearly_idle;
mod one_budget;
mod paid_probe;
mod podcast_library;
mod run_rests;
mod short_queues;
mod slow_server;
mod sockets_asleep;
mod sockets_killed;
#[path = "../../../../edge/capi/tests/support/mod.rs"]
mod support;
#[path = "../sockets/told.rs"]
mod told;
