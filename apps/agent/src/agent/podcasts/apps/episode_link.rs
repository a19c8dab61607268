//! The link of an episode for another app: whoever downloads it asks for the episode, and gets the agent's copy.
//!
//! ```text
//!  GET, Range ─▶ file is whole ─────────────────────────▶ its bytes
//!             ─▶ in the queue ─▶ a part is durable ─────▶ its bytes, as they come
//!             ─▶ neither: asked for, by the channel's rule ─▶ the same; 503 with Retry-After while nothing came
//! ```
//!
//! `HEAD` asks for nothing: apps look at the size of episodes that nobody wants.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path as RoutePath, State};
use axum::response::{IntoResponse, Response};
use cedos_http::{ByteRanges, RangeDecision};
use cedos_readycast::{Episode, EpisodeId, EpisodeState, GivenCopy};
use futures_util::stream;
use http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_RANGE, RANGE, RETRY_AFTER,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use jiff::{Timestamp, Zoned};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::AppContext;
use super::copy_body::{CopyBody, EpisodeCopy};
use crate::fetch::outcome::TransferFailure;
use crate::fetch::partial_reader::PartialReader;

/// How long a request waits for the first bytes: less than the least patient app waits.
const FIRST_BYTES_WITHIN: Duration = Duration::from_secs(7); // Media3 gives up after 8 s

/// How often it is looked whether first bytes are there.
const LOOK_EVERY: Duration = Duration::from_millis(250); // a guess

/// The Retry-After value while nothing came yet, in seconds.
const AGAIN_S: u32 = 300; // a guess: the episode waits for a network, and no request brings it sooner

/// A copy that can be given, and what the answer says of it.
struct FoundCopy {
    copy: EpisodeCopy,
    tag: Option<String>,
    length: Option<u64>,
}

fn words(status: StatusCode, text: &str) -> Response {
    (status, format!("{text}\n")).into_response()
}

fn refused(failure: &TransferFailure) -> Response {
    words(StatusCode::BAD_GATEWAY, &failure.text)
}

/// Answers an app.
pub(super) async fn episode(
    State(context): State<AppContext>,
    RoutePath((id, _name)): RoutePath<(i64, String)>,
    method: Method,
    fields: HeaderMap,
) -> Response {
    let answered = match method == Method::HEAD {
        true => describe(&context, EpisodeId(id)).await,
        false => give(&context, EpisodeId(id), &fields).await,
    };
    answered.unwrap_or_else(|failure| refused(&failure))
}

fn missing() -> Response {
    words(
        StatusCode::NOT_FOUND,
        "there is no such episode here any more",
    )
}

/// The answer to `HEAD`: what is known without asking for the episode.
async fn describe(context: &AppContext, id: EpisodeId) -> Result<Response, TransferFailure> {
    let Some(episode) = context.find(id).await? else {
        return Ok(missing());
    };
    let found = context.copy_of(&episode).await?;
    // An empty body would be given the length 0, which would be taken for that of the file.
    let nothing = stream::empty::<Result<Bytes, io::Error>>();
    let mut answer = Response::new(Body::from_stream(nothing));
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, media_type(&episode));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some(found) = found {
        if let Some(length) = found.length {
            headers.insert(CONTENT_LENGTH, length.into());
        }
        insert_tag(headers, found.tag.as_deref());
    }
    Ok(answer)
}

async fn give(
    context: &AppContext,
    id: EpisodeId,
    fields: &HeaderMap,
) -> Result<Response, TransferFailure> {
    let until = Instant::now() + FIRST_BYTES_WITHIN;
    let mut is_asked_for = false;
    loop {
        let Some(episode) = context.find(id).await? else {
            return Ok(missing());
        };
        if let Some(found) = context.copy_of(&episode).await? {
            return Ok(answer(context, &episode, found, fields));
        }
        let summary = &episode.summary;
        let is_coming = summary.state == EpisodeState::Downloading
            || (summary.state == EpisodeState::New && episode.own_deadline.is_some());
        if !is_coming && !is_asked_for {
            context.ask_for(&episode).await?;
            is_asked_for = true;
        } else if let (true, Some(problem)) = (is_asked_for, &summary.problem) {
            return Ok(words(StatusCode::BAD_GATEWAY, problem));
        }
        if Instant::now() >= until {
            let why = context.why_it_waits(&episode);
            let mut answer = words(StatusCode::SERVICE_UNAVAILABLE, &why);
            answer.headers_mut().insert(RETRY_AFTER, AGAIN_S.into());
            return Ok(answer);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

impl AppContext {
    async fn find(&self, id: EpisodeId) -> Result<Option<Episode>, TransferFailure> {
        let found = self.agent.podcasts.with(move |library| library.episode(id));
        found.await
    }

    /// Asks for an episode as its channel's rule would.
    async fn ask_for(&self, episode: &Episode) -> Result<(), TransferFailure> {
        let channel = episode.summary.channel;
        let found = self
            .agent
            .podcasts
            .with(move |library| library.channel(channel));
        let rule = found.await?.map(|channel| channel.summary.rule);
        let by = rule.and_then(|rule| {
            // As if it had been published now: an old episode is not late because an app wants it today.
            rule.schedule.deadline(Timestamp::now(), &Zoned::now())
        });
        let by = by.filter(|by| *by > Timestamp::now());
        let id = episode.summary.id;
        self.agent.ask_for_episode(id, by, None).await.map(drop)
    }

    /// Why nothing of an episode came yet, in a sentence.
    fn why_it_waits(&self, episode: &Episode) -> String {
        let transfer = self.agent.episode_transfer(&episode.summary);
        let why = transfer.as_ref().and_then(|t| t["last"]["why"].as_str());
        match why {
            Some(why) => format!("the episode is in the queue of cedos: {why}"),
            None => "the episode is in the queue of cedos; `cedos cast queue` shows it".to_owned(),
        }
    }

    /// The copy of an episode, if any of it can be given.
    async fn copy_of(&self, episode: &Episode) -> Result<Option<FoundCopy>, TransferFailure> {
        let id = episode.summary.id;
        let library = self.agent.podcasts.library()?;
        let failed = |error: &dyn std::fmt::Display| TransferFailure::error(error.to_string());
        let (file, sha256) = (episode.file.clone(), episode.sha256.clone());
        let state = episode.summary.state;
        let found = tokio::task::spawn_blocking(move || {
            let database = |error: cedos_readycast::LibraryError| error.to_string();
            let given = library.given_copy(id).map_err(database)?;
            if let Some(file) = file {
                let Some((found, checked)) = whole_copy(&file, sha256, given) else {
                    return Ok(None);
                };
                if let Some(checked) = checked {
                    library.note_given_copy(id, &checked).map_err(database)?;
                }
                return Ok(Some(found));
            }
            if state != EpisodeState::Downloading {
                return Ok(None);
            }
            let active = library.active_downloads().map_err(database)?;
            let file: Option<PathBuf> =
                active.into_iter().find(|d| d.episode == id).map(|d| d.file);
            let Some((reader, note)) = file.and_then(|file| PartialReader::open(&file)) else {
                return Ok(None);
            };
            if let Some(sha256) = note.sha256 {
                let copy = GivenCopy {
                    edition: reader.edition().to_owned(),
                    bytes: note.durable_bytes,
                    sha256,
                };
                library.note_given_copy(id, &copy).map_err(database)?;
            }
            Ok::<_, String>(Some(FoundCopy {
                tag: Some(reader.edition().to_owned()),
                length: note.length,
                copy: EpisodeCopy::Growing(reader),
            }))
        });
        let found = found.await.map_err(|error| failed(&error))?;
        found.map_err(|text| failed(&text))
    }
}

/// A file that is whole; and, if apps were given a part of it while it was fetched, the note that it was compared with
/// what they have.
fn whole_copy(
    file: &Path,
    sha256: Option<String>,
    given: Option<GivenCopy>,
) -> Option<(FoundCopy, Option<GivenCopy>)> {
    let opened = std::fs::File::open(file).ok()?;
    let length = opened.metadata().ok()?.len();
    let mut checked = None;
    let edition = given.and_then(|given| {
        if sha256.as_ref() != Some(&given.sha256) {
            if begins_with(&opened, given.bytes)? != given.sha256 {
                return None;
            }
            checked = sha256.clone().map(|sha256| GivenCopy {
                edition: given.edition.clone(),
                bytes: length,
                sha256,
            });
        }
        Some(given.edition)
    });
    let found = FoundCopy {
        tag: edition.or_else(|| sha256.map(|digest| digest.chars().take(32).collect())),
        copy: EpisodeCopy::Whole(opened, length),
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

fn insert_tag(headers: &mut HeaderMap, tag: Option<&str>) {
    if let Some(value) = tag.and_then(|tag| HeaderValue::from_str(&format!("\"{tag}\"")).ok()) {
        headers.insert(ETAG, value);
    }
}

/// A media type that a browser plays and never shows as a page.
fn media_type(episode: &Episode) -> HeaderValue {
    let named = episode.media_type.as_deref().filter(|media_type| {
        let lower = media_type.to_ascii_lowercase();
        lower.starts_with("audio/") || lower.starts_with("video/")
    });
    let named = named.and_then(|named| HeaderValue::from_str(named).ok());
    named.unwrap_or(HeaderValue::from_static("audio/mpeg"))
}

fn answer(
    context: &AppContext,
    episode: &Episode,
    found: FoundCopy,
    fields: &HeaderMap,
) -> Response {
    let asked = fields.get(RANGE).and_then(|value| value.to_str().ok());
    let is_same = fields.get(IF_RANGE).is_none_or(|named| {
        let tag = found.tag.as_ref().map(|tag| format!("\"{tag}\""));
        tag.is_some_and(|tag| named.as_bytes() == tag.as_bytes())
    });
    let decision = asked
        .filter(|_| is_same)
        .and_then(ByteRanges::parse)
        .map_or(RangeDecision::Whole, |ranges| ranges.decide(found.length));
    let (status, from, to) = match (decision, found.length) {
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
    let body = CopyBody::new(
        context.agent.clone(),
        episode.summary.id,
        found.copy,
        from,
        to,
    );
    let body = stream::try_unfold(body, |mut body| async move {
        Ok::<_, std::io::Error>(body.next().await?.map(|bytes| (bytes, body)))
    });
    let mut answer = (status, Body::from_stream(body)).into_response();
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, media_type(episode));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    insert_tag(headers, found.tag.as_deref());
    if let Some(to) = to {
        headers.insert(CONTENT_LENGTH, (to - from).into());
        if status == StatusCode::PARTIAL_CONTENT {
            let length = found.length.unwrap_or(to);
            let range = format!("bytes {from}-{}/{length}", to - 1);
            let range = HeaderValue::from_str(&range).expect("digits are a field's value");
            headers.insert(CONTENT_RANGE, range);
        }
    }
    answer
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
            Some(GivenCopy {
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
