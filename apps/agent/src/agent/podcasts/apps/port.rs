//! The port for apps: opening it, who may ask, and what is where.
//!
//! | request | answer |
//! |---|---|
//! | of another user's program | none: closed |
//! | `Host` is not this port of this machine | 421: a page of another name, after DNS rebinding |
//! | `Origin` is another page's | 403 |
//! | `/TOKEN/…` | the list, feeds and episodes |
//! | the API of gpodder.net, with user and password | subscriptions and positions |
//! | the API without them | 401 |
//! | anything else | 404 |

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::DefaultBodyLimit;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::{HeaderName, SET_COOKIE, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, Request, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::super::super::state::Agent;
use super::addresses::AppAddresses;
use super::open_port::{AppPort, OpenAppPort, SavedAppPort};
use super::sessions::{AppSessions, USER};
use super::{AppContext, episode_link, feed_pages, gpodder_server};
use crate::fetch::outcome::TransferFailure;
use crate::socket_owner::is_this_users;
use crate::stream::store::random_name;
use crate::token_listener::{ConnectionPlace, TokenGuard, TokenListener};

/// The header fields of every answer: an app is no browser, and a browser shows and runs nothing of it.
const HEADERS: [(HeaderName, &str); 2] = [
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (
        HeaderName::from_static("content-security-policy"),
        "default-src 'none'; sandbox; frame-ancestors 'none'",
    ),
];

impl Agent {
    /// Opens the port for apps if an earlier agent had it open.
    pub(in super::super::super) async fn reopen_apps(self: &Arc<Agent>) {
        if AppPort::is_saved()
            && let Err(failure) = self.open_apps(false).await
        {
            tracing::warn!(
                error = failure.text,
                "cannot open the port for podcast apps"
            );
        }
    }

    /// Opens the port for apps if it is not open; what apps are told of it. `new`: what they were told until now no
    /// longer works.
    ///
    /// # Errors
    /// No port is free, or it cannot be saved.
    pub(in super::super) async fn open_apps(
        self: &Arc<Agent>,
        new: bool,
    ) -> Result<Value, TransferFailure> {
        let mut open = self.podcasts.apps.0.lock().await;
        Ok(self.opened(&mut open, new).await?.access())
    }

    /// What apps are told of the port; none if it is not open.
    pub(in super::super::super) async fn app_access(&self) -> Option<Value> {
        let open = self.podcasts.apps.0.lock().await;
        open.as_ref().map(OpenAppPort::access)
    }

    /// The subscriptions as OPML for apps; none if the port is not open.
    ///
    /// # Errors
    /// The library cannot be read.
    pub(in super::super::super) async fn opml_of_open_apps(
        &self,
    ) -> Result<Option<String>, TransferFailure> {
        let addresses = {
            let open = self.podcasts.apps.0.lock().await;
            open.as_ref().map(|port| port.addresses.clone())
        };
        match addresses {
            Some(addresses) => self.app_opml(&addresses).await.map(Some),
            None => Ok(None),
        }
    }

    /// The subscriptions as OPML for apps; the port is opened if it is not.
    ///
    /// # Errors
    /// As [`Agent::open_apps`].
    pub(in super::super::super) async fn export_for_apps(
        self: &Arc<Agent>,
    ) -> Result<String, TransferFailure> {
        let addresses = {
            let mut open = self.podcasts.apps.0.lock().await;
            self.opened(&mut open, false).await?.addresses.clone()
        };
        self.app_opml(&addresses).await
    }

    /// Closes the port: nothing that apps were told works any longer, also not with the next agent.
    ///
    /// # Errors
    /// The saved port cannot be removed.
    pub(in super::super) async fn close_apps(&self) -> Result<(), TransferFailure> {
        self.podcasts.apps.shut().await;
        SavedAppPort::remove()
            .map_err(|error| TransferFailure::storage("cannot forget the port for apps", &error))
    }

    async fn opened<'o>(
        self: &Arc<Agent>,
        open: &'o mut Option<OpenAppPort>,
        new: bool,
    ) -> Result<&'o OpenAppPort, TransferFailure> {
        if let Some(mut port) = open.take_if(|_| new) {
            port.serving.shutdown().await;
        }
        let port = match open.take() {
            Some(port) => port,
            None => self.bind_apps(new).await.map_err(|error| {
                TransferFailure::error(format!("cannot open a port for apps: {error}"))
            })?,
        };
        Ok(open.insert(port))
    }

    async fn bind_apps(self: &Arc<Agent>, new: bool) -> io::Result<OpenAppPort> {
        let saved = SavedAppPort::load().filter(|_| !new);
        let bound = match saved {
            // Whoever has the port now hears the apps' token and password, so they are worth nothing.
            Some(saved) => match TokenListener::bind(saved.token, saved.port).await {
                Ok(listener) => Some((listener, saved.password)),
                Err(error) => {
                    let port = saved.port;
                    tracing::warn!(port, %error, "apps must be told a new address: `cedos cast apps`");
                    None
                }
            },
            None => None,
        };
        let (listener, password) = match bound {
            Some(bound) => bound,
            None => (TokenListener::bind(random_name(), 0).await?, random_name()),
        };
        let token = listener.guard().prefix().trim_start_matches('/').to_owned();
        let port = listener.address().port();
        let saved = SavedAppPort {
            token: token.clone(),
            port,
            password: password.clone(),
        };
        saved.save()?;
        let addresses = Arc::new(AppAddresses::new(&listener.base(), &token));
        let context = AppContext {
            agent: self.clone(),
            addresses: addresses.clone(),
            sessions: Arc::new(AppSessions::new(password.clone())),
        };
        let server = format!("http://{}", listener.address());
        let mut serving = JoinSet::new();
        serving.spawn_local(serve(listener, context));
        Ok(OpenAppPort {
            server,
            password,
            addresses,
            serving,
        })
    }
}

impl OpenAppPort {
    /// What apps are told of it.
    fn access(&self) -> Value {
        json!({
            "server": self.server,
            "server_for_original_addresses": format!("{}{}", self.server, gpodder_server::ORIGINS_PATH),
            "user": USER,
            "password": self.password,
            "subscriptions": self.addresses.opml(),
        })
    }
}

/// Answers requests until this is dropped, with all its connections.
async fn serve(listener: TokenListener, context: AppContext) {
    let links = Router::new()
        .route("/subscriptions.opml", get(feed_pages::opml))
        .route("/feeds/{id}", get(feed_pages::feed))
        .route("/episodes/{id}/{name}", get(episode_link::episode))
        .with_state(context.clone());
    let api = gpodder_server::routes(&context)
        .layer(DefaultBodyLimit::max(gpodder_server::BODY_BYTES_MAX));
    let server = Arc::new(AppServer {
        guard: listener.guard().clone(),
        sessions: context.sessions,
        links,
        api,
    });
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            (stream, place) = listener.accept() => {
                // Other users can have read the token on an app's command line.
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

struct AppServer {
    guard: Arc<TokenGuard>,
    sessions: Arc<AppSessions>,
    links: Router,
    api: Router,
}

impl AppServer {
    async fn speak(&self, stream: TcpStream, place: &ConnectionPlace) {
        let _ = stream.set_nodelay(true);
        let answer = service_fn(async |request: Request<Incoming>| {
            let mut answer = self.answer(request, place).await;
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
            tracing::debug!(%error, "an app's connection ended");
        }
    }

    async fn answer(&self, mut request: Request<Incoming>, place: &ConnectionPlace) -> Response {
        let headers = request.headers();
        if !self.guard.is_ours(headers) {
            let text = "this address works only on this machine, as 127.0.0.1 or localhost";
            return feed_pages::problem(StatusCode::MISDIRECTED_REQUEST, text);
        }
        if self.guard.is_same_origin(headers) == Some(false) {
            let text = "web pages have no access here";
            return feed_pages::problem(StatusCode::FORBIDDEN, text);
        }
        let path = request.uri().path_and_query().map_or("", |p| p.as_str());
        let pages = match self.guard.behind_token(path) {
            Some(rest) => {
                let Ok(uri) = Uri::try_from(format!("/{rest}")) else {
                    return feed_pages::problem(StatusCode::BAD_REQUEST, "that is no path");
                };
                *request.uri_mut() = uri;
                &self.links
            }
            None if !gpodder_server::is_api(path) => {
                let text = "there is nothing here; `cedos cast apps` prints the addresses for apps";
                return feed_pages::problem(StatusCode::NOT_FOUND, text);
            }
            None if self.sessions.admits(headers) => &self.api,
            None => {
                let text = "another user name or password is needed: `cedos cast apps` prints them";
                let realm = HeaderValue::from_static("Basic realm=\"cedos\", charset=\"UTF-8\"");
                let mut answer = feed_pages::problem(StatusCode::UNAUTHORIZED, text);
                answer.headers_mut().insert(WWW_AUTHENTICATE, realm);
                return answer;
            }
        };
        place.prove().await;
        // Some apps show the password a few times only, and expect a session from then on, as gpodder.net gives it.
        let headers = request.headers();
        let is_without_session =
            self.sessions.has_password(headers) && !self.sessions.has_session(headers);
        let pages = TowerToHyperService::new(pages.clone());
        let mut answer = match pages.call(request.map(Body::new)).await {
            Ok(answer) => answer.into_response(),
            Err(never) => match never {},
        };
        if is_without_session {
            let cookie = HeaderValue::from_str(&self.sessions.begin()).expect("letters");
            answer.headers_mut().insert(SET_COOKIE, cookie);
        }
        answer
    }
}
