//! Plain TCP over the emulated links of [`crate::Loopback`], to compare with D2TP.
//!
//! ```text
//!  client ─TCP─▶ relay of the link ─▶ upward pipe ─▶ ─TCP─▶ origin
//!         ◀─                       ◀─  down pipe  ◀─
//! ```
//!
//! The models delay and pace the bytes. Nothing is lost or reordered, since TCP would repair that,
//! and there is no slow start. A connection is reset when its link is lost or gets another address,
//! where a real one would hang until a timeout. All three favour TCP.

use crate::clock::EmuClock;
use crate::world::WorldEvent;
use anyhow::Context;
use cedos_lab_link::{LinkCondition, LinkDirection, LinkModel, Loss, Profile, Queue, Time};
use cedos_lab_scenario::{EventKind, Scenario};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

/// The size of a piece of data for the models, in bytes: one segment.
const PIECE_BYTES: usize = 1448;
/// The bytes that the models count for each segment beside its payload: IPv4 and TCP headers.
const HEADER_BYTES: u32 = 52;
/// The most bytes of a connection inside a link: more than any link of a demonstration needs to be
/// full, and the most that a lost link discards.
const WINDOW_BYTES: usize = 256 * 1024; // a guess: 60 Mb/s times 34 ms

#[derive(Clone)]
struct TcpRelayState {
    condition: LinkCondition,
    /// A counter that grows when connections must not survive.
    attachment: u64,
}

/// Relays for TCP, one for each link of a scenario.
pub struct TcpRelays {
    states: Vec<watch::Sender<TcpRelayState>>,
    at: Vec<SocketAddr>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TcpRelays {
    /// Creates relays to the origin at `origin`; every link is down.
    ///
    /// # Errors
    /// A port or a thread is not available.
    pub fn start(scenario: &Scenario, origin: SocketAddr) -> anyhow::Result<TcpRelays> {
        let (mut states, mut listening) = (Vec::new(), Vec::new());
        for number in 0..scenario.links.len() {
            let mut condition = scenario.condition_at_start(number);
            condition.up = false;
            let attachment = 0;
            let (tell, told) = watch::channel(TcpRelayState {
                condition,
                attachment,
            });
            states.push(tell);
            listening.push(told);
        }
        let seed = scenario.seed;
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, wait) = channel();
        let thread = std::thread::Builder::new()
            .name("lab-tcp".to_owned())
            .spawn(move || {
                let told = ready.clone();
                let served = serve(
                    listening,
                    origin,
                    seed,
                    |at| drop(told.send(Ok(at))),
                    stopped,
                );
                if let Err(error) = served {
                    let _ = ready.send(Err(error));
                }
            })
            .context("the TCP relays' thread cannot be started")?;
        let at = wait.recv().context("the TCP relays died")??;
        Ok(TcpRelays {
            states,
            at,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Handles an event of a link.
    pub fn happened(&self, happening: &WorldEvent) {
        let event = &happening.event;
        let moved = matches!(event.kind, EventKind::NewAddress { .. } | EventKind::Down);
        self.states[event.link].send_modify(|state| {
            state.condition = event.condition.clone();
            state.attachment += u64::from(moved);
        });
    }

    /// The address for a new connection to the origin: over the first link that is up, as the
    /// routing of a device prefers Wi-Fi.
    pub fn way(&self) -> Option<SocketAddr> {
        let up = self.states.iter().position(|s| s.borrow().condition.up)?;
        Some(self.at[up])
    }
}

impl Drop for TcpRelays {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(
    links: Vec<watch::Receiver<TcpRelayState>>,
    origin: SocketAddr,
    seed: u64,
    ready: impl FnOnce(Vec<SocketAddr>),
    stopped: oneshot::Receiver<()>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let clock = EmuClock::start();
        let (mut servers, mut at) = (JoinSet::new(), Vec::new());
        for told in links {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            at.push(listener.local_addr()?);
            servers.spawn(async move {
                let mut connections = JoinSet::new();
                while let Ok((client, _)) = listener.accept().await {
                    while connections.try_join_next().is_some() {}
                    let told = told.clone();
                    connections.spawn(async move {
                        if let Err(error) = carry(client, origin, told, clock, seed).await {
                            tracing::debug!(%error, "a TCP connection ended");
                        }
                    });
                }
            });
        }
        ready(at);
        let _ = stopped.await;
        Ok(())
    })
}

/// Carries one connection, until it ends or its link is lost.
async fn carry(
    mut client: TcpStream,
    origin: SocketAddr,
    mut told: watch::Receiver<TcpRelayState>,
    clock: EmuClock,
    seed: u64,
) -> std::io::Result<()> {
    let TcpRelayState {
        condition,
        attachment,
    } = told.borrow_and_update().clone();
    if !condition.up {
        return client.set_zero_linger();
    }
    let mut server = TcpStream::connect(origin).await?;
    let mut link: LinkModel<Vec<u8>> = LinkModel::new(&lossless(&condition), seed, 0);
    let (mut inside, mut ended) = (0, false);
    let (mut from_server, mut from_client) = (vec![0; 32 * 1024], vec![0; 4096]);
    loop {
        let now = clock.now();
        while let Some(piece) = link.pop(LinkDirection::Down, now) {
            inside -= piece.len();
            client.write_all(&piece).await?;
        }
        while let Some(piece) = link.pop(LinkDirection::Up, now) {
            server.write_all(&piece).await?;
        }
        if ended && inside == 0 {
            return client.shutdown().await;
        }
        let next = link.next_event().map(|at| clock.until(at));
        tokio::select! {
            biased;
            changed = told.changed() => {
                let state = told.borrow_and_update().clone();
                if changed.is_err() || !state.condition.up || state.attachment != attachment {
                    return client.set_zero_linger();
                }
                link.apply(clock.now(), &lossless(&state.condition));
            }
            () = tokio::time::sleep(next.unwrap_or_default()), if next.is_some() => {}
            read = server.read(&mut from_server), if !ended && inside < WINDOW_BYTES => {
                let n = read?;
                ended = n == 0;
                inside += n;
                push(&mut link, LinkDirection::Down, clock.now(), &from_server[..n]);
            }
            read = client.read(&mut from_client) => {
                let n = read?;
                if n == 0 {
                    return Ok(());
                }
                push(&mut link, LinkDirection::Up, clock.now(), &from_client[..n]);
            }
        }
    }
}

fn push(link: &mut LinkModel<Vec<u8>>, way: LinkDirection, now: Time, bytes: &[u8]) {
    for piece in bytes.chunks(PIECE_BYTES) {
        link.push(way, now, piece.len() as u32 + HEADER_BYTES, piece.to_vec());
    }
}

/// The condition of the link for TCP: rate and delay, without losses.
fn lossless(condition: &LinkCondition) -> LinkCondition {
    let repaired = |profile: &Profile| Profile {
        loss: Loss::default(),
        queue: Queue::Bytes(u64::MAX),
        reorder: 0.0,
        duplicate: 0.0,
        corrupt: 0.0,
        ..profile.clone()
    };
    LinkCondition {
        // Blocked data is sent again until it passes.
        stalled: condition.stalled || !condition.reach.passes_tcp(),
        down: repaired(&condition.down),
        upward: repaired(&condition.upward),
        ..condition.clone()
    }
}
