//! GET and HEAD against origins of every kind.

use crate::support::*;
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_lab_rig::port::HeldPort;
use cedos_prox::{ProxFlowOutcome, ResetCause, ServedFrom};
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn an_object_of_no_bytes_and_of_one_byte_arrive_whole() {
    for body in ["", "x"] {
        let origin = ScriptedOrigin::fixed(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nETag: \"e\"\r\n\r\n{body}",
            body.len()
        ))
        .await;
        let answer = ask(&prox(), get(&origin.url("/"), "")).await.whole();
        assert_eq!(
            (answer.status, answer.body.as_slice()),
            (200, body.as_bytes())
        );
        assert_eq!(answer.header("content-length"), body.len().to_string());
        assert_eq!(answer.header("etag"), "\"e\"");
        assert_eq!(answer.header("via"), "1.1 d2prox");
        assert_eq!(
            answer.header("cache-status"),
            "d2prox; fwd=uri-miss; fwd-status=200; stored"
        );
    }
}

#[tokio::test]
async fn a_large_object_arrives_whole_and_its_room_is_given_back() {
    let data = pattern(9_000_000);
    let mut answer =
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", data.len()).into_bytes();
    answer.extend_from_slice(&data);
    let origin = ScriptedOrigin::fixed(answer).await;
    let prox = prox();
    let answer = ask(&prox, get(&origin.url("/"), "")).await.whole();
    assert!(answer.body == data);
    until(|| prox.holdings() == Default::default()).await;
}

#[tokio::test]
async fn unknown_length_ends_with_the_flow() {
    let origin =
        ScriptedOrigin::fixed("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it").await;
    let (serving, mut device) = start(&prox(), CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    let answer = device.answer().await.whole();
    assert_eq!(answer.body, b"all of it");
    let report = ended(serving).await;
    assert_eq!(
        (report.outcome, report.status),
        (ProxFlowOutcome::Delivered, Some(200))
    );
    assert_eq!(report.served, ServedFrom::Origin);
}

#[tokio::test]
async fn chunks_are_undone_and_trailers_dropped() {
    let origin = ScriptedOrigin::fixed(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\nKeep-Alive: 5\r\n\r\n\
         5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nX: y\r\n\r\n",
    )
    .await;
    let answer = ask(&prox(), get(&origin.url("/"), "")).await.whole();
    assert_eq!(answer.body, b"hello world");
    for name in ["transfer-encoding", "trailer", "keep-alive", "x"] {
        assert_eq!(answer.header(name), "", "{name}");
    }
}

#[tokio::test]
async fn a_content_coding_passes_untouched_and_only_if_the_device_asked() {
    let origin = ScriptedOrigin::fixed(
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00"
            .to_vec(),
    )
    .await;
    let prox = prox();
    let answer = ask(&prox, get(&origin.url("/"), "Accept-Encoding: gzip\r\n"))
        .await
        .whole();
    assert_eq!(answer.header("content-encoding"), "gzip");
    assert_eq!(answer.body, b"\x1f\x8b\x08\x00");
    ask(&prox, get(&origin.url("/"), "")).await;
    let heads = origin.requests();
    assert_eq!(heads[0].header("accept-encoding"), Some("gzip"));
    assert_eq!(heads[1].header("accept-encoding"), None);
}

#[tokio::test]
async fn the_origin_sees_what_the_device_sent_and_nothing_of_the_hop() {
    let origin = ScriptedOrigin::fixed("HTTP/1.1 204 No Content\r\n\r\n").await;
    let request = get(
        &origin.url("/a?b=c"),
        "Cookie: c=1\r\nAuthorization: Basic eA==\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\
         Proxy-Authorization: Basic eQ==\r\nRange: bytes=0-\r\n",
    );
    let answer = ask(&prox(), request).await.whole();
    assert_eq!((answer.status, answer.body.len()), (204, 0));
    let head = origin.requests()[0].clone();
    assert!(head.head.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{head:?}");
    assert_eq!(
        head.header("host"),
        Some(origin.address.to_string().as_str())
    );
    assert_eq!(head.header("cookie"), Some("c=1"));
    assert_eq!(head.header("authorization"), Some("Basic eA=="));
    assert_eq!(head.header("via"), Some("1.1 d2prox"));
    for name in ["x-hop", "connection", "proxy-authorization", "range"] {
        assert_eq!(head.header(name), None, "{name}");
    }
}

#[tokio::test]
async fn head_has_a_length_and_no_body() {
    let origin =
        ScriptedOrigin::fixed("HTTP/1.1 200 OK\r\nContent-Length: 12345\r\nETag: \"e\"\r\n\r\n")
            .await;
    let request = format!("HEAD {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.url("/"));
    let answer = ask(&prox(), request).await;
    assert_eq!(
        (answer.status, answer.body.len(), answer.reset),
        (200, 0, None)
    );
    assert_eq!(answer.header("content-length"), "12345");
    assert!(origin.requests()[0].head.starts_with("HEAD / "));
}

#[tokio::test]
async fn an_error_of_the_origin_is_passed_on_with_its_body_and_never_as_a_part() {
    let origin =
        ScriptedOrigin::fixed("HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone").await;
    let answer = ask(&prox(), get(&origin.url("/"), "Range: bytes=1-\r\n"))
        .await
        .whole();
    assert_eq!((answer.status, answer.body.as_slice()), (404, &b"gone"[..]));
    assert_eq!(answer.header("etag"), "");
    assert_eq!(answer.header("proxy-status"), "");
}

#[tokio::test]
async fn a_redirect_chain_is_followed_and_its_end_is_named() {
    let origin = ScriptedOrigin::play(|request, mut stream| async move {
        let path = &request.path;
        let n: u32 = path.trim_start_matches('/').parse().unwrap();
        let status = [301, 302, 303, 307, 308][request.count % 5];
        let answer = match n {
            0 => "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nend".to_owned(),
            n => format!(
                "HTTP/1.1 {status} R\r\nLocation: /{}\r\nContent-Length: 0\r\n\r\n",
                n - 1
            ),
        };
        stream.write_all(answer.as_bytes()).await.unwrap();
    })
    .await;
    let prox = prox();
    let answer = ask(&prox, get(&origin.url("/10"), "")).await.whole();
    assert_eq!((answer.status, answer.body.as_slice()), (200, &b"end"[..]));
    assert_eq!(answer.header("content-location"), origin.url("/0"));
    let answer = ask(&prox, get(&origin.url("/11"), "")).await.whole();
    assert_eq!(answer.status, 502);
    assert!(
        answer
            .header("proxy-status")
            .contains("more than 10 redirects"),
        "{answer:?}"
    );
}

#[tokio::test]
async fn a_redirect_loop_ends() {
    let origin =
        ScriptedOrigin::fixed("HTTP/1.1 302 R\r\nLocation: /\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!(ask(&prox(), get(&origin.url("/"), "")).await.status, 502);
    assert_eq!(origin.requests().len(), 11);
}

#[tokio::test]
async fn credentials_do_not_follow_a_redirect_to_another_origin() {
    let other = ScriptedOrigin::fixed("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let first = ScriptedOrigin::fixed(format!(
        "HTTP/1.1 302 R\r\nLocation: {}\r\nContent-Length: 0\r\n\r\n",
        other.url("/x")
    ))
    .await;
    let headers = "Authorization: Basic eA==\r\nCookie: c=1\r\nX-Other: 1\r\n";
    assert_eq!(
        ask(&prox(), get(&first.url("/"), headers)).await.status,
        200
    );
    let head = other.requests()[0].clone();
    assert_eq!(head.header("authorization"), None);
    assert_eq!(head.header("cookie"), None);
    assert_eq!(head.header("x-other"), Some("1"));
}

#[tokio::test]
async fn an_origin_that_dies_half_way_is_continued_by_its_strong_validator() {
    for validator in [
        "ETag: \"v1\"\r\n",
        "Last-Modified: Fri, 20 Nov 2026 10:00:00 GMT\r\nDate: Fri, 20 Nov 2026 12:00:00 GMT\r\n",
    ] {
        let data = pattern(500_000);
        let served = data.clone();
        let origin = ScriptedOrigin::play(move |request, mut stream| {
            let data = served.clone();
            async move {
                let start = request.range_from().unwrap_or(0);
                let status = if start == 0 { 200 } else { 206 };
                let answer = format!(
                    "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nContent-Range: bytes {start}-{}/{}\r\n{validator}\r\n",
                    data.len() - start,
                    data.len() - 1,
                    data.len()
                );
                stream.write_all(answer.as_bytes()).await.unwrap();
                // Dies four times, once without any byte.
                let end = match request.count {
                    0..4 => data.len().min(start + request.count * 40_000),
                    _ => data.len(),
                };
                let _ = stream.write_all(&data[start..end]).await;
            }
        })
        .await;
        let answer = ask(&prox(), get(&origin.url("/"), "")).await.whole();
        assert!(answer.body == data);
        let heads = origin.requests();
        assert_eq!(heads.len(), 5);
        let sent = heads[2].header("if-range").unwrap();
        assert!(validator.contains(sent), "{sent}");
    }
}

#[tokio::test]
async fn an_origin_that_ignores_ranges_is_continued_if_its_validator_is_the_same() {
    let data = pattern(100_000);
    let served = data.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let data = served.clone();
        async move {
            let head = format!(
                "HTTP/1.1 200 OK\r\nETag: \"s\"\r\nContent-Length: {}\r\n\r\n",
                data.len()
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            let end = if request.count == 0 {
                60_000
            } else {
                data.len()
            };
            stream.write_all(&data[..end]).await.unwrap();
        }
    })
    .await;
    assert!(ask(&prox(), get(&origin.url("/"), "")).await.whole().body == data);
}

#[tokio::test]
async fn a_broken_chunked_object_is_continued_although_its_size_was_unknown() {
    let origin = ScriptedOrigin::play(|request, mut stream| async move {
        let answer = match request.count {
            0 => "HTTP/1.1 200 OK\r\nETag: \"c\"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
            _ => "HTTP/1.1 206 P\r\nETag: \"c\"\r\nContent-Range: bytes 5-9/10\r\nContent-Length: 5\r\n\r\nworld",
        };
        stream.write_all(answer.as_bytes()).await.unwrap();
    })
    .await;
    assert_eq!(
        ask(&prox(), get(&origin.url("/"), "")).await.whole().body,
        b"helloworld"
    );
}

#[tokio::test]
async fn an_origin_that_dies_half_way_without_a_validator_resets_the_flow_with_the_cause() {
    for validator in ["", "ETag: W/\"weak\"\r\n"] {
        let origin = ScriptedOrigin::fixed(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n{validator}\r\nhalf"
        ))
        .await;
        let prox = prox();
        let answer = ask(&prox, get(&origin.url("/"), "")).await;
        assert_eq!(answer.cause(), Some(ResetCause::OriginGone));
        assert_eq!(origin.requests().len(), 1);
        until(|| prox.holdings() == Default::default()).await;
    }
}

#[tokio::test]
async fn an_origin_whose_bytes_changed_resets_the_flow_with_the_cause() {
    let answers = [
        "HTTP/1.1 200 OK\r\nETag: \"2\"\r\nContent-Length: 10\r\n\r\n0123456789",
        "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789",
        "HTTP/1.1 200 OK\r\nETag: W/\"1\"\r\nContent-Length: 10\r\n\r\n0123456789",
        "HTTP/1.1 206 P\r\nETag: \"2\"\r\nContent-Range: bytes 4-9/10\r\nContent-Length: 6\r\n\r\n456789",
        "HTTP/1.1 206 P\r\nETag: \"1\"\r\nContent-Range: bytes 3-9/10\r\nContent-Length: 7\r\n\r\n3456789",
        "HTTP/1.1 206 P\r\nETag: \"1\"\r\nContent-Range: bytes 4-10/11\r\nContent-Length: 7\r\n\r\n456789a",
        "HTTP/1.1 206 P\r\nETag: \"1\"\r\nContent-Length: 6\r\n\r\n456789",
        "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 416 R\r\nContent-Range: bytes */4\r\nContent-Length: 0\r\n\r\n",
    ];
    for second in answers {
        let origin = ScriptedOrigin::play(move |request, mut stream| async move {
            let first = "HTTP/1.1 200 OK\r\nETag: \"1\"\r\nContent-Length: 10\r\n\r\nhalf";
            let answer = if request.count == 0 { first } else { second };
            stream.write_all(answer.as_bytes()).await.unwrap();
        })
        .await;
        let answer = ask(&prox(), get(&origin.url("/"), "")).await;
        assert_eq!(answer.cause(), Some(ResetCause::OriginChanged), "{second}");
    }
}

#[tokio::test]
async fn an_origin_that_never_comes_back_is_given_up_after_the_patience() {
    let origin = ScriptedOrigin::play(|request, mut stream| async move {
        let answer = match request.count {
            0 => "HTTP/1.1 200 OK\r\nETag: \"1\"\r\nContent-Length: 10\r\n\r\nhalf",
            _ => "HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n",
        };
        stream.write_all(answer.as_bytes()).await.unwrap();
    })
    .await;
    // Long enough for some tries when the machine is busy.
    let prox = cedos_prox::Prox::new(cedos_prox::ProxConfig {
        origin_patience: std::time::Duration::from_secs(2),
        ..config()
    })
    .unwrap();
    let answer = ask(&prox, get(&origin.url("/"), "")).await;
    assert_eq!(answer.cause(), Some(ResetCause::OriginTimeout));
    assert!(origin.requests().len() > 2);
}

#[tokio::test]
async fn a_silent_origin_is_asked_again_and_one_that_never_answers_is_504() {
    let origin = ScriptedOrigin::play(|request, mut stream| async move {
        let answer = match request.count {
            0 => "HTTP/1.1 200 OK\r\nETag: \"1\"\r\nContent-Length: 8\r\n\r\nhalf",
            1 => "HTTP/1.1 206 P\r\nETag: \"1\"\r\nContent-Range: bytes 4-7/8\r\nContent-Length: 4\r\n\r\nmore",
            _ => "",
        };
        stream.write_all(answer.as_bytes()).await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    // Longer than the origin's answers take when the machine is busy.
    let short = std::time::Duration::from_secs(1);
    let prox = cedos_prox::Prox::new(cedos_prox::ProxConfig {
        idle_timeout: short,
        response_timeout: short,
        ..config()
    })
    .unwrap();
    assert_eq!(
        ask(&prox, get(&origin.url("/"), "")).await.whole().body,
        b"halfmore"
    );
    let answer = ask(&prox, get(&origin.url("/"), "")).await;
    assert_eq!(answer.status, 504);
    assert!(
        answer
            .header("proxy-status")
            .contains("error=http_response_timeout")
    );
}

#[tokio::test]
async fn an_origin_that_answers_badly_is_502_with_the_kind() {
    let huge = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "a".repeat(200_000));
    for (bytes, kind) in [
        (huge.as_str(), "http_response_header_section_size"),
        ("SSH-2.0-OpenSSH_9.6\r\n\r\n", "http_protocol_error"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            "http_protocol_error",
        ),
        (
            "HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n",
            "http_protocol_error",
        ),
        (
            "HTTP/1.1 206 P\r\nContent-Range: bytes 0-0/9\r\nContent-Length: 1\r\n\r\na",
            "http_protocol_error",
        ),
        ("", "connection_terminated"),
        ("HTTP/1.1 200 OK\r\nX: a", "connection_terminated"),
    ] {
        let origin = ScriptedOrigin::fixed(bytes).await;
        let answer = ask(&prox(), get(&origin.url("/"), "")).await.whole();
        assert_eq!(answer.status, 502, "{kind}");
        let status = answer.header("proxy-status");
        assert!(
            status.contains(&format!("error={kind}")),
            "{status} for {kind}"
        );
    }
}

#[tokio::test]
async fn too_large_a_request_head_is_431_and_a_bad_one_400() {
    let prox = prox();
    let answer = ask(
        &prox,
        get(
            "http://127.0.0.1/",
            &format!("X: {}\r\n", "a".repeat(10_000)),
        ),
    )
    .await;
    assert_ne!(answer.status, 431);
    // Not through `ask`: the proxy stops reading before the device has sent it all.
    let (_serving, mut device) = start(&prox, CLIENT);
    let request = get(
        "http://127.0.0.1/",
        &format!("X: {}\r\n", "a".repeat(40_000)),
    );
    device.send(request).await;
    assert_eq!(device.answer().await.whole().status, 431);
    let answer = ask(&prox, "GET http://h/ HTTP/1.1\nHost: h\n\n")
        .await
        .whole();
    assert_eq!(answer.status, 400);
    assert!(String::from_utf8(answer.body).unwrap().contains("bare LF"));
}

#[tokio::test]
async fn a_dead_port_is_502_and_an_unknown_name_too() {
    let nobody = HeldPort::take();
    let address = nobody.address();
    let prox =
        cedos_prox::Prox::with_resolver(config(), std::sync::Arc::new(Names(vec![]))).unwrap();
    let answer = ask(&prox, get(&format!("http://{address}/"), ""))
        .await
        .whole();
    assert_eq!(answer.status, 502);
    assert!(
        answer
            .header("proxy-status")
            .contains("error=connection_refused")
    );
    let answer = ask(&prox, get("http://nowhere.example/", "")).await.whole();
    assert_eq!(answer.status, 502);
    assert!(answer.header("proxy-status").contains("error=dns_error"));
}
