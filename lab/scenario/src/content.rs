//! The content of flows: generated from a seed, each byte from its offset alone, so that either end
//! can continue from any offset and a reader can verify the bytes.

use sha2::{Digest, Sha256};

/// The number of bytes generated from one draw.
const BLOCK_BYTES: u64 = 8;

/// Fills `out` with the bytes from `offset` on.
///
/// ```
/// let mut whole = [0; 100];
/// cedos_lab_scenario::content::fill(7, 0, &mut whole);
/// let mut part = [0; 10];
/// cedos_lab_scenario::content::fill(7, 33, &mut part);
/// assert_eq!(part, whole[33..43]);
/// ```
pub fn fill(seed: u64, offset: u64, out: &mut [u8]) {
    let mut at = offset;
    let mut rest = out;
    while !rest.is_empty() {
        let block = draw(seed, at / BLOCK_BYTES).to_le_bytes();
        let from = &block[(at % BLOCK_BYTES) as usize..];
        let taken = from.len().min(rest.len());
        rest[..taken].copy_from_slice(&from[..taken]);
        rest = &mut rest[taken..];
        at += taken as u64;
    }
}

/// SplitMix64's output number `index`. // Steele, Lea, Flood 2014
// Not rand_pcg: each byte follows from its offset alone, and kill points of known seeds are drawn here.
fn draw(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The SHA-256 of the first `bytes` bytes.
pub fn sha256(seed: u64, bytes: u64) -> [u8; 32] {
    let mut digest = Sha256::new();
    let mut chunk = vec![0; 1 << 16];
    let mut offset = 0;
    while offset < bytes {
        let taken = (bytes - offset).min(chunk.len() as u64) as usize;
        fill(seed, offset, &mut chunk[..taken]);
        digest.update(&chunk[..taken]);
        offset += taken as u64;
    }
    digest.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_equals_that_part_of_the_whole() {
        let mut whole = [0; 100];
        fill(7, 0, &mut whole);
        let mut part = [0; 31];
        fill(7, 33, &mut part);
        assert_eq!(part, whole[33..64]);
        fill(8, 33, &mut part);
        assert_ne!(part, whole[33..64]);
    }
}
