//! The workers of a server: engines that share its port, each with a part of its clients.
//!
//! ```text
//!  socket 0 ─▶ engine 0 ─┐ misdirected ┌─▶ engine 0
//!  socket 1 ─▶ engine 1 ─┴──▶ inbox ───┴─▶ engine 1      seldom: first packets, and where the kernel cannot steer
//! ```
//!
//! A stream carries the sessions of one device, which are all in one worker. So a stream whose packets are misdirected goes
//! to that worker as a whole, with what waits to be written, unless an admitted device of its worker uses it:
//!
//! ```text
//!  accepted ─▶ worker 0 ── a packet of another worker's client ─▶ that worker: by connection id, or the key in a handshake
//! ```

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use d2tp_session::{CidShare, Misdirected, SecretKey, StreamPathId};
use d2tp_udp::LinkSocket;

use crate::clock;
use crate::driver_core::{DriverError, DriverShared};
use crate::relay_state::RelayedPackets;
use crate::secrets::derive;
use crate::{relay_dispatch, relay_host};

/// The share of a worker and its sockets; no share if it is the only one.
type WorkerSockets = (Option<CidShare>, Vec<LinkSocket>);

/// Assigns sockets to workers: of those with one address, each belongs to another worker. Has the kernel steer
/// packets to them.
///
/// # Errors
/// Addresses have different numbers of sockets, or there are too many.
pub(crate) fn assign(
    sockets: Vec<LinkSocket>,
    key: &SecretKey,
) -> Result<Vec<WorkerSockets>, DriverError> {
    let mut by_address: BTreeMap<SocketAddr, Vec<LinkSocket>> = BTreeMap::new();
    for socket in sockets {
        let same = by_address.entry(socket.local_addr()).or_default();
        same.push(socket);
    }
    let count = by_address.values().map(Vec::len).max().unwrap_or(0);
    if by_address.values().any(|same| same.len() != count) {
        let text = "not as many sockets for each address";
        return Err(DriverError::Socket(io::Error::other(text)));
    }
    if count == 1 {
        let sockets = by_address.into_values().flatten().collect();
        return Ok(vec![(None, sockets)]);
    }
    // The same in the next process, which gets sockets that are steered already.
    let secret = derive(b"d2tp worker steering", &key.to_bytes());
    let (seed, _) = secret.split_first_chunk().expect("32 bytes");
    let seed = u32::from_be_bytes(*seed);
    let shares = u16::try_from(count).unwrap_or(u16::MAX);
    let mut workers = Vec::with_capacity(count);
    for index in 0..shares {
        let share = CidShare::new(seed, index, shares);
        let share = share.map_err(|error| DriverError::Socket(io::Error::other(error)))?;
        workers.push((Some(share), Vec::new()));
    }
    for same in by_address.into_values() {
        steer(&same[0], seed, shares);
        for (worker, socket) in workers.iter_mut().zip(same) {
            worker.1.push(socket);
        }
    }
    Ok(workers)
}

/// Makes the kernel choose the worker for each packet. Where it cannot, workers pass packets on.
fn steer(socket: &LinkSocket, seed: u32, workers: u16) {
    #[cfg(target_os = "linux")]
    let steered = d2tp_udp::steer_to_workers(socket, seed, workers);
    #[cfg(not(target_os = "linux"))]
    let steered = {
        let _ = (socket, seed, workers);
        Err::<(), _>(io::Error::from(io::ErrorKind::Unsupported))
    };
    if let Err(error) = steered {
        tracing::warn!(%error, "the kernel does not steer packets to workers, which pass them to each other");
    }
}

/// Makes these the workers of one server.
pub(crate) fn connect(workers: &[Arc<DriverShared>]) {
    if workers.len() < 2 {
        return;
    }
    for worker in workers {
        let all = workers.iter().map(Arc::downgrade).collect();
        worker.workers.connect(all);
    }
}

/// Handles what other workers received for this one, and passes on what this one received for others.
pub(crate) fn exchange(shared: &DriverShared) {
    let Some(others) = shared.workers.others() else {
        return;
    };
    let received = shared.workers.take_received();
    let mut sent = Vec::new();
    let relayed: Vec<(u16, RelayedPackets)>;
    {
        let mut inner = shared.inner.lock();
        let now = clock::now();
        for packet in received.misdirected {
            match packet {
                Misdirected::Datagram(from, mut bytes)
                    if relay_dispatch::is_relayed(&inner, &bytes) =>
                {
                    let stride = bytes.len();
                    relay_dispatch::receive_run(&mut inner, now, from, &mut bytes, stride);
                }
                packet => inner.core.accept_misdirected(now, packet),
            }
        }
        for packets in &received.relayed {
            relay_host::deliver(&mut inner, packets);
        }
        while let Some(packet) = inner.core.poll_misdirected() {
            sent.push(packet);
        }
        relayed = std::mem::take(&mut inner.relays.for_workers);
    }
    for (index, packets) in relayed {
        if let Some(worker) = others.get(usize::from(index)).and_then(Weak::upgrade) {
            worker.workers.accept_relayed(packets);
            worker.wake();
        }
    }
    // Without the lock: the other worker may be about to pass something to this one.
    for (index, packet) in sent {
        let Some(worker) = others.get(usize::from(index)).and_then(Weak::upgrade) else {
            continue;
        };
        if let Some(stream) = StreamPathId::of(&packet.addresses().remote) {
            // Before the packet, whose answer goes by the stream.
            hand_over(shared, &worker, index, stream);
        }
        if worker.workers.accept(packet) {
            worker.wake();
        }
    }
}

/// Gives a stream to the worker with this index, unless an admitted device of this worker uses it.
fn hand_over(from: &DriverShared, to: &DriverShared, index: u16, stream: StreamPathId) {
    let Some(place) = from.inner.lock().streams.worker_of(stream) else {
        return;
    };
    let mut worker = place.lock();
    let taken = {
        let mut inner = from.inner.lock();
        match inner.core.client_of_stream(stream) {
            Some(_) => None,
            None => inner.streams.take(stream),
        }
    };
    if let Some(queue) = taken {
        to.inner.lock().streams.put(stream, queue);
        *worker = index;
    }
}

/// The number of streams that the workers of this one's server have.
pub(crate) fn stream_count(shared: &DriverShared) -> usize {
    let Some(workers) = shared.workers.others() else {
        return shared.inner.lock().streams.len();
    };
    let workers = workers.iter().filter_map(Weak::upgrade);
    workers.map(|w| w.inner.lock().streams.len()).sum()
}
