//! `cedos get --dry-run`: what would be done and why, without doing it.

use crate::download::{MODES, Rig};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper, reply};
use cedos_lab_rig::program::run;

const TAG: &str = "\"v1\"";

#[tokio::test]
async fn the_origin_is_asked_for_its_head_alone_in_every_mode() {
    for mode in MODES {
        let rig = Rig::new(mode, |asked| {
            let answer = proper(asked, &object(3_000_000, 1), TAG);
            let bytes = if asked.method == "HEAD" {
                cut(answer, 0)
            } else {
                answer
            };
            OriginReply(bytes, ReplyEnd::Close)
        })
        .await;
        let run = rig.get("/show.mp3", &["--dry-run", "--within", "1h"]).await;
        assert_eq!(run.code, 0, "{mode}: {}", run.errors);
        let plan = run.last();
        assert_eq!(plan["mode"], mode, "{plan}");
        assert_eq!(plan["length"], 3_000_000, "{plan}");
        assert_eq!(plan["resumable"], true, "{plan}");
        assert_eq!(plan["forecast"]["feasible"], true, "{plan}");
        // No link here costs, so none can carry a byte of it.
        for told in [&plan["forecast"], &plan["promise"]] {
            assert_eq!(told["metered_bytes_expected"], 0, "{plan}");
            assert_eq!(told["metered_bytes_worst"], 0, "{plan}");
        }
        let asked = rig.origin.requests();
        assert_eq!(asked.len(), 1, "{mode}");
        assert_eq!(asked[0].method, "HEAD", "{mode}");
        assert!(rig.names().is_empty(), "{mode}: {:?}", rig.names());
    }
}

#[tokio::test]
async fn whether_it_is_in_time_is_said_once() {
    let origin = ScriptedOrigin::start(|asked| {
        let head = cut(proper(asked, &object(3_000_000, 1), TAG), 0);
        OriginReply(head, ReplyEnd::Close)
    })
    .await;
    let directory = tempfile::tempdir().expect("a directory");
    for within in ["2s", "12s", "1h"] {
        let url = origin.url("/show.mp3");
        let shown = run(
            directory.path(),
            &["get", "--dry-run", "--within", within, &url],
        )
        .await;
        let text = String::from_utf8_lossy(&shown.output).into_owned();
        let line = |label: &str| {
            let found = text.lines().find(|line| line.trim().starts_with(label));
            found.unwrap_or_else(|| panic!("no {label} in {text}"))
        };
        assert!(!line("Deadline").contains("feasible"), "{text}");
        assert!(line("Promise").ends_with("no metered data"), "{text}");
    }
}

#[tokio::test]
async fn offline_asks_nobody_and_says_that_the_size_is_a_guess() {
    let origin = ScriptedOrigin::start(|_| OriginReply(Vec::new(), ReplyEnd::Close)).await;
    let directory = tempfile::tempdir().expect("a directory");
    let url = origin.url("/show.mp3");
    let arguments = ["get", "--dry-run", "--offline", &url, "--by", "+1s"];
    let shown = run(directory.path(), &arguments).await;
    shown.ends_with(0, "unknown, 100.00 MB assumed (not asked");
    shown.ends_with(0, "not feasible");
    shown.ends_with(0, "→ show.mp3 (direct)");
    assert!(origin.requests().is_empty());
}

#[tokio::test]
async fn what_an_earlier_run_left_is_counted_and_nobody_asked() {
    let origin = ScriptedOrigin::start(|asked| {
        let answer = proper(asked, &object(400_000, 2), TAG);
        OriginReply(cut(answer, 100_000), ReplyEnd::Close)
    })
    .await;
    let directory = tempfile::tempdir().expect("a directory");
    let url = origin.url("/show.mp3");
    // Cut for ever, and given up after one try without a new byte.
    let get = ["get", "--json", "-o", "out", &url, "--tries", "1"];
    let broken = run(directory.path(), &get).await;
    assert_eq!(broken.code, 1);
    let asked = origin.requests().len();
    let plan = run(directory.path(), &[&get[..], &["--dry-run"]].concat()).await;
    let held = broken.last()["resumable_bytes"].as_u64().expect("a number");
    let plan = plan.last();
    assert_eq!(plan["held_bytes"], held, "{plan}");
    assert_eq!(
        plan["forecast"]["remaining_bytes"],
        400_000 - held,
        "{plan}"
    );
    assert_eq!(origin.requests().len(), asked);
    assert!(directory.path().join("out.part").exists());
}

#[tokio::test]
async fn an_origin_without_the_object_is_an_error_and_one_without_heads_is_not() {
    let origin = ScriptedOrigin::start(|asked| {
        let status = match asked.path.as_str() {
            "/none" => "404 Not Found",
            _ => "405 Method Not Allowed",
        };
        OriginReply(
            reply(status, &[("Content-Length", "0")], b""),
            ReplyEnd::Close,
        )
    })
    .await;
    let directory = tempfile::tempdir().expect("a directory");
    let none = run(
        directory.path(),
        &["get", "--dry-run", &origin.url("/none")],
    )
    .await;
    none.ends_with(1, "404 Not Found");
    let mute = run(directory.path(), &["get", "--dry-run", &origin.url("/a")]).await;
    mute.ends_with(0, "answers 405");
}
