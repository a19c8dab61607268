//! The socket that the agent listens on: its own, or one that systemd hands over (sd_listen_fds(3)).
//!
//! ```text
//!  systemd: cedos-agent.socket ── LISTEN_FDS ──┐
//!                                              ├─▶ ListeningSocket ─▶ api_server
//!  `cedos agent` ── bind, after the lock ──────┘
//! ```

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use listenfd::ListenFd;
use tokio::net::UnixListener;

/// The agent's socket, which only one agent of a user may have.
pub(super) struct ListeningSocket {
    /// The bound Unix socket.
    pub(super) listener: UnixListener,
    /// The path that clients connect to.
    pub(super) path: PathBuf,
    /// Whether systemd made the socket, and keeps it when the agent exits.
    pub(super) is_handed_over: bool,
    /// The lock that is held while the agent runs.
    pub(super) _lock: File,
}

impl ListeningSocket {
    /// Takes the socket that systemd hands over, or else binds `path`.
    ///
    /// # Errors
    /// Another agent runs, or the system refuses.
    pub(super) fn open(path: &Path) -> anyhow::Result<ListeningSocket> {
        let handed_over = ListenFd::from_env()
            .take_unix_listener(0)
            .context("cannot use the socket that systemd hands over")?;
        let Some(listener) = handed_over else {
            let lock = take_lock(path)?;
            // No agent has the lock, so the one that left this is gone.
            let _ = std::fs::remove_file(path);
            let listener = UnixListener::bind(path)
                .with_context(|| format!("cannot listen at {}", path.display()))?;
            std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
            return Ok(ListeningSocket {
                listener,
                path: path.to_owned(),
                is_handed_over: false,
                _lock: lock,
            });
        };
        let address = listener.local_addr()?;
        let path = address.as_pathname().unwrap_or(path).to_owned();
        let lock = take_lock(&path)?;
        listener.set_nonblocking(true)?;
        Ok(ListeningSocket {
            listener: UnixListener::from_std(listener)?,
            path,
            is_handed_over: true,
            _lock: lock,
        })
    }
}

fn take_lock(path: &Path) -> anyhow::Result<File> {
    let folder = path.parent().context("the socket needs a folder")?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(lock_path(path))
        .with_context(|| format!("cannot write into {}", folder.display()))?;
    if lock.try_lock().is_err() {
        bail!("your agent is already running ({})", path.display());
    }
    Ok(lock)
}

fn lock_path(socket: &Path) -> PathBuf {
    socket.with_extension("lock")
}

/// Whether an agent holds the lock of this socket: it runs, begins or ends.
pub fn is_locked(socket: &Path) -> bool {
    File::open(lock_path(socket)).is_ok_and(|lock| lock.try_lock_shared().is_err())
}
