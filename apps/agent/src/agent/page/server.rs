//! Serves the page: who may ask, and the header fields of every answer.
//!
//! | request | answer |
//! |---|---|
//! | of another user's program | none: closed |
//! | `Host` is not this port of this machine | 421: a page of another name, after DNS rebinding |
//! | `Origin` is another page's, or a POST has none | 403 |
//! | `/open/CODE`, once | to the page |
//! | `/play/ID/CODE` | the audio of that episode, and nothing else |
//! | without the token | 404 |

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Redirect, Response};
use cedos_readycast::EpisodeId;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::socket_owner::is_this_users;
use crate::stream::store::random_name;
use crate::token_listener::{ConnectionPlace, TokenGuard, TokenListener};

/// The path of links that work once, before their code.
pub(super) const ENTRY_PATH: &str = "open/";

/// The path of links for players, before the number of an episode and its code: others can read a player's command line,
/// and the player needs no more than the episode.
const PLAY_PATH: &str = "play/";

/// How long a link that works once can be used.
const ENTRY_WITHIN: Duration = Duration::from_secs(60); // a guess: a browser that starts

/// Links at once that work once; the newest replaces the oldest.
const ENTRIES_MAX: usize = 8; // a guess

/// The header fields of every answer. The page is made of its own files alone, runs no script but its own, is
/// shown in no frame, and tells no other page its address. Its forms send their Origin.
const HEADERS: [(HeaderName, &str); 6] = [
    (
        CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
         media-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (CACHE_CONTROL, "no-store"),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "same-origin"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
];

/// Codes of links that work once.
#[derive(Default)]
pub(super) struct EntryCodes(Mutex<VecDeque<(String, Instant)>>);

impl EntryCodes {
    /// A new code.
    pub(super) fn create(&self) -> String {
        let code = random_name();
        let mut codes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if codes.len() >= ENTRIES_MAX {
            codes.pop_front();
        }
        codes.push_back((code.clone(), Instant::now() + ENTRY_WITHIN));
        code
    }

    /// Whether the code may be used now; it may not afterwards.
    fn redeem(&self, code: &str) -> bool {
        let mut codes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        codes.retain(|(_, until)| now < *until);
        let place = codes.iter().position(|(known, _)| known == code);
        place.and_then(|place| codes.remove(place)).is_some()
    }
}

/// Answers requests until this is dropped, with all its connections.
pub(super) async fn serve(listener: TokenListener, pages: Router, entries: Arc<EntryCodes>) {
    let server = Arc::new(PageServer {
        guard: listener.guard().clone(),
        pages,
        entries,
    });
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            (stream, place) = listener.accept() => {
                // Who has the token is not enough: others can have read it on a browser's command line, or at
                // the port while no agent ran.
                if !is_this_users(&stream) {
                    continue;
                }
                let server = server.clone();
                // What a request starts runs where the agent's transfers do.
                connections.spawn_local(async move {
                    tokio::select! {
                        () = server.speak(stream, &place) => {}
                        () = place.closed() => {}
                    }
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// The path of a player's link to an episode, which stays the same as long as the token does. `edition`: the tag of the
/// bytes that the player is given, so that it never mixes two copies.
pub(super) fn player_path(guard: &TokenGuard, episode: EpisodeId, edition: &str) -> String {
    let code = guard.code_for(&played_thing(episode));
    format!("{PLAY_PATH}{episode}/{code}?edition={edition}")
}

fn played_thing(episode: EpisodeId) -> String {
    format!("{PLAY_PATH}{episode}")
}

/// The page's own path of what a player's link leads to, without the first slash; none if the link is not ours.
fn played_path(guard: &TokenGuard, link: &str) -> Option<String> {
    let (path, query) = link.split_once('?').unwrap_or((link, ""));
    let (number, code) = path.split_once('/')?;
    let episode = EpisodeId(number.parse().ok()?);
    let is_ours = guard.is_code_for(&played_thing(episode), code);
    is_ours.then(|| format!("podcasts/episode/{episode}/played-audio?{query}"))
}

struct PageServer {
    guard: Arc<TokenGuard>,
    pages: Router,
    entries: Arc<EntryCodes>,
}

impl PageServer {
    async fn speak(&self, stream: TcpStream, place: &ConnectionPlace) {
        let _ = stream.set_nodelay(true);
        let answer = service_fn(async |request: Request<Incoming>| {
            let mut answer = match self.admit(request, place).await {
                Ok(request) => self.ask(request).await,
                Err(refusal) => *refusal,
            };
            for (name, value) in HEADERS {
                let value = HeaderValue::from_static(value);
                answer.headers_mut().insert(name, value);
            }
            Ok::<_, Infallible>(answer)
        });
        let spoken = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .serve_connection(TokioIo::new(stream), answer)
            .await;
        if let Err(error) = spoken {
            tracing::debug!(%error, "a browser's connection ended");
        }
    }

    /// The request with the path behind the token, if it may be answered.
    async fn admit(
        &self,
        mut request: Request<Incoming>,
        place: &ConnectionPlace,
    ) -> Result<Request<Incoming>, Box<Response>> {
        let refuse = |status: StatusCode, text: &'static str| {
            Err(Box::new((status, format!("{text}\n")).into_response()))
        };
        if !self.guard.is_ours(request.headers()) {
            let text =
                "this link works only on this machine, by its address 127.0.0.1 or localhost";
            return refuse(StatusCode::MISDIRECTED_REQUEST, text);
        }
        let is_safe = matches!(*request.method(), Method::GET | Method::HEAD);
        if !self
            .guard
            .is_same_origin(request.headers())
            .unwrap_or(is_safe)
        {
            return refuse(
                StatusCode::FORBIDDEN,
                "only this page's own forms are heard",
            );
        }
        let path = request.uri().path_and_query().map_or("", |p| p.as_str());
        let code = path
            .strip_prefix('/')
            .and_then(|path| path.strip_prefix(ENTRY_PATH));
        if let Some(code) = code.filter(|_| *request.method() == Method::GET) {
            if self.entries.redeem(code) {
                let page = format!("{}/", self.guard.prefix());
                return Err(Box::new(Redirect::to(&page).into_response()));
            }
            let text =
                "this link worked once and only for a minute; `cedos page --open` opens another";
            return refuse(StatusCode::GONE, text);
        }
        let played = path
            .strip_prefix('/')
            .and_then(|path| path.strip_prefix(PLAY_PATH))
            .and_then(|link| played_path(&self.guard, link));
        if played.is_some() && !is_safe {
            return refuse(StatusCode::METHOD_NOT_ALLOWED, "a player only reads");
        }
        let behind_token = || self.guard.behind_token(path).map(str::to_owned);
        let Some(rest) = played.or_else(behind_token) else {
            let text = "there is no such page here; `cedos page` prints its link";
            return refuse(StatusCode::NOT_FOUND, text);
        };
        let Ok(uri) = Uri::try_from(format!("/{rest}")) else {
            return refuse(StatusCode::BAD_REQUEST, "that is no path");
        };
        *request.uri_mut() = uri;
        place.prove().await;
        Ok(request)
    }

    async fn ask(&self, request: Request<Incoming>) -> Response {
        let pages = TowerToHyperService::new(self.pages.clone());
        match pages.call(request.map(Body::new)).await {
            Ok(answer) => answer,
            Err(never) => match never {},
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_players_link_leads_to_its_episode_and_nowhere_else() {
        let listener = TokenListener::bind("secret".into(), 0).await;
        let listener = listener.expect("a port");
        let guard = listener.guard();
        let link = player_path(guard, EpisodeId(17), "e1");
        let link = link.strip_prefix(PLAY_PATH).expect("its beginning");
        let to = played_path(guard, link);
        assert_eq!(
            to.as_deref(),
            Some("podcasts/episode/17/played-audio?edition=e1")
        );
        let (_, code) = link.split_once('/').expect("a code");
        let code = code.trim_end_matches("?edition=e1");
        for other in [
            format!("18/{code}"),
            format!("17/{code}/"),
            format!("17/../18/{code}"),
            "17/".to_owned(),
            "17".to_owned(),
        ] {
            assert_eq!(played_path(guard, &other), None, "{other}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_link_that_works_once_works_once_and_for_a_minute() {
        let codes = EntryCodes::default();
        let (first, late) = (codes.create(), codes.create());
        assert!(!codes.redeem(""));
        assert!(codes.redeem(&first));
        assert!(!codes.redeem(&first));
        tokio::time::advance(ENTRY_WITHIN).await;
        assert!(!codes.redeem(&late));
        let many: Vec<String> = (0..=ENTRIES_MAX).map(|_| codes.create()).collect();
        assert!(!codes.redeem(&many[0]));
        assert!(codes.redeem(&many[ENTRIES_MAX]));
    }
}
