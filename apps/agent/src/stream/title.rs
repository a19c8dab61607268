//! A title: a sequence of objects, the position of its viewer in them, and the next missing part.
//!
//! ```text
//!  film.mp4      ├─────────▼══════════╌╌╌╌╌╌╌═════╌╌╌╌╌┤        one object
//!  HLS           ├──┼──┼─▼═┼══┼═╌┼╌╌┼╌╌┼╌╌┤                      its segments, in order
//!                        ▼ the reader with the least ahead    ═ held    ╌ missing
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use d2tp_sched::PlaybackMeter;
use tokio::sync::watch;

use super::object::StreamObject;

/// How long no reader may read before the title counts as not watched, so that nothing is paid for.
const WATCHED_FOR: Duration = Duration::from_secs(30); // a guess: a player's pause between two requests

/// A piece of a title.
#[derive(Clone)]
pub struct TitlePiece {
    /// The object with the piece's bytes.
    pub object: Arc<StreamObject>,
    /// The playing time of the piece, if known.
    pub duration: Option<Duration>,
}

/// A position in a title: the piece, and the byte in it.
pub type TitlePosition = (usize, u64);

/// The range to fetch next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingRange {
    /// The index of the piece.
    pub piece: usize,
    /// The first missing byte.
    pub from: u64,
    /// The start of the next held bytes, if any.
    pub to: Option<u64>,
}

/// A snapshot of a title, for the feed.
#[derive(Debug, Clone, PartialEq)]
pub struct TitleView {
    /// The position of the reader.
    pub at: TitlePosition,
    /// Bytes held from there on without a gap.
    pub held_bytes: u64,
    /// The next missing range; none if all is held.
    pub missing: Option<MissingRange>,
    /// Bytes that are not held yet, if known.
    pub to_come: Option<u64>,
    /// Whether a reader is active.
    pub is_watched: bool,
    /// Whether a reader waits for missing bytes.
    pub is_starved: bool,
}

struct TitleState {
    pieces: Vec<TitlePiece>,
    /// The position of the last reader.
    rest: TitlePosition,
    read_at: Option<Duration>,
    pace: PlaybackMeter,
    why: String,
}

/// A title: pieces that are played in order.
pub struct StreamTitle {
    /// The name for users.
    pub name: String,
    /// Whether the title is fetched ahead only while it is watched, because it is one of several
    /// alternatives.
    pub only_watched: bool,
    state: Mutex<TitleState>,
    news: watch::Sender<()>,
}

impl StreamTitle {
    /// A title of these pieces, watched at `pace`.
    pub fn new(name: String, pieces: Vec<TitlePiece>, pace: PlaybackMeter) -> Arc<StreamTitle> {
        StreamTitle::with(name, pieces, pace, false)
    }

    /// Creates one of several alternative titles of these pieces.
    pub fn while_watched(
        name: String,
        pieces: Vec<TitlePiece>,
        pace: PlaybackMeter,
    ) -> Arc<StreamTitle> {
        StreamTitle::with(name, pieces, pace, true)
    }

    fn with(
        name: String,
        pieces: Vec<TitlePiece>,
        pace: PlaybackMeter,
        only_watched: bool,
    ) -> Arc<StreamTitle> {
        let state = TitleState {
            pieces,
            rest: (0, 0),
            read_at: None,
            pace,
            why: "nothing requested yet".into(),
        };
        Arc::new(StreamTitle {
            name,
            only_watched,
            state: Mutex::new(state),
            news: watch::Sender::new(()),
        })
    }

    fn state(&self) -> MutexGuard<'_, TitleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notified whenever a reader begins.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    /// The pieces of the title, in order.
    pub fn pieces(&self) -> Vec<TitlePiece> {
        self.state().pieces.clone()
    }

    /// Replaces the pieces; known ones keep their positions.
    pub fn set_pieces(&self, pieces: Vec<TitlePiece>) {
        let mut state = self.state();
        let here = state.pieces.get(state.rest.0).map(|p| p.object.url.clone());
        let moved = here.and_then(|url| pieces.iter().position(|p| p.object.url == url));
        state.rest = moved.map_or((0, 0), |n| (n, state.rest.1));
        state.pieces = pieces;
        drop(state);
        self.news.send_replace(());
    }

    /// Calls `f` with the playback meter.
    pub fn pace<R>(&self, f: impl FnOnce(&mut PlaybackMeter) -> R) -> R {
        f(&mut self.state().pace)
    }

    /// Why the title is fetched as it is, in words.
    pub fn reason(&self) -> String {
        self.state().why.clone()
    }

    /// Sets the reason. True if it changed.
    pub fn set_reason(&self, why: &str) -> bool {
        let mut state = self.state();
        let other = state.why != why;
        if other {
            state.why = why.to_owned();
        }
        other
    }

    /// Handles a new reader at `at` of this object.
    pub fn on_reader(&self, now: Duration, object: &Arc<StreamObject>, at: u64) {
        let mut state = self.state();
        let Some(piece) = state.place_of(object) else {
            return;
        };
        let goes_on = state.rest == (piece, at)
            || (at == 0 && piece == state.rest.0 + 1 && state.rest_is_end());
        if !goes_on {
            state.pace.on_seek(now);
        }
        state.rest = (piece, at);
        state.read_at = Some(now);
        drop(state);
        self.news.send_replace(());
    }

    /// Handles a read of `bytes` by a reader that is now at `at`.
    pub fn on_taken(&self, now: Duration, object: &Arc<StreamObject>, at: u64, bytes: u64) {
        let mut state = self.state();
        state.pace.on_read(now, bytes);
        state.read_at = Some(now);
        if let Some(piece) = state.place_of(object) {
            state.rest = (piece, at);
        }
    }

    /// A snapshot of the title.
    pub fn view(&self, now: Duration) -> TitleView {
        let mut state = self.state();
        state.pace.advance(now);
        let mut readers = Vec::new();
        for (n, piece) in state.pieces.iter().enumerate() {
            readers.extend(piece.object.readers().into_iter().map(|at| (n, at)));
        }
        let is_read = !readers.is_empty();
        let recent = |at: Duration| now.saturating_sub(at) < WATCHED_FOR;
        let is_watched = is_read || state.read_at.is_some_and(recent);
        if readers.is_empty() {
            readers.push(state.rest);
        }
        let walks = readers.into_iter().map(|at| (at, state.walk(at)));
        let least = walks.min_by_key(|(_, (held, missing))| (missing.is_none(), *held));
        let (at, (held_bytes, missing)) = least.expect("one at least");
        let waits = is_read && missing.is_some() && held_bytes == 0;
        state.pace.note_starvation(now, waits);
        TitleView {
            at,
            held_bytes,
            to_come: state.to_come(at).map(|all| all.saturating_sub(held_bytes)),
            missing,
            is_watched,
            is_starved: waits,
        }
    }

    /// Bytes held of the whole title.
    pub fn held_bytes(&self) -> u64 {
        let pieces = self.pieces();
        pieces.iter().map(|piece| piece.object.held_bytes()).sum()
    }

    /// Frees `bytes` of watched data.
    pub fn release(&self, bytes: u64) {
        let (pieces, readers) = {
            let state = self.state();
            (state.pieces.clone(), state.rest)
        };
        let mut left = bytes;
        for (n, piece) in pieces.iter().enumerate().take(readers.0 + 1) {
            let before = if n < readers.0 { u64::MAX } else { readers.1 };
            let read = piece.object.readers().into_iter().min();
            let before = before.min(read.unwrap_or(u64::MAX));
            left = left.saturating_sub(piece.object.release_below(before, left));
            if left == 0 {
                return;
            }
        }
    }
}

impl TitleState {
    fn place_of(&self, object: &Arc<StreamObject>) -> Option<usize> {
        self.pieces
            .iter()
            .position(|piece| Arc::ptr_eq(&piece.object, object))
    }

    fn rest_is_end(&self) -> bool {
        let piece = self.pieces.get(self.rest.0);
        piece.is_some_and(|piece| piece.object.length() == Some(self.rest.1))
    }

    /// The bytes held from `at` on without a gap, and the missing range after them.
    fn walk(&self, (first, from): TitlePosition) -> (u64, Option<MissingRange>) {
        let (mut held, mut from) = (0, from);
        for (n, piece) in self.pieces.iter().enumerate().skip(first) {
            let (end, next) = piece.object.held_from(from);
            held += end - from;
            let is_whole = piece.object.length().is_some_and(|length| end >= length);
            if !is_whole {
                let missing = MissingRange {
                    piece: n,
                    from: end,
                    to: next,
                };
                return (held, Some(missing));
            }
            from = 0;
        }
        (held, None)
    }

    /// Bytes after `at`, if all lengths are known.
    fn to_come(&self, (first, from): TitlePosition) -> Option<u64> {
        let rest = self.pieces.iter().skip(first);
        let lengths: Option<u64> = rest.map(|piece| piece.object.length()).sum();
        lengths.map(|all| all.saturating_sub(from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::exchange::{ContentPart, FetchResponse};

    struct Rig {
        _root: tempfile::TempDir,
        title: Arc<StreamTitle>,
        pieces: Vec<TitlePiece>,
    }

    fn rig(lengths: &[u64]) -> Rig {
        let root = tempfile::tempdir().unwrap();
        let piece = |(n, length): (usize, &u64)| {
            let url = format!("https://o.example/{n}").parse().unwrap();
            let object = StreamObject::open(root.path(), url).unwrap();
            let (ours, _) = tokio::io::duplex(1);
            let mut answer = FetchResponse::continued(Box::new(ours), 0, None, None);
            answer.part = ContentPart::Whole(Some(*length));
            object.accept(&answer).unwrap();
            let plays = None;
            TitlePiece {
                object,
                duration: plays,
            }
        };
        let pieces: Vec<TitlePiece> = lengths.iter().enumerate().map(piece).collect();
        let title = StreamTitle::new("t".into(), pieces.clone(), PlaybackMeter::new(Some(10.0)));
        Rig {
            _root: root,
            title,
            pieces,
        }
    }

    const NOW: Duration = Duration::from_secs(100);

    #[test]
    fn what_is_missing_follows_the_reader_through_what_is_held() {
        let rig = rig(&[100]);
        let object = &rig.pieces[0].object;
        let missing = |from, to| {
            let piece = 0;
            Some(MissingRange { piece, from, to })
        };
        let view = rig.title.view(NOW);
        assert_eq!((view.missing, view.to_come), (missing(0, None), Some(100)));
        assert!(!view.is_watched);
        object.put(0, &[1; 10]).unwrap();
        object.put(50, &[1; 10]).unwrap();
        let reading = object.read_from(4);
        let view = rig.title.view(NOW);
        assert_eq!((view.held_bytes, view.missing), (6, missing(10, Some(50))));
        assert_eq!(view.to_come, Some(90));
        assert!(view.is_watched && !view.is_starved);
        // Seeking beyond what is held re-orders what is fetched.
        let far = object.read_from(80);
        let view = rig.title.view(NOW);
        assert_eq!((view.at, view.missing), ((0, 80), missing(80, None)));
        assert!(view.is_starved);
        drop((reading, far));
        object.put(10, &[1; 90]).unwrap();
        assert_eq!(rig.title.view(NOW).missing, None);
    }

    #[test]
    fn segments_are_one_stream() {
        let rig = rig(&[10, 10, 10]);
        rig.pieces[0].object.put(0, &[1; 10]).unwrap();
        rig.pieces[1].object.put(0, &[1; 4]).unwrap();
        let reading = rig.pieces[0].object.read_from(5);
        let view = rig.title.view(NOW);
        assert_eq!((view.held_bytes, view.to_come), (9, Some(16)));
        let missing = view.missing.unwrap();
        assert_eq!((missing.piece, missing.from), (1, 4));
        drop(reading);
        // Between two requests the place is kept.
        rig.title.on_taken(NOW, &rig.pieces[0].object, 10, 5);
        assert_eq!(rig.title.view(NOW).at, (0, 10));
        rig.title.set_pieces(rig.pieces[1..].to_vec());
        assert_eq!(rig.title.view(NOW).at, (0, 0));
    }

    #[test]
    fn only_a_reader_that_jumps_empties_the_players_own_buffer() {
        let rig = rig(&[10, 10]);
        let (a, b) = (&rig.pieces[0].object, &rig.pieces[1].object);
        rig.title.on_reader(NOW, a, 0);
        rig.title.on_taken(NOW, a, 10, 10);
        rig.title.on_reader(NOW, b, 0);
        assert_eq!(rig.title.pace(|pace| pace.in_player()), 10);
        rig.title.on_reader(NOW, b, 5);
        assert_eq!(rig.title.pace(|pace| pace.in_player()), 0);
    }

    #[test]
    fn what_was_watched_makes_room() {
        let rig = rig(&[1 << 20]);
        let object = &rig.pieces[0].object;
        object.put(0, &vec![1; 1 << 20]).unwrap();
        rig.title.on_taken(NOW, object, 1 << 19, 1);
        rig.title.release(1 << 18);
        let left = rig.title.held_bytes();
        assert!(left == (1 << 20) - (1 << 18) || left == 1 << 20, "{left}");
        rig.title.release(u64::MAX);
        assert!(rig.title.held_bytes() >= 1 << 19);
    }
}
