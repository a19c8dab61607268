//! Files of one directory as HTTP answers: whole or from any offset, named by a strong validator.
//!
//! No file outside the directory is served, regardless of paths and symbolic links, even if a file
//! is replaced by a link meanwhile: the kernel resolves the path beneath the directory and opens
//! the file in one call (openat2). A symbolic link is followed if it leads to a file in the
//! directory by a relative path. tower-http's `ServeDir` and similar crates open by path and cannot
//! guarantee that.
//!
//! A path with a name that begins with a dot is neither found nor listed unless hidden files are served.

use std::fs::OpenOptions;
use std::io::SeekFrom;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path};
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use cedos_http::{ByteRanges, RangeDecision};
use futures_util::stream::{self, StreamExt};
use http::header::{
    ACCEPT, ACCEPT_RANGES, ALLOW, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_SECURITY_POLICY,
    CONTENT_TYPE, ETAG, IF_NONE_MATCH, IF_RANGE, LAST_MODIFIED, LOCATION, RANGE, VARY,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use percent_encoding::percent_decode_str;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};

use super::listing::{DirectoryList, LISTED_MAX, ListedEntry};

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

/// Whether directories are answered with a list of what is in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectoryAccess {
    /// Directories are not found.
    Refused,
    /// Requests for directories are answered with a listing.
    Listed,
}

/// How the validators of files (`ETag`) are made. Web servers that serve the same directory are to make the same, so that a
/// download may go on here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EtagFormat {
    /// Size, and time of the last change in nanoseconds
    #[default]
    Nanoseconds,
    /// nginx: time of the last change in seconds, and size
    Nginx,
    /// Apache httpd: size, and time of the last change in microseconds
    Apache,
}

impl EtagFormat {
    fn etag(self, length: u64, changed: Duration) -> String {
        match self {
            EtagFormat::Nanoseconds => format!("\"{length:x}-{:x}\"", changed.as_nanos()),
            EtagFormat::Nginx => format!("\"{:x}-{length:x}\"", changed.as_secs()),
            EtagFormat::Apache => format!("\"{length:x}-{:x}\"", changed.as_micros()),
        }
    }
}

/// A directory that is served.
#[derive(Debug)]
pub struct FileService {
    root: OwnedFd,
    hidden: HiddenFiles,
    directories: DirectoryAccess,
    etags: EtagFormat,
}

impl FileService {
    /// What lies below `root`.
    ///
    /// # Errors
    /// There is no such directory, or the kernel is older than Linux 5.6.
    pub fn new(
        root: &Path,
        hidden: HiddenFiles,
        directories: DirectoryAccess,
    ) -> std::io::Result<FileService> {
        let directory = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_PATH)
            .open(root)?;
        let service = FileService {
            root: directory.into(),
            hidden,
            directories,
            etags: EtagFormat::default(),
        };
        // A kernel without openat2 is noticed now rather than by the first client.
        match service.open_beneath(Path::new(".")) {
            Err(Errno::ENOSYS) => Err(std::io::Error::other(
                "the kernel cannot confine paths to a directory (openat2, Linux 5.6)",
            )),
            _ => Ok(service),
        }
    }

    /// Makes validators of this format.
    pub fn with_etags(self, etags: EtagFormat) -> FileService {
        FileService { etags, ..self }
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
        if about.is_dir() && self.directories == DirectoryAccess::Listed {
            return self.directory(request, file.into_std().await).await;
        }
        if !about.is_file() {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        let length = about.len();
        let changed = about.modified()?.duration_since(UNIX_EPOCH);
        let validator = self.etags.etag(length, changed.unwrap_or_default());
        let modified = httpdate::fmt_http_date(about.modified()?.max(UNIX_EPOCH));
        let text = |name| request.headers().get(name).and_then(|v| v.to_str().ok());
        if is_named(request.headers(), &validator) {
            let answer = Response::builder()
                .status(StatusCode::NOT_MODIFIED)
                .header(ETAG, &validator)
                .header(LAST_MODIFIED, modified);
            return answer.body(empty()).map_err(std::io::Error::other);
        }
        let same = text(IF_RANGE).is_none_or(|asked| asked == validator);
        let ranges = text(RANGE).filter(|_| same).and_then(ByteRanges::parse);
        let part = ranges.map_or(RangeDecision::Whole, |ranges| ranges.decide(Some(length)));
        let mut answer = Response::builder()
            .header(ETAG, &validator)
            .header(LAST_MODIFIED, modified)
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

    /// The answer to a request for a directory: its list, or the way to the name with a slash, to which
    /// the links in the list are relative.
    async fn directory<B>(
        &self,
        request: &Request<B>,
        directory: std::fs::File,
    ) -> std::io::Result<Response<FileBody>> {
        let path = request.uri().path();
        if !path.ends_with('/') {
            let last = path.rsplit('/').next().unwrap_or_default();
            let answer = Response::builder()
                .status(StatusCode::MOVED_PERMANENTLY)
                .header(LOCATION, format!("./{last}/"))
                .header(CONTENT_LENGTH, 0);
            return answer.body(empty()).map_err(std::io::Error::other);
        }
        let accepted = request.headers().get(ACCEPT);
        let accepted = accepted.and_then(|value| value.to_str().ok());
        let as_json = accepted.is_some_and(|types| types.contains("application/json"));
        let (path, service) = (decoded(path)?, self.try_clone()?);
        // Reading many entries takes the disk's time.
        let reading = tokio::task::spawn_blocking(move || service.list(&directory, path));
        let list = reading.await.map_err(std::io::Error::other)??;
        let (kind, text) = match as_json {
            true => ("application/json", list.to_json()),
            false => ("text/html; charset=utf-8", list.to_html()),
        };
        let answer = Response::builder()
            .header(CONTENT_TYPE, kind)
            .header(CONTENT_LENGTH, text.len())
            .header(VARY, ACCEPT)
            .header(X_CONTENT_TYPE_OPTIONS, "nosniff")
            .header(CONTENT_SECURITY_POLICY, "default-src 'none'");
        let body = match request.method() == Method::HEAD {
            true => empty(),
            false => whole(text.into()),
        };
        answer.body(body).map_err(std::io::Error::other)
    }

    fn try_clone(&self) -> std::io::Result<FileService> {
        Ok(FileService {
            root: self.root.try_clone()?,
            ..*self
        })
    }

    /// Lists an open directory: the names that a client may ask for.
    fn list(&self, directory: &std::fs::File, path: String) -> std::io::Result<DirectoryList> {
        // The directory that was resolved, although its name may mean another one by now.
        let names = std::fs::read_dir(format!("/proc/self/fd/{}", directory.as_raw_fd()))?;
        let beneath = Path::new(path.trim_start_matches('/')).to_owned();
        let mut entries = Vec::new();
        let mut is_complete = true;
        for name in names {
            // A name in another encoding cannot be asked for.
            let Ok(name) = name?.file_name().into_string() else {
                continue;
            };
            if self.hidden == HiddenFiles::Refused && name.starts_with('.') {
                continue;
            }
            // A link that leads outside is not served, so it is not listed.
            let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
            let opened = match self.open_beneath_with(&beneath.join(&name), flags) {
                Ok(opened) => opened,
                Err(Errno::ENOENT | Errno::EXDEV | Errno::ELOOP | Errno::EACCES) => continue,
                Err(_) => {
                    // Too many open files, for example: it may be there.
                    is_complete = false;
                    continue;
                }
            };
            let about = std::fs::File::from(opened).metadata()?;
            if !about.is_file() && !about.is_dir() {
                continue;
            }
            if entries.len() == LISTED_MAX {
                is_complete = false;
                break;
            }
            entries.push(ListedEntry {
                name,
                bytes: about.is_file().then_some(about.len()),
                modified: about.modified().ok(),
            });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(DirectoryList {
            path,
            entries,
            is_complete,
        })
    }

    /// The file that the path of a URL names; not always a regular one.
    fn open(&self, path: &str) -> std::io::Result<std::fs::File> {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let name = decoded(path)?;
        let name = match name.trim_start_matches('/') {
            "" => Path::new("."),
            name => Path::new(name),
        };
        let is_hidden = |part: Component| matches!(part, Component::Normal(name) if name.as_encoded_bytes().starts_with(b"."));
        if self.hidden == HiddenFiles::Refused && name.components().any(is_hidden) {
            return Err(missing());
        }
        Ok(std::fs::File::from(self.open_beneath(name)?))
    }

    fn open_beneath(&self, name: &Path) -> nix::Result<OwnedFd> {
        // Without O_NONBLOCK the opening of a pipe waits for who writes to it.
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        self.open_beneath_with(name, flags)
    }

    fn open_beneath_with(&self, name: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
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

/// Whether `If-None-Match` names this version of a file (RFC 9110 §13.1.2).
fn is_named(fields: &HeaderMap, validator: &str) -> bool {
    let lists = fields.get_all(IF_NONE_MATCH).iter();
    let mut tags = lists.flat_map(|list| list.to_str().unwrap_or_default().split(','));
    tags.any(
        |tag| matches!(tag.trim(), tag if tag == "*" || tag.trim_start_matches("W/") == validator),
    )
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

/// The path of a URL without its percent-encoding.
fn decoded(path: &str) -> std::io::Result<String> {
    let decoded = percent_decode_str(path).decode_utf8();
    let decoded = decoded.map_err(|_| std::io::Error::from(std::io::ErrorKind::NotFound))?;
    Ok(decoded.into_owned())
}

fn whole(text: Bytes) -> FileBody {
    Full::new(text)
        .map_err(|never| match never {})
        .boxed_unsync()
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

    /// What serves the files below `root`, and no lists.
    fn service(root: &Path, hidden: HiddenFiles) -> FileService {
        FileService::new(root, hidden, DirectoryAccess::Refused).unwrap()
    }

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

    #[test]
    fn validators_are_made_as_the_web_server_makes_them() {
        let changed = Duration::new(0x6563_2a01, 1_234_567);
        for (format, etag) in [
            (EtagFormat::Nanoseconds, "\"1e8480-179b2855bed1a087\""),
            (EtagFormat::Nginx, "\"65632a01-1e8480\""),
            (EtagFormat::Apache, "\"1e8480-60b0c5fadc712\""),
        ] {
            assert_eq!(format.etag(2_000_000, changed), etag, "{format:?}");
        }
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
        let files = service(&root, HiddenFiles::Served);
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
        let refused = service(root.path(), HiddenFiles::Refused);
        let served = service(root.path(), HiddenFiles::Served);
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
        let files = service(&root, HiddenFiles::Refused);
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
        let files = service(root.path(), HiddenFiles::Refused);
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

    #[tokio::test]
    async fn a_client_that_has_the_file_hears_that_it_did_not_change() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        std::fs::write(&path, "0123456789").unwrap();
        let files = service(root.path(), HiddenFiles::Refused);
        let ask = async |tags: &str| {
            let request = Request::builder().uri("/file").header(IF_NONE_MATCH, tags);
            let answer = files.answer(&request.body(()).unwrap()).await;
            let (head, body) = answer.into_parts();
            let tag = head.headers[ETAG].to_str().unwrap().to_owned();
            let length = body.collect().await.unwrap().to_bytes().len();
            (head.status.as_u16(), length, tag)
        };
        let (status, length, tag) = ask("\"other\"").await;
        assert_eq!((status, length), (200, 10));
        for known in [
            tag.clone(),
            format!("W/{tag}"),
            format!("\"other\", {tag}"),
            "*".to_owned(),
        ] {
            assert_eq!(ask(&known).await, (304, 0, tag.clone()), "{known}");
        }
        std::fs::write(&path, "01234567890").unwrap();
        let (status, length, _) = ask(&tag).await;
        assert_eq!((status, length), (200, 11));
    }

    #[tokio::test]
    async fn a_directory_is_listed_with_what_is_served_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("served");
        std::fs::create_dir_all(root.join("below/deep")).unwrap();
        std::fs::write(place.path().join("secret"), "outside").unwrap();
        for (name, text) in [
            ("b c.txt", "12345"),
            (".env", "hidden"),
            ("<i>\u{202e}&\"", ""),
        ] {
            std::fs::write(root.join("below").join(name), text).unwrap();
        }
        symlink("../../secret", root.join("below/outside")).unwrap();
        symlink("b c.txt", root.join("below/inside")).unwrap();
        nix::unistd::mkfifo(&root.join("below/pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let listed = |hidden| FileService::new(&root, hidden, DirectoryAccess::Listed).unwrap();
        let files = listed(HiddenFiles::Refused);
        let ask = async |files: &FileService, path: &str| {
            let request = Request::builder()
                .uri(path)
                .header(ACCEPT, "application/json");
            let answer = files.answer(&request.body(()).unwrap()).await;
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            serde_json::from_slice::<serde_json::Value>(&body).unwrap()
        };
        let list = ask(&files, "/below/").await;
        let names = |list: &serde_json::Value| -> Vec<String> {
            let entries = list["entries"].as_array().unwrap().iter();
            entries
                .map(|entry| entry["name"].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(
            names(&list),
            ["<i>\u{202e}&\"", "b c.txt", "deep", "inside"]
        );
        let entry = &list["entries"][1];
        assert_eq!(
            (&entry["type"], &entry["bytes"]),
            (&"file".into(), &5.into())
        );
        let modified: jiff::Timestamp = entry["modified"].as_str().unwrap().parse().unwrap();
        assert!(
            modified
                .duration_since(jiff::Timestamp::now())
                .as_secs()
                .abs()
                < 60
        );
        assert_eq!(list["entries"][2]["type"], "directory");
        assert_eq!(names(&ask(&files, "/").await), ["below"]);
        let hidden = ask(&listed(HiddenFiles::Served), "/below/").await;
        assert!(names(&hidden).contains(&".env".to_owned()), "{hidden}");

        let (status, page) = get(&files, "/below/").await;
        let page = std::str::from_utf8(&page).unwrap();
        assert_eq!(status, StatusCode::OK);
        assert!(
            page.contains("<a href=\"b%20c%2Etxt\">b c.txt</a>"),
            "{page}"
        );
        assert!(page.contains("&lt;i&gt;\u{fffd}&amp;&quot;</a>"), "{page}");
        assert!(
            !page.contains("<i>") && !page.contains('\u{202e}'),
            "{page}"
        );
        let request = Request::builder().uri("/below").body(()).unwrap();
        let answer = files.answer(&request).await;
        assert_eq!(answer.status(), StatusCode::MOVED_PERMANENTLY);
        assert_eq!(answer.headers()[LOCATION], "./below/");
        for path in ["/../", "/below/outside/", "/no/", "/.git/"] {
            assert_eq!(get(&files, path).await.0, StatusCode::NOT_FOUND, "{path}");
        }
    }
}
