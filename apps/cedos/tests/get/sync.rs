//! `cedos sync`: folders of `cedos serve`, of pages that list files, and of servers that take PUT.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, cut, object, proper, reply,
};
use cedos_lab_rig::program::{CedosRun, ProxyProcess, cedos, run};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Child;

/// The files of a scripted server, by path.
type Files = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

fn files(of: &[(&str, &str)]) -> Files {
    let of = of.iter();
    let of = of.map(|(path, text)| ((*path).to_owned(), text.as_bytes().to_vec()));
    Arc::new(Mutex::new(of.collect()))
}

/// The answer to a request for a file, which may be conditional.
fn file_answer(asked: &OriginRequest, files: &Files) -> OriginReply {
    let files = files.lock().expect("the files");
    let Some(bytes) = files.get(&asked.path[1..]) else {
        return OriginReply(reply("404 Not Found", &[], b""), ReplyEnd::Close);
    };
    let tag = format!("\"{:?}\"", bytes.iter().map(|b| u32::from(*b)).sum::<u32>());
    if asked.header("if-none-match") == Some(&tag) {
        return OriginReply(reply("304 Not Modified", &[], b""), ReplyEnd::Close);
    }
    OriginReply(proper(asked, bytes, &tag), ReplyEnd::Close)
}

/// A server that lists its files on pages, as Apache httpd does.
async fn pages(files: Files) -> ScriptedOrigin {
    ScriptedOrigin::start(move |asked| {
        if !asked.path.ends_with('/') {
            return file_answer(asked, &files);
        }
        let files = files.lock().expect("the files");
        let below = files
            .keys()
            .filter_map(|path| path.strip_prefix(&asked.path[1..]));
        let mut page = "<html><a href=\"../\">up</a> <a href=\"?C=M\">by date</a>".to_owned();
        for path in below {
            let name = match path.split_once('/') {
                Some((folder, _)) => format!("{folder}/"),
                None => path.to_owned(),
            };
            page += &format!("<a href=\"{name}\">icon</a> <a href=\"{name}\">{name}</a>");
        }
        OriginReply(reply("200 OK", &[], page.as_bytes()), ReplyEnd::Close)
    })
    .await
}

async fn sync(home: &Path, arguments: &[&str]) -> CedosRun {
    run(home, &[&["sync"], arguments, &["--json"]].concat()).await
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// How many were transferred, unchanged, deleted and failed.
fn counts(run: &CedosRun) -> [u64; 4] {
    let last = run.last();
    ["transferred", "unchanged", "deleted", "failed"].map(|name| {
        last[name]
            .as_u64()
            .unwrap_or_else(|| panic!("{last} {}", run.errors))
    })
}

/// Serves a folder over D2TP; the process, and its URL.
async fn serve(home: &Path, folder: &Path) -> (Child, String) {
    let folder = folder.display().to_string();
    let arguments = [
        "serve",
        &folder,
        "--listen",
        "127.0.0.1:0",
        "--allow-any-client",
    ];
    let mut child = cedos(home, &arguments).spawn().expect("start cedos");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    (
        child,
        line.expect("in time").expect("a line").expect("its URL"),
    )
}

#[tokio::test]
async fn a_folder_of_another_device_is_mirrored_and_only_what_changed_moves() {
    let place = tempfile::tempdir().expect("a folder");
    let (there, here) = (place.path().join("there"), place.path().join("here"));
    std::fs::create_dir_all(there.join("a/deep er")).expect("made");
    std::fs::write(there.join("top.txt"), "top").expect("written");
    std::fs::write(there.join("a/deep er/50%.txt"), "deep").expect("written");
    std::fs::write(there.join("a/empty"), "").expect("written");
    std::fs::write(there.join("a/left.out"), "x").expect("written");
    let (_server, url) = serve(place.path(), &there).await;
    let mirror = [url.as_str(), "here", "--exclude", "*.out", "--delete"];
    let plan = sync(place.path(), &[&mirror[..], &["--dry-run"]].concat()).await;
    assert_eq!(
        (plan.code, counts(&plan)),
        (0, [3, 0, 0, 0]),
        "{}",
        plan.errors
    );
    assert!(!here.exists(), "a dry run makes nothing");
    let first = sync(place.path(), &mirror).await;
    assert_eq!(
        (first.code, counts(&first)),
        (0, [3, 0, 0, 0]),
        "{}",
        first.errors
    );
    assert_eq!(text(&here.join("top.txt")), "top");
    assert_eq!(text(&here.join("a/deep er/50%.txt")), "deep");
    assert_eq!(text(&here.join("a/empty")), "");
    assert!(!here.join("a/left.out").exists() && !here.join(".cedos-sync").exists());
    let time = |path: &Path| path.metadata().expect("it").modified().expect("its time");
    let apart = |path: &str| {
        let (there, here) = (time(&there.join(path)), time(&here.join(path)));
        let apart = there
            .duration_since(here)
            .or_else(|_| here.duration_since(there));
        apart.expect("an order").as_secs()
    };
    assert_eq!(apart("top.txt"), 0, "the time of the original");
    std::fs::write(there.join("top.txt"), "another").expect("written");
    std::fs::remove_file(there.join("a/deep er/50%.txt")).expect("removed");
    std::fs::write(here.join("mine.out"), "excluded").expect("written");
    let second = sync(place.path(), &mirror).await;
    assert_eq!(
        (second.code, counts(&second)),
        (0, [1, 1, 1, 0]),
        "{}",
        second.errors
    );
    assert_eq!(text(&here.join("top.txt")), "another");
    assert!(
        !here.join("a/deep er").exists(),
        "an empty folder goes, too"
    );
    assert_eq!(text(&here.join("mine.out")), "excluded");
    let idle = sync(place.path(), &mirror).await;
    assert_eq!(counts(&idle), [0, 2, 0, 0]);
    let shown = run(place.path(), &[&["sync"], &mirror[..]].concat()).await;
    shown.ends_with(0, "0 downloaded (0 B), 2 unchanged, 0 deleted");
}

#[tokio::test]
async fn a_page_with_links_is_a_listing_and_what_did_not_change_is_not_sent_again() {
    let there = files(&[("pub/a", "one"), ("pub/d/b", "two"), ("pub/d/c", "three")]);
    let origin = pages(there.clone()).await;
    let home = tempfile::tempdir().expect("a folder");
    let mirror = [&origin.url("/pub"), "here"];
    let first = sync(home.path(), &mirror).await;
    assert_eq!(
        (first.code, counts(&first)),
        (0, [3, 0, 0, 0]),
        "{}",
        first.errors
    );
    there
        .lock()
        .expect("files")
        .insert("pub/a".into(), b"changed".to_vec());
    let before = origin.requests().len();
    let second = sync(home.path(), &mirror).await;
    assert_eq!(counts(&second), [1, 2, 0, 0], "{}", second.errors);
    assert_eq!(text(&home.path().join("here/a")), "changed");
    assert_eq!(text(&home.path().join("here/d/c")), "three");
    let asked = origin.requests().split_off(before);
    let conditional = asked
        .iter()
        .filter(|asked| asked.header("if-none-match").is_some());
    assert_eq!(
        (asked.len(), conditional.count()),
        (6, 3),
        "two pages, one attempt at WebDAV, three files"
    );
}

#[tokio::test]
async fn names_that_lead_out_of_the_folder_are_refused_and_links_are_not_followed() {
    let origin = ScriptedOrigin::start(|asked| {
        let file = |name: &str| json!({"name": name, "type": "file", "bytes": 3, "modified": null});
        let names = ["../out", "/etc/x", "..", "good", ".cedos-sync"];
        let mut entries: Vec<Value> = names.into_iter().map(file).collect();
        entries.push(json!({"name": "away", "type": "directory"}));
        if asked.path == "/away/" {
            entries = vec![file("inside")];
        }
        let listing = json!({"entries": entries, "complete": true}).to_string();
        match asked.path.ends_with('/') {
            true => OriginReply(reply("200 OK", &[], listing.as_bytes()), ReplyEnd::Close),
            false => OriginReply(proper(asked, b"new", "\"v\""), ReplyEnd::Close),
        }
    })
    .await;
    let home = tempfile::tempdir().expect("a folder");
    let at = |name: &str| home.path().join(name);
    std::fs::create_dir_all(at("here")).expect("made");
    std::fs::create_dir(at("elsewhere")).expect("made");
    std::fs::write(at("precious"), "precious").expect("written");
    std::fs::write(at("here/kept"), "kept").expect("written");
    std::os::unix::fs::symlink(at("elsewhere"), at("here/away")).expect("linked");
    std::os::unix::fs::symlink(at("precious"), at("here/good")).expect("linked");
    let run = sync(home.path(), &[&origin.url("/"), "here", "--delete"]).await;
    assert_eq!(
        (run.code, counts(&run)),
        (1, [1, 0, 0, 5]),
        "{}",
        run.errors
    );
    assert!(!at("out").exists() && !at("elsewhere/inside").exists());
    assert_eq!(text(&at("precious")), "precious");
    assert_eq!(text(&at("here/good")), "new", "in place of the link");
    assert_eq!(
        text(&at("here/kept")),
        "kept",
        "nothing is deleted after a failure"
    );
}

#[tokio::test]
async fn a_listing_that_is_empty_deletes_nothing() {
    let origin = pages(files(&[])).await;
    let home = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(home.path().join("here")).expect("made");
    std::fs::write(home.path().join("here/a"), "mine").expect("written");
    let mirror = [&origin.url("/"), "here", "--delete"];
    let kept = run(home.path(), &[&["sync"], &mirror[..]].concat()).await;
    // A page may be another one than that of the folder.
    kept.ends_with(
        0,
        "nothing is deleted, because the server lists its files as a web page",
    );
    let empty = home.path().join("empty");
    std::fs::create_dir(&empty).expect("made");
    let (_server, url) = serve(home.path(), &empty).await;
    let refused = sync(home.path(), &[&url, "here", "--delete"]).await;
    refused.ends_with(1, "--delete would delete all 1 here");
    assert_eq!(text(&home.path().join("here/a")), "mine");
}

#[tokio::test]
async fn a_run_that_was_stopped_shows_nothing_half_written_and_is_continued() {
    const BYTES: usize = 400_000;
    let origin = ScriptedOrigin::start(|asked| {
        if asked.path == "/" {
            let page = "<a href=\"big\">big</a> <a href=\"big.part\">part</a>";
            return OriginReply(reply("200 OK", &[], page.as_bytes()), ReplyEnd::Close);
        }
        if asked.path == "/big.part" {
            return OriginReply(
                proper(asked, b"a file of its own", "\"p\""),
                ReplyEnd::Close,
            );
        }
        let answer = proper(asked, &object(BYTES, 1), "\"v\"");
        match asked.range_from() {
            None => OriginReply(cut(answer, BYTES / 2), ReplyEnd::Silence),
            Some(_) => OriginReply(answer, ReplyEnd::Close),
        }
    })
    .await;
    let home = tempfile::tempdir().expect("a folder");
    let url = origin.url("/");
    let mut child = cedos(home.path(), &["sync", &url, "here", "--stall", "1h"])
        .spawn()
        .expect("start cedos");
    let here = home.path().join("here");
    let held = || {
        let parts = std::fs::read_dir(here.join(".cedos-sync")).ok()?;
        let notes = parts
            .flatten()
            .filter(|part| part.path().extension() == Some("json".as_ref()));
        let durable = |part: std::fs::DirEntry| -> Option<u64> {
            let note: Value = serde_json::from_slice(&std::fs::read(part.path()).ok()?).ok()?;
            note["durable_bytes"].as_u64()
        };
        notes.filter_map(durable).max()
    };
    let saved = || held() >= Some(BYTES as u64 / 2) && here.join("big.part").exists();
    cedos_lab_rig::wait::until("half is saved", saved).await;
    child.kill().await.expect("kill -9");
    assert!(!here.join("big").exists());
    assert_eq!(text(&here.join("big.part")), "a file of its own");
    let run = sync(home.path(), &[&url, "here"]).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    assert!(std::fs::read(here.join("big")).expect("the file") == object(BYTES, 1));
    assert_eq!(text(&here.join("big.part")), "a file of its own");
    let continued = origin
        .requests()
        .into_iter()
        .filter_map(|asked| asked.range_from());
    assert!(
        continued.max() > Some(BYTES / 4),
        "continued, not begun again"
    );
}

#[tokio::test]
async fn hundreds_of_small_files_do_not_wait_for_each_other() {
    let place = tempfile::tempdir().expect("a folder");
    let there = place.path().join("there");
    for n in 0..300 {
        let folder = there.join(format!("{}", n % 7));
        std::fs::create_dir_all(&folder).expect("made");
        std::fs::write(folder.join(format!("{n}.txt")), format!("file {n}")).expect("written");
    }
    let (_server, url) = serve(place.path(), &there).await;
    let first = sync(place.path(), &[&url, "here"]).await;
    assert_eq!(
        (first.code, counts(&first)),
        (0, [300, 0, 0, 0]),
        "{}",
        first.errors
    );
    for n in [0, 150, 299] {
        let path = place.path().join(format!("here/{}/{n}.txt", n % 7));
        assert_eq!(text(&path), format!("file {n}"));
    }
}

#[tokio::test]
async fn a_folder_here_is_put_to_a_server_and_only_what_changed_is_sent_again() {
    let taken: Files = Arc::default();
    let script = taken.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let taken = script.clone();
        async move {
            let body = request.body(&mut stream).await;
            let status = match (&*request.method, body) {
                ("PUT", Some(body)) => {
                    let path = format!("{} {}", request.method, request.path);
                    taken.lock().expect("files").insert(path, body);
                    "201 Created"
                }
                // No WebDAV; folders are made with what is in them.
                _ => "405 Method Not Allowed",
            };
            let _ = stream.write_all(&reply(status, &[], b"")).await;
        }
    })
    .await;
    let home = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    let here = home.path().join("here");
    std::fs::create_dir_all(here.join("d")).expect("made");
    std::fs::write(here.join("a b"), "one").expect("written");
    std::fs::write(here.join("d/c"), "two").expect("written");
    std::os::unix::fs::symlink("/etc/hostname", here.join("link")).expect("linked");
    let url = origin.url("/dav");
    let mirror = ["here", url.as_str(), "--prox", &proxy.address];
    let first = sync(home.path(), &mirror).await;
    assert_eq!(
        (first.code, counts(&first)),
        (0, [2, 0, 0, 0]),
        "{}",
        first.errors
    );
    std::fs::write(here.join("d/c"), "another").expect("written");
    let second = sync(home.path(), &mirror).await;
    assert_eq!(counts(&second), [1, 1, 0, 0], "{}", second.errors);
    let taken = taken.lock().expect("files").clone();
    let taken: Vec<(&str, &[u8])> = taken
        .iter()
        .map(|(path, body)| (&**path, &**body))
        .collect();
    let expected: [(&str, &[u8]); 2] = [("PUT /dav/a%20b", b"one"), ("PUT /dav/d/c", b"another")];
    assert_eq!(taken, expected);
    let delete = sync(home.path(), &[&mirror[..], &["--delete"]].concat()).await;
    delete.ends_with(1, "--delete needs a server that lists what it has");
}

#[tokio::test]
async fn what_cannot_be_mirrored_is_said_at_once() {
    let home = tempfile::tempdir().expect("a folder");
    for (arguments, words) in [
        (&["a", "b"][..], "rsync is for that"),
        (&["http://h/", "https://h/"], "both folders are elsewhere"),
        (&["ftp://h/", "b"], "ftp: is not supported"),
        (&["http://h/?x", "b"], "leave out what follows ?"),
        (
            &["http://h/", "b", "--include", "[a"],
            "is not a pattern of names",
        ),
        (
            &["http://h/", "b", "--every", "07:30"],
            "--every needs the agent",
        ),
        (
            &["http://h/", "b", "--every", "07:30", "--dry-run"][..],
            "leave out --every",
        ),
        (&["nothing", "http://h/"], "nothing is no folder"),
    ] {
        let run = run(home.path(), &[&["sync"], arguments].concat()).await;
        run.ends_with(2, words);
    }
}
