//! How long processes waited for a processor: what a busy machine adds to a span of time.
//!
//! A test of a bound in real time subtracts it, so that the bound stays what it is on an idle machine, where processes
//! hardly wait, and the test does not fail because other programs run. A test that can only let time pass for a process
//! lets as much more pass as the process waited: [`sleep_beside`].

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::Pid;

use crate::PATIENCE;

/// How long the calling thread has waited for a processor, all in all.
pub fn waited_by_this_thread() -> Duration {
    waited_in(Path::new("/proc/thread-self")).unwrap_or_default()
}

/// How often the figures of processes that may end are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long each thread has been ready to run without running, by process and number.
type ThreadWaits = BTreeMap<(i32, u32), Duration>;

/// The time that the threads of processes had waited for a processor at some moment.
#[must_use]
pub struct ProcessorWait {
    pids: Vec<Pid>,
    /// Whether the processes that these have started count, too.
    has_descendants: bool,
    before: ThreadWaits,
    /// The greatest figures since: those of threads that have ended stay.
    greatest: Mutex<ThreadWaits>,
}

impl ProcessorWait {
    /// Begins to watch this process and `others`, with all of their threads.
    pub fn of(others: &[Pid]) -> ProcessorWait {
        let mut pids = vec![Pid::this()];
        pids.extend(others);
        ProcessorWait::begin(pids, false)
    }

    /// Begins to watch this process and all that it has started, or will have started. For a test that is a process of
    /// its own, as those in namespaces are: a test program with several tests starts processes for each of them.
    pub fn of_this_and_descendants() -> ProcessorWait {
        ProcessorWait::begin(vec![Pid::this()], true)
    }

    fn begin(pids: Vec<Pid>, has_descendants: bool) -> ProcessorWait {
        let mut wait = ProcessorWait {
            pids,
            has_descendants,
            before: ThreadWaits::new(),
            greatest: Mutex::default(),
        };
        wait.before = wait.look();
        wait
    }

    /// How long the threads have waited for a processor since, all together.
    pub fn so_far(&self) -> Duration {
        self.of_each_thread().iter().sum()
    }

    /// How long the thread that waited longest has waited for a processor since.
    pub fn longest(&self) -> Duration {
        self.of_each_thread().into_iter().max().unwrap_or_default()
    }

    /// Awaits `future`, and returns with its result how long the threads have waited for a processor since. The threads of
    /// a process that ends meanwhile count by the figures that were seen last.
    pub async fn during<T>(&self, future: impl Future<Output = T>) -> (T, Duration) {
        let mut future = pin!(future);
        loop {
            // sleep: the figure of a running process is looked at now and then
            let look = tokio::time::sleep(LOOK_EVERY);
            tokio::select! {
                result = &mut future => return (result, self.so_far()),
                () = look => self.note(),
            }
        }
    }

    /// Notes the figures of the threads that run now.
    fn note(&self) {
        self.greatest().extend(self.look());
    }

    fn greatest(&self) -> MutexGuard<'_, ThreadWaits> {
        let greatest = self.greatest.lock();
        greatest.unwrap_or_else(PoisonError::into_inner)
    }

    fn of_each_thread(&self) -> Vec<Duration> {
        self.note();
        let greatest = self.greatest();
        let since = |(thread, waited): (&(i32, u32), &Duration)| {
            waited.saturating_sub(self.before.get(thread).copied().unwrap_or_default())
        };
        greatest.iter().map(since).collect()
    }

    /// How long the threads that run now have waited. There are none of processes that have ended.
    fn look(&self) -> ThreadWaits {
        let mut waits = ThreadWaits::new();
        let mut pids = self.pids.clone();
        while let Some(pid) = pids.pop() {
            let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
                continue;
            };
            for thread in threads.flatten() {
                let path = thread.path();
                let number = thread.file_name().to_str().and_then(|id| id.parse().ok());
                let (Some(number), Some(waited)) = (number, waited_in(&path)) else {
                    continue;
                };
                waits.insert((pid.as_raw(), number), waited);
                if self.has_descendants {
                    let children = std::fs::read_to_string(path.join("children"));
                    let children = children.unwrap_or_default();
                    let ids = children.split_whitespace().filter_map(|id| id.parse().ok());
                    pids.extend(ids.map(Pid::from_raw));
                }
            }
        }
        waits
    }
}

/// The time that a thread, by its place in /proc, was ready to run, and did not.
fn waited_in(thread: &Path) -> Option<Duration> {
    // Time on a processor, time in a queue for one, and how often it ran.
    let text = std::fs::read_to_string(thread.join("schedstat")).ok()?;
    let nanoseconds = text.split(' ').nth(1)?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

/// Sleeps for `span`, and for as long as one of this process's or the others' threads waited for a processor meanwhile:
/// for what happens within that span on an idle machine, and tells nobody.
pub async fn sleep_beside(span: Duration, others: &[Pid]) {
    let (wait, begun) = (ProcessorWait::of(others), Instant::now());
    let left = || {
        let passed = begun.elapsed().saturating_sub(wait.longest());
        span.saturating_sub(passed)
    };
    // More than that is not for want of a processor.
    while !left().is_zero() && begun.elapsed() < span + PATIENCE {
        // sleep: time in which processes can run is what is needed
        tokio::time::sleep(left()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spins on four threads for each processor for 200 ms. Returns what each finds at its end.
    fn on_spinning_threads<T: Send>(find: impl Fn() -> T + Sync) -> Vec<T> {
        let count = 4 * std::thread::available_parallelism().unwrap().get();
        let until = Instant::now() + Duration::from_millis(200);
        std::thread::scope(|scope| {
            let spin = || {
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                assert!(waited_by_this_thread() > Duration::ZERO);
                find()
            };
            let all: Vec<_> = (0..count).map(|_| scope.spawn(spin)).collect();
            all.into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    #[test]
    fn threads_that_share_processors_wait_for_them() {
        let wait = ProcessorWait::of(&[]);
        let counted = on_spinning_threads(|| wait.so_far()).into_iter().max();
        // Three of four threads wait at any time.
        assert!(counted > Some(Duration::from_millis(200)), "{counted:?}");
        // Those that have ended stay in the sum, and each waited for a part of it.
        assert!(Some(wait.so_far()) >= counted);
        assert!(!wait.longest().is_zero() && wait.longest() < wait.so_far());
    }

    #[tokio::test]
    async fn processes_that_were_started_count_with_those_that_began_them() {
        let alone = ProcessorWait::of(&[]);
        let wait = ProcessorWait::of_this_and_descendants();
        let spins = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
        let all = format!("for n in 1 2 3 4 5 6 7 8; do ({spins}) & done; wait");
        let child = tokio::process::Command::new("sh")
            .args(["-c", &all])
            .status();
        let (status, waited) = wait.during(child).await;
        assert!(status.unwrap().success());
        let more = waited.saturating_sub(alone.so_far());
        assert!(more > Duration::from_millis(20), "{more:?} of {waited:?}");
    }

    #[tokio::test]
    async fn a_sleep_beside_processes_is_at_least_as_long_as_it_says() {
        let begun = Instant::now();
        sleep_beside(Duration::from_millis(30), &[]).await;
        assert!(begun.elapsed() >= Duration::from_millis(30));
    }
}
