//! The serving side of a churn run: real D2Prox nodes, and the origin of the object that all hosts
//! download.
//!
//! ```text
//!  cedos-bench churn-server ── an origin: GET / ▶ one object that may be shared
//!    ├─ cedos prox, node 0 ◀── hosts 0, N, 2 N, …
//!    └─ cedos prox, node 1 ◀── hosts 1, N + 1, …
//! ```
//!
//! The proxies run with a state directory, and with as much memory for sessions as all hosts need, of which an operator of so
//! many would have to think, too; all else is as by default. They hibernate the sessions of hosts that have been silent for a
//! minute. They end with this process.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use cedos_terminal::print_stderr;
use d2tp_driver::ServerAddress;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::hostile::find_program;
use crate::process::tell;

/// What a proxy may hold for sessions: some 50 kB for each of 65,536 active ones, and room to spare.
const SESSION_MEMORY: &str = "8GiB";
/// Bytes that the origin writes at once.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

#[derive(clap::Args)]
pub struct ChurnServerOptions {
    /// The number of proxies
    #[arg(long)]
    nodes: usize,
    /// The address on which the nodes listen
    #[arg(long)]
    address: IpAddr,
    /// Bytes of the object
    #[arg(long)]
    object_bytes: u64,
    /// The program `cedos` [default: the one in this program's folder]
    #[arg(long)]
    cedos: Option<PathBuf>,
    /// The directory of their state
    #[arg(long)]
    dir: PathBuf,
}

/// What hosts must know about the serving side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChurnServerInfo {
    /// The proxies; host `n` uses number `n` modulo their count.
    pub nodes: Vec<ChurnNode>,
    /// The authority of the origin.
    pub origin: SocketAddr,
}

/// One proxy of a churn run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChurnNode {
    pub address: SocketAddr,
    pub key: [u8; 32],
    pub process: u32,
}

/// Runs until the process is killed.
pub fn run(options: &ChurnServerOptions) -> Result<()> {
    let program = find_program(options.cedos.as_ref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
    let origin = listener.local_addr()?;
    let object_bytes = options.object_bytes;
    runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, object_bytes));
        }
    });
    let start = |number| start_node(&program, options, number);
    let nodes: Vec<(Child, ChurnNode)> = (0..options.nodes).map(start).collect::<Result<_>>()?;
    tell(&ChurnServerInfo {
        nodes: nodes.iter().map(|(_, node)| node.clone()).collect(),
        origin,
    })?;
    for (mut child, _) in nodes {
        let status = child.wait()?;
        print_stderr(&format!("a proxy ended: {status}"));
    }
    Ok(())
}

fn start_node(
    program: &Path,
    options: &ChurnServerOptions,
    number: usize,
) -> Result<(Child, ChurnNode)> {
    let listen = SocketAddr::new(options.address, 0);
    let mut command = Command::new(program);
    command
        .args(["prox", "--allow-any-client", "--allow-private"])
        .args(["--session-memory", SESSION_MEMORY])
        .args(["--listen", &listen.to_string()])
        .arg("--state-dir")
        .arg(options.dir.join(format!("node-{number}")))
        .env("RUST_LOG", "warn")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    // SAFETY: prctl is async-signal-safe, and nothing is allocated between fork and exec.
    unsafe {
        command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?));
    }
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let mut line = String::new();
    let stdout = child.stdout.take().context("its output is piped")?;
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(!line.is_empty(), "the proxy ended; its error is above");
    let said = line.trim();
    let address: ServerAddress =
        (said.parse()).with_context(|| format!("the proxy said {said:?}"))?;
    let node = ChurnNode {
        address: SocketAddr::new(options.address, address.port),
        key: address.key.0,
        process: child.id(),
    };
    Ok((child, node))
}

/// Answers one request with an object that may be shared.
pub async fn answer(mut stream: TcpStream, object_bytes: u64) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if stream.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {object_bytes}\r\ncache-control: max-age=86400\r\netag: \"churn\"\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    let mut left = object_bytes;
    while left > 0 {
        let piece = left.min(ZEROS.len() as u64) as usize;
        stream.write_all(&ZEROS[..piece]).await?;
        left -= piece as u64;
    }
    Ok(())
}
