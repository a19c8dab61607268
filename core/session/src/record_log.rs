//! The encoded records of hibernated sessions, packed into segments.
//!
//! ```text
//!  segment   owner length record │ owner length record │ … │ room
//!  removal   the entry becomes a gap; what a segment of mostly gaps still has moves to the open segment
//! ```
//!
//! A record takes some hundred bytes and stays for days. Allocated by itself it lies where there was room at that
//! moment, between the buffers of sessions that were awake, and keeps the page around it from the system when those
//! are gone: of a hundred thousand records most then held a page each. In segments they lie side by side.

use slab::Slab;

/// The size of a segment, in bytes: so large that allocators take it from the system by itself, and give it back whole.
const SEGMENT_BYTES: usize = 256 * 1024;
/// The bytes before a record: its owner, and its length.
const HEADER_BYTES: usize = 8;
/// The owner of a gap.
const NOBODY: u32 = u32::MAX;
/// A segment is emptied when less than this part of it is in use.
const USED_PART_MIN: usize = 4; // a quarter: each byte is moved about once for three that were removed

/// Where a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordPlace {
    segment: u32,
    at: u32,
}

#[derive(Debug)]
struct RecordSegment {
    bytes: Vec<u8>,
    /// Bytes of entries that are no gaps.
    used: usize,
}

/// Records, each with a number that its owner chose.
#[derive(Debug, Default)]
pub(crate) struct RecordLog {
    segments: Slab<RecordSegment>,
    /// The segment that the next record goes to.
    open: Option<u32>,
}

impl RecordLog {
    /// The record at this place.
    pub(crate) fn get(&self, place: RecordPlace) -> &[u8] {
        let bytes = &self.segments[place.segment as usize].bytes;
        let (_, record) = entry(&bytes[place.at as usize..]);
        record
    }

    /// Adds a record.
    ///
    /// # Panics
    /// The record has 4 GiB or more.
    pub(crate) fn insert(&mut self, owner: u32, record: &[u8]) -> RecordPlace {
        let length = u32::try_from(record.len()).expect("records are small");
        let size = HEADER_BYTES + record.len();
        let number = self.segment_for(size);
        let segment = &mut self.segments[number as usize];
        let at = segment.bytes.len() as u32;
        segment.bytes.extend_from_slice(&owner.to_ne_bytes());
        segment.bytes.extend_from_slice(&length.to_ne_bytes());
        segment.bytes.extend_from_slice(record);
        segment.used += size;
        RecordPlace {
            segment: number,
            at,
        }
    }

    /// Removes a record. `moved` hears of every other record that is at another place now: its owner and the place.
    pub(crate) fn remove(&mut self, place: RecordPlace, mut moved: impl FnMut(u32, RecordPlace)) {
        let segment = &mut self.segments[place.segment as usize];
        let at = place.at as usize;
        let size = HEADER_BYTES + entry(&segment.bytes[at..]).1.len();
        segment.bytes[at..at + 4].copy_from_slice(&NOBODY.to_ne_bytes());
        segment.used -= size;
        let is_open = self.open == Some(place.segment);
        if segment.used == 0 && is_open {
            segment.bytes.clear();
        }
        if is_open || segment.used * USED_PART_MIN >= segment.bytes.len() {
            return;
        }
        let emptied = self.segments.remove(place.segment as usize).bytes;
        let mut rest = &emptied[..];
        while !rest.is_empty() {
            let (owner, record) = entry(rest);
            if owner != NOBODY {
                moved(owner, self.insert(owner, record));
            }
            rest = &rest[HEADER_BYTES + record.len()..];
        }
    }

    /// The number of a segment with room for an entry.
    fn segment_for(&mut self, size: usize) -> u32 {
        let has_room = |number: &u32| {
            let bytes = &self.segments[*number as usize].bytes;
            bytes.len() + size <= bytes.capacity()
        };
        if let Some(open) = self.open.filter(has_room) {
            return open;
        }
        let segment = RecordSegment {
            bytes: Vec::with_capacity(size.max(SEGMENT_BYTES)),
            used: 0,
        };
        let number = self.segments.insert(segment) as u32;
        // One that became all gaps while it was open is of no use any more.
        if let Some(before) = self.open.replace(number)
            && self.segments[before as usize].used == 0
        {
            self.segments.remove(before as usize);
        }
        number
    }
}

/// The entry at the start of these bytes: its owner and its record.
fn entry(bytes: &[u8]) -> (u32, &[u8]) {
    let word = |at: usize| {
        let bytes = bytes[at..at + 4].try_into().expect("four bytes");
        u32::from_ne_bytes(bytes)
    };
    let end = HEADER_BYTES + word(4) as usize;
    (word(0), &bytes[HEADER_BYTES..end])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::SeedableRng;
    use rand::seq::SliceRandom;

    use super::*;

    fn record(owner: u32) -> Vec<u8> {
        vec![owner as u8; 100 + owner as usize % 200]
    }

    fn assert_kept(log: &RecordLog, places: &BTreeMap<u32, RecordPlace>) {
        for (owner, place) in places {
            assert_eq!(log.get(*place), record(*owner), "{owner}");
        }
    }

    #[test]
    fn records_stay_readable_while_others_come_and_go_and_gaps_take_no_more_than_three_times_their_room()
     {
        let mut rng = rand_pcg::Pcg32::seed_from_u64(5);
        let (mut log, mut places) = (RecordLog::default(), BTreeMap::new());
        let mut next = 0;
        for wanted in [20_000, 500, 20_000, 1, 10_000, 0] {
            while places.len() < wanted {
                places.insert(next, log.insert(next, &record(next)));
                next += 1;
            }
            let mut owners: Vec<u32> = places.keys().copied().collect();
            // What is drawn must not depend on the order of the map.
            owners.sort_unstable();
            owners.shuffle(&mut rng);
            for owner in owners.into_iter().skip(wanted) {
                let place = places.remove(&owner).expect("it is there");
                log.remove(place, |owner, place| {
                    *places.get_mut(&owner).expect("it was not removed") = place;
                });
            }
            assert_kept(&log, &places);
            let used: usize = places
                .keys()
                .map(|owner| record(*owner).len() + HEADER_BYTES)
                .sum();
            let held = log.segments.len() * SEGMENT_BYTES;
            // Beside the open one, each is a quarter full at least.
            assert!(
                held <= USED_PART_MIN * used + 2 * SEGMENT_BYTES,
                "{held} for {used}"
            );
        }
    }

    #[test]
    fn a_record_larger_than_a_segment_has_its_own() {
        let mut log = RecordLog::default();
        let small = log.insert(1, &[1; 10]);
        let large = log.insert(2, &vec![2; 3 * SEGMENT_BYTES]);
        let after = log.insert(3, &[3; 10]);
        assert_eq!(log.get(large).len(), 3 * SEGMENT_BYTES);
        log.remove(large, |_, _| unreachable!("nothing else is in it"));
        assert_eq!(log.get(small), [1; 10]);
        assert_eq!(log.get(after), [3; 10]);
    }
}
