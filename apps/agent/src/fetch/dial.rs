//! The interface by which a request reaches an origin: a direct connection or a flow to a proxy.

use std::future::Future;
use std::net::IpAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use url::Url;

use super::mode::FetchMode;
use super::outcome::TransferFailure;
use super::unanswered_connects::UnansweredConnects;
use super::validator::Validator;

/// How long the head of an answer may take.
pub const HEAD_MAX: Duration = Duration::from_secs(30); // a guess

/// A byte stream that can carry one HTTP/1.1 exchange.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> ByteStream for T {}

/// The link a request leaves by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressLink {
    /// The device's name; none leaves the choice to routing.
    pub device: Option<String>,
    /// Source addresses, one of each family at least; none leaves the choice to routing.
    pub sources: Vec<IpAddr>,
}

/// The object of an answer in which its origin announces another server (RFC 7838).
#[derive(Debug, Clone)]
pub struct AnnouncedObject {
    /// The URL of the object.
    pub url: Url,
    /// The validator of the object.
    pub validator: Option<Validator>,
    /// The length of the object, if known.
    pub length: Option<u64>,
}

/// Why there is no answer, and what that means for the next attempt.
#[derive(Debug, Clone)]
pub enum FetchFault {
    /// The network between this device and the origin failed; another link may work.
    Path(String),
    /// The origin failed, or asks to wait.
    Origin {
        /// The fault in words, for people.
        text: String,
        /// The wait that the origin asked for.
        retry_after: Option<Duration>,
    },
    /// The flow at the proxy is lost; a new one may continue.
    Proxy(String),
    /// The server that answered could not prove to be the origin: another link may lead to it.
    UntrustedPeer(String),
    /// The link leads to a captive portal.
    CaptivePortal(String),
    /// The resolver says that there is no such name.
    NameNotFound(String),
    /// Trying again will not help.
    Final(TransferFailure),
}

/// Opens byte streams towards origins.
///
/// [`super::direct::DirectConnector`] opens TCP and TLS bound to a link. [`super::proxy::ProxyClient`] opens a flow
/// that moves between links by itself, for absolute-form requests or with a tunnel in it.
pub trait Dial: Send {
    /// Opens a stream for one request to `url`'s origin, leaving by `via`.
    fn dial(
        &self,
        url: &Url,
        via: &EgressLink,
    ) -> impl Future<Output = Result<Box<dyn ByteStream>, FetchFault>> + Send;

    /// Which host talks to the origin.
    fn mode(&self) -> FetchMode;

    /// Whether requests carry the whole URL, as a proxy expects.
    fn absolute_form(&self) -> bool {
        self.mode() == FetchMode::ProxyFetch
    }

    /// The proxy that asks the origin, so that its answers count as that proxy's.
    fn answering_proxy(&self) -> Option<String> {
        None
    }

    /// The failure of the session that carries the streams, if no other session would do better.
    fn session_failure(&self) -> Option<TransferFailure> {
        None
    }

    /// How the session that carries the streams ended, for users, if it did and another session may do better.
    fn session_end_text(&self) -> Option<String> {
        None
    }

    /// The connection attempts that go unanswered, where each connection is bound to a link.
    fn unanswered_connects(&self) -> Option<&UnansweredConnects> {
        None
    }

    /// Whether the origin is on this machine, however the URL is written.
    fn needs_no_link(&self) -> bool {
        false
    }

    /// Whether a stream survives the loss of its link.
    fn survives_link_loss(&self) -> bool {
        self.mode() != FetchMode::Direct
    }

    /// How long the head of an answer may take. A flow may sleep for hours before the answer comes, and knows itself
    /// when it is lost.
    fn answers_within(&self) -> Duration {
        match self.survives_link_loss() {
            true => Duration::MAX,
            false => HEAD_MAX,
        }
    }

    /// Handles an announcement of another server for the object of an answer (`Alt-Svc`).
    fn on_announcement(&self, _object: AnnouncedObject) {}

    /// Whether another request for `url` would go a better way than the running one.
    fn has_better_way(&self, _url: &Url) -> bool {
        false
    }

    /// Whether the last request went a better way, which may be left again.
    fn goes_better_way(&self) -> bool {
        false
    }

    /// Leaves the better way for good, because it failed.
    fn leave_better_way(&self) {}
}
