//! A Linux machine: alarms of the kernel, sleep as logind has it.

use std::io;

use d2tp_time::Span;

use crate::alarm::{Alarm, Wakes};
use crate::logind::{Inhibitor, Logind, LogindError};
use crate::machine::{Bell, Machine, Notice};

/// This machine.
#[derive(Debug)]
pub struct Linux {
    look: Alarm,
    start: Alarm,
    logind: Result<Logind, LogindError>,
    held: Option<Inhibitor>,
}

impl Linux {
    /// With the system's logind where there is one.
    ///
    /// # Errors
    /// The kernel gives no alarms.
    pub async fn open() -> io::Result<Linux> {
        Linux::with(Logind::system().await)
    }

    /// With this logind, or with none.
    ///
    /// # Errors
    /// The kernel gives no alarms.
    pub fn with(logind: Result<Logind, LogindError>) -> io::Result<Linux> {
        Ok(Linux {
            look: Alarm::open()?,
            start: Alarm::open()?,
            logind,
            held: None,
        })
    }

    /// What it cannot do, for people; nothing, where all is well.
    pub fn lacks(&self) -> Vec<String> {
        let mut lacks = Vec::new();
        if let Wakes::No(why) = self.look.wakes() {
            lacks.push(format!("it is not woken to look for links: {why}"));
        }
        if let Err(error) = &self.logind {
            lacks.push(format!("it may sleep while data flows: {error}"));
        }
        lacks
    }

    fn alarm(&self, bell: Bell) -> &Alarm {
        match bell {
            Bell::Look => &self.look,
            Bell::Start => &self.start,
        }
    }
}

impl Machine for Linux {
    fn set_alarm(&mut self, bell: Bell, after: Option<Span>) {
        if let Err(error) = self.alarm(bell).set(after) {
            tracing::error!(%error, ?bell, "an alarm cannot be set");
        }
    }

    async fn hold(&mut self, why: &str) {
        let (None, Ok(logind)) = (&self.held, &self.logind) else {
            return;
        };
        match logind.inhibit(why).await {
            Ok(inhibitor) => self.held = Some(inhibitor),
            Err(error) => tracing::warn!(%error, "it may sleep while data flows"),
        }
    }

    fn let_go(&mut self) {
        self.held = None;
    }

    async fn next(&mut self) -> Notice {
        let sleep = async {
            if let Ok(logind) = &mut self.logind
                && let Some(sleeps) = logind.next().await
            {
                return if sleeps { Notice::Sleeps } else { Notice::Woke };
            }
            std::future::pending().await
        };
        tokio::select! {
            () = self.look.rings() => Notice::Rings(Bell::Look),
            () = self.start.rings() => Notice::Rings(Bell::Start),
            notice = sleep => notice,
        }
    }
}
