//! A transfer: choose a link or wait, ask, move bytes, check, finish.
//!
//! ```text
//!  job, terms, links ─▶ control ─┐                 ┌─ direct ── suspect links, portals
//!                                ├▶ transfer loop ─┤  (source)
//!  download (sink) ─┐            │  (states)       └─ proxied ── grant, deadline, answers of a flow
//!  upload (file) ───┴▶ content ──┘
//! ```
//!
//! All transfers share one loop (`transfer_loop`); a table (`state`) lists the transitions. The
//! `source` carries the bytes of the `content`.

mod content;
mod control;
mod direct;
mod download;
mod dry_run;
mod following_bytes;
mod job;
mod link_usage;
mod progress;
mod proxied;
mod reporter;
mod retry;
mod source;
mod state;
mod transfer_loop;
mod upload;

use std::sync::Arc;

use d2tp_sched::TransferDirection;

use super::boot_clock::BootInstant;
use super::dial::Dial;
use super::mode::FetchMode;
use super::outcome::TransferExit;
use super::proxy::ProxyClient;
use super::report::{TransferEvent, TransferObserver, TransferReport};
use super::upload_body::UploadBody;
use control::TransferControl;
use direct::DirectSource;
use download::Download;
use proxied::{FlowSender, ProxySource};
use transfer_loop::TransferLoop;
use upload::Upload;

pub(crate) use control::may_cost;
pub use dry_run::{DryRunForecast, DryRunLink, DryRunPlan, plan_direct, plan_proxied};
pub use following_bytes::FollowingBytes;
pub use job::{Destination, TransferContext, TransferJob, redact_url};

/// Runs a download directly from its origin, and reports it.
pub async fn run<D: Dial>(
    job: &TransferJob,
    dial: &D,
    context: TransferContext,
    observer: &mut dyn TransferObserver,
) -> TransferExit {
    let begun = begin_download(job, dial.mode(), context, observer);
    let (control, download) = match begun {
        Ok(begun) => begun,
        Err(exit) => return exit,
    };
    let mut transfer = TransferLoop::new(control, DirectSource::new(dial), download);
    let (outcome, duplicates) = transfer.run().await;
    let TransferLoop {
        control, content, ..
    } = transfer;
    let proxy_would_add = (!dial.survives_link_loss()).then(|| {
        "with --prox, a transfer moves between networks without a new connection, and survives servers that cannot resume"
            .into()
    });
    content
        .finish(control, outcome, duplicates, proxy_would_add)
        .await
}

/// Runs a download through a proxy, as [`run`] does.
pub async fn run_proxied(
    job: &TransferJob,
    proxy: &ProxyClient,
    context: TransferContext,
    observer: &mut dyn TransferObserver,
) -> TransferExit {
    let begun = begin_download(job, proxy.mode(), context, observer);
    let (control, download) = match begun {
        Ok(begun) => begun,
        Err(exit) => return exit,
    };
    if proxy.mode() == FetchMode::ProxyFetch {
        download.claim_flow(|flow, durable_bytes| proxy.claim(flow, durable_bytes));
    }
    let source = ProxySource::new(proxy, FlowSender::Proxy);
    let mut transfer = TransferLoop::new(control, source, download);
    let (outcome, duplicates) = transfer.run().await;
    let TransferLoop {
        control, content, ..
    } = transfer;
    content.finish(control, outcome, duplicates, None).await
}

/// Runs an upload through a proxy, and reports it.
pub async fn run_upload(
    job: &TransferJob,
    body: UploadBody,
    proxy: &ProxyClient,
    context: TransferContext,
    observer: &mut dyn TransferObserver,
) -> TransferExit {
    let (start, direction) = (BootInstant::now(), TransferDirection::Up);
    let control = TransferControl::new(job, proxy.mode(), context, direction, observer, start);
    let body = Arc::new(body);
    let source = ProxySource::new(proxy, FlowSender::Device(body.clone()));
    let upload = Upload::new(body, control.rate_limiter.clone());
    let mut transfer = TransferLoop::new(control, source, upload);
    let (outcome, _) = transfer.run().await;
    let TransferLoop {
        control, content, ..
    } = transfer;
    content.finish(control, outcome)
}

/// Opens the destination of a download, and reports that.
fn begin_download<'a>(
    job: &'a TransferJob,
    mode: FetchMode,
    mut context: TransferContext,
    observer: &'a mut dyn TransferObserver,
) -> Result<(TransferControl<'a>, Download), TransferExit> {
    let start = BootInstant::now();
    let mut download = match Download::open(job, context.pending_rename.take()) {
        Ok(download) => download,
        Err(failure) => {
            let file = job.destination.describe(&job.expected_path());
            let asked = (redact_url(&job.url), file);
            let report = TransferReport::failed("get", asked, mode, &job.terms, &failure);
            observer.on_event(&TransferEvent::Error(report));
            return Err(failure.exit);
        }
    };
    let direction = TransferDirection::Down;
    let mut control = TransferControl::new(job, mode, context, direction, observer, start);
    download.announce(&mut control);
    Ok((control, download))
}
