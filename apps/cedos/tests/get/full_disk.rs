//! A proxy whose disk is really full: a small tmpfs of its own. It says so, the device says why it
//! waits, and once there is room the download comes to its end by itself.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::program::{ProxyProcess, at_home, built, cedos, device_key};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const SIZE: usize = 3_000_000;
const DISK: &str = "8m";

/// A proxy in a mount namespace where `state` is a file system of eight megabytes, and its address.
/// None where such a thing is forbidden.
async fn proxy(home: &Path) -> Option<ProxyProcess> {
    let client = device_key(home).await;
    std::fs::create_dir(home.join("state")).unwrap();
    let script = format!(
        "mount -t tmpfs -o size={DISK} none state && exec {} prox --listen 127.0.0.1:0 \
         --state-dir state --allow-private --allow-client {client} 2> proxy.err",
        built("cedos").display(),
    );
    let mut command = Command::new("unshare");
    at_home(command.args(["-rm", "sh", "-c", &script]), home).stderr(Stdio::null());
    ProxyProcess::spawned(&mut command).await
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
    let Some(ProxyProcess {
        child: mut proxy,
        address,
    }) = proxy(home.path()).await
    else {
        eprintln!("NOT TRIED: no mount namespace, or no tmpfs in it, is allowed here");
        return;
    };
    let body = object(SIZE, 4);
    let served = body.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        OriginReply(proper(asked, &served, "\"v1\""), ReplyEnd::Close)
    })
    .await;
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
            let text = last["text"].as_str().unwrap_or_default();
            assert!(!text.contains("without a network"), "{text}");
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
