//! How the operator gives podcast apps links: a client of them, and one link for each of its feeds.

use d2tp_driver::HostKey;
use url::Url;

use crate::client_store_error::ClientStoreError;
use crate::config::FeedsUrlError;
use crate::feed_links::{FeedLinkKind, LINKED_URL_BYTES_MAX, LinkSealer};
use crate::prox::Prox;

/// Why there are no links.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Each variant's message is its documentation.
pub enum LinksError {
    #[error(
        "this proxy gives no links to podcast apps; start it with --tcp-listen and --feeds-url (docs/proxy.md)"
    )]
    SwitchedOff,
    #[error(transparent)]
    FeedsUrl(#[from] FeedsUrlError),
    #[error(transparent)]
    Client(#[from] ClientStoreError),
}

/// The link of a feed, or in words why there is none.
pub type LinkedFeed = Result<Url, String>;

impl Prox {
    /// Makes links with keys that come from the proxy's private key. Only the first call counts.
    pub fn use_link_key(&self, private_key: &[u8; 32]) {
        let _ = self.link_state.links.set(LinkSealer::new(private_key));
    }

    /// The maker of links, and the address below which they lie; none where the proxy gives none.
    pub(crate) fn links(&self) -> Option<(&LinkSealer, Url)> {
        let base = self.config().feeds_base().ok().flatten()?;
        Some((self.link_state.links.get()?, base))
    }

    /// The links of a client of this name to feeds, in their order. The client is made if there is none.
    ///
    /// # Errors
    /// The proxy gives no links, or there is no such client and none can be made.
    pub fn link_feeds(
        &self,
        name: &str,
        feeds: &[String],
    ) -> Result<(HostKey, Vec<LinkedFeed>), LinksError> {
        self.config().feeds_base()?;
        let (links, base) = self.links().ok_or(LinksError::SwitchedOff)?;
        let client = self.clients.client_of_links(name)?;
        let linked = feeds.iter().map(|address| {
            let url = Url::parse(address).map_err(|error| error.to_string())?;
            if !matches!(url.scheme(), "http" | "https") {
                return Err("only http and https are fetched".to_owned());
            }
            let link = links.link(&base, &client.key, FeedLinkKind::Feed, &url);
            link.ok_or_else(|| format!("it is longer than {LINKED_URL_BYTES_MAX} bytes"))
        });
        Ok((client.key, linked.collect()))
    }
}
