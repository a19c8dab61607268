//! Kernel TCP, and kernel MPTCP with one subflow, without encryption.
//!
//! CUBIC if the kernel has it and nothing else is selected, because defaults of machines differ;
//! the control in force is read back from the connection. The kernel tunes the buffers. Blocking
//! calls of [`CALL_BYTES`].

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use d2tp_session::{DrwaLambda, Time};
use d2tp_tcp::WindowClamp;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::bench_peer::{BenchPeer, CALL_BYTES};
use crate::meter::ProcessMeter;
use crate::receiver_info::ReceiverInfo;

/// The default congestion control.
pub const CONGESTION_CONTROL: &str = "cubic";

/// The peer, in one of its variants.
pub struct Tcp {
    protocol: Protocol,
    congestion: &'static str,
    receiver: ReceiveWindowControl,
    /// The sender's own limit, in kb/s of payload.
    shaped_kbps: Option<u64>,
    /// The name of a variant beside plain TCP and MPTCP.
    name: Option<&'static str>,
}

/// What determines the advertised window.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReceiveWindowControl {
    /// The kernel's tuning.
    Kernel,
    /// A buffer of this many bytes, like a fixed maximum of tcp_rmem.
    Fixed(usize),
    /// The kernel, within the limit of DRWA.
    Drwa,
}

impl Tcp {
    /// Creates plain TCP.
    pub fn plain() -> Self {
        Self {
            protocol: Protocol::TCP,
            congestion: CONGESTION_CONTROL,
            receiver: ReceiveWindowControl::Kernel,
            shaped_kbps: None,
            name: None,
        }
    }

    /// Creates the peer with a name such as `tcp-drwa`, `tcp-bbr-drwa`, `tcp-reno`, `tcp-vegas`,
    /// `tcp-fixed-262144` (a receive buffer of this many bytes) or `tcp-shaped-3400` (a sender
    /// limited to this many kb/s).
    pub fn named(name: &str) -> Option<Self> {
        // A name lives as long as the process, which uses only a few.
        let known: &'static str = name.to_owned().leak();
        let mut tcp = Self {
            name: Some(known),
            ..Self::plain()
        };
        match known.strip_prefix("tcp-")? {
            "drwa" => tcp.receiver = ReceiveWindowControl::Drwa,
            "bbr-drwa" => (tcp.congestion, tcp.receiver) = ("bbr", ReceiveWindowControl::Drwa),
            "reno" => tcp.congestion = "reno",
            "vegas" => tcp.congestion = "vegas",
            other => match other.split_once('-')? {
                ("fixed", bytes) => tcp.receiver = ReceiveWindowControl::Fixed(bytes.parse().ok()?),
                ("shaped", kbps) => tcp.shaped_kbps = Some(kbps.parse().ok()?),
                _ => return None,
            },
        }
        Some(tcp)
    }

    /// TCP with the kernel's BBR.
    pub fn bbr() -> Self {
        Self {
            congestion: "bbr",
            ..Self::plain()
        }
    }

    /// MPTCP; with one address at each end it has one subflow.
    pub fn multipath() -> Self {
        Self {
            protocol: Protocol::MPTCP,
            ..Self::plain()
        }
    }
}

impl BenchPeer for Tcp {
    fn name(&self) -> &'static str {
        if let Some(name) = self.name {
            return name;
        }
        match (self.protocol, self.congestion) {
            (Protocol::MPTCP, _) => "mptcp",
            (_, CONGESTION_CONTROL) => "tcp",
            _ => "tcp-bbr",
        }
    }

    fn missing(&self) -> Option<String> {
        let refused = |error| format!("this kernel opens no {} socket: {error}", self.name());
        let socket = match Socket::new(Domain::IPV4, Type::STREAM, Some(self.protocol)) {
            Ok(socket) => socket,
            Err(error) => return Some(refused(error)),
        };
        // If nothing particular was selected, the kernel's default is used and noted.
        if self.congestion == CONGESTION_CONTROL {
            return None;
        }
        let error = socket
            .set_tcp_congestion(self.congestion.as_bytes())
            .err()?;
        Some(format!("this kernel has no {}: {error}", self.congestion))
    }

    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<ProcessMeter>,
        ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
    ) -> Result<()> {
        let buffer_bytes = match self.receiver {
            ReceiveWindowControl::Fixed(bytes) => Some(bytes),
            ReceiveWindowControl::Kernel | ReceiveWindowControl::Drwa => None,
        };
        let mut stream = accept_into(self.protocol, address, buffer_bytes, Vec::new(), ready)?;
        if self.receiver == ReceiveWindowControl::Drwa {
            let socket = stream.try_clone()?;
            std::thread::spawn(move || hold(socket));
        }
        let mut buffer = vec![0u8; CALL_BYTES];
        // If a link has gaps, the window may end in one.
        stream.set_read_timeout(Some(super::bench_peer::LOOK))?;
        while !meter.is_over() {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => meter.add(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return meter.forgive(Err(error).context("receiving")),
            }
        }
        Ok(())
    }

    fn send(&self, card: &ReceiverInfo, meter: &Arc<ProcessMeter>) -> Result<()> {
        let mut stream = connect(self.protocol, self.congestion, card.address)?;
        if let Some(kbps) = self.shaped_kbps {
            shape(&stream, kbps)?;
        }
        let settings = settings(&stream);
        meter.note(match self.protocol {
            Protocol::MPTCP if fell_back(&stream) => format!("FELL BACK to plain TCP; {settings}"),
            Protocol::MPTCP => format!("one subflow; {settings}"),
            _ => settings,
        });
        let payload = vec![0x5au8; CALL_BYTES];
        while !meter.is_over() {
            match stream.write(&payload) {
                Ok(count) => meter.add(count),
                Err(error) => return meter.forgive(Err(error).context("sending")),
            }
        }
        Ok(())
    }
}

/// Moves the window clamp of a socket until the connection ends.
fn hold(socket: TcpStream) {
    let begun = Instant::now();
    let mut clamp = WindowClamp::new(DrwaLambda::default());
    while let Ok(Some(again)) = clamp.update(socket.as_fd(), Time::ZERO + begun.elapsed().into()) {
        std::thread::sleep(again.into());
    }
}

/// Makes the kernel pace `stream` at this many kb/s.
fn shape(stream: &TcpStream, kbps: u64) -> Result<()> {
    let bytes_per_second = kbps * 1000 / 8;
    // SAFETY: the pointer is to a live integer of the size given.
    let refused = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const bytes_per_second).cast(),
            size_of::<u64>() as libc::socklen_t,
        )
    };
    match refused {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()).context("the sender cannot be shaped"),
    }
}

/// Listens on any port of `address`, reports it, and accepts one connection.
pub fn accept(
    protocol: Protocol,
    address: IpAddr,
    identity: Vec<u8>,
    ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
) -> Result<TcpStream> {
    accept_into(protocol, address, None, identity, ready)
}

/// Accepts a connection and reads it, into a receive buffer of fixed size if one is given.
fn accept_into(
    protocol: Protocol,
    address: IpAddr,
    buffer_bytes: Option<usize>,
    identity: Vec<u8>,
    ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
) -> Result<TcpStream> {
    let at = SocketAddr::new(address, 0);
    let listener = socket(protocol, at)?;
    if let Some(bytes) = buffer_bytes {
        // Before the handshake, which fixes the window scale; the kernel doubles it.
        listener.set_recv_buffer_size(bytes / 2)?;
    }
    listener.bind(&at.into())?;
    listener.listen(1)?;
    let address = listener
        .local_addr()?
        .as_socket()
        .context("a TCP listener has an address")?;
    ready(ReceiverInfo { address, identity })?;
    let (stream, _) = listener.accept()?;
    Ok(stream.into())
}

/// Opens a connection to `address`.
pub fn connect(protocol: Protocol, congestion: &str, address: SocketAddr) -> Result<TcpStream> {
    let socket = socket(protocol, address)?;
    // On failure the default stays; settings() reports the one in force.
    let _ = socket.set_tcp_congestion(congestion.as_bytes());
    socket
        .connect(&address.into())
        .with_context(|| format!("no connection to {address}"))?;
    Ok(socket.into())
}

/// Congestion control and segment size in force on `stream`.
pub fn settings(stream: &TcpStream) -> String {
    let options = SockRef::from(stream);
    let control = options.tcp_congestion().map_or_else(
        |_| "unknown".to_owned(),
        |name| {
            String::from_utf8_lossy(&name)
                .trim_end_matches('\0')
                .to_owned()
        },
    );
    match options.tcp_mss() {
        Ok(mss) => format!("{control}, MSS {mss}, kernel-tuned buffers"),
        Err(_) => format!("{control}, kernel-tuned buffers"),
    }
}

/// Whether an MPTCP socket fell back to plain TCP: MPTCP_INFO fails then.
fn fell_back(stream: &TcpStream) -> bool {
    const SOL_MPTCP: libc::c_int = 284; // linux/socket.h
    const MPTCP_INFO: libc::c_int = 1; // linux/mptcp.h
    let mut info = [0u8; 256];
    let mut length = info.len() as libc::socklen_t;
    // SAFETY: the pointers are to a live buffer and its length.
    let refused = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            SOL_MPTCP,
            MPTCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    refused != 0
}

fn socket(protocol: Protocol, address: SocketAddr) -> Result<Socket> {
    Socket::new(Domain::for_address(address), Type::STREAM, Some(protocol))
        .with_context(|| format!("this kernel has no protocol {protocol:?} for sockets"))
}
