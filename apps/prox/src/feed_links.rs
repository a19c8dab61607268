//! Links for podcast apps: which client they are of, and the one address that each leads to.
//!
//! ```text
//!  https://PROXY/feeds/TOKEN/SEALED/NAME
//!                        │      │     └─ what apps call the file; it is not read
//!                        │      └─────── AES-256-GCM-SIV of "feed" or "episode" and the address, base64url
//!                        └────────────── the client's id and its MAC, base64url
//! ```
//!
//! Both keys come from the proxy's own, so that nothing of a link is stored, nodes with one key know each other's links,
//! and nobody else can make one: a client gets what the operator listed for it, and what those feeds name. A link shows
//! neither its address nor a password in that. The same address has the same link each time: apps know episodes by it.

use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hmac::{self, HMAC_SHA256};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use d2tp_driver::HostKey;
use url::Url;

use crate::link_keys::{LINK_CLIENT_ID_BYTES, link_client_id, link_client_key};

/// The first segment of a link's path, below that of the address that the operator names.
const SEGMENT: &str = "feeds";

/// Bytes of the MAC in a token.
const TOKEN_MAC_BYTES: usize = 16;

/// Bytes of an address that a link is made for.
pub(crate) const LINKED_URL_BYTES_MAX: usize = 4096; // a guess: web servers take lines of 8 kB, and base64 adds a third

/// Characters of the file's name in a link.
const NAME_CHARS_MAX: usize = 80; // a guess

/// What a link leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FeedLinkKind {
    /// A feed, which is rewritten.
    Feed,
    /// An enclosure of such a feed, as it is.
    Episode,
}

impl FeedLinkKind {
    fn byte(self) -> u8 {
        match self {
            FeedLinkKind::Feed => b'F',
            FeedLinkKind::Episode => b'E',
        }
    }

    fn of_byte(byte: u8) -> Option<FeedLinkKind> {
        [FeedLinkKind::Feed, FeedLinkKind::Episode]
            .into_iter()
            .find(|kind| kind.byte() == byte)
    }
}

/// A link that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FeedLink {
    pub(crate) client: HostKey,
    pub(crate) kind: FeedLinkKind,
    /// The address that it leads to.
    pub(crate) url: Url,
}

/// Makes and reads links.
pub(crate) struct LinkSealer {
    secret: hmac::Key,
}

/// Never shows the secret.
impl std::fmt::Debug for LinkSealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LinkSealer(…)")
    }
}

impl LinkSealer {
    /// The links of the proxy with this private key.
    pub(crate) fn new(private_key: &[u8; 32]) -> LinkSealer {
        let root = hmac::Key::new(HMAC_SHA256, private_key);
        let secret = hmac::sign(&root, b"d2prox links of podcast feeds");
        LinkSealer {
            secret: hmac::Key::new(HMAC_SHA256, secret.as_ref()),
        }
    }

    fn token_mac(&self, id: &[u8; LINK_CLIENT_ID_BYTES]) -> hmac::Tag {
        hmac::sign(&self.secret, &[b"token ".as_slice(), id].concat())
    }

    /// The token of a client; none if the key is that of a device.
    fn token(&self, client: &HostKey) -> Option<String> {
        let id = link_client_id(client)?;
        let mac = self.token_mac(&id);
        let mac = &mac.as_ref()[..TOKEN_MAC_BYTES];
        Some(URL_SAFE_NO_PAD.encode([id.as_slice(), mac].concat()))
    }

    /// The client whose token this is, whether it still exists or not.
    fn client_of(&self, token: &str) -> Option<HostKey> {
        let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
        let (id, mac) = bytes.split_first_chunk::<LINK_CLIENT_ID_BYTES>()?;
        let expected = self.token_mac(id);
        let expected = &expected.as_ref()[..TOKEN_MAC_BYTES];
        aws_lc_rs::constant_time::verify_slices_are_equal(mac, expected).ok()?;
        Some(link_client_key(*id))
    }

    /// The cipher of a client's links. Its nonce is always zero: this mode then shows which texts are equal, and
    /// nothing else (RFC 8452 §1).
    fn cipher(&self, id: &[u8; LINK_CLIENT_ID_BYTES]) -> LessSafeKey {
        let key = hmac::sign(&self.secret, &[b"links ".as_slice(), id].concat());
        let key = UnboundKey::new(&AES_256_GCM_SIV, key.as_ref());
        LessSafeKey::new(key.expect("SHA-256 has as many bytes as the key"))
    }

    fn nonce() -> Nonce {
        Nonce::assume_unique_for_key([0; 12])
    }

    /// The link of a client to an address, below `base`; none if the key is that of a device, or the address is too long
    /// or not of the web.
    pub(crate) fn link(
        &self,
        base: &Url,
        client: &HostKey,
        kind: FeedLinkKind,
        url: &Url,
    ) -> Option<Url> {
        let id = link_client_id(client)?;
        if !matches!(url.scheme(), "http" | "https") || url.as_str().len() > LINKED_URL_BYTES_MAX {
            return None;
        }
        let mut text = [&[kind.byte()], url.as_str().as_bytes()].concat();
        let sealed =
            self.cipher(&id)
                .seal_in_place_append_tag(Self::nonce(), Aad::empty(), &mut text);
        sealed.ok()?;
        let mut link = base.clone();
        let mut segments = link.path_segments_mut().ok()?;
        segments.pop_if_empty();
        segments.push(SEGMENT);
        segments.push(&self.token(client)?);
        segments.push(&URL_SAFE_NO_PAD.encode(text));
        if kind == FeedLinkKind::Episode {
            segments.push(&file_name(url));
        }
        drop(segments);
        Some(link)
    }

    /// Reads the path of a request for a link below `base`, or below the root where a web server in front has removed
    /// the path of `base`. None if it is no link of this proxy.
    pub(crate) fn read(&self, base: &Url, path: &str) -> Option<FeedLink> {
        let path = path.split(['?', '#']).next()?;
        let of_base = base.path().trim_end_matches('/');
        let below = path.strip_prefix(of_base);
        let below = below.filter(|rest| rest.starts_with('/')).unwrap_or(path);
        let mut segments = below.strip_prefix('/')?.split('/');
        if segments.next()? != SEGMENT {
            return None;
        }
        let client = self.client_of(segments.next()?)?;
        let mut sealed = URL_SAFE_NO_PAD.decode(segments.next()?).ok()?;
        let cipher = self.cipher(&link_client_id(&client)?);
        let text = cipher.open_in_place(Self::nonce(), Aad::empty(), &mut sealed);
        let (kind, url) = text.ok()?.split_first()?;
        Some(FeedLink {
            client,
            kind: FeedLinkKind::of_byte(*kind)?,
            url: std::str::from_utf8(url).ok()?.parse().ok()?,
        })
    }
}

/// What apps are to call the file of an enclosure: the name that it has at its origin, which ends with what they know its
/// form by.
fn file_name(url: &Url) -> String {
    let last = url.path_segments().and_then(|mut all| all.next_back());
    let name = percent_encoding::percent_decode_str(last.unwrap_or_default()).decode_utf8_lossy();
    let is_plain = |c: &char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
    let plain: Vec<char> = name.chars().filter(is_plain).collect();
    let from = plain.len().saturating_sub(NAME_CHARS_MAX);
    let name: String = plain[from..].iter().collect();
    match name.trim_matches('.') {
        "" => "episode".to_owned(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: [u8; 16] = [3; 16];

    fn url(text: &str) -> Url {
        text.parse().expect("an address")
    }

    fn links() -> LinkSealer {
        LinkSealer::new(&[7; 32])
    }

    fn base() -> Url {
        url("https://proxy.example/podcasts/")
    }

    #[test]
    fn a_link_leads_back_to_its_address_and_shows_nothing_of_it() {
        let (links, client) = (links(), link_client_key(CLIENT));
        let address = url("https://user:hush@a.example/caf%C3%A9%20%2F1.mp3?id=5");
        let link = links.link(&base(), &client, FeedLinkKind::Episode, &address);
        let link = link.expect("a link");
        let text = link.as_str();
        assert!(
            text.starts_with("https://proxy.example/podcasts/feeds/"),
            "{text}"
        );
        assert!(text.ends_with("/caf%C3%A91.mp3"), "{text}");
        assert!(
            !text.contains("hush") && !text.contains("a.example"),
            "{text}"
        );
        let again = links.link(&base(), &client, FeedLinkKind::Episode, &address);
        assert_eq!(again.as_ref(), Some(&link), "apps know an episode by it");
        let expected = FeedLink {
            client,
            kind: FeedLinkKind::Episode,
            url: address,
        };
        let below_root = link.path().strip_prefix("/podcasts").expect("its path");
        for path in [link.path(), below_root, &format!("{}?x#y", link.path())] {
            assert_eq!(
                links.read(&base(), path).as_ref(),
                Some(&expected),
                "{path}"
            );
        }
    }

    #[test]
    fn no_link_works_that_this_proxy_has_not_made_for_this_client() {
        let (links, client) = (links(), link_client_key(CLIENT));
        let address = url("https://a.example/feed");
        let made = |links: &LinkSealer, client| {
            let link = links.link(&base(), &client, FeedLinkKind::Feed, &address);
            link.expect("a link").path().to_owned()
        };
        let path = made(&links, client);
        assert!(links.read(&base(), &path).is_some());
        let other_proxy = made(&LinkSealer::new(&[8; 32]), client);
        assert_eq!(links.read(&base(), &other_proxy), None);
        // The token of one client with what was sealed for another.
        let other = made(&links, link_client_key([4; 16]));
        let part = |path: &str, n: usize| path.split('/').nth(n).expect("a part").to_owned();
        let mixed = format!("/feeds/{}/{}", part(&other, 3), part(&path, 4));
        assert_eq!(links.read(&base(), &mixed), None);
        // A character more, less, or another one, wherever it is.
        for at in "/podcasts/feeds/".len()..path.len() {
            let mut bytes = path.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(bytes).expect("letters");
            assert_eq!(links.read(&base(), &changed), None, "{changed}");
        }
        for wrong in [
            "",
            "/",
            "/feeds",
            "/feeds/",
            "/feeds//",
            "/other/a/b",
            "feeds/a/b",
            "/feeds/é/é",
            &path[..path.len() - 1],
            &format!("{path}A"),
        ] {
            assert_eq!(links.read(&base(), wrong), None, "{wrong}");
        }
    }

    #[test]
    fn links_lead_to_the_web_only_and_are_of_clients_of_links_only() {
        let (links, client) = (links(), link_client_key(CLIENT));
        for wrong in [
            "file:///etc/passwd",
            "ftp://a.example/",
            "data:,x",
            "ipfs://x/",
        ] {
            let link = links.link(&base(), &client, FeedLinkKind::Episode, &url(wrong));
            assert_eq!(link, None, "{wrong}");
        }
        let long = url(&format!(
            "https://a.example/{}",
            "x".repeat(LINKED_URL_BYTES_MAX)
        ));
        assert_eq!(
            links.link(&base(), &client, FeedLinkKind::Feed, &long),
            None
        );
        let address = url("https://a.example/");
        assert_eq!(
            links.link(&base(), &[7; 32], FeedLinkKind::Feed, &address),
            None
        );
        let link = links.link(&base(), &client, FeedLinkKind::Episode, &address);
        assert!(link.expect("a link").path().ends_with("/episode"));
    }
}
