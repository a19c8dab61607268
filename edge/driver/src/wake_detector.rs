//! Detects that the machine resumed from sleep, without waking up to check.
//!
//! The kernel cancels a timer on the wall clock whenever that clock is set, which happens when the
//! machine resumes (`timerfd_create(2)`, `TFD_TIMER_CANCEL_ON_SET`). A clock that is set for
//! another reason costs one check.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The time of the timer, in seconds since 1970: later than any wait, and within the kernel's
/// range.
const NEVER_S: libc::time_t = 1 << 33;

pub(crate) struct WakeDetector {
    timer: AsyncFd<OwnedFd>,
}

impl WakeDetector {
    /// Starts to watch for changes of the clock. Must be called on a tokio runtime.
    pub(crate) fn watch() -> io::Result<WakeDetector> {
        // SAFETY: plain system calls; this function owns the descriptor from here on, and `spec` is
        // initialized.
        let timer = unsafe {
            let fd =
                libc::timerfd_create(libc::CLOCK_REALTIME, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let timer = OwnedFd::from_raw_fd(fd);
            let mut spec: libc::itimerspec = std::mem::zeroed();
            spec.it_value.tv_sec = NEVER_S;
            let flags = libc::TFD_TIMER_ABSTIME | libc::TFD_TIMER_CANCEL_ON_SET;
            if libc::timerfd_settime(fd, flags, &spec, std::ptr::null_mut()) < 0 {
                return Err(io::Error::last_os_error());
            }
            timer
        };
        // SAFETY: the value owns the descriptor that is registered, which therefore lives as long.
        let timer = unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) };
        Ok(WakeDetector {
            timer: timer.map_err(io::Error::from)?,
        })
    }

    /// Returns when the clock was set since the last call, so that the machine may have been
    /// asleep.
    pub(crate) async fn woken(&self) {
        loop {
            let Ok(mut ready) = self.timer.readable().await else {
                // The runtime is shutting down.
                return std::future::pending().await;
            };
            let read = ready.try_io(|timer| {
                let mut fired = [0u8; 8];
                // SAFETY: the buffer has the length that is passed.
                let n = unsafe { libc::read(timer.as_raw_fd(), fired.as_mut_ptr().cast(), 8) };
                if n < 0 {
                    Err(io::Error::last_os_error())
                } else {
                    Ok(())
                }
            });
            match read {
                // Would block: the readiness was spurious.
                Err(_) => {}
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ECANCELED) => return,
                Ok(_) => return std::future::pending().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn nothing_is_told_while_nobody_sets_the_clock() {
        let standby = WakeDetector::watch().unwrap();
        let told = tokio::time::timeout(Duration::from_millis(20), standby.woken()).await;
        assert!(told.is_err());
    }
}
