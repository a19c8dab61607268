//! A body of some megabytes that is a thousand times as large when it is unpacked.

use std::io::Write;
use std::sync::LazyLock;

use flate2::Compression;
use flate2::write::GzEncoder;

/// What one member of a packed body has when it is unpacked.
const MEMBER_BYTES: usize = 16 << 20;
/// Members of a packed body (RFC 1952 §2.2): 4 GiB when it is unpacked.
const MEMBERS: usize = 256;

/// A packed body of some megabytes, and of 4 GiB when it is unpacked.
static BOMB: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut member = GzEncoder::new(Vec::new(), Compression::best());
    let zeros = vec![0; MEMBER_BYTES];
    member.write_all(&zeros).expect("memory takes everything");
    let member = member.finish().expect("memory takes everything");
    member.repeat(MEMBERS)
});

/// A packed body that is a thousand times as large when it is unpacked.
pub fn bomb() -> &'static [u8] {
    &BOMB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bomb_is_a_thousand_times_as_large_when_it_is_unpacked() {
        // It reads the first member alone.
        let mut first = flate2::read::GzDecoder::new(bomb());
        let unpacked = std::io::copy(&mut first, &mut std::io::sink()).expect("it is packed");
        assert_eq!(unpacked, MEMBER_BYTES as u64);
        assert!(bomb().len() * 1_000 < MEMBERS * MEMBER_BYTES);
    }
}
