//! An ordinary download for comparison: one GET over TCP, which starts again from the first byte
//! when it breaks.
//!
//! It uses the system's routing, like `curl -O`, and treats [`SILENCE_MAX`] without a byte as
//! broken, which is better than curl's default of waiting for ever.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cedos_lab_emu::{ORIGIN_PORT, World, plan};

/// Silence after which the connection is given up.
const SILENCE_MAX: Duration = Duration::from_secs(3);
/// Time between two tries.
const RETRY: Duration = Duration::from_millis(500);

#[derive(Default)]
struct PlainDownloadCounts {
    held: AtomicU64,
    /// Bytes that were discarded by starting again.
    refetched: AtomicU64,
    starts: AtomicU64,
    whole: AtomicBool,
    stop: AtomicBool,
}

/// A running plain download.
pub(super) struct PlainDownload(Arc<PlainDownloadCounts>);

impl PlainDownload {
    /// Starts the download on the device of `world`.
    pub(super) fn start_in(world: &World, bytes: u64) -> anyhow::Result<PlainDownload> {
        let origin = SocketAddr::new(IpAddr::V4(plan::ORIGIN_V4), ORIGIN_PORT);
        let (plain, download) = PlainDownload::prepare(bytes, move || Some(origin));
        world.device().thread("plain", download)?;
        Ok(plain)
    }

    /// Starts the download on a thread of this program; `way` returns the address for a connection
    /// to the origin.
    pub(super) fn start_by(
        way: impl Fn() -> Option<SocketAddr> + Send + 'static,
        bytes: u64,
    ) -> anyhow::Result<PlainDownload> {
        let (plain, download) = PlainDownload::prepare(bytes, way);
        std::thread::Builder::new()
            .name("plain".to_owned())
            .spawn(download)?;
        Ok(plain)
    }

    /// Prepares the download's thread. It ends by itself: every wait is bounded, and `stop` is
    /// checked after each.
    fn prepare(
        bytes: u64,
        way: impl Fn() -> Option<SocketAddr> + Send + 'static,
    ) -> (PlainDownload, impl FnOnce() + Send + 'static) {
        let counts: Arc<PlainDownloadCounts> = Arc::default();
        let mine = counts.clone();
        let download = move || {
            while !mine.stop.load(Ordering::Relaxed) {
                if let Some(at) = way() {
                    // Any error is handled by starting again.
                    let _ = fetch(at, bytes, &mine);
                }
                let held = mine.held.load(Ordering::Relaxed);
                if held == bytes {
                    mine.whole.store(true, Ordering::Relaxed);
                    return;
                }
                mine.held.store(0, Ordering::Relaxed);
                mine.refetched.fetch_add(held, Ordering::Relaxed);
                std::thread::sleep(RETRY);
            }
        };
        (PlainDownload(counts), download)
    }

    /// Bytes held now.
    pub(super) fn held(&self) -> u64 {
        self.0.held.load(Ordering::Relaxed)
    }
    /// Bytes that were fetched and discarded.
    pub(super) fn refetched(&self) -> u64 {
        self.0.refetched.load(Ordering::Relaxed)
    }
    /// The number of connections that got an answer.
    pub(super) fn starts(&self) -> u64 {
        self.0.starts.load(Ordering::Relaxed)
    }
    pub(super) fn is_whole(&self) -> bool {
        self.0.whole.load(Ordering::Relaxed)
    }
    pub(super) fn stop(&self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

fn fetch(origin: SocketAddr, bytes: u64, counts: &PlainDownloadCounts) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&origin, SILENCE_MAX)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    write!(
        stream,
        "GET /bytes/{bytes} HTTP/1.1\r\nHost: {origin}\r\nConnection: close\r\n\r\n"
    )?;
    let mut piece = vec![0; 64 * 1024];
    let mut head = Vec::new();
    let mut begun = false;
    while !counts.stop.load(Ordering::Relaxed) {
        let n = stream.read(&mut piece)?;
        if n == 0 {
            return Ok(());
        }
        let mut body = n;
        if !begun {
            head.extend_from_slice(&piece[..n]);
            let Some(end) = head.windows(4).position(|w| w == b"\r\n\r\n") else {
                continue;
            };
            begun = true;
            counts.starts.fetch_add(1, Ordering::Relaxed);
            body = head.len() - end - 4;
        }
        let held = counts.held.fetch_add(body as u64, Ordering::Relaxed) + body as u64;
        if held >= bytes {
            return Ok(());
        }
    }
    Ok(())
}
