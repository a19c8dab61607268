//! `cedos url URL…`: the command line of a local link, and the parts that `play` shares.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgAction, Args};
use d2tp_driver::EndpointConfig;
use d2tp_links::{ClassRule, LinkMonitor};
use d2tp_sched::CostPolicy;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use url::Url;

use super::credentials::{CookieArgs, CredentialArgs, hide_passwords};
use super::device_links::watch_links;
use super::proxy_options::ProxyOptions;
use super::request_args::RequestArgs;
use super::transfer_args::{stop_on_signal, word_parser};
use super::transport::TransportArgs;
use crate::help::{COST_AND_TIME, EXPERT, TRUST};
use cedos_agent::agent::api::AgentRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::fetch::local_hosts::LocalHosts;
use cedos_agent::fetch::option_parsers;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::report::{human_bytes, link_label, print_stderr, print_stdout};
use cedos_agent::stream::feed::StreamThreshold;
use cedos_agent::stream::stream_service::{self, StreamOrder};
use cedos_terminal::stdout_result;

/// The time within which an agent stores what a stream holds.
const END_MAX: Duration = Duration::from_secs(20); // a guess: a sync on a slow disk

/// How often a run says how it stands.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Print a link on this machine for each URL, which any player can read, and serve it until stopped.
///
/// The stream is fetched far ahead over free networks, and over metered ones only as far as needed to
/// avoid a pause. The link stays the same when networks change, and when the same command runs again.
///
/// Exit codes: 0 ended by a signal, 1 error, 2 usage.
#[derive(Debug, Args)]
pub struct UrlArgs {
    /// What to play: http:// or https://
    #[arg(required = true, value_parser = parse_url)]
    urls: Vec<Url>,

    #[command(flatten)]
    stream: StreamArgs,
}

/// How a stream is to be fetched.
#[derive(Debug, Args)]
pub struct StreamArgs {
    /// Bits per second of the stream: 640k, 2.5M [default: from --duration, a playlist, or the player's
    /// reading]
    #[arg(long, value_name = "RATE", value_parser = option_parsers::parse_bytes, conflicts_with = "duration")]
    bitrate: Option<u64>,

    /// The playing time of the title: 45m, 1h30m; with the size this gives the rate
    #[arg(long, value_name = "SPAN", value_parser = option_parsers::parse_span)]
    duration: Option<Duration>,

    /// Store at most this much on the disk
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = option_parsers::parse_bytes)]
    keep: u64,

    /// Where to store it [default: cedos/stream in $XDG_CACHE_HOME]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,

    /// Whether metered networks may be used
    #[arg(long, default_value = "free-first", value_parser = word_parser::<CostPolicy, 2>(["free-only", "free-first"]), help_heading = COST_AND_TIME)]
    policy: CostPolicy,

    /// Use at most this much metered data: 50M, 1.5G
    #[arg(long, value_name = "SIZE", value_parser = option_parsers::parse_bytes, help_heading = COST_AND_TIME)]
    max_cell: Option<u64>,

    #[command(flatten)]
    proxy: ProxyOptions,

    /// This device's private key file, by which the proxy knows it [default: $CEDOS_KEY_FILE, or
    /// ~/.config/cedos/key, which is made on first use]
    #[arg(long, value_name = "FILE", help_heading = TRUST)]
    key: Option<PathBuf>,

    /// Set what a network costs: wwan0=metered, wlan0=free, rmnet*=roaming
    #[arg(long, value_name = "NAME=CLASS", action = ArgAction::Append, help_heading = COST_AND_TIME)]
    link: Vec<ClassRule>,

    #[command(flatten)]
    request: RequestArgs,

    #[command(flatten)]
    pub credentials: CredentialArgs,

    #[command(flatten)]
    cookies: CookieArgs,

    /// Use metered networks when no more than this is stored ahead: 200k, or 3s of it [default: three
    /// times the duration of a network change]
    #[arg(long, value_name = "AMOUNT", value_parser = parse_amount, help_heading = EXPERT)]
    low: Option<StreamThreshold>,

    /// Stop using metered networks when this much is stored ahead: 3M, or 30s [default: 10s above --low]
    #[arg(long, value_name = "AMOUNT", value_parser = parse_amount, help_heading = EXPERT)]
    high: Option<StreamThreshold>,

    #[command(flatten)]
    transport: TransportArgs,

    /// Do not hand it to the agent; serve in this process
    #[arg(long, help_heading = EXPERT)]
    alone: bool,

    /// Print one JSON object per line: link, progress, and last ended
    #[arg(long)]
    pub json: bool,
}

/// Reads a URL that can be streamed.
pub fn parse_url(text: &str) -> Result<Url, String> {
    match text.parse::<Url>() {
        Ok(url) if matches!(url.scheme(), "http" | "https") => Ok(url),
        Ok(url) => Err(format!(
            "{}: cannot be streamed; use http: or https:",
            url.scheme()
        )),
        Err(error) => Err(format!("`{text}` is not a URL: {error}")),
    }
}

/// `200k` and `3M` are bytes; `3s`, `2min` and `1h` are that much of the stream.
fn parse_amount(text: &str) -> Result<StreamThreshold, String> {
    let is_time = text.ends_with(['s', 'h', 'n']);
    let read = || match is_time {
        true => option_parsers::parse_span(text).map(StreamThreshold::Time),
        false => option_parsers::parse_bytes(text).map(StreamThreshold::Bytes),
    };
    read().map_err(|_| {
        format!("`{text}` is not an amount: write bytes (200k, 3M) or time (3s, 2min)")
    })
}

/// Runs `cedos url` until it is ended.
pub async fn run(mut args: UrlArgs) -> ExitCode {
    hide_passwords();
    let served = async {
        let found = args.stream.credentials.apply(&mut args.urls);
        found.map_err(TransferFailure::usage)?;
        let (stop, stopped) = watch::channel(false);
        stop_on_signal(stop)
            .map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
        let mut serving = ServedLinks::start(&args.urls, &args.stream, stopped).await?;
        if !args.stream.json {
            serving.links.iter().for_each(|link| print_stdout(link));
        }
        if stdout_result().is_err() {
            // Nobody knows the link. What went wrong is said at the end of every verb.
            serving.stop().await;
            return Ok(TransferExit::Error);
        }
        serving.serve_until(std::future::pending::<()>()).await;
        serving.stop().await;
        Ok(TransferExit::Done)
    };
    match served.await {
        Ok(exit) => exit.into(),
        Err(failure) => report_failure("url", &failure),
    }
}

/// Says why a verb ends.
pub fn report_failure(verb: &str, failure: &TransferFailure) -> ExitCode {
    print_stderr(&format!("cedos {verb}: {}", failure.text));
    failure.exit.into()
}

/// Links that are served, by this process or by the agent.
pub struct ServedLinks {
    /// A link for players, for each URL.
    pub links: Vec<String>,
    by: LinkServer,
    stopped: watch::Receiver<bool>,
    json: bool,
}

enum LinkServer {
    ThisProcess {
        serving: Box<stream_service::StreamService>,
        /// The links are followed as long as it lives.
        _monitor: LinkMonitor,
    },
    Agent(AgentApiClient),
}

impl ServedLinks {
    /// Starts a local HTTP server for players, in the agent where one runs. It ends when `stopped`
    /// turns true.
    ///
    /// # Errors
    /// The command line makes no sense, or there is no room or no port.
    pub async fn start(
        urls: &[Url],
        args: &StreamArgs,
        stopped: watch::Receiver<bool>,
    ) -> Result<ServedLinks, TransferFailure> {
        let ordered = args.ordered(urls)?;
        // What makes no sense is said here, whoever serves it.
        ordered.rules()?;
        if let Some(mut agent) = args.agent().await {
            let ordered = Box::new(ordered.with_absolute_paths()?);
            let answer = agent.ask(&AgentRequest::Stream { ordered }).await?;
            let links: Vec<String> =
                serde_json::from_value(answer["links"].clone()).unwrap_or_default();
            if args.json {
                let told = answer["told"].as_array().into_iter().flatten();
                told.for_each(|told| print_stdout(&told.to_string()));
            }
            return Ok(ServedLinks {
                links,
                by: LinkServer::Agent(agent),
                stopped,
                json: args.json,
            });
        }
        let monitor = watch_links(&args.link).await?;
        let configure = |config: &mut EndpointConfig| args.transport.apply(config);
        let links = monitor.subscribe();
        let serving =
            stream_service::StreamService::start(&ordered, links, None, configure).await?;
        if args.json {
            serving
                .links_json()
                .iter()
                .for_each(|told| print_stdout(&told.to_string()));
        }
        Ok(ServedLinks {
            links: serving.links.clone(),
            by: LinkServer::ThisProcess {
                serving: Box::new(serving),
                _monitor: monitor,
            },
            stopped,
            json: args.json,
        })
    }

    /// Serves until it is stopped, or `other` is over; what that came to.
    pub async fn serve_until<T>(&mut self, other: impl Future<Output = T>) -> Option<T> {
        let mut other = std::pin::pin!(other);
        let mut stopped = self.stopped.clone();
        let mut every = interval(TELL_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut said = String::new();
        loop {
            let by = &mut self.by;
            let next = async {
                match by {
                    LinkServer::ThisProcess { serving, .. } => {
                        every.tick().await;
                        Some(serving.state("progress"))
                    }
                    LinkServer::Agent(agent) => agent.next().await,
                }
            };
            tokio::select! {
                _ = stopped.wait_for(|stop| *stop) => return None,
                done = &mut other => return Some(done),
                state = next => match state {
                    Some(state) => say_how(&state, self.json, &mut said),
                    None => {
                        print_stderr("The agent has stopped, so the link no longer works. Run the same \
                            command again");
                        return None;
                    }
                },
            }
        }
    }

    /// Ends it: what is held is certain, and the proxy knows that we go.
    pub async fn stop(self) {
        let state = match self.by {
            LinkServer::ThisProcess { serving, .. } => serving.stop().await,
            LinkServer::Agent(mut agent) => {
                agent.close().await;
                let last = async {
                    loop {
                        let told = agent.next().await?;
                        if told["event"] == "ended" {
                            return Some(told);
                        }
                    }
                };
                match tokio::time::timeout(END_MAX, last).await {
                    Ok(Some(state)) => state,
                    _ => return,
                }
            }
        };
        if self.json {
            return print_stdout(&state.to_string());
        }
        let carried = state["bytes_by_link"].as_object().into_iter().flatten();
        let carried: Vec<String> = carried
            .map(|(link, bytes)| {
                let bytes = human_bytes(bytes.as_u64().unwrap_or(0));
                format!("{} {bytes}", link_label(link))
            })
            .collect();
        if !carried.is_empty() {
            print_stderr(&format!("Carried by: {}", carried.join(", ")));
        }
    }
}

fn say_how(state: &Value, json: bool, said: &mut String) {
    if json {
        return print_stdout(&state.to_string());
    }
    // What changes every second is no news.
    let news = |why: &str| why.replace(|c: char| c.is_ascii_digit(), "");
    let streams = state["streams"].as_array().into_iter().flatten();
    let why: Vec<&str> = streams
        .filter_map(|stream| stream["why"].as_str())
        .collect();
    let why = why.join(" | ");
    if news(&why) != news(said) {
        print_stderr(&why);
    }
    *said = why;
}

impl StreamArgs {
    fn ordered(&self, urls: &[Url]) -> Result<StreamOrder, TransferFailure> {
        let proxy = self.proxy.address();
        let prox = proxy.map_err(|error| TransferFailure::usage(error.to_string()))?;
        Ok(StreamOrder {
            urls: urls.iter().map(Url::to_string).collect(),
            bitrate: self.bitrate,
            duration_s: self.duration.map(|span| span.as_secs_f64()),
            low: self.low,
            high: self.high,
            keep: self.keep,
            store: self.store.clone(),
            policy: self.policy.as_str().to_owned(),
            max_cell: self.max_cell,
            prox,
            sealed: self.request.sealed,
            key: self.key.clone(),
            headers: self.request.header.clone(),
            cookies: self.cookies.path().map_err(TransferFailure::usage)?,
            ca: self.request.ca.clone(),
            allow_downgrade: self.request.allow_downgrade,
            local_hosts: LocalHosts::default(),
        })
    }

    /// The agent, unless there is none or something was asked for that only a process of its own can do.
    async fn agent(&self) -> Option<AgentApiClient> {
        if self.alone {
            return None;
        }
        let agent = AgentApiClient::connect().await?;
        let own = (!self.link.is_empty()).then_some("--link");
        let own = own.or((self.transport != TransportArgs::default()).then_some("how to send"));
        if let Some(own) = own {
            print_stderr(&format!(
                "note: the agent does not support {own}, so this runs in its own process and \
                 competes with the agent"
            ));
            return None;
        }
        Some(agent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        url: UrlArgs,
    }

    #[test]
    fn amounts_are_bytes_or_time() {
        assert_eq!(parse_amount("200k"), Ok(StreamThreshold::Bytes(200_000)));
        assert_eq!(parse_amount("3M"), Ok(StreamThreshold::Bytes(3_000_000)));
        let span = |s| Ok(StreamThreshold::Time(Duration::from_secs(s)));
        assert_eq!(parse_amount("10s"), span(10));
        assert_eq!(parse_amount("2min"), span(120));
        for bad in ["", "x", "3x", "-3M", "s"] {
            assert!(parse_amount(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_said_before_anything_begins() {
        let cli = Cli::parse_from(["x", "http://o.example/a", "--low", "3M", "--high", "200k"]);
        let ordered = cli.url.stream.ordered(&cli.url.urls).unwrap();
        assert!(ordered.rules().is_err());
        assert!(Cli::try_parse_from(["x"]).is_err());
        assert!(Cli::try_parse_from(["x", "ftp://o.example/a"]).is_err());
        let both = [
            "x",
            "http://o.example/a",
            "--bitrate",
            "1M",
            "--duration",
            "1h",
        ];
        assert!(Cli::try_parse_from(both).is_err());
    }
}
