//! A TCP stream that bounds what its sender has in flight, as it is read (DRWA).

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use d2tp_session::{DrwaLambda, Time};
use d2tp_tcp::WindowClamp;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The delay of the next query of a socket that does not support it: longer than any download.
const NEVER: Duration = Duration::from_secs(86_400);

/// A stream with a clamp on its receive window, which is updated only while the stream is read.
pub struct DrwaStream {
    stream: TcpStream,
    clamp: WindowClamp,
    begun: Instant,
    next: Instant,
}

impl DrwaStream {
    /// Clamps the window of `stream` while it is read through this.
    pub fn new(stream: TcpStream, lambda: DrwaLambda) -> DrwaStream {
        let now = Instant::now();
        DrwaStream {
            stream,
            clamp: WindowClamp::new(lambda),
            begun: now,
            next: now,
        }
    }

    fn look(&mut self) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        let at = Time::ZERO + now.duration_since(self.begun).into();
        self.next = match self.clamp.update(self.stream.as_fd(), at) {
            Ok(Some(again)) => now + Duration::from(again),
            Ok(None) => now + NEVER,
            Err(error) => {
                tracing::debug!(%error, "the kernel controls the receive window");
                now + NEVER
            }
        };
    }
}

impl AsyncRead for DrwaStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.look();
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for DrwaStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_held_stream_carries_what_it_is_given_both_ways_to_its_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap());
        let (ours, theirs) = tokio::join!(ours, listener.accept());
        let (mut ours, mut theirs) = (
            DrwaStream::new(ours.unwrap(), DrwaLambda::default()),
            theirs.unwrap().0,
        );
        ours.write_all(b"ask").await.unwrap();
        ours.shutdown().await.unwrap();
        let mut asked = Vec::new();
        theirs.read_to_end(&mut asked).await.unwrap();
        assert_eq!(asked, b"ask");
        let content: Vec<u8> = (0..3_000_000u32).map(|n| n as u8).collect();
        let sent = content.clone();
        let send = tokio::spawn(async move {
            theirs.write_all(&sent).await.unwrap();
        });
        let mut got = Vec::new();
        ours.read_to_end(&mut got).await.unwrap();
        send.await.unwrap();
        assert!(got == content);
    }
}
