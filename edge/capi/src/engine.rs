//! The engine: one thread with its own descriptor table, started at first use.
//!
//! ```text
//!  call ── job ──▶ porter ──▶ engine's thread: EngineState (sessions, listeners, flows), tasks
//!       ◀─────── reply ──────
//! ```
//!
//! The thread leaves the process's descriptor table (close_range(2), CLOSE_RANGE_UNSHARE) before it
//! opens a descriptor. Its sockets therefore take no number from the program, are not closed by a
//! loop over all descriptors, and are not inherited by children. For the same reason other threads
//! cannot wake it, which takes a descriptor: a second thread with the same table, the porter, waits
//! for jobs and wakes it. Both block every signal. All state of the driver belongs to the engine's
//! thread, in [`EngineState`].

use std::fs::File;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, mpsc};

use tokio::sync::mpsc::unbounded_channel;

use crate::engine_handle::{EngineJob, SocketEngine, lock};
use crate::engine_state::EngineState;
use crate::errno::{CallResult, Errno};
use crate::{exit_flush, fork, wake_watch};

static WATCHES: Once = Once::new();
static SHARES: AtomicBool = AtomicBool::new(false);

/// Keeps the engine's descriptors in the program's descriptor table. Must be called before the
/// first socket. It is for programs in Rust: their tokio is also the engine's, and all its runtimes
/// share one pair of sockets, which must be in the same table.
pub fn share_descriptors() {
    SHARES.store(true, Ordering::Relaxed);
}

/// The engine of this process, which is started if necessary.
pub(crate) fn get() -> CallResult<Arc<SocketEngine>> {
    WATCHES.call_once(|| {
        fork::watch();
        exit_flush::watch();
    });
    let mut engine = lock();
    if let Some(running) = engine.as_ref()
        && running.pid == std::process::id()
    {
        return Ok(running.clone());
    }
    let (jobs, to_do) = mpsc::channel();
    let (ready, started) = mpsc::channel();
    let before = block_signals();
    let thread = std::thread::Builder::new()
        .name("d2tp".into())
        .spawn(move || run(to_do, &ready));
    restore_signals(&before);
    thread?;
    let port = started.recv().map_err(|_| Errno(libc::EIO))??;
    let new = Arc::new(SocketEngine {
        jobs,
        port,
        pid: std::process::id(),
    });
    // The parent's engine is not dropped, because its thread does not exist here.
    std::mem::forget(engine.replace(new.clone()));
    Ok(new)
}

fn run(jobs: mpsc::Receiver<EngineJob>, ready: &mpsc::Sender<CallResult<u16>>) {
    let (carry, mut carried) = unbounded_channel();
    let begun = move || -> std::io::Result<(tokio::runtime::Runtime, crate::pair::PairPort)> {
        let leaves = !SHARES.load(Ordering::Relaxed);
        if leaves {
            leave_descriptors()?;
        }
        // Threads that this thread starts share its descriptor table.
        std::thread::Builder::new()
            .name("d2tp-porter".into())
            .spawn(move || {
                while jobs
                    .recv()
                    .is_ok_and(|job: EngineJob| carry.send(job).is_ok())
                {}
            })?;
        if leaves {
            fork::restore_signal_pair()?;
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        if leaves {
            fork::note_signal_pair();
        }
        Ok((runtime, crate::pair::PairPort::take()?))
    };
    let (runtime, port) = match begun() {
        Ok(begun) => begun,
        Err(error) => {
            let _ = ready.send(Err(error.into()));
            return;
        }
    };
    let _ = ready.send(Ok(port.number()));
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let home = Rc::new(EngineState::new(port));
        tokio::task::spawn_local(wake_watch::run(home.clone()));
        while let Some(job) = carried.recv().await {
            job(&home);
        }
    });
}

/// Gives this thread a descriptor table of its own.
fn leave_descriptors() -> std::io::Result<()> {
    // SAFETY: this thread has opened nothing, and the descriptors of others stay open for them.
    let left = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, CLOSE_RANGE_UNSHARE) };
    if left < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // A program that closes its output expects that, so this thread must not keep it open.
    let null = File::options().read(true).write(true).open("/dev/null")?;
    for standard in 0..3 {
        // SAFETY: plain numbers, in this thread's own table.
        unsafe { libc::dup2(null.as_raw_fd(), standard) };
    }
    Ok(())
}

/// The flag of close_range(2) for a table of its own (linux/close_range.h).
const CLOSE_RANGE_UNSHARE: u32 = 1 << 1;

fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets have the right size.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    }
}

fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: a set that `block_signals` filled.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
}
