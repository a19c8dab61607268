//! Lines on the agent's socket: a JSON object each.

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::api::LINE_BYTES_MAX;

pub(super) async fn next_line(
    lines: &mut BufReader<OwnedReadHalf>,
) -> std::io::Result<Option<String>> {
    let mut line = Vec::new();
    loop {
        let piece = lines.fill_buf().await?;
        if piece.is_empty() {
            return Ok(None);
        }
        let end = piece.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(piece.len(), |end| end + 1);
        line.extend_from_slice(&piece[..taken]);
        lines.consume(taken);
        if line.len() > LINE_BYTES_MAX {
            return Err(std::io::Error::other("a line without end"));
        }
        if end.is_some() {
            return Ok(Some(String::from_utf8_lossy(&line).into_owned()));
        }
    }
}

pub(super) async fn write_line(write: &mut OwnedWriteHalf, value: &Value) -> std::io::Result<()> {
    write.write_all(format!("{value}\n").as_bytes()).await
}
