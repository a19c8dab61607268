//! `cedos send FILE`: sends a file to another device, whose user types the code that is printed
//! here.

use std::collections::BTreeSet;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::report::{DigestProgress, human_bytes};
use cedos_terminal::{print_stderr, print_stdout, stdout_result};
use cedos_text::RemoteText;
use clap::Args;
use d2tp_driver::{Admission, PublicKey};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use super::pairing_args::{PairingArgs, report_failure};
use crate::pairing::key_exchange::{self, FileOffer};
use crate::pairing::transfer_code::TransferCode;
use crate::pairing::{OneFileService, mailbox};

/// Bytes read at once for the digest.
const DIGEST_BYTES: usize = 1 << 20;

/// Send FILE to another device: prints a code, which is entered there with `cedos receive`.
///
/// The file travels end to end, directly where possible, else sealed through the proxy, and survives changes
/// of network. The code works for one device, which can resume with it, and ends with this command.
///
/// Exit codes: 0 the other device has the file, 1 error, 2 usage, 3 stopped, 10 nobody came or it was not
/// complete by the deadline.
#[derive(Debug, Args)]
pub struct SendArgs {
    /// The file to send
    file: PathBuf,

    #[command(flatten)]
    how: PairingArgs,
}

/// Runs `cedos send` to its end.
pub async fn run(args: SendArgs) -> ExitCode {
    let json = args.how.json;
    match send(args).await {
        Ok(()) => ExitCode::SUCCESS,
        // Every verb says at its end that its output could not be written.
        Err(failure) if stdout_result().is_err_and(|error| error.to_string() == failure.text) => {
            failure.exit.into()
        }
        Err(failure) => report_failure("send", &failure, json),
    }
}

async fn send(args: SendArgs) -> Result<(), TransferFailure> {
    let begun = Instant::now();
    let name = name_of(&args.file)?;
    // A name may come from another host, as out of an archive.
    let shown_name = RemoteText::new(&name);
    args.how.time_left()?;
    let places = args.how.meeting_places().await?;
    let session = args.how.connect(&places[0]).await?;
    let progress = DigestProgress::new(std::io::stderr().is_terminal(), args.how.json);
    let path = args.file.clone();
    let digested = tokio::task::spawn_blocking(move || digest(&path, progress)).await;
    let shown = args.file.display();
    let (bytes, sha256) = digested
        .map_err(|error| TransferFailure::error(error.to_string()))?
        .map_err(|error| TransferFailure::error(format!("cannot read {shown}: {error}")))?;
    let offer = FileOffer {
        key: session.key.public().to_string(),
        token: hex::encode(random::<16>()?),
        name: name.clone(),
        bytes,
        sha256,
    };
    let service = OneFileService::new(&args.file, &offer.token)
        .map_err(|error| TransferFailure::error(format!("cannot send {shown}: {error}")))?;
    let service = Arc::new(service);

    let wrong = "Somebody tried the code with other words, so it is spent. Run `cedos send` again for a new one";
    let failure = |error| session.failure(&error, wrong);
    let left = args.how.time_left()?;
    let opened = session.until_deadline(left, "", mailbox::open(&session.device));
    let (number, mut flow) = opened.await?.map_err(failure)?;
    let code = TransferCode::new(number, random::<3>()?);
    if args.how.json {
        let event = serde_json::json!({"event": "code", "code": code.to_string(), "file": args.file,
                                       "bytes": bytes, "sha256": offer.sha256});
        print_stdout(&event.to_string());
    } else {
        print_stderr(&format!(
            "Sending {shown_name} ({}). On the other device:",
            human_bytes(bytes)
        ));
        print_stdout(&format!("cedos receive {code}"));
    }
    if let Err(error) = stdout_result() {
        // Nobody knows the code.
        session.device.close().await;
        return Err(TransferFailure::error(error.to_string()));
    }

    let nobody = "nobody came for the file";
    let left = args.how.time_left()?;
    let met = key_exchange::offer_to(&mut flow, &code, &offer, async |receiver| {
        let key = PublicKey::from_text(&receiver.key).ok()?;
        session
            .device
            .listen(Admission::Only(BTreeSet::from([key])))
            .await
            .ok()
    });
    let met = session.until_deadline(left, nobody, met).await;
    // What was said is to arrive, and the other device to learn that no more comes.
    let _ = flow.shutdown().await;
    let listener = match met {
        Ok(Ok(listener)) => listener,
        Ok(Err(error)) => {
            let failure = failure(error);
            session.device.close().await;
            return Err(failure);
        }
        Err(failure) => {
            session.device.close().await;
            return Err(failure);
        }
    };
    if args.how.json {
        print_stdout(&serde_json::json!({"event": "joined"}).to_string());
    } else {
        print_stderr("The other device is here");
    }

    let serving = async {
        loop {
            tokio::select! {
                flow = listener.accept() => match flow {
                    Some(flow) => drop(tokio::spawn(service.clone().serve(flow))),
                    None => return false,
                },
                () = service.done.notified() => return true,
            }
        }
    };
    let left = args.how.time_left()?;
    let not_whole = "the other device did not say that it has the whole file";
    if !session.until_deadline(left, not_whole, serving).await? {
        let error = crate::pairing::PairingError::ProxyLost;
        return Err(session.failure(&error, wrong));
    }
    drop(listener);
    session.device.close().await;
    let took = begun.elapsed().as_secs_f64();
    if args.how.json {
        let event = serde_json::json!({"event": "done", "verb": "send", "file": args.file, "bytes": bytes,
                                       "sha256": offer.sha256, "duration_s": took,
                                       "exit": TransferExit::Done as u8});
        print_stdout(&event.to_string());
    } else {
        print_stderr(&format!("{shown_name}: the other device has all of it"));
    }
    Ok(())
}

/// The name under which the file is offered.
fn name_of(path: &Path) -> Result<String, TransferFailure> {
    let shown = path.display();
    let about = std::fs::metadata(path)
        .map_err(|error| TransferFailure::error(format!("cannot read {shown}: {error}")))?;
    if about.is_dir() {
        let text =
            format!("{shown} is a directory; send one file, such as an archive of it (tar, zip)");
        return Err(TransferFailure::usage(text));
    }
    if !about.is_file() {
        let text = format!("{shown} is not a regular file; its size must be known");
        return Err(TransferFailure::usage(text));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok(name.into_owned())
}

/// The size and the digest of a file.
fn digest(path: &Path, mut progress: DigestProgress) -> anyhow::Result<(u64, String)> {
    let mut file = std::fs::File::open(path)?;
    let of = file.metadata()?.len();
    let (mut digest, mut bytes) = (Sha256::new(), 0);
    let mut piece = vec![0; DIGEST_BYTES];
    loop {
        let read = file.read(&mut piece).context("reading")?;
        if read == 0 {
            return Ok((bytes, hex::encode(digest.finalize())));
        }
        digest.update(&piece[..read]);
        bytes += read as u64;
        progress.update(bytes, of);
    }
}

fn random<const N: usize>() -> Result<[u8; N], TransferFailure> {
    let mut bytes = [0; N];
    let filled = getrandom::fill(&mut bytes);
    filled.map_err(|error| TransferFailure::error(format!("no randomness: {error}")))?;
    Ok(bytes)
}
