//! `cedos get --prox` and `cedos prox`, two processes on loopback: whole through it, whole across
//! its death, and clear words when it is not there, not ours, or refuses.

use std::path::Path;
use std::time::Instant;

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper, reply};
use cedos_lab_rig::program::{AgentProcess, CedosRun, ProxyProcess, cedos, ended, run};
use cedos_lab_rig::wait::{until_async, within};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};

const TAG: &str = "\"v1\"";

async fn told(directory: &Path, arguments: &[&str]) -> String {
    let run = run(directory, arguments).await;
    assert_eq!(run.code, 0, "{arguments:?}: {}", run.errors);
    String::from_utf8(run.output).expect("text").trim().into()
}

/// Everything that a run printed.
fn said(run: &CedosRun) -> String {
    String::from_utf8_lossy(&run.output).into_owned() + &run.errors
}

async fn get(directory: &Path, arguments: &[&str]) -> CedosRun {
    let arguments = [&["get", "--json", "-o", "got"], arguments].concat();
    run(directory, &arguments).await
}

#[tokio::test]
async fn what_comes_through_a_proxy_is_whole() {
    let directory = tempfile::tempdir().unwrap();
    let body = object(3_000_000, 1);
    let served = body.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        OriginReply(proper(asked, &served, TAG), ReplyEnd::Close)
    })
    .await;
    let proxy = ProxyProcess::start(directory.path(), "127.0.0.1:0", &[]).await;
    let run = get(
        directory.path(),
        &[&origin.url("/a"), "--prox", &proxy.address],
    )
    .await;
    assert_eq!(run.code, 0, "{:#?}", run.events);
    assert!(std::fs::read(directory.path().join("got")).unwrap() == body);
    let carried = run.last()["bytes_by_link"]["any"].as_u64().unwrap();
    assert_eq!(carried, body.len() as u64);
    // On a busy machine a packet may be late enough to be taken for lost.
    let twice = run.last()["duplicate_bytes"].as_u64().unwrap();
    assert!(twice <= body.len() as u64 / 100, "{twice}");
    assert_eq!(origin.requests().len(), 1);
}

#[tokio::test]
async fn a_proxy_that_is_killed_and_started_again_costs_a_range_request() {
    let directory = tempfile::tempdir().unwrap();
    let body = object(2_000_000, 2);
    let served = body.clone();
    let origin = ScriptedOrigin::start(move |asked| match asked.count {
        0 => OriginReply(
            cut(proper(asked, &served, TAG), 1_000_000),
            ReplyEnd::Silence,
        ),
        _ => OriginReply(proper(asked, &served, TAG), ReplyEnd::Close),
    })
    .await;
    let mut first = ProxyProcess::start(directory.path(), "127.0.0.1:0", &[]).await;
    let url = origin.url("/a");
    let arguments = ["get", "--json", "-o", "got", &url, "--prox", &first.address];
    let mut child = cedos(directory.path(), &arguments).spawn().unwrap();
    // Until the half that the origin gave has arrived.
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let half = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            let event: Value = serde_json::from_str(&line).unwrap();
            if event["event"] == "progress" && event["bytes"] == 1_000_000 {
                return;
            }
        }
        panic!("ended before it had half");
    };
    within(half).await;
    first.child.kill().await.unwrap();
    let _second = ProxyProcess::start(directory.path(), first.listens_at(), &[]).await;
    let rest = async {
        let mut last = Value::Null;
        while let Some(line) = lines.next_line().await.unwrap() {
            last = serde_json::from_str(&line).unwrap();
        }
        last
    };
    let last = within(rest).await;
    assert_eq!(last["event"], "done", "{last:#}");
    assert!(std::fs::read(directory.path().join("got")).unwrap() == body);
    let asked = origin.requests();
    assert_eq!(asked.len(), 2);
    // The proxy fetches whole objects; what the device held came over the wire only as overlap.
    let carried = last["bytes_by_link"]["any"].as_u64().unwrap();
    assert!(carried < 1_100_000 + 1_000_000, "{carried}");
}

#[tokio::test]
async fn a_proxy_that_is_killed_costs_a_range_request_at_another_with_its_key() {
    let directory = tempfile::tempdir().unwrap();
    let body = object(2_000_000, 7);
    let served = body.clone();
    let origin = ScriptedOrigin::start(move |asked| match asked.count {
        0 => OriginReply(
            cut(proper(asked, &served, TAG), 1_000_000),
            ReplyEnd::Silence,
        ),
        _ => OriginReply(proper(asked, &served, TAG), ReplyEnd::Close),
    })
    .await;
    let state = |name| ["--state-dir", name];
    let at = "127.0.0.1:0";
    let mut first = ProxyProcess::start(directory.path(), at, &state("a")).await;
    let second = ProxyProcess::start(directory.path(), at, &state("b")).await;
    let url = origin.url("/a");
    let both = ["--prox", &first.address, "--prox", &second.address];
    let arguments = [&["get", "--json", "-o", "got", &url][..], &both[..]].concat();
    let mut child = cedos(directory.path(), &arguments).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let half = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            let event: Value = serde_json::from_str(&line).unwrap();
            if event["event"] == "progress" && event["bytes"] == 1_000_000 {
                return;
            }
        }
        panic!("ended before it had half");
    };
    within(half).await;
    first.child.kill().await.unwrap();
    let rest = async {
        let mut last = Value::Null;
        while let Some(line) = lines.next_line().await.unwrap() {
            last = serde_json::from_str(&line).unwrap();
        }
        last
    };
    let last = within(rest).await;
    assert_eq!(last["event"], "done", "{last:#}");
    assert!(std::fs::read(directory.path().join("got")).unwrap() == body);
    assert_eq!(origin.requests().len(), 2);
    let carried = last["bytes_by_link"]["any"].as_u64().unwrap();
    assert!(carried < 1_100_000 + 1_000_000, "{carried}");
}

/// Starts a proxy with a key of its own.
async fn proxy_with_key(directory: &Path, name: &str) -> ProxyProcess {
    // A running proxy has read its key: the next one makes another.
    let _ = std::fs::remove_file(directory.join("prox.key"));
    ProxyProcess::start(directory, "127.0.0.1:0", &["--state-dir", name]).await
}

#[tokio::test]
async fn a_download_goes_on_at_a_proxy_of_another_key_when_its_own_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let body = object(2_000_000, 7);
    let served = body.clone();
    let origin = ScriptedOrigin::start(move |asked| match asked.count {
        0 => OriginReply(
            cut(proper(asked, &served, TAG), 1_000_000),
            ReplyEnd::Silence,
        ),
        _ => OriginReply(proper(asked, &served, TAG), ReplyEnd::Close),
    })
    .await;
    let mut first = proxy_with_key(directory.path(), "first").await;
    let second = proxy_with_key(directory.path(), "second").await;
    let url = origin.url("/a");
    // The first of those that are equally near is used.
    let both = ["--prox", &first.address, "--prox", &second.address];
    let arguments = [&["get", "--json", "-o", "got", &url][..], &both[..]].concat();
    let mut child = cedos(directory.path(), &arguments).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let half = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            let event: Value = serde_json::from_str(&line).unwrap();
            if event["event"] == "progress" && event["bytes"] == 1_000_000 {
                return;
            }
        }
        panic!("ended before it had half");
    };
    within(half).await;
    first.child.kill().await.unwrap();
    let mut notes = Vec::new();
    let rest = async {
        let mut last = Value::Null;
        while let Some(line) = lines.next_line().await.unwrap() {
            last = serde_json::from_str(&line).unwrap();
            notes.extend(last["text"].as_str().map(str::to_owned));
        }
        last
    };
    let last = within(rest).await;
    assert_eq!(last["event"], "done", "{last:#}");
    assert!(std::fs::read(directory.path().join("got")).unwrap() == body);
    let moved = notes.iter().any(|text| {
        text.contains("does not answer; going on through") && text.contains(second.listens_at())
    });
    assert!(moved, "{notes:?}");
    // The other proxy fetches the whole object once, and sends this device the rest.
    assert_eq!(origin.requests().len(), 2);
    let carried = last["bytes_by_link"]["any"].as_u64().unwrap();
    assert!(carried < 1_100_000 + 1_000_000, "{carried}");
}

#[tokio::test]
async fn a_proxy_that_does_not_run_is_passed_over_for_one_of_another_key() {
    let directory = tempfile::tempdir().unwrap();
    let origin = ScriptedOrigin::start(|asked| {
        OriginReply(proper(asked, &object(1_000, 7), TAG), ReplyEnd::Close)
    })
    .await;
    let mut first = proxy_with_key(directory.path(), "first").await;
    let second = proxy_with_key(directory.path(), "second").await;
    first.child.kill().await.unwrap();
    let url = origin.url("/a");
    let both = format!("{} {}", first.address, second.address);
    let run = get(directory.path(), &[&url, "--now", "--prox", &both]).await;
    assert_eq!(run.code, 0, "{:#?}", run.events);
}

#[tokio::test]
async fn a_wrong_key_is_a_proxy_that_does_not_answer() {
    let directory = tempfile::tempdir().unwrap();
    let proxy = ProxyProcess::start(directory.path(), "127.0.0.1:0", &[]).await;
    let (place, _) = proxy.address.rsplit_once('/').unwrap();
    let wrong = told(directory.path(), &["key", "gen", "-o", "other.key"]).await;
    let address = format!("{place}/{wrong}");
    let url = "http://127.0.0.1:9/never";
    let run = get(
        directory.path(),
        &[url, "--within", "6s", "--prox", &address],
    )
    .await;
    assert_eq!(run.code, 10, "{:#?}", run.events);
    assert!(run.reasons().contains(&"proxy_unreachable"));
    let waiting = run.events.iter().find(|event| event["event"] == "waiting");
    let t_s = waiting.expect("it says so before")["t_s"].as_f64().unwrap();
    assert!(t_s < 6.0, "{t_s}");
    assert!(!directory.path().join("got").exists());
}

#[tokio::test]
async fn who_wants_nothing_late_hears_of_the_deadline_and_of_no_proxy() {
    let directory = tempfile::tempdir().unwrap();
    let body = object(200_000, 4);
    let origin = ScriptedOrigin::start(move |asked| {
        let half = cut(proper(asked, &body, TAG), 100_000);
        OriginReply(half, ReplyEnd::Silence)
    })
    .await;
    let proxy = ProxyProcess::start(directory.path(), "127.0.0.1:0", &[]).await;
    let url = origin.url("/a");
    let fail = ["--within", "3s", "--if-late", "fail"];
    let run = get(
        directory.path(),
        &[&[&url, "--prox", &proxy.address], &fail[..]].concat(),
    )
    .await;
    assert_eq!(run.code, 10, "{:#?}", run.events);
    assert!(
        !run.reasons().contains(&"proxy_unreachable"),
        "{:#?}",
        run.events
    );
}

#[tokio::test]
async fn a_device_that_is_not_admitted_is_told_whom_to_ask_by_every_verb() {
    let directory = tempfile::tempdir().unwrap();
    let home = directory.path();
    let other = told(home, &["key", "gen", "-o", "other.key"]).await;
    told(home, &["key", "gen", "-o", "prox.key"]).await;
    let log = std::fs::File::create(home.join("prox.log")).unwrap();
    let listen = ["prox", "--listen", "127.0.0.1:0", "--key", "prox.key"];
    let admits = ["--allow-private", "--allow-client", &other];
    let mut proxy = cedos(home, &[&listen[..], &admits].concat());
    let proxy = ProxyProcess::spawned(proxy.stderr(log)).await.unwrap();
    let began = Instant::now();
    let refuses = ["serve", ".", "--listen", "127.0.0.1:0", "--allow-client"];
    let mut server = cedos(home, &[&refuses[..], &[&other]].concat());
    let server = ProxyProcess::spawned(&mut server).await.unwrap();

    let ours = told(home, &["key", "show"]).await;
    let advice = format!("--allow-client {ours}");
    let (prox, url) = (proxy.address.as_str(), "http://127.0.0.1:9/never");
    let file = format!("{}a.bin", server.address);
    for arguments in [
        &["get", url, "--prox", prox][..],
        &["get", url, "--prox", prox, "--sealed"],
        &["get", url, "--prox", prox, "--dry-run"],
        &["get", url, "--prox", prox, "--sealed", "--dry-run"],
        &["get", &file],
        &["get", &file, "--dry-run"],
        &["get", &file, "--prox", prox],
        &["put", "prox.key", url, "--prox", prox],
        &["serve", ".", "--allow-any-client", "--prox", prox],
        &[
            "sync",
            "http://127.0.0.1:9/never/",
            "folder",
            "--prox",
            prox,
        ],
        &["sync", &server.address, "folder"],
        &["receive", "7-acorn-acorn-acorn", "--prox", prox],
        &["send", "prox.key", "--prox", prox],
        &["doctor", "--prox", prox],
    ] {
        let refused = run(home, arguments).await;
        assert!(
            said(&refused).contains("does not let this device in"),
            "{arguments:?}: {refused:?}"
        );
        refused.ends_with(1, &advice);
    }
    let refused = run(home, &["get", url, "--prox", prox, "--json"]).await;
    assert!(refused.reasons().contains(&"proxy_refused"), "{refused:?}");
    // Those that serve a program go on, for the day on which they are let in, and say why nothing comes.
    let waits = "exec tail --pid=$PPID -f /dev/null";
    for arguments in [
        &["play", url, "--prox", prox, "--", "sh", "-c", waits, "{}"][..],
        &["url", url, "--prox", prox],
    ] {
        let mut child = cedos(home, arguments).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let explained = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if line.contains(&advice) {
                    return;
                }
            }
            panic!("{arguments:?} ended without a reason");
        };
        within(explained).await;
    }
    // By way of the agent, too.
    let agent = AgentProcess::start(home).await;
    let at_agent = async |arguments: &[&str]| {
        let mut command = cedos(home, arguments);
        command.env("CEDOS_AGENT", &agent.socket);
        ended(command.spawn().unwrap()).await
    };
    let left = at_agent(&["get", "--detach", url, "--prox", prox]).await;
    assert_eq!(left.code, 0, "{left:?}");
    // It waits for the day on which it is let in.
    until_async("it has asked the proxy", async || {
        let shown = at_agent(&["status", "1", "--json"]).await;
        (shown.last()["last"]["reason"] == "proxy_refused").then_some(())
    })
    .await;
    for (arguments, code, words) in [
        (&["why", "1"][..], 0, &*advice),
        (&["status", "1"], 75, &advice),
        (&["ls"], 0, "WAITING: the proxy refuses this device"),
    ] {
        at_agent(arguments).await.ends_with(code, words);
    }
    let log = std::fs::read_to_string(home.join("prox.log")).unwrap();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(&advice)).collect();
    assert!(!lines.is_empty(), "{log}");
    // One in ten seconds.
    let most = 3 + began.elapsed().as_secs() / 10;
    assert!(
        lines.len() as u64 <= most,
        "{} of {most}: {log}",
        lines.len()
    );
}

#[tokio::test]
async fn a_refusal_of_the_proxy_is_told_in_its_words() {
    let directory = tempfile::tempdir().unwrap();
    let proxy = ProxyProcess::start(directory.path(), "127.0.0.1:0", &[]).await;
    let metadata = "http://169.254.169.254/latest";
    let run = get(directory.path(), &[metadata, "--prox", &proxy.address]).await;
    assert_eq!(run.code, 1, "{:#?}", run.events);
    let text = run.last()["text"].as_str().unwrap();
    assert!(text.contains("metadata"), "{text}");
}

#[tokio::test]
async fn an_error_of_the_origin_passes_through_the_proxy() {
    let directory = tempfile::tempdir().unwrap();
    let origin = ScriptedOrigin::start(|_| {
        let nothing = reply("404 Not Found", &[("Content-Length", "0")], b"");
        OriginReply(nothing, ReplyEnd::Close)
    })
    .await;
    let proxy = ProxyProcess::start(directory.path(), "127.0.0.1:0", &[]).await;
    let run = get(
        directory.path(),
        &[&origin.url("/gone"), "--prox", &proxy.address],
    )
    .await;
    assert_eq!(run.code, 1);
    let text = run.last()["text"].as_str().unwrap();
    assert!(text.contains("404"), "{text}");
}

#[tokio::test]
async fn an_authority_that_only_the_proxy_could_use_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let address = format!("d2tp://127.0.0.1:9/{}", "A".repeat(43));
    let url = "https://origin.example/a";
    let arguments = [url, "--prox", &address, "--ca", "ca.pem"];
    let run = get(directory.path(), &arguments).await;
    assert_eq!(run.code, 2);
}

#[tokio::test]
async fn an_address_of_the_local_network_is_refused_with_the_way_around_the_proxy() {
    let directory = tempfile::tempdir().unwrap();
    let body = object(3_000, 1);
    let origin =
        ScriptedOrigin::start(move |asked| OriginReply(proper(asked, &body, TAG), ReplyEnd::Close))
            .await;
    let _ = run(directory.path(), &["key", "gen", "-o", "prox.key"]).await;
    let start = ["prox", "--key", "prox.key", "--listen", "127.0.0.1:0"];
    let mut command = cedos(
        directory.path(),
        &[&start[..], &["--allow-any-client"]].concat(),
    );
    let proxy = ProxyProcess::spawned(&mut command).await.expect("a proxy");
    let url = origin.url("/a");
    for more in [&[][..], &["--sealed"]] {
        let through = [&[url.as_str(), "--prox", &proxy.address][..], more].concat();
        let refused = get(directory.path(), &through).await;
        assert_eq!(refused.code, 1, "{refused:?}");
        let text = refused.last()["text"].as_str().unwrap_or_default();
        assert!(text.ends_with("--no-prox"), "{text}");
    }
    let metadata = "http://169.254.169.254/meta";
    let refused = get(directory.path(), &[metadata, "--prox", &proxy.address]).await;
    let text = refused.last()["text"].as_str().unwrap_or_default();
    assert!(
        text.contains("metadata service") && !text.contains("--no-prox"),
        "{text}"
    );
    let direct = get(directory.path(), &[&url, "--no-prox"]).await;
    assert_eq!(direct.code, 0, "{direct:?}");
}
