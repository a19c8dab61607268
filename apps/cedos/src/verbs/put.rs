//! `cedos put FILE URL`: the command line of an upload.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use d2tp_links::{ClassRules, LinkMonitor};
use tokio::sync::watch;
use url::Url;

use super::how::{How, stop_on_signal};
use super::key;
use cedos_agent::fetch::outcome::{Exit, Failure};
use cedos_agent::fetch::parcel::Parcel;
use cedos_agent::fetch::proxy::Proxy;
use cedos_agent::fetch::transfer::{self, Destination, Job};

/// Upload FILE to URL through a proxy, over the networks there are, free ones first, by a deadline.
///
/// The proxy takes the file in as it comes and hands it to the origin in one piece; the origin's
/// answer comes back. Stopped and run again, it begins from the file's first byte.
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 stopped, 10 deadline missed (without --if-late fail the
/// origin has the file, only late), 11 budget exhausted, 14 no permitted network and --now.
#[derive(Debug, Args)]
pub struct PutArgs {
    /// What to upload
    file: PathBuf,

    /// Where to: http:// or https://
    url: Url,

    /// POST instead of PUT. It is sent to the origin once at most
    #[arg(long)]
    post: bool,

    /// What the file is [default: application/octet-stream]
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    content_type: Option<String>,

    #[command(flatten)]
    how: How,
}

fn parse_type(text: &str) -> Result<String, String> {
    http::HeaderValue::from_str(text).map_err(|_| format!("`{text}` cannot be in a header"))?;
    Ok(text.to_owned())
}

/// Runs `cedos put` to its end.
pub async fn run(args: PutArgs) -> ExitCode {
    match start(args).await {
        Ok(exit) => exit.into(),
        Err(failure) => {
            eprintln!("cedos put: {}", failure.text);
            failure.exit.into()
        }
    }
}

async fn start(args: PutArgs) -> Result<Exit, Failure> {
    let usage = |text: String| Failure {
        exit: Exit::Usage,
        reason: None,
        text,
    };
    if !matches!(args.url.scheme(), "http" | "https") || !args.url.has_host() {
        let text = format!("{} is not an http:// or https:// URL", args.url);
        return Err(usage(text));
    }
    if !args.url.username().is_empty() || args.url.password().is_some() {
        let text = "the URL carries credentials, which the proxy would see";
        return Err(usage(text.into()));
    }
    let Some(address) = args.how.proxy().map_err(usage)? else {
        let text = "uploads go through a proxy: give --prox ADDR or CEDOS_PROX";
        return Err(usage(text.into()));
    };
    let job = Job {
        url: args.url.clone(),
        destination: Destination::Nowhere,
        within: args.how.within().map_err(usage)?,
        policy: args.how.policy(),
        if_late: args.how.if_late,
        now: args.how.now,
        metered_bytes_max: args.how.max_cell,
        integrity: None,
        tries_max: args.how.tries,
        stall: args.how.stall,
        allow_downgrade: false,
        fields: [].into(),
    };
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).map_err(|error| Failure::error(format!("signals: {error}")))?;
    let (file, url, kind, stop) = (args.file, args.url, args.content_type, stopped.clone());
    let reading = tokio::task::spawn_blocking(move || {
        Parcel::open(&file, &url, args.post, kind.as_deref(), || *stop.borrow())
    });
    let parcel = reading.await.expect("reading does not panic")?;
    let rules = ClassRules {
        rules: args.how.link.clone(),
    };
    let (_, monitor) = LinkMonitor::start(rules)
        .await
        .map_err(|error| Failure::error(error.to_string()))?;
    let mut observer = args.how.observer(false);
    let links = monitor.subscribe();
    let key = key::of_device(args.how.key.as_deref())
        .map_err(|error| Failure::error(format!("{error:#}")))?;
    let proxy = Proxy::new(address, key, links.clone(), None)
        .configured(|config| {
            args.how.transport.apply(config);
            config.ack_offload = args.how.offload_acks;
        })
        .sending();
    Ok(transfer::run_upload(&job, parcel, &proxy, links, stopped, observer.as_mut()).await)
}
