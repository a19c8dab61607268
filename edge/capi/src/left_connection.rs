//! A connection that outlives the agent that carries it: what this process keeps of it for the next agent.
//!
//! ```text
//!  agent ✗   here: the engine's end of the program's socket, memory with what is under way, the claim
//!            └─ every RETRY, WAITS by default ─▶ the next agent ─▶ claims the flow, and goes on
//!                                             └▶ nobody: ECONNRESET
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use d2tp_driver::{InstanceLease, ServerAddress};
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout};

use crate::agent_address::{self, ANSWER_WITHIN, socket_path};
use crate::agent_connection::{AgentAbilities, AgentConnection};
use crate::agent_message::{
    AgentCall, ConnectionClaim, MessageFromAgent, MessageReader, MessageToAgent, ReopenClaim,
    ReopenOptions, VERSION, send_message,
};
use crate::errno::SocketFault;
use crate::identity;
use crate::options::SocketOptions;
use crate::table;

/// The environment variable with the number of seconds that connections wait for another agent.
const WAIT_VARIABLE: &str = "CEDOS_AGENT_WAIT";
/// How long connections wait for another agent: a restart takes a second, and one after a crash some more.
const WAITS: Duration = Duration::from_secs(30); // a guess
/// The interval of attempts to reach another agent.
const RETRY: Duration = Duration::from_millis(50); // a guess: a restart is hardly noticed

/// How long connections wait for another agent when the one that carries them is gone; zero: they do not.
pub(crate) fn wait() -> Duration {
    let said = std::env::var(WAIT_VARIABLE).ok();
    let seconds = said.and_then(|seconds| seconds.parse().ok());
    seconds.map_or(WAITS, Duration::from_secs)
}

/// What this process keeps of a connection for the next agent.
pub(crate) struct LeftConnection {
    /// The engine's end of the program's socket, so that the kernel does not reset it.
    pub(crate) end: OwnedFd,
    /// The port at which the program's socket waits until it is connected.
    pub(crate) from: u16,
    /// The memory with what is under way.
    pub(crate) store: OwnedFd,
    pub(crate) claim: ConnectionClaim,
    /// The servers, of which one is used.
    pub(crate) servers: String,
    pub(crate) target: Option<String>,
    /// The path of the device's key file.
    pub(crate) key: PathBuf,
    /// Options of a connection that can be opened again.
    pub(crate) keep: Option<ReopenOptions>,
    /// The cookie of the program's socket in the table, and the options that hold where it is there no more.
    pub(crate) cookie: u64,
    pub(crate) options: SocketOptions,
}

/// An agent that goes on with a connection, and what it says.
type NextAgent = (Rc<UnixStream>, MessageReader, AgentAbilities);

impl LeftConnection {
    /// Waits for the next agent, and has it go on with the connection.
    ///
    /// # Errors
    /// None came in time.
    pub(crate) async fn resume(&self, handed: &mut AgentConnection) -> Result<(), SocketFault> {
        let (wait, began) = (wait(), Instant::now());
        while began.elapsed() < wait {
            if let Some((stream, reader, abilities)) = self.call(handed.program()).await {
                let fds = self.descriptors();
                let (store, end) = fds.map_err(|e| SocketFault::new(libc::ECONNRESET, e))?;
                handed.resume((stream, reader), abilities, (self.from, store, end));
                return Ok(());
            }
            tokio::time::sleep(RETRY).await;
        }
        self.forget();
        let text = format!(
            "the agent that carried this connection is gone, and no other one went on with it within {} s",
            wait.as_secs()
        );
        Err(SocketFault::new(libc::ECONNRESET, text))
    }

    fn descriptors(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        Ok((self.store.try_clone()?, self.end.try_clone()?))
    }

    /// Asks an agent to go on with the connection; none if no agent answers that can.
    async fn call(&self, program: Option<OwnedFd>) -> Option<NextAgent> {
        let at = socket_path()?;
        // A connection that was released meanwhile is not opened again.
        let keep = self.keep.clone().zip(program);
        if let Some((keep, program)) = &keep {
            deposit(&at, keep, program.try_clone().ok()?).await?;
        }
        let stream = agent_address::connect(&at).await?;
        let latest = table::change(self.cookie, |socket| socket.options.clone());
        let call = AgentCall {
            version: VERSION,
            server: self.servers.clone(),
            target: self.target.clone(),
            key: self.key.clone(),
            options: latest.as_ref().unwrap_or(&self.options).into(),
            keep: keep.map(|(keep, _)| keep),
            datagrams: false,
            resumes: Some(self.claim.clone()),
        };
        let mut reader = MessageReader::new(stream.clone());
        let taken = async {
            send_message(&stream, &MessageToAgent::Socket(Box::new(call)), None).await?;
            reader.next::<MessageFromAgent>().await
        };
        match timeout(ANSWER_WITHIN, taken).await {
            Ok(Ok(Some(MessageFromAgent::Taken {
                ok: true,
                version: VERSION,
                notices,
                locks,
                resumes: true,
            }))) => {
                let abilities = AgentAbilities {
                    notices,
                    locks,
                    resumes: true,
                };
                Some((stream, reader, abilities))
            }
            _ => None,
        }
    }

    /// Lets other processes have the instance of the agent that is gone.
    fn forget(&self) {
        let (Ok(key), Ok(server)) = (
            identity::read(&self.key),
            self.claim.server.parse::<ServerAddress>(),
        ) else {
            return;
        };
        InstanceLease::forget_record(key.public(), server.key, self.claim.instance);
    }
}

/// Leaves a copy of the program's descriptor with the next agent, as it was left with the one before; none if that does not
/// take it.
async fn deposit(at: &Path, keep: &ReopenOptions, program: OwnedFd) -> Option<()> {
    let stream = agent_address::connect(at).await?;
    let mut reader = MessageReader::new(stream.clone());
    let claim = MessageToAgent::Keep(ReopenClaim::to(keep.token));
    let left = async {
        send_message(&stream, &claim, None).await?;
        let taken = reader.next::<MessageFromAgent>().await?;
        if !matches!(taken, Some(MessageFromAgent::Taken { ok: true, .. })) {
            return Ok(None);
        }
        send_message(&stream, &MessageToAgent::Left, Some(program)).await?;
        reader.next::<MessageFromAgent>().await
    };
    match timeout(ANSWER_WITHIN, left).await {
        Ok(io::Result::Ok(Some(MessageFromAgent::Open { .. }))) => Some(()),
        _ => None,
    }
}
