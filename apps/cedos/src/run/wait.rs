//! The end of a program, and signals for it.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};

use d2tp_catch::children;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended(ExitStatus);

impl Ended {
    /// Ends this process in the same way: with its code, or by the signal that ended it.
    pub fn pass_on(self) -> ExitCode {
        if let Some(signal) = self.0.signal().and_then(|n| Signal::try_from(n).ok()) {
            // Its core is the program's business.
            let _ = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0);
            let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
            // SAFETY: back to what the system does.
            let _ = unsafe { sigaction(signal, &default) };
            let mut only = SigSet::empty();
            only.add(signal);
            let _ = only.thread_unblock();
            let _ = nix::sys::signal::raise(signal);
        }
        let code = self.0.code().and_then(|code| u8::try_from(code).ok());
        // A signal that does not end this process is said as a shell would.
        let signalled = || 128u8.wrapping_add(self.0.signal().unwrap_or(0) as u8);
        ExitCode::from(code.unwrap_or_else(signalled))
    }
}

/// Hands on what is sent to this process: SIGTERM, SIGHUP, SIGUSR1, SIGUSR2. Ctrl-C and Ctrl-\ come from a
/// terminal, which sends them to the program too: here they end nothing.
pub async fn pass_on(program: Pid) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut one = signal(SignalKind::user_defined1())?;
    let mut two = signal(SignalKind::user_defined2())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut quit = signal(SignalKind::quit())?;
    loop {
        let signal = tokio::select! {
            _ = terminate.recv() => Signal::SIGTERM,
            _ = hangup.recv() => Signal::SIGHUP,
            _ = one.recv() => Signal::SIGUSR1,
            _ = two.recv() => Signal::SIGUSR2,
            _ = interrupt.recv() => continue,
            _ = quit.recv() => continue,
        };
        if kill(program, signal).is_err() {
            // It left others, who are asked in its place.
            for child in children() {
                let _ = kill(Pid::from_raw(child), signal);
            }
        }
    }
}

/// Waits until the program and all that it left running have ended. `porter` is no part of it.
///
/// # Errors
/// What the system says.
pub async fn until_ended(program: Pid, porter: Option<Pid>) -> io::Result<Ended> {
    let mut child = signal(SignalKind::child())?;
    let mut ended = None;
    let mut said = false;
    loop {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == program => {
                    ended = Some(Ended(ExitStatus::from_raw((code & 0xff) << 8)));
                }
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == program => {
                    ended = Some(Ended(ExitStatus::from_raw(signal as i32)));
                }
                Ok(WaitStatus::StillAlive) | Err(nix::errno::Errno::ECHILD) => break,
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(ended) = ended {
            let porter = porter.map_or(0, Pid::as_raw);
            let left: Vec<i32> = children()
                .into_iter()
                .filter(|pid| *pid != porter)
                .collect();
            if left.is_empty() {
                return Ok(ended);
            }
            if !said {
                said = true;
                eprintln!(
                    "cedos run: it has ended; {} that it began goes on",
                    left.len()
                );
            }
        }
        let _ = child.recv().await;
    }
}
