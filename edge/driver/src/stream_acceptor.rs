//! A server's streams: accepts them, and closes those that no admitted device uses.
//!
//! ```text
//!  accept ─▶ unproven: few, their memory charged to all strangers together
//!              ├─ an admitted device's session sends by it ─▶ proven: its memory charged to that device
//!              └─ none does in time, or its device has had no memory left ─▶ closed
//! ```

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use d2tp_session::{Addresses, MemoryCharge, PublicKey};
use d2tp_stream::{PacketReceiver, PacketSender, StreamEnd, TcpStreamAcceptor};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;

use crate::driver_core::DriverShared;
use crate::open_stream::OpenStream;
use crate::relay_state::AbortOnDrop;
use crate::stream_queues::STREAM_BYTES;
use crate::workers;

/// The maximum number of streams of a server. Each uses a descriptor, and the buffers of TLS.
const STREAMS_MAX: usize = 8_192; // a guess: descriptors are left for origins
/// The maximum number of streams, and of connections that are to become one, that no admitted device uses.
const UNPROVEN_MAX: usize = 256; // a guess
/// The key to which the memory of streams is charged that no admitted device uses. No host has it, because
/// X25519 with it is refused.
const STRANGERS: PublicKey = PublicKey([0; 32]);
/// How long a connection may take until it is a stream that an admitted device uses.
const UNUSED_MAX: Duration = Duration::from_secs(15); // a guess: three lost SYNs
/// The pause after the system could accept no more connections.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The task that accepts streams. It ends when this is dropped.
pub(crate) struct StreamAcceptor {
    task: AbortOnDrop,
    /// Closed once the task has ended and no connection is about to become a stream.
    opening: mpsc::Receiver<Infallible>,
}

impl StreamAcceptor {
    /// Begins to accept streams for the server of this worker. Must be called on a tokio runtime.
    pub(crate) fn start(shared: Weak<DriverShared>, acceptor: TcpStreamAcceptor) -> StreamAcceptor {
        let (opens, opening) = mpsc::channel(1);
        let task = AbortOnDrop(tokio::spawn(accept(shared, acceptor, opens)));
        StreamAcceptor { task, opening }
    }

    /// R-STREAM-9: accepts no more connections, which wait in the sockets for the next process, and waits until those
    /// that were accepted are streams, at most for `max`.
    pub(crate) async fn stop(mut self, max: Duration) {
        self.task.0.abort();
        // It is cancelled.
        let _ = (&mut self.task.0).await;
        let _ = tokio::time::timeout(max, self.opening.recv()).await;
    }
}

/// Accepts streams until the server stops. `opens` is held while a connection is about to become a stream.
async fn accept(
    shared: Weak<DriverShared>,
    acceptor: TcpStreamAcceptor,
    opens: mpsc::Sender<Infallible>,
) {
    let unproven = Arc::new(Semaphore::new(UNPROVEN_MAX));
    loop {
        let (tcp, peer) = match acceptor.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a stream");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = unproven.clone().try_acquire_owned() else {
            tracing::debug!(%peer, "too many streams begin at once");
            continue;
        };
        let Some(memory) = strangers_memory(&shared) else {
            tracing::debug!(%peer, "no memory for a stream");
            continue;
        };
        let (shared, identity, opens) = (shared.clone(), acceptor.identity(), opens.clone());
        let deadline = Instant::now() + UNUSED_MAX;
        tokio::spawn(async move {
            let answered = tokio::time::timeout_at(deadline, identity.answer(tcp)).await;
            match answered {
                Ok(Ok((sender, receiver))) => {
                    let unproven = UnprovenStream {
                        permit,
                        memory,
                        deadline,
                    };
                    serve(shared, peer, unproven, opens, sender, receiver).await;
                }
                Ok(Err(error)) => tracing::debug!(%peer, %error, "no stream"),
                Err(_) => tracing::debug!(%peer, "no stream in time"),
            }
        });
    }
}

/// What a stream occupies until an admitted device uses it.
struct UnprovenStream {
    permit: OwnedSemaphorePermit,
    memory: MemoryCharge,
    /// When the stream is closed unless a device uses it.
    deadline: Instant,
}

/// The memory of a stream that nobody uses yet; none if strangers have their share already, or the server
/// has stopped.
fn strangers_memory(shared: &Weak<DriverShared>) -> Option<MemoryCharge> {
    let shared = shared.upgrade()?;
    let inner = shared.inner.lock();
    let mut memory = inner.core.memory().account(STRANGERS).charge();
    memory.try_resize(STREAM_BYTES).then_some(memory)
}

/// Waits until an admitted device uses the stream and has room for its memory, which is charged to that
/// device from then on. Until then the strangers pay. Returns false if the server is gone.
async fn until_proven(open: &OpenStream) -> bool {
    loop {
        open.signals.queued.notified().await;
        let worker = open.signals.worker.lock();
        let Some(shared) = open.shared_by(*worker) else {
            return false;
        };
        let mut inner = shared.inner.lock();
        if let Some(client) = inner.core.client_of_stream(open.stream) {
            let account = inner.core.memory().account(client);
            if inner.streams.charge_to(open.stream, &account) {
                return true;
            }
        }
    }
}

async fn serve(
    shared: Weak<DriverShared>,
    peer: SocketAddr,
    unproven: UnprovenStream,
    opens: mpsc::Sender<Infallible>,
    sender: PacketSender,
    receiver: PacketReceiver,
) {
    let open = {
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let streams = workers::stream_count(&shared);
        let mut inner = shared.inner.lock();
        if inner.stopped || inner.is_deaf {
            return;
        }
        if streams >= STREAMS_MAX {
            tracing::warn!(%peer, "no room for another stream");
            return;
        }
        let link = match inner.streams.served {
            Some(link) => link,
            None => inner.new_link(),
        };
        inner.streams.served = Some(link);
        let (stream, signals) = inner.streams.insert(link, peer);
        inner.streams.set_memory(stream, unproven.memory);
        OpenStream {
            shared: Arc::downgrade(&shared),
            stream,
            addresses: Addresses {
                link,
                local: None,
                remote: stream.address(),
            },
            is_served: true,
            signals,
        }
    };
    drop(opens);
    tracing::debug!(%peer, stream = open.stream.0, "a stream begins");
    let UnprovenStream {
        permit, deadline, ..
    } = unproven;
    let unused = async {
        let proven = tokio::time::timeout_at(deadline, until_proven(&open)).await;
        if proven == Ok(true) {
            drop(permit);
            std::future::pending::<()>().await;
        }
    };
    let connection = sender.connection();
    let end = tokio::select! {
        end = open.carry(sender, receiver) => end,
        () = unused => StreamEnd::Closed,
    };
    tracing::debug!(%peer, stream = open.stream.0, %end, "a stream ends");
    open.end(connection);
}
