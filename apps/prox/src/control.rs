//! The control socket, by which the operator changes a running proxy. One JSON object per line in
//! both directions.
//!
//! ```text
//!  {"do":"invite","name":"laptop","expires_s":600}   ▶
//!                                                    ◀ {"ok":true,"line":"d2tp://…#…","expires_s":1790000000}
//!  {"do":"clients"}                                  ▶
//!                                                    ◀ {"ok":true,"clients":[{"name":"laptop",…}]}
//! ```
//!
//! The socket is `control.sock` in the state directory and belongs to the proxy's user alone; the root user
//! may use it too.

use std::fs::{File, Permissions};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::ServerAddress;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use crate::client_limits::ClientLimits;
use crate::client_records::{EnrolledClient, OpenInvitation};
use crate::client_store_error::ClientStoreError;
use crate::client_use::ClientUse;
use crate::drain_state::DrainOrder;
use crate::invitation::Invitation;
use crate::key_text::show_key;
use crate::link_keys::link_client_id;
use crate::prox::Prox;
use crate::takeover::TakeoverOffer;

/// The name of the socket in the state directory.
const SOCKET_NAME: &str = "control.sock";
/// The most bytes of a line.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Programs that are served at the same time; more wait.
const PROGRAMS_MAX: usize = 16; // a guess
/// How long a program may take for its request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a socket's path: `sun_path` of unix(7), with its final zero.
const PATH_BYTES_MAX: usize = 107;

/// What the operator asks of a running proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ControlRequest {
    /// Makes an invitation for one device.
    Invite {
        /// The name of the client that will be enrolled; none: as the device suggests.
        #[serde(default)]
        name: Option<String>,
        /// How long the invitation is open, in seconds.
        expires_s: u64,
        /// The host in the line; none: the one that the proxy announces.
        #[serde(default)]
        host: Option<String>,
    },
    /// Lists the open invitations.
    Invitations,
    /// Withdraws an open invitation.
    Withdraw {
        /// The invitation's number, or the name of its client.
        invitation: String,
    },
    /// Lists the clients.
    Clients,
    /// Shows one client.
    Client {
        /// The client's name, its key, or the beginning of the key.
        client: String,
    },
    /// Gives a client another name.
    Rename {
        /// The client's name, its key, or the beginning of the key.
        client: String,
        /// The client's new name.
        name: String,
    },
    /// Changes the limits of a client.
    Limit {
        /// The client's name, its key, or the beginning of the key.
        client: String,
        /// The limits that change; none: all become those of all clients again.
        #[serde(default)]
        limits: Option<ClientLimits>,
    },
    /// Removes a client and ends its sessions.
    Remove {
        /// The client's name, its key, or the beginning of the key.
        client: String,
    },
    /// Makes links of a client to feeds, for podcast apps.
    Feeds {
        /// The client's name; one that only has links is made if there is none.
        client: String,
        /// The addresses of the feeds.
        feeds: Vec<String>,
    },
    /// Shows the address of the proxy and what it holds.
    Status,
    /// Reads the settings again.
    Reload,
    /// Asks the devices to go on at another node, and ends the proxy when they have.
    Drain {
        /// The address of the other node; `None`: the nearest that each device knows.
        #[serde(default)]
        to: Option<SocketAddr>,
        /// The time for moving sessions, in seconds; what is left then is ended as by SIGTERM.
        within_s: u64,
    },
    /// Hands the sockets over to the process that asks ([`TakeoverOffer`]). Nothing else is answered after it.
    TakeOver,
}

impl ControlRequest {
    /// Whether the request needs the clients of all nodes.
    fn is_about_clients(&self) -> bool {
        match self {
            ControlRequest::Invite { .. }
            | ControlRequest::Invitations
            | ControlRequest::Withdraw { .. }
            | ControlRequest::Clients
            | ControlRequest::Client { .. }
            | ControlRequest::Rename { .. }
            | ControlRequest::Limit { .. }
            | ControlRequest::Feeds { .. }
            | ControlRequest::Remove { .. } => true,
            ControlRequest::Status
            | ControlRequest::Reload
            | ControlRequest::Drain { .. }
            | ControlRequest::TakeOver => false,
        }
    }
}

/// Why a request to a proxy was not carried out.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Each variant's message is its documentation.
pub enum ControlError {
    #[error("no proxy runs with --state-dir {0}; start it first, or name the directory it has")]
    NotRunning(String),
    #[error("the proxy with --state-dir {0} is another user's; ask as that user, or as root")]
    NotOurs(String),
    #[error("cannot reach the proxy with --state-dir {directory}: {cause}")]
    Unreachable { directory: String, cause: io::Error },
    #[error("{0}")]
    Refused(String),
}

/// The socket of a running proxy.
pub struct ControlServer {
    listener: UnixListener,
    path: PathBuf,
}

impl ControlServer {
    /// Listens in a state directory. Must be called on a runtime.
    ///
    /// # Errors
    /// The socket cannot be made, or another process listens there: [`ErrorKind::AddrInUse`].
    pub fn bind(directory: &Path) -> io::Result<ControlServer> {
        let path = directory.join(SOCKET_NAME);
        let (_directory, short) = short_path(directory)?;
        // The journal's lock keeps others away, but a shared store has none.
        if std::os::unix::net::UnixStream::connect(&short).is_ok() {
            let text = "another proxy runs with this state directory";
            return Err(io::Error::new(ErrorKind::AddrInUse, text));
        }
        // What is there was left by a process that is gone.
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&short)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        Ok(ControlServer { listener, path })
    }

    /// Serves requests until it is dropped. `address`: where devices reach the proxy.
    /// `offer`: what a process that takes this one over gets.
    pub async fn serve(self, prox: Arc<Prox>, address: ServerAddress, offer: Arc<TakeoverOffer>) {
        let programs = Arc::new(Semaphore::new(PROGRAMS_MAX));
        loop {
            let Ok(permit) = programs.clone().acquire_owned().await else {
                return;
            };
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept on the control socket");
                    // Descriptors are short; others may be closed meanwhile.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            if !is_operator(&stream) {
                tracing::warn!("refused a program of another user on the control socket");
                continue;
            }
            let (prox, address, offer) = (prox.clone(), address.clone(), offer.clone());
            tokio::spawn(async move {
                let attended = tokio::time::timeout(PATIENCE, attend(stream, &prox, &address));
                let attended = attended.await;
                drop(permit);
                if let Ok(Ok(Some(successor))) = attended
                    && let Err(error) = offer.attend(successor).await
                {
                    tracing::warn!(%error, "cannot hand the sockets over");
                }
            });
        }
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether the program at the other end runs as this process's user, or as root. The mode of the socket
/// says so too; not every system heeds it.
fn is_operator(stream: &UnixStream) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    stream
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}

/// Answers a program. Returns its connection if it asks to take this process over.
async fn attend(
    stream: UnixStream,
    prox: &Arc<Prox>,
    address: &ServerAddress,
) -> io::Result<Option<UnixStream>> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).take(LINE_BYTES_MAX).lines();
    while let Some(line) = lines.next_line().await? {
        let answer = match serde_json::from_str::<ControlRequest>(&line) {
            Ok(ControlRequest::TakeOver) => {
                let read = lines.into_inner().into_inner().into_inner();
                return Ok(read.reunite(write).ok());
            }
            Ok(request) => carry_out(request, prox, address).await,
            Err(error) => Err(format!("not a request: {error}")),
        };
        let answer = match answer {
            Ok(mut answer) => {
                answer["ok"] = true.into();
                answer
            }
            Err(text) => json!({"ok": false, "text": text}),
        };
        write.write_all(format!("{answer}\n").as_bytes()).await?;
    }
    Ok(None)
}

async fn carry_out(
    request: ControlRequest,
    prox: &Arc<Prox>,
    address: &ServerAddress,
) -> Result<Value, String> {
    let clients = prox.clients().clone();
    let asked = prox.clone();
    if request.is_about_clients() {
        prox.follow_other_nodes().await;
    }
    let looked_up = match &request {
        ControlRequest::Clients => {
            let enrolled = clients.enrolled().into_iter().map(|client| client.key);
            enrolled.chain(clients.named().copied()).collect()
        }
        ControlRequest::Client { client } => {
            let found = clients.find(client);
            found.into_iter().map(|client| client.key).collect()
        }
        _ => Vec::new(),
    };
    prox.read_usage(looked_up).await;
    let in_words = |error: ClientStoreError| error.to_string();
    // Files are synced, which takes its time.
    let working = tokio::task::spawn_blocking(move || match request {
        ControlRequest::Invite {
            name,
            expires_s,
            host,
        } => {
            let expires_in = Duration::from_secs(expires_s);
            let (secret, listed) = clients
                .invite(name.as_deref(), expires_in)
                .map_err(in_words)?;
            let (id, expires_s) = (&listed.id, listed.expires_s);
            tracing::info!(id, name, expires_s, "made an invitation");
            Ok(ControlResult::Invitation(secret, host, listed))
        }
        ControlRequest::Invitations => {
            let open = clients.open_invitations();
            let open: Vec<Value> = open.iter().map(invitation_json).collect();
            Ok(ControlResult::Now(json!({"invitations": open})))
        }
        ControlRequest::Withdraw { invitation } => {
            let was = clients.withdraw(&invitation).map_err(in_words)?;
            tracing::info!(id = was.id, name = was.name, "withdrew an invitation");
            Ok(ControlResult::Applied(
                json!({"invitation": invitation_json(&was)}),
            ))
        }
        ControlRequest::Clients => {
            let enrolled = clients.enrolled();
            let shown = enrolled.iter().map(|client| client_json(&asked, client));
            let mut shown: Vec<Value> = shown.collect();
            let named = clients.named().filter(|key| clients.name_of(key).is_none());
            shown.extend(named.map(|key| {
                let mut shown = json!({"name": null, "key": show_key(key), "enrolled_s": null,
                                       "seen_s": null, "by": "--allow-client"});
                add_use(&mut shown, &asked.client_usage(key));
                shown
            }));
            Ok(ControlResult::Now(json!({"clients": shown})))
        }
        ControlRequest::Client { client } => {
            let known = clients.find(&client).map_err(in_words)?;
            Ok(ControlResult::Now(
                json!({"client": client_json(&asked, &known)}),
            ))
        }
        ControlRequest::Rename { client, name } => {
            let was = clients.rename(&client, &name).map_err(in_words)?;
            tracing::info!(
                client = show_key(&was.key),
                was = was.name,
                name,
                "renamed a client"
            );
            Ok(ControlResult::Now(
                json!({"was": was.name, "name": name, "key": show_key(&was.key)}),
            ))
        }
        ControlRequest::Limit { client, limits } => {
            let changed = asked.set_client_limits(&client, limits.as_ref());
            let changed = changed.map_err(in_words)?;
            let (client, name) = (show_key(&changed.key), &changed.name);
            tracing::info!(client, name, limits = ?changed.limits, "changed the limits of a client");
            Ok(ControlResult::Now(
                json!({"client": client_json(&asked, &changed)}),
            ))
        }
        ControlRequest::Remove { client } => {
            let was = clients.remove(&client).map_err(in_words)?;
            tracing::info!(
                client = show_key(&was.key),
                name = was.name,
                "removed a client"
            );
            Ok(ControlResult::Applied(
                json!({"name": was.name, "key": show_key(&was.key)}),
            ))
        }
        ControlRequest::Feeds { client, feeds } => {
            let linked = asked.link_feeds(&client, &feeds);
            let (key, linked) = linked.map_err(|error| error.to_string())?;
            let key = show_key(&key);
            tracing::info!(
                client = key,
                name = client,
                feeds = linked.len(),
                "made links to feeds"
            );
            let linked = feeds.iter().zip(linked).map(|(feed, link)| match link {
                Ok(link) => json!({"feed": feed, "link": link.as_str()}),
                Err(why) => json!({"feed": feed, "refused": why}),
            });
            let linked: Vec<Value> = linked.collect();
            Ok(ControlResult::Applied(
                json!({"client": client, "key": key, "feeds": linked}),
            ))
        }
        ControlRequest::Status => Ok(ControlResult::Status),
        ControlRequest::Drain { to, within_s } => {
            let within = Duration::from_secs(within_s);
            asked.begin_drain(DrainOrder { to, within });
            tracing::info!(?to, within_s, "devices are asked to go on at another node");
            Ok(ControlResult::Now(json!({})))
        }
        ControlRequest::TakeOver => unreachable!("it is not answered here"),
        ControlRequest::Reload => {
            let report = asked.reload()?;
            Ok(ControlResult::Now(
                json!({"taken": report.taken, "at_restart": report.at_restart}),
            ))
        }
    });
    let said: Result<ControlResult, String> = working.await.expect("requests do not panic");
    match said? {
        ControlResult::Now(answer) => Ok(answer),
        ControlResult::Applied(answer) => {
            prox.clients().applied().await;
            Ok(answer)
        }
        ControlResult::Invitation(secret, host, listed) => {
            // A device may come as soon as it has the line.
            prox.clients().applied().await;
            let mut proxy = address.clone();
            proxy.host = host.unwrap_or(proxy.host);
            let line = Invitation { proxy, secret }.to_line();
            Ok(json!({"line": line, "id": listed.id, "expires_s": listed.expires_s}))
        }
        ControlResult::Status => {
            let holdings = prox.holdings();
            let bucket = prox.copy_bucket_status();
            let mut status = json!({
                "address": address.to_string(),
                "flows": holdings.flows,
                "memory_bytes": holdings.memory_bytes,
                "disk_bytes": holdings.disk_bytes,
                "cache_bytes": holdings.cached_bytes,
                "cache_bytes_max": prox.config().cache_bytes_max,
                "cache_responses": holdings.cached_responses,
                "clients": prox.clients().enrolled_count(),
                "retained_copies": holdings.retained_copies,
                "retained_uploads": holdings.retained_uploads,
                "bucket": bucket.map(|bucket| {
                    json!({"waiting_copies": bucket.waiting, "failing": bucket.failing})
                }),
            });
            if let Some(left) = prox.drain_progress() {
                status["draining"] = json!({"sessions": left.asked, "staying": left.staying});
            }
            if let Some(shared) = prox.shared_records() {
                status["node"] = shared.node().into();
                status["store"] = shared.place().into();
                status["store_state"] = shared.state().into();
                status["clients_counted"] = match prox.counts_alone() {
                    true => "this node".into(),
                    false => "all nodes".into(),
                };
            }
            Ok(status)
        }
    }
}

/// The result of a request, before it is an answer.
enum ControlResult {
    /// The answer, available at once.
    Now(Value),
    /// The answer that is given once the server has applied the change.
    Applied(Value),
    /// The secret of a new invitation, the host for its line, and how it is listed.
    Invitation(
        crate::invitation::InvitationSecret,
        Option<String>,
        OpenInvitation,
    ),
    /// A request for the state of the proxy.
    Status,
}

fn invitation_json(invitation: &OpenInvitation) -> Value {
    json!({"id": invitation.id, "name": invitation.name, "expires_s": invitation.expires_s})
}

fn client_json(prox: &Prox, client: &EnrolledClient) -> Value {
    let mut shown = json!({
        "name": client.name,
        "key": show_key(&client.key),
        "enrolled_s": client.enrolled_s,
        "seen_s": client.seen_s.max(prox.seen_elsewhere_s(&client.key)),
        "by": match link_client_id(&client.key) {
            None => "invitation",
            Some(_) => "links",
        },
        "own_limits": client.limits,
    });
    add_use(&mut shown, &prox.client_usage(&client.key));
    shown
}

/// Adds what a client may do, and what it does.
fn add_use(shown: &mut Value, now: &ClientUse) {
    shown["limits"] = json!(now.limits);
    shown["flows"] = now.flows.into();
    if now.flows_elsewhere > 0 {
        shown["flows_elsewhere"] = now.flows_elsewhere.into();
    }
    shown["pinned_bytes"] = now.pinned_bytes.into();
    shown["month"] = json!({"down_bytes": now.month.down, "up_bytes": now.month.up});
}

/// A path to the socket that fits into its address, and what must stay open while it is used.
fn short_path(directory: &Path) -> io::Result<(Option<File>, PathBuf)> {
    let path = directory.join(SOCKET_NAME);
    if path.as_os_str().as_bytes().len() <= PATH_BYTES_MAX {
        return Ok((None, path));
    }
    let open = File::open(directory)?;
    let short = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET_NAME}", open.as_raw_fd()));
    Ok((Some(open), short))
}

/// A connection to a running proxy.
pub struct ControlClient {
    stream: BufReader<UnixStream>,
}

impl ControlClient {
    /// Connects to the proxy that runs with this state directory.
    ///
    /// # Errors
    /// None runs, or it is another user's.
    pub async fn connect(directory: &Path) -> Result<ControlClient, ControlError> {
        let shown = || directory.display().to_string();
        let connecting = async {
            let (_directory, path) = short_path(directory)?;
            UnixStream::connect(path).await
        };
        match connecting.await {
            Ok(stream) => Ok(ControlClient {
                stream: BufReader::new(stream),
            }),
            Err(cause) => Err(match cause.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                    ControlError::NotRunning(shown())
                }
                ErrorKind::PermissionDenied => ControlError::NotOurs(shown()),
                _ => ControlError::Unreachable {
                    directory: shown(),
                    cause,
                },
            }),
        }
    }

    /// The connection, on which nothing was asked yet.
    pub(crate) fn into_stream(self) -> UnixStream {
        self.stream.into_inner()
    }

    /// Asks, and returns an answer that says yes.
    ///
    /// # Errors
    /// The proxy says no, or is gone.
    pub async fn ask(&mut self, request: &ControlRequest) -> Result<Value, ControlError> {
        let gone = || ControlError::Refused("the proxy ended before it answered".to_owned());
        let text = serde_json::to_string(request).expect("plain data");
        let stream = &mut self.stream;
        let sent = stream.write_all(format!("{text}\n").as_bytes()).await;
        sent.map_err(|_| gone())?;
        let mut line = String::new();
        let read = stream.read_line(&mut line).await;
        read.map_err(|_| gone())?;
        let answer: Value = serde_json::from_str(&line).map_err(|_| gone())?;
        match answer["ok"].as_bool() {
            Some(true) => Ok(answer),
            _ => {
                let text = answer["text"].as_str().unwrap_or("the proxy refused");
                Err(ControlError::Refused(text.to_owned()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_second_proxy_does_not_take_the_control_socket_of_a_running_one() {
        let directory = tempfile::tempdir().unwrap();
        let first = ControlServer::bind(directory.path()).unwrap();
        let second = ControlServer::bind(directory.path()).err().unwrap();
        assert_eq!(second.kind(), ErrorKind::AddrInUse);
        assert!(first.path.exists());
        // What a process left that was killed is replaced.
        let path = first.path.clone();
        drop(first);
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        ControlServer::bind(directory.path()).unwrap();
    }

    #[test]
    fn requests_are_read_as_they_are_documented() {
        let read = |text: &str| serde_json::from_str::<ControlRequest>(text);
        assert_eq!(
            read(r#"{"do":"invite","expires_s":600}"#).unwrap(),
            ControlRequest::Invite {
                name: None,
                expires_s: 600,
                host: None,
            }
        );
        assert_eq!(
            read(r#"{"do":"clients"}"#).unwrap(),
            ControlRequest::Clients
        );
        assert_eq!(
            read(r#"{"do":"withdraw","invitation":"laptop"}"#).unwrap(),
            ControlRequest::Withdraw {
                invitation: "laptop".into(),
            }
        );
        assert_eq!(
            read(r#"{"do":"limit","client":"laptop","limits":{"flows":2}}"#).unwrap(),
            ControlRequest::Limit {
                client: "laptop".into(),
                limits: Some(ClientLimits {
                    flows: Some(2),
                    ..Default::default()
                }),
            }
        );
        assert!(read(r#"{"do":"remove"}"#).is_err());
        assert!(read(r#"{"do":"invite","expires_s":600,"nme":"x"}"#).is_err());
    }
}
