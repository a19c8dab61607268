//! The end of a download: digest, name, commit or partial, and the report.

use std::path::{Path, PathBuf};

use super::Download;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::outcome::{TransferExit, TransferFailure};
use crate::fetch::pending_rename::PendingRename;
use crate::fetch::transfer::control::{EndMoment, TransferControl};
use crate::fetch::transfer::job::Destination;

impl Download {
    /// Checks the digest, renames the object into place, and reports. `duplicates`: bytes that the
    /// source carried more than once; `proxy_would_add`: what a proxy would have improved.
    pub(in crate::fetch::transfer) async fn finish(
        mut self,
        control: TransferControl<'_>,
        outcome: Result<(), TransferFailure>,
        duplicates: u64,
        proxy_would_add: Option<String>,
    ) -> TransferExit {
        let end = control.end_moment();
        let job = control.job;
        let sha256 = self.sink.sha256_hex();
        let bytes = self.sink.held_bytes();
        let file = self.final_path(&job.destination, outcome.is_ok());
        let (came, encoding) = (self.came, self.encoding.take());
        let duplicate_bytes = self.duplicate_bytes + duplicates;
        let (outcome, resumable_bytes) = match (outcome, job.integrity) {
            (Ok(()), Some(wanted)) if hex::encode(wanted) != sha256 => {
                (Err(self.refuse_digest(&sha256, wanted).await), 0)
            }
            (Ok(()), _) => self.commit(&file, &sha256, end).await,
            (Err(failure), _) => {
                let kept = self.sink.suspend().await;
                (Err(failure), kept.map_or(0, |(bytes, _)| bytes))
            }
        };
        let start = control.reporter.start();
        let since_start = |moment: BootInstant| moment.since(start).as_secs_f64();
        let shown = job.destination.describe(&file);
        control.finish("get", shown, end, outcome, |report, _| {
            report.bytes = bytes;
            report.sha256 = sha256;
            report.first_byte_s = came.map(|(first, _)| since_start(first));
            report.last_byte_s = came.map(|(_, last)| since_start(last));
            report.duplicate_bytes = duplicate_bytes;
            report.content_encoding = encoding;
            report.resumable_bytes = resumable_bytes;
            report.proxy_would_add = proxy_would_add;
        })
    }

    /// The final path: by the origin's name, unless that would replace a file that the user did not
    /// name.
    fn final_path(&self, destination: &Destination, whole: bool) -> PathBuf {
        match (destination, &self.offered_name) {
            (Destination::File(path), _) => path.clone(),
            (Destination::InDirectory(directory), Some(name))
                if whole && !directory.join(name).exists() =>
            {
                directory.join(name)
            }
            _ => self.named.clone(),
        }
    }

    /// Renames a complete object whose digest is wrong.
    async fn refuse_digest(self, sha256: &str, wanted: [u8; 32]) -> TransferFailure {
        let kept = self.sink.set_aside().await;
        let kept = kept
            .map(|path| format!("; the bytes are in {}", path.display()))
            .unwrap_or_default();
        let wanted = hex::encode(wanted);
        TransferFailure {
            exit: TransferExit::IntegrityMismatch,
            reason: None,
            text: format!("sha256 is {sha256}, not {wanted}{kept}"),
        }
    }

    /// Renames the object into place. If that fails, returns how many bytes a later run can continue
    /// from.
    async fn commit(
        self,
        file: &Path,
        sha256: &str,
        end: EndMoment,
    ) -> (Result<(), TransferFailure>, u64) {
        let safe = self.sink.durable_bytes();
        if let (Some(pending), Some(part)) = (&self.pending_rename, self.sink.part_path()) {
            let bytes = self.sink.held_bytes();
            let rename = PendingRename::of(part, file, bytes, sha256, end.is_late, end.duration_s);
            let written = rename.and_then(|mut rename| {
                let note = self.sink.note_path();
                rename.note = note.map(std::path::absolute).transpose()?;
                rename.write(pending)
            });
            // It is whole all the same; only a crash in the next moment would not know.
            if let Err(error) = written {
                tracing::warn!(%error, "cannot save that the object is complete");
            }
        }
        let committed = self.sink.commit(file).await;
        let resumable = if committed.is_err() { safe } else { 0 };
        (committed, resumable)
    }
}
