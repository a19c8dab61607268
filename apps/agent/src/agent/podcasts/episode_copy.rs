//! The copy of an episode that players and other apps are given: its file, or its download as far as it has come.
//!
//! ```text
//!  file is whole ────────────────┐
//!  a part of it is durable ──────┼─▶ EpisodeCopy ─▶ ETag, Range, If-Range ─▶ copy_body
//!  what apps have of it (SQLite) ┘
//! ```
//!
//! A server of podcasts may insert other advertisements into each answer. So the bytes have a tag that changes when a
//! download starts again from zero, and stays when it becomes whole.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use cedos_http::{ByteRanges, RangeDecision};
use cedos_readycast::{Episode, EpisodeState, LibraryError, ServedCopyVersion};
use futures_util::stream;
use http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_RANGE, RANGE,
};
use http::{HeaderMap, HeaderValue, StatusCode};
use sha2::{Digest, Sha256};

use super::super::state::Agent;
use super::copy_body::{CopyBody, CopySource};
use crate::fetch::outcome::TransferFailure;
use crate::fetch::partial_reader::PartialReader;

/// How long a request waits for the first bytes: less than the least patient app waits.
pub(in super::super) const FIRST_BYTES_WITHIN: Duration = Duration::from_secs(7); // Media3 gives up after 8 s

/// The interval at which a copy is checked for its first bytes.
pub(in super::super) const FIRST_BYTES_LOOK_EVERY: Duration = Duration::from_millis(250); // a guess

/// Whether an episode that is not on this device is to be, as far as the library knows.
pub(in super::super) fn is_coming(episode: &Episode) -> bool {
    let state = episode.summary.state;
    state == EpisodeState::Downloading
        || (state == EpisodeState::New && episode.own_deadline.is_some())
}

/// A copy that can be given, and what the answer says of it.
pub(in super::super) struct EpisodeCopy {
    source: CopySource,
    /// The name of these bytes.
    tag: Option<String>,
    /// The length of the whole file; none if the origin did not say it and the download goes on.
    length: Option<u64>,
}

impl Agent {
    /// The copy of an episode for an answer, if any of it is on this device.
    ///
    /// # Errors
    /// From the library.
    pub(in super::super) async fn copy_of_episode(
        &self,
        episode: &Episode,
    ) -> Result<Option<EpisodeCopy>, TransferFailure> {
        self.find_copy(episode, true).await
    }

    /// The copy of an episode for a page that says whether there is one, if any of it is on this device.
    ///
    /// # Errors
    /// From the library.
    pub(in super::super) async fn look_at_copy(
        &self,
        episode: &Episode,
    ) -> Result<Option<EpisodeCopy>, TransferFailure> {
        self.find_copy(episode, false).await
    }

    async fn find_copy(
        &self,
        episode: &Episode,
        is_given: bool,
    ) -> Result<Option<EpisodeCopy>, TransferFailure> {
        let library = self.podcasts.library()?;
        let (id, state) = (episode.summary.id, episode.summary.state);
        let (file, sha256) = (episode.file.clone(), episode.sha256.clone());
        let found = tokio::task::spawn_blocking(move || {
            let found = match file {
                Some(file) => whole_copy(&file, sha256, library.given_copy(id)?),
                None if state == EpisodeState::Downloading => {
                    let active = library.active_downloads()?;
                    let download = active.into_iter().find(|active| active.episode == id);
                    download.and_then(|download| growing_copy(&download.file, is_given))
                }
                None => None,
            };
            let Some((copy, note)) = found else {
                return Ok(None);
            };
            if let Some(note) = note {
                library.note_given_copy(id, &note)?;
            }
            Ok::<_, LibraryError>(Some(copy))
        });
        let failed = |error: &dyn std::fmt::Display| TransferFailure::error(error.to_string());
        let found = found.await.map_err(|error| failed(&error))?;
        found.map_err(|error| failed(&error))
    }
}

impl EpisodeCopy {
    /// The name of these bytes.
    pub(in super::super) fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The length of the whole file, if it is known.
    pub(in super::super) fn length(&self) -> Option<u64> {
        self.length
    }

    /// Whether all of the episode is on this device.
    pub(in super::super) fn is_whole(&self) -> bool {
        matches!(self.source, CopySource::Whole(..))
    }

    /// Sets what an answer says of the copy, whatever part of it follows.
    pub(in super::super) fn describe(&self, headers: &mut HeaderMap) {
        let tag = self.tag.as_ref().map(|tag| format!("\"{tag}\""));
        if let Some(value) = tag.and_then(|tag| HeaderValue::from_str(&tag).ok()) {
            headers.insert(ETAG, value);
        }
    }

    /// Answers a request for the copy, or for the part that its fields name. Of what is on this device,
    /// `reserve_bytes` are kept back until the rest has come.
    pub(in super::super) fn answer(
        self,
        agent: &Arc<Agent>,
        episode: &Episode,
        fields: &HeaderMap,
        reserve_bytes: u64,
    ) -> Response {
        if let (false, Some(job)) = (self.is_whole(), episode.summary.job) {
            agent.prefer_heard_download(job);
        }
        let asked = fields.get(RANGE).and_then(|value| value.to_str().ok());
        let is_same = fields.get(IF_RANGE).is_none_or(|named| {
            let tag = self.tag.as_ref().map(|tag| format!("\"{tag}\""));
            tag.is_some_and(|tag| named.as_bytes() == tag.as_bytes())
        });
        let decision = asked
            .filter(|_| is_same)
            .and_then(ByteRanges::parse)
            .map_or(RangeDecision::Whole, |ranges| ranges.decide(self.length));
        let (status, from, to) = match (decision, self.length) {
            (RangeDecision::Unsatisfiable, Some(length)) => {
                let range = format!("bytes */{length}");
                let refusal = (StatusCode::RANGE_NOT_SATISFIABLE, [(CONTENT_RANGE, range)]);
                return refusal.into_response();
            }
            (RangeDecision::Parts(parts), Some(_)) if parts.len() == 1 => (
                StatusCode::PARTIAL_CONTENT,
                parts[0].start,
                Some(parts[0].end),
            ),
            // Of several parts, and where the length is not known, the whole is a permitted answer.
            (_, length) => (StatusCode::OK, 0, length),
        };
        let length = self.length;
        let mut described = HeaderMap::new();
        self.describe(&mut described);
        let body = CopyBody::new(
            agent.clone(),
            episode.summary.id,
            self.source,
            from,
            to,
            reserve_bytes,
        );
        let body = stream::try_unfold(body, |mut body| async move {
            Ok::<_, std::io::Error>(body.next().await?.map(|bytes| (bytes, body)))
        });
        let mut answer = (status, Body::from_stream(body)).into_response();
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, media_type(episode));
        headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        headers.extend(described);
        if let Some(to) = to {
            headers.insert(CONTENT_LENGTH, (to - from).into());
            if status == StatusCode::PARTIAL_CONTENT {
                let length = length.unwrap_or(to);
                let range = format!("bytes {from}-{}/{length}", to - 1);
                let range = HeaderValue::from_str(&range).expect("digits are a field's value");
                headers.insert(CONTENT_RANGE, range);
            }
        }
        answer
    }
}

/// A download as far as it has come; and, if it is given to an app or a player, the note of what they have.
fn growing_copy(file: &Path, is_given: bool) -> Option<(EpisodeCopy, Option<ServedCopyVersion>)> {
    let (reader, note) = PartialReader::open(file)?;
    let edition = reader.edition().to_owned();
    let given = note
        .sha256
        .filter(|_| is_given)
        .map(|sha256| ServedCopyVersion {
            edition: edition.clone(),
            bytes: note.durable_bytes,
            sha256,
        });
    let copy = EpisodeCopy {
        tag: Some(edition),
        length: note.length,
        source: CopySource::Growing(reader),
    };
    Some((copy, given))
}

/// A file that is whole; and, if apps were given a part of it while it was fetched, the note that it was compared with
/// what they have.
fn whole_copy(
    file: &Path,
    sha256: Option<String>,
    given: Option<ServedCopyVersion>,
) -> Option<(EpisodeCopy, Option<ServedCopyVersion>)> {
    let opened = std::fs::File::open(file).ok()?;
    let length = opened.metadata().ok()?.len();
    let mut checked = None;
    let edition = given.and_then(|given| {
        if sha256.as_ref() != Some(&given.sha256) {
            if begins_with(&opened, given.bytes)? != given.sha256 {
                return None;
            }
            checked = sha256.clone().map(|sha256| ServedCopyVersion {
                edition: given.edition.clone(),
                bytes: length,
                sha256,
            });
        }
        Some(given.edition)
    });
    let found = EpisodeCopy {
        tag: edition.or_else(|| sha256.map(|digest| digest.chars().take(32).collect())),
        source: CopySource::Whole(opened, length),
        length: Some(length),
    };
    Some((found, checked))
}

/// The digest of the first bytes of a file, in hexadecimal; none if it is shorter.
fn begins_with(file: &std::fs::File, bytes: u64) -> Option<String> {
    use std::io::Read;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 256 * 1024];
    let mut rest = file.take(bytes);
    loop {
        match rest.read(&mut buffer).ok()? {
            0 => break,
            n => digest.update(&buffer[..n]),
        }
    }
    (rest.limit() == 0).then(|| hex::encode(digest.finalize()))
}

/// A media type that a browser plays and never shows as a page.
pub(in super::super) fn media_type(episode: &Episode) -> HeaderValue {
    let chosen = episode.chosen.as_ref();
    let media_type = match chosen {
        Some(chosen) => chosen.media_type.as_deref(),
        None => episode.media_type.as_deref(),
    };
    let named = media_type.filter(|media_type| {
        let lower = media_type.to_ascii_lowercase();
        lower.starts_with("audio/") || lower.starts_with("video/")
    });
    let named = named.and_then(|named| HeaderValue::from_str(named).ok());
    named.unwrap_or(HeaderValue::from_static("audio/mpeg"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sha256(bytes: &[u8]) -> String {
        hex::encode(Sha256::digest(bytes))
    }

    #[test]
    fn a_whole_file_has_the_tag_of_its_part_only_if_it_begins_with_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a");
        std::fs::write(&file, b"0123456789").expect("written");
        let given = |bytes: &[u8]| {
            Some(ServedCopyVersion {
                edition: "edition".to_owned(),
                bytes: bytes.len() as u64,
                sha256: sha256(bytes),
            })
        };
        let of_all = sha256(b"0123456789");
        let (found, checked) =
            whole_copy(&file, Some(of_all.clone()), given(b"0123")).expect("it is there");
        assert_eq!(found.tag.as_deref(), Some("edition"));
        let checked = checked.expect("it was compared");
        assert_eq!((checked.bytes, &checked.sha256), (10, &of_all));
        let (found, again) =
            whole_copy(&file, Some(of_all.clone()), Some(checked)).expect("it is there");
        assert_eq!((found.tag.as_deref(), again), (Some("edition"), None));
        for other in [&b"abc"[..], b"0123456789a"] {
            let (found, _) =
                whole_copy(&file, Some(of_all.clone()), given(other)).expect("it is there");
            assert_eq!(found.tag.as_deref(), Some(&of_all[..32]));
        }
        assert!(whole_copy(&folder.path().join("none"), None, None).is_none());
    }
}
