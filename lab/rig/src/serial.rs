//! Serial lines of the kernel's pseudo-terminals: two devices, and a cable between them with a rate.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::pty::OpenptFlags;

/// How long to wait for a device that nobody has open.
const CLOSED_WAIT: Duration = Duration::from_millis(5);
/// How much of a second a cable carries at once.
const PIECES_PER_SECOND: u64 = 100;

/// A pseudo-terminal: a serial device for a program, and the end of the cable that is plugged into it.
#[derive(Debug)]
pub struct PseudoTerminal {
    control: OwnedFd,
    /// The device file.
    pub device: PathBuf,
}

impl PseudoTerminal {
    /// A new device. When this value is dropped, and no cable is plugged in, the device hangs up.
    pub fn open() -> PseudoTerminal {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let control = rustix::pty::openpt(flags).expect("a pseudo-terminal");
        rustix::pty::grantpt(&control).expect("granted");
        rustix::pty::unlockpt(&control).expect("unlocked");
        let name = rustix::pty::ptsname(&control, Vec::new()).expect("a name");
        PseudoTerminal {
            control,
            device: PathBuf::from(name.into_string().expect("ASCII")),
        }
    }

    /// Carries what programs write to this device to another one for the rest of the process: at a rate in
    /// bytes per second, or as fast as they take it, each piece as `change` leaves it. A cable needs no processor: what
    /// waits when this thread wakes late is carried as if the thread had woken in time.
    pub fn carry_to(
        &self,
        to: &PseudoTerminal,
        rate: Option<u64>,
        mut change: impl FnMut(&mut Vec<u8>) + Send + 'static,
    ) {
        let from = self.control.try_clone().expect("a descriptor");
        let to = to.control.try_clone().expect("a descriptor");
        let piece = rate.map_or(1_024, |rate| (rate / PIECES_PER_SECOND).clamp(1, 1_024));
        std::thread::spawn(move || {
            let mut buffer = vec![0; piece as usize];
            let mut free_at = Instant::now();
            let mut was_waiting = false;
            loop {
                // The last program that closes a device makes reading fail until another one opens it.
                let Ok(n) = rustix::io::read(&from, &mut buffer) else {
                    // sleep: the kernel does not tell when a program opens the device
                    std::thread::sleep(CLOSED_WAIT);
                    continue;
                };
                if let Some(rate) = rate {
                    let took = Duration::from_nanos(n as u64 * 1_000_000_000 / rate);
                    if !was_waiting {
                        free_at = free_at.max(Instant::now());
                    }
                    free_at += took;
                    // sleep: the cable's rate is its subject
                    std::thread::sleep(free_at.saturating_duration_since(Instant::now()));
                    was_waiting = has_bytes(&from);
                }
                let mut bytes = buffer[..n].to_vec();
                change(&mut bytes);
                write_whole(&to, &bytes);
            }
        });
    }
}

/// Whether bytes wait to be read.
fn has_bytes(from: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
    let is_ready = poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    let events = polled[0].revents();
    is_ready && events.is_some_and(|events| events.contains(PollFlags::POLLIN))
}

/// Two devices, and a cable between them that carries so many bytes per second each way.
pub fn serial_cable(rate: Option<u64>) -> [PseudoTerminal; 2] {
    let ends = [PseudoTerminal::open(), PseudoTerminal::open()];
    ends[0].carry_to(&ends[1], rate, |_| ());
    ends[1].carry_to(&ends[0], rate, |_| ());
    ends
}

/// Who sends on an air, until when, and when two did at once.
#[derive(Debug)]
struct AirUse {
    sender: usize,
    until: Instant,
    collided_at: Option<Instant>,
}

/// Serial devices of radios that share an air of so many bytes per second, for the rest of the process. The first one and the
/// others hear each other; the others hear each other only where `hears_all`. What two send at once nobody understands.
pub fn shared_air(devices: usize, rate: u64, hears_all: bool) -> Vec<PseudoTerminal> {
    let ends: Vec<PseudoTerminal> = (0..devices).map(|_| PseudoTerminal::open()).collect();
    let air = Arc::new(Mutex::new(AirUse {
        sender: devices,
        until: Instant::now(),
        collided_at: None,
    }));
    for (n, end) in ends.iter().enumerate() {
        let from = end.control.try_clone().expect("a descriptor");
        let hearers = ends.iter().enumerate();
        let hearers = hearers.filter(|(m, _)| *m != n && (*m == 0 || n == 0 || hears_all));
        let hearers = hearers.map(|(_, to)| to.control.try_clone().expect("a descriptor"));
        let (hearers, air) = (hearers.collect::<Vec<OwnedFd>>(), air.clone());
        std::thread::spawn(move || send_on_air(n, &from, &hearers, &air, rate));
    }
    ends
}

/// Sends what a device writes, piece after piece.
fn send_on_air(n: usize, from: &OwnedFd, hearers: &[OwnedFd], air: &Mutex<AirUse>, rate: u64) {
    let piece = (rate / PIECES_PER_SECOND).clamp(1, 1_024);
    let mut buffer = vec![0; piece as usize];
    let mut free_at = Instant::now();
    let mut was_waiting = false;
    loop {
        let Ok(read) = rustix::io::read(from, &mut buffer) else {
            // sleep: the kernel does not tell when a program opens the device
            std::thread::sleep(CLOSED_WAIT);
            continue;
        };
        if !was_waiting {
            free_at = free_at.max(Instant::now());
        }
        let began = free_at;
        free_at += Duration::from_nanos(read as u64 * 1_000_000_000 / rate);
        {
            let mut air = air.lock().expect("no thread panicked");
            if air.sender != n && air.until > began {
                air.collided_at = Some(Instant::now());
            }
            air.sender = n;
            air.until = air.until.max(free_at);
        }
        // sleep: the air's rate is its subject
        std::thread::sleep(free_at.saturating_duration_since(Instant::now()));
        was_waiting = has_bytes(from);
        let collided_at = air.lock().expect("no thread panicked").collided_at;
        if collided_at.is_some_and(|at| at >= began) {
            buffer[..read].iter_mut().for_each(|byte| *byte ^= 0x55);
        }
        for to in hearers {
            write_whole(to, &buffer[..read]);
        }
    }
}

fn write_whole(to: &OwnedFd, mut bytes: &[u8]) {
    while let Ok(n @ 1..) = rustix::io::write(to, bytes) {
        bytes = &bytes[n..];
    }
}

/// A cable that carries bytes until it is dropped: then it is unplugged, in the middle of a frame perhaps.
#[derive(Debug)]
pub struct PluggedCable {
    is_plugged: Arc<AtomicBool>,
    directions: Vec<JoinHandle<()>>,
}

impl PluggedCable {
    /// Connects two devices at a rate in bytes per second, each piece as `change` leaves it.
    pub fn plug(
        ends: [&PseudoTerminal; 2],
        rate: u64,
        change: impl FnMut(&mut Vec<u8>) + Clone + Send + 'static,
    ) -> PluggedCable {
        let is_plugged = Arc::new(AtomicBool::new(true));
        let [near, far] = ends;
        let directions = [(near, far), (far, near)].map(|(from, to)| {
            let from = from.control.try_clone().expect("a descriptor");
            let to = to.control.try_clone().expect("a descriptor");
            let (is_plugged, mut change) = (is_plugged.clone(), change.clone());
            std::thread::spawn(move || {
                let mut buffer = vec![0; (rate / PIECES_PER_SECOND).clamp(1, 1_024) as usize];
                while is_plugged.load(Ordering::Relaxed) {
                    if !has_bytes(&from) {
                        // sleep: bytes are looked for until the cable is unplugged
                        std::thread::sleep(CLOSED_WAIT);
                        continue;
                    }
                    let Ok(n) = rustix::io::read(&from, &mut buffer) else {
                        continue;
                    };
                    // sleep: the cable's rate is its subject
                    std::thread::sleep(Duration::from_nanos(n as u64 * 1_000_000_000 / rate));
                    let mut bytes = buffer[..n].to_vec();
                    change(&mut bytes);
                    write_whole(&to, &bytes);
                }
            })
        });
        PluggedCable {
            is_plugged,
            directions: directions.into(),
        }
    }
}

impl Drop for PluggedCable {
    fn drop(&mut self) {
        self.is_plugged.store(false, Ordering::Relaxed);
        for direction in self.directions.drain(..) {
            let _ = direction.join();
        }
    }
}
