//! `cedos get URL`: the command line of a download.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use d2tp_driver::{AddressError, ServerAddress};
use d2tp_links::{ClassRule, ClassRules, LinkMonitor};
use d2tp_sched::{IfLate, Policy};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use url::Url;

use super::key;
use crate::get::direct::Direct;
use crate::get::filename;
use crate::get::forget::forget;
use crate::get::outcome::{Exit, Failure};
use crate::get::proxy::Proxy;
use crate::get::report::{Bar, JsonLines, Lines, Observer};
use crate::get::transfer::{self, Destination, Job};
use crate::get::when;

/// Deadline of a download that names none.
const WITHIN_DEFAULT: Duration = Duration::from_secs(6 * 3600);

/// Download URL over the networks there are, free ones first, by a deadline.
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 stopped (run again to continue), 10 deadline missed
/// (without --if-late fail the file is whole, only late), 11 budget exhausted, 12 wrong digest,
/// 13 the origin keeps changing the bytes, 14 no permitted network and --now.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// What to download: http:// or https://
    url: Url,

    /// Write to FILE, replacing it when the download is whole; `-` is standard output [default:
    /// a new file named by the URL or the origin]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Be ready by TIME: 07:30 (the next one), RFC 3339, or +45m
    #[arg(long, value_name = "TIME", group = "when")]
    by: Option<String>,

    /// Be ready within this long: 2h, 45m, 1h30m [default: 6h]
    #[arg(long, value_name = "SPAN", group = "when", value_parser = when::parse_span)]
    within: Option<Duration>,

    /// No deadline: wait for free networks however long it takes
    #[arg(long, group = "when")]
    when_free: bool,

    /// Start at once on any network, or fail
    #[arg(long, group = "when")]
    now: bool,

    /// How to weigh money against time [default: free-first; any with --now; free-only with
    /// --when-free]
    #[arg(long, value_parser = words::<Policy, 5>(Policy::ALL.map(Policy::word)))]
    policy: Option<Policy>,

    /// Bytes that metered networks may carry at most: 50M, 1.5G
    #[arg(long, value_name = "SIZE", value_parser = when::parse_bytes)]
    max_cell: Option<u64>,

    /// What to do when free networks alone will not make the deadline
    #[arg(long, default_value = "cell", value_parser = words::<IfLate, 3>(IfLate::ALL.map(IfLate::word)))]
    if_late: IfLate,

    /// Refuse bytes with another digest: sha256:HEX. They are put aside as FILE.bad
    #[arg(long, value_name = "sha256:HEX", value_parser = parse_integrity)]
    integrity: Option<[u8; 32]>,

    /// Download through this proxy: d2tp://host:port/KEY
    #[arg(long, value_name = "ADDR", env = "CEDOS_PROX")]
    prox: Option<String>,

    /// This device's private key file, by which the proxy knows it [default: $CEDOS_KEY_FILE, or
    /// ~/.config/cedos/key, which is made on first use]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,

    /// Give up a download that was stopped: remove its part, and tell the proxy that it may let go
    /// of its copy
    #[arg(long)]
    forget: bool,

    /// Say what a network costs: wwan0=metered, wlan0=free, rmnet*=roaming
    #[arg(long, value_name = "NAME=CLASS", action = ArgAction::Append)]
    link: Vec<ClassRule>,

    /// Trust the certificate authorities in FILE (PEM) besides the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Follow a redirect from https to http
    #[arg(long)]
    allow_downgrade: bool,

    /// Tries without a new byte before giving up on the origin
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    tries: u32,

    /// Drop a connection that has been silent this long
    #[arg(long, value_name = "SPAN", default_value = "10s", value_parser = when::parse_span)]
    stall: Duration,

    /// Print one JSON object per line: progress, switch, waiting, note, and last done or error
    #[arg(long)]
    json: bool,
}

/// Reads one of some words, which `--help` lists.
fn words<T, const N: usize>(words: [&'static str; N]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = d2tp_sched::UnknownWord> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).try_map(|word| word.parse::<T>())
}

fn parse_integrity(text: &str) -> Result<[u8; 32], String> {
    let refuse = || format!("`{text}` is not sha256: and 64 hexadecimal digits");
    let digits = text.strip_prefix("sha256:").ok_or_else(refuse)?;
    let mut digest = [0; 32];
    hex::decode_to_slice(digits, &mut digest).map_err(|_| refuse())?;
    Ok(digest)
}

/// Runs `cedos get` to its end.
pub async fn run(args: GetArgs) -> ExitCode {
    match start(args).await {
        Ok(exit) => exit.into(),
        Err(failure) => {
            eprintln!("cedos get: {}", failure.text);
            failure.exit.into()
        }
    }
}

async fn start(args: GetArgs) -> Result<Exit, Failure> {
    let usage = |text: String| Failure {
        exit: Exit::Usage,
        reason: None,
        text,
    };
    if !matches!(args.url.scheme(), "http" | "https") || !args.url.has_host() {
        return Err(usage(format!(
            "{} is not an http:// or https:// URL",
            args.url
        )));
    }
    let proxy: Option<ServerAddress> = match args.prox.as_deref().filter(|text| !text.is_empty()) {
        Some(text) => Some(
            text.parse()
                .map_err(|e: AddressError| usage(e.to_string()))?,
        ),
        None => None,
    };
    if proxy.is_some() && (!args.url.username().is_empty() || args.url.password().is_some()) {
        return Err(usage(
            "the URL carries credentials, which the proxy would see; download it without --prox \
             (and CEDOS_PROX)"
                .into(),
        ));
    }
    if proxy.is_some() && args.ca.is_some() {
        return Err(usage(
            "--ca is for downloads without a proxy: with --prox it is the proxy that verifies the \
             origin; give --ca to `cedos prox` instead"
                .into(),
        ));
    }
    let job = job(&args).map_err(usage)?;
    let rules = ClassRules {
        rules: args.link.clone(),
    };
    let (_, monitor) = LinkMonitor::start(rules)
        .await
        .map_err(|error| Failure::error(error.to_string()))?;
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).map_err(|error| Failure::error(format!("signals: {error}")))?;
    let mut observer = observer(&args);
    let links = monitor.subscribe();
    let Some(address) = proxy else {
        if args.forget {
            return give_up(&job, None).await;
        }
        let dial = Direct::new(args.ca.as_deref())?;
        return Ok(transfer::run(&job, &dial, links, stopped, observer.as_mut()).await);
    };
    let key = key::of_device(args.key.as_deref())
        .map_err(|error| Failure::error(format!("{error:#}")))?;
    let mut proxy = Proxy::new(address, key, links.clone());
    if let Some(directory) = instances() {
        proxy = proxy.keep_in(directory);
    }
    if args.forget {
        return give_up(&job, Some(&proxy)).await;
    }
    Ok(transfer::run_proxied(&job, &proxy, links, stopped, observer.as_mut()).await)
}

/// Where this user's instances are kept: `$XDG_STATE_HOME/cedos/instances`.
fn instances() -> Option<PathBuf> {
    let absolute = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
    };
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    Some(state?.join("cedos/instances"))
}

async fn give_up(job: &Job, proxy: Option<&Proxy>) -> Result<Exit, Failure> {
    let url = transfer::public(&job.url);
    let file = match &job.destination {
        Destination::File(path) => path.clone(),
        Destination::Named => filename::from_url(&job.url).into(),
        Destination::Output => {
            let text = "standard output leaves nothing to give up".into();
            return Err(Failure {
                exit: Exit::Usage,
                reason: None,
                text,
            });
        }
    };
    eprintln!("{}", forget(&file, &url, proxy).await?);
    Ok(Exit::Done)
}

fn job(args: &GetArgs) -> Result<Job, String> {
    let within = match (&args.by, args.within) {
        (Some(by), _) => Some(when::parse_by(by, &jiff::Zoned::now())?),
        (None, Some(within)) => Some(within),
        (None, None) if args.when_free || args.now => None,
        (None, None) => Some(WITHIN_DEFAULT),
    };
    let policy = args.policy.unwrap_or(match (args.when_free, args.now) {
        (true, _) => Policy::FreeOnly,
        (_, true) => Policy::Any,
        _ => Policy::FreeFirst,
    });
    let destination = match &args.output {
        Some(path) if path.as_os_str() == "-" => Destination::Output,
        Some(path) if path.is_dir() => return Err(format!("{} is a directory", path.display())),
        Some(path) => Destination::File(path.clone()),
        None => Destination::Named,
    };
    Ok(Job {
        url: args.url.clone(),
        destination,
        within,
        policy,
        if_late: args.if_late,
        now: args.now,
        metered_bytes_max: args.max_cell,
        integrity: args.integrity,
        tries_max: args.tries,
        stall: args.stall,
        allow_downgrade: args.allow_downgrade,
    })
}

fn observer(args: &GetArgs) -> Box<dyn Observer> {
    let to_stdout = args
        .output
        .as_ref()
        .is_some_and(|path| path.as_os_str() == "-");
    if args.json && to_stdout {
        // Standard output carries the object.
        Box::new(JsonLines(std::io::stderr()))
    } else if args.json {
        Box::new(JsonLines(std::io::stdout()))
    } else if std::io::stderr().is_terminal() {
        Box::new(Bar::new())
    } else {
        Box::new(Lines)
    }
}

/// Ctrl-C and SIGTERM ask for a clean stop; a second one ends the process at once.
fn stop_on_signal(stop: watch::Sender<bool>) -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::spawn(async move {
        for first in [true, false] {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if first {
                stop.send_replace(true);
            } else {
                std::process::exit(Exit::Cancelled as i32);
            }
        }
    });
    Ok(())
}
