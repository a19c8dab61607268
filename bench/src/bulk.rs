//! `cedos-bench bulk`: one large object from one host to another over one emulated link, by D2TP,
//! TCP, UDT and a DTN stack in turn: goodput, and the CPU time of each end.
//!
//! UDT is a library: its program is built when it is needed from `bench/udt/flow.cpp` if the
//! library's headers are installed. The DTN stack is another program (`dtn.rs`). A missing peer has
//! a row that says so.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cedos_lab_scenario::TextTable;
use cedos_terminal::{print_stderr, print_stdout};
use serde::Serialize;

use crate::bottleneck::{BottleneckShape, Bottlenecks};
use crate::dtn;
use crate::meter::MeterPlan;
use crate::peers;
use crate::placement::ProcessPlacement;
use crate::process::{self, Message, Process};
use crate::receiver_info::ReceiverInfo;

/// The peers that are compared by default.
const PEERS: [&str; 4] = ["d2tp", "tcp", "udt", "dtn"];
const UDT_SOURCE: &str = include_str!("../udt/flow.cpp");
/// How many times longer an object may take than at the link's rate.
const SLACK: f64 = 5.0;

/// Options of `bench bulk`.
#[derive(clap::Args)]
pub struct BulkOptions {
    /// Peers, separated by commas: those of `throughput`, udt and dtn
    #[arg(long, value_delimiter = ',', default_values_t = PEERS.map(String::from))]
    peers: Vec<String>,
    /// Size of the object
    #[arg(long, default_value_t = 250_000_000)]
    bytes: u64,
    /// Rate of the link
    #[arg(long, default_value_t = 100.0)]
    mbps: f64,
    /// Round trip without queueing
    #[arg(long, default_value_t = 14.0)]
    rtt_ms: f64,
    /// Queue, in bandwidth-delay products
    #[arg(long, default_value_t = 2.0)]
    queue_bdp: f64,
    /// Random loss of data packets, in per cent
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// The daemon of dtn7, if it is not in PATH
    #[arg(long)]
    dtnd: Option<PathBuf>,
    /// One JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
}

/// One peer's transfer.
#[derive(Debug, Serialize)]
struct BulkRow {
    peer: String,
    /// Why there is no result.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<String>,
    mbps: Option<f64>,
    seconds: Option<f64>,
    /// CPU time of the receiver, from the first byte to the last.
    rcv_cpu_s: Option<f64>,
    /// CPU time of the sender, from its start.
    snd_cpu_s: Option<f64>,
    notes: String,
}

#[derive(Debug, Serialize)]
struct BulkRows {
    bytes: u64,
    network: String,
    rows: Vec<BulkRow>,
}

/// Measures and prints.
///
/// # Errors
/// The network cannot be made, or a transfer failed.
pub fn run(options: &BulkOptions) -> Result<()> {
    cedos_lab_emu::enter()?;
    let shape = BottleneckShape {
        mbps: options.mbps,
        rtt_ms: options.rtt_ms,
        loss: options.loss / 100.0,
        queue_bdp: options.queue_bdp,
    };
    let folder = tempfile::tempdir().context("no temporary folder")?;
    let mut rows = Vec::new();
    for name in &options.peers {
        let row = match name.as_str() {
            "udt" => match build_udt(folder.path())? {
                Ok(program) => measure(name, &shape, options, |lane| {
                    Ok((start_udt(&program, lane, options.bytes)?, None))
                })?,
                Err(why) => BulkRow::missing(name, why),
            },
            "dtn" => match dtn::find(options.dtnd.as_deref()) {
                Ok(program) => measure(name, &shape, options, |lane| {
                    let (sender, receiver, daemon) = dtn::start(&program, lane, options.bytes)?;
                    Ok(((sender, receiver), Some(daemon)))
                })?,
                Err(why) => BulkRow::missing(name, why),
            },
            _ => {
                let peer = peers::named(name)?;
                match peer.missing() {
                    Some(why) => BulkRow::missing(name, why),
                    None => measure(name, &shape, options, |lane| {
                        Ok((process::start(peer.as_ref(), lane, plan(options)?)?, None))
                    })?,
                }
            }
        };
        match (&row.missing, row.mbps) {
            (None, Some(mbps)) => print_stderr(&format!("{name}: {mbps:.1} Mb/s")),
            (why, _) => print_stderr(&format!("{name}: {}", why.as_deref().unwrap_or("nothing"))),
        }
        rows.push(row);
    }
    let rows = BulkRows {
        bytes: options.bytes,
        network: shape.in_words(),
        rows,
    };
    if options.json {
        print_stdout(&serde_json::to_string(&rows)?);
    } else {
        print(&rows);
    }
    Ok(())
}

/// How long the object takes if the link is always full.
fn full(options: &BulkOptions) -> f64 {
    options.bytes as f64 * 8.0 / (options.mbps * 1e6)
}

fn plan(options: &BulkOptions) -> Result<MeterPlan> {
    Ok(MeterPlan {
        warm_up: Duration::ZERO,
        window: Duration::try_from_secs_f64(full(options) * SLACK)?,
        grace: Duration::ZERO,
        end_bytes: Some(options.bytes),
    })
}

/// Sender and receiver, and another process of the sender.
type StartedTransfer = ((Process, Process), Option<u32>);

fn measure(
    name: &str,
    shape: &BottleneckShape,
    options: &BulkOptions,
    start: impl FnOnce(&dyn ProcessPlacement) -> Result<StartedTransfer>,
) -> Result<BulkRow> {
    let bottlenecks = Bottlenecks::make(shape, 1, 1)?;
    let lane = bottlenecks.lane(0);
    let ((sender, receiver), helper) = start(&lane).with_context(|| name.to_owned())?;
    let received = receiver
        .report(plan(options)?.patience())
        .with_context(|| name.to_owned())?;
    let mut snd_cpu_s = cpu_s(sender.id())?;
    if let Some(helper) = helper {
        snd_cpu_s += cpu_s(helper)?;
    }
    drop(sender);
    bottlenecks.check()?;
    Ok(BulkRow {
        peer: name.to_owned(),
        missing: None,
        mbps: Some(received.gbps() * 1e3),
        seconds: Some(received.window_s),
        rcv_cpu_s: Some(received.cpu_s),
        snd_cpu_s: Some(snd_cpu_s),
        notes: received.notes,
    })
}

impl BulkRow {
    fn missing(peer: &str, why: String) -> BulkRow {
        BulkRow {
            peer: peer.to_owned(),
            missing: Some(why),
            mbps: None,
            seconds: None,
            rcv_cpu_s: None,
            snd_cpu_s: None,
            notes: String::new(),
        }
    }
}

/// The CPU time that a process has used so far, in whole ticks.
pub fn cpu_s(process: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))
        .context("a process is gone before it was asked what it cost")?;
    // After the name, which may contain anything.
    let fields: Vec<&str> = (stat.rsplit_once(')').map_or("", |(_, rest)| rest))
        .split_whitespace()
        .collect();
    // proc_pid_stat(5): utime and stime are fields 14 and 15; the first here is number 3.
    let ticks: Option<u64> = [11, 12]
        .iter()
        .map(|at| fields.get(*at)?.parse::<u64>().ok())
        .sum();
    // SAFETY: a plain question.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Ok(ticks.context("/proc says nothing of processor time")? as f64 / per_second as f64)
}

/// The program, or why it is missing.
fn build_udt(folder: &Path) -> Result<Result<PathBuf, String>> {
    if !Path::new("/usr/include/udt/udt.h").is_file() {
        return Ok(Err("not installed (Debian: libudt-dev)".to_owned()));
    }
    let (source, program) = (folder.join("flow.cpp"), folder.join("udt-flow"));
    std::fs::write(&source, UDT_SOURCE)?;
    let built = Command::new("g++")
        .arg("-O2")
        .arg("-o")
        .args([&program, &source])
        .arg("-ludt")
        .output();
    match built {
        Err(error) => Ok(Err(format!("not built: no g++ here ({error})"))),
        Ok(said) if !said.status.success() => bail!(
            "g++ does not build bench/udt/flow.cpp: {}",
            String::from_utf8_lossy(&said.stderr)
        ),
        Ok(_) => Ok(Ok(program)),
    }
}

fn start_udt(
    program: &Path,
    lane: &dyn ProcessPlacement,
    bytes: u64,
) -> Result<(Process, Process)> {
    let mut receiver = Command::new(program);
    receiver
        .arg("receive")
        .arg(lane.receiver_address().to_string())
        .arg(bytes.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let receiver = Process::new(lane.start_receiver(receiver)?, "receiver")?;
    let Message::Card(ReceiverInfo { address, .. }) = receiver.hear(Duration::from_secs(10))?
    else {
        bail!("UDT's receiver reported before it listened");
    };
    let mut sender = Command::new(program);
    sender
        .arg("send")
        .arg(address.ip().to_string())
        .arg(address.port().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    Ok((
        Process::new(lane.start_sender(sender)?, "sender")?,
        receiver,
    ))
}

fn print(rows: &BulkRows) {
    print_stdout(&format!(
        "{} MB over {}\n",
        rows.bytes as f64 / 1e6,
        rows.network
    ));
    let mut table = TextTable::with_notes([
        "",
        "Mb/s",
        "seconds",
        "CPU-s, receiver",
        "CPU-s, sender",
        "",
    ]);
    for row in &rows.rows {
        let cell = |figure: Option<f64>, digits: usize| {
            figure.map_or_else(String::new, |figure| format!("{figure:.digits$}"))
        };
        table.row([
            row.peer.to_owned(),
            cell(row.mbps, 1),
            cell(row.seconds, 1),
            cell(row.rcv_cpu_s, 2),
            cell(row.snd_cpu_s, 2),
            row.missing.clone().unwrap_or_else(|| row.notes.clone()),
        ]);
    }
    print_stdout(&table.to_text());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_process_that_worked_has_used_its_processor() {
        let begun = Instant::now();
        let mut x = 1u64;
        let before = cpu_s(std::process::id()).unwrap();
        // By CPU time, not by the clock: the machine may be busy. The clock ends a hang.
        while cpu_s(std::process::id()).unwrap() < before + 0.05 {
            x = (0..100_000).fold(x, |x, n| x.wrapping_mul(31).wrapping_add(n));
            assert!(begun.elapsed() < Duration::from_secs(120), "{x}");
        }
        assert!(cpu_s(u32::MAX).is_err());
    }
}
