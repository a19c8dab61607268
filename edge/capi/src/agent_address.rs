//! The address of the user's agent, and connecting to it.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::errno::SocketFault;

/// The environment variable with the path of the agent's socket; `none` disables the agent.
const SOCKET_VARIABLE: &str = "CEDOS_AGENT";

/// How long an agent may take to answer: it is on this machine and never blocks for long.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(2); // a guess

/// The path of the agent's socket, as `cedos` finds it; `None` if the agent is disabled.
pub(crate) fn socket_path() -> Option<PathBuf> {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(none) if none == "none" => return None,
        Some(path) if !path.is_empty() => return Some(path.into()),
        _ => {}
    }
    let folder = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let place = folder("XDG_RUNTIME_DIR")
        .or_else(|| folder("XDG_STATE_HOME"))
        .or_else(|| Some(folder("HOME")?.join(".local/state")))?;
    Some(place.join("cedos").join("agent.sock"))
}

/// The error of a persistent socket without an agent that would keep it.
pub(crate) fn no_agent() -> SocketFault {
    let text = "a connection that outlives its program needs an agent that carries it, and none answers: \
                start `cedos agent`";
    SocketFault::new(libc::EOPNOTSUPP, text)
}

/// Connects to this user's agent, if it answers and supports sockets.
pub(crate) async fn connect(at: &Path) -> Option<Rc<UnixStream>> {
    let stream = timeout(ANSWER_WITHIN, UnixStream::connect(at)).await;
    let stream = stream.ok()?.ok()?;
    // If another user's process listens there, it must not learn anything about this one.
    let peer = stream.peer_cred().ok()?;
    // SAFETY: a call without arguments.
    let is_ours = peer.uid() == unsafe { libc::geteuid() };
    is_ours.then(|| Rc::new(stream))
}

/// Whether an agent is running.
pub(crate) async fn is_agent_running() -> bool {
    match socket_path() {
        Some(at) => connect(&at).await.is_some(),
        None => false,
    }
}
