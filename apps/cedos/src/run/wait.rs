//! The end of a program, and signals for it.

use cedos_terminal::print_stderr;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};
use std::task::Poll;

use d2tp_catch::children;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramExit(ExitStatus);

impl ProgramExit {
    /// Ends this process in the same way: with its code, or by the signal that ended it.
    pub fn into_exit_code(self) -> ExitCode {
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

/// Forwards the signals that this process gets for the program: SIGTERM, SIGHUP, SIGUSR1, SIGUSR2. Ctrl-C and Ctrl-\ come
/// from a terminal, which sends them to the program too: here they end nothing.
///
/// Made before the program runs, so that no signal ends this process and leaves the program behind.
#[derive(Debug)]
pub struct SignalForwarder {
    handed_on: Vec<(Signal, tokio::signal::unix::Signal)>,
    /// Listened to, so that they do not end this process.
    _heard: [tokio::signal::unix::Signal; 2],
}

impl SignalForwarder {
    /// Must be called in a runtime.
    ///
    /// # Errors
    /// What the system says.
    pub fn listen() -> io::Result<SignalForwarder> {
        let handed_on = [
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGUSR1,
            Signal::SIGUSR2,
        ];
        let stream = |kind: Signal| signal(SignalKind::from_raw(kind as i32));
        Ok(SignalForwarder {
            handed_on: handed_on
                .into_iter()
                .map(|kind| Ok((kind, stream(kind)?)))
                .collect::<io::Result<_>>()?,
            _heard: [stream(Signal::SIGINT)?, stream(Signal::SIGQUIT)?],
        })
    }

    /// Hands them on to `program`, or to what it left running.
    pub async fn forward_to(mut self, program: Pid) {
        loop {
            let signal = std::future::poll_fn(|cx| {
                let ready = |(kind, stream): &mut (Signal, tokio::signal::unix::Signal)| {
                    stream.poll_recv(cx).is_ready().then_some(*kind)
                };
                match self.handed_on.iter_mut().find_map(ready) {
                    Some(signal) => Poll::Ready(signal),
                    None => Poll::Pending,
                }
            })
            .await;
            if kill(program, signal).is_err() {
                // It left others, who are asked in its place.
                for child in children() {
                    let _ = kill(Pid::from_raw(child), signal);
                }
            }
        }
    }
}

/// Waits until the program and all that it left running have ended. `porter` is no part of it.
///
/// # Errors
/// What the system says.
pub async fn wait_for_program(program: Pid, porter: Pid) -> io::Result<ProgramExit> {
    let mut child = signal(SignalKind::child())?;
    let mut ended = None;
    let mut said = false;
    loop {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == program => {
                    ended = Some(ProgramExit(ExitStatus::from_raw((code & 0xff) << 8)));
                }
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == program => {
                    ended = Some(ProgramExit(ExitStatus::from_raw(signal as i32)));
                }
                Ok(WaitStatus::StillAlive) | Err(nix::errno::Errno::ECHILD) => break,
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(ended) = ended {
            let left: Vec<i32> = children()
                .into_iter()
                .filter(|pid| *pid != porter.as_raw())
                .collect();
            if left.is_empty() {
                return Ok(ended);
            }
            if !said {
                said = true;
                print_stderr(&format!(
                    "cedos run: the program has ended; waiting for {} that it started",
                    left.len()
                ));
            }
        }
        let _ = child.recv().await;
    }
}
