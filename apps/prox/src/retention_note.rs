//! Notes on what nodes retain for devices that may return: copies of flows that ended abnormally, uploads, and their
//! answers.
//!
//! ```text
//!  o<id>              which process retains the object, until when, and which note names it
//!  R<client><url>     the retained copies of a URL
//!  B<client><token>   an upload: its record
//! ```
//!
//! A process that ends lets its objects go with the next process of its node. That one finds them free, sees by the
//! notes that a device may return, and holds them for the rest of their time.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use d2tp_driver::{HostKey, JournalError, SharedRecords};
use serde::{Deserialize, Serialize};

use crate::copy_store::{CopyNote, name, wall_ms};
use crate::request::UploadToken;

/// The most copies that are retained for one URL of one client; the oldest is forgotten first.
const RETAINED_PER_URL_MAX: usize = 8; // as a node lists for itself

/// Who retains an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RetentionNote {
    /// The process, by its name in the store.
    process: String,
    /// When the object is dropped, in milliseconds since 1970; none: some time after its process has ended.
    until_ms: Option<u64>,
    /// The note that names the object, if one does.
    named_by: Option<Vec<u8>>,
}

/// A copy in the note of its URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RetainedUrlCopy {
    pub(crate) id: u64,
    until_ms: u64,
}

/// The name of the note of an upload.
pub(crate) fn upload_name(client: &HostKey, token: &UploadToken) -> Vec<u8> {
    [b"B", &client[..], token.as_str().as_bytes()].concat()
}

/// The name of the note with the retained copies of a URL.
fn url_name(client: &HostKey, url: &str) -> Vec<u8> {
    [b"R", &client[..], url.as_bytes()].concat()
}

/// Changes a note until no other process has changed it meanwhile.
async fn change(
    shared: &Arc<dyn SharedRecords>,
    name: &[u8],
    change: impl Fn(Option<&[u8]>) -> Option<Vec<u8>>,
) -> Result<(), JournalError> {
    loop {
        let held = shared.read_note(name).await?;
        let new = change(held.as_deref());
        if new == held {
            return Ok(());
        }
        let changed = shared.exchange_note(name, held.as_deref(), new.as_deref());
        if changed.await? {
            return Ok(());
        }
    }
}

fn read_url(json: Option<&[u8]>) -> Vec<RetainedUrlCopy> {
    let read = json.and_then(|json| serde_json::from_slice(json).ok());
    read.unwrap_or_default()
}

fn write_url(copies: &[RetainedUrlCopy]) -> Option<Vec<u8>> {
    (!copies.is_empty()).then(|| serde_json::to_vec(copies).expect("numbers"))
}

impl RetentionNote {
    /// The note of an object that this process retains.
    pub(crate) fn of_process(shared: &Arc<dyn SharedRecords>) -> RetentionNote {
        RetentionNote {
            process: shared.process().to_owned(),
            until_ms: None,
            named_by: None,
        }
    }

    /// The note of an upload that this process has.
    pub(crate) fn of_upload(shared: &Arc<dyn SharedRecords>, named_by: &[u8]) -> RetentionNote {
        RetentionNote {
            named_by: Some(named_by.to_vec()),
            ..RetentionNote::of_process(shared)
        }
    }

    /// Reads the note of an object.
    pub(crate) async fn read(
        shared: &Arc<dyn SharedRecords>,
        id: u64,
    ) -> Result<Option<RetentionNote>, JournalError> {
        let json = shared.read_note(&name(CopyNote::Retention, id)).await?;
        Ok(json.and_then(|json| serde_json::from_slice(&json).ok()))
    }

    /// Writes the note of an object.
    pub(crate) async fn write(
        &self,
        shared: &Arc<dyn SharedRecords>,
        id: u64,
    ) -> Result<(), JournalError> {
        let json = serde_json::to_vec(self).expect("text and numbers");
        change(shared, &name(CopyNote::Retention, id), |_| {
            Some(json.clone())
        })
        .await
    }

    /// How long the object is retained without its process, at most for `keep`.
    pub(crate) fn left(&self, shared: &Arc<dyn SharedRecords>, keep: Duration) -> Duration {
        if self.process == shared.process() {
            return Duration::ZERO; // This process has let go of it.
        }
        let left = |until: u64| until.saturating_sub(wall_ms(SystemTime::now()));
        let left = self
            .until_ms
            .map(|until| Duration::from_millis(left(until)));
        left.map_or(keep, |left| left.min(keep))
    }

    /// The name of the upload's note, if the object is the body of one.
    pub(crate) fn upload(&self) -> Option<&[u8]> {
        self.named_by
            .as_deref()
            .filter(|name| name.starts_with(b"B"))
    }

    /// Makes the object this process's.
    pub(crate) async fn take_over(
        mut self,
        shared: &Arc<dyn SharedRecords>,
        id: u64,
    ) -> Result<(), JournalError> {
        shared.process().clone_into(&mut self.process);
        self.write(shared, id).await
    }

    /// Removes what names the object, and its note.
    pub(crate) async fn remove(
        &self,
        shared: &Arc<dyn SharedRecords>,
        id: u64,
    ) -> Result<(), JournalError> {
        if let Some(named_by) = &self.named_by {
            let is_url = named_by.first() == Some(&b'R');
            change(shared, named_by, |held| match is_url {
                true => {
                    let mut copies = read_url(held);
                    copies.retain(|copy| copy.id != id);
                    write_url(&copies)
                }
                // Another upload may have the token since.
                false => {
                    let named = held.and_then(|json| serde_json::from_slice(json).ok());
                    let is_it = named.is_some_and(|named: NamedObject| named.id == id);
                    held.filter(|_| !is_it).map(<[u8]>::to_vec)
                }
            })
            .await?;
        }
        change(shared, &name(CopyNote::Retention, id), |_| None).await
    }
}

/// The part of an upload's record that says which object has its body.
#[derive(Deserialize)]
struct NamedObject {
    id: u64,
}

/// Notes that this process retains a copy for its client, who may return to any node.
pub(crate) async fn note_retained(
    shared: &Arc<dyn SharedRecords>,
    client: &HostKey,
    url: &str,
    id: u64,
    until: SystemTime,
) -> Result<(), JournalError> {
    let (named_by, until_ms) = (url_name(client, url), wall_ms(until));
    let note = RetentionNote {
        until_ms: Some(until_ms),
        ..RetentionNote::of_upload(shared, &named_by)
    };
    note.write(shared, id).await?;
    change(shared, &named_by, |held| {
        let mut copies = read_url(held);
        let now = wall_ms(SystemTime::now());
        copies.retain(|copy| copy.id != id && copy.until_ms > now);
        copies.push(RetainedUrlCopy { id, until_ms });
        let over = copies.len().saturating_sub(RETAINED_PER_URL_MAX);
        write_url(&copies[over..])
    })
    .await
}

/// The copies of a URL that nodes retain for a client, the newest first.
pub(crate) async fn retained_copies(
    shared: &Arc<dyn SharedRecords>,
    client: &HostKey,
    url: &str,
) -> Result<Vec<RetainedUrlCopy>, JournalError> {
    let mut copies = read_url(shared.read_note(&url_name(client, url)).await?.as_deref());
    let now = wall_ms(SystemTime::now());
    copies.retain(|copy| copy.until_ms > now);
    copies.reverse();
    Ok(copies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_notes::SharedNotes;

    const CLIENT: HostKey = [3; 32];
    const URL: &str = "http://origin.example/object";

    #[tokio::test]
    async fn copies_of_a_url_are_bounded_and_go_with_their_notes() {
        let notes = Arc::new(SharedNotes::default());
        let shared: Arc<dyn SharedRecords> = notes.at("a");
        let until = SystemTime::now() + Duration::from_secs(60);
        for id in 1..=10 {
            note_retained(&shared, &CLIENT, URL, id, until)
                .await
                .unwrap();
        }
        let ids = async || {
            let copies = retained_copies(&shared, &CLIENT, URL).await.unwrap();
            copies.iter().map(|copy| copy.id).collect::<Vec<_>>()
        };
        assert_eq!(ids().await, [10, 9, 8, 7, 6, 5, 4, 3]);
        for id in 1..=10 {
            let note = RetentionNote::read(&shared, id).await.unwrap().unwrap();
            note.remove(&shared, id).await.unwrap();
        }
        assert!(ids().await.is_empty());
        assert!(
            shared
                .read_note(&url_name(&CLIENT, URL))
                .await
                .unwrap()
                .is_none()
        );
    }

    #[tokio::test]
    async fn what_another_process_retained_has_time_left_and_what_this_one_let_go_has_none() {
        let notes = Arc::new(SharedNotes::default());
        let shared: Arc<dyn SharedRecords> = notes.at("a");
        let other: Arc<dyn SharedRecords> = notes.at("b");
        let keep = Duration::from_secs(60);
        let note = RetentionNote::of_process(&shared);
        note.write(&shared, 1).await.unwrap();
        let found = RetentionNote::read(&other, 1).await.unwrap().unwrap();
        assert_eq!(found.left(&shared, keep), Duration::ZERO);
        assert_eq!(found.left(&other, keep), keep);
        found.take_over(&other, 1).await.unwrap();
        let found = RetentionNote::read(&shared, 1).await.unwrap().unwrap();
        assert_eq!(found.left(&other, keep), Duration::ZERO);
    }
}
