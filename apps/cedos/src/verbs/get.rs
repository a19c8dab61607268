//! `cedos get URL`: the command line of a download.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use d2tp_driver::Qlog;
use d2tp_session::DrwaLambda;
use tokio::sync::watch;
use url::Url;

use super::credentials::{CookieArgs, CredentialArgs, hide_passwords};
use super::device_links::watch_links;
use super::log_levels::log_if_chosen;
use super::qlog::QlogArgs;
use super::request_args::RequestArgs;
use super::transfer_args::{TransferArgs, stop_on_signal};
use super::url_list::{parse_url, read_urls};
use super::{get_batch, get_plan, handover};
use crate::help::{COST_AND_TIME, EXPERT, TRUST};
use cedos_agent::fetch::forget::forget;
use cedos_agent::fetch::jobs::{self, JobState};
use cedos_agent::fetch::measured_rates::MeasuredRates;
use cedos_agent::fetch::older_versions::OLDER_MAX;
use cedos_agent::fetch::option_parsers;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::proxy::ProxyClient;
use cedos_agent::fetch::rate_limiter::RateLimiter;
use cedos_agent::fetch::report::{
    DeadlinePromise, LineObserver, ObserverPair, TransferObserver, print_stderr, print_stdout,
};
use cedos_agent::fetch::transfer::{self, Destination, TransferContext, TransferJob};
use cedos_agent::order::{self, TransferOrder, TransferVerb};
use cedos_agent::prepared_transfer::{
    PreparedTransfer, SessionTuning, TransferTransport, TransportPurpose,
};
use cedos_agent::settings::UserSettings;

/// Download by a deadline, over free networks first.
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 stopped (run again to resume), 10 deadline missed (without
/// --if-late fail the file is complete, but late), 11 --max-cell or budget used up, 12 wrong digest, 13 the
/// server keeps changing the content, 14 no permitted network and --now, or none at the deadline and
/// --if-late fail, 75 the agent stopped. Of several URLs, that of the first that does not end with 0.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// What to download: http:// or https://; d2tp://host:port/KEY/path from a server that speaks D2TP;
    /// d2tp://KEY/path from a device that serves
    #[arg(value_name = "URL", value_parser = parse_url, required_unless_present = "input_file")]
    urls: Vec<Url>,

    /// Read more URLs from FILE, one a line; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    input_file: Option<PathBuf>,

    /// Write to FILE, replacing it when the download is complete; into FILE if that is a directory;
    /// `-` is standard output [default: a new file named by the URL or the server]
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,

    /// With --every: keep the last N versions of the file that are replaced, as FILE.1 (the newest) to FILE.N
    #[arg(long, value_name = "N", requires = "every", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=i64::from(OLDER_MAX)))]
    keep: u32,

    /// Do not download what exists already under its name
    #[arg(long, conflicts_with = "every")]
    pub(super) skip_existing: bool,

    /// curl's option: the server or the URL names the file, as it does without -o
    #[arg(
        short = 'O',
        long = "remote-name",
        alias = "remote-name-all",
        conflicts_with = "output",
        hide = true
    )]
    _remote_name: bool,

    /// curl's option, with `-` alone: a stopped download is always resumed
    #[arg(short = 'C', long = "continue-at", value_name = "OFFSET", allow_hyphen_values = true, value_parser = parse_continue_at, hide = true)]
    _continue_at: Option<String>,

    /// wget's option: a stopped download is always resumed
    #[arg(short = 'c', long = "continue", hide = true)]
    _continue: bool,

    #[command(flatten)]
    pub(super) how: TransferArgs,

    /// Take in at most this many bytes per second, all URLs together: 500k, 2M
    #[arg(long, value_name = "RATE", value_parser = parse_rate, help_heading = COST_AND_TIME)]
    pub(super) limit_rate: Option<u64>,

    /// Refuse content with another digest: sha256:HEX. It is kept as FILE.bad
    #[arg(long, value_name = "sha256:HEX", value_parser = parse_integrity, conflicts_with = "every", help_heading = TRUST)]
    pub(super) integrity: Option<String>,

    /// Discard a stopped download: remove its partial file, and have the proxy free its copy
    #[arg(long, conflicts_with_all = ["detach", "dry_run", "every"])]
    forget: bool,

    #[command(flatten)]
    request: RequestArgs,

    #[command(flatten)]
    credentials: CredentialArgs,

    #[command(flatten)]
    cookies: CookieArgs,

    /// Show what would be done, and why; download nothing. Asks the server for the size, if a free
    /// network is up
    #[arg(long, conflicts_with_all = ["detach", "every"])]
    dry_run: bool,

    /// With --dry-run: send nothing
    #[arg(long, requires = "dry_run", help_heading = EXPERT)]
    offline: bool,

    /// Keep the queues of slow networks short: limit the round trip to LAMBDA times the shortest one
    /// [default without a value: 3]
    #[arg(long, value_name = "LAMBDA", num_args = 0..=1, require_equals = true, default_missing_value = "3", help_heading = EXPERT)]
    drwa: Option<DrwaLambda>,

    #[command(flatten)]
    pub(super) qlog: QlogArgs,

    /// Run in the background and print a number, by which `cedos ls`, `status` and `cancel` know it
    #[arg(long)]
    pub(super) detach: bool,
}

/// The slowest limit on the rate, in bytes per second.
const LIMIT_RATE_MIN: u64 = 100; // a guess: a gigabyte in four months

pub(super) fn parse_rate(text: &str) -> Result<u64, String> {
    let text = text.strip_suffix("/s").unwrap_or(text);
    match option_parsers::parse_bytes(text)? {
        rate if rate >= LIMIT_RATE_MIN => Ok(rate),
        _ => Err(format!("at least {LIMIT_RATE_MIN} bytes per second")),
    }
}

fn parse_continue_at(text: &str) -> Result<String, String> {
    match text {
        "-" => Ok(text.to_owned()),
        _ => Err(
            "a stopped download resumes where it stopped, and nowhere else; leave it out"
                .to_owned(),
        ),
    }
}

fn parse_integrity(text: &str) -> Result<String, String> {
    order::parse_integrity(text).map(|_| text.to_owned())
}

/// The directory for downloads that name no file, if the settings name one.
fn downloads_folder() -> Result<Option<PathBuf>, String> {
    let settings = UserSettings::load(None).map_err(|error| error.to_string())?;
    let Some(folder) = settings.path("directories.downloads") else {
        return Ok(None);
    };
    let made = std::fs::create_dir_all(&folder);
    made.map_err(|error| {
        format!(
            "directories.downloads: cannot make {}: {error}",
            folder.display()
        )
    })?;
    Ok(Some(folder))
}

/// Runs `cedos get` to its end.
pub async fn run(mut args: GetArgs) -> ExitCode {
    log_if_chosen();
    // Nobody follows a transfer that never ends.
    args.detach |= args.how.every.is_some();
    // Before they are hidden: a process in the background is handed all of them.
    let arguments = std::env::args_os().collect();
    hide_passwords();
    let ended = match args.input_file.is_some() || args.urls.len() > 1 {
        true => start_all(args).await,
        false => start(args, arguments).await.map(handover::exit_number),
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            print_stderr(&format!("cedos get: {}", failure.text));
            failure.exit.into()
        }
    }
}

/// Downloads several URLs, or those of a list.
async fn start_all(args: GetArgs) -> get_batch::BatchResult {
    let urls = read_urls(&args.urls, args.input_file.as_deref());
    let mut urls = urls.map_err(TransferFailure::usage)?;
    let found = args.credentials.apply_user(&mut urls);
    found.map_err(TransferFailure::usage)?;
    if !args.dry_run && !args.forget {
        return get_batch::run(args, urls).await;
    }
    if args.output.as_ref().is_some_and(|output| !output.is_dir()) {
        let text = "-o names a directory if there are several URLs";
        return Err(TransferFailure::usage(text));
    }
    let begun = async |url: Url| {
        if !args.how.json {
            print_stdout(&format!("{}:", transfer::redact_url(&url)));
        }
        let exit = examine(&args, &url).await;
        exit.map(|exit| exit.unwrap_or(TransferExit::Error))
    };
    get_batch::one_after_another(urls, begun).await
}

/// Downloads as these options say, in this process.
pub(super) async fn fetch(args: GetArgs) -> handover::FollowResult {
    start(args, Vec::new()).await
}

async fn start(mut args: GetArgs, arguments: Vec<OsString>) -> handover::FollowResult {
    let asked = args.urls[0].clone();
    let found = args.credentials.apply_user(&mut args.urls);
    found.map_err(TransferFailure::usage)?;
    let url = args.urls[0].clone();
    if args.dry_run || args.forget {
        return examine(&args, &url).await;
    }
    let order = args.order(&url).map_err(TransferFailure::usage)?;
    // Everything that can be wrong with the command line is said before anything is started.
    let mut prepared =
        PreparedTransfer::prepare(&order, order.job()?, args.how.asks_for_paid_links())?;
    if args.skip_existing && get_batch::is_skipped(&prepared.job) {
        say_skipped(&prepared.job, args.how.json);
        return Ok(Some(TransferExit::Done));
    }
    let to_output = matches!(
        prepared.job.destination,
        Destination::Stdout | Destination::Device(_)
    );
    let own = args.only_here(&args.urls, to_output);
    if let Some(agent) = args.how.agent(own, args.detach).await {
        prepared.job.check_path()?;
        args.how.announce_deadline(&order);
        let json = args.how.json;
        if args.detach {
            return handover::submit(agent, order, json).await.map(Some);
        }
        let mut observer = args.how.observer(false);
        return handover::submit_and_follow(agent, order, observer.as_mut(), json).await;
    }
    args.how.refuse_to_recur_alone()?;
    if args.detach {
        prepared.job.check_path()?;
        args.how.announce_deadline(&order);
        let arguments = (args.credentials).resolved(arguments, &asked, &url);
        return detach(&prepared.job, arguments, args.how.json).map(Some);
    }
    let own = jobs::BackgroundProcess::claim()
        .map_err(|e| TransferFailure::storage("cannot keep the state", &e))?;
    let log = args
        .qlog
        .open()
        .map_err(|e| TransferFailure::usage(format!("{e:#}")))?;
    let monitor = watch_links(&args.how.link).await?;
    let links = monitor.subscribe();
    let tuning = args.tuning(log.clone());
    let transport = prepared
        .open_transport(&links, &tuning, TransportPurpose::Carry)
        .await;
    let job = &prepared.job;
    let (stop, stopped) = watch::channel(false);
    let scheduler = args.how.scheduler(&links)?;
    let rates = MeasuredRates::restore(&scheduler, &links.borrow());
    let setting = TransferContext {
        rate_limiter: args.limit_rate.map(|rate| Arc::new(RateLimiter::new(rate))),
        ..TransferContext::standalone(links, stopped, scheduler.clone())
    };
    stop_on_signal(stop).map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
    let mut observer: Box<dyn TransferObserver> = match own {
        Some(own) => Box::new(ObserverPair(
            Box::new(LineObserver::of_changes()),
            Box::new(own),
        )),
        None => args
            .how
            .observer(matches!(job.destination, Destination::Stdout)),
    };
    job.check_path()?;
    args.how.announce_deadline(&order);
    let exit = transport.run(job, None, setting, observer.as_mut()).await;
    rates.save(&scheduler);
    if let Some(log) = log {
        log.finish();
    }
    Ok(Some(exit))
}

/// Plans a download, or discards a stopped one.
async fn examine(args: &GetArgs, url: &Url) -> handover::FollowResult {
    let order = args.order(url).map_err(TransferFailure::usage)?;
    let asks_for_paid = args.how.asks_for_paid_links();
    let mut prepared = PreparedTransfer::prepare(&order, order.job()?, asks_for_paid)?;
    let monitor = watch_links(&args.how.link).await?;
    let links = monitor.subscribe();
    let tuning = args.tuning(None);
    let purpose = match args.forget {
        true => TransportPurpose::Forget,
        false => TransportPurpose::DryRun,
    };
    let transport = prepared.open_transport(&links, &tuning, purpose).await;
    let job = &prepared.job;
    if args.forget {
        return give_up(job, transport.proxy()).await.map(Some);
    }
    let (_stop, stopped) = watch::channel(false);
    let scheduler = args.how.scheduler(&links)?;
    let _rates = MeasuredRates::restore(&scheduler, &links.borrow());
    let setting = TransferContext::standalone(links, stopped, scheduler);
    let plan = match &transport {
        TransferTransport::Direct(dial) => {
            transfer::plan_direct(job, &**dial, setting, args.offline).await
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
    Ok(Some(TransferExit::Done))
}

/// Says that a file exists, so that nothing is downloaded.
fn say_skipped(job: &TransferJob, json: bool) {
    let file = job.expected_path().display().to_string();
    if json {
        let event = serde_json::json!({"event": "skipped", "file": file,
                                       "url": transfer::redact_url(&job.url)});
        print_stdout(&event.to_string());
    } else {
        print_stderr(&format!("{file} exists already, so it is not downloaded"));
    }
}

async fn give_up(
    job: &TransferJob,
    proxy: Option<&ProxyClient>,
) -> Result<TransferExit, TransferFailure> {
    if matches!(
        job.destination,
        Destination::Stdout | Destination::Device(_)
    ) {
        return Err(TransferFailure::usage(
            "--forget needs a file; standard output and devices leave none",
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
    if matches!(
        job.destination,
        Destination::Stdout | Destination::Device(_)
    ) {
        return Err(TransferFailure::usage(
            "--detach cannot write to standard output or a device; name a file with -o",
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
            "Download {id} runs in the background. See also: cedos status {id}, cedos wait {id}, cedos cancel \
             {id}, cedos ls. Its log: {}",
            log.display()
        ));
        if due && let Some(promised) = first_promise(id) {
            handover::warn_if_unlikely(&promised);
        }
    }
    Ok(TransferExit::Done)
}

/// The promise to meet the deadline of a download that was just begun, if its size becomes known soon.
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
    pub(super) fn only_here(&self, urls: &[Url], to_output: bool) -> Option<&'static str> {
        match () {
            () if to_output => Some("standard output"),
            () if urls.iter().any(|url| url.scheme() == "d2tp") => Some("d2tp://"),
            () if self.drwa.is_some() => Some("--drwa"),
            () if self.qlog.is_requested() => Some("--qlog"),
            () => None,
        }
    }

    /// How sessions are to send. `log`: their log.
    pub(super) fn tuning(&self, log: Option<Arc<Qlog>>) -> SessionTuning {
        SessionTuning {
            drwa: self.drwa,
            log,
            ..self.how.tuning()
        }
    }

    /// What was asked for, of one URL.
    pub(super) fn order(&self, url: &Url) -> Result<TransferOrder, String> {
        let mut order = TransferOrder::new(TransferVerb::Get, url.as_str());
        self.how.apply_to(&mut order)?;
        self.credentials.apply_to(&mut order)?;
        order.cookies = self.cookies.path()?;
        match &self.output {
            Some(path) if path.as_os_str() != "-" && path.is_dir() => {
                order.folder = Some(path.clone());
            }
            Some(path) => order.file = Some(path.clone()),
            None => order.folder = downloads_folder()?,
        }
        if order.every.is_some() && order.file.is_none() {
            // Each run replaces the file of the last one, so the first one may not find another's.
            let job = order.job().map_err(|failure| failure.text)?;
            job.refuse_existing().map_err(|failure| failure.text)?;
            order.file = Some(job.expected_path());
        }
        order.keep_older = self.keep;
        order.integrity = self.integrity.clone();
        order.limit_rate = self.limit_rate;
        self.request.apply_to(&mut order);
        Ok(order)
    }
}
