//! The process that keeps the queues of all connections of a user's programs short, for an agent in its sandbox.
//!
//! ```text
//!  cedos agent --short-queues ── a pipe ──▶ `cedos agent --keep-queues-short=3`: looks at all connections, sets clamps
//!                                 its end ──▶ it ends, too
//! ```
//!
//! It is outside the sandbox, since a process in one may not touch the sockets of processes outside.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use cedos_terminal::print_stderr;
use d2tp_session::{DrwaLambda, Time};
use d2tp_tcp::DeviceQueues;

/// Starts the process; it ends with the pipe.
///
/// # Errors
/// It cannot be started.
pub fn start(lambda: DrwaLambda) -> anyhow::Result<File> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg("agent")
        .arg(format!("--keep-queues-short={lambda}"))
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot start the process that keeps queues short")?;
    let pipe = child.stdin.take().context("no pipe to it")?;
    Ok(File::from(OwnedFd::from(pipe)))
}

/// Keeps queues short until the pipe on standard input ends.
///
/// # Errors
/// The kernel does not list connections.
pub fn run(lambda: DrwaLambda) -> anyhow::Result<()> {
    let (ended, end) = channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().lock().read_to_end(&mut Vec::new());
        let _ = ended.send(());
    });
    let begun = Instant::now();
    let mut queues = DeviceQueues::new(lambda);
    let mut is_said = false;
    loop {
        let now = Time::ZERO + begun.elapsed().into();
        let look = queues.update(now).context("cannot look at connections")?;
        if look.out_of_reach > 0 && !std::mem::replace(&mut is_said, true) {
            print_stderr(
                "note: the queues of some programs are not kept short, because the system keeps processes from each \
                 other's sockets (kernel.yama.ptrace_scope); an agent of root reaches those of root",
            );
        }
        match end.recv_timeout(Duration::from(look.next)) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}
