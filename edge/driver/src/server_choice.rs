//! Asks several servers, each with a key of its own, and returns the nearest: over sockets what `ServerRace` of
//! `d2tp-device` decides.
//!
//! ```text
//!  names ─▶ addresses (0.25 s after the first) ─▶ probes of versions, each in its turn ─▶ ServerRace ─▶ the nearest
//! ```
//!
//! The probes name no key and no origin: whoever answers them still has to prove its key in the handshake.

use std::future::pending;
use std::net::{SocketAddr, UdpSocket as StdUdpSocket};
use std::time::Duration;

use d2tp_device::ServerRace;
use d2tp_links::{CostClass, Link, LinkKind};
use d2tp_session::{Span, Time};
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::address::ServerAddress;
use crate::attach::{Attach as _, KernelLinks};
use crate::clock;
use crate::local_hints::true_hints;
use crate::server_list::ServerList;
use crate::server_nodes::server_nodes;
use crate::system_route::is_by_system_route;
use crate::version_probe::{VersionProbeAnswer, probe_version_from};

/// How long lookups of other servers may take once one has an address.
const OTHERS_WITHIN: Duration = Duration::from_millis(250); // RFC 8305 §8

/// A server to ask.
#[derive(Clone, Debug)]
pub struct AskedServer {
    /// The server.
    pub address: ServerAddress,
    /// The links over which the server is asked; `None`: by the system's route.
    pub over: Option<Vec<Link>>,
    /// The round trip to it on this network, if one was measured before.
    pub known: Option<Duration>,
}

/// What servers answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerChoice {
    /// The place of the nearest in the list; `None` if none answered.
    pub nearest: Option<usize>,
    /// The round trip to each that was asked and answered, by place in the list.
    pub round_trips: Vec<Option<Duration>>,
    /// The places of servers that had time to answer, and did not.
    pub silent: Vec<usize>,
}

/// The links over which servers are asked: the free ones. Nothing has allowed bytes on metered links yet.
pub fn free_links(links: &[Link]) -> Vec<Link> {
    let is_free = |link: &&Link| {
        link.kind != LinkKind::Loopback && link.class.class == CostClass::Free && link.is_usable()
    };
    links.iter().filter(is_free).cloned().collect()
}

/// The servers of a list, each asked over the free links or by the system's route.
pub fn asked_servers(servers: &ServerList, links: &[Link]) -> Vec<AskedServer> {
    let free = free_links(links);
    let asked = |address: &ServerAddress| AskedServer {
        address: address.clone(),
        over: (!is_by_system_route(&address.host, links)).then(|| free.clone()),
        known: None,
    };
    servers.servers().iter().map(asked).collect()
}

/// When a choice ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChoiceEnd {
    /// The choice ends once no other server can win.
    Decided,
    /// The choice ends when every server has answered, or cannot.
    AllAnswered,
}

/// Asks servers which is the nearest, for `patience` at most.
pub async fn choose_server(servers: Vec<AskedServer>, patience: Duration) -> ServerChoice {
    ask(servers, patience, ChoiceEnd::Decided).await
}

/// Measures the round trip to every server, and waits for the answers of all, for `patience` at most.
pub async fn measure_servers(servers: Vec<AskedServer>, patience: Duration) -> ServerChoice {
    ask(servers, patience, ChoiceEnd::AllAnswered).await
}

async fn ask(servers: Vec<AskedServer>, patience: Duration, end: ChoiceEnd) -> ServerChoice {
    let addresses = look_up_all(&servers).await;
    let known: Vec<Option<Span>> = servers.iter().map(|s| s.known.map(Span::from)).collect();
    let mut race = ServerRace::new(clock::now(), &known);
    let (answer, mut answers) = mpsc::unbounded_channel();
    // Probes end with the race.
    let mut tasks = JoinSet::new();
    let asked_at: Vec<Time> = race.asked_at().collect();
    for (place, server) in servers.into_iter().enumerate() {
        let (answer, addresses) = (answer.clone(), addresses[place].clone());
        let turn = asked_at[place];
        tasks.spawn(async move {
            sleep(turn.since(clock::now()).into()).await;
            let mut probes = JoinSet::new();
            let links = server.over.as_deref();
            let mut sockets = probe_sockets(links, &addresses);
            for link in links.unwrap_or_default() {
                let link = std::slice::from_ref(link);
                for hint in true_hints(link, &server.address.key) {
                    sockets.extend(probe_sockets(Some(link), &[hint.address]));
                }
            }
            for (socket, remote) in sockets {
                probes.spawn(probe_version_from(socket, remote, patience));
            }
            while let Some(probed) = probes.join_next().await {
                if let Ok(Ok(VersionProbeAnswer::Answered { round_trip, .. })) = probed {
                    let _ = answer.send((place, Some(Span::from(round_trip))));
                }
            }
            let _ = answer.send((place, None));
        });
    }
    drop(answer);
    let decided = async {
        loop {
            let winner = race.winner(clock::now());
            match (winner, end) {
                (Some(_), ChoiceEnd::Decided) => return winner,
                _ if race.is_over() => return race.leader(),
                _ => {}
            }
            let decided_at = race.decided_at().filter(|_| end == ChoiceEnd::Decided);
            let decision = async {
                match decided_at {
                    Some(at) => sleep(Duration::from(at.since(clock::now())) + TIMER_STEP).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                next = answers.recv() => match next {
                    Some((place, Some(round_trip))) => race.on_answer(place, round_trip),
                    Some((place, None)) => race.on_failure(place),
                    None => return race.leader(),
                },
                () = decision => {}
            }
        }
    };
    let winner = timeout(patience, decided).await;
    let nearest = winner.unwrap_or_else(|_| race.leader());
    let now = clock::now();
    let round_trips = race.round_trips().into_iter();
    ServerChoice {
        nearest,
        silent: race.silent(now),
        round_trips: round_trips.map(|trip| trip.map(Duration::from)).collect(),
    }
}

/// Timers end at full milliseconds.
const TIMER_STEP: Duration = Duration::from_millis(1);

/// The addresses of each server's nodes; none for one that has none yet.
async fn look_up_all(servers: &[AskedServer]) -> Vec<Vec<SocketAddr>> {
    let mut lookups = JoinSet::new();
    for (place, server) in servers.iter().enumerate() {
        let address = server.address.clone();
        lookups.spawn(async move {
            let found = server_nodes(&address).await.map(|lookup| lookup.found);
            let nodes = found.unwrap_or_default().into_iter();
            let addresses: Vec<SocketAddr> = nodes.flat_map(|node| node.addresses).collect();
            (place, addresses)
        });
    }
    let mut all: Vec<Vec<SocketAddr>> = vec![Vec::new(); servers.len()];
    let mut is_any_found = false;
    while let Some(next) = match is_any_found {
        true => timeout(OTHERS_WITHIN, lookups.join_next())
            .await
            .ok()
            .flatten(),
        false => lookups.join_next().await,
    } {
        if let Ok((place, addresses)) = next {
            is_any_found |= !addresses.is_empty();
            all[place] = addresses;
        }
    }
    all
}

/// Sockets that are used for nothing but a probe, and the address that each asks.
fn probe_sockets(over: Option<&[Link]>, addresses: &[SocketAddr]) -> Vec<(UdpSocket, SocketAddr)> {
    let mut sockets = Vec::new();
    let Some(links) = over else {
        for remote in addresses {
            let local: SocketAddr = match remote.is_ipv6() {
                true => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
                false => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
            };
            sockets.extend(
                StdUdpSocket::bind(local)
                    .ok()
                    .map(|socket| (socket, *remote)),
            );
        }
        return to_tokio(sockets);
    };
    for link in links {
        for remote in KernelLinks.probe_addresses(link, addresses) {
            let socket = KernelLinks.probe_socket(link, remote);
            sockets.extend(socket.ok().map(|socket| (socket, remote)));
        }
    }
    to_tokio(sockets)
}

fn to_tokio(sockets: Vec<(StdUdpSocket, SocketAddr)>) -> Vec<(UdpSocket, SocketAddr)> {
    let to_tokio = |(socket, remote): (StdUdpSocket, SocketAddr)| {
        socket.set_nonblocking(true).ok()?;
        Some((UdpSocket::from_std(socket).ok()?, remote))
    };
    sockets.into_iter().filter_map(to_tokio).collect()
}

#[cfg(test)]
mod tests {
    use d2tp_session::PublicKey;
    use d2tp_wire::{CID_BYTES, PacketKind, VERSION};

    use super::*;

    /// More than a busy machine needs.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// A host on loopback that answers probes, or none.
    async fn host(answers: bool) -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = socket.local_addr().unwrap();
        tokio::spawn(async move {
            let mut bytes = vec![0; 2_000];
            while let Ok((_, from)) = socket.recv_from(&mut bytes).await {
                if !answers {
                    continue;
                }
                let mut answer = vec![PacketKind::Version.first_byte()];
                answer.extend_from_slice(&bytes[1..=CID_BYTES]);
                answer.push(VERSION);
                let _ = socket.send_to(&answer, from).await;
            }
        });
        at
    }

    fn asked(at: SocketAddr, key: u8) -> AskedServer {
        let address = format!("d2tp://{at}/{}", PublicKey([key; 32]));
        AskedServer {
            address: address.parse().unwrap(),
            over: None,
            known: None,
        }
    }

    #[tokio::test]
    async fn the_server_that_answers_is_chosen_wherever_it_is_in_the_list() {
        let (silent, answering) = (host(false).await, host(true).await);
        let closed = StdUdpSocket::bind("127.0.0.1:0").unwrap();
        let closed = closed.local_addr().unwrap();
        for (first, second, nearest) in [
            (silent, answering, Some(1)),
            (answering, silent, Some(0)),
            (closed, answering, Some(1)),
            (closed, closed, None),
        ] {
            let servers = vec![asked(first, 1), asked(second, 2)];
            // Nobody is waited for who does not come.
            let patience = match nearest {
                Some(_) => PATIENCE,
                None => Duration::from_millis(300),
            };
            let choice = choose_server(servers, patience).await;
            assert_eq!(choice.nearest, nearest);
            let answered = choice.round_trips.iter().position(Option::is_some);
            assert_eq!(answered, nearest);
        }
    }

    #[tokio::test]
    async fn servers_that_all_are_silent_are_given_up() {
        let silent = host(false).await;
        let servers = vec![asked(silent, 1), asked(silent, 2)];
        let choice = choose_server(servers, Duration::from_millis(300)).await;
        assert_eq!(choice.nearest, None);
    }

    #[tokio::test]
    async fn a_server_whose_name_has_no_address_does_not_hold_up_another() {
        let answering = host(true).await;
        let mut nameless = asked(answering, 1);
        // Longer than a name may be: no resolver is asked.
        nameless.address.host = "x".repeat(300);
        let choice = choose_server(vec![nameless, asked(answering, 2)], PATIENCE).await;
        assert_eq!(choice.nearest, Some(1));
    }
}
