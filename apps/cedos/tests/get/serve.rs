//! `cedos serve` and `cedos get d2tp://…`: an origin by its address, directly and by way of a proxy, and
//! a device by its key.

use std::path::Path;

use crate::download::Rig;
use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, cut, proper, reply};
use cedos_lab_rig::program::{cedos, run};
use cedos_lab_rig::wait::within;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

/// Starts a verb that says on its first line how it is reached.
pub(crate) async fn started(directory: &Path, arguments: &[&str]) -> (Child, String) {
    std::fs::create_dir_all(directory).unwrap();
    let mut child = cedos(directory, arguments).spawn().expect("start cedos");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    let line = line.expect("in time").unwrap();
    (child, line.expect("it says where it is"))
}

fn bytes() -> Vec<u8> {
    (0..3_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

#[tokio::test]
async fn a_file_comes_whole_from_an_origin_directly_or_relayed_and_from_a_device() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    std::fs::create_dir_all(at("files/below")).unwrap();
    std::fs::write(at("files/below/a.bin"), bytes()).unwrap();
    let files = at("files").display().to_string();

    let proxy = [
        "prox",
        "--listen",
        "127.0.0.1:0",
        "--allow-any-client",
        "--allow-private",
    ];
    let (_proxy, proxy) = started(&at("proxy"), &proxy).await;
    let origin = [
        "serve",
        &files,
        "--listen",
        "127.0.0.1:0",
        "--allow-any-client",
    ];
    let (_origin, origin) = started(&at("origin"), &origin).await;
    let device = ["serve", &files, "--prox", &proxy, "--allow-any-client"];
    let (_device, device) = started(&at("device"), &device).await;

    for (n, (whom, by)) in [
        (&origin, None),
        (&origin, Some(&proxy)),
        (&device, Some(&proxy)),
    ]
    .into_iter()
    .enumerate()
    {
        let (home, url) = (at(&format!("home{n}")), format!("{whom}below/a.bin"));
        std::fs::create_dir_all(&home).unwrap();
        let mut arguments = vec!["get", &url, "--json"];
        arguments.extend(by.iter().flat_map(|proxy| ["--prox", proxy]));
        let got = run(&home, &arguments).await;
        assert_eq!(got.code, 0, "{url} by {by:?}: {}", got.errors);
        assert_eq!(std::fs::read(home.join("a.bin")).unwrap(), bytes(), "{url}");
        assert_eq!(got.last()["event"], "done");
    }

    let nobody = format!("d2tp://{}/a.bin", "A".repeat(43));
    let home = at("nobody");
    std::fs::create_dir_all(&home).unwrap();
    let lost = ["get", &nobody, "--prox", &proxy, "--tries", "1"];
    run(&home, &lost)
        .await
        .ends_with(1, "no device with that key listens");
    run(&home, &["get", &nobody])
        .await
        .ends_with(2, "give --prox");
    let wrong = ["get", "d2tp://127.0.0.1:1/short/a.bin"];
    run(&home, &wrong).await.ends_with(2, "43 characters");
    let paid = ["get", &nobody, "--prox", &proxy, "--policy", "any"];
    run(&home, &paid).await.ends_with(2, "free networks only");
}

#[tokio::test]
async fn an_origin_that_says_it_speaks_d2tp_is_asked_that_way_next_time_if_it_is_there() {
    let place = tempfile::tempdir().unwrap();
    let files = place.path().join("files");
    std::fs::create_dir_all(&files).unwrap();
    std::fs::write(files.join("a.bin"), bytes()).unwrap();
    let shown = files.display().to_string();
    let serve = [
        "serve",
        &shown,
        "--listen",
        "127.0.0.1:0",
        "--allow-any-client",
    ];
    for mode in ["direct", "proxy-fetch"] {
        let (mut serving, address) = started(&place.path().join(mode), &serve).await;
        let (at, key) = address
            .trim_start_matches("d2tp://")
            .split_once('/')
            .unwrap();
        let hint = format!(
            "h3=\":1\", d2tp=\"{at}\"; key=\"{}\"; ma=600",
            key.trim_matches('/')
        );
        let rig = Rig::new(mode, move |_| {
            let length = bytes().len().to_string();
            let headers = [
                ("Alt-Svc", &*hint),
                ("Content-Length", &length),
                ("ETag", "\"1\""),
            ];
            OriginReply(reply("200 OK", &headers, &bytes()), ReplyEnd::Close)
        })
        .await;
        let asked = || rig.origin.requests().len();
        rig.assert_whole(&rig.get("/a.bin", &[]).await, &bytes());
        let once = asked();
        // What may cost money goes as before.
        rig.assert_whole(&rig.get("/a.bin", &[]).await, &bytes());
        let twice = asked();
        assert!(twice > once);
        let free = ["--policy", "free-only"];
        let got = rig.get("/a.bin", &free).await;
        assert_eq!(got.code, 0, "{mode}: {}", got.errors);
        assert_eq!(asked(), twice, "{mode}: the web was not asked");
        assert_eq!(std::fs::read(rig.place().join("out")).unwrap(), bytes());
        std::fs::remove_file(rig.place().join("out")).unwrap();

        serving.kill().await.unwrap();
        rig.assert_whole(&rig.get("/a.bin", &free).await, &bytes());
        assert!(asked() > twice, "{mode}: as before, when it is gone");
    }
}

/// The validator by which `cedos serve` names a file.
fn validator_of(file: &Path) -> String {
    let about = std::fs::metadata(file).unwrap();
    let changed = about.modified().unwrap();
    let changed = changed.duration_since(std::time::UNIX_EPOCH).unwrap();
    format!("\"{:x}-{:x}\"", about.len(), changed.as_nanos())
}

/// An origin that serves a file by HTTPS and by D2TP, and says so.
struct BothWays {
    place: tempfile::TempDir,
    serving: Child,
    rig: Rig,
}

/// Bytes of the first answer of the web server, which then falls silent.
const FIRST_BYTES: usize = 1_000_000;

impl BothWays {
    /// The web server names the file by this validator, or by that of `cedos serve`.
    async fn start(validator: Option<&str>) -> BothWays {
        let place = tempfile::tempdir().unwrap();
        let files = place.path().join("files");
        std::fs::create_dir_all(&files).unwrap();
        std::fs::write(files.join("a.bin"), bytes()).unwrap();
        let tag = validator.map(str::to_owned);
        let tag = tag.unwrap_or_else(|| validator_of(&files.join("a.bin")));
        let shown = files.display().to_string();
        let serve = [
            "serve",
            &shown,
            "--listen",
            "127.0.0.1:0",
            "--allow-any-client",
        ];
        let (serving, address) = started(&place.path().join("d2tp"), &serve).await;
        let address = address.trim_start_matches("d2tp://").trim_matches('/');
        let (at, key) = address.split_once('/').unwrap();
        let hint = format!("d2tp=\"{at}\"; key=\"{key}\"; ma=600");
        let rig = Rig::new("direct", move |asked| {
            if asked.range_from().is_some() {
                return OriginReply(proper(asked, &bytes(), &tag), ReplyEnd::Close);
            }
            let length = bytes().len().to_string();
            let headers = [
                ("Alt-Svc", &*hint),
                ("Content-Length", &length),
                ("ETag", &tag),
            ];
            let whole = reply("200 OK", &headers, &bytes());
            OriginReply(cut(whole, FIRST_BYTES), ReplyEnd::Silence)
        })
        .await;
        BothWays {
            place,
            serving,
            rig,
        }
    }
}

/// Whether a run said this in a note.
fn is_noted(events: &[Value], words: &str) -> bool {
    let mut texts = events.iter().filter_map(|event| event["text"].as_str());
    texts.any(|text| text.contains(words))
}

const GOES_OVER: &str = "the rest comes that way";

#[tokio::test]
async fn the_rest_of_a_file_comes_by_d2tp_once_its_server_has_said_that_it_speaks_it() {
    let both = BothWays::start(None).await;
    let got = both.rig.get("/a.bin", &["--policy", "free-only"]).await;
    both.rig.assert_whole(&got, &bytes());
    assert_eq!(both.rig.origin.requests().len(), 1, "{:#?}", got.events);
    assert!(is_noted(&got.events, GOES_OVER), "{:#?}", got.events);
    // What is held is compared with its last bytes once more, and nothing else comes twice.
    let twice = got.last()["duplicate_bytes"].as_u64().unwrap();
    assert!(twice <= 16 * 1024, "{twice}");
    // What may cost money stays with the web server.
    let paid = ["--policy", "free-first", "--stall", "1s"];
    let got = both.rig.get("/a.bin", &paid).await;
    both.rig.assert_whole(&got, &bytes());
    assert!(!is_noted(&got.events, GOES_OVER), "{:#?}", got.events);
    drop(both.place);
}

#[tokio::test]
async fn a_file_that_d2tp_names_otherwise_stays_with_the_web_server() {
    let both = BothWays::start(Some("\"other\"")).await;
    let free = ["--policy", "free-only", "--stall", "4s"];
    let got = both.rig.get("/a.bin", &free).await;
    both.rig.assert_whole(&got, &bytes());
    assert!(!is_noted(&got.events, GOES_OVER), "{:#?}", got.events);
    assert_eq!(both.rig.origin.requests().len(), 2);
    drop((both.place, both.serving));
}

#[tokio::test]
async fn a_file_whose_d2tp_server_dies_on_the_way_is_finished_by_the_web_server() {
    let mut both = BothWays::start(None).await;
    let slow = [
        "--policy",
        "free-only",
        "--stall",
        "2s",
        "--limit-rate",
        "500k",
    ];
    let mut command = both.rig.command("/a.bin", &slow);
    let mut running = command.spawn().unwrap();
    let mut lines = BufReader::new(running.stdout.take().unwrap()).lines();
    let mut events = Vec::new();
    while let Some(line) = within(lines.next_line()).await.unwrap() {
        let event: Value = serde_json::from_str(&line).unwrap();
        if is_noted(std::slice::from_ref(&event), GOES_OVER) {
            both.serving.kill().await.unwrap();
        }
        events.push(event);
    }
    assert!(running.wait().await.unwrap().success(), "{events:#?}");
    assert!(
        is_noted(&events, "comes from the web server"),
        "{events:#?}"
    );
    let file = std::fs::read(both.rig.place().join("out")).unwrap();
    assert!(file == bytes());
    assert_eq!(both.rig.origin.requests().len(), 2);
    drop(both.place);
}

#[tokio::test]
async fn a_device_is_reached_through_each_of_its_proxies_and_one_that_is_dead_is_left_out() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    std::fs::create_dir_all(at("files")).unwrap();
    std::fs::write(at("files/a.bin"), bytes()).unwrap();
    let files = at("files").display().to_string();
    let proxy = [
        "prox",
        "--listen",
        "127.0.0.1:0",
        "--allow-any-client",
        "--allow-private",
    ];
    let (mut first, one) = started(&at("one"), &proxy).await;
    let (_second, two) = started(&at("two"), &proxy).await;
    let both = format!("{one} {two}");
    let serve = ["serve", &files, "--prox", &both, "--allow-any-client"];
    let (_device, device) = started(&at("device"), &serve).await;
    let url = format!("{device}a.bin");
    for (n, by) in [&one, &two, &both].into_iter().enumerate() {
        if n == 2 {
            first.kill().await.unwrap();
        }
        let home = at(&format!("home{n}"));
        std::fs::create_dir_all(&home).unwrap();
        let got = run(&home, &["get", &url, "--json", "--prox", by]).await;
        assert_eq!(got.code, 0, "{url} by {by}: {}", got.errors);
        assert_eq!(std::fs::read(home.join("a.bin")).unwrap(), bytes(), "{by}");
    }
}
