//! The two processes of a fairness run: one sends on every connection, the other opens them all,
//! reads, and counts the bytes of each.
//!
//! ```text
//!  source (senders' namespace)                     sink (receivers' namespace)
//!   TCP listener, CUBIC  ◀────────── connect ───── n connections
//!   D2TP server          ◀────────── SYN ───────── sessions, each with its flows
//!   writes until it ends  ───────────────────────▶  counts from the end of the warm-up
//! ```
//!
//! The receiving host opens all connections, like a device that downloads. The two kinds alternate
//! with short intervals, so that neither finds an emptier queue than the other.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, Flow, FlowSettings, LinkUse, ProvidedLink,
    ProvidedLinks, PublicKey, Qlog, SecretKey, Server, ServerAddress, ServerOptions, TraceLevel,
};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::process::tell;

/// The time within which all connections are opened. If all began at once, slow starts would fill
/// the queue together, and the run would measure how long that effect lasts.
const OPENING: Duration = Duration::from_secs(2);
/// Bytes written or read in one call.
const CALL_BYTES: usize = 64 << 10;
const LISTEN_BACKLOG: i32 = 1024;
const CONGESTION_CONTROL: &str = "cubic";

/// What a sink must know about its source.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SourceCard {
    tcp: SocketAddr,
    d2tp: SocketAddr,
    key: [u8; 32],
}

/// The bytes of every flow in the counted time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FlowBytes {
    /// Bytes of each TCP connection.
    pub tcp: Vec<u64>,
    /// Bytes of each D2TP flow, session after session.
    pub d2tp: Vec<u64>,
    /// The length of the counted time.
    pub seconds: f64,
    /// The congestion control of the TCP senders.
    pub tcp_control: String,
}

#[derive(clap::Args)]
pub struct SourceOptions {
    #[arg(long)]
    address: IpAddr,
    #[arg(long)]
    qlog: Option<PathBuf>,
}

#[derive(clap::Args)]
pub struct SinkOptions {
    #[arg(long)]
    card: String,
    #[arg(long)]
    tcp: usize,
    #[arg(long)]
    sessions: usize,
    #[arg(long)]
    flows_per_session: usize,
    #[arg(long)]
    paths_per_session: usize,
    #[arg(long)]
    warm_up_s: f64,
    #[arg(long)]
    seconds: f64,
}

/// The sending process. It runs until it is killed.
pub fn source(options: &SourceOptions) -> Result<()> {
    runtime()?.block_on(async {
        let (listener, control) = listen(options.address)?;
        let server = Server::bind(ServerOptions {
            listen: (options.address, 0).into(),
            key: SecretKey::from_bytes([2; 32]),
            admission: Admission::Anybody,
            config: EndpointConfig::default(),
        })?;
        if let Some(folder) = &options.qlog {
            server.log_to(&Qlog::in_folder(folder, TraceLevel::Events)?);
        }
        ensure!(
            control == CONGESTION_CONTROL,
            "this kernel gives TCP {control} where {CONGESTION_CONTROL} was asked for: the \
             comparison would not be what it says"
        );
        tell(&SourceCard {
            tcp: listener.local_addr()?,
            d2tp: server.local_addr(),
            key: server.public_key().0,
        })?;
        let payload = Bytes::from(vec![0x5a; CALL_BYTES]);
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let (stream, _) = accepted?;
                    tokio::spawn(fill_connection(stream, payload.clone()));
                }
                flow = server.accept() => {
                    let flow = flow.context("the server stopped")?;
                    tokio::spawn(fill_flow(flow, payload.clone()));
                }
            }
        }
    })
}

fn listen(address: IpAddr) -> Result<(TcpListener, String)> {
    let at = SocketAddr::new(address, 0);
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::TCP))?;
    // Accepted connections inherit it.
    socket
        .set_tcp_congestion(CONGESTION_CONTROL.as_bytes())
        .context("this kernel has no CUBIC for TCP")?;
    let control = String::from_utf8_lossy(&SockRef::from(&socket).tcp_congestion()?)
        .trim_end_matches('\0')
        .to_owned();
    socket.bind(&at.into())?;
    socket.listen(LISTEN_BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok((TcpListener::from_std(socket.into())?, control))
}

async fn fill_connection(mut stream: TcpStream, payload: Bytes) {
    // Until the sink leaves.
    while stream.write_all(&payload).await.is_ok() {}
}

async fn fill_flow(mut flow: Flow, payload: Bytes) {
    while flow.write_chunk(payload.clone()).await.is_ok() {}
}

/// The receiving process.
pub fn sink(options: &SinkOptions) -> Result<()> {
    let card: SourceCard = serde_json::from_str(&options.card).context("--card")?;
    let warm_up = Duration::try_from_secs_f64(options.warm_up_s).context("--warm-up-s")?;
    let window = Duration::try_from_secs_f64(options.seconds).context("--seconds")?;
    let shares = runtime()?.block_on(async {
        let mut reading = JoinSet::new();
        let (mut tcp, mut d2tp) = (Vec::new(), Vec::new());
        let mut devices = Vec::new();
        let begun = tokio::time::Instant::now();
        let openings = options.tcp.max(options.sessions);
        for turn in 0..openings {
            if turn < options.tcp {
                let stream = TcpStream::connect(card.tcp).await.context("TCP")?;
                let count = counter(&mut tcp);
                reading.spawn(read_connection(stream, count));
            }
            if turn < options.sessions {
                let device = call(&card, turn, options.paths_per_session).await?;
                for _ in 0..options.flows_per_session {
                    let flow = device.open(FlowSettings::default())?;
                    let count = counter(&mut d2tp);
                    reading.spawn(read_flow(flow, count));
                }
                devices.push(device);
            }
            let due = OPENING.mul_f64((turn + 1) as f64 / openings as f64);
            tokio::time::sleep_until(begun + due).await;
        }
        let measured = async {
            tokio::time::sleep_until(begun + OPENING + warm_up).await;
            let before = (look(&tcp), look(&d2tp));
            let at = tokio::time::Instant::now();
            tokio::time::sleep(window).await;
            let seconds = at.elapsed().as_secs_f64();
            let grown = |now: Vec<u64>, before: &[u64]| {
                now.iter().zip(before).map(|(now, was)| now - was).collect()
            };
            FlowBytes {
                tcp: grown(look(&tcp), &before.0),
                d2tp: grown(look(&d2tp), &before.1),
                seconds,
                tcp_control: CONGESTION_CONTROL.to_owned(),
            }
        };
        tokio::select! {
            shares = measured => Ok(shares),
            // None of them ends by itself.
            Some(ended) = reading.join_next() => Err(match ended {
                Ok(Ok(())) => anyhow::anyhow!("a flow ended before it was counted"),
                Ok(Err(error)) => error.context("a flow failed before it was counted"),
                Err(error) => error.into(),
            }),
        }
    })?;
    tell(&shares)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?)
}

fn counter(all: &mut Vec<Arc<AtomicU64>>) -> Arc<AtomicU64> {
    let count = Arc::new(AtomicU64::new(0));
    all.push(count.clone());
    count
}

fn look(counts: &[Arc<AtomicU64>]) -> Vec<u64> {
    counts.iter().map(|c| c.load(Ordering::Relaxed)).collect()
}

/// Opens a session with its own host key and a socket for each of its paths.
async fn call(card: &SourceCard, number: usize, paths: usize) -> Result<Device> {
    let mut key = [1; 32];
    key[..8].copy_from_slice(&(number as u64).to_be_bytes());
    let options = DeviceOptions {
        server: ServerAddress::new(
            card.d2tp.ip().to_string(),
            card.d2tp.port(),
            PublicKey(card.key),
        ),
        key: SecretKey::from_bytes(key),
        config: EndpointConfig::default(),
    };
    let links = ProvidedLinks::new();
    let mut device = Device::with_attach(options, links.clone()).await?;
    device.follow_links(links.subscribe(), |_| LinkUse::Free);
    let local = local_address(card.d2tp)?;
    for path in 0..paths {
        links.add(ProvidedLink::new(format!("path{path}"), local));
    }
    Ok(device)
}

/// The address from which this host reaches another one.
fn local_address(remote: SocketAddr) -> Result<IpAddr> {
    let any: IpAddr = match remote {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(remote)?;
    Ok(socket.local_addr()?.ip())
}

async fn read_connection(mut stream: TcpStream, count: Arc<AtomicU64>) -> Result<()> {
    let mut buffer = vec![0; CALL_BYTES];
    loop {
        match stream.read(&mut buffer).await.context("TCP")? {
            0 => return Ok(()),
            n => count.fetch_add(n as u64, Ordering::Relaxed),
        };
    }
}

async fn read_flow(mut flow: Flow, count: Arc<AtomicU64>) -> Result<()> {
    // This stands for a request.
    flow.write_chunk(Bytes::from_static(b"?"))
        .await
        .context("D2TP")?;
    while let Some(chunk) = flow.read_chunk().await.context("D2TP")? {
        count.fetch_add(chunk.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}
