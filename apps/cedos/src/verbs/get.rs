//! `cedos get URL`: the command line of a download.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use d2tp_driver::{Config, SecretKey};
use d2tp_links::{ClassRules, Link, LinkMonitor};
use d2tp_sched::Policy;
use d2tp_session::Lambda;
use tokio::sync::watch;
use url::Url;

use super::how::{How, stop_on_signal};
use super::qlog::QlogArgs;
use super::{get_plan, key};
use cedos_agent::fetch::alternative;
use cedos_agent::fetch::dial::Dial as _;
use cedos_agent::fetch::direct::Direct;
use cedos_agent::fetch::forget::forget;
use cedos_agent::fetch::header::{self, Field};
use cedos_agent::fetch::jobs::{self, Standing};
use cedos_agent::fetch::mode::Mode;
use cedos_agent::fetch::origin::{Origin, Whom};
use cedos_agent::fetch::outcome::{Exit, Failure};
use cedos_agent::fetch::proxy::Proxy;
use cedos_agent::fetch::report::{Both, Lines, Observer, complain, say};
use cedos_agent::fetch::tls::Tls;
use cedos_agent::fetch::transfer::{self, Destination, Job};
use cedos_agent::fetch::tunnel::Tunnel;

/// Download URL over the networks there are, free ones first, by a deadline.
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 stopped (run again to continue), 10 deadline missed
/// (without --if-late fail the file is whole, only late), 11 budget exhausted, 12 wrong digest,
/// 13 the origin keeps changing the bytes, 14 no permitted network and --now, or none at the
/// deadline and --if-late fail.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// What to download: http:// or https://; from an origin that speaks D2TP,
    /// d2tp://host:port/KEY/path; from a device that serves, d2tp://KEY/path
    #[arg(value_parser = parse_url)]
    url: Url,

    /// Write to FILE, replacing it when the download is whole; into FILE if that is a directory;
    /// `-` is standard output [default: a new file named by the URL or the origin]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Refuse bytes with another digest: sha256:HEX. They are put aside as FILE.bad
    #[arg(long, value_name = "sha256:HEX", value_parser = parse_integrity)]
    integrity: Option<[u8; 32]>,

    /// Have the proxy open a tunnel only: this device asks the origin itself, and with https the
    /// proxy sees nothing but host and port. Always so for URLs with credentials
    #[arg(long)]
    sealed: bool,

    /// Give up a download that was stopped: remove its part, and tell the proxy that it may let go
    /// of its copy
    #[arg(long, conflicts_with_all = ["detach", "dry_run"])]
    forget: bool,

    /// Add a field to the request, as 'Accept: audio/mpeg'; repeatable. Those that look like
    /// credentials go to no other origin, and to no proxy (see --sealed)
    #[arg(short = 'H', long, value_name = "FIELD", value_parser = header::parse)]
    header: Vec<Field>,

    /// Trust the certificate authorities in FILE (PEM) besides the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Follow a redirect from https to http
    #[arg(long)]
    allow_downgrade: bool,

    /// Say what would be done and why, and do nothing. The origin is asked for the size, if a free
    /// network is up
    #[arg(long, conflicts_with = "detach")]
    dry_run: bool,

    /// With --dry-run: ask nobody
    #[arg(long, requires = "dry_run")]
    offline: bool,

    /// Keep the queues of slow networks short: whoever sends may have in flight what makes the round
    /// trip LAMBDA times the shortest, where it would grow beyond that [default: 3, if given without]
    #[arg(long, value_name = "LAMBDA", num_args = 0..=1, require_equals = true, default_missing_value = "3")]
    drwa: Option<Lambda>,

    #[command(flatten)]
    qlog: QlogArgs,

    /// Go on in the background, with no terminal; `cedos ls`, `status` and `cancel` find it by the
    /// number that is printed
    #[arg(long)]
    detach: bool,

    #[command(flatten)]
    how: How,
}

fn parse_url(text: &str) -> Result<Url, String> {
    let refuse = |why: &str| {
        let meant = match text.split_once("://") {
            None if text.contains('.') => format!("; is https://{text} meant?"),
            _ => String::new(),
        };
        Err(format!(
            "`{text}` is not an http:// or https:// URL: {why}{meant}"
        ))
    };
    match text.parse::<Url>() {
        Ok(url) if matches!(url.scheme(), "http" | "https" | "d2tp") => Ok(url),
        Ok(url) => refuse(&format!("{}: is another kind", url.scheme())),
        Err(url::ParseError::RelativeUrlWithoutBase) => refuse("it has no https:// in front"),
        Err(error) => refuse(&error.to_string()),
    }
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
            complain(&format!("cedos get: {}", failure.text));
            failure.exit.into()
        }
    }
}

async fn start(args: GetArgs) -> Result<Exit, Failure> {
    let proxy = args.how.proxy().map_err(Failure::usage)?;
    let mut job = job(&args).map_err(Failure::usage)?;
    let whom = end_to_end(&args, &mut job)?;
    let mode = match whom {
        Some(_) => Mode::Direct,
        None => mode(&args, proxy.is_some())?,
    };
    // Everything that can be wrong with the command line is said before anything is started.
    let tls = match mode {
        Mode::Direct | Mode::Sealed if whom.is_none() => Some(Tls::new(args.ca.as_deref())?),
        _ => None,
    };
    let key = match (&proxy, &whom) {
        (Some(_), _) | (_, Some(_)) => Some(
            key::of_device(args.how.key.as_deref())
                .map_err(|error| Failure::error(format!("{error:#}")))?,
        ),
        (None, None) => None,
    };
    if args.detach {
        return detach(&job, args.how.json);
    }
    let own = jobs::Own::claim().map_err(|e| Failure::storage("cannot keep the state", &e))?;
    let log = args
        .qlog
        .open()
        .map_err(|e| Failure::usage(format!("{e:#}")))?;
    let rules = ClassRules {
        rules: args.how.link.clone(),
    };
    let (_, monitor) = LinkMonitor::start(rules)
        .await
        .map_err(|error| Failure::error(error.to_string()))?;
    let links = monitor.subscribe();
    let origin = |whom, key| {
        let mut config = Config::default();
        args.how.transport.apply(&mut config);
        let (proxy, links, log) = (proxy.clone(), links.clone(), log.clone());
        Origin::new(whom, proxy, key, config, links, log)
    };
    let end_to_end = match (whom, &key) {
        (Some(whom), Some(key)) => Some(origin(whom, key.clone())),
        (None, _) if may_go_end_to_end(&args, &job) => {
            alternative(&args, &job, &links, origin).await
        }
        _ => None,
    };
    let way = match (end_to_end, proxy, key, tls) {
        (Some(origin), ..) => Way::EndToEnd(Box::new(origin)),
        (None, Some(address), Some(key), tls) => {
            let tunnel = tls.map(Tunnel::new);
            let mut proxy = Proxy::new(address, key, links.clone(), tunnel).configured(|config| {
                args.how.transport.apply(config);
                config.ack_offload = args.how.offload_acks;
                config.drwa = args.drwa;
            });
            if let Some(log) = &log {
                proxy.log_to(log.clone());
            }
            // Only a flow of which the proxy knows what it carries goes on in another process.
            let lasts = args.forget || (mode == Mode::ProxyFetch && !args.dry_run);
            if let Some(directory) = jobs::state().ok().filter(|_| lasts) {
                proxy = proxy.keep_in(directory.join("instances"));
            }
            Way::Proxied(Box::new(proxy))
        }
        (None, _, _, Some(tls)) => Way::Straight(Direct::new(tls).holding(args.drwa)),
        (None, _, _, None) => unreachable!("a download without a proxy has its own trust"),
    };
    if args.forget {
        return give_up(&job, way.proxy()).await;
    }
    if args.dry_run {
        job.refuse_existing()?;
        let plan = match &way {
            Way::Straight(dial) => transfer::rehearse(&job, dial, links, args.offline).await,
            Way::EndToEnd(dial) => transfer::rehearse(&job, &**dial, links, args.offline).await,
            Way::Proxied(proxy) => {
                transfer::rehearse_proxied(&job, proxy, links, args.offline).await
            }
        }?;
        let text = match args.how.json {
            true => json_of(&plan),
            false => get_plan::screen(&plan),
        };
        say(&text);
        return Ok(Exit::Done);
    }
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).map_err(|error| Failure::error(format!("signals: {error}")))?;
    let mut observer: Box<dyn Observer> = match own {
        Some(own) => Box::new(Both(Box::new(Lines), Box::new(own))),
        None => args
            .how
            .observer(matches!(job.destination, Destination::Output)),
    };
    let exit = match &way {
        Way::Straight(dial) => transfer::run(&job, dial, links, stopped, observer.as_mut()).await,
        Way::EndToEnd(dial) => {
            transfer::run(&job, &**dial, links, stopped, observer.as_mut()).await
        }
        Way::Proxied(proxy) => {
            transfer::run_proxied(&job, proxy, links, stopped, observer.as_mut()).await
        }
    };
    if let Some(log) = log {
        log.finish();
    }
    Ok(exit)
}

enum Way {
    Straight(Direct),
    EndToEnd(Box<Origin>),
    Proxied(Box<Proxy>),
}

impl Way {
    fn proxy(&self) -> Option<&Proxy> {
        match self {
            Way::Straight(_) | Way::EndToEnd(_) => None,
            Way::Proxied(proxy) => Some(proxy),
        }
    }
}

async fn give_up(job: &Job, proxy: Option<&Proxy>) -> Result<Exit, Failure> {
    if matches!(job.destination, Destination::Output) {
        return Err(Failure::usage("standard output leaves nothing to give up"));
    }
    complain(&forget(&job.named(), &transfer::public(&job.url), proxy).await?);
    Ok(Exit::Done)
}

fn json_of(what: &impl serde::Serialize) -> String {
    serde_json::to_string(what).expect("plain data")
}

/// Hands this command line to a process in the background.
fn detach(job: &Job, json: bool) -> Result<Exit, Failure> {
    if matches!(job.destination, Destination::Output) {
        return Err(Failure::usage(
            "--detach leaves the terminal, so there is no standard output to write to; name a file \
             with -o",
        ));
    }
    let named = std::path::absolute(job.named())
        .map_err(|e| Failure::error(format!("the working directory: {e}")))?;
    let now = jiff::Zoned::now();
    let asked = jobs::Asked {
        url: transfer::public(&job.url),
        file: named,
        since: now.timestamp().to_string(),
        deadline: job
            .within
            .and_then(|within| jiff::SignedDuration::try_from(within).ok())
            .and_then(|within| now.timestamp().checked_add(within).ok())
            .map(|at| at.to_string()),
    };
    let arguments: Vec<_> = std::env::args_os()
        .filter(|argument| argument != "--detach")
        .collect();
    let begun =
        jobs::start(&asked, &arguments).map_err(|error| Failure::error(format!("{error:#}")))?;
    if begun.standing() == Standing::Failed {
        let text = begun.event["text"].as_str().unwrap_or("it failed at once");
        let exit = begun.event["exit"].as_u64().and_then(Exit::of);
        return Err(Failure {
            exit: exit.unwrap_or(Exit::Error),
            ..Failure::error(text)
        });
    }
    if json {
        let told = serde_json::json!({"event": "detached", "id": begun.id, "pid": begun.pid,
                                      "file": asked.file, "log": begun.log()});
        say(&told.to_string());
    } else {
        say(&begun.id.to_string());
        let (id, log) = (begun.id, begun.log());
        complain(&format!(
            "download {id} goes on in the background; cedos status {id} | cedos ls | cedos cancel \
             {id}; log: {}",
            log.display()
        ));
    }
    Ok(Exit::Done)
}

/// Whom a `d2tp:` URL names. The job then asks them, and spends nothing: these sessions use free links.
fn end_to_end(args: &GetArgs, job: &mut Job) -> Result<Option<Whom>, Failure> {
    if args.url.scheme() != "d2tp" {
        return Ok(None);
    }
    let (whom, url) =
        Whom::of(&args.url).map_err(|why| Failure::usage(format!("{}: {why}", args.url)))?;
    if args.sealed || args.ca.is_some() {
        let text = "d2tp:// is end to end in any case, and proved by the key in it";
        return Err(Failure::usage(format!(
            "{text}: leave out --sealed and --ca"
        )));
    }
    if args.how.asks_for_paid_links() {
        let text = "d2tp:// goes over free links only: leave out --policy and --max-cell";
        return Err(Failure::usage(text));
    }
    job.url = url;
    job.policy = Policy::FreeOnly;
    Ok(Some(whom))
}

/// Whether a web download may go to the same origin by D2TP, if that speaks it: over free links only, with
/// nothing that is to be seen by whom it was meant for alone.
fn may_go_end_to_end(args: &GetArgs, job: &Job) -> bool {
    let secret = !args.url.username().is_empty() || args.url.password().is_some();
    let plain = !secret && !args.header.iter().any(Field::is_credential);
    job.policy == Policy::FreeOnly && plain && !args.sealed && !args.forget && !args.dry_run
}

/// The origin by D2TP, if it said before that it speaks it and is there now.
async fn alternative(
    args: &GetArgs,
    job: &Job,
    links: &watch::Receiver<Arc<Vec<Link>>>,
    origin: impl Fn(Whom, SecretKey) -> Origin,
) -> Option<Origin> {
    let proxy = args.how.proxy().ok()?.map(|proxy| proxy.to_string());
    let address = alternative::known(&job.url, proxy.as_deref())?;
    let key = key::of_device(args.how.key.as_deref()).ok()?;
    let origin = origin(Whom::At(address), key);
    // Without a network nobody is there, which says nothing of the origin.
    let may_ask = origin.needs_no_link() || links.borrow().iter().any(Link::is_usable);
    (may_ask && alternative::answers(&origin, &job.url).await).then_some(origin)
}

/// Who speaks to the origin. What proves who the user is, no proxy gets to see unasked.
fn mode(args: &GetArgs, through_proxy: bool) -> Result<Mode, Failure> {
    let refuse = |text: &str| Err(Failure::usage(text));
    if !through_proxy {
        return match args.sealed {
            true => refuse("--sealed is a way of using a proxy: give --prox too, or leave it out"),
            false => Ok(Mode::Direct),
        };
    }
    let secret = !args.url.username().is_empty()
        || args.url.password().is_some()
        || args.header.iter().any(Field::is_credential);
    if args.sealed || secret {
        return Ok(Mode::Sealed);
    }
    if args.ca.is_some() {
        return refuse(
            "--ca is for downloads whose origin this device verifies: add --sealed, or give --ca \
             to `cedos prox`, which verifies it otherwise",
        );
    }
    Ok(Mode::ProxyFetch)
}

fn job(args: &GetArgs) -> Result<Job, String> {
    let destination = match &args.output {
        Some(path) if path.as_os_str() == "-" => Destination::Output,
        Some(path) if path.is_dir() => Destination::Named(path.clone()),
        Some(path) => Destination::File(path.clone()),
        None => Destination::Named(PathBuf::new()),
    };
    Ok(Job {
        url: args.url.clone(),
        destination,
        within: args.how.within()?,
        policy: args.how.policy(),
        if_late: args.how.if_late,
        now: args.how.now,
        metered_bytes_max: args.how.max_cell,
        integrity: args.integrity,
        tries_max: args.how.tries,
        stall: args.how.stall,
        allow_downgrade: args.allow_downgrade,
        fields: args.header.as_slice().into(),
    })
}
