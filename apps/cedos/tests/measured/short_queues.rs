//! The queues of programs that know nothing of Cedos, beside an agent that nobody told anything: short where the network is
//! bloated, and untouched elsewhere. And what the process that does it takes while there is nothing to do.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{
    SHAPED_LINKS_OF_ROOT, in_namespace, in_namespace_with, origin_namespace, received,
    second_device_namespace, sh, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::program::{AgentProcess, cedos, pid_of, run};
use cedos_lab_rig::share::beside_others;
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::{until, within};
use d2tp_session::DrwaLambda;
use d2tp_tcp::{DeviceQueues, ReachBarrier};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::sleep;

/// How long a download is observed; judged by the last half.
const OBSERVED: Duration = Duration::from_secs(12);
/// More than what passes at 4 Mb/s in a few times as long.
const OBJECT_BYTES: usize = 24_000_000;
/// A queue of 600 kB: 1.2 s.
const BLOATED: &str = "tc qdisc replace dev ap0 root tbf rate 4mbit burst 10k latency 1200ms";
/// A queue of 35 kB: 70 ms, which is long for the round trip and noticed by nobody.
const ORDINARY: &str = "tc qdisc replace dev ap0 root tbf rate 4mbit burst 10k latency 50ms";
/// A clamp that no connection has which was never touched: no limit (`edge/tcp/src/sockopt.rs`).
const NO_CLAMP: i32 = 1 << 30;
/// How often a measurement is repeated that the load of the machine decided.
const TRIES_ON_BUSY_MACHINE: usize = 3;

/// What a download beside an agent was like.
#[derive(Clone, Copy, Debug)]
struct ObservedDownload {
    /// The median of handshakes through the same queue.
    handshake: Duration,
    /// Whether somebody moved the window clamp of the connection.
    is_touched: bool,
    /// Bytes that the link carried in the judged time.
    bytes: u64,
}

/// The window clamp of a socket. The kernel moves it upwards, as it grows the buffer, and a little back as it learns how much of
/// that is overhead.
fn window_clamp(stream: &TcpStream) -> i32 {
    let (mut clamp, mut length) = (0i32, 4);
    // SAFETY: the pointers are to a live integer and its length.
    let failed = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_WINDOW_CLAMP,
            (&raw mut clamp).cast(),
            &raw mut length,
        )
    };
    assert_eq!(failed, 0, "{}", std::io::Error::last_os_error());
    clamp
}

/// Downloads by a plain socket, beside handshakes of others.
fn observed_download(origin: SocketAddr) -> ObservedDownload {
    let is_over = AtomicBool::new(false);
    let began = Instant::now();
    thread::scope(|scope| {
        let download = scope.spawn(|| {
            let mut stream = TcpStream::connect(origin).expect("it listens");
            write!(stream, "GET /a HTTP/1.1\r\nHost: o\r\n\r\n").expect("sent");
            let (mut widest, mut is_touched, mut before) = (0, false, None);
            let mut read = vec![0; 65_536];
            while !is_over.load(Ordering::Relaxed) {
                let count = stream.read(&mut read).expect("bytes");
                assert!(count > 0, "the object is too small");
                if began.elapsed() > OBSERVED / 2 {
                    before.get_or_insert_with(|| received("wlan0"));
                }
                let clamp = window_clamp(&stream);
                is_touched |= clamp < widest / 2 || clamp == NO_CLAMP;
                widest = widest.max(clamp);
            }
            let before = before.expect("it took longer than half of the time");
            (is_touched, received("wlan0") - before)
        });
        let handshake = median_handshake(origin);
        is_over.store(true, Ordering::Relaxed);
        let (is_touched, bytes) = download.join().expect("it downloads");
        ObservedDownload {
            handshake,
            is_touched,
            bytes,
        }
    })
}

/// The median of handshakes through the same queue as a download, in the last half of the time.
fn median_handshake(origin: SocketAddr) -> Duration {
    let began = Instant::now();
    let mut handshakes = Vec::new();
    while began.elapsed() < OBSERVED {
        let asked = Instant::now();
        let connected = TcpStream::connect_timeout(&origin, Duration::from_secs(5));
        if connected.is_ok() && began.elapsed() > OBSERVED / 2 {
            handshakes.push(asked.elapsed());
        }
        // sleep: handshakes that do not fill the queue themselves
        thread::sleep(Duration::from_millis(100));
    }
    handshakes.sort();
    handshakes[handshakes.len() / 2]
}

/// An origin behind a router that has this queue. It would keep a queue of its own short itself (TCP Small Queues).
fn origin_behind(queue: &'static str) -> ScriptedOrigin {
    origin_namespace(move || async move {
        sh(queue);
        sh("echo 1 > /proc/sys/net/ipv4/ip_forward");
        second_device_namespace(|| async {
            // It fills queues, and every namespace has it; BBR would keep them short itself.
            sh("echo reno > /proc/sys/net/ipv4/tcp_congestion_control");
            let bytes = object(OBJECT_BYTES, 1);
            let script = move |asked: &OriginRequest| {
                OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
            };
            ScriptedOrigin::start_at("192.0.2.129", script).await
        })
    })
}

/// Whether the processes of this machine reach each other's sockets; a sentence says that they do not.
fn is_within_reach() -> bool {
    let barrier = ReachBarrier::of_this_process();
    if let Some(barrier) = barrier {
        eprintln!("skipped: {barrier}");
    }
    barrier.is_none()
}

#[test]
fn an_agent_that_nobody_told_anything_shortens_the_queue_of_a_bloated_network_unless_it_is_off() {
    if !is_within_reach() {
        return;
    }
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let origin = origin_behind(BLOATED);
        wifi_on("198.51.100.7");
        let without = tempfile::tempdir().expect("a directory");
        let off = ["config", "set", "agent.short_queues", "false"];
        run(without.path(), &off).await.ends_with(0, "changed");
        let agent = AgentProcess::start(without.path()).await;
        let alone = observed_download(origin.address);
        agent.kill().await;
        eprintln!("switched off: {alone:?}");
        assert!(!alone.is_touched, "{alone:?}");
        assert!(alone.handshake > Duration::from_millis(400), "{alone:?}");

        let home = tempfile::tempdir().expect("a directory");
        let agent = AgentProcess::start(home.path()).await;
        for tries_left in (0..TRIES_ON_BUSY_MACHINE).rev() {
            let short = observed_download(origin.address);
            eprintln!("by default: {short:?}");
            assert!(short.is_touched, "{short:?}");
            let is_short = short.handshake < alone.handshake / 4;
            if is_short && short.bytes * 100 >= alone.bytes * 90 {
                break;
            }
            assert!(tries_left > 0, "{short:?}, and {alone:?} without");
        }
        agent.kill().await;
    });
}

#[test]
fn connections_over_a_network_that_is_not_bloated_are_not_touched() {
    if !is_within_reach() {
        return;
    }
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let origin = origin_behind(ORDINARY);
        wifi_on("198.51.100.7");
        let home = tempfile::tempdir().expect("a directory");
        let agent = AgentProcess::start(home.path()).await;
        assert!(queue_keeper(&agent).is_some());
        let ordinary = observed_download(origin.address);
        eprintln!("70 ms of queue: {ordinary:?}");
        assert!(!ordinary.is_touched, "{ordinary:?}");
        assert!(
            ordinary.handshake > Duration::from_millis(20),
            "{ordinary:?}"
        );
        agent.kill().await;
    });
}

/// The process beside the agent that keeps queues short. It is started before the agent says that it is ready.
fn queue_keeper(agent: &AgentProcess) -> Option<u32> {
    let agent = pid_of(&agent.child);
    let children = std::fs::read_to_string(format!("/proc/{agent}/task/{agent}/children")).ok()?;
    let mut children = children.split_whitespace().filter_map(|id| id.parse().ok());
    children.find(|id: &u32| {
        let command = std::fs::read_to_string(format!("/proc/{id}/cmdline"));
        command.is_ok_and(|command| command.contains("--keep-queues-short"))
    })
}

/// How often a process with one thread has waited.
fn waits(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let mut lines = status.lines();
    assert_eq!(
        lines.clone().find(|line| line.starts_with("Threads:")),
        Some("Threads:\t1")
    );
    let count = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count
        .and_then(|count| count.trim().parse().ok())
        .expect("a count")
}

/// A figure of `/proc/PID/smaps_rollup`, in kB.
fn kilobytes(process: u32, name: &str) -> u64 {
    let path = format!("/proc/{process}/smaps_rollup");
    let rollup = std::fs::read_to_string(Path::new(&path)).expect("it runs");
    let mut lines = rollup.lines();
    let figure = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let figure = figure.and_then(|figure| figure.split_whitespace().next()?.parse().ok());
    figure.expect("a figure")
}

#[test]
fn what_keeps_queues_short_hardly_wakes_while_nothing_arrives_and_never_without_a_network() {
    if !is_within_reach() {
        return;
    }
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let _origin = origin_behind(ORDINARY);
        let home = tempfile::tempdir().expect("a directory");
        let agent = AgentProcess::start(home.path()).await;
        let keeper = queue_keeper(&agent).expect("one");
        // sleep: it comes to rest
        sleep(Duration::from_secs(2)).await;
        let before = waits(keeper);
        // sleep: what wakes it while there is no network is counted
        sleep(Duration::from_secs(6)).await;
        assert_eq!(waits(keeper) - before, 0, "there is no network");

        wifi_on("198.51.100.7");
        until("it hears of the network", || waits(keeper) > before).await;
        // sleep: looks become rare
        sleep(Duration::from_secs(10)).await;
        let before = waits(keeper);
        // sleep: what wakes it at rest is counted
        sleep(Duration::from_secs(20)).await;
        let woken = waits(keeper) - before;
        eprintln!(
            "{woken} wakes in 20 s; {} kB of its own, {} kB as its share of all",
            kilobytes(keeper, "Private_Dirty"),
            kilobytes(keeper, "Pss"),
        );
        assert!((1..=6).contains(&woken), "{woken} wakes in 20 s");
        wifi_off();
    });
}

/// The capabilities that a process has, by their numbers (linux/capability.h).
fn capabilities(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    u64::from_str_radix(line.expect("a line").trim(), 16).expect("a number")
}

const CAP_SYS_PTRACE: u64 = 1 << 19;

#[test]
fn a_service_without_a_debuggers_right_shortens_the_queue_of_another_users_program() {
    let _share = beside_others();
    in_namespace_with(SHAPED_LINKS_OF_ROOT, this_test!(), || async {
        if let Err(error) = DeviceQueues::of_all_users(DrwaLambda::default()) {
            eprintln!("skipped: no BPF program can be loaded here: {error}");
            return;
        }
        sh("ip link set lo up; mount -t tmpfs t /run");
        let origin = origin_behind(BLOATED);
        wifi_on("198.51.100.7");
        let home = tempfile::tempdir().expect("a directory");
        let download = || {
            let nobody = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
            let mut curl = Command::new("setpriv");
            let url = origin.url("/a");
            let curl = curl
                .args(nobody)
                .args(["curl", "-s", "-o", "/dev/null", &url]);
            curl.kill_on_drop(true).spawn().expect("start curl")
        };
        let downloading = download();
        let alone = median_handshake(origin.address);
        drop(downloading);
        assert!(alone > Duration::from_millis(400), "{alone:?}");

        let mut service = cedos(home.path(), &["agent", "--short-queues-of-all-users"]);
        let mut service = service.spawn().expect("start the service");
        let mut said = BufReader::new(service.stderr.take().expect("its errors")).lines();
        let line = within(said.next_line())
            .await
            .expect("text")
            .unwrap_or_default();
        assert!(line.contains("for all users"), "{line}");
        let process = service.id().expect("it runs");
        assert_eq!(capabilities(process) & CAP_SYS_PTRACE, 0);
        let _downloading = download();
        let short = median_handshake(origin.address);
        eprintln!("{alone:?} alone, {short:?} beside the service");
        assert!(short < alone / 4, "{short:?}, and {alone:?} without it");

        // Where it runs, an agent does nothing of its own; and there is one of it.
        let agent = AgentProcess::start(home.path()).await;
        assert_eq!(queue_keeper(&agent), None);
        let second = run(home.path(), &["agent", "--short-queues-of-all-users"]).await;
        second.ends_with(1, "another service");

        let threads =
            || std::fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count);
        assert_eq!(threads(), 1);
        sh("ip netns add other");
        until("it is in the other namespace, too", || threads() == 2).await;
        sh("ip netns del other");
        until("it has left the namespace", || threads() == 1).await;
    });
}
