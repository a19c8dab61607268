//! The origin servers for requests of honest and hostile clients, each on its own port.
//!
//! ```text
//!  /object/N   N bytes, as fast as they are taken
//!  /endless    a body without an end, paced
//!  /head       a response head of almost the largest size, without its end
//!  /cached/N/… N bytes that every cache may keep, each path another object
//!  /varied/…   a small answer with a large head, which varies with X-Variant
//!  /slow/N     a byte a second: of the body where N is even, of the head where it is odd
//!  /bomb/…     a body that is a thousand times as large when it is unpacked
//!  PUT         reads endlessly
//!  blast       (another port) bytes for a tunnel, as fast as they are taken
//!  silent      (another port) accepts and sends nothing: a TLS handshake that never ends
//! ```

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use super::packed_body::bomb;
use super::{HOSTILE_NICE, be_nice};

/// Bytes that an origin writes in one call.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
/// The pace of an endless body: 64 KiB in this time, 4 MB/s.
const PACE: Duration = Duration::from_millis(16);
/// The interval of the bytes of a slow origin.
const SLOW_BYTE_EVERY: Duration = Duration::from_secs(1);
/// Bytes of a response head that never ends: just below the limit of the proxy.
const HEAD_BYTES: usize = 60 * 1024;

/// Bytes of the head of a varied answer.
const VARIED_HEAD_BYTES: usize = 30 * 1024;

/// The bytes that a server which sends endlessly keeps in the kernel for each connection.
const BLAST_BUFFER_BYTES: usize = 64 * 1024;

/// The running servers; they end when this is dropped. Those of the hostile have a thread of their own, behind
/// all others: what an attacker's servers compute must not count as harm to others.
pub struct HostileOrigins {
    /// The origin that answers requests of honest clients.
    pub honest: SocketAddr,
    /// The origin that answers requests of hostile clients.
    pub http: SocketAddr,
    /// The origin that sends endlessly.
    pub blast: SocketAddr,
    /// The origin that sends nothing.
    pub silent: SocketAddr,
    _runtimes: [Runtime; 2],
}

impl HostileOrigins {
    /// Starts the servers.
    ///
    /// # Errors
    /// The ports cannot be opened.
    pub fn start() -> Result<HostileOrigins> {
        let (friend, enemy) = (runtime(0)?, runtime(HOSTILE_NICE)?);
        let (listener, honest) = listen(&friend)?;
        friend.spawn(serve(listener, answer));
        let (listener, http) = listen(&enemy)?;
        enemy.spawn(serve(listener, answer));
        let (listener, blast) = listen(&enemy)?;
        enemy.spawn(serve(listener, send_for_ever));
        let (listener, silent) = listen(&enemy)?;
        enemy.spawn(serve(listener, read_for_ever));
        Ok(HostileOrigins {
            honest,
            http,
            blast,
            silent,
            _runtimes: [friend, enemy],
        })
    }
}

/// A thread of its own with this niceness.
fn runtime(nice: i32) -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .on_thread_start(move || be_nice(nice))
        .enable_all()
        .build()
        .context("no runtime for the origins")
}

fn listen(runtime: &Runtime) -> Result<(TcpListener, SocketAddr)> {
    let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

async fn serve<F>(listener: TcpListener, one: fn(TcpStream) -> F)
where
    F: Future<Output = std::io::Result<()>> + Send + 'static,
{
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(one(stream));
            }
            // No descriptors are left: a connection may end meanwhile.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

async fn read_for_ever(mut stream: TcpStream) -> std::io::Result<()> {
    let mut space = [0; 16 * 1024];
    while stream.read(&mut space).await? > 0 {}
    Ok(())
}

async fn send_for_ever(mut stream: TcpStream) -> std::io::Result<()> {
    let _ = socket2::SockRef::from(&stream).set_send_buffer_size(BLAST_BUFFER_BYTES);
    loop {
        stream.write_all(&ZEROS).await?;
    }
}

/// Sends an answer of `length` bytes with these fields.
async fn send_object(stream: &mut TcpStream, length: usize, fields: &str) -> std::io::Result<()> {
    let head = format!("HTTP/1.1 200 OK\r\n{fields}content-length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let mut left = length;
    while left > 0 {
        let piece = left.min(ZEROS.len());
        stream.write_all(&ZEROS[..piece]).await?;
        left -= piece;
    }
    Ok(())
}

async fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if stream.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or_default();
    if !head.starts_with("GET") {
        return read_for_ever(stream).await;
    }
    if let Some(length) = path.strip_prefix("/object/") {
        send_object(&mut stream, length.parse().unwrap_or(0), "").await?;
    } else if let Some(object) = path.strip_prefix("/cached/") {
        let length = object
            .split('/')
            .next()
            .and_then(|length| length.parse().ok());
        let fields = "cache-control: public, max-age=3600\r\netag: \"1\"\r\n";
        send_object(&mut stream, length.unwrap_or(0), fields).await?;
    } else if path.starts_with("/varied/") {
        let field = format!("x-filler: {}\r\n", "f".repeat(1000));
        let filler = field.repeat(VARIED_HEAD_BYTES / field.len());
        let fields = format!("cache-control: max-age=3600\r\nvary: x-variant\r\n{filler}");
        send_object(&mut stream, 100, &fields).await?;
    } else if let Some(kind) = path.strip_prefix("/bomb/") {
        let fields = match kind {
            "" => "content-encoding: gzip\r\ncache-control: private\r\n",
            "transfer" => "transfer-encoding: gzip\r\n",
            _ => "content-encoding: gzip\r\ncache-control: max-age=3600\r\netag: \"1\"\r\n",
        };
        let length = match kind {
            "transfer" => "connection: close\r\n".to_owned(),
            _ => format!("content-length: {}\r\n", bomb().len()),
        };
        let head = format!("HTTP/1.1 200 OK\r\n{fields}{length}\r\n");
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(bomb()).await?;
        if kind == "transfer" {
            return stream.shutdown().await;
        }
    } else if let Some(number) = path.strip_prefix("/slow/") {
        let is_in_body = number.parse::<u64>().is_ok_and(|number| number % 2 == 0);
        stream.write_all(b"HTTP/1.1 200 OK\r\n").await?;
        let end_of_head: &[u8] = if is_in_body { b"\r\n" } else { b"x-filler: " };
        stream.write_all(end_of_head).await?;
        loop {
            tokio::time::sleep(SLOW_BYTE_EVERY).await;
            stream.write_all(b"f").await?;
        }
    } else if path.starts_with("/head") {
        let field = format!("x-filler: {}\r\n", "f".repeat(1000));
        let head = format!(
            "HTTP/1.1 200 OK\r\n{}",
            field.repeat(HEAD_BYTES / field.len())
        );
        stream.write_all(head.as_bytes()).await?;
        return read_for_ever(stream).await;
    } else {
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
        loop {
            stream.write_all(&ZEROS).await?;
            tokio::time::sleep(PACE).await;
        }
    }
    // The peer closes when it has enough.
    read_for_ever(stream).await
}
