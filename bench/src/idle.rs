//! `cedos-bench idle`: the cost of absent devices to a server, and how fast they come back.
//!
//! ```text
//!  fill ──▶ journal ──▶ server ◀── some fall asleep by real sessions
//!                         │  memory of a million
//!                         ◀── a thousand at random wake: every byte is looked at
//!                         ◀── a storm: wakes at a rate, time to the first byte
//!                         ✗ SIGKILL, restarted: time to answers, time until all are known
//!  another server        ◀── sessions that are awake and idle: memory of each
//! ```
//!
//! Most sleepers are written to the journal in bulk, as the driver writes them; the output says how
//! many. After that they do not differ: the server reads them as after a restart.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use cedos_terminal::{print_stderr, print_stdout};
use d2tp_session::{
    FlowError, FlowOptions, HybridPolicy, ReadOutcome, ReasonCode, SecretKey, SessionEvent,
};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde::Serialize;

use crate::handshake_hosts::{
    DEADLINE, FLOW_BYTES, HandshakeHosts, READ_BEFORE_BYTES, content, flow_id, key_of,
    record_with_ticket,
};
use crate::handshake_server::{HandshakeServerFigures, HandshakeServerProcess};
use crate::idle_fill::fill;

/// Sockets of all devices together.
const SOCKETS: usize = 8;
/// Devices handled at once if no rate is set.
const AT_ONCE: usize = 64;
/// Devices that begin before packets of the others are handled again.
const BEGIN_BETWEEN: usize = 4;
/// How long the server keeps a suspended session in memory here before it hibernates it.
const SLEEP_AFTER: Duration = Duration::from_secs(1);
/// How long a device may take before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(20);
/// Wakes per second in a storm in which a tenth of a million devices comes back within a minute.
const STORM_PER_S: f64 = 1_667.0;

/// Options of `bench idle`.
#[derive(clap::Args)]
pub struct IdleOptions {
    /// Sleeping flows, each of its own host
    #[arg(long, default_value_t = 1_000_000)]
    flows: u64,
    /// How many sessions hibernate by real exchanges; the rest is written to the journal in bulk
    #[arg(long, default_value_t = 10_000)]
    real: u64,
    /// Hibernated devices, chosen at random, that wake and whose bytes are verified
    #[arg(long, default_value_t = 1_000)]
    wake: u64,
    /// The length of the storm in seconds; 0 omits it
    #[arg(long, default_value_t = 15.0)]
    storm_s: f64,
    /// Sessions awake and idle, measured on their own server; 0 omits them
    #[arg(long, default_value_t = 10_000)]
    live: u64,
    /// Omits the crash
    #[arg(long)]
    no_reload: bool,
    /// The directory of the journal during the run; a temporary directory by default
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The seed of the random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object on standard output instead of text
    #[arg(long)]
    json: bool,
}

/// The results of `bench idle`.
#[derive(Debug, Default, Serialize)]
struct IdleOutcome {
    flows: u64,
    rss_bytes: u64,
    woken: u64,
    woken_ok: u64,
    by_real_sessions: u64,
    written_in_bulk: u64,
    /// The resident memory divided by the number of flows, including program and caches.
    bytes_per_flow: f64,
    rss_bytes_empty: u64,
    disk_bytes: u64,
    storm: Option<WakeStormReport>,
    reload: Option<RestartReport>,
    live: Option<LiveSessionsReport>,
}

#[derive(Debug, Serialize)]
struct WakeStormReport {
    seconds: f64,
    per_s: f64,
    woken: u64,
    ok: u64,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    rss_bytes_after: u64,
}

#[derive(Debug, Serialize)]
struct RestartReport {
    /// The time from the kill until the new process has a socket.
    listening_s: f64,
    /// The time from the kill to the first byte of the first hibernated device that came back.
    first_answer_s: f64,
    /// The time from the kill to the first answer to a new device.
    first_new_s: f64,
    /// The time from the kill until all hibernated devices were known.
    all_known_s: f64,
    /// Hibernated devices that woke before all were known, and those whose bytes were correct.
    woken: u64,
    ok: u64,
    rss_bytes: u64,
    asleep: usize,
}

#[derive(Debug, Serialize)]
struct LiveSessionsReport {
    sessions: u64,
    /// The resident memory of each session just after its last exchange.
    bytes_each: f64,
    /// Memory of a session when the server has become silent; the session continues with its keys.
    bytes_each_silent: f64,
}

/// A device that wakes, and its progress.
struct WakingDevice {
    number: u64,
    at: u64,
    right: bool,
    due: Instant,
    first: Option<Duration>,
}

/// Makes one device wake; returns its place in the crowd.
fn begin_waking(
    crowd: &mut HandshakeHosts,
    sleepers: &mut HibernatedDevices,
    number: u64,
    key: SecretKey,
    due: Instant,
) -> Result<(usize, WakingDevice)> {
    let epoch = sleepers.next_epoch(number);
    let record = sleepers.record(number, &key);
    let place = crowd.wake(number, key, &record, epoch)?;
    let waking = WakingDevice {
        number,
        at: READ_BEFORE_BYTES,
        right: true,
        due,
        first: None,
    };
    Ok((place, waking))
}

/// The results of wakes.
#[derive(Default)]
struct WakeResults {
    ok: u64,
    all: u64,
    first: Vec<Duration>,
    first_at: Option<Instant>,
}

/// The devices' side of the sleepers: those that hibernated by real exchanges have their own
/// records.
struct HibernatedDevices {
    real: HashMap<u64, Vec<u8>>,
    epochs: HashMap<u64, u32>,
}

impl HibernatedDevices {
    /// An epoch that the host did not use before (R-HS-2).
    fn next_epoch(&mut self, number: u64) -> u32 {
        let next = self.epochs.entry(number).or_insert(2_000);
        *next += 1_000;
        *next
    }

    fn record(&self, number: u64, key: &SecretKey) -> Vec<u8> {
        match self.real.get(&number) {
            Some(record) => record.clone(),
            None => record_with_ticket(HandshakeServerProcess::key(), key, number).encode(),
        }
    }
}

/// Measures and prints.
///
/// # Errors
/// A process or the disk fails.
pub fn run(options: &IdleOptions) -> Result<()> {
    ensure!(options.real <= options.flows, "--real is more than --flows");
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

fn measure(options: &IdleOptions, dir: &Path) -> Result<IdleOutcome> {
    let mut random = rand::rngs::StdRng::seed_from_u64(options.seed);
    let journal = dir.join("journal");
    let bulk = options.flows - options.real;
    let mut outcome = IdleOutcome {
        flows: options.flows,
        by_real_sessions: options.real,
        written_in_bulk: bulk,
        ..IdleOutcome::default()
    };
    if options.flows > 0 {
        let mut empty = start(&dir.join("empty"), "127.0.0.1:0".parse()?)?;
        outcome.rss_bytes_empty = empty.figures()?.rss_bytes;
        drop(empty);
        note(&format!("writing {bulk} sleepers"));
        fill(&journal, 0..bulk)?;
        note("starting the server");
        let mut serving = start(&journal, "127.0.0.1:0".parse()?)?;
        serving.wait(Duration::from_secs(120), |f| f.all_known)?;
        let mut crowd = HandshakeHosts::new(
            serving.address,
            HandshakeServerProcess::key(),
            SOCKETS,
            HybridPolicy::Offered,
        )?;
        let mut sleepers = HibernatedDevices {
            real: HashMap::new(),
            epochs: HashMap::new(),
        };
        note(&format!("{} fall asleep by real sessions", options.real));
        fall_asleep(&mut crowd, &mut sleepers, bulk..options.flows)?;
        let all = |f: &HandshakeServerFigures| f.asleep as u64 == options.flows && f.awake == 0;
        let (so, figures) = serving.wait(Duration::from_secs(60), all)?;
        ensure!(
            so,
            "{} of {} sleep: {figures:?}",
            figures.asleep,
            options.flows
        );
        // Wait until the system has taken back freed memory, if it does.
        std::thread::sleep(Duration::from_secs(2));
        let figures = serving.figures()?;
        outcome.rss_bytes = figures.rss_bytes;
        outcome.bytes_per_flow = figures.rss_bytes as f64 / options.flows as f64;
        outcome.disk_bytes = std::fs::metadata(&journal)?.len();

        let mut chosen: Vec<u64> = (0..options.flows).collect();
        chosen.shuffle(&mut random);
        let mut chosen = chosen.into_iter();
        note(&format!("{} wake", options.wake));
        let some: Vec<u64> = chosen.by_ref().take(options.wake as usize).collect();
        let woken = wake(&mut crowd, &mut sleepers, &some, None)?;
        (outcome.woken, outcome.woken_ok) = (woken.all, woken.ok);

        if options.storm_s > 0.0 {
            note(&format!("a storm of {} s", options.storm_s));
            let n = (options.storm_s * STORM_PER_S) as usize;
            let some: Vec<u64> = chosen.by_ref().take(n).collect();
            let begun = Instant::now();
            let mut woken = wake(&mut crowd, &mut sleepers, &some, Some(STORM_PER_S))?;
            let took = begun.elapsed().as_secs_f64();
            woken.first.sort();
            let at = |part: f64| ms(&woken.first, part);
            outcome.storm = Some(WakeStormReport {
                seconds: took,
                per_s: woken.all as f64 / took,
                woken: woken.all,
                ok: woken.ok,
                p50_ms: at(0.5),
                p99_ms: at(0.99),
                max_ms: at(1.0),
                rss_bytes_after: serving.figures()?.rss_bytes,
            });
        }
        if !options.no_reload {
            note("a crash");
            let some: Vec<u64> = chosen.by_ref().take(2_000).collect();
            outcome.reload = Some(reload(serving, &journal, &mut crowd, &mut sleepers, &some)?);
        }
    }
    if options.live > 0 {
        note(&format!("{} sessions awake and idle", options.live));
        outcome.live = Some(live(&dir.join("live"), options.live, random.random())?);
    }
    Ok(outcome)
}

fn note(what: &str) {
    print_stderr(&format!("idle: {what}"));
}

fn start(journal: &Path, listen: std::net::SocketAddr) -> Result<HandshakeServerProcess> {
    // The protocol's own limit of SYNs per second: above it devices prove their addresses.
    let cookie_above = d2tp_session::EndpointConfig::default().cookie_above;
    HandshakeServerProcess::start(journal, listen, SLEEP_AFTER, cookie_above)
}

fn ms(sorted: &[Duration], part: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    let at = (last as f64 * part).round() as usize;
    sorted.get(at).map_or(f64::NAN, |d| d.as_secs_f64() * 1e3)
}

/// Each host opens its flow, sends its request, reads the first part, and hibernates with notice.
fn fall_asleep(
    crowd: &mut HandshakeHosts,
    sleepers: &mut HibernatedDevices,
    hosts: std::ops::Range<u64>,
) -> Result<()> {
    let mut left = hosts.clone();
    let mut under_way: HashMap<usize, (Instant, u64)> = HashMap::new();
    let mut told = Vec::new();
    loop {
        while under_way.len() < AT_ONCE
            && let Some(number) = left.next()
        {
            let deadline = crowd.now() + DEADLINE;
            let place = crowd.begin(number, key_of(number), |s| {
                let options = FlowOptions {
                    hibernates: true,
                    deadline: Some(deadline),
                    ..FlowOptions::default()
                };
                let id = s.open(options).expect("its first flow");
                let asked = Bytes::copy_from_slice(&number.to_be_bytes());
                s.write(id, asked).expect("an open flow");
                s.finish(id).expect("an open flow");
            });
            under_way.insert(place, (Instant::now(), 0));
        }
        if under_way.is_empty() {
            return Ok(());
        }
        crowd.turn(Duration::from_millis(5), &mut told)?;
        for (place, event) in told.drain(..) {
            match event {
                SessionEvent::Suspended(_) if under_way.contains_key(&place) => {
                    let now = crowd.now();
                    let host = crowd.host(place).context("it is there")?;
                    let record = host.hibernate(now)?;
                    sleepers.real.insert(host.number, record);
                    under_way.remove(&place);
                    crowd.drop_host(place);
                }
                _ => {}
            }
        }
        let now = crowd.now();
        for (place, (_, read)) in &mut under_way {
            let place = *place;
            let Some(host) = crowd.host(place) else {
                continue;
            };
            let ready = host.with(|s| {
                // The window is no larger, so this is one piece, and the rest stays at the server.
                if *read < READ_BEFORE_BYTES
                    && let Ok(ReadOutcome::Chunk(bytes)) =
                        s.read(flow_id(), READ_BEFORE_BYTES as usize)
                {
                    *read += bytes.len() as u64;
                }
                *read >= READ_BEFORE_BYTES
                    && s.is_flushed(flow_id())
                    && s.state() == d2tp_session::SessionState::Established
            });
            if ready == Some(true) {
                host.with(|s| s.suspend(now, ReasonCode::UserPaused));
                crowd.pump(place, now);
            }
        }
        let late = under_way
            .values()
            .filter(|(begun, _)| begun.elapsed() > PATIENCE);
        ensure!(
            late.count() == 0,
            "a device did not fall asleep in {PATIENCE:?}"
        );
    }
}

/// Wakes hibernated devices, all at once or at a rate, and reads their flows to the end.
fn wake(
    crowd: &mut HandshakeHosts,
    sleepers: &mut HibernatedDevices,
    hosts: &[u64],
    per_s: Option<f64>,
) -> Result<WakeResults> {
    // On a device, keys exist before the wake.
    let keys: Vec<(u64, SecretKey)> = hosts.iter().map(|n| (*n, key_of(*n))).collect();
    let begun = Instant::now();
    let mut left = keys.into_iter().enumerate().peekable();
    let mut under_way: HashMap<usize, WakingDevice> = HashMap::new();
    let mut woken = WakeResults::default();
    let mut told = Vec::new();
    loop {
        let due = |i: usize| {
            begun + per_s.map_or(Duration::ZERO, |r| Duration::from_secs_f64(i as f64 / r))
        };
        let may =
            |under_way: &HashMap<usize, WakingDevice>| per_s.is_some() || under_way.len() < AT_ONCE;
        // Answers have priority: otherwise a process with thousands of devices that is late only
        // starts new wakes and loses the answers.
        let mut begun_now = 0;
        while may(&under_way)
            && begun_now < BEGIN_BETWEEN
            && let Some((i, (number, key))) = left.next_if(|(i, _)| due(*i) <= Instant::now())
        {
            // In a storm, the time that a device waited for this process counts too.
            let due = per_s.map_or_else(Instant::now, |_| due(i));
            let (place, waking) = begin_waking(crowd, sleepers, number, key, due)?;
            under_way.insert(place, waking);
            woken.all += 1;
            begun_now += 1;
        }
        if under_way.is_empty() && left.peek().is_none() {
            return Ok(woken);
        }
        crowd.turn(Duration::from_millis(1), &mut told)?;
        for (place, event) in told.drain(..) {
            let flow = flow_id();
            if !matches!(event, SessionEvent::Readable(f) if f == flow) {
                continue;
            }
            if let Some(waking) = under_way.get_mut(&place) {
                let over = read(crowd, place, waking);
                if waking.at > READ_BEFORE_BYTES && waking.first.is_none() {
                    waking.first = Some(waking.due.elapsed());
                    woken.first_at.get_or_insert_with(Instant::now);
                }
                let now = crowd.now();
                crowd.pump(place, now);
                if over {
                    let waking = under_way.remove(&place).expect("it is there");
                    woken.ok += u64::from(waking.right && waking.at == FLOW_BYTES);
                    woken.first.extend(waking.first);
                }
            }
        }
        under_way.retain(|place, waking| {
            let lost = waking.due.elapsed() > PATIENCE;
            if lost {
                print_stderr(&format!("idle: host {} did not wake", waking.number));
                crowd.drop_host(*place);
            }
            !lost
        });
    }
}

/// Reads available data of a flow that woke. Returns whether the flow ended.
fn read(crowd: &mut HandshakeHosts, place: usize, waking: &mut WakingDevice) -> bool {
    let Some(host) = crowd.host(place) else {
        return true;
    };
    let number = waking.number;
    host.with(|s| {
        loop {
            match s.read(flow_id(), usize::MAX) {
                Ok(ReadOutcome::Chunk(bytes)) => {
                    waking.right &= bytes == content(number, waking.at, bytes.len());
                    waking.at += bytes.len() as u64;
                }
                Ok(ReadOutcome::End) => {
                    if !waking.right || waking.at != FLOW_BYTES {
                        print_stderr(&format!(
                            "idle: host {number} ended at {}, right: {}",
                            waking.at, waking.right
                        ));
                    }
                    return true;
                }
                Ok(ReadOutcome::Pending) => return false,
                // All of it was read before: a complete flow has ended.
                Err(FlowError::Gone) if waking.at == FLOW_BYTES => return true,
                Err(error) => {
                    print_stderr(&format!("idle: host {number} at {}: {error}", waking.at));
                    waking.right = false;
                    return true;
                }
            }
        }
    })
    .unwrap_or(true)
}

/// Kills the server and restarts it, while hibernated and new devices send requests.
fn reload(
    serving: HandshakeServerProcess,
    journal: &Path,
    crowd: &mut HandshakeHosts,
    sleepers: &mut HibernatedDevices,
    hosts: &[u64],
) -> Result<RestartReport> {
    let address = serving.address;
    let killed = Instant::now();
    serving.kill()?;
    let started = std::thread::scope(|scope| {
        let starting = scope.spawn(|| {
            let began = killed.elapsed();
            let serving = start(journal, address);
            (serving, began, killed.elapsed())
        });
        let mut woken = WakeResults::default();
        let mut first_new = None;
        let mut fresh = 1_u64 << 40;
        let mut told = Vec::new();
        let mut hosts = hosts.iter();
        // Every tenth of a second, one new device and ten sleepers send requests, until the server
        // listens and one of each kind was answered.
        while !starting.is_finished() || first_new.is_none() || woken.first_at.is_none() {
            ensure!(
                killed.elapsed() < Duration::from_secs(60),
                "nobody is answered after the crash"
            );
            let some: Vec<u64> = hosts.by_ref().take(10).copied().collect();
            let keys: Vec<_> = some.iter().map(|n| (*n, key_of(*n))).collect();
            let mut under_way = HashMap::new();
            for (number, key) in keys {
                let (place, waking) = begin_waking(crowd, sleepers, number, key, Instant::now())?;
                under_way.insert(place, waking);
            }
            fresh += 1;
            let new = crowd.begin(fresh, key_of(fresh), |_| {});
            let until = Instant::now() + Duration::from_millis(100);
            while Instant::now() < until {
                crowd.turn(Duration::from_millis(5), &mut told)?;
                for (place, event) in told.drain(..) {
                    match event {
                        SessionEvent::Established { .. } if place == new => {
                            first_new.get_or_insert_with(|| killed.elapsed());
                        }
                        SessionEvent::Readable(_) => {
                            if let Some(waking) = under_way.get_mut(&place)
                                && read(crowd, place, waking)
                            {
                                woken.first_at.get_or_insert_with(Instant::now);
                                woken.ok += u64::from(waking.right && waking.at == FLOW_BYTES);
                                under_way.remove(&place);
                            }
                            let now = crowd.now();
                            crowd.pump(place, now);
                        }
                        _ => {}
                    }
                }
            }
            woken.all = woken.ok;
            for place in under_way.keys() {
                crowd.drop_host(*place);
            }
        }
        let (serving, began, listening) = starting.join().expect("it only waits");
        Ok((
            serving?,
            began,
            listening,
            woken,
            first_new.unwrap_or_default(),
        ))
    })?;
    let (mut serving, began, listening, mut woken, first_new) = started;
    // The others come while the journal is being read.
    let left: Vec<u64> = hosts
        .iter()
        .copied()
        .filter(|n| !sleepers.epochs.contains_key(n))
        .collect();
    let more = wake(crowd, sleepers, &left, None)?;
    woken.ok += more.ok;
    woken.all += more.all;
    let (known, figures) = serving.wait(Duration::from_secs(120), |f| f.all_known)?;
    ensure!(known, "the journal was not read in two minutes");
    Ok(RestartReport {
        listening_s: listening.as_secs_f64(),
        first_answer_s: woken
            .first_at
            .map_or(f64::NAN, |at| at.duration_since(killed).as_secs_f64()),
        first_new_s: first_new.as_secs_f64(),
        all_known_s: began.as_secs_f64() + figures.all_known_s.unwrap_or(f64::NAN),
        woken: woken.all,
        ok: woken.ok,
        rss_bytes: figures.rss_bytes,
        asleep: figures.asleep,
    })
}

/// Measures sessions that are awake, have no flow and nothing to send.
fn live(journal: &Path, sessions: u64, salt: u64) -> Result<LiveSessionsReport> {
    let mut serving = start(journal, "127.0.0.1:0".parse()?)?;
    let mut crowd = HandshakeHosts::new(
        serving.address,
        HandshakeServerProcess::key(),
        SOCKETS,
        HybridPolicy::Offered,
    )?;
    let before = serving.figures()?.rss_bytes;
    let first = salt >> 8;
    let mut left = first..first + sessions;
    let mut under_way = std::collections::HashSet::new();
    let mut told = Vec::new();
    loop {
        while under_way.len() < AT_ONCE
            && let Some(number) = left.next()
        {
            under_way.insert(crowd.begin(number, key_of(number), |_| {}));
        }
        if under_way.is_empty() {
            break;
        }
        crowd.turn(Duration::from_millis(5), &mut told)?;
        for (place, event) in told.drain(..) {
            if matches!(event, SessionEvent::Established { .. }) {
                under_way.remove(&place);
            }
        }
    }
    let rest = |crowd: &mut HandshakeHosts, span: Duration| -> Result<()> {
        let until = Instant::now() + span;
        let mut told = Vec::new();
        while Instant::now() < until {
            crowd.turn(Duration::from_millis(20), &mut told)?;
        }
        Ok(())
    };
    rest(&mut crowd, Duration::from_secs(4))?;
    let figures = serving.figures()?;
    ensure!(
        figures.awake as u64 == sessions,
        "{} of {sessions} are awake",
        figures.awake
    );
    let each = |rss: u64| rss.saturating_sub(before) as f64 / sessions as f64;
    let bytes_each = each(figures.rss_bytes);
    rest(&mut crowd, Duration::from_secs(16))?;
    let figures = serving.figures()?;
    Ok(LiveSessionsReport {
        sessions,
        bytes_each,
        bytes_each_silent: each(figures.rss_bytes),
    })
}
