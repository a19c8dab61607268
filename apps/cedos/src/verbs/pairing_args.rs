//! The options that `cedos send` and `cedos receive` share, and their session with the proxy.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use cedos_agent::fetch::deadline_text::parse_deadline;
use cedos_agent::fetch::option_parsers;
use cedos_agent::fetch::origin::follow_free_links;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::session_refusal::{host_and_port, session_end_text, session_refusal};
use cedos_agent::order::Deadline;
use cedos_terminal::{print_stderr, print_stdout};
use clap::Args;
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, PathState, SecretKey, ServerAddress, ServerList,
    asked_servers, measure_servers,
};
use d2tp_links::LinkMonitor;
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

/// How long answers of proxies are awaited where there are several.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1); // as for downloads

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
    /// The session with the proxy.
    pub device: Device,
    /// This device's key.
    pub key: SecretKey,
    proxy: String,
    /// The networks of this device.
    pub monitor: LinkMonitor,
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

    /// The proxies at which the other device may be: those that answer, in the order of the list, so that two devices
    /// with one list meet at the same one. If none answers, the first.
    ///
    /// # Errors
    /// No proxy is named, or one has no address.
    pub async fn meeting_places(&self) -> Result<Vec<ServerAddress>, TransferFailure> {
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
        let servers = proxies.servers().to_vec();
        if servers.len() == 1 {
            return Ok(servers);
        }
        let monitor = watch_links(&[]).await?;
        let links = monitor.subscribe().borrow().clone();
        let asked = asked_servers(&proxies, &links);
        let round_trips = measure_servers(asked, ANSWERS_WITHIN).await.round_trips;
        let answers = |place: usize| round_trips.get(place).copied().flatten().is_some();
        let mut places: Vec<ServerAddress> = (0..servers.len())
            .filter(|place| answers(*place))
            .map(|place| servers[place].clone())
            .collect();
        if places.is_empty() {
            places.extend(servers.into_iter().next());
        }
        Ok(places)
    }

    /// Begins a session with the proxy at which both devices meet.
    ///
    /// # Errors
    /// The device has no key, or the proxy no address.
    pub async fn connect(&self, server: &ServerAddress) -> Result<PairingSession, TransferFailure> {
        let failed = |error: anyhow::Error| TransferFailure::error(format!("{error:#}"));
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
        follow_free_links(&mut device, &server.host, monitor.subscribe())
            .map_err(|error| failed(error.into()))?;
        Ok(PairingSession {
            device,
            key,
            proxy: format!("the proxy {}", host_and_port(server)),
            monitor,
        })
    }
}

/// What to do about a proxy from which nothing came.
const NO_ANSWER: &str = ". If it works from another network, this one blocks UDP, and the proxy needs `--stream-listen`; \
                         `cedos doctor` says more";

impl PairingSession {
    /// What an error means for people; `wrong`: what to do about a code that does not match.
    pub fn failure(&self, error: &PairingError, wrong: &str) -> TransferFailure {
        let end = self.device.ended();
        let refusal = end.as_ref();
        let refusal = refusal.and_then(|end| session_refusal(end, &self.proxy, &self.key.public()));
        refusal.unwrap_or_else(|| {
            TransferFailure::error(match (error, end) {
                (PairingError::WrongCode, _) => format!("{error}. {wrong}"),
                (PairingError::ProxyLost, Some(end)) => {
                    let ended = session_end_text(&end, &self.proxy);
                    format!("{ended}. Run `cedos send` again for a new code")
                }
                (PairingError::ProxyLost, None) => format!(
                    "the connection to {} broke. Run `cedos send` again for a new code",
                    self.proxy
                ),
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
                print_stderr(&format!(
                    "note: {} does not answer yet{NO_ANSWER}",
                    self.proxy
                ));
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
            false => format!(
                "{} does not answer; the deadline passed{NO_ANSWER}",
                self.proxy
            ),
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
