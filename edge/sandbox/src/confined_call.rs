//! Calls on a thread of their own that reaches no file, no network and no program: for what parses bytes of strangers.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError,
};

use crate::sandbox_report::SandboxPart;
use crate::system_calls;

/// Whether calls are confined.
static IS_ON: AtomicBool = AtomicBool::new(true);

/// Switches confinement of later calls on or off: for `--no-sandbox`.
pub fn set_confinement(is_on: bool) {
    IS_ON.store(is_on, Ordering::Relaxed);
}

/// Runs `work` on a thread that can compute, allocate memory and write messages to standard error, and nothing else:
/// no file can be opened, no socket made, and those that are open cannot be used. Blocks until it is done.
///
/// ```
/// let text = cedos_sandbox::confined(|| std::fs::read_to_string("/etc/hostname"));
/// assert!(text.is_err());
/// ```
///
/// # Panics
/// If `work` panics, or no thread can be started.
pub fn confined<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    if !IS_ON.load(Ordering::Relaxed) {
        return work();
    }
    let ended = thread::scope(|scope| {
        let confined = scope.spawn(|| {
            note_once(confine_thread());
            work()
        });
        confined.join()
    });
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Takes from the calling thread what `confined` promises.
fn confine_thread() -> SandboxPart {
    // Both, for a kernel may have one of them only.
    let files = refuse_files().map_err(|error| error.to_string());
    system_calls::restrict_to_computing().and(files)
}

fn refuse_files() -> Result<(), RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .handle_access(AccessNet::from_all(ABI::V4))?
        .create()?
        .restrict_self()?;
    Ok(())
}

/// Logs the first reason for which calls are not confined.
fn note_once(outcome: SandboxPart) {
    static NOTED: OnceLock<()> = OnceLock::new();
    if let Err(reason) = outcome {
        NOTED.get_or_init(|| tracing::warn!(reason, "parsers are not confined"));
    }
}
