//! What sessions without a flow take at a server, counted at the allocator: growth that nobody meant fails here.
//! Figures with the allocator's own part and the driver's are in `docs/benchmarks.md`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use d2tp_session::*;

/// The bytes that the program asked for and has not given back.
static HELD_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Counts what the program asks the system's allocator for.
struct CountingAllocator;

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const STEP: Span = Span::from_micros(200);
/// Steps without a packet after which a device and the server have nothing more to say for now.
const QUIET_STEPS: u32 = 20;

/// The addresses of a path as one end sees them, with the port of the other.
fn addresses(port: u16) -> Addresses {
    Addresses {
        link: LinkId(0),
        local: None,
        remote: ([192, 0, 2, 1], port).into(),
    }
}

fn deliver(to: &mut Endpoint, now: Time, from: u16, packets: (Transmit, &mut [u8])) {
    let (transmit, bytes) = packets;
    let addresses = addresses(from);
    let incoming = IncomingDatagram { addresses, bytes };
    to.handle_datagrams(now, incoming, transmit.segment);
}

struct MemoryBench {
    now: Time,
    server: Endpoint,
    peer: PublicKey,
    devices: u16,
    buffer: Vec<u8>,
}

impl MemoryBench {
    /// Lets a new device connect. It is gone without a word when it has nothing more to say.
    fn connect_device(&mut self) {
        self.devices += 1;
        let port = self.devices;
        let mut key = [7; 32];
        key[8..10].copy_from_slice(&port.to_be_bytes());
        let (config, seed) = (EndpointConfig::default(), key);
        let key = SecretKey::from_bytes(key);
        let mut device = Endpoint::new(config, key, Admission::Nobody, seed, [2; 32]);
        let id = device.connect(self.now, self.peer, 7, 1..100);
        let opened = |s: &mut Session| s.open_path(self.now, addresses(4433), false);
        device.with(id, opened).expect("it is there");
        let mut quiet = 0;
        while quiet < QUIET_STEPS {
            quiet += 1;
            self.now += STEP;
            let now = self.now;
            device.handle_timeouts(now);
            self.server.handle_timeouts(now);
            while let Some(t) = device.poll_transmit(now, &mut self.buffer) {
                deliver(&mut self.server, now, port, (t, &mut self.buffer[..t.len]));
                quiet = 0;
            }
            while let Some(t) = self.server.poll_transmit(now, &mut self.buffer) {
                if t.remote.port() == port {
                    deliver(&mut device, now, 4433, (t, &mut self.buffer[..t.len]));
                    quiet = 0;
                }
            }
            while device.poll_event().is_some() || self.server.poll_event().is_some() {}
        }
        let state = device.session(id).map(Session::state);
        assert_eq!(state, Some(SessionState::Established));
    }

    /// Lets time pass in which nothing arrives, and all that the server sends is lost.
    fn wait(&mut self, span: Span) {
        let until = self.now + span;
        while self.now < until {
            self.now = self.server.next_timeout().max(self.now + STEP).min(until);
            self.server.handle_timeouts(self.now);
            while (self.server.poll_transmit(self.now, &mut self.buffer)).is_some() {}
            while self.server.poll_event().is_some() {}
        }
    }

    /// The bytes that the program holds with so many sessions at the server.
    fn held_with(&mut self, sessions: u16) -> usize {
        while self.devices < sessions {
            self.connect_device();
        }
        self.wait(Span::from_secs(2));
        let awake = self.server.counts().0;
        assert_eq!(awake, usize::from(sessions));
        HELD_BYTES.load(Ordering::Relaxed)
    }
}

/// What a session may take, without the allocator's own part.
const LIVE_BYTES_MAX: usize = 3_100; // measured: 3,057
/// Twice as many sessions fill tables that are twice as large, so the difference has no spare room of its own.
const SESSIONS: u16 = 512;

#[test]
fn a_live_session_without_a_flow_takes_little_memory_at_a_server() {
    let server = SecretKey::from_bytes([200; 32]);
    let peer = server.public();
    let (config, admission) = (EndpointConfig::default(), Admission::Anybody);
    let mut bench = MemoryBench {
        now: Time::ZERO + Span::from_secs(1),
        server: Endpoint::new(config, server, admission, [3; 32], [4; 32]),
        peer,
        devices: 0,
        buffer: vec![0; 65_536],
    };
    let half = bench.held_with(SESSIONS / 2);
    let all = bench.held_with(SESSIONS);
    let each = (all - half) / usize::from(SESSIONS / 2);
    println!("{each} B for each live session");
    assert!(each <= LIVE_BYTES_MAX, "{each}");
    // The server falls silent, and the sessions go on as they are.
    bench.wait(Span::from_secs(20));
    assert_eq!(bench.server.counts().0, usize::from(SESSIONS));
    let silent = HELD_BYTES.load(Ordering::Relaxed);
    let more = silent.saturating_sub(all) / usize::from(SESSIONS);
    assert_eq!(more, 0, "bytes more for each silent session");
}
