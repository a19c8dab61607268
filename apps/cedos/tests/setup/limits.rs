//! `cedos prox client limit`, `prox status`, `--metrics-listen` and `--access-log`, as programs.

use std::path::{Path, PathBuf};

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, reply};
use cedos_lab_rig::program::{ProxyProcess, at_home, pid_of, run};
use cedos_lab_rig::wait::{until, within};
use nix::sys::signal::{Signal, kill};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Operator, join, proxy_command, start_proxy};

async fn origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|_| {
        let body = vec![7; 200_000];
        let answer = reply("200 OK", &[("content-length", "200000")], &body);
        OriginReply(answer, ReplyEnd::Close)
    })
    .await
}

#[tokio::test]
async fn an_operator_limits_a_client_whose_user_hears_why_and_until_when() {
    let operator = Operator::start().await;
    let (home, origin) = (tempfile::tempdir().unwrap(), origin().await);
    let line = operator.invite(&["--for", "laptop"]).await;
    join(home.path(), &line, &[]).await.ends_with(0, "enrolled");
    let limit = ["prox", "client", "limit", "laptop"];
    let none = operator.run(&limit).await;
    assert_eq!(none.code, 2, "what is to be limited: {}", none.errors);
    let limited = [&limit[..], &["--month", "100k", "--flows", "9", "--json"]].concat();
    let told = operator.run(&limited).await;
    assert_eq!(told.code, 0, "{}", told.errors);
    assert_eq!(told.events[0]["limits"]["month_bytes"], 100_000);
    assert_eq!(told.events[0]["own_limits"]["flows"], 9);

    let url = origin.url("/file");
    let got = run(home.path(), &["get", &url, "-o", "file"]).await;
    assert_eq!(got.code, 1, "{}", got.errors);
    for words in ["has used the 100 kB", "in a month", "00:00 UTC", "operator"] {
        assert!(got.errors.contains(words), "{words}: {}", got.errors);
    }
    let log = std::fs::read_to_string(operator.home.path().join("log")).unwrap();
    assert!(
        log.contains("a limit was reached") && log.contains("client_month"),
        "{log}"
    );
    let shown = operator.run(&["prox", "client", "show", "laptop"]).await;
    let text = String::from_utf8_lossy(&shown.output).into_owned();
    assert!(text.contains("at most 100.00 kB (its own limit)"), "{text}");
    assert!(text.contains("flows: 0 of 9 (its own limit)"), "{text}");
    assert!(text.contains("deadlines: at most 7d\n"), "{text}");

    let reset = operator.run(&[&limit[..], &["--reset"]].concat()).await;
    assert_eq!(reset.code, 0, "{}", reset.errors);
    let got = run(home.path(), &["get", &url, "-o", "file", "--json"]).await;
    got.ends_with(0, "done");
    let clients = operator.clients().await;
    let down = clients[0]["month"]["down_bytes"].as_u64().unwrap();
    assert!(down >= 300_000, "{clients:?}");
    let status = operator.run(&["prox", "status", "--json"]).await;
    assert_eq!(status.events[0]["clients"], 1);
    assert!(
        status.events[0]["cache_bytes"].is_u64(),
        "{:?}",
        status.events
    );
}

/// Asks for the metrics.
async fn metrics(at: &str) -> String {
    let mut stream = TcpStream::connect(at).await.unwrap();
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {at}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    within(stream.read_to_string(&mut answer)).await.unwrap();
    answer
}

#[tokio::test]
async fn a_proxy_serves_metrics_and_writes_an_access_log_that_can_be_rotated() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let more = [
        "--metrics-listen",
        "127.0.0.1:0",
        "--access-log",
        "access.log",
        "--access-log-detail",
        "full",
        "--allow-any-client",
    ];
    let proxy = start_proxy(home, "127.0.0.1:0", &more).await;
    let origin = origin().await;
    let url = origin.url("/file?secret");
    let address = proxy.address.clone();
    let get = ["get", &url, "-o", "file", "--json", "--prox", &address];
    run(home, &get).await.ends_with(0, "done");
    let log = std::fs::read_to_string(home.join("log")).unwrap();
    let line = log
        .lines()
        .find(|line| line.contains("serving metrics"))
        .unwrap();
    let at = line.split("listening=").nth(1).unwrap().trim().to_owned();
    let told = metrics(&at).await;
    assert!(told.contains("application/openmetrics-text"), "{told}");
    for words in [
        "cedos_prox_carried_bytes_total{direction=\"down\",kind=\"fetch\"}",
        "cedos_prox_sessions{state=\"awake\"}",
        "cedos_prox_datagrams_total{direction=\"in\"}",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
    assert!(
        !told.contains("secret") && !told.contains("127.0.0.1"),
        "{told}"
    );
    let path = home.join("access.log");
    until("a line in the access log", || {
        std::fs::read_to_string(&path)
            .unwrap()
            .contains("/file?secret")
    })
    .await;
    std::fs::rename(&path, home.join("access.log.1")).unwrap();
    kill(pid_of(&proxy.child), Signal::SIGHUP).unwrap();
    until("a new file", || path.exists()).await;
}

/// The value of a field in the first line of the log with these words.
fn logged(log: &str, words: &str, field: &str) -> Option<u64> {
    let line = log.lines().find(|line| line.contains(words))?;
    let rest = line.split(&format!("{field}=")).nth(1)?;
    rest.split_whitespace().next()?.parse().ok()
}

/// What a proxy with the options of [`BOUNDED`] takes at most: session memory, twice as much in the kernel, copies, heads
/// of the cache, the program, and the buffers of one UDP socket.
const BOUND: u64 = 3 * (20 << 20) + (10 << 20) + (16 << 20) + (64 << 20) + (16 << 20);
const BOUNDED: [&str; 7] = [
    "--allow-any-client",
    "--session-memory",
    "20MiB",
    "--memory-quota",
    "10MiB",
    "--workers",
    "1",
];
const SMALL_GROUP: &str = "control group of this proxy allows less memory";

#[tokio::test]
async fn one_number_says_how_much_memory_a_proxy_takes() {
    let home = tempfile::tempdir().unwrap();
    let more = [&BOUNDED[..], &["--metrics-listen", "127.0.0.1:0"]].concat();
    let _proxy = start_proxy(home.path(), "127.0.0.1:0", &more).await;
    let log = std::fs::read_to_string(home.path().join("log")).unwrap();
    let bound = logged(&log, "bytes of memory at most", "memory_bound");
    assert_eq!(bound, Some(BOUND), "{log}");
    let line = log.lines().find(|line| line.contains("serving metrics"));
    let at = line.unwrap().split("listening=").nth(1).unwrap().trim();
    let told = metrics(at).await;
    let gauge = format!("cedos_prox_memory_bound_bytes {BOUND}\n");
    assert!(told.contains(&gauge), "{told}");
}

/// A control group with a limit on memory, removed at the end.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// A group of either version; `None` where no group can be made.
    fn new(limit: u64) -> Option<MemoryGroup> {
        let name = format!("cedos-limits-{}-{limit}", std::process::id());
        let kinds = [
            ("/sys/fs/cgroup", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ];
        kinds.into_iter().find_map(|(mount, file)| {
            // A directory of another file system takes any file, and limits nothing.
            if !Path::new(mount).join("cgroup.procs").exists() {
                return None;
            }
            let group = MemoryGroup(Path::new(mount).join(&name));
            std::fs::create_dir(&group.0).ok()?;
            std::fs::write(group.0.join(file), limit.to_string()).ok()?;
            Some(group)
        })
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[tokio::test]
async fn a_control_group_that_is_too_small_for_a_proxy_is_warned_of() {
    const PAGE: u64 = 64 << 10; // the largest of a processor that Linux has: limits are rounded to pages
    for (limit, is_too_small) in [(BOUND - PAGE, true), (BOUND, false)] {
        let Some(group) = MemoryGroup::new(limit) else {
            return eprintln!("skipped: no control group can be made");
        };
        let home = tempfile::tempdir().unwrap();
        let proxy = proxy_command(home.path(), "127.0.0.1:0", &BOUNDED);
        let (proxy, mut command) = (proxy.as_std(), tokio::process::Command::new("sh"));
        command
            .args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""])
            .arg(&group.0)
            .arg(proxy.get_program())
            .args(proxy.get_args());
        at_home(&mut command, home.path());
        let log = std::fs::File::create(home.path().join("log")).unwrap();
        command.stderr(log);
        let mut proxy = ProxyProcess::spawned(&mut command)
            .await
            .expect("it starts");
        let log = std::fs::read_to_string(home.path().join("log")).unwrap();
        assert_eq!(log.contains(SMALL_GROUP), is_too_small, "{log}");
        let group_max = logged(&log, SMALL_GROUP, "group_max");
        assert_eq!(group_max, is_too_small.then_some(limit), "{log}");
        // The group is empty once the process is gone.
        proxy.child.kill().await.unwrap();
    }
}
