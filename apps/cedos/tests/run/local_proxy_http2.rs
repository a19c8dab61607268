//! HTTP/2 at the local proxy of `cedos agent`, for programs that begin with it. Real curl, and streams of the test's own.
//! Where one stream breaks, its program learns it by RST_STREAM, and the others go on.

use bytes::Bytes;
use cedos_lab_rig::http2::{
    CONTINUATION, END_HEADERS, END_STREAM, HEADERS, Http2Client, RST_STREAM, RawHttp2, hpack,
    read_all, reason, request, send, whole,
};
use cedos_lab_rig::origin::{
    OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper, reply, reset,
};
use cedos_lab_rig::{PATIENCE, wait};
use h2::Reason;
use http::{Method, StatusCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::local_proxy::Device;

const BYTES: usize = 2_000_000;

/// More than all windows and buffers between an origin and its program.
const LARGE: usize = 40_000_000;

/// An origin that serves these bytes.
async fn origin_of(bytes: Vec<u8>) -> ScriptedOrigin {
    let bytes = Arc::new(bytes);
    ScriptedOrigin::start(move |asked| {
        OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
    })
    .await
}

#[tokio::test]
async fn curl_gets_puts_and_posts_by_http_2() {
    let device = Device::new(&[]).await;
    let bytes = object(BYTES, 1);
    let served = bytes.clone();
    let origin = ScriptedOrigin::play(move |asked, mut stream| {
        let served = served.clone();
        async move {
            let body = asked.body(&mut stream).await.unwrap_or_default();
            let answer = match asked.method.as_str() {
                "GET" => served,
                _ => body,
            };
            let length = answer.len().to_string();
            let answer = reply("200 OK", &[("content-length", &length)], &answer);
            let _ = stream.write_all(&answer).await;
        }
    })
    .await;
    let url = origin.url("/a");
    // curl 7.88 asks no proxy by HTTP/2, and what it asks an origin is the same (RFC 9113 §8.3.1).
    let to = format!("::{}", device.at);
    let words = ["--http2-prior-knowledge", "--connect-to", &to];
    let file = device.path().join("upload");
    std::fs::write(&file, &bytes).expect("write");
    let from_file = format!("@{}", file.display());
    let upload = file.display().to_string();
    for more in [
        &[][..],
        &["-T", &upload],
        &["--data-binary", &from_file],
        &["-T", &upload, "-H", "Expect: 100-continue"],
    ] {
        let all = [&words[..], more, &[&url]].concat();
        let Some(ran) = device.curl(&all).await else {
            return;
        };
        ran.is_whole(&bytes);
    }
    let version = ["-o", "/dev/null", "-w", "%{http_version}", &url];
    let ran = device.curl(&[&words[..], &version].concat()).await;
    assert_eq!(ran.expect("curl").output, b"2");
    let asked = origin.requests();
    assert_eq!(asked[0].header("via"), Some("2.0 cedos"));
    assert_eq!(asked[1].header("content-length"), Some("2000000"));
    let nowhere = ["-I", "http://127.0.0.1:25/"];
    let ran = device.curl(&[&words[..], &nowhere].concat()).await;
    let ran = ran.expect("curl");
    assert_eq!(ran.code, 0, "{}", ran.errors);
    let said = String::from_utf8_lossy(&ran.output).into_owned();
    assert!(said.starts_with("HTTP/2 403"), "{said}");
    assert!(said.contains("proxy-status: cedos; error="), "{said}");
}

#[tokio::test]
async fn many_streams_share_a_connection_and_each_is_whole() {
    let device = Device::new(&[]).await;
    let origin = ScriptedOrigin::start(|asked| {
        let seed = asked.path[1..].parse().expect("a number");
        let body = object(50_000, seed);
        let length = body.len().to_string();
        let answer = reply("200 OK", &[("content-length", &length)], &body);
        OriginReply(answer, ReplyEnd::Close)
    })
    .await;
    let client = Http2Client::connect(&device.at).await;
    // More than one connection may have at once: the client waits.
    let streams = (0..150).map(|number: u32| {
        let (client, url) = (client.clone(), origin.url(&format!("/{number}")));
        tokio::spawn(async move {
            let answer = client.get(&url).await.expect("an answer");
            assert_eq!(answer.status, StatusCode::OK);
            assert!(answer.body == object(50_000, number), "stream {number}");
        })
    });
    for stream in streams.collect::<Vec<_>>() {
        stream.await.expect("it is whole");
    }
    assert_eq!(origin.requests().len(), 150);
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_a_reset_and_other_streams_go_on() {
    let device = Device::new(&[]).await;
    let bytes = object(BYTES, 2);
    let served = bytes.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &served, "\"v1\"");
        // Its end is its connection's.
        let endless = [b"HTTP/1.0 200 OK\r\n\r\n", &served[..]].concat();
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n";
        match asked.path.as_str() {
            "/whole" => OriginReply(answer, ReplyEnd::Close),
            "/closed" => OriginReply(cut(answer, BYTES / 2), ReplyEnd::Close),
            "/reset" => OriginReply(cut(answer, BYTES / 2), ReplyEnd::Reset),
            "/chunked" => OriginReply(chunked.to_vec(), ReplyEnd::Close),
            "/endless" => OriginReply(endless, ReplyEnd::Close),
            _ => OriginReply(endless, ReplyEnd::Reset),
        }
    })
    .await;
    let client = Http2Client::connect(&device.at).await;
    for path in ["/closed", "/reset", "/chunked", "/endless-reset"] {
        match client.get(&origin.url(path)).await {
            // The reset overtook the first bytes.
            Ok(answer) if path.contains("reset") => {
                assert_eq!(answer.status, StatusCode::BAD_GATEWAY, "{path}");
            }
            broken => assert_eq!(reason(broken), Reason::INTERNAL_ERROR, "{path}"),
        }
    }
    for path in ["/whole", "/endless"] {
        let answer = client.get(&origin.url(path)).await.expect("an answer");
        assert!(answer.body == bytes, "{path}: {} bytes", answer.body.len());
    }
}

#[tokio::test]
async fn a_stream_that_nobody_reads_holds_no_other() {
    let device = Device::new(&[]).await;
    let large = origin_of(object(LARGE, 3)).await;
    let small = origin_of(object(BYTES, 4)).await;
    // Its body is not read by the origin.
    let silent = ScriptedOrigin::play(|_, stream| async move {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await;
    let client = Http2Client::connect(&device.at).await;
    let unread = request(Method::GET, &large.url("/a"), &[]);
    let (unread, _) = client.open(unread, true).await.expect("a stream");
    let mut unread = unread.await.expect("an answer").into_body();
    let first = unread.data().await.expect("bytes").expect("bytes");
    let released = unread.flow_control().release_capacity(first.len());
    released.expect("it is used");
    let upload = request(Method::POST, &silent.url("/a"), &[]);
    let (_answer, mut upload) = client.open(upload, false).await.expect("a stream");
    let stuck = tokio::spawn(async move { send(&mut upload, &vec![7; LARGE]).await });
    let head = request(Method::HEAD, &small.url("/a"), &[]);
    let answer = client.ask(head, None).await.expect("an answer");
    assert_eq!(answer.fields["content-length"], "2000000");
    let answer = client.get(&small.url("/a")).await.expect("an answer");
    assert!(answer.body == object(BYTES, 4));
    assert!(!stuck.is_finished(), "the origin reads nothing");
    // What waited is still all there.
    let rest = timeout(PATIENCE, read_all(&mut unread)).await;
    let rest = rest.expect("in time").expect("whole");
    assert_eq!(first.len() + rest.len(), LARGE);
    stuck.abort();
}

#[tokio::test]
async fn a_tunnel_carries_both_ways_and_each_direction_ends_by_itself() {
    let device = Device::new(&[]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it").to_string();
    let origin = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.expect("an end");
        stream.write_all(&all).await.expect("it is read");
    });
    let client = Http2Client::connect(&device.at).await;
    let connect = request(Method::CONNECT, &address, &[]);
    let (answer, mut up) = client.open(connect, false).await.expect("a stream");
    let answer = answer.await.expect("an answer");
    assert_eq!(answer.status(), StatusCode::OK);
    let bytes = object(BYTES, 5);
    send(&mut up, &bytes).await.expect("it is taken");
    up.send_data(Bytes::new(), true).expect("an end");
    let echoed = timeout(PATIENCE, whole(answer)).await.expect("in time");
    assert!(echoed.expect("whole").body == bytes);
    origin.await.expect("it ends");
    // Where nobody is, the answer says so.
    let refused = client.ask(request(Method::CONNECT, &address, &[]), None);
    let refused = refused.await.expect("an answer");
    assert_eq!(refused.status, StatusCode::BAD_GATEWAY);
}

#[tokio::test]
async fn a_tunnel_that_breaks_is_reset_at_its_other_end() {
    let device = Device::new(&[]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it").to_string();
    let client = Http2Client::connect(&device.at).await;
    let open = async || {
        let connect = request(Method::CONNECT, &address, &[]);
        let (answer, up) = client.open(connect, false).await.expect("a stream");
        let (far, _) = listener.accept().await.expect("a connection");
        let mut down = answer.await.expect("an answer").into_body();
        let mut far = far;
        far.write_all(b"hello").await.expect("it is read");
        assert_eq!(down.data().await.expect("bytes").expect("bytes"), "hello");
        (up, down, far)
    };
    // The origin resets it.
    let (_up, mut down, far) = open().await;
    far.set_zero_linger().expect("a socket");
    drop(far);
    let broken = timeout(PATIENCE, read_all(&mut down)).await;
    assert_eq!(reason(broken.expect("in time")), Reason::CONNECT_ERROR);
    // The program does: also one that has ended its own direction.
    for ends in [false, true] {
        let (mut up, _down, mut far) = open().await;
        if ends {
            up.send_data(Bytes::new(), true).expect("an end");
            let mut all = Vec::new();
            far.read_to_end(&mut all).await.expect("an end");
        }
        up.send_reset(Reason::CANCEL);
        let broken = async {
            // It is reset, and not ended.
            while far.write_all(&[7; 1000]).await.is_ok() {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, broken).await.expect("it is reset");
    }
}

#[tokio::test]
async fn a_cancelled_request_is_cancelled_at_the_origin() {
    let device = Device::new(&[]).await;
    let (asked, mut gone) = tokio::sync::mpsc::unbounded_channel();
    let origin = ScriptedOrigin::play(move |_, mut stream| {
        let asked = asked.clone();
        async move {
            asked.send(()).expect("the test listens");
            let mut byte = [0];
            let end = stream.read(&mut byte).await;
            assert!(!matches!(end, Ok(1)));
            asked.send(()).expect("the test listens");
        }
    })
    .await;
    let client = Http2Client::connect(&device.at).await;
    let get = request(Method::GET, &origin.url("/a"), &[]);
    let (answer, mut stream) = client.open(get, true).await.expect("a stream");
    gone.recv().await.expect("it is asked");
    stream.send_reset(Reason::CANCEL);
    drop(answer);
    let ended = timeout(PATIENCE, gone.recv()).await;
    ended.expect("in time").expect("it is told");
}

#[tokio::test]
async fn what_two_readers_could_take_for_two_requests_is_refused() {
    let device = Device::new(&[]).await;
    let whole_puts = Arc::new(AtomicUsize::new(0));
    let count = whole_puts.clone();
    let origin = ScriptedOrigin::play(move |asked, mut stream| {
        let count = count.clone();
        async move {
            if asked.method == "PUT" && asked.body(&mut stream).await.is_some() {
                count.fetch_add(1, Ordering::Relaxed);
            }
            let _ = stream.write_all(&reply("200 OK", &[], b"ok")).await;
        }
    })
    .await;
    let url = origin.url("/a");
    let client = Http2Client::connect(&device.at).await;
    let other = request(Method::GET, &url, &[("host", "other.example")]);
    let refused = client.ask(other, None).await.expect("an answer");
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    // Bytes that do not fit the length: the stream is reset, and the origin gets no whole request.
    for length in ["2", "4"] {
        let put = request(Method::PUT, &url, &[("content-length", length)]);
        let broken = client.ask(put, Some(b"abc")).await;
        assert!(broken.is_err(), "{length}: {broken:?}");
    }
    let answer = client.get(&url).await.expect("an answer");
    assert_eq!(answer.body, b"ok");
    assert_eq!(whole_puts.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn trailers_go_no_further_and_break_nothing() {
    let device = Device::new(&[]).await;
    let origin = ScriptedOrigin::play(|_, mut stream| async move {
        let mut body = Vec::new();
        while !body.ends_with(b"0\r\n\r\n") && stream.read_buf(&mut body).await.unwrap_or(0) > 0 {}
        let body = String::from_utf8_lossy(&body).into_owned();
        let has_them = body.contains("x-secret");
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n";
        let answer = format!("{head}5\r\n{has_them:5}\r\n0\r\nX-Sum: 1\r\n\r\n");
        let _ = stream.write_all(answer.as_bytes()).await;
    })
    .await;
    let client = Http2Client::connect(&device.at).await;
    let put = request(Method::PUT, &origin.url("/a"), &[]);
    let (answer, mut up) = client.open(put, false).await.expect("a stream");
    send(&mut up, b"body").await.expect("it is taken");
    let mut trailers = http::HeaderMap::new();
    trailers.insert("x-secret", "1".parse().expect("a value"));
    up.send_trailers(trailers).expect("trailers");
    let answer = timeout(PATIENCE, answer).await.expect("in time");
    let answer = whole(answer.expect("an answer")).await.expect("whole");
    assert_eq!((&*answer.body, answer.has_trailers), (&b"false"[..], false));
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused_and_the_connection_goes_on() {
    let device = Device::new(&[]).await;
    let origin = origin_of(object(100, 7)).await;
    let client = Http2Client::connect(&device.at).await;
    let large = "x".repeat(10_000);
    let names = ["x-1", "x-2", "x-3", "x-4"];
    let fields = names.map(|name| (name, &*large));
    let oversized = request(Method::GET, &origin.url("/a"), &fields);
    match client.ask(oversized, None).await {
        Ok(answer) => assert_eq!(answer.status, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
        Err(error) => panic!("{error}"),
    }
    let fits = request(Method::GET, &origin.url("/a"), &fields[..2]);
    let answer = client.ask(fits, None).await.expect("an answer");
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(origin.requests().len(), 1);
}

/// The block of a GET of this URL.
fn get_block(host: &str) -> Vec<u8> {
    hpack(&[
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", host),
        (":path", "/"),
    ])
}

#[tokio::test]
async fn rapid_resets_end_the_connection_and_cost_no_other_program() {
    let device = Device::new(&[]).await;
    let origin = origin_of(object(100, 8)).await;
    let url = origin.url("/");
    let host = url.trim_start_matches("http://").trim_end_matches('/');
    let other = Http2Client::connect(&device.at).await;
    let mut raw = RawHttp2::connect(&device.at).await;
    let block = get_block(host);
    for number in 0..20_000 {
        let stream = 2 * number + 1;
        let begun = raw.send(HEADERS, END_STREAM | END_HEADERS, stream, &block);
        let cancelled = match begun.await {
            Ok(()) => {
                let cancel = u32::from(Reason::CANCEL).to_be_bytes();
                raw.send(RST_STREAM, 0, stream, &cancel).await
            }
            Err(error) => Err(error),
        };
        if cancelled.is_err() {
            break;
        }
    }
    let reason = raw.goaway().await;
    assert!(
        matches!(reason, None | Some(Reason::ENHANCE_YOUR_CALM)),
        "{reason:?}"
    );
    let asked = origin.requests().len();
    assert!(asked < 500, "{asked} requests reached the origin");
    let answer = other.get(&url).await.expect("an answer");
    assert_eq!(answer.status, StatusCode::OK);
}

#[tokio::test]
async fn slow_cancels_end_the_connection_too() {
    let device = Device::new(&[]).await;
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let origin = ScriptedOrigin::play(move |_, mut stream| {
        count.fetch_add(1, Ordering::Relaxed);
        async move {
            let _ = stream.read(&mut [0]).await;
        }
    })
    .await;
    let url = origin.url("/");
    let (client, connection) = Http2Client::connect_watched(&device.at).await;
    for number in 1..=300 {
        let get = request(Method::GET, &url, &[]);
        let Ok((answer, mut stream)) = client.open(get, true).await else {
            break;
        };
        let reached = wait::until("it is asked", || asked.load(Ordering::Relaxed) >= number);
        tokio::select! {
            () = reached => stream.send_reset(Reason::CANCEL),
            ended = answer => {
                assert!(ended.is_err(), "the origin says nothing");
                break;
            }
        }
    }
    let ended = timeout(PATIENCE, connection).await.expect("it ends");
    let reason = reason(ended.expect("no panic"));
    assert_eq!(reason, Reason::ENHANCE_YOUR_CALM);
    assert!(asked.load(Ordering::Relaxed) < 300);
}

#[tokio::test]
async fn a_head_without_end_is_refused() {
    let device = Device::new(&[]).await;
    let mut raw = RawHttp2::connect(&device.at).await;
    let first = get_block("a.example");
    raw.send(HEADERS, END_STREAM, 1, &first)
        .await
        .expect("HEADERS");
    let value = "x".repeat(120);
    let more = hpack(&[("x-more", &*value); 100]);
    let mut sent = 0;
    while sent < 50_000_000 && raw.send(CONTINUATION, 0, 1, &more).await.is_ok() {
        sent += more.len();
    }
    assert!(sent < 20_000_000, "{sent} bytes were taken");
    let reason = raw.goaway().await;
    assert!(
        matches!(reason, None | Some(Reason::ENHANCE_YOUR_CALM)),
        "{reason:?}"
    );
    let client = Http2Client::connect(&device.at).await;
    let origin = origin_of(object(100, 9)).await;
    let answer = client.get(&origin.url("/")).await.expect("an answer");
    assert_eq!(answer.status, StatusCode::OK);
}

#[tokio::test]
async fn a_tunnel_whose_origin_resets_never_looks_ended() {
    let device = Device::new(&[]).await;
    let origin = ScriptedOrigin::play(|_, mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nhalf").await;
        let _ = reset(stream);
    })
    .await;
    let url = origin.url("/");
    let host = url.trim_start_matches("http://").trim_end_matches('/');
    let client = Http2Client::connect(&device.at).await;
    let connect = request(Method::CONNECT, host, &[]);
    let (answer, mut up) = client.open(connect, false).await.expect("a stream");
    let answer = answer.await.expect("an answer");
    send(&mut up, b"GET / HTTP/1.0\r\n\r\n")
        .await
        .expect("it is taken");
    let broken = timeout(PATIENCE, whole(answer)).await.expect("in time");
    assert_eq!(reason(broken), Reason::CONNECT_ERROR);
}
