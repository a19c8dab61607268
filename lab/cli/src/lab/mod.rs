//! What runs in the lab: a proxy, the scenario's transfers as processes, and their ends.
//!
//! ```text
//!   origin: nginx or built-in        proxy: cedos prox            device: cedos get, cedos put
//!                                      │ prints d2tp://…              ▲
//!                                      └──────────────────────────────┘
//! ```
//!
//! The flows may have another client (client.rs). Or, as a measure, the kernel carries them: `cedos lab fetch` (over.rs), without a proxy.

pub mod arrival_meter;
pub mod client;
pub mod kill;
pub mod offspring;
pub mod over;
pub mod prox;
pub mod socket_transfer;
pub mod transfers;

use anyhow::Context;
use cedos_lab_emu::{World, plan};
use cedos_lab_scenario::Scenario;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often children are looked after.
pub const LOOK: Duration = Duration::from_millis(2);
/// How long children may take to end after being asked to.
const FAREWELL: Duration = Duration::from_secs(2);

/// Set by SIGINT and SIGTERM: the run then ends as it would by itself, and removes its files.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupt(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Whether the user asked for the end.
pub fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Takes SIGINT and SIGTERM as a wish to end in order.
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

/// `http://` and the origin as the proxy and the device reach it, by address.
pub fn origin_url() -> String {
    format!("http://{}", plan::ORIGIN_V4)
}

/// The origin by name, which has both address families, where names work.
pub fn origin_named(world: &World) -> String {
    if world.has_names() {
        format!("http://{}", cedos_lab_emu::plan::ORIGIN_NAME)
    } else {
        origin_url()
    }
}

/// Tells a `cedos get` what the lab's links stand for: they are none of them radios.
pub fn classes(command: &mut Command, scenario: &Scenario) {
    // Not by an agent of the user's, who has other links.
    command.arg("--alone");
    for link in &scenario.links {
        command.args(["--link", &format!("{}={}", link.name, link.class.word())]);
    }
}

/// The lab's devices are all TUN: `wlan0=free,wwan0=metered` says what they stand for.
pub fn link_classes(scenario: &Scenario) -> String {
    let class = |link: &cedos_lab_scenario::Link| format!("{}={}", link.name, link.class.word());
    let classes = scenario.links.iter().map(class);
    classes.collect::<Vec<_>>().join(",")
}

/// The digest of a file; none if it cannot be read.
pub fn file_sha256(path: &Path) -> Option<[u8; 32]> {
    use sha2::{Digest, Sha256};
    let mut digest = Sha256::new();
    std::io::copy(&mut File::open(path).ok()?, &mut digest).ok()?;
    Some(digest.finalize().into())
}

/// Ask a child to end, and end it if it does not.
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
