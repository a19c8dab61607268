//! The end of a download: digest, name, commit or partial, and the report.

use std::path::PathBuf;
use std::time::Duration;

use crate::fetch::pending_rename::PendingRename;

use super::{
    BootInstant, Destination, Dial, TransferEvent, TransferExit, TransferFailure, TransferReport,
    TransferRun, display, redact_url,
};

impl<D: Dial> TransferRun<'_, D> {
    /// Checks the digest, gives the object its name, and reports.
    pub(super) async fn finish(
        self,
        outcome: Result<(), TransferFailure>,
        named: PathBuf,
    ) -> TransferExit {
        let sha256 = self.sink.sha256_hex();
        let bytes = self.sink.held_bytes();
        let late = self.time_left() == Some(Duration::ZERO);
        let duration_s = self.t_s();
        let start = self.start;
        let promise = self.first_promise;
        let since_start = |moment: BootInstant| moment.since(start).as_secs_f64();
        let file = match (&self.job.destination, &outcome, &self.offered_name) {
            (Destination::File(path), ..) => path.clone(),
            // The origin's name, unless it would replace a file nobody mentioned.
            (Destination::InDirectory(directory), Ok(()), Some(name))
                if !directory.join(name).exists() =>
            {
                directory.join(name)
            }
            _ => named.clone(),
        };
        let mut resumable_bytes = 0;
        let outcome = match outcome {
            Ok(())
                if self
                    .job
                    .integrity
                    .is_some_and(|wanted| hex::encode(wanted) != sha256) =>
            {
                let kept = self.sink.set_aside().await;
                let kept = kept
                    .map(|p| format!("; the bytes are in {}", p.display()))
                    .unwrap_or_default();
                let wanted = hex::encode(self.job.integrity.unwrap_or_default());
                let text = format!("sha256 is {sha256}, not {wanted}{kept}");
                Err(TransferFailure {
                    exit: TransferExit::IntegrityMismatch,
                    reason: None,
                    text,
                })
            }
            Ok(()) => {
                let safe = self.sink.durable_bytes();
                if let (Some(landing), Some(part)) = (&self.landing, self.sink.part_path()) {
                    let written = PendingRename::of(part, &file, bytes, &sha256, late, duration_s)
                        .and_then(|mut of_it| {
                            let note = self.sink.note_path();
                            of_it.note = note.map(std::path::absolute).transpose()?;
                            of_it.write(landing)
                        });
                    // It is whole all the same; only a crash in the next moment would not know.
                    if let Err(error) = written {
                        tracing::warn!(%error, "cannot save that the object is complete");
                    }
                }
                let committed = self.sink.commit(&file).await;
                if committed.is_err() {
                    resumable_bytes = safe;
                }
                committed
            }
            Err(failure) => {
                resumable_bytes = self.sink.suspend().await.map_or(0, |(bytes, _)| bytes);
                Err(failure)
            }
        };
        let (exit, reason, text) = match outcome {
            Ok(()) if late => (TransferExit::DeadlineMissed, None, None),
            Ok(()) => (TransferExit::Done, None, None),
            Err(failure) => (failure.exit, failure.reason, Some(failure.text)),
        };
        let whole = text.is_none();
        let report = TransferReport {
            verb: "get".into(),
            url: redact_url(&self.job.url),
            mode: self.dial.mode(),
            file: display(&self.job.destination, &file),
            bytes,
            sha256,
            bytes_by_link: self.bytes_by_link,
            duration_s,
            first_byte_s: self.came.map(|(first, _)| since_start(first)),
            last_byte_s: self.came.map(|(_, last)| since_start(last)),
            deadline_s: (self.terms.due).map(|due| due.after(start).as_secs_f64()),
            deadline_met: self.terms.due.map(|_| whole && !late),
            promise,
            switches: self.switches,
            duplicate_bytes: self.duplicate_bytes,
            content_encoding: self.encoding,
            exit: exit as u8,
            reason,
            text,
            resumable_bytes,
            proxy_would_add: (!self.dial.survives_link_loss()).then(|| {
                "with --prox, a transfer moves between networks without a new connection, and \
                 survives servers that cannot resume"
                    .into()
            }),
            status: None,
            answer: None,
        };
        self.observer.on_event(&if whole {
            TransferEvent::Done(report)
        } else {
            TransferEvent::Error(report)
        });
        exit
    }
}
