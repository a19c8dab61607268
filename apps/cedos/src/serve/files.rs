//! Files of one directory as HTTP answers: whole or from any offset, named by a strong validator.
//!
//! Nothing outside the directory is served, whatever a path or a link in it says, and whoever swaps a
//! file for a link meanwhile: the kernel resolves the path beneath the directory and opens the file
//! in one call (openat2). A link counts where it leads to a file in the directory by a relative path.
//! tower-http's `ServeDir` and its like open by path and cannot promise that.
//!
//! A path with a name that begins with a dot is not found unless hidden files are served.

use std::fs::OpenOptions;
use std::io::SeekFrom;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path};
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use cedos_http::{ByteRanges, RangeDecision};
use futures_util::stream::{self, StreamExt};
use http::header::{
    ACCEPT_RANGES, ALLOW, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_RANGE, RANGE,
};
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use percent_encoding::percent_decode_str;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};

/// Bytes read from a file at once.
const PIECE_BYTES: u64 = 256 * 1024;

/// Attempts to resolve a path while directories are renamed.
const OPEN_RETRIES_MAX: usize = 16; // a guess

/// The body of an answer.
pub type FileBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// Whether files are served whose path has a name that begins with a dot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HiddenFiles {
    /// Hidden files are not found.
    Refused,
    /// Hidden files are served like others.
    Served,
}

/// A directory that is served.
#[derive(Debug)]
pub struct FileService {
    root: OwnedFd,
    hidden: HiddenFiles,
}

impl FileService {
    /// What lies below `root`.
    ///
    /// # Errors
    /// There is no such directory, or the kernel is older than Linux 5.6.
    pub fn new(root: &Path, hidden: HiddenFiles) -> std::io::Result<FileService> {
        let directory = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_PATH)
            .open(root)?;
        let service = FileService {
            root: directory.into(),
            hidden,
        };
        // A kernel without openat2 is noticed now rather than by the first client.
        match service.open_beneath(Path::new(".")) {
            Err(Errno::ENOSYS) => Err(std::io::Error::other(
                "the kernel cannot confine paths to a directory (openat2, Linux 5.6)",
            )),
            _ => Ok(service),
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
        let mut file = File::from_std(self.open(request.uri().path())?);
        let about = file.metadata().await?;
        if !about.is_file() {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        let length = about.len();
        let changed = about.modified()?.duration_since(UNIX_EPOCH);
        let changed = changed.map_or(0, |since| since.as_nanos());
        let validator = format!("\"{length:x}-{changed:x}\"");
        let text = |name| request.headers().get(name).and_then(|v| v.to_str().ok());
        let same = text(IF_RANGE).is_none_or(|asked| asked == validator);
        let ranges = text(RANGE).filter(|_| same).and_then(ByteRanges::parse);
        let part = ranges.map_or(RangeDecision::Whole, |ranges| ranges.decide(Some(length)));
        let mut answer = Response::builder()
            .header(ETAG, &validator)
            .header(ACCEPT_RANGES, "bytes")
            .header(CONTENT_TYPE, "application/octet-stream");
        let (from, to) = match part {
            RangeDecision::Parts(parts) if parts.len() == 1 => {
                let (from, to) = (parts[0].start, parts[0].end);
                let range = format!("bytes {from}-{}/{length}", to - 1);
                answer = answer
                    .status(StatusCode::PARTIAL_CONTENT)
                    .header(CONTENT_RANGE, range);
                (from, to)
            }
            RangeDecision::Unsatisfiable => {
                answer = answer
                    .status(StatusCode::RANGE_NOT_SATISFIABLE)
                    .header(CONTENT_RANGE, format!("bytes */{length}"));
                (0, 0)
            }
            // Several parts are answered with the whole, which RFC 9110 §14.2 allows.
            _ => (0, length),
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

    /// The file that the path of a URL names; not always a regular one.
    fn open(&self, path: &str) -> std::io::Result<std::fs::File> {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let name = percent_decode_str(path)
            .decode_utf8()
            .map_err(|_| missing())?;
        let name = Path::new(name.trim_start_matches('/'));
        let is_hidden = |part: Component| matches!(part, Component::Normal(name) if name.as_encoded_bytes().starts_with(b"."));
        if self.hidden == HiddenFiles::Refused && name.components().any(is_hidden) {
            return Err(missing());
        }
        Ok(std::fs::File::from(self.open_beneath(name)?))
    }

    fn open_beneath(&self, name: &Path) -> nix::Result<OwnedFd> {
        // Without O_NONBLOCK the opening of a pipe waits for who writes to it.
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS;
        let how = OpenHow::new().flags(flags).resolve(resolve);
        for _ in 0..OPEN_RETRIES_MAX {
            match openat2(&self.root, name, how) {
                // A rename meanwhile: the kernel could not rule out that `..` led outside.
                Err(Errno::EAGAIN) => {}
                opened => return opened,
            }
        }
        Err(Errno::EAGAIN)
    }
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
    use std::os::unix::fs::symlink;

    use super::*;

    /// What a GET of this path is answered with.
    async fn get(files: &FileService, path: &str) -> (StatusCode, Bytes) {
        let request = Request::builder().uri(path).body(()).unwrap();
        let answer = files.answer(&request).await;
        let status = answer.status();
        (
            status,
            answer.into_body().collect().await.unwrap().to_bytes(),
        )
    }

    #[tokio::test]
    async fn nothing_outside_the_directory_is_served() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("served");
        std::fs::create_dir_all(root.join("below")).unwrap();
        std::fs::write(root.join("below/a b.txt"), "inside").unwrap();
        std::fs::write(place.path().join("secret"), "outside").unwrap();
        symlink("../secret", root.join("link")).unwrap();
        symlink(place.path().join("secret"), root.join("absolute")).unwrap();
        symlink("below/a b.txt", root.join("inner")).unwrap();
        symlink(place.path(), root.join("up")).unwrap();
        nix::unistd::mkfifo(&root.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let files = FileService::new(&root, HiddenFiles::Served).unwrap();
        for path in ["/below/a%20b.txt", "/inner"] {
            let (status, body) = get(&files, path).await;
            assert_eq!((status, &body[..]), (StatusCode::OK, &b"inside"[..]));
        }
        for path in [
            "/",
            "/below",
            "/link",
            "/absolute",
            "/up/secret",
            "/pipe",
            "/../secret",
            "/below/../../secret",
            "/below/%2e%2e/%2e%2e/secret",
            "/below%2f..%2f..%2fsecret",
            "/below/a%20b.txt%00",
            "/%zz",
            "/%ff",
            "/no",
        ] {
            assert_eq!(get(&files, path).await.0, StatusCode::NOT_FOUND, "{path}");
        }
    }

    #[tokio::test]
    async fn hidden_files_are_served_only_where_that_is_asked_for() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join(".git")).unwrap();
        std::fs::write(root.path().join(".git/config"), "hidden").unwrap();
        std::fs::write(root.path().join(".env"), "hidden").unwrap();
        let refused = FileService::new(root.path(), HiddenFiles::Refused).unwrap();
        let served = FileService::new(root.path(), HiddenFiles::Served).unwrap();
        for path in ["/.env", "/%2eenv", "/.git/config", "/./.git/config"] {
            let (status, _) = get(&refused, path).await;
            assert_eq!(status, StatusCode::NOT_FOUND, "{path}");
            assert_eq!(&get(&served, path).await.1[..], b"hidden", "{path}");
        }
    }

    #[tokio::test]
    async fn a_file_swapped_for_a_link_while_it_is_asked_for_leaks_nothing() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("served");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(place.path().join("secret"), "outside").unwrap();
        std::fs::write(root.join("plain"), "inside").unwrap();
        let files = FileService::new(&root, HiddenFiles::Refused).unwrap();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let name = root.join("file");
                let next = root.join("next");
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    symlink("../secret", &next).unwrap();
                    std::fs::rename(&next, &name).unwrap();
                    std::fs::hard_link(root.join("plain"), &next).unwrap();
                    std::fs::rename(&next, &name).unwrap();
                }
            });
            let (mut found, mut refused) = (0, 0);
            // Both have been seen: the swapping did happen meanwhile.
            while found < 500 || refused < 500 {
                match files.open("/file") {
                    Ok(file) => {
                        assert_eq!(std::io::read_to_string(file).unwrap(), "inside");
                        found += 1;
                    }
                    Err(_) => refused += 1,
                }
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    #[tokio::test]
    async fn parts_and_conditions_are_answered() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("file"), "0123456789").unwrap();
        let files = FileService::new(root.path(), HiddenFiles::Refused).unwrap();
        let ask = async |range: &str, if_range: Option<&str>| {
            let mut request = Request::builder().uri("/file").header(RANGE, range);
            if let Some(validator) = if_range {
                request = request.header(IF_RANGE, validator);
            }
            let answer = files.answer(&request.body(()).unwrap()).await;
            let (head, body) = answer.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let field = |name| {
                head.headers
                    .get(name)
                    .map(|v| v.to_str().unwrap().to_owned())
            };
            (
                head.status.as_u16(),
                field(CONTENT_RANGE),
                field(ETAG),
                body,
            )
        };
        let (status, range, tag, body) = ask("bytes=2-4", None).await;
        assert_eq!((status, &body[..]), (206, &b"234"[..]));
        assert_eq!(range.as_deref(), Some("bytes 2-4/10"));
        let (status, _, _, body) = ask("bytes=-3", tag.as_deref()).await;
        assert_eq!((status, &body[..]), (206, &b"789"[..]));
        let (status, range, _, body) = ask("bytes=2-4", Some("\"other\"")).await;
        assert_eq!((status, range, &body[..]), (200, None, &b"0123456789"[..]));
        let (status, range, _, body) = ask("bytes=0-1,5-6", None).await;
        assert_eq!((status, range, body.len()), (200, None, 10));
        let (status, range, _, body) = ask("bytes=10-", None).await;
        assert_eq!((status, body.len()), (416, 0));
        assert_eq!(range.as_deref(), Some("bytes */10"));
    }
}
