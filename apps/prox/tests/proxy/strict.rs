//! What may be read in two ways is refused on both sides: 400 to clients, 502 for origins, and the connection ends.

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin};

use crate::support::*;

/// The answer of a proxy whose origin answers with these bytes and closes.
async fn answered(bytes: &str) -> ProxyReply {
    let bytes = bytes.to_owned();
    let origin =
        ScriptedOrigin::start(move |_| OriginReply(bytes.clone().into(), ReplyEnd::CloseLater))
            .await;
    ask(&prox(), get(&origin.url("/"), "")).await
}

#[tokio::test]
async fn an_origin_that_can_be_read_in_two_ways_is_502() {
    let long = format!("X: {}\r\n", "a".repeat(70_000));
    let many = "X: a\r\n".repeat(200);
    for head in [
        "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        "Content-Length: 3\r\nContent-Length: 3\r\n",
        "Content-Length: 3\r\nContent-Length: 4\r\n",
        "Content-Length: 3, 3\r\n",
        "Content-Length: +3\r\n",
        "Content-Length: -3\r\n",
        "Content-Length: 3 3\r\n",
        "Content-Length: 0x3\r\n",
        "Content-Length: \r\n",
        "Content-Length: 18446744073709551616\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Content-Length : 3\r\n",
        "X: a\r\n b\r\n",
        "X: a\rSet-Cookie: b\r\n",
        "X: a\0b\r\n",
        "X y: a\r\n",
        ": a\r\n",
        &long,
        &many,
    ] {
        let answer = answered(&format!(
            "HTTP/1.1 200 OK\r\n{head}\r\n3\r\nabc\r\n0\r\n\r\n"
        ))
        .await;
        let shown = &head[..head.len().min(60)];
        assert_eq!(answer.status, 502, "{shown:?}");
        assert!(!answer.headers.contains_key("x"), "{shown:?}");
        assert!(!answer.headers.contains_key("set-cookie"), "{shown:?}");
        assert_eq!(answer.header("connection"), "close", "{shown:?}");
    }
}

#[tokio::test]
async fn what_is_no_answer_is_502() {
    for bytes in [
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nraw",
        "HTTP/1.1 100 Continue\r\n\r\n",
        "HTTP/1.1 99 Low\r\n\r\n",
        "HTTP/1.1 2000 High\r\n\r\n",
        "HTTP/1.1 OK\r\n\r\n",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        "<html>an answer without a head</html>",
        "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        "",
    ] {
        let answer = answered(bytes).await;
        assert_eq!(answer.status, 502, "{bytes:?}");
    }
}

#[tokio::test]
async fn interim_answers_and_bodies_where_there_are_none_are_not_passed_on() {
    let final_one = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let early = format!(
        "HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\nX-Early: 1\r\n\r\n{final_one}"
    );
    let answer = answered(&early).await.whole();
    assert_eq!((answer.status, answer.body.as_slice()), (200, &b"ok"[..]));
    assert!(!answer.headers.contains_key("x-early"));

    let second = "HTTP/1.1 200 OK\r\nX-Second: 1\r\nContent-Length: 2\r\n\r\nno";
    for first in [
        "HTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\nhello",
    ] {
        let answer = answered(&format!("{first}{second}")).await;
        assert_eq!(answer.body, b"", "{first}");
        assert!(!answer.headers.contains_key("content-length"), "{first}");
        assert!(!answer.headers.contains_key("x-second"), "{first}");
    }
    // More than Content-Length says.
    let answer = answered(&format!("{final_one}{second}")).await.whole();
    assert_eq!(answer.body, b"ok");

    let origin = ScriptedOrigin::fixed(format!("{final_one}{second}")).await;
    let head = format!("HEAD {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.url("/"));
    let answer = ask(&prox(), head).await;
    assert_eq!(
        (answer.header("content-length"), answer.body.len()),
        ("2", 0)
    );
}

#[tokio::test]
async fn chunks_that_can_be_read_in_two_ways_break_the_answer() {
    for body in [
        "3\r\nabcd\r\n0\r\n\r\n",
        "-3\r\nabc\r\n0\r\n\r\n",
        "0x3\r\nabc\r\n0\r\n\r\n",
        "g\r\nabc\r\n0\r\n\r\n",
        "ffffffffffffffff1\r\nabc\r\n0\r\n\r\n",
        "3\r\nabc\r\n",
    ] {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let answer = answered(&format!("{head}{body}")).await;
        assert!(answer.reset.is_some() || answer.status == 502, "{body:?}");
    }
}

#[tokio::test]
async fn a_request_that_can_be_read_in_two_ways_reaches_no_origin() {
    let origin = ScriptedOrigin::fixed("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let url = origin.url("/");
    let prox = prox();
    for (fields, status) in [
        ("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400),
        ("Transfer-Encoding: chunked\r\n", 400),
        ("Content-Length: 1\r\nContent-Length: 1\r\n", 400),
        ("Content-Length: 1\r\n", 400),
        ("Host: other\r\n", 400),
        ("X: a\r\n b\r\n", 400),
        ("X: a\rb\r\n", 400),
        ("X: a\nY: b\r\n", 400),
        ("X : a\r\n", 400),
        ("X: \0\r\n", 400),
        (&format!("X: {}\r\n", "a".repeat(40_000)), 431),
        (&"X: a\r\n".repeat(200), 400),
    ] {
        let answer = ask(&prox, get(&url, fields)).await;
        assert_eq!(
            answer.status,
            status,
            "{:?}",
            &fields[..fields.len().min(60)]
        );
        assert_eq!(answer.header("connection"), "close");
    }
    assert_eq!(origin.requests().len(), 0);
    // A second request on the same flow is none.
    let two = get(&url, "") + &get(&url, "");
    ask(&prox, two).await.whole();
    assert_eq!(origin.requests().len(), 1);
    assert!(!origin.requests()[0].head.contains("proxy-connection"));
}

#[tokio::test]
async fn fields_that_an_origin_calls_hop_by_hop_still_forbid_sharing() {
    let origin = ScriptedOrigin::fixed(
        "HTTP/1.1 200 OK\r\nConnection: cache-control, set-cookie\r\nContent-Length: 2\r\n\
         Cache-Control: private\r\nSet-Cookie: a=b\r\nETag: \"e\"\r\nExpires: Thu, 18 Aug 2050 02:01:18 GMT\r\n\r\nok",
    )
    .await;
    let prox = prox();
    for expected in [1, 2] {
        let answer = ask(&prox, get(&origin.url("/"), "")).await.whole();
        assert!(!answer.headers.contains_key("set-cookie"));
        assert_eq!(origin.requests().len(), expected);
    }
    assert_eq!(prox.holdings().cached_responses, 0);
}

#[tokio::test]
async fn what_an_origin_calls_hop_by_hop_still_holds_after_a_304() {
    let origin = ScriptedOrigin::start(|request| {
        let fields = "ETag: \"e\"\r\nConnection: vary, cache-control\r\nVary: X\r\nCache-Control: no-cache\r\n";
        let (status, body) = match request.header("if-none-match") {
            Some("\"e\"") => ("304 Not Modified", String::new()),
            _ => ("200 OK", format!("for {}", request.header("x").unwrap_or_default())),
        };
        // The 304 says less than the answer did.
        let fields = match status {
            "200 OK" => format!("{fields}Content-Length: {}\r\n", body.len()),
            _ => "ETag: \"e\"\r\n".to_owned(),
        };
        OriginReply(format!("HTTP/1.1 {status}\r\n{fields}\r\n{body}").into(), ReplyEnd::Close)
    })
    .await;
    let (prox, url) = (prox(), origin.url("/"));
    for (expected, x) in ["a", "a", "a", "b"].into_iter().enumerate() {
        let answer = ask(&prox, get(&url, &format!("X: {x}\r\n"))).await.whole();
        assert_eq!(answer.body, format!("for {x}").into_bytes());
        // Each one is asked for: no-cache holds on.
        assert_eq!(origin.requests().len(), expected + 1);
    }
}
