//! A proxy whose disk is really full: a small tmpfs of its own. It says so, the device says why it
//! waits, and once there is room the download comes to its end by itself.

mod get_origin;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use get_origin::{End, Origin, Reply, object, proper};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// Upper bound for what is certain to happen, so that a failure is not a hang.
const PATIENCE: Duration = Duration::from_secs(60);
const SIZE: usize = 3_000_000;
const DISK: &str = "8m";

fn environment(command: &mut Command, home: &Path) {
    command
        .current_dir(home)
        .env_remove("CEDOS_PROX")
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .env("XDG_CONFIG_HOME", home)
        .env("XDG_STATE_HOME", home.join("device"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
}

fn cedos(home: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cedos"));
    environment(command.args(arguments), home);
    command
}

/// A proxy in a mount namespace where `state` is a file system of eight megabytes, and its address.
/// None where such a thing is forbidden.
async fn proxy(home: &Path) -> Option<(Child, String)> {
    let shown = cedos(home, &["key", "show"]).output().await.unwrap();
    let client = String::from_utf8(shown.stdout).unwrap();
    std::fs::create_dir(home.join("state")).unwrap();
    let script = format!(
        "mount -t tmpfs -o size={DISK} none state && exec {} prox --listen 127.0.0.1:0 \
         --state-dir state --allow-private --allow-client {} 2> proxy.err",
        env!("CARGO_BIN_EXE_cedos"),
        client.trim(),
    );
    let mut command = Command::new("unshare");
    environment(command.args(["-rm", "sh", "-c", &script]), home);
    let mut child = command.spawn().ok()?;
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    let address = line.expect("in time").expect("readable")?;
    Some((child, address))
}

/// Fills the proxy's disk but for a little; the file that does.
fn fill(proxy: &Child) -> PathBuf {
    let root = format!("/proc/{}/root", proxy.id().unwrap());
    let inside = std::fs::read_link(format!("/proc/{}/cwd", proxy.id().unwrap())).unwrap();
    let state = Path::new(&root)
        .join(inside.strip_prefix("/").unwrap())
        .join("state");
    let ballast = state.join("ballast");
    let mut length = 0;
    let mut file = std::fs::File::create(&ballast).unwrap();
    while std::io::Write::write_all(&mut file, &[1; 65_536]).is_ok() {
        length += 65_536;
    }
    // Room for some pages of the journal, not for the copy.
    file.set_len(length - 4 * 65_536).unwrap();
    ballast
}

#[tokio::test]
async fn a_full_disk_under_a_running_proxy_is_told_and_with_room_again_the_download_ends_whole() {
    let home = tempfile::tempdir().unwrap();
    let Some((mut proxy, address)) = proxy(home.path()).await else {
        eprintln!("NOT TRIED: no mount namespace, or no tmpfs in it, is allowed here");
        return;
    };
    let body = object(SIZE, 4);
    let served = body.clone();
    let origin =
        Origin::start(move |asked| Reply(proper(asked, &served, "\"v1\""), End::Close)).await;
    let ballast = fill(&proxy);
    let url = origin.url("/a");
    let arguments = ["get", "--json", "-o", "got", &url, "--prox", &address];
    let mut device = cedos(home.path(), &arguments).spawn().unwrap();
    let mut lines = BufReader::new(device.stdout.take().unwrap()).lines();
    let mut last = Value::Null;
    let mut room = Some(ballast);
    let story = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            last = serde_json::from_str(&line).unwrap();
            let words = last["why"]
                .as_str()
                .or(last["text"].as_str())
                .unwrap_or_default();
            if words.contains("disk")
                && let Some(ballast) = room.take()
            {
                std::fs::remove_file(ballast).unwrap();
            }
        }
    };
    tokio::time::timeout(PATIENCE, story)
        .await
        .expect("it ends");
    assert!(room.is_none(), "nobody said that a disk is full: {last:#}");
    assert_eq!(last["event"], "done", "{last:#}");
    assert!(std::fs::read(home.path().join("got")).unwrap() == body);
    let said = std::fs::read_to_string(home.path().join("proxy.err")).unwrap();
    assert!(
        said.contains("cannot be written") || said.contains("disk is full"),
        "{said}"
    );
    assert!(proxy.try_wait().unwrap().is_none(), "the proxy goes on");
}
