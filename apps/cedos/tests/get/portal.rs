//! `cedos get` on a Wi-Fi that leads somewhere else: a sign-in page that answers for everybody, a
//! certificate of the portal's own, or a network where the proxy never answers. The file is never
//! the portal's page, and a network that works is found within seconds.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cedos_lab_rig::namespace::{cell_on, in_namespace, origin_namespace, sh, wifi_off, wifi_on};
use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, TestAuthority, object, proper, reply,
};
use cedos_lab_rig::program::{CedosRun, ProxyProcess, cedos, run};
use cedos_lab_rig::{PATIENCE, this_test};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpListener;

const OBJECT_BYTES: usize = 4_000_000; // 1.6 s at 20 Mb/s
const TAG: &str = "\"v1\"";

/// Long enough for a busy machine, far shorter than any backoff that would be noticed.
const SECONDS: f64 = 15.0;

fn origins(asked: &OriginRequest) -> OriginReply {
    OriginReply(
        proper(asked, &object(OBJECT_BYTES, 1), TAG),
        ReplyEnd::Close,
    )
}

/// Sends everybody to its own page.
fn portals(asked: &OriginRequest) -> OriginReply {
    let bytes = if asked.path == "/login" {
        let head = [("Content-Type", "text/html; charset=utf-8")];
        reply("200 OK", &head, b"<html>Welcome! Room number?")
    } else {
        let head = [("Location", "/login"), ("Content-Length", "0")];
        reply("302 Found", &head, b"")
    };
    OriginReply(bytes, ReplyEnd::Close)
}

/// A listener at the origin's address for what comes in by one link.
fn listener(link: &str, port: u16) -> TcpListener {
    let socket =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    socket
        .bind_device(Some(link.as_bytes()))
        .expect("bind to the link");
    let address: SocketAddr = ([192, 0, 2, 1], port).into();
    socket.bind(&address.into()).expect("bind");
    socket.listen(64).expect("listen");
    socket.set_nonblocking(true).expect("nonblocking");
    TcpListener::from_std(socket.into()).expect("a listener")
}

/// An origin by cellular; by Wi-Fi a portal until the flag is set.
async fn behind_portal(
    authorities: Option<(TestAuthority, TestAuthority)>,
    open: Arc<AtomicBool>,
) -> String {
    let (genuine, own) = authorities.unzip();
    let origin = ScriptedOrigin::serve_at(listener("tower0", 0), genuine.as_ref(), origins);
    let by_wifi = listener("ap0", origin.address.port());
    ScriptedOrigin::serve_at(by_wifi, own.as_ref(), move |asked| {
        if open.load(Ordering::Relaxed) {
            origins(asked)
        } else {
            portals(asked)
        }
    });
    origin.url("/episode.mp3")
}

fn assert_whole(directory: &Path, run: &CedosRun) {
    assert_eq!(run.code, 0, "{:#?}\n{}", run.events, run.errors);
    let got = std::fs::read(directory.join("out")).expect("the file");
    assert!(got == object(OBJECT_BYTES, 1), "other bytes");
}

async fn get(directory: &Path, url: &str, more: &[&str]) -> CedosRun {
    run(
        directory,
        &[&["get", "--json", "-o", "out", url], more].concat(),
    )
    .await
}

#[test]
fn a_sign_in_page_is_not_the_object_and_another_network_is_used() {
    in_namespace(this_test!(), || async {
        let url = origin_namespace(|| behind_portal(None, Arc::default()));
        let directory = tempfile::tempdir().expect("a directory");
        wifi_on("198.51.100.7");
        // Nothing else is there: it cannot be told from an origin like that, and the error says so.
        let run = get(directory.path(), &url, &[]).await;
        run.ends_with(1, "sign in");
        assert_eq!(run.last()["reason"], "portal");
        assert!(!directory.path().join("out").exists());
        cell_on();
        let run = get(directory.path(), &url, &["--policy", "any"]).await;
        assert_whole(directory.path(), &run);
        assert!(run.reasons().contains(&"portal"), "{:#?}", run.events);
        assert_eq!(run.last()["bytes_by_link"]["wwan0"], OBJECT_BYTES as u64);
        assert!(
            run.last()["duration_s"].as_f64() < Some(SECONDS),
            "{}",
            run.last()
        );
    });
}

#[test]
fn a_certificate_of_the_portals_own_costs_that_network_only() {
    in_namespace(this_test!(), || async {
        let (genuine, own) = (TestAuthority::new(), TestAuthority::new());
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("ca.pem"), &genuine.pem).expect("write");
        let url = origin_namespace(|| behind_portal(Some((genuine, own)), Arc::default()));
        wifi_on("198.51.100.7");
        let run = get(directory.path(), &url, &["--ca", "ca.pem"]).await;
        run.ends_with(1, "the certificate of");
        cell_on();
        let run = get(
            directory.path(),
            &url,
            &["--ca", "ca.pem", "--policy", "any"],
        )
        .await;
        assert_whole(directory.path(), &run);
        assert!(run.reasons().contains(&"portal"), "{:#?}", run.events);
        // On all networks the same stranger: then it is no portal.
        let run = get(directory.path(), &url, &["--policy", "any"]).await;
        run.ends_with(1, "the certificate of");
    });
}

#[test]
fn a_portal_that_comes_in_between_is_waited_out() {
    in_namespace(this_test!(), || async {
        let open = Arc::new(AtomicBool::new(true));
        let flag = open.clone();
        let url = origin_namespace(|| behind_portal(None, flag));
        let directory = tempfile::tempdir().expect("a directory");
        wifi_on("198.51.100.7");
        let arguments = ["get", "--json", "-o", "out", &url];
        let mut child = cedos(directory.path(), &arguments).spawn().expect("start");
        let mut lines = BufReader::new(child.stdout.take().expect("output")).lines();
        let mut until = async |what: &str, wanted: fn(&Value) -> bool| {
            loop {
                let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
                let line = line.expect("in time").expect("readable");
                let line = line.unwrap_or_else(|| panic!("never {what}"));
                let event: Value = serde_json::from_str(&line).expect("JSON");
                if wanted(&event) {
                    return event;
                }
            }
        };
        until("bytes", |e| e["event"] == "progress" && e["bytes"] != 0).await;
        open.store(false, Ordering::Relaxed);
        wifi_off();
        wifi_on("198.51.100.8");
        let waiting = until("a wait", |e| {
            e["reason"] == "portal" && e["event"] == "waiting"
        })
        .await;
        assert!(
            waiting["unblocks"]
                .as_str()
                .expect("words")
                .contains("signing in"),
            "{waiting}"
        );
        open.store(true, Ordering::Relaxed);
        wifi_off();
        wifi_on("198.51.100.9");
        until("the end", |e| e["event"] == "done").await;
        let got = std::fs::read(directory.path().join("out")).expect("the file");
        assert!(got == object(OBJECT_BYTES, 1), "other bytes");
    });
}

#[test]
fn a_tunnel_moves_between_networks_and_its_origin_is_asked_once() {
    in_namespace(this_test!(), || async {
        let directory = tempfile::tempdir().expect("a directory");
        let home = directory.path().to_owned();
        let (origin, proxy) = origin_namespace(|| near_proxy(home));
        wifi_on("198.51.100.7");
        let url = origin.url("/episode.mp3");
        let arguments = [
            "get",
            "--json",
            "-o",
            "out",
            &url,
            "--prox",
            &proxy.address,
            "--sealed",
        ];
        let arguments = [&arguments[..], &["--policy", "any"]].concat();
        let mut child = cedos(directory.path(), &arguments).spawn().expect("start");
        let mut lines = BufReader::new(child.stdout.take().expect("output")).lines();
        let mut last = Value::Null;
        let mut moved = false;
        let running = async {
            while let Some(line) = lines.next_line().await.expect("readable") {
                last = serde_json::from_str(&line).expect("JSON");
                if !moved && last["event"] == "progress" && last["bytes"] != 0 {
                    moved = true;
                    wifi_off();
                    // A while without any network: the tunnel sleeps, and is the same one after.
                    // sleep: that a while without any network does no harm is the subject
                    tokio::time::sleep(Duration::from_secs(2)).await;
                    cell_on();
                }
            }
        };
        tokio::time::timeout(PATIENCE, running)
            .await
            .expect("an end");
        assert_eq!(last["event"], "done", "{last:#}");
        assert_eq!(last["mode"], "sealed", "{last:#}");
        let got = std::fs::read(directory.path().join("out")).expect("the file");
        assert!(got == object(OBJECT_BYTES, 1), "other bytes");
        assert!(
            last["bytes_by_link"]["wwan0"].as_u64() > Some(0),
            "{last:#}"
        );
        assert!(
            last["bytes_by_link"]["wlan0"].as_u64() > Some(0),
            "{last:#}"
        );
        assert_eq!(origin.requests().len(), 1);
    });
}

/// An origin and a proxy for the device whose home is `directory`; the proxy hears nothing by
/// Wi-Fi.
async fn behind_proxy(directory: PathBuf) -> (ScriptedOrigin, ProxyProcess) {
    sh("ip rule add pref 10 lookup local
        ip rule del pref 0
        ip rule add pref 5 iif ap0 ipproto udp blackhole");
    near_proxy(directory).await
}

/// An origin, and a proxy near it that hears everything.
async fn near_proxy(directory: PathBuf) -> (ScriptedOrigin, ProxyProcess) {
    let origin = ScriptedOrigin::start_at("192.0.2.1", origins).await;
    let proxy = ProxyProcess::start(&directory, "192.0.2.1:0", &[]).await;
    (origin, proxy)
}

#[test]
fn a_wifi_on_which_the_proxy_never_answers_is_passed_over_within_seconds() {
    in_namespace(this_test!(), || async {
        let directory = tempfile::tempdir().expect("a directory");
        let home = directory.path().to_owned();
        let (origin, proxy) = origin_namespace(|| behind_proxy(home));
        wifi_on("198.51.100.7");
        cell_on();
        let url = origin.url("/episode.mp3");
        // 4 MB at the first estimate of 2 Mb/s need 16 s: 20 s are urgent.
        for more in [
            &["--policy", "any"][..],
            &["--within", "20s"],
            &["--policy", "any", "--sealed"],
        ] {
            let more = [&["--prox", &proxy.address], more].concat();
            let run = get(directory.path(), &url, &more).await;
            assert_whole(directory.path(), &run);
            let last = run.last();
            let carried = &last["bytes_by_link"];
            assert_eq!(carried["wlan0"], Value::Null, "{last:#}");
            assert!(carried["wwan0"].as_u64() > Some(0), "{last:#}");
            let begun = run.events.iter().find(|e| e["event"] == "switch");
            let begun = begun.expect("a start")["t_s"].as_f64();
            assert!(begun < Some(SECONDS), "{more:?}: {:#?}", run.events);
        }
    });
}
