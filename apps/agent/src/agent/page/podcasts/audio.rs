//! The audio of an episode by ranges, as players ask for it: of its file, or of its download as far as it has come.

use std::io;
use std::ops::Range;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use cedos_http::{ByteRanges, RangeDecision};
use cedos_readycast::{Episode, EpisodeId};
use futures_util::stream;
use http::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, RANGE};
use http::{HeaderMap, HeaderValue, StatusCode};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};

use super::super::super::state::Agent;
use super::super::frame::{self, PageContext};
use super::growing_file::{PIECE_BYTES, PlayableDownload};
use crate::fetch::outcome::TransferFailure;

/// A media type that a browser plays and never shows as a page.
fn media_type(episode: &Episode) -> HeaderValue {
    let named = episode.media_type.as_deref().filter(|media_type| {
        let lower = media_type.to_ascii_lowercase();
        lower.starts_with("audio/") || lower.starts_with("video/")
    });
    named
        .and_then(|named| HeaderValue::from_str(named).ok())
        .unwrap_or(HeaderValue::from_static("audio/mpeg"))
}

/// Where the bytes of an episode are.
enum AudioSource {
    Whole(File),
    Growing(PlayableDownload),
}

/// The file of an episode, or that of its download.
async fn source_of(
    context: &PageContext,
    episode: &Episode,
) -> Result<AudioSource, TransferFailure> {
    let Some(path) = &episode.file else {
        let download = playable_download(&context.agent, episode);
        return download.map(AudioSource::Growing).ok_or_else(|| {
            let text = "Nothing of this episode is on this device yet: download it first.";
            TransferFailure::error(text)
        });
    };
    let file = File::open(path).await.map_err(unreadable)?;
    Ok(AudioSource::Whole(file))
}

fn unreadable(error: io::Error) -> TransferFailure {
    TransferFailure::storage("cannot read the file of this episode", &error)
}

/// The download of an episode, if a player can have its beginning.
pub(super) fn playable_download(agent: &Agent, episode: &Episode) -> Option<PlayableDownload> {
    PlayableDownload::of(&agent.episode_transfer(&episode.summary)?)
}

/// The part that a player asks for, and its status; none if there is no such part.
fn part_of(fields: &HeaderMap, length: u64) -> Option<(StatusCode, Range<u64>)> {
    let asked = fields.get(RANGE).and_then(|value| value.to_str().ok());
    let decision = asked
        .and_then(ByteRanges::parse)
        .map_or(RangeDecision::Whole, |ranges| ranges.decide(Some(length)));
    match decision {
        RangeDecision::Unsatisfiable => None,
        RangeDecision::Parts(parts) if parts.len() == 1 => {
            Some((StatusCode::PARTIAL_CONTENT, parts[0].clone()))
        }
        // No player asks for several parts; the whole is a permitted answer.
        _ => Some((StatusCode::OK, 0..length)),
    }
}

async fn whole_body(mut file: File, part: &Range<u64>) -> io::Result<Body> {
    file.seek(io::SeekFrom::Start(part.start)).await?;
    let rest = file.take(part.end - part.start);
    Ok(Body::from_stream(stream::try_unfold(
        rest,
        |mut file| async move {
            let mut piece = Vec::with_capacity(PIECE_BYTES);
            let mut next = (&mut file).take(PIECE_BYTES as u64);
            match next.read_to_end(&mut piece).await? {
                0 => Ok::<_, io::Error>(None),
                _ => Ok(Some((Bytes::from(piece), file))),
            }
        },
    )))
}

async fn growing_body(
    context: &PageContext,
    download: &PlayableDownload,
    part: &Range<u64>,
) -> io::Result<Body> {
    let file = download.open(&context.agent, part.start).await?;
    let end = part.end;
    Ok(Body::from_stream(stream::try_unfold(
        file,
        move |mut file| async move {
            let piece = file.next(end).await?;
            Ok::<_, io::Error>(piece.map(|piece| (piece, file)))
        },
    )))
}

async fn answer(
    context: &PageContext,
    id: EpisodeId,
    fields: &HeaderMap,
) -> Result<Response, TransferFailure> {
    // A download that ends between two looks has a whole file at the second.
    let mut is_last = false;
    loop {
        let episode = context.read_podcasts(move |library| library.episode(id));
        let episode = episode
            .await?
            .ok_or_else(|| super::episode_page::missing(id))?;
        let source = source_of(context, &episode).await?;
        let length = match &source {
            AudioSource::Whole(file) => file.metadata().await.map_err(unreadable)?.len(),
            AudioSource::Growing(download) => download.length,
        };
        let Some((status, part)) = part_of(fields, length) else {
            let range = format!("bytes */{length}");
            let refusal = (StatusCode::RANGE_NOT_SATISFIABLE, [(CONTENT_RANGE, range)]);
            return Ok(refusal.into_response());
        };
        let body = match source {
            AudioSource::Whole(file) => whole_body(file, &part).await,
            AudioSource::Growing(download) => growing_body(context, &download, &part).await,
        };
        let body = match body {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_last => {
                is_last = true;
                continue;
            }
            body => body.map_err(unreadable)?,
        };
        let mut answer = (status, body).into_response();
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, media_type(&episode));
        headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        headers.insert(CONTENT_LENGTH, HeaderValue::from(part.end - part.start));
        if status == StatusCode::PARTIAL_CONTENT {
            let range = format!("bytes {}-{}/{length}", part.start, part.end - 1);
            let range = HeaderValue::from_str(&range).expect("digits are a field's value");
            headers.insert(CONTENT_RANGE, range);
        }
        return Ok(answer);
    }
}

/// Answers a player.
pub(super) async fn audio(
    State(context): State<PageContext>,
    Path(id): Path<i64>,
    fields: HeaderMap,
) -> Response {
    match answer(&context, EpisodeId(id), &fields).await {
        Ok(answer) => answer,
        Err(failure) => frame::problem(&context, &failure),
    }
}
