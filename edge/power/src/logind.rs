//! Access to logind on the system bus: keeps the machine awake, and reports sleep.

use futures_util::StreamExt;
use zbus::{Connection, OwnedFd, proxy};

/// The part of logind's manager interface that is used.
#[proxy(
    interface = "org.freedesktop.login1.Manager",
    default_service = "org.freedesktop.login1",
    default_path = "/org/freedesktop/login1"
)]
trait LogindManager {
    /// Inhibits the actions in `what` until the descriptor is closed.
    fn inhibit(&self, what: &str, who: &str, why: &str, mode: &str) -> zbus::Result<OwnedFd>;

    /// The machine is about to sleep (true), or is awake again.
    #[zbus(signal)]
    fn prepare_for_sleep(&self, start: bool) -> zbus::Result<()>;

    /// Whether the machine is about to sleep.
    #[zbus(property(emits_changed_signal = "false"))]
    fn preparing_for_sleep(&self) -> zbus::Result<bool>;
}

/// The operations that are inhibited: suspend, and logind's idle action. Not the lid: users close it on purpose.
const WHAT: &str = "sleep:idle";

/// Why a request to logind failed.
#[derive(Debug, thiserror::Error)]
#[error("logind {doing}: {cause}")]
pub struct LogindError {
    doing: &'static str,
    cause: zbus::Error,
}

impl LogindError {
    /// The system bus has not answered in time.
    pub fn unanswered() -> LogindError {
        let cause = std::io::Error::from(std::io::ErrorKind::TimedOut);
        error_while("is not reached")(zbus::Error::InputOutput(cause.into()))
    }
}

/// A connection to logind, which reports and inhibits sleep.
#[derive(Debug)]
pub struct Logind {
    manager: LogindManagerProxy<'static>,
    sleep_signals: PrepareForSleepStream,
}

/// Keeps the machine awake until this is dropped.
#[derive(Debug)]
pub struct Inhibitor {
    /// logind waits until this descriptor is closed.
    _fd: OwnedFd,
}

impl Logind {
    /// Connects to logind on the system bus.
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
    /// There is no logind on the bus.
    pub async fn on(bus: &Connection) -> Result<Logind, LogindError> {
        let manager = LogindManagerProxy::new(bus).await;
        let manager = manager.map_err(error_while("is not reached"))?;
        let sleeps = manager.receive_prepare_for_sleep().await;
        let sleeps = sleeps.map_err(error_while("does not tell when it sleeps"))?;
        // The proxy does not report a missing service, so a property is read.
        let sleeping = manager.preparing_for_sleep().await;
        sleeping.map_err(error_while("is not reached"))?;
        Ok(Logind {
            manager,
            sleep_signals: sleeps,
        })
    }

    /// Keeps the machine awake, for this reason.
    ///
    /// # Errors
    /// logind does not allow it to this user.
    pub async fn inhibit(&self, why: &str) -> Result<Inhibitor, LogindError> {
        let fd = self.manager.inhibit(WHAT, "Cedos", why, "block").await;
        let fd = fd.map_err(error_while("refuses to stay awake"))?;
        Ok(Inhibitor { _fd: fd })
    }

    /// The next change: the machine is about to sleep (true), or is awake again. `None` when the
    /// connection to the bus is closed.
    pub async fn next_sleep_change(&mut self) -> Option<bool> {
        loop {
            let said = self.sleep_signals.next().await?;
            match said.args() {
                Ok(said) => return Some(said.start),
                Err(error) => tracing::warn!(%error, "logind said something else"),
            }
        }
    }
}

fn error_while(doing: &'static str) -> impl FnOnce(zbus::Error) -> LogindError {
    move |cause| LogindError { doing, cause }
}
