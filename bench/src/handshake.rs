//! `cedos-bench handshake`: how many devices per second make handshakes, and how many wake.
//!
//! Both ends are separate processes, with the sockets, the driver and the journal of a proxy. A
//! handshake counts when the device has its keys and sent its first packet; a wake when the first
//! byte of the hibernated flow arrives.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cedos_lab_scenario::TextTable;
use cedos_terminal::print_stdout;
use d2tp_session::{HybridPolicy, SessionEvent};
use serde::Serialize;

use crate::handshake_hosts::{
    HandshakeHosts, READ_BEFORE_BYTES, flow_id, key_of, record_with_ticket,
};
use crate::handshake_server::{HandshakeServerProcess, cpu_s};
use crate::idle_fill::fill;

/// Handshakes under way at once: enough that neither end waits for the other.
pub(crate) const AT_ONCE: usize = 64;
/// Connections of quinn that are enough to tell its rate.
const QUINN_MOST: u64 = 5_000;
/// Sockets of all devices together.
const SOCKETS: usize = 4;
/// The first number of hosts that wake, so that none of them has connected before.
const SLEEPERS: u64 = 1 << 32;

/// Options of `bench handshake`.
#[derive(clap::Args)]
pub struct HandshakeOptions {
    /// The number of devices that make handshakes and of those that wake, in each round
    #[arg(long, default_value_t = 15_000)]
    hosts: u64,
    /// Rounds of each kind; the median counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Make the server request an address proof from every device, as under load
    #[arg(long)]
    cookies: bool,
    /// Print one JSON object on standard output instead of text
    #[arg(long)]
    json: bool,
}

/// The results of `bench handshake`.
#[derive(Debug, Serialize)]
struct HandshakeOutcome {
    handshakes_per_s: f64,
    /// Handshakes followed by the exchange of ML-KEM: until its keys are in force at the device.
    hybrid_per_s: f64,
    wakes_per_s: f64,
    /// The rate of two cores if a handshake consisted only of its X25519 products.
    x25519_bound_per_s: f64,
    /// The rate of two cores if a handshake with its exchange consisted only of what X25519 and ML-KEM
    /// compute.
    hybrid_bound_per_s: f64,
    /// Connections of quinn per second, both ends on this machine too.
    quinn_per_s: f64,
    hosts: u64,
    rounds: usize,
    cookies: bool,
    server_cpu_us_per_handshake: f64,
    device_cpu_us_per_handshake: f64,
    server_cpu_us_per_hybrid: f64,
    device_cpu_us_per_hybrid: f64,
    server_cpu_us_per_wake: f64,
    device_cpu_us_per_wake: f64,
    failed: u64,
}

impl HandshakeOutcome {
    fn table(&self) -> String {
        let mut table = TextTable::with_notes(["", "a second", "server µs", "device µs", ""]);
        for (what, per_s, cpu_us, note) in [
            (
                "handshakes",
                self.handshakes_per_s,
                Some((
                    self.server_cpu_us_per_handshake,
                    self.device_cpu_us_per_handshake,
                )),
                "CPU for each",
            ),
            (
                "with ML-KEM",
                self.hybrid_per_s,
                Some((self.server_cpu_us_per_hybrid, self.device_cpu_us_per_hybrid)),
                "CPU for each",
            ),
            (
                "wakes",
                self.wakes_per_s,
                Some((self.server_cpu_us_per_wake, self.device_cpu_us_per_wake)),
                "CPU for each",
            ),
            (
                "X25519 alone",
                self.x25519_bound_per_s,
                None,
                "on two cores",
            ),
            ("and ML-KEM", self.hybrid_bound_per_s, None, "on two cores"),
            ("quinn", self.quinn_per_s, None, ""),
        ] {
            let figure = |figure: f64| format!("{figure:.0}");
            let (server, device) = cpu_us.unzip();
            table.row([
                what.to_owned(),
                figure(per_s),
                server.map(figure).unwrap_or_default(),
                device.map(figure).unwrap_or_default(),
                note.to_owned(),
            ]);
        }
        table.to_text()
    }
}

/// What the devices of a round do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RoundKind {
    /// A handshake of X25519 alone.
    Handshake,
    /// A handshake and the exchange of ML-KEM after it.
    Hybrid,
    /// A wake by ticket.
    Wake,
}

#[derive(Clone, Copy, Default)]
struct HandshakeRound {
    per_s: f64,
    server_us: f64,
    device_us: f64,
    failed: u64,
}

/// Measures and prints.
///
/// # Errors
/// The serving process fails, or no device came in.
pub fn run(options: &HandshakeOptions) -> Result<()> {
    let (mut handshakes, mut hybrids) = (Vec::new(), Vec::new());
    let mut wakes = Vec::new();
    for _ in 0..options.rounds.max(1) {
        handshakes.push(round(options, RoundKind::Handshake)?);
        hybrids.push(round(options, RoundKind::Hybrid)?);
        wakes.push(round(options, RoundKind::Wake)?);
    }
    let all = handshakes.iter().chain(&hybrids).chain(&wakes);
    let failed = all.map(|r| r.failed).sum();
    let (handshake, hybrid, wake) = (median(handshakes), median(hybrids), median(wakes));
    let (x25519, with_ml_kem) = (bound(x25519_once), bound(hybrid_once));
    let outcome = HandshakeOutcome {
        handshakes_per_s: handshake.per_s.round(),
        hybrid_per_s: hybrid.per_s.round(),
        wakes_per_s: wake.per_s.round(),
        x25519_bound_per_s: x25519.round(),
        hybrid_bound_per_s: with_ml_kem.round(),
        quinn_per_s: crate::handshake_quinn::per_second(options.hosts.min(QUINN_MOST))?.round(),
        hosts: options.hosts,
        rounds: options.rounds,
        cookies: options.cookies,
        server_cpu_us_per_handshake: handshake.server_us.round(),
        device_cpu_us_per_handshake: handshake.device_us.round(),
        server_cpu_us_per_hybrid: hybrid.server_us.round(),
        device_cpu_us_per_hybrid: hybrid.device_us.round(),
        server_cpu_us_per_wake: wake.server_us.round(),
        device_cpu_us_per_wake: wake.device_us.round(),
        failed,
    };
    if options.json {
        print_stdout(&serde_json::to_string(&outcome)?);
    } else {
        print_stdout(&outcome.table());
    }
    ensure!(failed == 0, "{failed} devices did not get through");
    Ok(())
}

fn median(mut rounds: Vec<HandshakeRound>) -> HandshakeRound {
    rounds.sort_by(|a, b| a.per_s.total_cmp(&b.per_s));
    rounds[rounds.len() / 2]
}

/// Runs one server and all its devices.
fn round(options: &HandshakeOptions, kind: RoundKind) -> Result<HandshakeRound> {
    let wake = kind == RoundKind::Wake;
    let dir = tempfile::tempdir()?;
    let journal = dir.path().join("journal");
    let first = if wake { SLEEPERS } else { 0 };
    if wake {
        fill(&journal, first..first + options.hosts)?;
    }
    let above = if options.cookies { 0 } else { u32::MAX };
    let hour = Duration::from_secs(3600);
    let mut serving = HandshakeServerProcess::start(&journal, "127.0.0.1:0".parse()?, hour, above)?;
    serving.wait(Duration::from_secs(60), |f| f.all_known)?;
    // On a device, keys and records exist before the handshake.
    let host = |n| {
        let key = key_of(n);
        let record =
            wake.then(|| record_with_ticket(HandshakeServerProcess::key(), &key, n).encode());
        (n, key, record)
    };
    let mut hosts: Vec<_> = (first..first + options.hosts).map(host).collect();
    let policy = match kind {
        RoundKind::Hybrid => HybridPolicy::Offered,
        RoundKind::Handshake | RoundKind::Wake => HybridPolicy::Off,
    };
    let key = HandshakeServerProcess::key();
    let mut crowd = HandshakeHosts::new(serving.address, key, SOCKETS, policy)?;
    let (mut under_way, mut done) = (HashMap::new(), 0);
    let mut told = Vec::new();
    let server_before = serving.figures()?.cpu_s;
    let (begun, cpu_before) = (Instant::now(), cpu_s());
    let mut last = Instant::now();
    while done < options.hosts && last.elapsed() < Duration::from_secs(10) {
        while under_way.len() < AT_ONCE
            && let Some((number, key, record)) = hosts.pop()
        {
            let place = match record {
                Some(record) => crowd.wake(number, key, &record, 2)?,
                None => crowd.begin(number, key, |_| {}),
            };
            under_way.insert(place, number);
        }
        crowd.turn(Duration::from_millis(5), &mut told)?;
        for (place, event) in told.drain(..) {
            let through = match event {
                SessionEvent::Established { .. } => kind == RoundKind::Handshake,
                SessionEvent::HybridKeys => kind == RoundKind::Hybrid,
                SessionEvent::Readable(flow) => {
                    wake && flow == flow_id() && has_more(&mut crowd, place)
                }
                _ => false,
            };
            if through && under_way.remove(&place).is_some() {
                done += 1;
                last = Instant::now();
            }
        }
    }
    let took = last.duration_since(begun).as_secs_f64();
    let device = cpu_s() - cpu_before;
    let figures = serving.figures()?;
    let server = figures.cpu_s - server_before;
    ensure!(done > 0, "nobody came in");
    if !wake {
        // The device has its keys; the server must have them too.
        let all = |f: &crate::handshake_server::HandshakeServerFigures| f.awake as u64 >= done;
        let (so, figures) = serving.wait(Duration::from_secs(5), all)?;
        ensure!(
            so,
            "{done} devices came in and the server knows {}",
            figures.awake
        );
    }
    let each = |cpu: f64| cpu * 1e6 / done as f64;
    Ok(HandshakeRound {
        per_s: done as f64 / took,
        server_us: each(server),
        device_us: each(device),
        failed: options.hosts - done,
    })
}

/// Whether a byte has arrived since the sleep.
fn has_more(crowd: &mut HandshakeHosts, place: usize) -> bool {
    let received = |s: &mut d2tp_session::Session| s.read(flow_id(), usize::MAX).is_ok();
    crowd
        .host(place)
        .and_then(|h| h.with(received))
        .unwrap_or(false)
        && crowd
            .host(place)
            .and_then(|h| h.with(|s| s.received(flow_id())))
            .flatten()
            .is_some_and(|(at, _)| at > READ_BEFORE_BYTES)
}

/// Handshakes per second if each end computed only what `once` does, on two cores that are both busy
/// with that.
fn bound(once: fn(u64)) -> f64 {
    const TIMES: u64 = 2_000;
    let per_s = || {
        let begun = Instant::now();
        (0..TIMES).for_each(once);
        TIMES as f64 / begun.elapsed().as_secs_f64()
    };
    std::thread::scope(|both| {
        let sides = [(); 2].map(|()| both.spawn(per_s));
        let rates = sides.map(|side| side.join().expect("it computes"));
        f64::min(rates[0], rates[1])
    })
}

/// One side's products of a handshake: a key pair and four of X25519.
fn x25519_once(number: u64) {
    use aws_lc_rs::agreement::{PrivateKey, UnparsedPublicKey, X25519, agree};
    let peer = key_of(1).public();
    let private = PrivateKey::from_private_key(&X25519, &key_of(2).to_bytes()).expect("32 bytes");
    std::hint::black_box(key_of(number));
    for _ in 0..4 {
        let peer = UnparsedPublicKey::new(&X25519, &peer.0);
        let product = agree(&private, peer, (), |shared| Ok(shared[0]));
        std::hint::black_box(product).expect("a key of ours");
    }
}

/// One side's products of a handshake, and half of an exchange by ML-KEM, for which both ends together
/// make a key pair, encapsulate and decapsulate.
fn hybrid_once(number: u64) {
    use aws_lc_rs::kem::{Ciphertext, DecapsulationKey, ML_KEM_768};
    x25519_once(number);
    if number.is_multiple_of(2) {
        let key = DecapsulationKey::generate(&ML_KEM_768).expect("there is randomness");
        let public = key.encapsulation_key().expect("it has one");
        let (ciphertext, _) = public.encapsulate().expect("a key of ours");
        let secret = key.decapsulate(Ciphertext::from(ciphertext.as_ref()));
        std::hint::black_box(secret.expect("a ciphertext of ours"));
    }
}
