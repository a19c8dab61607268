//! One set of origins in all three modes of `cedos get`: straight, fetched by a proxy, and sealed in
//! a tunnel through it. Whoever asks the origin, what arrives is whole, or the error names the
//! cause.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::Mutex;

use crate::download::{MODES, Rig};
use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, cut, object, proper, reply,
};
use cedos_lab_rig::program::ProxyProcess;
use cedos_lab_rig::{PATIENCE, program};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const TAG: &str = "\"v1\"";

/// A script that also knows how often a path was asked for before.
fn by_path(
    script: impl Fn(&OriginRequest, usize) -> OriginReply + Send + Sync + 'static,
) -> impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static {
    let counts = Mutex::new(HashMap::<String, usize>::new());
    move |asked| {
        let count = {
            let mut counts = counts.lock().expect("no panic");
            let count = counts.entry(asked.path.clone()).or_default();
            *count += 1;
            *count - 1
        };
        script(asked, count)
    }
}

fn chunked(body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for chunk in body.chunks(7_000) {
        bytes.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
        bytes.extend([chunk, b"\r\n"].concat());
    }
    [&bytes[..], b"0\r\n\r\n"].concat()
}

#[tokio::test]
async fn well_behaved_objects_of_every_form_arrive_whole_in_every_mode() {
    for mode in MODES {
        let rig = Rig::new(mode, |asked| {
            let bytes = match asked.path.as_str() {
                "/one" => proper(asked, b"1", TAG),
                "/empty" => proper(asked, b"", TAG),
                "/unknown-length" => reply("200 OK", &[], &object(50_000, 3)),
                "/chunked" => {
                    let head = [("Transfer-Encoding", "chunked")];
                    reply("200 OK", &head, &chunked(&object(100_000, 2)))
                }
                "/gzip" => {
                    let head = [("Content-Encoding", "gzip"), ("Content-Length", "10")];
                    reply("200 OK", &head, b"\x1f\x8bnot gzip")
                }
                "/moved" => reply("302 Found", &[("Location", "/object?x=1")], b""),
                "/object?x=1" => proper(asked, &object(1_000_000, 4), TAG),
                _ => reply("404 Not Found", &[("Content-Length", "0")], b""),
            };
            OriginReply(bytes, ReplyEnd::Close)
        })
        .await;
        for (path, wanted) in [
            ("/one", b"1".to_vec()),
            ("/empty", Vec::new()),
            ("/unknown-length", object(50_000, 3)),
            ("/chunked", object(100_000, 2)),
            ("/gzip", b"\x1f\x8bnot gzip".to_vec()),
            ("/moved", object(1_000_000, 4)),
        ] {
            let run = rig.get(path, &[]).await;
            rig.assert_whole(&run, &wanted);
            if path == "/gzip" {
                assert_eq!(run.last()["content_encoding"], "gzip", "{mode}");
            }
        }
        let run = rig.get("/none", &[]).await;
        rig.assert_fails(&run, 1, "404 Not Found");
        assert!(rig.names().is_empty(), "{mode}: {:?}", rig.names());
    }
}

#[tokio::test]
async fn an_origin_that_dies_half_way_costs_an_overlap_at_most_in_every_mode() {
    for mode in MODES {
        let rig = Rig::new(
            mode,
            by_path(|asked, count| {
                let answer = proper(asked, &object(500_000, 5), TAG);
                match count {
                    0 => OriginReply(cut(answer, 150_000), ReplyEnd::Close),
                    1 => OriginReply(cut(answer, 150_000), ReplyEnd::Reset),
                    _ => OriginReply(answer, ReplyEnd::Close),
                }
            }),
        )
        .await;
        let run = rig.get("/object", &[]).await;
        rig.assert_whole(&run, &object(500_000, 5));
        let asked = rig.origin.requests();
        assert_eq!(asked.len(), 3, "{mode}");
        assert_eq!(asked[1].headers["if-range"], TAG, "{mode}");
        assert!(asked[1].range_from() >= Some(100_000), "{mode}");
        let duplicate = run.last()["duplicate_bytes"].as_u64().expect("a number");
        assert!(duplicate <= 2 * 16 * 1024 + 5_000, "{mode}: {duplicate}");
    }
}

#[tokio::test]
async fn an_origin_with_other_bytes_each_time_gives_one_answer_or_an_error_in_every_mode() {
    let body = |count: usize| object(300_000, 100 + count as u32);
    for mode in MODES {
        let rig = Rig::new(
            mode,
            by_path(move |_, count| {
                let answer = reply("200 OK", &[("Content-Length", "300000")], &body(count));
                match count {
                    // What a reset overtakes is never seen to be other bytes.
                    0 | 1 => OriginReply(cut(answer, 200_000), ReplyEnd::CloseLater),
                    _ => OriginReply(answer, ReplyEnd::Close),
                }
            }),
        )
        .await;
        let run = rig.get("/object", &[]).await;
        rig.assert_whole(&run, &body(2));
        assert!(run.reasons().contains(&"origin_changed"), "{mode}");

        let rig = Rig::new(
            mode,
            by_path(move |_, count| {
                let answer = reply("200 OK", &[("Content-Length", "300000")], &body(count));
                OriginReply(cut(answer, 100_000 + 1000 * count), ReplyEnd::CloseLater)
            }),
        )
        .await;
        let run = rig.get("/object", &[]).await;
        rig.assert_fails(&run, 13, "starting from zero");
    }
}

#[tokio::test]
async fn an_origin_that_hangs_behind_a_tunnel_is_left_and_continued() {
    let rig = Rig::new(
        "sealed",
        by_path(|asked, count| {
            let answer = proper(asked, &object(200_000, 6), TAG);
            match count {
                0 => OriginReply(cut(answer, 100_000), ReplyEnd::Silence),
                _ => OriginReply(answer, ReplyEnd::Close),
            }
        }),
    )
    .await;
    let run = rig.get("/object", &["--stall", "1s"]).await;
    rig.assert_whole(&run, &object(200_000, 6));
    run.ends_with(0, "no data through the tunnel");
}

#[tokio::test]
async fn a_proxy_that_sees_a_tunnel_sees_no_request() {
    let rig = Rig::new("sealed", |asked| {
        OriginReply(proper(asked, &object(1000, 7), TAG), ReplyEnd::Close)
    })
    .await;
    let run = rig.get("/object", &[]).await;
    rig.assert_whole(&run, &object(1000, 7));
    // The origin was asked by this device: the proxy would have added itself.
    let asked = &rig.origin.requests()[0];
    assert!(!asked.headers.contains_key("via"), "{asked:?}");
    assert!(asked.headers["user-agent"].starts_with("cedos/"));

    // Its authority is unknown without --ca: it is the device that verifies.
    let address = &rig.proxy.as_ref().expect("a proxy").address;
    let url = rig.origin.url("/object");
    let untrusted = ["get", "--json", "-o", "out", &url, "--prox", address];
    let run = program::run(rig.home(), &[&untrusted[..], &["--sealed"]].concat()).await;
    run.ends_with(1, "the certificate of");
}

#[tokio::test]
async fn credentials_seal_a_download_by_themselves_and_reach_the_origin() {
    let rig = Rig::new("proxy-fetch", |asked| {
        let basic = asked.headers.get("authorization");
        let cookie = asked.headers.get("cookie");
        if basic.is_some_and(|v| v == "Basic bWU6c2VjcmV0") || cookie.is_some_and(|v| v == "a=b") {
            OriginReply(proper(asked, b"for members", TAG), ReplyEnd::Close)
        } else {
            let head = [("Content-Length", "0")];
            OriginReply(reply("401 Unauthorized", &head, b""), ReplyEnd::Close)
        }
    })
    .await;
    let proxy = &rig.proxy.as_ref().expect("a proxy").address;
    let url = rig.origin.url("/object");
    let with_user = url.replace("https://", "https://me:secret@");
    for secret in [
        &[with_user.as_str()][..],
        &[&url, "--header", "Cookie: a=b"],
        &[&url, "-H", "Authorization: Basic bWU6c2VjcmV0"],
    ] {
        let start = [
            "get", "--json", "-o", "out", "--prox", proxy, "--ca", "ca.pem",
        ];
        let run = program::run(rig.home(), &[&start[..], secret].concat()).await;
        run.ends_with(0, "\"mode\":\"sealed\"");
        let said = String::from_utf8_lossy(&run.output);
        assert!(!said.contains("secret") && !said.contains("a=b"), "{said}");
        assert!(
            !rig.origin
                .requests()
                .iter()
                .any(|a| a.headers.contains_key("via"))
        );
    }
    // Without them the proxy fetches, and is the one who is refused.
    let run = rig.get("/object", &["-H", "Accept: text/plain"]).await;
    rig.assert_fails(&run, 1, "requires credentials");
    assert_eq!(run.last()["reason"], "auth_required");
    let asked = rig.origin.requests();
    let last = asked.last().expect("a request");
    assert_eq!(last.headers["accept"], "text/plain");
    assert!(last.headers.contains_key("via"), "{last:?}");
}

#[tokio::test]
async fn fields_of_the_users_own_go_on_and_secrets_stay_with_their_origin() {
    let other = ScriptedOrigin::start(|asked| {
        OriginReply(proper(asked, &object(1000, 8), TAG), ReplyEnd::Close)
    })
    .await;
    let elsewhere = other.url("/b");
    let rig = Rig::new("direct", move |_| {
        let head = [("Location", elsewhere.as_str()), ("Content-Length", "0")];
        OriginReply(reply("302 Found", &head, b""), ReplyEnd::Close)
    })
    .await;
    let fields = [
        "-H",
        "User-Agent: me",
        "-H",
        "X-Api-Key: hush",
        "--allow-downgrade",
    ];
    let run = rig.get("/a", &fields).await;
    rig.assert_whole(&run, &object(1000, 8));
    assert_eq!(rig.origin.requests()[0].headers["x-api-key"], "hush");
    let there = &other.requests()[0].headers;
    assert_eq!(there["user-agent"], "me");
    assert!(!there.contains_key("x-api-key"), "{there:?}");
}

#[tokio::test]
async fn standard_output_gets_the_bytes_and_only_the_bytes_in_every_mode() {
    for mode in MODES {
        let rig = Rig::new(
            mode,
            by_path(|asked, count| {
                let answer = proper(asked, &object(300_000, 9), TAG);
                match count {
                    0 => OriginReply(cut(answer, 100_000), ReplyEnd::Close),
                    _ => OriginReply(answer, ReplyEnd::Close),
                }
            }),
        )
        .await;
        let run = rig.get("/object", &["-o", "-"]).await;
        assert_eq!(run.code, 0, "{mode}: {}", run.errors);
        assert!(run.output == object(300_000, 9), "{mode}: other bytes");
        assert!(rig.names().is_empty(), "{mode}: {:?}", rig.names());
    }
}

#[tokio::test]
async fn a_sealed_download_continues_with_a_range_after_its_proxy_was_killed() {
    let mut rig = Rig::new(
        "sealed",
        by_path(|asked, count| {
            let answer = proper(asked, &object(2_000_000, 10), TAG);
            match count {
                0 => OriginReply(cut(answer, 1_000_000), ReplyEnd::Silence),
                _ => OriginReply(answer, ReplyEnd::Close),
            }
        }),
    )
    .await;
    let mut child = rig
        .command("/object", &["--stall", "60s"])
        .spawn()
        .expect("start");
    let mut lines = BufReader::new(child.stdout.take().expect("output")).lines();
    let half = async {
        while let Some(line) = lines.next_line().await.expect("readable") {
            let event: Value = serde_json::from_str(&line).expect("JSON");
            if event["event"] == "progress" && event["bytes"] == 1_000_000 {
                return;
            }
        }
        panic!("ended before it had half");
    };
    tokio::time::timeout(PATIENCE, half).await.expect("half");
    let mut first = rig.proxy.take().expect("a proxy");
    first.child.kill().await.expect("kill");
    let listen = first.address.trim_start_matches("d2tp://");
    let listen = listen.split('/').next().expect("a place");
    rig.proxy = Some(ProxyProcess::start(rig.home(), listen, &[]).await);
    let mut last = Value::Null;
    let rest = async {
        while let Some(line) = lines.next_line().await.expect("readable") {
            last = serde_json::from_str(&line).expect("JSON");
        }
    };
    tokio::time::timeout(PATIENCE, rest).await.expect("an end");
    assert_eq!(last["event"], "done", "{last:#}");
    let got = std::fs::read(rig.place().join("out")).expect("the file");
    assert!(got == object(2_000_000, 10), "other bytes");
    let asked = rig.origin.requests();
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[1].headers["if-range"], TAG);
    assert!(asked[1].range_from() >= Some(1_000_000 - 16 * 1024));
    assert!(
        last["duplicate_bytes"].as_u64() <= Some(16 * 1024 + 5_000),
        "{last}"
    );
}

#[tokio::test]
async fn a_terminal_that_closes_leaves_a_partial_unless_nohup_says_otherwise() {
    let rig = Rig::new("direct", |asked| {
        let answer = proper(asked, &object(200_000, 11), TAG);
        match asked.range_from() {
            None => OriginReply(cut(answer, 100_000), ReplyEnd::Silence),
            Some(_) => OriginReply(answer, ReplyEnd::Close),
        }
    })
    .await;
    let hung_up = async |mut child: Child| {
        let mut lines = BufReader::new(child.stdout.take().expect("output")).lines();
        while let Some(line) = lines.next_line().await.expect("readable") {
            if line.contains("\"bytes\":100000") {
                break;
            }
        }
        let pid = child.id().expect("it runs") as i32;
        kill(Pid::from_raw(pid), Signal::SIGHUP).expect("send");
        while lines.next_line().await.expect("readable").is_some() {}
        child.wait().await.expect("it ends").code()
    };
    // Whoever runs the tests may have been told not to hang up.
    let under = |program: &[&str], get: Command| {
        let get = get.as_std();
        let mut command = Command::new(program[0]);
        command
            .args(&program[1..])
            .arg(get.get_program())
            .args(get.get_args())
            .current_dir(rig.place())
            .env_remove("CEDOS_PROX")
            .env("CEDOS_AGENT", "none")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        command.spawn().expect("start")
    };
    let get = rig.command("/a", &["--stall", "60s"]);
    let child = under(&["env", "--default-signal=HUP"], get);
    let code = tokio::time::timeout(PATIENCE, hung_up(child)).await;
    assert_eq!(code.expect("in time"), Some(3));
    assert_eq!(rig.names(), ["out.part", "out.part.json"]);
    std::fs::remove_file(rig.place().join("out.part.json")).expect("remove");

    let get = rig.command("/a", &["--stall", "2s"]);
    let code = tokio::time::timeout(PATIENCE, hung_up(under(&["nohup"], get))).await;
    assert_eq!(code.expect("in time"), Some(0));
}
