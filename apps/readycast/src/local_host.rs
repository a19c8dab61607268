//! Hosts of local networks: which of them a channel may lead to.
//!
//! A feed is written by a stranger, so what it names must not lead into the user's own networks: only a feed that the
//! user subscribed to there may lead to its own host. Names are checked here by what is written; the agent checks the
//! addresses that it connects to.

use cedos_http::is_local_address;
use url::{Host, Url};

/// Whether an address names this machine or a local network by what is written, without a look-up.
pub fn is_local_url(address: &Url) -> bool {
    match address.host() {
        Some(Host::Ipv4(ip)) => is_local_address(ip.into()),
        Some(Host::Ipv6(ip)) => is_local_address(ip.into()),
        Some(Host::Domain(name)) => {
            let name = name.trim_end_matches('.');
            name == "localhost" || name.ends_with(".localhost") || name.ends_with(".local")
        }
        None => true,
    }
}

/// The host of a local network that a channel may lead to: its feed's own, if that is local by what is written, or if
/// it was so when the user subscribed (`subscribed`).
pub(crate) fn local_host_of(feed: &Url, subscribed: Option<String>) -> Option<String> {
    let host = feed.host_str()?;
    let is_allowed = is_local_url(feed) || subscribed.as_deref() == Some(host);
    is_allowed.then(|| host.to_owned())
}
