//! What a second worker of D2Prox gives: throughput, and CPU time for each gigabyte, with one and with several.
//!
//! ```text
//!  devices, each with a key ══▶ cedos prox --workers N ── one object, from the shared cache
//! ```
//!
//! Devices run in this process, on the same cores as the proxy. Where there are fewer cores than the workers and the devices
//! could use, the throughput says little, and the CPU time for each gigabyte says what more cores would give: workers whose
//! bytes cost the same carry together what each carries alone.

use std::convert::Infallible;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cedos_lab_scenario::TextTable;
use cedos_terminal::print_stdout;
use d2tp_driver::{Device, DeviceOptions, EndpointConfig, SecretKey, ServerAddress};
use serde::Serialize;
use tokio::io::AsyncReadExt;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::bulk::cpu_s;
use crate::hostile::find_program;
use crate::median::median;
use crate::node_costs::{BenchChild, begin, finish, origin};

/// How long the first download may take, and the start of all.
const STEP_MAX: Duration = Duration::from_secs(60);
/// How long all run before they are counted.
const WARM_UP: Duration = Duration::from_secs(1);

#[derive(clap::Args)]
pub struct WorkerOptions {
    /// How many workers, in turn
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    workers: Vec<u16>,
    /// Devices, each with a session and one download after the other
    #[arg(long, default_value_t = 32)]
    devices: usize,
    /// Bytes of the object
    #[arg(long, default_value_t = 32_000_000)]
    bytes: u64,
    /// How long bytes are counted
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Times each number of workers is measured, in turn; the table gives medians
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The program `cedos` [default: the one in this program's folder]
    #[arg(long)]
    cedos: Option<PathBuf>,
    /// Print one JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
struct WorkerRound {
    gbps: f64,
    cpu_s_per_gb: f64,
    cores: f64,
}

/// The medians with one number of workers.
#[derive(Debug, Serialize)]
struct WorkerRow {
    workers: u16,
    /// Payload that all devices received.
    gbps: f64,
    /// CPU time of the proxy for each gigabyte that devices received.
    cpu_s_per_gb: f64,
    /// CPU time of the proxy in a second.
    cores: f64,
    /// What these workers carry with as many cores, by the CPU time for each gigabyte, over what the first row's do.
    times_by_cpu: f64,
}

#[derive(Debug, Serialize)]
struct WorkerRows {
    devices: usize,
    machine_cores: usize,
    rows: Vec<WorkerRow>,
}

/// Measures each number of workers.
///
/// # Errors
/// The proxy does not start, or a device does not get its object.
pub fn run(options: &WorkerOptions) -> Result<()> {
    ensure!(options.devices > 0, "no device: --devices N");
    ensure!(options.rounds > 0, "no round: --rounds N");
    ensure!(
        !options.workers.is_empty() && !options.workers.contains(&0),
        "a run needs a worker: --workers N"
    );
    let program = find_program(options.cedos.as_ref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let mut rounds: Vec<Vec<WorkerRound>> = vec![Vec::new(); options.workers.len()];
    for _ in 0..options.rounds {
        for (workers, rounds) in options.workers.iter().zip(&mut rounds) {
            rounds.push(runtime.block_on(measure(options, &program, *workers))?);
        }
    }
    let median_of =
        |rounds: &[WorkerRound], of: fn(&WorkerRound) -> f64| median(rounds.iter().map(of));
    let capacity = |workers: u16, rounds: &[WorkerRound]| {
        f64::from(workers) / median_of(rounds, |round| round.cpu_s_per_gb)
    };
    let first = capacity(options.workers[0], &rounds[0]);
    let rows = options.workers.iter().zip(&rounds);
    let rows = rows.map(|(workers, rounds)| WorkerRow {
        workers: *workers,
        gbps: median_of(rounds, |round| round.gbps),
        cpu_s_per_gb: median_of(rounds, |round| round.cpu_s_per_gb),
        cores: median_of(rounds, |round| round.cores),
        times_by_cpu: capacity(*workers, rounds) / first,
    });
    let all = WorkerRows {
        devices: options.devices,
        machine_cores: std::thread::available_parallelism().map_or(0, usize::from),
        rows: rows.collect(),
    };
    match options.json {
        true => print_stdout(&serde_json::to_string(&all)?),
        false => print_stdout(&table(&all)),
    }
    Ok(())
}

fn table(all: &WorkerRows) -> String {
    let mut table = TextTable::new(["workers", "Gb/s", "CPU-s/GB", "cores", "times, by CPU"]);
    for row in &all.rows {
        table.row([
            row.workers.to_string(),
            format!("{:.2}", row.gbps),
            format!("{:.3}", row.cpu_s_per_gb),
            format!("{:.2}", row.cores),
            format!("{:.2}", row.times_by_cpu),
        ]);
    }
    table.to_text()
}

/// A proxy with this many workers, and its address.
fn start_proxy(program: &Path, dir: &Path, workers: u16) -> Result<(BenchChild, ServerAddress)> {
    let mut command = Command::new(program);
    command
        .args(["prox", "--allow-any-client", "--allow-private"])
        .args(["--listen", "127.0.0.1:0"])
        .args(["--workers", &workers.to_string()])
        .arg("--state-dir")
        .arg(dir)
        .env("RUST_LOG", "warn")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut process = BenchChild::start(command)?;
    let mut line = String::new();
    let output = process.0.stdout.take().context("its output is piped")?;
    BufReader::new(output).read_line(&mut line)?;
    ensure!(!line.is_empty(), "the proxy ended; its error is above");
    let address = line.trim().parse();
    let address = address.with_context(|| format!("the proxy said {line:?}"))?;
    Ok((process, address))
}

async fn measure(options: &WorkerOptions, program: &Path, workers: u16) -> Result<WorkerRound> {
    let dir = tempfile::tempdir()?;
    let (process, address) = start_proxy(program, dir.path(), workers)?;
    let origin = origin(options.bytes).await?;
    let mut devices = Vec::new();
    for _ in 0..options.devices {
        let device = Device::new(DeviceOptions {
            server: address.clone(),
            key: SecretKey::from_bytes(rand::random()),
            config: EndpointConfig::default(),
        });
        let device = device.await?;
        device.use_default_route()?;
        devices.push(device);
    }
    let first = async { finish(begin(&devices[0], origin, "/", 0).await?).await };
    // The others get it from the cache.
    timeout(STEP_MAX, first)
        .await
        .context("the first download")??;
    let received = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for device in devices {
        tasks.spawn(download(device, origin, received.clone()));
    }
    let counted = async {
        while received.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tokio::time::sleep(WARM_UP).await;
        let (before, cpu_before) = (received.load(Ordering::Relaxed), cpu_s(process.0.id())?);
        let begun = Instant::now();
        tokio::time::sleep(Duration::from_secs_f64(options.seconds)).await;
        let seconds = begun.elapsed().as_secs_f64();
        let bytes = (received.load(Ordering::Relaxed) - before) as f64;
        let cpu = cpu_s(process.0.id())? - cpu_before;
        Ok(WorkerRound {
            gbps: bytes * 8.0 / 1e9 / seconds,
            cpu_s_per_gb: cpu / (bytes / 1e9),
            cores: cpu / seconds,
        })
    };
    tokio::select! {
        round = counted => round,
        Some(ended) = tasks.join_next() => match ended? {
            Ok(never) => match never {},
            Err(error) => Err(error.context("a download")),
        },
    }
}

/// Downloads the object again and again.
async fn download(
    device: Device,
    origin: SocketAddr,
    received: Arc<AtomicU64>,
) -> Result<Infallible> {
    let mut piece = vec![0; 256 << 10];
    loop {
        let mut flow = begin(&device, origin, "/", 0).await?;
        loop {
            match flow.read(&mut piece).await? {
                0 => break,
                read => received.fetch_add(read as u64, Ordering::Relaxed),
            };
        }
    }
}
