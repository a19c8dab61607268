//! The TCP header of an inner packet; the ACK that closes its sender's window; an ACK without its SACK blocks.

use std::net::IpAddr;
use std::ops::Range;

use bytes::Bytes;
use etherparse::{InternetSlice, PacketBuilder, SlicedPacket, TcpOptionElement, TransportSlice};

use crate::PROTOCOL_TCP;
use crate::internet_checksum::changed_checksum;

const HOPS: u8 = 64; // RFC 1700

/// The bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

/// Kinds of TCP options (IANA).
const OPTION_END: u8 = 0;
const OPTION_NOOP: u8 = 1;
const OPTION_SACK: u8 = 5; // RFC 2018
const OPTION_TIMESTAMPS: u8 = 8; // RFC 7323
const OPTION_MD5: u8 = 19; // RFC 2385
const OPTION_AO: u8 = 29; // RFC 5925

/// The two ends of a connection, as packets in one direction name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConnectionEnds {
    source: IpAddr,
    destination: IpAddr,
    source_port: u16,
    destination_port: u16,
}

impl ConnectionEnds {
    /// The ends as packets in the other direction name them.
    pub(crate) fn reversed(self) -> ConnectionEnds {
        ConnectionEnds {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
        }
    }
}

/// The timestamps option (RFC 7323): the sender's clock, and the one that it echoes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TcpTimestamps {
    pub(crate) value: u32,
    pub(crate) echo: u32,
}

/// What the TCP header of a packet says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InnerSegment {
    pub(crate) ends: ConnectionEnds,
    pub(crate) sequence: u32,
    /// The bytes of sequence space that the segment takes: its payload, a SYN and a FIN.
    pub(crate) length: u32,
    /// The acknowledged sequence number, but for a first SYN.
    pub(crate) acknowledged: Option<u32>,
    pub(crate) is_reset: bool,
    /// Whether the segment begins a connection.
    pub(crate) is_syn: bool,
    /// What the receive window field says, not scaled.
    pub(crate) window: u16,
    pub(crate) timestamps: Option<TcpTimestamps>,
    /// The ranges that the SACK option (RFC 2018) reports, each with the number after it.
    pub(crate) sack: SackBlocks,
}

/// At most four ranges of sequence numbers, each with the number after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SackBlocks([Option<(u32, u32)>; 4]);

impl SackBlocks {
    /// The ranges above `acknowledged`. One below it reports what came twice (RFC 2883).
    pub(crate) fn above(self, acknowledged: u32) -> impl Iterator<Item = (u32, u32)> {
        let ranges = self.0.into_iter().flatten();
        ranges.filter(move |(start, _)| is_after(*start, acknowledged))
    }

    /// Whether one of the ranges contains all numbers from `start` to before `end`.
    pub(crate) fn contains(self, start: u32, end: u32) -> bool {
        let mut ranges = self.0.into_iter().flatten();
        ranges.any(|(from, to)| !is_after(from, start) && !is_after(end, to))
    }
}

impl InnerSegment {
    /// Reads the headers of a packet; `None` if it is no whole TCP segment, or one that is signed: neither its header may
    /// change, nor would its sender take an answer of ours.
    pub(crate) fn parse(packet: &[u8]) -> Option<InnerSegment> {
        // Most other packets are told apart without reading all headers.
        let may_be_tcp = match packet.first()? >> 4 {
            4 => *packet.get(9)? == PROTOCOL_TCP,
            _ => true,
        };
        if !may_be_tcp {
            return None;
        }
        let sliced = SlicedPacket::from_ip(packet).ok()?;
        let (source, destination): (IpAddr, IpAddr) = match sliced.net? {
            InternetSlice::Ipv4(ip) => (
                ip.header().source_addr().into(),
                ip.header().destination_addr().into(),
            ),
            InternetSlice::Ipv6(ip) => (
                ip.header().source_addr().into(),
                ip.header().destination_addr().into(),
            ),
            _ => return None,
        };
        let TransportSlice::Tcp(tcp) = sliced.transport? else {
            return None;
        };
        let payload = u32::try_from(tcp.payload().len()).ok()?;
        let (mut stamps, mut sack) = (None, SackBlocks::default());
        for (kind, range) in options(tcp.options()) {
            let option = &tcp.options()[range];
            match kind {
                OPTION_TIMESTAMPS => stamps = timestamps(option),
                OPTION_SACK => sack = sack_blocks(option),
                OPTION_MD5 | OPTION_AO => return None,
                _ => {}
            }
        }
        Some(InnerSegment {
            ends: ConnectionEnds {
                source,
                destination,
                source_port: tcp.source_port(),
                destination_port: tcp.destination_port(),
            },
            sequence: tcp.sequence_number(),
            length: payload + u32::from(tcp.syn()) + u32::from(tcp.fin()),
            acknowledged: tcp.ack().then(|| tcp.acknowledgment_number()),
            is_reset: tcp.rst(),
            is_syn: tcp.syn(),
            window: tcp.window_size(),
            timestamps: stamps,
            sack,
        })
    }

    /// The number after the segment.
    pub(crate) fn end(&self) -> u32 {
        self.sequence.wrapping_add(self.length)
    }

    /// The ACK by which the receiver of this segment would set the sender's window, with `acknowledged` as what it has;
    /// `timestamps` are the last ones that came from it. `None` for the SYN that begins a connection.
    pub(crate) fn answer(
        &self,
        acknowledged: u32,
        window: u16,
        timestamps: Option<TcpTimestamps>,
    ) -> Option<Bytes> {
        let ends = self.ends.reversed();
        let ip = match (ends.source, ends.destination) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                PacketBuilder::ipv4(from.octets(), to.octets(), HOPS)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                PacketBuilder::ipv6(from.octets(), to.octets(), HOPS)
            }
            _ => return None,
        };
        let builder = ip
            .tcp(
                ends.source_port,
                ends.destination_port,
                self.acknowledged?,
                window,
            )
            .ack(acknowledged);
        let builder = match timestamps {
            Some(TcpTimestamps { value, echo }) => builder
                .options(&[
                    TcpOptionElement::Noop,
                    TcpOptionElement::Noop,
                    TcpOptionElement::Timestamp(value, echo),
                ])
                .ok()?,
            None => builder,
        };
        let mut packet = Vec::with_capacity(builder.size(0));
        builder.write(&mut packet, &[]).ok()?;
        Some(packet.into())
    }
}

/// The packet with its SACK option overwritten by options that say nothing, so that its length stays. `None` if it has none.
pub(crate) fn without_sack(packet: &[u8]) -> Option<Bytes> {
    with_option(packet, OPTION_SACK, |option| option.fill(OPTION_NOOP))
}

/// The packet with this value in place of its timestamp's. `None` if it has none, or this one.
pub(crate) fn with_timestamp(packet: &[u8], value: u32) -> Option<Bytes> {
    with_option(packet, OPTION_TIMESTAMPS, |option| {
        if let Some(at) = option.get_mut(2..6) {
            at.copy_from_slice(&value.to_be_bytes());
        }
    })
}

/// The packet with this in the field of its receive window. `None` if it is there already.
pub(crate) fn with_window(packet: &[u8], window: u16) -> Option<Bytes> {
    with_header(packet, |header| {
        header
            .get_mut(14..16)?
            .copy_from_slice(&window.to_be_bytes());
        Some(())
    })
}

/// The packet with another option of this kind. `None` if nothing changes.
fn with_option(packet: &[u8], kind: u8, change: impl Fn(&mut [u8])) -> Option<Bytes> {
    with_header(packet, |header| {
        let (_, range) = options(header.get(TCP_HEADER..)?).find(|(found, _)| *found == kind)?;
        change(header.get_mut(TCP_HEADER..)?.get_mut(range)?);
        Some(())
    })
}

/// The packet with another TCP header, and a checksum that is as right or wrong as it was. `None` if nothing changes.
fn with_header(packet: &[u8], change: impl Fn(&mut [u8]) -> Option<()>) -> Option<Bytes> {
    let sliced = SlicedPacket::from_ip(packet).ok()?;
    let TransportSlice::Tcp(tcp) = sliced.transport? else {
        return None;
    };
    let before = tcp.header_slice();
    let mut header = before.to_vec();
    change(&mut header)?;
    if header == before {
        return None;
    }
    let checksum = changed_checksum(tcp.checksum(), before, &header);
    header
        .get_mut(16..18)?
        .copy_from_slice(&checksum.to_be_bytes());
    let start = packet.len().checked_sub(tcp.slice().len())?;
    let mut changed = packet.to_vec();
    let place = changed.get_mut(start..start + header.len())?;
    // Not if bytes follow that the IP header does not count.
    (*place == *before).then(|| place.copy_from_slice(&header))?;
    Some(changed.into())
}

/// The options of a TCP header that say anything: each one's kind, and where it is.
fn options(bytes: &[u8]) -> impl Iterator<Item = (u8, Range<usize>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        while *bytes.get(at)? == OPTION_NOOP {
            at += 1;
        }
        let kind = *bytes.get(at)?;
        let range = at..at + usize::from(*bytes.get(at + 1)?);
        if kind == OPTION_END || range.len() < 2 || range.end > bytes.len() {
            return None;
        }
        at = range.end;
        Some((kind, range))
    })
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

fn sack_blocks(option: &[u8]) -> SackBlocks {
    let mut blocks = SackBlocks::default();
    let ranges = option.get(2..).unwrap_or_default().chunks_exact(8);
    for (block, range) in blocks.0.iter_mut().zip(ranges) {
        *block = number(range).zip(number(&range[4..]));
    }
    blocks
}

fn timestamps(option: &[u8]) -> Option<TcpTimestamps> {
    Some(TcpTimestamps {
        value: number(option.get(2..)?)?,
        echo: number(option.get(6..)?)?,
    })
}

/// The longest packet that may be no more than an ACK: IPv6 and TCP with all options.
const ACK_BYTES_MAX: usize = 40 + 60;

/// Whether a packet of TCP does nothing but acknowledge: it has no data, reports no loss, and its window is open. What is more
/// urgent, or may be answered, is no such ACK.
pub(crate) fn is_plain_ack(packet: &[u8]) -> bool {
    packet.len() <= ACK_BYTES_MAX
        && InnerSegment::parse(packet).is_some_and(|segment| {
            segment.length == 0
                && !segment.is_reset
                && segment.window > 0
                && segment
                    .acknowledged
                    .is_some_and(|number| segment.sack.above(number).next().is_none())
        })
}

/// Whether `number` comes after `other` in TCP's sequence space.
pub(crate) fn is_after(number: u32, other: u32) -> bool {
    number.wrapping_sub(other).cast_signed() > 0
}

/// A segment for tests, from port 1,000 of 10.83.0.2 to port 80 of 192.0.2.1, with timestamps.
#[cfg(test)]
pub(crate) fn segment(sequence: u32, payload: &[u8]) -> Vec<u8> {
    timestamped_segment(sequence, payload, 11)
}

/// A segment of that connection with this timestamp.
#[cfg(test)]
pub(crate) fn timestamped_segment(sequence: u32, payload: &[u8], timestamp: u32) -> Vec<u8> {
    let builder = PacketBuilder::ipv4([10, 83, 0, 2], [192, 0, 2, 1], HOPS)
        .tcp(1_000, 80, sequence, 500)
        .ack(7_000)
        .options(&[TcpOptionElement::Timestamp(timestamp, 12)])
        .expect("room for an option");
    let mut packet = Vec::new();
    builder.write(&mut packet, payload).expect("in memory");
    packet
}

/// An ACK of the other end of the connection that [`segment`] is of.
#[cfg(test)]
pub(crate) fn acknowledgement(number: u32) -> Vec<u8> {
    selective_acknowledgement(number, &[])
}

/// An ACK of that connection's other end with SACK blocks, three at most.
#[cfg(test)]
pub(crate) fn selective_acknowledgement(number: u32, blocks: &[(u32, u32)]) -> Vec<u8> {
    let mut options = vec![
        TcpOptionElement::Noop,
        TcpOptionElement::Noop,
        TcpOptionElement::Timestamp(21, 11),
    ];
    if let [first, more @ ..] = blocks {
        let more = [more.first().copied(), more.get(1).copied(), None];
        options.push(TcpOptionElement::Noop);
        options.push(TcpOptionElement::Noop);
        options.push(TcpOptionElement::SelectiveAcknowledgement(*first, more));
    }
    let builder = PacketBuilder::ipv4([192, 0, 2, 1], [10, 83, 0, 2], HOPS)
        .tcp(80, 1_000, 7_000, 400)
        .ack(number)
        .options(&options)
        .expect("room for options");
    let mut packet = Vec::new();
    builder.write(&mut packet, &[]).expect("in memory");
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_segment_that_says_nothing_else_is_a_plain_ack() {
        let ack = acknowledgement(500);
        assert!(is_plain_ack(&ack));
        assert!(!is_plain_ack(&selective_acknowledgement(
            500,
            &[(600, 700)]
        )));
        // RFC 2883: what came twice is no loss.
        assert!(is_plain_ack(&selective_acknowledgement(500, &[(400, 450)])));
        assert!(!is_plain_ack(&segment(100, b"hello")));
        assert!(!is_plain_ack(&with_window(&ack, 0).expect("a window")));
        assert!(!is_plain_ack(&ack[..30]) && !is_plain_ack(&[]));
        let mut finish = Vec::new();
        let builder = PacketBuilder::ipv4([192, 0, 2, 1], [10, 83, 0, 2], HOPS);
        let builder = builder.tcp(80, 1_000, 7_000, 400).ack(500).fin();
        builder.write(&mut finish, &[]).expect("in memory");
        assert!(!is_plain_ack(&finish));
    }

    #[test]
    fn a_segment_is_read_and_its_answer_closes_the_window() {
        let read = InnerSegment::parse(&segment(100, b"hello")).expect("TCP");
        assert_eq!((read.sequence, read.length, read.end()), (100, 5, 105));
        let answer = read
            .answer(
                100,
                0,
                Some(TcpTimestamps {
                    value: 21,
                    echo: 11,
                }),
            )
            .expect("an answer");
        let answered = InnerSegment::parse(&answer).expect("TCP");
        assert_eq!(answered.ends, read.ends.reversed());
        assert_eq!((answered.sequence, answered.length), (7_000, 0));
        assert_eq!(answered.acknowledged, Some(100));
        assert_eq!(answered.window, 0);
        assert_eq!(
            answered.timestamps,
            Some(TcpTimestamps {
                value: 21,
                echo: 11
            })
        );
        let sliced = SlicedPacket::from_ip(&answer).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
            panic!("no TCP");
        };
        let header = tcp.to_header();
        let sum = header.calc_checksum_ipv4_raw([192, 0, 2, 1], [10, 83, 0, 2], &[]);
        assert_eq!(sum, Ok(tcp.checksum()));
    }

    #[test]
    fn an_acknowledgement_loses_its_sack_blocks_and_keeps_the_rest() {
        let packet = selective_acknowledgement(100, &[(200, 300), (400, 500)]);
        let read = InnerSegment::parse(&packet).expect("TCP");
        assert!(read.sack.contains(410, 500) && !read.sack.contains(150, 300));
        assert_eq!(read.sack.above(250).count(), 1);
        let without = without_sack(&packet).expect("TCP");
        assert_eq!(without.len(), packet.len());
        let changed = InnerSegment::parse(&without).expect("TCP");
        assert_eq!(
            changed,
            InnerSegment {
                sack: SackBlocks::default(),
                ..read
            }
        );
        let sliced = SlicedPacket::from_ip(&without).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
            panic!("no TCP");
        };
        let sum = tcp
            .to_header()
            .calc_checksum_ipv4_raw([192, 0, 2, 1], [10, 83, 0, 2], &[]);
        assert_eq!(sum, Ok(tcp.checksum()));
    }

    #[test]
    fn a_segment_gets_another_timestamp_and_keeps_its_payload() {
        let read = InnerSegment::parse(&segment(100, b"hello")).expect("TCP");
        let changed = with_timestamp(&segment(100, b"hello"), 99).expect("TCP");
        let parsed = InnerSegment::parse(&changed).expect("TCP");
        let timestamps = Some(TcpTimestamps {
            value: 99,
            echo: 12,
        });
        assert_eq!(parsed, InnerSegment { timestamps, ..read });
        assert!(changed.ends_with(b"hello"));
        let sliced = SlicedPacket::from_ip(&changed).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
            panic!("no TCP");
        };
        let sum = tcp
            .to_header()
            .calc_checksum_ipv4_raw([10, 83, 0, 2], [192, 0, 2, 1], b"hello");
        assert_eq!(sum, Ok(tcp.checksum()));
    }

    /// A segment with these options and the payload "x".
    fn with_options(options: &[u8]) -> Vec<u8> {
        let builder = PacketBuilder::ipv4([10, 83, 0, 2], [192, 0, 2, 1], HOPS)
            .tcp(1_000, 80, 1, 500)
            .options_raw(options)
            .expect("room for options");
        let mut packet = Vec::new();
        builder.write(&mut packet, b"x").expect("in memory");
        packet
    }

    #[test]
    fn options_are_read_behind_unknown_ones_and_where_their_numbers_are_not_aligned() {
        // TCP Fast Open (34), and a timestamp at an odd place.
        let options = [34, 4, 1, 2, 1, 8, 10, 0, 0, 0, 7, 0, 0, 0, 9, 0];
        let packet = with_options(&options);
        let read = InnerSegment::parse(&packet).expect("TCP");
        assert_eq!(read.timestamps, Some(TcpTimestamps { value: 7, echo: 9 }));
        let changed = with_timestamp(&packet, 0x0102_0304).expect("TCP");
        let sliced = SlicedPacket::from_ip(&changed).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
            panic!("no TCP");
        };
        assert_eq!(tcp.options()[..10], [34, 4, 1, 2, 1, 8, 10, 1, 2, 3]);
        let header = tcp.to_header();
        let sum = header.calc_checksum_ipv4_raw([10, 83, 0, 2], [192, 0, 2, 1], b"x");
        assert_eq!(sum, Ok(tcp.checksum()));
    }

    #[test]
    fn a_segment_behind_extension_headers_is_changed_and_a_fragment_is_none() {
        let addresses = ([0xfd; 16], [0x20; 16]);
        let options = [TcpOptionElement::Timestamp(11, 12)];
        let builder = PacketBuilder::ipv6(addresses.0, addresses.1, HOPS)
            .tcp(1_000, 80, 1, 500)
            .options(&options)
            .expect("room for an option");
        let mut packet = Vec::new();
        builder.write(&mut packet, b"hello").expect("in memory");
        // Destination options (60) before TCP, and the payload is 8 bytes longer.
        (packet[5], packet[6]) = (packet[5] + 8, 60);
        packet.splice(40..40, [PROTOCOL_TCP, 0, 1, 4, 0, 0, 0, 0]);
        let read = InnerSegment::parse(&packet).expect("TCP");
        assert_eq!((read.sequence, read.length), (1, 5));
        let changed = with_timestamp(&packet, 99).expect("TCP");
        let sliced = SlicedPacket::from_ip(&changed).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
            panic!("no TCP");
        };
        let header = tcp.to_header();
        let sum = header.calc_checksum_ipv6_raw(addresses.0, addresses.1, b"hello");
        assert_eq!(sum, Ok(tcp.checksum()));
        // A fragment header (44) that says that more follows.
        packet[6] = 44;
        packet[40..48].copy_from_slice(&[PROTOCOL_TCP, 0, 0, 1, 0, 0, 0, 7]);
        assert_eq!(InnerSegment::parse(&packet), None);
    }

    #[test]
    fn a_signed_segment_and_options_without_a_length_are_left_alone() {
        let mut signed = vec![19, 18];
        signed.resize(20, 0);
        assert_eq!(InnerSegment::parse(&with_options(&signed)), None);
        for options in [&[8, 0, 1, 1], &[8, 1, 1, 1], &[8, 10, 1, 1], &[1, 1, 1, 8]] {
            let read = InnerSegment::parse(&with_options(options)).expect("TCP");
            assert_eq!(read.timestamps, None, "{options:?}");
        }
        let read = InnerSegment::parse(&with_options(&[5, 3, 1, 1])).expect("TCP");
        assert_eq!(read.sack, SackBlocks::default());
    }

    #[test]
    fn a_wrong_checksum_stays_wrong() {
        let mut packet = segment(100, b"hello");
        let last = packet.len() - 1;
        packet[last] ^= 1;
        let changed = with_timestamp(&packet, 99).expect("TCP");
        let sliced = SlicedPacket::from_ip(&changed).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
            panic!("no TCP");
        };
        let header = tcp.to_header();
        let sum = header.calc_checksum_ipv4_raw([10, 83, 0, 2], [192, 0, 2, 1], tcp.payload());
        assert_ne!(sum, Ok(tcp.checksum()));
    }

    #[test]
    fn what_is_no_whole_segment_is_none() {
        let whole = segment(1, b"x");
        assert_eq!(InnerSegment::parse(&whole[..30]), None);
        assert_eq!(InnerSegment::parse(&[]), None);
        let mut udp = whole.clone();
        udp[9] = 17;
        assert_eq!(InnerSegment::parse(&udp), None);
    }

    #[test]
    fn numbers_are_compared_across_their_end() {
        assert!(is_after(5, u32::MAX - 5));
        assert!(!is_after(u32::MAX - 5, 5));
        assert!(!is_after(7, 7));
    }
}
