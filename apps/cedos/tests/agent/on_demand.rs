//! An agent that nobody started: verbs start it, systemd hands it a socket, and it exits when it has nothing
//! to do.

use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper};
use cedos_lab_rig::program::{self, CedosRun, ended};
use cedos_lab_rig::wait::{until_async, within};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::Command;

const BYTES: usize = 400_000;

/// A home without an agent, in which verbs may start one. It ends with this.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Home {
        Home(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn socket(&self) -> PathBuf {
        self.path().join("run/agent.sock")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program::cedos(self.path(), arguments);
        command.env("CEDOS_AGENT", self.socket());
        command
    }

    async fn run(&self, arguments: &[&str]) -> CedosRun {
        ended(self.command(arguments).spawn().expect("start cedos")).await
    }

    /// The process of the agent that answers; none if there is none.
    async fn agent(&self) -> Option<Pid> {
        let mut stream = UnixStream::connect(self.socket()).await.ok()?;
        stream.write_all(b"{\"do\":\"hello\"}\n").await.ok()?;
        let line = BufReader::new(stream).lines().next_line().await.ok()??;
        let told: Value = serde_json::from_str(&line).ok()?;
        Some(Pid::from_raw(told["pid"].as_i64()? as i32))
    }

    async fn until_gone(&self, pid: Pid) {
        within(async {
            while kill(pid, None).is_ok() {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Its number is in the lock of the transfers.
        let lock = self.path().join(".state/cedos/get/lock");
        let pid = std::fs::read_to_string(lock).unwrap_or_default();
        if let Ok(pid) = pid.trim().parse() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// An origin that gives half of an object, and the rest once the flag is set.
async fn halting(open: Arc<AtomicBool>) -> ScriptedOrigin {
    ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &object(BYTES, 1), "\"v1\"");
        match (open.load(Ordering::Relaxed), asked.range_from()) {
            (true, _) => OriginReply(answer, ReplyEnd::Close),
            (false, None) => OriginReply(cut(answer, BYTES / 2), ReplyEnd::Silence),
            (false, Some(_)) => OriginReply(Vec::new(), ReplyEnd::Close),
        }
    })
    .await
}

#[tokio::test]
async fn a_download_that_is_left_starts_the_agent_and_wait_finds_it() {
    let origin = halting(Arc::new(AtomicBool::new(true))).await;
    let home = Home::new();
    let left = home
        .run(&["get", "--detach", "--json", "-o", "out", &origin.url("/a")])
        .await;
    assert_eq!(left.code, 0, "{}", left.errors);
    assert_eq!(left.last()["agent"], true, "{}", left.last());
    let waited = home.run(&["wait"]).await;
    assert_eq!(waited.code, 0, "{}", waited.errors);
    assert!(std::fs::read(home.path().join("out")).expect("the file") == object(BYTES, 1));
    let mode = std::fs::metadata(home.socket())
        .expect("a socket")
        .permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    // It leads a session of its own: the end of this terminal does not reach it.
    let pid = home.agent().await.expect("an agent");
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields = stat.rsplit(')').next().expect("fields");
    assert_eq!(fields.split(' ').nth(4), Some(pid.to_string().as_str()));
}

#[tokio::test]
async fn after_kill_9_a_verb_starts_the_next_agent_and_the_queue_goes_on() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let home = Home::new();
    let get = [
        "get",
        "--detach",
        "-o",
        "out",
        "--stall",
        "1s",
        &origin.url("/a"),
    ];
    home.run(&get).await.ends_with(0, "carries out download 1");
    let pid = home.agent().await.expect("an agent");
    kill(pid, Signal::SIGKILL).expect("send");
    home.until_gone(pid).await;
    home.run(&["why", "1"])
        .await
        .ends_with(0, "`cedos wait 1` starts it");
    home.run(&["pause", "1"]).await.ends_with(0, "#1");
    let next = home.agent().await.expect("another agent");
    assert_ne!(next, pid);
    open.store(true, Ordering::Relaxed);
    home.run(&["resume", "1"]).await.ends_with(0, "#1");
    let waited = home.run(&["wait", "1"]).await;
    assert_eq!(waited.code, 0, "{}", waited.errors);
    assert!(std::fs::read(home.path().join("out")).expect("the file") == object(BYTES, 1));
}

#[tokio::test]
async fn pause_answers_when_the_transfer_has_stopped_and_what_runs_carried_adds_up() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let home = Home::new();
    let url = origin.url("/a");
    let get = ["get", "--detach", "-o", "out", &url];
    home.run(&get).await.ends_with(0, "carries out download 1");
    let half = async || {
        let shown = home.run(&["status", "1", "--json"]).await;
        (shown.last()["bytes"] == BYTES / 2).then_some(())
    };
    until_async("half of it is there", half).await;
    home.run(&["pause", "1"]).await.ends_with(0, "PAUSED");
    open.store(true, Ordering::Relaxed);
    let resumed = home.run(&["resume", "1"]).await;
    assert!(
        !String::from_utf8_lossy(&resumed.output).contains("QUEUED"),
        "{resumed:?}"
    );
    home.run(&["wait", "1"])
        .await
        .ends_with(0, "from an earlier run");
    let status = home.run(&["status", "1", "--json"]).await;
    let event = &status.last()["last"];
    let carried = |field: &str| event[field]["lo"].as_u64().expect("bytes of lo");
    assert!(carried("bytes_by_link") < BYTES as u64, "{event}");
    assert!(carried("carried_by_link") >= BYTES as u64, "{event}");
}

#[tokio::test]
async fn verbs_at_the_same_time_start_one_agent() {
    let home = Home::new();
    let verbs: Vec<_> = (0..6)
        .map(|_| home.command(&["budget", "--json"]).spawn().expect("start"))
        .collect();
    for child in verbs {
        let run = ended(child).await;
        assert_eq!(run.code, 0, "{}", run.errors);
    }
    let log = home.path().join(".state/cedos/agent.log");
    let log = std::fs::read_to_string(log).expect("its log");
    assert_eq!(log.matches("ready at").count(), 1, "{log}");
    assert!(!log.contains("already running"), "{log}");
}

#[tokio::test]
async fn an_agent_that_cannot_start_says_why_and_a_download_goes_on_without_it() {
    let origin = halting(Arc::new(AtomicBool::new(true))).await;
    let home = Home::new();
    // A file lies where the folder of the socket has to be.
    std::fs::write(home.path().join("run"), "").expect("written");
    let refused = home.run(&["budget"]).await;
    refused.ends_with(1, "the agent is not running and cannot be started");
    refused.ends_with(1, "cannot make");
    let left = home
        .run(&["get", "--detach", "-o", "out", &origin.url("/a")])
        .await;
    left.ends_with(0, "note: the agent is not running");
    left.ends_with(0, "Download 1 runs in the background");
    home.run(&["wait", "1"]).await.ends_with(0, "DONE");
    std::fs::remove_file(home.path().join("run")).expect("removed");
    std::fs::create_dir_all(home.path().join(".config/cedos")).expect("a folder");
    std::fs::write(
        home.path().join(".config/cedos/config.toml"),
        "nonsense = 1",
    )
    .expect("written");
    // Settings that make no sense are a mistake of the command line's kind.
    home.run(&["budget"]).await.ends_with(2, "nonsense");
}

#[tokio::test]
async fn an_agent_with_nothing_to_do_exits_and_one_with_a_transfer_does_not() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let home = Home::new();
    let mut agent = home
        .command(&["agent", "--exit-when-idle=700ms"])
        .spawn()
        .expect("start the agent");
    let mut lines = BufReader::new(agent.stderr.take().expect("its errors")).lines();
    within(lines.next_line()).await.expect("text");
    // On a busy machine the next program may need longer to start than an idle agent waits.
    let held = UnixStream::connect(home.socket())
        .await
        .expect("it listens");
    let get = [
        "get",
        "--detach",
        "--json",
        "-o",
        "out",
        "--stall",
        "1s",
        &origin.url("/a"),
    ];
    let left = home.run(&get).await;
    assert_eq!(left.code, 0, "{}", left.errors);
    drop(held);
    // sleep: that it stays while a transfer waits is the subject
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert!(agent.try_wait().expect("a status").is_none(), "it has work");
    open.store(true, Ordering::Relaxed);
    let status = within(agent.wait()).await.expect("a status");
    assert!(status.success(), "{status}");
    assert!(!home.socket().exists());
    assert!(std::fs::read(home.path().join("out")).expect("the file") == object(BYTES, 1));
}

#[tokio::test]
async fn an_agent_takes_the_socket_that_systemd_hands_over_and_leaves_it_there() {
    let home = Home::new();
    std::fs::create_dir(home.path().join("run")).expect("a folder");
    let socket = std::os::unix::net::UnixListener::bind(home.socket()).expect("bind");
    // As with systemd, the connection is there before the agent is, which has no time to be idle before it.
    let asks = home.command(&["budget", "--json"]).spawn();
    let asks = asks.expect("start cedos");
    // As systemd does: descriptor 3, and the number of the process that it is for (sd_listen_fds(3)).
    let agent = program::built("cedos");
    let script = r#"exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$1" agent --exit-when-idle=300ms"#;
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(agent);
    let mut command = program::at_home(&mut command, home.path())
        .env_remove("CEDOS_AGENT")
        .stdin(
            socket
                .try_clone()
                .map(std::os::fd::OwnedFd::from)
                .expect("a copy"),
        )
        .spawn()
        .expect("start the agent");
    let waiting = ended(asks).await;
    assert_eq!(waiting.code, 0, "{}", waiting.errors);
    assert!(socket.as_raw_fd() >= 0);
    let status = within(command.wait()).await.expect("a status");
    assert!(status.success(), "{status}");
    assert!(home.socket().exists(), "it is systemd's");
    assert!(
        !home.path().join(".state/cedos/agent.log").exists(),
        "no second one was started"
    );
}

#[tokio::test]
async fn several_transfers_are_named_at_once_and_each_fault_is_said() {
    let origin = halting(Arc::default()).await;
    let home = Home::new();
    for name in ["a", "b", "c"] {
        let get = [
            "get",
            "--detach",
            "-o",
            name,
            "--stall",
            "1s",
            &origin.url("/a"),
        ];
        home.run(&get).await.ends_with(0, "carries out download");
    }
    let paused = home.run(&["pause", "1", "9", "2", "--json"]).await;
    paused.ends_with(1, "cedos pause: there is no transfer 9");
    let ids: Vec<_> = paused
        .events
        .iter()
        .map(|told| told["id"].as_u64())
        .collect();
    assert_eq!(ids, [Some(1), Some(2)]);
    home.run(&["resume", "1", "2"]).await.ends_with(0, "#2");
    home.run(&["cancel", "1", "2", "3"])
        .await
        .ends_with(0, "#3 c");
    let waited = home.run(&["wait", "1", "3"]).await;
    assert_eq!(waited.code, 3, "{}", waited.errors);
    home.run(&["cancel", "1", "2"])
        .await
        .ends_with(1, "transfer 2 has ended");
    home.run(&["retry", "3"]).await.ends_with(0, "#3");

    // What has ended is forgotten, and nothing else; its number is not given again.
    home.run(&["ls", "--clear"])
        .await
        .ends_with(0, "Removed from the list: 2");
    let listed = home.run(&["ls", "--json"]).await;
    let ids: Vec<_> = listed
        .events
        .iter()
        .map(|told| told["id"].as_u64())
        .collect();
    assert_eq!(ids, [Some(3)], "{:?}", listed.events);
    home.run(&["status", "1"])
        .await
        .ends_with(1, "there is no transfer 1");
    assert!(!home.path().join(".state/cedos/get/1").exists());
    home.run(&["cancel", "3"]).await.ends_with(0, "#3");
    let pid = home.agent().await.expect("an agent");
    kill(pid, Signal::SIGTERM).expect("send");
    home.until_gone(pid).await;
    home.run(&["ls", "--clear"])
        .await
        .ends_with(0, "Removed from the list: 1");
    home.run(&["ls", "--clear"])
        .await
        .ends_with(0, "the list stays as it is");
    let get = [
        "get",
        "--detach",
        "-o",
        "d",
        "--stall",
        "1s",
        &origin.url("/a"),
    ];
    home.run(&get).await.ends_with(0, "carries out download 4");
}
