//! Marks packets "congestion experienced" in place of dropping them (RFC 3168).

use crate::internet_checksum::changed_checksum;

/// The two ECN bits of a packet whose sender is told by a mark.
const ECT_1: u8 = 0b01;
const ECT_0: u8 = 0b10;
const CE: u8 = 0b11;

/// Marks a packet of IPv4 or IPv6 if its sender understands marks. Returns whether it is marked now.
pub(crate) fn mark_congestion(packet: &mut [u8]) -> bool {
    match packet.first().map(|first| first >> 4) {
        Some(4) if packet.len() >= 20 => mark_v4(packet),
        Some(6) if packet.len() >= 40 => mark_v6(packet),
        _ => false,
    }
}

fn understands(ecn: u8) -> bool {
    matches!(ecn, ECT_0 | ECT_1 | CE)
}

fn mark_v4(packet: &mut [u8]) -> bool {
    let before = [packet[0], packet[1]];
    if !understands(packet[1] & CE) {
        return false;
    }
    packet[1] |= CE;
    let checksum = u16::from_be_bytes([packet[10], packet[11]]);
    let checksum = changed_checksum(checksum, &before, &packet[..2]);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    true
}

fn mark_v6(packet: &mut [u8]) -> bool {
    // The traffic class lies across the first two bytes; its last two bits are bits 4 and 5 of the second one.
    if !understands(packet[1] >> 4 & CE) {
        return false;
    }
    packet[1] |= CE << 4;
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::internet_checksum::sum;

    /// A header of IPv4 with a right checksum.
    fn header(tos: u8) -> Vec<u8> {
        let mut bytes = vec![0x45, tos, 0, 20, 0x12, 0x34, 0x40, 0, 64, 6, 0, 0];
        bytes.extend([10, 83, 0, 2, 192, 0, 2, 1]);
        let sum = !sum(&bytes);
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    #[test]
    fn who_understands_marks_gets_one_and_the_checksum_stays_right() {
        for dscp in [0, 0b1011_1000, 0b1111_1100] {
            for ecn in [ECT_0, ECT_1, CE] {
                let mut packet = header(dscp | ecn);
                assert!(mark_congestion(&mut packet));
                assert_eq!(packet[1], dscp | CE);
                assert_eq!(sum(&packet), 0xffff, "{packet:x?}");
            }
            let mut packet = header(dscp);
            assert!(!mark_congestion(&mut packet), "not ECN-capable");
            assert_eq!(packet, header(dscp));
        }
    }

    #[test]
    fn ipv6_is_marked_and_what_is_no_packet_is_left_alone() {
        let mut packet = vec![0; 40];
        (packet[0], packet[1]) = (0x6b, 0x8a | ECT_0 << 4);
        assert!(mark_congestion(&mut packet));
        assert_eq!((packet[0], packet[1]), (0x6b, 0xba));
        packet[1] = 0x8a & 0x0f;
        assert!(!mark_congestion(&mut packet));
        assert!(!mark_congestion(&mut packet[..39].to_vec()));
        assert!(!mark_congestion(&mut []));
        assert!(!mark_congestion(&mut [0x45; 8]));
    }
}
