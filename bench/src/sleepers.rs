//! `cedos-bench sleepers`: what sleeping downloads cost D2Prox, with an object behind each.
//!
//! ```text
//!  origin ◀── GET /N ── cedos prox ◀── GET, the first bytes, sleep ── N devices, each with its own key
//!                          │  resident memory and disk with all asleep
//!                          ◀── some at random wake: every byte is compared
//!                          ✗ SIGKILL, a new process: time until it answers and knows all; others wake
//! ```
//!
//! Everything is by real exchanges: each device has a handshake, a request, and a private object that D2Prox fetches from
//! the origin and stores. A wake must come from the stored object: the origin counts what is requested twice.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use cedos_terminal::{print_stderr, print_stdout};
use d2tp_driver::ServerAddress;
use d2tp_session::{
    FlowError, FlowOptions, HybridPolicy, PublicKey, ReadOutcome, ReasonCode, SessionEvent,
    SessionState,
};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::handshake_hosts::{
    DEADLINE, HandshakeHosts, READ_BEFORE_BYTES, content, flow_id, key_of,
};
use crate::hostile::find_program;

/// Sockets of all devices together.
const SOCKETS: usize = 8;
/// Devices handled at once.
const AT_ONCE: usize = 64;
/// How long a device may take before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long the proxy may take until all devices that said so are asleep, and to know all after a crash.
const SETTLED_WITHIN: Duration = Duration::from_secs(300);
/// Progress is printed after so many devices.
const NOTE_EVERY: u64 = 50_000;

/// Options of `bench sleepers`.
#[derive(clap::Args)]
pub struct SleepersOptions {
    /// Sleeping downloads, each of its own device
    #[arg(long, default_value_t = 1_000_000)]
    flows: u64,
    /// Bytes of each object
    #[arg(long, default_value_t = 8 * 1024)]
    object_bytes: u64,
    /// Devices, chosen at random, that wake before the crash, and as many after it
    #[arg(long, default_value_t = 1_000)]
    wake: usize,
    /// Seconds from when all are asleep until memory is measured: the proxy gives free memory back some seconds after
    /// many have fallen asleep, and again after the last ones
    #[arg(long, default_value_t = 12.0)]
    settle_s: f64,
    /// The program `cedos` [default: the one in this program's folder]
    #[arg(long)]
    cedos: Option<PathBuf>,
    /// The directory for the proxy's state during the run, on a disk; a temporary directory by default
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The seed of the random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object on standard output instead of text
    #[arg(long)]
    json: bool,
}

/// The results of `bench sleepers`.
#[derive(Debug, Default, Serialize)]
struct SleepersOutcome {
    flows: u64,
    object_bytes: u64,
    /// Resident memory of the proxy before the first device.
    rss_bytes_empty: u64,
    /// Resident memory with all devices asleep, and the most until then.
    rss_bytes: u64,
    rss_bytes_max: u64,
    /// What the memory grew by, divided by the number of devices.
    bytes_per_flow: f64,
    /// Allocated bytes of the state directory, and of the journal in it.
    disk_bytes: u64,
    journal_bytes: u64,
    /// Devices that fell asleep in a second, both ends on this machine.
    fill_per_s: f64,
    woken: WakeFigures,
    crash: CrashFigures,
    /// Objects that the origin was asked for more than once.
    requested_twice: u64,
}

/// Devices that woke.
#[derive(Debug, Default, Serialize)]
struct WakeFigures {
    devices: u64,
    /// Devices that read the rest of their object, with the right bytes.
    ok: u64,
    first_byte_p50_ms: f64,
    first_byte_p99_ms: f64,
}

/// A proxy that was killed and started again.
#[derive(Debug, Default, Serialize)]
struct CrashFigures {
    /// From the kill until the new process listens.
    listening_s: f64,
    /// From the kill until it knows all sleeping downloads.
    all_known_s: f64,
    rss_bytes: u64,
    woken: WakeFigures,
}

/// What a device keeps while it sleeps.
struct SleepingDevice {
    record: Vec<u8>,
    /// Bytes of the response's head, which the flow's offsets count.
    head_bytes: u64,
}

/// Measures and prints.
///
/// # Errors
/// A process or the disk fails.
pub fn run(options: &SleepersOptions) -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let dir = options.dir.as_deref().unwrap_or(temporary.path());
    let outcome = measure(options, dir)?;
    if options.json {
        print_stdout(&serde_json::to_string(&outcome)?);
    } else {
        print_stdout(&serde_json::to_string_pretty(&outcome)?);
    }
    Ok(())
}

fn note(what: &str) {
    print_stderr(&format!("sleepers: {what}"));
}

fn measure(options: &SleepersOptions, dir: &Path) -> Result<SleepersOutcome> {
    ensure!(
        options.object_bytes >= READ_BEFORE_BYTES,
        "--object-bytes is at least {READ_BEFORE_BYTES}: each device reads so much before it sleeps"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let origin = CountingOrigin::start(&runtime, options)?;
    let start = ProxyStart {
        program: find_program(options.cedos.as_ref())?,
        dir: dir.to_owned(),
        flows: options.flows,
        disk_bytes: options.flows.saturating_mul(options.object_bytes) * 2,
    };
    std::fs::write(start.settings(), start.settings_text())?;
    let proxy = start.start(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    let mut outcome = SleepersOutcome {
        flows: options.flows,
        object_bytes: options.object_bytes,
        rss_bytes_empty: proxy.memory("VmRSS:"),
        ..SleepersOutcome::default()
    };
    let mut crowd = HandshakeHosts::new(proxy.address, proxy.key, SOCKETS, HybridPolicy::Offered)?;
    let mut devices = HashMap::new();
    let begun = Instant::now();
    fall_asleep(&mut crowd, &origin, options, &mut devices)?;
    outcome.fill_per_s = options.flows as f64 / begun.elapsed().as_secs_f64();
    proxy.until_asleep(options.flows)?;
    std::thread::sleep(Duration::from_secs_f64(options.settle_s));
    outcome.rss_bytes = proxy.memory("VmRSS:");
    outcome.rss_bytes_max = proxy.memory("VmHWM:");
    let grown = outcome.rss_bytes.saturating_sub(outcome.rss_bytes_empty);
    outcome.bytes_per_flow = grown as f64 / options.flows as f64;
    outcome.disk_bytes = allocated(&start.state_dir())?;
    outcome.journal_bytes = std::fs::read_dir(start.state_dir())?
        .filter_map(|entry| entry.ok()?.metadata().ok())
        .filter(std::fs::Metadata::is_file)
        .map(|file| file.blocks() * 512)
        .sum();

    let mut chosen: Vec<u64> = (0..options.flows).collect();
    chosen.shuffle(&mut rand::rngs::StdRng::seed_from_u64(options.seed));
    let (first, rest) = chosen.split_at(options.wake.min(chosen.len()));
    note(&format!("{} wake", first.len()));
    outcome.woken = wake(&mut crowd, &devices, options.object_bytes, first)?;

    let left = options.flows - first.len() as u64;
    note("a crash");
    let address = proxy.address;
    let killed = Instant::now();
    drop(proxy);
    let proxy = start.start(address)?;
    outcome.crash.listening_s = killed.elapsed().as_secs_f64();
    proxy.until_asleep(left)?;
    outcome.crash.all_known_s = killed.elapsed().as_secs_f64();
    outcome.crash.rss_bytes = proxy.memory("VmRSS:");
    let some = &rest[..options.wake.min(rest.len())];
    outcome.crash.woken = wake(&mut crowd, &devices, options.object_bytes, some)?;
    outcome.requested_twice = origin.requested_twice();
    Ok(outcome)
}

/// Each device opens its flow, sends its request, reads the first part, and sleeps with notice.
fn fall_asleep(
    crowd: &mut HandshakeHosts,
    origin: &CountingOrigin,
    options: &SleepersOptions,
    devices: &mut HashMap<u64, SleepingDevice>,
) -> Result<()> {
    let mut left = 0..options.flows;
    let mut under_way: HashMap<usize, (Instant, Vec<u8>)> = HashMap::new();
    let mut told = Vec::new();
    loop {
        while under_way.len() < AT_ONCE
            && let Some(number) = left.next()
        {
            if number > 0 && number.is_multiple_of(NOTE_EVERY) {
                note(&format!("{number} asleep"));
            }
            let deadline = crowd.now() + DEADLINE;
            let request = origin.request(number);
            let place = crowd.begin(number, key_of(number), |s| {
                let options = FlowOptions {
                    hibernates: true,
                    deadline: Some(deadline),
                    ..FlowOptions::default()
                };
                let id = s.open(options).expect("its first flow");
                s.write(id, request).expect("an open flow");
                s.finish(id).expect("an open flow");
            });
            under_way.insert(place, (Instant::now(), Vec::new()));
        }
        if under_way.is_empty() {
            return Ok(());
        }
        crowd.turn(Duration::from_millis(5), &mut told)?;
        for (place, event) in told.drain(..) {
            let is_suspended = matches!(event, SessionEvent::Suspended(_));
            if let Some((_, bytes)) = is_suspended.then(|| under_way.remove(&place)).flatten() {
                let now = crowd.now();
                let host = crowd.host(place).context("it is there")?;
                let number = host.number;
                let device = SleepingDevice {
                    record: host.hibernate(now)?,
                    head_bytes: head_of(number, &bytes)?,
                };
                devices.insert(number, device);
                crowd.drop_host(place);
            }
        }
        let now = crowd.now();
        for (place, (_, bytes)) in &mut under_way {
            let place = *place;
            let Some(host) = crowd.host(place) else {
                continue;
            };
            let is_ready = host.with(|s| {
                let missing = READ_BEFORE_BYTES as usize - bytes.len();
                // The window is no larger: the rest stays at the proxy.
                if missing > 0
                    && let Ok(ReadOutcome::Chunk(piece)) = s.read(flow_id(), missing)
                {
                    bytes.extend_from_slice(&piece);
                }
                bytes.len() as u64 == READ_BEFORE_BYTES
                    && s.is_flushed(flow_id())
                    && s.state() == SessionState::Established
            });
            if is_ready == Some(true) {
                host.with(|s| s.suspend(now, ReasonCode::UserPaused));
                crowd.pump(place, now);
            }
        }
        let is_late = |(begun, bytes): &&(Instant, Vec<u8>)| {
            let late = begun.elapsed() > PATIENCE;
            if late {
                note(&format!("it read {:?}", String::from_utf8_lossy(bytes)));
            }
            late
        };
        let late = under_way.values().any(|waiting| is_late(&waiting));
        ensure!(!late, "a device did not fall asleep in {PATIENCE:?}");
    }
}

/// The length of a response's head, after a look at all that was read of the response.
fn head_of(number: u64, bytes: &[u8]) -> Result<u64> {
    let text = || String::from_utf8_lossy(bytes).into_owned();
    ensure!(bytes.starts_with(b"HTTP/1.1 200"), "answered {:?}", text());
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    let head = end.with_context(|| format!("no head in {:?}", text()))? + 4;
    let body = &bytes[head..];
    ensure!(
        body == content(number, 0, body.len()),
        "device {number} got other bytes before it slept"
    );
    Ok(head as u64)
}

/// A device that is awake again.
struct WakingDevice {
    number: u64,
    begun: Instant,
    /// Bytes of the flow that were read.
    at: u64,
    is_right: bool,
    first_byte: Option<Duration>,
}

/// Wakes these devices and reads their flows to the end.
fn wake(
    crowd: &mut HandshakeHosts,
    devices: &HashMap<u64, SleepingDevice>,
    object_bytes: u64,
    numbers: &[u64],
) -> Result<WakeFigures> {
    let mut left = numbers.iter();
    let mut under_way: HashMap<usize, WakingDevice> = HashMap::new();
    let mut figures = WakeFigures::default();
    let mut first_bytes = Vec::new();
    let mut told = Vec::new();
    loop {
        while under_way.len() < AT_ONCE
            && let Some(number) = left.next()
        {
            let device = devices.get(number).context("it sleeps")?;
            // Each wakes once, with an epoch that it did not use.
            let place = crowd.wake(*number, key_of(*number), &device.record, 3_000)?;
            figures.devices += 1;
            let waking = WakingDevice {
                number: *number,
                begun: Instant::now(),
                at: READ_BEFORE_BYTES,
                is_right: true,
                first_byte: None,
            };
            under_way.insert(place, waking);
        }
        if under_way.is_empty() {
            break;
        }
        crowd.turn(Duration::from_millis(1), &mut told)?;
        for (place, event) in told.drain(..) {
            let is_readable = matches!(event, SessionEvent::Readable(flow) if flow == flow_id());
            let Some(waking) = under_way.get_mut(&place).filter(|_| is_readable) else {
                continue;
            };
            let head = devices[&waking.number].head_bytes;
            let whole = head + object_bytes;
            let is_over = read(crowd, place, waking, head, whole);
            if waking.at > READ_BEFORE_BYTES && waking.first_byte.is_none() {
                waking.first_byte = Some(waking.begun.elapsed());
            }
            let now = crowd.now();
            crowd.pump(place, now);
            if is_over && let Some(waking) = under_way.remove(&place) {
                let is_whole = waking.at == whole;
                figures.ok += u64::from(waking.is_right && is_whole);
                if !waking.is_right || !is_whole {
                    note(&format!(
                        "device {} ended at {} of {}, right: {}",
                        waking.number, waking.at, whole, waking.is_right
                    ));
                }
                first_bytes.extend(waking.first_byte);
            }
        }
        under_way.retain(|place, waking| {
            let is_lost = waking.begun.elapsed() > PATIENCE;
            if is_lost {
                note(&format!("device {} did not wake", waking.number));
                crowd.drop_host(*place);
            }
            !is_lost
        });
    }
    first_bytes.sort();
    let at = |part: f64| {
        let last = first_bytes.len().saturating_sub(1);
        let found = first_bytes.get((last as f64 * part).round() as usize);
        found.map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
    };
    (figures.first_byte_p50_ms, figures.first_byte_p99_ms) = (at(0.5), at(0.99));
    Ok(figures)
}

/// Reads what is there. Returns whether the flow is over.
fn read(
    crowd: &mut HandshakeHosts,
    place: usize,
    waking: &mut WakingDevice,
    head: u64,
    whole: u64,
) -> bool {
    let Some(host) = crowd.host(place) else {
        return true;
    };
    host.with(|s| {
        loop {
            match s.read(flow_id(), usize::MAX) {
                Ok(ReadOutcome::Chunk(bytes)) => {
                    let expected = content(waking.number, waking.at - head, bytes.len());
                    waking.is_right &= bytes == expected;
                    waking.at += bytes.len() as u64;
                }
                Ok(ReadOutcome::End) => return true,
                Ok(ReadOutcome::Pending) => return false,
                // All of it was read before: a complete flow has ended.
                Err(FlowError::Gone) if waking.at == whole => return true,
                Err(error) => {
                    note(&format!("device {}: {error}", waking.number));
                    waking.is_right = false;
                    return true;
                }
            }
        }
    })
    .unwrap_or(true)
}

/// Allocated bytes of all files below a directory.
fn allocated(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let about = entry.metadata()?;
        bytes += about.blocks() * 512;
        if about.is_dir() {
            bytes += allocated(&entry.path())?;
        }
    }
    Ok(bytes)
}

/// An origin with an object for each number, which counts what is requested of it.
struct CountingOrigin {
    address: SocketAddr,
    /// How often each object was requested, by its number.
    requests: Arc<Vec<AtomicU32>>,
}

impl CountingOrigin {
    fn start(
        runtime: &tokio::runtime::Runtime,
        options: &SleepersOptions,
    ) -> Result<CountingOrigin> {
        let listener = runtime.block_on(tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let address = listener.local_addr()?;
        let counts = (0..options.flows).map(|_| AtomicU32::new(0));
        let requests: Arc<Vec<AtomicU32>> = Arc::new(counts.collect());
        let (counts, object_bytes) = (requests.clone(), options.object_bytes);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, object_bytes, counts.clone()));
            }
        });
        Ok(CountingOrigin { address, requests })
    }

    fn request(&self, number: u64) -> Bytes {
        let host = self.address;
        format!("GET http://{host}/{number} HTTP/1.1\r\nhost: {host}\r\n\r\n").into()
    }

    fn requested_twice(&self) -> u64 {
        let is_twice = |times: &&AtomicU32| times.load(Ordering::Relaxed) > 1;
        self.requests.iter().filter(is_twice).count() as u64
    }
}

/// Answers the requests of a connection.
async fn serve(
    mut stream: tokio::net::TcpStream,
    object_bytes: u64,
    counts: Arc<Vec<AtomicU32>>,
) -> std::io::Result<()> {
    let mut read = Vec::new();
    loop {
        let end = loop {
            if let Some(at) = read.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(&mut read).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8_lossy(&read[..end]).into_owned();
        read.drain(..end);
        let path = head.split(' ').nth(1).unwrap_or_default();
        let number = path.strip_prefix('/').and_then(|n| n.parse::<u64>().ok());
        let Some((number, count)) = number.and_then(|n| Some((n, counts.get(n as usize)?))) else {
            return Ok(());
        };
        count.fetch_add(1, Ordering::Relaxed);
        let mut answer = String::from("HTTP/1.1 200 OK\r\ncache-control: private\r\n");
        write!(
            answer,
            "content-length: {object_bytes}\r\netag: \"{number}\"\r\n\r\n"
        )
        .expect("text grows");
        stream.write_all(answer.as_bytes()).await?;
        let body = content(number, 0, object_bytes as usize);
        stream.write_all(&body).await?;
    }
}

/// How the proxy is started.
struct ProxyStart {
    program: PathBuf,
    dir: PathBuf,
    flows: u64,
    disk_bytes: u64,
}

impl ProxyStart {
    fn settings(&self) -> PathBuf {
        self.dir.join("prox.toml")
    }

    fn state_dir(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// The bounds that an operator raises for so many devices. All others are the defaults.
    fn settings_text(&self) -> String {
        format!(
            "flows_max = {}\ndisk_quota_bytes = {}\n",
            self.flows + 65_536,
            self.disk_bytes.max(16 << 30)
        )
    }

    fn start(&self, listen: SocketAddr) -> Result<SleeperProxy> {
        // The port is free again when the proxy takes it.
        let metrics = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let mut child = Command::new(&self.program)
            .args(["prox", "--allow-any-client", "--allow-private"])
            .args(["--listen", &listen.to_string()])
            .args(["--metrics-listen", &metrics.to_string()])
            .args(["--sleep-after", "1s"])
            .arg("--config")
            .arg(self.settings())
            .arg("--state-dir")
            .arg(self.state_dir())
            .env(
                "RUST_LOG",
                std::env::var("RUST_LOG").unwrap_or("warn".into()),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("its output is piped")?;
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(!line.is_empty(), "the proxy ended; its error is above");
        let said: ServerAddress = line
            .trim()
            .parse()
            .with_context(|| format!("the proxy said {line:?}"))?;
        Ok(SleeperProxy {
            child,
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, said.port)),
            key: said.key,
            metrics,
        })
    }
}

/// A running proxy, which is killed when this is dropped.
struct SleeperProxy {
    child: Child,
    address: SocketAddr,
    key: PublicKey,
    metrics: SocketAddr,
}

impl SleeperProxy {
    /// A figure of its memory in /proc, in bytes.
    fn memory(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }

    /// The number of sleeping downloads, as its metrics say.
    fn asleep(&self) -> Result<u64> {
        let mut stream = TcpStream::connect(self.metrics)?;
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let is_it = |line: &&str| line.contains("prox_flows{state=\"hibernated\"}");
        let line = text.lines().find(is_it).context("no number of flows")?;
        let number = line.rsplit(' ').next().unwrap_or_default();
        number.parse().with_context(|| format!("{line:?}"))
    }

    /// Waits until so many downloads sleep, or more: what ended just before a crash may be known still.
    fn until_asleep(&self, flows: u64) -> Result<()> {
        let begun = Instant::now();
        loop {
            let asleep = self.asleep()?;
            if asleep >= flows {
                return Ok(());
            }
            if begun.elapsed() > SETTLED_WITHIN {
                bail!("{asleep} of {flows} downloads sleep after {SETTLED_WITHIN:?}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for SleeperProxy {
    fn drop(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downloads_wake_whole_before_and_after_a_crash_and_nothing_is_requested_twice() {
        let own = std::env::current_exe().expect("its path");
        let built = own.ancestors().nth(2).expect("two folders").join("cedos");
        assert!(
            built.is_file(),
            "{} is not built: `cargo build -p cedos` builds it, and a test of the whole workspace as well",
            built.display()
        );
        let options = SleepersOptions {
            flows: 60,
            object_bytes: 8 * 1024,
            wake: 20,
            settle_s: 0.0,
            cedos: Some(built),
            dir: None,
            seed: 1,
            json: true,
        };
        let dir = tempfile::tempdir().expect("a directory");
        let outcome = measure(&options, dir.path()).expect("it is measured");
        let woken = |figures: &WakeFigures| (figures.devices, figures.ok);
        assert_eq!(woken(&outcome.woken), (20, 20));
        assert_eq!(woken(&outcome.crash.woken), (20, 20));
        assert_eq!(outcome.requested_twice, 0);
        assert!(outcome.disk_bytes >= 60 * 8 * 1024, "{outcome:?}");
    }
}
