//! Keeps a checksum of the internet's protocols right while its packet changes (RFC 1624).

/// The checksum in place of `checksum` when the bytes `before` become `after`. Both begin at an even offset of what the
/// checksum covers. A checksum that was wrong stays wrong, so that its receiver drops the packet.
pub(crate) fn changed_checksum(checksum: u16, before: &[u8], after: &[u8]) -> u16 {
    // RFC 1624 §3: HC' = ~(~HC + ~m + m').
    let sum = u32::from(!checksum) + u32::from(!sum(before)) + u32::from(sum(after));
    !folded(sum)
}

/// The ones' complement sum of bytes (RFC 1071).
pub(crate) fn sum(bytes: &[u8]) -> u16 {
    let word = |two: &[u8]| u32::from(two[0]) << 8 | two.get(1).copied().map_or(0, u32::from);
    bytes
        .chunks(2)
        .fold(0, |sum, two| folded(u32::from(sum) + word(two)))
}

fn folded(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_packet_has_the_checksum_that_it_would_be_given() {
        let mut bytes = [0x45, 0xb8, 0, 20, 0x12, 0x34, 0x40, 0, 64, 6, 10, 83, 0];
        let mut checksum = !sum(&bytes);
        for n in 0..200_u8 {
            let at = usize::from(n) % 10;
            let before = bytes;
            bytes[at] = bytes[at].wrapping_mul(31) ^ n;
            bytes[at + 1] = 0xff - n;
            checksum = changed_checksum(checksum, &before, &bytes);
            assert_eq!(checksum, !sum(&bytes), "{bytes:x?}");
            let wrong = changed_checksum(checksum ^ 1, &before, &bytes);
            assert_ne!(wrong, !sum(&bytes));
        }
    }
}
