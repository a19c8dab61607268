//! A device and a server over real sockets: links that come and go, sessions that sleep, and what is
//! written down.

mod datagrams;
mod early_data;
mod hop;
mod links;
mod loopback;
mod paying;
mod qlog;
mod rest;
mod support;
