//! What the bytes of a stream mean: the set-up of TLS and WebSocket, then messages with packets.
//!
//! ```text
//!  device ── Connect ──▶        ◀── Connected ── HTTP proxy, where one is between
//!         ── Hello ──▶          ◀── Certificate ── proxy
//!         ── Request ──▶        ◀── Accepted ──            another host: ◀── Page
//!         ◀── Packets ──▶       kind(1) length(4) content
//! ```
//!
//! The contents of the set-up are zeros of the usual sizes, because only their number matters.
//! Nothing is encrypted: TLS adds bytes and round trips.

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageKind {
    /// The ClientHello, with a hybrid key share.
    Hello,
    /// Everything from the ServerHello to Finished, with a short chain of certificates.
    Certificate,
    /// The client's Finished, and the request for a WebSocket.
    Request,
    /// "101 Switching Protocols".
    Accepted,
    /// Something else than that.
    Page,
    /// Packets, each behind its length.
    Packets,
    /// A request to an HTTP proxy for a connection to the proxy of the session.
    Connect,
    /// The answer to that: "200 OK".
    Connected,
}

impl MessageKind {
    const ALL: [MessageKind; 8] = [
        MessageKind::Hello,
        MessageKind::Certificate,
        MessageKind::Request,
        MessageKind::Accepted,
        MessageKind::Page,
        MessageKind::Packets,
        MessageKind::Connect,
        MessageKind::Connected,
    ];

    /// Bytes of a message of the set-up. // measured with rustls and tungstenite, rounded
    fn setup_bytes(self) -> usize {
        match self {
            MessageKind::Hello => 1_500,
            MessageKind::Certificate => 2_500,
            MessageKind::Request => 400,
            MessageKind::Accepted => 250,
            MessageKind::Page => 600,
            MessageKind::Packets => 0,
            MessageKind::Connect => 120,
            MessageKind::Connected => 40,
        }
    }

    /// A message of the set-up.
    pub(crate) fn setup_message(self) -> Vec<u8> {
        self.message(&vec![0; self.setup_bytes()])
    }

    fn message(self, content: &[u8]) -> Vec<u8> {
        let mut message = vec![self as u8];
        message.extend((content.len() as u32).to_be_bytes());
        message.extend(content);
        message
    }
}

/// Bytes that WebSocket and TLS add to a message beside those of this format.
const OVERHEAD_BYTES: usize = 25;
/// Bytes of packets in a message, if one packet is not larger, as in edge/stream.
const MESSAGE_BYTES: usize = 18 * 1024;

/// The messages with packets of `stride` bytes each, which are stored back to back.
pub(crate) fn packet_messages(packets: &[u8], stride: usize) -> impl Iterator<Item = Vec<u8>> {
    let together = (MESSAGE_BYTES / stride).max(1) * stride;
    packets.chunks(together).map(move |packets| {
        let mut content = vec![0; OVERHEAD_BYTES];
        for packet in packets.chunks(stride) {
            content.extend((packet.len() as u16).to_be_bytes());
            content.extend(packet);
        }
        MessageKind::Packets.message(&content)
    })
}

/// Bytes of a stream, and the messages in them.
#[derive(Debug, Default)]
pub(crate) struct StreamMessageReader(Vec<u8>);

impl StreamMessageReader {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// The next message that is complete.
    pub(crate) fn next(&mut self) -> Option<(MessageKind, Vec<u8>)> {
        let (head, rest) = self.0.split_first_chunk::<5>()?;
        let [kind, length @ ..] = *head;
        let kind = *MessageKind::ALL
            .get(kind as usize)
            .expect("TCP delivers what was written");
        let content = rest.get(..u32::from_be_bytes(length) as usize)?.to_vec();
        self.0.drain(..head.len() + content.len());
        Some((kind, content))
    }
}

/// The packets of a message.
pub(crate) fn packets(content: &[u8]) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    let mut rest = &content[OVERHEAD_BYTES..];
    while let Some((length, after)) = rest.split_first_chunk::<2>() {
        let (packet, more) = after.split_at(usize::from(u16::from_be_bytes(*length)));
        packets.push(packet.to_vec());
        rest = more;
    }
    packets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_come_back_from_messages_that_arrive_in_pieces() {
        let all: Vec<u8> = (0..60_000u32).map(|n| n as u8).collect();
        let bytes: Vec<u8> = packet_messages(&all, 8_972).flatten().collect();
        let (mut reader, mut found) = (StreamMessageReader::default(), Vec::new());
        for piece in bytes.chunks(1_000) {
            reader.push(piece);
            while let Some((kind, content)) = reader.next() {
                assert_eq!(kind, MessageKind::Packets);
                found.extend(packets(&content));
            }
        }
        assert_eq!(found.len(), 60_000usize.div_ceil(8_972));
        assert_eq!(found.concat(), all);
    }
}
