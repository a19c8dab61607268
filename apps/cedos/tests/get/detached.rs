//! `cedos get --detach`, `ls`, `status` and `cancel`: a download that outlives its terminal, is
//! found again, and is stopped.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper};
use cedos_lab_rig::program::{CedosRun, cedos, run};
use cedos_lab_rig::{PATIENCE, program};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const TAG: &str = "\"v1\"";

/// An origin that gives the first half, and the rest once the flag is set.
async fn halting(open: Arc<AtomicBool>) -> ScriptedOrigin {
    ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &object(400_000, 1), TAG);
        if open.load(Ordering::Relaxed) {
            OriginReply(answer, ReplyEnd::Close)
        } else if asked.count == 0 {
            OriginReply(cut(answer, 200_000), ReplyEnd::Silence)
        } else {
            OriginReply(Vec::new(), ReplyEnd::Close)
        }
    })
    .await
}

/// Starts a download in the background; its number and process.
async fn detached(directory: &Path, arguments: &[&str]) -> (String, Pid) {
    let start = [
        "get", "--detach", "--json", "-o", "out", "--stall", "1s", "--tries", "1000",
    ];
    let run = run(directory, &[&start[..], arguments].concat()).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    let told = run.last();
    assert_eq!(told["event"], "detached", "{told}");
    let pid = Pid::from_raw(told["pid"].as_i64().expect("a process") as i32);
    (told["id"].to_string(), pid)
}

async fn status(directory: &Path, id: &str) -> CedosRun {
    run(directory, &["status", id, "--json"]).await
}

/// Looks until the download stands like this.
async fn until(
    directory: &Path,
    id: &str,
    what: &str,
    wanted: impl Fn(&Value) -> bool,
) -> CedosRun {
    let looking = async {
        loop {
            let run = status(directory, id).await;
            if wanted(run.last()) {
                return run;
            }
        }
    };
    let found = tokio::time::timeout(PATIENCE, looking).await;
    found.unwrap_or_else(|_| panic!("never {what}"))
}

#[tokio::test]
async fn a_download_in_the_background_outlives_its_terminal_and_is_found_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let url = origin.url("/a").replace("http://", "http://me:hush@");
    let (id, pid) = detached(home, &[&url]).await;

    // It leads a session of its own, and the end of a terminal does not reach or stop it.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let session = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split(' ').nth(4));
    assert_eq!(session, Some(pid.to_string().as_str()));
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).expect("its command line");
    assert!(
        !String::from_utf8_lossy(&line).contains("hush"),
        "readable by everybody"
    );
    until(home, &id, "waits", |told| told["last"]["bytes"] == 200_000).await;
    kill(pid, Signal::SIGHUP).expect("send");
    let run = until(home, &id, "waits", |told| told["standing"] == "waiting").await;
    assert_eq!(run.code, 75, "{:#?}", run.events);
    let shown = program::run(home, &["status", &id]).await;
    shown.ends_with(75, "WAITING: ");

    open.store(true, Ordering::Relaxed);
    let run = until(home, &id, "is done", |told| told["standing"] == "done").await;
    assert_eq!(run.code, 0);
    assert!(std::fs::read(home.join("out")).expect("the file") == object(400_000, 1));
    let log = run.last()["log"].as_str().expect("a path");
    let log = std::fs::read_to_string(log).expect("the log");
    assert!(log.contains("sha256"), "{log}");
    let listed = program::run(home, &["ls"]).await;
    listed.ends_with(0, "DONE");
    let kept = home.join(".state/cedos/get").join(&id);
    for file in std::fs::read_dir(kept).expect("its folder") {
        let text = std::fs::read_to_string(file.expect("entry").path()).expect("text");
        assert!(!text.contains("hush"), "{text}");
    }
    assert!(origin.requests()[0].headers.contains_key("authorization"));
}

#[tokio::test]
async fn a_cancelled_download_leaves_a_partial_that_can_be_continued() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let url = origin.url("/a");
    let (id, _) = detached(home, &[&url]).await;
    until(home, &id, "has half", |told| {
        told["last"]["bytes"] == 200_000
    })
    .await;

    // The same file again is refused at once, not in some log.
    let again = run(home, &["get", "--detach", "-o", "out", &url]).await;
    again.ends_with(1, "another cedos get is writing it");

    let cancelled = run(home, &["cancel", &id, "--json"]).await;
    assert_eq!(cancelled.code, 0, "{}", cancelled.errors);
    assert_eq!(cancelled.last()["standing"], "cancelled");
    assert_eq!(cancelled.last()["last"]["resumable_bytes"], 200_000);
    assert_eq!(status(home, &id).await.code, 3);
    run(home, &["cancel", &id])
        .await
        .ends_with(1, "is not running any more");
    open.store(true, Ordering::Relaxed);
    let run = run(home, &["get", "--json", "-o", "out", &url]).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    assert!(
        origin
            .requests()
            .last()
            .expect("asked")
            .range_from()
            .is_some()
    );
    assert!(std::fs::read(home.join("out")).expect("the file") == object(400_000, 1));
}

#[tokio::test]
async fn a_download_that_was_killed_is_shown_as_gone_and_says_how_to_go_on() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    let origin = halting(Arc::default()).await;
    let (id, pid) = detached(home, &[&origin.url("/a")]).await;
    kill(pid, Signal::SIGKILL).expect("send");
    let run = until(home, &id, "is gone", |told| told["standing"] == "gone").await;
    assert_eq!(run.code, 1);
    let shown = program::run(home, &["status", &id]).await;
    shown.ends_with(1, "same command to resume");
    program::run(home, &["ls"]).await.ends_with(0, "GONE");
}

#[tokio::test]
async fn what_cannot_go_on_in_the_background_is_said_in_front() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    run(home, &["ls"])
        .await
        .ends_with(0, "No transfers in the background");
    run(home, &["status", "7"])
        .await
        .ends_with(1, "there is no download 7");
    let output = ["get", "--detach", "-o", "-", "http://127.0.0.1:9/a"];
    run(home, &output).await.ends_with(2, "standard output");
    let nowhere = [
        "get",
        "--detach",
        "-o",
        "no/such/out",
        "http://127.0.0.1:9/a",
    ];
    run(home, &nowhere)
        .await
        .ends_with(1, "the directory no/such does not exist");
    std::fs::write(home.join("a"), "old").expect("write");
    let exists = ["get", "--detach", "http://127.0.0.1:9/a"];
    run(home, &exists)
        .await
        .ends_with(2, "a exists; -o a replaces it");
    let child = cedos(home, &["ls", "--json"]).output().await.expect("run");
    let listed = String::from_utf8_lossy(&child.stdout);
    assert!(!listed.contains("running"), "{listed}");
}

#[tokio::test]
async fn a_password_is_read_from_a_file_or_overwritten_in_the_list_of_processes() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let url = origin.url("/a");
    std::fs::write(home.join("password"), "hush\n").expect("written");
    let from_file = ["--user", "me", "--password-file", "password", &url];
    let (id, pid) = detached(home, &from_file).await;
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).expect("its command line");
    assert!(!String::from_utf8_lossy(&line).contains("hush"));
    until(home, &id, "waits", |told| told["last"]["bytes"] == 200_000).await;
    let basic = "Basic bWU6aHVzaA==";
    assert_eq!(origin.requests()[0].headers["authorization"], basic);
    assert_eq!(run(home, &["cancel", &id]).await.code, 0);

    let in_url = url.replace("http://", "http://me:hush@");
    let asked = origin.requests().len();
    let child = cedos(home, &["get", "-o", "other", "--stall", "1s", &in_url]).spawn();
    let child = child.expect("start cedos");
    let pid = program::pid_of(&child);
    while origin.requests().len() == asked {
        tokio::task::yield_now().await;
    }
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).expect("its command line");
    let line = String::from_utf8_lossy(&line);
    assert!(
        !line.contains("hush") && line.contains("me:xxxx@"),
        "{line}"
    );
    let last = origin.requests().pop().expect("a request");
    assert_eq!(last.headers["authorization"], basic);
    open.store(true, Ordering::Relaxed);
    let got = program::ended(child).await;
    got.ends_with(0, "note: other users of this machine can read a password");
}
