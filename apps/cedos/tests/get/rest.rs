//! Downloads that outlive their processes: `cedos get` and `cedos prox`, killed at critical
//! moments.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{
    OriginReply, ReplyEnd, ScriptedOrigin, cut, note, object, proper, reply,
};
use cedos_lab_rig::processor_wait::sleep_beside;
use cedos_lab_rig::program::{ProxyProcess, cedos, device_key, pid_of};
use cedos_lab_rig::wait::until;
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

const TAG: &str = "\"v1\"";
const SIZE: usize = 2_000_000;
const HALF: usize = 1_000_000;
/// The folder with logs of the device's sessions.
const LOG: &str = "sessions";

/// A directory, an origin that stops at half, and a proxy that keeps its state.
struct Stage {
    directory: tempfile::TempDir,
    body: Vec<u8>,
    origin: ScriptedOrigin,
    /// The origin gives the rest too.
    open: Arc<AtomicBool>,
    proxy: Option<Child>,
    /// What the proxy is given beside its state directory.
    proxy_arguments: &'static [&'static str],
    address: String,
}

impl Stage {
    async fn new(seed: u32) -> Stage {
        Stage::with(seed, &[]).await
    }

    /// With more arguments for the proxy.
    async fn with(seed: u32, proxy_arguments: &'static [&'static str]) -> Stage {
        let body = object(SIZE, seed);
        let (served, open) = (body.clone(), Arc::new(AtomicBool::new(false)));
        let gate = open.clone();
        let origin = ScriptedOrigin::start(move |asked| {
            if asked.count == 0 {
                let first = cut(proper(asked, &served, TAG), HALF);
                return OriginReply(first, ReplyEnd::Close);
            }
            if !gate.load(Ordering::SeqCst) {
                let later = reply("503 Later", &[("Content-Length", "0")], b"");
                return OriginReply(later, ReplyEnd::Close);
            }
            OriginReply(proper(asked, &served, TAG), ReplyEnd::Close)
        })
        .await;
        let mut stage = Stage {
            directory: tempfile::tempdir().unwrap(),
            body,
            origin,
            open,
            proxy: None,
            proxy_arguments,
            address: String::new(),
        };
        stage.start_proxy("127.0.0.1:0").await;
        stage
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    async fn start_proxy(&mut self, listen: &str) {
        let arguments = [&["--state-dir", "proxy"], self.proxy_arguments].concat();
        let proxy = ProxyProcess::start(self.path(), listen, &arguments).await;
        self.address = proxy.address;
        self.proxy = Some(proxy.child);
    }

    async fn kill_proxy(&mut self) {
        self.proxy.take().unwrap().kill().await.unwrap();
    }

    async fn restart_proxy(&mut self) {
        let place = self.address.trim_start_matches("d2tp://").to_owned();
        let listen = place.split('/').next().unwrap().to_owned();
        let before = self.address.clone();
        self.start_proxy(&listen).await;
        assert_eq!(self.address, before, "it is who it was");
    }

    fn get(&self, more: &[&str]) -> Child {
        let url = self.origin.url("/a");
        let arguments = ["get", "--json", "-o", "got", &url, "--prox", &self.address];
        let log = ["--qlog", LOG, "--qlog-packets", "none"];
        let arguments = [&arguments[..], &log, more].concat();
        cedos(self.path(), &arguments).spawn().unwrap()
    }

    /// Waits until the partial file and its metadata contain all bytes that the origin sent.
    async fn half_is_safe(&self, device: &Child) {
        let note = self.path().join("got.part.json");
        until("half is safe", || {
            let note = std::fs::read(&note).ok();
            let note = note.and_then(|n| serde_json::from_slice::<Value>(&n).ok());
            note.is_some_and(|n| n["durable_bytes"] == HALF && n["flow"].is_object())
        })
        .await;
        let proxy = self.proxy.as_ref().map(pid_of);
        let both: Vec<Pid> = [Some(pid_of(device)), proxy]
            .into_iter()
            .flatten()
            .collect();
        // sleep: both journals are written a moment later, and nothing tells of it
        sleep_beside(Duration::from_secs(2), &both).await;
    }

    fn let_the_rest_come(&self) {
        self.open.store(true, Ordering::SeqCst);
    }

    /// What every story ends with: the file is right, and the origin gave nothing twice.
    fn assert_whole(&self, last: &Value) {
        assert_eq!(last["event"], "done", "{last:#}");
        assert!(std::fs::read(self.path().join("got")).unwrap() == self.body);
        let asked = self.origin.requests();
        assert_eq!(asked[0].range_from(), None);
        for again in &asked[1..] {
            assert_eq!(again.range_from(), Some(HALF), "{asked:#?}");
        }
    }

    /// The events of this name in the logs of the devices' sessions.
    fn logged(&self, name: &str) -> Vec<Value> {
        let files = std::fs::read_dir(self.path().join(LOG)).unwrap();
        let texts = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
        let texts: Vec<String> = texts.collect();
        let lines = texts.iter().flat_map(|text| text.lines());
        let events = lines.filter_map(|line| {
            let line = line.trim_start_matches('\u{1e}');
            // A process that was killed may have left a part of one.
            serde_json::from_str::<Value>(line).ok()
        });
        events.filter(|event| event["name"] == name).collect()
    }

    /// Asserts that one flow brought all, and that it went on after a new handshake behind what its device had.
    fn assert_continued(&self, last: &Value) {
        let opened = self.logged("d2tp:flow_opened");
        let ids: BTreeSet<&str> = opened
            .iter()
            .filter_map(|e| e["data"]["flow"].as_str())
            .collect();
        assert_eq!(ids.len(), 1, "{opened:#?}");
        assert!(!self.logged("d2tp:claim_accepted").is_empty());
        assert_eq!(self.logged("d2tp:claim_refused"), Vec::<Value>::new());
        assert_eq!(last["duplicate_bytes"], 0, "{last:#}");
    }

    fn copies(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path().join("proxy/copies")).unwrap();
        entries.map(|e| e.unwrap().path()).collect()
    }
}

async fn ended(child: Child) -> (i32, Value) {
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output())
        .await
        .expect("cedos ends by itself")
        .expect("its output");
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or("null");
    let last = serde_json::from_str(last).unwrap_or_else(|_| Value::String(text.into_owned()));
    (output.status.code().unwrap_or(-1), last)
}

fn signal(child: &Child, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(pid_of(child), signal).unwrap();
}

fn received(last: &Value) -> u64 {
    last["bytes_by_link"]["any"].as_u64().unwrap()
}

#[tokio::test]
async fn a_proxy_killed_in_the_middle_goes_on_from_its_state() {
    let mut stage = Stage::new(1).await;
    let device = stage.get(&[]);
    stage.half_is_safe(&device).await;
    stage.kill_proxy().await;
    stage.let_the_rest_come();
    stage.restart_proxy().await;
    let (code, last) = ended(device).await;
    assert_eq!(code, 0, "{last:#}");
    stage.assert_whole(&last);
    assert_eq!(received(&last), SIZE as u64);
    stage.assert_continued(&last);
}

#[tokio::test]
async fn a_proxy_that_is_replaced_goes_on_from_its_state() {
    let mut stage = Stage::new(2).await;
    let device = stage.get(&[]);
    stage.half_is_safe(&device).await;
    let mut old = stage.proxy.take().unwrap();
    signal(&old, nix::sys::signal::Signal::SIGTERM);
    let status = tokio::time::timeout(PATIENCE, old.wait()).await;
    assert!(status.expect("it ends").unwrap().success());
    assert_eq!(stage.copies().len(), 1, "its copy stays");
    stage.let_the_rest_come();
    stage.restart_proxy().await;
    let (code, last) = ended(device).await;
    assert_eq!(code, 0, "{last:#}");
    stage.assert_whole(&last);
    assert_eq!(received(&last), SIZE as u64);
}

#[tokio::test]
async fn a_device_killed_in_the_middle_gets_only_what_it_lacks() {
    let stage = Stage::new(3).await;
    let mut device = stage.get(&[]);
    stage.half_is_safe(&device).await;
    device.kill().await.unwrap();
    let device = stage.get(&[]);
    stage.let_the_rest_come();
    let (code, last) = ended(device).await;
    assert_eq!(code, 0, "{last:#}");
    stage.assert_whole(&last);
    assert_eq!(received(&last), (SIZE - HALF) as u64);
    stage.assert_continued(&last);
}

#[tokio::test]
async fn both_killed_in_the_middle_lose_nothing() {
    // The shared cache would keep the object.
    let mut stage = Stage::with(4, &["--cache-quota", "0"]).await;
    let mut device = stage.get(&[]);
    stage.half_is_safe(&device).await;
    device.kill().await.unwrap();
    stage.kill_proxy().await;
    stage.restart_proxy().await;
    stage.let_the_rest_come();
    let (code, last) = ended(stage.get(&[])).await;
    assert_eq!(code, 0, "{last:#}");
    stage.assert_whole(&last);
    assert_eq!(received(&last), (SIZE - HALF) as u64);
    // Delivered: the proxy holds nothing any more.
    until("the copy is freed", || stage.copies().is_empty()).await;
}

#[tokio::test]
async fn a_copy_that_became_whole_while_nobody_was_there_is_not_fetched_again() {
    let mut stage = Stage::new(8).await;
    let mut device = stage.get(&[]);
    stage.half_is_safe(&device).await;
    device.kill().await.unwrap();
    stage.let_the_rest_come();
    until("the copy is whole", || {
        std::fs::metadata(&stage.copies()[0]).unwrap().len() == SIZE as u64
    })
    .await;
    let proxy = pid_of(stage.proxy.as_ref().unwrap());
    // sleep: the proxy's journal is written a moment later, and nothing tells of it
    sleep_beside(Duration::from_secs(2), &[proxy]).await;
    stage.kill_proxy().await;
    let asked = stage.origin.requests().len();
    stage.restart_proxy().await;
    let (code, last) = ended(stage.get(&[])).await;
    assert_eq!(code, 0, "{last:#}");
    stage.assert_whole(&last);
    assert_eq!(received(&last), (SIZE - HALF) as u64);
    assert_eq!(stage.origin.requests().len(), asked);
}

#[tokio::test]
async fn a_download_that_was_stopped_goes_on_in_the_same_flow() {
    let stage = Stage::new(5).await;
    let device = stage.get(&[]);
    stage.half_is_safe(&device).await;
    signal(&device, nix::sys::signal::Signal::SIGINT);
    let (code, last) = ended(device).await;
    assert_eq!(code, 3, "{last:#}");
    stage.let_the_rest_come();
    let (code, last) = ended(stage.get(&[])).await;
    assert_eq!(code, 0, "{last:#}");
    stage.assert_whole(&last);
    assert_eq!(received(&last), (SIZE - HALF) as u64);
}

#[tokio::test]
async fn a_download_given_up_frees_the_proxy_at_once_or_at_the_next_network() {
    for proxy_is_there in [true, false] {
        // The shared cache would keep the part of an object that others may be given.
        let mut stage = Stage::with(6, &["--cache-quota", "0"]).await;
        let device = stage.get(&[]);
        stage.half_is_safe(&device).await;
        signal(&device, nix::sys::signal::Signal::SIGINT);
        assert_eq!(ended(device).await.0, 3);
        assert_eq!(stage.copies().len(), 1);
        if !proxy_is_there {
            stage.kill_proxy().await;
        }
        assert_eq!(ended(stage.get(&["--forget"])).await.0, 0);
        assert!(!stage.path().join("got.part").exists());
        if !proxy_is_there {
            stage.restart_proxy().await;
            assert_eq!(stage.copies().len(), 1, "nobody told it");
            // Another download by another process: its first words are about the old one.
            let refused = stage.origin.url("/b");
            let arguments = [
                "get",
                "-o",
                "b",
                &refused,
                "--tries",
                "1",
                "--prox",
                &stage.address,
            ];
            let other = cedos(stage.path(), &arguments).spawn().unwrap();
            assert_ne!(ended(other).await.0, 0, "the origin serves nothing now");
        }
        until("the copy is freed", || stage.copies().is_empty()).await;
    }
}

#[tokio::test]
async fn a_session_of_a_silent_device_sleeps_and_wakes() {
    let mut stage = Stage::new(7).await;
    stage.kill_proxy().await;
    let place = stage.address.trim_start_matches("d2tp://").to_owned();
    let key = device_key(stage.path()).await;
    let arguments = [
        "prox",
        "--listen",
        place.split('/').next().unwrap(),
        "--key",
        "prox.key",
        "--state-dir",
        "proxy",
        "--allow-private",
        "--sleep-after",
        "1s",
        "--log",
        "json",
        "--allow-client",
        &key,
    ];
    let mut proxy = cedos(stage.path(), &arguments)
        .env("RUST_LOG", "debug")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(proxy.stderr.take().unwrap()).lines();
    let device = stage.get(&[]);
    stage.half_is_safe(&device).await;
    signal(&device, nix::sys::signal::Signal::SIGSTOP);
    let asleep = async {
        while let Some(line) = log.next_line().await.unwrap() {
            if line.contains("a session sleeps") {
                return;
            }
        }
        panic!("the proxy ended");
    };
    tokio::time::timeout(PATIENCE, asleep)
        .await
        .expect("asleep");
    tokio::spawn(async move { while let Ok(Some(_)) = log.next_line().await {} });
    signal(&device, nix::sys::signal::Signal::SIGCONT);
    stage.let_the_rest_come();
    let (code, last) = ended(device).await;
    assert_eq!(code, 0, "{last:#}");
    stage.assert_whole(&last);
    assert_eq!(received(&last), SIZE as u64);
}

#[tokio::test]
async fn a_part_that_is_all_there_of_an_unknown_length_is_compared_and_not_thrown_away() {
    let stage = Stage::new(9).await;
    stage.let_the_rest_come();
    let url = stage.origin.url("/a");
    std::fs::write(stage.path().join("got.part"), &stage.body).unwrap();
    let note = note(&url, TAG, None, SIZE);
    std::fs::write(stage.path().join("got.part.json"), note).unwrap();
    let (code, last) = ended(stage.get(&[])).await;
    assert_eq!(code, 0, "{last:#}");
    assert!(std::fs::read(stage.path().join("got")).unwrap() == stage.body);
    assert_eq!(received(&last), 16 * 1024);
}
