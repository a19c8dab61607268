//! The two processes of a measurement and what they tell their parent.
//!
//! ```text
//!  parent ── starts ──▶ receiver        receiver ── Card ──▶ parent      (address, certificate)
//!  parent ── starts ──▶ sender, Card on its standard input
//!                       … the flow …
//!  receiver ── Report ──▶ parent        sender ── Report ──▶ parent
//! ```
//!
//! One JSON value per line. Each process holds itself, with every thread it will ever have, on
//! one core.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::meter::{Meter, Plan, Report};
use crate::network::Network;
use crate::peers::{self, Peer};

/// The core the sending process is held on.
pub const SENDER_CORE: usize = 0;
/// The core the receiving process is held on.
pub const RECEIVER_CORE: usize = 1;

/// How much longer than its plan a measurement may take before it is given up.
const PATIENCE: Duration = Duration::from_secs(15);

/// What a sender must know of its receiver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Card {
    /// Where it listens.
    pub address: SocketAddr,
    /// What proves who it is: a certificate or a public key, empty where nothing does.
    pub identity: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
enum Message {
    Card(Card),
    Report(Report),
}

#[derive(clap::Args)]
pub struct ReceiveOptions {
    #[arg(long)]
    peer: String,
    #[arg(long)]
    address: IpAddr,
    #[command(flatten)]
    plan: PlanOptions,
}

#[derive(clap::Args)]
pub struct SendOptions {
    #[arg(long)]
    peer: String,
    #[command(flatten)]
    plan: PlanOptions,
}

#[derive(clap::Args)]
struct PlanOptions {
    #[arg(long)]
    warm_up_ms: u64,
    #[arg(long)]
    window_ms: u64,
}

impl PlanOptions {
    fn plan(&self) -> Plan {
        Plan {
            warm_up: Duration::from_millis(self.warm_up_ms),
            window: Duration::from_millis(self.window_ms),
        }
    }
}

/// The receiving process.
pub fn receive(options: &ReceiveOptions) -> Result<()> {
    hold_on(RECEIVER_CORE)?;
    let peer = peers::named(&options.peer)?;
    let meter = Meter::start(options.plan.plan());
    peer.serve(options.address, &meter, &mut |card| {
        tell(&Message::Card(card))
    })?;
    tell(&Message::Report(meter.report()?))
}

/// The sending process.
pub fn send(options: &SendOptions) -> Result<()> {
    hold_on(SENDER_CORE)?;
    let peer = peers::named(&options.peer)?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let card: Card = serde_json::from_str(&line).context("standard input holds no card")?;
    let meter = Meter::start(options.plan.plan());
    peer.send(&card, &meter)?;
    tell(&Message::Report(meter.report()?))
}

/// Runs one flow of `peer` over `network`: the sender's report, then the receiver's.
pub fn measure(peer: &dyn Peer, network: &Network, plan: Plan) -> Result<(Report, Report)> {
    let mut receiver = command("flow-receive", peer, plan)?;
    receiver.args(["--address", &network.receiver_address.to_string()]);
    network.at_receiver(&mut receiver);
    let receiver = Process::start(receiver, "receiver")?;
    let patience = plan.warm_up + plan.window + PATIENCE;
    let Message::Card(card) = receiver.hear(patience)? else {
        bail!("the receiver reported before it listened: a fault of this program");
    };

    let mut sender = command("flow-send", peer, plan)?;
    sender.stdin(Stdio::piped());
    network.at_sender(&mut sender);
    let mut sender = Process::start(sender, "sender")?;
    let mut stdin = sender.child.stdin.take().expect("piped above");
    writeln!(stdin, "{}", serde_json::to_string(&card)?)?;
    drop(stdin);

    let (Message::Report(sent), Message::Report(received)) =
        (sender.hear(patience)?, receiver.hear(patience)?)
    else {
        bail!("a process told its address twice: a fault of this program");
    };
    Ok((sent, received))
}

fn command(verb: &str, peer: &dyn Peer, plan: Plan) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .arg(verb)
        .args(["--peer", peer.name()])
        .args(["--warm-up-ms", &plan.warm_up.as_millis().to_string()])
        .args(["--window-ms", &plan.window.as_millis().to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    Ok(command)
}

/// A child process; ended, if it still runs, when this is dropped.
struct Process {
    child: Child,
    role: &'static str,
    lines: mpsc::Receiver<String>,
}

impl Process {
    fn start(mut command: Command, role: &'static str) -> Result<Self> {
        let mut child = command
            .spawn()
            .with_context(|| format!("the {role} could not be started"))?;
        let stdout = child.stdout.take().expect("piped by command()");
        Ok(Self {
            child,
            role,
            lines: lines_of(stdout),
        })
    }

    fn hear(&self, patience: Duration) -> Result<Message> {
        let line = match self.lines.recv_timeout(patience) {
            Ok(line) => line,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                bail!("the {} said nothing for {patience:?}", self.role)
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                bail!(
                    "the {} ended without a report; its error is above",
                    self.role
                )
            }
        };
        serde_json::from_str(&line).with_context(|| format!("the {} said {line:?}", self.role))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when the process is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines_of(stdout: ChildStdout) -> mpsc::Receiver<String> {
    let (said, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if said.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

fn tell(message: &Message) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(message)?)?;
    out.flush()?;
    Ok(())
}

fn hold_on(core: usize) -> Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core)?;
    sched_setaffinity(Pid::from_raw(0), &cores)
        .with_context(|| format!("this process may not run on core {core}"))
}
