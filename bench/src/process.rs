//! The two processes of a measurement and their messages to the parent.
//!
//! ```text
//!  parent ── starts ──▶ receiver        receiver ── Card ──▶ parent      (address, certificate)
//!  parent ── starts ──▶ sender, Card on its standard input
//!                       … the flow …
//!  receiver ── Report ──▶ parent        sender ── Report ──▶ parent
//! ```
//!
//! One JSON value per line. If the network requires it, each process keeps all its threads on one
//! core.

use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::meter::{MeterPlan, MeterReport, ProcessMeter};
use crate::peers::{self, BenchPeer};
use crate::placement::{ProcessPlacement, RECEIVER_CORE, SENDER_CORE};
use crate::receiver_info::ReceiverInfo;

/// A message of a process of a flow to its parent.
#[derive(Serialize, Deserialize)]
pub enum Message {
    /// The receiver listens.
    Card(ReceiverInfo),
    /// The process has ended; this is its report.
    Report(MeterReport),
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
    #[arg(long)]
    grace_ms: u64,
    /// End by bytes instead: the measurement is from the first byte to this one
    #[arg(long)]
    end_bytes: Option<u64>,
    /// Keep to one core
    #[arg(long)]
    held: bool,
}

impl PlanOptions {
    fn plan(&self) -> MeterPlan {
        MeterPlan {
            warm_up: Duration::from_millis(self.warm_up_ms),
            window: Duration::from_millis(self.window_ms),
            grace: Duration::from_millis(self.grace_ms),
            end_bytes: self.end_bytes,
        }
    }

    fn hold_on(&self, core: usize) -> Result<()> {
        if self.held { hold_on(core) } else { Ok(()) }
    }
}

/// The receiving process.
pub fn receive(options: &ReceiveOptions) -> Result<()> {
    options.plan.hold_on(RECEIVER_CORE)?;
    let peer = peers::named(&options.peer)?;
    let meter = ProcessMeter::start(options.plan.plan());
    peer.serve(options.address, &meter, &mut |card| {
        tell(&Message::Card(card))
    })?;
    meter.await_look();
    tell(&Message::Report(meter.report()?))
}

/// The sending process.
pub fn send(options: &SendOptions) -> Result<()> {
    options.plan.hold_on(SENDER_CORE)?;
    let peer = peers::named(&options.peer)?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let card: ReceiverInfo = serde_json::from_str(&line).context("standard input holds no card")?;
    let meter = ProcessMeter::start(options.plan.plan());
    peer.send(&card, &meter)?;
    tell(&Message::Report(meter.report()?))
}

/// Runs one flow of `peer` over `place`: the sender's report, then the receiver's.
pub fn measure(
    peer: &dyn BenchPeer,
    place: &dyn ProcessPlacement,
    plan: MeterPlan,
) -> Result<(MeterReport, MeterReport)> {
    let (sender, receiver) = start(peer, place, plan)?;
    let patience = plan.patience();
    Ok((sender.report(patience)?, receiver.report(patience)?))
}

/// Starts the processes of one flow: sender and receiver.
pub fn start(
    peer: &dyn BenchPeer,
    place: &dyn ProcessPlacement,
    plan: MeterPlan,
) -> Result<(Process, Process)> {
    let mut receiver = command("flow-receive", peer, place, plan)?;
    receiver.args(["--address", &place.receiver_address().to_string()]);
    let receiver = Process::new(place.start_receiver(receiver)?, "receiver")?;
    let Message::Card(card) = receiver.hear(plan.patience())? else {
        bail!("the receiver reported before it listened: a fault of this program");
    };

    let mut sender = command("flow-send", peer, place, plan)?;
    sender.stdin(Stdio::piped());
    let mut sender = Process::new(place.start_sender(sender)?, "sender")?;
    let mut stdin = sender.child.stdin.take().expect("piped above");
    writeln!(stdin, "{}", serde_json::to_string(&card)?)?;
    drop(stdin);
    Ok((sender, receiver))
}

fn command(
    verb: &str,
    peer: &dyn BenchPeer,
    place: &dyn ProcessPlacement,
    plan: MeterPlan,
) -> Result<Command> {
    let mut command = own_program(verb)?;
    command
        .args(["--peer", peer.name()])
        .args(["--warm-up-ms", &plan.warm_up.as_millis().to_string()])
        .args(["--window-ms", &plan.window.as_millis().to_string()])
        .args(["--grace-ms", &plan.grace.as_millis().to_string()]);
    // If the measurement is by bytes, the receiver ends it: written data has not arrived yet.
    if let (Some(bytes), "flow-receive") = (plan.end_bytes, verb) {
        command.args(["--end-bytes", &bytes.to_string()]);
    }
    if place.holds_cores() {
        command.arg("--held");
    }
    Ok(command)
}

/// This program with a hidden verb; it writes its messages to standard output.
pub fn own_program(verb: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .arg(verb)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    Ok(command)
}

/// A child process, which is killed when this is dropped.
pub struct Process {
    child: Child,
    role: &'static str,
    lines: mpsc::Receiver<String>,
}

impl Process {
    /// Manages `child`, whose standard output is piped.
    pub fn new(mut child: Child, role: &'static str) -> Result<Self> {
        let stdout = child.stdout.take().context("its output is not piped")?;
        Ok(Self {
            child,
            role,
            lines: lines_of(stdout),
        })
    }

    /// The id of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The report of the process.
    pub fn report(&self, patience: Duration) -> Result<MeterReport> {
        match self.hear(patience)? {
            Message::Report(report) => Ok(report),
            Message::Card(_) => {
                bail!(
                    "the {} told its address twice: a fault of this program",
                    self.role
                )
            }
        }
    }

    /// The next message of the process.
    pub fn hear<T: DeserializeOwned>(&self, patience: Duration) -> Result<T> {
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
        // Both fail only if the process has ended already.
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

/// Sends a message to the parent: one JSON value on one line.
pub fn tell<T: Serialize>(message: &T) -> Result<()> {
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
