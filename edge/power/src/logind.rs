//! logind, on the system's bus: what keeps the machine awake, and when it sleeps.

use futures_util::StreamExt;
use zbus::proxy::SignalStream;
use zbus::{Connection, Proxy};

const NAME: &str = "org.freedesktop.login1";
const PATH: &str = "/org/freedesktop/login1";
const INTERFACE: &str = "org.freedesktop.login1.Manager";

/// What is held off: suspending, and what logind does when nobody is there. Not the lid: who closes
/// it means it.
const WHAT: &str = "sleep:idle";

/// logind does not do what it is asked for.
#[derive(Debug, thiserror::Error)]
#[error("logind {doing}: {cause}")]
pub struct LogindError {
    doing: &'static str,
    cause: zbus::Error,
}

/// A connection to logind, which says when the machine sleeps and keeps it awake.
#[derive(Debug)]
pub struct Logind {
    manager: Proxy<'static>,
    sleep_signals: SignalStream<'static>,
}

/// Keeps the machine awake until it is dropped.
#[derive(Debug)]
pub struct Inhibitor {
    /// logind waits for its end.
    _fd: zbus::OwnedFd,
}

impl Logind {
    /// Connects to logind on the system's bus.
    ///
    /// # Errors
    /// There is no bus, or no logind on it.
    pub async fn system() -> Result<Logind, LogindError> {
        let connection = Connection::system().await;
        Logind::on(&connection.map_err(error_while("is not reached"))?).await
    }

    /// Connects to logind on a bus.
    ///
    /// # Errors
    /// There is none.
    pub async fn on(bus: &Connection) -> Result<Logind, LogindError> {
        let manager = Proxy::new(bus, NAME, PATH, INTERFACE).await;
        let manager = manager.map_err(error_while("is not reached"))?;
        let sleeps = manager.receive_signal("PrepareForSleep").await;
        let sleeps = sleeps.map_err(error_while("does not tell when it sleeps"))?;
        // A name without an owner is heard of only by asking.
        let sleeping: Result<bool, _> = manager.get_property("PreparingForSleep").await;
        sleeping.map_err(error_while("is not reached"))?;
        Ok(Logind {
            manager,
            sleep_signals: sleeps,
        })
    }

    /// Keeps the machine awake, for this reason.
    ///
    /// # Errors
    /// It is not allowed to us.
    pub async fn inhibit(&self, why: &str) -> Result<Inhibitor, LogindError> {
        let what = (WHAT, "Cedos", why, "block");
        let fd = self.manager.call("Inhibit", &what).await;
        let fd = fd.map_err(error_while("refuses to stay awake"))?;
        Ok(Inhibitor { _fd: fd })
    }

    /// The next time it is about to sleep (true), or is awake again. None when the bus is gone.
    pub async fn next_sleep_change(&mut self) -> Option<bool> {
        loop {
            let said = self.sleep_signals.next().await?;
            match said.body().deserialize::<bool>() {
                Ok(sleeps) => return Some(sleeps),
                Err(error) => tracing::warn!(%error, "logind said something else"),
            }
        }
    }
}

fn error_while(doing: &'static str) -> impl FnOnce(zbus::Error) -> LogindError {
    move |cause| LogindError { doing, cause }
}
