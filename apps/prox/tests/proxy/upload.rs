//! PUT and POST: spooled whole, sent on once, answered in the origin's own words.

use std::sync::Arc;
use std::time::Duration;

use crate::support::*;
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_lab_rig::port::HeldPort;
use cedos_prox::{Prox, ProxConfig, ProxFlowOutcome};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;

/// An origin that reads bodies as their `Content-Length` says, keeps them, and answers `answer`.
async fn store(answer: &'static str) -> (ScriptedOrigin, Arc<Mutex<Vec<Vec<u8>>>>) {
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let kept = bodies.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let kept = kept.clone();
        async move {
            if let Some(body) = request.body(&mut stream).await {
                kept.lock().push(body);
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        }
    })
    .await;
    (origin, bodies)
}

fn put(url: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut request = format!("PUT {url} HTTP/1.1\r\nHost: h\r\n{headers}\r\n").into_bytes();
    request.extend(body);
    request
}

fn sized(url: &str, body: &[u8]) -> Vec<u8> {
    put(url, &format!("Content-Length: {}\r\n", body.len()), body)
}

const CREATED: &str = "HTTP/1.1 201 Created\r\nContent-Length: 5\r\nLocation: /new\r\n\r\nthere";

#[tokio::test]
async fn an_upload_arrives_whole_and_the_device_gets_the_origins_own_answer() {
    let (origin, bodies) = store(CREATED).await;
    let prox = prox();
    let data = pattern(5_000_000);
    let answer = ask(&prox, sized(&origin.url("/a?b"), &data)).await.whole();
    assert_eq!(
        (answer.status, answer.body.as_slice()),
        (201, b"there".as_slice())
    );
    assert_eq!(answer.header("location"), "/new");
    assert_eq!(answer.header("via"), "1.1 d2prox");
    for absent in ["etag", "cache-status", "accept-ranges"] {
        assert_eq!(answer.header(absent), "", "{absent}");
    }
    assert!(bodies.lock().as_slice() == [data]);
    let head = origin.requests()[0].clone();
    assert!(head.head.starts_with("PUT /a?b HTTP/1.1\r\n"), "{head:?}");
    assert_eq!(head.header("transfer-encoding"), None);
    until(|| prox.holdings() == Default::default()).await;
}

#[tokio::test]
async fn without_a_length_the_body_goes_to_the_flows_end_and_the_origin_is_told_its_length() {
    let (origin, bodies) = store(CREATED).await;
    for body in ["", "x", "a longer one"] {
        let answer = ask(&prox(), put(&origin.url("/"), "", body.as_bytes())).await;
        assert_eq!(answer.whole().status, 201);
        assert_eq!(bodies.lock().pop().unwrap(), body.as_bytes());
        let head = origin.requests().pop().unwrap();
        let length = body.len().to_string();
        assert_eq!(head.header("content-length"), Some(length.as_str()));
    }
}

#[tokio::test]
async fn a_body_that_is_not_as_long_as_it_says_reaches_no_origin() {
    let (origin, _) = store(CREATED).await;
    let smuggled = b"abcGET /admin HTTP/1.1\r\nHost: h\r\n\r\n";
    for body in [smuggled.as_slice(), b"ab", b""] {
        let answer = ask(
            &prox(),
            put(&origin.url("/"), "Content-Length: 3\r\n", body),
        )
        .await;
        assert_eq!(answer.whole().status, 400, "{} bytes", body.len());
    }
    assert_eq!(origin.requests().len(), 0);
}

#[tokio::test]
async fn what_comes_after_a_body_is_no_second_request() {
    let (origin, bodies) = store(CREATED).await;
    let (serving, mut device) = start(&prox(), CLIENT);
    device.send(sized(&origin.url("/"), b"abc")).await;
    let head = device.read_head().await;
    assert_eq!(head.status, 201);
    device.send(get(&origin.url("/admin"), "")).await;
    device.finish_sending().await;
    assert_eq!(device.read_rest().await, b"there");
    device.finished();
    assert_eq!(ended(serving).await.outcome, ProxFlowOutcome::Delivered);
    assert_eq!(origin.requests().len(), 1);
    assert_eq!(bodies.lock().as_slice(), [b"abc"]);
}

#[tokio::test]
async fn an_upload_that_breaks_off_reaches_no_origin_and_its_room_is_given_back() {
    let (origin, _) = store(CREATED).await;
    let prox = prox();
    for headers in ["", "Content-Length: 100000\r\n"] {
        let (serving, mut device) = start(&prox, CLIENT);
        device
            .send(put(&origin.url("/"), headers, &[7; 9_000]))
            .await;
        until(|| prox.holdings().memory_bytes >= 9_000).await;
        device.crash_with_reset();
        assert!(matches!(
            ended(serving).await.outcome,
            ProxFlowOutcome::Broken(_)
        ));
        until(|| prox.holdings() == Default::default()).await;
    }
    assert_eq!(origin.requests().len(), 0);
}

#[tokio::test]
async fn a_device_that_asks_first_hears_100_or_the_refusal() {
    let (origin, bodies) = store(CREATED).await;
    let expecting = |url: &str| put(url, "Content-Length: 3\r\nExpect: 100-continue\r\n", b"");
    let prox_open = prox();
    let (serving, mut device) = start(&prox_open, CLIENT);
    device.send(expecting(&origin.url("/"))).await;
    assert_eq!(device.read_head().await.status, 100);
    device.send("abc").await;
    device.finish_sending().await;
    assert_eq!(device.answer().await.whole().status, 201);
    ended(serving).await;
    assert_eq!(bodies.lock().as_slice(), [b"abc"]);
    let head = origin.requests()[0].clone();
    assert_eq!(head.header("expect"), None);

    let closed = Prox::new(ProxConfig {
        allow_private: false,
        ..config()
    });
    let answer = ask(&closed.unwrap(), expecting(&origin.url("/"))).await;
    assert_eq!(answer.whole().status, 403);
}

#[tokio::test]
async fn a_put_waits_for_an_origin_that_goes_away_and_a_post_is_never_sent_twice() {
    for (method, status, sent) in [("PUT", 201, 2), ("POST", 502, 1)] {
        let origin = ScriptedOrigin::play(|request, mut stream| async move {
            let body = request.body(&mut stream).await;
            if request.count > 0 && body.is_some() {
                let _ = stream.write_all(CREATED.as_bytes()).await;
            }
        })
        .await;
        let request = format!(
            "{method} {} HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc",
            origin.url("/")
        );
        let answer = ask(&prox(), request).await.whole();
        assert_eq!(answer.status, status, "{method}");
        assert_eq!(origin.requests().len(), sent, "{method}");
    }
}

#[tokio::test]
async fn an_origin_that_is_not_up_yet_gets_a_post_when_it_is() {
    // A port that nobody listens on until later.
    let held = HeldPort::take();
    let address = held.address();
    let (serving, mut device) = start(&prox(), CLIENT);
    device
        .send(format!(
            "POST http://{address}/ HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
        ))
        .await;
    device.finish_sending().await;
    // sleep: the first attempt is to be refused, and a port where nobody listens tells nothing
    tokio::time::sleep(Duration::from_millis(20)).await;
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let _origin = ScriptedOrigin::play_at(listener, None, |request, mut stream| async move {
        let got = request.body(&mut stream).await;
        assert_eq!(got.as_deref(), Some(b"abc".as_slice()));
        stream.write_all(CREATED.as_bytes()).await.unwrap();
    });
    assert_eq!(device.answer().await.whole().status, 201);
    ended(serving).await;
}

#[tokio::test]
async fn an_origin_may_answer_before_it_has_read_everything() {
    let origin = ScriptedOrigin::fixed(
        "HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    )
    .await;
    let answer = ask(&prox(), sized(&origin.url("/"), &pattern(50_000))).await;
    // The reset that follows an unread body may overtake the answer, as with any client of it.
    assert!([413, 502].contains(&answer.whole().status));
}

#[tokio::test]
async fn a_redirect_of_an_upload_is_the_devices_to_follow() {
    let (origin, _) = store(
        "HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
    )
    .await;
    let answer = ask(&prox(), sized(&origin.url("/"), b"abc")).await.whole();
    assert_eq!(
        (answer.status, answer.header("location")),
        (307, "/elsewhere")
    );
    assert_eq!(origin.requests().len(), 1);
}

#[tokio::test]
async fn uploads_have_the_quotas_of_copies() {
    let (origin, bodies) = store(CREATED).await;
    let prox = Prox::new(ProxConfig {
        client_pinned_bytes_max: 10_000,
        object_memory_bytes_max: 1_000,
        memory_quota_bytes: 2_000,
        disk_quota_bytes: 8_000,
        ..config()
    })
    .unwrap();
    let url = origin.url("/");
    assert_eq!(
        ask(&prox, sized(&url, &[1; 9_000])).await.whole().status,
        413
    );
    let unknown = put(&url, "", &[1; 9_000]);
    assert_eq!(ask(&prox, unknown).await.whole().status, 503);
    // Beyond memory, within the disk.
    assert_eq!(
        ask(&prox, put(&url, "", &[1; 7_000])).await.whole().status,
        201
    );
    assert_eq!(bodies.lock().as_slice(), [vec![1; 7_000]]);
    until(|| prox.holdings() == Default::default()).await;
}

/// What an origin does with a request that waits for 100.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnExpect {
    /// The origin says 100, and reads the body.
    Continue,
    /// The origin waits for the body.
    Nothing,
    /// The origin answers 417.
    Refuse,
    /// The origin closes the connection, as if it had done so before the request came.
    Close,
    /// The origin says 100, reads the body, and closes the connection.
    CloseLater,
}

/// The requests of each connection, and their bodies, in order.
type Conns = Arc<Mutex<Vec<Vec<(String, Vec<u8>)>>>>;

/// An origin that answers any number of requests on a connection.
async fn keeping_origin(on_expect: OnExpect) -> (String, Conns) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let conns = Conns::default();
    let told = conns.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let number = {
                let mut conns = told.lock();
                conns.push(Vec::new());
                conns.len() - 1
            };
            let told = told.clone();
            tokio::spawn(async move {
                let _ = keep_answering(stream, on_expect, |request| {
                    told.lock()[number].push(request);
                })
                .await;
            });
        }
    });
    (url, conns)
}

async fn keep_answering(
    stream: tokio::net::TcpStream,
    on_expect: OnExpect,
    mut on_request: impl FnMut((String, Vec<u8>)),
) -> std::io::Result<()> {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
    let mut stream = BufReader::new(stream);
    loop {
        let (mut first, mut length, mut is_waited_for) = (String::new(), 0, false);
        if stream.read_line(&mut first).await? == 0 {
            return Ok(());
        }
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await?;
            let line = line.trim().to_ascii_lowercase();
            if let Some(digits) = line.strip_prefix("content-length: ") {
                length = digits.parse().unwrap();
            }
            is_waited_for |= line == "expect: 100-continue";
            if line.is_empty() {
                break;
            }
        }
        if is_waited_for {
            match on_expect {
                OnExpect::Continue | OnExpect::CloseLater => {
                    let interim = b"HTTP/1.1 100 Continue\r\n\r\n";
                    stream.get_mut().write_all(interim).await?;
                }
                OnExpect::Nothing => {}
                OnExpect::Refuse => {
                    let refusal = b"HTTP/1.1 417 No\r\nContent-Length: 0\r\n\r\n";
                    return stream.get_mut().write_all(refusal).await;
                }
                OnExpect::Close => return Ok(()),
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        on_request((first.trim().to_owned(), body));
        if is_waited_for && on_expect == OnExpect::CloseLater {
            return Ok(());
        }
        let answer = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok";
        stream.get_mut().write_all(answer).await?;
    }
}

/// How many requests came by each connection.
fn by_conn(conns: &Conns) -> Vec<usize> {
    conns.lock().iter().map(Vec::len).collect()
}

fn post(url: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let mut request =
        format!("POST {url} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n").into_bytes();
    request.extend(body);
    request
}

/// Sends an upload, and lets the connection be kept.
async fn send_and_keep(prox: &Arc<Prox>, request: Vec<u8>) -> u16 {
    let status = ask(prox, request).await.whole().status;
    // sleep: that the connection is kept shows in nothing until it is used
    tokio::time::sleep(Duration::from_millis(50)).await;
    status
}

#[tokio::test]
async fn uploads_of_one_client_to_one_origin_share_a_connection() {
    let (url, conns) = keeping_origin(OnExpect::Continue).await;
    let prox = prox();
    for n in 0..10u8 {
        assert_eq!(send_and_keep(&prox, sized(&url, &[n; 9])).await, 201);
        assert_eq!(send_and_keep(&prox, post(&url, &[n; 99_999])).await, 201);
    }
    assert_eq!(by_conn(&conns), [20]);
    let posts: Vec<_> = conns.lock()[0].iter().skip(1).step_by(2).cloned().collect();
    let expected = (0..10u8).map(|n| ("POST / HTTP/1.1".to_owned(), vec![n; 99_999]));
    assert!(posts == expected.collect::<Vec<_>>());
    // Without a body it is not known whether the origin has received it.
    assert_eq!(send_and_keep(&prox, post(&url, b"")).await, 201);
    assert_eq!(by_conn(&conns), [20, 1]);
    // Another client never gets it.
    let (serving, mut device) = start(&prox, [2; 32]);
    device.send(sized(&url, b"abc")).await;
    device.finish_sending().await;
    assert_eq!(device.answer().await.whole().status, 201);
    ended(serving).await;
    assert_eq!(by_conn(&conns), [20, 1, 1]);
}

#[tokio::test]
async fn a_post_on_a_connection_that_its_origin_closes_is_delivered_once_by_another() {
    let (url, conns) = keeping_origin(OnExpect::Close).await;
    let prox = prox();
    assert_eq!(send_and_keep(&prox, post(&url, b"one")).await, 201);
    assert_eq!(send_and_keep(&prox, post(&url, b"two")).await, 201);
    let bodies: Vec<_> = conns.lock().iter().flatten().cloned().collect();
    let bodies: Vec<_> = bodies.iter().map(|(_, body)| &body[..]).collect();
    assert_eq!(bodies, [b"one", b"two"]);
    assert_eq!(by_conn(&conns), [1, 1]);
}

#[tokio::test]
async fn a_post_whose_body_went_out_on_a_kept_connection_is_not_sent_again() {
    let (url, conns) = keeping_origin(OnExpect::CloseLater).await;
    let prox = prox();
    assert_eq!(send_and_keep(&prox, post(&url, b"one")).await, 201);
    assert_eq!(send_and_keep(&prox, post(&url, b"two")).await, 502);
    assert_eq!(by_conn(&conns), [2]);
}

#[tokio::test]
async fn an_origin_that_does_not_say_100_gets_later_posts_by_new_connections() {
    for (on_expect, expected) in [
        (OnExpect::Nothing, &[2, 1, 1][..]),
        (OnExpect::Refuse, &[1, 1, 1, 1][..]),
    ] {
        let (url, conns) = keeping_origin(on_expect).await;
        let prox = prox();
        for body in [b"a", b"b", b"c", b"d"] {
            assert_eq!(send_and_keep(&prox, post(&url, body)).await, 201);
        }
        assert_eq!(by_conn(&conns), expected);
        let bodies = conns
            .lock()
            .iter()
            .flatten()
            .map(|(_, body)| body[0])
            .collect::<Vec<_>>();
        assert_eq!(bodies, b"abcd");
    }
}
