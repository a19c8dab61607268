//! How long processes waited for a processor: what a busy machine adds to a span of time.
//!
//! A test of a bound in real time subtracts it, so that the bound stays what it is on an idle machine, where processes
//! hardly wait, and the test does not fail because other programs run.

use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use nix::unistd::Pid;

/// How often the figures of processes that may end are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long the calling thread has waited for a processor, all in all.
pub fn waited_by_this_thread() -> Duration {
    waited_in(Path::new("/proc/thread-self")).unwrap_or_default()
}

/// The time that processes had waited for a processor at some moment.
#[must_use]
pub struct ProcessorWait {
    pids: Vec<Pid>,
    before: Duration,
}

impl ProcessorWait {
    /// Begins to watch this process and `others`, with all of their threads.
    pub fn of(others: &[Pid]) -> ProcessorWait {
        let mut pids = vec![Pid::this()];
        pids.extend(others);
        let before = waited(&pids);
        ProcessorWait { pids, before }
    }

    /// How long the threads have waited for a processor since, all together.
    pub fn so_far(&self) -> Duration {
        waited(&self.pids).saturating_sub(self.before)
    }

    /// Awaits `future`, and returns with its result how long the threads have waited for a processor since. A process that
    /// ends meanwhile takes its figure with it: the greatest figure that was seen counts.
    pub async fn during<T>(&self, future: impl Future<Output = T>) -> (T, Duration) {
        let mut future = pin!(future);
        let mut greatest = Duration::ZERO;
        loop {
            // sleep: the figure of a running process is looked at now and then
            let look = tokio::time::sleep(LOOK_EVERY);
            tokio::select! {
                result = &mut future => return (result, greatest.max(self.so_far())),
                () = look => greatest = greatest.max(self.so_far()),
            }
        }
    }
}

/// The time that threads of processes were ready to run, and did not. It is zero for processes that have ended.
fn waited(pids: &[Pid]) -> Duration {
    let threads = pids
        .iter()
        .filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")).ok())
        .flat_map(|all| all.flatten());
    threads.filter_map(|thread| waited_in(&thread.path())).sum()
}

/// The time that a thread, by its place in /proc, was ready to run, and did not.
fn waited_in(thread: &Path) -> Option<Duration> {
    // Time on a processor, time in a queue for one, and how often it ran.
    let text = std::fs::read_to_string(thread.join("schedstat")).ok()?;
    let nanoseconds = text.split(' ').nth(1)?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn threads_that_share_processors_wait_for_them() {
        let wait = ProcessorWait::of(&[]);
        let count = 4 * std::thread::available_parallelism().unwrap().get();
        let until = Instant::now() + Duration::from_millis(200);
        let counted: Duration = std::thread::scope(|scope| {
            let spin = || {
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                assert!(waited_by_this_thread() > Duration::ZERO);
                // Threads that have ended are not counted any more.
                wait.so_far()
            };
            let all: Vec<_> = (0..count).map(|_| scope.spawn(spin)).collect();
            let ended = all.into_iter().map(|thread| thread.join().unwrap());
            ended.max().unwrap()
        });
        // Three of four threads wait at any time.
        assert!(counted > Duration::from_millis(200), "{counted:?}");
    }
}
