//! `cedos prox --upgrade`: a new process takes the running proxy over, in the middle of transfers.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::program::{ProxyProcess, built, cedos, ended, pid_of, run};
use cedos_lab_rig::wait::until;
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

const DEVICES: usize = 8;
const OBJECTS: usize = 5;
const BYTES: usize = 2_000_000;

/// Objects of one size, each with content of its own: `/N`.
async fn origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked| {
        let seed = asked.path.trim_start_matches('/').parse().unwrap();
        let whole = proper(asked, &object(BYTES, seed), "\"v1\"");
        OriginReply(whole, ReplyEnd::Close)
    })
    .await
}

/// The options of a proxy with its state beside the test.
pub fn proxy_arguments(listen: &str) -> [&str; 8] {
    [
        "prox",
        "--listen",
        listen,
        "--state-dir",
        "proxy",
        "--allow-private",
        "--allow-any-client",
        "--log=json",
    ]
}

/// A proxy that logs into a file.
pub async fn proxy(directory: &Path, listen: &str, more: &[&str], log: &str) -> ProxyProcess {
    let arguments = [&proxy_arguments(listen)[..], more].concat();
    let mut command = cedos(directory, &arguments);
    command.stderr(std::fs::File::create(directory.join(log)).unwrap());
    let started = ProxyProcess::spawned(&mut command).await;
    started.unwrap_or_else(|| panic!("{}", said(directory, log)))
}

fn said(directory: &Path, log: &str) -> String {
    std::fs::read_to_string(directory.join(log)).unwrap()
}

/// Lines of a JSON log with this message.
pub fn logged(directory: &Path, log: &str, message: &str) -> Vec<Value> {
    let text = said(directory, log);
    let lines = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    let lines = lines.filter(|line: &Value| line["message"] == message);
    lines.collect()
}

/// A device in a directory of its own, with a process that downloads these objects at this rate.
pub fn device(home: &Path, proxy: &str, urls: &[String], rate: &str) -> Child {
    std::fs::create_dir_all(home).unwrap();
    std::fs::write(home.join("list"), urls.join("\n")).unwrap();
    let arguments = [
        "get",
        "-i",
        "list",
        "--json",
        "--limit-rate",
        rate,
        "--prox",
        proxy,
    ];
    cedos(home, &arguments).spawn().unwrap()
}

/// The bytes of downloads in a device's directory.
pub fn part_bytes(home: &Path) -> u64 {
    let entries = std::fs::read_dir(home).unwrap().flatten();
    let files = entries.filter(|entry| entry.file_name() != "list");
    let lengths = files.filter_map(|entry| entry.metadata().ok().filter(|m| m.is_file()));
    lengths.map(|found| found.len()).sum()
}

/// Devices in the middle of their downloads.
struct Fleet {
    homes: Vec<PathBuf>,
    devices: Vec<Child>,
}

impl Fleet {
    async fn start(directory: &Path, origin: &ScriptedOrigin, proxy: &str) -> Fleet {
        let homes: Vec<_> = (0..DEVICES)
            .map(|n| directory.join(format!("device{n}")))
            .collect();
        let urls = |n: usize| -> Vec<String> {
            (0..OBJECTS)
                .map(|object| origin.url(&format!("/{}", n * OBJECTS + object)))
                .collect()
        };
        let devices = homes.iter().enumerate();
        let devices = devices.map(|(n, home)| device(home, proxy, &urls(n), "2M"));
        let fleet = Fleet {
            devices: devices.collect(),
            homes,
        };
        until("every device receives", || {
            fleet.homes.iter().all(|home| part_bytes(home) > 200_000)
        })
        .await;
        fleet
    }

    /// Asserts that every download is whole, and that the origin was asked for each once.
    async fn assert_whole(self, origin: &ScriptedOrigin) {
        for device in self.devices {
            let ran = ended(device).await;
            assert_eq!(ran.code, 0, "{} {:#?}", ran.errors, ran.events.last());
        }
        for (n, home) in self.homes.iter().enumerate() {
            for number in n * OBJECTS..(n + 1) * OBJECTS {
                let got = std::fs::read(home.join(number.to_string())).unwrap();
                assert!(got == object(BYTES, number as u32), "object {number}");
            }
        }
        let requests = origin.requests();
        let mut whole: Vec<_> = requests
            .iter()
            .filter(|r| r.range_from().is_none())
            .collect();
        assert_eq!(whole.len(), DEVICES * OBJECTS, "{requests:#?}");
        whole.sort_by_key(|request| &request.path);
        whole.dedup_by_key(|request| &request.path);
        assert_eq!(
            whole.len(),
            DEVICES * OBJECTS,
            "the origin is asked for nothing twice"
        );
        for rest in requests.iter().filter(|r| r.range_from().is_some()) {
            eprintln!("a half-fetched copy goes on from {:?}", rest.range_from());
            assert!(rest.range_from() > Some(0), "{rest:?}");
        }
    }
}

async fn downloads_are_taken_over(workers: &str) {
    let workers = ["--workers", workers];
    let directory = tempfile::tempdir().unwrap();
    let origin = origin().await;
    let mut old = proxy(directory.path(), "127.0.0.1:0", &workers, "old.log").await;
    let fleet = Fleet::start(directory.path(), &origin, &old.address).await;
    let began = Instant::now();
    let new = proxy(
        directory.path(),
        old.listens_at(),
        &["--workers", workers[1], "--upgrade"],
        "new.log",
    )
    .await;
    assert_eq!(new.address, old.address);
    eprintln!("the new process served after {:?}", began.elapsed());
    let status = tokio::time::timeout(PATIENCE, old.child.wait()).await;
    assert!(status.expect("the old process ends").unwrap().success());
    fleet.assert_whole(&origin).await;
    let restored = logged(
        directory.path(),
        "new.log",
        "sessions restored from the journal",
    );
    let sessions: u64 = (restored.iter())
        .filter_map(|line| line["sessions"].as_u64())
        .sum();
    eprintln!("{sessions} sessions were in the middle");
    assert!(sessions >= DEVICES as u64, "{sessions}");
}

#[tokio::test]
async fn a_new_process_takes_running_downloads_over_and_the_origin_is_asked_for_nothing_twice() {
    downloads_are_taken_over("1").await;
}

#[tokio::test]
async fn the_sockets_of_several_workers_are_taken_over() {
    downloads_are_taken_over("2").await;
}

#[tokio::test]
async fn a_request_that_waits_for_its_origin_is_not_sent_again() {
    let directory = tempfile::tempdir().unwrap();
    let origin = ScriptedOrigin::play(|asked, mut stream| async move {
        // sleep: the origin takes longer than a proxy needs to record a flow that has its answer
        tokio::time::sleep(Duration::from_millis(1_200)).await;
        let whole = proper(&asked, &object(BYTES, 1), "\"v1\"");
        // The client may have closed the connection.
        let _ = stream.write_all(&whole).await;
    })
    .await;
    let old = proxy(directory.path(), "127.0.0.1:0", &[], "old.log").await;
    let home = directory.path().join("device");
    let device = device(&home, &old.address, &[origin.url("/1")], "2M");
    until("the origin is asked", || !origin.requests().is_empty()).await;
    let new = proxy(
        directory.path(),
        old.listens_at(),
        &["--upgrade"],
        "new.log",
    )
    .await;
    assert_eq!(new.address, old.address);
    let ran = ended(device).await;
    assert_eq!(ran.code, 0, "{} {:#?}", ran.errors, ran.events.last());
    assert!(std::fs::read(home.join("1")).unwrap() == object(BYTES, 1));
    let whole = origin.requests();
    let whole = whole.iter().filter(|r| r.range_from().is_none());
    assert_eq!(whole.count(), 1, "{:#?}", origin.requests());
}

/// A proxy on both families with this many workers is taken over, and serves.
async fn many_workers_are_taken_over(workers: &str) {
    let directory = tempfile::tempdir().unwrap();
    let origin = origin().await;
    let arguments = ["--workers", workers, "--public-host", "127.0.0.1"];
    let mut old = proxy(directory.path(), "[::]:0", &arguments, "old.log").await;
    let port = old.listens_at().rsplit_once(':').unwrap().1.to_owned();
    let new = proxy(
        directory.path(),
        &format!("[::]:{port}"),
        &[&arguments[..], &["--upgrade"]].concat(),
        "new.log",
    )
    .await;
    assert_eq!(new.address, old.address);
    let status = tokio::time::timeout(PATIENCE, old.child.wait()).await;
    assert!(status.expect("the old process ends").unwrap().success());
    let urls = [origin.url("/1")];
    let ran = ended(device(
        &directory.path().join("device"),
        &new.address,
        &urls,
        "2M",
    ))
    .await;
    assert_eq!(ran.code, 0, "{} {:#?}", ran.errors, ran.events.last());
    for line in [
        "a socket that was passed is not used: no option names its address",
        "serving one address family only",
    ] {
        assert!(
            logged(directory.path(), "new.log", line).is_empty(),
            "{line}"
        );
    }
}

#[tokio::test]
async fn the_sockets_of_nine_workers_on_both_families_are_taken_over() {
    many_workers_are_taken_over("9").await;
}

#[tokio::test]
async fn the_sockets_of_110_workers_are_taken_over_in_several_messages() {
    many_workers_are_taken_over("110").await;
}

#[tokio::test]
async fn a_new_process_that_cannot_serve_leaves_the_old_one_serving() {
    let directory = tempfile::tempdir().unwrap();
    let origin = origin().await;
    let mut old = proxy(directory.path(), "127.0.0.1:0", &[], "old.log").await;
    let fleet = Fleet::start(directory.path(), &origin, &old.address).await;
    // Options that make no sense: the old process does not even pause.
    std::fs::write(directory.path().join("bad.toml"), "client_flows_mx = 3\n").unwrap();
    let mistaken = [
        &proxy_arguments(old.listens_at())[..],
        &["--upgrade", "--config", "bad.toml"],
    ]
    .concat();
    let refused = run(directory.path(), &mistaken).await;
    assert_ne!(refused.code, 0);
    assert!(logged(directory.path(), "old.log", "a new process takes over").is_empty());
    // It dies when the old one has left: that one serves again.
    let dies = cedos(directory.path(), &mistaken[..8])
        .args(["--upgrade", "--qlog", "/proc/nowhere"])
        .output()
        .await
        .unwrap();
    assert!(!dies.status.success());
    until("the old process serves again", || {
        !logged(
            directory.path(),
            "old.log",
            "the new process failed; this one serves again",
        )
        .is_empty()
    })
    .await;
    fleet.assert_whole(&origin).await;
    assert!(old.child.try_wait().unwrap().is_none(), "the same process");
}

#[tokio::test]
async fn sockets_that_systemd_passes_hold_what_devices_send_while_the_proxy_restarts() {
    let program = Path::new("/usr/bin/systemd-socket-activate");
    if !program.exists() {
        eprintln!("skipped: no systemd-socket-activate");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let origin = origin().await;
    let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = free.local_addr().unwrap().to_string();
    drop(free);
    // systemd's own tool listens, and starts the program with the sockets at the first datagram. A shell
    // starts the proxy again on the same sockets when it ends.
    let script = "while true; do export LISTEN_PID=; \
                  sh -c 'export LISTEN_PID=$$; exec \"$0\" \"$@\"' \"$@\" 2>> prox.log || exit 1; done";
    let mut holder = Command::new(program);
    holder.args(["--datagram", "--listen", &listen, "sh", "-c", script, "sh"]);
    holder.arg(built("cedos")).args(proxy_arguments(&listen));
    cedos_lab_rig::program::at_home(&mut holder, directory.path());
    holder.stderr(Stdio::null()).process_group(0);
    let mut holder = holder.spawn().unwrap();
    let group = pid_of(&holder);
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    let knock = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut first = None;
    while first.is_none() {
        let _ = knock.send_to(b"x", &listen);
        let line = tokio::time::timeout(Duration::from_millis(200), lines.next_line()).await;
        first = line.ok().and_then(|line| line.unwrap());
    }
    let address = first.unwrap();
    assert!(address.contains(&listen), "{address}");
    let fleet = Fleet::start(directory.path(), &origin, &address).await;
    let proxy = || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let mut found = processes.filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let pid = nix::unistd::Pid::from_raw(pid);
            let command = std::fs::read(entry.path().join("cmdline")).ok()?;
            let is_ours = nix::unistd::getpgid(Some(pid)).ok()? == group;
            (is_ours && command.starts_with(built("cedos").as_os_str().as_encoded_bytes()))
                .then_some(pid)
        });
        found.next()
    };
    kill(proxy().expect("it runs"), Signal::SIGTERM).unwrap();
    let again = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    assert_eq!(again.unwrap().unwrap().unwrap(), address);
    fleet.assert_whole(&origin).await;
    nix::sys::signal::killpg(group, Signal::SIGKILL).unwrap();
}
