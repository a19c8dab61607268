//! The object of one URL: its stored parts, its readers, and the origin's answer if it has none.
//!
//! ```text
//!  feed ── accept(head) ── put(bytes) ──▶ store ──▶ take() ── ObjectReader ──▶ player
//!                │                                                 │
//!                └── another edition: readers of the old one end with an error
//! ```

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::StatusCode;
use tokio::sync::watch;
use url::Url;

use super::store::{ObjectNote, ObjectStore, PendingSync};
use crate::fetch::exchange::{ContentPart, FetchResponse};

/// Held bytes that are requested again and compared, if the origin sends no validator.
pub const OVERLAP_BYTES: u64 = 4096;

/// Why an object is not available.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OriginRefusal {
    /// The status of the origin's answer, or a gateway status if there was none.
    pub status: StatusCode,
    /// The explanation, for users.
    pub text: String,
    /// Whether a later request may succeed.
    pub is_temporary: bool,
}

/// The metadata of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectHead {
    /// The version of the object's content.
    pub edition: String,
    /// The length of the object.
    pub length: Option<u64>,
    /// The media type of the object.
    pub media_type: Option<String>,
}

/// The position of a fetched answer in the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerPosition {
    /// The answer begins at this byte.
    At(u64),
    /// The requested range does not exist.
    OutOfRange,
    /// The origin sends another version: nothing is held now, and the answer begins with the first
    /// byte.
    Changed,
}

/// The result of a read.
#[derive(Debug, PartialEq, Eq)]
pub enum ObjectRead {
    /// Bytes of the object.
    Bytes(Bytes),
    /// The bytes have not arrived yet.
    NotYet,
    /// The end of the object.
    End,
    /// The bytes will never be available.
    Broken,
}

/// An object of an origin, and the bytes of it that are held.
pub struct StreamObject {
    /// The URL of the object.
    pub url: Url,
    state: Mutex<ObjectState>,
    news: watch::Sender<()>,
}

struct ObjectState {
    store: ObjectStore,
    refusal: Option<OriginRefusal>,
    /// The position of each reader.
    readers: BTreeMap<u64, u64>,
    readers_ever: u64,
    /// Held bytes that must arrive again and be compared first.
    overlap: Option<(u64, Vec<u8>)>,
}

impl StreamObject {
    /// Opens what is held of it below `root`.
    ///
    /// # Errors
    /// From the disk; `WouldBlock` while another program has it.
    pub fn open(root: &Path, url: Url) -> io::Result<Arc<StreamObject>> {
        let store = ObjectStore::open(root, url.as_str())?;
        Ok(Arc::new(StreamObject {
            url,
            state: Mutex::new(ObjectState {
                store,
                refusal: None,
                readers: BTreeMap::new(),
                readers_ever: 0,
                overlap: None,
            }),
            news: watch::Sender::new(()),
        }))
    }

    fn state(&self) -> MutexGuard<'_, ObjectState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notified whenever the object changes.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    fn notify_readers(&self) {
        self.news.send_replace(());
    }

    /// The metadata of the object, once the origin has answered.
    pub fn head(&self) -> Option<ObjectHead> {
        let state = self.state();
        let note = &state.store.note;
        note.is_known.then(|| ObjectHead {
            edition: note.edition.clone(),
            length: note.length,
            media_type: note.media_type.clone(),
        })
    }

    /// The stored note of the object.
    pub fn note(&self) -> ObjectNote {
        self.state().store.note.clone()
    }

    /// The length of the object, if known.
    pub fn length(&self) -> Option<u64> {
        self.state().store.note.length
    }

    /// The end of the held bytes from `at` on, and the start of the next held ones.
    pub fn held_from(&self, at: u64) -> (u64, Option<u64>) {
        let state = self.state();
        let held = &state.store.note.held;
        let end = held.end_from(at);
        (end, held.next_from(end))
    }

    /// Bytes of the object that are held.
    pub fn held_bytes(&self) -> u64 {
        self.state().store.note.held.bytes()
    }

    /// Why the object is not available, if so.
    pub fn refusal(&self) -> Option<OriginRefusal> {
        self.state().refusal.clone()
    }

    /// Records why the object is not available.
    pub fn refuse(&self, refusal: OriginRefusal) {
        self.state().refusal = Some(refusal);
        self.notify_readers();
    }

    /// Clears the refusal, so that the origin is asked again.
    pub fn clear_refusal(&self) {
        let was = self.state().refusal.take();
        if was.is_some() {
            self.notify_readers();
        }
    }

    // ---- fetching ----

    /// The first byte to request for the bytes at `at`: a little before it, if only the bytes can show
    /// that the object is unchanged.
    pub fn ask_from(&self, at: u64) -> u64 {
        let mut state = self.state();
        state.overlap = None;
        let note = &state.store.note;
        if note.validator.is_some() || at == 0 {
            return at;
        }
        let from = at.saturating_sub(OVERLAP_BYTES);
        if note.held.end_from(from) < at {
            return at;
        }
        let mut bytes = vec![0; (at - from) as usize];
        if state.store.read(from, &mut bytes).is_err() {
            return at;
        }
        state.overlap = Some((from, bytes));
        from
    }

    /// Takes in the head of an answer.
    ///
    /// # Errors
    /// From the disk.
    pub fn accept(&self, answer: &FetchResponse) -> io::Result<AnswerPosition> {
        let mut state = self.state();
        let (at, total) = match answer.part {
            ContentPart::Whole(length) => (0, length),
            ContentPart::Range { from, total, .. } => (from, total),
            // Streams ask for no version.
            ContentPart::NotModified => return Ok(AnswerPosition::OutOfRange),
            ContentPart::Unsatisfiable(total) => {
                // The object ends where we thought it went on.
                let known = state.store.note.length;
                if known.is_none() && total.is_some() {
                    state.store.update_note(|note| note.length = total);
                } else if known != total {
                    state.store.clear()?;
                }
                drop(state);
                self.notify_readers();
                return Ok(AnswerPosition::OutOfRange);
            }
        };
        let note = &state.store.note;
        let other_name =
            matches!((&note.validator, &answer.validator), (Some(a), b) if Some(a) != b.as_ref());
        let other_length = matches!((note.length, total), (Some(a), Some(b)) if a != b);
        // A part of something that nothing names, with nothing to compare, is taken at its word.
        let changed = note.is_known && (other_name || other_length);
        if changed {
            state.store.clear()?;
            state.overlap = None;
        }
        let is_part = matches!(answer.part, ContentPart::Range { .. });
        if !is_part {
            // From its first byte on there is nothing to compare but what lies there.
            state.overlap = None;
        }
        state.refusal = None;
        state.store.update_note(|note| {
            note.is_known = true;
            note.length = note.length.or(total);
            note.validator = note.validator.take().or_else(|| answer.validator.clone());
            note.media_type = note.media_type.take().or_else(|| answer.media_type.clone());
        });
        drop(state);
        self.notify_readers();
        // What follows `at` of the new bytes is theirs: only a part further on is of no use alone.
        Ok(if changed && at > 0 {
            AnswerPosition::Changed
        } else {
            AnswerPosition::At(at)
        })
    }

    /// Puts fetched bytes where they belong. False if they are not those that are held.
    ///
    /// # Errors
    /// From the disk.
    pub fn put(&self, at: u64, bytes: &[u8]) -> io::Result<bool> {
        let mut state = self.state();
        if let Some((from, expected)) = &state.overlap {
            let skip = at.saturating_sub(*from) as usize;
            let expected = expected.get(skip..).unwrap_or_default();
            let n = expected.len().min(bytes.len());
            if expected[..n] != bytes[..n] {
                state.overlap = None;
                state.store.clear()?;
                drop(state);
                self.notify_readers();
                return Ok(false);
            }
        }
        state.store.write(at, bytes)?;
        drop(state);
        self.notify_readers();
        Ok(true)
    }

    /// Records the clean end of an answer at `at`, which is the length if that was unknown.
    pub fn set_end(&self, at: u64) {
        let mut state = self.state();
        if state.store.note.length.is_none() {
            state.store.update_note(|note| note.length = Some(at));
        }
        drop(state);
        self.notify_readers();
    }

    /// The work that makes the bytes held so far durable.
    pub fn prepare_sync(&self) -> Option<PendingSync> {
        self.state().store.prepare_sync()
    }

    /// Frees up to `bytes` bytes before `before`. Returns how many it was.
    pub fn release_below(&self, before: u64, bytes: u64) -> u64 {
        let mut state = self.state();
        let held = state.store.note.held.bytes();
        let Some((from, to)) = state.store.note.held.first_below(before) else {
            return 0;
        };
        state
            .store
            .release(from, to.min(from.saturating_add(bytes)));
        held - state.store.note.held.bytes()
    }

    // ---- reading ----

    /// Creates a reader at `at`.
    pub fn read_from(self: &Arc<StreamObject>, at: u64) -> ObjectReader {
        let mut state = self.state();
        state.readers_ever += 1;
        let number = state.readers_ever;
        state.readers.insert(number, at);
        ObjectReader {
            edition: state.store.note.edition.clone(),
            number,
            at,
            object: self.clone(),
        }
    }

    /// The positions of all readers.
    pub fn readers(&self) -> Vec<u64> {
        self.state().readers.values().copied().collect()
    }
}

/// A reader of an object, from one byte to the next.
pub struct ObjectReader {
    object: Arc<StreamObject>,
    number: u64,
    /// The next byte.
    pub at: u64,
    edition: String,
}

impl ObjectReader {
    /// The object that the bytes belong to.
    pub fn object(&self) -> &Arc<StreamObject> {
        &self.object
    }

    /// How far the reader could read now, below `to`, and whether that is all it wants.
    pub fn readable_until(&self, to: u64) -> (u64, bool) {
        let state = self.object.state();
        let note = &state.store.note;
        let to = to.min(note.length.unwrap_or(u64::MAX));
        let end = note.held.end_from(self.at).min(to);
        (end, end >= to)
    }

    /// Reads up to `most` held bytes.
    pub fn take(&mut self, most: u64) -> ObjectRead {
        let mut state = self.object.state();
        let note = &state.store.note;
        if note.edition != self.edition {
            return ObjectRead::Broken;
        }
        if note.length.is_some_and(|length| self.at >= length) {
            return ObjectRead::End;
        }
        let end = note
            .held
            .end_from(self.at)
            .min(self.at.saturating_add(most));
        if end == self.at {
            return ObjectRead::NotYet;
        }
        let mut bytes = vec![0; (end - self.at) as usize];
        if state.store.read(self.at, &mut bytes).is_err() {
            return ObjectRead::Broken;
        }
        self.at = end;
        state.readers.insert(self.number, end);
        ObjectRead::Bytes(bytes.into())
    }

    /// Moves to another position.
    pub fn seek(&mut self, at: u64) {
        self.at = at;
        self.object.state().readers.insert(self.number, at);
        self.object.notify_readers();
    }
}

impl Drop for ObjectReader {
    fn drop(&mut self) {
        self.object.state().readers.remove(&self.number);
        self.object.notify_readers();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::validator::Validator;

    fn answer(part: ContentPart, tag: Option<&str>) -> FetchResponse {
        let from = match part {
            ContentPart::Range { from, .. } => from,
            _ => 0,
        };
        let validator = tag.map(|tag| Validator::Etag(format!("\"{tag}\"")));
        let (ours, _) = tokio::io::duplex(1);
        let mut answer = FetchResponse::continued(Box::new(ours), from, None, validator);
        answer.part = part;
        answer
    }

    fn object() -> (tempfile::TempDir, Arc<StreamObject>) {
        let root = tempfile::tempdir().unwrap();
        let url = "https://o.example/a.mp4".parse().unwrap();
        let object = StreamObject::open(root.path(), url).unwrap();
        (root, object)
    }

    fn range(from: u64, total: u64) -> ContentPart {
        let (to, total) = (total - 1, Some(total));
        ContentPart::Range { from, to, total }
    }

    #[test]
    fn bytes_are_read_where_they_are_held_and_the_end_is_known() {
        let (_root, object) = object();
        assert_eq!(object.head(), None);
        let whole = answer(ContentPart::Whole(Some(10)), Some("a"));
        assert_eq!(object.accept(&whole).unwrap(), AnswerPosition::At(0));
        assert!(object.put(0, b"01234").unwrap());
        let mut reading = object.read_from(2);
        assert_eq!(
            reading.take(2),
            ObjectRead::Bytes(Bytes::from_static(b"23"))
        );
        assert_eq!(reading.take(9), ObjectRead::Bytes(Bytes::from_static(b"4")));
        assert_eq!(reading.take(9), ObjectRead::NotYet);
        assert!(object.put(5, b"56789").unwrap());
        assert_eq!(reading.readable_until(7), (7, true));
        assert_eq!(
            reading.take(9),
            ObjectRead::Bytes(Bytes::from_static(b"56789"))
        );
        assert_eq!(reading.take(9), ObjectRead::End);
        assert_eq!(object.readers(), [10]);
        drop(reading);
        assert!(object.readers().is_empty());
    }

    #[test]
    fn another_version_breaks_the_readers_of_the_one_before() {
        let (_root, object) = object();
        object
            .accept(&answer(ContentPart::Whole(Some(10)), Some("a")))
            .unwrap();
        object.put(0, b"01234").unwrap();
        let mut reading = object.read_from(0);
        let other = answer(range(5, 10), Some("b"));
        assert_eq!(object.accept(&other).unwrap(), AnswerPosition::Changed);
        assert_eq!(reading.take(9), ObjectRead::Broken);
        assert_eq!(object.held_bytes(), 0);
        let other = answer(ContentPart::Whole(Some(12)), Some("c"));
        assert_eq!(object.accept(&other).unwrap(), AnswerPosition::At(0));
        assert_eq!(object.length(), Some(12));
    }

    #[test]
    fn without_a_name_only_equal_bytes_are_joined() {
        let (_root, object) = object();
        object
            .accept(&answer(ContentPart::Whole(Some(10)), None))
            .unwrap();
        object.put(0, b"01234").unwrap();
        assert_eq!(object.ask_from(5), 0, "what is held comes again");
        object.accept(&answer(range(0, 10), None)).unwrap();
        assert!(object.put(0, b"012").unwrap());
        assert!(object.put(3, b"3456").unwrap());
        assert_eq!(object.held_from(0), (7, None));
        assert_eq!(object.ask_from(7), 0);
        object.accept(&answer(range(0, 10), None)).unwrap();
        assert!(!object.put(0, b"0x2").unwrap());
        assert_eq!(object.held_bytes(), 0);
    }

    #[test]
    fn an_object_of_unknown_length_ends_where_its_answer_does() {
        let (_root, object) = object();
        object
            .accept(&answer(ContentPart::Whole(None), None))
            .unwrap();
        object.put(0, b"0123").unwrap();
        let mut reading = object.read_from(0);
        assert!(matches!(reading.take(9), ObjectRead::Bytes(_)));
        assert_eq!(reading.take(9), ObjectRead::NotYet);
        object.set_end(4);
        assert_eq!(reading.take(9), ObjectRead::End);
    }
}
