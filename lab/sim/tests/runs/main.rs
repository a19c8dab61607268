//! Tests of the real core in virtual time: shipped scenarios, former faults, devices, peers and
//! video.

mod energy;
mod faults;
mod grants;
mod peers;
mod scenarios;
mod strategy;
mod streams;
mod video;
