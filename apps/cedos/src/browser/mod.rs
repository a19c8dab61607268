//! Browsers that hand their downloads over to the agent.
//!
//! ```text
//!  browser ─ extension ── native messaging: stdin, stdout ── `cedos browser host` ── agent
//! ```
//!
//! A browser starts only programs that a manifest in one of its folders names, and only for the extensions
//! that this manifest names.

pub mod host;
pub mod host_message;
pub mod install;
