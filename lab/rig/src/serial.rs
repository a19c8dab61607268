//! Serial lines of the kernel's pseudo-terminals: two devices, and a cable between them with a rate.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
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
                let mut rest = &bytes[..];
                while let Ok(n @ 1..) = rustix::io::write(&to, rest) {
                    rest = &rest[n..];
                }
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
