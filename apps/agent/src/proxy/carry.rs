//! Copies bytes between a program's connection and a flow, in both directions until both have
//! ended.

use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};
use tokio::net::TcpStream;

/// Bytes in transit in each direction.
const COPY_BYTES: usize = 64 * 1024; // a guess

/// Carries both directions to their ends, and returns whether everything arrived. If the peer breaks,
/// the program's connection is reset, so that no program mistakes a part for the whole.
pub async fn carry(
    mut program: TcpStream,
    far: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> bool {
    let _ = program.set_nodelay(true);
    match copy_bidirectional_with_sizes(&mut program, far, COPY_BYTES, COPY_BYTES).await {
        Ok(_) => true,
        Err(error) => {
            tracing::debug!(%error, "broken off");
            reset(program);
            false
        }
    }
}

/// Resets a program's connection.
pub fn reset(program: TcpStream) {
    // If that fails it reads an end, which is a lesser evil than a connection that hangs.
    let _ = program.set_zero_linger();
}
