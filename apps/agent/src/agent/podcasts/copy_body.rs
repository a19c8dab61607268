//! The body of an answer with an episode: one consistent copy, also while it is being fetched.
//!
//! ```text
//!  durable ════════════════╪═══════╪╌╌╌╌╌╌ missing
//!              at once     │reserve│ 16 B every 4 s while nothing else comes
//! ```
//!
//! Bytes that a crash of the agent could take back are not given away, so what an app has, the agent has. The reserve
//! keeps connections of apps alive that end silent ones, as for streams (`stream::response_body`). Browsers wait.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cedos_readycast::{EpisodeId, EpisodeState};
use tokio::time::Instant;

use super::super::idle::ConnectionCount;
use super::super::state::Agent;
use super::episode_copy::is_coming;
use crate::fetch::partial_reader::{PartialReader, PartialState};
use crate::stream::response_body::{DRIP_BYTES, DRIP_EVERY};

/// Bytes that are read at a time.
const PIECE_BYTES: u64 = 256 * 1024; // a guess

/// How often a download that goes on is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500); // a guess: more becomes durable every two seconds

/// The interval at which a download that brings nothing is checked for whether it is still wanted.
const ASK_EVERY: Duration = Duration::from_secs(2); // a guess

/// Where the bytes are.
pub(super) enum CopySource {
    /// A file that is whole: its length.
    Whole(std::fs::File, u64),
    /// A download that goes on.
    Growing(PartialReader),
}

impl CopySource {
    fn state(&self) -> PartialState {
        match self {
            CopySource::Whole(_, length) => PartialState::Whole { length: *length },
            CopySource::Growing(reader) => reader.state(),
        }
    }

    fn read(&self, at: u64, most: u64) -> std::io::Result<Vec<u8>> {
        use std::os::unix::fs::FileExt;
        let most = usize::try_from(most).map_err(std::io::Error::other)?;
        match self {
            CopySource::Whole(file, _) => {
                let mut bytes = vec![0; most];
                file.read_exact_at(&mut bytes, at)?;
                Ok(bytes)
            }
            CopySource::Growing(reader) => reader.read(at, most),
        }
    }
}

/// The body while it is sent.
pub(super) struct CopyBody {
    agent: Arc<Agent>,
    episode: EpisodeId,
    copy: Arc<CopySource>,
    at: u64,
    /// The end; none where the length is not known yet.
    to: Option<u64>,
    reserve_bytes: u64,
    /// When the last byte was sent.
    last: Instant,
    asked_at: Instant,
    _counted: ConnectionCount,
}

/// The next step of an answer that is made from the copy on disk.
enum CopyStep {
    /// There are bytes to send.
    Bytes(Vec<u8>),
    /// There is nothing to send yet.
    Wait,
    End,
}

impl CopyBody {
    /// The bytes from `at` up to `to`, of which `reserve_bytes` are kept back while more of a download is missing.
    pub(super) fn new(
        agent: Arc<Agent>,
        episode: EpisodeId,
        copy: CopySource,
        at: u64,
        to: Option<u64>,
        reserve_bytes: u64,
    ) -> CopyBody {
        let now = Instant::now();
        CopyBody {
            _counted: ConnectionCount::new(agent.clone()),
            agent,
            episode,
            copy: Arc::new(copy),
            at,
            to,
            reserve_bytes,
            last: now,
            asked_at: now,
        }
    }

    /// The next bytes; none at the end.
    ///
    /// # Errors
    /// The download started again from zero, failed, or is not wanted any longer.
    pub(super) async fn next(&mut self) -> std::io::Result<Option<Bytes>> {
        loop {
            let (copy, at, to) = (self.copy.clone(), self.at, self.to);
            let reserve = match self.last.elapsed() >= DRIP_EVERY {
                true => CopyReserve::Due(self.reserve_bytes),
                false => CopyReserve::Kept(self.reserve_bytes),
            };
            let step = tokio::task::spawn_blocking(move || step(&copy, at, to, reserve)).await;
            match step.map_err(std::io::Error::other)?? {
                CopyStep::Bytes(bytes) => {
                    self.at += bytes.len() as u64;
                    self.last = Instant::now();
                    return Ok(Some(bytes.into()));
                }
                CopyStep::End => return Ok(None),
                CopyStep::Wait => {}
            }
            if self.asked_at.elapsed() >= ASK_EVERY {
                self.asked_at = Instant::now();
                self.check_wanted().await?;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn check_wanted(&self) -> std::io::Result<()> {
        let id = self.episode;
        let episode = self.agent.podcasts.with(move |library| library.episode(id));
        let episode = episode.await.map_err(|f| std::io::Error::other(f.text))?;
        let not_wanted = || std::io::Error::other("the episode is not wanted any longer");
        let episode = episode.ok_or_else(not_wanted)?;
        if let Some(problem) = episode.summary.problem {
            return Err(std::io::Error::other(problem));
        }
        match episode.summary.state == EpisodeState::Ready || is_coming(&episode) {
            true => Ok(()),
            false => Err(not_wanted()),
        }
    }
}

/// The last bytes of what is durable, which are given singly so that a connection is not silent.
#[derive(Debug, Clone, Copy)]
enum CopyReserve {
    Kept(u64),
    /// Some of these bytes are due.
    Due(u64),
}

impl CopyReserve {
    fn bytes(self) -> u64 {
        match self {
            CopyReserve::Kept(bytes) | CopyReserve::Due(bytes) => bytes,
        }
    }

    fn is_due(self) -> bool {
        matches!(self, CopyReserve::Due(_))
    }
}

/// One look at the copy.
fn step(
    copy: &CopySource,
    at: u64,
    to: Option<u64>,
    reserve: CopyReserve,
) -> std::io::Result<CopyStep> {
    let replaced = || std::io::Error::other("the server has other bytes by now");
    let to_end = |end: u64| to.map_or(end, |to| to.min(end));
    let most = match copy.state() {
        PartialState::Replaced => return Err(replaced()),
        PartialState::Whole { length } if at >= to_end(length) => {
            return match to.is_some_and(|to| to > length) {
                true => Err(replaced()),
                false => Ok(CopyStep::End),
            };
        }
        PartialState::Whole { length } => to_end(length) - at,
        PartialState::Growing { durable_bytes } => {
            let end = to_end(durable_bytes);
            if to == Some(at) {
                return Ok(CopyStep::End);
            }
            let free = match to == Some(end) {
                true => end,
                false => end.saturating_sub(reserve.bytes()),
            };
            match (free.saturating_sub(at), end.saturating_sub(at)) {
                (0, 0) => return Ok(CopyStep::Wait),
                (0, held_back) if reserve.is_due() => held_back.min(DRIP_BYTES),
                (0, _) => return Ok(CopyStep::Wait),
                (free, _) => free,
            }
        }
    };
    let bytes = copy.read(at, most.min(PIECE_BYTES))?;
    // Only now is it certain of which edition they are.
    match copy.state() {
        PartialState::Replaced => Err(replaced()),
        _ => Ok(CopyStep::Bytes(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::sink::DownloadSink;

    fn bytes_of(step: std::io::Result<CopyStep>) -> Option<usize> {
        match step.expect("the copy is there") {
            CopyStep::Bytes(bytes) => Some(bytes.len()),
            CopyStep::Wait => Some(0),
            CopyStep::End => None,
        }
    }

    #[tokio::test]
    async fn a_reserve_of_what_is_durable_is_kept_for_a_gap() {
        let folder = tempfile::tempdir().expect("a folder");
        let destination = folder.path().join("a");
        let mut sink = DownloadSink::file(&destination, "https://h.example/a").expect("it opens");
        let reserve = 10_000;
        sink.append(&vec![7; reserve + 100]).expect("written");
        sink.sync().await.expect("synced");
        let (reader, _) = PartialReader::open(&destination).expect("some bytes");
        let copy = CopySource::Growing(reader);
        let (kept, due) = (CopyReserve::Kept(10_000), CopyReserve::Due(10_000));
        let end = reserve as u64 + 200;
        let to = Some(end);
        assert_eq!(bytes_of(step(&copy, 0, to, kept)), Some(100));
        assert_eq!(bytes_of(step(&copy, 100, to, kept)), Some(0));
        assert_eq!(
            bytes_of(step(&copy, 100, to, due)),
            Some(DRIP_BYTES as usize)
        );
        // What was asked for and is all there is not held back.
        assert_eq!(bytes_of(step(&copy, 100, Some(150), kept)), Some(50));
        assert_eq!(bytes_of(step(&copy, 150, Some(150), kept)), None);
        sink.append(&[7; 100]).expect("written");
        sink.commit(&destination, true, 0).await.expect("whole");
        assert_eq!(bytes_of(step(&copy, 100, to, kept)), Some(reserve + 100));
        assert_eq!(bytes_of(step(&copy, end, to, kept)), None);
        assert_eq!(bytes_of(step(&copy, 100, None, kept)), Some(reserve + 100));
    }

    #[tokio::test]
    async fn bytes_of_another_edition_are_not_given() {
        let folder = tempfile::tempdir().expect("a folder");
        let destination = folder.path().join("a");
        let mut sink = DownloadSink::file(&destination, "https://h.example/a").expect("it opens");
        sink.append(b"0123").expect("written");
        sink.sync().await.expect("synced");
        let (reader, _) = PartialReader::open(&destination).expect("some bytes");
        let copy = CopySource::Growing(reader);
        sink.restart().await.expect("from zero");
        sink.append(b"abcdef").expect("written");
        sink.sync().await.expect("synced");
        assert!(step(&copy, 0, Some(4), CopyReserve::Due(0)).is_err());
    }
}
