//! What sessions do to each other, packet by packet, in one program: built and linked once, and
//! its tests share the cores.
//!
//! [`pair`] joins two endpoints by links of the test's making; each module is one subject, and
//! [`adversary`] holds everybody who breaks the rules.

mod adversary;
mod asleep;
mod careful;
mod corpus;
mod counted;
mod datagrams;
mod drwa;
mod early_data;
mod fairness;
mod holes;
mod hop;
mod key_exchange;
mod line;
mod long_round_trip;
mod mirror;
mod offload;
mod pair;
mod passed_on;
mod paths;
mod repairs;
mod route;
mod serial_path;
mod slice;
mod source;
mod stream_path;
mod ticket;
mod unread;
mod vectors;
