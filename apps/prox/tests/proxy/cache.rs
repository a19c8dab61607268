//! The cache that all clients share: who gets whose copy, and how often the origin is asked.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use aws_lc_rs::digest::{Context, SHA256};
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, proper, reply};
use cedos_prox::{Prox, ProxConfig, ProxHoldings, ServedFrom, TcpFlowListener, serve};
use d2tp_driver::HostKey;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpSocket;
use tokio::sync::Semaphore;

use crate::support::*;

const OTHER: HostKey = [2; 32];

/// An origin whose answers have this head beside their length, and a body that counts the requests.
async fn counting(fields: &'static str) -> ScriptedOrigin {
    ScriptedOrigin::start(move |request| {
        let body = format!("answer {}", request.count);
        whole(fields, &body)
    })
    .await
}

fn whole(fields: &str, body: &str) -> OriginReply {
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n{fields}\r\n");
    OriginReply((head + body).into(), ReplyEnd::Close)
}

async fn ask_as(prox: &Arc<Prox>, client: HostKey, request: String) -> ProxyReply {
    let (serving, mut device) = start(prox, client);
    device.send(request).await;
    device.finish_sending().await;
    let answer = device.answer().await;
    ended(serving).await;
    answer
}

/// The bodies that two clients get, one after the other.
async fn both(origin: &ScriptedOrigin, fields: (&str, &str)) -> (ProxyReply, ProxyReply) {
    let prox = prox();
    let url = origin.url("/");
    let one = ask_as(&prox, CLIENT, get(&url, fields.0)).await.whole();
    let other = ask_as(&prox, OTHER, get(&url, fields.1)).await.whole();
    (one, other)
}

#[tokio::test]
async fn what_one_client_fetched_answers_another_and_says_how_old_it_is() {
    let origin = counting("Cache-Control: max-age=60\r\nAge: 7\r\n").await;
    let (one, other) = both(&origin, ("", "")).await;
    assert_eq!(one.body, b"answer 0");
    assert_eq!(
        one.header("cache-status"),
        "d2prox; fwd=uri-miss; fwd-status=200; stored"
    );
    assert_eq!(other.body, b"answer 0");
    let age: u64 = other.header("age").parse().unwrap();
    assert!((7..60).contains(&age), "{age}");
    let status = other.header("cache-status");
    assert!(status.starts_with("d2prox; hit; ttl="), "{status}");
    assert_eq!(origin.requests().len(), 1);
}

#[tokio::test]
async fn nothing_private_is_ever_shared() {
    let plain = "Cache-Control: max-age=60\r\n";
    let public = "Cache-Control: public, max-age=60, s-maxage=60, must-revalidate\r\n";
    for (fields, asked) in [
        ("Cache-Control: private, max-age=60\r\n", ""),
        ("Cache-Control: PRIVATE=\"x\", max-age=60\r\n", ""),
        (
            "Cache-Control: max-age=60\r\nCache-Control: No-Store\r\n",
            "",
        ),
        (
            "Cache-Control: max-age=60\r\nCDN-Cache-Control: private\r\n",
            "",
        ),
        (
            "Cache-Control: public, max-age=60\r\nSet-Cookie: a=b\r\n",
            "",
        ),
        (plain, "Authorization: Basic x\r\n"),
        (public, "Authorization: Basic x\r\n"),
        (plain, "Cookie: a=b\r\n"),
        (public, "Cookie: a=b\r\n"),
        (plain, "Cache-Control: no-store\r\n"),
        // Who could choose what others get.
        (plain, "X-Forwarded-Host: evil.example\r\n"),
        (plain, "X-HTTP-Method-Override: DELETE\r\n"),
        (plain, "If-Match: \"x\"\r\n"),
        ("Cache-Control: max-age=60\r\nVary: *\r\n", ""),
        ("", ""),
    ] {
        let origin = counting(fields).await;
        let (one, other) = both(&origin, (asked, "")).await;
        assert_eq!(one.body, b"answer 0", "{fields} {asked}");
        assert_eq!(other.body, b"answer 1", "{fields} {asked}");
    }
}

#[tokio::test]
async fn who_has_credentials_gets_no_answer_that_others_got() {
    let origin = counting("Cache-Control: public, max-age=60\r\n").await;
    let (_, other) = both(&origin, ("", "Authorization: Basic x\r\n")).await;
    assert_eq!(other.body, b"answer 1");
}

#[tokio::test]
async fn an_answer_of_one_variant_is_not_given_to_another() {
    let origin = counting("Cache-Control: max-age=60\r\nVary: Accept-Language, X\r\n").await;
    let prox = prox();
    let url = origin.url("/");
    let mut bodies = Vec::new();
    for fields in [
        "Accept-Language: de\r\nX: 1\r\n",
        "Accept-Language: en\r\nX: 1\r\n",
        "X: 1\r\nAccept-Language:  DE\r\n",
        "Accept-Language: de\r\n",
    ] {
        let answer = ask_as(&prox, CLIENT, get(&url, fields)).await.whole();
        bodies.push(String::from_utf8(answer.body).unwrap());
    }
    assert_eq!(bodies, ["answer 0", "answer 1", "answer 0", "answer 2"]);
}

/// An origin whose object is validated: 304 with further fields, if the request has the right tag.
async fn validating(first: &'static str, then: &'static str) -> ScriptedOrigin {
    ScriptedOrigin::start(move |request| match request.header("if-none-match") {
        Some("\"v1\"") => {
            let head = format!("HTTP/1.1 304 Not Modified\r\nETag: \"v1\"\r\n{then}\r\n");
            OriginReply(head.into(), ReplyEnd::Close)
        }
        _ => whole(&format!("ETag: \"v1\"\r\n{first}"), "the object"),
    })
    .await
}

#[tokio::test]
async fn a_stale_copy_is_validated_and_gets_the_fields_of_the_304() {
    let origin = validating("X: 1\r\nY: 1\r\n", "X: 2\r\nCache-Control: max-age=60\r\n").await;
    let prox = prox();
    let url = origin.url("/");
    ask_as(&prox, CLIENT, get(&url, "")).await.whole();
    let second = ask_as(&prox, OTHER, get(&url, "")).await.whole();
    assert_eq!(second.body, b"the object");
    assert_eq!((second.header("x"), second.header("y")), ("2", "1"));
    assert_eq!(
        second.header("cache-status"),
        "d2prox; fwd=stale; fwd-status=304"
    );
    // It is fresh now.
    let third = ask_as(&prox, CLIENT, get(&url, "")).await.whole();
    assert_eq!(
        (third.header("x"), third.body.as_slice()),
        ("2", &b"the object"[..])
    );
    assert_eq!(origin.requests().len(), 2);
    // A client that has it gets no body, whatever form of the tag it knows.
    let fields = "If-None-Match: \"other\", W/\"v1\"\r\n";
    let known = ask_as(&prox, CLIENT, get(&url, fields)).await;
    assert_eq!((known.status, known.body.len()), (304, 0));
    assert_eq!(origin.requests().len(), 2);
    // Who asks for the origin's word gets it.
    let fields = "Cache-Control: no-cache\r\n";
    ask_as(&prox, CLIENT, get(&url, fields)).await.whole();
    assert_eq!(origin.requests().len(), 3);
}

#[tokio::test]
async fn an_origin_that_takes_its_leave_back_is_obeyed() {
    let origin = validating("", "Cache-Control: private, max-age=60\r\n").await;
    let prox = prox();
    let url = origin.url("/");
    for expected in [1, 2, 3] {
        let answer = ask_as(&prox, CLIENT, get(&url, "")).await.whole();
        assert_eq!(answer.body, b"the object");
        assert_eq!(origin.requests().len(), expected);
    }
    let third = &origin.requests()[2];
    assert_eq!(third.header("if-none-match"), None, "it was not kept");
}

#[tokio::test]
async fn a_copy_is_used_while_it_is_validated_where_the_origin_allows_that() {
    let origin = validating(
        "Cache-Control: max-age=0, stale-while-revalidate=60\r\n",
        "Cache-Control: max-age=60\r\n",
    )
    .await;
    let prox = prox();
    let url = origin.url("/");
    ask_as(&prox, CLIENT, get(&url, "")).await.whole();
    let second = ask_as(&prox, OTHER, get(&url, "")).await.whole();
    assert!(
        second
            .header("cache-status")
            .starts_with("d2prox; hit; ttl=")
    );
    until(|| origin.requests().len() == 2).await;
}

#[tokio::test]
async fn a_stale_copy_survives_its_origin_unless_that_forbids_it() {
    for (fields, expected) in [
        ("Cache-Control: max-age=1\r\nAge: 5\r\n", 200),
        (
            "Cache-Control: max-age=1, must-revalidate\r\nAge: 5\r\n",
            502,
        ),
        ("Cache-Control: s-maxage=1\r\nAge: 5\r\n", 502),
        ("Cache-Control: max-age=1\r\nAge: 900000\r\n", 502),
        (
            "Cache-Control: max-age=1, stale-if-error=2\r\nAge: 5\r\n",
            502,
        ),
        ("ETag: \"never fresh\"\r\n", 502),
    ] {
        let origin = counting(fields).await;
        let prox = prox();
        let url = origin.url("/");
        ask_as(&prox, CLIENT, get(&url, "")).await.whole();
        origin.stop();
        let answer = ask_as(&prox, OTHER, get(&url, "")).await;
        assert_eq!(answer.status, expected, "{fields}");
    }
}

#[tokio::test]
async fn ranges_of_all_clients_come_from_one_copy() {
    let origin = ScriptedOrigin::start(|_: &OriginRequest| {
        whole("Cache-Control: max-age=60\r\n", "0123456789")
    })
    .await;
    let prox = prox();
    let url = origin.url("/");
    let first = ask_as(&prox, CLIENT, get(&url, "Range: bytes=2-4\r\n"))
        .await
        .whole();
    assert_eq!((first.status, first.body.as_slice()), (206, &b"234"[..]));
    let second = ask_as(&prox, OTHER, get(&url, "Range: bytes=-3\r\n"))
        .await
        .whole();
    assert_eq!((second.status, second.body.as_slice()), (206, &b"789"[..]));
    assert_eq!(second.header("content-range"), "bytes 7-9/10");
    let third = ask_as(&prox, CLIENT, get(&url, "")).await.whole();
    assert_eq!(third.body, b"0123456789");
    let head = format!("HEAD {url} HTTP/1.1\r\nHost: h\r\n\r\n");
    let fourth = ask_as(&prox, OTHER, head).await;
    assert_eq!(
        (fourth.header("content-length"), fourth.body.len()),
        ("10", 0)
    );
    assert_eq!(origin.requests().len(), 1);
    assert_eq!(origin.requests()[0].header("range"), None);
}

#[tokio::test]
async fn a_flow_keeps_its_version_while_others_get_the_next() {
    let part = 100_000;
    let gate = Arc::new(Semaphore::new(0));
    let opened = gate.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let gate = gate.clone();
        async move {
            let version = u8::try_from(request.count).unwrap() + b'a';
            let head = format!(
                "HTTP/1.1 200 OK\r\nETag: \"{version}\"\r\nContent-Length: {}\r\n\
                 Cache-Control: max-age=60\r\n\r\n",
                2 * part
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&vec![version; part]).await.unwrap();
            gate.acquire().await.unwrap().forget();
            stream.write_all(&vec![version; part]).await.unwrap();
        }
    })
    .await;
    let prox = prox();
    let url = origin.url("/");
    let (first, mut one) = start(&prox, CLIENT);
    one.send(get(&url, "")).await;
    assert_eq!(one.read_head().await.header("etag"), "\"97\"");
    assert!(one.read(1000).await.iter().all(|byte| *byte == b'a'));
    // Another asks for the newest, while the first is half way.
    let (second, mut other) = start(&prox, OTHER);
    other.send(get(&url, "Cache-Control: no-cache\r\n")).await;
    assert_eq!(other.read_head().await.header("etag"), "\"98\"");
    opened.add_permits(2);
    let body = one.read(2 * part - 1000).await;
    assert!(body.iter().all(|byte| *byte == b'a'), "one version");
    let body = other.read(2 * part).await;
    assert!(body.iter().all(|byte| *byte == b'b'));
    one.finished();
    other.finished();
    ended(first).await;
    ended(second).await;
    let later = ask_as(&prox, CLIENT, get(&url, "")).await.whole();
    assert_eq!(later.body[0], b'b');
}

/// Serves a thousand clients at the same time, and returns their bodies. The origin's answer waits for `gate`.
async fn a_thousand(origin: &ScriptedOrigin, prox: &Arc<Prox>, gate: &Semaphore) -> Vec<Vec<u8>> {
    let url = origin.url("/object");
    let mut asking = Vec::new();
    for client in 0..1000u16 {
        let mut key = [0; 32];
        key[..2].copy_from_slice(&client.to_be_bytes());
        key[31] = 1;
        let (prox, request) = (prox.clone(), get(&url, ""));
        asking.push(tokio::spawn(
            async move { ask_as(&prox, key, request).await },
        ));
    }
    until(|| prox.holdings().flows == 1000).await;
    gate.add_permits(1000);
    let mut bodies = Vec::new();
    for asked in asking {
        bodies.push(asked.await.unwrap().whole().body);
    }
    bodies
}

async fn gated(fields: &'static str, body: Vec<u8>) -> (ScriptedOrigin, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let opened = gate.clone();
    let body = Arc::new(body);
    let origin = ScriptedOrigin::play(move |_, mut stream| {
        let (gate, body) = (gate.clone(), body.clone());
        async move {
            gate.acquire().await.unwrap().forget();
            let length = body.len();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n{fields}\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&body).await.unwrap();
        }
    })
    .await;
    (origin, opened)
}

#[tokio::test]
async fn a_thousand_who_miss_at_the_same_time_are_one_request_to_the_origin() {
    let body = pattern(200_000);
    let (origin, gate) = gated("Cache-Control: max-age=60\r\n", body.clone()).await;
    let prox = prox();
    for got in a_thousand(&origin, &prox, &gate).await {
        assert!(got == body);
    }
    assert_eq!(origin.requests().len(), 1);
    assert_eq!(prox.holdings().cached_bytes, 200_000);
}

#[tokio::test]
async fn a_thousand_who_ask_for_something_private_are_a_thousand_requests() {
    let (origin, gate) = gated("Cache-Control: private, max-age=60\r\n", b"mine".to_vec()).await;
    let prox = prox();
    for got in a_thousand(&origin, &prox, &gate).await {
        assert_eq!(got, b"mine");
    }
    assert_eq!(origin.requests().len(), 1000);
    assert_eq!(prox.holdings().cached_responses, 0);
}

#[tokio::test]
async fn who_waits_for_a_client_that_goes_away_asks_instead() {
    let (origin, gate) = gated("Cache-Control: max-age=60\r\n", b"the object".to_vec()).await;
    let prox = prox();
    let url = origin.url("/");
    let (first, mut leading) = start(&prox, CLIENT);
    leading.send(get(&url, "")).await;
    until(|| origin.requests().len() == 1).await;
    let (second, mut waiting) = start(&prox, OTHER);
    waiting.send(get(&url, "")).await;
    waiting.finish_sending().await;
    until(|| prox.holdings().flows == 2).await;
    leading.crash();
    ended(first).await;
    gate.add_permits(2);
    assert_eq!(waiting.answer().await.whole().body, b"the object");
    ended(second).await;
}

#[tokio::test]
async fn a_change_at_the_origin_takes_the_old_answer_from_the_cache() {
    for method in ["POST", "PUT", "DELETE", "M-SEARCH"] {
        let origin = counting("Cache-Control: max-age=60\r\n").await;
        let prox = prox();
        let url = origin.url("/");
        ask_as(&prox, CLIENT, get(&url, "")).await.whole();
        let fields = "Host: h\r\nContent-Length: 0\r\n";
        let change = format!("{method} {url} HTTP/1.1\r\n{fields}\r\n");
        ask_as(&prox, OTHER, change).await.whole();
        let after = ask_as(&prox, CLIENT, get(&url, "")).await.whole();
        assert_eq!(after.body, b"answer 2", "{method}");
    }
}

#[tokio::test]
async fn an_answer_that_is_overtaken_by_a_change_is_not_kept() {
    let asked = Arc::new(AtomicUsize::new(0));
    let gate = Arc::new(Semaphore::new(0));
    let (count, open) = (asked.clone(), gate.clone());
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let (asked, gate) = (asked.clone(), gate.clone());
        async move {
            if request.method == "GET" && asked.fetch_add(1, Ordering::Relaxed) == 0 {
                gate.acquire().await.unwrap().forget();
            }
            let OriginReply(bytes, _) = whole("Cache-Control: max-age=60\r\n", "an answer");
            stream.write_all(&bytes).await.unwrap();
        }
    })
    .await;
    let prox = prox();
    let url = origin.url("/");
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&url, "")).await;
    device.finish_sending().await;
    until(|| count.load(Ordering::Relaxed) == 1).await;
    let change = format!("POST {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n");
    ask_as(&prox, OTHER, change).await.whole();
    open.add_permits(1);
    device.answer().await.whole();
    ended(serving).await;
    ask_as(&prox, OTHER, get(&url, "")).await.whole();
    assert_eq!(count.load(Ordering::Relaxed), 2, "the first was not kept");
}

#[tokio::test]
async fn a_full_cache_lets_go_of_what_was_used_least_recently() {
    let origin = ScriptedOrigin::start(|request| {
        let body = format!("{:0>1000}", request.path);
        whole("Cache-Control: max-age=60\r\n", &body)
    })
    .await;
    let prox = Prox::new(ProxConfig {
        cache_bytes_max: 3000,
        cache_object_bytes_max: 2000,
        ..config()
    })
    .unwrap();
    let asked = async |path: &str| {
        let request = get(&origin.url(path), "");
        ask_as(&prox, CLIENT, request).await.whole();
        origin.requests().len()
    };
    assert_eq!(asked("/1").await, 1);
    assert_eq!(asked("/2").await, 2);
    assert_eq!(asked("/3").await, 3);
    assert_eq!(asked("/1").await, 3, "used again");
    assert_eq!(asked("/4").await, 4, "in the place of /2");
    assert_eq!(asked("/1").await, 4);
    assert_eq!(asked("/2").await, 5);
    assert_eq!(prox.holdings().cached_bytes, 3000);
}

#[tokio::test]
async fn an_object_that_outgrows_the_cache_becomes_its_clients_own() {
    // Its size is known at its end only.
    let origin = ScriptedOrigin::fixed(
        "HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nTransfer-Encoding: chunked\r\n\r\n\
         a\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n",
    )
    .await;
    let prox = Prox::new(ProxConfig {
        cache_bytes_max: 3000,
        cache_object_bytes_max: 15,
        ..config()
    })
    .unwrap();
    let url = origin.url("/");
    for expected in [1, 2] {
        let answer = ask_as(&prox, CLIENT, get(&url, "")).await.whole();
        assert_eq!(answer.body.len(), 20);
        assert_eq!(origin.requests().len(), expected);
    }
    until(|| prox.holdings() == Default::default()).await;
}

#[tokio::test]
async fn without_room_for_a_client_the_cache_gives_way() {
    let origin = ScriptedOrigin::start(|request| match request.path.as_str() {
        "/shared" => whole("Cache-Control: max-age=60\r\n", &"s".repeat(900)),
        _ => whole("Cache-Control: private\r\n", &"p".repeat(900)),
    })
    .await;
    let prox = Prox::new(ProxConfig {
        memory_quota_bytes: 0,
        disk_quota_bytes: 1000,
        ..config()
    })
    .unwrap();
    ask_as(&prox, CLIENT, get(&origin.url("/shared"), ""))
        .await
        .whole();
    assert_eq!(prox.holdings().cached_bytes, 900);
    let answer = ask_as(&prox, OTHER, get(&origin.url("/private"), "")).await;
    assert_eq!(answer.whole().body.len(), 900);
    assert_eq!(prox.holdings().cached_bytes, 0);
}

#[tokio::test]
async fn a_large_object_that_nobody_reads_any_more_is_not_fetched_on() {
    let origin = ScriptedOrigin::play(|_, mut stream| async move {
        let head =
            "HTTP/1.1 200 OK\r\nContent-Length: 500000000\r\nCache-Control: max-age=60\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&[b'x'; 1000]).await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let prox = prox();
    let answer = ask_as(&prox, CLIENT, get(&origin.url("/"), "Range: bytes=0-9\r\n")).await;
    assert_eq!(answer.whole().body.len(), 10);
    until(|| prox.holdings() == Default::default()).await;
}

/// Bytes of an object of which the origin sends a part, and of that part.
const OBJECT: usize = 500_000;
const PART: usize = 200_000;

/// What an origin answers to a request for an object.
type Answering = fn(&OriginRequest, &[u8]) -> Vec<u8>;

/// An origin that sends a part of an object to the first who asks, and answers others by `later`.
async fn stopping_origin(later: Answering) -> ScriptedOrigin {
    ScriptedOrigin::play(move |request, mut stream| async move {
        let body = pattern(OBJECT);
        if request.count > 0 {
            if request.method == "POST" {
                request.body(&mut stream).await;
            }
            // The proxy may have gone.
            let _ = stream.write_all(&later(&request, &body)).await;
            return;
        }
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {OBJECT}\r\nETag: \"v1\"\r\nCache-Control: max-age=60\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&body[..PART]).await.unwrap();
        std::future::pending::<()>().await;
    })
    .await
}

/// A client reads the beginning of an object and goes away, so that a part of it is in the cache.
async fn leave_a_part(prox: &Arc<Prox>, url: &str) {
    let answer = ask_as(prox, CLIENT, get(url, "Range: bytes=0-9\r\n")).await;
    assert_eq!(answer.whole().body.len(), 10);
    until(|| {
        let holdings = prox.holdings();
        holdings.cached_responses == 0 && (1..=PART as u64).contains(&holdings.cached_bytes)
    })
    .await;
}

#[tokio::test]
async fn a_part_that_nobody_read_on_is_completed_by_its_rest() {
    let origin = stopping_origin(|request, body| proper(request, body, "\"v1\"")).await;
    let prox = prox();
    let url = origin.url("/");
    leave_a_part(&prox, &url).await;
    let answer = ask_as(&prox, OTHER, get(&url, "")).await.whole();
    assert!(answer.body == pattern(OBJECT));
    assert_eq!(answer.header("etag"), "\"v1\"");
    assert_eq!(
        answer.header("cache-status"),
        "d2prox; fwd=partial; fwd-status=206; stored"
    );
    let asked = origin.requests();
    let from = asked[1].range_from().unwrap();
    assert!((1..=PART).contains(&from), "{from}");
    assert_eq!(asked[1].header("if-range"), Some("\"v1\""));
    // It is whole now, and as fresh as it was.
    let range = get(&url, "Range: bytes=499990-\r\n");
    let answer = ask_as(&prox, CLIENT, range).await.whole();
    assert!(answer.body == pattern(OBJECT)[499_990..]);
    let status = answer.header("cache-status");
    assert!(status.starts_with("d2prox; hit; ttl="), "{status}");
    assert_eq!(origin.requests().len(), 2);
}

#[tokio::test]
async fn a_part_of_what_the_origin_has_no_more_is_never_mixed_with_something_else() {
    let other = |request: &OriginRequest, body: &[u8]| {
        let changed: Vec<u8> = body.iter().map(|byte| byte ^ 1).collect();
        proper(request, &changed, "\"v2\"")
    };
    // It honours If-Range, or sends the rest of another object all the same.
    let careless = |request: &OriginRequest, body: &[u8]| {
        let changed: Vec<u8> = body.iter().map(|byte| byte ^ 1).collect();
        let mut request = request.clone();
        request.headers.remove("if-range");
        proper(&request, &changed, "\"v2\"")
    };
    let cases: [(Answering, usize); 2] = [(other, 2), (careless, 3)];
    for (later, requests) in cases {
        let origin = stopping_origin(later).await;
        let prox = prox();
        let url = origin.url("/");
        leave_a_part(&prox, &url).await;
        let answer = ask_as(&prox, OTHER, get(&url, "")).await.whole();
        let changed: Vec<u8> = pattern(OBJECT).iter().map(|byte| byte ^ 1).collect();
        assert!(answer.body == changed);
        assert_eq!(answer.header("etag"), "\"v2\"");
        assert_eq!(origin.requests().len(), requests);
    }
}

#[tokio::test]
async fn a_part_goes_when_room_is_needed_or_its_url_changes() {
    let origin = stopping_origin(|request, body| match &*request.method {
        "POST" => reply("204 No Content", &[], b""),
        _ => proper(request, body, "\"v1\""),
    })
    .await;
    let url = origin.url("/");
    let changed = prox();
    leave_a_part(&changed, &url).await;
    let post = format!("POST {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx");
    assert_eq!(ask_as(&changed, OTHER, post).await.status, 204);
    assert_eq!(changed.holdings().cached_bytes, 0);
    let answer = ask_as(&changed, OTHER, get(&url, "")).await.whole();
    assert!(answer.body == pattern(OBJECT));
    let asked = origin.requests();
    assert_eq!(asked.last().unwrap().range_from(), None);

    let origin = stopping_origin(|_, _| {
        let fields = [("Cache-Control", "private"), ("Content-Length", "550000")];
        reply("200 OK", &fields, &[b'p'; 550_000])
    })
    .await;
    let full = Prox::new(ProxConfig {
        memory_quota_bytes: 0,
        // Room for the other object, and not for a part besides, however little of it came.
        disk_quota_bytes: 550_500,
        ..config()
    })
    .unwrap();
    leave_a_part(&full, &origin.url("/")).await;
    let answer = ask_as(&full, OTHER, get(&origin.url("/private"), "")).await;
    assert_eq!(answer.whole().body.len(), 550_000);
    assert_eq!(full.holdings().cached_bytes, 0);
}

#[tokio::test]
async fn a_redirect_is_followed_to_what_is_shared() {
    let origin = ScriptedOrigin::start(|request| match request.path.as_str() {
        "/from" => OriginReply(
            "HTTP/1.1 302 Found\r\nLocation: /to\r\nContent-Length: 0\r\n\r\n".into(),
            ReplyEnd::Close,
        ),
        _ => whole("Cache-Control: max-age=60\r\n", "there"),
    })
    .await;
    let prox = prox();
    let asked = async |client, path: &str| {
        let answer = ask_as(&prox, client, get(&origin.url(path), ""))
            .await
            .whole();
        assert_eq!(answer.body, b"there");
        answer.header("content-location").to_owned()
    };
    assert_eq!(asked(CLIENT, "/from").await, origin.url("/to"));
    assert_eq!(asked(OTHER, "/from").await, origin.url("/to"));
    assert_eq!(asked(OTHER, "/to").await, "");
    let paths: Vec<_> = origin
        .requests()
        .into_iter()
        .map(|asked| asked.path)
        .collect();
    assert_eq!(paths, ["/from", "/to", "/from"]);
}

#[tokio::test]
async fn only_if_cached_asks_no_origin() {
    let origin = counting("Cache-Control: max-age=60\r\n").await;
    let prox = prox();
    let fields = "Cache-Control: only-if-cached\r\n";
    let answer = ask_as(&prox, CLIENT, get(&origin.url("/"), fields)).await;
    assert_eq!(answer.status, 504);
    ask_as(&prox, CLIENT, get(&origin.url("/"), ""))
        .await
        .whole();
    let answer = ask_as(&prox, OTHER, get(&origin.url("/"), fields)).await;
    assert_eq!(answer.status, 200);
    let known = format!("{fields}Authorization: Basic eDp5\r\n");
    let answer = ask_as(&prox, OTHER, get(&origin.url("/"), &known)).await;
    assert_eq!(answer.status, 504);
    assert_eq!(origin.requests().len(), 1);
}

#[tokio::test]
async fn without_a_quota_there_is_no_cache() {
    let origin = counting("Cache-Control: max-age=60\r\n").await;
    let prox = Prox::new(ProxConfig {
        cache_bytes_max: 0,
        ..config()
    })
    .unwrap();
    for body in ["answer 0", "answer 1"] {
        let answer = ask_as(&prox, CLIENT, get(&origin.url("/"), ""))
            .await
            .whole();
        assert_eq!(answer.body, body.as_bytes());
        assert!(
            answer
                .header("cache-status")
                .starts_with("d2prox; fwd=bypass")
        );
    }
}

#[tokio::test]
async fn the_log_names_the_cache() {
    let origin = counting("Cache-Control: max-age=60\r\n").await;
    let prox = prox();
    let mut served = Vec::new();
    for client in [CLIENT, OTHER] {
        let (serving, mut device) = start(&prox, client);
        device.send(get(&origin.url("/"), "")).await;
        device.finish_sending().await;
        device.answer().await.whole();
        served.push(ended(serving).await.served);
    }
    assert_eq!(served, [ServedFrom::Origin, ServedFrom::SharedCache]);
}

/// Reads an answer to its end: the SHA-256 of its body, and the body's length.
async fn digest_of(at: SocketAddr, from: Ipv4Addr, url: &str) -> (Vec<u8>, usize) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((from, 0))).unwrap();
    let mut stream = BufReader::with_capacity(64 * 1024, socket.connect(at).await.unwrap());
    stream.write_all(get(url, "").as_bytes()).await.unwrap();
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        assert!(
            stream.read_line(&mut line).await.unwrap() > 0,
            "a whole head"
        );
    }
    let mut digest = Context::new(&SHA256);
    let mut length = 0;
    loop {
        let bytes = stream.fill_buf().await.unwrap();
        if bytes.is_empty() {
            return (digest.finish().as_ref().to_vec(), length);
        }
        digest.update(bytes);
        length += bytes.len();
        let used = bytes.len();
        stream.consume(used);
    }
}

/// A thousand hosts that ask for 50 MB at the TCP port, and what the origin was asked.
async fn fifty_megabytes_for_a_thousand(fields: &'static str) -> (ScriptedOrigin, ProxHoldings) {
    let body = pattern(50_000_000);
    let expected = aws_lc_rs::digest::digest(&SHA256, &body).as_ref().to_vec();
    let (origin, gate) = gated(fields, body).await;
    let prox = Prox::new(ProxConfig {
        allow_addresses: vec!["127.0.0.0/8".parse().unwrap()],
        disk_quota_bytes: 60_000_000_000,
        ..config()
    })
    .unwrap();
    let listener =
        TcpFlowListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), prox.clone()).unwrap();
    let at = listener.local_addr().unwrap();
    let serving = tokio::spawn(serve(listener, prox.clone(), std::future::pending()));
    let mut asking = Vec::new();
    for client in 0..1000u16 {
        let [high, low] = client.to_be_bytes();
        let url = origin.url("/object");
        let from = Ipv4Addr::new(127, 1 + high, low, 1);
        asking.push(tokio::spawn(async move { digest_of(at, from, &url).await }));
    }
    until(|| prox.holdings().flows == 1000).await;
    gate.add_permits(1000);
    for asked in asking {
        assert!(asked.await.unwrap() == (expected.clone(), 50_000_000));
    }
    let holdings = prox.holdings();
    serving.abort();
    (origin, holdings)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "moves 50 GB: cargo test -p cedos-prox --test proxy -- --ignored fifty_megabytes"]
async fn fifty_megabytes_for_a_thousand_hosts_are_fetched_once() {
    let (origin, holdings) = fifty_megabytes_for_a_thousand("Cache-Control: max-age=600\r\n").await;
    assert_eq!(origin.requests().len(), 1);
    assert_eq!(holdings.cached_bytes, 50_000_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "moves 100 GB: cargo test -p cedos-prox --test proxy -- --ignored private_megabytes"]
async fn fifty_private_megabytes_for_a_thousand_hosts_are_shared_by_none() {
    let fields = "Cache-Control: private, max-age=600\r\n";
    let (origin, holdings) = fifty_megabytes_for_a_thousand(fields).await;
    assert_eq!(origin.requests().len(), 1000);
    assert_eq!((holdings.cached_responses, holdings.cached_bytes), (0, 0));
}

#[tokio::test]
async fn an_origin_that_answers_one_request_with_a_close_is_asked_by_those_who_waited() {
    let gate = Arc::new(Semaphore::new(0));
    let open = gate.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let gate = gate.clone();
        async move {
            if request.header("x-poison").is_some() {
                gate.acquire().await.unwrap().forget();
                return;
            }
            let OriginReply(bytes, _) = whole("Cache-Control: max-age=60\r\n", "an answer");
            stream.write_all(&bytes).await.unwrap();
        }
    })
    .await;
    let prox = prox();
    let url = origin.url("/");
    let (first, mut leading) = start(&prox, CLIENT);
    leading.send(get(&url, "X-Poison: 1\r\n")).await;
    leading.finish_sending().await;
    until(|| origin.requests().len() == 1).await;
    let (second, mut waiting) = start(&prox, OTHER);
    waiting.send(get(&url, "")).await;
    waiting.finish_sending().await;
    until(|| prox.holdings().flows == 2).await;
    open.add_permits(10);
    assert_eq!(leading.answer().await.status, 502);
    assert_eq!(waiting.answer().await.whole().body, b"an answer");
    ended(first).await;
    ended(second).await;
}

#[tokio::test]
async fn an_origin_cannot_say_that_the_proxy_takes_streams() {
    for status in ["200 OK", "204 No Content", "404 Not Found"] {
        for fields in ["", "Cache-Control: max-age=60\r\n", "Set-Cookie: a=b\r\n"] {
            let port = "D2TP-Stream-Port: 4433\r\n";
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n{port}{fields}\r\n");
            let origin =
                ScriptedOrigin::start(move |_| OriginReply(head.clone().into(), ReplyEnd::Close))
                    .await;
            let prox = prox();
            let url = origin.url("/");
            for method in ["GET", "HEAD", "GET", "POST"] {
                let length = if method == "POST" {
                    "Content-Length: 0\r\n"
                } else {
                    ""
                };
                let place = origin.address;
                let request = format!("{method} {url} HTTP/1.1\r\nHost: {place}\r\n{length}\r\n");
                let answer = ask_as(&prox, CLIENT, request).await;
                let said = answer.headers.contains_key("d2tp-stream-port");
                assert!(!said, "{method}: {status}, {fields}");
            }
        }
    }
}

#[tokio::test]
async fn what_a_reload_may_forbid_is_not_answered_from_before() {
    let origin = counting("Cache-Control: max-age=60\r\n").await;
    let prox = prox();
    let url = origin.url("/");
    ask_as(&prox, CLIENT, get(&url, "")).await.whole();
    let newer = ProxConfig {
        client_flows_max: config().client_flows_max + 1,
        ..config()
    };
    let unchanged = newer.clone();
    prox.set_config_source(move || Ok(unchanged.clone()));
    prox.reload().unwrap();
    assert_eq!(prox.holdings().cached_responses, 1, "it is no such setting");
    prox.set_config_source(move || {
        Ok(ProxConfig {
            allow_private: false,
            ..newer.clone()
        })
    });
    prox.reload().unwrap();
    assert_eq!(prox.holdings().cached_responses, 0);
    let answer = ask_as(&prox, OTHER, get(&url, "")).await;
    assert_eq!(answer.status, 403);
}
