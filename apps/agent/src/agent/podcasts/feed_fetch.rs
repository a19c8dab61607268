//! A GET of a feed, a page or a directory's answer into memory, by a link that may be used for it.
//!
//! ```text
//!  candidates of the device ─▶ free first, then metered while the budget lasts ─▶ request, redirects ─▶ body
//! ```
//!
//! The bytes count against the device's budget like those of transfers. Roaming links are never used. A public answer
//! leads to public addresses only, whatever it redirects to.

use std::sync::Arc;
use std::time::Duration;

use cedos_http::is_local_address;
use d2tp_links::CostClass;
use d2tp_sched::LinkClass;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, ETAG, HOST, IF_MODIFIED_SINCE, IF_NONE_MATCH,
    LAST_MODIFIED, LOCATION, RETRY_AFTER, USER_AGENT,
};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use url::Url;

use super::super::state::{Agent, lock};
use crate::fetch::dial::{Dial, FetchFault, HEAD_MAX};
use crate::fetch::direct::DirectConnector;
use crate::fetch::exchange::{AGENT, REDIRECTS_MAX, credentials, host};
use crate::fetch::local_hosts::LocalHosts;
use crate::fetch::tls::OriginTls;
use crate::stream::stream_transport::StreamTransport;

/// How long a body may bring nothing.
const SILENCE_MAX: Duration = Duration::from_secs(30); // a guess, as for the head
/// How long a body may take: an origin that sends a byte now and then holds one of few places.
const BODY_WITHIN: Duration = Duration::from_secs(10 * 60); // a guess: 50 MB over a slow network

/// A request for a feed, with the validators of the copy that is known.
pub(super) struct FeedFetch {
    pub(super) url: Url,
    pub(super) etag: Option<String>,
    pub(super) last_modified: Option<String>,
    /// Value of `Authorization`, for the URL's own origin only.
    pub(super) authorization: Option<String>,
    /// Further fields, for the URL's own origin only.
    pub(super) fields: Vec<(&'static str, String)>,
    /// The host of a local network that the request may lead to.
    pub(super) local_host: Option<String>,
    /// The maximum number of bytes of the body.
    pub(super) bytes_max: usize,
}

impl FeedFetch {
    /// A request without conditions, to public addresses only; credentials in the URL are sent.
    pub(super) fn of(url: Url, bytes_max: usize) -> FeedFetch {
        FeedFetch {
            authorization: credentials(&url),
            url,
            etag: None,
            last_modified: None,
            fields: Vec::new(),
            local_host: None,
            bytes_max,
        }
    }

    /// Allows a host of a local network.
    pub(super) fn with_local_host(mut self, host: Option<String>) -> FeedFetch {
        self.local_host = host;
        self
    }
}

/// The host of an address that a user named, which may therefore be in a local network.
pub(super) fn named_host(url: &Url) -> Option<String> {
    url.host_str().map(str::to_owned)
}

/// The answer of an origin, whatever its status.
pub(super) struct FeedAnswer {
    pub(super) status: StatusCode,
    headers: HeaderMap,
    pub(super) body: Vec<u8>,
    /// Where the redirects ended.
    pub(super) url: Url,
    /// Where the redirects for good ended, those that come before any other.
    pub(super) moved_to: Option<Url>,
    /// The host of the URL that was asked for, if it is in a local network.
    pub(super) local_host: Option<String>,
}

impl FeedAnswer {
    fn field(&self, name: http::HeaderName) -> Option<String> {
        let value = self.headers.get(name)?.to_str().ok()?;
        Some(value.to_owned())
    }

    pub(super) fn etag(&self) -> Option<String> {
        self.field(ETAG)
    }

    pub(super) fn last_modified(&self) -> Option<String> {
        self.field(LAST_MODIFIED)
    }

    /// How long the origin wants to be left alone.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        let seconds = self.field(RETRY_AFTER)?.trim().parse().ok()?;
        Some(Duration::from_secs(seconds))
    }
}

/// Why nothing was fetched.
pub(super) enum FeedFault {
    /// No network that may be used is up.
    NoNetwork,
    /// The origin, or the way to it; in a sentence.
    Failed(String),
}

impl Agent {
    /// The requests' way to origins, made once: it reads the system's authorities.
    pub(super) fn feed_transport(&self) -> Result<Arc<StreamTransport>, FeedFault> {
        if let Some(transport) = self.podcasts.transport.get() {
            return Ok(transport.clone());
        }
        let tls = OriginTls::new(None).map_err(|failure| FeedFault::Failed(failure.text))?;
        let transport = StreamTransport::direct(DirectConnector::new(tls), self.link_view.links());
        Ok(self.podcasts.transport.get_or_init(|| transport).clone())
    }

    /// Whether a link is up that may be used for a feed.
    pub(super) fn can_fetch(&self, url: &Url) -> bool {
        let transport = self.feed_transport();
        // What else is wrong, the request tells.
        transport.map_or(true, |transport| self.link_for(&transport, url).is_some())
    }

    /// The link for a feed: a free one, else a metered one while the budget lasts.
    pub(super) fn link_for(
        &self,
        transport: &StreamTransport,
        url: &Url,
    ) -> Option<(String, CostClass)> {
        let links = transport.link_candidates(url);
        let best = |class: LinkClass| {
            let links = links.iter().filter(move |link| link.class == class);
            links.min_by_key(|link| (link.stalled, link.metric))
        };
        if let Some(link) = best(LinkClass::Free) {
            return Some((link.name.clone(), CostClass::Free));
        }
        let link = best(LinkClass::Metered)?;
        let around = self.link_view.nearby().borrow().name(&link.name);
        let is_used_up = self.link_view.exhausted().contains_key(&around);
        let is_over = *self.left.borrow() == Some(0);
        (!is_used_up && !is_over).then(|| (link.name.clone(), CostClass::Metered))
    }

    /// Fetches a document into memory.
    ///
    /// # Errors
    /// There is no network for it, no answer, or too large a one.
    pub(super) async fn fetch_document(&self, ask: &FeedFetch) -> Result<FeedAnswer, FeedFault> {
        let transport = self.feed_transport()?;
        let (name, class) = self
            .link_for(&transport, &ask.url)
            .ok_or(FeedFault::NoNetwork)?;
        let link = transport
            .egress_link(Some(&name))
            .ok_or(FeedFault::NoNetwork)?;
        let mut url = ask.url.clone();
        let (mut moved_to, mut is_for_good) = (None, true);
        let mut local_host = ask.local_host.clone();
        for _ in 0..=REDIRECTS_MAX {
            let conn = transport
                .request_conn(&ask.url, Some(name.clone()), true)
                .with_local_hosts(LocalHosts::only(local_host.as_deref()));
            let stream = conn.dial(&url, &link).await.map_err(fault_text)?;
            if !conn.peer().is_some_and(is_local_address) {
                local_host = None;
            }
            let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
            let (mut sender, connection) = handshake.await.map_err(|error| broken(&url, &error))?;
            let _connection = FeedConnection(tokio::spawn(async move {
                // What goes wrong is seen by the one who reads.
                let _ = connection.await;
            }));
            let request = ask.request(&url)?;
            let answer = timeout(HEAD_MAX, sender.send_request(request)).await;
            let answer = answer.map_err(|_| silent(&url))?;
            let (head, body) = answer.map_err(|error| broken(&url, &error))?.into_parts();
            if head.status.is_redirection()
                && let Some(location) = head.headers.get(LOCATION)
            {
                let location = location.to_str().unwrap_or_default();
                url = redirected(&url, location)?;
                is_for_good &= matches!(
                    head.status,
                    StatusCode::MOVED_PERMANENTLY | StatusCode::PERMANENT_REDIRECT
                );
                if is_for_good {
                    moved_to = Some(url.clone());
                }
                continue;
            }
            let mut bytes = Vec::new();
            let reading = self.read_body(body, &head.headers, ask, &url, &mut bytes);
            let read = timeout(BODY_WITHIN, reading).await;
            // What was not whole has its cost as well.
            let carried = bytes.len() as u64;
            self.record_spending(&[(name.clone(), class, carried)]);
            lock(&self.meter).carried(class, true, carried);
            read.map_err(|_| FeedFault::Failed(format!("{} is too slow", host(&url))))??;
            return Ok(FeedAnswer {
                status: head.status,
                headers: head.headers,
                body: bytes,
                url,
                moved_to,
                local_host,
            });
        }
        Err(FeedFault::Failed(format!(
            "{} redirects more than {REDIRECTS_MAX} times, in a circle",
            host(&ask.url)
        )))
    }

    async fn read_body(
        &self,
        mut body: Incoming,
        headers: &HeaderMap,
        ask: &FeedFetch,
        url: &Url,
        bytes: &mut Vec<u8>,
    ) -> Result<(), FeedFault> {
        let too_large = || {
            let most = ask.bytes_max >> 20;
            FeedFault::Failed(format!("{} sent more than {most} MB", host(url)))
        };
        let said = headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok());
        let said: usize = said.and_then(|text| text.parse().ok()).unwrap_or(0);
        if said > ask.bytes_max {
            return Err(too_large());
        }
        bytes.reserve(said);
        loop {
            let frame = timeout(SILENCE_MAX, body.frame()).await;
            let Some(frame) = frame.map_err(|_| silent(url))? else {
                return Ok(());
            };
            let frame = frame.map_err(|error| broken(url, &error))?;
            if let Ok(data) = frame.into_data() {
                if bytes.len() + data.len() > ask.bytes_max {
                    return Err(too_large());
                }
                bytes.extend_from_slice(&data);
            }
        }
    }
}

impl FeedFetch {
    fn request(&self, url: &Url) -> Result<Request<Empty<Bytes>>, FeedFault> {
        let is_own_origin = url.origin() == self.url.origin();
        // A validator names what was at the address that is asked for, not what is where it redirects.
        let is_same = *url == self.url;
        let mut request = Request::get(&url[url::Position::BeforePath..url::Position::AfterQuery])
            .header(HOST, host(url))
            .header(USER_AGENT, AGENT)
            .header(ACCEPT_ENCODING, "identity");
        let conditions = [
            (IF_NONE_MATCH, &self.etag, is_same),
            (IF_MODIFIED_SINCE, &self.last_modified, is_same),
            (AUTHORIZATION, &self.authorization, is_own_origin),
        ];
        for (name, value, is_sent) in conditions {
            if let Some(value) = value.as_ref().filter(|_| is_sent) {
                request = request.header(name, value);
            }
        }
        for (name, value) in self.fields.iter().filter(|_| is_own_origin) {
            request = request.header(*name, value);
        }
        let request = request.body(Empty::new());
        request.map_err(|error| FeedFault::Failed(format!("cannot request {url}: {error}")))
    }
}

/// A task that ends with its owner.
struct FeedConnection(tokio::task::JoinHandle<()>);

impl Drop for FeedConnection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn redirected(from: &Url, location: &str) -> Result<Url, FeedFault> {
    let refuse = |why: &str| {
        let from = host(from);
        FeedFault::Failed(format!("{from} redirects to `{location}`, which {why}"))
    };
    let to = (from.join(location)).map_err(|_| refuse("is no address"))?;
    match (from.scheme(), to.scheme()) {
        (_, "https") | ("http", "http") => Ok(to),
        ("https", "http") => Err(refuse("is not encrypted")),
        _ => Err(refuse("is neither http nor https")),
    }
}

fn silent(url: &Url) -> FeedFault {
    FeedFault::Failed(format!("{} does not answer", host(url)))
}

fn broken(url: &Url, error: &hyper::Error) -> FeedFault {
    FeedFault::Failed(format!("{} broke off: {error}", host(url)))
}

pub(super) fn fault_text(fault: FetchFault) -> FeedFault {
    FeedFault::Failed(match fault {
        FetchFault::Path(text)
        | FetchFault::Proxy(text)
        | FetchFault::UntrustedPeer(text)
        | FetchFault::CaptivePortal(text)
        | FetchFault::NameNotFound(text)
        | FetchFault::Origin { text, .. } => text,
        FetchFault::Final(failure) => failure.text,
    })
}
