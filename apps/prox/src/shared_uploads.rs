//! Uploads among nodes that share a store: one node after the other has an upload, and its origin gets it once.
//!
//! ```text
//!  a device comes with a token ─▶ note in the store? ── none ─▶ a new upload; its note is made if there is none still
//!                                    │
//!                                    ├─ this process's ─▶ on in its spool
//!                                    ├─ of one that runs and sends it to the origin ─▶ wait for the answer
//!                                    └─ of another ─▶ its body: from the shared directory, from the bucket, or a file here
//!                                                     the note is replaced if nobody else did ─▶ on in a spool of its own
//! ```
//!
//! A node that lost an upload hears so when it writes the note, which it does before it sends a byte to the origin.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{
    HostKey, JournalError, JournalSessionKey, OwnerAnswer, PublicKey, SharedRecords,
};

use crate::copy_store::{CopyStore, StoredProgress};
use crate::prox::{Prox, random_name};
use crate::refusal::ProxRefusal;
use crate::request::UploadRequest;
use crate::restore::{FoundUpload, ended_delivery};
use crate::retention_note::{RetentionNote, upload_name};
use crate::stored_upload::{StoredUpload, UploadRecord, UploadStage};
use crate::upload_table::UploadRoom;

/// How soon the note of an upload is looked at again that another process sends to its origin.
const LOOK_AGAIN: Duration = Duration::from_millis(300); // a guess
/// How long a new upload waits until the store knows of it. Then the device is told to come later. A guess.
const NOTED_WITHIN: Duration = Duration::from_secs(20);

/// Why an upload is not here.
enum UploadNotHere {
    /// Another process changed its note meanwhile, or sends it.
    Again,
    Refused(ProxRefusal),
}

impl From<JournalError> for UploadNotHere {
    fn from(error: JournalError) -> UploadNotHere {
        tracing::warn!(%error, "an upload cannot be looked up; its device comes later");
        UploadNotHere::Refused(ProxRefusal::UploadAwaited)
    }
}

/// What nodes share.
struct NodesRecords<'a> {
    copy_store: &'a Arc<CopyStore>,
    store: &'a Arc<dyn SharedRecords>,
}

/// An upload as the store has it, of another process.
struct UploadOfAnother {
    /// The name of its note, and its value.
    name: Vec<u8>,
    held: Vec<u8>,
    record: UploadRecord,
}

impl Prox {
    /// Finds the upload of a request in this process, takes it over from another one, or makes it. Does nothing where
    /// uploads are each process's own.
    ///
    /// # Errors
    /// There is no room, or the store or the bucket does not answer.
    pub(crate) async fn find_shared_upload(
        self: &Arc<Prox>,
        client: HostKey,
        request: &UploadRequest,
    ) -> Result<(), ProxRefusal> {
        let (Some(copy_store), Some(store), Some(token)) =
            (&self.copy_store, self.shared_records(), &request.token)
        else {
            return Ok(());
        };
        let nodes = NodesRecords { copy_store, store };
        let name = upload_name(&client, token);
        let finding = self.uploads.finding(client, token);
        let _alone = finding.lock().await;
        loop {
            let found = self.find_upload(&nodes, client, request, &name).await;
            match found {
                Ok(()) => return Ok(()),
                Err(UploadNotHere::Again) => {}
                Err(UploadNotHere::Refused(refusal)) => return Err(refusal),
            }
        }
    }

    /// Takes up an upload that an earlier process of this node had, so that it is delivered if it is complete. Returns
    /// whether it is here.
    pub(crate) async fn take_up_upload(self: &Arc<Prox>, id: u64, name: &[u8]) -> bool {
        let Some(store) = self.shared_records() else {
            return false;
        };
        let Ok(Some(held)) = store.read_note(name).await else {
            return false;
        };
        let record = serde_json::from_slice::<UploadRecord>(&held).ok();
        let record = record.filter(|record| record.id == id && self.is_client(&record.client));
        let Some(request) = record.as_ref().and_then(UploadRecord::request) else {
            return false;
        };
        let client = record.expect("it has a request").client;
        let found = self.find_shared_upload(client, &request).await;
        found.is_ok()
    }

    async fn find_upload(
        self: &Arc<Prox>,
        nodes: &NodesRecords<'_>,
        client: HostKey,
        request: &UploadRequest,
        name: &[u8],
    ) -> Result<(), UploadNotHere> {
        let held = nodes.store.read_note(name).await?;
        let read = |json: &[u8]| serde_json::from_slice::<UploadRecord>(json).ok();
        let record = held.as_deref().and_then(read);
        match (held, record.filter(|record| record.is_of(request))) {
            (Some(held), Some(record)) => {
                if self.uploads.version_of(client, request) == Some(record.version) {
                    return Ok(());
                }
                let name = name.to_vec();
                let found = UploadOfAnother { name, held, record };
                self.take_over_upload(nodes, request, found).await
            }
            (held, _) => {
                let making = self.make_upload(nodes, client, request, name, held);
                let made = tokio::time::timeout(NOTED_WITHIN, making).await;
                made.unwrap_or(Err(UploadNotHere::Refused(ProxRefusal::UploadAwaited)))
            }
        }
    }

    /// Makes a new upload, if nobody else has changed its note.
    async fn make_upload(
        &self,
        nodes: &NodesRecords<'_>,
        client: HostKey,
        request: &UploadRequest,
        name: &[u8],
        held: Option<Vec<u8>>,
    ) -> Result<(), UploadNotHere> {
        let NodesRecords { copy_store, store } = nodes;
        let id = random_name();
        let Some(mut record) = UploadRecord::new(client, request) else {
            return Ok(());
        };
        let spool = self.reserve_spool(client, request.length, Some(id));
        let spool = spool.map_err(UploadNotHere::Refused)?;
        record.id = id;
        record.version = copy_store.new_version();
        store.process().clone_into(&mut record.process);
        let _ = copy_store.hold_shared(id).await;
        let note = RetentionNote::of_upload(store, name);
        note.write(store, id).await?;
        let new = record.to_note();
        let made = store.exchange_note(name, held.as_deref(), Some(&new));
        if !made.await? {
            return Err(UploadNotHere::Again);
        }
        let stored = StoredUpload::shared(copy_store, store, name.to_vec(), record);
        let room = UploadRoom {
            spool,
            stored: Some(stored),
        };
        self.uploads.put(client, request, room);
        Ok(())
    }

    /// Takes an upload over from another process.
    async fn take_over_upload(
        self: &Arc<Prox>,
        nodes: &NodesRecords<'_>,
        request: &UploadRequest,
        found: UploadOfAnother,
    ) -> Result<(), UploadNotHere> {
        let NodesRecords { copy_store, store } = nodes;
        let UploadOfAnother { name, held, record } = found;
        if record.stage == UploadStage::Sending && runs_elsewhere(store, &record).await? {
            // Its answer is what the device wants.
            tokio::time::sleep(LOOK_AGAIN).await;
            return Err(UploadNotHere::Again);
        }
        let id = record.id;
        let progress = copy_store.shared_progress(store, id).await?;
        let version = copy_store.new_version();
        let have = take_body(copy_store, &record, progress, version).await;
        let have = have.map_err(|error| {
            tracing::warn!(%error, "an upload is needed whose body cannot be read now; its device comes later");
            UploadNotHere::Refused(ProxRefusal::UploadAwaited)
        })?;
        let mut taken = record.clone();
        taken.version = copy_store.new_version();
        store.process().clone_into(&mut taken.process);
        taken.until_ms = None;
        taken.boot = d2tp_driver::boot();
        let new = taken.to_note();
        let replaced = store.exchange_note(&name, Some(&held), Some(&new));
        if !replaced.await? {
            let _ = std::fs::remove_file(copy_store.path_of_version(id, version));
            return Err(UploadNotHere::Again);
        }
        let _ = copy_store.hold_shared(id).await;
        store.hold_alone(id).await?;
        let note = RetentionNote::of_upload(store, &name);
        note.write(store, id).await?;
        copy_store.set_found_version(id, version, progress);
        if copy_store.node_bucket().is_none() {
            copy_store.remove_old_version_later(id, progress.version);
            copy_store.remove_old_version_later(id, version);
        }
        let answer = match record.stage {
            UploadStage::AnsweredCopy(answer) => self.rouse_shared(answer).await,
            _ => None,
        };
        if let Some(answer) = &answer {
            let note = RetentionNote::of_process(store);
            note.write(store, answer.id).await?;
        }
        tracing::info!(id, have, "took over an upload");
        let found = FoundUpload {
            id,
            have,
            progress,
            delivered: ended_delivery(&taken, request, answer),
            stored: StoredUpload::shared(copy_store, store, name, taken.clone()),
            record: taken,
            grace: self.config().keep,
        };
        match self.open_upload(copy_store, request, found) {
            true => Ok(()),
            false => Err(UploadNotHere::Refused(ProxRefusal::StoreFailed)),
        }
    }
}

/// Whether another process has the upload, and runs.
async fn runs_elsewhere(
    store: &Arc<dyn SharedRecords>,
    record: &UploadRecord,
) -> Result<bool, JournalError> {
    if record.process == store.process() {
        return Ok(false);
    }
    // Whatever it says of a session that is nobody's, it runs.
    let nobody = JournalSessionKey {
        peer: PublicKey(record.client),
        instance: 0,
    };
    let answer = store.ask_owner(nobody, record.process.clone()).await?;
    Ok(answer != OwnerAnswer::Gone)
}

/// Makes a file with this version of what there is of an upload's body. Returns how many of its bytes count.
async fn take_body(
    copy_store: &Arc<CopyStore>,
    record: &UploadRecord,
    progress: StoredProgress,
    version: u64,
) -> io::Result<u64> {
    let id = record.id;
    let from = copy_store.path_of_version(id, progress.version);
    let to = copy_store.path_of_version(id, version);
    let boot = d2tp_driver::boot();
    let length = match tokio::fs::metadata(&from).await {
        Ok(found) => Some(found.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let valid = length.map(|length| {
        let is_same_boot = boot != 0 && (record.boot == boot || progress.boot == boot);
        match is_same_boot {
            true => length,
            false => progress.synced.min(length),
        }
    });
    let bucket = copy_store.node_bucket();
    match (valid, bucket) {
        // It is this node's: no other reads it.
        (Some(valid), Some(_)) => {
            tokio::fs::rename(&from, &to).await?;
            Ok(valid)
        }
        (Some(valid), None) => {
            let copying = move || copy_body(&from, &to, valid);
            let copied = tokio::task::spawn_blocking(copying).await;
            copied.map_err(io::Error::other)??;
            Ok(valid)
        }
        (None, Some(bucket)) => {
            let fetched = bucket.fetch(id, &to).await;
            bucket.report(&fetched.as_ref().map(|_| ()).map_err(ToString::to_string));
            match fetched? {
                Some(have) => {
                    let parts = have.div_ceil(crate::copy_bucket::PART_BYTES);
                    bucket.on_parts_read(id, version, parts);
                    Ok(have)
                }
                None => copy_store.create_version(id, version).map(|()| 0),
            }
        }
        (None, None) => copy_store.create_version(id, version).map(|()| 0),
    }
}

fn copy_body(from: &Path, to: &Path, valid: u64) -> io::Result<()> {
    std::fs::copy(from, to)?;
    let file = std::fs::File::options().write(true).open(to)?;
    file.set_len(valid)?;
    file.sync_all()
}
