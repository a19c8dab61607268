//! A host that accepts sessions: D2Prox, or any origin that speaks D2TP.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{Admission, Endpoint, EndpointConfig, PublicKey, RelayLimits, SecretKey};
use d2tp_udp::{BindOptions, LinkSocket};

use crate::datagrams::Connection;
use crate::driver_core::{DriverError, DriverShared};
use crate::engine;
use crate::flow::Flow;
use crate::hibernation;
use crate::hibernation_state::{HibernatedReader, HibernationState};
use crate::journal::{Journal, JournalError};
use crate::qlog::Qlog;
use crate::relay_state::RelayHost;
use crate::source::HostKey;
use crate::ticket_seed;

/// Options of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The address to listen at. `[::]:port` takes both families where the system allows.
    pub listen: SocketAddr,
    /// The key pair of the server.
    pub key: SecretKey,
    /// Which devices may connect.
    pub admission: Admission,
    /// Protocol settings.
    pub config: EndpointConfig,
}

/// How sessions of absent devices are kept.
#[derive(Clone, Debug, Default)]
pub struct HibernationOptions {
    /// How long a device may be silent before its session hibernates; never if none. Keys and buffers
    /// are freed then, and waking costs a handshake.
    pub hibernate_after: Option<Duration>,
    /// The journal, which keeps sessions across restarts of this process.
    pub journal: Option<Arc<Journal>>,
}

/// A listening server.
pub struct Server {
    shared: Arc<DriverShared>,
    local: SocketAddr,
    public: PublicKey,
}

impl Server {
    /// Begins to listen. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The socket could not be bound.
    pub fn bind(options: ServerOptions) -> Result<Server, DriverError> {
        Server::bind_with(options, HibernationOptions::default())
    }

    /// Binds a server whose sessions may hibernate.
    ///
    /// # Errors
    /// The socket could not be bound, or the journal could not be read.
    pub fn bind_with(
        options: ServerOptions,
        rest: HibernationOptions,
    ) -> Result<Server, DriverError> {
        let sockets = bind_all(options.listen)?;
        let local = sockets[0].local_addr();
        let public = options.key.public();
        // The token's secret follows from the key, so old sessions can be told that they are
        // unknown after a restart.
        let token_seed = derive(&options.key.to_bytes());
        let mut core = Endpoint::new(
            options.config,
            options.key,
            options.admission,
            seed(),
            token_seed,
        );
        core.set_ticket_seed(ticket_seed::load_or_create(rest.journal.as_deref())?);
        let shared = engine::start(core, true);
        shared.inner.lock().hibernation =
            HibernationState::new(rest.hibernate_after, rest.journal.clone());
        if let Some(journal) = rest.journal {
            let more = hibernation::load(&mut shared.inner.lock(), &journal)?;
            if let Some(after) = more {
                tokio::spawn(hibernation::journal_loader(shared.clone(), journal, after));
            }
            tokio::spawn(hibernation::journal_writer(shared.clone()));
        }
        for socket in sockets {
            shared.add_socket(socket, options.listen.ip().is_unspecified());
        }
        Ok(Server {
            shared,
            local,
            public,
        })
    }

    /// The address that the server listens at.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
    /// The server's public key.
    pub fn public_key(&self) -> PublicKey {
        self.public
    }

    /// The next flow a device opens.
    pub async fn accept(&self) -> Option<Flow> {
        self.shared.accept().await
    }

    /// Logs what sessions do from now on to `log`, each session into its own file.
    pub fn log_to(&self, log: &Arc<Qlog>) {
        self.shared.log_to(log);
    }

    /// All sessions that are awake.
    pub fn connections(&self) -> Vec<Connection> {
        let inner = self.shared.inner.lock();
        let ids = inner.core.ids().into_iter();
        ids.filter_map(|id| {
            let peer = inner.core.session(id)?.peer();
            Some(Connection::new(self.shared.clone(), id, peer))
        })
        .collect()
    }

    /// Whether the journal is loaded completely. Until then a session is looked up when its device
    /// connects; only deadlines of sessions that are not loaded have to wait.
    pub fn knows_all(&self) -> bool {
        self.shared.inner.lock().hibernation.knows_all()
    }

    /// The numbers of awake, hibernated and half-open sessions.
    pub fn counts(&self) -> (usize, usize, usize) {
        self.shared.inner.lock().core.counts()
    }

    /// The next memo of a flow that expired while it was hibernated, and its device. `None` when the
    /// server has stopped.
    pub async fn next_expired(&self) -> Option<(HostKey, Bytes)> {
        let (key, memo) = hibernation::next_expired(&self.shared).await?;
        Some((key.peer.0, memo))
    }

    /// Sets the reader of hibernated flows, so that their first bytes are sent with the answer to a SYN
    /// and arrive one round trip sooner. It is called under the server's lock.
    pub fn set_hibernated_reader(&self, peek: Arc<HibernatedReader>) {
        self.shared.inner.lock().hibernation.peek = Some(peek);
    }

    /// Stages a note of the application, which is written with the next changes; none removes it.
    pub fn note(&self, name: Vec<u8>, value: Option<Bytes>) {
        self.shared.inner.lock().hibernation.note(name, value);
    }

    /// Allows flows of this server to open relays, through [`crate::FlowIo::relays`].
    pub fn relay_for_devices(&self, limits: RelayLimits) {
        self.shared.inner.lock().relays.host = Some(RelayHost::new(limits, seed()));
    }

    /// Stops without a word to devices whose flows may sleep: whoever has the journal next goes on
    /// with them. Flows that may not are reset with `code`.
    ///
    /// # Errors
    /// The journal could not be written.
    pub async fn leave(&self, code: u64) -> Result<(), JournalError> {
        hibernation::hibernate_all(&mut self.shared.inner.lock(), code);
        self.shared.wake();
        // The resets leave in the task's next turn.
        tokio::time::sleep(CLOSE_GRACE).await;
        let journal = self.shared.inner.lock().hibernation.journal.clone();
        let written = match journal {
            Some(journal) => hibernation::write_batch(&self.shared, &journal).await,
            None => Ok(()),
        };
        self.shared.stop();
        written
    }

    /// Informs every device that this host stops, without waiting as [`Server::close`] does.
    pub fn say_goodbye(&self) {
        let mut inner = self.shared.inner.lock();
        for id in inner.core.ids() {
            let _ = inner.core.with(id, |s| s.close(0, "the proxy is stopping"));
        }
        drop(inner);
        self.shared.wake();
    }

    /// Informs every device that this host stops, and stops.
    pub async fn close(&self) {
        self.say_goodbye();
        // The closes leave in the task's next turn.
        tokio::time::sleep(CLOSE_GRACE).await;
        self.shared.stop();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

/// Binds one socket, or one of each family for `[::]`: a host without IPv6, or without IPv4, still
/// serves the other.
fn bind_all(listen: SocketAddr) -> Result<Vec<LinkSocket>, DriverError> {
    let first = LinkSocket::bind(&BindOptions::at(listen));
    if !(listen.is_ipv6() && listen.ip().is_unspecified()) {
        return Ok(vec![first?]);
    }
    let port = first
        .as_ref()
        .map_or(listen.port(), |s| s.local_addr().port());
    let second = LinkSocket::bind(&BindOptions::at((Ipv4Addr::UNSPECIFIED, port).into()));
    match (first, second) {
        (Ok(v6), Ok(v4)) => Ok(vec![v6, v4]),
        (Ok(one), Err(error)) | (Err(error), Ok(one)) => {
            tracing::warn!(%error, "serving one address family only");
            Ok(vec![one])
        }
        (Err(error), Err(_)) => Err(error.into()),
    }
}

/// Time for the last packets to be sent.
pub(crate) const CLOSE_GRACE: Duration = Duration::from_millis(20);

pub(crate) fn seed() -> [u8; 32] {
    let mut seed = [0; 32];
    // A program that is started for one connection waits for this.
    getrandom::fill(&mut seed).expect("the system has randomness");
    seed
}

fn derive(secret: &[u8; 32]) -> [u8; 32] {
    let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
    context.update(b"d2tp token secret");
    context.update(secret);
    context
        .finish()
        .as_ref()
        .try_into()
        .expect("SHA-256 has 32 bytes")
}
