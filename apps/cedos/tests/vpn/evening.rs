//! A laptop's evening: programs of the distribution go on behind a VPN through six changes of network and a minute
//! without any.
//!
//! ```text
//!   device                              relay                       proxy                 origin
//!   Chromium, ssh, wget, apt, dig, …    delays, rates, NAT          cedos prox            Caddy, sshd, Dovecot, …
//!   cedos vpn up                        of evening.toml             --tunnel-net
//! ```
//!
//! It prints one JSON object, and fails where a mark is missed.

mod datagrams;
mod programs;
mod servers;

use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cedos_lab_emu::World;
use cedos_lab_rig::namespace::{NamespaceNeeds, in_namespace_with, sh};
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::program::{cedos, device_key, run};
use cedos_lab_rig::this_test;
use cedos_lab_scenario::{EventKind, Scenario};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};

use datagrams::{ArrivalGap, PacketTimes};
use servers::EveningServers;

/// Processes of their own, so that none is left, and users: only for root.
const EVENING: NamespaceNeeds = NamespaceNeeds::new(
    "-nmpf",
    "mount -t proc proc /proc
     mount -t tmpfs t /run
     ip tuntap add dev t0 mode tun
     setpriv --reuid 65534 --clear-groups true
     nft 'table inet t { chain c { type nat hook output priority -100; meta l4proto tcp redirect to :1; }; }'",
);

/// The programs of the evening, and the packages of Debian that have them.
const PROGRAMS: [(&str, &str); 13] = [
    ("chromedriver", "chromium-driver"),
    ("caddy", "caddy"),
    ("/usr/sbin/sshd", "openssh-server"),
    ("ssh", "openssh-client"),
    ("dnsmasq", "dnsmasq-base"),
    ("dig", "bind9-dnsutils"),
    ("dovecot", "dovecot-imapd"),
    ("chronyd", "chrony"),
    ("ping", "iputils-ping"),
    ("wget", "wget"),
    ("apt-get", "apt"),
    ("dpkg-scanpackages", "dpkg-dev"),
    ("openssl", "openssl"),
];

/// The longest gap in a call where the old network works until the new one does.
const HANDOVER_GAP_MAX_MS: f64 = 200.0;
/// How soon datagrams arrive again after a network is there.
const BACK_WITHIN_MS: f64 = 1_000.0;
/// The longest gap in a call where a network falls silent and keeps its address.
const SILENCE_MAX_MS: f64 = 1_500.0;

/// How long after a change packets belong to it.
const AFTERMATH_S: f64 = 5.0;
/// When mail arrives at the server: in the minute without a network.
const MAIL_AT_S: f64 = 100.0;
/// How long programs may take to end after the evening.
const END_WITHIN_S: f64 = 100.0;

/// The evening's clock.
#[derive(Debug)]
pub struct EveningClock {
    began: Instant,
    over_s: f64,
}

impl EveningClock {
    /// Seconds since the beginning.
    pub fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Whether programs are to end.
    pub fn is_over(&self) -> bool {
        self.now_s() >= self.over_s
    }

    /// Whether programs should have ended.
    pub fn is_long_over(&self) -> bool {
        self.now_s() >= self.over_s + END_WITHIN_S
    }

    /// Waits until a time of the evening.
    pub fn wait_until(&self, at_s: f64) {
        let left = Duration::from_secs_f64((at_s - self.now_s()).max(0.0));
        // sleep: what happens at times of the evening is the subject
        std::thread::sleep(left);
    }

    /// Waits for the end of the evening.
    pub fn wait_until_over(&self) {
        self.wait_until(self.over_s);
    }
}

/// What a change of network is for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChangeKind {
    /// There is always a network that works.
    MakeBeforeBreak,
    /// One network ends before the next one is there.
    BreakBeforeMake,
    /// A network keeps its address and carries nothing, beside one that works.
    Silent,
}

/// A change of network in evening.toml.
#[derive(Clone, Copy, Debug)]
struct NetworkChange {
    what: &'static str,
    kind: ChangeKind,
    /// The change's first event by the file: its link and seconds.
    first: (&'static str, f64),
    /// Its last event, from which datagrams arrive again.
    last: (&'static str, f64),
}

const CHANGES: [NetworkChange; 7] = [
    NetworkChange {
        what: "Wi-Fi ends; cellular has been up for 3 s",
        kind: ChangeKind::MakeBeforeBreak,
        first: ("wlan0", 23.0),
        last: ("wlan0", 23.0),
    },
    NetworkChange {
        what: "another Wi-Fi comes; cellular ends 3 s later",
        kind: ChangeKind::MakeBeforeBreak,
        first: ("wlan0", 38.0),
        last: ("wwan0", 41.0),
    },
    NetworkChange {
        what: "Wi-Fi ends; a third one comes 1.7 s later",
        kind: ChangeKind::BreakBeforeMake,
        first: ("wlan0", 56.0),
        last: ("wlan0", 57.7),
    },
    NetworkChange {
        what: "Wi-Fi ends; cellular comes 60 s later",
        kind: ChangeKind::BreakBeforeMake,
        first: ("wlan0", 75.0),
        last: ("wwan0", 135.0),
    },
    NetworkChange {
        what: "a fourth Wi-Fi comes; cellular ends 3 s later",
        kind: ChangeKind::MakeBeforeBreak,
        first: ("wlan0", 150.0),
        last: ("wwan0", 153.0),
    },
    NetworkChange {
        what: "Wi-Fi falls silent; cellular has been up for 3 s",
        kind: ChangeKind::Silent,
        first: ("wlan0", 168.0),
        last: ("wlan0", 168.0),
    },
    NetworkChange {
        what: "the silent Wi-Fi ends",
        kind: ChangeKind::MakeBeforeBreak,
        first: ("wlan0", 180.0),
        last: ("wlan0", 180.0),
    },
];

/// An event as the lab carried it out.
#[derive(Clone, Debug)]
struct LinkMoment {
    link: String,
    planned_s: f64,
    at_s: f64,
}

/// What the evening's parts are judged by.
struct EveningFindings {
    call_down: PacketTimes,
    call_up: PacketTimes,
    game: PacketTimes,
    ping: PacketTimes,
    names: Vec<(f64, f64)>,
    moments: Vec<LinkMoment>,
    /// How long the threads of the VPN and of the proxy had waited for a processor, in seconds of the evening.
    waits: Vec<(f64, Duration)>,
}

impl EveningFindings {
    fn moment(&self, (link, planned_s): (&str, f64)) -> f64 {
        let found = self
            .moments
            .iter()
            .find(|moment| moment.link == link && (moment.planned_s - planned_s).abs() < 0.01);
        found
            .unwrap_or_else(|| panic!("no event of {link} at {planned_s} s: {:?}", self.moments))
            .at_s
    }

    /// How long threads waited for a processor in a part of the evening.
    fn waited_ms(&self, from_s: f64, to_s: f64) -> f64 {
        let before = self.waits.iter().rev().find(|(at, _)| *at <= from_s);
        let after = self.waits.iter().find(|(at, _)| *at >= to_s);
        let (Some((_, before)), Some((_, after))) = (before, after) else {
            return 0.0;
        };
        after.saturating_sub(*before).as_secs_f64() * 1e3
    }

    /// Judges a change: its figures, and the marks that were missed.
    fn judge(&self, change: &NetworkChange, missed: &mut Vec<String>) -> Value {
        let (first_s, last_s) = (self.moment(change.first), self.moment(change.last));
        let end_s = last_s + AFTERMATH_S;
        let mut row = json!({ "at_s": rounded(first_s, 1e3), "what": change.what });
        let streams = [
            ("call_to_device", &self.call_down),
            ("call_to_server", &self.call_up),
            ("game", &self.game),
            ("ping", &self.ping),
        ];
        for (name, times) in streams {
            let (from_s, to_s, mark) = match change.kind {
                ChangeKind::BreakBeforeMake => {
                    let back = times.back_after(last_s);
                    (
                        last_s,
                        last_s + back.unwrap_or(f64::INFINITY),
                        BACK_WITHIN_MS,
                    )
                }
                kind => {
                    let gap: ArrivalGap = times.longest_gap(first_s, end_s);
                    let mark = match kind {
                        ChangeKind::Silent => SILENCE_MAX_MS,
                        _ => HANDOVER_GAP_MAX_MS,
                    };
                    (gap.from_s, gap.to_s, mark)
                }
            };
            let took_ms = (to_s - from_s) * 1e3;
            let word = match change.kind {
                ChangeKind::BreakBeforeMake => "back_after_ms",
                _ => "gap_ms",
            };
            row[format!("{name}_{word}")] = json!(rounded(took_ms, 1.0));
            if change.kind != ChangeKind::BreakBeforeMake {
                row[format!("{name}_gap_from_s")] = json!(rounded(from_s, 1e3));
            }
            // A handover has no mark for pings, of which five come in a second.
            let has_mark = name.starts_with("call") || change.kind == ChangeKind::BreakBeforeMake;
            let waited_ms = self.waited_ms(from_s, to_s.min(end_s));
            if has_mark && took_ms > mark {
                row[format!("{name}_processor_wait_ms")] = json!(rounded(waited_ms, 1.0));
                missed.push(format!(
                    "{}: {name} {took_ms:.0} ms (mark {mark:.0}), of which threads waited {waited_ms:.0} ms for a processor",
                    change.what
                ));
            }
        }
        if change.kind == ChangeKind::BreakBeforeMake {
            let answered = self.names.iter().map(|(_, at)| at - last_s);
            let back = answered.filter(|after| *after >= 0.0).reduce(f64::min);
            row["name_back_after_ms"] = json!(back.map(|back| rounded(back * 1e3, 1.0)));
        }
        for (name, times) in [("to_device", &self.call_down), ("to_server", &self.call_up)] {
            row[format!("call_{name}_lost")] = json!(times.lost(first_s - 1.0, end_s));
        }
        row
    }

    /// What a stream was like between changes: its delays and its longest gap on each network.
    fn between_changes(&self, times: &PacketTimes, over_s: f64) -> Vec<Value> {
        let starts = CHANGES.iter().map(|change| self.moment(change.last));
        let ends = CHANGES.iter().map(|change| self.moment(change.first));
        let starts = [0.0].into_iter().chain(starts);
        let parts = starts.zip(ends.chain([over_s]));
        let part = |(start_s, end_s): (f64, f64)| {
            let (from_s, to_s) = (start_s + AFTERMATH_S, end_s - 0.5);
            let delays = times.delays_ms(from_s, to_s);
            let at = |share: f64| {
                let delay = delays.get((delays.len() as f64 * share) as usize);
                rounded(delay.copied().unwrap_or(f64::NAN), 1.0)
            };
            json!({
                "from_s": rounded(from_s, 10.0), "to_s": rounded(to_s, 10.0), "lost": times.lost(from_s, to_s),
                "delay_median_ms": at(0.5), "delay_p95_ms": at(0.95),
                "delay_max_ms": delays.last().map(|delay| rounded(*delay, 1.0)),
                "longest_gap_ms": rounded(times.longest_gap(from_s, to_s).ms(), 1.0),
            })
        };
        parts.map(part).collect()
    }
}

fn rounded(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}

/// Runs a program on a thread of a namespace. Its finding comes through the channel.
fn start<T: Send + 'static>(
    namespace: &cedos_lab_emu::Namespace,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Receiver<T> {
    let (tell, told) = channel();
    let started = namespace.thread(name, move || drop(tell.send(work())));
    started.expect("started");
    told
}

fn found<T>(name: &str, from: &Receiver<T>) -> T {
    let found = from.recv_timeout(Duration::from_secs_f64(END_WITHIN_S * 3.0));
    found.unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Spawns a command of `cedos` in a namespace, and returns it with the first line that it prints.
fn spawn_cedos(
    namespace: &cedos_lab_emu::Namespace,
    command: tokio::process::Command,
    log: &std::path::Path,
) -> (std::process::Child, String) {
    let mut command = command.into_std();
    command.stderr(std::fs::File::create(log).expect("a file"));
    let mut child = namespace.spawn(command).expect("started");
    let mut lines = BufReader::new(child.stdout.take().expect("its output"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("text");
    std::thread::spawn(move || for _ in lines.lines() {});
    (child, line.trim().to_owned())
}

fn installed(program: &str) -> bool {
    let mut which = Command::new("sh");
    which.args(["-c", "command -v \"$0\"", program]);
    which
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

async fn evening() {
    let missing = PROGRAMS.iter().filter(|(program, _)| !installed(program));
    let missing: Vec<&str> = missing.map(|(_, package)| *package).collect();
    if !missing.is_empty() {
        return eprintln!("skipped: it needs {}", missing.join(", "));
    }
    sh(&format!(
        "mount -t proc proc /proc
         mount -t tmpfs t /run
         echo nameserver {} >/run/resolv.conf
         mount --bind /run/resolv.conf /etc/resolv.conf",
        cedos_lab_emu::plan::ORIGIN_V4
    ));
    let text = include_str!("evening.toml");
    let scenario = Scenario::parse("evening.toml", text, &mut |_| unreachable!("no traces"));
    let scenario = scenario.expect("a scenario");
    let over_s = scenario.duration_s;
    let classes: Vec<String> = scenario
        .links
        .iter()
        .map(|link| format!("{}={}", link.name, link.class.word()))
        .collect();
    let home = tempfile::tempdir().expect("a directory");
    let folder = home.path().join("servers");
    std::fs::create_dir(&folder).expect("made");
    let mut world = World::build(scenario).expect("a lab");
    let servers = EveningServers::start(&world, &folder);

    let device = device_key(home.path()).await;
    run(home.path(), &["key", "gen", "-o", "prox.key"]).await;
    let words = [
        "prox",
        "--listen",
        "203.0.113.10:4433",
        "--key",
        "prox.key",
        "--allow-private",
        "--allow-client",
        &device,
        "--state-dir",
        "proxy",
        "--tunnel-net",
        "10.83.0.0/16",
    ];
    let log = home.path().join("prox.log");
    let (mut proxy, address) = spawn_cedos(world.proxy(), cedos(home.path(), &words), &log);
    assert!(
        address.starts_with("d2tp://"),
        "{}",
        std::fs::read_to_string(&log).unwrap_or_default()
    );

    let clock = Arc::new(EveningClock {
        began: Instant::now(),
        over_s,
    });
    let moments = Arc::new(Mutex::new(Vec::new()));
    let (noting, noting_clock) = (moments.clone(), clock.clone());
    let begins = move |event: &cedos_lab_emu::WorldEvent| {
        let is_attaching = event.event.kind == EventKind::Attaching;
        if !is_attaching {
            noting.lock().expect("no panic").push(LinkMoment {
                link: event.link.clone(),
                planned_s: event.event.at.as_secs_f64(),
                at_s: noting_clock.now_s(),
            });
        }
    };
    world.start(begins).expect("its time begins");

    let mut words = vec!["vpn", "up", "--prox", &address, "--state-dir", "vpn"];
    words.extend(classes.iter().flat_map(|class| ["--link", class]));
    let log = home.path().join("vpn.log");
    let mut command = cedos(home.path(), &words);
    command.env(
        "RUST_LOG",
        std::env::var("EVENING_LOG").unwrap_or("warn".to_owned()),
    );
    let (mut vpn, up) = spawn_cedos(world.device(), command, &log);
    assert!(
        up.starts_with("cedos vpn: up as"),
        "{up}{}",
        std::fs::read_to_string(&log).unwrap_or_default()
    );
    let up_s = clock.now_s();

    let watched = [proxy.id(), vpn.id()].map(|id| Pid::from_raw(id as i32));
    let waiting = clock.clone();
    let waits = std::thread::spawn(move || {
        let wait = ProcessorWait::of(&watched);
        let mut waits = Vec::new();
        while !waiting.is_over() {
            waits.push((waiting.now_s(), wait.so_far()));
            waiting.wait_until(waiting.now_s() + 0.05);
        }
        waits
    });
    let (device, origin) = (world.device(), world.origin());
    let of = |clock: &Arc<EveningClock>| clock.clone();
    let (c, f) = (of(&clock), folder.clone());
    let shell = start(device, "ssh", move || programs::shell(&c, &f));
    let (c, f) = (of(&clock), folder.clone());
    let download = start(device, "wget", move || programs::long_download(&c, &f));
    let (c, f) = (of(&clock), folder.clone());
    let packages = start(device, "apt", move || programs::packages(&c, &f));
    let c = of(&clock);
    let mailbox = start(device, "imap", move || programs::mailbox(&c));
    let c = of(&clock);
    let names = start(device, "dig", move || programs::names(&c));
    let c = of(&clock);
    let time = start(device, "ntp", move || programs::time(&c));
    let c = of(&clock);
    let ping = start(device, "ping", move || programs::ping(&c));
    let c = of(&clock);
    let call_at_server = start(origin, "call", move || datagrams::call_at_server(&c));
    let c = of(&clock);
    start(origin, "game", move || datagrams::game_at_server(&c));
    let c = of(&clock);
    let call_at_device = start(device, "call", move || datagrams::call_at_device(&c));
    let c = of(&clock);
    let game = start(device, "game", move || datagrams::game_at_device(&c));
    let (c, browsing) = (of(&clock), home.path().join("browser"));
    std::fs::create_dir(&browsing).expect("made");
    let key_hash = servers.key_hash.clone();
    let browser = start(device, "browser", move || {
        programs::browser(&c, browsing, &key_hash)
    });

    clock.wait_until(MAIL_AT_S);
    servers.deliver_mail();
    clock.wait_until_over();

    let shell = found("ssh", &shell);
    let download = found("wget", &download);
    let packages = found("apt", &packages);
    let mailbox = found("imap", &mailbox);
    let (names, name_times) = found("dig", &names);
    let (time, _) = found("ntp", &time);
    let (ping, ping_times) = found("ping", &ping);
    let browser = found("browser", &browser);
    let (here, there) = (
        found("call", &call_at_device),
        found("call", &call_at_server),
    );
    let findings = EveningFindings {
        // What was sent is known at the other end.
        call_down: PacketTimes {
            sent: there.sent,
            arrived: here.arrived,
        },
        call_up: PacketTimes {
            sent: here.sent,
            arrived: there.arrived,
        },
        game: found("game", &game),
        ping: ping_times,
        names: name_times,
        moments: moments.lock().expect("no panic").clone(),
        waits: waits.join().expect("no panic"),
    };
    assert_eq!(world.fault(), None);
    let mut missed = Vec::new();
    let changes: Vec<Value> = CHANGES
        .iter()
        .map(|change| findings.judge(change, &mut missed))
        .collect();
    for (name, found) in [
        ("ssh", &shell),
        ("wget", &download),
        ("apt", &packages),
        ("imap", &mailbox),
    ] {
        if found["whole"] != true {
            missed.push(format!("{name} was not whole: {found}"));
        }
    }
    let links: Vec<Value> = world
        .seen()
        .links
        .iter()
        .map(|link| json!({"name": link.name, "bytes_down": link.bytes_down, "bytes_up": link.bytes_up}))
        .collect();
    let stream = |times: &PacketTimes| {
        json!({
            "sent": times.sent.len(), "arrived": times.arrived.len(),
            "between_changes": findings.between_changes(times, over_s),
        })
    };
    let report = json!({
        "up_after_s": rounded(up_s, 1e3),
        "changes": changes,
        "call_to_device": stream(&findings.call_down),
        "call_to_server": stream(&findings.call_up),
        "game": stream(&findings.game),
        "browser": browser, "ssh": shell, "wget": download, "apt": packages, "imap": mailbox,
        "dns": names, "ntp": time, "ping": ping, "links": links, "missed": missed,
    });
    println!("{}", serde_json::to_string_pretty(&report).expect("JSON"));
    println!("{}", std::fs::read_to_string(&log).unwrap_or_default());
    programs::end(&mut vpn);
    programs::end(&mut proxy);
    assert!(missed.is_empty(), "missed: {missed:#?}");
}

#[test]
#[ignore = "it lasts for more than three minutes, and needs servers of the distribution"]
fn a_laptops_programs_go_on_through_an_evening_of_changing_networks() {
    in_namespace_with(EVENING, this_test!(), evening);
}
