//! Honest clients beside the hostile one: some fetch at a constant rate, others connect during the
//! attack.
//!
//! ```text
//!  HONEST clients    an object each every REQUEST_EVERY, regardless of the attack
//!  27 newcomers      one after the other in the time of the attack; every second one wakes by a ticket
//! ```

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use d2tp_session::{EndpointConfig, FlowId, FlowOptions, PublicKey, ReadOutcome, SessionEvent};

use crate::handshake_hosts::{HandshakeHosts, key_of};

/// Clients that fetch all the time.
pub const HONEST: u64 = 4;
/// Clients that connect during an attack.
pub const NEWCOMERS: u64 = 27;
/// The interval of each client's requests.
const REQUEST_EVERY: Duration = Duration::from_millis(250);
/// The size of an object.
const OBJECT_BYTES: u64 = 64 * 1024;
/// The maximum number of unanswered requests of one client.
const REQUESTS_MAX: usize = 16;
/// How long a newcomer may take to connect.
const ADMITTED_WITHIN: Duration = Duration::from_secs(10);
/// The first number of honest clients among the keys.
const FIRST: u64 = 1 << 40;

/// The keys of all honest clients.
pub fn honest_keys() -> impl Iterator<Item = PublicKey> {
    (FIRST..FIRST + HONEST + NEWCOMERS).map(|number| key_of(number).public())
}

/// Results that the clients report while they run.
#[derive(Default)]
struct SharedResults {
    bytes: AtomicU64,
    refused: AtomicU64,
    admitted: AtomicU64,
    attack: AtomicBool,
    stop: AtomicBool,
}

/// The running clients.
pub struct HonestLoad {
    shared: Arc<SharedResults>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl HonestLoad {
    /// Starts the clients, and waits until they are connected and the newcomers have their tickets.
    /// Newcomers connect during `attack` after the call of [`HonestLoad::begin_attack`].
    ///
    /// # Errors
    /// They cannot connect although there is no attack yet.
    pub fn start(
        proxy: SocketAddr,
        key: PublicKey,
        origin: SocketAddr,
        attack: Duration,
    ) -> Result<HonestLoad> {
        let shared = Arc::<SharedResults>::default();
        let mut clients = HonestClients::new(proxy, key, origin, attack, shared.clone())?;
        clients.prepare()?;
        let thread = std::thread::spawn(move || clients.run());
        Ok(HonestLoad {
            shared,
            thread: Some(thread),
        })
    }

    /// Bytes of responses so far.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Newcomers whose handshake was completed in time.
    pub fn admitted(&self) -> u64 {
        self.shared.admitted.load(Ordering::Relaxed)
    }

    /// Lets newcomers connect.
    pub fn begin_attack(&self) {
        self.shared.attack.store(true, Ordering::Relaxed);
    }

    /// Ends the clients. Returns the number of their flows that were reset or refused.
    ///
    /// # Errors
    /// A socket failed.
    pub fn end(mut self) -> Result<u64> {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            ended.map_err(|_| anyhow::anyhow!("the honest clients panicked"))??;
        }
        Ok(self.shared.refused.load(Ordering::Relaxed))
    }
}

impl Drop for HonestLoad {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

struct HonestClients {
    crowd: HandshakeHosts,
    origin: SocketAddr,
    attack: Duration,
    shared: Arc<SharedResults>,
    /// Open flows, by the client's place, and the bytes received on each.
    flows: HashMap<usize, HashMap<FlowId, u64>>,
    /// Records of the newcomers that wake.
    records: HashMap<u64, Vec<u8>>,
    /// Newcomers that are connecting: the time of their start, by place.
    coming: HashMap<usize, Instant>,
}

impl HonestClients {
    fn new(
        proxy: SocketAddr,
        key: PublicKey,
        origin: SocketAddr,
        attack: Duration,
        shared: Arc<SharedResults>,
    ) -> Result<HonestClients> {
        Ok(HonestClients {
            crowd: HandshakeHosts::with_config(proxy, key, 2, EndpointConfig::default())?,
            origin,
            attack,
            shared,
            flows: HashMap::new(),
            records: HashMap::new(),
            coming: HashMap::new(),
        })
    }

    /// Connects the honest clients, and gets tickets for those that wake later.
    fn prepare(&mut self) -> Result<()> {
        for number in FIRST..FIRST + HONEST {
            let place = self.crowd.begin(number, key_of(number), |_| {});
            self.flows.insert(place, HashMap::new());
        }
        let waking = (0..NEWCOMERS).filter(|n| n % 2 == 1);
        let mut waking: HashMap<usize, u64> = waking
            .map(|n| FIRST + HONEST + n)
            .map(|number| (self.crowd.begin(number, key_of(number), |_| {}), number))
            .collect();
        let begun = Instant::now();
        let (mut in_place, mut told) = (0, Vec::new());
        while in_place < HONEST || !waking.is_empty() {
            ensure!(
                begun.elapsed() < Duration::from_secs(20),
                "honest clients do not get in although nobody is hostile yet"
            );
            self.crowd.turn(Duration::from_millis(5), &mut told)?;
            for (place, event) in told.drain(..) {
                if !matches!(event, SessionEvent::PathUp { .. }) {
                    continue;
                }
                let Some(number) = waking.remove(&place) else {
                    in_place += 1;
                    continue;
                };
                let now = self.crowd.now();
                let host = self.crowd.host(place).context("it was there")?;
                let record = host.hibernate(now)?;
                self.crowd.drop_host(place);
                self.records.insert(number, record);
            }
        }
        Ok(())
    }

    fn run(mut self) -> Result<()> {
        let begun = Instant::now();
        let mut next_request = vec![begun; HONEST as usize];
        let (mut attacked_at, mut newcomers) = (None, 0);
        let mut told = Vec::new();
        while !self.shared.stop.load(Ordering::Relaxed) {
            self.crowd.turn(Duration::from_millis(5), &mut told)?;
            for (place, event) in told.drain(..) {
                match event {
                    SessionEvent::Established { .. } => self.on_established(place),
                    SessionEvent::Readable(flow) => self.read(place, flow),
                    _ => {}
                }
            }
            for (place, due) in next_request.iter_mut().enumerate() {
                let now = Instant::now();
                if *due <= now {
                    // Missed requests are not made up for: they are omitted.
                    *due = (*due + REQUEST_EVERY).max(now);
                    self.request(place);
                }
            }
            if attacked_at.is_none() && self.shared.attack.load(Ordering::Relaxed) {
                attacked_at = Some(Instant::now());
            }
            if let Some(at) = attacked_at {
                let due = self.attack.mul_f64(newcomers as f64 / NEWCOMERS as f64);
                if newcomers < NEWCOMERS && at.elapsed() >= due {
                    self.newcomer(FIRST + HONEST + newcomers)?;
                    newcomers += 1;
                }
            }
        }
        Ok(())
    }

    fn newcomer(&mut self, number: u64) -> Result<()> {
        let place = match self.records.get(&number) {
            Some(record) => self.crowd.wake(number, key_of(number), record, 2)?,
            None => self.crowd.begin(number, key_of(number), |_| {}),
        };
        self.coming.insert(place, Instant::now());
        Ok(())
    }

    fn on_established(&mut self, place: usize) {
        if let Some(since) = self.coming.remove(&place) {
            let in_time = since.elapsed() <= ADMITTED_WITHIN;
            (self.shared.admitted).fetch_add(u64::from(in_time), Ordering::Relaxed);
        }
    }

    fn request(&mut self, place: usize) {
        let Some(flows) = self.flows.get_mut(&place) else {
            return;
        };
        if flows.len() >= REQUESTS_MAX {
            return;
        }
        let request = format!(
            "GET http://{0}/object/{OBJECT_BYTES} HTTP/1.1\r\nHost: {0}\r\n\r\n",
            self.origin
        );
        let Some(host) = self.crowd.host(place) else {
            return;
        };
        let opened = host.with(|session| {
            let flow = session.open(FlowOptions::default()).ok()?;
            session.write(flow, request.into()).ok()?;
            session.finish(flow).ok()?;
            Some(flow)
        });
        flows.extend(opened.flatten().map(|flow| (flow, 0)));
        let now = self.crowd.now();
        self.crowd.pump(place, now);
    }

    fn read(&mut self, place: usize, flow: FlowId) {
        let flows = self.flows.get_mut(&place);
        let Some(bytes) = flows.and_then(|flows| flows.get_mut(&flow)) else {
            return;
        };
        let Some(host) = self.crowd.host(place) else {
            return;
        };
        let mut more = 0;
        let is_over = host.with(|session| {
            loop {
                match session.read(flow, usize::MAX) {
                    Ok(ReadOutcome::Chunk(chunk)) => more += chunk.len() as u64,
                    Ok(ReadOutcome::Pending) => return false,
                    Ok(ReadOutcome::End) | Err(_) => return true,
                }
            }
        });
        *bytes += more;
        self.shared.bytes.fetch_add(more, Ordering::Relaxed);
        if is_over != Some(false) {
            // A refusal is shorter than an object.
            let refused = u64::from(*bytes < OBJECT_BYTES);
            self.shared.refused.fetch_add(refused, Ordering::Relaxed);
            if let Some(flows) = self.flows.get_mut(&place) {
                flows.remove(&flow);
            }
        }
        let now = self.crowd.now();
        self.crowd.pump(place, now);
    }
}
