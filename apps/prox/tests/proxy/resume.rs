//! Pinned copies: ranges, devices that are away or come back, deadlines and quotas.

use std::sync::Arc;
use std::time::Duration;

use crate::support::*;
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_prox::{Prox, ProxConfig, ProxFlowOutcome, ResetCause, ServedFrom};
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;

/// An origin that gives `data` in steps: the first `free` bytes at once, then 1,000 bytes for
/// each permit of the gate. `head` is everything of its head but the status line.
async fn gated(data: Vec<u8>, free: usize, head: &'static str) -> (ScriptedOrigin, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let opener = gate.clone();
    let origin = ScriptedOrigin::play(move |_, mut stream| {
        let (data, gate) = (data.clone(), gate.clone());
        async move {
            let head = head.replace("LEN", &data.len().to_string());
            stream
                .write_all(format!("HTTP/1.1 200 OK\r\n{head}\r\n").as_bytes())
                .await
                .unwrap();
            if stream.write_all(&data[..free]).await.is_err() {
                return;
            }
            for step in data[free..].chunks(1_000) {
                gate.acquire().await.unwrap().forget();
                if stream.write_all(step).await.is_err() {
                    return;
                }
            }
        }
    })
    .await;
    (origin, opener)
}

#[tokio::test]
async fn every_kind_of_range_on_a_whole_object() {
    let data = pattern(100);
    let mut bytes =
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nETag: \"e\"\r\nContent-Digest: x\r\n\r\n"
            .to_vec();
    bytes.extend_from_slice(&data);
    let origin = ScriptedOrigin::fixed(bytes).await;
    let prox = prox();
    for (range, status, content_range, part) in [
        ("bytes=0-0", 206, "bytes 0-0/100", 0..1),
        ("bytes=0-", 206, "bytes 0-99/100", 0..100),
        ("bytes=10-19", 206, "bytes 10-19/100", 10..20),
        ("bytes=90-500", 206, "bytes 90-99/100", 90..100),
        ("bytes=-7", 206, "bytes 93-99/100", 93..100),
        ("bytes=-700", 206, "bytes 0-99/100", 0..100),
        ("bytes=100-", 416, "bytes */100", 0..0),
        ("bytes=-0", 416, "bytes */100", 0..0),
        ("bytes=0-1,5-6", 200, "", 0..100),
        ("bytes=200-,300-", 416, "bytes */100", 0..0),
        ("bytes=9-5", 200, "", 0..100),
        ("lines=1-2", 200, "", 0..100),
    ] {
        let answer = ask(&prox, get(&origin.url("/"), &format!("Range: {range}\r\n")))
            .await
            .whole();
        assert_eq!(answer.status, status, "{range}");
        assert_eq!(answer.header("content-range"), content_range, "{range}");
        assert!(answer.body == data[part], "{range}");
        assert_eq!(
            answer.header("content-digest").is_empty(),
            status != 200,
            "{range}"
        );
        assert_eq!(answer.header("accept-ranges"), "bytes");
    }
    // A validator that is not the object's turns the range off.
    for (if_range, status) in [("\"e\"", 206), ("\"f\"", 200), ("W/\"e\"", 200)] {
        let headers = format!("Range: bytes=5-\r\nIf-Range: {if_range}\r\n");
        assert_eq!(
            ask(&prox, get(&origin.url("/"), &headers)).await.status,
            status,
            "{if_range}"
        );
    }
}

#[tokio::test]
async fn a_range_is_answered_while_the_object_still_grows() {
    let data = pattern(10_000);
    let (origin, gate) = gated(
        data.clone(),
        1_000,
        "Content-Length: LEN\r\nETag: \"g\"\r\n",
    )
    .await;
    let prox = prox();
    // Here already.
    let (_serving, mut device) = start(&prox, CLIENT);
    device
        .send(get(&origin.url("/"), "Range: bytes=100-199\r\n"))
        .await;
    let answer = device.answer().await.whole();
    assert_eq!(
        (answer.status, answer.header("content-range")),
        (206, "bytes 100-199/10000")
    );
    assert!(answer.body == data[100..200]);
    // Beyond what is here: the head at once, the bytes as they come.
    let (_serving, mut device) = start(&prox, CLIENT);
    device
        .send(get(&origin.url("/"), "Range: bytes=-8500\r\n"))
        .await;
    let head = device.read_head().await;
    assert_eq!(
        (head.status, head.header("content-range")),
        (206, "bytes 1500-9999/10000")
    );
    gate.add_permits(100);
    assert!(device.read_rest().await == data[1_500..]);
}

#[tokio::test]
async fn a_range_of_an_object_of_unknown_size_waits_until_it_can_be_said() {
    let data = pattern(5_000);
    let (origin, gate) = gated(data.clone(), 1_000, "Connection: close\r\n").await;
    let prox = prox();
    let (_serving, mut device) = start(&prox, CLIENT);
    device
        .send(get(&origin.url("/"), "Range: bytes=900-999\r\n"))
        .await;
    let answer = device.answer().await.whole();
    assert_eq!(
        (answer.status, answer.header("content-range")),
        (206, "bytes 900-999/*")
    );
    assert!(answer.body == data[900..1_000]);

    let (_serving, mut device) = start(&prox, CLIENT);
    device
        .send(get(&origin.url("/"), "Range: bytes=4000-\r\n"))
        .await;
    gate.add_permits(100);
    let answer = device.answer().await.whole();
    assert_eq!(
        (answer.status, answer.header("content-range")),
        (206, "bytes 4000-4999/5000")
    );
    assert!(answer.body == data[4_000..]);
}

#[tokio::test]
async fn the_fetch_goes_on_while_the_device_is_away() {
    let data = pattern(3_000_000);
    // Of unknown size, so that bytes are counted as they arrive.
    let (origin, _gate) = gated(data.clone(), data.len(), "Connection: close\r\n").await;
    let prox = prox();
    let (_serving, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    // The device takes nothing, and all of it is here all the same.
    until(|| prox.holdings().memory_bytes == 3_000_000).await;
    assert!(device.answer().await.whole().body == data);
}

/// An origin that serves other bytes each time and names no validator.
async fn fickle() -> ScriptedOrigin {
    ScriptedOrigin::play(|request, mut stream| async move {
        let body: Vec<u8> = pattern(200_000)
            .iter()
            .map(|b| b ^ request.count as u8)
            .collect();
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n")
            .await
            .unwrap();
        let _ = stream.write_all(&body).await;
    })
    .await
}

#[tokio::test]
async fn a_device_that_restarts_gets_the_rest_of_the_same_bytes_from_a_fickle_origin() {
    let origin = fickle().await;
    let prox = prox();
    let url = origin.url("/episode");
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&url, "")).await;
    let head = device.read_head().await;
    let tag = head.header("etag").to_owned();
    assert!(tag.starts_with("\"d2prox-"), "{tag}");
    let mut got = device.read(50_000).await;
    device.crash();
    assert!(matches!(
        ended(serving).await.outcome,
        ProxFlowOutcome::Broken(_)
    ));
    assert_eq!(prox.holdings().retained_copies, 1);

    let (serving, mut device) = start(&prox, CLIENT);
    device
        .send(get(
            &url,
            &format!("Range: bytes=50000-\r\nIf-Range: {tag}\r\n"),
        ))
        .await;
    let answer = device.answer().await.whole();
    assert_eq!(answer.status, 206);
    assert_eq!(answer.header("cache-status"), "d2prox; hit; detail=pinned");
    assert_eq!(answer.header("etag"), tag);
    got.extend(answer.body);
    assert!(got == pattern(200_000));
    assert_eq!(ended(serving).await.served, ServedFrom::PinnedCopy);
    assert_eq!(origin.requests().len(), 1);
}

#[tokio::test]
async fn a_copy_is_found_even_before_the_old_flow_is_known_to_be_dead() {
    let origin = fickle().await;
    let prox = prox();
    let (_old, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    let tag = device.read_head().await.header("etag").to_owned();
    let headers = format!("Range: bytes=199999-\r\nIf-Range: {tag}\r\n");
    let answer = ask(&prox, get(&origin.url("/"), &headers)).await.whole();
    assert_eq!((answer.status, answer.body.len()), (206, 1));
    // Everything was received but the end: the device learns that it has it all.
    let headers = format!("Range: bytes=200000-\r\nIf-Range: {tag}\r\n");
    let answer = ask(&prox, get(&origin.url("/"), &headers)).await.whole();
    assert_eq!(
        (answer.status, answer.header("content-range")),
        (416, "bytes */200000")
    );
    assert_eq!(origin.requests().len(), 1);
}

#[tokio::test]
async fn a_kept_copy_is_private_to_its_client_its_url_and_its_credentials() {
    let origin = fickle().await;
    let prox = prox();
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "Cookie: a\r\n")).await;
    let tag = device.read_head().await.header("etag").to_owned();
    device.crash();
    ended(serving).await;
    let again = |client, path, cookie: &str| {
        let (serving, mut device) = start(&prox, client);
        let headers = format!("Range: bytes=1-\r\nIf-Range: {tag}\r\n{cookie}");
        let request = get(&origin.url(path), &headers);
        async move {
            device.send(request).await;
            let status = device.answer().await.status;
            ended(serving).await;
            status
        }
    };
    assert_eq!(again([2; 32], "/", "Cookie: a\r\n").await, 200);
    assert_eq!(again(CLIENT, "/other", "Cookie: a\r\n").await, 200);
    assert_eq!(again(CLIENT, "/", "Cookie: b\r\n").await, 200);
    assert_eq!(again(CLIENT, "/", "").await, 200);
    assert_eq!(again(CLIENT, "/", "Cookie: a\r\n").await, 206);
}

#[tokio::test]
async fn a_growing_copy_goes_on_growing_while_its_device_restarts() {
    let data = pattern(10_000);
    let (origin, gate) = gated(data.clone(), 1_000, "Content-Length: LEN\r\n").await;
    let prox = prox();
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    let tag = device.read_head().await.header("etag").to_owned();
    device.read(500).await;
    device.crash();
    ended(serving).await;
    let (_serving, mut device) = start(&prox, CLIENT);
    let headers = format!("Range: bytes=500-\r\nIf-Range: {tag}\r\n");
    device.send(get(&origin.url("/"), &headers)).await;
    assert_eq!(device.read_head().await.status, 206);
    gate.add_permits(100);
    assert!(device.read_rest().await == data[500..]);
}

#[tokio::test]
async fn a_kept_copy_that_failed_is_not_served_again() {
    // Breaks off once the device is gone; names a strong validator but refuses to continue.
    let breaks = Arc::new(Semaphore::new(0));
    let gate = breaks.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let gate = gate.clone();
        async move {
            let whole = "HTTP/1.1 200 OK\r\nETag: \"e\"\r\nContent-Length: 10\r\n\r\n";
            match request.count {
                0 => {
                    stream
                        .write_all(format!("{whole}half").as_bytes())
                        .await
                        .unwrap();
                    gate.acquire().await.unwrap().forget();
                }
                1 => stream
                    .write_all(b"HTTP/1.1 404 N\r\nContent-Length: 0\r\n\r\n")
                    .await
                    .unwrap(),
                _ => stream
                    .write_all(format!("{whole}half and t").as_bytes())
                    .await
                    .unwrap(),
            }
        }
    })
    .await;
    let prox = prox();
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    device.read_head().await;
    device.read(4).await;
    device.crash();
    ended(serving).await;
    breaks.add_permits(1);
    until(|| origin.requests().len() == 2).await;
    // The failure is noted once the 404 has been read; until then the old copy is served and
    // the flow is reset, after that a new fetch answers.
    let headers = "Range: bytes=4-\r\nIf-Range: \"e\"\r\n";
    let mut answer = ask(&prox, get(&origin.url("/"), headers)).await;
    if answer.reset.is_some() {
        answer = ask(&prox, get(&origin.url("/"), headers)).await;
    }
    let answer = answer.whole();
    assert_eq!(
        (answer.status, answer.body.as_slice()),
        (206, &b" and t"[..])
    );
    assert_eq!(origin.requests().len(), 3);
}

#[tokio::test]
async fn a_kept_copy_goes_after_its_time_and_when_room_is_needed() {
    let origin = fickle().await;
    let short = Prox::new(ProxConfig {
        keep: Duration::from_millis(20),
        ..config()
    })
    .unwrap();
    let few = Prox::new(ProxConfig {
        client_kept_max: 2,
        ..config()
    })
    .unwrap();
    let small = Prox::new(ProxConfig {
        client_pinned_bytes_max: 450_000,
        memory_quota_bytes: 450_000,
        disk_quota_bytes: 0,
        ..config()
    })
    .unwrap();
    for (prox, expected) in [(&short, 0), (&few, 2), (&small, 2)] {
        for _ in 0..4 {
            let (serving, mut device) = start(prox, CLIENT);
            device.send(get(&origin.url("/"), "")).await;
            assert_eq!(device.read_head().await.status, 200);
            device.crash();
            ended(serving).await;
        }
        until(|| prox.holdings().retained_copies == expected).await;
        until(|| prox.holdings().memory_bytes == 200_000 * expected as u64).await;
    }
}

#[tokio::test]
async fn a_deadline_that_passes_resets_the_flow_and_frees_the_copy() {
    let (origin, _gate) = gated(pattern(5_000), 1_000, "Content-Length: LEN\r\n").await;
    let prox = prox();
    let (serving, mut device) = start_until(&prox, CLIENT, Some(Duration::from_secs(3_600)));
    device.send(get(&origin.url("/"), "")).await;
    device.read(1_000).await;
    device.set_deadline(Duration::ZERO);
    device.send("x").await; // Anything that makes the proxy look again.
    device.crash();
    let report = ended(serving).await;
    assert_eq!(report.outcome, ProxFlowOutcome::Reset(ResetCause::Deadline));
    until(|| prox.holdings() == Default::default()).await;
}

#[tokio::test]
async fn a_deadline_ends_a_flow_by_itself_and_may_be_moved_before() {
    let (origin, _gate) = gated(pattern(5_000), 1_000, "Content-Length: LEN\r\n").await;
    let prox = prox();
    let (serving, mut device) = start_until(&prox, CLIENT, Some(Duration::from_millis(200)));
    device.set_deadline(Duration::from_millis(600));
    device.send(get(&origin.url("/"), "")).await;
    let report = ended(serving).await;
    assert_eq!(report.outcome, ProxFlowOutcome::Reset(ResetCause::Deadline));
    assert!(
        report.lasted >= Duration::from_millis(500),
        "{:?}",
        report.lasted
    );
    assert_eq!(device.reset_code(), Some(ResetCause::Deadline.code()));
    assert_eq!(prox.holdings().retained_copies, 0);
}

#[tokio::test]
async fn a_deadline_may_be_moved_no_further_than_the_client_is_allowed() {
    let (origin, _gate) = gated(pattern(5_000), 1_000, "Content-Length: LEN\r\n").await;
    let prox = Prox::new(ProxConfig {
        deadline_horizon: Duration::from_secs(1),
        ..config()
    })
    .unwrap();
    let (serving, mut device) = start_until(&prox, CLIENT, Some(Duration::from_millis(900)));
    device.send(get(&origin.url("/"), "")).await;
    until(|| !origin.requests().is_empty()).await;
    device.set_deadline(Duration::from_secs(86_400));
    let report = ended(serving).await;
    assert_eq!(report.outcome, ProxFlowOutcome::Reset(ResetCause::Deadline));
}

#[tokio::test]
async fn a_large_object_spills_to_disk_and_comes_back_the_same() {
    let data = pattern(2_000_000);
    for head in ["Content-Length: LEN\r\n", "Connection: close\r\n"] {
        let (origin, _gate) = gated(data.clone(), data.len(), head).await;
        let prox = Prox::new(ProxConfig {
            object_memory_bytes_max: 100_000,
            ..config()
        })
        .unwrap();
        let (_serving, mut device) = start(&prox, CLIENT);
        device.send(get(&origin.url("/"), "")).await;
        until(|| prox.holdings().disk_bytes == 2_000_000).await;
        assert_eq!(prox.holdings().memory_bytes, 0);
        assert!(device.answer().await.whole().body == data);
        until(|| prox.holdings().disk_bytes == 0).await;
    }
}

#[tokio::test]
async fn an_object_that_does_not_fit_is_refused_at_once_or_reset_once_it_outgrows() {
    let data = pattern(200_000);
    let quota = |client, memory, disk| ProxConfig {
        client_pinned_bytes_max: client,
        memory_quota_bytes: memory,
        disk_quota_bytes: disk,
        ..config()
    };
    for config in [
        quota(150_000, 1 << 20, 1 << 20),
        quota(1 << 20, 50_000, 150_000),
    ] {
        let prox = Prox::new(config).unwrap();
        let (origin, _gate) = gated(data.clone(), data.len(), "Content-Length: LEN\r\n").await;
        let answer = ask(&prox, get(&origin.url("/"), "")).await.whole();
        assert_eq!(answer.status, 502);
        assert!(
            answer
                .header("proxy-status")
                .contains("http_response_body_size")
        );
        let (origin, _gate) = gated(data.clone(), data.len(), "Connection: close\r\n").await;
        let answer = ask(&prox, get(&origin.url("/"), "")).await;
        assert_eq!(answer.cause(), Some(ResetCause::StoreFull));
        until(|| prox.holdings() == Default::default()).await;
    }
}

#[tokio::test]
async fn a_store_filled_by_others_is_503_with_a_time_to_come_back() {
    let (origin, _gate) = gated(pattern(200_000), 200_000, "Content-Length: LEN\r\n").await;
    for (client, reason) in [([2; 32], "no room"), (CLIENT, "already fill")] {
        let config = ProxConfig {
            memory_quota_bytes: 300_000,
            disk_quota_bytes: 0,
            client_pinned_bytes_max: if client == CLIENT { 300_000 } else { 1 << 20 },
            ..config()
        };
        let prox = Prox::new(config).unwrap();
        let (_first, mut holder) = start(&prox, client);
        holder.send(get(&origin.url("/"), "")).await;
        holder.read_head().await;
        let answer = ask(&prox, get(&origin.url("/"), "")).await.whole();
        assert_eq!((answer.status, answer.header("retry-after")), (503, "30"));
        assert!(answer.header("proxy-status").contains(reason), "{answer:?}");
    }
}

#[tokio::test]
async fn flows_clients_and_deadlines_beyond_the_limits_are_refused_with_the_reason() {
    let prox = Prox::new(ProxConfig {
        client_flows_max: 1,
        ..config()
    })
    .unwrap();
    let (_serving, _device) = start(&prox, CLIENT);
    until(|| prox.holdings().flows == 1).await;
    let answer = ask(&prox, get("http://127.0.0.1:1/", "")).await.whole();
    assert_eq!((answer.status, answer.header("retry-after")), (503, "30"));

    let prox = Prox::new(ProxConfig {
        allow_any_client: false,
        allow_clients: vec![CLIENT],
        ..config()
    })
    .unwrap();
    let (_serving, device) = start(&prox, [9; 32]);
    let answer = device.answer().await.whole();
    assert_eq!(answer.status, 403);
    assert!(answer.header("proxy-status").contains("--allow-client"));
    let (_serving, device) = start_until(&prox, CLIENT, Some(Duration::from_secs(8 * 86_400)));
    assert_eq!(device.answer().await.status, 403);
}

#[tokio::test]
async fn a_device_that_goes_midway_through_its_request_or_before_the_answer_leaves_nothing() {
    let prox = prox();
    let (serving, mut device) = start(&prox, CLIENT);
    device.send("GET http://127.0.0.1/ HT").await;
    device.crash();
    let report = ended(serving).await;
    assert!(matches!(report.outcome, ProxFlowOutcome::Broken(_)) || report.status == Some(400));

    let origin = ScriptedOrigin::play(|_, _stream| std::future::pending()).await;
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    until(|| !origin.requests().is_empty()).await;
    device.crash();
    assert!(matches!(
        ended(serving).await.outcome,
        ProxFlowOutcome::Broken(_)
    ));
    until(|| prox.holdings() == Default::default()).await;
}
