//! `cedos sync SRC DST`: the command line of a mirror.

use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use cedos_agent::fetch::measured_rates::MeasuredRates;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::rate_limiter::RateLimiter;
use cedos_agent::fetch::report::{TransferReport, print_stderr};
use cedos_agent::fetch::transfer::FollowingBytes;
use cedos_agent::mirror::{
    FileTransfers, FolderMirror, MirrorEvent, MirrorObserver, MirrorPlan, MirrorReporter,
};
use cedos_agent::order::{MirrorOptions, TransferOrder, TransferVerb};
use cedos_agent::prepared_transfer::PreparedTransfer;
use clap::Args;
use serde_json::Value;
use tokio::sync::watch;
use url::Url;

use super::credentials::{CookieArgs, CredentialArgs, hide_passwords};
use super::device_links::watch_links;
use super::get::parse_rate;
use super::handover;
use super::request_args::RequestArgs;
use super::sync_output::SyncOutput;
use super::transfer_args::{TransferArgs, stop_on_signal};
use crate::help::COST_AND_TIME;

/// Make the folder DST what the folder SRC is, by a deadline, over free networks first.
///
/// One of the two is a folder here. The other is http://, https:// or d2tp:// of `cedos serve`: as SRC, with a listing (of
/// `cedos serve`, nginx, Apache httpd and others); as DST, one that takes PUT (WebDAV), through a proxy. Files that changed
/// are transferred, and replaced when they are complete. Run the same command to resume after a stop. An agent that runs
/// carries it out beside its other transfers; with --every it does so again and again.
///
/// Exit codes: those of the first file that fails (see `cedos get --help`); 0 all done, 3 stopped, 10 some are late, 75 the
/// agent stopped.
#[derive(Debug, Args)]
pub struct SyncArgs {
    /// The folder that is read: a path, or a URL
    src: String,

    /// The folder that is written: a path, or a URL
    dst: String,

    #[command(flatten)]
    how: TransferArgs,

    /// Only files that fit PATTERN, as rclone writes it: '*.jpg', '/top.txt', 'folder/', '**'; repeatable
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,

    /// No files that fit PATTERN, whatever --include says; repeatable
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,

    /// Delete files in DST that SRC does not have, once all others are transferred. Excluded ones stay
    #[arg(long)]
    delete: bool,

    /// Show what would be transferred and deleted; change nothing
    #[arg(long)]
    dry_run: bool,

    /// Take in at most this many bytes per second, all files together: 500k, 2M
    #[arg(long, value_name = "RATE", value_parser = parse_rate, help_heading = COST_AND_TIME)]
    limit_rate: Option<u64>,

    /// Leave it to the agent and return
    #[arg(long, conflicts_with = "dry_run")]
    detach: bool,

    #[command(flatten)]
    request: RequestArgs,

    #[command(flatten)]
    credentials: CredentialArgs,

    #[command(flatten)]
    cookies: CookieArgs,
}

/// Runs `cedos sync` to its end.
pub async fn run(mut args: SyncArgs) -> ExitCode {
    // Nobody follows a mirror that never ends.
    args.detach |= args.how.every.is_some();
    hide_passwords();
    match start(args).await {
        Ok(exit) => ExitCode::from(handover::exit_number(exit)),
        Err(failure) => {
            print_stderr(&format!("cedos sync: {}", failure.text));
            failure.exit.into()
        }
    }
}

async fn start(args: SyncArgs) -> handover::FollowResult {
    let order = args.order().map_err(TransferFailure::usage)?;
    MirrorPlan::of(&order)?;
    // Everything that can be wrong with the command line is said before anything is started.
    let asks_for_paid = args.how.asks_for_paid_links();
    let mode = PreparedTransfer::prepare(&order, order.job()?, asks_for_paid)?.mode();
    let verb = order.verb.as_str();
    let output = SyncOutput::new(args.how.json, args.dry_run, verb);
    if args.dry_run && args.how.every.is_some() {
        let text = "--dry-run shows what a run would do now; leave out --every";
        return Err(TransferFailure::usage(text));
    }
    if !args.dry_run
        && let Some(agent) = args.how.agent(None, args.detach).await
    {
        args.how.announce_deadline(&order);
        if args.detach {
            return handover::submit(agent, order, args.how.json)
                .await
                .map(Some);
        }
        let mut show = |event: &Value| output.show(event);
        return handover::submit_and_watch(agent, order, &mut show).await;
    }
    args.how.refuse_to_recur_alone()?;
    if args.detach {
        let text =
            "--detach needs the agent for folders, and there is none; without --detach it works";
        return Err(TransferFailure::error(text));
    }
    let monitor = watch_links(&args.how.link).await?;
    let links = monitor.subscribe();
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
    args.how.announce_deadline(&order);
    let scheduler = args.how.scheduler(&links)?;
    let rates = MeasuredRates::restore(&scheduler, &links.borrow());
    let (_, terms) = watch::channel(order.terms()?);
    let transfers = FileTransfers {
        order: order.clone(),
        terms,
        links,
        stop: stopped,
        scheduler: scheduler.clone(),
        tuning: args.how.tuning(),
        rate_limiter: args.limit_rate.map(|rate| Arc::new(RateLimiter::new(rate))),
        asks_for_paid,
        repeats_waits: false,
        transports: Mutex::default(),
        following: Arc::new(FollowingBytes::default()),
    };
    let observer = Box::new(OutputObserver(output));
    let reporter = MirrorReporter::new(observer, verb, mode, (args.dry_run, false));
    let report = FolderMirror::new(&order, args.dry_run, transfers, reporter)?
        .run()
        .await;
    rates.save(&scheduler);
    Ok(Some(finish(output, &report)))
}

/// Shows the events of a mirror that this process carries out.
struct OutputObserver(SyncOutput);

impl MirrorObserver for OutputObserver {
    fn on_event(&self, event: &MirrorEvent) {
        self.0.on_event(event);
    }
}

fn finish(output: SyncOutput, report: &TransferReport) -> TransferExit {
    output.finish(report);
    TransferExit::of(report.exit.into()).unwrap_or(TransferExit::Error)
}

impl SyncArgs {
    /// What was asked for.
    fn order(&self) -> Result<TransferOrder, String> {
        let (verb, url, folder) = match (is_url(&self.src), is_url(&self.dst)) {
            (true, false) => (TransferVerb::Get, &self.src, &self.dst),
            (false, true) => (TransferVerb::Put, &self.dst, &self.src),
            (false, false) => {
                return Err("both folders are here; rsync is for that".to_owned());
            }
            (true, true) => {
                let text = "both folders are elsewhere; sync to a folder here, and from there";
                return Err(text.to_owned());
            }
        };
        let mut url: Url =
            (url.parse()).map_err(|error| format!("`{url}` is not a URL: {error}"))?;
        self.credentials
            .apply_user(std::slice::from_mut(&mut url))?;
        let folder = std::path::absolute(folder);
        let folder = folder.map_err(|error| format!("the working directory: {error}"))?;
        let mut order = TransferOrder::new(verb, url.as_str());
        order.file = Some(folder);
        order.mirror = Some(MirrorOptions {
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            delete: self.delete,
        });
        self.how.apply_to(&mut order)?;
        self.credentials.apply_to(&mut order)?;
        order.cookies = self.cookies.path()?;
        order.limit_rate = self.limit_rate;
        self.request.apply_to(&mut order);
        Ok(order)
    }
}

/// Whether a folder is named by a URL, and not by a path.
fn is_url(text: &str) -> bool {
    text.contains("://")
}
