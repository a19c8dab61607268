//! `cedos prox --copies`: a bucket of an S3 server in this process has the bytes of copies and uploads, and is read when the disk
//! has them no more; when it fails, what runs goes on.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, cut, object, proper, reply,
};
use cedos_lab_rig::program::ended;
use cedos_lab_rig::wait::{until, within};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use nix::sys::signal::Signal;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::durable_proxy::{DurableProxy, TOKEN, command, get, head_of, offset, rest_of};

/// Bytes of a part in the bucket.
pub(crate) const PART: usize = 8 << 20;

/// What an S3 server does with requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum S3Fault {
    Well,
    /// The server answers every request with 503.
    Unavailable,
    /// The server refuses to store anything.
    Full,
    /// The server reads requests and never answers.
    Silent,
    /// The server stores objects whatever the conditions of requests say.
    Unconditional,
}

/// An S3 server on a folder, with one bucket.
pub(crate) struct S3Server {
    pub(crate) folder: tempfile::TempDir,
    endpoint: String,
    mood: Arc<AtomicU8>,
}

/// A server of the bucket that nodes and proxies use here.
pub(crate) trait BucketServer {
    /// The folder in which the server has its buckets.
    fn root(&self) -> PathBuf;

    /// The URL of the server.
    fn endpoint(&self) -> String;

    /// The variables by which programs find the server.
    fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ENDPOINT_URL", self.endpoint()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "key-id".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ]
    }

    /// The files of the objects of copies.
    fn objects(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let copies = self.root().join("bucket/prox/a");
        for copy in std::fs::read_dir(copies).into_iter().flatten().flatten() {
            let parts = std::fs::read_dir(copy.path())
                .into_iter()
                .flatten()
                .flatten();
            files.extend(parts.map(|part| part.path()));
        }
        files
    }

    /// The lengths of the objects of copies, without the one byte of [`DurableProxy::until_recorded`]: a proxy that is
    /// killed before it has removed that object leaves it for a day.
    fn parts(&self) -> Vec<u64> {
        let files = self.objects().into_iter();
        let mut lengths: Vec<u64> = files
            .filter_map(|file| Some(file.metadata().ok()?.len()))
            .filter(|length| *length > 1)
            .collect();
        lengths.sort_unstable();
        lengths
    }
}

/// The service of a server with its buckets in this folder.
pub(crate) fn s3_service(root: &Path) -> S3Service {
    let files = s3s_fs::FileSystem::new(root).expect("a store");
    let mut builder = S3ServiceBuilder::new(files);
    builder.set_auth(SimpleAuth::from_single("key-id", "secret"));
    builder.build()
}

pub(crate) type S3Body = UnsyncBoxBody<bytes::Bytes, Box<dyn std::error::Error + Send + Sync>>;

fn refusal(status: u16, code: &str) -> http::Response<S3Body> {
    let text = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
    let body = Full::from(text).map_err(|never| match never {});
    let answer = http::Response::builder().status(status);
    answer.body(body.boxed_unsync()).expect("an answer")
}

/// The server's answer to a request.
pub(crate) async fn s3_answer(
    service: &S3Service,
    request: http::Request<Incoming>,
) -> http::Response<S3Body> {
    match service.call(request.map(s3s::Body::from)).await {
        Ok(answer) => answer.map(|body| body.map_err(Into::into).boxed_unsync()),
        Err(_) => refusal(500, "InternalError"),
    }
}

impl S3Server {
    pub(crate) async fn start() -> S3Server {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("bucket")).expect("a bucket");
        let service = s3_service(folder.path());
        // A signature covers the conditions: only one that checks none can ignore them.
        let files = s3s_fs::FileSystem::new(folder.path()).expect("a store");
        let unsigned = S3ServiceBuilder::new(files).build();
        let mood = Arc::new(AtomicU8::new(S3Fault::Well as u8));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("its address"));
        let served = mood.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (service, mood) = (service.clone(), served.clone());
                let unsigned = unsigned.clone();
                let answer = service_fn(move |mut request: http::Request<Incoming>| {
                    let (mut service, mood) = (service.clone(), mood.clone());
                    let unsigned = unsigned.clone();
                    async move {
                        let mood = mood.load(Ordering::Relaxed);
                        let is = |which: S3Fault| mood == which as u8;
                        if is(S3Fault::Silent) {
                            std::future::pending::<()>().await;
                        }
                        if is(S3Fault::Unavailable) {
                            return Ok::<_, Infallible>(refusal(503, "SlowDown"));
                        }
                        if is(S3Fault::Full) && request.method() == http::Method::PUT {
                            return Ok(refusal(507, "InsufficientStorage"));
                        }
                        if is(S3Fault::Unconditional) {
                            for name in ["if-none-match", "if-match", "authorization"] {
                                request.headers_mut().remove(name);
                            }
                            service = unsigned;
                        }
                        Ok(s3_answer(&service, request).await)
                    }
                });
                let served = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), answer);
                tokio::spawn(async move { drop(served.await) });
            }
        });
        S3Server {
            folder,
            endpoint,
            mood,
        }
    }

    pub(crate) fn set(&self, mood: S3Fault) {
        self.mood.store(mood as u8, Ordering::Relaxed);
    }
}

impl BucketServer for S3Server {
    fn root(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    fn endpoint(&self) -> String {
        self.endpoint.clone()
    }
}

pub(crate) const PLACE: [&str; 2] = ["--copies", "s3://bucket/prox/a"];

fn remove_files(proxy: &DurableProxy) {
    for file in proxy.files() {
        std::fs::remove_file(file).expect("removed");
    }
}

#[tokio::test]
async fn a_copy_whose_disk_is_gone_comes_from_the_bucket() {
    let server = S3Server::start().await;
    let mut proxy = DurableProxy::start_with(server.environment(), &PLACE).await;
    let body = object(2 * PART + 1_000, 9);
    let served = body.clone();
    // No validator: nothing but the copy has the rest of these bytes.
    let origin = ScriptedOrigin::start(move |_| {
        let fields = [("Cache-Control", "private")];
        OriginReply(reply("200 OK", &fields, &served), ReplyEnd::Close)
    })
    .await;
    let url = origin.url("/");
    let mut stream = proxy.send(get(&url, "")).await;
    let head = head_of(&mut stream).await;
    let tag = head
        .lines()
        .find_map(|line| line.strip_prefix("etag: "))
        .expect("a tag");
    let mut first = vec![0; 100_000];
    within(stream.read_exact(&mut first)).await.expect("bytes");
    until("all parts are in the bucket", || {
        server.parts() == [1_000, PART as u64, PART as u64]
    })
    .await;
    stream.set_zero_linger().expect("a reset at the end");
    drop(stream);
    until_kept(&proxy, "retained_copies").await;
    proxy.end(Signal::SIGTERM).await;
    remove_files(&proxy);
    proxy.start_again(&PLACE).await;
    let fields = format!("Range: bytes=100000-\r\nIf-Range: {tag}\r\n");
    let rest = proxy.get(&url, &fields).await;
    assert_eq!(rest.status, 206, "{}", rest.head);
    assert!([first, rest.body].concat() == body);
    assert_eq!(origin.requests().len(), 1);
}

async fn until_kept(proxy: &DurableProxy, what: &str) {
    cedos_lab_rig::wait::until_async("the proxy keeps it", async || {
        (proxy.status().await[what] == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_rest_of_a_growing_copy_is_fetched_from_the_origin() {
    let server = S3Server::start().await;
    let mut proxy = DurableProxy::start_with(server.environment(), &PLACE).await;
    let body = object(PART + 3_000_000, 4);
    let served = body.clone();
    let origin = ScriptedOrigin::start(move |asked: &OriginRequest| match asked.count {
        0 => OriginReply(
            cut(proper(asked, &served, "\"v1\""), PART + 1_000_000),
            ReplyEnd::Silence,
        ),
        _ => OriginReply(proper(asked, &served, "\"v1\""), ReplyEnd::Close),
    })
    .await;
    let url = origin.url("/");
    let mut stream = proxy.send(get(&url, "Cookie: a=b\r\n")).await;
    head_of(&mut stream).await;
    let mut first = vec![0; 100_000];
    within(stream.read_exact(&mut first)).await.expect("bytes");
    until("a part is in the bucket", || {
        server.parts() == [PART as u64]
    })
    .await;
    stream.set_zero_linger().expect("a reset at the end");
    drop(stream);
    until_kept(&proxy, "retained_copies").await;
    proxy.until_recorded().await;
    proxy.end(Signal::SIGKILL).await;
    remove_files(&proxy);
    proxy.start_again(&PLACE).await;
    let fields = "Cookie: a=b\r\nRange: bytes=100000-\r\nIf-Range: \"v1\"\r\n";
    let rest = proxy.get(&url, fields).await;
    assert_eq!(rest.status, 206, "{}", rest.head);
    assert!([first, rest.body].concat() == body);
    let asked = origin.requests();
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[1].range_from(), Some(PART));
    assert_eq!(asked[1].header("if-range"), Some("\"v1\""));
}

#[tokio::test]
async fn an_upload_whose_disk_is_gone_goes_on_after_its_parts_in_the_bucket() {
    let server = S3Server::start().await;
    let mut proxy = DurableProxy::start_with(server.environment(), &PLACE).await;
    let body = object(2 * PART + 500_000, 8);
    let origin = ScriptedOrigin::play({
        let body = body.clone();
        move |request, mut stream| {
            let body = body.clone();
            async move {
                let same = request.body(&mut stream).await == Some(body);
                let status = if same {
                    "201 Created"
                } else {
                    "400 Bad Request"
                };
                let _ = stream.write_all(&reply(status, &[], b"")).await;
            }
        }
    })
    .await;
    let head = format!(
        "PUT {} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\nExpect: 100-continue\r\nCedos-Upload: {TOKEN}\r\n\r\n",
        origin.url("/a"),
        body.len()
    );
    let mut stream = proxy.send(&head).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream
        .write_all(&body[..PART + 200_000])
        .await
        .expect("sent");
    until("a part is in the bucket", || {
        server.parts() == [PART as u64]
    })
    .await;
    proxy.until_recorded().await;
    proxy.end(Signal::SIGKILL).await;
    remove_files(&proxy);
    proxy.start_again(&PLACE).await;
    let mut stream = proxy.send(&head).await;
    assert_eq!(offset(&mut stream).await, PART);
    stream.write_all(&body[PART..]).await.expect("sent");
    assert_eq!(rest_of(stream).await.status, 201);
    // Its objects go with it.
    until("the bucket is empty", || server.parts().is_empty()).await;
}

#[tokio::test]
async fn a_bucket_that_fails_delays_only_itself() {
    for mood in [S3Fault::Unavailable, S3Fault::Full, S3Fault::Silent] {
        let server = S3Server::start().await;
        let proxy = DurableProxy::start_with(server.environment(), &PLACE).await;
        let origin = ScriptedOrigin::start(|_| {
            let fields = [("Cache-Control", "max-age=600")];
            OriginReply(
                reply("200 OK", &fields, &object(300_000, 1)),
                ReplyEnd::Close,
            )
        })
        .await;
        server.set(mood);
        for path in ["/a", "/b"] {
            assert!(proxy.get(&origin.url(path), "").await.body == object(300_000, 1));
        }
        // A copy waits once its file is whole, which its readers do not wait for.
        until_status(&proxy, "both copies wait for the bucket", |status| {
            status["bucket"]["waiting_copies"] == 2
        })
        .await;
        if mood == S3Fault::Silent {
            continue; // It is given up after its time, which no test waits for.
        }
        until("the log says it", || {
            proxy.log().contains("the bucket of copies fails")
        })
        .await;
        assert!(proxy.status().await["bucket"]["failing"].is_string());
        assert_eq!(server.parts(), Vec::<u64>::new());
        server.set(S3Fault::Well);
        until("both are in the bucket", || {
            server.parts() == [300_000, 300_000]
        })
        .await;
        until("the log says it", || proxy.log().contains("works again")).await;
        assert_eq!(proxy.log().matches("the bucket of copies fails").count(), 1);
        let status = proxy.status().await;
        assert_eq!(status["bucket"]["waiting_copies"], 0, "{status}");
        assert!(status["bucket"]["failing"].is_null(), "{status}");
    }
}

#[tokio::test]
async fn old_objects_without_a_note_are_removed_and_young_ones_stay() {
    let server = S3Server::start().await;
    let two_days_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(48 * 3600);
    for (id, length, is_old) in [(1u64, 11u64, true), (2, 22, false)] {
        let copy = server
            .folder
            .path()
            .join(format!("bucket/prox/a/{id:016x}"));
        std::fs::create_dir_all(&copy).expect("a folder");
        let part = std::fs::File::create(copy.join("00000000")).expect("an object");
        part.set_len(length).expect("its bytes");
        if is_old {
            part.set_modified(two_days_ago).expect("its time");
        }
    }
    let mut proxy = DurableProxy::start_with(server.environment(), &PLACE).await;
    let origin = ScriptedOrigin::start(|_| {
        let fields = [("Cache-Control", "max-age=600")];
        OriginReply(reply("200 OK", &fields, &[7; 33]), ReplyEnd::Close)
    })
    .await;
    proxy.get(&origin.url("/"), "").await;
    until("the old one is gone, the copy is there", || {
        server.parts() == [22, 33]
    })
    .await;
    // A copy with a note stays, however old its object is.
    proxy.until_recorded().await;
    proxy.end(Signal::SIGTERM).await;
    for object in server.objects() {
        let object = std::fs::File::options()
            .write(true)
            .open(object)
            .expect("open");
        object.set_modified(two_days_ago).expect("its time");
    }
    proxy.start_again(&PLACE).await;
    until("what has no note is gone", || server.parts() == [33]).await;
    assert!(proxy.get(&origin.url("/"), "").await.is_hit());
}

#[tokio::test]
async fn a_bucket_that_cannot_be_used_is_refused_with_the_reason() {
    let server = S3Server::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("prox.toml"), "").expect("written");
    cedos_lab_rig::program::run(folder.path(), &["key", "gen", "-o", "prox.key"]).await;
    let ends = async |environment: &[(&'static str, String)], place: &str, reason: &str| {
        let at = "127.0.0.1:0".parse().expect("an address");
        let mut command = command(folder.path(), at, environment, &["--copies", place]);
        let run = ended(command.spawn().expect("start")).await;
        assert_ne!(run.code, 0);
        assert!(
            run.errors.contains(reason),
            "no `{reason}` in {}",
            run.errors
        );
        assert!(!run.errors.contains("secret"), "{}", run.errors);
    };
    let environment = server.environment();
    ends(&environment, "http://bucket", "s3://BUCKET").await;
    let mut senseless = environment.clone();
    senseless.push(("AWS_SKIP_SIGNATURE", "perhaps".to_owned()));
    ends(&senseless, "s3://bucket/x", "cannot be used").await;
    // Credentials and bodies would go out in clear.
    let mut in_clear = environment.clone();
    in_clear.retain(|(name, _)| *name != "AWS_ALLOW_HTTP");
    ends(&in_clear, "s3://bucket/x", "AWS_ALLOW_HTTP").await;
    server.set(S3Fault::Unconditional);
    ends(&environment, "s3://bucket/x", "ignores If-None-Match").await;
}

#[tokio::test]
async fn a_proxy_whose_bucket_is_away_starts_and_takes_up_what_it_has_later() {
    let server = S3Server::start().await;
    let mut proxy = DurableProxy::start_with(server.environment(), &PLACE).await;
    let body = object(PART + 1_000, 9);
    let served = body.clone();
    // No validator: nothing but the copy has the rest of these bytes.
    let origin = ScriptedOrigin::start(move |_| {
        let fields = [("Cache-Control", "private")];
        OriginReply(reply("200 OK", &fields, &served), ReplyEnd::Close)
    })
    .await;
    let url = origin.url("/");
    let mut stream = proxy.send(get(&url, "")).await;
    let head = head_of(&mut stream).await;
    let tag = head
        .lines()
        .find_map(|line| line.strip_prefix("etag: "))
        .expect("a tag");
    let mut first = vec![0; 100_000];
    within(stream.read_exact(&mut first)).await.expect("bytes");
    stream.set_zero_linger().expect("a reset at the end");
    drop(stream);
    until_kept(&proxy, "retained_copies").await;
    let sink = origin.url("/upload");
    let upload = format!(
        "PUT {sink} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\nExpect: 100-continue\r\nCedos-Upload: {TOKEN}\r\n\r\n",
        body.len()
    );
    let mut stream = proxy.send(&upload).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(&body[..PART + 500]).await.expect("sent");
    until("what is due is in the bucket", || {
        server.parts() == [1_000, PART as u64, PART as u64]
    })
    .await;
    proxy.until_recorded().await;
    proxy.end(Signal::SIGKILL).await;
    remove_files(&proxy);
    server.set(S3Fault::Unavailable);
    proxy.start_again(&PLACE).await;
    let status = proxy.status().await;
    assert!(status["bucket"]["failing"].is_string(), "{status}");
    assert_eq!(proxy.get(&url, "").await.body.len(), body.len());
    // From its beginning it would be another upload.
    assert_eq!(proxy.ask(&upload).await.status, 503);
    // The same at an upgrade, which asks nothing of the bucket before the running process has ended.
    proxy
        .start_again(&["--copies", "s3://bucket/prox/a", "--upgrade"])
        .await;
    assert_eq!(proxy.ask(&upload).await.status, 503);
    server.set(S3Fault::Well);
    until_kept(&proxy, "retained_uploads").await;
    until_kept(&proxy, "retained_copies").await;
    let fields = format!("Range: bytes=100000-\r\nIf-Range: {tag}\r\n");
    let rest = proxy.get(&url, &fields).await;
    assert_eq!(rest.status, 206, "{}", rest.head);
    assert!([first, rest.body].concat() == body);
    let mut stream = proxy.send(&upload).await;
    assert_eq!(offset(&mut stream).await, PART);
    until_status(&proxy, "it works", |status| {
        status["bucket"]["failing"].is_null()
    })
    .await;
}

async fn until_status(proxy: &DurableProxy, what: &str, is: impl Fn(&serde_json::Value) -> bool) {
    cedos_lab_rig::wait::until_async(what, async || is(&proxy.status().await).then_some(())).await;
}

#[tokio::test]
async fn a_bucket_that_refuses_the_keys_or_is_silent_keeps_no_proxy_from_serving() {
    for mood in [S3Fault::Well, S3Fault::Silent] {
        let server = S3Server::start().await;
        server.set(mood);
        let mut environment = server.environment();
        environment[4].1 = "another secret".to_owned();
        let proxy = DurableProxy::start_with(environment, &PLACE).await;
        assert!(proxy.status().await["bucket"]["failing"].is_string());
        let log = proxy.log();
        assert!(log.contains("the bucket of copies fails"), "{log}");
        assert!(!log.contains("another secret"), "{log}");
        proxy.until_recorded().await;
    }
}

#[tokio::test]
async fn a_prefix_of_another_proxy_is_refused_and_what_is_no_copy_there_stays() {
    let server = S3Server::start().await;
    let two_days_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(48 * 3600);
    // The first is a copy without a note, the others are somebody's files below a folder with such a name.
    let names = [
        "0000000000000001/00000000",
        "0000000000000001/00000000.txt",
        "0000000000000001/more/00000000",
        "1/00000000",
    ];
    let path = |name: &str| server.folder.path().join("bucket/prox/a").join(name);
    for name in names {
        std::fs::create_dir_all(path(name).parent().expect("a folder")).expect("a folder");
        let file = std::fs::File::create(path(name)).expect("an object");
        file.set_modified(two_days_ago).expect("its time");
    }
    let mut proxy = DurableProxy::start_with(server.environment(), &PLACE).await;
    until("the copy without a note is gone", || {
        !path(names[0]).exists()
    })
    .await;
    assert!(names[1..].iter().all(|name| path(name).exists()));
    // The same proxy may come again, and no other.
    proxy.restart(Signal::SIGTERM, &PLACE).await;
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("prox.toml"), "").expect("written");
    cedos_lab_rig::program::run(folder.path(), &["key", "gen", "-o", "prox.key"]).await;
    let at = "127.0.0.1:0".parse().expect("an address");
    let mut command = command(folder.path(), at, &server.environment(), &PLACE);
    let run = ended(command.spawn().expect("start")).await;
    assert_ne!(run.code, 0);
    assert!(
        run.errors.contains("is used by the proxy with the key"),
        "{}",
        run.errors
    );
}
