//! What `cedos doctor` finds: each thing that a test can break, and what it says to do about it.

use std::path::Path;

use cedos_lab_rig::namespace::{LINKS, LINKS_AND_MOUNTS, in_namespace_with, sh};
use cedos_lab_rig::program::{AgentProcess, cedos, ended, run};
use cedos_lab_rig::this_test;
use serde_json::Value;

use crate::support::{Operator, join, start_proxy};

const KEY: &str = "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc";

/// What one run of `cedos doctor` found.
struct Checkup {
    exit_code: i32,
    checks: Vec<Value>,
}

impl Checkup {
    async fn by(mut command: tokio::process::Command) -> Checkup {
        let ended = ended(command.spawn().unwrap()).await;
        Checkup {
            exit_code: ended.code,
            checks: ended.last()["checks"].as_array().unwrap().clone(),
        }
    }

    async fn at(home: &Path, more: &[&str]) -> Checkup {
        Checkup::by(cedos(home, &[&["doctor", "--json"], more].concat())).await
    }

    /// Asserts the status of a check, and words of its text or advice.
    #[track_caller]
    fn has(&self, name: &str, status: &str, words: &str) {
        let named = self.checks.iter().find(|check| check["name"] == name);
        let found = named.unwrap_or_else(|| panic!("no {name}: {:?}", self.checks));
        assert_eq!(found["status"], status, "{found}");
        assert!(found.to_string().contains(words), "{words:?}: {found}");
        if status != "good" {
            let advice = found["advice"].as_str().unwrap_or_default();
            assert!(!advice.is_empty(), "without advice: {found}");
        }
    }
}

#[tokio::test]
async fn settings_that_make_no_sense_are_named_and_all_else_is_checked_too() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join(".config/cedos");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("config.toml"), "[transfer]\npolisy = \"any\"\n").unwrap();
    let found = Checkup::at(home.path(), &["--no-prox"]).await;
    assert_eq!(found.exit_code, 1);
    found.has("settings", "bad", "policy");
    found.has("key", "note", "correct the settings");
    found.has("proxy", "note", "cedos prox invite");
    found.has("sockets per network", "good", "bind");
    found.has("NetworkManager", "note", "[[network]]");
}

#[tokio::test]
async fn a_proxy_that_neither_answers_by_udp_nor_by_tcp_is_told_from_one_that_takes_streams() {
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = closed.local_addr().unwrap().port();
    drop(closed);
    let home = tempfile::tempdir().unwrap();
    let address = format!(
        "d2tp://{}/{KEY}?stream={port}",
        silent.local_addr().unwrap()
    );
    let found = Checkup::at(home.path(), &["--prox", &address]).await;
    assert_eq!(found.exit_code, 1);
    found.has("proxy over UDP", "bad", "this one blocks UDP");
    found.has("proxy over TCP", "note", "--stream-listen");

    let at_proxy = tempfile::tempdir().unwrap();
    let streams = ["--stream-listen", "127.0.0.1:0"];
    let proxy = start_proxy(at_proxy.path(), "127.0.0.1:0", &streams).await;
    let operator = Operator {
        home: at_proxy,
        proxy,
    };
    join(home.path(), &operator.invite(&[]).await, &[])
        .await
        .ends_with(0, "enrolled");
    let found = Checkup::at(home.path(), &[]).await;
    found.has("proxy over UDP", "good", "answers after");
    found.has("proxy over TCP", "good", "takes D2TP");
    found.has("proxy key", "good", "lets this device in");
}

#[tokio::test]
async fn an_agent_without_its_sandbox_is_named() {
    for (more, status, words) in [
        (&["--no-sandbox"][..], "note", "without its sandbox"),
        (&[], "good", "runs"),
    ] {
        let home = tempfile::tempdir().unwrap();
        let agent = AgentProcess::start_with(home.path(), more).await;
        let mut command = cedos(home.path(), &["doctor", "--json", "--no-prox"]);
        command.env("CEDOS_AGENT", &agent.socket);
        Checkup::by(command).await.has("agent", status, words);
    }
    let home = tempfile::tempdir().unwrap();
    let found = Checkup::at(home.path(), &["--no-prox"]).await;
    found.has("agent", "good", "does not run");
}

#[test]
fn a_machine_without_a_network_hears_so() {
    in_namespace_with(LINKS, this_test!(), || async {
        let home = tempfile::tempdir().unwrap();
        let found = Checkup::at(home.path(), &["--no-prox"]).await;
        assert_eq!(found.exit_code, 1);
        found.has("networks", "bad", "none is usable");
        sh("ip link add wlan0 type veth peer name far0
            ip addr add 10.7.7.2/24 dev wlan0
            ip link set far0 up; ip link set wlan0 up
            ip route add default via 10.7.7.1");
        let found = Checkup::at(home.path(), &["--no-prox"]).await;
        found.has("networks", "good", "wlan0");
    });
}

#[test]
fn disks_that_are_full_or_not_writable_and_a_clock_that_nothing_keeps_are_named() {
    in_namespace_with(LINKS_AND_MOUNTS, this_test!(), || async {
        let home = tempfile::tempdir().unwrap();
        let place = home.path().join("small");
        let small = place.display();
        sh(&format!(
            "mkdir {small}; mount -t tmpfs -o size=1m t {small}; mount -t tmpfs t /run"
        ));
        run(
            home.path(),
            &[
                "config",
                "set",
                "directories.downloads",
                place.to_str().unwrap(),
            ],
        )
        .await
        .ends_with(0, "changed");
        let found = Checkup::at(home.path(), &["--no-prox"]).await;
        found.has("disk for downloads", "note", "make room");
        found.has("disk for the state", "good", "free in");
        found.has("clock", "note", "nothing seems to keep it right");
        sh(&format!(
            "mount -o remount,ro {small}
             mkdir -p /run/systemd/timesync; touch /run/systemd/timesync/synchronized"
        ));
        let found = Checkup::at(home.path(), &["--no-prox"]).await;
        found.has("disk for downloads", "bad", "may not write");
        found.has("clock", "good", "20");
    });
}
