//! `cedos get --prox` and `cedos prox`, two processes on loopback: whole through it, whole across
//! its death, and clear words when it is not there, not ours, or refuses.

mod get_origin;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use get_origin::{End, Origin, Reply, cut, object, proper, reply};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// Upper bound for what is certain to happen, so that a failure is not a hang.
const PATIENCE: Duration = Duration::from_secs(60);
const TAG: &str = "\"v1\"";

fn cedos(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cedos"));
    command
        .current_dir(directory)
        .args(arguments)
        .env_remove("CEDOS_PROX")
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .env("XDG_CONFIG_HOME", directory)
        .env("XDG_STATE_HOME", directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

async fn told(directory: &Path, arguments: &[&str]) -> String {
    let output = cedos(directory, arguments).output().await.expect("cedos");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout)
        .expect("text")
        .trim()
        .into()
}

struct Proxy {
    child: Child,
    address: String,
}

/// A proxy with the key in `prox.key`, for this device or for `client`.
async fn proxy(directory: &Path, listen: &str, client: Option<&str>) -> Proxy {
    let ours = told(directory, &["key", "show"]).await;
    if !directory.join("prox.key").exists() {
        told(directory, &["key", "gen", "-o", "prox.key"]).await;
    }
    let client = client.unwrap_or(&ours);
    let arguments = [
        "prox",
        "--listen",
        listen,
        "--key",
        "prox.key",
        "--allow-private",
        "--allow-client",
        client,
    ];
    // A port that was free a moment ago may be somebody else's for another moment.
    for _ in 0..100 {
        let mut child = cedos(directory, &arguments)
            .stderr(Stdio::null())
            .spawn()
            .expect("start the proxy");
        let out = child.stdout.take().expect("its output");
        let mut lines = BufReader::new(out).lines();
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        if let Some(address) = line.expect("in time").expect("readable") {
            return Proxy { child, address };
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("the proxy cannot listen at {listen}");
}

struct Run {
    code: i32,
    events: Vec<Value>,
}

impl Run {
    fn last(&self) -> &Value {
        self.events.last().expect("an event")
    }
    fn has_reason(&self, reason: &str) -> bool {
        self.events.iter().any(|event| event["reason"] == reason)
    }
}

async fn get(directory: &Path, arguments: &[&str]) -> Run {
    let arguments = [&["get", "--json", "-o", "got"], arguments].concat();
    let child = cedos(directory, &arguments).spawn().expect("start cedos");
    ended(child).await
}

async fn ended(child: Child) -> Run {
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output())
        .await
        .expect("cedos ends by itself")
        .expect("its output");
    let text = String::from_utf8_lossy(&output.stdout);
    Run {
        code: output.status.code().expect("no signal ended it"),
        events: text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect(),
    }
}

#[tokio::test]
async fn what_comes_through_a_proxy_is_whole() {
    let directory = tempfile::tempdir().unwrap();
    let body = object(3_000_000, 1);
    let served = body.clone();
    let origin = Origin::start(move |asked| Reply(proper(asked, &served, TAG), End::Close)).await;
    let proxy = proxy(directory.path(), "127.0.0.1:0", None).await;
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
    assert_eq!(origin.asked().len(), 1);
}

#[tokio::test]
async fn a_proxy_that_is_killed_and_started_again_costs_a_range_request() {
    let directory = tempfile::tempdir().unwrap();
    let body = object(2_000_000, 2);
    let served = body.clone();
    let origin = Origin::start(move |asked| match asked.count {
        0 => Reply(cut(proper(asked, &served, TAG), 1_000_000), End::Silence),
        _ => Reply(proper(asked, &served, TAG), End::Close),
    })
    .await;
    let mut first = proxy(directory.path(), "127.0.0.1:0", None).await;
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
    tokio::time::timeout(PATIENCE, half).await.expect("half");
    first.child.kill().await.unwrap();
    let listen = first.address.trim_start_matches("d2tp://");
    let listen = listen.split('/').next().unwrap();
    let _second = proxy(directory.path(), listen, None).await;
    let rest = async {
        let mut last = Value::Null;
        while let Some(line) = lines.next_line().await.unwrap() {
            last = serde_json::from_str(&line).unwrap();
        }
        last
    };
    let last = tokio::time::timeout(PATIENCE, rest).await.expect("an end");
    assert_eq!(last["event"], "done", "{last:#}");
    assert!(std::fs::read(directory.path().join("got")).unwrap() == body);
    let asked = origin.asked();
    assert_eq!(asked.len(), 2);
    // The proxy fetches whole objects; what the device held came over the wire only as overlap.
    let carried = last["bytes_by_link"]["any"].as_u64().unwrap();
    assert!(carried < 1_100_000 + 1_000_000, "{carried}");
}

#[tokio::test]
async fn a_wrong_key_is_a_proxy_that_does_not_answer() {
    let directory = tempfile::tempdir().unwrap();
    let proxy = proxy(directory.path(), "127.0.0.1:0", None).await;
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
    assert!(run.has_reason("proxy_unreachable"));
    let waiting = run.events.iter().find(|event| event["event"] == "waiting");
    let t_s = waiting.expect("it says so before")["t_s"].as_f64().unwrap();
    assert!(t_s < 6.0, "{t_s}");
    assert!(!directory.path().join("got").exists());
}

#[tokio::test]
async fn who_wants_nothing_late_hears_of_the_deadline_and_of_no_proxy() {
    let directory = tempfile::tempdir().unwrap();
    let body = object(200_000, 4);
    let origin = Origin::start(move |asked| {
        let half = cut(proper(asked, &body, TAG), 100_000);
        Reply(half, End::Silence)
    })
    .await;
    let proxy = proxy(directory.path(), "127.0.0.1:0", None).await;
    let url = origin.url("/a");
    let fail = ["--within", "3s", "--if-late", "fail"];
    let run = get(
        directory.path(),
        &[&[&url, "--prox", &proxy.address], &fail[..]].concat(),
    )
    .await;
    assert_eq!(run.code, 10, "{:#?}", run.events);
    assert!(!run.has_reason("proxy_unreachable"), "{:#?}", run.events);
}

#[tokio::test]
async fn a_device_that_is_not_admitted_is_told_whom_to_ask() {
    let directory = tempfile::tempdir().unwrap();
    let other = told(directory.path(), &["key", "gen", "-o", "other.key"]).await;
    let proxy = proxy(directory.path(), "127.0.0.1:0", Some(&other)).await;
    let url = "http://127.0.0.1:9/never";
    let run = get(directory.path(), &[url, "--prox", &proxy.address]).await;
    assert_eq!(run.code, 1, "{:#?}", run.events);
    let ours = told(directory.path(), &["key", "show"]).await;
    let text = run.last()["text"].as_str().unwrap();
    assert!(text.contains(&format!("--allow-client {ours}")), "{text}");
}

#[tokio::test]
async fn a_refusal_of_the_proxy_is_told_in_its_words() {
    let directory = tempfile::tempdir().unwrap();
    let proxy = proxy(directory.path(), "127.0.0.1:0", None).await;
    let metadata = "http://169.254.169.254/latest";
    let run = get(directory.path(), &[metadata, "--prox", &proxy.address]).await;
    assert_eq!(run.code, 1, "{:#?}", run.events);
    let text = run.last()["text"].as_str().unwrap();
    assert!(text.contains("metadata"), "{text}");
}

#[tokio::test]
async fn an_error_of_the_origin_passes_through_the_proxy() {
    let directory = tempfile::tempdir().unwrap();
    let origin = Origin::start(|_| {
        let nothing = reply("404 Not Found", &[("Content-Length", "0")], b"");
        Reply(nothing, End::Close)
    })
    .await;
    let proxy = proxy(directory.path(), "127.0.0.1:0", None).await;
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
