//! The mode of a transfer: which host connects to the origin, and which hosts can read the data.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which host talks to the origin, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FetchMode {
    /// This device requests from the origin itself, over one link at a time.
    Direct,
    /// A proxy requests from the origin and keeps the bytes until the device has them; it sees
    /// everything.
    ProxyFetch,
    /// This device requests from the origin itself, through a tunnel that a proxy opens: the proxy sees
    /// host and port, and the content only if the URL is `http`.
    Sealed,
}

impl fmt::Display for FetchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FetchMode::Direct => "direct",
            FetchMode::ProxyFetch => "proxy-fetch",
            FetchMode::Sealed => "sealed",
        })
    }
}
