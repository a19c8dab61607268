//! The origin for kill points: one object for each path, sent at the rate in the path, and a record
//! of all requests.
//!
//! `/CASE/SEED/BYTES/RATE/known/private` (or `unknown`: without a length; or `shared`: caches may
//! give it to others for ten minutes). It has a strong ETag and supports ranges.
//!
//! Not the origin of `lab/rig`: that is for tests alone, and answers one request for each connection,
//! which would hide what a proxy does with connections that it keeps.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use cedos_lab_scenario::content;
use futures_util::stream;
use http::header::{ACCEPT_RANGES, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_RANGE, ETAG, RANGE};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

/// Bytes of a piece of a body.
const PIECE_BYTES: u64 = 16 * 1024;

/// One request: the start of its range, and the bytes that were sent for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KillOriginRequest {
    /// First byte of the range that was requested; `None` without a range.
    pub from: Option<u64>,
    /// Bytes sent, also those that were lost with a connection.
    pub sent: u64,
}

type RequestsByPath = Arc<Mutex<HashMap<String, Vec<KillOriginRequest>>>>;

/// A running origin; it ends with its runtime.
#[derive(Clone, Debug)]
pub struct Origin {
    address: SocketAddr,
    book: RequestsByPath,
}

impl Origin {
    /// Starts the server.
    ///
    /// # Errors
    /// No port is available.
    pub async fn start() -> anyhow::Result<Origin> {
        let listener = TcpListener::bind(("127.0.0.1", 0))
            .await
            .context("no port for the origin")?;
        let address = listener.local_addr()?;
        let book = RequestsByPath::default();
        let origin = Origin {
            address,
            book: book.clone(),
        };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                let book = book.clone();
                let service = service_fn(move |request| {
                    let book = book.clone();
                    async move { Ok::<_, Infallible>(answer(&request, &book)) }
                });
                let served = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(async move { drop(served.await) });
            }
        });
        Ok(origin)
    }

    /// The URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The requests for a path, in order.
    pub fn asked(&self, path: &str) -> Vec<KillOriginRequest> {
        let book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        book.get(path).cloned().unwrap_or_default()
    }
}

struct Object {
    seed: u64,
    bytes: u64,
    rate: u64,
    known: bool,
    shared: bool,
}

fn object(path: &str) -> Option<Object> {
    let mut parts = path.split('/').skip(2);
    Some(Object {
        seed: parts.next()?.parse().ok()?,
        bytes: parts.next()?.parse().ok()?,
        rate: parts.next()?.parse().ok()?,
        known: parts.next()? == "known",
        shared: parts.next()? == "shared",
    })
}

/// First and last byte of a range of one object.
fn range(headers: &HeaderMap, bytes: u64) -> Option<(u64, u64)> {
    let text = headers.get(RANGE)?.to_str().ok()?.strip_prefix("bytes=")?;
    let (from, to) = text.split_once('-')?;
    let last = to.parse().unwrap_or(bytes - 1);
    Some((from.parse().ok()?, last.min(bytes - 1)))
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

fn answer(request: &Request<Incoming>, book: &RequestsByPath) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let head = Response::builder();
    let Some(object) = object(&path) else {
        let head = head.status(StatusCode::NOT_FOUND);
        return head
            .body(Empty::new().boxed_unsync())
            .expect("a valid head");
    };
    let range = range(request.headers(), object.bytes);
    let number = {
        let mut book = book.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = book.entry(path.clone()).or_default();
        asked.push(KillOriginRequest {
            from: range.map(|(from, _)| from),
            sent: 0,
        });
        asked.len() - 1
    };
    let control = match object.shared {
        true => "max-age=600",
        false => "private",
    };
    let head = head.header(ETAG, "\"one\"").header(ACCEPT_RANGES, "bytes");
    let head = head.header(CACHE_CONTROL, control);
    let (from, to) = range.unwrap_or((0, object.bytes - 1));
    if from > to {
        let whole = format!("bytes */{}", object.bytes);
        let head = head
            .status(StatusCode::RANGE_NOT_SATISFIABLE)
            .header(CONTENT_RANGE, whole);
        return head
            .body(Empty::new().boxed_unsync())
            .expect("a valid head");
    }
    let mut head = match range {
        Some(_) => head
            .status(StatusCode::PARTIAL_CONTENT)
            .header(CONTENT_RANGE, format!("bytes {from}-{to}/{}", object.bytes)),
        None => head,
    };
    if object.known || range.is_some() {
        head = head.header(CONTENT_LENGTH, to + 1 - from);
    }
    let book = book.clone();
    let pieces = stream::unfold(from, move |at| {
        let (book, path) = (book.clone(), path.clone());
        let (seed, rate) = (object.seed, object.rate);
        async move {
            let taken = (to + 1)
                .checked_sub(at)
                .filter(|n| *n > 0)?
                .min(PIECE_BYTES);
            tokio::time::sleep(Duration::from_secs_f64(taken as f64 / rate as f64)).await;
            let mut piece = vec![0; taken as usize];
            content::fill(seed, at, &mut piece);
            let mut book = book.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(asked) = book.get_mut(&path).and_then(|all| all.get_mut(number)) {
                asked.sent += taken;
            }
            Some((Ok(Frame::data(Bytes::from(piece))), at + taken))
        }
    });
    head.body(StreamBody::new(pieces).boxed_unsync())
        .expect("a valid head")
}
