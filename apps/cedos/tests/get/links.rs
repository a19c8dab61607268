//! `cedos get` over two real links in a network namespace: a free one that is lost and found
//! again at another address, and a metered one that must not be touched before it may.
//!
//! What crossed a link is read from the kernel's counters.

use std::process::Stdio;
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{
    cell_on, in_namespace, origin_namespace, received, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::program::cedos;
use cedos_lab_rig::{PATIENCE, this_test};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout};

const OBJECT_BYTES: usize = 8_000_000; // 3.2 s at 20 Mb/s

/// What a link may carry besides payload: handshakes, headers, acknowledgements, neighbours.
const CONTROL_BYTES_MAX: u64 = 3_000;

/// Runs the body of a test in a device namespace, with the URL of an object.
fn with_object<F: Future<Output = ()>>(test: String, body: impl FnOnce(String) -> F) {
    in_namespace(test, || async {
        let url = origin_namespace(|| async {
            let bytes = object(OBJECT_BYTES, 1);
            let origin = ScriptedOrigin::start_at("192.0.2.1", move |asked| {
                OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
            })
            .await;
            origin.url("/object")
        });
        body(url).await;
    });
}

struct Get {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    directory: tempfile::TempDir,
}

impl Get {
    fn start(url: &str, more: &[&str]) -> Get {
        let directory = tempfile::tempdir().expect("a directory");
        let mut child = cedos(directory.path(), &["get", "--json", "-o", "out", url])
            .args(more)
            .stderr(Stdio::inherit())
            .spawn()
            .expect("start cedos");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        Get {
            child,
            lines,
            directory,
        }
    }

    /// The next event for which `wanted` holds.
    async fn until(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut seen = Vec::new();
        let found = tokio::time::timeout(PATIENCE, async {
            loop {
                let line = self.lines.next_line().await.expect("read")?;
                let event: Value = serde_json::from_str(&line).expect("JSON");
                if wanted(&event) {
                    return Some(event);
                }
                seen.push(line);
            }
        })
        .await;
        found
            .ok()
            .flatten()
            .unwrap_or_else(|| panic!("never {what}:\n{}", seen.join("\n")))
    }

    async fn done(self, code: i32) -> Value {
        let (ended, last) = self.ended().await;
        assert_eq!(ended, Some(code), "{last}");
        last
    }

    /// Its exit code and its last event. The file is whole if it says so.
    async fn ended(mut self) -> (Option<i32>, Value) {
        let last = self
            .until("the end", |e| e["event"] == "done" || e["event"] == "error")
            .await;
        let code = self.child.wait().await.expect("it ends").code();
        if last["event"] == "done" {
            let bytes = std::fs::read(self.directory.path().join("out")).expect("the file");
            assert!(bytes == object(OBJECT_BYTES, 1), "other bytes");
        }
        (code, last)
    }
}

#[test]
fn a_lost_wifi_is_waited_for_and_cellular_is_not_touched() {
    with_object(this_test!(), |url| async move {
        wifi_on("198.51.100.7");
        cell_on();
        let before = received("wwan0");
        let mut get = Get::start(&url, &["--policy", "free-only"]);
        get.until("some bytes", |e| {
            e["event"] == "progress" && e["bytes"] != 0
        })
        .await;
        wifi_off();
        let (wait, lost) = (ProcessorWait::of_this_and_descendants(), Instant::now());
        let waiting = get.until("a wait", |e| e["event"] == "waiting").await;
        assert_eq!(waiting["reason"], "path_cost", "{waiting}");
        let said = lost.elapsed().saturating_sub(wait.so_far());
        assert!(said < Duration::from_secs(1), "said after {said:?}");
        wifi_on("198.51.100.99");
        get.until("a new start", |e| {
            e["event"] == "switch" && e["to"] == "wlan0"
        })
        .await;
        let done = get.done(0).await;
        assert_eq!(
            done["bytes_by_link"].as_object().expect("links").len(),
            1,
            "{done}"
        );
        let on_cell = received("wwan0") - before;
        assert!(
            on_cell < CONTROL_BYTES_MAX,
            "{on_cell} bytes arrived on wwan0"
        );
        let duplicate = done["duplicate_bytes"].as_u64().expect("a number");
        assert!(
            duplicate <= 16 * 1024,
            "{duplicate} bytes twice for one change of address"
        );
    });
}

#[test]
fn an_urgent_download_moves_to_cellular_and_back_to_wifi_by_policy() {
    with_object(this_test!(), |url| async move {
        wifi_on("198.51.100.7");
        cell_on();
        let mut get = Get::start(&url, &["--policy", "any"]);
        let first = get.until("a start", |e| e["event"] == "switch").await;
        assert_eq!(first["to"], "wlan0", "free is preferred");
        get.until("some bytes", |e| {
            e["event"] == "progress" && e["bytes"] != 0
        })
        .await;
        wifi_off();
        get.until("cellular", |e| e["event"] == "switch" && e["to"] == "wwan0")
            .await;
        wifi_on("198.51.100.99");
        get.until("Wi-Fi again", |e| {
            e["event"] == "switch" && e["to"] == "wlan0"
        })
        .await;
        let done = get.done(0).await;
        assert_eq!(done["switches"], 2);
        let carried: u64 = done["bytes_by_link"]
            .as_object()
            .expect("links")
            .values()
            .map(|bytes| bytes.as_u64().expect("a number"))
            .sum();
        let duplicate = done["duplicate_bytes"].as_u64().expect("a number");
        assert_eq!(
            carried,
            OBJECT_BYTES as u64 + duplicate,
            "every byte is accounted for"
        );
    });
}

#[test]
fn a_deadline_pays_for_cellular_only_when_it_must() {
    with_object(this_test!(), |url| async move {
        cell_on();
        // 8 MB at the first estimate of 2 Mb/s need 32 s: urgent. Once the link is measured at
        // 20 Mb/s there is slack again, until 3 s and the margin are left.
        let (wait, begun) = (ProcessorWait::of_this_and_descendants(), Instant::now());
        let mut get = Get::start(&url, &["--within", "12s"]);
        get.until("cellular", |e| e["event"] == "switch" && e["to"] == "wwan0")
            .await;
        let waiting = get.until("a wait", |e| e["event"] == "waiting").await;
        assert_eq!(waiting["reason"], "path_cost", "{waiting}");
        let ((code, done), waited) = wait.during(get.ended()).await;
        let took = begun.elapsed().saturating_sub(waited);
        // By what processes wait for a processor it may be late.
        let is_met = done["deadline_met"] == true;
        assert!(is_met || took < Duration::from_secs(12), "{took:?}: {done}");
        assert_eq!(code, Some(if is_met { 0 } else { 10 }), "{done}");
    });
}

#[test]
fn a_budget_holds_to_the_byte_and_its_end_has_its_own_exit_code() {
    with_object(this_test!(), |url| async move {
        cell_on();
        let before = received("wwan0");
        let get = Get::start(&url, &["--now", "--max-cell", "1M"]);
        let done = get.done(11).await;
        assert_eq!(done["reason"], "over_budget", "{done}");
        assert_eq!(done["resumable_bytes"], 1_000_000, "{done}");
        let on_wire = received("wwan0") - before;
        assert!(
            on_wire < 1_060_000,
            "{on_wire} bytes on the wire for 1 MB of payload"
        );
    });
}

#[test]
fn without_any_network_now_fails_and_later_waits() {
    with_object(this_test!(), |url| async move {
        let done = Get::start(&url, &["--now"]).done(14).await;
        assert_eq!(done["reason"], "no_path");
        let mut get = Get::start(&url, &[]);
        let waiting = get.until("a wait", |e| e["event"] == "waiting").await;
        assert_eq!(waiting["reason"], "no_path");
        wifi_on("198.51.100.7");
        get.done(0).await;
    });
}

#[test]
fn at_the_deadline_a_network_that_may_not_be_used_has_its_own_exit_code() {
    with_object(this_test!(), |url| async move {
        let fail = ["--within", "2s", "--if-late", "fail"];
        let done = Get::start(&url, &fail).done(10).await;
        assert_eq!(done["reason"], "no_path", "{done}");
        cell_on();
        let before = received("wwan0");
        let free_only = [&fail[..], &["--policy", "free-only"]].concat();
        let done = Get::start(&url, &free_only).done(14).await;
        assert_eq!(done["reason"], "path_cost", "{done}");
        assert!(received("wwan0") - before < CONTROL_BYTES_MAX);
        // Late is better than never where nothing else was said: it waits on.
        let mut get = Get::start(&url, &["--within", "1s", "--if-late", "wait"]);
        get.until("a wait", |e| e["event"] == "waiting").await;
        // sleep: the deadline of a second is to pass
        tokio::time::sleep(Duration::from_millis(1500)).await;
        wifi_on("198.51.100.7");
        let done = get.done(10).await;
        assert_eq!(done["event"], "done", "whole, only late: {done}");
        assert_eq!(done["bytes_by_link"]["wwan0"], Value::Null, "{done}");
    });
}

#[test]
fn when_free_never_pays_and_a_budget_that_ends_before_the_deadline_waits() {
    with_object(this_test!(), |url| async move {
        cell_on();
        let mut get = Get::start(&url, &["--when-free"]);
        let waiting = get.until("a wait", |e| e["event"] == "waiting").await;
        assert_eq!(waiting["reason"], "path_cost", "{waiting}");
        drop(get);
        // Urgent by the first estimate; the budget is used up, and then only Wi-Fi helps.
        let mut get = Get::start(&url, &["--within", "25s", "--max-cell", "1M"]);
        let spent = |e: &Value| e["event"] == "waiting" && e["reason"] != "path_too_slow";
        get.until("a wait", spent).await;
        wifi_on("198.51.100.7");
        let done = get.done(0).await;
        assert!(
            done["bytes_by_link"]["wwan0"].as_u64() <= Some(1_000_000),
            "{done}"
        );
    });
}

#[test]
fn a_rehearsal_asks_over_free_networks_only() {
    with_object(this_test!(), |url| async move {
        cell_on();
        let before = received("wwan0");
        let plan = rehearsed(&url, &[]).await;
        assert_eq!(plan["length"], Value::Null, "{plan}");
        assert_eq!(plan["reason"], "path_cost", "{plan}");
        assert!(received("wwan0") - before < CONTROL_BYTES_MAX);
        wifi_on("198.51.100.7");
        let plan = rehearsed(&url, &["--within", "1h"]).await;
        assert_eq!(plan["length"], OBJECT_BYTES as u64, "{plan}");
        assert_eq!(plan["link"], "wlan0", "{plan}");
        assert_eq!(plan["forecast"]["feasible"], true, "{plan}");
        assert_eq!(plan["forecast"]["metered_bytes_expected"], 0, "{plan}");
        assert_eq!(plan["forecast"]["metered_bytes_worst"], OBJECT_BYTES as u64);
        // Nothing is known of the link's rate: it is unlikely to be that fast, and not impossible.
        let plan = rehearsed(&url, &["--within", "1s", "--max-cell", "0"]).await;
        assert!(plan["promise"]["p"].as_f64() < Some(0.75), "{plan}");
    });
}

async fn rehearsed(url: &str, more: &[&str]) -> Value {
    let home = tempfile::tempdir().expect("a directory");
    let mut command = cedos(home.path(), &["get", "--dry-run", "--json", url]);
    let output = command.args(more).output().await.expect("run cedos");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
}
