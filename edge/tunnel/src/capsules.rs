//! Packets in the bytes of a flow, for networks where datagrams may not go: DATAGRAM capsules (RFC 9297 §3.5) with the
//! context 0 of IP packets (RFC 9484 §6).
//!
//! ```text
//!  00        capsule type DATAGRAM
//!  varint    length of what follows
//!  00        context: an IP packet
//!  …         the packet
//! ```
//!
//! Each byte of a flow on a metered link is granted and counted, which datagrams' are not.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use d2tp_wire::{WireReader, WireWriter, varint_len};
use tokio::io::{AsyncRead, AsyncReadExt as _};

const DATAGRAM: u64 = 0;
const IP_PACKET: u64 = 0;

/// The largest capsule that is read; an inner packet has fewer bytes.
const CAPSULE_BYTES_MAX: u64 = 4_096;

/// The capsule that carries a packet.
pub fn packet_capsule(packet: &[u8]) -> Bytes {
    let length = varint_len(IP_PACKET) + packet.len();
    let head = varint_len(DATAGRAM) + varint_len(length as u64);
    let mut bytes = vec![0; head + length];
    let mut writer = WireWriter::new(&mut bytes);
    writer.varint(DATAGRAM);
    writer.varint(length as u64);
    writer.varint(IP_PACKET);
    writer.bytes(packet);
    bytes.into()
}

/// Reads packets out of a flow's bytes.
#[derive(Debug, Default)]
pub struct CapsuleReader {
    unread: BytesMut,
}

impl CapsuleReader {
    /// Whether no part of a capsule was read that is not complete.
    pub fn is_empty(&self) -> bool {
        self.unread.is_empty()
    }

    /// The next packet; `None` at the end. May be dropped and called again: nothing is lost.
    ///
    /// # Errors
    /// The stream's, or the bytes are no capsules.
    pub async fn next(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
    ) -> io::Result<Option<Bytes>> {
        loop {
            if let Some(packet) = self.take_packet()? {
                return Ok(Some(packet));
            }
            if stream.read_buf(&mut self.unread).await? == 0 {
                return Ok(None);
            }
        }
    }

    /// The next packet among the bytes that were read. Capsules of other types and contexts are skipped.
    fn take_packet(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            let mut reader = WireReader::new(&self.unread);
            let (Ok(kind), Ok(length)) = (reader.varint(), reader.varint()) else {
                return Ok(None);
            };
            if length > CAPSULE_BYTES_MAX {
                let text = format!("a capsule of {length} bytes in a packet tunnel");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            let head = self.unread.len() - reader.remaining();
            if reader.remaining() < length as usize {
                return Ok(None);
            }
            self.unread.advance(head);
            let mut content = self.unread.split_to(length as usize);
            let mut reader = WireReader::new(&content);
            let is_packet = kind == DATAGRAM && reader.varint() == Ok(IP_PACKET);
            let context = content.len() - reader.remaining();
            if is_packet {
                content.advance(context);
                return Ok(Some(content.freeze()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All packets of a stream that hands over so many bytes at once.
    async fn packets(bytes: &[u8], at_once: usize) -> io::Result<Vec<Bytes>> {
        let (mut reader, mut found) = (CapsuleReader::default(), Vec::new());
        let mut stream = cut_stream(bytes, at_once);
        while let Some(packet) = reader.next(&mut stream).await? {
            found.push(packet);
        }
        Ok(found)
    }

    /// A stream of pieces.
    fn cut_stream(bytes: &[u8], at_once: usize) -> impl AsyncRead + Unpin {
        let (mut write, read) = tokio::io::duplex(at_once);
        let bytes = bytes.to_vec();
        tokio::spawn(async move {
            use tokio::io::AsyncWriteExt as _;
            let _ = write.write_all(&bytes).await;
        });
        read
    }

    #[tokio::test]
    async fn packets_come_back_however_the_stream_is_cut() {
        let sent = [vec![0x45; 20], vec![0x60; 1_420], vec![], vec![7; 4_000]];
        let stream: Vec<u8> = sent.iter().flat_map(|p| packet_capsule(p)).collect();
        assert_eq!(stream[..4], [0, 21, 0, 0x45]);
        for at_once in [1, 2, 3, 100, 100_000] {
            assert_eq!(packets(&stream, at_once).await.unwrap(), sent, "{at_once}");
        }
    }

    #[tokio::test]
    async fn other_capsules_are_skipped_and_huge_ones_end_the_tunnel() {
        // Type 5; a DATAGRAM of context 2; an empty one.
        let mut stream = vec![5, 3, 1, 2, 3, 0, 2, 2, 9, 0, 0];
        stream.extend_from_slice(&packet_capsule(b"packet"));
        assert_eq!(packets(&stream, 64).await.unwrap(), [&b"packet"[..]]);
        // 2^20 bytes.
        let error = packets(&[0, 0x80, 0x10, 0, 0], 64).await.unwrap_err();
        assert!(error.to_string().contains("1048576"), "{error}");
        // One that never comes whole.
        assert!(packets(&[0, 9, 0, 1], 64).await.unwrap().is_empty());
    }
}
