//! A timer that counts while the machine sleeps, and wakes it if that is allowed.
//!
//! `CLOCK_BOOTTIME_ALARM` needs CAP_WAKE_ALARM, which systemd gives to user sessions from version
//! 254 on, and a hardware clock that can wake the machine. Without them `CLOCK_BOOTTIME` is used,
//! which fires as soon as something else has woken the machine.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use d2tp_time::Span;
use nix::errno::Errno;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Whether an alarm wakes the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WakeSupport {
    /// The alarm wakes the machine.
    Yes,
    /// The alarm fires late, when something else has woken the machine; the reason, for users.
    No(&'static str),
}

/// A timer of the kernel that can wake the machine.
#[derive(Debug)]
pub struct Alarm {
    timer: AsyncFd<BootTimer>,
    wake_support: WakeSupport,
}

#[derive(Debug)]
struct BootTimer(TimerFd);

impl AsRawFd for BootTimer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Alarm {
    /// Opens an alarm that is not set. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The kernel has no timer descriptors, or the process has no descriptors left.
    pub fn open() -> io::Result<Alarm> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let (timer, wakes) = match TimerFd::new(ClockId::CLOCK_BOOTTIME_ALARM, flags) {
            Ok(timer) if has_waking_clock() => (timer, WakeSupport::Yes),
            Ok(timer) => (
                timer,
                WakeSupport::No("the machine has no clock that could wake it"),
            ),
            Err(Errno::EPERM) => (
                TimerFd::new(ClockId::CLOCK_BOOTTIME, flags)?,
                WakeSupport::No("CAP_WAKE_ALARM is missing"),
            ),
            Err(errno) => return Err(errno.into()),
        };
        // SAFETY: the timer owns its descriptor, which stays the same and open until it is dropped.
        let timer =
            unsafe { AsyncFd::register_with_interest(BootTimer(timer), Interest::READABLE) };
        Ok(Alarm {
            timer: timer?,
            wake_support: wakes,
        })
    }

    /// Whether the alarm wakes the machine.
    pub fn wake_support(&self) -> &WakeSupport {
        &self.wake_support
    }

    /// Sets the alarm to fire after this span; `None` cancels it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set(&self, after: Option<Span>) -> io::Result<()> {
        let timer = &self.timer.get_ref().0;
        let Some(after) = after else {
            return Ok(timer.unset()?);
        };
        // A timer of zero would be disarmed.
        let after = after.max(Span::from_nanos(1));
        let span = TimeSpec::from_duration(after.into());
        Ok(timer.set(Expiration::OneShot(span), TimerSetTimeFlags::empty())?)
    }

    /// Returns when the alarm fires; never if it is not set.
    pub async fn fired(&self) {
        let ring = self.timer.async_io(Interest::READABLE, |timer| {
            timer.0.wait().map_err(io::Error::from)
        });
        if let Err(error) = ring.await {
            tracing::error!(%error, "an alarm cannot be read");
            std::future::pending().await
        }
    }
}

/// Whether there is a real-time clock that can wake the machine: it has a file to set its alarm.
fn has_waking_clock() -> bool {
    let clocks = fs::read_dir("/sys/class/rtc").into_iter().flatten();
    clocks
        .flatten()
        .any(|clock| clock.path().join("wakealarm").exists())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// The longest time that a test waits.
    const SOON: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn an_alarm_rings_once_and_one_that_was_taken_back_does_not() {
        let alarm = Alarm::open().unwrap();
        alarm.set(Some(Span::from_secs(3_600))).unwrap();
        alarm.set(Some(Span::ZERO)).unwrap();
        tokio::time::timeout(SOON, alarm.fired()).await.unwrap();
        let again = tokio::time::timeout(Duration::from_millis(20), alarm.fired());
        assert!(again.await.is_err(), "it rang twice");
        alarm.set(Some(Span::from_millis(5))).unwrap();
        alarm.set(None).unwrap();
        let taken_back = tokio::time::timeout(Duration::from_millis(50), alarm.fired());
        assert!(taken_back.await.is_err());
    }

    /// Takes CAP_WAKE_ALARM from this thread.
    fn may_not_wake() {
        const VERSION: u32 = 0x2008_0522; // _LINUX_CAPABILITY_VERSION_3, linux/capability.h
        const WAKE_ALARM: u32 = 35;
        let mut header = [VERSION, 0];
        let mut sets = [[0u32; 3]; 2];
        // SAFETY: both point to what capget(2) writes: a header, and two times three words.
        let got =
            unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) };
        assert_eq!(got, 0);
        sets[1][0] &= !(1 << (WAKE_ALARM - 32));
        // SAFETY: as above, and capset(2) only reads.
        let set = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
        assert_eq!(set, 0);
    }

    #[test]
    fn without_the_capability_it_rings_all_the_same_and_says_so() {
        // Capabilities belong to a thread.
        let thread = std::thread::spawn(|| {
            may_not_wake();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let alarm = Alarm::open().unwrap();
                assert_eq!(
                    alarm.wake_support(),
                    &WakeSupport::No("CAP_WAKE_ALARM is missing")
                );
                alarm.set(Some(Span::from_millis(1))).unwrap();
                tokio::time::timeout(SOON, alarm.fired()).await.unwrap();
            });
        });
        thread.join().unwrap();
    }
}
