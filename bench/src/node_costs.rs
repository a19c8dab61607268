//! What nodes of a proxy cost that share a store: CPU time for bytes, wakes and sleeping flows, and operations of the
//! store for each wake.
//!
//! ```text
//!  devices ── forwarder each ──▶ cedos prox a, b, …  ──▶ redis-server, a directory of copies
//!    1  each downloads an object                       CPU per GB
//!    2  each begins another, and its forwarder is cut  CPU and bytes of the store for each sleeping flow
//!    3  the forwarder leads to the next node           CPU, scripts and commands of the store for each wake
//! ```
//!
//! Costs are counted, not timed: CPU time of the processes, and what the store counts itself. Devices and origin are in
//! this process, which counts for nothing.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cedos_lab_scenario::TextTable;
use cedos_terminal::{print_stderr, print_stdout};
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, Flow, FlowSettings, SecretKey, ServerAddress,
};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::bulk::cpu_s;
use crate::churn_server::answer;
use crate::hostile::find_program;

/// How much of an object a device reads before it falls silent.
const READ_BEFORE_SLEEP: usize = 64 << 10;
/// The window of a flow that sleeps.
const SLEEPING_WINDOW: u64 = 64 << 10;
/// The object of a flow that sleeps: a little more than a device takes unasked, so that few bytes follow a wake.
const SLEEPING_OBJECT_BYTES: u64 = 256 << 10;
/// How long devices are silent until their sessions sleep.
const SLEEP_AFTER: &str = "3s";
/// How long flows sleep while CPU time is counted.
const ASLEEP_FOR: Duration = Duration::from_secs(10);
/// How long a step may take.
const STEP_MAX: Duration = Duration::from_secs(300);

#[derive(clap::Args)]
pub struct NodeCostOptions {
    /// How many nodes, in turn
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4])]
    nodes: Vec<usize>,
    /// Devices, each with a session and a flow
    #[arg(long, default_value_t = 200)]
    devices: usize,
    /// Bytes that each device downloads
    #[arg(long, default_value_t = 20_000_000)]
    bytes: u64,
    /// The program `cedos` [default: the one in this program's folder]
    #[arg(long)]
    cedos: Option<PathBuf>,
    /// Print one JSON object for each number of nodes
    #[arg(long)]
    json: bool,
}

/// The costs with one number of nodes.
#[derive(Debug, Serialize)]
struct NodeCosts {
    nodes: usize,
    devices: usize,
    /// CPU time of all nodes for each gigabyte that devices received.
    cpu_s_per_gb: f64,
    /// CPU time of the store for the same.
    store_cpu_s_per_gb: f64,
    /// CPU time of all nodes for each flow and hour asleep.
    cpu_s_per_sleeping_flow_hour: f64,
    /// Memory of the store for each session that sleeps with a flow.
    store_bytes_per_sleeping_flow: f64,
    /// CPU time of all nodes for each wake, with that of the 200 kB at most that follow.
    cpu_ms_per_wake: f64,
    store_cpu_ms_per_wake: f64,
    /// Scripts that the store ran for each wake.
    store_scripts_per_wake: f64,
    /// Commands that the store ran for each wake, those of scripts included.
    store_commands_per_wake: f64,
}

/// A process that ends with this one.
pub struct BenchChild(pub Child);

impl BenchChild {
    /// Starts a process.
    ///
    /// # Errors
    /// The program cannot be run.
    pub fn start(mut command: Command) -> Result<BenchChild> {
        // SAFETY: prctl is async-signal-safe, and nothing is allocated between fork and exec.
        unsafe {
            command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?));
        }
        let name = command.get_program().display().to_string();
        let child = command.spawn();
        Ok(BenchChild(
            child.with_context(|| format!("cannot run {name}"))?,
        ))
    }
}

impl Drop for BenchChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The store of the nodes.
struct BenchStore {
    process: BenchChild,
    socket: PathBuf,
}

impl BenchStore {
    fn start(dir: &Path) -> Result<BenchStore> {
        let socket = dir.join("redis.sock");
        let mut command = Command::new("redis-server");
        command
            .args(["--port", "0", "--save", "", "--appendonly", "yes", "--dir"])
            .arg(dir)
            .arg("--unixsocket")
            .arg(&socket)
            .stdout(Stdio::null());
        let process = BenchChild::start(command).context("the store: install redis-server")?;
        let store = BenchStore { process, socket };
        for _ in 0..500 {
            if store.ask(&["PING"]).is_ok_and(|said| said.contains("PONG")) {
                return Ok(store);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("redis-server does not answer")
    }

    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let asked = Command::new("redis-cli")
            .arg("-s")
            .arg(&self.socket)
            .args(arguments)
            .output()?;
        Ok(String::from_utf8_lossy(&asked.stdout).into_owned())
    }

    /// A number of `INFO`.
    fn number(&self, section: &str, field: &str) -> Result<f64> {
        let told = self.ask(&["INFO", section])?;
        let mut lines = told.lines();
        let line = lines.find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let line = line.with_context(|| format!("the store does not tell {field}"))?;
        // `calls=12,usec=…`, or a bare number.
        let number = line.trim_start_matches("calls=").split(',').next();
        Ok(number.unwrap_or(line).trim().parse()?)
    }

    fn scripts(&self) -> f64 {
        // None was run yet.
        self.number("commandstats", "cmdstat_evalsha")
            .unwrap_or(0.0)
    }
}

/// The way of one device to its node, as a balancer or an address that moves is one.
struct DeviceForwarder {
    address: SocketAddr,
    /// The port of its node, on loopback.
    to: Arc<AtomicU16>,
    is_cut: Arc<AtomicBool>,
}

impl DeviceForwarder {
    async fn start(port: u16) -> Result<DeviceForwarder> {
        let front = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?);
        let back = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?);
        let address = front.local_addr()?;
        let (to, is_cut) = (Arc::new(AtomicU16::new(port)), Arc::<AtomicBool>::default());
        let device = Arc::new(AtomicU16::new(0));
        let (from, target, cut, known) =
            (front.clone(), to.clone(), is_cut.clone(), device.clone());
        let behind = back.clone();
        tokio::spawn(async move {
            let mut bytes = vec![0; 65_536];
            while let Ok((len, at)) = from.recv_from(&mut bytes).await {
                known.store(at.port(), Ordering::SeqCst);
                if !cut.load(Ordering::SeqCst) {
                    let node = (Ipv4Addr::LOCALHOST, target.load(Ordering::SeqCst));
                    let _ = behind.send_to(&bytes[..len], node).await;
                }
            }
        });
        let cut = is_cut.clone();
        tokio::spawn(async move {
            let mut bytes = vec![0; 65_536];
            loop {
                // An error is an ICMP message about a node that is gone.
                let Ok((len, _)) = back.recv_from(&mut bytes).await else {
                    continue;
                };
                let port = device.load(Ordering::SeqCst);
                if !cut.load(Ordering::SeqCst) {
                    let _ = front
                        .send_to(&bytes[..len], (Ipv4Addr::LOCALHOST, port))
                        .await;
                }
            }
        });
        Ok(DeviceForwarder {
            address,
            to,
            is_cut,
        })
    }
}

/// A proxy of the run.
struct BenchNode {
    process: BenchChild,
    address: ServerAddress,
    /// How many sessions have fallen asleep, as its log says.
    asleep: Arc<AtomicU64>,
}

impl BenchNode {
    fn start(program: &Path, dir: &Path, store: &BenchStore, number: usize) -> Result<BenchNode> {
        let mut command = Command::new(program);
        command
            .args(["prox", "--allow-any-client", "--allow-private"])
            .args(["--listen", "127.0.0.1:0", "--sleep-after", SLEEP_AFTER])
            .arg("--key")
            .arg(dir.join("key"))
            .args(["--node", &format!("node-{number}"), "--store"])
            .arg(format!("redis+unix://{}", store.socket.display()))
            .arg("--state-dir")
            .arg(dir.join(format!("state-{number}")))
            .arg("--copies-dir")
            .arg(dir.join("copies"))
            .env("RUST_LOG", "warn,d2tp_driver::hibernation=debug")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = BenchChild::start(command)?;
        let errors = process.0.stderr.take().context("its errors are piped")?;
        let asleep = Arc::new(AtomicU64::new(0));
        let counted = asleep.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                if line.contains("a session sleeps") {
                    counted.fetch_add(1, Ordering::SeqCst);
                } else {
                    print_stderr(&line);
                }
            }
        });
        let mut line = String::new();
        let output = process.0.stdout.take().context("its output is piped")?;
        BufReader::new(output).read_line(&mut line)?;
        ensure!(!line.is_empty(), "a node ended; its error is above");
        let address = (line.trim().parse()).with_context(|| format!("a node said {line:?}"))?;
        Ok(BenchNode {
            process,
            address,
            asleep,
        })
    }
}

/// The CPU time of all nodes.
fn nodes_cpu_s(nodes: &[BenchNode]) -> Result<f64> {
    nodes.iter().map(|node| cpu_s(node.process.0.id())).sum()
}

/// Asks for an object in a flow of its own, and reads its head and `bytes` of it.
///
/// # Errors
/// The flow fails.
pub async fn begin(device: &Device, origin: SocketAddr, path: &str, bytes: usize) -> Result<Flow> {
    let mut flow = device.open(FlowSettings::default())?;
    let request = format!("GET http://{origin}{path} HTTP/1.1\r\nhost: {origin}\r\n\r\n");
    flow.write_all(request.as_bytes()).await?;
    flow.shutdown().await?;
    let mut read = vec![0; bytes];
    flow.read_exact(&mut read).await?;
    Ok(flow)
}

/// Reads the rest of an answer, and returns its bytes.
///
/// # Errors
/// The flow fails.
pub async fn finish(mut flow: Flow) -> Result<u64> {
    let (mut piece, mut bytes) = (vec![0; 64 << 10], 0);
    loop {
        match flow.read(&mut piece).await? {
            0 => return Ok(bytes),
            read => bytes += read as u64,
        }
    }
}

/// Waits for all, and returns their sum.
async fn all(mut tasks: JoinSet<Result<u64>>) -> Result<u64> {
    let mut sum = 0;
    while let Some(done) = tasks.join_next().await {
        sum += done??;
    }
    Ok(sum)
}

async fn measure(options: &NodeCostOptions, program: &Path, count: usize) -> Result<NodeCosts> {
    let dir = tempfile::tempdir()?;
    let store = BenchStore::start(dir.path())?;
    let made = Command::new(program)
        .args(["key", "gen", "-o"])
        .arg(dir.path().join("key"))
        .stdout(Stdio::null())
        .status()?;
    ensure!(made.success(), "`cedos key gen` failed");
    let start = |number| BenchNode::start(program, dir.path(), &store, number);
    let nodes: Vec<BenchNode> = (0..count).map(start).collect::<Result<_>>()?;
    let large = origin(options.bytes).await?;
    let small = origin(SLEEPING_OBJECT_BYTES).await?;
    let port_of = |device: usize| nodes[device % count].address.port;
    let ports: Vec<u16> = (0..options.devices).map(port_of).collect();
    let (devices, _ways) = connect(&nodes[0].address, &ports, EndpointConfig::default()).await?;

    // 1: bytes.
    let before = (nodes_cpu_s(&nodes)?, cpu_s(store.process.0.id())?);
    let mut tasks = JoinSet::new();
    for (number, device) in devices.iter().enumerate() {
        let (device, path) = (device.clone(), format!("/large/{number}"));
        tasks.spawn(async move { finish(begin(&device, large, &path, 0).await?).await });
    }
    let bytes = timeout(STEP_MAX, all(tasks)).await.context("downloads")??;
    let gb = bytes as f64 / 1e9;
    let cpu_s_per_gb = (nodes_cpu_s(&nodes)? - before.0) / gb;
    let store_cpu_s_per_gb = (cpu_s(store.process.0.id())? - before.1) / gb;

    // 2: sleep.
    drop(devices);
    let small_windows = EndpointConfig {
        session_window: SLEEPING_WINDOW,
        flow_window: SLEEPING_WINDOW,
        ..EndpointConfig::default()
    };
    let (devices, ways) = connect(&nodes[0].address, &ports, small_windows).await?;
    let memory = store.number("memory", "used_memory")?;
    let mut flows = Vec::new();
    for (number, device) in devices.iter().enumerate() {
        let path = format!("/small/{number}");
        let begun = begin(device, small, &path, READ_BEFORE_SLEEP).await;
        flows.push(begun.context("a flow that is to sleep")?);
    }
    // Copies are complete and recorded before their flows sleep.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let asleep = || {
        nodes
            .iter()
            .map(|node| node.asleep.load(Ordering::SeqCst))
            .sum::<u64>()
    };
    let begun = asleep();
    ways.iter()
        .for_each(|way| way.is_cut.store(true, Ordering::SeqCst));
    let all_sleep = async {
        while asleep() < begun + options.devices as u64 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(STEP_MAX, all_sleep)
        .await
        .context("not all sessions sleep")?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let store_bytes = (store.number("memory", "used_memory")? - memory) / options.devices as f64;
    let before = nodes_cpu_s(&nodes)?;
    tokio::time::sleep(ASLEEP_FOR).await;
    let cpu_asleep_s = nodes_cpu_s(&nodes)? - before;

    // 3: wake, at the next node.
    let before = (nodes_cpu_s(&nodes)?, cpu_s(store.process.0.id())?);
    let (scripts, commands) = (
        store.scripts(),
        store.number("stats", "total_commands_processed")?,
    );
    for (number, way) in ways.iter().enumerate() {
        way.to.store(port_of(number + 1), Ordering::SeqCst);
        way.is_cut.store(false, Ordering::SeqCst);
    }
    let mut tasks = JoinSet::new();
    for flow in flows {
        tasks.spawn(finish(flow));
    }
    timeout(STEP_MAX, all(tasks)).await.context("wakes")??;
    let wakes = options.devices as f64;
    let cpu = nodes_cpu_s(&nodes)? - before.0;
    Ok(NodeCosts {
        nodes: count,
        devices: options.devices,
        cpu_s_per_gb,
        store_cpu_s_per_gb,
        cpu_s_per_sleeping_flow_hour: cpu_asleep_s / wakes * 3600.0 / ASLEEP_FOR.as_secs_f64(),
        store_bytes_per_sleeping_flow: store_bytes,
        cpu_ms_per_wake: cpu * 1e3 / wakes,
        store_cpu_ms_per_wake: (cpu_s(store.process.0.id())? - before.1) * 1e3 / wakes,
        store_scripts_per_wake: (store.scripts() - scripts) / wakes,
        store_commands_per_wake: (store.number("stats", "total_commands_processed")? - commands)
            / wakes,
    })
}

/// Devices, each with a way of its own to the node at its port.
async fn connect(
    proxy: &ServerAddress,
    ports: &[u16],
    config: EndpointConfig,
) -> Result<(Vec<Arc<Device>>, Vec<DeviceForwarder>)> {
    let (mut devices, mut ways) = (Vec::new(), Vec::new());
    for port in ports {
        let way = DeviceForwarder::start(*port).await?;
        let mut server = proxy.clone();
        (server.host, server.port) = (way.address.ip().to_string(), way.address.port());
        let device = Device::new(DeviceOptions {
            server,
            key: SecretKey::from_bytes(rand::random()),
            config: config.clone(),
        });
        let device = device.await?;
        device.use_default_route()?;
        devices.push(Arc::new(device));
        ways.push(way);
    }
    Ok((devices, ways))
}

/// An origin of objects of one size.
///
/// # Errors
/// No port is free.
pub async fn origin(object_bytes: u64) -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let at = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, object_bytes));
        }
    });
    Ok(at)
}

/// Measures each number of nodes.
///
/// # Errors
/// A process does not start, or a device does not get its object.
pub fn run(options: &NodeCostOptions) -> Result<()> {
    ensure!(options.devices > 0, "no device: --devices N");
    ensure!(!options.nodes.contains(&0), "a run needs a node: --nodes N");
    let program = find_program(options.cedos.as_ref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let (mut measured, mut result) = (Vec::new(), Ok(()));
    for count in &options.nodes {
        match runtime.block_on(measure(options, &program, *count)) {
            Ok(costs) if options.json => print_stdout(&serde_json::to_string(&costs)?),
            Ok(costs) => measured.push(costs),
            Err(error) => {
                // Minutes of other measurements are not lost with this one.
                result = Err(error);
                break;
            }
        }
    }
    if !measured.is_empty() {
        print_stdout(&table(&measured));
    }
    result
}

fn table(measured: &[NodeCosts]) -> String {
    let mut table = TextTable::new([
        "nodes",
        "CPU-s/GB",
        "of the store",
        "CPU-s/sleeping flow h",
        "store bytes/flow",
        "CPU-ms/wake",
        "of the store",
        "scripts/wake",
        "commands/wake",
    ]);
    for costs in measured {
        table.row([
            costs.nodes.to_string(),
            format!("{:.2}", costs.cpu_s_per_gb),
            format!("{:.3}", costs.store_cpu_s_per_gb),
            format!("{:.2}", costs.cpu_s_per_sleeping_flow_hour),
            format!("{:.0}", costs.store_bytes_per_sleeping_flow),
            format!("{:.2}", costs.cpu_ms_per_wake),
            format!("{:.2}", costs.store_cpu_ms_per_wake),
            format!("{:.1}", costs.store_scripts_per_wake),
            format!("{:.1}", costs.store_commands_per_wake),
        ]);
    }
    table.to_text()
}
