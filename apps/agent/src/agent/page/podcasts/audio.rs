//! The audio of an episode whose file is whole, by ranges, as players ask for it.

use std::io::SeekFrom;

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

use super::super::frame::{self, PageContext};
use crate::fetch::outcome::TransferFailure;

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 64 * 1024; // a guess

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

async fn answer(
    context: &PageContext,
    id: EpisodeId,
    fields: &HeaderMap,
) -> Result<Response, TransferFailure> {
    let episode = context
        .read_podcasts(move |library| library.episode(id))
        .await?;
    let episode = episode.ok_or_else(|| super::episode_page::missing(id))?;
    let path = episode.file.as_ref().ok_or_else(|| {
        TransferFailure::error("This episode is not on this device yet: download it first.")
    })?;
    let failed = |error| TransferFailure::storage("cannot read the file of this episode", &error);
    let mut file = File::open(path).await.map_err(failed)?;
    let length = file.metadata().await.map_err(failed)?.len();
    let asked = fields.get(RANGE).and_then(|value| value.to_str().ok());
    let decision = asked
        .and_then(ByteRanges::parse)
        .map_or(RangeDecision::Whole, |ranges| ranges.decide(Some(length)));
    let (status, part) = match decision {
        RangeDecision::Unsatisfiable => {
            let range = format!("bytes */{length}");
            let refusal = (StatusCode::RANGE_NOT_SATISFIABLE, [(CONTENT_RANGE, range)]);
            return Ok(refusal.into_response());
        }
        RangeDecision::Parts(parts) if parts.len() == 1 => {
            (StatusCode::PARTIAL_CONTENT, parts[0].clone())
        }
        // No player asks for several parts; the whole is a permitted answer.
        _ => (StatusCode::OK, 0..length),
    };
    file.seek(SeekFrom::Start(part.start))
        .await
        .map_err(failed)?;
    let bytes = part.end - part.start;
    let pieces = stream::try_unfold(file.take(bytes), |mut file| async move {
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        let mut next = (&mut file).take(PIECE_BYTES as u64);
        match next.read_to_end(&mut piece).await? {
            0 => Ok::<_, std::io::Error>(None),
            _ => Ok(Some((Bytes::from(piece), file))),
        }
    });
    let mut answer = (status, Body::from_stream(pieces)).into_response();
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, media_type(&episode));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes));
    if status == StatusCode::PARTIAL_CONTENT {
        let range = format!("bytes {}-{}/{length}", part.start, part.end - 1);
        let range = HeaderValue::from_str(&range).expect("digits are a field's value");
        headers.insert(CONTENT_RANGE, range);
    }
    Ok(answer)
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
