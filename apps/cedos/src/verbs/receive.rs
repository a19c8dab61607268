//! `cedos receive CODE`: a file from another device, on which `cedos send` printed the code.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use cedos_agent::fetch::origin::{D2tpOrigin, D2tpTarget};
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::report::human_bytes;
use cedos_terminal::print_stderr;
use cedos_text::RemoteText;
use clap::{Args, Parser};
use d2tp_driver::{EndpointConfig, PublicKey, ServerAddress, ServerList};
use url::Url;

use super::get::{self, GetArgs};
use super::pairing_args::{PairingArgs, PairingSession, report_failure};
use crate::pairing::accepted_offer::AcceptedOffer;
use crate::pairing::key_exchange::{self, FileOffer, ReceiverHello};
use crate::pairing::transfer_code::TransferCode;
use crate::pairing::{OneFileService, PairingError, mailbox};

/// Receive the file that `cedos send` offers on another device.
///
/// The file goes into this directory under its own name, unless -o says otherwise. It is checked against the
/// sender's digest. The same command resumes it, for as long as `cedos send` runs there.
///
/// Exit codes: as `cedos get`; 1 also for a code that is wrong or was used before.
#[derive(Debug, Args)]
pub struct ReceiveArgs {
    /// The code that `cedos send` printed, such as 4271-tulip-hazel-canoe
    #[arg(value_name = "CODE", num_args = 1.., required = true)]
    code: Vec<String>,

    /// Write to FILE; into FILE if that is a directory [default: a new file with the sender's name]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Take in at most this many bytes per second: 500k, 2M
    #[arg(long, value_name = "RATE", value_parser = get::parse_rate)]
    limit_rate: Option<u64>,

    #[command(flatten)]
    how: PairingArgs,
}

/// The command line of the download.
#[derive(Debug, Parser)]
struct DownloadLine {
    #[command(flatten)]
    get: GetArgs,
}

/// Runs `cedos receive` to its end.
pub async fn run(args: ReceiveArgs) -> ExitCode {
    let json = args.how.json;
    match receive(args).await {
        Ok(exit) => exit.into(),
        Err(failure) => report_failure("receive", &failure, json),
    }
}

async fn receive(args: ReceiveArgs) -> Result<TransferExit, TransferFailure> {
    let code: TransferCode = args
        .code
        .join("-")
        .parse()
        .map_err(TransferFailure::usage)?;
    let left = args.how.time_left()?;
    let mut places = args.how.meeting_places().await?;
    let mut session = args.how.connect(&places[0]).await?;
    let kept = AcceptedOffer::of(&code)
        .inspect_err(|error| tracing::warn!(%error, "the code will not resume the transfer"))
        .ok();
    let mut tried = 0;
    let offer = match kept.as_ref().and_then(AcceptedOffer::read) {
        Some(offer) => offer,
        None => {
            let offer = loop {
                match first_offer(&session, &code, left).await? {
                    Ok(offer) => break offer,
                    // The sender may have come to another one.
                    Err(PairingError::NobodyWaits) if tried + 1 < places.len() => tried += 1,
                    Err(error) => return Err(not_met(&session, &error)),
                }
                session.device.close().await;
                session = args.how.connect(&places[tried]).await?;
            };
            if let Some(Err(error)) = kept.as_ref().map(|kept| kept.write(&offer)) {
                tracing::warn!(%error, "the code will not resume the transfer");
            }
            offer
        }
    };
    let url = url_of(&offer).map_err(|error| session.failure(&error, ""))?;
    // The sender listens at the proxy at which it was met; an offer that was kept does not say at which.
    places.swap(0, tried);
    let proxies = proxy_list(places)?;
    let (key, monitor) = (session.key.clone(), session.monitor);
    session.device.close().await;
    if !args.how.json {
        let name = RemoteText::new(&offer.name);
        print_stderr(&format!("Receiving {name} ({})", human_bytes(offer.bytes)));
    }
    let to_resume = "To resume, run the same command while `cedos send` still runs there";
    let fetched = match download_line(&args, &proxies, &url, &offer) {
        Ok(line) => get::fetch(line.get).await,
        Err(failure) => Err(failure),
    };
    let exit = match fetched {
        Ok(exit) => exit.unwrap_or(TransferExit::Error),
        Err(failure) => {
            let next = match failure.exit {
                TransferExit::Usage if kept.is_some() => {
                    "The code still works: run the command again with that changed, while `cedos send` still \
                     runs there"
                }
                _ => to_resume,
            };
            let text = format!("{}. {next}", failure.text);
            return Err(TransferFailure { text, ..failure });
        }
    };
    if !matches!(exit, TransferExit::Done | TransferExit::DeadlineMissed) {
        print_stderr(to_resume);
        return Ok(exit);
    }
    if let Some(kept) = &kept {
        kept.remove();
    }
    // The sender ends; if this is lost, it waits until its deadline.
    let mut done = url;
    done.set_path(&OneFileService::done_path(&offer.token));
    let whom = D2tpTarget::of(&done).map_err(TransferFailure::error)?.0;
    let links = monitor.subscribe();
    let config = EndpointConfig::default();
    let sender = D2tpOrigin::new(whom, Some(proxies), key, config, links, None);
    sender.is_available(&done).await;
    Ok(exit)
}

/// Meets the sender for the first time. Returns what it offers, or why it was not met.
async fn first_offer(
    session: &PairingSession,
    code: &TransferCode,
    left: Duration,
) -> Result<Result<FileOffer, PairingError>, TransferFailure> {
    let nobody = "the other device did not answer";
    let met = session.until_deadline(left, nobody, meet(session, code));
    met.await
}

/// The error for people if no connection to the sender was made.
fn not_met(session: &PairingSession, error: &PairingError) -> TransferFailure {
    let again = "The code is spent: run `cedos send` there again for a new one";
    match error {
        PairingError::NobodyWaits => TransferFailure::error(format!(
            "{error}: it was used already, or `cedos send` has ended there, or one device uses another \
             proxy. Run `cedos send` again for a new code"
        )),
        error => session.failure(error, again),
    }
}

/// Meets the sender in the code's mailbox. Returns what it offers.
async fn meet(session: &PairingSession, code: &TransferCode) -> Result<FileOffer, PairingError> {
    let mut flow = mailbox::join(&session.device, code.number).await?;
    let hello = ReceiverHello {
        key: session.key.public().to_string(),
    };
    key_exchange::accept(&mut flow, code, &hello).await
}

/// The URL of what is offered.
fn url_of(offer: &FileOffer) -> Result<Url, PairingError> {
    let is_hex = |text: &str, length| {
        text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let key = PublicKey::from_text(&offer.key).map_err(|_| PairingError::OtherVersion)?;
    if !is_hex(&offer.sha256, 64) || !is_hex(&offer.token, 32) {
        return Err(PairingError::OtherVersion);
    }
    let path = OneFileService::path(&offer.token, &offer.name);
    format!("d2tp://{key}{path}")
        .parse()
        .map_err(|_| PairingError::OtherVersion)
}

/// The proxies as a list.
fn proxy_list(places: Vec<ServerAddress>) -> Result<ServerList, TransferFailure> {
    let text: Vec<String> = places.iter().map(ServerAddress::to_string).collect();
    let list = text.join(" ").parse();
    list.map_err(|error: d2tp_driver::ServerListError| TransferFailure::error(error.to_string()))
}

/// The download, with what was said here.
fn download_line(
    args: &ReceiveArgs,
    proxies: &ServerList,
    url: &Url,
    offer: &FileOffer,
) -> Result<DownloadLine, TransferFailure> {
    let left = args.how.time_left()?;
    let mut line: Vec<std::ffi::OsString> = vec!["get".into(), url.as_str().into()];
    line.extend([
        "--integrity".into(),
        format!("sha256:{}", offer.sha256).into(),
    ]);
    match &args.how.by {
        Some(by) => line.extend(["--by".into(), by.into()]),
        None => line.extend([
            "--within".into(),
            format!("{}s", left.as_secs().max(1)).into(),
        ]),
    }
    line.extend(["--prox".into(), proxies.to_string().into()]);
    if let Some(key) = &args.how.key {
        line.extend(["--key".into(), key.into()]);
    }
    if let Some(output) = &args.output {
        line.extend(["--output".into(), output.into()]);
    }
    if let Some(rate) = &args.limit_rate {
        line.extend(["--limit-rate".into(), rate.to_string().into()]);
    }
    if args.how.json {
        line.push("--json".into());
    }
    DownloadLine::try_parse_from(line).map_err(|error| TransferFailure::usage(error.to_string()))
}
