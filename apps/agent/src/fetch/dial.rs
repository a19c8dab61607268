//! How a request reaches an origin: the seam between a direct connection and a flow to a proxy.

use std::future::Future;
use std::net::IpAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use url::Url;

use super::mode::FetchMode;
use super::outcome::TransferFailure;

/// A byte stream that can carry one HTTP/1.1 exchange.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> ByteStream for T {}

/// The link a request leaves by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressLink {
    /// The device's name; none leaves it to routing.
    pub device: Option<String>,
    /// Addresses to send from, one family each at least; none leaves it to routing.
    pub sources: Vec<IpAddr>,
}

/// Why no answer came, and what that means for the next try.
#[derive(Debug, Clone)]
pub enum FetchFault {
    /// The network between us and the origin failed; another link may do better.
    Path(String),
    /// The origin failed or asks for patience.
    Origin {
        /// What happened.
        text: String,
        /// The wait it asked for.
        retry_after: Option<Duration>,
    },
    /// The flow at the proxy is lost; a new one may continue.
    Proxy(String),
    /// Somebody answers who cannot prove to be the origin: another link may lead to it.
    UntrustedPeer(String),
    /// The link leads to a page that asks to sign in, whatever is asked for.
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

    /// Who speaks to the origin.
    fn mode(&self) -> FetchMode;

    /// True when requests carry the whole URL, as a proxy wants it.
    fn absolute_form(&self) -> bool {
        self.mode() == FetchMode::ProxyFetch
    }

    /// Who asks the origin in our place, so that what it said is that one's word.
    fn answering_proxy(&self) -> Option<String> {
        None
    }

    /// True when it leads to this machine, however the URL is written.
    fn needs_no_link(&self) -> bool {
        false
    }

    /// True when a stream outlives its link, so that a lost link is no reason to drop it.
    fn survives_link_loss(&self) -> bool {
        self.mode() != FetchMode::Direct
    }
}
