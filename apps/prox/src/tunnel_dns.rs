//! The name server of packet tunnels: it hands queries to the name server of this host.
//!
//! Clients need one that they reach through the tunnel, and that of this host is often in a network that they may not
//! reach. Answers are handed back as they are.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::tunnel_rules::DEVICE;

const DNS_PORT: u16 = 53;
/// Bytes of a message over UDP at most.
const MESSAGE_BYTES_MAX: usize = 4096; // RFC 6891 §6.2.5
/// Queries and connections at once; further ones are dropped, and asked again by their clients.
const QUERIES_MAX: usize = 512; // a guess
/// How long the name server may take. Clients ask again after 5 s.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5); // resolv.conf(5): timeout
/// How long a connection may last.
const CONNECTION_MAX: Duration = Duration::from_secs(30); // RFC 7766 §6.2.3 asks for seconds
/// Where this host's name servers are listed.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Answers queries at this inner address until the future is dropped.
///
/// # Errors
/// The port cannot be had.
pub(crate) async fn serve_names(at: IpAddr) -> io::Result<()> {
    let at = SocketAddr::new(at, DNS_PORT);
    let socket = Arc::new(UdpSocket::from_std(bound(at, Type::DGRAM)?.into())?);
    let listener = bound(at, Type::STREAM)?;
    listener.listen(64)?;
    let listener = TcpListener::from_std(listener.into())?;
    let room = Arc::new(Semaphore::new(QUERIES_MAX));
    tokio::select! {
        served = serve_datagrams(&socket, &room) => served,
        served = serve_connections(&listener, &room) => served,
    }
}

/// A socket that hears only what comes out of tunnels.
fn bound(at: SocketAddr, kind: Type) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(at), kind, None)?;
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(DEVICE.as_bytes()))?;
    socket.bind(&at.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

async fn serve_datagrams(socket: &Arc<UdpSocket>, room: &Arc<Semaphore>) -> io::Result<()> {
    let mut query = vec![0; MESSAGE_BYTES_MAX];
    loop {
        let (bytes, client) = match socket.recv_from(&mut query).await {
            Ok(received) => received,
            // An earlier answer was refused by its receiver.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => return Err(error),
        };
        let Ok(permit) = room.clone().try_acquire_owned() else {
            continue;
        };
        let (socket, query) = (socket.clone(), query[..bytes].to_vec());
        tokio::spawn(async move {
            match timeout(ANSWERED_WITHIN, ask(&query)).await {
                // The client asks again.
                Err(_) | Ok(Err(_)) => {}
                Ok(Ok(answer)) => drop(socket.send_to(&answer, client).await),
            }
            drop(permit);
        });
    }
}

async fn ask(query: &[u8]) -> io::Result<Vec<u8>> {
    let server = name_server();
    let any: IpAddr = match server {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect((server, DNS_PORT)).await?;
    socket.send(query).await?;
    let mut answer = vec![0; MESSAGE_BYTES_MAX];
    let bytes = socket.recv(&mut answer).await?;
    answer.truncate(bytes);
    Ok(answer)
}

async fn serve_connections(listener: &TcpListener, room: &Arc<Semaphore>) -> io::Result<()> {
    loop {
        let (mut client, _) = listener.accept().await?;
        let Ok(permit) = room.clone().try_acquire_owned() else {
            continue;
        };
        tokio::spawn(async move {
            let carried = async {
                let mut server = TcpStream::connect((name_server(), DNS_PORT)).await?;
                copy_bidirectional(&mut client, &mut server).await
            };
            // The client asks again.
            let _ = timeout(CONNECTION_MAX, carried).await;
            drop(permit);
        });
    }
}

/// The first name server of this host; its own, if none is listed.
fn name_server() -> IpAddr {
    let text = std::fs::read_to_string(RESOLV_CONF).unwrap_or_default();
    first_name_server(&text).unwrap_or(Ipv4Addr::LOCALHOST.into())
}

fn first_name_server(text: &str) -> Option<IpAddr> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_server_of_the_list_is_asked() {
        let text = "# a comment\nsearch example\nnameserver fe80::1%eth0\nnameserver 192.0.2.53\n";
        assert_eq!(first_name_server(text), Some("192.0.2.53".parse().unwrap()));
        assert_eq!(first_name_server("options edns0\n"), None);
    }
}
