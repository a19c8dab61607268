//! Who may sync: user name and password, and sessions of apps that logged in.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use base64::Engine as _;
use http::HeaderMap;
use http::header::{AUTHORIZATION, COOKIE};
use tokio::time::Instant;

use super::super::super::state::lock;
use crate::stream::store::random_name;

/// The name of the user: there is one.
pub(super) const USER: &str = "cedos";

/// The cookie of a session, as gpodder.net names it.
pub(super) const COOKIE_NAME: &str = "sessionid";

/// Sessions at once; the newest replaces the oldest.
const SESSIONS_MAX: usize = 256; // a guess: apps that forget their cookie get one with each request

/// How long a session lasts. An app logs in again, or sends the password with each request.
const SESSION_WITHIN: Duration = Duration::from_secs(24 * 3_600); // a guess

/// The password, and the sessions of apps that showed it.
pub(super) struct AppSessions {
    password: String,
    open: Mutex<VecDeque<(String, Instant)>>,
}

impl AppSessions {
    /// No sessions, for this password.
    pub(super) fn new(password: String) -> AppSessions {
        AppSessions {
            password,
            open: Mutex::default(),
        }
    }

    /// Whether a request has the password, or the cookie of a session.
    pub(super) fn admits(&self, headers: &HeaderMap) -> bool {
        self.has_password(headers) || self.has_session(headers)
    }

    /// Whether a request has user name and password (RFC 7617).
    pub(super) fn has_password(&self, headers: &HeaderMap) -> bool {
        let mut values = headers.get_all(AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return false;
        };
        let pair = value.to_str().ok().and_then(|value| {
            let (scheme, pair) = value.split_once(' ')?;
            let engine = base64::engine::general_purpose::STANDARD;
            let is_basic = scheme.eq_ignore_ascii_case("basic");
            is_basic.then(|| engine.decode(pair.trim()).ok())?
        });
        let expected = format!("{USER}:{}", self.password);
        pair.is_some_and(|pair| verify_slices_are_equal(&pair, expected.as_bytes()).is_ok())
    }

    /// The cookie of a new session.
    pub(super) fn begin(&self) -> String {
        let name = random_name();
        let mut open = lock(&self.open);
        if open.len() >= SESSIONS_MAX {
            open.pop_front();
        }
        open.push_back((name.clone(), Instant::now() + SESSION_WITHIN));
        format!("{COOKIE_NAME}={name}; Path=/; HttpOnly; SameSite=Strict")
    }

    /// Ends the session of a request.
    pub(super) fn end(&self, headers: &HeaderMap) {
        if let Some(name) = cookie(headers) {
            lock(&self.open).retain(|(open, _)| open != name);
        }
    }

    /// Whether a request has the cookie of a session.
    pub(super) fn has_session(&self, headers: &HeaderMap) -> bool {
        let now = Instant::now();
        let mut open = lock(&self.open);
        open.retain(|(_, until)| now < *until);
        let is_open = |name: &str| {
            let mut open = open.iter();
            open.any(|(open, _)| verify_slices_are_equal(open.as_bytes(), name.as_bytes()).is_ok())
        };
        cookie(headers).is_some_and(is_open)
    }
}

fn cookie(headers: &HeaderMap) -> Option<&str> {
    let values = headers.get_all(COOKIE).iter();
    let pairs = values.filter_map(|value| value.to_str().ok());
    let mut pairs = pairs.flat_map(|value| value.split(';'));
    pairs.find_map(|pair| pair.trim().strip_prefix(COOKIE_NAME)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn with(name: http::HeaderName, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_str(value).expect("a value"));
        headers
    }

    #[tokio::test(start_paused = true)]
    async fn the_password_or_a_session_is_needed() {
        let sessions = AppSessions::new("hush".to_owned());
        let basic = |pair: &str| {
            let pair = base64::engine::general_purpose::STANDARD.encode(pair);
            sessions.admits(&with(AUTHORIZATION, &format!("Basic {pair}")))
        };
        assert!(basic("cedos:hush"));
        for wrong in ["cedos:hus", "cedos:", "other:hush", "cedos:hush\n", ""] {
            assert!(!basic(wrong), "{wrong}");
        }
        assert!(!sessions.admits(&HeaderMap::new()));
        assert!(!sessions.admits(&with(AUTHORIZATION, "Bearer hush")));
        let cookie = sessions.begin();
        let cookie = with(
            COOKIE,
            &format!("a=b; {}", cookie.split(';').next().expect("a pair")),
        );
        assert!(sessions.admits(&cookie));
        assert!(!sessions.admits(&with(COOKIE, "sessionid=")));
        sessions.end(&cookie);
        assert!(!sessions.admits(&cookie));
        let late = sessions.begin();
        let late = with(COOKIE, late.split(';').next().expect("a pair"));
        tokio::time::advance(SESSION_WITHIN).await;
        assert!(!sessions.admits(&late));
    }
}
