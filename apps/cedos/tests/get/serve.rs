//! `cedos serve` and `cedos get d2tp://…`: an origin by its address, directly and by way of a proxy, and
//! a device by its key.

use std::path::Path;

use crate::download::Rig;
use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, reply};
use cedos_lab_rig::program::{cedos, run};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

/// Starts a verb that says on its first line how it is reached.
async fn started(directory: &Path, arguments: &[&str]) -> (Child, String) {
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
