//! Two network namespaces with two links between them: a free one and a metered one.
//!
//! ```text
//!  device namespace                           origin namespace
//!  wlan0 198.51.100.7  ── veth, 20 Mb/s ──  ap0    198.51.100.1 ┐
//!  wwan0 203.0.113.7   ── veth, 20 Mb/s ──  tower0 203.0.113.1  ┴ origin at 192.0.2.1
//! ```
//!
//! Each test runs itself again under `unshare -Urn`; where the system forbids that, it says so and
//! passes.

#![allow(dead_code)] // each test file uses a part of it

use std::time::Duration;

use serde_json::Value;

const INSIDE: &str = "CEDOS_TEST_INSIDE_NAMESPACE";

/// Upper bound for what is certain to happen, so that a failure is not a hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the body of the test `name` in a device namespace of its own.
pub fn in_namespace<F: Future<Output = ()>>(name: &str, body: impl FnOnce() -> F) {
    if std::env::var_os(INSIDE).is_some() {
        sh("ip link set lo up");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        return runtime.expect("a runtime").block_on(body());
    }
    let attempt = "ip link add a0 type veth peer name a1 && tc qdisc add dev a0 root tbf rate 1mbit \
                   burst 10k latency 50ms";
    let allowed = std::process::Command::new("unshare")
        .args(["-Urn", "sh", "-c", attempt])
        .output()
        .is_ok_and(|output| output.status.success());
    if !allowed {
        eprintln!("skipped: this system does not let us make namespaces with veth links and tbf");
        return;
    }
    let status = std::process::Command::new("unshare")
        .arg("-Urn")
        .arg(std::env::current_exe().expect("path of this test"))
        .args(["--exact", name, "--nocapture"])
        // Its closing line is not one of this program's.
        .stdout(std::io::stderr())
        .env(INSIDE, "1")
        .status()
        .expect("run unshare");
    assert!(status.success(), "inside the namespace: {status}");
}

pub fn sh(commands: &str) {
    let output = std::process::Command::new("sh")
        .args(["-ec", commands])
        .output()
        .expect("run sh");
    assert!(
        output.status.success(),
        "{commands}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Makes the origin namespace on a thread that stays in it, and starts there what it is to hold.
pub fn origin_namespace<T, F>(start: impl FnOnce() -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let device = std::process::id();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a second namespace");
        sh(&format!(
            "ip link set lo up
             ip addr add 192.0.2.1/32 dev lo
             ip link add ap0 type veth peer name wlan0 netns {device}
             ip link add tower0 type veth peer name wwan0 netns {device}
             ip addr add 198.51.100.1/24 dev ap0
             ip addr add 203.0.113.1/24 dev tower0
             ip link set ap0 up
             ip link set tower0 up
             tc qdisc add dev ap0 root tbf rate 20mbit burst 20k latency 100ms
             tc qdisc add dev tower0 root tbf rate 20mbit burst 20k latency 100ms"
        ));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(async {
            assert!(tell.send(start().await).is_ok(), "the test listens");
            std::future::pending::<()>().await;
        });
    });
    told.recv_timeout(PATIENCE).expect("it starts")
}

pub fn wifi_on(address: &str) {
    sh(&format!(
        "ip link set wlan0 up
         ip addr add {address}/24 dev wlan0
         ip route add default via 198.51.100.1 dev wlan0 metric 600"
    ));
}

pub fn wifi_off() {
    sh("ip addr flush dev wlan0; ip link set wlan0 down");
}

pub fn cell_on() {
    sh("ip link set wwan0 up
        ip addr add 203.0.113.7/24 dev wwan0
        ip route add default via 203.0.113.1 dev wwan0 metric 700");
}

/// Bytes the kernel received on a link.
pub fn received(link: &str) -> u64 {
    counted(link, "rx")
}

/// Bytes the kernel sent on a link.
pub fn sent(link: &str) -> u64 {
    counted(link, "tx")
}

fn counted(link: &str, way: &str) -> u64 {
    let output = std::process::Command::new("ip")
        .args(["-s", "-j", "link", "show", link])
        .output()
        .expect("run ip");
    let shown: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    shown[0]["stats64"][way]["bytes"]
        .as_u64()
        .expect("a counter")
}
