//! `cedos prox --state-dir` that is killed or stopped and started again: what it held is there, what it must not
//! repeat is not repeated, and what is damaged is not served. Its clients speak HTTP over TCP.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, proper, reply,
};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::wait::{until, until_async, until_some, within};
use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use crate::durable_proxy::{DurableProxy, TOKEN, get, head_of, offset, rest_of};

/// An origin with one object for each way in which a cache may use it.
async fn cached_origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked: &OriginRequest| {
        let body = object(20_000, 3);
        let control = match asked.path.as_str() {
            "/stale" => "max-age=0",
            "/private" => "private, max-age=600",
            _ => "max-age=600",
        };
        let fields = [("Cache-Control", control), ("ETag", "\"v1\"")];
        let answer = match asked.header("if-none-match") {
            Some("\"v1\"") => reply("304 Not Modified", &fields, b""),
            _ => reply("200 OK", &fields, &body),
        };
        OriginReply(answer, ReplyEnd::Close)
    })
    .await
}

fn asked_for(origin: &ScriptedOrigin, path: &str) -> usize {
    let asked = origin.requests();
    asked.iter().filter(|request| request.path == path).count()
}

#[tokio::test]
async fn responses_of_the_cache_survive_a_restart_and_removed_ones_stay_removed() {
    let body = object(20_000, 3);
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let mut proxy = DurableProxy::start().await;
        let origin = cached_origin().await;
        for path in ["/fresh", "/stale", "/private", "/changed"] {
            assert!(
                proxy.get(&origin.url(path), "").await.body == body,
                "{path}"
            );
        }
        let url = origin.url("/changed");
        let put = format!("PUT {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx");
        assert_eq!(proxy.ask(put).await.status, 200);
        proxy.until_recorded().await;
        proxy.restart(signal, &[]).await;
        let fresh = proxy.get(&origin.url("/fresh"), "").await;
        assert!(
            fresh.is_hit() && fresh.body == body,
            "{signal}: {}",
            fresh.head
        );
        assert_eq!(asked_for(&origin, "/fresh"), 1, "{signal}");
        let stale = proxy.get(&origin.url("/stale"), "").await;
        assert!(stale.body == body, "{signal}: {}", stale.head);
        let said = stale.field("cache-status").unwrap_or_default().to_owned();
        assert!(
            said.contains("fwd=stale; fwd-status=304"),
            "{signal}: {said}"
        );
        for path in ["/private", "/changed"] {
            let before = asked_for(&origin, path);
            let answer = proxy.get(&origin.url(path), "").await;
            assert!(
                !answer.is_hit() && answer.body == body,
                "{signal} {path}: {}",
                answer.head
            );
            assert_eq!(asked_for(&origin, path), before + 1, "{signal} {path}");
        }
    }
}

#[tokio::test]
async fn a_response_whose_file_is_damaged_or_missing_is_asked_for_again() {
    for damage in ["short", "long", "gone"] {
        let mut proxy = DurableProxy::start().await;
        let origin = cached_origin().await;
        let (url, body) = (origin.url("/fresh"), object(20_000, 3));
        assert!(proxy.get(&url, "").await.body == body);
        proxy.end(Signal::SIGTERM).await;
        let file = proxy.file_of(20_000).expect("the file of the copy");
        let opened = std::fs::File::options()
            .write(true)
            .open(&file)
            .expect("open");
        match damage {
            "short" => opened.set_len(19_999).expect("cut"),
            "long" => opened.set_len(20_001).expect("grown"),
            _ => std::fs::remove_file(&file).expect("removed"),
        }
        proxy.start_again(&[]).await;
        assert!(
            proxy.file_of(19_999).is_none() && proxy.file_of(20_001).is_none(),
            "{damage}"
        );
        let answer = proxy.get(&url, "").await;
        assert!(
            !answer.is_hit() && answer.body == body,
            "{damage}: {}",
            answer.head
        );
        assert_eq!(origin.requests().len(), 2, "{damage}");
    }
}

/// An origin that sends the beginning of an object to the first who asks, and then nothing. Others get what they ask for.
async fn stopping_origin(etag: &'static str) -> ScriptedOrigin {
    ScriptedOrigin::play(move |request, mut stream| async move {
        let body = object(PART * 5, 5);
        if request.count > 0 {
            // The proxy may have gone.
            let _ = stream.write_all(&proper(&request, &body, etag)).await;
            return;
        }
        let length = body.len().to_string();
        let fields = [
            ("Cache-Control", "max-age=600"),
            ("Content-Length", &length),
            ("ETag", etag),
        ];
        let mut head = String::from("HTTP/1.1 200 OK\r\n");
        for (name, value) in fields {
            head += &format!("{name}: {value}\r\n");
        }
        let beginning = [head.as_bytes(), b"\r\n", &body[..PART]].concat();
        stream.write_all(&beginning).await.expect("the proxy reads");
        std::future::pending::<()>().await;
    })
    .await
}

/// Bytes of an object that an origin sends before it stops.
const PART: usize = 400_000;

/// A client that has read a beginning of what the origin sends, and waits for more.
async fn reading(proxy: &DurableProxy, url: &str) -> tokio::net::TcpStream {
    let mut stream = proxy.send(get(url, "")).await;
    head_of(&mut stream).await;
    let mut first = vec![0; PART];
    within(stream.read_exact(&mut first)).await.expect("bytes");
    stream
}

#[tokio::test]
async fn a_part_in_the_cache_survives_a_restart_and_its_rest_completes_it() {
    for (signal, is_read) in [
        (Signal::SIGKILL, false),
        (Signal::SIGTERM, false),
        (Signal::SIGKILL, true),
    ] {
        let case = format!("{signal}, read until then: {is_read}");
        let mut proxy = DurableProxy::start().await;
        let origin = stopping_origin("\"v1\"").await;
        let url = origin.url("/");
        let client = match is_read {
            true => Some(reading(&proxy, &url).await),
            false => {
                let answer = proxy.get(&url, "Range: bytes=0-9\r\n").await;
                assert_eq!(answer.body.len(), 10, "{case}: {}", answer.head);
                until_async("it is a part", async || {
                    (proxy.status().await["cache_responses"] == 0).then_some(())
                })
                .await;
                None
            }
        };
        proxy.until_recorded().await;
        proxy.restart(signal, &[]).await;
        drop(client);
        let status = proxy.status().await;
        assert_eq!(status["cache_responses"], 0, "{case}");
        let have = status["cache_bytes"].as_u64().unwrap_or_default();
        assert!((1..=PART as u64).contains(&have), "{case}: {have}");
        let answer = proxy.get(&url, "").await;
        assert!(
            answer.body == object(PART * 5, 5),
            "{case}: {}",
            answer.head
        );
        assert_eq!(
            answer.field("cache-status"),
            Some("d2prox; fwd=partial; fwd-status=206; stored"),
            "{case}"
        );
        let asked = origin.requests();
        assert_eq!(asked[1].range_from(), Some(have as usize), "{case}");
        assert_eq!(asked[1].header("if-range"), Some("\"v1\""), "{case}");
        assert!(proxy.get(&url, "").await.is_hit(), "{case}");
        assert_eq!(origin.requests().len(), 2, "{case}");
    }
}

#[tokio::test]
async fn a_response_that_is_fetched_on_for_a_client_after_a_restart_is_shared_as_before() {
    let mut proxy = DurableProxy::start().await;
    let origin = stopping_origin("\"v1\"").await;
    let url = origin.url("/");
    let client = reading(&proxy, &url).await;
    client.set_zero_linger().expect("a reset at the end");
    drop(client);
    until_async("it is kept for the client", async || {
        (proxy.status().await["retained_copies"] == 1).then_some(())
    })
    .await;
    proxy.until_recorded().await;
    proxy.restart(Signal::SIGTERM, &[]).await;
    assert_eq!(proxy.status().await["cache_responses"], 1);
    let answer = proxy.get(&url, "").await;
    assert!(answer.body == object(PART * 5, 5), "{}", answer.head);
    let asked = origin.requests();
    assert_eq!(asked.len(), 2, "{asked:#?}");
    assert_eq!(asked[1].range_from(), Some(PART));
}

#[tokio::test]
async fn a_part_of_which_the_rest_cannot_be_told_from_others_is_dropped_at_a_restart() {
    let mut proxy = DurableProxy::start().await;
    let origin = stopping_origin("W/\"v1\"").await;
    let url = origin.url("/");
    let client = reading(&proxy, &url).await;
    proxy.until_recorded().await;
    proxy.restart(Signal::SIGKILL, &[]).await;
    drop(client);
    assert_eq!(proxy.files(), Vec::<PathBuf>::new());
    let answer = proxy.get(&url, "").await;
    assert!(answer.body == object(PART * 5, 5), "{}", answer.head);
    assert_eq!(origin.requests()[1].range_from(), None);
}

#[tokio::test]
async fn a_cache_that_was_filled_under_other_rules_is_not_used() {
    let mut proxy = DurableProxy::start().await;
    let origin = cached_origin().await;
    let url = origin.url("/fresh");
    proxy.get(&url, "").await;
    proxy
        .restart(Signal::SIGTERM, &["--allow-net", "10.0.0.0/8"])
        .await;
    assert!(!proxy.get(&url, "").await.is_hit());
    assert!(proxy.get(&url, "").await.is_hit());
    // A smaller budget holds, and nothing is left on the disk of what it has no room for.
    proxy
        .restart(
            Signal::SIGTERM,
            &["--allow-net", "10.0.0.0/8", "--cache-quota", "10000"],
        )
        .await;
    assert_eq!(proxy.files(), Vec::<PathBuf>::new());
    assert!(!proxy.get(&url, "").await.is_hit());
}

#[tokio::test]
async fn a_copy_for_a_device_that_broke_off_survives_a_restart() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let mut proxy = DurableProxy::start().await;
        // Other bytes each time, and nothing by which they could be told apart: only the copy continues them.
        let count = AtomicUsize::new(0);
        let origin = ScriptedOrigin::start(move |_| {
            let body = object(2_000_000, count.fetch_add(1, Ordering::Relaxed) as u32);
            let fields = [("Cache-Control", "private")];
            OriginReply(reply("200 OK", &fields, &body), ReplyEnd::Close)
        })
        .await;
        let url = origin.url("/");
        let mut stream = proxy.send(get(&url, "")).await;
        let head = head_of(&mut stream).await;
        let tag = head
            .lines()
            .find_map(|line| line.strip_prefix("etag: "))
            .expect("a tag")
            .to_owned();
        let mut first = vec![0; 100_000];
        within(stream.read_exact(&mut first)).await.expect("bytes");
        until("the copy is complete", || {
            proxy.file_of(2_000_000).is_some()
        })
        .await;
        stream.set_zero_linger().expect("a reset at the end");
        drop(stream);
        until_async("the copy is kept", async || {
            (proxy.status().await["retained_copies"] == 1).then_some(())
        })
        .await;
        proxy.until_recorded().await;
        proxy.restart(signal, &[]).await;
        let fields = format!("Range: bytes=100000-\r\nIf-Range: {tag}\r\n");
        let rest = proxy.get(&url, &fields).await;
        assert_eq!(rest.status, 206, "{signal}: {}", rest.head);
        assert!(
            [first, rest.body].concat() == object(2_000_000, 0),
            "{signal}"
        );
        assert_eq!(origin.requests().len(), 1, "{signal}");
    }
}

/// An origin that keeps the bodies that it gets, and answers while it has permits.
struct UploadOrigin {
    origin: ScriptedOrigin,
    bodies: Arc<Mutex<Vec<Vec<u8>>>>,
    may_answer: Arc<Semaphore>,
}

impl UploadOrigin {
    async fn start() -> UploadOrigin {
        let bodies: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let may_answer = Arc::new(Semaphore::new(0));
        let (kept, permits) = (bodies.clone(), may_answer.clone());
        let origin = ScriptedOrigin::play(move |request, mut stream| {
            let (kept, permits) = (kept.clone(), permits.clone());
            async move {
                if let Some(body) = request.body(&mut stream).await {
                    kept.lock().expect("not poisoned").push(body);
                    permits.acquire().await.expect("open").forget();
                    let _ = stream.write_all(&reply("201 Created", &[], b"there")).await;
                }
            }
        })
        .await;
        UploadOrigin {
            origin,
            bodies,
            may_answer,
        }
    }

    fn received(&self) -> Vec<Vec<u8>> {
        self.bodies.lock().expect("not poisoned").clone()
    }

    fn head(&self, method: &str, length: usize) -> String {
        let url = self.origin.url("/a");
        format!(
            "{method} {url} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\
             Cedos-Upload: {TOKEN}\r\n\r\n"
        )
    }
}

#[tokio::test]
async fn an_upload_goes_on_after_a_restart_at_the_byte_that_was_stored() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let mut proxy = DurableProxy::start().await;
        let store = UploadOrigin::start().await;
        store.may_answer.add_permits(1);
        let body = object(1_000_000, 5);
        let mut stream = proxy.send(store.head("PUT", body.len())).await;
        assert_eq!(offset(&mut stream).await, 0);
        stream.write_all(&body[..600_000]).await.expect("sent");
        until("the bytes are stored", || proxy.file_of(600_000).is_some()).await;
        proxy.until_recorded().await;
        proxy.restart(signal, &[]).await;
        let mut stream = proxy.send(store.head("PUT", body.len())).await;
        assert_eq!(offset(&mut stream).await, 600_000, "{signal}");
        stream.write_all(&body[600_000..]).await.expect("sent");
        let answer = rest_of(stream).await;
        assert_eq!(
            (answer.status, &answer.body[..]),
            (201, &b"there"[..]),
            "{signal}"
        );
        assert!(store.received() == [body], "{signal}");
        until("the file is gone", || proxy.file_of(1_000_000).is_none()).await;
    }
}

#[tokio::test]
async fn a_post_that_was_under_way_is_not_sent_again_and_a_put_is() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        for (method, times) in [("POST", 1), ("PUT", 2)] {
            let mut proxy = DurableProxy::start().await;
            let store = UploadOrigin::start().await;
            let mut stream = proxy.send(store.head(method, 3)).await;
            assert_eq!(offset(&mut stream).await, 0);
            stream.write_all(b"abc").await.expect("sent");
            until("the origin has it", || store.received().len() == 1).await;
            proxy.restart(signal, &[]).await;
            // What may be repeated is, although the device is away.
            until("the origin has it", || store.received().len() == times).await;
            store.may_answer.add_permits(2);
            let mut stream = proxy.send(store.head(method, 3)).await;
            assert_eq!(offset(&mut stream).await, 3, "{signal} {method}");
            let answer = rest_of(stream).await;
            let expected = if times == 1 { 502 } else { 201 };
            assert_eq!(answer.status, expected, "{signal} {method}");
            assert_eq!(store.received().len(), times, "{signal} {method}");
        }
    }
}

#[tokio::test]
async fn the_answer_to_a_post_survives_a_restart() {
    let mut proxy = DurableProxy::start().await;
    let store = UploadOrigin::start().await;
    let mut stream = proxy.send(store.head("POST", 3)).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(b"abc").await.expect("sent");
    until("the origin has it", || store.received().len() == 1).await;
    stream.set_zero_linger().expect("a reset at the end");
    drop(stream);
    store.may_answer.add_permits(1);
    // The body of the answer.
    until_some("the answer is stored", || proxy.file_of(5)).await;
    proxy.until_recorded().await;
    proxy.restart(Signal::SIGKILL, &[]).await;
    let mut stream = proxy.send(store.head("POST", 3)).await;
    assert_eq!(offset(&mut stream).await, 3);
    let answer = rest_of(stream).await;
    assert_eq!((answer.status, &answer.body[..]), (201, &b"there"[..]));
    assert_eq!(store.received(), [b"abc"]);
}

#[tokio::test]
async fn an_upload_whose_origin_was_away_is_delivered_after_a_restart() {
    let mut proxy = DurableProxy::start().await;
    let store = UploadOrigin::start().await;
    store.may_answer.add_permits(1);
    let closed = HeldPort::take();
    let at = closed.address();
    let head = store
        .head("POST", 3)
        .replace(&store.origin.address.to_string(), &at.to_string());
    let mut stream = proxy.send(&head).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(b"abc").await.expect("sent");
    until("the body is stored", || proxy.file_of(3).is_some()).await;
    proxy.until_recorded().await;
    proxy.end(Signal::SIGKILL).await;
    // It comes up while the proxy is down: the process before never reached it.
    let origin = tokio::net::TcpListener::bind(at)
        .await
        .expect("the same port");
    proxy.start_again(&[]).await;
    let (mut stream, _) = within(origin.accept()).await.expect("the delivery");
    let request = head_of(&mut stream).await;
    assert!(request.starts_with("post /a http/1.1"), "{request}");
    let mut body = [0; 3];
    within(stream.read_exact(&mut body))
        .await
        .expect("the body");
    assert_eq!(&body, b"abc");
}

#[tokio::test]
async fn the_answer_to_an_upload_is_no_part_of_its_resource_after_a_restart() {
    let mut proxy = DurableProxy::start().await;
    let may_answer = Arc::new(Semaphore::new(0));
    let permits = may_answer.clone();
    let body = object(10_000, 6);
    let resource = body.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let (permits, resource) = (permits.clone(), resource.clone());
        async move {
            let answer = if request.method == "PUT" {
                request.body(&mut stream).await.expect("a body");
                permits.acquire().await.expect("open").forget();
                // The tag is that of the new resource (RFC 9110 section 9.3.4).
                reply("200 OK", &[("ETag", "\"v2\"")], b"stored, thank you")
            } else {
                proper(&request, &resource, "\"v2\"")
            };
            let _ = stream.write_all(&answer).await;
        }
    })
    .await;
    let url = origin.url("/a");
    let head = format!(
        "PUT {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\
         Cedos-Upload: {TOKEN}\r\n\r\n"
    );
    let mut stream = proxy.send(&head).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(b"abc").await.expect("sent");
    until("the origin has it", || origin.requests().len() == 1).await;
    stream.set_zero_linger().expect("a reset at the end");
    drop(stream);
    may_answer.add_permits(1);
    until_some("the answer is stored", || proxy.file_of(17)).await;
    proxy.until_recorded().await;
    for _ in 0..2 {
        let fields = "Range: bytes=3-\r\nIf-Range: \"v2\"\r\n";
        let rest = proxy.get(&url, fields).await;
        assert_eq!(rest.status, 206, "{}", rest.head);
        assert!(rest.body == body[3..], "{}", rest.head);
        proxy.restart(Signal::SIGTERM, &[]).await;
    }
    let mut stream = proxy.send(&head).await;
    assert_eq!(offset(&mut stream).await, 3);
    assert_eq!(rest_of(stream).await.body, b"stored, thank you");
}

#[tokio::test]
async fn a_put_that_succeeds_while_the_proxy_stops_removes_what_the_cache_has() {
    let mut proxy = DurableProxy::start().await;
    proxy.set("stop_grace_s = 60");
    proxy.restart(Signal::SIGTERM, &[]).await;
    let may_answer = Arc::new(Semaphore::new(0));
    let permits = may_answer.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let permits = permits.clone();
        async move {
            let fields = [("Cache-Control", "max-age=600")];
            let body = if request.method == "PUT" {
                permits.acquire().await.expect("open").forget();
                permits.close();
                b"put"
            } else if permits.is_closed() {
                b"new"
            } else {
                b"old"
            };
            let _ = stream.write_all(&reply("200 OK", &fields, body)).await;
        }
    })
    .await;
    let url = origin.url("/a");
    assert_eq!(proxy.get(&url, "").await.body, b"old");
    assert!(proxy.get(&url, "").await.is_hit());
    let put = format!("PUT {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx");
    let stream = proxy.send(put).await;
    until("the origin has it", || origin.requests().len() == 2).await;
    proxy.signal(Signal::SIGTERM);
    // Copies are the next process's from then on.
    let control = proxy.folder.path().join("state/control.sock");
    until("the proxy stops", || !control.exists()).await;
    may_answer.add_permits(1);
    assert_eq!(rest_of(stream).await.status, 200);
    proxy.until_ended().await;
    proxy.start_again(&[]).await;
    let answer = proxy.get(&url, "").await;
    assert_eq!(answer.body, b"new", "{}", answer.head);
}

#[tokio::test]
async fn a_smaller_bound_ends_no_upload_and_no_copy_at_a_restart() {
    let mut proxy = DurableProxy::start().await;
    let store = UploadOrigin::start().await;
    store.may_answer.add_permits(1);
    let body = object(500_000, 5);
    let mut stream = proxy.send(store.head("PUT", body.len())).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(&body[..400_000]).await.expect("sent");
    until("the bytes are stored", || proxy.file_of(400_000).is_some()).await;
    let cached = cached_origin().await;
    assert_eq!(proxy.get(&cached.url("/fresh"), "").await.status, 200);
    proxy.until_recorded().await;
    // Less than the upload has, for its client, on the disk, and both together.
    proxy.set("client_pinned_bytes_max = 100000\ndisk_quota_bytes = 510000");
    proxy.restart(Signal::SIGTERM, &[]).await;
    // What can be fetched again is what goes.
    until("the response is gone", || proxy.file_of(20_000).is_none()).await;
    let mut stream = proxy.send(store.head("PUT", body.len())).await;
    assert_eq!(offset(&mut stream).await, 400_000);
    stream.write_all(&body[400_000..]).await.expect("sent");
    // There is no room for the body of the answer.
    until("the origin has it", || store.received() == [&body[..]]).await;
}

#[tokio::test]
async fn a_post_whose_stored_body_is_lost_is_not_sent_to_its_origin_again() {
    let mut proxy = DurableProxy::start().await;
    let store = UploadOrigin::start().await;
    let mut stream = proxy.send(store.head("POST", 3)).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(b"abc").await.expect("sent");
    until("the origin has it", || store.received().len() == 1).await;
    stream.set_zero_linger().expect("a reset at the end");
    drop(stream);
    store.may_answer.add_permits(2);
    until_some("the answer is stored", || proxy.file_of(5)).await;
    proxy.until_recorded().await;
    proxy.end(Signal::SIGKILL).await;
    std::fs::remove_file(proxy.file_of(3).expect("the body")).expect("removed");
    proxy.start_again(&[]).await;
    let mut stream = proxy.send(store.head("POST", 3)).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(b"abc").await.expect("sent");
    let answer = rest_of(stream).await;
    assert_eq!((answer.status, &answer.body[..]), (201, &b"there"[..]));
    assert_eq!(store.received(), [b"abc"]);
}
