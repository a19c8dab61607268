//! From nothing to a transfer: `cedos prox invite`, `join`, `prox client`, `config` and `doctor` as programs.

mod agent_unit;
mod doctor;
mod enrol;
mod files;
mod limits;
mod reload;
mod sandbox;
mod shared_clients;
mod support;
