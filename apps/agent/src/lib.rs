//! What runs on the device: fetches and puts that move between links, wait when they may, and are
//! whole or absent.

pub mod fetch;
pub mod stream;
