//! The end of a download: digest, name, commit or partial, and the report.

use std::path::{Path, PathBuf};

use super::Download;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::filename::free_path;
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
        let is_unchanged = self.is_unchanged && outcome.is_ok();
        let (bytes, sha256) = match is_unchanged {
            true => (
                self.named.metadata().map_or(0, |file| file.len()),
                String::new(),
            ),
            false => (self.sink.held_bytes(), self.sink.sha256_hex()),
        };
        let version = self.version.take();
        let mut file = self.final_path(&job.destination, outcome.is_ok());
        // After a restart from zero nothing of an earlier run is left.
        let held_bytes = match self.restarts {
            0 => self.held_at_start,
            _ => 0,
        };
        let (came, encoding) = (self.came, self.encoding.take());
        let duplicate_bytes = self.duplicate_bytes + duplicates;
        let mut starts_over = false;
        let (outcome, resumable_bytes) = match (outcome, job.integrity) {
            (Ok(()), _) if is_unchanged => {
                file.clone_from(&self.named);
                self.sink.suspend().await;
                (Ok(()), 0)
            }
            (Ok(()), Some(wanted)) if hex::encode(wanted) != sha256 => {
                (Err(self.refuse_digest(&sha256, wanted).await), 0)
            }
            (Ok(()), _) => {
                let replaces = matches!(job.destination, Destination::File(_));
                let keep = job.keep_older;
                match self.commit(&file, replaces, keep, &sha256, end).await {
                    Ok(path) => {
                        file = path;
                        (Ok(()), 0)
                    }
                    Err((failure, resumable)) => (Err(failure), resumable),
                }
            }
            (Err(failure), _) => {
                // Without a version the server is not believed to have the same content later; the proxy's copy is.
                let note = &self.sink.note;
                let may_resume = note.validator.is_some() || note.flow.is_some();
                // What went to a program starts from zero, whatever the server can.
                starts_over = !may_resume && bytes > 0 && self.sink.part_path().is_some();
                let kept = self.sink.suspend().await.filter(|_| may_resume);
                (Err(failure), kept.map_or(0, |(bytes, _)| bytes))
            }
        };
        let start = control.reporter.start();
        let since_start = |moment: BootInstant| moment.since(start).as_secs_f64();
        let shown = job.destination.describe(&file);
        control.finish("get", shown, end, outcome, |report, _| {
            report.bytes = bytes;
            report.held_bytes = held_bytes;
            report.sha256 = sha256;
            report.first_byte_s = came.map(|(first, _)| since_start(first));
            report.last_byte_s = came.map(|(_, last)| since_start(last));
            report.duplicate_bytes = duplicate_bytes;
            report.content_encoding = encoding;
            report.resumable_bytes = resumable_bytes;
            report.starts_over = starts_over;
            report.proxy_would_add = proxy_would_add;
            report.unchanged = is_unchanged;
            report.version = version;
        })
    }

    /// The final path: by the origin's name unless that is taken, and never that of a file that is there and
    /// that the user did not name.
    fn final_path(&self, destination: &Destination, whole: bool) -> PathBuf {
        let is_taken = |path: &Path| path.symlink_metadata().is_ok();
        let path = match (destination, &self.offered_name) {
            (Destination::File(path), _) => return path.clone(),
            (Destination::InDirectory(directory), Some(name))
                if whole && !is_taken(&directory.join(name)) =>
            {
                directory.join(name)
            }
            _ => self.named.clone(),
        };
        let is_file = matches!(
            destination,
            Destination::NewFile(_) | Destination::InDirectory(_)
        );
        let free = (whole && is_file).then(|| free_path(&path, is_taken));
        free.flatten().unwrap_or(path)
    }

    /// Renames a complete object whose digest is wrong.
    async fn refuse_digest(self, sha256: &str, wanted: [u8; 32]) -> TransferFailure {
        let kept = self.sink.set_aside().await;
        let kept = kept
            .map(|path| format!(". It is kept as {}", path.display()))
            .unwrap_or_default();
        let wanted = hex::encode(wanted);
        TransferFailure {
            exit: TransferExit::IntegrityMismatch,
            reason: None,
            text: format!(
                "the content is not what --integrity names: its sha256 is {sha256}, not {wanted}{kept}"
            ),
        }
    }

    /// Renames the object into place. Returns its path, which is another if a file of that name came meanwhile
    /// and is not to be replaced; if that fails, how many bytes a later run can continue from.
    async fn commit(
        self,
        file: &Path,
        replaces: bool,
        keep_older: u32,
        sha256: &str,
        end: EndMoment,
    ) -> Result<PathBuf, (TransferFailure, u64)> {
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
        let committed = self.sink.commit(file, replaces, keep_older).await;
        committed.map_err(|failure| (failure, safe))
    }
}
