//! Packets that wait for a line, with equal shares of it for all stations that have some (deficit round
//! robin: Shreedhar and Varghese, SIGCOMM 1995).

use std::collections::{BTreeMap, VecDeque};

use crate::frame::StationAddress;

/// What a station may send more in each round, in bytes: a packet of the largest size, so that each turn
/// sends at least one.
const QUANTUM_BYTES: usize = crate::fragments::PACKET_BYTES_MAX;
/// The stations that may have packets waiting.
pub const STATIONS_MAX: usize = 256; // a guess

/// Packets of one station.
#[derive(Debug, Default)]
struct StationQueue {
    packets: VecDeque<Vec<u8>>,
    bytes: usize,
    deficit: usize,
}

/// Packets that wait, by station.
#[derive(Debug)]
pub struct FairQueue {
    stations: BTreeMap<StationAddress, StationQueue>,
    /// Stations with packets, in the order of their turns.
    turns: VecDeque<StationAddress>,
    /// The most bytes that wait for one station.
    bytes_max: usize,
}

/// The queue of a station is full, or there are too many stations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

impl FairQueue {
    /// An empty queue, in which at most `bytes_max` bytes wait for each station, and always one packet.
    pub fn new(bytes_max: usize) -> FairQueue {
        FairQueue {
            stations: BTreeMap::new(),
            turns: VecDeque::new(),
            bytes_max,
        }
    }

    /// Adds a packet.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn push(&mut self, address: StationAddress, packet: Vec<u8>) -> Result<(), QueueFull> {
        if self.turns.len() >= STATIONS_MAX && !self.stations.contains_key(&address) {
            return Err(QueueFull);
        }
        let station = self.stations.entry(address).or_default();
        if station.packets.is_empty() {
            self.turns.push_back(address);
        } else if station.bytes + packet.len() > self.bytes_max {
            return Err(QueueFull);
        }
        station.bytes += packet.len();
        station.packets.push_back(packet);
        Ok(())
    }

    /// The next packet.
    pub fn pop(&mut self) -> Option<(StationAddress, Vec<u8>)> {
        loop {
            let address = *self.turns.front()?;
            let Some(station) = self.stations.get_mut(&address) else {
                self.turns.pop_front();
                continue;
            };
            let size = station.packets.front().map_or(0, Vec::len);
            if station.deficit < size {
                // The turn is over; the next one begins with a larger deficit.
                station.deficit += QUANTUM_BYTES;
                self.turns.rotate_left(1);
                continue;
            }
            let Some(packet) = station.packets.pop_front() else {
                self.turns.pop_front();
                self.stations.remove(&address);
                continue;
            };
            station.deficit -= size;
            station.bytes -= size;
            if station.packets.is_empty() {
                self.turns.pop_front();
                self.stations.remove(&address);
            }
            return Some((address, packet));
        }
    }

    /// The next packet of a station, whose turn it is by other rules than this queue's.
    pub fn pop_of(&mut self, address: StationAddress) -> Option<Vec<u8>> {
        let station = self.stations.get_mut(&address)?;
        let packet = station.packets.pop_front()?;
        station.bytes -= packet.len();
        if station.packets.is_empty() {
            self.turns.retain(|other| *other != address);
            self.stations.remove(&address);
        }
        Some(packet)
    }

    /// Bytes that wait.
    pub fn bytes(&self) -> usize {
        self.stations.values().map(|station| station.bytes).sum()
    }

    /// Bytes of a station that wait.
    pub fn bytes_of(&self, address: StationAddress) -> usize {
        self.stations
            .get(&address)
            .map_or(0, |station| station.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_station_that_sends_much_in_large_packets_leaves_others_their_share() {
        let mut queue = FairQueue::new(1 << 20);
        for _ in 0..200 {
            queue.push(StationAddress(1), vec![1; 1_200]).unwrap();
        }
        for _ in 0..400 {
            queue.push(StationAddress(2), vec![2; 100]).unwrap();
        }
        let mut sent = [0; 3];
        while sent[2] < 30_000 {
            let (address, packet) = queue.pop().unwrap();
            sent[usize::from(address.0)] += packet.len();
        }
        let ratio = sent[1] as f64 / sent[2] as f64;
        assert!((0.8..1.25).contains(&ratio), "{sent:?}");
    }

    #[test]
    fn the_order_of_one_station_is_kept_and_an_empty_queue_holds_nothing() {
        let mut queue = FairQueue::new(10_000);
        for n in 0..9 {
            queue.push(StationAddress(5), vec![n; 1_000]).unwrap();
        }
        for n in 0..9 {
            assert_eq!(queue.pop().unwrap().1[0], n);
        }
        assert_eq!(queue.pop(), None);
        assert!(queue.stations.is_empty() && queue.turns.is_empty());
    }

    #[test]
    fn packets_of_one_station_are_taken_out_of_turn_and_the_others_keep_theirs() {
        let mut queue = FairQueue::new(10_000);
        for address in [1, 2, 1] {
            queue.push(StationAddress(address), vec![7; 100]).unwrap();
        }
        assert_eq!(queue.bytes_of(StationAddress(1)), 200);
        for _ in 0..2 {
            assert_eq!(queue.pop_of(StationAddress(1)), Some(vec![7; 100]));
        }
        assert_eq!(queue.pop_of(StationAddress(1)), None);
        assert_eq!((queue.bytes_of(StationAddress(1)), queue.bytes()), (0, 100));
        assert_eq!(
            queue.pop().map(|(address, _)| address),
            Some(StationAddress(2))
        );
        assert!(queue.stations.is_empty() && queue.turns.is_empty());
    }

    #[test]
    fn a_full_queue_refuses_but_one_packet_always_waits() {
        let mut queue = FairQueue::new(1_000);
        queue.push(StationAddress(1), vec![0; 1_400]).unwrap();
        assert_eq!(queue.push(StationAddress(1), vec![0; 10]), Err(QueueFull));
        for address in 2..=256 {
            queue.push(StationAddress(address), vec![0; 10]).unwrap();
        }
        assert_eq!(queue.push(StationAddress(300), vec![0]), Err(QueueFull));
        assert_eq!(queue.bytes(), 1_400 + 255 * 10);
    }
}
