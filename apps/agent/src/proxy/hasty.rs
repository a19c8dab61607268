//! A connection that is written to before D2Prox has made it: what it has to say travels with the question, a
//! round trip sooner. Its answer is what is read first; after a refusal nothing is.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, ReadHalf, WriteHalf};

use super::line::Open;
use super::refusal::Refusal;

/// Reads D2Prox's answer, and then leaves the reading to others.
pub(super) type Answer = Pin<Box<dyn Future<Output = Result<ReadHalf<Open>, Refusal>> + Send>>;

/// Why a connection was not made, once that is known.
#[derive(Clone, Default)]
pub struct Why(Arc<Mutex<Option<Refusal>>>);

impl Why {
    /// Takes it.
    pub fn take(&self) -> Option<Refusal> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

enum Read {
    Asked(Answer),
    Made(ReadHalf<Open>),
    Refused,
}

/// The connection.
pub struct Hasty {
    write: WriteHalf<Open>,
    read: Read,
    why: Why,
}

impl Hasty {
    pub(super) fn new(open: Open, answer: impl FnOnce(ReadHalf<Open>) -> Answer) -> Hasty {
        let (read, write) = tokio::io::split(open);
        Hasty {
            write,
            read: Read::Asked(answer(read)),
            why: Why::default(),
        }
    }

    /// The same once it is made.
    ///
    /// # Errors
    /// Why it is not.
    pub async fn made(mut self) -> Result<Hasty, Refusal> {
        if let Read::Asked(answer) = self.read {
            self.read = Read::Made(answer.await?);
        }
        Ok(self)
    }

    /// Where it is said why it was not made.
    pub fn why(&self) -> Why {
        self.why.clone()
    }
}

impl AsyncRead for Hasty {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let answered = match &mut self.read {
                Read::Asked(answer) => ready!(answer.as_mut().poll(cx)),
                Read::Made(read) => return Pin::new(read).poll_read(cx, into),
                Read::Refused => return Poll::Ready(Err(io::ErrorKind::ConnectionRefused.into())),
            };
            self.read = match answered {
                Ok(read) => Read::Made(read),
                Err(refusal) => {
                    let mut why = self.why.0.lock().unwrap_or_else(PoisonError::into_inner);
                    *why = Some(refusal);
                    drop(why);
                    Read::Refused
                }
            };
        }
    }
}

impl AsyncWrite for Hasty {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.write).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_shutdown(cx)
    }
}
