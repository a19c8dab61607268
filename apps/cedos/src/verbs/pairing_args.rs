//! The options that `cedos send` and `cedos receive` share, and their session with the proxy.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use cedos_agent::fetch::deadline_text::parse_deadline;
use cedos_agent::fetch::option_parsers;
use cedos_agent::fetch::origin::is_this_machine;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::session_refusal::{host_and_port, session_refusal};
use cedos_agent::order::Deadline;
use cedos_terminal::{print_stderr, print_stdout};
use clap::Args;
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, LinkUse, PathState, SecretKey, ServerAddress, ServerList,
};
use d2tp_links::{CostClass, LinkMonitor};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};

use super::device_links::watch_links;
use super::key;
use super::proxy_options::ProxyOptions;
use crate::pairing::PairingError;

/// The deadline of a transfer that names none.
const WITHIN_DEFAULT: Duration = Duration::from_secs(6 * 3600); // as that of `cedos get`

/// How long the proxy may be silent before people are told.
const SILENT_AFTER: Duration = Duration::from_secs(4); // as in transfers: five tries on a fast link

/// How two devices come together.
#[derive(Debug, Clone, Args)]
pub struct PairingArgs {
    /// Finish by TIME: 07:30 (the next one), 7pm, tomorrow 07:30, 2030-01-31 07:30, +45m
    #[arg(long, value_name = "TIME", group = "when")]
    pub by: Option<String>,

    /// Finish within SPAN from now: 2h, 45m, 1h30m [default: 6h]
    #[arg(long, value_name = "SPAN", group = "when", value_parser = option_parsers::parse_span, allow_hyphen_values = true)]
    pub within: Option<Duration>,

    #[command(flatten)]
    proxy: ProxyOptions,

    /// This device's private key file, by which the proxy knows it [default: $CEDOS_KEY_FILE, or
    /// ~/.config/cedos/key, which is made on first use]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,

    /// Print one JSON object per line; the last is done or error
    #[arg(long)]
    pub json: bool,
}

/// A device's session with the proxy at which it meets another one.
pub struct PairingSession {
    /// The session.
    pub device: Device,
    /// This device's key.
    pub key: SecretKey,
    proxy: String,
    /// The networks of this device.
    pub monitor: LinkMonitor,
    /// The address of the proxy.
    pub server: ServerAddress,
}

impl PairingArgs {
    /// The time until the deadline.
    ///
    /// # Errors
    /// The text is no time, or the time has passed.
    pub fn time_left(&self) -> Result<Duration, TransferFailure> {
        let deadline = match &self.by {
            Some(by) => parse_deadline(by, &jiff::Zoned::now()).map_err(TransferFailure::usage)?,
            None => Deadline::WithinS(self.within.unwrap_or(WITHIN_DEFAULT).as_secs_f64()),
        };
        if deadline.has_passed() {
            return Err(TransferFailure::usage("the deadline has passed already"));
        }
        Ok(deadline.due().time_left())
    }

    /// Begins a session with the proxy at which both devices meet.
    ///
    /// # Errors
    /// No proxy is named, or it has no address.
    pub async fn connect(&self) -> Result<PairingSession, TransferFailure> {
        let failed = |error: anyhow::Error| TransferFailure::error(format!("{error:#}"));
        let address = self
            .proxy
            .address()
            .map_err(|error| TransferFailure::usage(error.to_string()))?;
        let Some(address) = address else {
            let text = "the two devices meet at a proxy: give --prox d2tp://HOST:4433/KEY, or see `cedos join`";
            return Err(TransferFailure::usage(text));
        };
        let proxies: ServerList = address
            .parse()
            .map_err(|error| TransferFailure::usage(format!("--prox {address}: {error}")))?;
        // Both devices must come to the same one.
        let server = proxies.first().clone();
        let key = key::load_device_key(self.key.as_deref()).map_err(failed)?;
        let monitor = watch_links(&[]).await?;
        let options = DeviceOptions {
            server: server.clone(),
            key: key.clone(),
            config: EndpointConfig::default(),
        };
        let mut device = Device::new(options)
            .await
            .map_err(|error| failed(error.into()))?;
        if is_this_machine(&server.host) {
            device
                .use_default_route()
                .map_err(|error| failed(error.into()))?;
        } else {
            device.follow_links(monitor.subscribe(), |link| match link.class.class {
                CostClass::Free => LinkUse::Free,
                _ => LinkUse::Off,
            });
        }
        Ok(PairingSession {
            device,
            key,
            proxy: format!("the proxy {}", host_and_port(&server)),
            monitor,
            server,
        })
    }
}

impl PairingSession {
    /// What an error means for people; `wrong`: what to do about a code that does not match.
    pub fn failure(&self, error: &PairingError, wrong: &str) -> TransferFailure {
        let end = self.device.ended();
        let refusal = end.and_then(|end| session_refusal(&end, &self.proxy, &self.key.public()));
        refusal.unwrap_or_else(|| {
            TransferFailure::error(match error {
                PairingError::WrongCode => format!("{error}. {wrong}"),
                PairingError::ProxyLost => format!("{error}: {}", self.proxy),
                _ => error.to_string(),
            })
        })
    }

    /// Waits for `what` until the deadline; says so if the proxy does not answer meanwhile. `whom`: what
    /// to say at the deadline.
    ///
    /// # Errors
    /// The deadline passed, or Ctrl-C or SIGTERM came.
    pub async fn until_deadline<T>(
        &self,
        left: Duration,
        whom: &str,
        what: impl Future<Output = T>,
    ) -> Result<T, TransferFailure> {
        let silent = async {
            sleep(SILENT_AFTER).await;
            if !self.answers() {
                print_stderr(&format!("note: {} does not answer yet", self.proxy));
            }
            std::future::pending().await
        };
        let stopped = || TransferFailure {
            exit: TransferExit::Cancelled,
            ..TransferFailure::error("stopped")
        };
        let mut terminate = signal(SignalKind::terminate())
            .map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
        tokio::select! {
            came = timeout(left, what) => came.map_err(|_| self.too_late(whom)),
            () = silent => unreachable!("it never ends"),
            _ = terminate.recv() => Err(stopped()),
            _ = tokio::signal::ctrl_c() => Err(stopped()),
        }
    }

    fn answers(&self) -> bool {
        let mut paths = self.device.paths().into_iter();
        paths.any(|path| path.state == PathState::Active)
    }

    fn too_late(&self, whom: &str) -> TransferFailure {
        let text = match self.answers() {
            true => format!("{whom}; the deadline passed"),
            false => format!("{} does not answer; the deadline passed", self.proxy),
        };
        TransferFailure {
            exit: TransferExit::DeadlineMissed,
            ..TransferFailure::error(text)
        }
    }
}

/// Prints how a verb failed, and returns its exit code.
pub fn report_failure(verb: &str, failure: &TransferFailure, json: bool) -> ExitCode {
    if json {
        let event = serde_json::json!({"event": "error", "verb": verb, "exit": failure.exit as u8,
                                       "text": failure.text});
        print_stdout(&event.to_string());
    } else {
        print_stderr(&format!("cedos {verb}: {}", failure.text));
    }
    failure.exit.into()
}
