//! `cedos sync` with an agent: a mirror is one transfer of its queue, beside others, through crashes, and again and again.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cedos_lab_rig::namespace::{
    cell_on, in_namespace, origin_namespace, received, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, cut, object, proper, reply,
};
use cedos_lab_rig::program::{CedosRun, ProxyProcess, ended};
use cedos_lab_rig::{PATIENCE, this_test, wait};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use super::home::Home;

const HOUR: i64 = 3_600;
const DAY: i64 = 24 * HOUR;

/// The files of a scripted server, by name.
type Files = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

fn files(of: &[(&str, &[u8])]) -> Files {
    let of = of
        .iter()
        .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()));
    Arc::new(Mutex::new(of.collect()))
}

/// The answer of a server that lists its files in JSON, with the day of its calendar as the times of all.
fn answer(asked: &OriginRequest, files: &Files) -> OriginReply {
    let files = files.lock().expect("the files");
    if asked.path == "/" {
        let entry = |(name, bytes): (&String, &Vec<u8>)| {
            json!({"name": name, "type": "file", "bytes": bytes.len(),
                   "modified": "2030-01-01T00:00:00Z"})
        };
        let entries: Vec<Value> = files.iter().map(entry).collect();
        let listing = json!({"entries": entries, "complete": true}).to_string();
        let headers = [("Content-Type", "application/json")];
        return OriginReply(
            reply("200 OK", &headers, listing.as_bytes()),
            ReplyEnd::Close,
        );
    }
    match files.get(&asked.path[1..]) {
        Some(bytes) => OriginReply(proper(asked, bytes, "\"v\""), ReplyEnd::Close),
        None => OriginReply(reply("404 Not Found", &[], b""), ReplyEnd::Close),
    }
}

async fn serve(files: &Files) -> ScriptedOrigin {
    let files = files.clone();
    ScriptedOrigin::start(move |asked| answer(asked, &files)).await
}

/// Leaves a mirror to the agent; its number.
async fn leave(home: &Home, arguments: &[&str]) -> String {
    let run = home
        .run(&[&["sync", "--detach", "--json"], arguments].concat())
        .await;
    assert_eq!(run.code, 0, "{}", run.errors);
    assert_eq!(run.last()["agent"], true, "{}", run.last());
    run.last()["id"].to_string()
}

fn counts(report: &Value) -> [u64; 4] {
    ["transferred", "unchanged", "deleted", "failed"]
        .map(|name| report[name].as_u64().unwrap_or_else(|| panic!("{report}")))
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn lines(run: &CedosRun) -> Vec<String> {
    let output = String::from_utf8_lossy(&run.output);
    let mut lines: Vec<String> = output.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn a_mirror_is_handed_over_and_says_the_same_as_one_of_its_own_process() {
    let there = files(&[("a", b"one"), ("b", b"two"), ("c.out", b"three")]);
    let origin = serve(&there).await;
    let home = Home::new(&[]).await;
    std::fs::create_dir(home.path().join("with")).expect("made");
    std::fs::write(home.path().join("with/old"), "old").expect("written");
    let url = origin.url("/");
    let mirror = |folder: &'static str| ["sync", &*url, folder, "--exclude", "*.out", "--delete"];
    let with = home.run(&mirror("with")).await;
    with.ends_with(0, "2 downloaded (6 B), 0 unchanged, 1 deleted");
    let listed = home.run(&["ls", "--json"]).await;
    let transfer = listed.last();
    assert_eq!(transfer["standing"], "done", "{transfer}");
    assert_eq!(counts(&transfer["last"]["mirror"]), [2, 0, 1, 0]);
    assert_eq!(transfer["mirror"]["delete"], true);
    home.run(&["status", "1"]).await.ends_with(0, "DONE");
    std::fs::create_dir(home.path().join("alone")).expect("made");
    std::fs::write(home.path().join("alone/old"), "old").expect("written");
    let alone = home
        .run(&[&mirror("alone")[..], &["--alone"]].concat())
        .await;
    assert_eq!(lines(&with), lines(&alone));
    assert_eq!(alone.code, 0, "{}", alone.errors);
    let again = home.run(&[&mirror("with")[..], &["--json"]].concat()).await;
    assert_eq!(counts(again.last()), [0, 2, 0, 0]);
    assert_eq!(
        (again.last()["event"].as_str(), again.code),
        (Some("done"), 0)
    );
    // A file that fails fails the mirror, with its name.
    there
        .lock()
        .expect("files")
        .insert("gone/".into(), Vec::new());
    let failed = home.run(&mirror("with")).await;
    failed.ends_with(1, "gone/");
    let id = home.run(&["ls", "--json"]).await.last()["id"].to_string();
    home.run(&["status", &id]).await.ends_with(1, "FAILED");
}

#[tokio::test]
async fn after_kill_9_of_the_agent_a_mirror_goes_on_where_it_was() {
    const BYTES: usize = 400_000;
    let there = files(&[("big", &object(BYTES, 1)), ("small", b"small")]);
    let script = there.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let OriginReply(whole, end) = answer(asked, &script);
        match asked.path == "/big" && asked.range_from().is_none() {
            true => OriginReply(cut(whole, BYTES / 2), ReplyEnd::Silence),
            false => OriginReply(whole, end),
        }
    })
    .await;
    let mut home = Home::new(&[]).await;
    let url = origin.url("/");
    let id = leave(&home, &[&url, "here", "--stall", "1h"]).await;
    let here = home.path().join("here");
    let held = || {
        let parts = std::fs::read_dir(here.join(".cedos-sync")).ok()?;
        let notes = parts.flatten().map(|part| part.path());
        let notes = notes.filter(|path| path.extension().is_some_and(|end| end == "json"));
        let durable = |path: std::path::PathBuf| -> Option<u64> {
            let note: Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
            note["durable_bytes"].as_u64()
        };
        notes.filter_map(durable).max()
    };
    let saved = || held() >= Some(BYTES as u64 / 2) && here.join("small").exists();
    wait::until("half is saved", saved).await;
    home.end(Signal::SIGKILL).await;
    assert!(!here.join("big").exists());
    home.run(&["ls"]).await.ends_with(0, "QUEUED");
    home.start(&[]).await;
    let done = home
        .until(&id, "was done", |told| told["standing"] == "done")
        .await;
    assert_eq!(counts(&done.last()["last"]["mirror"]), [1, 1, 0, 0]);
    assert!(std::fs::read(here.join("big")).expect("the file") == object(BYTES, 1));
    let continued = origin.requests().into_iter();
    let continued = continued.filter_map(|asked| asked.range_from());
    assert!(
        continued.max() > Some(BYTES / 4),
        "continued, not begun again"
    );
}

#[tokio::test]
async fn a_mirror_is_paused_changed_resumed_and_not_begun_twice_for_one_folder() {
    let there = files(&[("a", b"one")]);
    let script = there.clone();
    let origin = ScriptedOrigin::start(move |asked| match asked.path == "/a" {
        true => OriginReply(cut(answer(asked, &script).0, 1), ReplyEnd::Silence),
        false => answer(asked, &script),
    })
    .await;
    let home = Home::new(&[]).await;
    let url = origin.url("/");
    let id = leave(&home, &[&url, "here", "--stall", "1h"]).await;
    let asked = || origin.requests().iter().any(|asked| asked.path == "/a");
    wait::until("it runs", asked).await;
    home.run(&["sync", &url, "here"])
        .await
        .ends_with(2, "mirrors into this folder already");
    home.run(&["pause", &id]).await.ends_with(0, "PAUSED");
    home.run(&["edit", &id, "--priority", "3"])
        .await
        .ends_with(0, "here");
    let before = origin.requests().len();
    home.run(&["resume", &id]).await.ends_with(0, "here");
    wait::until("it runs again", || origin.requests().len() > before + 1).await;
    home.run(&["cancel", &id]).await.ends_with(0, "CANCELLED");
    assert!(!home.path().join("here/a").exists());
    for (arguments, words) in [
        (&[&*url, "here", "--include", "[a"][..], "is not a pattern"),
        (&["nothing", &*url], "nothing is no folder"),
    ] {
        let refused = home.run(&[&["sync", "--detach"], arguments].concat()).await;
        refused.ends_with(2, words);
    }
}

/// Serves a folder over D2TP; the process, and its URL.
async fn serve_folder(home: &Home, folder: &Path) -> (Child, String) {
    let folder = folder.display().to_string();
    let listen = ["--listen", "127.0.0.1:0", "--allow-any-client"];
    let mut command = home.command(&[&["serve", &folder], &listen[..]].concat());
    let mut child = command.spawn().expect("start cedos");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    let line = line.expect("in time").expect("a line").expect("its URL");
    (child, line)
}

#[tokio::test]
async fn a_mirror_of_another_device_recurs_and_moves_only_what_changed() {
    let Some(home) = Home::with_clock().await else {
        return;
    };
    let (there, here) = (home.path().join("there"), home.path().join("here"));
    std::fs::create_dir_all(there.join("d")).expect("made");
    std::fs::write(there.join("a"), "one").expect("written");
    std::fs::write(there.join("d/b"), "two").expect("written");
    let (_server, url) = serve_folder(&home, &there).await;
    let at = jiff::Zoned::now().saturating_add(jiff::Span::new().hours(3));
    let every = at.strftime("daily %H:%M").to_string();
    let id = leave(
        &home,
        &[
            &url, "here", "--delete", "--every", &every, "--within", "1h",
        ],
    )
    .await;
    home.until(&id, "is scheduled", |told| told["standing"] == "scheduled")
        .await;
    assert!(!here.exists(), "too early");
    let ran = |outcome: &'static str| {
        move |told: &Value| {
            told["standing"] == "scheduled" && told["last"]["last_run"]["outcome"] == outcome
        }
    };
    home.set_clock(2 * HOUR + 600);
    home.until(&id, "ran", ran("done")).await;
    assert_eq!(
        (text(&here.join("a")), text(&here.join("d/b"))),
        ("one".into(), "two".into())
    );
    home.set_clock(DAY + 2 * HOUR + 600);
    home.until(&id, "ran again", ran("unchanged")).await;
    std::fs::write(there.join("a"), "changed").expect("written");
    std::fs::remove_dir_all(there.join("d")).expect("removed");
    home.set_clock(2 * DAY + 2 * HOUR + 600);
    home.until(&id, "took what changed", ran("done")).await;
    assert_eq!(text(&here.join("a")), "changed");
    assert!(!here.join("d").exists());
    home.run(&["why", &id]).await.ends_with(0, "Next run");
    // A run that fails ends nothing.
    std::fs::remove_dir_all(&there).expect("removed");
    home.run(&["retry", &id]).await;
    home.until(&id, "failed", ran("failed")).await;
    assert_eq!(text(&here.join("a")), "changed");
}

#[tokio::test]
async fn an_upload_of_a_folder_recurs_and_notices_a_file_deep_in_it() {
    let taken: Files = Arc::default();
    let script = taken.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let taken = script.clone();
        async move {
            let body = request.body(&mut stream).await;
            let status = match (&*request.method, body) {
                ("PUT", Some(body)) => {
                    taken.lock().expect("files").insert(request.path, body);
                    "201 Created"
                }
                _ => "405 Method Not Allowed",
            };
            let _ =
                tokio::io::AsyncWriteExt::write_all(&mut stream, &reply(status, &[], b"")).await;
        }
    })
    .await;
    let home = Home::new(&[]).await;
    let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    let deep = home.path().join("here/d/deep");
    std::fs::create_dir_all(&deep).expect("made");
    std::fs::write(deep.join("a"), "one").expect("written");
    std::fs::write(deep.join("b"), "two").expect("written");
    let at = jiff::Zoned::now().saturating_add(jiff::Span::new().hours(3));
    let every = at.strftime("daily %H:%M").to_string();
    let url = origin.url("/in");
    let put = ["here", &*url, "--prox", &proxy.address];
    let id = leave(
        &home,
        &[&put[..], &["--every", &every, "--within", "1h"]].concat(),
    )
    .await;
    for (outcome, written) in [
        ("done", None),
        ("unchanged", None),
        ("done", Some("another")),
    ] {
        home.until(&id, "waits", |told| told["standing"] == "scheduled")
            .await;
        if let Some(written) = written {
            std::fs::write(deep.join("a"), written).expect("written");
        }
        assert_eq!(home.run(&["retry", &id]).await.code, 0);
        home.until(&id, "ran", |told| {
            told["standing"] == "scheduled" && told["last"]["last_run"]["outcome"] == outcome
        })
        .await;
    }
    let taken = taken.lock().expect("files");
    assert_eq!(taken["/in/d/deep/a"], b"another");
    assert_eq!(taken["/in/d/deep/b"], b"two");
    let puts = origin.requests();
    let puts = puts.iter().filter(|asked| asked.method == "PUT").count();
    assert_eq!(puts, 3, "two files, and the one that changed");
}

const BIG: usize = 1_500_000;

#[test]
fn a_mirror_shares_the_agents_budget_and_waits_for_free_networks_with_its_reason() {
    in_namespace(this_test!(), || async {
        let there = files(&[("a", &object(BIG, 1)), ("b", &object(BIG, 2))]);
        let script = there.clone();
        let home = Home::new(&[]).await;
        let place = home.path().to_owned();
        let (origin, prox) = origin_namespace(|| async move {
            let script = move |asked: &OriginRequest| answer(asked, &script);
            let origin = ScriptedOrigin::start_at("192.0.2.1", script).await;
            let prox = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
            (origin, prox)
        });
        cell_on();
        let before = received("wwan0");
        let budget = home.run(&["budget", "set", "1M", "--json"]).await;
        assert_eq!(budget.code, 0, "{}", budget.errors);
        let url = origin.url("/");
        let mirror = [&*url, "here", "--policy", "fast", "--prox", &prox.address];
        let id = leave(&home, &mirror).await;
        let waits = |told: &Value| told["standing"] == "waiting" && told["reason"] == "over_budget";
        home.until(&id, "has used the budget up", waits).await;
        let spent = received("wwan0") - before;
        // Heads of packets, handshakes and acknowledgements, and what each of eight files is granted at once.
        assert!((900_000..1_350_000).contains(&spent), "{spent} of 1 MB");
        let left = home.run(&["budget", "--json"]).await;
        assert_eq!(left.last()["left"], 0, "{}", left.last());
        wifi_on("198.51.100.7");
        home.until(&id, "was done", |told| told["standing"] == "done")
            .await;
        assert!(std::fs::read(home.path().join("here/b")).expect("it") == object(BIG, 2));
        wifi_off();
    });
}

#[tokio::test]
async fn a_mirror_goes_on_when_the_command_that_follows_it_is_killed() {
    let there = files(&[("a", &object(300_000, 1))]);
    let origin = serve(&there).await;
    let home = Home::new(&[]).await;
    let url = origin.url("/");
    let follower = ["sync", &*url, "here", "--limit-rate", "100k"];
    let mut child = home.command(&follower).spawn().expect("start cedos");
    let asked = || origin.requests().iter().any(|asked| asked.path == "/a");
    wait::until("it runs", asked).await;
    child.kill().await.expect("kill -9");
    home.until("1", "was done", |told| told["standing"] == "done")
        .await;
    assert!(std::fs::read(home.path().join("here/a")).expect("it") == object(300_000, 1));
    // Ctrl-C of one that follows cancels it.
    there
        .lock()
        .expect("files")
        .insert("b".into(), object(3_000_000, 2));
    let child = home.command(&follower).spawn().expect("start cedos");
    let asked = || origin.requests().iter().any(|asked| asked.path == "/b");
    wait::until("it runs", asked).await;
    let pid = nix::unistd::Pid::from_raw(child.id().expect("a process") as i32);
    nix::sys::signal::kill(pid, Signal::SIGINT).expect("send");
    ended(child).await.ends_with(3, "Stopped");
    home.run(&["ls"]).await.ends_with(0, "CANCELLED");
}
