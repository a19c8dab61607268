//! Counts payload bytes, and reads the clock and the CPU time twice.
//!
//! ```text
//!  first byte ── warm-up ──▶ look A ── window ──▶ look B ── grace ──▶ over
//!                            bytes, CPU            bytes, CPU          the peer stops
//! ```
//!
//! The result is B − A: handshakes, slow start and the end of the run are outside. The peer's loop
//! only adds to a counter; another thread of the same process takes the looks. The grace keeps each
//! process running until the other one has certainly taken its second look.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::resource::{UsageWho, getrusage};
use serde::{Deserialize, Serialize};

/// [`MeterPlan::grace`] if the round trip is far below a millisecond: both processes start within a
/// round trip.
pub const GRACE_ON_ONE_MACHINE: Duration = Duration::from_millis(150);
/// How much longer than its plan a measurement may take.
const PATIENCE: Duration = Duration::from_secs(15);

/// When a measurement reads its counters.
#[derive(Clone, Copy, Debug)]
pub struct MeterPlan {
    /// The time from the first payload byte to the first reading.
    pub warm_up: Duration,
    /// The time from the first reading to the second.
    pub window: Duration,
    /// How long both processes continue after their window, so that neither ends inside the
    /// other's.
    pub grace: Duration,
    /// If set, the looks are taken at the first byte and at this one instead.
    pub end_bytes: Option<u64>,
}

impl MeterPlan {
    /// How long to wait for a process with this plan. The `window` of a plan by bytes is the time
    /// that they may take.
    pub fn patience(&self) -> Duration {
        self.warm_up + self.window + self.grace + PATIENCE
    }
}

/// What one process measured between its two looks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MeterReport {
    /// Payload bytes accepted (sender) or delivered (receiver).
    pub bytes: u64,
    /// Time between the looks.
    pub window_s: f64,
    /// CPU time of the whole process, user and system, as getrusage counts it.
    pub cpu_s: f64,
    /// Time in which threads of the process were ready to run but had no core, because of other
    /// load.
    pub waited_s: f64,
    /// Settings as read back by the running process, for readers of the table.
    pub notes: String,
}

impl MeterReport {
    fn between(a: &MeterReading, b: &MeterReading) -> Self {
        Self {
            bytes: b.bytes - a.bytes,
            window_s: (b.at - a.at).as_secs_f64(),
            cpu_s: (b.cpu - a.cpu).as_secs_f64(),
            waited_s: b.waited.saturating_sub(a.waited).as_secs_f64(),
            notes: String::new(),
        }
    }

    /// Payload rate in 10⁹ bits per second.
    pub fn gbps(&self) -> f64 {
        self.bytes as f64 * 8.0 / 1e9 / self.window_s
    }

    /// CPU-seconds for 10⁹ payload bytes.
    pub fn cpu_s_per_gb(&self) -> f64 {
        self.cpu_s / (self.bytes as f64 / 1e9)
    }
}

/// The counter of a peer, and the thread that watches it. There is one per process.
#[derive(Debug)]
pub struct ProcessMeter {
    bytes: AtomicU64,
    over: AtomicBool,
    begun: Mutex<Option<mpsc::Sender<()>>>,
    notes: Mutex<String>,
    measured: OnceLock<MeterReport>,
    /// The number of bytes that ends the measurement, regardless of time.
    end_bytes: u64,
}

impl ProcessMeter {
    /// Starts the watching thread; it sleeps until the first [`ProcessMeter::add`].
    pub fn start(plan: MeterPlan) -> Arc<Self> {
        let (begun, first_byte) = mpsc::channel();
        let meter = Arc::new(Self {
            bytes: AtomicU64::new(0),
            over: AtomicBool::new(false),
            begun: Mutex::new(Some(begun)),
            notes: Mutex::new(String::new()),
            measured: OnceLock::new(),
            end_bytes: plan.end_bytes.unwrap_or(u64::MAX),
        });
        let watched = Arc::clone(&meter);
        std::thread::spawn(move || {
            if first_byte.recv().is_err() {
                return;
            }
            match plan.end_bytes {
                None => watched.watch(plan),
                Some(_) => watched.watch_bytes(),
            }
        });
        meter
    }

    /// Creates a meter without a clock: it is over when `bytes` have been counted, and measures
    /// nothing.
    #[cfg(test)]
    pub fn counting_to(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes: AtomicU64::new(0),
            over: AtomicBool::new(false),
            begun: Mutex::new(None),
            notes: Mutex::new(String::new()),
            measured: OnceLock::new(),
            end_bytes: bytes,
        })
    }

    /// Ends the measurement from outside.
    #[cfg(test)]
    pub fn stop(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Bytes counted so far.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Counts payload bytes. Only one thread of the process may call this.
    pub fn add(&self, bytes: usize) {
        let before = self.bytes.load(Ordering::Relaxed);
        // A plain store, not an atomic addition: there is one writer.
        let now = before + bytes as u64;
        self.bytes.store(now, Ordering::Relaxed);
        if now >= self.end_bytes {
            self.over.store(true, Ordering::Relaxed);
        }
        if before == 0
            && let Some(begun) = self.begun.lock().expect("no holder panics").take()
        {
            // The watcher waits for this; it cannot have ended before.
            let _ = begun.send(());
        }
    }

    /// Whether the peer should stop sending or reading.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Replaces the notes of the report.
    pub fn note(&self, notes: String) {
        *self.notes.lock().expect("no holder panics") = notes;
    }

    /// Ignores an error after the second look: the other process ended first.
    pub fn forgive<E: Into<anyhow::Error>>(&self, outcome: Result<(), E>) -> Result<()> {
        match outcome {
            Err(_) if self.measured.get().is_some() => Ok(()),
            other => other.map_err(Into::into),
        }
    }

    /// If the plan is by bytes, waits until the watcher has taken its second look.
    pub fn await_look(&self) {
        while self.is_over() && self.measured.get().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The result of the measurement.
    ///
    /// # Errors
    /// The flow ended before the window did, or no byte arrived in it.
    pub fn report(&self) -> Result<MeterReport> {
        let mut report = self.measured.get().cloned().with_context(|| {
            format!(
                "the flow ended before the measuring window did, after {} bytes: the other \
                 process left, or nothing came through",
                self.bytes.load(Ordering::Relaxed)
            )
        })?;
        if report.bytes == 0 {
            bail!(
                "no byte came through during the measuring window: the flow stalled after {} bytes",
                self.bytes.load(Ordering::Relaxed)
            );
        }
        report.notes = self.notes.lock().expect("no holder panics").clone();
        Ok(report)
    }

    fn watch(&self, plan: MeterPlan) {
        std::thread::sleep(plan.warm_up);
        let a = MeterReading::take(self);
        std::thread::sleep(plan.window);
        let b = MeterReading::take(self);
        self.measured
            .set(MeterReport::between(&a, &b))
            .expect("the watcher measures once");
        std::thread::sleep(plan.grace);
        self.over.store(true, Ordering::Relaxed);
    }

    /// Takes the looks at the first byte and, with an accuracy of a millisecond, at the last.
    fn watch_bytes(&self) {
        let mut a = MeterReading::take(self);
        a.bytes = 0;
        while !self.is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let b = MeterReading::take(self);
        self.measured
            .set(MeterReport::between(&a, &b))
            .expect("the watcher measures once");
    }
}

struct MeterReading {
    at: Instant,
    bytes: u64,
    cpu: Duration,
    waited: Duration,
}

impl MeterReading {
    fn take(meter: &ProcessMeter) -> Self {
        Self {
            at: Instant::now(),
            bytes: meter.bytes.load(Ordering::Relaxed),
            cpu: cpu_of_process(),
            waited: waited_by_process(),
        }
    }
}

fn cpu_of_process() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("getrusage of oneself cannot fail");
    [usage.user_time(), usage.system_time()]
        .iter()
        .map(|time| Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000))
        .sum()
}

/// Run-queue wait of all threads: the second field of `schedstat`, in nanoseconds. Zero if the
/// kernel does not count it.
fn waited_by_process() -> Duration {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return Duration::ZERO;
    };
    let waited_ns = tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok())
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum();
    Duration::from_nanos(waited_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_and_cost_are_per_payload_byte() {
        let report = MeterReport {
            bytes: 5_000_000_000,
            window_s: 4.0,
            cpu_s: 2.0,
            ..MeterReport::default()
        };
        assert!((report.gbps() - 10.0).abs() < 1e-9);
        assert!((report.cpu_s_per_gb() - 0.4).abs() < 1e-9);
    }

    #[test]
    fn a_flow_that_ends_early_has_no_report() {
        let meter = ProcessMeter::start(MeterPlan {
            warm_up: Duration::from_secs(3600),
            window: Duration::from_secs(3600),
            grace: Duration::ZERO,
            end_bytes: None,
        });
        meter.add(1000);
        let error = meter.report().expect_err("the window never ended");
        assert!(error.to_string().contains("after 1000 bytes"), "{error}");
        assert!(meter.forgive(Err(anyhow::anyhow!("reset"))).is_err());
    }

    #[test]
    fn only_what_lies_between_the_looks_counts() {
        let at = Instant::now();
        let look = |s: u64, bytes: u64| MeterReading {
            at: at + Duration::from_secs(s),
            bytes,
            cpu: Duration::from_millis(500 * s),
            waited: Duration::from_millis(10 * s),
        };
        let report = MeterReport::between(&look(1, 7_000), &look(5, 4_007_000));
        assert_eq!(report.bytes, 4_000_000);
        assert_eq!(report.window_s, 4.0);
        assert_eq!(report.cpu_s, 2.0);
        assert_eq!(report.waited_s, 0.04);
    }

    #[test]
    fn a_window_without_a_byte_is_no_measurement() {
        let meter = ProcessMeter::counting_to(1);
        let looks = [(); 2].map(|()| MeterReading::take(&meter));
        let silent = MeterReport::between(&looks[0], &looks[1]);
        meter.measured.set(silent).expect("nothing else measures");
        let error = meter.report().expect_err("0 bytes");
        assert!(error.to_string().contains("no byte"), "{error}");
    }
}
