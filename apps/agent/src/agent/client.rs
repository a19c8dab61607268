//! The client of the agent's socket, for `cedos get`, `ls`, `why` and others.

use std::path::Path;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::api::{AgentRequest, failure_from};
use crate::fetch::outcome::TransferFailure;

/// A connection to the agent.
pub struct AgentApiClient {
    lines: Lines<BufReader<OwnedReadHalf>>,
    write: OwnedWriteHalf,
}

impl AgentApiClient {
    /// Connects to this user's agent; none if none runs.
    pub async fn connect() -> Option<AgentApiClient> {
        let path = super::socket_path().ok()?;
        AgentApiClient::connect_to(&path).await
    }

    /// Connects to the agent with this socket; none unless one answers. An agent that is about to exit
    /// accepts no more connections, and one that answers does not exit while this one is open.
    pub async fn connect_to(path: &Path) -> Option<AgentApiClient> {
        let stream = UnixStream::connect(path).await.ok()?;
        let (read, write) = stream.into_split();
        let mut client = AgentApiClient {
            lines: BufReader::new(read).lines(),
            write,
        };
        client.ask(&AgentRequest::Hello).await.ok()?;
        Some(client)
    }

    /// Asks, and returns an answer that says yes.
    ///
    /// # Errors
    /// The agent says no, or is gone.
    pub async fn ask(&mut self, request: &AgentRequest) -> Result<Value, TransferFailure> {
        let text = serde_json::to_string(request).expect("plain data");
        let gone = || TransferFailure::error("the agent has stopped; run the same command again");
        self.write
            .write_all(format!("{text}\n").as_bytes())
            .await
            .map_err(|_| gone())?;
        let answer = self.next().await.ok_or_else(gone)?;
        match answer["ok"].as_bool() {
            Some(true) => Ok(answer),
            _ => Err(failure_from(&answer)),
        }
    }

    /// The next message of the agent; none when there are no more.
    pub async fn next(&mut self) -> Option<Value> {
        let line = self.lines.next_line().await.ok()??;
        serde_json::from_str(&line).ok()
    }

    /// Closes the sending side; further messages of the agent can still be read.
    pub async fn close(&mut self) {
        let _ = self.write.shutdown().await;
    }
}
