//! One object over a DTN stack, as bundles from one daemon to another: `dtnd` of dtn7 (Bundle
//! Protocol version 7, RFC 9171) over its TCP convergence layer (RFC 9174).
//!
//! ```text
//!  dtn-send ──HTTP, own lo──▶ dtnd ══ TCP, port 4556 ══▶ dtnd ──HTTP, own lo──▶ dtn-receive
//! ```
//!
//! A daemon holds whole bundles, so the object is divided into many; an application passes and
//! takes them one by one through the daemon's HTTP interface. The receiving end counts from the
//! first bundle to the last. The CPU times of the daemon and the application are added: neither
//! works without the other.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::bulk::cpu_s;
use crate::meter::MeterReport;
use crate::placement::ProcessPlacement;
use crate::process::{Message, Process, own_program, tell};

/// The name of the daemon's program.
const PROGRAM: &str = "dtnd";
/// Payload of a bundle: half of what the daemon's HTTP interface takes in one request.
pub const BUNDLE_BYTES: u64 = 1_000_000;
/// The default port of the daemons' convergence layer (RFC 9174 §8).
const PORT: u16 = 4556;
/// The address at which applications reach the daemon, in its own namespace.
const HTTP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3000);
/// The endpoint to which applications send and on which they listen.
const ENDPOINT: &str = "bulk";
/// An answer shorter than this says that there is no bundle.
const BUNDLE_BYTES_MIN: usize = 64;
/// How often an application polls if there was no bundle.
const LOOK: Duration = Duration::from_millis(5);
/// How long a daemon may take until it listens.
const PATIENCE: Duration = Duration::from_secs(20);

/// The path of the program, or why it is missing.
pub fn find(named: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(program) = named {
        return match program.is_file() {
            true => Ok(program.to_owned()),
            false => Err(format!("there is no {}", program.display())),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(PROGRAM))
        .find(|program| program.is_file())
        .ok_or_else(|| "not installed (cargo install dtn7 --locked, or --dtnd PROGRAM)".to_owned())
}

/// Begins a transfer: sender, receiver, and the sender's daemon.
pub fn start(
    program: &Path,
    lane: &dyn ProcessPlacement,
    bytes: u64,
) -> Result<(Process, Process, u32)> {
    let end = |verb: &str| -> Result<Command> {
        let mut command = own_program(verb)?;
        command.arg("--dtnd").arg(program);
        command.args(["--bytes", &bytes.to_string()]);
        Ok(command)
    };
    let receiver = Process::new(lane.start_receiver(end("dtn-receive")?)?, "receiver")?;
    receiver.hear::<u32>(PATIENCE)?;
    let mut sender = end("dtn-send")?;
    sender.args(["--to", &lane.receiver_address().to_string()]);
    let sender = Process::new(lane.start_sender(sender)?, "sender")?;
    let daemon = sender.hear(PATIENCE)?;
    Ok((sender, receiver, daemon))
}

#[derive(clap::Args)]
pub struct DtnOptions {
    #[arg(long)]
    dtnd: PathBuf,
    #[arg(long)]
    bytes: u64,
    /// The other daemon's address, at the sending end
    #[arg(long)]
    to: Option<IpAddr>,
}

/// The receiving process: the application and its daemon.
pub fn receive(options: &DtnOptions) -> Result<()> {
    let daemon = Daemon::start(&options.dtnd, "device", &["-e", ENDPOINT])?;
    tell(&daemon.child.id())?;
    let take = format!("GET /endpoint?{ENDPOINT}");
    let mut left = sizes(options.bytes).len();
    let mut first = None;
    while left > 0 {
        let bundle = daemon.ask(&take, &[])?;
        if bundle.len() < BUNDLE_BYTES_MIN {
            std::thread::sleep(LOOK);
            continue;
        }
        left -= 1;
        if first.is_none() {
            first = Some((Instant::now(), daemon.cpu_s()?));
        }
    }
    let (at, cpu_s) = first.context("there is nothing to receive")?;
    tell(&Message::Report(MeterReport {
        // The first bundle had arrived when counting began.
        bytes: options.bytes - BUNDLE_BYTES.min(options.bytes),
        window_s: at.elapsed().as_secs_f64(),
        cpu_s: daemon.cpu_s()? - cpu_s,
        waited_s: 0.0,
        notes: format!(
            "bundles of {} kB, counted from the end of the first",
            BUNDLE_BYTES / 1000
        ),
    }))
}

/// The sending process, until it is killed.
pub fn send(options: &DtnOptions) -> Result<()> {
    let to = options.to.context("--to")?;
    let peer = format!("tcp://{}/device", SocketAddr::new(to, PORT));
    let daemon = Daemon::start(&options.dtnd, "origin", &["-s", &peer])?;
    tell(&daemon.child.id())?;
    let hand_over = format!("POST /send?dst=dtn://device/{ENDPOINT}");
    let payload = vec![0x5a; BUNDLE_BYTES as usize];
    for bytes in sizes(options.bytes) {
        daemon.ask(&hand_over, &payload[..bytes as usize])?;
    }
    loop {
        std::thread::park();
    }
}

/// Payloads of the bundles of an object.
fn sizes(bytes: u64) -> Vec<u64> {
    let mut sizes = vec![BUNDLE_BYTES; (bytes / BUNDLE_BYTES) as usize];
    sizes.extend(Some(bytes % BUNDLE_BYTES).filter(|rest| *rest > 0));
    sizes
}

/// A daemon of this process; it ends with the process.
struct Daemon {
    child: Child,
    _folder: tempfile::TempDir,
}

impl Daemon {
    fn start(program: &Path, name: &str, more: &[&str]) -> Result<Daemon> {
        let folder = tempfile::tempdir()?;
        let mut command = Command::new(program);
        command
            // The peer's address is configured, not discovered: no beacons, and each bundle goes to
            // every peer once.
            .args(["-n", name, "-C", "tcp", "-4", "--disable_nd"])
            .args(["-r", "epidemic", "-D", "mem"])
            .arg("-W")
            .arg(folder.path())
            .args(more)
            // Messages that it prints at its end, when the other one has ended already, are not
            // errors.
            .env("RUST_LOG", "off")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // SAFETY: only one system call is made between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let child = command.spawn().context("dtnd does not start")?;
        let daemon = Daemon {
            child,
            _folder: folder,
        };
        let begun = Instant::now();
        while let Err(error) = daemon.ask("GET /status/nodeid", &[]) {
            if begun.elapsed() > PATIENCE {
                return Err(error).context("dtnd does not answer on its HTTP port");
            }
            std::thread::sleep(LOOK);
        }
        Ok(daemon)
    }

    /// The CPU time of the daemon and this process.
    fn cpu_s(&self) -> Result<f64> {
        Ok(cpu_s(self.child.id())? + cpu_s(std::process::id())?)
    }

    /// Sends a request on its own connection and returns the body of the answer.
    fn ask(&self, what: &str, body: &[u8]) -> Result<Vec<u8>> {
        let mut stream = TcpStream::connect(HTTP)?;
        stream.set_nodelay(true)?;
        let head = format!(
            "{what} HTTP/1.1\r\nHost: dtnd\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        body_of(answer).with_context(|| format!("dtnd on {what}"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn body_of(mut answer: Vec<u8>) -> Result<Vec<u8>> {
    const END: &[u8] = b"\r\n\r\n";
    let head = answer
        .windows(END.len())
        .position(|at| at == END)
        .context("no answer")?;
    let line = String::from_utf8_lossy(&answer[..head]).into_owned();
    let status = line.split_whitespace().nth(1).unwrap_or_default();
    if status != "200" {
        let why = String::from_utf8_lossy(&answer[head + END.len()..]).into_owned();
        bail!("status {status}: {why}");
    }
    answer.drain(..head + END.len());
    ensure!(!answer.is_empty(), "an empty answer");
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundles_of_an_object_are_all_of_it() {
        assert_eq!(sizes(250_000_000).len(), 250);
        assert_eq!(sizes(2_500_000), [1_000_000, 1_000_000, 500_000]);
        assert_eq!(sizes(999), [999]);
    }

    #[test]
    fn an_answer_is_its_body_or_says_why_there_is_none() {
        let of = |text: &str| body_of(text.as_bytes().to_vec());
        let good = of("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").unwrap();
        assert_eq!(good, b"ok");
        let refused =
            of("HTTP/1.1 413 Payload Too Large\r\n\r\nlength limit exceeded").unwrap_err();
        assert_eq!(refused.to_string(), "status 413: length limit exceeded");
        assert!(of("HTTP/1.1 200").is_err());
    }

    #[test]
    fn what_is_not_installed_is_said() {
        let why = find(Some(Path::new("/nowhere/dtnd"))).unwrap_err();
        assert_eq!(why, "there is no /nowhere/dtnd");
    }
}
