//! `cedos run` beside a metered link: an idle connection never wakes it without need, and events
//! after an idle time are handled as usual.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Stdio;
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{
    cell_on, in_namespace, origin_namespace, received, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::program::ProxyProcess;
use cedos_lab_rig::share::{alone, beside_others};
use cedos_lab_rig::{PATIENCE, program, this_test};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

const OBJECT_BYTES: usize = 24_000_000;

/// Reads as many bytes as it is told, and says how many came.
const PROGRAM: &str = r#"
exec 3<>/dev/tcp/192.0.2.1/$0
printf 'GET /a HTTP/1.1\r\nHost: origin\r\n\r\n' >&3
while read bytes; do head -c "$bytes" <&3 | wc -c; done
"#;

/// What a rest of ten seconds may wake for: 15 were seen, seven for each packet by which a path asks whether it is
/// still open and its answer.
const WAKES_MAX: u64 = 24; // a look a second more made it 36

/// How many spans of ten seconds are looked at: on a busy machine the connection comes to rest later.
const RESTS: usize = 3;

/// What probes of cellular may cost, of 100 kB each.
const PROBES_BYTES_MAX: u64 = 300_000;

/// How often a measurement is repeated that the load of the machine decided.
const TRIES_ON_BUSY_MACHINE: usize = 8;

/// How often each thread of a process waited.
fn waits(process: u32) -> BTreeMap<OsString, u64> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let of = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let count = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        let count = count.expect("a line of it").trim().parse();
        Some((task.file_name(), count.expect("a count")))
    };
    tasks
        .filter_map(|task| of(task.expect("a thread")))
        .collect()
}

/// A device with Wi-Fi and cellular, and whom it reaches.
struct Net {
    home: TempDir,
    origin: ScriptedOrigin,
    proxy: ProxyProcess,
}

impl Net {
    fn new() -> Net {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (origin, proxy) = origin_namespace(|| async move {
            let bytes = object(OBJECT_BYTES, 1);
            let script = move |asked: &OriginRequest| {
                OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
            };
            let origin = ScriptedOrigin::start_at("192.0.2.1", script).await;
            let proxy = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
            (origin, proxy)
        });
        wifi_on("198.51.100.7");
        cell_on();
        Net {
            home,
            origin,
            proxy,
        }
    }

    fn reader(&self, options: &[&str]) -> Reader {
        let port = self.origin.address.port().to_string();
        let words = [&["run", "--prox", &self.proxy.address], options, &["--"]].concat();
        let program = ["bash", "-c", PROGRAM, &port];
        let mut running = program::cedos(self.home.path(), &[&words[..], &program].concat())
            .stdin(Stdio::piped())
            .spawn()
            .expect("start cedos run");
        Reader {
            orders: running.stdin.take().expect("its input"),
            answers: BufReader::new(running.stdout.take().expect("its output")).lines(),
            running,
        }
    }
}

/// A program that reads what it is told to, by `cedos run`.
struct Reader {
    running: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Reader {
    async fn order(&mut self, bytes: usize) {
        let order = format!("{bytes}\n");
        let written = self.orders.write_all(order.as_bytes()).await;
        written.expect("it reads orders");
    }

    async fn read(&mut self, bytes: usize) {
        self.order(bytes).await;
        self.hear(bytes).await;
    }

    async fn hear(&mut self, bytes: usize) {
        let answer = tokio::time::timeout(PATIENCE, self.answers.next_line()).await;
        let answer = answer.expect("in time").expect("text").expect("a count");
        assert_eq!(answer, bytes.to_string());
    }
}

#[test]
fn a_connection_at_rest_wakes_for_nothing_and_pays_when_it_must() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let net = Net::new();
        let mut reader = net.reader(&["--policy", "any"]);
        let process = reader.running.id().expect("it runs");
        reader.read(1_000_000).await;
        // What is read ahead of it has come, and paths have asked what they ask in the beginning.
        // sleep: paths ask what they ask in their first seconds
        tokio::time::sleep(Duration::from_secs(8)).await;
        let mut wakes = u64::MAX;
        for _ in 0..RESTS {
            let before = waits(process);
            // sleep: wakes in a span of time are the subject
            tokio::time::sleep(Duration::from_secs(10)).await;
            // A thread that ended meanwhile had nothing to do.
            let since = |(thread, now): (OsString, u64)| now - before.get(&thread).unwrap_or(&0);
            wakes = waits(process).into_iter().map(since).sum();
            if wakes <= WAKES_MAX {
                break;
            }
        }
        assert!(wakes <= WAKES_MAX, "{wakes} wakes in ten seconds of rest");
        // Without a free network it pays.
        let before = received("wwan0");
        wifi_off();
        reader.read(14_000_000).await;
        let paid = received("wwan0") - before;
        assert!(paid > 1_000_000, "{paid} bytes on wwan0");
        // And not once there is one.
        wifi_on("198.51.100.99");
        // sleep: what the device had granted itself for cellular is to be over
        tokio::time::sleep(Duration::from_secs(4)).await;
        let before = received("wwan0");
        reader.read(8_500_000).await;
        let paid = received("wwan0") - before;
        assert!(
            paid < 100_000,
            "{paid} bytes on wwan0 beside a free network"
        );
    });
}

#[test]
fn a_connection_at_rest_pays_by_how_much_time_is_left() {
    // What it decides depends on the rates that it sees.
    let _machine = alone();
    in_namespace(this_test!(), || async {
        let net = Net::new();
        let mut reader = net.reader(&["--by", "+1h"]);
        reader.read(1_000_000).await;
        // sleep: the connection is to rest first
        tokio::time::sleep(Duration::from_secs(4)).await;
        let before = received("wwan0");
        wifi_off();
        reader.order(16_000_000).await;
        // sleep: that it does not pay for so long is the subject
        tokio::time::sleep(Duration::from_secs(6)).await;
        let paid = received("wwan0") - before;
        assert!(paid < 100_000, "{paid} bytes on wwan0, due in an hour");
        wifi_on("198.51.100.99");
        reader.hear(16_000_000).await;
        // How much is to come nobody says: Wi-Fi is waited for, and not until it is too late for cellular.
        let mut tries = 1..=TRIES_ON_BUSY_MACHINE;
        let (waited, left) = loop {
            if let Some(found) = when_cellular_is_paid_for(&net).await {
                break found;
            }
            assert!(
                tries.next().is_some(),
                "Wi-Fi was too slow for 40 s each time"
            );
        };
        // 15 s and 19 s were seen, of 34 s: half of the time that Wi-Fi left, which is less where programs start
        // slowly. By how much a slow machine moves that depends on the rates that it shows; the rule itself is tested
        // in core/sched, in virtual time.
        let all = waited + left;
        assert!(waited >= Duration::from_secs(2), "{waited:?} of {all:?}");
        assert!(left >= all.mul_f64(0.3), "{left:?} of {all:?}");
    });
}

/// How long after Wi-Fi went cellular is paid for, and the time left then until the connection is due. None if
/// cellular carried more than probes beside Wi-Fi: on a busy machine Wi-Fi looks too slow for the deadline.
async fn when_cellular_is_paid_for(net: &Net) -> Option<(Duration, Duration)> {
    let at_first = received("wwan0");
    // A moment, because it takes a while until the program has read a length of time.
    let (now, span) = (jiff::Timestamp::now(), Duration::from_secs(40));
    let due = Instant::now() + span;
    let by = (now + span).to_string();
    let mut reader = net.reader(&["--by", &by]);
    reader.read(1_000_000).await;
    // sleep: the connection is to rest first
    tokio::time::sleep(Duration::from_secs(4)).await;
    let before = received("wwan0");
    if before - at_first > PROBES_BYTES_MAX {
        return None;
    }
    wifi_off();
    let went = Instant::now();
    reader.order(16_000_000).await;
    while received("wwan0") - before < PROBES_BYTES_MAX && Instant::now() < due {
        // sleep: the kernel's counter is looked at until the connection is due
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Some((
        went.elapsed(),
        due.saturating_duration_since(Instant::now()),
    ))
}
