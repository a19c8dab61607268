//! The engine's end of the loopback connection to a program's socket: writing, ending and
//! resetting.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use bytes::{Buf, Bytes};
use tokio::net::TcpStream;

/// Pieces of a flow that are written to a socket in one call.
pub(crate) const PIECES_MAX: usize = 64;

/// Restores the normal close of a stream that was passed on with a reset as its close.
pub(crate) fn clear_linger(stream: &TcpStream) {
    // If that fails, data that the program has not read yet may be lost, and the program gets an
    // error.
    let _ = socket2::SockRef::from(stream).set_linger(None);
}

/// Resets the program's socket.
pub(crate) fn break_off(stream: TcpStream) {
    // If that fails, the socket reads an end instead, and SO_ERROR still has the cause.
    let _ = stream.set_zero_linger();
}

/// Ends the stream to the program.
pub(crate) fn end(stream: &TcpStream) -> io::Result<()> {
    socket2::SockRef::from(stream).shutdown(std::net::Shutdown::Write)
}

/// Writes as much as there is room for, after waiting for room. Returns the number of bytes.
pub(crate) async fn put_some(
    stream: &TcpStream,
    pieces: &mut VecDeque<Bytes>,
) -> io::Result<usize> {
    loop {
        let slices: Vec<IoSlice<'_>> = pieces
            .iter()
            .take(PIECES_MAX)
            .map(|piece| IoSlice::new(piece))
            .collect();
        match stream.try_write_vectored(&slices) {
            Ok(written) => {
                let mut left = written;
                while let Some(piece) = pieces.front_mut()
                    && left > 0
                {
                    let taken = left.min(piece.len());
                    piece.advance(taken);
                    left -= taken;
                    if piece.is_empty() {
                        pieces.pop_front();
                    }
                }
                return Ok(written);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(error) => return Err(error),
        }
    }
}

/// Writes all pieces, waiting for room.
pub(crate) async fn put(stream: &TcpStream, pieces: &mut Vec<Bytes>) -> io::Result<()> {
    let mut from = 0;
    while from < pieces.len() {
        let slices: Vec<IoSlice<'_>> = pieces[from..].iter().map(|p| IoSlice::new(p)).collect();
        match stream.try_write_vectored(&slices) {
            Ok(mut written) => {
                while from < pieces.len() && written >= pieces[from].len() {
                    written -= pieces[from].len();
                    // The block can be used by the core again.
                    pieces[from] = Bytes::new();
                    from += 1;
                }
                if written > 0 {
                    pieces[from].advance(written);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(error) => return Err(error),
        }
    }
    pieces.clear();
    Ok(())
}
