//! `cedos put FILE URL`: the command line of an upload.

use cedos_terminal::print_stderr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use tokio::sync::watch;
use url::Url;

use crate::help::COST_AND_TIME;

use super::credentials::{CookieArgs, CredentialArgs, hide_passwords};
use super::device_links::watch_links;
use super::get::parse_rate;
use super::handover;
use super::transfer_args::{TransferArgs, stop_on_signal};
use cedos_agent::fetch::measured_rates::MeasuredRates;
use cedos_agent::fetch::outcome::TransferFailure;
use cedos_agent::fetch::rate_limiter::RateLimiter;
use cedos_agent::fetch::transfer::TransferContext;
use cedos_agent::order::{TransferOrder, TransferVerb};
use cedos_agent::prepared_transfer::{PreparedTransfer, TransportPurpose};

/// Upload FILE to URL through a proxy by a deadline, over free networks first.
///
/// The proxy stores the file as it arrives and sends it to the server when it is complete; the server's
/// answer comes back. To resume after a stop, run the same command within an hour.
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 stopped, 10 deadline missed (without --if-late fail the
/// server has the file, but late), 11 --max-cell or budget used up, 14 no permitted network and --now,
/// 75 the agent stopped.
#[derive(Debug, Args)]
pub struct PutArgs {
    /// The file to upload
    file: PathBuf,

    /// Where to: http:// or https://
    url: Url,

    #[command(flatten)]
    how: TransferArgs,

    /// POST instead of PUT. It is sent to the server at most once
    #[arg(long)]
    post: bool,

    /// Media type of the file [default: application/octet-stream]
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    content_type: Option<String>,

    /// Send at most this many bytes per second: 500k, 2M
    #[arg(long, value_name = "RATE", value_parser = parse_rate, help_heading = COST_AND_TIME)]
    limit_rate: Option<u64>,

    #[command(flatten)]
    credentials: CredentialArgs,

    #[command(flatten)]
    cookies: CookieArgs,

    /// Leave it to the agent and return
    #[arg(long)]
    detach: bool,
}

fn parse_type(text: &str) -> Result<String, String> {
    http::HeaderValue::from_str(text).map_err(|_| format!("`{text}` cannot be in a header"))?;
    Ok(text.to_owned())
}

/// Runs `cedos put` to its end.
pub async fn run(mut args: PutArgs) -> ExitCode {
    // Nobody follows a transfer that never ends.
    args.detach |= args.how.every.is_some();
    hide_passwords();
    match start(args).await {
        Ok(Some(exit)) => exit.into(),
        Ok(None) => ExitCode::from(handover::STILL_WAITING),
        Err(failure) => {
            print_stderr(&format!("cedos put: {}", failure.text));
            failure.exit.into()
        }
    }
}

async fn start(mut args: PutArgs) -> handover::FollowResult {
    let found = args
        .credentials
        .apply_user(std::slice::from_mut(&mut args.url));
    found.map_err(TransferFailure::usage)?;
    let order = args.order().map_err(TransferFailure::usage)?;
    let mut prepared =
        PreparedTransfer::prepare(&order, order.job()?, args.how.asks_for_paid_links())?;
    if let Some(agent) = args.how.agent(None, args.detach).await {
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
        let text =
            "--detach needs the agent for uploads, and there is none; without --detach it works";
        return Err(TransferFailure::error(text));
    }
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
    let mut reading = args.how.digest_progress();
    let event = move |bytes, of| reading.update(bytes, of);
    let upload_body = prepared.open_upload_body(stopped.clone(), event).await?;
    let monitor = watch_links(&args.how.link).await?;
    args.how.announce_deadline(&order);
    let mut observer = args.how.observer(false);
    let links = monitor.subscribe();
    let transport = prepared
        .open_transport(&links, &args.how.tuning(), TransportPurpose::Carry)
        .await;
    let scheduler = args.how.scheduler(&links)?;
    let rates = MeasuredRates::restore(&scheduler, &links.borrow());
    let setting = TransferContext {
        rate_limiter: args.limit_rate.map(|rate| Arc::new(RateLimiter::new(rate))),
        ..TransferContext::standalone(links, stopped, scheduler.clone())
    };
    let exit = transport
        .run(&prepared.job, upload_body, setting, observer.as_mut())
        .await;
    rates.save(&scheduler);
    Ok(Some(exit))
}

impl PutArgs {
    /// What was asked for.
    fn order(&self) -> Result<TransferOrder, String> {
        let mut order = TransferOrder::new(TransferVerb::Put, self.url.as_str());
        self.how.apply_to(&mut order)?;
        self.credentials.apply_to(&mut order)?;
        order.cookies = self.cookies.path()?;
        order.file = Some(self.file.clone());
        order.post = self.post;
        order.limit_rate = self.limit_rate;
        order.content_type.clone_from(&self.content_type);
        Ok(order)
    }
}
