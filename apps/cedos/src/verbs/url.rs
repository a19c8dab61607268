//! `cedos url URL…`: the command line of a link on this machine, and what `play` shares of it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgAction, Args};
use d2tp_driver::{AddressError, Config, ServerAddress};
use d2tp_links::{ClassRule, ClassRules, LinkMonitor};
use d2tp_sched::Policy;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use url::Url;

use super::how::{stop_on_signal, words};
use super::key;
use super::transport::TransportArgs;
use cedos_agent::fetch::clock::Moment;
use cedos_agent::fetch::direct::Direct;
use cedos_agent::fetch::header::{self, Field};
use cedos_agent::fetch::outcome::{Exit, Failure};
use cedos_agent::fetch::proxy::Proxy;
use cedos_agent::fetch::report::{complain, human_bytes, say};
use cedos_agent::fetch::tls::Tls;
use cedos_agent::fetch::tunnel::Tunnel;
use cedos_agent::fetch::when;
use cedos_agent::stream::door::Door;
use cedos_agent::stream::feed::{Amount, Amounts, Rules};
use cedos_agent::stream::roads::Roads;
use cedos_agent::stream::shelf::{LinkNote, Shelf};
use cedos_agent::stream::store::forget_old;

/// How often a run says how it stands.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Print a link on this machine for each URL, which any player can read, and serve it until ended.
///
/// What is watched is fetched over free networks as far ahead as the disk allows, and over those that
/// cost only so much that there is no pause. The link stays the same when networks change, and when the
/// same command runs again.
///
/// Exit codes: 0 ended by a signal, 1 error, 2 usage.
#[derive(Debug, Args)]
pub struct UrlArgs {
    /// What to watch or to hear: http:// or https://
    #[arg(required = true, value_parser = parse_url)]
    urls: Vec<Url>,

    #[command(flatten)]
    stream: StreamArgs,
}

/// How a stream is to be fetched.
#[derive(Debug, Args)]
pub struct StreamArgs {
    /// Bits per second of what is watched: 640k, 2.5M [default: what --duration, a playlist, or the
    /// player's reading says]
    #[arg(long, value_name = "RATE", value_parser = when::parse_bytes, conflicts_with = "duration")]
    bitrate: Option<u64>,

    /// How long it plays: 45m, 1h30m; with its size that is its rate
    #[arg(long, value_name = "SPAN", value_parser = when::parse_span)]
    duration: Option<Duration>,

    /// Begin to use networks that cost when no more than this is held ahead: 200k, or 3s of it
    /// [default: three times what a change of networks takes]
    #[arg(long, value_name = "AMOUNT", value_parser = parse_amount)]
    low: Option<Amount>,

    /// Stop using them when so much is: 3M, or 30s [default: 10s above --low]
    #[arg(long, value_name = "AMOUNT", value_parser = parse_amount)]
    high: Option<Amount>,

    /// Keep at most so much on the disk
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = when::parse_bytes)]
    keep: u64,

    /// Where [default: cedos/stream in $XDG_CACHE_HOME]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,

    /// Whether networks that cost may be used at all
    #[arg(long, default_value = "free-first", value_parser = words::<Policy, 2>(["free-only", "free-first"]))]
    policy: Policy,

    /// Bytes that metered networks may carry at most: 50M, 1.5G
    #[arg(long, value_name = "SIZE", value_parser = when::parse_bytes)]
    max_cell: Option<u64>,

    /// Go through this proxy: d2tp://host:port/KEY
    #[arg(long, value_name = "ADDR", env = "CEDOS_PROX")]
    prox: Option<String>,

    /// Have the proxy open a tunnel only: this device asks the origin itself. Always so for URLs with
    /// credentials
    #[arg(long)]
    sealed: bool,

    /// This device's private key file, by which the proxy knows it [default: $CEDOS_KEY_FILE, or
    /// ~/.config/cedos/key, which is made on first use]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,

    /// Say what a network costs: wwan0=metered, wlan0=free, rmnet*=roaming
    #[arg(long, value_name = "NAME=CLASS", action = ArgAction::Append)]
    link: Vec<ClassRule>,

    /// Add a field to the requests, as 'Accept: audio/mpeg'; repeatable
    #[arg(short = 'H', long, value_name = "FIELD", value_parser = header::parse)]
    header: Vec<Field>,

    /// Trust the certificate authorities in FILE (PEM) besides the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Follow a redirect from https to http
    #[arg(long)]
    allow_downgrade: bool,

    #[command(flatten)]
    transport: TransportArgs,

    /// Print one JSON object per line: link, progress, and last ended
    #[arg(long)]
    pub json: bool,
}

/// Reads a URL that can be streamed.
pub fn parse_url(text: &str) -> Result<Url, String> {
    match text.parse::<Url>() {
        Ok(url) if matches!(url.scheme(), "http" | "https") => Ok(url),
        Ok(url) => Err(format!(
            "{}: cannot be streamed, http: and https: can",
            url.scheme()
        )),
        Err(error) => Err(format!("`{text}` is no URL: {error}")),
    }
}

/// `200k` and `3M` are bytes; `3s`, `2min` and `1h` are that much of the stream.
fn parse_amount(text: &str) -> Result<Amount, String> {
    let is_time = text.ends_with(['s', 'h', 'n']);
    let read = || match is_time {
        true => when::parse_span(text).map(Amount::Time),
        false => when::parse_bytes(text).map(Amount::Bytes),
    };
    read()
        .map_err(|_| format!("`{text}` is no amount: write 200k or 3M bytes, or 3s or 2min of it"))
}

/// Runs `cedos url` until it is ended.
pub async fn run(args: UrlArgs) -> ExitCode {
    let served = async {
        let (stop, stopped) = watch::channel(false);
        stop_on_signal(stop).map_err(|error| Failure::error(format!("signals: {error}")))?;
        let mut serving = Serving::begin(&args.urls, &args.stream, stopped).await?;
        if !args.stream.json {
            serving.links.iter().for_each(|link| say(link));
        }
        serving.watch(std::future::pending::<()>()).await;
        serving.end().await;
        Ok(Exit::Done)
    };
    match served.await {
        Ok(exit) => exit.into(),
        Err(failure) => tell("url", &failure),
    }
}

/// Says why a verb ends.
pub fn tell(verb: &str, failure: &Failure) -> ExitCode {
    complain(&format!("cedos {verb}: {}", failure.text));
    failure.exit.into()
}

/// Links that are served.
pub struct Serving {
    /// One for each URL.
    pub links: Vec<String>,
    shelf: Arc<Shelf>,
    roads: Arc<Roads>,
    stopped: watch::Receiver<bool>,
    stop: watch::Sender<bool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    begun: Moment,
    json: bool,
}

impl Serving {
    /// Opens the door. `stopped` turning true ends it.
    ///
    /// # Errors
    /// The command line makes no sense, or there is no room or no port.
    pub async fn begin(
        urls: &[Url],
        args: &StreamArgs,
        stopped: watch::Receiver<bool>,
    ) -> Result<Serving, Failure> {
        let rules = ClassRules {
            rules: args.link.clone(),
        };
        let roads_rules = args.rules()?;
        let (_, monitor) = LinkMonitor::start(rules)
            .await
            .map_err(|error| Failure::error(error.to_string()))?;
        let roads = args.roads(urls, monitor.subscribe())?;
        let root = args.root()?;
        let storage = |error: &std::io::Error| match error.kind() {
            std::io::ErrorKind::WouldBlock => Failure::error(
                "another cedos serves this URL with the same --store; end it, or use its link",
            ),
            _ => Failure::storage("cannot keep what is watched", error),
        };
        forget_old(&root);
        let (stop, told) = watch::channel(false);
        let rate = args.bitrate.map(|bits| bits as f64 / 8.0);
        let mut note = LinkNote::of(&root, urls);
        let token = note.token.clone();
        let shelf = Shelf::new(root.clone(), roads.clone(), roads_rules, rate, token, told);
        let names: Result<Vec<String>, _> = urls.iter().map(|url| shelf.put_up(url)).collect();
        let names = names.map_err(|error| storage(&error))?;
        let door = Door::open(note.token.clone(), note.port)
            .await
            .map_err(|error| Failure::error(format!("no port on this machine: {error}")))?;
        note.port = Some(door.port());
        note.keep(&root, urls).map_err(|error| storage(&error))?;
        let base = door.base();
        let links: Vec<String> = names.iter().map(|name| format!("{base}/{name}")).collect();
        if args.json {
            for (url, link) in urls.iter().zip(&links) {
                let url = cedos_agent::fetch::transfer::public(url);
                let told = json!({"event": "link", "url": url, "link": link, "mode": roads.mode()});
                say(&told.to_string());
            }
        }
        let mut tasks = vec![tokio::spawn(roads.clone().keep())];
        tasks.push(tokio::spawn(door.serve(shelf.clone())));
        // The links are followed as long as the monitor lives.
        tasks.push(tokio::spawn(async move {
            let _monitor = monitor;
            std::future::pending().await
        }));
        Ok(Serving {
            links,
            shelf,
            roads,
            stopped,
            stop,
            tasks,
            begun: Moment::now(),
            json: args.json,
        })
    }

    /// Serves until it is stopped, or `other` is over; what that came to.
    pub async fn watch<T>(&mut self, other: impl Future<Output = T>) -> Option<T> {
        let mut other = std::pin::pin!(other);
        let mut stopped = self.stopped.clone();
        let mut every = interval(TELL_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut said = String::new();
        loop {
            tokio::select! {
                _ = stopped.wait_for(|stop| *stop) => return None,
                done = &mut other => return Some(done),
                _ = every.tick() => self.say_how(&mut said),
            }
        }
    }

    fn say_how(&self, said: &mut String) {
        if self.json {
            say(&self.state("progress").to_string());
            return;
        }
        // What changes every second is no news.
        let news = |why: &str| why.replace(|c: char| c.is_ascii_digit(), "");
        let why: Vec<String> = self.shelf.titles().iter().map(|t| t.why()).collect();
        let why = why.join(" | ");
        if news(&why) != news(said) {
            complain(&why);
        }
        *said = why;
    }

    fn state(&self, event: &str) -> serde_json::Value {
        let now = Moment::now().since(self.begun);
        let streams: Vec<_> = self.shelf.titles().iter().map(|title| {
            let view = title.view(now);
            let (pauses, paused) = title.pace(|pace| pace.pauses());
            let (rate, in_player) = title.pace(|pace| (pace.rate(now), pace.in_player()));
            json!({
                "name": title.name, "why": title.why(), "held_bytes": title.held_bytes(),
                "ahead_bytes": view.held_bytes + in_player, "rate_bytes_per_s": rate as u64,
                "pauses": pauses, "paused_s": paused.as_secs_f64(), "is_watched": view.is_watched,
            })
        }).collect();
        json!({
            "event": event, "t_s": now.as_secs_f64(), "streams": streams,
            "bytes_by_link": self.roads.carried(), "mode": self.roads.mode(),
        })
    }

    /// Ends it: what is held is certain, and the proxy knows that we go.
    pub async fn end(self) {
        self.stop.send_replace(true);
        self.shelf.settled().await;
        let state = self.state("ended");
        if self.json {
            say(&state.to_string());
        } else {
            let carried = self.roads.carried();
            let carried: Vec<String> = (carried.iter())
                .map(|(link, bytes)| format!("{link} {}", human_bytes(*bytes)))
                .collect();
            if !carried.is_empty() {
                complain(&format!("by link: {}", carried.join(", ")));
            }
        }
        self.tasks.iter().for_each(|task| task.abort());
        self.roads.close().await;
    }
}

impl StreamArgs {
    fn rules(&self) -> Result<Rules, Failure> {
        let (low, high) = (self.low, self.high);
        let wrong = match (low, high) {
            (Some(Amount::Bytes(low)), Some(Amount::Bytes(high))) => low > high,
            (Some(Amount::Time(low)), Some(Amount::Time(high))) => low > high,
            _ => false,
        };
        if wrong {
            return Err(Failure::usage("--low is more than --high"));
        }
        Ok(Rules {
            policy: self.policy,
            thresholds: Amounts { low, high },
            quota_bytes: self.keep,
            metered_bytes_max: self.max_cell,
            plays: self.duration,
            fields: self.header.as_slice().into(),
            allow_downgrade: self.allow_downgrade,
        })
    }

    fn root(&self) -> Result<PathBuf, Failure> {
        if let Some(store) = &self.store {
            return Ok(store.clone());
        }
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let cache = set("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".cache")));
        let cache = cache
            .ok_or_else(|| Failure::usage("neither HOME nor --store says where to keep it"))?;
        Ok(cache.join("cedos").join("stream"))
    }

    fn roads(
        &self,
        urls: &[Url],
        links: watch::Receiver<Arc<Vec<d2tp_links::Link>>>,
    ) -> Result<Arc<Roads>, Failure> {
        let secret = |url: &Url| !url.username().is_empty() || url.password().is_some();
        let secret = urls.iter().any(secret) || self.header.iter().any(Field::is_credential);
        let Some(address) = self.prox.as_deref().filter(|text| !text.is_empty()) else {
            if self.sealed {
                let text = "--sealed is a way of using a proxy: give --prox too, or leave it out";
                return Err(Failure::usage(text));
            }
            let tls = Tls::new(self.ca.as_deref())?;
            return Ok(Roads::direct(Direct::new(tls), links));
        };
        let address: ServerAddress = address
            .parse()
            .map_err(|error: AddressError| Failure::usage(error.to_string()))?;
        let key = key::of_device(self.key.as_deref())
            .map_err(|error| Failure::error(format!("{error:#}")))?;
        // What proves who the user is, no proxy gets to see unasked.
        let tunnel = match self.sealed || secret {
            true => Some(Tunnel::new(Tls::new(self.ca.as_deref())?)),
            false if self.ca.is_some() => {
                let text = "--ca is for what this device asks for itself: add --sealed, or give --ca \
                            to `cedos prox`";
                return Err(Failure::usage(text));
            }
            false => None,
        };
        let proxy = Proxy::new(address, key, links.clone(), tunnel);
        let proxy = proxy.configured(|config: &mut Config| self.transport.apply(config));
        Ok(Roads::proxied(proxy, links))
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
        assert_eq!(parse_amount("200k"), Ok(Amount::Bytes(200_000)));
        assert_eq!(parse_amount("3M"), Ok(Amount::Bytes(3_000_000)));
        let span = |s| Ok(Amount::Time(Duration::from_secs(s)));
        assert_eq!(parse_amount("10s"), span(10));
        assert_eq!(parse_amount("2min"), span(120));
        for bad in ["", "x", "3x", "-3M", "s"] {
            assert!(parse_amount(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_said_before_anything_begins() {
        let cli = Cli::parse_from(["x", "http://o.example/a", "--low", "3M", "--high", "200k"]);
        assert!(cli.url.stream.rules().is_err());
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
