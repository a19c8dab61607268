//! The web server that is the lab's origin.

use serde::Deserialize;

/// The web server program. The simulator has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OriginKind {
    /// nginx if it is installed, otherwise the built-in server.
    #[default]
    Auto,
    /// nginx; without it the run fails.
    Nginx,
    /// The origin is the built-in server.
    Builtin,
}
