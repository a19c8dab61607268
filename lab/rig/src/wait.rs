//! Waiting for conditions that become true, with a limit so that a failure does not hang.

use std::time::Duration;

/// The longest wait for something that must happen.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The interval between checks of a condition.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The result of `future`; panics if it takes longer than [`PATIENCE`].
#[track_caller]
pub fn within<T>(future: impl Future<Output = T>) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    async move {
        match tokio::time::timeout(PATIENCE, future).await {
            Ok(value) => value,
            Err(_) => panic!("{caller}: not within {} s", PATIENCE.as_secs()),
        }
    }
}

/// Waits until `is_so` is true; panics with `what` if it is not within [`PATIENCE`].
pub async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    until_some(what, || is_so().then_some(())).await;
}

/// Waits for the first value that `look` returns; panics with `what` if there is none within
/// [`PATIENCE`].
pub async fn until_some<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    until_async(what, async || look()).await
}

/// Waits for the first value that the asynchronous `look` returns; panics with `what` if there is
/// none within [`PATIENCE`].
pub async fn until_async<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            // sleep: files, counters and other processes are polled, because they send no events
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    match tokio::time::timeout(PATIENCE, found).await {
        Ok(found) => found,
        Err(_) => panic!("never: {what}"),
    }
}

/// Waits on this thread until `is_so` is true, as [`until`] does in a task.
pub fn until_blocking(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = std::time::Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "never: {what}");
        // sleep: files, counters and other processes are polled, because they send no events
        std::thread::sleep(LOOK_EVERY);
    }
}
