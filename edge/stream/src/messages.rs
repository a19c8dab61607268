//! Packets in binary messages: each after two bytes of length, several in one message (R-STREAM-1).
//!
//! ```text
//!  message = *( length(2) packet )       length: bytes of the packet, in network byte order
//! ```

use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::{self, Message};

use crate::unsent::{SharedTcp, UnsentLimit};
use crate::{CarrierStream, MESSAGE_BYTES_MAX};

/// Bytes of packets that are sent as one message, if one packet is not larger. A message is delivered when
/// all of it has arrived. Larger: packets wait for those behind them on slow networks. Smaller: more work
/// for each byte.
pub const MESSAGE_BYTES: usize = 18 * 1024; // two packets of the largest size
/// Bytes before each packet of a message.
const LENGTH_BYTES: usize = 2;

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
pub enum StreamEnd {
    /// The peer closed it properly.
    #[error("the peer closed it")]
    Closed,
    /// A message contains something other than packets.
    #[error("a message holds something else than packets")]
    BadMessage,
    /// The connection broke, or the peer sent something other than WebSocket frames.
    #[error("{0}")]
    Broken(String),
}

impl From<tungstenite::Error> for StreamEnd {
    fn from(error: tungstenite::Error) -> StreamEnd {
        match error {
            tungstenite::Error::ConnectionClosed | tungstenite::Error::AlreadyClosed => {
                StreamEnd::Closed
            }
            error => StreamEnd::Broken(error.to_string()),
        }
    }
}

/// The half of a stream that sends.
pub struct PacketSender {
    sink: SplitSink<WebSocketStream<Box<dyn CarrierStream>>, Message>,
    tcp: SharedTcp,
    limit: UnsentLimit,
}

/// The connection of a stream, which stays open until this is dropped.
pub struct StreamConnection(SharedTcp);

impl StreamConnection {
    /// Closes the connection once the peer has taken what was written, or after `most`: the rest is given up.
    pub async fn end(self, most: Duration) {
        self.0.end(most).await;
    }
}

/// The half of a stream that receives.
pub struct PacketReceiver {
    stream: SplitStream<WebSocketStream<Box<dyn CarrierStream>>>,
}

/// Packets that arrived in one message.
#[derive(Debug)]
pub struct PacketBatch(BytesMut);

pub(crate) fn split(
    stream: WebSocketStream<Box<dyn CarrierStream>>,
    tcp: SharedTcp,
) -> (PacketSender, PacketReceiver) {
    let (sink, stream) = stream.split();
    let limit = UnsentLimit::new();
    (PacketSender { sink, tcp, limit }, PacketReceiver { stream })
}

impl PacketSender {
    /// Sends packets that are stored back to back, `stride` bytes each (the last may be shorter),
    /// in messages of about 18 KiB. Ready when the kernel has accepted them.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn send(&mut self, packets: &[u8], stride: usize) -> Result<(), StreamEnd> {
        let asked = Instant::now();
        let stride = stride.clamp(1, usize::from(u16::MAX));
        let together = (MESSAGE_BYTES / stride).max(1) * stride;
        for packets in packets.chunks(together) {
            let message = frame_packets(packets, stride);
            self.sink.feed(Message::Binary(message)).await?;
        }
        self.sink.flush().await?;
        let limit = self.limit.on_sent(asked, Instant::now(), packets.len());
        if let Some(limit) = limit
            && let Err(error) = self.tcp.set_unsent_limit(limit)
        {
            tracing::debug!(%error, "the limit of unsent bytes stays as it was");
        }
        Ok(())
    }

    /// How many bytes may wait for [`PacketSender::send`], so that little waits on a slow connection.
    pub fn waiting_bytes_max(&self) -> usize {
        self.limit.bytes() as usize
    }

    /// The limit of the connection's send buffer in the kernel, as the kernel counts. The kernel raises it as the peer
    /// acknowledges, unless it is held.
    pub fn send_buffer_max(&self) -> u64 {
        self.tcp.kernel_buffers().send_max
    }

    /// Sets the limit of the connection's send buffer in the kernel, which does not raise it any more. Returns the limit
    /// that holds: the system has a least and a most.
    pub fn hold_send_buffer(&self, limit: u64) -> u64 {
        if let Err(error) = self.tcp.set_send_buffer_max(limit) {
            tracing::debug!(%error, "the send buffer of a stream stays as the kernel tunes it");
        }
        self.send_buffer_max()
    }

    /// The stream's connection, which can be ended when both halves are gone.
    pub fn connection(&self) -> StreamConnection {
        StreamConnection(self.tcp.clone())
    }

    /// Closes the stream properly.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn close(&mut self) -> Result<(), StreamEnd> {
        Ok(self.sink.close().await?)
    }
}

/// Packs packets of `stride` bytes into the content of a message.
fn frame_packets(packets: &[u8], stride: usize) -> Bytes {
    let count = packets.len().div_ceil(stride);
    let mut message = BytesMut::with_capacity(packets.len() + count * LENGTH_BYTES);
    for packet in packets.chunks(stride) {
        message.put_u16(packet.len() as u16);
        message.put_slice(packet);
    }
    debug_assert!(message.len() <= MESSAGE_BYTES_MAX, "the peer refuses it");
    message.freeze()
}

impl PacketReceiver {
    /// Receives the packets of the next message.
    ///
    /// # Errors
    /// The connection has ended, or the peer violates the format of messages.
    pub async fn recv(&mut self) -> Result<PacketBatch, StreamEnd> {
        loop {
            match self.stream.next().await {
                None => return Err(StreamEnd::Closed),
                Some(Ok(Message::Binary(bytes))) => return PacketBatch::parse(bytes),
                Some(Ok(Message::Close(_))) => return Err(StreamEnd::Closed),
                Some(Ok(Message::Text(_))) => return Err(StreamEnd::BadMessage),
                // The library answers pings.
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Err(error)) => return Err(error.into()),
            }
        }
    }
}

impl PacketBatch {
    fn parse(bytes: Bytes) -> Result<PacketBatch, StreamEnd> {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (length, after) = rest
                .split_first_chunk::<LENGTH_BYTES>()
                .ok_or(StreamEnd::BadMessage)?;
            let length = usize::from(u16::from_be_bytes(*length));
            rest = after.get(length..).ok_or(StreamEnd::BadMessage)?;
        }
        Ok(PacketBatch(BytesMut::from(bytes)))
    }

    /// The packets, which can be decrypted in place.
    pub fn packets(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let mut rest = &mut self.0[..];
        std::iter::from_fn(move || {
            let (length, after) =
                std::mem::take(&mut rest).split_first_chunk_mut::<LENGTH_BYTES>()?;
            let length = usize::from(u16::from_be_bytes(*length));
            let (packet, more) = after.split_at_mut(length);
            rest = more;
            Some(packet)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::*;
    use crate::{WRITE_BUFFER_BYTES_MAX, websocket_config};

    /// A peer that sends pings, and reads nothing before the last of them. Then it ends the connection.
    struct PingingPeer {
        pings: usize,
        read: Arc<AtomicUsize>,
    }

    impl AsyncRead for PingingPeer {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if self.pings > 0 {
                self.pings -= 1;
                // The last fragment, a ping; a mask that changes nothing, and 125 bytes.
                buf.put_slice(&[0x89, 0x80 | 125, 0, 0, 0, 0]);
                buf.put_slice(&[7; 125]);
            }
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for PingingPeer {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.pings > 0 {
                return Poll::Pending;
            }
            self.read.fetch_add(bytes.len(), Ordering::Relaxed);
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn little_is_kept_of_pongs_that_the_peer_does_not_read() {
        let read = Arc::new(AtomicUsize::new(0));
        let peer: Box<dyn CarrierStream> = Box::new(PingingPeer {
            pings: 20_000,
            read: read.clone(),
        });
        let config = Some(websocket_config());
        let stream = WebSocketStream::from_raw_socket(peer, Role::Server, config).await;
        let (_sink, stream) = stream.split();
        let ended = PacketReceiver { stream }.recv().await;
        assert!(ended.is_err(), "there were no packets");
        let read = read.load(Ordering::Relaxed);
        assert!((1..=WRITE_BUFFER_BYTES_MAX).contains(&read), "{read} bytes");
    }

    #[test]
    fn packets_come_back_from_a_message() {
        let packets: Vec<u8> = (0..2_500u32).map(|n| n as u8).collect();
        let message = frame_packets(&packets, 1_000);
        assert_eq!(message.len(), 2_500 + 3 * LENGTH_BYTES);
        let mut batch = PacketBatch::parse(message).expect("it is well-formed");
        let sizes: Vec<usize> = batch.packets().map(|packet| packet.len()).collect();
        assert_eq!(sizes, [1_000, 1_000, 500]);
        let joined: Vec<u8> = batch.packets().flat_map(|packet| packet.to_vec()).collect();
        assert_eq!(joined, packets);
    }

    // R-STREAM-1
    #[test]
    fn a_message_that_ends_within_a_packet_is_refused() {
        let whole = frame_packets(&[7; 30], 30);
        for end in 1..whole.len() {
            let cut = PacketBatch::parse(whole.slice(..end));
            assert!(matches!(cut, Err(StreamEnd::BadMessage)), "cut at {end}");
        }
        let mut empty = PacketBatch::parse(Bytes::new()).expect("no packets are no fault");
        assert_eq!(empty.packets().count(), 0);
    }
}
