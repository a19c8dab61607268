//! Bytes as a feed, as a list of subscriptions and as a web page. This is not part of `lib.rs`, whose other users do
//! not depend on the library of podcasts.

use cedos_readycast::{feed_links_of_page, parse_feed, read_opml};
use url::Url;

/// Checks that nothing panics, and that a page leads to web addresses only.
pub fn feed(bytes: &[u8]) {
    // A thread for each input would be most of the time.
    cedos_sandbox::set_confinement(false);
    let base = Url::parse("https://example.org/a/feed.xml").expect("an address");
    let _ = parse_feed(bytes, &base);
    let _ = read_opml(bytes);
    for link in feed_links_of_page(bytes, &base) {
        assert!(matches!(link.scheme(), "http" | "https"), "{link}");
    }
}
