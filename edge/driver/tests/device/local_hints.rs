//! Addresses that networks name for a device's server: true ones are used, lies get a SYN and nothing else.

use std::io;
use std::net::{SocketAddr, UdpSocket as StdUdpSocket};
use std::sync::{Arc, Mutex};

use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    Admission, Attach, Attachment, Device, DeviceOptions, EndpointConfig, HintSource, LocalHint,
    ProvidedLink, ProvidedLinks, PublicKey, Server, ServerAddress, ServerOptions,
};
use d2tp_links::{CostClass, Link};
use d2tp_udp::BindError;
use d2tp_wire::{CID_BYTES, PacketKind, VERSION};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::nodes::Node;
use crate::support::{at, flow, key, server, usage};

/// Links whose networks name these addresses, whoever is asked for.
struct HintedLinks {
    links: Arc<ProvidedLinks>,
    hints: Mutex<Vec<SocketAddr>>,
    /// The links that were asked.
    asked: Mutex<Vec<String>>,
}

impl HintedLinks {
    fn naming(hints: &[SocketAddr]) -> Arc<HintedLinks> {
        Arc::new(HintedLinks {
            links: ProvidedLinks::new(),
            hints: Mutex::new(hints.to_vec()),
            asked: Mutex::default(),
        })
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

impl Attach for HintedLinks {
    fn attach(&self, link: &Link, servers: &[SocketAddr]) -> Result<Vec<Attachment>, BindError> {
        self.links.attach(link, servers)
    }

    fn probe_addresses(&self, link: &Link, servers: &[SocketAddr]) -> Vec<SocketAddr> {
        self.links.probe_addresses(link, servers)
    }

    fn probe_socket(&self, link: &Link, to: SocketAddr) -> io::Result<StdUdpSocket> {
        self.links.probe_socket(link, to)
    }

    fn local_hints(&self, link: &Link, _server: PublicKey) -> UnboundedReceiver<LocalHint> {
        let (found, hints) = unbounded_channel();
        self.asked.lock().unwrap().push(link.name.clone());
        for address in self.hints.lock().unwrap().iter().copied() {
            let source = HintSource::Announced;
            found.send(LocalHint { address, source }).unwrap();
        }
        hints
    }
}

async fn device(server: &Server, known: SocketAddr, links: &Arc<HintedLinks>) -> Device {
    let options = DeviceOptions {
        server: ServerAddress {
            stream: Some(0),
            ..ServerAddress::new(known.ip().to_string(), known.port(), server.public_key())
        },
        key: key(1),
        config: EndpointConfig::default(),
    };
    let mut device = Device::with_attach(options, links.clone()).await.unwrap();
    device.follow_links(links.links.subscribe(), usage);
    device
}

/// A server that is reached at each address of this host, and lets sessions move between them.
fn server_at_every_address() -> Arc<Server> {
    let options = ServerOptions {
        listen: "0.0.0.0:0".parse().unwrap(),
        key: key(2),
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    };
    let server = Arc::new(Server::bind(options).unwrap());
    let answers = server.clone();
    tokio::spawn(async move { answers.answer_move_questions(&|_| false).await });
    server
}

/// A host that answers probes at once and nothing else, and what it received.
async fn liar() -> (SocketAddr, Arc<Mutex<Vec<Vec<u8>>>>) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let at = socket.local_addr().unwrap();
    let received = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let packets = received.clone();
    tokio::spawn(async move {
        let mut bytes = vec![0; 65_536];
        while let Ok((n, from)) = socket.recv_from(&mut bytes).await {
            packets.lock().unwrap().push(bytes[..n].to_vec());
            if bytes[0] & 0x1f != VERSION {
                let mut answer = vec![PacketKind::Version.first_byte()];
                answer.extend_from_slice(&bytes[1..=CID_BYTES]);
                answer.push(VERSION);
                let _ = socket.send_to(&answer, from).await;
            }
        }
    });
    (at, received)
}

fn names(device: &Device) -> Vec<(String, bool, Option<HintSource>)> {
    let nodes = device.nodes().into_iter();
    nodes
        .map(|node| (node.name, node.is_current, node.hint))
        .collect()
}

/// Sends a message each way and reads it.
async fn carries(device: &Device, server: &Server) {
    let (mut near, mut far) = flow(device, server).await;
    assert_eq!(within(far.read_u8()).await.unwrap(), b'!');
    far.write_all(b"and back").await.unwrap();
    let mut got = [0; 8];
    within(near.read_exact(&mut got)).await.unwrap();
    near.shutdown().await.unwrap();
    far.shutdown().await.unwrap();
    assert_eq!(within(far.read(&mut got)).await.unwrap(), 0);
    assert_eq!(within(near.read(&mut got)).await.unwrap(), 0);
}

#[tokio::test]
async fn a_server_whose_known_address_is_dead_is_used_where_the_network_names_it() {
    let server = server();
    let (dead, near) = (Node::of(&server, 1).await, Node::of(&server, 1).await);
    dead.set_alive(false);
    let links = HintedLinks::naming(&[near.at]);
    let device = device(&server, dead.at, &links).await;
    links.links.add(ProvidedLink::new("hint-dead", at(2)));
    carries(&device, &server).await;
    let hinted = (near.at.to_string(), true, Some(HintSource::Announced));
    assert_eq!(names(&device)[1], hinted);
    assert_eq!(device.paths()[0].addresses.remote, near.at);
}

#[tokio::test]
async fn a_nearer_address_that_the_network_names_is_moved_to_and_left_with_the_network() {
    let server = server_at_every_address();
    let far = Node::of(&server, 60).await;
    let near = SocketAddr::new(at(8), server.local_addr().port());
    let links = HintedLinks::naming(&[near]);
    let device = device(&server, far.at, &links).await;
    links.links.add(ProvidedLink::new("hint-home", at(2)));
    until("the session is at the hinted address", || {
        names(&device).len() == 2
    })
    .await;
    // Nodes are compared when payload has moved.
    carries(&device, &server).await;
    until("the session is at the hinted address", || {
        names(&device).iter().any(|node| node.1 && node.2.is_some())
    })
    .await;
    carries(&device, &server).await;
    // Another network, on which nobody names it.
    links.hints.lock().unwrap().clear();
    links.links.remove("hint-home");
    links.links.add(ProvidedLink::new("hint-away", at(3)));
    until("the session is at the known address", || {
        names(&device) == [(far.at.to_string(), true, None)]
    })
    .await;
    carries(&device, &server).await;
    assert_eq!(device.paths()[0].addresses.remote, far.at);
}

// R-NODE-7
#[tokio::test]
async fn a_host_that_announces_a_key_and_does_not_hold_it_gets_a_syn_and_delays_nothing() {
    let server = server();
    let far = Node::of(&server, 40).await;
    let (liar, received) = liar().await;
    let links = HintedLinks::naming(&[liar]);
    let device = device(&server, far.at, &links).await;
    links.links.add(ProvidedLink::new("hint-lie", at(2)));
    carries(&device, &server).await;
    // Its answers to probes would win any race: it is not in one.
    until("the lie is known as one", || {
        let kind = |packet: &Vec<u8>| packet[0];
        let link = links.links.subscribe().borrow()[0].clone();
        let tried = d2tp_driver::local_hints(&link);
        let packets: Vec<u8> = received.lock().unwrap().iter().map(kind).collect();
        assert!(
            packets
                .iter()
                .all(|kind| kind >> 5 == PacketKind::Syn.first_byte() >> 5)
        );
        assert!(packets.iter().all(|kind| kind & 0x1f == VERSION));
        assert_eq!(names(&device), [(far.at.to_string(), true, None)]);
        !packets.is_empty() && tried.len() == 1 && tried[0].is_true == Some(false)
    })
    .await;
    let told = received.lock().unwrap().len();
    carries(&device, &server).await;
    assert_eq!(device.paths()[0].addresses.remote, far.at);
    assert_eq!(received.lock().unwrap().len(), told, "nothing more is sent");
}

#[tokio::test]
async fn a_true_address_is_used_although_a_lie_is_named_first() {
    let server = server();
    let (dead, near) = (Node::of(&server, 1).await, Node::of(&server, 20).await);
    dead.set_alive(false);
    let (liar, _) = liar().await;
    let links = HintedLinks::naming(&[liar, near.at]);
    let device = device(&server, dead.at, &links).await;
    links.links.add(ProvidedLink::new("hint-both", at(2)));
    carries(&device, &server).await;
    assert_eq!(device.paths()[0].addresses.remote, near.at);
    assert_eq!(names(&device).len(), 2);
}

// R-NODE-5
#[tokio::test]
async fn a_session_with_flows_moves_to_a_nearer_address_of_its_own_server() {
    let server = server_at_every_address();
    let far = Node::of(&server, 60).await;
    let near = SocketAddr::new(at(9), server.local_addr().port());
    let links = HintedLinks::naming(&[near]);
    let device = device(&server, far.at, &links).await;
    links.links.add(ProvidedLink::new("hint-own", at(2)));
    let (mut one, mut other) = flow(&device, &server).await;
    assert_eq!(within(other.read_u8()).await.unwrap(), b'!');
    let mut byte = [0];
    let is_there = || {
        let paths = device.paths();
        paths
            .iter()
            .map(|path| path.addresses.remote)
            .collect::<Vec<_>>()
            == [near]
    };
    within(async {
        while !is_there() {
            one.write_all(b"a").await.unwrap();
            other.read_exact(&mut byte).await.unwrap();
            other.write_all(b"b").await.unwrap();
            one.read_exact(&mut byte).await.unwrap();
        }
    })
    .await;
    assert_eq!(device.duplicate_bytes(), 0);
}

#[tokio::test]
async fn metered_networks_are_asked_for_nothing() {
    let server = server();
    let known = Node::of(&server, 1).await;
    let links = HintedLinks::naming(&[]);
    let device = device(&server, known.at, &links).await;
    let metered = ProvidedLink::new("hint-metered", at(2)).with_class(CostClass::Metered);
    links.links.add(metered);
    let flow = device.open(Default::default()).unwrap();
    device.allow_paid(&flow, true, None);
    until("the metered network is in use", || {
        !device.paths().is_empty()
    })
    .await;
    links.links.add(ProvidedLink::new("hint-free", at(3)));
    until("the free one is asked", || !links.asked().is_empty()).await;
    assert_eq!(links.asked(), ["hint-free"]);
}
