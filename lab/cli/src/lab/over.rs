//! Transports for comparison with D2TP: kernel TCP over one link or over the first available one of
//! several, or kernel MPTCP over all.
//!
//! ```text
//!  cedos lab fetch --over mptcp URL -o FILE    on the device, straight from the origin, or from the
//!      │                                       proxy's TCP port
//!      └─▶ one JSON object: bytes, when the first and the last came, by which link
//! ```
//!
//! Times are measured as in `cedos get`: from the first byte of the body to the last, as the
//! application gets them, written to a file.

use anyhow::{Context, bail, ensure};
use cedos_terminal::print_stdout;
use clap::Args;
use d2tp_tcp::multipath::{self, Subflow};
use nix::ifaddrs::InterfaceAddress;
use serde::Serialize;
use socket2::{Domain, Protocol, Socket, Type};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};
use url::{Position, Url};

use super::{heed_interrupts, is_interrupted};

/// The kernel's transport that carries the flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelTransport {
    /// Kernel TCP, over the link of this name.
    Tcp(String),
    /// Kernel TCP over the first of these links that has an address. When that changes, another
    /// connection requests the rest.
    First(Vec<String>),
    /// Kernel MPTCP, over all links.
    Mptcp,
    /// Multipath TCP to the proxy's TCP port.
    MptcpProx,
}

impl FromStr for KernelTransport {
    type Err = String;

    fn from_str(text: &str) -> Result<KernelTransport, String> {
        match text.split_once(':') {
            None if text == "mptcp" => Ok(KernelTransport::Mptcp),
            None if text == "mptcp-prox" => Ok(KernelTransport::MptcpProx),
            Some(("tcp", link)) if !link.is_empty() => Ok(KernelTransport::Tcp(link.to_owned())),
            Some(("tcp-first", links)) if links.split(',').all(|link| !link.is_empty()) => Ok(
                KernelTransport::First(links.split(',').map(str::to_owned).collect()),
            ),
            _ => Err(format!(
                "`{text}` is not one of mptcp, mptcp-prox, tcp:LINK, tcp-first:LINK,LINK"
            )),
        }
    }
}

impl KernelTransport {
    /// The name of the transport on the command line.
    pub fn word(&self) -> String {
        match self {
            KernelTransport::Tcp(link) => format!("tcp:{link}"),
            KernelTransport::First(links) => format!("tcp-first:{}", links.join(",")),
            KernelTransport::Mptcp => "mptcp".to_owned(),
            KernelTransport::MptcpProx => "mptcp-prox".to_owned(),
        }
    }

    /// Whether all links are used.
    pub fn is_multipath(&self) -> bool {
        matches!(self, KernelTransport::Mptcp | KernelTransport::MptcpProx)
    }
}

/// Fetch URL by the kernel, as a measure for D2TP.
#[derive(Debug, Args)]
pub struct FetchArgs {
    #[arg(long)]
    over: KernelTransport,
    /// Host and port of an HTTP proxy.
    #[arg(long)]
    through: Option<String>,
    url: Url,
    #[arg(short, long)]
    output: PathBuf,
}

/// The longest wait of a read, after which it is checked whether the run is over, and the bytes of
/// subflows are read: a subflow that ends takes its counters with it.
const LOOK: Duration = Duration::from_millis(50);
/// The most bytes of the head of an answer.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// How long the kernel may try to connect.
const CONNECT_PATIENCE: Duration = Duration::from_secs(30);
/// How long the kernel may try to connect if another link may be tried.
const FIRST_PATIENCE: Duration = Duration::from_secs(3);
/// The number of bytes requested in one call.
const CALL_BYTES: usize = 256 << 10;

#[derive(Serialize)]
struct LabFetch {
    event: &'static str,
    bytes: u64,
    first_byte_s: Option<f64>,
    last_byte_s: Option<f64>,
    duration_s: f64,
    bytes_by_link: BTreeMap<String, u64>,
    duplicate_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// Carries out `cedos lab fetch`. The exit code is 0 if the object is complete.
///
/// # Errors
/// The transfer could not begin.
pub fn fetch(args: &FetchArgs) -> anyhow::Result<ExitCode> {
    heed_interrupts()?;
    let begun = Instant::now();
    let stream = match &args.over {
        KernelTransport::First(_) => None,
        _ => Some(connect(args, &args.over)?),
    };
    let mut fetch = Fetch {
        stream,
        out: File::create(&args.output)?,
        args,
        looked: begun,
        head_bytes: 0,
        bytes: 0,
        came: None,
        carried: BTreeMap::new(),
        first: None,
        by_link: BTreeMap::new(),
    };
    let ended = match &args.over {
        KernelTransport::First(links) => fetch.run_first(links),
        _ => fetch.run(),
    };
    let carried: u64 = fetch.carried.values().map(|(_, bytes)| bytes).sum();
    let since = |moment: Instant| (moment - begun).as_secs_f64();
    let fetched = LabFetch {
        event: if ended.is_ok() { "done" } else { "error" },
        bytes: fetch.bytes,
        first_byte_s: fetch.came.map(|(first, _)| since(first)),
        last_byte_s: fetch.came.map(|(_, last)| since(last)),
        duration_s: since(Instant::now()),
        bytes_by_link: fetch.bytes_by_link(),
        duplicate_bytes: carried.saturating_sub(fetch.head_bytes + fetch.bytes),
        text: ended.as_ref().err().map(|error| format!("{error:#}")),
    };
    print_stdout(&serde_json::to_string(&fetched)?);
    Ok(match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    })
}

/// Connects to the first address of the origin that answers.
fn connect(args: &FetchArgs, over: &KernelTransport) -> anyhow::Result<TcpStream> {
    let origin = || -> anyhow::Result<String> {
        let host = args.url.host_str().context("the URL names no host")?;
        let port = args.url.port_or_known_default().context("no port")?;
        Ok(format!("{host}:{port}"))
    };
    let there = args.through.clone().map_or_else(origin, Ok)?;
    let connect = |to: SocketAddr| -> io::Result<TcpStream> {
        match over {
            KernelTransport::Mptcp | KernelTransport::MptcpProx => multipath::connect(to),
            KernelTransport::First(_) => Err(ErrorKind::InvalidInput.into()),
            KernelTransport::Tcp(link) => {
                let domain = Domain::for_address(to);
                let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
                socket.bind_device(Some(link.as_bytes()))?;
                let patience = match args.over {
                    KernelTransport::First(_) => FIRST_PATIENCE,
                    _ => CONNECT_PATIENCE,
                };
                socket.connect_timeout(&to.into(), patience)?;
                Ok(socket.into())
            }
        }
    };
    let mut last = None;
    for to in there.to_socket_addrs()? {
        match connect(to) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(LOOK))?;
                return Ok(stream);
            }
            Err(error) => last = Some((to, error)),
        }
    }
    let (to, error) = last.context("the host has no address")?;
    Err(error).with_context(|| format!("no connection to {to} over {}", over.word()))
}

struct Fetch<'a> {
    /// The connection; `None` before the first one, and between two.
    stream: Option<TcpStream>,
    out: File,
    args: &'a FetchArgs,
    looked: Instant,
    head_bytes: u64,
    bytes: u64,
    /// When the first and the last bytes of the body arrived.
    came: Option<(Instant, Instant)>,
    /// The link of each subflow and the bytes that it carried, by its local address and port. A new
    /// subflow has another port.
    carried: BTreeMap<SocketAddr, (String, u64)>,
    /// The link of the connection and its address, if the first available link is used.
    first: Option<(String, IpAddr)>,
    by_link: BTreeMap<String, u64>,
}

/// The connection is not the best one any more.
#[derive(Debug)]
struct LinkSuperseded;

impl std::fmt::Display for LinkSuperseded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("another link carries")
    }
}

impl std::error::Error for LinkSuperseded {}

impl Fetch<'_> {
    /// Fetches over the first available link, repeatedly, each time the rest.
    fn run_first(&mut self, links: &[String]) -> anyhow::Result<()> {
        loop {
            ensure!(!is_interrupted(), "stopped");
            self.first = first_of(links);
            let Some((link, _)) = self.first.clone() else {
                std::thread::sleep(LOOK);
                continue;
            };
            match connect(self.args, &KernelTransport::Tcp(link)) {
                Ok(stream) => self.stream = Some(stream),
                // The link may be gone again.
                Err(_) => {
                    std::thread::sleep(LOOK);
                    continue;
                }
            }
            match self.run() {
                Err(error) if error.is::<LinkSuperseded>() || error.is::<io::Error>() => {}
                ended => return ended,
            }
        }
    }

    fn run(&mut self) -> anyhow::Result<()> {
        let url = &self.args.url;
        let host = url.host_str().unwrap_or_default();
        // Neither end closes the connection before the subflows' counters are read, after the last
        // byte.
        let from = match self.args.through {
            Some(_) => Position::BeforeScheme,
            None => Position::BeforePath,
        };
        let target = &url[from..Position::AfterQuery];
        let held = self.bytes;
        let range = match held {
            0 => String::new(),
            held => format!("Range: bytes={held}-\r\n"),
        };
        let ask = format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n{range}\r\n");
        self.stream()?.write_all(ask.as_bytes())?;
        let (rest, first) = self.head(held > 0)?;
        let length = held + rest;
        self.take(&first)?;
        let mut piece = vec![0; CALL_BYTES];
        while self.bytes < length {
            let count = self.read(&mut piece)?;
            self.take(&piece[..count])?;
        }
        ensure!(self.bytes == length, "more came than was promised");
        self.look()?;
        Ok(())
    }

    fn stream(&mut self) -> anyhow::Result<&mut TcpStream> {
        self.stream.as_mut().context("there is no connection")
    }

    /// Reads the head of the answer. Returns the length of the body, and the part that was read
    /// with it.
    fn head(&mut self, is_rest: bool) -> anyhow::Result<(u64, Vec<u8>)> {
        let mut answer = Vec::new();
        let mut piece = vec![0; HEAD_BYTES_MAX];
        loop {
            let count = self.read(&mut piece)?;
            answer.extend_from_slice(&piece[..count]);
            let mut fields = [httparse::EMPTY_HEADER; 32];
            let mut head = httparse::Response::new(&mut fields);
            let httparse::Status::Complete(end) = head.parse(&answer)? else {
                ensure!(
                    answer.len() < HEAD_BYTES_MAX,
                    "the answer has too long a head"
                );
                continue;
            };
            let right = if is_rest { 206 } else { 200 };
            ensure!(
                head.code == Some(right),
                "the origin answers {:?}",
                head.code
            );
            let length = (head.headers.iter())
                .find(|field| field.name.eq_ignore_ascii_case("content-length"))
                .and_then(|field| std::str::from_utf8(field.value).ok()?.parse().ok());
            let length = length.context("the origin does not say how long the object is")?;
            self.head_bytes += end as u64;
            return Ok((length, answer.split_off(end)));
        }
    }

    /// Reads at least one byte.
    fn read(&mut self, piece: &mut [u8]) -> anyhow::Result<usize> {
        loop {
            ensure!(!is_interrupted(), "stopped");
            if self.looked.elapsed() >= LOOK {
                self.look()?;
            }
            match self.stream()?.read(piece) {
                Ok(0) => bail!("the connection ended early"),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn take(&mut self, body: &[u8]) -> io::Result<()> {
        if !body.is_empty() {
            let now = Instant::now();
            self.came = Some((self.came.map_or(now, |(first, _)| first), now));
            self.bytes += body.len() as u64;
            if let Some((link, _)) = &self.first {
                *self.by_link.entry(link.clone()).or_default() += body.len() as u64;
            }
        }
        self.out.write_all(body)
    }

    /// Records what each subflow has carried so far.
    fn look(&mut self) -> anyhow::Result<()> {
        self.looked = Instant::now();
        if let KernelTransport::First(links) = &self.args.over
            && first_of(links) != self.first
        {
            self.stream = None;
            bail!(LinkSuperseded);
        }
        if !self.args.over.is_multipath() {
            return Ok(());
        }
        let subflows = multipath::subflows(self.stream()?.as_fd())?
            .context("the connection fell back to plain TCP")?;
        for Subflow {
            local,
            bytes_received,
            ..
        } in subflows
        {
            let known = self.carried.entry(local);
            let (_, bytes) = known.or_insert_with(|| (link_of(local.ip()), 0));
            *bytes = bytes_received;
        }
        Ok(())
    }

    fn bytes_by_link(&self) -> BTreeMap<String, u64> {
        if let KernelTransport::Tcp(link) = &self.args.over {
            return BTreeMap::from([(link.clone(), self.bytes)]);
        }
        if let KernelTransport::First(_) = &self.args.over {
            return self.by_link.clone();
        }
        let mut by_link = BTreeMap::new();
        for (name, bytes) in self.carried.values() {
            *by_link.entry(name.clone()).or_default() += bytes;
        }
        by_link
    }
}

/// The first of these links that has an IPv4 address, and that address.
fn first_of(links: &[String]) -> Option<(String, IpAddr)> {
    let interfaces: Vec<InterfaceAddress> =
        nix::ifaddrs::getifaddrs().into_iter().flatten().collect();
    links.iter().find_map(|link| {
        let own = interfaces.iter().filter(|i| i.interface_name == *link);
        let v4 = own.filter_map(|i| Some(IpAddr::V4(i.address?.as_sockaddr_in()?.ip())));
        Some((link.clone(), v4.into_iter().next()?))
    })
}

/// The link that has this address now; the address itself if no link has it any more.
fn link_of(address: IpAddr) -> String {
    let mut interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let address_of = |interface: &InterfaceAddress| {
        let own = interface.address?;
        let v4 = own.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let v6 = || own.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()));
        v4.or_else(v6)
    };
    interfaces
        .find(|interface| address_of(interface) == Some(address))
        .map_or_else(|| address.to_string(), |link| link.interface_name)
}

#[cfg(test)]
mod tests {
    use super::KernelTransport;

    #[test]
    fn who_carries_is_named_as_it_is_printed() {
        let first = KernelTransport::First(["wlan0", "wwan0"].map(str::to_owned).to_vec());
        let tcp = KernelTransport::Tcp("wlan0".to_owned());
        for over in [
            KernelTransport::Mptcp,
            KernelTransport::MptcpProx,
            tcp,
            first,
        ] {
            assert_eq!(over.word().parse(), Ok(over));
        }
        for wrong in ["tcp", "tcp:", "mptcp:wlan0", "udp:wlan0", "tcp-first:"] {
            assert!(wrong.parse::<KernelTransport>().is_err(), "{wrong}");
        }
    }
}
