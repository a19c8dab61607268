//! Attackers, from the weakest to the strongest: strangers who know nothing, witnesses who see
//! and replay packets, and members who finished the handshake and then break every rule.
//!
//! What an attacker may cost is bounded, what it may change is nothing, and the sessions of others
//! go on. An ignored test is a known fault of the core, and says which.

mod rogue;

mod amplification;
mod claims;
mod farewell;
mod lessons;
mod limits;
mod member;
mod memory;
mod network;
mod relay;
mod small_depth;
mod stranger;
mod waker;
mod witness;
mod workers;
