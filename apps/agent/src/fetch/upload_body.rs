//! The data that `cedos put` sends: a request head and a file, readable again at any offset; and
//! the reading of the answer.
//!
//! ```text
//!  offset 0            head            length
//!  │ PUT https://… HTTP/1.1 ⏎ … ⏎⏎ │ the file's bytes │ end of our direction
//! ```
//!
//! A flow that sleeps keeps a cursor into this, not a copy of it. Where the proxy may have a part of the
//! file from an earlier flow, the body waits until it has said which byte is next (104).

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::SystemTime;

use bytes::Bytes;
use d2tp_driver::SendSource;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sha2::{Digest, Sha256};
use url::Url;

use super::outcome::{TransferExit, TransferFailure};
use super::rate_limiter::RateLimiter;
use super::state_directory::state_directory;
use super::upload_ticket::UploadTicket;
pub use super::upload_ticket::new_token;

/// The most header fields of an answer.
const HEADERS_MAX: usize = 128;
/// The size of reads for the digest.
const DIGEST_BYTES: usize = 1024 * 1024;
/// Bytes of an answer that are kept: its head, and as much of its body as a person would read.
pub const ANSWER_BYTES_MAX: usize = 128 * 1024;

/// The size from which the proxy is asked what it has before anything is sent: a round trip, which is
/// short beside a whole body.
const ASKED_FROM_BYTES: u64 = 64 * 1024;

/// A file that is uploaded to an origin.
pub struct UploadBody {
    /// The path of the file, for users.
    pub path: PathBuf,
    /// Size of the file.
    pub length: u64,
    /// The digest of the file when the upload began, in hex.
    pub sha256: String,
    /// Whether the request is a POST: it is never sent twice once the origin may have it.
    pub post: bool,
    file: File,
    modified: Option<SystemTime>,
    /// The head of the request without its last line.
    head: String,
    ticket: UploadTicket,
    gate: Mutex<UploadGate>,
    /// Whether a flow has read the file to its end.
    is_handed_over: AtomicBool,
}

/// Whether the flow may read from the file.
#[derive(Default)]
struct UploadGate {
    shut: bool,
    waiting: Option<Waker>,
}

impl UploadBody {
    /// Opens and digests the file, which takes seconds for a gigabyte, unless it is stopped; `progress`
    /// hears how many bytes of how many are read. `token`: what the proxy knows it by. Without one, a
    /// PUT has a ticket, so that another process goes on with it; a POST may be meant twice.
    pub fn open(
        path: &Path,
        url: &Url,
        post: bool,
        content_type: Option<&str>,
        token: Option<String>,
        stopped: impl Fn() -> bool,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<UploadBody, TransferFailure> {
        let refuse = |error: io::Error| {
            TransferFailure::error(format!("cannot read {}: {error}", path.display()))
        };
        let mut file = File::open(path).map_err(refuse)?;
        let about = file.metadata().map_err(refuse)?;
        if !about.is_file() {
            let what = match about.is_dir() {
                true => "a directory; send one file, such as an archive of it (tar, zip)",
                false => "neither a file nor a directory; give a regular file",
            };
            let text = format!("{} is {what}", path.display());
            return Err(TransferFailure::error(text));
        }
        let (mut digest, mut length) = (Sha256::new(), 0);
        let mut piece = vec![0; DIGEST_BYTES];
        loop {
            if stopped() {
                return Err(TransferFailure {
                    exit: TransferExit::Cancelled,
                    reason: None,
                    text: "stopped before anything was sent".into(),
                });
            }
            let read = file.read(&mut piece).map_err(refuse)?;
            if read == 0 {
                break;
            }
            digest.update(&piece[..read]);
            length += read as u64;
            progress(length, about.len());
        }
        let mut plain = url.clone();
        plain.set_fragment(None);
        let host = &plain[url::Position::BeforeHost..url::Position::AfterPort];
        let method = if post { "POST" } else { "PUT" };
        let kind = content_type.unwrap_or("application/octet-stream");
        let agent = concat!("cedos/", env!("CARGO_PKG_VERSION"));
        let head = format!(
            "{method} {plain} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {agent}\r\n\
             Content-Type: {kind}\r\nContent-Length: {length}\r\n"
        );
        let sha256 = hex::encode(digest.finalize());
        let folder = state_directory().ok().map(|state| state.join("uploads"));
        let ticket = match token {
            // The token is in an order, which another process may take up.
            Some(token) if post => UploadTicket::for_post(token, folder.as_deref()),
            Some(token) => UploadTicket::from_token(token),
            None if post => UploadTicket::from_token(new_token()),
            None => UploadTicket::load_or_create(folder.as_deref(), &format!("{head}{sha256}")),
        };
        let is_handed_over = AtomicBool::new(ticket.is_sent());
        Ok(UploadBody {
            path: path.to_owned(),
            length,
            ticket,
            sha256,
            post,
            modified: about.modified().ok(),
            file,
            head,
            gate: Mutex::default(),
            is_handed_over,
        })
    }

    /// Pauses reading, because other transfers go first, or resumes it.
    pub fn set_held(&self, held: bool) {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        gate.shut = held;
        if let Some(waiting) = gate.waiting.take_if(|_| !held) {
            waiting.wake();
        }
    }

    /// Records that the last byte is given to the transport, before it is.
    fn hand_over(&self) {
        if self.is_handed_over.swap(true, Ordering::SeqCst) {
            return;
        }
        if let Err(error) = self.ticket.set_sent() {
            tracing::warn!(%error, "cannot store that the POST was sent; if this process dies, the next does not know");
        }
    }

    /// Whether every byte of the file was once given to the transport, for a POST by an earlier process, too: from
    /// then on a proxy, and so the origin, may have all of it, although nothing was acknowledged.
    pub fn is_handed_over(&self) -> bool {
        self.is_handed_over.load(Ordering::SeqCst)
    }

    /// Records that the origin has answered, so that the request is not sent again.
    pub fn set_answered(&self) {
        self.ticket.remove();
    }

    /// Fails if the file has changed since its digest was computed.
    pub fn check_unchanged(&self) -> Result<(), TransferFailure> {
        let now = self.file.metadata().ok();
        let same =
            now.is_some_and(|now| now.len() == self.length && now.modified().ok() == self.modified);
        if same {
            return Ok(());
        }
        let path = self.path.display();
        Err(TransferFailure::error(format!(
            "{path} changed while it was being sent; send it again when it is complete"
        )))
    }
}

/// An upload body as the source of a flow.
pub struct UploadSource {
    body: Arc<UploadBody>,
    head: Vec<u8>,
    begun: Mutex<UploadStart>,
    limit: Option<SourceLimit>,
}

/// Ready when the limit lets bytes be read.
type LimitWait = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A limit on the rate at which a source is read.
struct SourceLimit {
    limiter: Arc<RateLimiter>,
    /// The wait for the limit, while there is one.
    waiting: Mutex<Option<LimitWait>>,
}

impl SourceLimit {
    /// Ready when bytes may be read.
    fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = waiting.get_or_insert_with(|| {
            let limiter = self.limiter.clone();
            Box::pin(async move { limiter.ready().await })
        });
        std::task::ready!(wait.as_mut().poll(cx));
        *waiting = None;
        Poll::Ready(())
    }
}

/// The offset in the file at which the flow's body begins; none until the proxy has said it.
#[derive(Default)]
struct UploadStart {
    from: Option<u64>,
    waiting: Option<Waker>,
}

impl UploadSource {
    /// Creates the source of one flow. `again`: the proxy may have some of the file.
    pub fn new(body: Arc<UploadBody>, again: bool) -> UploadSource {
        let asks = again || body.post || body.length >= ASKED_FROM_BYTES;
        let head = match asks {
            true => format!(
                "{}Expect: 100-continue\r\nCedos-Upload: {}\r\n\r\n",
                body.head, body.ticket.token
            ),
            false => format!("{}\r\n", body.head),
        };
        UploadSource {
            head: head.into_bytes(),
            begun: Mutex::new(UploadStart {
                from: (!asks).then_some(0),
                waiting: None,
            }),
            limit: None,
            body,
        }
    }

    /// Limits the rate at which the file is read.
    pub fn limited(mut self, limiter: Option<Arc<RateLimiter>>) -> UploadSource {
        self.limit = limiter.map(|limiter| SourceLimit {
            limiter,
            waiting: Mutex::default(),
        });
        self
    }

    /// Bytes before the first byte of the body.
    pub fn head_bytes(&self) -> u64 {
        self.head.len() as u64
    }

    /// Bytes of the flow, if the proxy has nothing yet.
    pub fn size(&self) -> u64 {
        self.head_bytes() + self.body.length
    }

    /// The offset in the file of the first byte that is sent.
    pub fn from(&self) -> Option<u64> {
        self.begun().from
    }

    /// Sets the offset in the file at which the body begins.
    pub fn start_at(&self, from: u64) {
        let mut begun = self.begun();
        begun.from = Some(from);
        if let Some(waiting) = begun.waiting.take() {
            waiting.wake();
        }
    }

    fn begun(&self) -> std::sync::MutexGuard<'_, UploadStart> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SendSource for UploadSource {
    fn poll_read_at(
        &self,
        cx: &mut Context<'_>,
        offset: u64,
        max: usize,
    ) -> Poll<io::Result<Bytes>> {
        let body = &*self.body;
        {
            let mut gate = body.gate.lock().unwrap_or_else(PoisonError::into_inner);
            if gate.shut {
                gate.waiting = Some(cx.waker().clone());
                return Poll::Pending;
            }
        }
        let head = self.head_bytes();
        if let Some(rest) = self.head.get(offset as usize..).filter(|_| offset < head) {
            let piece = &rest[..rest.len().min(max)];
            // Nothing follows the head of an empty file.
            if body.length == 0 && piece.len() == rest.len() {
                body.hand_over();
            }
            return Poll::Ready(Ok(Bytes::copy_from_slice(piece)));
        }
        let from = {
            let mut begun = self.begun();
            let Some(from) = begun.from else {
                begun.waiting = Some(cx.waker().clone());
                return Poll::Pending;
            };
            from
        };
        let at = from + (offset - head);
        let mut want = body.length.saturating_sub(at).min(max as u64) as usize;
        if let Some(limit) = self.limit.as_ref().filter(|_| want > 0) {
            std::task::ready!(limit.poll_ready(cx));
            want = want.min(limit.limiter.piece_bytes_max());
            limit.limiter.take(want as u64);
        }
        let mut piece = vec![0; want];
        if at + want as u64 >= body.length {
            body.hand_over();
        }
        // A file that became shorter ends the flow with a reset: the origin never gets a part.
        Poll::Ready(
            body.file
                .read_exact_at(&mut piece, at)
                .map(|()| piece.into()),
        )
    }
}

/// An interim response of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterimResponse {
    /// The body is requested from its beginning; the proxy keeps nothing.
    FromStart,
    /// The body is requested from this offset; the proxy keeps what it receives.
    FromOffset(u64),
}

impl InterimResponse {
    /// The first interim response in the bytes received so far.
    pub fn read(kept: &[u8]) -> Option<InterimResponse> {
        let mut at = 0;
        loop {
            let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
            let mut parsed = httparse::Response::new(&mut fields);
            let Ok(httparse::Status::Complete(head)) = parsed.parse(&kept[at..]) else {
                return None;
            };
            at += head;
            match parsed.code {
                Some(100) => return Some(InterimResponse::FromStart),
                Some(104) => {
                    let is_offset = |f: &&mut httparse::Header<'_>| {
                        f.name.eq_ignore_ascii_case("upload-offset")
                    };
                    let field = parsed.headers.iter_mut().find(is_offset);
                    let text = field.and_then(|field| std::str::from_utf8(field.value).ok());
                    if let Some(offset) = text.and_then(|text| text.trim().parse().ok()) {
                        return Some(InterimResponse::FromOffset(offset));
                    }
                }
                Some(101..=199) => {}
                _ => return None,
            }
        }
    }
}

/// The response to an upload, as far as it was kept.
#[derive(Debug)]
pub struct UploadResponse {
    /// Status of the response.
    pub status: StatusCode,
    /// Header fields of the response.
    pub headers: HeaderMap,
    /// The body of the response, or its beginning.
    pub body_text: String,
}

impl UploadResponse {
    /// Parses what a flow received, which ended cleanly after `total` bytes; interim responses are
    /// skipped.
    pub fn read(kept: &[u8], total: u64) -> Result<UploadResponse, &'static str> {
        let mut at = 0;
        loop {
            let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
            let mut parsed = httparse::Response::new(&mut fields);
            let head = match parsed.parse(&kept[at..]) {
                Ok(httparse::Status::Complete(head)) => head,
                Ok(httparse::Status::Partial) => return Err("the answer ended early"),
                Err(_) => return Err("the answer is not HTTP"),
            };
            at += head;
            let status = StatusCode::from_u16(parsed.code.unwrap_or(0))
                .map_err(|_| "the answer has no status")?;
            if status.is_informational() {
                continue;
            }
            let mut headers = HeaderMap::new();
            for field in parsed.headers.iter() {
                let name = HeaderName::from_bytes(field.name.as_bytes());
                let value = HeaderValue::from_bytes(field.value);
                if let (Ok(name), Ok(value)) = (name, value) {
                    headers.append(name, value);
                }
            }
            let declared = headers
                .get(http::header::CONTENT_LENGTH)
                .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
            if declared.is_some_and(|declared| declared != total - at as u64) {
                return Err("the answer is shorter than its Content-Length");
            }
            return Ok(UploadResponse {
                status,
                headers,
                body_text: String::from_utf8_lossy(&kept[at..]).into_owned(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn token() -> Option<String> {
        Some(new_token())
    }

    #[test]
    fn an_upload_is_its_head_and_then_its_file_wherever_it_is_read() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"0123456789").unwrap();
        let url = "http://h:81/a?b#c".parse().unwrap();
        let body = Arc::new(
            UploadBody::open(file.path(), &url, false, None, token(), || false, |_, _| ()).unwrap(),
        );
        let drawn = UploadSource::new(body.clone(), false);
        let read = |offset, max| match read_of(&drawn, offset, max) {
            Poll::Ready(read) => read,
            Poll::Pending => panic!("a file never waits"),
        };
        let mut whole = Vec::new();
        loop {
            let piece = read(whole.len() as u64, 7).unwrap();
            if piece.is_empty() {
                break;
            }
            whole.extend(piece);
        }
        let text = String::from_utf8(whole).unwrap();
        assert!(
            text.starts_with("PUT http://h:81/a?b HTTP/1.1\r\nHost: h:81\r\n"),
            "{text}"
        );
        assert!(
            text.ends_with("Content-Length: 10\r\n\r\n0123456789"),
            "{text}"
        );
        assert_eq!(drawn.size(), text.len() as u64);
        assert!(body.check_unchanged().is_ok());
        let stopped = UploadBody::open(file.path(), &url, false, None, token(), || true, |_, _| ());
        assert_eq!(stopped.err().unwrap().exit, TransferExit::Cancelled);
        file.as_file().set_len(5).unwrap();
        assert!(read(drawn.head_bytes(), 100).is_err());
        assert!(body.check_unchanged().is_err());
    }

    fn read_of(drawn: &UploadSource, offset: u64, max: usize) -> Poll<io::Result<Bytes>> {
        drawn.poll_read_at(
            &mut Context::from_waker(std::task::Waker::noop()),
            offset,
            max,
        )
    }

    #[test]
    fn a_body_that_was_begun_waits_until_it_is_known_what_is_missing() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"0123456789").unwrap();
        let url = "http://h/a".parse().unwrap();
        let open = |post: bool| {
            let token = token().filter(|_| !post);
            let body = UploadBody::open(file.path(), &url, post, None, token, || false, |_, _| ());
            Arc::new(body.unwrap())
        };
        let drawn = UploadSource::new(open(false), true);
        let head = drawn.head_bytes();
        assert!(
            read_of(&drawn, 0, 9999).is_ready(),
            "the head does not wait"
        );
        assert!(read_of(&drawn, head, 100).is_pending());
        drawn.start_at(7);
        match read_of(&drawn, head, 100) {
            Poll::Ready(Ok(rest)) => assert_eq!(&rest[..], b"789"),
            other => panic!("{other:?}"),
        }
        // A POST is one by itself.
        assert_ne!(open(true).ticket.token, open(true).ticket.token);
    }

    #[test]
    fn leave_is_the_first_word_on_how_to_go_on() {
        let read = |text: &str| InterimResponse::read(text.as_bytes());
        assert_eq!(
            read("HTTP/1.1 100 Continue\r\n\r\n"),
            Some(InterimResponse::FromStart)
        );
        let resumed = "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 104 x\r\nUpload-Offset: 12\r\n\r\n";
        assert_eq!(read(resumed), Some(InterimResponse::FromOffset(12)));
        for cut in 0..resumed.len() {
            assert_eq!(read(&resumed[..cut]), None, "cut at {cut}");
        }
        assert_eq!(read("HTTP/1.1 403 Forbidden\r\n\r\n"), None);
        assert_eq!(read("HTTP/1.1 104 x\r\nUpload-Offset: -1\r\n\r\n"), None);
    }

    #[test]
    fn an_answer_is_read_past_interim_ones_and_must_be_whole() {
        let text =
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok";
        let answer = UploadResponse::read(text, text.len() as u64).unwrap();
        assert_eq!(
            (answer.status.as_u16(), answer.body_text.as_str()),
            (201, "ok")
        );
        for cut in 0..text.len() {
            assert!(
                UploadResponse::read(&text[..cut], cut as u64).is_err(),
                "cut at {cut}"
            );
        }
        assert!(UploadResponse::read(b"hello", 5).is_err());
    }
}
