//! Tests of a device and a server over real sockets: links, hibernation, journals, logs.

mod datagrams;
mod early_data;
mod hop;
mod lease;
mod links;
mod local_hints;
mod loopback;
mod nodes;
mod paying;
mod qlog;
mod relays;
mod rest;
mod standstill;
mod streams;
mod support;
mod system_route;
mod workers;
