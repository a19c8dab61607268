//! Several nodes of one server: one is chosen, left when it falls silent, and changed for a nearer one.

use std::collections::btree_map::Entry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cedos_lab_rig::processor_wait::waited_by_this_thread;
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, Flow, FlowSettings, NodeAddress, ProvidedLinks, Server,
    ServerAddress, ServerNodes,
};
use d2tp_wire::{CID_BYTES, PacketKind, VERSION};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use crate::support::{flow, key, server, usage, wifi};

/// An address at which the server is reached, with a delay each way. It can fall silent.
pub struct Node {
    pub at: SocketAddr,
    is_alive: Arc<AtomicBool>,
    delay_ms: Arc<AtomicU64>,
    /// Whether the delay is longer by what this thread waits for a processor meanwhile.
    is_stretched: Arc<AtomicBool>,
    /// Datagrams towards the server, without probes of versions.
    sent: Arc<AtomicU64>,
}

impl Node {
    pub async fn of(server: &Server, delay_ms: u64) -> Node {
        let outside = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let node = Node {
            at: outside.local_addr().unwrap(),
            is_alive: Arc::new(AtomicBool::new(true)),
            delay_ms: Arc::new(AtomicU64::new(delay_ms)),
            is_stretched: Arc::default(),
            sent: Arc::default(),
        };
        let to = server.local_addr();
        let (is_alive, delay) = (node.is_alive.clone(), node.delay_ms.clone());
        let is_stretched = node.is_stretched.clone();
        let sent = node.sent.clone();
        tokio::spawn(async move {
            let mut inside = std::collections::BTreeMap::new();
            let mut buf = vec![0; 65_536];
            while let Ok((n, from)) = outside.recv_from(&mut buf).await {
                if buf[0] & 0x1f != 0x1f {
                    sent.fetch_add(1, Ordering::SeqCst);
                }
                if let Entry::Vacant(entry) = inside.entry(from) {
                    let back = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
                    back.connect(to).await.unwrap();
                    entry.insert(back.clone());
                    let (outside, is_alive, delay) =
                        (outside.clone(), is_alive.clone(), delay.clone());
                    let is_stretched = is_stretched.clone();
                    tokio::spawn(async move {
                        let mut buf = vec![0; 65_536];
                        while let Ok(n) = back.recv(&mut buf).await {
                            let (data, outside) = (buf[..n].to_vec(), outside.clone());
                            let (is_alive, delay) = (is_alive.clone(), delay.clone());
                            later(&is_alive, &delay, &is_stretched, async move {
                                let _ = outside.send_to(&data, from).await;
                            });
                        }
                    });
                }
                let (data, inside) = (buf[..n].to_vec(), inside[&from].clone());
                later(&is_alive, &delay, &is_stretched, async move {
                    let _ = inside.send(&data).await;
                });
            }
        });
        node
    }

    pub fn set_alive(&self, is_alive: bool) {
        self.is_alive.store(is_alive, Ordering::SeqCst);
    }
}

/// After how long a device that has not moved is asked again, as a node that is to be left does: a request may be lost.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(1);

fn later(
    is_alive: &AtomicBool,
    delay: &AtomicU64,
    is_stretched: &Arc<AtomicBool>,
    send: impl Future<Output = ()> + Send + 'static,
) {
    if !is_alive.load(Ordering::SeqCst) {
        return;
    }
    let delay = Duration::from_millis(delay.load(Ordering::SeqCst));
    let (begin, waited) = (Instant::now(), waited_by_this_thread());
    let is_stretched = is_stretched.clone();
    tokio::spawn(async move {
        // sleep: the delay of the network is the subject
        tokio::time::sleep(delay).await;
        while is_stretched.load(Ordering::SeqCst)
            && begin.elapsed() < delay + waited_by_this_thread().saturating_sub(waited)
        {
            // sleep: the delay of the network is the subject
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        send.await;
    });
}

fn address(server: &Server, nodes: &[&Node]) -> ServerAddress {
    let places = nodes.iter().map(|node| NodeAddress {
        host: node.at.ip().to_string(),
        port: node.at.port(),
    });
    let mut places: Vec<NodeAddress> = places.collect();
    let first = places.remove(0);
    ServerAddress {
        nodes: ServerNodes::Also(places),
        ..ServerAddress::new(first.host, first.port, server.public_key())
    }
}

async fn device(server: &Server, nodes: &[&Node], links: &Arc<ProvidedLinks>) -> Device {
    let options = DeviceOptions {
        server: address(server, nodes),
        key: key(1),
        config: EndpointConfig::default(),
    };
    let mut device = Device::with_attach(options, links.clone()).await.unwrap();
    device.follow_links(links.subscribe(), usage);
    device
}

fn current(device: &Device) -> usize {
    let nodes = device.nodes();
    nodes.iter().position(|node| node.is_current).unwrap()
}

/// Sends a message each way and reads it.
async fn carries(near: &mut Flow, far: &mut Flow) {
    near.write_all(b"there").await.unwrap();
    far.write_all(b"and back").await.unwrap();
    let mut got = [0; 5];
    within(far.read_exact(&mut got)).await.unwrap();
    assert_eq!(&got, b"there");
    let mut got = [0; 8];
    within(near.read_exact(&mut got)).await.unwrap();
    assert_eq!(&got, b"and back");
}

async fn past_the_mark(far: &mut Flow) {
    assert_eq!(within(far.read_u8()).await.unwrap(), b'!');
}

#[tokio::test]
async fn a_flow_goes_on_at_another_node_when_its_own_falls_silent() {
    let (server, links) = (server(), ProvidedLinks::new());
    let (first, second) = (Node::of(&server, 2).await, Node::of(&server, 2).await);
    let device = device(&server, &[&first, &second], &links).await;
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    past_the_mark(&mut far).await;
    carries(&mut near, &mut far).await;
    assert_eq!(current(&device), 0);
    let mut longest = Duration::ZERO;
    for dead in [&first, &second] {
        for node in [&first, &second] {
            node.set_alive(node.at != dead.at);
        }
        let begun = Instant::now();
        carries(&mut near, &mut far).await;
        longest = longest.max(begun.elapsed());
    }
    println!("longest silence: {longest:?}");
    assert_eq!(device.duplicate_bytes(), 0);
}

// R-NODE-4
#[tokio::test]
async fn a_flow_goes_on_at_another_node_when_its_server_asks_for_it() {
    for is_named in [true, false] {
        let (server, links) = (server(), ProvidedLinks::new());
        let (first, second) = (Node::of(&server, 2).await, Node::of(&server, 2).await);
        let known = match is_named {
            true => vec![&first],
            false => vec![&first, &second],
        };
        let device = device(&server, &known, &links).await;
        links.add(wifi(2));
        let (mut near, mut far) = flow(&device, &server).await;
        past_the_mark(&mut far).await;
        carries(&mut near, &mut far).await;
        assert_eq!(current(&device), 0);
        let to = is_named.then_some(second.at);
        // Its flow has no memo: another server could not go on with it.
        let left = server.ask_to_move(to, false, &|_| true);
        assert_eq!((left.asked, left.staying), (0, 1));
        let left = server.ask_to_move(to, true, &|_| true);
        assert_eq!((left.asked, left.staying), (1, 0));
        let has_moved = || {
            let remotes = device.paths().into_iter().map(|path| path.addresses.remote);
            current(&device) == 1 && remotes.collect::<Vec<_>>() == [second.at]
        };
        within(async {
            while timeout(ASKED_AGAIN_AFTER, until("it moves", has_moved))
                .await
                .is_err()
            {
                server.ask_to_move(to, true, &|_| true);
            }
        })
        .await;
        first.set_alive(false);
        carries(&mut near, &mut far).await;
        assert_eq!(device.duplicate_bytes(), 0);
    }
}

#[tokio::test]
async fn a_device_whose_first_node_is_dead_begins_at_the_second() {
    let (server, links) = (server(), ProvidedLinks::new());
    let (first, second) = (Node::of(&server, 2).await, Node::of(&server, 2).await);
    first.set_alive(false);
    let device = device(&server, &[&first, &second], &links).await;
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    past_the_mark(&mut far).await;
    carries(&mut near, &mut far).await;
    assert_eq!(current(&device), 1);
}

#[tokio::test]
async fn a_session_begins_at_the_nearest_node() {
    for is_managed in [true, false] {
        let (server, links) = (server(), ProvidedLinks::new());
        let (far_node, near_node) = (Node::of(&server, 200).await, Node::of(&server, 1).await);
        // Device, nodes and server run on this thread. While it waits for a processor the far node comes no nearer.
        far_node.is_stretched.store(true, Ordering::SeqCst);
        let device = match is_managed {
            true => device(&server, &[&far_node, &near_node], &links).await,
            false => over_the_systems_route(&server, &[&far_node, &near_node]).await,
        };
        links.add(wifi(2));
        let (mut near, mut far) = flow(&device, &server).await;
        past_the_mark(&mut far).await;
        carries(&mut near, &mut far).await;
        assert_eq!(current(&device), 1);
        assert_eq!(device.paths()[0].addresses.remote, near_node.at);
        // A probe is not waited for as long as that. Nodes are compared again after a minute.
        far_node.is_stretched.store(false, Ordering::SeqCst);
        until("the far node has been measured, too", || {
            let trips = device.nodes();
            trips[1].round_trip < trips[0].round_trip
        })
        .await;
        assert_eq!(device.duplicate_bytes(), 0);
        // The node that was left hears nothing more of the session.
        let before = far_node.sent.load(Ordering::SeqCst);
        for _ in 0..5 {
            carries(&mut near, &mut far).await;
        }
        assert_eq!(far_node.sent.load(Ordering::SeqCst), before);
    }
}

async fn over_the_systems_route(server: &Server, nodes: &[&Node]) -> Device {
    let options = DeviceOptions {
        server: address(server, nodes),
        key: key(1),
        config: EndpointConfig::default(),
    };
    let device = Device::new(options).await.unwrap();
    device.use_default_route().unwrap();
    device
}

/// Two servers with one key, each of which knows only its own sessions, as the two nodes of a device.
struct TwoServers {
    servers: [Server; 2],
    nodes: [Node; 2],
    device: Device,
    links: Arc<ProvidedLinks>,
}

impl TwoServers {
    async fn with_delays(delays_ms: [u64; 2]) -> TwoServers {
        let servers = [server(), server()];
        let nodes = [
            Node::of(&servers[0], delays_ms[0]).await,
            Node::of(&servers[1], delays_ms[1]).await,
        ];
        let links = ProvidedLinks::new();
        let device = device(&servers[0], &[&nodes[0], &nodes[1]], &links).await;
        links.add(wifi(2));
        TwoServers {
            servers,
            nodes,
            device,
            links,
        }
    }

    /// A flow with the handles of both ends, and the number of the server that has it.
    async fn flow(&self) -> (Flow, Flow, usize) {
        let mut near = self.device.open(FlowSettings::default()).unwrap();
        near.write_all(b"!").await.unwrap();
        let accepted = async {
            tokio::select! {
                far = self.servers[0].accept() => (far.unwrap(), 0),
                far = self.servers[1].accept() => (far.unwrap(), 1),
            }
        };
        let (mut far, at) = within(accepted).await;
        past_the_mark(&mut far).await;
        (near, far, at)
    }
}

// The second node is nearer, but not by so much that the session begins there.
#[tokio::test]
async fn a_flow_stays_at_its_node_although_another_is_nearer() {
    let two = TwoServers::with_delays([10, 1]).await;
    let (mut near, mut far, at) = two.flow().await;
    let other = || two.nodes[1 - at].sent.load(Ordering::SeqCst);
    let before = other();
    for _ in 0..100 {
        carries(&mut near, &mut far).await;
    }
    assert_eq!(current(&two.device), at);
    assert_eq!(other(), before, "the other node was asked for the session");
    assert_eq!(two.device.duplicate_bytes(), 0);
}

#[tokio::test]
async fn a_flow_survives_an_interruption_of_the_link_to_both_nodes() {
    let two = TwoServers::with_delays([2, 1]).await;
    let (mut near, mut far, at) = two.flow().await;
    carries(&mut near, &mut far).await;
    for _ in 0..3 {
        let both = |is_alive| two.nodes.iter().for_each(|node| node.set_alive(is_alive));
        both(false);
        near.write_all(b"there").await.unwrap();
        // sleep: the length of the interruption is the subject
        tokio::time::sleep(Duration::from_millis(800)).await;
        both(true);
        let mut got = [0; 5];
        within(far.read_exact(&mut got)).await.unwrap();
        carries(&mut near, &mut far).await;
        assert_eq!(current(&two.device), at);
    }
}

#[tokio::test]
async fn a_flow_whose_node_died_is_reset_at_one_that_does_not_know_it_and_the_next_is_carried_there()
 {
    let two = TwoServers::with_delays([2, 2]).await;
    let (mut near, mut far, at) = two.flow().await;
    carries(&mut near, &mut far).await;
    two.nodes[at].set_alive(false);
    near.write_all(b"lost").await.unwrap();
    let mut got = [0; 1];
    within(near.read_exact(&mut got)).await.unwrap_err();
    let (mut near, mut far, now_at) = two.flow().await;
    assert_eq!(now_at, 1 - at);
    carries(&mut near, &mut far).await;
    drop(two.links);
}

#[tokio::test]
async fn over_the_systems_route_a_flow_goes_on_at_another_node_too() {
    let server = server();
    let (first, second) = (Node::of(&server, 2).await, Node::of(&server, 2).await);
    let device = over_the_systems_route(&server, &[&first, &second]).await;
    let (mut near, mut far) = flow(&device, &server).await;
    past_the_mark(&mut far).await;
    carries(&mut near, &mut far).await;
    first.set_alive(false);
    carries(&mut near, &mut far).await;
    assert_eq!(current(&device), 1);
    first.set_alive(true);
    second.set_alive(false);
    carries(&mut near, &mut far).await;
    assert_eq!(current(&device), 0);
    assert_eq!(device.duplicate_bytes(), 0);
}

/// A host without the server's key, which answers probes of versions at once and keeps what else it gets.
async fn impostor() -> (SocketAddr, Arc<parking_lot::Mutex<Vec<Vec<u8>>>>) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let at = socket.local_addr().unwrap();
    let got = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let kept = got.clone();
    tokio::spawn(async move {
        let mut buf = vec![0; 65_536];
        while let Ok((n, from)) = socket.recv_from(&mut buf).await {
            // R-HS-10: the answer to a SYN of a version that does not exist.
            if buf[0] & 0x1f == 0x1f {
                let mut answer = vec![PacketKind::Version.first_byte()];
                answer.extend_from_slice(&buf[1..=CID_BYTES]);
                answer.push(VERSION);
                let _ = socket.send_to(&answer, from).await;
            } else {
                kept.lock().push(buf[..n].to_vec());
            }
        }
    });
    (at, got)
}

#[tokio::test]
async fn a_device_that_only_receives_notices_that_its_node_died() {
    for is_managed in [true, false] {
        let (server, links) = (server(), ProvidedLinks::new());
        let (first, second) = (Node::of(&server, 2).await, Node::of(&server, 2).await);
        let device = match is_managed {
            true => device(&server, &[&first, &second], &links).await,
            false => over_the_systems_route(&server, &[&first, &second]).await,
        };
        links.add(wifi(2));
        let (mut near, mut far) = flow(&device, &server).await;
        past_the_mark(&mut far).await;
        carries(&mut near, &mut far).await;
        until("all is acknowledged", || device.paths()[0].in_flight == 0).await;
        first.set_alive(false);
        far.write_all(b"late").await.unwrap();
        let mut got = [0; 4];
        within(near.read_exact(&mut got)).await.unwrap();
        assert_eq!(current(&device), 1);
    }
}

// R-NODE-1
#[tokio::test]
async fn a_node_without_the_key_gets_syns_alone_and_flows_go_on_elsewhere() {
    let (server, links) = (server(), ProvidedLinks::new());
    let ours = Node::of(&server, 40).await;
    let (at, got) = impostor().await;
    for impostor_first in [true, false] {
        let mut server_address = address(&server, &[&ours, &ours]);
        let places = [(at.port(), ours.at.port()), (ours.at.port(), at.port())];
        let (first, second) = places[usize::from(!impostor_first)];
        server_address.port = first;
        server_address.nodes = ServerNodes::Also(vec![NodeAddress {
            host: "127.0.0.1".into(),
            port: second,
        }]);
        let options = DeviceOptions {
            server: server_address,
            key: key(1),
            config: EndpointConfig::default(),
        };
        let mut device = Device::with_attach(options, links.clone()).await.unwrap();
        device.follow_links(links.subscribe(), usage);
        links.add(wifi(2));
        let mut near = device.open(FlowSettings::default()).unwrap();
        let request = b"GET https://secret.example/name HTTP/1.1\r\n\r\n";
        near.write_all(request).await.unwrap();
        let mut far = within(server.accept()).await.unwrap();
        let mut read = vec![0; request.len()];
        within(far.read_exact(&mut read)).await.unwrap();
        assert_eq!(read, request);
        until("the impostor was asked", || !got.lock().is_empty()).await;
        // It seems nearer, and does not get the session.
        for _ in 0..20 {
            carries(&mut near, &mut far).await;
        }
        for datagram in got.lock().drain(..) {
            let kind = PacketKind::split(&datagram).map(|(kind, ..)| kind);
            let is_syn = matches!(kind, Some(PacketKind::Syn | PacketKind::Wake));
            assert!(is_syn, "{kind:?}");
            let name = b"secret.example";
            assert!(!datagram.windows(name.len()).any(|part| part == name));
        }
        links.remove("wifi");
    }
}
