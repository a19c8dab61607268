//! The other end of the agent's socket: what `cedos get`, `ls`, `why` … use.

use std::path::Path;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::api::{Request, failure_of};
use crate::fetch::outcome::Failure;

/// A connection to the agent.
pub struct Client {
    lines: Lines<BufReader<OwnedReadHalf>>,
    write: OwnedWriteHalf,
}

impl Client {
    /// To the agent of this user; none if none runs.
    pub async fn connect() -> Option<Client> {
        let path = super::socket().ok()?;
        Client::at(&path).await
    }

    /// To the agent whose socket this is.
    pub async fn at(path: &Path) -> Option<Client> {
        let stream = UnixStream::connect(path).await.ok()?;
        let (read, write) = stream.into_split();
        Some(Client {
            lines: BufReader::new(read).lines(),
            write,
        })
    }

    /// Asks, and returns an answer that says yes.
    ///
    /// # Errors
    /// The agent says no, or is gone.
    pub async fn ask(&mut self, request: &Request) -> Result<Value, Failure> {
        let text = serde_json::to_string(request).expect("plain data");
        let gone = || Failure::error("the agent is gone; `cedos agent` starts it");
        self.write
            .write_all(format!("{text}\n").as_bytes())
            .await
            .map_err(|_| gone())?;
        let answer = self.next().await.ok_or_else(gone)?;
        match answer["ok"].as_bool() {
            Some(true) => Ok(answer),
            _ => Err(failure_of(&answer)),
        }
    }

    /// The next thing told; none when there is no more.
    pub async fn next(&mut self) -> Option<Value> {
        let line = self.lines.next_line().await.ok()??;
        serde_json::from_str(&line).ok()
    }

    /// Says that nothing more will be asked; what is still told can be heard.
    pub async fn close(&mut self) {
        let _ = self.write.shutdown().await;
    }
}
