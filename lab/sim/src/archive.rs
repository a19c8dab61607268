//! The memory of an eavesdropper: a sample of all datagrams that were sent towards an end, for
//! replays.

use std::net::SocketAddr;

use cedos_lab_link::seeded;
use rand::Rng;
use rand_pcg::Pcg32;

/// The datagrams kept for each direction; all datagrams have the same chance to be among them.
const KEPT_MAX: usize = 512;
/// The random streams of the archives; links use lower ones.
const ARCHIVE_STREAM: u64 = (1 << 32) + 16;

/// A datagram as it was sent.
#[derive(Clone, Debug)]
pub(crate) struct DatagramCopy {
    pub link: usize,
    pub from: SocketAddr,
    pub bytes: Vec<u8>,
}

/// A sample of the datagrams of one direction.
pub(crate) struct Archive {
    kept: Vec<DatagramCopy>,
    seen: u64,
    rng: Pcg32,
}

impl Archive {
    /// Archive number `number` of a run with this seed.
    pub(crate) fn new(seed: u64, number: u64) -> Archive {
        Archive {
            kept: Vec::new(),
            seen: 0,
            rng: seeded(seed, ARCHIVE_STREAM + number),
        }
    }

    /// Adds a datagram to the sample, at random.
    pub(crate) fn offer(&mut self, link: usize, from: SocketAddr, bytes: &[u8]) {
        self.seen += 1;
        let copy = || DatagramCopy {
            link,
            from,
            bytes: bytes.to_vec(),
        };
        if self.kept.len() < KEPT_MAX {
            self.kept.push(copy());
        } else {
            let place = self.rng.random_range(0..self.seen);
            if place < KEPT_MAX as u64 {
                self.kept[place as usize] = copy();
            }
        }
    }

    /// Draws one of the kept datagrams.
    pub(crate) fn draw(&mut self) -> Option<DatagramCopy> {
        if self.kept.is_empty() {
            return None;
        }
        let place = self.rng.random_range(0..self.kept.len());
        Some(self.kept[place].clone())
    }

    /// An address that no host had so far.
    pub(crate) fn elsewhere(&mut self) -> SocketAddr {
        // RFC 5737's third block for documentation.
        let [host, high, low] = self.rng.random::<[u8; 3]>();
        let port = u16::from_be_bytes([high | 0x40, low]);
        SocketAddr::from(([192, 0, 2, host], port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_and_early_datagrams_are_kept_and_never_more_than_the_bound() {
        let mut archive = Archive::new(1, 0);
        assert!(archive.draw().is_none());
        let from = archive.elsewhere();
        for n in 0..5_000_u32 {
            archive.offer(0, from, &n.to_be_bytes());
        }
        assert_eq!(archive.kept.len(), KEPT_MAX);
        let number = |c: &DatagramCopy| u32::from_be_bytes(c.bytes[..].try_into().unwrap());
        let late = archive.kept.iter().filter(|c| number(c) >= 2_500).count();
        assert!((150..360).contains(&late), "{late}");
    }
}
