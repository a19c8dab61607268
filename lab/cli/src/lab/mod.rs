//! The processes of a lab run: a proxy, and the scenario's transfers.
//!
//! ```text
//!   origin: nginx or built-in        proxy: cedos prox            device: cedos get, cedos put
//!                                      │ prints d2tp://…              ▲
//!                                      └──────────────────────────────┘
//! ```
//!
//! A VPN may have a radio beside its links (bridge.rs). Podcasts have an agent of their own on the device (podcasts.rs). The flows may use another client (client.rs). For comparison the kernel can carry them: `cedos
//! lab fetch` (over.rs), without a proxy.

pub mod arrival_meter;
pub mod bridge;
pub mod client;
pub mod energy_settings;
pub mod kill;
pub mod offspring;
pub mod over;
pub mod podcasts;
pub mod prox;
pub mod socket_transfer;
pub mod store;
pub mod transfers;
pub mod udp_stream;

use anyhow::Context;
use cedos_lab_emu::{World, plan};
use cedos_lab_scenario::Scenario;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The interval at which child processes are checked.
pub const LOOK: Duration = Duration::from_millis(2);
/// How long child processes may take to end after a request.
const FAREWELL: Duration = Duration::from_secs(2);

/// Set by SIGINT and SIGTERM: the run then ends normally, and removes its files.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupt(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Whether the user requested the end.
pub fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Treats SIGINT and SIGTERM as requests to end in order.
///
/// # Errors
/// The system refused.
pub fn heed_interrupts() -> anyhow::Result<()> {
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
    let handler = SigHandler::Handler(interrupt);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler does nothing but store to an atomic.
        unsafe { sigaction(signal, &action) }.context("no handler for signals")?;
    }
    Ok(())
}

/// The URL of the origin as the proxy and the device reach it, with an address.
pub fn origin_url() -> String {
    format!("http://{}", plan::ORIGIN_V4)
}

/// The URL of the origin with its name, which has both address families, if names work.
pub fn origin_named(world: &World) -> String {
    if world.has_names() {
        format!("http://{}", cedos_lab_emu::plan::ORIGIN_NAME)
    } else {
        origin_url()
    }
}

/// Passes the link classes to a `cedos get`, because the lab's links are not radios.
pub fn classes(command: &mut Command, scenario: &Scenario) {
    // Not with an agent of the user, which has other links.
    command.arg("--alone");
    for link in &scenario.links {
        command.args(["--link", &format!("{}={}", link.name, link.class.word())]);
    }
}

/// The classes of the lab's links, which are all TUN devices: `wlan0=free,wwan0=metered`.
pub fn link_classes(scenario: &Scenario) -> String {
    let class = |link: &cedos_lab_scenario::Link| format!("{}={}", link.name, link.class.word());
    let classes = scenario.links.iter().map(class);
    classes.collect::<Vec<_>>().join(",")
}

/// The digest of a file; `None` if it cannot be read.
pub fn file_sha256(path: &Path) -> Option<[u8; 32]> {
    use sha2::{Digest, Sha256};
    let mut digest = Sha256::new();
    std::io::copy(&mut File::open(path).ok()?, &mut digest).ok()?;
    Some(digest.finalize().into())
}

/// Asks a child process to end, and kills it if it does not.
pub fn end(child: &mut Child) {
    use nix::sys::signal::{Signal, kill};
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    let _ = kill(pid, Signal::SIGTERM);
    let mut left = FAREWELL;
    while child.try_wait().is_ok_and(|ended| ended.is_none()) {
        if left.is_zero() {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        std::thread::sleep(LOOK);
        left = left.saturating_sub(LOOK);
    }
}
