//! `cedos prox --config`: what a file says, what a running proxy takes of its changes, and what it says to the rest.

use std::path::Path;

use cedos_lab_rig::program::{pid_of, run};
use cedos_lab_rig::wait::{until, within};
use nix::sys::signal::{Signal, kill};

use crate::support::{proxy_command, start_proxy};

fn write(home: &Path, text: &str) {
    std::fs::write(home.join("prox.toml"), text).unwrap();
}

const RELOAD: &[&str] = &["prox", "reload", "--state-dir", "state"];

#[tokio::test]
async fn a_running_proxy_takes_what_it_can_and_names_the_rest() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    write(home, "client_flows_max = 5\n");
    let proxy = start_proxy(home, "127.0.0.1:0", &["--config", "prox.toml"]).await;

    write(
        home,
        "client_flows_max = 6\nrelay = false\nallow_private = false\n",
    );
    let json = [RELOAD, &["--json"]].concat();
    let told = run(home, &json).await;
    assert_eq!(told.code, 0, "{}", told.errors);
    assert_eq!(
        told.events[0],
        serde_json::json!({"taken": ["client_flows_max"], "at_restart": ["relay"]}),
        "an option overrides the file"
    );

    write(home, "client_flow_max = 7\n");
    let told = run(home, RELOAD).await;
    assert_eq!(told.code, 1);
    assert!(
        told.errors.contains("do you mean `client_flows_max`?"),
        "{}",
        told.errors
    );

    write(home, "client_flows_max = 8\n");
    kill(pid_of(&proxy.child), Signal::SIGHUP).unwrap();
    let log = home.join("log");
    until("the log says that the file was read", || {
        let said = std::fs::read_to_string(&log).unwrap();
        said.matches("read the settings again").count() == 2
    })
    .await;
    let told = run(home, RELOAD).await;
    assert_eq!(told.code, 0, "{}", told.errors);
    let said = String::from_utf8_lossy(&told.output);
    assert!(said.contains("nothing has changed"), "{said}");
}

#[tokio::test]
async fn systemd_is_told_when_a_proxy_serves_and_a_reload_then_does_not_end_it() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let manager = tokio::net::UnixDatagram::bind(home.join("notify")).unwrap();
    write(home, "client_flows_max = 5\n");
    let more = ["--config", "prox.toml"];
    let mut command = proxy_command(home, "127.0.0.1:0", &more);
    command.env("NOTIFY_SOCKET", home.join("notify"));
    let child = command.spawn().unwrap();
    let mut said = [0; 64];
    let length = within(manager.recv(&mut said)).await.unwrap();
    assert_eq!(&said[..length], b"READY=1");
    // systemd sends the signal of a reload now, and another program can use the control socket.
    kill(pid_of(&child), Signal::SIGHUP).unwrap();
    let told = run(home, RELOAD).await;
    assert_eq!(told.code, 0, "{}", told.errors);
}

#[tokio::test]
async fn a_file_that_makes_no_sense_ends_with_2_and_says_what_was_meant() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    for (text, said) in [
        ("disk_quota = 5\n", "do you mean `disk_quota_bytes`?"),
        ("keep_s = \"soon\"\n", "line 1"),
        ("keep_s = -5\n", "keep_s"),
    ] {
        write(home, text);
        let told = run(home, &["prox", "--config", "prox.toml"]).await;
        assert_eq!(told.code, 2, "{text}");
        assert!(told.errors.contains("prox.toml"), "{}", told.errors);
        assert!(told.errors.contains(said), "{}", told.errors);
    }
    let told = run(home, &["prox", "--config", "missing.toml"]).await;
    assert_eq!(told.code, 2);
}

#[tokio::test]
async fn a_proxy_without_a_file_says_so() {
    let home = tempfile::tempdir().unwrap();
    let _proxy = start_proxy(home.path(), "127.0.0.1:0", &[]).await;
    let told = run(home.path(), RELOAD).await;
    assert_eq!(told.code, 1);
    assert!(told.errors.contains("--config"), "{}", told.errors);
}
