//! The body of a response to a player, which never pauses for long.
//!
//! ```text
//!  held ═══════════════╪════════╪╌╌╌╌╌╌╌ missing
//!        at once       │ reserve│
//!                      │ 16 B every 4 s, while nothing else comes
//! ```
//!
//! Players give a silent connection up: after 8 s (Media3), 10 s (hls.js), 60 s (mpv). So the last held
//! bytes before a gap are a reserve that is dripped. [`RESERVE_BYTES`] by [`DRIP_BYTES`] every
//! [`DRIP_EVERY`] last four and a half hours. The player may have nothing to show by then, but its
//! connection stands, and goes on by itself. What is asked for and held in full is handed over at once.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::object::{ObjectRead, ObjectReader};
use super::title::StreamTitle;
use crate::fetch::boot_clock::BootInstant;

/// Bytes held back before a gap. Higher: the first bytes after a seek come later; lower: players
/// survive shorter gaps.
pub const RESERVE_BYTES: u64 = 64 * 1024; // a guess: a tenth of a second at 6 Mb/s

/// Bytes of the reserve that are sent at a time.
pub const DRIP_BYTES: u64 = 16; // a guess

/// The interval at which the reserve is sent: half of what the least patient player waits.
pub const DRIP_EVERY: Duration = Duration::from_secs(4); // Media3's DEFAULT_READ_TIMEOUT_MILLIS is 8000

/// Bytes that are sent at a time.
const PIECE_BYTES: u64 = 64 * 1024;

/// A part of a response body.
#[derive(Debug)]
pub enum ResponsePart {
    /// Text that is no part of an object.
    Text(Bytes),
    /// Bytes of the object, from the first up to, not including, the second.
    Range(u64, u64),
}

/// The body of a response while it is sent.
pub struct ResponseBody {
    reading: ObjectReader,
    title: Arc<StreamTitle>,
    news: watch::Receiver<()>,
    out: VecDeque<ResponsePart>,
    /// When the last byte was sent.
    last: Instant,
    begun: BootInstant,
}

impl ResponseBody {
    /// The body of a response that consists of these parts of an object.
    pub fn new(
        reading: ObjectReader,
        title: Arc<StreamTitle>,
        out: VecDeque<ResponsePart>,
        begun: BootInstant,
    ) -> ResponseBody {
        ResponseBody {
            news: reading.object().changes(),
            reading,
            title,
            out,
            last: Instant::now(),
            begun,
        }
    }

    /// The next bytes; none at the end.
    ///
    /// # Errors
    /// The object is another one now: what was handed over cannot be completed.
    pub async fn next(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            let (from, to) = match self.out.front_mut() {
                None => return Ok(None),
                Some(ResponsePart::Text(words)) => {
                    let words = std::mem::take(words);
                    self.out.pop_front();
                    return Ok(Some(words));
                }
                Some(ResponsePart::Range(from, to)) => (*from, *to),
            };
            if self.reading.at != from {
                self.reading.seek(from);
            }
            self.news.borrow_and_update();
            let (end, is_all) = self.reading.readable_until(to);
            let free = match is_all {
                true => end,
                false => end.saturating_sub(RESERVE_BYTES),
            };
            let held_back = end.saturating_sub(free.max(from));
            let dripped = match self.last.elapsed() >= DRIP_EVERY && free <= from {
                true => held_back.min(DRIP_BYTES),
                false => 0,
            };
            let most = free.saturating_sub(from).min(PIECE_BYTES).max(dripped);
            if most > 0 || to == from || is_all {
                match self.reading.take(most.min(to - from)) {
                    ObjectRead::Bytes(bytes) => return Ok(Some(self.hand(bytes, to))),
                    ObjectRead::Broken => return Err(io::Error::other("other bytes by now")),
                    ObjectRead::End => {
                        // Nobody knew how long it is, and here it ends.
                        self.out.pop_front();
                        continue;
                    }
                    ObjectRead::NotYet if to == from => {
                        self.out.pop_front();
                        continue;
                    }
                    ObjectRead::NotYet => {}
                }
            }
            let again = self.last + DRIP_EVERY;
            let again = match held_back > 0 && again > Instant::now() {
                true => again,
                false => Instant::now() + DRIP_EVERY,
            };
            let _ = timeout_at(again, self.news.changed()).await;
        }
    }

    fn hand(&mut self, bytes: Bytes, to: u64) -> Bytes {
        self.last = Instant::now();
        let at = self.reading.at;
        match at >= to {
            true => drop(self.out.pop_front()),
            false => self.out[0] = ResponsePart::Range(at, to),
        }
        let now = BootInstant::now().since(self.begun);
        let object = self.reading.object().clone();
        self.title.on_taken(now, &object, at, bytes.len() as u64);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::exchange::{ContentPart, FetchResponse};
    use crate::stream::object::StreamObject;
    use crate::stream::title::TitlePiece;
    use d2tp_sched::PlaybackMeter;

    struct Rig {
        _root: tempfile::TempDir,
        object: Arc<StreamObject>,
        title: Arc<StreamTitle>,
    }

    fn rig(length: Option<u64>) -> Rig {
        let root = tempfile::tempdir().unwrap();
        let url = "https://o.example/a".parse().unwrap();
        let object = StreamObject::open(root.path(), url).unwrap();
        let (ours, _) = tokio::io::duplex(1);
        let mut answer = FetchResponse::continued(Box::new(ours), 0, None, None);
        answer.part = ContentPart::Whole(length);
        object.accept(&answer).unwrap();
        let plays = None;
        let piece = TitlePiece {
            object: object.clone(),
            duration: plays,
        };
        let title = StreamTitle::new("t".into(), vec![piece], PlaybackMeter::new(Some(1e5)));
        Rig {
            _root: root,
            object,
            title,
        }
    }

    impl Rig {
        fn handing(&self, out: Vec<ResponsePart>) -> ResponseBody {
            let reading = self.object.read_from(0);
            ResponseBody::new(reading, self.title.clone(), out.into(), BootInstant::now())
        }
    }

    async fn all(handing: &mut ResponseBody) -> Vec<u8> {
        let mut got = Vec::new();
        while let Some(bytes) = handing.next().await.unwrap() {
            got.extend(bytes);
        }
        got
    }

    #[tokio::test(start_paused = true)]
    async fn a_player_with_eight_seconds_of_patience_outlives_a_gap_of_three_minutes() {
        let rig = rig(Some(1 << 20));
        rig.object.put(0, &vec![7; 200_000]).unwrap();
        let mut handing = rig.handing(vec![ResponsePart::Range(0, 1 << 20)]);
        let begun = Instant::now();
        let (mut got, mut longest) = (0u64, Duration::ZERO);
        while begun.elapsed() < Duration::from_secs(180) {
            let asked = Instant::now();
            got += handing
                .next()
                .await
                .unwrap()
                .expect("more is to come")
                .len() as u64;
            longest = longest.max(asked.elapsed());
        }
        assert!(longest < Duration::from_secs(8), "{longest:?}");
        assert!(got < 140_000, "a reserve is left: {got}");
        // As soon as more is there, it comes at once.
        rig.object
            .put(200_000, &vec![7; (1 << 20) - 200_000])
            .unwrap();
        let asked = Instant::now();
        got += all(&mut handing).await.len() as u64;
        assert_eq!((got, asked.elapsed()), (1 << 20, Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn the_reserve_lasts_for_hours() {
        let drips = RESERVE_BYTES / DRIP_BYTES;
        assert!(DRIP_EVERY * drips as u32 >= Duration::from_secs(4 * 3600));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_asked_for_and_held_is_not_held_back() {
        let rig = rig(Some(1 << 20));
        rig.object.put(0, b"0123456789").unwrap();
        let parts = vec![
            ResponsePart::Text(Bytes::from_static(b"--")),
            ResponsePart::Range(8, 10),
            ResponsePart::Text(Bytes::from_static(b"--")),
            ResponsePart::Range(0, 2),
        ];
        let mut handing = rig.handing(parts);
        let begun = Instant::now();
        assert_eq!(all(&mut handing).await, b"--89--01");
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_of_unknown_length_is_handed_to_its_end() {
        let rig = rig(None);
        rig.object.put(0, b"0123").unwrap();
        let mut handing = rig.handing(vec![ResponsePart::Range(0, u64::MAX)]);
        let object = rig.object.clone();
        tokio::spawn(async move {
            // sleep: time is paused; bytes that come late are the subject
            tokio::time::sleep(Duration::from_secs(9)).await;
            object.put(4, b"45").unwrap();
            object.set_end(6);
        });
        assert_eq!(all(&mut handing).await, b"012345");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_of_other_bytes_breaks_off() {
        let rig = rig(Some(100));
        rig.object.put(0, b"0123").unwrap();
        let mut handing = rig.handing(vec![ResponsePart::Range(0, 4), ResponsePart::Range(50, 60)]);
        assert!(handing.next().await.unwrap().is_some());
        let (ours, _) = tokio::io::duplex(1);
        let mut answer = FetchResponse::continued(Box::new(ours), 0, None, None);
        answer.part = ContentPart::Whole(Some(99));
        rig.object.accept(&answer).unwrap();
        rig.object.put(0, &[9; 99]).unwrap();
        assert!(handing.next().await.is_err());
    }
}
