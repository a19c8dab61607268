//! The real core in virtual time: shipped scenarios, faults that were found, devices, peers and video.

mod faults;
mod grants;
mod peers;
mod scenarios;
mod strategy;
mod video;
