//! The file of an episode that is still being downloaded: what is there is read at once, the rest when it has come.
//!
//! ```text
//!  download ── appends ──▶ FILE.part ──▶ GrowingFile ──▶ the browser's player
//!      └─ events ────────────────────────────▲
//! ```
//!
//! It is the file that the download makes whole, so nothing is fetched twice, and an origin that inserts other
//! advertisements into each answer cannot mix two of them. A position behind what is there is waited for.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;

use super::super::super::idle::ConnectionCount;
use super::super::super::state::Agent;
use crate::fetch::partial::part_path;

/// Bytes that are read at a time.
pub(super) const PIECE_BYTES: usize = 64 * 1024; // a guess

/// The interval at which a download is looked at that reports nothing.
const LOOK_EVERY: Duration = Duration::from_secs(5); // a guess

/// A download of which a player can have the beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlayableDownload {
    /// Number of the agent's transfer.
    transfer: u64,
    part: PathBuf,
    /// Size of the whole file.
    pub(super) length: u64,
}

impl PlayableDownload {
    /// The download of a transfer in JSON; none while nothing of it is there, or nobody knows how long it is.
    pub(super) fn of(transfer: &Value) -> Option<PlayableDownload> {
        let is_begun = transfer["bytes"].as_u64()? > 0;
        Some(PlayableDownload {
            transfer: transfer["id"].as_u64()?,
            part: part_path(Path::new(transfer["file"].as_str()?)),
            length: transfer["length"].as_u64()?,
        })
        .filter(|_| is_begun)
    }

    /// Opens the part at a position.
    ///
    /// # Errors
    /// `NotFound` if the download has ended meanwhile; others from the disk.
    pub(super) async fn open(&self, agent: &Arc<Agent>, from: u64) -> io::Result<GrowingFile> {
        let mut file = File::open(&self.part).await?;
        file.seek(io::SeekFrom::Start(from)).await?;
        Ok(GrowingFile {
            file,
            at: from,
            read_until: 0,
            transfer: self.transfer,
            events: agent.events.subscribe(),
            agent: agent.clone(),
            _counted: ConnectionCount::new(agent.clone()),
        })
    }
}

/// A file that a download appends to, and a position in it.
pub(super) struct GrowingFile {
    file: File,
    at: u64,
    /// End of what was read: the file is never shorter, unless the download begins anew.
    read_until: u64,
    transfer: u64,
    events: Receiver<(u64, Value)>,
    agent: Arc<Agent>,
    _counted: ConnectionCount,
}

impl GrowingFile {
    /// The next bytes before `end`, once there are some; none at `end`.
    ///
    /// # Errors
    /// The download failed, was cancelled or began anew; or from the disk.
    pub(super) async fn next(&mut self, end: u64) -> io::Result<Option<Bytes>> {
        let most = end.saturating_sub(self.at).min(PIECE_BYTES as u64);
        if most == 0 {
            return Ok(None);
        }
        loop {
            // Asked before the file is read: what came until then is in it.
            let is_coming = self.is_coming();
            let mut piece = Vec::with_capacity(most as usize);
            (&mut self.file).take(most).read_to_end(&mut piece).await?;
            if !piece.is_empty() {
                self.at += piece.len() as u64;
                self.read_until = self.at;
                return Ok(Some(piece.into()));
            }
            if !is_coming {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if self.file.metadata().await?.len() < self.read_until {
                return Err(io::Error::other("the download began anew"));
            }
            self.until_news().await;
        }
    }

    /// Whether the download goes on, or may.
    fn is_coming(&self) -> bool {
        let transfer = self.agent.show(self.transfer);
        let standing = transfer.as_ref().map(|transfer| &transfer["standing"]);
        standing.is_ok_and(|standing| {
            matches!(
                standing.as_str(),
                Some("running" | "waiting" | "queued" | "paused")
            )
        })
    }

    /// Waits until the download reports something, or for a while.
    async fn until_news(&mut self) {
        let transfer = self.transfer;
        let news = async {
            loop {
                match self.events.recv().await {
                    Ok((id, _)) if id != transfer => {}
                    Ok(_) | Err(RecvError::Lagged(_)) => return,
                    Err(RecvError::Closed) => std::future::pending().await,
                }
            }
        };
        // Nothing is lost if nothing was reported: the file is looked at again.
        let _ = timeout(LOOK_EVERY, news).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_download_can_be_played_once_it_has_begun_and_its_length_is_known() {
        let transfer = |bytes: Value, length: Value| {
            let file = "/home/me/Podcasts/a.mp3";
            PlayableDownload::of(&json!({"id": 7, "bytes": bytes, "length": length, "file": file}))
        };
        let known = transfer(json!(1), json!(10)).expect("it has begun");
        assert_eq!(known.part, Path::new("/home/me/Podcasts/a.mp3.part"));
        assert_eq!((known.transfer, known.length), (7, 10));
        assert_eq!(transfer(json!(0), json!(10)), None);
        assert_eq!(transfer(json!(1), Value::Null), None);
        assert_eq!(transfer(Value::Null, json!(10)), None);
    }
}
