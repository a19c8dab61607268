//! What a machine has to be able to do for D-Lock.

use std::future::Future;

use d2tp_time::Span;

/// Why the machine is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WakeReason {
    /// To scan for links.
    ScanLinks,
    /// To begin a flow.
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
/// Nothing here is about Linux' own calls, so that an app can fill it in:
///
/// | | there |
/// |---|---|
/// | `set_alarm` | `AlarmManager.setExactAndAllowWhileIdle(ELAPSED_REALTIME_WAKEUP, …)`, one `PendingIntent` for each bell, and `cancel`; exact alarms need `SCHEDULE_EXACT_ALARM` from API 31 on. In Doze an app's alarms ring at most once in nine minutes: shorter periods hold only while the device moves |
/// | `hold`, `let_go` | `PowerManager.newWakeLock(PARTIAL_WAKE_LOCK, "cedos:flow")` with `acquire` and `release`, and a `WifiManager.WifiLock` beside it |
/// | `next` | the alarm's receiver hands its bell over by a channel; there is no notice of sleep, and none is needed: alarms and deadlines count the time asleep |
///
/// A receiver holds the processor only while it runs, so it takes the wake lock before it hands over, and
/// the answer to a ring (look, then [`Keeper::keep`](crate::WakeController::apply)) lets it go.
pub trait SleepingMachine: Send {
    /// Rings after a span, out of sleep where the machine can; with none, not any more. Time asleep
    /// counts. Each bell has one alarm, the one set last.
    fn set_alarm(&mut self, bell: WakeReason, after: Option<Span>);

    /// Keeps the machine from sleeping by itself until [`SleepingMachine::allow_sleep`]; why, for people. Once more is
    /// as once.
    fn inhibit_sleep(&mut self, why: &str) -> impl Future<Output = ()> + Send;

    /// Allows the machine to sleep.
    fn allow_sleep(&mut self);

    /// The next event. May be dropped without losing one.
    fn next_event(&mut self) -> impl Future<Output = PowerEvent> + Send;
}
