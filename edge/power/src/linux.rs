//! A Linux machine: alarms of the kernel, sleep control by logind.

use std::io;

use d2tp_time::Span;

use crate::alarm::{Alarm, WakeSupport};
use crate::logind::{Inhibitor, Logind, LogindError};
use crate::machine::{PowerEvent, SleepingMachine, WakeReason};

/// The sleep control of a Linux machine.
#[derive(Debug)]
pub struct LinuxMachine {
    scan_alarm: Alarm,
    start_alarm: Alarm,
    logind: Result<Logind, LogindError>,
    inhibitor: Option<Inhibitor>,
}

impl LinuxMachine {
    /// Uses the system's logind, if there is one.
    ///
    /// # Errors
    /// The kernel provides no alarms.
    pub async fn open() -> io::Result<LinuxMachine> {
        LinuxMachine::with(Logind::system().await)
    }

    /// Uses this connection to logind, or none.
    ///
    /// # Errors
    /// The kernel provides no alarms.
    pub fn with(logind: Result<Logind, LogindError>) -> io::Result<LinuxMachine> {
        Ok(LinuxMachine {
            scan_alarm: Alarm::open()?,
            start_alarm: Alarm::open()?,
            logind,
            inhibitor: None,
        })
    }

    /// Uses this connection to logind from now on, or none. What kept the machine awake ends.
    pub fn set_logind(&mut self, logind: Result<Logind, LogindError>) {
        self.logind = logind;
        self.inhibitor = None;
    }

    /// What the machine cannot do, for users; empty if nothing is missing.
    pub fn limitations(&self) -> Vec<String> {
        let mut lacks = Vec::new();
        if let WakeSupport::No(why) = self.scan_alarm.wake_support() {
            lacks.push(format!("it is not woken to look for links: {why}"));
        }
        if let Err(error) = &self.logind {
            lacks.push(format!("it may sleep while data flows: {error}"));
        }
        lacks
    }

    fn alarm(&self, bell: WakeReason) -> &Alarm {
        match bell {
            WakeReason::ScanLinks => &self.scan_alarm,
            WakeReason::StartFlow => &self.start_alarm,
        }
    }
}

impl SleepingMachine for LinuxMachine {
    fn set_alarm(&mut self, bell: WakeReason, after: Option<Span>) {
        if let Err(error) = self.alarm(bell).set(after) {
            tracing::error!(%error, ?bell, "an alarm cannot be set");
        }
    }

    async fn inhibit_sleep(&mut self, why: &str) {
        let (None, Ok(logind)) = (&self.inhibitor, &self.logind) else {
            return;
        };
        match logind.inhibit(why).await {
            Ok(inhibitor) => self.inhibitor = Some(inhibitor),
            Err(error) => tracing::warn!(%error, "it may sleep while data flows"),
        }
    }

    fn allow_sleep(&mut self) {
        self.inhibitor = None;
    }

    async fn next_event(&mut self) -> PowerEvent {
        let sleep = async {
            if let Ok(logind) = &mut self.logind
                && let Some(sleeps) = logind.next_sleep_change().await
            {
                return if sleeps {
                    PowerEvent::Suspending
                } else {
                    PowerEvent::Resumed
                };
            }
            std::future::pending().await
        };
        tokio::select! {
            () = self.scan_alarm.fired() => PowerEvent::AlarmFired(WakeReason::ScanLinks),
            () = self.start_alarm.fired() => PowerEvent::AlarmFired(WakeReason::StartFlow),
            notice = sleep => notice,
        }
    }
}
