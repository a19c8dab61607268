//! `cedos bridge` and `cedos get` over a serial line: in a network namespace in which no link is up but the
//! loopback one, so that the line is the only way.
//!
//! ```text
//!  cedos get ── /dev/pts/a ══ a cable of the rate ══ /dev/pts/b ── cedos bridge ── 127.0.0.1 ── cedos prox
//! ```

use std::path::Path;
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{
    LINKS, in_namespace, in_namespace_with, origin_namespace, sh, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::program::{CedosRun, ProxyProcess, cedos, ended, pid_of, run};
use cedos_lab_rig::serial::{PseudoTerminal, serial_cable};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::within;
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout};

/// The address of the proxy as the device knows it: one that no link reaches, since the bridge has its own.
const ELSEWHERE: &str = "192.0.2.1";

/// The size of an object that takes the Wi-Fi several seconds.
const HOLE_OBJECT_BYTES: usize = 12_000_000; // 4.8 s at 20 Mb/s

struct BridgeProcess {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl BridgeProcess {
    async fn start(home: &Path, end: &PseudoTerminal, more: &[&str]) -> BridgeProcess {
        let device = end.device.display().to_string();
        let arguments = [&["bridge", "--serial", &device], more].concat();
        let mut child = cedos(home, &arguments).spawn().expect("start the bridge");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut bridge = BridgeProcess { child, lines };
        let first = bridge.line().await;
        assert!(first.contains("bytes per second"), "{first}");
        bridge
    }

    async fn line(&mut self) -> String {
        let line = within(self.lines.next_line()).await.expect("readable");
        line.expect("the bridge runs")
    }

    /// Ends the bridge; returns what it says last.
    async fn end(mut self) -> String {
        kill(pid_of(&self.child), Signal::SIGTERM).expect("it runs");
        let mut said = String::new();
        while let Some(line) = within(self.lines.next_line()).await.expect("readable") {
            said += &line;
            said.push('\n');
        }
        let status = within(self.child.wait()).await.expect("it ends");
        assert!(status.success(), "{said}");
        said
    }
}

/// Fetches an object of so many bytes over a line of this bit rate. Returns the run, its duration without the time for which
/// processes waited for a processor, and what the bridge counted.
async fn fetch(bytes: usize, baud: u32, more: &[&str]) -> (CedosRun, Duration, String) {
    sh("ip link set lo up");
    let home = tempfile::tempdir().expect("a directory");
    let body = object(bytes, 5);
    let served = body.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        OriginReply(proper(asked, &served, "\"v1\""), ReplyEnd::Close)
    })
    .await;
    let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    let [near, far] = serial_cable(Some(u64::from(baud / 10)));
    let rate = baud.to_string();
    let arguments = ["--baud", &rate, "--prox", proxy.listens_at()];
    let bridge = BridgeProcess::start(home.path(), &near, &[&arguments[..], more].concat()).await;
    let kiss = more.contains(&"--kiss");
    let device = far.device.display();
    let link = match kiss {
        true => format!("kiss:{device}@{baud},N0CALL-2=free"),
        false => format!("serial:{device}@{baud}=free"),
    };
    let elsewhere = proxy.address.replace("127.0.0.1", ELSEWHERE);
    let url = origin.url("/a");
    let arguments = [
        "get", "--json", "-o", "got", &url, "--prox", &elsewhere, "--link", &link,
    ];
    let began = Instant::now();
    let child = cedos(home.path(), &arguments).spawn().expect("start cedos");
    let all = [&child, &proxy.child, &bridge.child].map(pid_of);
    let wait = ProcessorWait::of(&all);
    let (run, waited) = wait.during(ended(child)).await;
    let took = began.elapsed().saturating_sub(waited);
    assert_eq!(run.code, 0, "{:#?} {}", run.events, run.errors);
    assert!(std::fs::read(home.path().join("got")).expect("the file") == body);
    (run, took, bridge.end().await)
}

#[test]
fn a_file_arrives_over_a_serial_line_of_115_kilobits_and_nothing_else() {
    in_namespace_with(LINKS, this_test!(), || async {
        let (run, took, said) = fetch(100_000, 115_200, &[]).await;
        let links = run.last()["bytes_by_link"]
            .as_object()
            .expect("links")
            .clone();
        assert!(links.len() == 1 && links.keys().all(|name| name.starts_with("serial:")));
        // 8.7 s of the line; the rest is what is not content, and round trips.
        assert!(took < Duration::from_secs(14), "{took:?}");
        assert!(
            said.contains("answered by the proxy at 127.0.0.1"),
            "{said}"
        );
        let dropped = ["noise", "unknown", "incomplete", "queue", "contradicting"];
        assert!(!dropped.iter().any(|word| said.contains(word)), "{said}");
    });
}

#[test]
fn a_small_file_arrives_over_a_serial_line_of_9600_bits() {
    in_namespace_with(LINKS, this_test!(), || async {
        let (_, took, said) = fetch(8_000, 9_600, &[]).await;
        assert!(took < Duration::from_secs(20), "{took:?} {said}");
    });
}

#[test]
fn a_file_arrives_through_modems_that_speak_kiss_and_share_the_air() {
    in_namespace_with(LINKS, this_test!(), || async {
        let more = ["--kiss", "N0CALL-1", "--half-duplex"];
        let (_, _, said) = fetch(30_000, 115_200, &more).await;
        assert!(said.contains("packets to proxies"), "{said}");
    });
}

#[test]
fn a_file_arrives_from_a_bridge_that_polls_its_devices() {
    in_namespace_with(LINKS, this_test!(), || async {
        let (_, took, said) = fetch(60_000, 115_200, &["--poll"]).await;
        // 5.2 s of the line, with half a turn for each round trip.
        assert!(took < Duration::from_secs(20), "{took:?}");
        assert!(said.contains(" turns ("), "{said}");
        assert!(!said.contains("out of turn"), "{said}");
    });
}

/// The origin, the proxy and the bridge at the far end of the Wi-Fi; the bridge has the other end of the line.
struct FarEnd {
    url: String,
    proxy: ProxyProcess,
    bridge: BridgeProcess,
}

#[test]
fn a_line_patches_a_hole_of_the_wifi() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let [near, far] = serial_cable(Some(11_520));
        let place = home.path().to_owned();
        let mut served = origin_namespace(move || async move {
            let body = object(HOLE_OBJECT_BYTES, 5);
            let origin = ScriptedOrigin::start_at("192.0.2.1", move |asked| {
                OriginReply(proper(asked, &body, "\"v1\""), ReplyEnd::Close)
            })
            .await;
            let proxy = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
            let to = ["--prox", proxy.listens_at()];
            let bridge = BridgeProcess::start(&place, &near, &to).await;
            FarEnd {
                url: origin.url("/a"),
                proxy,
                bridge,
            }
        });
        wifi_on("198.51.100.7");
        let line = format!("serial:{}@115200", far.device.display());
        let rule = format!("{line}=free");
        let (url, proxy) = (&served.url, &served.proxy.address);
        let arguments = [
            "get", "--json", "-o", "got", url, "--prox", proxy, "--link", &rule,
        ];
        let mut child = cedos(home.path(), &arguments).spawn().expect("start cedos");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut by_line = [0, 0];
        let mut next = async |wanted: &dyn Fn(&Value) -> bool| loop {
            let text = within(lines.next_line()).await.expect("readable");
            let event: Value = serde_json::from_str(&text.expect("it runs")).expect("JSON");
            if wanted(&event) {
                return event;
            }
        };
        let on_line = |event: &Value| event["bytes_by_link"][&line].as_u64().unwrap_or(0);
        let much = |event: &Value| event["bytes"].as_u64() > Some(HOLE_OBJECT_BYTES as u64 / 4);
        by_line[0] = on_line(&next(&much).await);
        wifi_off();
        // Two seconds of the line.
        let enough = |event: &Value| on_line(event) > by_line[0] + 20_000;
        by_line[1] = on_line(&next(&enough).await);
        wifi_on("198.51.100.8");
        let done = next(&|event| event["event"] == "done").await;
        assert!(on_line(&done) >= by_line[1], "{done}");
        let got = std::fs::read(home.path().join("got")).expect("the file");
        assert!(got == object(HOLE_OBJECT_BYTES, 5), "other bytes");
        let answered = served.bridge.line().await;
        assert!(answered.contains("answered by the proxy"), "{answered}");
    });
}

/// The size of an object that takes the Wi-Fi 16 s, in which it is there for four seconds and gone for four, three times.
const HOLES_OBJECT_BYTES: usize = 40_000_000;
const HOLES: u8 = 3;
const STAY: Duration = Duration::from_secs(4);

/// Fetches the object while the Wi-Fi goes and comes. Returns the bytes that the line carried, and how long it took.
async fn through_holes(home: &Path, served: &FarEnd, line: &str) -> (u64, Duration) {
    let rule = format!("{line}=free");
    let (url, proxy) = (&served.url, &served.proxy.address);
    let arguments = [
        "get", "--json", "-o", "got", url, "--prox", proxy, "--link", &rule,
    ];
    let began = Instant::now();
    let child = cedos(home, &arguments).spawn().expect("start cedos");
    let goes = async {
        for hole in 0..HOLES {
            // sleep: Wi-Fi is there for this long
            tokio::time::sleep(STAY).await;
            wifi_off();
            // sleep: and away for this long
            tokio::time::sleep(STAY).await;
            wifi_on(&format!("198.51.100.{}", 20 + hole));
        }
    };
    let ((), run) = tokio::join!(goes, ended(child));
    let took = began.elapsed();
    assert_eq!(run.code, 0, "{:#?} {}", run.events, run.errors);
    let got = std::fs::read(home.join("got")).expect("the file");
    assert!(got == object(HOLES_OBJECT_BYTES, 5), "other bytes");
    std::fs::remove_file(home.join("got")).expect("removed");
    let by_line = run.last()["bytes_by_link"][line].as_u64();
    (by_line.unwrap_or(0), took)
}

#[test]
fn a_radio_that_sleeps_while_wifi_works_carries_a_fifth_fewer_bytes_and_patches_holes_as_well() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let [near, far] = serial_cable(Some(11_520));
        let place = home.path().to_owned();
        let served = origin_namespace(move || async move {
            let body = object(HOLES_OBJECT_BYTES, 5);
            let origin = ScriptedOrigin::start_at("192.0.2.1", move |asked| {
                OriginReply(proper(asked, &body, "\"v1\""), ReplyEnd::Close)
            })
            .await;
            let proxy = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
            let to = ["--prox", proxy.listens_at()];
            let bridge = BridgeProcess::start(&place, &near, &to).await;
            FarEnd {
                url: origin.url("/a"),
                proxy,
                bridge,
            }
        });
        let line = format!("serial:{}@115200", far.device.display());
        wifi_on("198.51.100.7");
        let awake = through_holes(home.path(), &served, &line).await;
        wifi_off();
        wifi_on("198.51.100.8");
        let asleep = through_holes(home.path(), &served, &format!("{line},sleep")).await;
        println!("awake: {awake:?}, asleep beside Wi-Fi: {asleep:?}");
        // It patches holes: some seconds of 12 at 11 kB/s.
        assert!(asleep.0 > 30_000, "{asleep:?}");
        assert!(
            asleep.0 as f64 <= 0.82 * awake.0 as f64,
            "{awake:?} {asleep:?}"
        );
        let slower = asleep.1.as_secs_f64() / awake.1.as_secs_f64();
        assert!(slower <= 1.1, "{awake:?} {asleep:?}");
    });
}

#[tokio::test]
async fn a_bridge_that_cannot_begin_says_why() {
    let home = tempfile::tempdir().unwrap();
    let missing = [
        "bridge",
        "--serial",
        "/dev/no-such-device",
        "--prox",
        "127.0.0.1",
    ];
    run(home.path(), &missing).await.ends_with(1, "plugged in");
    let nowhere = [
        "bridge",
        "--serial",
        "/dev/null",
        "--prox",
        "no-such-host.invalid",
    ];
    run(home.path(), &nowhere)
        .await
        .ends_with(1, "has no address");
    let file = ["bridge", "--serial", "/dev/null", "--prox", "127.0.0.1"];
    run(home.path(), &file)
        .await
        .ends_with(1, "no serial device");
    let wrong = [
        "get",
        "http://192.0.2.1/a",
        "--link",
        "serial:/dev/x@fast=free",
    ];
    run(home.path(), &wrong).await.ends_with(2, "no bit rate");
}
