//! Transcripts of episodes whose feed names one (`podcast:transcript`): passages of plain text, with their times.

use std::sync::Arc;

use cedos_readycast::{Episode, TRANSCRIPT_BYTES_MAX, TranscriptPassage, parse_transcript};

use super::super::state::Agent;
use super::episode_documents::DocumentKind;

/// The files of transcripts.
const TRANSCRIPTS: DocumentKind<Vec<TranscriptPassage>> = DocumentKind {
    name: "transcripts",
    bytes_max: TRANSCRIPT_BYTES_MAX,
    parse: parse_transcript,
};

impl Agent {
    /// Whether the transcript of an episode is on this device. One that is not is fetched, and is here the next time.
    pub(in super::super) fn has_transcript(self: &Arc<Agent>, episode: &Episode) -> bool {
        let Some(url) = &episode.transcript else {
            return false;
        };
        let is_kept = TRANSCRIPTS.is_kept(url);
        if !is_kept {
            self.fetch_document_of(episode, url, &TRANSCRIPTS);
        }
        is_kept
    }

    /// The transcript of an episode; empty if it is not on this device.
    pub(in super::super) async fn transcript(&self, episode: &Episode) -> Vec<TranscriptPassage> {
        let Some(url) = episode.transcript.clone() else {
            return Vec::new();
        };
        let read = tokio::task::spawn_blocking(move || TRANSCRIPTS.kept(&url));
        read.await.ok().flatten().unwrap_or_default()
    }
}
