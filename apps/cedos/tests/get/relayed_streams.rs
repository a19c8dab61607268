//! Two devices where one or both are on a network that blocks UDP: `send`, `receive`, `serve` and `get` of a device
//! reach each other through the proxy, in the stream of the device that has no UDP. Two real links in a network
//! namespace; what comes in by the Wi-Fi as UDP is dropped at its far end.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{
    BlockedUdp, in_namespace, origin_namespace, received, second_device_namespace, wifi_off,
    wifi_on,
};
use cedos_lab_rig::origin::object;
use cedos_lab_rig::program::{CedosRun, ProxyProcess, cedos, ended, run};
use cedos_lab_rig::{PATIENCE, this_test};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;
use tokio::task::JoinHandle;

const FILE_BYTES: usize = 6_000_000; // 2.4 s at 20 Mb/s

fn file() -> Vec<u8> {
    object(FILE_BYTES, 7)
}

/// A home with the file in it.
fn home_with_file(place: &Path, name: &str) -> PathBuf {
    let home = place.join(name);
    std::fs::create_dir_all(&home).expect("a directory");
    std::fs::write(home.join("report.bin"), file()).expect("written");
    home
}

/// Waits for the first line of a child's standard output.
async fn first_line(child: &mut Child) -> String {
    let mut lines = BufReader::new(child.stdout.as_mut().expect("piped")).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    let line = line.expect("in time").expect("text");
    line.expect("it says how it is reached")
}

/// Starts `cedos send`; returns the code, and the end of the run.
async fn send(home: &Path, proxy: &str) -> (String, JoinHandle<CedosRun>) {
    let arguments = ["send", "report.bin", "--json", "--prox", proxy];
    let mut child = cedos(home, &arguments).spawn().expect("start cedos");
    let line = first_line(&mut child).await;
    let event: Value = serde_json::from_str(&line).expect("JSON");
    let code = event["code"].as_str().expect("a code").to_owned();
    (code, tokio::spawn(ended(child)))
}

/// Runs `cedos receive` in a new home, and asserts that the file arrives.
async fn receive_whole(place: &Path, proxy: &str, code: &str) -> CedosRun {
    let home = place.join("receiver");
    std::fs::create_dir_all(&home).expect("a directory");
    let arguments = ["receive", code, "--json", "--prox", proxy];
    let got = run(&home, &arguments).await;
    assert_received(&home, &got);
    got
}

#[track_caller]
fn assert_received(home: &Path, got: &CedosRun) {
    assert_eq!(got.code, 0, "{:#?}\n{}", got.events, got.errors);
    let bytes = std::fs::read(home.join("report.bin")).expect("the file");
    assert!(bytes == file(), "other bytes");
}

/// A proxy with streams, and a network without UDP at the far end of the Wi-Fi.
async fn proxy_behind_blocked_udp(place: &Path) -> (ProxyProcess, BlockedUdp) {
    proxy_with(place, &[]).await
}

/// A proxy with streams and more options, and a network without UDP at the far end of the Wi-Fi.
async fn proxy_with(place: &Path, more: &[&str]) -> (ProxyProcess, BlockedUdp) {
    let udp = BlockedUdp::on("ap0");
    let streams = ["--stream-listen", "192.0.2.1:0", "--allow-any-client"];
    let more = [&streams[..], more].concat();
    let proxy = ProxyProcess::start(place, "192.0.2.1:0", &more).await;
    (proxy, udp)
}

#[test]
fn a_file_is_received_where_udp_is_blocked() {
    in_namespace(this_test!(), || async {
        let place = tempfile::tempdir().expect("a directory");
        let home = home_with_file(place.path(), "sender");
        let at = place.path().to_owned();
        let (proxy, _udp, code, sending) = origin_namespace(move || async move {
            let (proxy, udp) = proxy_behind_blocked_udp(&at).await;
            let (code, sending) = send(&home, &proxy.address).await;
            (proxy, udp, code, sending)
        });
        wifi_on("198.51.100.7");
        let before = received("wlan0");
        receive_whole(place.path(), &proxy.address, &code).await;
        // What it takes to carry it once, and no more.
        let carried = received("wlan0") - before;
        let most = FILE_BYTES as u64 * 115 / 100;
        assert!(carried < most, "{carried} bytes for {FILE_BYTES}");
        let sent = sending.await.expect("it ends");
        assert_eq!(sent.code, 0, "{}", sent.errors);
    });
}

#[test]
#[expect(
    clippy::async_yields_async,
    reason = "what receives goes on in its namespace, and its end is awaited here"
)]
fn a_file_is_sent_from_where_udp_is_blocked() {
    in_namespace(this_test!(), || async {
        let place = tempfile::tempdir().expect("a directory");
        let home = home_with_file(place.path(), "sender");
        let at = place.path().to_owned();
        let (proxy, _udp, tell, receiving) = origin_namespace(move || async move {
            let (proxy, udp) = proxy_behind_blocked_udp(&at).await;
            let (tell, code) = tokio::sync::oneshot::channel::<String>();
            let address = proxy.address.clone();
            let receiving = second_device_namespace(move || async move {
                tokio::spawn(async move {
                    let code = code.await.expect("a code");
                    receive_whole(&at, &address, &code).await
                })
            });
            (proxy, udp, tell, receiving)
        });
        wifi_on("198.51.100.7");
        let (code, sending) = send(&home, &proxy.address).await;
        tell.send(code).expect("it is awaited");
        receiving.await.expect("it ends");
        let sent = sending.await.expect("it ends");
        assert_eq!(sent.code, 0, "{}", sent.errors);
    });
}

#[test]
fn two_devices_that_both_have_no_udp_reach_each_other() {
    in_namespace(this_test!(), || async {
        let place = tempfile::tempdir().expect("a directory");
        let home = home_with_file(place.path(), "sender");
        let at = place.path().to_owned();
        let (proxy, _udp) =
            origin_namespace(move || async move { proxy_behind_blocked_udp(&at).await });
        wifi_on("198.51.100.7");
        let (code, sending) = send(&home, &proxy.address).await;
        receive_whole(place.path(), &proxy.address, &code).await;
        let sent = sending.await.expect("it ends");
        assert_eq!(sent.code, 0, "{}", sent.errors);
    });
}

#[test]
fn devices_without_udp_reach_each_other_by_a_proxy_with_several_workers() {
    in_namespace(this_test!(), || async {
        let place = tempfile::tempdir().expect("a directory");
        let server_home = home_with_file(place.path(), "server");
        let at = place.path().to_owned();
        let (proxy, _udp) =
            origin_namespace(move || async move { proxy_with(&at, &["--workers", "3"]).await });
        wifi_on("198.51.100.7");
        let arguments = ["serve", ".", "--prox", &proxy.address, "--allow-any-client"];
        let mut serving = cedos(&server_home, &arguments)
            .spawn()
            .expect("start cedos");
        let device = first_line(&mut serving).await;
        let url = format!("{device}report.bin");
        // Each has a key of its own, so that it is in any of the workers.
        for n in 0..4 {
            let home = place.path().join(format!("home-{n}"));
            std::fs::create_dir(&home).expect("a directory");
            let got = run(&home, &["get", &url, "--json", "--prox", &proxy.address]).await;
            assert_received(&home, &got);
        }
    });
}

#[test]
fn a_device_that_serves_is_reached_where_udp_is_blocked() {
    in_namespace(this_test!(), || async {
        let place = tempfile::tempdir().expect("a directory");
        let server_home = home_with_file(place.path(), "server");
        let at = place.path().to_owned();
        let (proxy, _udp, _serving, device) = origin_namespace(move || async move {
            let (proxy, udp) = proxy_behind_blocked_udp(&at).await;
            let arguments = ["serve", ".", "--prox", &proxy.address, "--allow-any-client"];
            let mut serving = cedos(&server_home, &arguments)
                .spawn()
                .expect("start cedos");
            let device = first_line(&mut serving).await;
            (proxy, udp, serving, device)
        });
        wifi_on("198.51.100.7");
        let home = place.path().join("home");
        std::fs::create_dir_all(&home).expect("a directory");
        let url = format!("{device}report.bin");
        let got = run(&home, &["get", &url, "--json", "--prox", &proxy.address]).await;
        assert_received(&home, &got);
    });
}

/// Waits until so many bytes came by the Wi-Fi since its counter stood at `from`.
async fn comes(from: u64, bytes: u64) {
    let begun = Instant::now();
    while received("wlan0") < from + bytes {
        assert!(begun.elapsed() < PATIENCE, "too little by wlan0");
        // sleep: nobody tells of the kernel's counters
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn a_transfer_between_devices_goes_on_in_a_stream_and_by_udp_as_networks_change() {
    in_namespace(this_test!(), || async {
        let place = tempfile::tempdir().expect("a directory");
        let home = home_with_file(place.path(), "sender");
        let at = place.path().to_owned();
        let (proxy, udp, code, sending) = origin_namespace(move || async move {
            let (proxy, udp) = proxy_behind_blocked_udp(&at).await;
            let (code, sending) = send(&home, &proxy.address).await;
            (proxy, udp, code, sending)
        });
        udp.lift();
        wifi_on("198.51.100.7");
        let home = place.path().join("receiver");
        std::fs::create_dir_all(&home).expect("a directory");
        let arguments = ["receive", &code, "--json", "--prox", &proxy.address];
        let before = received("wlan0");
        let child = cedos(&home, &arguments).spawn().expect("start cedos");
        let receiving = tokio::spawn(ended(child));
        comes(before, 1_500_000).await;
        udp.block();
        comes(before, 3_500_000).await;
        // The next network carries UDP.
        wifi_off();
        udp.lift();
        wifi_on("198.51.100.8");
        let got = receiving.await.expect("it ends");
        assert_received(&home, &got);
        let sent = sending.await.expect("it ends");
        assert_eq!(sent.code, 0, "{}", sent.errors);
    });
}
