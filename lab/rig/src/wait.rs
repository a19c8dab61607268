//! Waiting for something that is certain to happen, with a limit so that a failure is not a hang.

use std::time::Duration;

/// Upper bound for what is certain to happen.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Time between two looks at a condition.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What `future` returns; panics when it takes longer than [`PATIENCE`].
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

/// Waits until `is_so`; panics, saying `what`, when it is not so within [`PATIENCE`].
pub async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    until_some(what, || is_so().then_some(())).await;
}

/// The first value that `look` finds; panics, saying `what`, when there is none within [`PATIENCE`].
pub async fn until_some<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    until_async(what, async || look()).await
}

/// The first value that `look` finds by asking somebody; panics, saying `what`, when there is none
/// within [`PATIENCE`].
pub async fn until_async<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            // sleep: files, counters and other processes are looked at; none of them tells
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    match tokio::time::timeout(PATIENCE, found).await {
        Ok(found) => found,
        Err(_) => panic!("never: {what}"),
    }
}

/// Waits on this thread until `is_so`, as [`until`] does in a task.
pub fn until_blocking(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = std::time::Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "never: {what}");
        // sleep: files, counters and other processes are looked at; none of them tells
        std::thread::sleep(LOOK_EVERY);
    }
}
