//! `cedos-bench`: compares the speed and CPU cost of transports in one run.
//!
//! `cedos-bench throughput` sends one flow from one process to another, each on its own core, over
//! a network made for the run, in turn for every selected transport ("peer" here). The two
//! processes are this program again, started with a hidden verb.
//!
//! ```text
//!  throughput ─┬─ network     namespaces with lo or a veth pair, MTU 1500
//!              ├─ process ──▶ `flow-receive` (core 1) ── peers::X.serve ─┐ meter
//!              ├─ process ──▶ `flow-send`    (core 0) ── peers::X.send  ─┘ meter
//!              └─ table       medians, spread, ratios; or JSON
//! ```

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod bloat;
mod bottleneck;
mod bulk;
mod churn;
mod churn_hosts;
mod churn_network;
mod churn_server;
mod credential;
mod dtn;
mod fairness;
mod fairness_flows;
mod grid;
mod grid_report;
mod handshake;
mod handshake_hosts;
mod handshake_quinn;
mod handshake_server;
mod hostile;
mod idle;
mod idle_fill;
mod jain;
mod lanes;
mod median;
mod meter;
mod network;
mod node_costs;
mod peers;
mod placement;
mod process;
mod programs;
mod quiet;
mod receiver_info;
mod sleepers;
mod table;
mod throughput;
mod tunnel;
mod worker_scaling;

use std::io::ErrorKind;
use std::process::ExitCode;

use cedos_terminal::{print_stderr, stdout_result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cedos-bench",
    version,
    about = "Speed and CPU cost of transports, in one run"
)]
struct Cli {
    #[command(subcommand)]
    verb: BenchVerb,
}

#[derive(Subcommand)]
enum BenchVerb {
    /// One flow between two processes: Gb/s and CPU-seconds per GB of each side
    Throughput(throughput::ThroughputOptions),
    /// Handshakes and wakes a second, both ends on this machine
    Handshake(handshake::HandshakeOptions),
    /// TCP of iperf3 through `cedos vpn`, beside WireGuard: Gb/s and CPU-seconds per GB
    Tunnel(tunnel::TunnelOptions),
    /// Memory of a million sleeping flows, how fast they wake, and what a crash costs
    Idle(idle::IdleOptions),
    /// Memory and disk of D2Prox with a million sleeping downloads, and what a crash costs
    Sleepers(sleepers::SleepersOptions),
    /// Memory of a proxy, and goodput of its other clients, while a client is hostile
    Hostile(hostile::HostileOptions),
    /// Packets and wake-ups while there is nothing to do
    Quiet(quiet::QuietOptions),
    /// The device's process of `quiet`
    #[command(hide = true)]
    QuietDevice(quiet::DeviceArgs),
    /// The serving process of `handshake` and `idle`
    #[command(hide = true)]
    RestServe(handshake_server::HandshakeServerOptions),
    /// Many flows on one bottleneck: do TCP and D2TP share it evenly?
    Fairness(fairness::FairnessOptions),
    /// One large object over one emulated link, beside TCP, UDT and a DTN stack
    Bulk(bulk::BulkOptions),
    /// The receiving process of a DTN transfer
    #[command(hide = true)]
    DtnReceive(dtn::DtnOptions),
    /// The sending process of a DTN transfer
    #[command(hide = true)]
    DtnSend(dtn::DtnOptions),
    /// One flow over a deep queue, and how long packets wait in it: DRWA beside other ways
    Bloat(bloat::BloatOptions),
    /// The server of objects of `bloat`
    #[command(hide = true)]
    ObjectServer(bloat::BloatServerOptions),
    /// The client of the server of objects
    #[command(hide = true)]
    ObjectFetch(bloat::FetchOptions),
    /// A flow over each link of a scenario, all at once
    Lanes(lanes::LinkFlowsOptions),
    /// One flow over round trips, losses and queues, beside kernel TCP and quinn
    Grid(grid::GridOptions),
    /// Tens of thousands of hosts, of which a tenth leaves or comes back every minute
    Churn(churn::ChurnOptions),
    /// CPU time and operations of the store that 1, 2 and 4 nodes of a proxy cost
    Nodes(node_costs::NodeCostOptions),
    /// Downloads and unmodified programs by Cedos, beside `curl` over TLS: seconds
    Programs(programs::ProgramsOptions),
    /// Throughput of D2Prox with one worker and with several, and its CPU time for each gigabyte
    Workers(worker_scaling::WorkerOptions),
    /// The serving process of a churn run
    #[command(hide = true)]
    ChurnServer(churn_server::ChurnServerOptions),
    /// All hosts of a churn run
    #[command(hide = true)]
    ChurnHosts(churn::HostsOptions),
    /// The sending process of a fairness run
    #[command(hide = true)]
    FairnessSource(fairness_flows::SourceOptions),
    /// The receiving process of a fairness run
    #[command(hide = true)]
    FairnessSink(fairness_flows::SinkOptions),
    /// The receiving process of one measurement
    #[command(hide = true)]
    FlowReceive(process::ReceiveOptions),
    /// The sending process of one measurement
    #[command(hide = true)]
    FlowSend(process::SendOptions),
}

fn main() -> ExitCode {
    cedos_sandbox::keep_free_heap();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage_exit(&error),
    };
    let outcome = match cli.verb {
        BenchVerb::Throughput(options) => throughput::run(&options),
        BenchVerb::Handshake(options) => handshake::run(&options),
        BenchVerb::Tunnel(options) => tunnel::run(&options),
        BenchVerb::Idle(options) => idle::run(&options),
        BenchVerb::Sleepers(options) => sleepers::run(&options),
        BenchVerb::Hostile(options) => hostile::run(&options),
        BenchVerb::Quiet(options) => quiet::run(&options),
        BenchVerb::QuietDevice(args) => quiet::device(&args),
        BenchVerb::RestServe(options) => handshake_server::run(&options),
        BenchVerb::Fairness(options) => fairness::run(&options),
        BenchVerb::Bulk(options) => bulk::run(&options),
        BenchVerb::DtnReceive(options) => dtn::receive(&options),
        BenchVerb::DtnSend(options) => dtn::send(&options),
        BenchVerb::Bloat(options) => bloat::run(&options),
        BenchVerb::ObjectServer(options) => bloat::serve(&options),
        BenchVerb::ObjectFetch(options) => bloat::fetch(&options),
        BenchVerb::Nodes(options) => node_costs::run(&options),
        BenchVerb::Programs(options) => programs::run(&options),
        BenchVerb::Workers(options) => worker_scaling::run(&options),
        BenchVerb::Lanes(options) => lanes::run(&options),
        BenchVerb::Grid(options) => grid::run(&options),
        BenchVerb::Churn(options) => churn::run(&options),
        BenchVerb::ChurnServer(options) => churn_server::run(&options),
        BenchVerb::ChurnHosts(options) => churn::hosts(&options),
        BenchVerb::FairnessSource(options) => fairness_flows::source(&options),
        BenchVerb::FairnessSink(options) => fairness_flows::sink(&options),
        BenchVerb::FlowReceive(options) => process::receive(&options),
        BenchVerb::FlowSend(options) => process::send(&options),
    };
    // What did not reach standard output is no success.
    match outcome.and_then(|()| Ok(stdout_result()?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_stderr(&format!("cedos-bench: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Prints help, version or a mistake in the command line, and returns the exit code for it.
fn usage_exit(error: &clap::Error) -> ExitCode {
    match error.print() {
        Err(output) if output.kind() != ErrorKind::BrokenPipe && !error.use_stderr() => {
            print_stderr(&format!(
                "cedos-bench: cannot write to standard output: {output}"
            ));
            ExitCode::FAILURE
        }
        _ => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
    }
}
