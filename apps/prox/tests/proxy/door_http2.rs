//! HTTP/2 at the proxy's TCP port: each stream is a flow as a connection of HTTP/1.1 is, with the same cache, limits and log.

use std::net::{IpAddr, SocketAddr};
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use cedos_lab_rig::http2::{
    CONTINUATION, END_HEADERS, END_STREAM, HEADERS, Http2Answer, Http2Client, RST_STREAM, RawHttp2,
    WINDOW_UPDATE, hpack, read_all, reason, request, send, whole,
};
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_prox::{AccessDetail, ProxConfig};
use h2::Reason;
use http::{Method, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::time::timeout;

use crate::door::Served;
use crate::support::*;

/// More than all windows and buffers between an origin and its client.
const LARGE: usize = 40_000_000;

/// An origin that answers every request with this body, which clients may share.
async fn shared(body: &[u8]) -> ScriptedOrigin {
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n");
    let fields = "Cache-Control: public, max-age=60\r\nETag: \"1\"\r\n\r\n";
    ScriptedOrigin::fixed([head.as_bytes(), fields.as_bytes(), body].concat()).await
}

fn text(answer: &Http2Answer) -> String {
    String::from_utf8_lossy(&answer.body).into_owned()
}

/// Waits until no flow is served and no memory is charged to anybody.
async fn released(served: &Served) {
    until(|| served.prox.holdings().flows == 0).await;
    until(|| served.prox.session_memory().used() == 0).await;
    until(|| served.prox.socket_memory().used() == 0).await;
}

/// Runs curl with HTTP/2 at the proxy, for a URL of plain HTTP; none if there is no curl. curl 7.88 asks no proxy by HTTP/2,
/// and what it asks an origin is the same (RFC 9113 §8.3.1).
async fn curl(at: SocketAddr, words: &[&str]) -> Option<Vec<u8>> {
    let to = format!("::{at}");
    let output = Command::new("curl")
        .env_remove("http_proxy")
        .args(["-sS", "--max-time", "60", "--http2-prior-knowledge"])
        .args(["--connect-to", &to])
        .args(words)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let Ok(output) = timeout(PATIENCE, output).await.expect("curl ends") else {
        eprintln!("skipped: there is no curl");
        return None;
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {errors}");
    Some(output.stdout)
}

#[tokio::test]
async fn curl_gets_heads_and_uploads_by_http_2() {
    let data = pattern(3_000_000);
    let served = Served::with(config());
    let wanted = data.clone();
    let echo = ScriptedOrigin::play(move |asked, mut stream| {
        let data = wanted.clone();
        async move {
            let body = match asked.method.as_str() {
                "PUT" | "POST" => asked.body(&mut stream).await.unwrap(),
                "HEAD" => Vec::new(),
                _ => data.clone(),
            };
            let head = "HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n";
            let _ = stream.write_all(&[head.as_bytes(), &body].concat()).await;
        }
    })
    .await;
    let url = echo.url("/a");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("upload");
    std::fs::write(&file, &data).unwrap();
    let (upload, from_file) = (file.display().to_string(), format!("@{}", file.display()));
    for words in [
        &[&*url][..],
        &["-T", &upload, &url],
        &["-H", "Expect: 100-continue", "-T", &upload, &url],
        &["--data-binary", &from_file, &url],
    ] {
        let Some(output) = curl(served.at, words).await else {
            return;
        };
        assert!(output == data, "{words:?}: {} bytes", output.len());
    }
    let head = curl(served.at, &["-I", &url]).await.unwrap();
    let head = String::from_utf8_lossy(&head).into_owned();
    assert!(head.starts_with("HTTP/2 200"), "{head}");
    assert!(head.contains("content-length: 3000000\r\n"), "{head}");
    assert!(!head.contains("connection:"), "{head}");
    let part = curl(served.at, &["-r", "1000-1999", &url]).await.unwrap();
    assert!(part == data[1000..2000]);
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn streams_share_the_cache_and_are_in_the_access_log() {
    let served = Served::with(config());
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("access.log");
    let opened = served.prox.log_access(Some(&log), AccessDetail::Full);
    opened.unwrap();
    let data = pattern(200_000);
    let origin = shared(&data).await;
    let url = origin.url("/shared");
    // Another client than the one of the streams, by HTTP/1.1.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    let other: IpAddr = "127.0.0.2".parse().unwrap();
    socket.bind(SocketAddr::from((other, 0))).unwrap();
    let mut stream = socket.connect(served.at).await.unwrap();
    stream.write_all(get(&url, "").as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(answer.ends_with(&data));
    drop(stream);
    let client = Http2Client::connect(served.at).await;
    let answer = client.get(&url).await.unwrap();
    assert!(answer.body == data);
    let status = answer.fields["cache-status"].to_str().unwrap();
    assert!(status.contains("hit"), "{status}");
    assert!(answer.fields.contains_key("age"));
    let fields = [("if-none-match", "\"1\"")];
    let fresh = client.ask(request(Method::GET, &url, &fields), None).await;
    assert_eq!(fresh.unwrap().status, StatusCode::NOT_MODIFIED);
    let fields = [("range", "bytes=7-9")];
    let part = client.ask(request(Method::GET, &url, &fields), None).await;
    let part = part.unwrap();
    assert_eq!((part.status.as_u16(), &*part.body), (206, &data[7..10]));
    assert_eq!(origin.requests().len(), 1);
    drop(client);
    released(&served).await;
    served.prox.flush_access_log().await;
    let log = std::fs::read_to_string(&log).unwrap();
    assert_eq!(log.lines().count(), 4, "{log}");
    assert_eq!(log.matches("/shared").count(), 4, "{log}");
    served.stop().await;
}

#[tokio::test]
async fn many_streams_are_whole_and_a_clients_limit_holds_for_them() {
    let served = Served::with(ProxConfig {
        client_flows_max: 20,
        ..config()
    });
    let data = pattern(50_000);
    let origin = shared(&data).await;
    let slow = ScriptedOrigin::play(|_, stream| async move {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await;
    let client = Http2Client::connect(served.at).await;
    for _ in 0..10 {
        let streams = (0..18).map(|number: u32| {
            let (client, url) = (client.clone(), origin.url(&format!("/{number}")));
            tokio::spawn(async move { client.get(&url).await.unwrap() })
        });
        for stream in streams.collect::<Vec<_>>() {
            let answer = stream.await.unwrap();
            assert_eq!(answer.status, StatusCode::OK, "{}", text(&answer));
            assert!(answer.body == data);
        }
    }
    assert_eq!(origin.requests().len(), 18, "the others are from the cache");
    let mut waiting = Vec::new();
    for number in 0..20 {
        let get = request(Method::GET, &slow.url(&format!("/{number}")), &[]);
        waiting.push(client.open(get, true).await.unwrap());
    }
    until(|| served.prox.holdings().flows == 20).await;
    let refused = client.get(&origin.url("/1")).await.unwrap();
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(
        refused.fields["proxy-status"]
            .to_str()
            .unwrap()
            .contains("connection_limit_reached")
    );
    // By connections and by streams, it is one client.
    let mut stream = TcpStream::connect(served.at).await.unwrap();
    stream
        .write_all(get(&origin.url("/1"), "").as_bytes())
        .await
        .unwrap();
    let mut answer = String::new();
    let read = stream.read_to_string(&mut answer);
    timeout(PATIENCE, read).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    drop((stream, waiting, client));
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn a_stream_for_which_there_is_no_memory_is_refused_and_may_be_asked_again() {
    let served = Served::with(ProxConfig {
        session_memory_bytes_max: 6 << 20,
        ..config()
    });
    let slow = ScriptedOrigin::play(|_, stream| async move {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await;
    let client = Http2Client::connect(served.at).await;
    let mut waiting = Vec::new();
    let refused = loop {
        let get = request(Method::GET, &slow.url("/"), &[]);
        let (mut answer, stream) = client.open(get, true).await.unwrap();
        let early = timeout(Duration::from_millis(100), &mut answer).await;
        match early {
            Err(_) => waiting.push((answer, stream)),
            Ok(early) => break early,
        }
        assert!(waiting.len() < 90, "none is refused");
    };
    match refused {
        Err(error) => assert_eq!(error.reason(), Some(Reason::REFUSED_STREAM), "{error}"),
        Ok(answer) => assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE),
    }
    assert!(waiting.len() > 1, "some are served");
    drop((waiting, client));
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_a_reset_and_other_streams_go_on() {
    let data = pattern(300_000);
    let wanted = data.clone();
    // Neither length nor validator: only the end tells.
    let origin = ScriptedOrigin::play(move |asked, mut stream| {
        let data = wanted.clone();
        async move {
            let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n493e0\r\n";
            let end = match asked.path.as_str() {
                "/whole" => "\r\n0\r\n\r\n",
                _ => "\r\n4\r\nhalf",
            };
            let answer = [head.as_bytes(), &data, end.as_bytes()].concat();
            stream.write_all(&answer).await.unwrap();
        }
    })
    .await;
    let served = Served::with(config());
    let client = Http2Client::connect(served.at).await;
    let broken = client.get(&origin.url("/broken")).await;
    assert_eq!(reason(broken), Reason::INTERNAL_ERROR);
    let answer = client.get(&origin.url("/whole")).await.unwrap();
    assert!(answer.body == data);
    drop(client);
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn a_stream_that_nobody_reads_holds_no_other() {
    let served = Served::with(config());
    let large = pattern(LARGE);
    let (large_origin, small) = (shared(&large).await, shared(b"small").await);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let client = Http2Client::connect(served.at).await;
    let get = request(Method::GET, &large_origin.url("/"), &[]);
    let (unread, _) = client.open(get, true).await.unwrap();
    let mut unread = unread.await.unwrap().into_body();
    let first = unread.data().await.unwrap().unwrap();
    let released_bytes = unread.flow_control().release_capacity(first.len());
    released_bytes.unwrap();
    // A tunnel whose origin reads nothing.
    let connect = request(Method::CONNECT, &address, &[]);
    let (opened, mut up) = client.open(connect, false).await.unwrap();
    let (_far, _) = listener.accept().await.unwrap();
    assert_eq!(opened.await.unwrap().status(), StatusCode::OK);
    let stuck = tokio::spawn(async move { send(&mut up, &vec![7; LARGE]).await });
    for _ in 0..20 {
        assert_eq!(client.get(&small.url("/")).await.unwrap().body, b"small");
    }
    assert!(!stuck.is_finished(), "the origin reads nothing");
    // An upload gets through beside it.
    let upload = request(Method::POST, &small.url("/upload"), &[]);
    let answer = client.ask(upload, Some(&large[..2_000_000])).await.unwrap();
    assert_eq!(answer.status, StatusCode::OK, "{}", text(&answer));
    let rest = timeout(PATIENCE, read_all(&mut unread)).await;
    assert_eq!(first.len() + rest.unwrap().unwrap().len(), LARGE);
    stuck.abort();
    let _ = stuck.await;
    drop((unread, client));
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn a_tunnel_carries_both_ways_and_breaks_as_its_ends_do() {
    let served = Served::with(config());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let client = Http2Client::connect(served.at).await;
    let open = async || {
        let connect = request(Method::CONNECT, &address, &[]);
        let (opened, up) = client.open(connect, false).await.unwrap();
        let (far, _) = listener.accept().await.unwrap();
        let opened = opened.await.unwrap();
        assert_eq!(opened.status(), StatusCode::OK);
        (up, opened.into_body(), far)
    };
    // Each direction ends by itself.
    let (mut up, mut down, mut far) = open().await;
    let data = pattern(1_000_000);
    let sent = data.clone();
    let echo = tokio::spawn(async move {
        let mut all = Vec::new();
        far.read_to_end(&mut all).await.unwrap();
        far.write_all(&all).await.unwrap();
    });
    send(&mut up, &sent).await.unwrap();
    up.send_data(Bytes::new(), true).unwrap();
    let echoed = timeout(PATIENCE, read_all(&mut down)).await.unwrap();
    assert!(echoed.unwrap() == data);
    echo.await.unwrap();
    drop((up, down));
    // The origin resets it.
    let (up, mut down, far) = open().await;
    far.set_zero_linger().unwrap();
    drop(far);
    let broken = timeout(PATIENCE, read_all(&mut down)).await.unwrap();
    assert_eq!(reason(broken), Reason::CONNECT_ERROR);
    drop((up, down));
    // The client does, in the middle and after its own end.
    for ends in [false, true] {
        let (mut up, _down, mut far) = open().await;
        send(&mut up, b"hello").await.unwrap();
        far.read_exact(&mut [0; 5]).await.unwrap();
        if ends {
            up.send_data(Bytes::new(), true).unwrap();
            assert_eq!(far.read(&mut [0; 5]).await.unwrap(), 0);
        }
        up.send_reset(Reason::CANCEL);
        until(|| served.prox.holdings().flows == 0).await;
    }
    // Where nobody is, the answer says so.
    drop(listener);
    let refused = client.ask(request(Method::CONNECT, &address, &[]), None);
    let refused = refused.await.unwrap();
    assert_eq!(refused.status, StatusCode::BAD_GATEWAY);
    drop(client);
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn a_stop_lets_streams_end_and_begins_no_more() {
    let (go_on, mut may_go_on) = tokio::sync::watch::channel(false);
    may_go_on.mark_unchanged();
    let origin = ScriptedOrigin::play(move |_, mut stream| {
        let mut may_go_on = may_go_on.clone();
        async move {
            let head = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf";
            stream.write_all(head.as_bytes()).await.unwrap();
            let _ = may_go_on.changed().await;
            let _ = stream.write_all(b"more").await;
        }
    })
    .await;
    let mut served = Served::with(config());
    let client = Http2Client::connect(served.at).await;
    let get = request(Method::GET, &origin.url("/"), &[]);
    let (answer, _) = client.open(get, true).await.unwrap();
    let answer = answer.await.unwrap();
    served.begin_stop();
    // GOAWAY comes, and then no stream begins.
    let refused = async {
        while client.get("http://127.0.0.1:1/").await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, refused).await.unwrap();
    go_on.send(true).unwrap();
    let answer = timeout(PATIENCE, whole(answer)).await.unwrap();
    assert_eq!(answer.unwrap().body, b"halfmore");
    drop(client);
    served.stop().await;
}

#[tokio::test]
async fn a_network_that_is_not_admitted_any_more_gets_no_more_streams() {
    let served = Served::with(config());
    let origin = shared(b"ok").await;
    let client = Http2Client::connect(served.at).await;
    assert_eq!(client.get(&origin.url("/")).await.unwrap().body, b"ok");
    let changed = ProxConfig {
        allow_addresses: vec!["127.0.0.4/32".parse().unwrap()],
        ..(*served.prox.config()).clone()
    };
    served.prox.set_config_source(move || Ok(changed.clone()));
    served.prox.reload().unwrap();
    let refused = client.get(&origin.url("/")).await;
    assert_eq!(reason(refused), Reason::REFUSED_STREAM);
    drop(client);
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn what_is_refused_of_http_1_is_refused_of_http_2() {
    let served = Served::with(config());
    let origin = shared(b"ok").await;
    let url = origin.url("/");
    let client = Http2Client::connect(served.at).await;
    for (method, url, fields, status) in [
        ("GET", &*url, &[("host", "other.example")][..], 400),
        ("GET", "ftp://127.0.0.1/", &[], 501),
        ("GET", "http://user@127.0.0.1/", &[], 400),
        ("TRACE", &url, &[], 501),
        ("ENROL", &url, &[], 400),
        ("CONNECT", "127.0.0.1:25", &[], 403),
    ] {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let shown = format!("{method} {url} {fields:?}");
        let refused = client
            .ask(request(method, url, fields), None)
            .await
            .unwrap();
        assert_eq!(
            refused.status.as_u16(),
            status,
            "{shown}: {}",
            text(&refused)
        );
    }
    // Bytes that do not fit the length are no body.
    for length in ["2", "4"] {
        let put = request(Method::PUT, &url, &[("content-length", length)]);
        match client.ask(put, Some(b"abc")).await {
            Ok(answer) => assert_eq!(answer.status, StatusCode::BAD_REQUEST),
            Err(error) => assert_eq!(error.reason(), Some(Reason::PROTOCOL_ERROR), "{error}"),
        }
    }
    assert_eq!(origin.requests().len(), 0);
    // Trailers break nothing.
    let put = request(Method::PUT, &url, &[]);
    let (answer, mut up) = client.open(put, false).await.unwrap();
    send(&mut up, b"abc").await.unwrap();
    let mut trailers = http::HeaderMap::new();
    trailers.insert("x-secret", "1".parse().unwrap());
    up.send_trailers(trailers).unwrap();
    let answer = timeout(PATIENCE, answer).await.unwrap().unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(!origin.requests()[0].head.contains("x-secret"));
    drop((answer, up, client));
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused_and_the_connection_goes_on() {
    let served = Served::with(config());
    let origin = shared(b"ok").await;
    let client = Http2Client::connect(served.at).await;
    let large = "x".repeat(10_000);
    let fields = ["x-1", "x-2", "x-3", "x-4"].map(|name| (name, &*large));
    let oversized = request(Method::GET, &origin.url("/"), &fields);
    let refused = client.ask(oversized, None).await.unwrap();
    assert_eq!(refused.status, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    let many: Vec<_> = (0..200).map(|number| format!("x-{number}")).collect();
    let many: Vec<_> = many.iter().map(|name| (&**name, "1")).collect();
    let refused = client.ask(request(Method::GET, &origin.url("/"), &many), None);
    assert_eq!(refused.await.unwrap().status, StatusCode::BAD_REQUEST);
    assert_eq!(client.get(&origin.url("/")).await.unwrap().body, b"ok");
    assert_eq!(origin.requests().len(), 1);
    drop(client);
    served.stop().await;
}

#[tokio::test]
async fn rapid_resets_and_heads_without_end_close_their_connection_alone() {
    let served = Served::with(config());
    let origin = shared(b"ok").await;
    let url = origin.url("/");
    let host = url.trim_start_matches("http://").trim_end_matches('/');
    let block = hpack(&[
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", host),
        (":path", "/none"),
        ("cache-control", "no-store"),
    ]);
    let other = Http2Client::connect(served.at).await;
    let mut raw = RawHttp2::connect(served.at).await;
    for number in 0..20_000 {
        let stream = 2 * number + 1;
        let cancel = u32::from(Reason::CANCEL).to_be_bytes();
        let flags = END_STREAM | END_HEADERS;
        if raw.send(HEADERS, flags, stream, &block).await.is_err()
            || raw.send(RST_STREAM, 0, stream, &cancel).await.is_err()
        {
            break;
        }
    }
    let calm = [None, Some(Reason::ENHANCE_YOUR_CALM)];
    let reason = raw.goaway().await;
    assert!(calm.contains(&reason), "{reason:?}");
    let asked = origin.requests().len();
    assert!(asked < 500, "{asked} requests reached the origin");
    let mut raw = RawHttp2::connect(served.at).await;
    raw.send(HEADERS, END_STREAM, 1, &block).await.unwrap();
    let value = "x".repeat(120);
    let more = hpack(&[("x-more", &*value); 100]);
    let mut sent = 0;
    while sent < 50_000_000 && raw.send(CONTINUATION, 0, 1, &more).await.is_ok() {
        sent += more.len();
    }
    assert!(sent < 20_000_000, "{sent} bytes were taken");
    let reason = raw.goaway().await;
    assert!(calm.contains(&reason), "{reason:?}");
    assert_eq!(other.get(&url).await.unwrap().body, b"ok");
    drop((other, raw));
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn a_client_that_has_its_streams_reset_loses_its_connection() {
    let served = Served::with(config());
    let origin = shared(b"ok").await;
    let url = origin.url("/");
    let host = url.trim_start_matches("http://").trim_end_matches('/');
    let block = hpack(&[
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", host),
        (":path", "/none"),
        ("cache-control", "no-store"),
    ]);
    let mut raw = RawHttp2::connect(served.at).await;
    let most = i32::MAX.to_be_bytes();
    let mut streams = 0;
    while streams < 20_000 {
        let stream = 2 * streams + 1;
        let flags = END_STREAM | END_HEADERS;
        // A window that overflows is an error of its stream (RFC 9113 §6.9.1).
        if raw.send(HEADERS, flags, stream, &block).await.is_err()
            || raw.send(WINDOW_UPDATE, 0, stream, &most).await.is_err()
        {
            break;
        }
        streams += 1;
    }
    let reason = raw.goaway().await;
    let calm = [None, Some(Reason::ENHANCE_YOUR_CALM)];
    assert!(calm.contains(&reason), "{reason:?}");
    let asked = origin.requests().len();
    assert!(asked < 500, "{asked} requests reached the origin");
    drop(raw);
    released(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_away_gives_its_flows_back() {
    let served = Served::with(config());
    let large = shared(&pattern(LARGE)).await;
    let client = Http2Client::connect(served.at).await;
    let get = request(Method::GET, &large.url("/"), &[]);
    let (one, _) = client.open(get.clone(), true).await.unwrap();
    let (two, mut up) = client.open(get, true).await.unwrap();
    let (one, two) = (one.await.unwrap(), two.await.unwrap());
    assert_eq!(served.prox.holdings().flows, 2);
    up.send_reset(Reason::CANCEL);
    until(|| served.prox.holdings().flows == 1).await;
    drop((one, two, up, client));
    released(&served).await;
    served.stop().await;
}
