//! A request to a server of the gpodder API, by a link that may be used for it.
//!
//! Each has a connection of its own: a handful an hour, to servers of which many close theirs after an answer.

use std::time::Duration;

use cedos_readycast::SyncAccount;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, HOST, LOCATION,
    SET_COOKIE, USER_AGENT,
};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use url::Url;

use super::super::super::state::{Agent, lock};
use super::super::feed_fetch::{FeedFault, fault_text};
use crate::fetch::dial::{Dial, HEAD_MAX};
use crate::fetch::exchange::{AGENT, host};

/// The maximum number of bytes of an answer.
const ANSWER_BYTES_MAX: usize = 32 << 20; // a guess: 100,000 actions

/// How long an answer's body may take.
const BODY_WITHIN: Duration = Duration::from_secs(120); // a guess: the largest on a slow link

/// The maximum number of bytes of a cookie that is sent back.
const COOKIE_BYTES_MAX: usize = 4_096; // RFC 6265 §6.1

/// An answer of the server, whatever its status.
pub(super) struct ServerAnswer {
    pub(super) status: StatusCode,
    body: Bytes,
    cookie: Option<String>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum ServerFault {
    /// No network that may be used is up.
    NoNetwork,
    /// What the server or the way to it did, in a sentence.
    Failed(String),
}

impl From<FeedFault> for ServerFault {
    fn from(fault: FeedFault) -> ServerFault {
        match fault {
            FeedFault::NoNetwork => ServerFault::NoNetwork,
            FeedFault::Failed(text) => ServerFault::Failed(text),
        }
    }
}

impl ServerAnswer {
    /// The answer's JSON; none if it is something else.
    pub(super) fn json(&self) -> Option<Value> {
        serde_json::from_slice(&self.body).ok()
    }

    /// The cookies that the server set, as they are sent back.
    pub(super) fn cookie(&self) -> Option<&str> {
        self.cookie.as_deref()
    }
}

/// A task that ends with its owner.
struct ServerConnection(JoinHandle<()>);

impl Drop for ServerConnection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The pairs of all cookies of an answer.
fn cookies(headers: &HeaderMap) -> Option<String> {
    let values = headers.get_all(SET_COOKIE).iter();
    let pairs = values.filter_map(|value| value.to_str().ok()?.split(';').next());
    let pairs: Vec<&str> = pairs.map(str::trim).collect();
    let cookie = pairs.join("; ");
    (!cookie.is_empty() && cookie.len() <= COOKIE_BYTES_MAX).then_some(cookie)
}

impl Agent {
    /// Sends a request for `url`, with the account's password and the session's cookie.
    ///
    /// # Errors
    /// There is no network for it, no answer, or too large a one.
    pub(super) async fn ask_server(
        &self,
        account: &SyncAccount,
        cookie: Option<&str>,
        method: Method,
        url: &Url,
        body: Option<&Value>,
    ) -> Result<ServerAnswer, ServerFault> {
        let failed = |why: String| ServerFault::Failed(format!("{} {why}", host(url)));
        let transport = self.feed_transport()?;
        let (name, class) = self
            .link_for(&transport, url)
            .ok_or(ServerFault::NoNetwork)?;
        let link = transport
            .egress_link(Some(&name))
            .ok_or(ServerFault::NoNetwork)?;
        let conn = transport.request_conn(url, Some(name.clone()), true);
        let stream = conn.dial(url, &link).await.map_err(fault_text)?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) =
            handshake.map_err(|error| failed(format!("broke off: {error}")))?;
        let _connection = ServerConnection(tokio::spawn(async move {
            // What goes wrong is seen by the one who reads.
            let _ = connection.await;
        }));
        let text = body.map(Value::to_string).unwrap_or_default();
        let sent = text.len() as u64;
        let mut request = Request::builder()
            .method(method)
            .uri(&url[url::Position::BeforePath..url::Position::AfterQuery])
            .header(HOST, host(url))
            .header(USER_AGENT, AGENT)
            .header(ACCEPT, "application/json")
            .header(ACCEPT_ENCODING, "identity")
            .header(AUTHORIZATION, &account.authorization)
            .header(CONTENT_LENGTH, sent);
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(cookie) = cookie {
            request = request.header(COOKIE, cookie);
        }
        let request = request.body(Full::new(Bytes::from(text)));
        let request = request.map_err(|error| failed(format!("cannot be asked: {error}")))?;
        let answer = timeout(HEAD_MAX, sender.send_request(request)).await;
        let answer = answer.map_err(|_| failed("does not answer".to_owned()))?;
        let (head, body) = answer
            .map_err(|error| failed(format!("broke off: {error}")))?
            .into_parts();
        if head.status.is_redirection() {
            let location = head.headers.get(LOCATION).and_then(|to| to.to_str().ok());
            let origin = location
                .and_then(|to| url.join(to).ok())
                .map(|to| to.origin());
            let to = origin.filter(|to| to.is_tuple()).map_or_else(
                || "another address".to_owned(),
                |to| to.ascii_serialization(),
            );
            // A password goes to no address that its owner did not name.
            return Err(failed(format!(
                "says that it is at {to}; set it up there: `cedos cast sync {to} --user NAME`"
            )));
        }
        let body = timeout(BODY_WITHIN, Limited::new(body, ANSWER_BYTES_MAX).collect()).await;
        let body = body.map_err(|_| failed("does not finish its answer".to_owned()))?;
        let body = body.map_err(|error| failed(format!("broke off: {error}")))?;
        let body = body.to_bytes();
        let bytes = sent + body.len() as u64;
        self.record_spending(&[(name, class, bytes)]);
        lock(&self.meter).carried(class, true, bytes);
        Ok(ServerAnswer {
            status: head.status,
            cookie: cookies(&head.headers),
            body,
        })
    }
}
