//! The nodes of a server, with the addresses of each.
//!
//! ```text
//!  d2tp://a:1,b:2/KEY ─▶ a, b ───────────────────────────────────┐
//!  d2tp://name/KEY ─▶ SVCB records of _d2tp.name ─▶ a, b         ├─▶ addresses of each (server_lookup.rs)
//!                          └── none ─▶ name, at the usual port ──┘
//!
//!  the first node with an address ─▶ 0.25 s for the others ─▶ found; what comes then is told later
//! ```

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, timeout_at};

use crate::address::{NodeAddress, ServerAddress, ServerNodes};
use crate::server_lookup::server_addresses;
use crate::service_records::{self, ServiceNode};

/// How long the lookup of other nodes may take once one has an address.
const OTHERS_WITHIN: Duration = Duration::from_millis(250); // RFC 8305 §8

/// A node of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerNode {
    pub(crate) name: NodeAddress,
    /// The TCP port of the node's streams, if it may have any.
    pub(crate) stream_port: Option<u16>,
    pub(crate) addresses: Vec<SocketAddr>,
}

/// The result of a lookup of a server's nodes.
pub(crate) struct ServerNodeLookup {
    /// Nodes with their addresses: at least one.
    pub(crate) found: Vec<ServerNode>,
    /// Nodes and addresses that are found later.
    pub(crate) later: mpsc::UnboundedReceiver<ServerNode>,
    /// Tell lookups that failed that links changed.
    pub(crate) links_changed: Vec<Arc<Notify>>,
}

/// Looks up where the nodes of a server are: each with its addresses, in the order in which they are tried.
///
/// # Errors
/// No node has an address, or the records of a name have other keys.
pub async fn look_up_nodes(
    server: &ServerAddress,
) -> io::Result<Vec<(NodeAddress, Vec<SocketAddr>)>> {
    let found = server_nodes(server).await?.found;
    let of_node = |node: ServerNode| (node.name, node.addresses);
    Ok(found.into_iter().map(of_node).collect())
}

/// Looks up the nodes of a server.
///
/// # Errors
/// No node has an address. The text names each node with its cause, if there are several.
pub(crate) async fn server_nodes(server: &ServerAddress) -> io::Result<ServerNodeLookup> {
    let plain = |name: NodeAddress| ServiceNode {
        name,
        hints: Vec::new(),
        stream: None,
    };
    let named = || server.named_nodes().into_iter().map(plain).collect();
    let nodes: Vec<ServiceNode> = match server.nodes {
        ServerNodes::Records => match service_records::look_up(&server.host, &server.key).await {
            Ok(nodes) if !nodes.is_empty() => nodes,
            Ok(_) => named(),
            // A record that names other keys only is no reason to look elsewhere.
            Err(error) => return Err(error),
        },
        ServerNodes::One | ServerNodes::Also(_) => named(),
    };
    addresses_of(nodes, server.stream_port()).await
}

async fn addresses_of(
    nodes: Vec<ServiceNode>,
    stream_port: Option<u16>,
) -> io::Result<ServerNodeLookup> {
    let count = nodes.len();
    let (answer, mut answers) = mpsc::unbounded_channel();
    for (place, node) in nodes.into_iter().enumerate() {
        let answer = answer.clone();
        tokio::spawn(async move {
            let (host, port) = (node.name.host.clone(), node.name.port);
            let looked_up = match node.hints.is_empty() {
                true => server_addresses(&host, port).await,
                false => server_addresses(&hinted(&node.hints), port)
                    .await
                    .map(|mut first| {
                        let all = node.hints.iter().map(|ip| SocketAddr::new(*ip, port));
                        first.found = all.collect();
                        first
                    }),
            };
            let stream_port = match node.stream {
                Some(0) => None,
                Some(port) => Some(port),
                None => stream_port,
            };
            let found = ServerNode {
                name: node.name,
                stream_port,
                addresses: Vec::new(),
            };
            let _ = answer.send((place, found, looked_up));
        });
    }
    drop(answer);
    let (update, later) = mpsc::unbounded_channel();
    let mut found: Vec<(usize, ServerNode)> = Vec::new();
    let mut links_changed = Vec::new();
    let mut failures: Vec<(NodeAddress, io::Error)> = Vec::new();
    let mut until = None;
    while found.len() + failures.len() < count {
        let next = answers.recv();
        let next = match until {
            None => next.await,
            Some(until) => match timeout_at(until, next).await {
                Ok(next) => next,
                Err(_) => break,
            },
        };
        let Some((place, mut node, looked_up)) = next else {
            break;
        };
        match looked_up {
            Err(error) => failures.push((node.name, error)),
            Ok(addresses) => {
                node.addresses = addresses.found;
                if let Some(later) = addresses.later {
                    links_changed.push(addresses.links_changed);
                    let (update, mut node) = (update.clone(), node.clone());
                    tokio::spawn(async move {
                        if let Ok(found) = later.await {
                            node.addresses = found;
                            let _ = update.send(node);
                        }
                    });
                }
                found.push((place, node));
                until.get_or_insert_with(|| Instant::now() + OTHERS_WITHIN);
            }
        }
    }
    if found.is_empty() {
        return Err(all_failed(failures));
    }
    for (node, error) in &failures {
        tracing::info!(%node, %error, "this node of the server has no address");
    }
    // Nodes that are looked up more slowly are told when they are found.
    tokio::spawn(async move {
        while let Some((_, mut node, looked_up)) = answers.recv().await {
            if let Ok(addresses) = looked_up {
                node.addresses = addresses.found;
                let _ = update.send(node);
            }
        }
    });
    found.sort_by_key(|(place, _)| *place);
    Ok(ServerNodeLookup {
        found: found.into_iter().map(|(_, node)| node).collect(),
        later,
        links_changed,
    })
}

/// The text of an address hint, which needs no lookup.
fn hinted(hints: &[IpAddr]) -> String {
    hints.first().map(IpAddr::to_string).unwrap_or_default()
}

fn all_failed(mut failures: Vec<(NodeAddress, io::Error)>) -> io::Error {
    if failures.len() == 1 {
        return failures.remove(0).1;
    }
    let each = failures
        .iter()
        .map(|(node, error)| format!("{node}: {error}"));
    io::Error::other(each.collect::<Vec<_>>().join("; "))
}
