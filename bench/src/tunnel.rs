//! `cedos-bench tunnel`: kernel TCP of `iperf3` through `cedos vpn`, beside WireGuard and no tunnel.
//!
//! ```text
//!  device ── veth ── proxy's host ── veth ── server          three namespaces, MTU 1500
//!  iperf3 ─▶ cedos vpn ══▶ cedos prox --tunnel-net ─▶ iperf3 -s     flows, packets
//!  iperf3 ─▶ WireGuard ═══▶ WireGuard, NAT ─────────▶ iperf3 -s     wireguard (kernel), wireguard-go
//!  iperf3 ──────────────────────────────────────────▶ iperf3 -s     none
//! ```
//!
//! Everything shares this machine's cores, so the rate is what the whole path costs: CPU-seconds per GB stand beside it,
//! of the whole machine, and of the tunnel's processes alone where it has any.

mod tunnel_kind;
mod tunnel_network;

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use cedos_terminal::print_stdout;
use serde::{Deserialize, Serialize};

use crate::hostile::find_program;
use crate::median::{median, spread};
use crate::network;
use tunnel_kind::{OpenTunnel, TunnelKind};
use tunnel_network::TunnelNetwork;

/// Options of `bench tunnel`.
#[derive(clap::Args)]
pub struct TunnelOptions {
    /// The tunnel to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "none,flows,packets,wireguard,wireguard-go"
    )]
    tunnels: Vec<TunnelKind>,
    /// Numbers of TCP connections at once
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    connections: Vec<u32>,
    /// Seconds of a run, after one that is not counted
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// How often each is measured, in turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The program `cedos` [default: the one in this program's folder]
    #[arg(long)]
    cedos: Option<PathBuf>,
    /// One JSON object on standard output instead of a table
    #[arg(long)]
    json: bool,
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum TunnelDirection {
    /// From the server to the device.
    Down,
    /// From the device to the server.
    Up,
}

impl TunnelDirection {
    /// The name in tables.
    fn name(self) -> &'static str {
        match self {
            TunnelDirection::Down => "down",
            TunnelDirection::Up => "up",
        }
    }
}

/// One run of iperf3.
#[derive(Clone, Copy, Debug)]
struct TunnelRun {
    gbps: f64,
    retransmits: u64,
    machine_cpu_s_per_gb: f64,
    tunnel_cpu_s_per_gb: Option<f64>,
}

/// Medians of one tunnel, direction and number of connections.
#[derive(Debug, Serialize)]
struct TunnelRow {
    tunnel: TunnelKind,
    direction: TunnelDirection,
    connections: u32,
    gbps: f64,
    gbps_lowest: f64,
    gbps_highest: f64,
    /// TCP segments that were sent again in a run.
    retransmits: f64,
    /// CPU-seconds of the whole machine, `iperf3` included.
    machine_cpu_s_per_gb: f64,
    /// CPU-seconds of the tunnel's processes.
    tunnel_cpu_s_per_gb: Option<f64>,
}

#[derive(Debug, Serialize)]
struct TunnelMissing {
    tunnel: TunnelKind,
    why: String,
}

#[derive(Debug, Serialize)]
struct TunnelOutcome {
    rows: Vec<TunnelRow>,
    /// What could not be measured here.
    missing: Vec<TunnelMissing>,
}

/// Measures and prints.
///
/// # Errors
/// A namespace or a program fails.
pub fn run(options: &TunnelOptions) -> Result<()> {
    ensure!(options.rounds > 0, "--rounds must be at least 1");
    let program = find_program(options.cedos.as_ref())?;
    network::enter_user_namespace()?;
    let network = TunnelNetwork::make()?;
    let mut outcome = TunnelOutcome {
        rows: Vec::new(),
        missing: Vec::new(),
    };
    for tunnel in &options.tunnels {
        let opened = match OpenTunnel::open(*tunnel, &network, &program) {
            Ok(opened) => opened,
            Err(error) => {
                let why = format!("{error:#}");
                outcome.missing.push(TunnelMissing {
                    tunnel: *tunnel,
                    why,
                });
                continue;
            }
        };
        for &connections in &options.connections {
            for direction in [TunnelDirection::Down, TunnelDirection::Up] {
                let runs: Result<Vec<TunnelRun>> = (0..options.rounds)
                    .map(|_| measure(&network, &opened, options, connections, direction))
                    .collect();
                let runs = match runs {
                    Ok(runs) => runs,
                    Err(error) => {
                        let why = format!("{connections} TCP, {}: {error:#}", direction.name());
                        outcome.missing.push(TunnelMissing {
                            tunnel: *tunnel,
                            why,
                        });
                        continue;
                    }
                };
                let row = row(*tunnel, direction, connections, &runs);
                if !options.json {
                    print_row(&row);
                }
                outcome.rows.push(row);
            }
        }
    }
    if options.json {
        print_stdout(&serde_json::to_string(&outcome)?);
        return Ok(());
    }
    for TunnelMissing { tunnel, why } in &outcome.missing {
        print_stdout(&format!("{}: not measured: {why}", tunnel.name()));
    }
    Ok(())
}

/// What `iperf3 --json` prints, as far as it is used.
#[derive(Deserialize)]
#[serde(untagged)]
enum IperfReport {
    /// The test failed, perhaps near its end; the rest of such a report is not whole.
    Failed {
        error: String,
    },
    Done {
        end: IperfEnd,
    },
}

impl IperfReport {
    /// What `iperf3` measured.
    ///
    /// # Errors
    /// It failed, or printed something else.
    fn parse(stdout: &[u8]) -> Result<IperfEnd> {
        match serde_json::from_slice(stdout) {
            Ok(IperfReport::Done { end }) => Ok(end),
            Ok(IperfReport::Failed { error }) => bail!("iperf3: {error}"),
            Err(_) => bail!(
                "iperf3 printed no report: {}",
                String::from_utf8_lossy(stdout).trim()
            ),
        }
    }
}

#[derive(Debug, Deserialize)]
struct IperfEnd {
    sum_sent: IperfSum,
    sum_received: IperfSum,
}

#[derive(Debug, Deserialize)]
struct IperfSum {
    bytes: f64,
    bits_per_second: f64,
    #[serde(default)]
    retransmits: u64,
}

fn measure(
    network: &TunnelNetwork,
    tunnel: &OpenTunnel,
    options: &TunnelOptions,
    connections: u32,
    direction: TunnelDirection,
) -> Result<TunnelRun> {
    let mut command = Command::new("iperf3");
    command
        .args(["--client", tunnel_network::SERVER_ADDRESS, "--json"])
        .args(["--time", &options.seconds.to_string(), "--omit", "1"])
        .args(["--parallel", &connections.to_string()])
        .stdout(Stdio::piped());
    if direction == TunnelDirection::Down {
        command.arg("--reverse");
    }
    let _server = network.start_server()?;
    let before = (machine_cpu_s()?, tunnel.cpu_s());
    let child = network.start_on_device(command)?;
    let output = child.wait_with_output()?;
    let after = (machine_cpu_s()?, tunnel.cpu_s());
    let end = IperfReport::parse(&output.stdout)?;
    ensure!(
        output.status.success(),
        "iperf3 ended with {}",
        output.status
    );
    // CPU time is that of the whole run, and so are the bytes: what was omitted is as long as one second.
    let seconds = f64::from(options.seconds);
    let gb = end.sum_received.bytes / 1e9 * (seconds + 1.0) / seconds;
    let tunnel_cpu_s = after.1.zip(before.1).map(|(after, before)| after - before);
    Ok(TunnelRun {
        gbps: end.sum_received.bits_per_second / 1e9,
        retransmits: end.sum_sent.retransmits,
        machine_cpu_s_per_gb: (after.0 - before.0) / gb,
        tunnel_cpu_s_per_gb: tunnel_cpu_s.map(|cpu_s| cpu_s / gb),
    })
}

fn row(
    tunnel: TunnelKind,
    direction: TunnelDirection,
    connections: u32,
    runs: &[TunnelRun],
) -> TunnelRow {
    let of = |value: fn(&TunnelRun) -> f64| median(runs.iter().map(value));
    let (gbps_lowest, gbps_highest) = spread(runs.iter().map(|run| run.gbps));
    let processes = runs.iter().filter_map(|run| run.tunnel_cpu_s_per_gb);
    TunnelRow {
        tunnel,
        direction,
        connections,
        gbps: of(|run| run.gbps),
        gbps_lowest,
        gbps_highest,
        retransmits: of(|run| run.retransmits as f64),
        machine_cpu_s_per_gb: of(|run| run.machine_cpu_s_per_gb),
        tunnel_cpu_s_per_gb: Some(median(processes)).filter(|cpu_s| cpu_s.is_finite()),
    }
}

fn print_row(row: &TunnelRow) {
    let processes = row
        .tunnel_cpu_s_per_gb
        .map_or("-".to_owned(), |cpu_s| format!("{cpu_s:.2}"));
    print_stdout(&format!(
        "{:<13} {:<4} {} TCP: {:6.2} Gb/s ({:.2} to {:.2}), CPU s/GB {:.2} (the tunnel's processes {processes}), {} segments again",
        row.tunnel.name(),
        row.direction.name(),
        row.connections,
        row.gbps,
        row.gbps_lowest,
        row.gbps_highest,
        row.machine_cpu_s_per_gb,
        row.retransmits,
    ));
}

/// The time in which this machine's cores were busy, in seconds.
fn machine_cpu_s() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<f64> = line
        .split_whitespace()
        .skip(1)
        .map_while(|ticks| ticks.parse().ok())
        .collect();
    // user, nice, system, idle, iowait, irq, softirq, steal: proc(5).
    let busy: f64 = [0, 1, 2, 5, 6].iter().filter_map(|n| ticks.get(*n)).sum();
    Ok(busy / 100.0) // USER_HZ is 100 on all supported Linux systems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_iperf_is_named_by_its_own_error() {
        let printed = br#"{"start":{},"intervals":[],"end":{},"error":"control socket has closed unexpectedly"}"#;
        let error = IperfReport::parse(printed).unwrap_err().to_string();
        assert_eq!(error, "iperf3: control socket has closed unexpectedly");
        let error = IperfReport::parse(b"usage").unwrap_err().to_string();
        assert_eq!(error, "iperf3 printed no report: usage");
        let whole = br#"{"end":{"sum_sent":{"bytes":5,"bits_per_second":40,"retransmits":1},
            "sum_received":{"bytes":5,"bits_per_second":40}}}"#;
        assert_eq!(IperfReport::parse(whole).unwrap().sum_sent.retransmits, 1);
    }
}
