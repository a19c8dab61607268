//! What `cedos put` sends: a request head and a file behind it, readable again at any offset, and
//! the reading of the answer.
//!
//! ```text
//!  offset 0            head            length
//!  │ PUT https://… HTTP/1.1 ⏎ … ⏎⏎ │ the file's bytes │ end of our direction
//! ```
//!
//! A flow that sleeps keeps a cursor into this, not a copy of it.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::SystemTime;

use bytes::Bytes;
use d2tp_driver::Source;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sha2::{Digest, Sha256};
use url::Url;

use super::outcome::{Exit, Failure};

/// Header fields of an answer.
const HEADERS_MAX: usize = 128;
/// Bytes digested at once.
const DIGEST_BYTES: usize = 1024 * 1024;
/// Bytes of an answer that are kept: its head and what a person would read of its body.
pub const ANSWER_BYTES_MAX: usize = 128 * 1024;

/// A file on its way to an origin.
pub struct Parcel {
    /// Its name, for people.
    pub path: PathBuf,
    /// Its bytes.
    pub length: u64,
    /// Their digest when the upload began, in hex.
    pub sha256: String,
    /// POST instead of PUT: never sent twice once the origin may have it.
    pub post: bool,
    file: File,
    modified: Option<SystemTime>,
    head: Vec<u8>,
    gate: Mutex<Gate>,
}

/// Whether the flow may draw.
#[derive(Default)]
struct Gate {
    shut: bool,
    waiting: Option<Waker>,
}

impl Parcel {
    /// Opens and digests the file, which takes seconds for a gigabyte, unless it is stopped; `progress`
    /// hears how many bytes of how many are read.
    pub fn open(
        path: &Path,
        url: &Url,
        post: bool,
        content_type: Option<&str>,
        stopped: impl Fn() -> bool,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Parcel, Failure> {
        let refuse = |error: io::Error| {
            Failure::error(format!("{} cannot be read: {error}", path.display()))
        };
        let mut file = File::open(path).map_err(refuse)?;
        let about = file.metadata().map_err(refuse)?;
        if !about.is_file() {
            let text = format!(
                "{} is no ordinary file; its size must be known",
                path.display()
            );
            return Err(Failure::error(text));
        }
        let (mut digest, mut length) = (Sha256::new(), 0);
        let mut piece = vec![0; DIGEST_BYTES];
        loop {
            if stopped() {
                return Err(Failure {
                    exit: Exit::Cancelled,
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
             Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        );
        Ok(Parcel {
            path: path.to_owned(),
            length,
            sha256: hex::encode(digest.finalize()),
            post,
            modified: about.modified().ok(),
            file,
            head: head.into_bytes(),
            gate: Mutex::default(),
        })
    }

    /// Lets nothing more be drawn, because others go first, or lets it go on.
    pub fn hold_back(&self, held: bool) {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        gate.shut = held;
        if let Some(waiting) = gate.waiting.take_if(|_| !held) {
            waiting.wake();
        }
    }

    /// Bytes before the file's first.
    pub fn head_bytes(&self) -> u64 {
        self.head.len() as u64
    }

    /// The file is not what was digested, so what was sent is neither.
    pub fn check_unchanged(&self) -> Result<(), Failure> {
        let now = self.file.metadata().ok();
        let same =
            now.is_some_and(|now| now.len() == self.length && now.modified().ok() == self.modified);
        if same {
            return Ok(());
        }
        let path = self.path.display();
        Err(Failure::error(format!(
            "{path} was changed while it was being sent; send it again when it is finished"
        )))
    }
}

/// A parcel as a flow draws from it.
pub struct Drawn(pub Arc<Parcel>);

impl Source for Drawn {
    fn poll_read_at(
        &self,
        cx: &mut Context<'_>,
        offset: u64,
        max: usize,
    ) -> Poll<io::Result<Bytes>> {
        let parcel = &*self.0;
        {
            let mut gate = parcel.gate.lock().unwrap_or_else(PoisonError::into_inner);
            if gate.shut {
                gate.waiting = Some(cx.waker().clone());
                return Poll::Pending;
            }
        }
        let head = parcel.head_bytes();
        if let Some(rest) = parcel.head.get(offset as usize..).filter(|_| offset < head) {
            let piece = &rest[..rest.len().min(max)];
            return Poll::Ready(Ok(Bytes::copy_from_slice(piece)));
        }
        let at = offset - head;
        let want = parcel.length.saturating_sub(at).min(max as u64) as usize;
        let mut piece = vec![0; want];
        // A file that became shorter ends the flow with a reset: the origin never gets a part.
        Poll::Ready(
            parcel
                .file
                .read_exact_at(&mut piece, at)
                .map(|()| piece.into()),
        )
    }
}

/// An answer, as far as it was kept.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its header.
    pub headers: HeaderMap,
    /// Its body, or the beginning of it.
    pub words: String,
}

impl Answer {
    /// Reads what a flow brought, which has ended cleanly after `total` bytes; interim answers are
    /// passed over.
    pub fn read(kept: &[u8], total: u64) -> Result<Answer, &'static str> {
        let mut at = 0;
        loop {
            let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
            let mut parsed = httparse::Response::new(&mut fields);
            let head = match parsed.parse(&kept[at..]) {
                Ok(httparse::Status::Complete(head)) => head,
                Ok(httparse::Status::Partial) => return Err("the answer broke off"),
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
                return Err("the answer is not as long as it says");
            }
            return Ok(Answer {
                status,
                headers,
                words: String::from_utf8_lossy(&kept[at..]).into_owned(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_parcel_is_its_head_and_then_its_file_wherever_it_is_read() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"0123456789").unwrap();
        let url = "http://h:81/a?b#c".parse().unwrap();
        let parcel =
            Arc::new(Parcel::open(file.path(), &url, false, None, || false, |_, _| ()).unwrap());
        let read = |offset, max| {
            let waker = std::task::Waker::noop();
            let mut cx = Context::from_waker(waker);
            match Drawn(parcel.clone()).poll_read_at(&mut cx, offset, max) {
                Poll::Ready(read) => read,
                Poll::Pending => panic!("a file never waits"),
            }
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
        assert_eq!(parcel.head_bytes() + 10, text.len() as u64);
        assert!(parcel.check_unchanged().is_ok());
        let stopped = Parcel::open(file.path(), &url, false, None, || true, |_, _| ());
        assert_eq!(stopped.err().unwrap().exit, Exit::Cancelled);
        file.as_file().set_len(5).unwrap();
        assert!(read(parcel.head_bytes(), 100).is_err());
        assert!(parcel.check_unchanged().is_err());
    }

    #[test]
    fn an_answer_is_read_past_interim_ones_and_must_be_whole() {
        let text =
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok";
        let answer = Answer::read(text, text.len() as u64).unwrap();
        assert_eq!((answer.status.as_u16(), answer.words.as_str()), (201, "ok"));
        for cut in 0..text.len() {
            assert!(
                Answer::read(&text[..cut], cut as u64).is_err(),
                "cut at {cut}"
            );
        }
        assert!(Answer::read(b"hello", 5).is_err());
    }
}
