//! What HTTP/2 has otherwise than HTTP/1.1, for proxies that serve both.

use std::sync::atomic::{AtomicUsize, Ordering};

use http::header::{COOKIE, HeaderMap, HeaderValue};

/// What a client of HTTP/2 begins with (RFC 9113 §3.4). No method of HTTP/1.1 begins with its first three bytes.
pub const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Streams that were reset before a server looked at them: more end the connection (CVE-2023-44487).
pub const HTTP2_RESETS_UNSEEN_MAX: usize = 20; // what the crate h2 has without being told

/// Streams that a server reset for errors of the client: more end the connection (CVE-2025-8671).
pub const HTTP2_ERROR_RESETS_MAX: usize = 100; // a guess

/// Streams of one connection at once.
pub const HTTP2_CONN_STREAMS_MAX: u32 = 100; // RFC 9113 §6.5.2: no smaller than 100

/// Requests that a client may cancel before their answers, beyond those that were answered: each costs a proxy more than
/// it costs the client (CVE-2023-44487).
const CANCELS_MAX: usize = 200; // a guess: two times all streams of a page that is left

/// How many requests of a connection were cancelled before their answers, less those that were answered.
#[derive(Debug, Default)]
pub struct CancelCount(AtomicUsize);

impl CancelCount {
    /// Counts a request that its client cancelled before it was answered.
    pub fn on_cancelled(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that was answered.
    pub fn on_answered(&self) {
        let less_one = |count: usize| count.checked_sub(1);
        // None: there is nothing to make up for.
        let _ = (self.0).fetch_update(Ordering::Relaxed, Ordering::Relaxed, less_one);
    }

    /// Whether the connection must end.
    pub fn is_too_many(&self) -> bool {
        self.0.load(Ordering::Relaxed) > CANCELS_MAX
    }
}

/// Makes one field of the pieces of `Cookie`, as HTTP/1.1 has it (RFC 9113 §8.2.3).
pub fn join_cookies(fields: &mut HeaderMap) {
    if fields.get_all(COOKIE).iter().nth(1).is_none() {
        return;
    }
    let pieces: Vec<&[u8]> = (fields.get_all(COOKIE).iter())
        .map(HeaderValue::as_bytes)
        .collect();
    let whole = HeaderValue::from_bytes(&pieces.join(&b"; "[..]));
    fields.insert(COOKIE, whole.expect("pieces of fields are a field"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_cookie_are_one_field_again() {
        let mut fields = HeaderMap::new();
        for piece in ["a=1", "b=2; c=3"] {
            fields.append(COOKIE, HeaderValue::from_static(piece));
        }
        join_cookies(&mut fields);
        let cookies: Vec<_> = fields.get_all(COOKIE).iter().collect();
        assert_eq!(cookies, ["a=1; b=2; c=3"]);
    }

    #[test]
    fn cancels_are_too_many_only_beyond_what_was_answered() {
        let cancels = CancelCount::default();
        cancels.on_answered();
        for _ in 0..CANCELS_MAX {
            cancels.on_cancelled();
        }
        assert!(!cancels.is_too_many());
        cancels.on_cancelled();
        assert!(cancels.is_too_many());
        cancels.on_answered();
        assert!(!cancels.is_too_many());
    }
}
