//! The interface of machines that D-Lock controls.

use std::future::Future;

use d2tp_time::Span;

/// Why the machine is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WakeReason {
    /// The machine wakes to scan for links.
    ScanLinks,
    /// The machine wakes to begin a flow.
    StartFlow,
}

/// An event of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerEvent {
    /// An alarm is due.
    AlarmFired(WakeReason),
    /// The machine is about to sleep.
    Suspending,
    /// The machine slept, and is awake again.
    Resumed,
}

/// A machine that sleeps.
///
/// # On Android
///
/// The trait does not depend on Linux, so that an app can implement it:
///
/// | | there |
/// |---|---|
/// | `set_alarm` | `AlarmManager.setExactAndAllowWhileIdle(ELAPSED_REALTIME_WAKEUP, …)`, one `PendingIntent` for each reason, and `cancel`; exact alarms need `SCHEDULE_EXACT_ALARM` from API 31 on. In Doze an app's alarms fire at most once in nine minutes: shorter periods work only while the device moves |
/// | `inhibit_sleep`, `allow_sleep` | `PowerManager.newWakeLock(PARTIAL_WAKE_LOCK, "cedos:flow")` with `acquire` and `release`, and a `WifiManager.WifiLock` beside it |
/// | `next_event` | the alarm's receiver passes its reason through a channel; there is no notice of sleep, and none is needed: alarms and deadlines count time asleep |
///
/// The processor stays awake only while a receiver runs, so the receiver takes the wake lock before
/// it passes the reason on. The handler of the event (a scan, then
/// [`WakeController::apply`](crate::WakeController::apply)) releases it.
pub trait SleepingMachine: Send {
    /// Sets an alarm that fires after a span, and wakes the machine if it can; `None` cancels it.
    /// Time asleep counts. Each reason has one alarm, the one set last.
    fn set_alarm(&mut self, bell: WakeReason, after: Option<Span>);

    /// Keeps the machine from sleeping by itself until [`SleepingMachine::allow_sleep`]; `why` is
    /// for people. Repeated calls have no further effect.
    fn inhibit_sleep(&mut self, why: &str) -> impl Future<Output = ()> + Send;

    /// Allows the machine to sleep.
    fn allow_sleep(&mut self);

    /// The next event. The future may be dropped without losing an event.
    fn next_event(&mut self) -> impl Future<Output = PowerEvent> + Send;
}
