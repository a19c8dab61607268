//! `cedos-bench hostile`: the harm that one admitted client, or strangers, can do to a proxy, and to its
//! other clients.
//!
//! ```text
//!  for each kind:  a real `cedos prox` in a control group ◀── honest clients, a constant load
//!                  ┌ before ┐┌──── attack ────┐┌ silence ┐
//!                  goodput    goodput, memory   memory        killed?
//! ```
//!
//! The marks: resident memory stays below what the operator configured, the honest clients keep
//! their goodput, and the kernel never kills the proxy.

mod answer_start;
mod attack;
mod attack_context;
mod cache_attack;
mod compressed_bombs;
mod enrolment_guests;
mod forged_sockets;
mod honest_load;
mod hostile_kind;
mod http2_attack;
mod memory_group;
mod origins;
mod packed_body;
mod packet_tunnels;
mod proxy_under_load;
mod quota_attack;
mod raw_client;
mod slow_origins;
mod stream_strangers;
mod tcp_flood;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cedos_terminal::print_stdout;
use d2tp_session::{KEY_SHARE, PublicKey};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Serialize;

use self::attack::attack;
use self::attack_context::{AttackContext, AttackTally, hostile_keys};
use self::honest_load::{HonestLoad, NEWCOMERS, honest_keys};
use self::hostile_kind::HostileKind;
use self::memory_group::MemoryLimiter;
use self::origins::HostileOrigins;
pub use self::proxy_under_load::find_program;
use self::proxy_under_load::{LOOK_EVERY, ProxySetup, ProxyUnderLoad};

use crate::network::{in_namespace, namespace_with_lo};

/// The memory of the proxy beside the limits of `--session-memory` and `--memory-quota`: the
/// program, thread stacks, the allocator's reserve, tables and sockets. docs/security.md states it
/// for operators.
const FIXED_BYTES: u64 = 64 << 20;

/// The memory of the shared cache for URLs and heads of its copies, beside the quota of copies.
const CACHE_HEAD_BYTES: u64 = 16 << 20;

/// The disk for copies where the shared cache is filled: little enough to be full within the attack.
const CACHE_DISK_BYTES: u64 = 256 << 20;
/// What files may be larger than the quota says: the blocks that they end in.
const DISK_SLACK_BYTES: u64 = 8 << 20;

/// How much nicer the attacker's threads are than the others.
const HOSTILE_NICE: i32 = 10;

/// The share of goodput that honest clients must keep.
const GOODPUT_MIN: f64 = 0.95;

/// Options of `bench hostile`.
#[derive(clap::Args)]
pub struct HostileOptions {
    /// Kinds to run, such as `sparse-pieces` [default: all]
    #[arg(long, value_delimiter = ',')]
    kinds: Vec<String>,
    /// Seconds that each attack lasts
    #[arg(long, default_value_t = 10.0)]
    attack_s: f64,
    /// Admitted keys of the attacker
    #[arg(long, default_value_t = 1)]
    keys: u64,
    /// Datagrams per second of floods
    #[arg(long, default_value_t = 60_000)]
    flood_rate: u64,
    /// `--session-memory` of the proxy, in bytes
    #[arg(long, default_value_t = 512 << 20)]
    session_memory: u64,
    /// `--memory-quota` of the proxy, in bytes
    #[arg(long, default_value_t = 256 << 20)]
    memory_quota: u64,
    /// `--disk-quota` of the proxy, in bytes [default: 256 MiB where the shared cache is attacked, else the
    /// proxy's own]
    #[arg(long)]
    disk_quota: Option<u64>,
    /// The limit of the proxy's control group, in bytes
    #[arg(long, default_value_t = 512_000_000)]
    memory_max: u64,
    /// The program `cedos` [default: the one in this program's folder]
    #[arg(long)]
    cedos: Option<PathBuf>,
    /// The directory of the proxy's spilled copies during the run; it should be on a disk
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one JSON object on standard output instead of text
    #[arg(long)]
    json: bool,
}

/// The results of all kinds.
#[derive(Debug, Serialize)]
struct HostileOutcome {
    rss_bound_bytes: u64,
    rss_max_bytes: u64,
    others_goodput_ratio: f64,
    killed: bool,
    memory_max_bytes: u64,
    limited_by: MemoryLimiter,
    kinds: Vec<KindOutcome>,
}

/// The results of one kind.
#[derive(Debug, Serialize)]
struct KindOutcome {
    kind: &'static str,
    rss_bound_bytes: u64,
    rss_max_bytes: u64,
    /// Resident memory before the attack.
    rss_before_bytes: u64,
    others_goodput_ratio: f64,
    killed: bool,
    /// The number of honest clients, of 27, that connected during the attack.
    newcomers_admitted: u64,
    newcomers: u64,
    /// The number of objects that honest clients did not receive.
    others_refused: u64,
    hostile_sessions: u64,
    hostile_flows: u64,
    hostile_datagrams: u64,
    /// TCP connections that the attacker opened, and what it wrote to them.
    hostile_connections: u64,
    hostile_tcp_bytes: u64,
    /// What the proxy's files occupied at most, and its quota where the attack fills that.
    disk_max_bytes: u64,
    disk_bound_bytes: Option<u64>,
    /// The number of the attacker's flows that were refused with a sentence.
    hostile_refused: u64,
    /// The number of the attacker's flows that ended without an answer or a sentence.
    hostile_unexplained: u64,
    /// The number of limits that an attack on all of a client's limits did not reach.
    limits_left: u64,
    /// CPU time of the proxy during the attack, as a share of a core.
    proxy_cpu: f64,
}

impl KindOutcome {
    fn holds(&self) -> bool {
        !self.killed
            && self.rss_max_bytes <= self.rss_bound_bytes
            && self.others_goodput_ratio >= GOODPUT_MIN
            && self.hostile_unexplained == 0
            && self.limits_left == 0
            && self
                .disk_bound_bytes
                .is_none_or(|bound| self.disk_max_bytes <= bound + DISK_SLACK_BYTES)
    }
}

/// Measures and prints.
///
/// # Errors
/// A kind could not be run, or a mark was missed.
pub fn run(options: &HostileOptions) -> Result<()> {
    raise_descriptor_limit();
    let kinds = chosen(&options.kinds)?;
    let program = find_program(options.cedos.as_ref())?;
    let origins = HostileOrigins::start()?;
    let mut outcomes = Vec::new();
    let mut limited_by = MemoryLimiter::None;
    for (kind, name) in kinds {
        let setup = ProxySetup {
            program: program.clone(),
            session_memory: options.session_memory,
            memory_quota: options.memory_quota,
            memory_max: options.memory_max,
            clients: clients(kind.keys(options.keys)),
            kind,
            disk_quota: disk_quota(options, kind),
            settings: (kind == HostileKind::EveryQuota)
                .then(|| quota_attack::settings(options.attack_s)),
        };
        let outcome = match kind.uses_tunnels() {
            true => in_namespace(&namespace_with_lo()?, || {
                run_kind(options, kind, name, &setup, &HostileOrigins::start()?)
            }),
            false => run_kind(options, kind, name, &setup, &origins),
        };
        let (outcome, limiter) = outcome.with_context(|| format!("{name} could not be run"))?;
        limited_by = limiter;
        if !options.json {
            print_kind(&outcome);
        }
        outcomes.push(outcome);
    }
    let missed: Vec<&str> = outcomes
        .iter()
        .filter(|outcome| !outcome.holds())
        .map(|outcome| outcome.kind)
        .collect();
    let missed = missed.join(", ");
    let outcome = HostileOutcome {
        rss_bound_bytes: outcomes
            .iter()
            .map(|o| o.rss_bound_bytes)
            .max()
            .unwrap_or(0),
        rss_max_bytes: outcomes.iter().map(|o| o.rss_max_bytes).max().unwrap_or(0),
        others_goodput_ratio: outcomes
            .iter()
            .map(|o| o.others_goodput_ratio)
            .fold(f64::INFINITY, f64::min),
        killed: outcomes.iter().any(|o| o.killed),
        memory_max_bytes: options.memory_max,
        limited_by,
        kinds: outcomes,
    };
    if options.json {
        print_stdout(&serde_json::to_string(&outcome)?);
    }
    ensure!(missed.is_empty(), "marks were missed: {missed}");
    Ok(())
}

/// Runs one kind against its own proxy.
fn run_kind(
    options: &HostileOptions,
    kind: HostileKind,
    name: &'static str,
    setup: &ProxySetup,
    origins: &HostileOrigins,
) -> Result<(KindOutcome, MemoryLimiter)> {
    let directory = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let mut proxy = ProxyUnderLoad::start(setup, &directory)?;
    let (host, port) = (proxy.address.host.parse()?, proxy.address.port);
    let (address, key) = (SocketAddr::new(host, port), proxy.address.key);
    let attack_span = Duration::from_secs_f64(options.attack_s);
    let honest = HonestLoad::start(address, key, origins.honest, attack_span)?;
    watch(&mut proxy, Duration::from_secs(1));
    let before = goodput(&mut proxy, &honest, attack_span / 2);
    let rss_before_bytes = proxy.measure();
    let cpu_before = proxy.cpu_s();
    honest.begin_attack();
    let context = AttackContext {
        proxy: address,
        proxy_key: key,
        tcp: proxy.tcp().clone(),
        http: origins.http,
        blast: origins.blast,
        silent: origins.silent,
        keys: kind.keys(options.keys),
        rate: options.flood_rate,
        until: Instant::now() + attack_span,
    };
    let attacker = thread::spawn(move || {
        be_nice(HOSTILE_NICE);
        attack(kind, &context)
    });
    let during = goodput(&mut proxy, &honest, attack_span);
    let proxy_cpu = (proxy.cpu_s() - cpu_before) / options.attack_s;
    let tally = attacker.join();
    let tally = tally.map_err(|_| anyhow::anyhow!("the attacker panicked"))?;
    // The attacker is silent now; the memory that it left in use must not grow.
    watch(&mut proxy, attack_span / 2);
    let killed = proxy.is_gone();
    let newcomers_admitted = honest.admitted();
    let others_refused = honest.end()?;
    let tally: AttackTally = match killed {
        // A killed proxy does not answer the attacker.
        true => tally.unwrap_or_default(),
        false => tally?,
    };
    let outcome = KindOutcome {
        kind: name,
        rss_bound_bytes: bound(options, kind),
        rss_max_bytes: proxy.rss_max(),
        rss_before_bytes,
        others_goodput_ratio: (during / before.max(1.0) * 1000.0).round() / 1000.0,
        killed,
        newcomers_admitted,
        newcomers: NEWCOMERS,
        others_refused,
        hostile_sessions: tally.sessions,
        hostile_flows: tally.flows,
        hostile_datagrams: tally.datagrams,
        hostile_connections: tally.connections,
        hostile_tcp_bytes: tally.tcp_bytes,
        disk_max_bytes: proxy.disk_max(),
        disk_bound_bytes: disk_quota(options, kind),
        hostile_refused: tally.refused,
        hostile_unexplained: tally.unexplained,
        limits_left: tally.limits_left,
        proxy_cpu: (proxy_cpu * 100.0).round() / 100.0,
    };
    Ok((outcome, proxy.group().limiter()))
}

/// The memory that the configured limits allow the proxy: its fixed part, the hostile keys' share
/// of the session memory, and the quota of copies if the kind makes it hold some.
fn bound(options: &HostileOptions, kind: HostileKind) -> u64 {
    let mut left = options.session_memory;
    for _ in 0..kind.keys(options.keys) {
        left -= left / KEY_SHARE;
    }
    let copies = match kind.pins_copies() {
        true => options.memory_quota,
        false => 0,
    };
    let heads = match kind.fills_cache() {
        true => CACHE_HEAD_BYTES,
        false => 0,
    };
    FIXED_BYTES + (options.session_memory - left) + copies + heads
}

/// The disk that the proxy is given for copies; none: as much as it takes by itself.
fn disk_quota(options: &HostileOptions, kind: HostileKind) -> Option<u64> {
    let of_cache = kind.fills_cache().then_some(CACHE_DISK_BYTES);
    options.disk_quota.or(of_cache)
}

/// Watches the proxy for a span. Returns the bytes per second that honest clients received in it.
fn goodput(proxy: &mut ProxyUnderLoad, honest: &HonestLoad, span: Duration) -> f64 {
    let (bytes, begun) = (honest.bytes(), Instant::now());
    watch(proxy, span);
    (honest.bytes() - bytes) as f64 / begun.elapsed().as_secs_f64()
}

fn watch(proxy: &mut ProxyUnderLoad, span: Duration) {
    let until = Instant::now() + span;
    while Instant::now() < until {
        proxy.measure();
        thread::sleep(LOOK_EVERY);
    }
}

fn clients(hostile: u64) -> Vec<PublicKey> {
    let hostile = hostile_keys(hostile).map(|key| key.public());
    honest_keys().chain(hostile).collect()
}

fn chosen(names: &[String]) -> Result<Vec<(HostileKind, &'static str)>> {
    if names.is_empty() {
        return Ok(HostileKind::ALL.to_vec());
    }
    let known = |name: &String| {
        let found = HostileKind::ALL
            .into_iter()
            .find(|(_, known)| known == name);
        match found {
            Some(found) => Ok(found),
            None => {
                let all: Vec<&str> = HostileKind::ALL.iter().map(|(_, name)| *name).collect();
                bail!("{name} is no kind; there are {}", all.join(", "))
            }
        }
    };
    names.iter().map(known).collect()
}

/// Lowers the priority of this thread: an attacker's computations, made elsewhere in reality, must
/// not take CPU time from the proxy and honest clients.
fn be_nice(more: i32) {
    // SAFETY: plain calls about this thread.
    unsafe {
        let now = libc::getpriority(libc::PRIO_PROCESS, 0);
        libc::setpriority(libc::PRIO_PROCESS, 0, now + more);
    }
}

/// Raises the limit of descriptors, because origins need one for each connection of the proxy.
fn raise_descriptor_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // If that is refused, kinds with many connections have fewer of them.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

fn print_kind(outcome: &KindOutcome) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    print_stdout(&format!(
        "{:<23} {:>4.0} of {:>4.0} MiB (before {:>3.0})  goodput {:>5.3}  admitted {:>2} of {}  \
         {:>4} sessions {:>5} flows ({} refused, {} without a word) {:>7} datagrams  \
         {:>5} connections {:>5.0} MiB by TCP  disk {:>3.0} MiB  CPU {:.2}{}",
        outcome.kind,
        mib(outcome.rss_max_bytes),
        mib(outcome.rss_bound_bytes),
        mib(outcome.rss_before_bytes),
        outcome.others_goodput_ratio,
        outcome.newcomers_admitted,
        outcome.newcomers,
        outcome.hostile_sessions,
        outcome.hostile_flows,
        outcome.hostile_refused,
        outcome.hostile_unexplained,
        outcome.hostile_datagrams,
        outcome.hostile_connections,
        mib(outcome.hostile_tcp_bytes),
        mib(outcome.disk_max_bytes),
        outcome.proxy_cpu,
        if outcome.killed { "  KILLED" } else { "" },
    ));
}
