//! `cedos sync SRC DST`: the command line of a mirror.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use cedos_agent::fetch::header;
use cedos_agent::fetch::measured_rates::MeasuredRates;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::rate_limiter::RateLimiter;
use cedos_agent::fetch::report::print_stderr;
use cedos_agent::order::{TransferOrder, TransferVerb};
use clap::Args;
use tokio::sync::watch;
use url::Url;

use super::credentials::{CookieArgs, CredentialArgs, hide_passwords};
use super::device_links::watch_links;
use super::get::parse_rate;
use super::transfer_args::{TransferArgs, stop_on_signal};
use crate::help::{COST_AND_TIME, TRUST};
use crate::sync::{FileTransfers, FolderMirror, PathFilter, SyncDirection, SyncReporter};

/// Make the folder DST what the folder SRC is, by a deadline, over free networks first.
///
/// One of the two is a folder here. The other is http://, https:// or d2tp:// of `cedos serve`: as SRC, with a listing (of
/// `cedos serve`, nginx, Apache httpd and others); as DST, one that takes PUT (WebDAV), through a proxy. Files that changed
/// are transferred, and replaced when they are complete. Run the same command to resume after a stop.
///
/// Exit codes: those of the first file that fails (see `cedos get --help`); 0 all done, 3 stopped, 10 some are late.
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

    /// Add a header field to the requests; repeatable
    #[arg(short = 'H', long, value_name = "FIELD", value_parser = parse_header)]
    header: Vec<String>,

    #[command(flatten)]
    credentials: CredentialArgs,

    #[command(flatten)]
    cookies: CookieArgs,

    /// Use the proxy only as a tunnel. Always on with credentials
    #[arg(long, help_heading = TRUST)]
    sealed: bool,

    /// Trust the certificate authorities in FILE (PEM) besides the system's
    #[arg(long, value_name = "FILE", help_heading = TRUST)]
    ca: Option<PathBuf>,

    /// Follow a redirect from https to http
    #[arg(long, help_heading = TRUST)]
    allow_downgrade: bool,
}

fn parse_header(text: &str) -> Result<String, String> {
    header::parse(text).map(|_| text.to_owned())
}

/// Runs `cedos sync` to its end.
pub async fn run(args: SyncArgs) -> ExitCode {
    hide_passwords();
    match start(args).await {
        Ok(exit) => exit.into(),
        Err(failure) => {
            print_stderr(&format!("cedos sync: {}", failure.text));
            failure.exit.into()
        }
    }
}

async fn start(args: SyncArgs) -> Result<TransferExit, TransferFailure> {
    let usage = |text: String| TransferFailure::usage(text);
    if args.how.every.is_some() {
        return Err(TransferFailure::usage(
            "folders do not recur by --every yet: run the command by a systemd timer or cron",
        ));
    }
    let mut direction = args.direction().map_err(usage)?;
    let url = match &mut direction {
        SyncDirection::Download { from: url, .. } | SyncDirection::Upload { to: url, .. } => url,
    };
    args.credentials
        .apply_user(std::slice::from_mut(url))
        .map_err(usage)?;
    let is_upload = matches!(direction, SyncDirection::Upload { .. });
    if is_upload && args.delete {
        let text = "--delete is for a DST here: what a server has besides is not known";
        return Err(TransferFailure::usage(text));
    }
    let filter = PathFilter::new(&args.include, &args.exclude).map_err(usage)?;
    let order = args.order().map_err(usage)?;
    let terms = order.terms()?;
    let monitor = watch_links(&args.how.link).await?;
    let links = monitor.subscribe();
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
    args.how.announce_deadline(&order);
    let scheduler = args.how.scheduler(&links)?;
    let rates = MeasuredRates::restore(&scheduler, &links.borrow());
    let transfers = FileTransfers {
        order,
        terms,
        links,
        stop: stopped,
        scheduler: scheduler.clone(),
        tuning: args.how.tuning(),
        rate_limiter: args.limit_rate.map(|rate| Arc::new(RateLimiter::new(rate))),
        asks_for_paid: args.how.asks_for_paid_links(),
        transports: Mutex::default(),
        last_id: AtomicU64::new(0),
    };
    let verb = if is_upload { "uploaded" } else { "downloaded" };
    let reporter = SyncReporter::new(args.how.json, args.dry_run, verb);
    let flags = (args.delete, args.dry_run);
    let mirror = FolderMirror::new(direction, filter, flags, transfers, reporter);
    let exit = mirror.run().await;
    rates.save(&scheduler);
    Ok(exit)
}

impl SyncArgs {
    fn direction(&self) -> Result<SyncDirection, String> {
        let path = |text: &str| {
            let path = std::path::absolute(text);
            path.map_err(|error| format!("the working directory: {error}"))
        };
        match (folder_url(&self.src)?, folder_url(&self.dst)?) {
            (Some(from), None) => {
                let to = path(&self.dst)?;
                if to.exists() && !to.is_dir() {
                    return Err(format!("{} is a file, not a folder", self.dst));
                }
                Ok(SyncDirection::Download { from, to })
            }
            (None, Some(to)) => {
                let from = path(&self.src)?;
                if !from.is_dir() {
                    return Err(format!("{} is no folder", self.src));
                }
                Ok(SyncDirection::Upload { from, to })
            }
            (None, None) => Err("both folders are here; rsync is for that".to_owned()),
            (Some(_), Some(_)) => {
                Err("both folders are elsewhere; sync to a folder here, and from there".to_owned())
            }
        }
    }

    /// What all transfers have in common.
    fn order(&self) -> Result<TransferOrder, String> {
        let mut order = TransferOrder::new(TransferVerb::Get, "");
        self.how.apply_to(&mut order)?;
        self.credentials.apply_to(&mut order)?;
        order.cookies = self.cookies.path()?;
        order.limit_rate = self.limit_rate;
        order.headers.clone_from(&self.header);
        order.sealed = self.sealed;
        order.ca.clone_from(&self.ca);
        order.allow_downgrade = self.allow_downgrade;
        Ok(order)
    }
}

/// The URL of a folder, with a slash at its end; none if the text is a path.
fn folder_url(text: &str) -> Result<Option<Url>, String> {
    if !text.contains("://") {
        return Ok(None);
    }
    let mut url: Url = text
        .parse()
        .map_err(|error| format!("`{text}` is not a URL: {error}"))?;
    if !matches!(url.scheme(), "http" | "https" | "d2tp") {
        let scheme = url.scheme();
        return Err(format!(
            "{scheme}: is not supported; use http:, https: or d2tp:"
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(format!(
            "`{text}` names no folder: leave out what follows ? and #"
        ));
    }
    if !url.path().ends_with('/') {
        let path = format!("{}/", url.path());
        url.set_path(&path);
    }
    Ok(Some(url))
}
