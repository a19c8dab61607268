//! `cedos get --every` and `put --every`: runs by the clock, through the agent's end and the machine's absence.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper, reply};
use cedos_lab_rig::program::ProxyProcess;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::io::AsyncWriteExt;

use super::home::Home;

const BYTES: usize = 50_000;
const HOUR: i64 = 3_600;
const DAY: i64 = 24 * HOUR;

/// An origin whose object is another one whenever the number is, and that answers conditional requests.
async fn versioned(version: Arc<AtomicU32>) -> ScriptedOrigin {
    ScriptedOrigin::start(move |asked| {
        let version = version.load(Ordering::Relaxed);
        let tag = format!("\"v{version}\"");
        if asked.path == "/gone" {
            return OriginReply(reply("404 Not Found", &[], b""), ReplyEnd::Close);
        }
        if asked.header("if-none-match") == Some(&tag) {
            let unchanged = reply("304 Not Modified", &[("ETag", &tag)], b"");
            return OriginReply(unchanged, ReplyEnd::Close);
        }
        OriginReply(
            proper(asked, &object(BYTES, version), &tag),
            ReplyEnd::Close,
        )
    })
    .await
}

/// The time of day three hours from now, as a schedule for each day.
fn in_three_hours() -> String {
    let at = jiff::Zoned::now().saturating_add(jiff::Span::new().hours(3));
    at.strftime("daily %H:%M").to_string()
}

/// Leaves a transfer that recurs to the agent; what it answered.
async fn leave(home: &Home, arguments: &[&str]) -> Value {
    let every = in_three_hours();
    let more = ["--json", "--every", &every, "--within", "1h"];
    let run = home.run(&[arguments, &more].concat()).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    run.last().clone()
}

/// Whether the transfer waits for its next run, after this many runs ended like this.
fn waits_after(outcome: &'static str) -> impl Fn(&Value) -> bool {
    move |told| told["standing"] == "scheduled" && told["last"]["last_run"]["outcome"] == outcome
}

fn content(path: &Path) -> Vec<u8> {
    std::fs::read(path).expect("the file")
}

#[tokio::test]
async fn each_run_replaces_the_file_if_it_changed_and_costs_one_request_if_not() {
    let version = Arc::new(AtomicU32::new(1));
    let origin = versioned(version.clone()).await;
    let Some(home) = Home::with_clock().await else {
        return;
    };
    let told = leave(
        &home,
        &["get", &origin.url("/a"), "-o", "out", "--keep", "1"],
    )
    .await;
    let id = told["id"].to_string();
    let time = |field: &str| -> jiff::Timestamp {
        told[field]
            .as_str()
            .expect("a time")
            .parse()
            .expect("a time")
    };
    assert_eq!((time("due") - time("starts")).get_seconds(), HOUR);
    let out = home.path().join("out");
    home.until(&id, "is scheduled", |told| told["standing"] == "scheduled")
        .await;
    assert!(origin.requests().is_empty() && !out.exists(), "too early");
    home.run(&["ls"]).await.ends_with(0, "SCHEDULED");
    // An hour before it is due, and a little.
    home.set_clock(2 * HOUR + 600);
    home.until(&id, "ran", waits_after("done")).await;
    assert!(content(&out) == object(BYTES, 1));
    home.set_clock(DAY + 2 * HOUR + 600);
    home.until(&id, "ran again", waits_after("unchanged")).await;
    let requests = origin.requests();
    assert_eq!(requests.len(), 2, "one for each run");
    assert_eq!(requests[1].header("if-none-match"), Some("\"v1\""));
    assert!(content(&out) == object(BYTES, 1));
    version.store(2, Ordering::Relaxed);
    home.set_clock(2 * DAY + 2 * HOUR + 600);
    let run = home
        .until(&id, "took the new one", waits_after("done"))
        .await;
    assert!(content(&out) == object(BYTES, 2));
    assert!(
        content(&home.path().join("out.1")) == object(BYTES, 1),
        "--keep 1"
    );
    assert_eq!(run.last()["last"]["missed"], 0);
    home.run(&["why", &id]).await.ends_with(0, "Next run");
    // A file that was changed here is fetched again, whatever the server says of its own.
    std::fs::write(&out, "edited").expect("write");
    home.set_clock(3 * DAY + 2 * HOUR + 600);
    home.until(&id, "repaired it", |_| content(&out) == object(BYTES, 2))
        .await;
    assert_eq!(origin.requests()[3].header("if-none-match"), None);
}

#[tokio::test]
async fn runs_that_were_missed_while_the_machine_was_off_are_made_up_for_once() {
    let origin = versioned(Arc::new(AtomicU32::new(1))).await;
    let Some(mut home) = Home::with_clock().await else {
        return;
    };
    let told = leave(&home, &["get", &origin.url("/a"), "-o", "out"]).await;
    let id = told["id"].to_string();
    home.until(&id, "is scheduled", |told| told["standing"] == "scheduled")
        .await;
    home.end(Signal::SIGKILL).await;
    home.run(&["ls"]).await.ends_with(0, "SCHEDULED");
    home.set_clock(2 * DAY + 5 * HOUR);
    home.start(&[]).await;
    let run = home.until(&id, "ran", waits_after("done")).await;
    assert_eq!(run.last()["last"]["missed"], 3, "{}", run.last());
    assert!(content(&home.path().join("out")) == object(BYTES, 1));
    // The next one is that of tomorrow.
    home.end(Signal::SIGTERM).await;
    home.run(&["ls"]).await.ends_with(0, "SCHEDULED");
    home.start(&[]).await;
    home.until(&id, "waits", waits_after("done")).await;
    assert_eq!(origin.requests().len(), 1, "once for all");
}

#[tokio::test]
async fn a_transfer_that_recurs_is_paused_run_at_once_and_cancelled() {
    let origin = versioned(Arc::new(AtomicU32::new(1))).await;
    let home = Home::new(&[]).await;
    let told = leave(&home, &["get", &origin.url("/a")]).await;
    let id = told["id"].to_string();
    assert!(!home.path().join("a").exists());
    assert_eq!(home.run(&["pause", &id]).await.code, 0);
    home.until(&id, "is paused", |told| told["standing"] == "paused")
        .await;
    home.run(&["resume", &id]).await.ends_with(0, "SCHEDULED");
    home.run(&["edit", &id, "--by", "07:30"])
        .await
        .ends_with(1, "recurs, so its deadlines are those of its schedule");
    assert_eq!(home.run(&["edit", &id, "--max-cell", "5M"]).await.code, 0);
    assert_eq!(home.run(&["retry", &id]).await.code, 0);
    home.until(&id, "ran now", waits_after("done")).await;
    assert!(content(&home.path().join("a")) == object(BYTES, 1));
    // What waits for its time is nothing to wait for, and not ended.
    assert_eq!(home.run(&["wait"]).await.code, 0);
    home.run(&["ls", "--clear"])
        .await
        .ends_with(0, "No transfer has ended");
    home.run(&["cancel", &id]).await.ends_with(0, "CANCELLED");
    home.run(&["ls", "--clear"])
        .await
        .ends_with(0, "Removed from the list: 1");
}

#[tokio::test]
async fn a_run_that_fails_does_not_end_the_transfer() {
    let origin = versioned(Arc::new(AtomicU32::new(1))).await;
    let home = Home::new(&[]).await;
    let told = leave(&home, &["get", &origin.url("/gone")]).await;
    let id = told["id"].to_string();
    home.until(&id, "is scheduled", |told| told["standing"] == "scheduled")
        .await;
    assert_eq!(home.run(&["retry", &id]).await.code, 0);
    home.until(&id, "failed", waits_after("failed")).await;
    home.run(&["ls"]).await.ends_with(0, "404 Not Found");
}

#[tokio::test]
async fn what_cannot_recur_is_said_at_once() {
    let home = Home::new(&[]).await;
    let get = |more: &'static [&'static str]| [&["get", "http://127.0.0.1:9/a"], more].concat();
    home.run(&get(&["--every", "soon"]))
        .await
        .ends_with(2, "is not a time that recurs");
    home.run(&get(&["--every", "07:30", "-o", "-"]))
        .await
        .ends_with(2, "--every needs the agent");
    home.run(&get(&["--every", "07:30", "--by", "08:00"]))
        .await
        .ends_with(2, "cannot be used with");
    std::fs::write(home.path().join("a"), "mine").expect("write");
    home.run(&get(&["--every", "07:30"]))
        .await
        .ends_with(2, "a exists; -o a replaces it");
}

#[tokio::test]
async fn an_upload_that_recurs_sends_the_file_only_if_it_changed() {
    let origin = ScriptedOrigin::play(|request, mut stream| async move {
        if request.body(&mut stream).await.is_some() {
            let answer = b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n";
            let _ = stream.write_all(answer).await;
        }
    })
    .await;
    let home = Home::new(&[]).await;
    let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    std::fs::write(home.path().join("log"), "one").expect("write");
    let url = origin.url("/in");
    let put = ["put", "log", url.as_str(), "--prox", &proxy.address];
    let id = leave(&home, &put).await["id"].to_string();
    for (outcome, sent) in [("done", 1), ("unchanged", 1)] {
        home.until(&id, "waits", |told| told["standing"] == "scheduled")
            .await;
        assert_eq!(home.run(&["retry", &id]).await.code, 0);
        home.until(&id, "ran", waits_after(outcome)).await;
        assert_eq!(origin.requests().len(), sent, "{outcome}");
    }
    std::fs::write(home.path().join("log"), "one and two").expect("write");
    assert_eq!(home.run(&["retry", &id]).await.code, 0);
    home.until(&id, "was sent", waits_after("done")).await;
    assert_eq!(origin.requests().len(), 2);
}

#[tokio::test]
async fn what_did_not_change_is_not_sent_through_a_proxy_either() {
    let origin = versioned(Arc::new(AtomicU32::new(1))).await;
    let home = Home::new(&[]).await;
    let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    let url = origin.url("/a");
    for more in [&[][..], &["--sealed"]] {
        let get = ["get", url.as_str(), "-o", "out", "--prox", &proxy.address];
        let id = leave(&home, &[&get[..], more].concat()).await["id"].to_string();
        for outcome in ["done", "unchanged"] {
            home.until(&id, "waits", |told| told["standing"] == "scheduled")
                .await;
            assert_eq!(home.run(&["retry", &id]).await.code, 0);
            home.until(&id, "ran", waits_after(outcome)).await;
        }
        let last = origin.requests().pop().expect("asked");
        assert_eq!(last.header("if-none-match"), Some("\"v1\""), "{more:?}");
        assert!(content(&home.path().join("out")) == object(BYTES, 1));
        home.run(&["cancel", &id]).await;
    }
}
