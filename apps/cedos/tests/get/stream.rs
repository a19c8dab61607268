//! `cedos url` and `cedos play`: a link that players read while the object still comes, from wherever
//! they like, and that nobody else can.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, OriginStream, ReplyEnd, ScriptedOrigin, proper, reply,
};
use cedos_lab_rig::program::{ProxyProcess, cedos, run};
use cedos_lab_rig::wait::until;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdout};
use tokio::sync::watch;
use tokio::time::timeout;

const LENGTH: usize = 1_000_000;

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|n| (n * 7 + n / 251) as u8).collect()
}

/// An origin that sends an object only as far as it is let.
struct SlowOrigin {
    origin: ScriptedOrigin,
    /// Bytes below this may be sent.
    let_go: watch::Sender<usize>,
    /// Whether the origin does not answer at all.
    is_deaf: Arc<AtomicBool>,
}

impl SlowOrigin {
    /// `told`: it says how long the object is, has a strong name for it, and serves ranges.
    async fn start(object: Vec<u8>, told: bool) -> SlowOrigin {
        let (let_go, allowed) = watch::channel(0);
        let is_deaf = Arc::new(AtomicBool::new(false));
        let (object, deaf) = (Arc::new(object), is_deaf.clone());
        let origin = ScriptedOrigin::play(move |request, stream| {
            let (object, allowed, deaf) = (object.clone(), allowed.clone(), deaf.clone());
            async move {
                if deaf.load(Ordering::Relaxed) {
                    std::future::pending::<()>().await;
                }
                // A player that went away is its own affair.
                let _ = SlowOrigin::answer(&request, stream, &object, allowed, told).await;
            }
        });
        SlowOrigin {
            origin: origin.await,
            let_go,
            is_deaf,
        }
    }

    async fn answer(
        request: &OriginRequest,
        mut stream: OriginStream,
        object: &[u8],
        mut allowed: watch::Receiver<usize>,
        told: bool,
    ) -> std::io::Result<()> {
        let from = request.range_from().filter(|_| told);
        let to = request.range_to().filter(|_| told);
        let length = object.len();
        let (mut at, to) = (from.unwrap_or(0), to.map_or(length, |last| last + 1));
        let words = match (told, from) {
            (true, Some(from)) => format!(
                "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {from}-{}/{length}\r\n\
                 Content-Length: {}\r\nETag: \"v1\"\r\nContent-Type: video/mp4\r\n",
                to - 1,
                to - from
            ),
            (true, None) => format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nETag: \"v1\"\r\n\
                 Content-Type: video/mp4\r\nAccept-Ranges: bytes\r\n"
            ),
            _ => "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n".to_owned(),
        };
        stream.write_all(words.as_bytes()).await?;
        stream.write_all(b"Connection: close\r\n\r\n").await?;
        while at < to {
            let limit = *allowed.wait_for(|limit| *limit > at).await.unwrap();
            let end = limit.min(to);
            if !told {
                let size = format!("{:x}\r\n", end - at);
                stream.write_all(size.as_bytes()).await?;
            }
            stream.write_all(&object[at..end]).await?;
            if !told {
                stream.write_all(b"\r\n").await?;
            }
            at = end;
        }
        if !told {
            stream.write_all(b"0\r\n\r\n").await?;
        }
        stream.shutdown().await
    }

    /// The ranges that were asked for, empty where there was none.
    fn ranges(&self) -> Vec<String> {
        let requests = self.origin.requests().into_iter();
        requests
            .map(|mut request| request.headers.remove("range").unwrap_or_default())
            .collect()
    }

    /// Waits until the requests have been read that were sent so far: connections are accepted in their order.
    async fn read_what_was_sent(&self) {
        for path in ["/first", "/second"] {
            let mut stream = TcpStream::connect(self.origin.address).await.unwrap();
            let head = format!("GET {path} HTTP/1.1\r\nHost: origin\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            until(path, || {
                self.origin
                    .requests()
                    .iter()
                    .any(|request| request.path == path)
            })
            .await;
        }
    }

    fn url(&self) -> String {
        self.origin.url("/film.mp4")
    }
}

/// The first line and the fields of a message, names in small letters.
async fn read_head(stream: &mut TcpStream) -> std::io::Result<(String, HashMap<String, String>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8(head).unwrap();
    let mut lines = head.lines();
    let first = lines.next().unwrap_or_default().to_owned();
    let fields = lines.filter_map(|line| line.split_once(": "));
    let fields = fields.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()));
    Ok((first, fields.collect()))
}

/// A `cedos url` that serves.
struct Served {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    link: String,
}

impl Served {
    async fn start(directory: &Path, url: &str, more: &[&str]) -> Served {
        let arguments = [&["url", "--json", "--store", "store", url][..], more].concat();
        let mut child = cedos(directory, &arguments).spawn().expect("start cedos");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = timeout(PATIENCE, lines.next_line()).await.expect("in time");
        let first = first.unwrap().expect("a link");
        let told: Value = serde_json::from_str(&first).unwrap();
        let link = told["link"].as_str().expect("a link").to_owned();
        Served { child, lines, link }
    }

    fn port(&self) -> &str {
        let rest = self.link.strip_prefix("http://127.0.0.1:").unwrap();
        rest.split('/').next().unwrap()
    }

    /// Ends it; the last it says.
    async fn end(mut self) -> Value {
        let id = self.child.id().unwrap();
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(id as i32),
            nix::sys::signal::Signal::SIGTERM,
        )
        .unwrap();
        let mut last = Value::Null;
        while let Some(line) = timeout(PATIENCE, self.lines.next_line())
            .await
            .unwrap()
            .unwrap()
        {
            last = serde_json::from_str(&line).unwrap();
        }
        timeout(PATIENCE, self.child.wait()).await.unwrap().unwrap();
        last
    }
}

/// An answer of the link.
#[derive(Debug)]
struct StreamReply {
    status: u16,
    fields: HashMap<String, String>,
    body: Vec<u8>,
}

impl StreamReply {
    fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }
}

/// Asks for a path of the link's host, and reads `most` bytes of the answer's body at most.
async fn ask(link: &str, method: &str, fields: &[(&str, &str)], most: usize) -> StreamReply {
    let rest = link.strip_prefix("http://").unwrap();
    let (host, path) = rest.split_once('/').unwrap();
    let mut stream = TcpStream::connect(host).await.unwrap();
    let mut words = format!("{method} /{path} HTTP/1.1\r\nConnection: close\r\n");
    if !fields.iter().any(|(name, _)| *name == "Host") {
        words += &format!("Host: {host}\r\n");
    }
    for (name, value) in fields {
        words += &format!("{name}: {value}\r\n");
    }
    stream.write_all((words + "\r\n").as_bytes()).await.unwrap();
    timeout(PATIENCE, async {
        let (first, fields) = read_head(&mut stream).await.unwrap();
        let status = first.split(' ').nth(1).unwrap().parse().unwrap();
        let mut body = Vec::new();
        let chunked = fields.contains_key("transfer-encoding");
        let mut piece = [0; 16 * 1024];
        while body.len() < most {
            match stream.read(&mut piece).await {
                Ok(0) | Err(_) => break,
                Ok(n) => body.extend_from_slice(&piece[..n]),
            }
        }
        if chunked {
            body = dechunked(&body);
        }
        body.truncate(most);
        StreamReply {
            status,
            fields,
            body,
        }
    })
    .await
    .expect("an answer in time")
}

fn dechunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(end) = bytes.windows(2).position(|two| two == b"\r\n") {
        let size = std::str::from_utf8(&bytes[..end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        bytes = &bytes[end + 2..];
        let size = size.min(bytes.len());
        out.extend_from_slice(&bytes[..size]);
        bytes = bytes.get(size + 2..).unwrap_or_default();
    }
    out
}

#[tokio::test]
async fn every_kind_of_range_is_answered_while_the_object_still_grows() {
    let object = content(LENGTH);
    let home = tempfile::tempdir().unwrap();
    let origin = SlowOrigin::start(object.clone(), true).await;
    origin.let_go.send_replace(400_000);
    let served = Served::start(home.path(), &origin.url(), &[]).await;
    let of = |from: usize, to: usize| format!("bytes {from}-{}/{LENGTH}", to - 1);
    // The first 400 kB are here or coming, and no more.
    let growing = [
        ("bytes=0-9", 0, 10),
        ("bytes=100000-100099", 100_000, 100_100),
        ("bytes=390000-399999", 390_000, 400_000),
    ];
    for (range, from, to) in growing {
        let got = ask(&served.link, "GET", &[("Range", range)], LENGTH).await;
        assert_eq!(
            (got.status, got.field("content-range")),
            (206, &*of(from, to)),
            "{range}"
        );
        assert_eq!(got.field("content-length"), (to - from).to_string());
        assert!(got.body == object[from..to], "{range}");
    }
    let head = ask(&served.link, "HEAD", &[("Range", "bytes=0-9")], LENGTH).await;
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(head.field("content-length"), LENGTH.to_string());
    assert_eq!(head.field("accept-ranges"), "bytes");
    assert_eq!(head.field("content-type"), "video/mp4");
    let tag = head.field("etag").to_owned();
    let past = format!("bytes={LENGTH}-");
    let got = ask(&served.link, "GET", &[("Range", &past)], LENGTH).await;
    assert_eq!(
        (got.status, got.field("content-range")),
        (416, &*format!("bytes */{LENGTH}"))
    );
    // The rest of the table wants bytes that come while it waits.
    let let_go = origin.let_go.clone();
    let growing = tokio::spawn(async move {
        for limit in (400_000..=LENGTH).step_by(50_000) {
            // sleep: an object that grows while it is read is the subject
            tokio::time::sleep(Duration::from_millis(20)).await;
            let_go.send_replace(limit);
        }
    });
    let open = ask(&served.link, "GET", &[("Range", "bytes=350000-")], LENGTH).await;
    assert_eq!(open.field("content-range"), of(350_000, LENGTH));
    assert!(open.body == object[350_000..], "{} bytes", open.body.len());
    growing.await.unwrap();
    let suffix = ask(&served.link, "GET", &[("Range", "bytes=-1000")], LENGTH).await;
    assert_eq!(suffix.field("content-range"), of(LENGTH - 1000, LENGTH));
    assert!(suffix.body == object[LENGTH - 1000..]);
    let whole = ask(&served.link, "GET", &[], LENGTH).await;
    assert_eq!(
        (whole.status, whole.field("content-length")),
        (200, &*LENGTH.to_string())
    );
    assert!(whole.body == object);
    let ours = [("Range", "bytes=5-9"), ("If-Range", &*tag)];
    assert_eq!(
        ask(&served.link, "GET", &ours, LENGTH).await.body,
        object[5..10]
    );
    let other = [("Range", "bytes=5-9"), ("If-Range", "\"other\"")];
    assert_eq!(ask(&served.link, "GET", &other, LENGTH).await.status, 200);
    let two = [("Range", "bytes=0-3, 500-503")];
    let got = ask(&served.link, "GET", &two, LENGTH).await;
    let kind = got.field("content-type").to_owned();
    let boundary = kind
        .strip_prefix("multipart/byteranges; boundary=")
        .expect("parts");
    let mut parts = Vec::new();
    for (from, to) in [(0, 4), (500, 504)] {
        let range = of(from, to);
        let head = format!(
            "\r\n--{boundary}\r\nContent-Type: video/mp4\r\nContent-Range: {range}\r\n\r\n"
        );
        parts.extend_from_slice(head.as_bytes());
        parts.extend_from_slice(&object[from..to]);
    }
    parts.extend_from_slice(format!("\r\n--{boundary}--\r\n").as_bytes());
    assert!(got.body == parts, "{}", String::from_utf8_lossy(&got.body));
    assert_eq!(got.field("content-length"), parts.len().to_string());
    served.end().await;
}

#[tokio::test]
async fn seeking_beyond_what_is_held_fetches_there_and_several_read_at_once() {
    let object = content(LENGTH);
    let home = tempfile::tempdir().unwrap();
    let origin = SlowOrigin::start(object.clone(), true).await;
    origin.let_go.send_replace(100_000);
    let served = Served::start(home.path(), &origin.url(), &[]).await;
    let first = ask(&served.link, "GET", &[], 30_000).await;
    assert!(first.body == object[..30_000]);
    // Only what is asked for from there on may be sent: the fetch must have gone there.
    let far = tokio::spawn({
        let link = served.link.clone();
        async move { ask(&link, "GET", &[("Range", "bytes=900000-900099")], LENGTH).await }
    });
    let there = |range: &String| range.starts_with("bytes=900000-");
    until("it asks there", || origin.ranges().iter().any(there)).await;
    origin.let_go.send_replace(LENGTH);
    assert!(far.await.unwrap().body == object[900_000..900_100]);
    let readers = ["bytes=0-", "bytes=500000-", "bytes=950000-"].map(|range| {
        let link = served.link.clone();
        tokio::spawn(async move { ask(&link, "GET", &[("Range", range)], LENGTH).await.body })
    });
    let mut bodies = Vec::new();
    for reader in readers {
        bodies.push(reader.await.unwrap());
    }
    assert!(
        bodies[0] == object && bodies[1] == object[500_000..] && bodies[2] == object[950_000..]
    );
    served.end().await;
}

#[tokio::test]
async fn an_object_whose_length_nobody_tells_is_read_to_its_end() {
    let object = content(300_000);
    let home = tempfile::tempdir().unwrap();
    let origin = SlowOrigin::start(object.clone(), false).await;
    origin.let_go.send_replace(200_000);
    let served = Served::start(home.path(), &origin.url(), &[]).await;
    let got = ask(&served.link, "GET", &[("Range", "bytes=1000-1999")], LENGTH).await;
    assert_eq!(
        (got.status, got.field("content-range")),
        (206, "bytes 1000-1999/*")
    );
    assert!(got.body == object[1000..2000]);
    let let_go = origin.let_go.clone();
    tokio::spawn(async move {
        // sleep: the reader is to wait for bytes that come later
        tokio::time::sleep(Duration::from_millis(300)).await;
        let_go.send_replace(300_000);
    });
    let got = ask(&served.link, "GET", &[("Range", "bytes=1000-")], LENGTH).await;
    assert_eq!((got.status, got.field("content-length")), (200, ""));
    assert!(got.body == object, "{} bytes", got.body.len());
    let got = ask(&served.link, "GET", &[("Range", "bytes=-10")], LENGTH).await;
    assert_eq!(got.field("content-range"), "bytes 299990-299999/300000");
    served.end().await;
}

#[tokio::test]
async fn a_page_that_rebound_its_name_and_whoever_has_no_token_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let origin = SlowOrigin::start(content(1000), true).await;
    origin.let_go.send_replace(1000);
    let served = Served::start(home.path(), &origin.url(), &[]).await;
    let port = served.port().to_owned();
    let evil = format!("evil.example:{port}");
    let bare = "127.0.0.1".to_owned();
    for host in [&*evil, &*bare, "127.0.0.1:1", "localhost.evil.example", ""] {
        let got = ask(&served.link, "GET", &[("Host", host)], LENGTH).await;
        assert!(got.status == 421 || got.status == 400, "{host}: {got:?}");
        assert!(!got.body.starts_with(&content(10)), "{host}");
    }
    let (host, _) = served.link.rsplit_once('/').unwrap();
    let mut guessed = host.to_owned();
    let last = if guessed.pop() == Some('0') { '1' } else { '0' };
    guessed.push(last);
    for link in [
        format!("{guessed}/film.mp4"),
        format!("http://127.0.0.1:{port}/film.mp4"),
        format!("http://127.0.0.1:{port}//film.mp4"),
        format!("{host}/other.mp4"),
    ] {
        assert_eq!(ask(&link, "GET", &[], LENGTH).await.status, 404, "{link}");
    }
    let origin_field = [("Origin", "http://evil.example")];
    let got = ask(&served.link, "GET", &origin_field, LENGTH).await;
    assert!(
        got.fields
            .keys()
            .all(|name| !name.starts_with("access-control")),
        "{got:?}"
    );
    let got = ask(&served.link, "POST", &[("Content-Length", "0")], LENGTH).await;
    assert_eq!((got.status, got.field("allow")), (405, "GET, HEAD"));
    let local = format!("localhost:{port}");
    assert_eq!(
        ask(&served.link, "GET", &[("Host", &local)], LENGTH)
            .await
            .status,
        200
    );
    served.end().await;
}

#[tokio::test]
async fn the_link_and_what_is_held_outlive_the_process() {
    let object = content(LENGTH);
    let home = tempfile::tempdir().unwrap();
    let origin = SlowOrigin::start(object.clone(), true).await;
    origin.let_go.send_replace(600_000);
    let served = Served::start(home.path(), &origin.url(), &[]).await;
    let link = served.link.clone();
    let got = ask(&link, "GET", &[("Range", "bytes=0-599999")], LENGTH).await;
    assert!(got.body == object[..600_000]);
    let ended = served.end().await;
    assert_eq!(ended["event"], "ended");
    assert!(
        ended["bytes_by_link"]["any"].as_u64().unwrap() >= 600_000,
        "{ended}"
    );
    // The origin is not there, and what was fetched is.
    origin.is_deaf.store(true, Ordering::Relaxed);
    let served = Served::start(home.path(), &origin.url(), &[]).await;
    assert_eq!(served.link, link);
    let got = ask(&link, "GET", &[("Range", "bytes=100-599999")], LENGTH).await;
    assert!(got.body == object[100..600_000]);
    served.end().await;
    // Requests of the process that has ended are read while nobody answers, and not counted below.
    origin.read_what_was_sent().await;
    origin.is_deaf.store(false, Ordering::Relaxed);
    let before = origin.ranges().len();
    let served = Served::start(home.path(), &origin.url(), &[]).await;
    origin.let_go.send_replace(LENGTH);
    assert!(ask(&link, "GET", &[], LENGTH).await.body == object);
    let asked = origin.ranges()[before..].to_vec();
    assert_eq!(asked, ["bytes=600000-"], "nothing is fetched twice");
    served.end().await;
}

#[tokio::test]
async fn what_the_origin_refuses_is_passed_on_in_words() {
    let home = tempfile::tempdir().unwrap();
    let origin = ScriptedOrigin::start(|asked| {
        let status = asked.path.trim_start_matches('/').to_owned();
        let head = format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n");
        OriginReply(head.into_bytes(), ReplyEnd::Close)
    })
    .await;
    for (status, words) in [
        (404, "404 Not Found"),
        (401, "credentials"),
        (410, "410"),
        (503, "503"),
    ] {
        let url = origin.url(&format!("/{status}"));
        let served = Served::start(home.path(), &url, &[]).await;
        let got = ask(&served.link, "GET", &[], LENGTH).await;
        let text = String::from_utf8_lossy(&got.body).into_owned();
        assert_eq!(got.status, status, "{text}");
        assert!(text.contains(words), "{status}: {text}");
        assert!(got.field("content-type").starts_with("text/plain"));
        assert_eq!(got.fields.contains_key("retry-after"), status == 503);
        served.end().await;
    }
}

#[tokio::test]
async fn through_a_proxy_it_is_the_same() {
    let object = content(LENGTH);
    let home = tempfile::tempdir().unwrap();
    let origin = SlowOrigin::start(object.clone(), true).await;
    origin.let_go.send_replace(LENGTH);
    let prox = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    for more in [&[][..], &["--sealed"]] {
        let store = format!("store-{}", more.len());
        let arguments = [&["--prox", &prox.address, "--store", &store][..], more].concat();
        let url = origin.url();
        let arguments = [&["url", "--json", &url][..], &arguments].concat();
        let mut child = cedos(home.path(), &arguments).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = timeout(PATIENCE, lines.next_line())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        let told: Value = serde_json::from_str(&first).unwrap();
        let link = told["link"].as_str().unwrap().to_owned();
        let served = Served { child, lines, link };
        let got = ask(&served.link, "GET", &[("Range", "bytes=700000-")], LENGTH).await;
        assert!(
            got.body == object[700_000..],
            "{more:?}: {} bytes",
            got.body.len()
        );
        let got = ask(&served.link, "GET", &[], LENGTH).await;
        assert!(got.body == object, "{more:?}");
        served.end().await;
    }
}

#[tokio::test]
async fn a_stream_goes_on_at_another_proxy_of_the_list_when_its_own_falls_silent() {
    let object = content(LENGTH);
    let home = tempfile::tempdir().unwrap();
    let origin = SlowOrigin::start(object.clone(), true).await;
    origin.let_go.send_replace(300_000);
    let mut first = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    // A running proxy has read its key: the next one makes another.
    std::fs::remove_file(home.path().join("prox.key")).unwrap();
    let second = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    let both = format!("{} {}", first.address, second.address);
    let served = Served::start(home.path(), &origin.url(), &["--prox", &both]).await;
    let begun = ask(&served.link, "GET", &[("Range", "bytes=0-199999")], 200_000).await;
    assert!(begun.body == object[..200_000]);
    first.child.kill().await.unwrap();
    origin.let_go.send_replace(LENGTH);
    let got = ask(&served.link, "GET", &[], LENGTH).await;
    assert!(got.body == object, "{} bytes", got.body.len());
    served.end().await;
}

/// A reader that gives a silent connection up after eight seconds, as Media3 does, and shows what it has
/// at the stream's rate.
#[tokio::test]
async fn a_player_with_eight_seconds_of_patience_outlives_a_silent_origin() {
    let patience = Duration::from_secs(8);
    let silence = Duration::from_secs(20);
    let object = content(LENGTH);
    let home = tempfile::tempdir().unwrap();
    let origin = SlowOrigin::start(object.clone(), true).await;
    origin.let_go.send_replace(300_000);
    let served = Served::start(home.path(), &origin.url(), &["--bitrate", "640k"]).await;
    let host = format!("127.0.0.1:{}", served.port());
    let mut player = TcpStream::connect(&host).await.unwrap();
    let path = served.link.strip_prefix(&format!("http://{host}")).unwrap();
    let words = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    player.write_all(words.as_bytes()).await.unwrap();
    read_head(&mut player).await.unwrap();
    let let_go = origin.let_go.clone();
    tokio::spawn(async move {
        // sleep: a silence of this length is the subject
        tokio::time::sleep(silence).await;
        let_go.send_replace(LENGTH);
    });
    let begun = Instant::now();
    let mut got = Vec::new();
    let mut piece = vec![0; 64 * 1024];
    while got.len() < LENGTH {
        let read = timeout(patience, player.read(&mut piece)).await;
        let n = read.expect("a byte before patience is at its end").unwrap();
        assert!(n > 0, "broken off after {} bytes", got.len());
        got.extend_from_slice(&piece[..n]);
    }
    assert!(got == object);
    assert!(begun.elapsed() >= silence, "there was no gap");
    served.end().await;
}

#[tokio::test]
async fn a_player_is_run_with_the_link_and_its_end_is_ours() {
    let home = tempfile::tempdir().unwrap();
    let origin = SlowOrigin::start(content(1000), true).await;
    origin.let_go.send_replace(1000);
    let url = origin.url();
    let arguments = [
        "play",
        &url,
        "--store",
        "store",
        "--",
        "sh",
        "-c",
        "echo $0; exit 7",
    ];
    let played = run(home.path(), &arguments).await;
    assert_eq!(played.code, 7);
    let link = String::from_utf8(played.output).unwrap();
    assert!(link.starts_with("http://127.0.0.1:"), "{link}");
    assert!(link.trim().ends_with("/film.mp4"), "{link}");
    let arguments = ["play", &url, "--store", "store", "--", "no-such-player"];
    run(home.path(), &arguments)
        .await
        .ends_with(1, "Is it installed?");
}

#[tokio::test]
async fn a_manifests_segments_lead_here_and_what_follows_is_fetched_ahead() {
    let home = tempfile::tempdir().unwrap();
    let segment = |n: u8| vec![n; 50_000];
    let manifest = "<MPD type=\"static\" mediaPresentationDuration=\"PT12S\"><Period><AdaptationSet>\
        <SegmentTemplate duration=\"4\" media=\"$RepresentationID$/$Number$.m4s\"/>\
        <Representation id=\"low\"/></AdaptationSet></Period></MPD>";
    let origin = ScriptedOrigin::start(move |asked| {
        let answer = match asked.path.as_str() {
            "/main.mpd" => {
                let length = manifest.len().to_string();
                reply(
                    "200 OK",
                    &[("Content-Length", &length)],
                    manifest.as_bytes(),
                )
            }
            path => {
                let name = path.strip_prefix("/low/");
                let n = name.and_then(|name| name.strip_suffix(".m4s"));
                match n.and_then(|n| n.parse().ok()) {
                    Some(n) => proper(asked, &segment(n), "\"v1\""),
                    None => reply("404 Not Found", &[("Content-Length", "0")], b""),
                }
            }
        };
        OriginReply(answer, ReplyEnd::Close)
    })
    .await;
    let served = Served::start(home.path(), &origin.url("/main.mpd"), &[]).await;
    let got = ask(&served.link, "GET", &[], LENGTH).await;
    assert_eq!(got.field("content-type"), "application/dash+xml");
    let text = String::from_utf8(got.body.clone()).unwrap();
    let (_, base) = text.split_once("<BaseURL>").expect("a base");
    let (base, _) = base.split_once("main.mpd</BaseURL>").expect("its end");
    let url = |n: u8| format!("http://127.0.0.1:{}{base}low/{n}.m4s", served.port());
    // Nothing leads to what the manifest did not name.
    assert_eq!(ask(&url(4), "GET", &[], LENGTH).await.status, 404);
    let first = ask(&url(1), "GET", &[], LENGTH).await;
    assert!(
        first.status == 200 && first.body == segment(1),
        "{}",
        first.status
    );
    until("the third is fetched before it is asked for", || {
        (origin.requests().iter()).any(|asked| asked.path == "/low/3.m4s")
    })
    .await;
}

#[tokio::test]
async fn a_playlists_links_lead_here_and_what_follows_is_fetched_ahead() {
    let home = tempfile::tempdir().unwrap();
    let segment = |n: u8| vec![n; 50_000];
    let origin = ScriptedOrigin::start(move |asked| {
        let playlist = |text: &str| {
            let length = text.len().to_string();
            reply("200 OK", &[("Content-Length", &length)], text.as_bytes())
        };
        let answer = match asked.path.as_str() {
            "/main.m3u8" => {
                playlist("#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=100000\nlow/list.m3u8\n")
            }
            "/low/list.m3u8" => playlist(
                "#EXTM3U\n#EXTINF:4,\n1.ts\n#EXTINF:4,\n2.ts\n#EXTINF:4,\n3.ts\n#EXT-X-ENDLIST\n",
            ),
            path => {
                let n = path
                    .strip_prefix("/low/")
                    .and_then(|name| name.strip_suffix(".ts"));
                match n.and_then(|n| n.parse().ok()) {
                    Some(n) => proper(asked, &segment(n), "\"v1\""),
                    None => reply("404 Not Found", &[("Content-Length", "0")], b""),
                }
            }
        };
        OriginReply(answer, ReplyEnd::Close)
    })
    .await;
    let served = Served::start(home.path(), &origin.url("/main.m3u8"), &[]).await;
    let root = format!("http://127.0.0.1:{}", served.port());
    let linked = |got: &StreamReply| -> Vec<String> {
        let text = String::from_utf8(got.body.clone()).unwrap();
        let links = text.lines().filter(|line| !line.starts_with('#'));
        links.map(|path| format!("{root}{path}")).collect()
    };
    let master = ask(&served.link, "GET", &[], LENGTH).await;
    assert_eq!(
        master.field("content-type"),
        "application/vnd.apple.mpegurl"
    );
    let lists = linked(&master);
    // Nothing leads to what no playlist named.
    let unnamed = lists[0].replace("list.m3u8", "1.ts");
    assert_eq!(ask(&unnamed, "GET", &[], LENGTH).await.status, 404);
    let segments = linked(&ask(&lists[0], "GET", &[], LENGTH).await);
    assert_eq!(segments.len(), 3);
    let first = ask(&segments[0], "GET", &[], LENGTH).await;
    assert!(
        first.status == 200 && first.body == segment(1),
        "{}",
        first.status
    );
    until("the third is fetched before it is asked for", || {
        (origin.requests().iter()).any(|asked| asked.path == "/low/3.ts")
    })
    .await;
    let range = [("Range", "bytes=10-19")];
    let second = ask(&segments[1], "GET", &range, LENGTH).await;
    assert_eq!((second.status, second.body), (206, vec![2; 10]));
    let times = |path: &str| origin.requests().iter().filter(|a| a.path == path).count();
    assert_eq!(
        (
            times("/low/1.ts"),
            times("/low/2.ts"),
            times("/low/list.m3u8")
        ),
        (1, 1, 1)
    );
    served.end().await;
}

/// `ffmpeg`, where it is installed: a real player reads a sound of a second while it comes slowly.
#[tokio::test]
async fn ffmpeg_reads_the_link_while_it_comes() {
    let installed = std::process::Command::new("ffmpeg")
        .arg("-version")
        .output();
    if installed.is_err() {
        eprintln!("ffmpeg is not installed: not tried");
        return;
    }
    let home = tempfile::tempdir().unwrap();
    // Two seconds of 8 bits, 8,000 samples a second.
    let origin = SlowOrigin::start(content(16_000), true).await;
    let let_go = origin.let_go.clone();
    tokio::spawn(async move {
        for limit in (0..=16_000).step_by(1_000) {
            let_go.send_replace(limit);
            // sleep: a film that comes as fast as it plays is the subject
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let url = origin.url();
    let player =
        "ffmpeg -loglevel error -nostdin -f u8 -ar 8000 -ac 1 -i {} -f u8 -ar 8000 -ac 1 out.raw";
    let mut arguments = vec!["play", &url, "--store", "store", "--"];
    arguments.extend(player.split(' '));
    let played = run(home.path(), &arguments).await;
    assert_eq!(played.code, 0, "{}", played.errors);
    let shown = std::fs::read(home.path().join("out.raw")).unwrap();
    assert!(shown == content(16_000), "{} bytes", shown.len());
}

#[tokio::test]
async fn several_streams_are_fed_at_once_each_by_its_own_link() {
    let (one, two) = (content(200_000), content(300_000)[100_000..].to_vec());
    let home = tempfile::tempdir().unwrap();
    let origins = [
        SlowOrigin::start(one.clone(), true).await,
        SlowOrigin::start(two.clone(), true).await,
    ];
    for origin in &origins {
        origin.let_go.send_replace(100_000);
    }
    let second = origins[1].url();
    let mut served = Served::start(home.path(), &origins[0].url(), &[&second]).await;
    let line = timeout(PATIENCE, served.lines.next_line())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    let told: Value = serde_json::from_str(&line).unwrap();
    let other = told["link"].as_str().unwrap().to_owned();
    assert!(
        served.link.ends_with("/film.mp4") && other.ends_with("/2-film.mp4"),
        "{other}"
    );
    let ours = served.link.clone();
    let first = tokio::spawn(async move { ask(&ours, "GET", &[], LENGTH).await.body });
    let got = ask(&other, "GET", &[("Range", "bytes=0-99999")], LENGTH).await;
    assert!(
        got.body == two[..100_000],
        "one that waits does not hold up the other"
    );
    for origin in &origins {
        origin.let_go.send_replace(LENGTH);
    }
    assert!(first.await.unwrap() == one);
    assert!(ask(&other, "GET", &[], LENGTH).await.body == two);
    served.end().await;
}
