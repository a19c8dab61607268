//! A radio that looks like a serial line: two pseudo-terminals, with a rate and a delay between them.
//!
//! ```text
//!  cedos vpn ── /dev/pts/a ═ bytes per second, delay ═ /dev/pts/b ── cedos bridge
//! ```
//!
//! What a program writes waits in the kernel's buffer of its device, some kilobytes, as in a radio.

use anyhow::Context;
use rustix::pty::OpenptFlags;
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How many pieces the radio carries in a second: each is delivered when its last byte has been sent.
const PIECES_PER_SECOND: u64 = 100;
/// The largest piece in bytes.
const PIECE_BYTES_MAX: u64 = 1_024;

/// Two serial devices that are connected by a radio, for the rest of the process.
#[derive(Debug)]
pub struct SerialRadio {
    devices: [PathBuf; 2],
    carried: [Arc<AtomicU64>; 2],
    /// Open for as long as the radio: a device that nobody has open cannot be read from its other side.
    _open: [File; 2],
}

impl SerialRadio {
    /// Connects two new devices, with so many bytes per second and this delay each way.
    ///
    /// # Errors
    /// The system gives no pseudo-terminals.
    pub fn connect(bytes_per_second: u64, delay: Duration) -> anyhow::Result<SerialRadio> {
        let [(near, near_at, near_open), (far, far_at, far_open)] = [device()?, device()?];
        let carried = [Arc::default(), Arc::default()];
        for (from, to, carried) in [(&near, &far, &carried[0]), (&far, &near, &carried[1])] {
            let one_way = OneWayRadio {
                from: from.try_clone()?,
                to: to.try_clone()?,
                bytes_per_second: bytes_per_second.max(1),
                delay,
                carried: Arc::clone(carried),
            };
            one_way.start()?;
        }
        Ok(SerialRadio {
            devices: [near_at, far_at],
            carried,
            _open: [near_open, far_open],
        })
    }

    /// The device files.
    pub fn devices(&self) -> &[PathBuf; 2] {
        &self.devices
    }

    /// Bytes that the radio has carried from each of the devices.
    pub fn carried(&self) -> [u64; 2] {
        [0, 1].map(|n: usize| self.carried[n].load(Ordering::Relaxed))
    }
}

/// A new pseudo-terminal: its other side, the path of its device, and the device, which is open.
fn device() -> anyhow::Result<(File, PathBuf, File)> {
    let none = "the system gives no pseudo-terminal: is /dev/pts mounted?";
    let control = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).context(none)?;
    rustix::pty::grantpt(&control).context(none)?;
    rustix::pty::unlockpt(&control).context(none)?;
    let name = rustix::pty::ptsname(&control, Vec::new()).context(none)?;
    let path = PathBuf::from(name.into_string().context(none)?);
    let open = rustix::fs::open(
        &path,
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY,
        rustix::fs::Mode::empty(),
    );
    let open = open.with_context(|| format!("{} cannot be opened", path.display()))?;
    Ok((File::from(control), path, File::from(open)))
}

/// What the radio does in one direction.
struct OneWayRadio {
    from: File,
    to: File,
    bytes_per_second: u64,
    delay: Duration,
    carried: Arc<AtomicU64>,
}

impl OneWayRadio {
    fn start(mut self) -> anyhow::Result<()> {
        let (send, sent) = mpsc::channel::<(Instant, Vec<u8>)>();
        let mut to = self.to.try_clone()?;
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        thread("radio-send").spawn(move || self.send(&send))?;
        thread("radio-receive").spawn(move || {
            for (at, bytes) in sent {
                // sleep: the radio's delay is its subject
                std::thread::sleep(at.saturating_duration_since(Instant::now()));
                if to.write_all(&bytes).is_err() {
                    return;
                }
            }
        })?;
        Ok(())
    }

    /// Sends piece after piece. A radio needs no processor: what waits when this thread wakes late is sent as if the thread
    /// had woken in time.
    fn send(&mut self, send: &mpsc::Sender<(Instant, Vec<u8>)>) {
        let piece = (self.bytes_per_second / PIECES_PER_SECOND).clamp(1, PIECE_BYTES_MAX);
        let mut buffer = vec![0; piece as usize];
        let mut free_at = Instant::now();
        loop {
            let asked = Instant::now();
            let Ok(n @ 1..) = self.from.read(&mut buffer) else {
                return;
            };
            // A read that had to wait found the radio idle.
            let read = Instant::now();
            if read.duration_since(asked) > Duration::from_millis(1) {
                free_at = free_at.max(read);
            }
            free_at += Duration::from_nanos(n as u64 * 1_000_000_000 / self.bytes_per_second);
            self.carried.fetch_add(n as u64, Ordering::Relaxed);
            if send
                .send((free_at + self.delay, buffer[..n].to_vec()))
                .is_err()
            {
                return;
            }
            // sleep: the radio's rate is its subject
            std::thread::sleep(free_at.saturating_duration_since(Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_radio_carries_both_ways_at_its_rate_and_counts() {
        let radio = SerialRadio::connect(6_000, Duration::from_millis(50)).unwrap();
        let open = |n: usize| {
            let file = File::options()
                .read(true)
                .write(true)
                .open(&radio.devices()[n])
                .unwrap();
            let mut mode = rustix::termios::tcgetattr(&file).unwrap();
            mode.make_raw();
            rustix::termios::tcsetattr(&file, rustix::termios::OptionalActions::Now, &mode)
                .unwrap();
            file
        };
        let (mut near, mut far) = (open(0), open(1));
        let sent: Vec<u8> = (0..1_200_u32).map(|n| n as u8).collect();
        let began = Instant::now();
        near.write_all(&sent).unwrap();
        let mut received = vec![0; sent.len()];
        far.read_exact(&mut received).unwrap();
        assert!(received == sent);
        // 1,200 bytes take 200 ms.
        assert!(began.elapsed() >= Duration::from_millis(249));
        far.write_all(b"back").unwrap();
        let mut back = [0; 4];
        near.read_exact(&mut back).unwrap();
        assert_eq!((&back, radio.carried()), (b"back", [1_200, 4]));
    }
}
