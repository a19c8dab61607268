//! Files of one directory as HTTP answers: whole or from any offset, named by a strong validator.
//!
//! Nothing outside the directory is served, whatever a path or a link in it says: the file that a path
//! leads to is looked up first and then judged by where it really lies.

use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http::header::{
    ACCEPT_RANGES, ALLOW, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_RANGE, RANGE,
};
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};

/// Bytes read from a file at once.
const PIECE_BYTES: u64 = 256 * 1024;

/// The body of an answer.
pub type FileBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// A directory that is served.
#[derive(Debug)]
pub struct FileService {
    root: PathBuf,
}

/// Which bytes of a file were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileRange {
    Whole,
    /// From the first up to, not including, the second.
    Range(u64, u64),
    Unsatisfiable,
}

impl FileService {
    /// What lies below `root`.
    ///
    /// # Errors
    /// There is no such directory.
    pub fn new(root: &Path) -> std::io::Result<FileService> {
        let root = root.canonicalize()?;
        match root.is_dir() {
            true => Ok(FileService { root }),
            false => Err(std::io::ErrorKind::NotADirectory.into()),
        }
    }

    /// The answer to one request.
    pub async fn answer<B>(&self, request: &Request<B>) -> Response<FileBody> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut answer = words(
                StatusCode::METHOD_NOT_ALLOWED,
                "only GET and HEAD are served here\n",
            );
            answer
                .headers_mut()
                .insert(ALLOW, http::HeaderValue::from_static("GET, HEAD"));
            return answer;
        }
        match self.file(request).await {
            Ok(answer) => answer,
            Err(_) => words(StatusCode::NOT_FOUND, "there is no such file here\n"),
        }
    }

    async fn file<B>(&self, request: &Request<B>) -> std::io::Result<Response<FileBody>> {
        let path = self.found(request.uri().path())?;
        let mut file = File::open(&path).await?;
        let about = file.metadata().await?;
        let length = about.len();
        let changed = about.modified()?.duration_since(UNIX_EPOCH);
        let changed = changed.map_or(0, |since| since.as_nanos());
        let validator = format!("\"{length:x}-{changed:x}\"");
        let text = |name| request.headers().get(name).and_then(|v| v.to_str().ok());
        let same = text(IF_RANGE).is_none_or(|asked| asked == validator);
        let part = match text(RANGE).filter(|_| same) {
            Some(range) => part(range, length),
            None => FileRange::Whole,
        };
        let mut answer = Response::builder()
            .header(ETAG, &validator)
            .header(ACCEPT_RANGES, "bytes")
            .header(CONTENT_TYPE, "application/octet-stream");
        let (from, to) = match part {
            FileRange::Whole => (0, length),
            FileRange::Range(from, to) => {
                let range = format!("bytes {from}-{}/{length}", to - 1);
                answer = answer
                    .status(StatusCode::PARTIAL_CONTENT)
                    .header(CONTENT_RANGE, range);
                (from, to)
            }
            FileRange::Unsatisfiable => {
                answer = answer
                    .status(StatusCode::RANGE_NOT_SATISFIABLE)
                    .header(CONTENT_RANGE, format!("bytes */{length}"));
                (0, 0)
            }
        };
        answer = answer.header(CONTENT_LENGTH, to - from);
        let head_only = request.method() == Method::HEAD;
        let body = if head_only || from == to {
            empty()
        } else {
            file.seek(SeekFrom::Start(from)).await?;
            bytes_of(file, to - from)
        };
        answer.body(body).map_err(std::io::Error::other)
    }

    /// The file that the path of a URL names.
    fn found(&self, path: &str) -> std::io::Result<PathBuf> {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let name = percent_decoded(path).ok_or_else(missing)?;
        let file = self
            .root
            .join(name.trim_start_matches('/'))
            .canonicalize()?;
        let inside = file.starts_with(&self.root) && file.is_file();
        inside.then_some(file).ok_or_else(missing)
    }
}

/// Reads `bytes=a-b`, `bytes=a-` and `bytes=-n` (RFC 9110 §14.1.2); of what it cannot read, and of
/// several ranges, nothing comes but the whole.
fn part(range: &str, length: u64) -> FileRange {
    let Some((first, last)) = range.strip_prefix("bytes=").and_then(|r| r.split_once('-')) else {
        return FileRange::Whole;
    };
    let (from, to) = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(from), Ok(last)) if from <= last => (from, last.saturating_add(1).min(length)),
        (Ok(from), Err(_)) if last.is_empty() => (from, length),
        (Err(_), Ok(n)) if first.is_empty() => (length.saturating_sub(n), length),
        _ => return FileRange::Whole,
    };
    if from < to {
        FileRange::Range(from, to)
    } else {
        FileRange::Unsatisfiable
    }
}

fn percent_decoded(path: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        rest = more;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let mut byte = [0];
        hex::decode_to_slice(rest.get(..2)?, &mut byte).ok()?;
        bytes.push(byte[0]);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}

fn bytes_of(file: File, length: u64) -> FileBody {
    let pieces = stream::try_unfold((file, length), |(mut file, left)| async move {
        if left == 0 {
            return Ok(None);
        }
        let mut piece = vec![0; left.min(PIECE_BYTES) as usize];
        // A file that became shorter breaks the answer off: it must not end as if it were whole.
        file.read_exact(&mut piece).await?;
        let left = left - piece.len() as u64;
        Ok(Some((Bytes::from(piece), (file, left))))
    });
    StreamBody::new(pieces.map(|piece| piece.map(Frame::data))).boxed_unsync()
}

fn empty() -> FileBody {
    Full::default()
        .map_err(|never| match never {})
        .boxed_unsync()
}

fn words(status: StatusCode, text: &'static str) -> Response<FileBody> {
    let body = Full::new(Bytes::from_static(text.as_bytes()));
    let mut answer = Response::new(body.map_err(|never| match never {}).boxed_unsync());
    *answer.status_mut() = status;
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_rfc_9110_has_them() {
        for (text, expected) in [
            ("bytes=0-9", FileRange::Range(0, 10)),
            ("bytes=90-", FileRange::Range(90, 100)),
            ("bytes=-10", FileRange::Range(90, 100)),
            ("bytes=90-1000", FileRange::Range(90, 100)),
            ("bytes=-1000", FileRange::Range(0, 100)),
            ("bytes=100-", FileRange::Unsatisfiable),
            ("bytes=9-5", FileRange::Whole),
            ("bytes=0-1,5-6", FileRange::Whole),
            ("items=0-1", FileRange::Whole),
        ] {
            assert_eq!(part(text, 100), expected, "{text}");
        }
    }

    #[tokio::test]
    async fn nothing_outside_the_directory_is_served() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("served");
        std::fs::create_dir_all(root.join("below")).unwrap();
        std::fs::write(root.join("below/a b.txt"), "inside").unwrap();
        std::fs::write(place.path().join("secret"), "outside").unwrap();
        std::os::unix::fs::symlink("../secret", root.join("link")).unwrap();
        let files = FileService::new(&root).unwrap();
        let status = async |path: &str| {
            let request = Request::builder().uri(path).body(()).unwrap();
            let answer = files.answer(&request).await;
            (
                answer.status(),
                answer.into_body().collect().await.unwrap().to_bytes(),
            )
        };
        let (ok, body) = status("/below/a%20b.txt").await;
        assert_eq!((ok, &body[..]), (StatusCode::OK, &b"inside"[..]));
        for path in [
            "/",
            "/below",
            "/link",
            "/../secret",
            "/below/%2e%2e/%2e%2e/secret",
            "/%zz",
            "/no",
        ] {
            assert_eq!(status(path).await.0, StatusCode::NOT_FOUND, "{path}");
        }
    }
}
