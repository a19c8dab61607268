//! The name server of packet tunnels: it hands queries to the name server of this host.
//!
//! Clients need one that they reach through the tunnel, and that of this host is often in a network that they may not
//! reach. Answers are handed back as they are.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::{sleep, timeout};

use crate::tunnel_rules::DEVICE;

const DNS_PORT: u16 = 53;
/// Bytes of a message over UDP at most.
const MESSAGE_BYTES_MAX: usize = 4096; // RFC 6891 §6.2.5
/// Queries at once, and connections at once; further ones are dropped, and asked again by their clients.
const QUERIES_MAX: usize = 512; // a guess
/// Queries, or connections, of one client at once.
const QUERIES_PER_CLIENT_MAX: usize = 16; // a guess
/// How long none is taken after the system refused one, as it does without free descriptors.
const PAUSE: Duration = Duration::from_millis(100); // a guess
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
    tokio::select! {
        () = serve_datagrams(&socket) => {}
        () = serve_connections(&listener) => {}
    }
    Ok(())
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

/// Counts what is under way, for all clients and for each.
#[derive(Clone, Debug, Default)]
struct QueryRoom {
    of_client: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One query's or connection's place, which is free again when this is dropped.
#[derive(Debug)]
struct QueryPlace {
    room: QueryRoom,
    client: IpAddr,
}

impl QueryRoom {
    fn take(&self, client: IpAddr) -> Option<QueryPlace> {
        let mut of_client = self
            .of_client
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let own = of_client.get(&client).copied().unwrap_or(0);
        if own >= QUERIES_PER_CLIENT_MAX || of_client.values().sum::<usize>() >= QUERIES_MAX {
            return None;
        }
        of_client.insert(client, own + 1);
        let room = self.clone();
        Some(QueryPlace { room, client })
    }
}

impl Drop for QueryPlace {
    fn drop(&mut self) {
        let mut of_client = self
            .room
            .of_client
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = of_client.get_mut(&self.client) {
            *own -= 1;
            if *own == 0 {
                of_client.remove(&self.client);
            }
        }
    }
}

async fn serve_datagrams(socket: &Arc<UdpSocket>) {
    let room = QueryRoom::default();
    let mut query = vec![0; MESSAGE_BYTES_MAX];
    loop {
        let (bytes, client) = match socket.recv_from(&mut query).await {
            Ok(received) => received,
            // An earlier answer was refused by its receiver.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => {
                tracing::debug!(%error, "no query of a name can be received");
                sleep(PAUSE).await;
                continue;
            }
        };
        let Some(place) = room.take(client.ip()) else {
            continue;
        };
        let (socket, query) = (socket.clone(), query[..bytes].to_vec());
        tokio::spawn(async move {
            match timeout(ANSWERED_WITHIN, ask(&query)).await {
                // The client asks again.
                Err(_) | Ok(Err(_)) => {}
                Ok(Ok(answer)) => drop(socket.send_to(&answer, client).await),
            }
            drop(place);
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

async fn serve_connections(listener: &TcpListener) {
    let room = QueryRoom::default();
    loop {
        let (mut client, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "no connection for queries of names can be accepted");
                sleep(PAUSE).await;
                continue;
            }
        };
        let Some(place) = room.take(from.ip()) else {
            continue;
        };
        tokio::spawn(async move {
            let carried = async {
                let mut server = TcpStream::connect((name_server(), DNS_PORT)).await?;
                copy_bidirectional(&mut client, &mut server).await
            };
            // The client asks again.
            let _ = timeout(CONNECTION_MAX, carried).await;
            drop(place);
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
    fn one_client_does_not_take_the_room_of_others() {
        let room = QueryRoom::default();
        let client = |n: u8| IpAddr::from([10, 83, 0, n]);
        let places: Vec<QueryPlace> = (0..64)
            .flat_map(|n| (0..QUERIES_MAX).map(move |_| n))
            .filter_map(|n| room.take(client(n)))
            .collect();
        assert_eq!(places.len(), QUERIES_MAX);
        let own = places.iter().filter(|place| place.client == client(0));
        assert_eq!(own.count(), QUERIES_PER_CLIENT_MAX);
        assert!(room.take(client(200)).is_none());
        drop(places);
        assert!(room.take(client(200)).is_some());
        assert!(room.of_client.lock().unwrap().is_empty());
    }

    #[test]
    fn the_first_name_server_of_the_list_is_asked() {
        let text = "# a comment\nsearch example\nnameserver fe80::1%eth0\nnameserver 192.0.2.53\n";
        assert_eq!(first_name_server(text), Some("192.0.2.53".parse().unwrap()));
        assert_eq!(first_name_server("options edns0\n"), None);
    }
}
