//! Which web server is the lab's origin.

use serde::Deserialize;

/// Who serves. The simulator has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OriginKind {
    /// nginx where it is installed, else the built-in one.
    #[default]
    Auto,
    /// nginx, or no run.
    Nginx,
    /// The built-in one.
    Builtin,
}
