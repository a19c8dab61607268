//! `cedos get URL`: the command line of a download.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use d2tp_links::ClassRules;
use d2tp_session::DrwaLambda;
use tokio::sync::watch;
use url::Url;

use super::credentials::{CredentialArgs, hide_passwords};
use super::qlog::QlogArgs;
use super::transfer_args::{TransferArgs, stop_on_signal};
use super::{get_plan, handover};
use cedos_agent::fetch::forget::forget;
use cedos_agent::fetch::header;
use cedos_agent::fetch::jobs::{self, JobState};
use cedos_agent::fetch::measured_rates::MeasuredRates;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::proxy::ProxyClient;
use cedos_agent::fetch::report::{
    DeadlinePromise, LineObserver, ObserverPair, TransferObserver, print_stderr, print_stdout,
};
use cedos_agent::fetch::transfer::{self, Destination, TransferContext, TransferJob};
use cedos_agent::order::{self, TransferOrder, TransferVerb};
use cedos_agent::prepared_transfer::{
    PreparedTransfer, SessionTuning, TransferTransport, TransportPurpose,
};
use cedos_agent::settings;

/// Download URL by a deadline, over free networks first.
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 stopped (run again to resume), 10 deadline missed (without
/// --if-late fail the file is complete, but late), 11 --max-cell or budget used up, 12 wrong digest, 13 the
/// server keeps changing the content, 14 no permitted network and --now, or none at the deadline and
/// --if-late fail, 75 the agent stopped.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// What to download: http:// or https://; d2tp://host:port/KEY/path from a server that speaks D2TP;
    /// d2tp://KEY/path from a device that serves
    #[arg(value_parser = parse_url)]
    url: Url,

    /// Write to FILE, replacing it when the download is complete; into FILE if that is a directory;
    /// `-` is standard output [default: a new file named by the URL or the server]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Refuse content with another digest: sha256:HEX. It is kept as FILE.bad
    #[arg(long, value_name = "sha256:HEX", value_parser = parse_integrity)]
    integrity: Option<String>,

    /// Use the proxy only as a tunnel: with https it then sees nothing but host and port. Always on for
    /// URLs with credentials
    #[arg(long)]
    sealed: bool,

    /// Discard a stopped download: remove its partial file, and have the proxy free its copy
    #[arg(long, conflicts_with_all = ["detach", "dry_run"])]
    forget: bool,

    /// Add a header field to the request, such as 'Accept: audio/mpeg'; repeatable. Fields that look like
    /// credentials are sent to no other server, and to no proxy (see --sealed)
    #[arg(short = 'H', long, value_name = "FIELD", value_parser = parse_header)]
    header: Vec<String>,

    #[command(flatten)]
    credentials: CredentialArgs,

    /// Trust the certificate authorities in FILE (PEM) besides the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Follow a redirect from https to http
    #[arg(long)]
    allow_downgrade: bool,

    /// Show what would be done, and why; download nothing. Asks the server for the size, if a free
    /// network is up
    #[arg(long, conflicts_with = "detach")]
    dry_run: bool,

    /// With --dry-run: send nothing
    #[arg(long, requires = "dry_run")]
    offline: bool,

    /// Keep the queues of slow networks short: limit the round trip to LAMBDA times the shortest one
    /// [default without a value: 3]
    #[arg(long, value_name = "LAMBDA", num_args = 0..=1, require_equals = true, default_missing_value = "3")]
    drwa: Option<DrwaLambda>,

    #[command(flatten)]
    qlog: QlogArgs,

    /// Run in the background and print a number, by which `cedos ls`, `status` and `cancel` know it
    #[arg(long)]
    detach: bool,

    #[command(flatten)]
    how: TransferArgs,
}

fn parse_url(text: &str) -> Result<Url, String> {
    let refuse = |why: &str| {
        let meant = match text.split_once("://") {
            None if text.contains('.') => format!("; do you mean https://{text}?"),
            _ => String::new(),
        };
        Err(format!(
            "`{text}` is not an http:// or https:// URL: {why}{meant}"
        ))
    };
    match text.parse::<Url>() {
        Ok(url) if matches!(url.scheme(), "http" | "https" | "d2tp") => Ok(url),
        Ok(url) => refuse(&format!("{}: is not supported", url.scheme())),
        Err(url::ParseError::RelativeUrlWithoutBase) => refuse("it has no https:// in front"),
        Err(error) => refuse(&error.to_string()),
    }
}

fn parse_integrity(text: &str) -> Result<String, String> {
    order::parse_integrity(text).map(|_| text.to_owned())
}

/// Parses a header field; returns it as it was written, once it makes sense.
fn parse_header(text: &str) -> Result<String, String> {
    header::parse(text).map(|_| text.to_owned())
}

/// Runs `cedos get` to its end.
pub async fn run(args: GetArgs) -> ExitCode {
    // Before they are hidden: a process in the background is handed all of them.
    let arguments = std::env::args_os().collect();
    hide_passwords();
    match start(args, arguments).await {
        Ok(Some(exit)) => exit.into(),
        Ok(None) => ExitCode::from(handover::STILL_WAITING),
        Err(failure) => {
            print_stderr(&format!("cedos get: {}", failure.text));
            failure.exit.into()
        }
    }
}

async fn start(mut args: GetArgs, arguments: Vec<OsString>) -> handover::FollowResult {
    let asked = args.url.clone();
    let found = args.credentials.apply(std::slice::from_mut(&mut args.url));
    found.map_err(TransferFailure::usage)?;
    let order = args.order().map_err(TransferFailure::usage)?;
    // Everything that can be wrong with the command line is said before anything is started.
    let mut prepared =
        PreparedTransfer::prepare(&order, order.job()?, args.how.asks_for_paid_links())?;
    if !args.dry_run && !args.forget {
        let to_output = matches!(prepared.job.destination, Destination::Stdout);
        if let Some(agent) = args.how.agent(args.only_here(to_output), args.detach).await {
            prepared.job.refuse_existing()?;
            args.how.announce_deadline(&order);
            let json = args.how.json;
            if args.detach {
                return handover::submit(agent, order, json).await.map(Some);
            }
            let mut observer = args.how.observer(false);
            return handover::submit_and_follow(agent, order, observer.as_mut(), json).await;
        }
    }
    if args.detach {
        args.how.announce_deadline(&order);
        let arguments = (args.credentials).resolved(arguments, &asked, &args.url);
        return detach(&prepared.job, arguments, args.how.json).map(Some);
    }
    let own = jobs::BackgroundProcess::claim()
        .map_err(|e| TransferFailure::storage("cannot keep the state", &e))?;
    let log = args
        .qlog
        .open()
        .map_err(|e| TransferFailure::usage(format!("{e:#}")))?;
    let rules = ClassRules {
        rules: args.how.link.clone(),
    };
    let (monitor, _) = settings::watch(rules, None)
        .await
        .map_err(|error| TransferFailure::error(format!("{error:#}")))?;
    let links = monitor.subscribe();
    let tuning = SessionTuning {
        drwa: args.drwa,
        log: log.clone(),
        ..args.how.tuning()
    };
    let purpose = match (args.forget, args.dry_run) {
        (true, _) => TransportPurpose::Forget,
        (_, true) => TransportPurpose::DryRun,
        _ => TransportPurpose::Carry,
    };
    let transport = prepared.open_transport(&links, &tuning, purpose).await;
    let job = &prepared.job;
    if args.forget {
        return give_up(job, transport.proxy()).await.map(Some);
    }
    let (stop, stopped) = watch::channel(false);
    let scheduler = args.how.scheduler();
    let rates = MeasuredRates::restore(&scheduler, &links.borrow());
    let setting = TransferContext::standalone(links, stopped, scheduler.clone());
    if args.dry_run {
        job.refuse_existing()?;
        let plan = match &transport {
            TransferTransport::Direct(dial) => {
                transfer::plan_direct(job, dial, setting, args.offline).await
            }
            TransferTransport::EndToEnd(dial) => {
                transfer::plan_direct(job, &**dial, setting, args.offline).await
            }
            TransferTransport::Proxied(proxy) => {
                transfer::plan_proxied(job, proxy, setting, args.offline).await
            }
        }?;
        let text = match args.how.json {
            true => json_of(&plan),
            false => get_plan::render(&plan),
        };
        print_stdout(&text);
        return Ok(Some(TransferExit::Done));
    }
    stop_on_signal(stop).map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
    let mut observer: Box<dyn TransferObserver> = match own {
        Some(own) => Box::new(ObserverPair(Box::new(LineObserver), Box::new(own))),
        None => args
            .how
            .observer(matches!(job.destination, Destination::Stdout)),
    };
    args.how.announce_deadline(&order);
    let exit = transport.run(job, None, setting, observer.as_mut()).await;
    rates.save(&scheduler);
    if let Some(log) = log {
        log.finish();
    }
    Ok(Some(exit))
}

async fn give_up(
    job: &TransferJob,
    proxy: Option<&ProxyClient>,
) -> Result<TransferExit, TransferFailure> {
    if matches!(job.destination, Destination::Stdout) {
        return Err(TransferFailure::usage(
            "--forget needs a file; standard output leaves none",
        ));
    }
    print_stderr(&forget(&job.expected_path(), &transfer::redact_url(&job.url), proxy).await?);
    Ok(TransferExit::Done)
}

fn json_of(what: &impl serde::Serialize) -> String {
    serde_json::to_string(what).expect("plain data")
}

/// Hands this command line to a process in the background.
fn detach(
    job: &TransferJob,
    arguments: Vec<OsString>,
    json: bool,
) -> Result<TransferExit, TransferFailure> {
    if matches!(job.destination, Destination::Stdout) {
        return Err(TransferFailure::usage(
            "--detach cannot write to standard output; name a file with -o",
        ));
    }
    let named = std::path::absolute(job.expected_path())
        .map_err(|e| TransferFailure::error(format!("the working directory: {e}")))?;
    let now = jiff::Zoned::now();
    let asked = jobs::JobRequest {
        verb: TransferVerb::Get,
        url: transfer::redact_url(&job.url),
        file: named,
        since: now.timestamp().to_string(),
        deadline: job.terms.due.map(|due| due.at().to_string()),
    };
    let arguments: Vec<_> = (arguments.into_iter())
        .filter(|argument| argument != "--detach")
        .collect();
    let begun = jobs::start(&asked, &arguments)
        .map_err(|error| TransferFailure::error(format!("{error:#}")))?;
    if begun.state() == JobState::Failed {
        let text = begun.event["text"].as_str().unwrap_or("it failed at once");
        let exit = begun.event["exit"].as_u64().and_then(TransferExit::of);
        return Err(TransferFailure {
            exit: exit.unwrap_or(TransferExit::Error),
            ..TransferFailure::error(text)
        });
    }
    let due = asked.deadline.is_some();
    if json {
        let promise = due.then(|| first_promise(begun.id)).flatten();
        let event = serde_json::json!({"event": "detached", "id": begun.id, "pid": begun.pid,
                                      "file": asked.file, "log": begun.log_path(),
                                      "promise": promise});
        print_stdout(&event.to_string());
    } else {
        print_stdout(&begun.id.to_string());
        let (id, log) = (begun.id, begun.log_path());
        print_stderr(&format!(
            "download {id} runs in the background: cedos status {id} | cedos ls | cedos cancel \
             {id}; log: {}",
            log.display()
        ));
        if due && let Some(promised) = first_promise(id) {
            handover::warn_if_unlikely(&promised);
        }
    }
    Ok(TransferExit::Done)
}

/// What is promised of a download that was just begun, if that is known soon.
fn first_promise(id: u64) -> Option<DeadlinePromise> {
    let begun = Instant::now();
    while begun.elapsed() < handover::SIZE_KNOWN_WITHIN {
        let event = jobs::find(id).ok()?.event;
        if matches!(
            event["event"].as_str(),
            Some("progress" | "waiting" | "done" | "error")
        ) {
            return serde_json::from_value(event["promise"].clone()).ok();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}

impl GetArgs {
    /// The option among these that no agent can follow, if any.
    fn only_here(&self, to_output: bool) -> Option<&'static str> {
        match () {
            () if to_output => Some("standard output"),
            () if self.url.scheme() == "d2tp" => Some("d2tp://"),
            () if self.drwa.is_some() => Some("--drwa"),
            () if self.qlog.is_requested() => Some("--qlog"),
            () => None,
        }
    }

    /// What was asked for.
    fn order(&self) -> Result<TransferOrder, String> {
        let mut order = TransferOrder::new(TransferVerb::Get, self.url.as_str());
        self.how.apply_to(&mut order)?;
        match &self.output {
            Some(path) if path.as_os_str() != "-" && path.is_dir() => {
                order.folder = Some(path.clone());
            }
            path => order.file.clone_from(path),
        }
        order.integrity = self.integrity.clone();
        order.allow_downgrade = self.allow_downgrade;
        order.headers.clone_from(&self.header);
        order.sealed = self.sealed;
        order.ca.clone_from(&self.ca);
        Ok(order)
    }
}
