//! A connection to which data is written before D2Prox has opened it: the data is sent with the
//! request, a round trip sooner. The answer of D2Prox is read first; after a refusal nothing is
//! read.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, ReadHalf, WriteHalf};

use super::proxy_session::ProxyConnection;
use super::refusal::ConnectRefusal;

/// Reads D2Prox's answer, and returns the reading half.
pub(super) type ConnectAnswer =
    Pin<Box<dyn Future<Output = Result<ReadHalf<ProxyConnection>, ConnectRefusal>> + Send>>;

/// Why a connection failed, once that is known.
#[derive(Clone, Default)]
pub struct ConnectFailure(Arc<Mutex<Option<ConnectRefusal>>>);

impl ConnectFailure {
    /// Takes the reason for which the connection was refused.
    pub fn take(&self) -> Option<ConnectRefusal> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

enum ConnectReader {
    Asked(ConnectAnswer),
    Made(ReadHalf<ProxyConnection>),
    Refused,
}

/// A connection that can be written to before D2Prox has answered.
pub struct OptimisticConnect {
    write: WriteHalf<ProxyConnection>,
    read: ConnectReader,
    why: ConnectFailure,
}

impl OptimisticConnect {
    pub(super) fn new(
        open: ProxyConnection,
        answer: impl FnOnce(ReadHalf<ProxyConnection>) -> ConnectAnswer,
    ) -> OptimisticConnect {
        let (read, write) = tokio::io::split(open);
        OptimisticConnect {
            write,
            read: ConnectReader::Asked(answer(read)),
            why: ConnectFailure::default(),
        }
    }

    /// A connection that D2Prox has opened already.
    pub(super) fn made(open: ProxyConnection) -> OptimisticConnect {
        let (read, write) = tokio::io::split(open);
        OptimisticConnect {
            write,
            read: ConnectReader::Made(read),
            why: ConnectFailure::default(),
        }
    }

    /// A handle that gets the reason if the connection fails.
    pub fn failure(&self) -> ConnectFailure {
        self.why.clone()
    }
}

impl AsyncRead for OptimisticConnect {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let answered = match &mut self.read {
                ConnectReader::Asked(answer) => ready!(answer.as_mut().poll(cx)),
                ConnectReader::Made(read) => return Pin::new(read).poll_read(cx, into),
                ConnectReader::Refused => {
                    return Poll::Ready(Err(io::ErrorKind::ConnectionRefused.into()));
                }
            };
            self.read = match answered {
                Ok(read) => ConnectReader::Made(read),
                Err(refusal) => {
                    let mut why = self.why.0.lock().unwrap_or_else(PoisonError::into_inner);
                    *why = Some(refusal);
                    drop(why);
                    ConnectReader::Refused
                }
            };
        }
    }
}

impl AsyncWrite for OptimisticConnect {
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
