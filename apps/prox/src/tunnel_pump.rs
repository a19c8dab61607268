//! One direction of a tunnel: what was read from one end and the other has not taken yet.
//!
//! ```text
//!  from ──▶ │ held │ ──▶ to          an end of `from` is passed on once nothing is held
//! ```
//!
//! What is held stays when copying stops, so that the tunnel can go on elsewhere.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Buffer for each direction of a tunnel. Larger: fewer calls, and fewer tunnels fit the memory of one key
/// (R-QUOTA-4); 1,024 of them take two thirds of its share by default.
pub const TUNNEL_BUFFER_BYTES: usize = 32 * 1024;

/// One direction of a tunnel.
#[derive(Debug)]
pub(crate) struct TunnelPump {
    buffer: Vec<u8>,
    /// The bytes of `buffer` that are held.
    start: usize,
    end: usize,
    /// Whether the direction has ended, and whether that was passed on.
    is_ended: bool,
    is_shut: bool,
    needs_flush: bool,
}

impl TunnelPump {
    /// A direction in which these bytes come first. It `is_ended` if nothing comes after them, and `is_shut` if that was
    /// passed on.
    pub(crate) fn new(first: &[u8], is_ended: bool, is_shut: bool) -> TunnelPump {
        // Zeros of the kernel's, which take no memory before they are written.
        let mut buffer = vec![0; TUNNEL_BUFFER_BYTES.max(first.len())];
        buffer[..first.len()].copy_from_slice(first);
        TunnelPump {
            buffer,
            start: 0,
            end: first.len(),
            is_ended,
            is_shut,
            needs_flush: false,
        }
    }

    /// What was read and not written yet.
    pub(crate) fn held(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Whether the direction has ended.
    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Whether the end was passed on.
    pub(crate) fn is_shut(&self) -> bool {
        self.is_shut
    }

    /// Whether nothing is held, and more may come.
    pub(crate) fn is_idle(&self) -> bool {
        self.start == self.end && !self.is_ended
    }

    /// Copies until the end was passed on.
    fn poll_copy<R: AsyncRead + ?Sized, W: AsyncWrite + ?Sized>(
        &mut self,
        cx: &mut Context<'_>,
        mut from: Pin<&mut R>,
        mut to: Pin<&mut W>,
    ) -> Poll<io::Result<()>> {
        while !self.is_shut {
            let is_waiting = self.poll_fill(cx, from.as_mut())?.is_pending();
            while self.start < self.end {
                let held = &self.buffer[self.start..self.end];
                let written = ready!(to.as_mut().poll_write(cx, held))?;
                if written == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.start += written;
                self.needs_flush = true;
            }
            if self.needs_flush && (is_waiting || self.is_ended) {
                ready!(to.as_mut().poll_flush(cx))?;
                self.needs_flush = false;
            }
            if self.is_ended {
                ready!(to.as_mut().poll_shutdown(cx))?;
                self.is_shut = true;
            } else if is_waiting {
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads what there is room for. Pending: nothing is there to read.
    fn poll_fill<R: AsyncRead + ?Sized>(
        &mut self,
        cx: &mut Context<'_>,
        from: Pin<&mut R>,
    ) -> Poll<io::Result<()>> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.is_ended || self.end == self.buffer.len() {
            return Poll::Ready(Ok(()));
        }
        let mut room = ReadBuf::new(&mut self.buffer[self.end..]);
        ready!(from.poll_read(cx, &mut room))?;
        let read = room.filled().len();
        self.end += read;
        self.is_ended = read == 0;
        Poll::Ready(Ok(()))
    }
}

/// Copies both ways until both ends were passed on, and calls `on_step` whenever something may have moved.
pub(crate) async fn copy_both<A, B>(
    a: &mut A,
    b: &mut B,
    a_to_b: &mut TunnelPump,
    b_to_a: &mut TunnelPump,
    on_step: impl Fn(&TunnelPump, &TunnelPump),
) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (mut a, mut b) = (pin!(a), pin!(b));
    poll_fn(|cx| {
        let there = a_to_b.poll_copy(cx, a.as_mut(), b.as_mut());
        let back = b_to_a.poll_copy(cx, b.as_mut(), a.as_mut());
        on_step(a_to_b, b_to_a);
        match (there?, back?) {
            (Poll::Ready(()), Poll::Ready(())) => Poll::Ready(Ok(())),
            _ => Poll::Pending,
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn fresh() -> TunnelPump {
        TunnelPump::new(b"", false, false)
    }

    #[tokio::test]
    async fn bytes_and_ends_pass_both_ways() {
        let (mut here, mut a) = duplex(10);
        let (mut b, mut there) = duplex(10);
        let copying = tokio::spawn(async move {
            let (mut up, mut down) = (TunnelPump::new(b"first ", false, false), fresh());
            copy_both(&mut a, &mut b, &mut up, &mut down, |_, _| {}).await
        });
        let talk = async {
            here.write_all(b"and a longer request").await.unwrap();
            here.shutdown().await.unwrap();
            let mut got = Vec::new();
            here.read_to_end(&mut got).await.unwrap();
            assert_eq!(got, b"an answer that has more than ten bytes");
        };
        let answer = async {
            let mut got = Vec::new();
            there.read_to_end(&mut got).await.unwrap();
            assert_eq!(got, b"first and a longer request");
            there
                .write_all(b"an answer that has more than ten bytes")
                .await
                .unwrap();
            there.shutdown().await.unwrap();
        };
        tokio::join!(talk, answer);
        copying.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn what_is_held_when_copying_stops_comes_first_when_it_goes_on() {
        let (mut here, mut a) = duplex(1 << 16);
        let (mut b, mut there) = duplex(10);
        let (mut up, mut down) = (fresh(), fresh());
        here.write_all(b"0123456789abcdefghij").await.unwrap();
        here.shutdown().await.unwrap();
        {
            let copying = copy_both(&mut a, &mut b, &mut up, &mut down, |_, _| {});
            let mut copying = pin!(copying);
            let once = poll_fn(|cx| Poll::Ready(copying.as_mut().poll(cx))).await;
            assert!(once.is_pending());
        }
        assert_eq!(up.held(), b"abcdefghij");
        assert!(!up.is_idle() && down.is_idle());
        // Elsewhere.
        let (mut up, mut down) = (
            TunnelPump::new(up.held(), up.is_ended(), up.is_shut()),
            fresh(),
        );
        let copying =
            tokio::spawn(
                async move { copy_both(&mut a, &mut b, &mut up, &mut down, |_, _| {}).await },
            );
        let mut got = Vec::new();
        there.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"0123456789abcdefghij");
        there.shutdown().await.unwrap();
        copying.await.unwrap().unwrap();
    }

    /// A stream that nobody may touch.
    struct Untouched;

    impl AsyncRead for Untouched {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            panic!("it is read");
        }
    }

    impl AsyncWrite for Untouched {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &[u8],
        ) -> Poll<io::Result<usize>> {
            panic!("it is written");
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            panic!("it is flushed");
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            panic!("its end is passed on");
        }
    }

    #[tokio::test]
    async fn an_end_that_was_passed_on_is_not_passed_on_again() {
        let ended = || TunnelPump::new(b"", true, true);
        let (mut up, mut down) = (ended(), ended());
        copy_both(
            &mut Untouched,
            &mut Untouched,
            &mut up,
            &mut down,
            |_, _| {},
        )
        .await
        .unwrap();
    }
}
