//! `cedos get` with several URLs: by its own process and by an agent, stopped and resumed, limited in its rate.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper};
use cedos_lab_rig::program::{AgentProcess, CedosRun, ProxyProcess, cedos, ended, pid_of, run};
use cedos_lab_rig::wait::until;
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::Command;

/// Bytes of the object that a path names: `/5000/…`.
fn size_in(path: &str) -> Option<usize> {
    path.split('/').nth(1)?.parse().ok()
}

/// A server with objects of any size, and one that is `named` hangs.bin by the server. Until it `is_well`, what is named `hangs` stops in the middle.
async fn origin_that(is_well: Arc<AtomicBool>) -> ScriptedOrigin {
    ScriptedOrigin::start(move |asked| match size_in(&asked.path) {
        Some(size) => {
            let mut whole = proper(asked, &object(size, 3), "\"v1\"");
            if asked.path.ends_with("/named") {
                let field = b"\r\nContent-Disposition: attachment; filename=hangs.bin";
                let end = whole.windows(4).position(|four| four == b"\r\n\r\n");
                let end = end.expect("the end of the head");
                whole.splice(end..end, field.iter().copied());
            }
            let hangs = asked.path.ends_with("hangs.bin") && !is_well.load(Ordering::Relaxed);
            match hangs {
                true => OriginReply(cut(whole, size / 2), ReplyEnd::Silence),
                false => OriginReply(whole, ReplyEnd::Close),
            }
        }
        None => OriginReply(
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec(),
            ReplyEnd::Close,
        ),
    })
    .await
}

async fn origin() -> ScriptedOrigin {
    origin_that(Arc::default()).await
}

fn assert_has(folder: &Path, name: &str, size: usize) {
    let content = std::fs::read(folder.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(content == object(size, 3), "{name} is not what was served");
}

/// The events of the download that is `number` in the list.
fn events_of(run: &CedosRun, number: usize) -> Vec<&Value> {
    let events = run.events.iter();
    events.filter(|event| event["number"] == number).collect()
}

/// A command that an agent carries out, if there is one.
fn command(folder: &Path, agent: Option<&AgentProcess>, arguments: &[&str]) -> Command {
    let mut command = cedos(folder, arguments);
    if let Some(agent) = agent {
        command.env("CEDOS_AGENT", &agent.socket);
    }
    command
}

async fn a_list_is_downloaded(agent: Option<&AgentProcess>, folder: &Path) {
    let origin = origin().await;
    let (a, b) = (origin.url("/70000/a.bin"), origin.url("/500000/b.bin"));
    let list = format!("# a comment\n\n{}\n{a}\n", origin.url("/0/empty.bin"));
    std::fs::write(folder.join("list"), list).expect("written");
    let none = origin.url("/none/c.bin");
    let arguments = ["get", &a, &b, &none, "-i", "list", "--json"];
    let spawned = command(folder, agent, &arguments).spawn().expect("start");
    let ran = ended(spawned).await;
    assert_eq!(ran.code, 1, "that of the one that fails: {ran:?}");
    assert_has(folder, "a.bin", 70_000);
    assert_has(folder, "b.bin", 500_000);
    assert_has(folder, "empty.bin", 0);
    let summary = ran.last();
    assert_eq!(summary["event"], "summary");
    let counts = ["urls", "done", "failed", "skipped", "stopped", "late"];
    let counts = counts.map(|field| summary[field].as_u64());
    assert_eq!(
        counts,
        [Some(4), Some(3), Some(1), Some(0), Some(0), Some(0)]
    );
    assert_eq!(
        (&summary["bytes"], &summary["exit"]),
        (&570_000.into(), &1.into())
    );
    for number in 1..=4 {
        let events = events_of(&ran, number);
        let last = events.last().unwrap_or_else(|| panic!("{number}: {ran:?}"));
        let expected = if number == 3 { "error" } else { "done" };
        assert_eq!(last["event"], expected, "{number}: {ran:?}");
        let ends = events.iter().filter(|event| !event["exit"].is_null());
        assert_eq!(ends.count(), 1, "{number} ends once: {ran:?}");
    }
}

#[tokio::test]
async fn several_urls_and_a_list_are_downloaded_and_one_that_fails_keeps_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    a_list_is_downloaded(None, folder.path()).await;
}

#[tokio::test]
async fn an_agent_carries_out_a_list_and_its_command_follows_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let agent = AgentProcess::start(folder.path()).await;
    a_list_is_downloaded(Some(&agent), folder.path()).await;
}

async fn a_stopped_list_is_resumed(agent: Option<&AgentProcess>, folder: &Path) {
    let is_well = Arc::new(AtomicBool::new(false));
    let origin = origin_that(is_well.clone()).await;
    let (whole, half) = (
        origin.url("/3000/whole.bin"),
        origin.url("/90000/hangs.bin"),
    );
    let arguments = ["get", &whole, &half, "--json"];
    let child = command(folder, agent, &arguments).spawn().expect("start");
    let part = folder.join("hangs.bin.part");
    until("one is whole, and half of the other there", || {
        folder.join("whole.bin").exists() && part.metadata().is_ok_and(|part| part.len() == 45_000)
    })
    .await;
    kill(pid_of(&child), Signal::SIGINT).expect("send");
    let stopped = ended(child).await;
    assert_eq!(stopped.code, 3, "{stopped:?}");
    let summary = stopped.last();
    assert_eq!(
        (&summary["done"], &summary["stopped"]),
        (&1.into(), &1.into())
    );
    is_well.store(true, Ordering::Relaxed);
    let again = [&arguments[..], &["--skip-existing"]].concat();
    let child = command(folder, agent, &again).spawn().expect("start");
    let resumed = ended(child).await;
    assert_eq!(resumed.code, 0, "{resumed:?}");
    assert_has(folder, "whole.bin", 3_000);
    assert_has(folder, "hangs.bin", 90_000);
    let summary = resumed.last();
    assert_eq!(
        (&summary["done"], &summary["skipped"]),
        (&1.into(), &1.into())
    );
    let done = *events_of(&resumed, 2).last().expect("an event");
    assert_eq!(done["held_bytes"], 45_000, "the half was not fetched again");
}

#[tokio::test]
async fn a_list_that_is_stopped_resumes_with_what_is_not_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    a_stopped_list_is_resumed(None, folder.path()).await;
}

#[tokio::test]
async fn an_agent_stops_a_list_with_its_command_and_resumes_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let agent = AgentProcess::start(folder.path()).await;
    a_stopped_list_is_resumed(Some(&agent), folder.path()).await;
}

#[tokio::test]
async fn a_list_is_left_to_the_agent_by_its_numbers() {
    let folder = tempfile::tempdir().expect("a folder");
    let agent = AgentProcess::start(folder.path()).await;
    let origin = origin().await;
    let urls = [origin.url("/10/a.bin"), origin.url("/20/b.bin")];
    let arguments = ["get", &urls[0], &urls[1], "--detach"];
    let child = command(folder.path(), Some(&agent), &arguments).spawn();
    let left = ended(child.expect("start")).await;
    left.ends_with(0, "carries out 2 downloads");
    assert_eq!(String::from_utf8_lossy(&left.output), "1\n2\n");
    let child = command(folder.path(), Some(&agent), &["wait", "1", "2"]).spawn();
    assert_eq!(ended(child.expect("start")).await.code, 0);
    assert_has(folder.path(), "a.bin", 10);
    assert_has(folder.path(), "b.bin", 20);
    let alone = run(folder.path(), &arguments).await;
    alone.ends_with(2, "need the agent");
    // What is skipped or refused is told as without --detach.
    let (same, more) = (origin.url("/30/c.bin"), origin.url("/40/c.bin"));
    let arguments = [
        "get",
        &urls[0],
        &same,
        &more,
        "--detach",
        "--skip-existing",
        "--json",
    ];
    let child = command(folder.path(), Some(&agent), &arguments).spawn();
    let left = ended(child.expect("start")).await;
    assert_eq!(left.code, 2, "{left:?}");
    for (number, event) in [(1, "skipped"), (2, "detached"), (3, "error")] {
        let events = events_of(&left, number);
        let named: Vec<_> = events.iter().map(|told| &told["event"]).collect();
        assert_eq!(named, [event], "{left:?}");
    }
}

#[tokio::test]
async fn a_file_that_another_download_finished_meanwhile_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let is_well = Arc::new(AtomicBool::new(false));
    let origin = origin_that(is_well.clone()).await;
    let slow = origin.url("/90000/hangs.bin");
    let arguments = ["get", &slow, "--stall", "1s"];
    let slow = command(folder.path(), None, &arguments).spawn();
    let part = folder.path().join("hangs.bin.part");
    until("half of it is there", || {
        part.metadata().is_ok_and(|part| part.len() == 45_000)
    })
    .await;
    let named = origin.url("/10/named");
    let named = run(folder.path(), &["get", &named]).await;
    named.ends_with(0, "");
    is_well.store(true, Ordering::Relaxed);
    ended(slow.expect("start")).await.ends_with(0, "");
    assert_has(folder.path(), "hangs.bin", 10);
    assert_has(folder.path(), "hangs (1).bin", 90_000);
}

/// Speaks as an agent whose events of two downloads were lost: the first is whole, the second was removed. Events of
/// another download come all the time.
async fn speak_as_forgetful_agent(stream: UnixStream, added: Arc<AtomicU64>) {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let asked: Value = serde_json::from_str(&line).expect("JSON");
        let answer = match asked["do"].as_str().expect("a request") {
            "add" => {
                let id = added.fetch_add(1, Ordering::Relaxed) + 1;
                serde_json::json!({"ok": true, "id": id, "file": "/f"})
            }
            "status" if asked["id"] == 1 => {
                serde_json::json!({"ok": true, "standing": "done", "last": {
                "event": "done", "verb": "get", "url": "http://h/a.bin", "mode": "direct", "file": "/f",
                "bytes": 10, "sha256": "", "bytes_by_link": {}, "duration_s": 1.0, "switches": 0,
                "duplicate_bytes": 0, "exit": 0, "resumable_bytes": 0}})
            }
            "status" => {
                serde_json::json!({"ok": false, "exit": 1, "text": "there is no transfer 2"})
            }
            _ => serde_json::json!({"ok": true}),
        };
        let _ = write.write_all(format!("{answer}\n").as_bytes()).await;
        if asked["do"] == "watch" {
            let mut often = tokio::time::interval(Duration::from_millis(200));
            let event = "{\"event\":\"progress\",\"id\":77}\n";
            while write.write_all(event.as_bytes()).await.is_ok() {
                often.tick().await;
            }
        }
    }
}

#[tokio::test]
async fn events_that_are_lost_among_others_are_asked_for_and_a_removed_download_ends_no_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let agent = tokio::spawn(async move {
        let added = Arc::default();
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(speak_as_forgetful_agent(stream, Arc::clone(&added)));
        }
    });
    let arguments = ["get", "http://h/a.bin", "http://h/b.bin", "--json"];
    let mut command = cedos(folder.path(), &arguments);
    let ran = ended(command.env("CEDOS_AGENT", &socket).spawn().expect("start")).await;
    agent.abort();
    let last = |number| events_of(&ran, number).last().map(|event| &event["event"]);
    assert_eq!(last(1), Some(&"done".into()), "{ran:?}");
    assert_eq!(last(2), Some(&"error".into()), "{ran:?}");
    let text = &events_of(&ran, 2)[0]["text"];
    assert_eq!(text, "it was removed from the agent's list");
    assert_eq!((ran.code, &ran.last()["event"]), (1, &"summary".into()));
}

/// Downloads at a limited rate, which a busy machine only makes slower. Returns how long it took.
async fn limited(agent: Option<&AgentProcess>, folder: &Path, more: &[&str]) -> Duration {
    let origin = origin().await;
    let urls = ["/60000/a.bin", "/60000/b.bin", "/60000/c.bin"].map(|path| origin.url(path));
    let [a, b, c] = &urls;
    let arguments = [&["get", a, b, c, "--limit-rate", "60k"][..], more].concat();
    let begun = Instant::now();
    let child = command(folder, agent, &arguments).spawn().expect("start");
    let ran = ended(child).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    for name in ["a.bin", "b.bin", "c.bin"] {
        assert_has(folder, name, 60_000);
    }
    begun.elapsed()
}

/// 180 kB at 60 kB/s, less what may be taken in before the limit holds: a piece of each that fills a socket.
const LIMITED_MIN: Duration = Duration::from_millis(1_500);

#[tokio::test]
async fn a_limit_on_the_rate_is_for_all_urls_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let took = limited(None, folder.path(), &[]).await;
    assert!(took >= LIMITED_MIN, "{took:?}");
}

#[tokio::test]
async fn an_agent_keeps_the_limit_of_a_command_for_all_its_urls() {
    let folder = tempfile::tempdir().expect("a folder");
    let agent = AgentProcess::start(folder.path()).await;
    let took = limited(Some(&agent), folder.path(), &[]).await;
    assert!(took >= LIMITED_MIN, "{took:?}");
}

#[tokio::test]
async fn a_limit_on_the_rate_holds_through_a_proxy() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    let took = limited(None, folder.path(), &["--prox", &proxy.address]).await;
    assert!(took >= LIMITED_MIN, "{took:?}");
}

#[tokio::test]
async fn a_slow_limit_is_no_silence_of_the_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let origin = origin().await;
    let url = origin.url("/120000/a.bin");
    let more = [
        "--limit-rate",
        "20k",
        "--stall",
        "2s",
        "--tries",
        "1",
        "--json",
    ];
    let begun = Instant::now();
    let ran = run(folder.path(), &[&["get", &url][..], &more].concat()).await;
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(2_500), "{took:?}");
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.last()["duplicate_bytes"], 0, "{ran:?}");
    assert!(ran.reasons().is_empty(), "{ran:?}");
}

#[tokio::test]
async fn names_and_options_that_make_no_sense_for_several_are_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let origin = origin().await;
    let (a, b) = (origin.url("/10/a.bin"), origin.url("/20/a.bin"));
    let refused = async |more: &[&str], words: &str| {
        let ran = run(folder.path(), &[&["get", &a, &b][..], more].concat()).await;
        ran.ends_with(2, words);
    };
    refused(&["-o", "one.bin"], "no directory").await;
    refused(&["-o", "-"], "-o - is for one URL").await;
    let digest = format!("sha256:{}", "0".repeat(64));
    refused(&["--integrity", &digest], "--integrity is for one URL").await;
    assert!(!folder.path().join("a.bin").exists(), "nothing was begun");
    // Both would be a.bin.
    refused(&[], "a.bin is the name for").await;
    assert_has(folder.path(), "a.bin", 10);
    std::fs::write(folder.path().join("one"), format!("{b}\n")).expect("written");
    for output in ["-", "one.bin"] {
        let ran = run(folder.path(), &["get", "-i", "one", "-o", output]).await;
        ran.ends_with(2, "name the URL on the command line");
    }
    std::fs::write(folder.path().join("bad"), "https://h/a\nh.example/b\n").expect("written");
    run(folder.path(), &["get", "-i", "bad"])
        .await
        .ends_with(2, "bad, line 2: ");
    run(folder.path(), &["get", &a, "--skip-existing"])
        .await
        .ends_with(0, "exists already");
}

#[tokio::test]
async fn people_read_a_name_in_front_of_each_line_and_a_summary() {
    let folder = tempfile::tempdir().expect("a folder");
    let origin = origin().await;
    let (a, none) = (origin.url("/10/a.bin"), origin.url("/none/b.bin"));
    let ran = run(folder.path(), &["get", &a, &none]).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.output.is_empty(), "{ran:?}");
    let using = ran.errors.matches("Using lo").count();
    assert_eq!(using, 1, "what is true of all is said once: {}", ran.errors);
    assert!(ran.errors.contains("\na.bin: 10 B in "), "{}", ran.errors);
    assert!(
        ran.errors.contains("\nb.bin: 127.0.0.1 answers 404"),
        "{}",
        ran.errors
    );
    assert!(
        ran.errors
            .contains("\n1 of 2 downloaded, 1 failed: 10 B in "),
        "{}",
        ran.errors
    );
}
