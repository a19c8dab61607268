//! Runs many seeds on all cores: finds those that break something, and counts what they tried.
//!
//! A seed is one drawn scenario ([`scenario_text`]) and one run of it. Seeds are independent, so
//! the result is the same for any number of threads.

use std::cell::RefCell;
use std::num::NonZero;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cedos_lab_scenario::Scenario;

use crate::Coverage;
pub use crate::draw::scenario_text;

/// The stack size of a thread that runs seeds: that of a program's main thread.
const STACK_BYTES: usize = 8 << 20;

/// A seed whose run broke something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailingSeed {
    /// Seed of the scenario.
    pub seed: u64,
    /// Salt of the run, which makes other random choices of the same scenario.
    pub salt: u64,
    /// The error in words.
    pub what: String,
}

impl FailingSeed {
    /// The command that repeats the run.
    pub fn replay(&self) -> String {
        let FailingSeed { seed, salt, .. } = self;
        format!("cedos sim fuzz --first {seed} --seeds 1 --salt {salt} --keep .")
    }
}

/// The result of running many seeds.
#[derive(Clone, Debug, Default)]
pub struct FuzzResult {
    /// Runs that broke an invariant, in the order of their seeds.
    pub failing: Vec<FailingSeed>,
    /// Situations that the runs tried, all together.
    pub coverage: Coverage,
}

/// Runs all seeds of a range. `found` is called with each failing seed as soon as it fails.
pub fn try_seeds(seeds: Range<u64>, salt: u64, found: impl Fn(&FailingSeed) + Sync) -> FuzzResult {
    try_each(seeds, salt, |seed| try_seed(seed, salt), found)
}

/// Tries all seeds of a range by `run`; `found` hears of each that fails as soon as it does.
pub fn try_each(
    seeds: Range<u64>,
    salt: u64,
    run: impl Fn(u64) -> Result<Coverage, String> + Sync,
    found: impl Fn(&FailingSeed) + Sync,
) -> FuzzResult {
    let next = AtomicU64::new(seeds.start);
    let worker = || {
        let mut tried = FuzzResult::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return tried;
            }
            match run(seed) {
                Ok(coverage) => tried.coverage.add(&coverage),
                Err(what) => {
                    let failing = FailingSeed { seed, salt, what };
                    found(&failing);
                    tried.failing.push(failing);
                }
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let mut all = FuzzResult::default();
    thread::scope(|scope| {
        let spawned = |_| {
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            thread
                .spawn_scoped(scope, worker)
                .expect("a thread can be started")
        };
        let workers: Vec<_> = (0..threads).map(spawned).collect();
        for worker in workers {
            let tried = worker.join().expect("panics of runs are caught");
            all.coverage.add(&tried.coverage);
            all.failing.extend(tried.failing);
        }
    });
    all.failing.sort_by_key(|failing| failing.seed);
    all
}

/// Runs the scenario of a seed. Returns its coverage.
///
/// # Errors
/// The error in words: a fault, a panic of the core, or a flow that did not complete.
pub fn try_seed(seed: u64, salt: u64) -> Result<Coverage, String> {
    let text = scenario_text(seed, salt);
    let scenario = Scenario::parse("fuzz", &text, &mut |name| {
        unreachable!("no scenario drawn here names {name}")
    })
    .map_err(|fault| fault.to_string())?;
    try_scenario(&scenario)
}

/// Runs a scenario. Returns its coverage.
///
/// # Errors
/// The error in words: a fault, a panic of the core, or an expectation that does not hold.
pub fn try_scenario(scenario: &Scenario) -> Result<Coverage, String> {
    listen_to_panics();
    PANIC.set(Some(String::new()));
    let ended = catch_unwind(AssertUnwindSafe(|| crate::run(scenario, None)));
    let panicked = PANIC.take().unwrap_or_default();
    let outcome = match ended {
        Ok(ended) => ended.map_err(|fault| fault.to_string())?,
        Err(_) => return Err(panicked),
    };
    let broken = outcome.report.expectations.iter().filter(|e| !e.holds);
    let broken = broken.map(|e| format!("{} ({})", e.text, e.why));
    let failed = outcome.failed.iter();
    let failed = failed.map(|(id, why)| format!("flow {id}: {why}"));
    let wrong: Vec<String> = failed.chain(broken).collect();
    if wrong.is_empty() {
        Ok(outcome.coverage)
    } else {
        Err(wrong.join(", "))
    }
}

thread_local! {
    /// The message of this thread's last panic; `None` unless panics are being recorded.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes panics during a run be recorded with their location instead of printed.
fn listen_to_panics() {
    static LISTENS: Once = Once::new();
    LISTENS.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let listens = PANIC.with_borrow_mut(|kept| {
                kept.as_mut()
                    .map(|kept| *kept = info.to_string().replace('\n', " "))
                    .is_some()
            });
            if !listens {
                before(info);
            }
        }));
    });
}
