//! TCP connections of an attacker, each of which writes what its script says.
//!
//! ```text
//!  open ─▶ script ─▶ unsent ─▶ the kernel, as far as it takes it      closed by the proxy: another one is opened
//! ```
//!
//! All are turned by one thread, so that one which the proxy does not read delays no other.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use socket2::{Domain, Protocol, Socket, Type};

use super::attack_context::AttackTally;

/// How long the proxy may take to accept a connection.
const OPENED_WITHIN: Duration = Duration::from_millis(200);
/// The pause between two turns of all connections.
const TURN_PAUSE: Duration = Duration::from_micros(500);
/// Connections that are opened in one turn.
const OPENED_PER_TURN: usize = 4;
/// What one connection writes in a turn at most, so that the others have theirs.
const WRITTEN_PER_TURN: usize = 64 * 1024;

/// What a connection does with what the proxy sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// The connection reads it and throws it away.
    All,
    /// The connection leaves it in the kernel, until that takes no more.
    Nothing,
}

/// What a connection writes: called whenever all was written, and adds the next bytes. None: nothing more, for now.
pub type Script = Box<dyn FnMut(&mut Vec<u8>)>;

/// A connection with its script.
pub struct ScriptedConnection {
    tcp: TcpStream,
    script: Script,
    reading: Reading,
    unsent: Vec<u8>,
    sent: usize,
    written: u64,
}

impl ScriptedConnection {
    /// A connection that follows a script from now on.
    ///
    /// # Errors
    /// The socket does not work.
    pub fn new(tcp: TcpStream, reading: Reading, script: Script) -> Result<ScriptedConnection> {
        tcp.set_nonblocking(true)?;
        Ok(ScriptedConnection {
            tcp,
            script,
            reading,
            unsent: Vec::new(),
            sent: 0,
            written: 0,
        })
    }

    /// Writes as much as the kernel takes. Returns false when the connection has ended.
    fn turn(&mut self) -> bool {
        if !self.is_open() {
            return false;
        }
        let until = self.written + WRITTEN_PER_TURN as u64;
        while self.written < until {
            if self.sent == self.unsent.len() {
                self.unsent.clear();
                self.sent = 0;
                (self.script)(&mut self.unsent);
                if self.unsent.is_empty() {
                    return true;
                }
            }
            match self.tcp.write(&self.unsent[self.sent..]) {
                Ok(count) => {
                    self.sent += count;
                    self.written += count as u64;
                }
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
        true
    }

    /// Whether the proxy has not ended the connection, as far as that can be seen without reading.
    fn is_open(&mut self) -> bool {
        let mut space = [0; 16 * 1024];
        loop {
            let read = match self.reading {
                Reading::All => self.tcp.read(&mut space),
                Reading::Nothing => self.tcp.peek(&mut space[..1]),
            };
            match read {
                Ok(0) => return false,
                Ok(_) if self.reading == Reading::Nothing => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
    }
}

/// Keeps `count` connections open until the time is over. `open` opens the connection with a number; what fails is tried
/// again.
///
/// # Errors
/// None could be opened.
pub fn keep_connections(
    count: usize,
    until: Instant,
    mut open: impl FnMut(u64) -> Result<ScriptedConnection>,
) -> Result<AttackTally> {
    let mut tally = AttackTally::default();
    let mut connections: Vec<ScriptedConnection> = Vec::new();
    let mut number = 0;
    while Instant::now() < until {
        for _ in 0..OPENED_PER_TURN.min(count - connections.len()) {
            if let Ok(connection) = open(number) {
                tally.connections += 1;
                connections.push(connection);
            }
            number += 1;
        }
        connections.retain_mut(|connection| {
            let before = connection.written;
            let is_open = connection.turn();
            tally.tcp_bytes += connection.written - before;
            is_open
        });
        std::thread::sleep(TURN_PAUSE);
    }
    ensure!(
        tally.connections > 0,
        "no connection of the attacker was accepted"
    );
    Ok(tally)
}

/// Opens a connection from the attacker's address with this number: each is a client of its own at the proxy's port for
/// clients without D2TP.
///
/// # Errors
/// The proxy does not accept it in time.
pub fn connect(to: SocketAddr, number: u64) -> Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    let from = IpAddr::V4(Ipv4Addr::new(127, 67, number as u8, 7));
    socket.bind(&SocketAddr::new(from, 0).into())?;
    socket.connect_timeout(&to.into(), OPENED_WITHIN)?;
    let tcp = TcpStream::from(socket);
    tcp.set_nodelay(true)?;
    tcp.set_read_timeout(Some(OPENED_WITHIN))?;
    tcp.set_write_timeout(Some(OPENED_WITHIN))?;
    Ok(tcp)
}
