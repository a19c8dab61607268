//! `cedos get` against origins that misbehave: each download is right, or fails naming the cause,
//! and the destination is never wrong.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, cut, object, proper, reply,
};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program::{CedosRun, built, cedos, ended};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Command;

const TAG: &str = "\"v1\"";

fn command(directory: &Path, arguments: &[&str]) -> Command {
    cedos(directory, &[&["get"], arguments].concat())
}

async fn run(directory: &Path, arguments: &[&str]) -> CedosRun {
    let child = command(directory, arguments).spawn().expect("start cedos");
    ended(child).await
}

/// A scratch directory and the destination in it.
fn place() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("out");
    (directory, file)
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory)
        .expect("list")
        .map(|entry| entry.expect("entry"));
    let mut names: Vec<String> = entries
        .map(|e| e.file_name().to_string_lossy().into())
        // The folders of a home.
        .filter(|name: &String| !name.starts_with('.'))
        .collect();
    names.sort();
    names
}

/// Downloads from `origin` and asserts that exactly `wanted` arrives and nothing else is left.
#[track_caller]
fn assert_whole(directory: &Path, run: &CedosRun, wanted: &[u8]) {
    assert_eq!(run.code, 0, "{:#?}\n{}", run.events, run.errors);
    assert_eq!(run.last()["event"], "done");
    assert_eq!(run.last()["bytes"], wanted.len());
    assert_eq!(run.last()["sha256"], hex::encode(Sha256::digest(wanted)));
    assert!(
        std::fs::read(directory.join("out")).expect("the file") == wanted,
        "other bytes"
    );
    assert_eq!(names(directory), ["out"]);
}

async fn fetch(origin: &ScriptedOrigin, more: &[&str]) -> (tempfile::TempDir, CedosRun) {
    let (directory, _) = place();
    let url = origin.url("/object");
    let run = run(
        directory.path(),
        &[&["--json", "-o", "out", &url], more].concat(),
    )
    .await;
    (directory, run)
}

#[tokio::test]
async fn objects_of_zero_one_and_many_bytes_arrive_whole() {
    for length in [0, 1, 3_000_000] {
        let wanted = object(length, 1);
        let body = wanted.clone();
        let origin = ScriptedOrigin::start(move |asked| {
            OriginReply(proper(asked, &body, TAG), ReplyEnd::Close)
        })
        .await;
        let (directory, run) = fetch(&origin, &[]).await;
        assert_whole(directory.path(), &run, &wanted);
        assert_eq!(run.last()["duplicate_bytes"], 0);
        assert_eq!(run.last()["deadline_met"], true, "six hours are enough");
        if length > 0 {
            assert_eq!(run.last()["bytes_by_link"]["lo"], length);
        }
        assert_eq!(origin.requests()[0].headers["accept-encoding"], "identity");
    }
}

#[tokio::test]
async fn a_chunked_object_is_whole_only_with_its_last_chunk() {
    let wanted = object(100_000, 2);
    let mut body = Vec::new();
    for chunk in wanted.chunks(7_000) {
        body.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
        body.extend([chunk, b"\r\n"].concat());
    }
    let chunked = [("Transfer-Encoding", "chunked")];
    let open = reply("200 OK", &chunked, &body);
    let whole = reply("200 OK", &chunked, &[&body[..], b"0\r\n\r\n"].concat());
    // The first answer ends without the last chunk: a cut, not an end.
    let origin = ScriptedOrigin::start(move |asked| {
        OriginReply(
            if asked.count == 0 {
                open.clone()
            } else {
                whole.clone()
            },
            ReplyEnd::Close,
        )
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &wanted);
    assert!(
        run.reasons().contains(&"origin_changed"),
        "started again: {:?}",
        run.events
    );
}

#[tokio::test]
async fn an_object_of_unknown_length_is_whole_at_a_clean_end_and_not_at_a_reset() {
    let wanted = object(50_000, 3);
    let body = wanted.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let (bytes, end) = if asked.count == 0 {
            (&body[..20_000], ReplyEnd::Reset)
        } else {
            (&body[..], ReplyEnd::Close)
        };
        OriginReply(reply("200 OK", &[], bytes), end)
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &wanted);
    assert_eq!(origin.requests().len(), 2);
}

#[tokio::test]
async fn a_coding_nobody_asked_for_is_stored_as_it_comes_and_said() {
    let wanted = b"\x1f\x8b not really gzip".to_vec();
    let body = wanted.clone();
    let origin = ScriptedOrigin::start(move |_| {
        let length = body.len().to_string();
        let headers = [("Content-Encoding", "gzip"), ("Content-Length", &*length)];
        OriginReply(reply("200 OK", &headers, &body), ReplyEnd::Close)
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &wanted);
    assert_eq!(run.last()["content_encoding"], "gzip");
    run.ends_with(0, "gzip-encoded although not asked");
}

#[tokio::test]
async fn redirects_are_followed_and_circles_are_not() {
    let wanted = object(1000, 4);
    let body = wanted.clone();
    let origin = ScriptedOrigin::start(move |asked| match asked.path.as_str() {
        "/object" => OriginReply(
            reply("302 Found", &[("Location", "/b?x=1")], b""),
            ReplyEnd::Close,
        ),
        "/b?x=1" => OriginReply(proper(asked, &body, TAG), ReplyEnd::Close),
        _ => OriginReply(
            reply("301 Moved Permanently", &[("Location", "/circle")], b""),
            ReplyEnd::Close,
        ),
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &wanted);
    let (directory, _) = place();
    let circle = self::run(
        directory.path(),
        &["--json", "-o", "out", &origin.url("/circle")],
    )
    .await;
    circle.ends_with(1, "in a circle");
    assert!(names(directory.path()).is_empty());
}

#[tokio::test]
async fn a_missing_object_is_an_error_that_names_it_and_leaves_nothing() {
    let origin = ScriptedOrigin::start(|_| {
        OriginReply(reply("404 Not Found", &[], b"<html>sorry"), ReplyEnd::Close)
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    run.ends_with(1, "404 Not Found for /object");
    assert!(
        names(directory.path()).is_empty(),
        "{:?}",
        names(directory.path())
    );
    assert_eq!(origin.requests().len(), 1, "no point in asking again");
}

#[tokio::test]
async fn credentials_are_asked_for_by_their_reason_code() {
    let origin = ScriptedOrigin::start(|_| {
        OriginReply(reply("401 Unauthorized", &[], b""), ReplyEnd::Close)
    })
    .await;
    let (_directory, run) = fetch(&origin, &[]).await;
    run.ends_with(1, "auth_required");
}

#[tokio::test]
async fn an_origin_that_dies_half_way_is_continued_where_it_stopped() {
    let wanted = object(500_000, 5);
    let body = wanted.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &body, TAG);
        let end = if asked.count == 1 {
            ReplyEnd::Reset
        } else {
            ReplyEnd::Close
        };
        OriginReply(
            if asked.count < 2 {
                cut(answer, 150_000)
            } else {
                answer
            },
            end,
        )
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &wanted);
    let asked = origin.requests();
    assert_eq!(asked.len(), 3);
    assert_eq!(asked[1].headers["if-range"], TAG);
    let overlap = 16 * 1024;
    assert_eq!(asked[1].range_from(), Some(150_000 - overlap));
    let duplicate = run.last()["duplicate_bytes"].as_u64().expect("a number");
    assert_eq!(
        duplicate,
        2 * overlap as u64,
        "the overlap of two continuations and no more"
    );
    assert!(!run.reasons().contains(&"origin_changed"));
}

#[tokio::test]
async fn an_origin_that_is_silent_is_left_and_continued() {
    let wanted = object(200_000, 6);
    let body = wanted.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &body, TAG);
        match asked.count {
            0 => OriginReply(cut(answer, 100_000), ReplyEnd::Silence),
            _ => OriginReply(answer, ReplyEnd::Close),
        }
    })
    .await;
    let (directory, run) = fetch(&origin, &["--stall", "1s"]).await;
    assert_whole(directory.path(), &run, &wanted);
    run.ends_with(0, "no data for");
}

#[tokio::test]
async fn an_origin_that_never_gets_anywhere_is_given_up_with_its_fault() {
    let origin = ScriptedOrigin::start(|_| OriginReply(Vec::new(), ReplyEnd::Close)).await;
    let (directory, run) = fetch(&origin, &["--tries", "3"]).await;
    run.ends_with(1, "gave up after 3 tries");
    assert_eq!(origin.requests().len(), 3);
    assert!(names(directory.path()).is_empty());

    let origin = ScriptedOrigin::start(|_| {
        OriginReply(reply("503 Service Unavailable", &[], b""), ReplyEnd::Close)
    })
    .await;
    let (_directory, run) = fetch(&origin, &["--tries", "2"]).await;
    run.ends_with(1, "503 Service Unavailable");
    assert!(run.reasons().contains(&"origin_wait"));
}

#[tokio::test]
async fn a_port_nobody_listens_on_is_the_origins_fault() {
    let origin = ScriptedOrigin::start(|_| OriginReply(Vec::new(), ReplyEnd::Close)).await;
    let nobody = HeldPort::take();
    let url = format!("http://{}/", nobody.address());
    drop(origin);
    let (directory, _) = place();
    let run = run(
        directory.path(),
        &["--json", "-o", "out", "--tries", "2", &url],
    )
    .await;
    run.ends_with(1, "refuses connections");
}

#[tokio::test]
async fn an_origin_without_a_validator_is_started_again_and_the_file_is_of_one_answer() {
    let body = |count: usize| object(300_000, 100 + count as u32);
    let origin = ScriptedOrigin::start(move |asked| {
        let bytes = body(asked.count);
        let answer = reply("200 OK", &[("Content-Length", "300000")], &bytes);
        OriginReply(
            if asked.count < 2 {
                cut(answer, 200_000)
            } else {
                answer
            },
            ReplyEnd::Close,
        )
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &body(2));
    assert!(run.reasons().contains(&"origin_changed"));
    assert_eq!(
        run.last()["duplicate_bytes"],
        400_000,
        "two parts thrown away, and said"
    );
}

#[tokio::test]
async fn an_origin_whose_validator_changes_is_started_again() {
    let origin = ScriptedOrigin::start(move |asked| {
        let tag = format!("\"v{}\"", asked.count);
        let answer = proper(asked, &object(300_000, asked.count as u32), &tag);
        OriginReply(
            if asked.count == 0 {
                cut(answer, 200_000)
            } else {
                answer
            },
            ReplyEnd::Close,
        )
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &object(300_000, 1));
    run.ends_with(0, "the server has another object now");
}

#[tokio::test]
async fn an_origin_that_lies_with_its_validator_is_caught_by_the_overlap() {
    let origin = ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &object(300_000, asked.count as u32), TAG);
        OriginReply(
            if asked.count == 0 {
                cut(answer, 200_000)
            } else {
                answer
            },
            ReplyEnd::Close,
        )
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &object(300_000, 2));
    run.ends_with(0, "but its bytes differ");
}

#[tokio::test]
async fn an_origin_whose_length_changes_is_started_again() {
    let origin = ScriptedOrigin::start(move |asked| {
        let length = 300_000 + 1000 * asked.count;
        let answer = proper(asked, &object(length, 7), TAG);
        OriginReply(
            if asked.count == 0 {
                cut(answer, 200_000)
            } else {
                answer
            },
            ReplyEnd::Close,
        )
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &object(302_000, 7));
    run.ends_with(0, "length has changed");
}

#[tokio::test]
async fn an_origin_that_ignores_ranges_is_started_again() {
    let wanted = object(300_000, 8);
    let body = wanted.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let headers = [("Content-Length", "300000"), ("ETag", TAG)];
        let answer = reply("200 OK", &headers, &body);
        OriginReply(
            if asked.count == 0 {
                cut(answer, 200_000)
            } else {
                answer
            },
            ReplyEnd::Close,
        )
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    assert_whole(directory.path(), &run, &wanted);
    run.ends_with(0, "does not send parts");
}

#[tokio::test]
async fn an_origin_that_never_sends_the_same_bytes_is_given_up_as_changed() {
    let origin = ScriptedOrigin::start(move |asked| {
        let bytes = object(300_000, asked.count as u32);
        let answer = reply("200 OK", &[("Content-Length", "300000")], &bytes);
        OriginReply(cut(answer, 100_000 + 1000 * asked.count), ReplyEnd::Close)
    })
    .await;
    let (directory, run) = fetch(&origin, &[]).await;
    run.ends_with(13, "starting from zero");
    assert_eq!(run.last()["reason"], "origin_changed");
    assert!(!directory.path().join("out").exists());
}

/// Stops a download by Ctrl-C when it says that it has this many bytes; returns its last event.
async fn stopped_at(folder: &Path, arguments: &[&str], bytes: u64) -> Value {
    let mut child = command(folder, arguments).spawn().expect("start");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    loop {
        let line = lines
            .next_line()
            .await
            .expect("read")
            .expect("it tells its progress");
        let event: Value = serde_json::from_str(&line).expect("JSON");
        if event["event"] == "progress" && event["bytes"] == bytes {
            break;
        }
    }
    let id = nix::unistd::Pid::from_raw(child.id().expect("it runs") as i32);
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGINT).expect("signal");
    let mut last = String::new();
    while let Some(line) = lines.next_line().await.expect("read") {
        last = line;
    }
    assert_eq!(child.wait().await.expect("ends").code(), Some(3));
    serde_json::from_str(&last).expect("JSON")
}

#[tokio::test]
async fn a_part_that_no_server_will_continue_is_not_said_to_be_resumable() {
    let origin = ScriptedOrigin::start(|_| {
        // Without a tag or a date, nobody knows later whether the content is the same.
        let headers = [("Content-Length", "400000")];
        let half = reply("200 OK", &headers, &object(250_000, 9));
        OriginReply(half, ReplyEnd::Silence)
    })
    .await;
    let (directory, _) = place();
    let url = origin.url("/object");
    let last = stopped_at(directory.path(), &["--json", "-o", "out", &url], 250_000).await;
    assert_eq!(last["resumable_bytes"], 0, "{last}");
    assert_eq!(last["starts_over"], true, "{last}");
}

#[tokio::test]
async fn of_a_server_that_can_resume_nobody_says_that_it_cannot() {
    let origin = ScriptedOrigin::start(|asked| {
        let answer = proper(asked, &object(400_000, 9), TAG);
        OriginReply(cut(answer, 250_000), ReplyEnd::Silence)
    })
    .await;
    let (directory, _) = place();
    let url = origin.url("/object");
    let mut child = command(directory.path(), &["-o", "-", &url])
        .spawn()
        .expect("start");
    let mut came = vec![0; 250_000];
    let output = child.stdout.as_mut().expect("its output");
    output.read_exact(&mut came).await.expect("the first half");
    let id = nix::unistd::Pid::from_raw(child.id().expect("it runs") as i32);
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).expect("signal");
    let ended = child.wait_with_output().await.expect("ends");
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(errors.contains("Stopped"), "{errors}");
    assert!(!errors.contains("cannot resume"), "{errors}");
    // All that came was readable while nothing more came, before the download asked again.
    assert_eq!(origin.requests().len(), 1);
}

#[tokio::test]
async fn ctrl_c_leaves_a_partial_that_the_same_command_continues() {
    let wanted = object(400_000, 9);
    let body = wanted.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &body, TAG);
        match asked.count {
            0 => OriginReply(cut(answer, 250_000), ReplyEnd::Silence),
            _ => OriginReply(answer, ReplyEnd::Close),
        }
    })
    .await;
    let (directory, _) = place();
    let url = origin.url("/object");
    let arguments = ["--json", "-o", "out", &url];
    let last = stopped_at(directory.path(), &arguments, 250_000).await;
    assert_eq!(
        (
            &last["exit"],
            &last["resumable_bytes"],
            &last["starts_over"]
        ),
        (&3.into(), &250_000.into(), &Value::Null)
    );
    assert_eq!(names(directory.path()), ["out.part", "out.part.json"]);

    let second = run(directory.path(), &arguments).await;
    assert_whole(directory.path(), &second, &wanted);
    assert_eq!(origin.requests()[1].range_from(), Some(250_000 - 16 * 1024));
    assert_eq!(second.last()["bytes_by_link"]["lo"], 150_000 + 16 * 1024);
}

#[tokio::test]
async fn a_killed_download_is_continued_from_its_last_checkpoint() {
    let wanted = object(400_000, 10);
    let body = wanted.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &body, TAG);
        match asked.count {
            0 => OriginReply(cut(answer, 250_000), ReplyEnd::Silence),
            _ => OriginReply(answer, ReplyEnd::Close),
        }
    })
    .await;
    let (directory, _) = place();
    let url = origin.url("/object");
    let arguments = ["--json", "-o", "out", &url, "--stall", "60s"];
    let mut child = command(directory.path(), &arguments)
        .spawn()
        .expect("start");
    let note = directory.path().join("out.part.json");
    tokio::time::timeout(PATIENCE, async {
        while !note.exists() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("a checkpoint is written while it runs");
    child.kill().await.expect("kill -9");
    let second = run(directory.path(), &arguments).await;
    assert_whole(directory.path(), &second, &wanted);
    assert!(origin.requests()[1].range_from().is_some(), "continued");
}

#[tokio::test]
async fn wrong_bytes_are_put_aside_and_right_ones_pass() {
    let wanted = object(1000, 11);
    let body = wanted.clone();
    let origin =
        ScriptedOrigin::start(move |asked| OriginReply(proper(asked, &body, TAG), ReplyEnd::Close))
            .await;
    let right = format!("sha256:{}", hex::encode(Sha256::digest(&wanted)));
    let (directory, run) = fetch(&origin, &["--integrity", &right]).await;
    assert_whole(directory.path(), &run, &wanted);
    let wrong = format!("sha256:{}", "0".repeat(64));
    let (directory, run) = fetch(&origin, &["--integrity", &wrong]).await;
    run.ends_with(12, "out.bad");
    assert_eq!(names(directory.path()), ["out.bad"]);
}

#[tokio::test]
async fn a_download_that_fails_leaves_the_old_file_as_it_was() {
    let origin = ScriptedOrigin::start(|asked| {
        let answer = proper(asked, &object(1000, 12), TAG);
        OriginReply(cut(answer, 10), ReplyEnd::Close)
    })
    .await;
    let (directory, file) = place();
    std::fs::write(&file, "old").expect("write");
    let url = origin.url("/object");
    let run = run(
        directory.path(),
        &["--json", "-o", "out", "--tries", "2", &url],
    )
    .await;
    run.ends_with(1, "before the end");
    assert_eq!(std::fs::read(&file).expect("read"), b"old");
}

#[tokio::test]
async fn standard_output_gets_the_bytes_and_only_the_bytes() {
    let wanted = object(300_000, 13);
    let body = wanted.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &body, TAG);
        OriginReply(
            if asked.count == 0 {
                cut(answer, 100_000)
            } else {
                answer
            },
            ReplyEnd::Close,
        )
    })
    .await;
    let (directory, _) = place();
    let run = run(directory.path(), &["-o", "-", &origin.url("/object")]).await;
    run.ends_with(0, "with --prox");
    assert!(run.output == wanted, "continued without a byte twice");
}

#[tokio::test]
async fn bytes_on_standard_output_are_not_taken_back() {
    let origin = ScriptedOrigin::start(move |asked| {
        let bytes = object(300_000, asked.count as u32);
        let answer = reply("200 OK", &[("Content-Length", "300000")], &bytes);
        OriginReply(cut(answer, 100_000), ReplyEnd::Close)
    })
    .await;
    let (directory, _) = place();
    let run = run(directory.path(), &["-o", "-", &origin.url("/object")]).await;
    run.ends_with(13, "already");
    assert!(run.output == object(100_000, 0));
}

#[tokio::test]
async fn a_file_is_named_by_the_origin_or_the_url_and_never_a_path() {
    let origin = ScriptedOrigin::start(|asked| {
        let disposition = [
            ("Content-Length", "2"),
            (
                "Content-Disposition",
                "attachment; filename=\"../../evil.sh\"",
            ),
        ];
        let headers = if asked.path == "/named" {
            &disposition[..]
        } else {
            &disposition[..1]
        };
        OriginReply(reply("200 OK", headers, b"ok"), ReplyEnd::Close)
    })
    .await;
    let (directory, _) = place();
    run(directory.path(), &[&origin.url("/a/show%20118.mp3?x")])
        .await
        .ends_with(0, "show 118.mp3");
    run(directory.path(), &[&origin.url("/named")])
        .await
        .ends_with(0, "evil.sh");
    assert_eq!(names(directory.path()), ["evil.sh", "show 118.mp3"]);
    let again = run(directory.path(), &[&origin.url("/a/show%20118.mp3")]).await;
    again.ends_with(2, "exists; -o");
}

#[tokio::test]
async fn a_late_download_is_whole_and_says_it_is_late_unless_told_to_fail() {
    let script = |asked: &OriginRequest| {
        let answer = proper(asked, &object(200_000, 14), TAG);
        match asked.count {
            0 => OriginReply(cut(answer, 100_000), ReplyEnd::Silence),
            _ => OriginReply(answer, ReplyEnd::Close),
        }
    };
    let origin = ScriptedOrigin::start(script).await;
    let (directory, run) = fetch(&origin, &["--within", "1s", "--stall", "2s"]).await;
    assert_eq!(run.code, 10, "{:?}", run.events);
    assert_eq!(run.last()["deadline_met"], false);
    assert!(std::fs::read(directory.path().join("out")).expect("whole") == object(200_000, 14));

    let origin = ScriptedOrigin::start(script).await;
    // Half of it comes within four seconds, on a busy machine too.
    let late = ["--within", "4s", "--stall", "20s", "--if-late", "fail"];
    let (directory, run) = fetch(&origin, &late).await;
    run.ends_with(10, "the deadline passed");
    assert_eq!(names(directory.path()), ["out.part", "out.part.json"]);
    assert_eq!(run.last()["resumable_bytes"], 100_000);
}

#[tokio::test]
async fn mistakes_on_the_command_line_are_usage_errors_in_words() {
    let (directory, _) = place();
    for (arguments, words) in [
        (&["ftp://host/x"][..], "not an http"),
        (&["http://host/x", "--by", "soon"], "07:30"),
        (
            &["http://host/x", "--by", "12:00", "--within", "2h"],
            "cannot be used with",
        ),
        (&["http://host/x", "--integrity", "md5:00"], "sha256:"),
        (&["http://host/x", "--link", "wwan0=cheap"], "wwan0=metered"),
        (&["http://host/x", "--max-cell", "lots"], "50M"),
    ] {
        run(directory.path(), arguments).await.ends_with(2, words);
    }
    assert!(names(directory.path()).is_empty());
}

#[tokio::test]
async fn a_full_disk_is_said_and_the_part_is_continued_when_there_is_room() {
    let wanted = object(3_000_000, 15);
    let body = wanted.clone();
    let origin =
        ScriptedOrigin::start(move |asked| OriginReply(proper(asked, &body, TAG), ReplyEnd::Close))
            .await;
    let (directory, _) = place();
    let get = format!(
        "{} get --json -o out {}",
        built("cedos").display(),
        origin.url("/object")
    );
    let script = format!(
        "mount -t tmpfs -o size=1m none . && cd \"$PWD\" || exit 77
         {get}; echo \"{{\\\"code\\\": $?}}\"
         mount -o remount,size=16m . && {get} && sha256sum out >&2 && ls >&2"
    );
    let child = Command::new("unshare")
        .args(["-Urm", "sh", "-c", &script])
        .current_dir(directory.path())
        .env_remove("CEDOS_PROX")
        .env("CEDOS_AGENT", "none")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let Ok(child) = child else {
        return eprintln!("skipped: there is no unshare here");
    };
    let run = ended(child).await;
    if run.code == 77 || run.events.is_empty() {
        return eprintln!("skipped: this system does not let us mount a small disk");
    }
    let full = run
        .events
        .iter()
        .find(|event| event["event"] == "error")
        .expect("an error");
    assert_eq!(
        (&full["reason"], &full["exit"]),
        (&"storage_full".into(), &1.into()),
        "{full}"
    );
    let text = full["text"].as_str().expect("a sentence");
    assert!(
        text.contains("; make room, then run the same command"),
        "{text}"
    );
    assert!(!text.contains("network"), "{text}");
    let kept = full["resumable_bytes"].as_u64().expect("a number");
    assert!(kept > 500_000, "{full}");
    let done = run.last();
    assert_eq!(
        done["sha256"],
        hex::encode(Sha256::digest(&wanted)),
        "{done}"
    );
    assert_eq!(
        done["bytes_by_link"]["lo"],
        3_000_000 - kept + 16 * 1024,
        "{done}"
    );
    assert!(
        run.errors.contains(&hex::encode(Sha256::digest(&wanted))),
        "{}",
        run.errors
    );
    assert!(!run.errors.contains("part"), "{}", run.errors);
}

#[tokio::test]
async fn an_origin_that_answers_with_nothing_new_is_given_up() {
    // It claims a range that ends where our part ends, for ever.
    let origin = ScriptedOrigin::start(|asked| match asked.range_from() {
        None => OriginReply(
            cut(proper(asked, &object(300_000, 16), TAG), 100_000),
            ReplyEnd::Close,
        ),
        Some(from) => {
            let range = format!("bytes {from}-99999/300000");
            let length = (100_000 - from).to_string();
            let headers = [
                ("Content-Range", &*range),
                ("Content-Length", &length),
                ("ETag", TAG),
            ];
            let body = &object(300_000, 16)[from..100_000];
            OriginReply(
                reply("206 Partial Content", &headers, body),
                ReplyEnd::Close,
            )
        }
    })
    .await;
    let (_directory, run) = fetch(&origin, &["--tries", "3"]).await;
    run.ends_with(1, "nothing new");
}

#[tokio::test]
async fn an_origin_that_answers_small_ranges_nobody_asked_for_is_given_up() {
    // Partial content without a request for it, with another validator each time.
    let origin = ScriptedOrigin::start(|asked| {
        let tag = format!("\"v{}\"", asked.count);
        let headers = [
            ("Content-Range", "bytes 0-99/1000"),
            ("Content-Length", "100"),
            ("ETag", &*tag),
        ];
        OriginReply(
            reply("206 Partial Content", &headers, &object(100, 17)),
            ReplyEnd::Close,
        )
    })
    .await;
    let (directory, run) = fetch(&origin, &["--tries", "3"]).await;
    assert_ne!(run.code, 0);
    assert!(!directory.path().join("out").exists());
}
