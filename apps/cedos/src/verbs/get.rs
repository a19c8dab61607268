//! `cedos get URL`: the command line of a download.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use d2tp_links::{ClassRules, LinkMonitor};
use tokio::sync::watch;
use url::Url;

use super::how::{How, stop_on_signal};
use super::key;
use crate::get::direct::Direct;
use crate::get::outcome::{Exit, Failure};
use crate::get::proxy::Proxy;
use crate::get::transfer::{self, Destination, Job};

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

    /// Refuse bytes with another digest: sha256:HEX. They are put aside as FILE.bad
    #[arg(long, value_name = "sha256:HEX", value_parser = parse_integrity)]
    integrity: Option<[u8; 32]>,

    /// Trust the certificate authorities in FILE (PEM) besides the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Follow a redirect from https to http
    #[arg(long)]
    allow_downgrade: bool,

    #[command(flatten)]
    how: How,
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
    let proxy = args.how.proxy().map_err(usage)?;
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
        rules: args.how.link.clone(),
    };
    let (_, monitor) = LinkMonitor::start(rules)
        .await
        .map_err(|error| Failure::error(error.to_string()))?;
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).map_err(|error| Failure::error(format!("signals: {error}")))?;
    let to_stdout = matches!(job.destination, Destination::Output);
    let mut observer = args.how.observer(to_stdout);
    let links = monitor.subscribe();
    let Some(address) = proxy else {
        let dial = Direct::new(args.ca.as_deref())?;
        return Ok(transfer::run(&job, &dial, links, stopped, observer.as_mut()).await);
    };
    let key = key::of_device(args.how.key.as_deref())
        .map_err(|error| Failure::error(format!("{error:#}")))?;
    let proxy = Proxy::new(address, key, links.clone());
    Ok(transfer::run_proxied(&job, &proxy, links, stopped, observer.as_mut()).await)
}

fn job(args: &GetArgs) -> Result<Job, String> {
    let destination = match &args.output {
        Some(path) if path.as_os_str() == "-" => Destination::Output,
        Some(path) if path.is_dir() => return Err(format!("{} is a directory", path.display())),
        Some(path) => Destination::File(path.clone()),
        None => Destination::Named,
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
    })
}
