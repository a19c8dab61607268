//! Relays over real sockets: two devices, or a device and an origin, by way of a proxy.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use cedos_lab_rig::wait::{until, within};
use cedos_prox::{Prox, ProxConfig, serve};
use d2tp_driver::{
    Admission, CallError, Device, DeviceOptions, EndpointConfig, Flow, FlowIo, FlowSettings,
    HibernationOptions, LinkUse, Peer, PeerListener, ProvidedLink, ProvidedLinks, PublicKey,
    RelayId, SecretKey, Server, ServerAddress, ServerOptions,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;

const SIZE: u64 = 3_000_000;

fn key(n: u8) -> SecretKey {
    SecretKey::from_bytes([n; 32])
}

fn content(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8
}

fn options(n: u8, listen: &str) -> ServerOptions {
    ServerOptions {
        listen: listen.parse().unwrap(),
        key: key(n),
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    }
}

fn listening(n: u8) -> Server {
    Server::bind(options(n, "127.0.0.1:0")).unwrap()
}

fn at(server: &Server) -> ServerAddress {
    ServerAddress::new("127.0.0.1", server.local_addr().port(), server.public_key())
}

/// A proxy that may reach this machine.
fn proxy(set: impl FnOnce(&mut ProxConfig)) -> ServerAddress {
    let server = Arc::new(listening(9));
    let address = at(&server);
    proxy_on(server, set);
    address
}

/// Has this server be a proxy that may reach this machine.
fn proxy_on(server: Arc<Server>, set: impl FnOnce(&mut ProxConfig)) {
    let mut config = ProxConfig {
        allow_any_client: true,
        allow_private: true,
        ..Default::default()
    };
    set(&mut config);
    let prox = Prox::new(config).unwrap();
    if let Some(limits) = prox.config().relay_limits() {
        server.relay_for_devices(limits);
        server.meter_relays(prox.clone());
    }
    tokio::spawn(serve(server, prox, std::future::pending()));
}

/// A device on one link, at `127.0.0.n`.
async fn device(n: u8, proxy: &ServerAddress) -> (Device, Arc<ProvidedLinks>) {
    device_at(n, Ipv4Addr::new(127, 0, 0, n).into(), proxy).await
}

/// A device on one link, with this address.
async fn device_at(n: u8, at: IpAddr, proxy: &ServerAddress) -> (Device, Arc<ProvidedLinks>) {
    let links = ProvidedLinks::new();
    let options = DeviceOptions {
        server: proxy.clone(),
        key: key(n),
        config: EndpointConfig::default(),
    };
    let mut device = Device::with_attach(options, links.clone()).await.unwrap();
    device.follow_links(links.subscribe(), |_| LinkUse::Free);
    links.add(ProvidedLink::new("net", at));
    (device, links)
}

/// Answers every flow with as many bytes as it asks for.
async fn answer(mut flow: Flow) {
    let bytes = flow.read_u64().await.unwrap();
    let all: Vec<u8> = (0..bytes).map(content).collect();
    flow.write_all(&all).await.unwrap();
    flow.shutdown().await.unwrap();
    let _ = std::future::poll_fn(|cx| flow.poll_finished(cx)).await;
}

fn answering(listener: PeerListener) {
    tokio::spawn(async move {
        while let Some(flow) = listener.accept().await {
            tokio::spawn(answer(flow));
        }
    });
}

async fn fetch(peer: &Peer, bytes: u64) {
    let mut flow = peer.open(FlowSettings::default()).unwrap();
    flow.write_u64(bytes).await.unwrap();
    flow.shutdown().await.unwrap();
    let mut got = Vec::new();
    within(flow.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got.len() as u64, bytes);
    assert!((0..bytes).zip(&got).all(|(i, b)| content(i) == *b));
}

/// Where payload came from: directly, and by way of the proxy.
fn payload(peer: &Peer) -> (u64, u64) {
    let paths = peer.paths();
    let relayed = |p: &&d2tp_driver::PathStats| RelayId::of(&p.addresses.remote).is_some();
    let sum = |by: bool| {
        let of = paths.iter().filter(|p| relayed(p) == by);
        of.map(|p| p.payload_in).sum()
    };
    (sum(false), sum(true))
}

#[tokio::test]
async fn a_device_is_called_by_its_key_and_the_two_find_a_direct_path() {
    let proxy = proxy(|_| {});
    let (callee, _links) = device(2, &proxy).await;
    answering(within(callee.listen(Admission::Anybody)).await.unwrap());
    let (caller, _links) = device(3, &proxy).await;
    let peer = within(caller.call(key(2).public())).await.unwrap();
    fetch(&peer, 1000).await;
    until("a direct path", || peer.is_direct()).await;
    fetch(&peer, SIZE).await;
    let (direct, relayed) = payload(&peer);
    assert!(direct >= SIZE && relayed == 0, "{direct} and {relayed}");
}

#[tokio::test]
async fn when_both_devices_move_at_once_the_relay_keeps_their_session() {
    let proxy = proxy(|_| {});
    let (callee, callee_links) = device(2, &proxy).await;
    answering(within(callee.listen(Admission::Anybody)).await.unwrap());
    let (caller, caller_links) = device(3, &proxy).await;
    let peer = within(caller.call(key(2).public())).await.unwrap();
    until("a direct path", || peer.is_direct()).await;
    let mut flow = peer.open(FlowSettings::default()).unwrap();
    flow.write_u64(SIZE).await.unwrap();
    flow.shutdown().await.unwrap();
    let mut got = vec![0; 100_000];
    within(flow.read_exact(&mut got)).await.unwrap();
    callee_links.remove("net");
    caller_links.remove("net");
    until("nothing is left", || peer.paths().is_empty()).await;
    callee_links.add(ProvidedLink::new("net", [127, 0, 0, 12].into()));
    caller_links.add(ProvidedLink::new("net", [127, 0, 0, 13].into()));
    within(flow.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got.len() as u64, SIZE);
    assert!((0..SIZE).zip(&got).all(|(i, b)| content(i) == *b));
    assert_eq!(peer.ended(), None);
    until("direct again", || peer.is_direct()).await;
}

#[tokio::test]
async fn who_is_not_let_in_by_the_listener_hears_what_who_calls_nobody_hears() {
    let proxy = proxy(|_| {});
    let (callee, _links) = device(2, &proxy).await;
    let friends = Admission::Only(BTreeSet::from([key(4).public()]));
    answering(within(callee.listen(friends)).await.unwrap());
    let refusal = async |n: u8, whom: PublicKey| {
        let (caller, _links) = device(n, &proxy).await;
        let called = within(caller.call(whom)).await;
        match called {
            Err(CallError::Refused { status, text }) => Some((status, text)),
            Err(other) => panic!("{other}"),
            Ok(peer) => {
                fetch(&peer, 10).await;
                None
            }
        }
    };
    let stranger = refusal(3, key(2).public()).await;
    let nobody = refusal(5, key(77).public()).await;
    assert_eq!(stranger.as_ref().map(|(status, _)| *status), Some(404));
    assert_eq!(stranger, nobody);
    assert_eq!(refusal(4, key(2).public()).await, None);
}

// R-RELAY-9
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_whose_sessions_are_in_different_workers_reach_each_other_by_the_relay() {
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        eprintln!("skipped: no IPv6");
        return;
    }
    let rest = HibernationOptions::default();
    let server = Arc::new(Server::bind_workers(3, options(9, "[::]:0"), rest).unwrap());
    let (port, public) = (server.local_addr().port(), server.public_key());
    proxy_on(server.clone(), |_| {});
    // No direct path leads from one family to the other.
    let by_v6 = ServerAddress::new("::1", port, public);
    let by_v4 = ServerAddress::new("127.0.0.1", port, public);
    let (callee, _links) = device_at(2, Ipv6Addr::LOCALHOST.into(), &by_v6).await;
    answering(within(callee.listen(Admission::Anybody)).await.unwrap());
    let mut callers = Vec::new();
    for n in 3..10 {
        let caller = device(n, &by_v4).await;
        let peer = within(caller.0.call(key(2).public())).await.unwrap();
        fetch(&peer, SIZE).await;
        let (direct, relayed) = payload(&peer);
        assert!(direct == 0 && relayed >= SIZE, "{direct} and {relayed}");
        callers.push((caller, peer));
    }
    let by_worker = server.counts_by_worker();
    assert!(
        by_worker.iter().all(|(awake, ..)| *awake > 0),
        "{by_worker:?}"
    );
    // The kernel steers relayed packets, too: first packets alone come to the wrong worker.
    let passed = server.passed_between_workers();
    assert!(passed <= 2 * 8, "{passed}");
}

/// A hole in front of a server: the relay's socket gets through, nobody else does.
async fn walled(server: SocketAddr, passes: Ipv4Addr) -> SocketAddr {
    let front = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let at = front.local_addr().unwrap();
    let back = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    tokio::spawn(async move {
        let (mut near, mut far) = (vec![0; 2000], vec![0; 2000]);
        let mut to = None;
        loop {
            tokio::select! {
                Ok((n, from)) = front.recv_from(&mut near) => if from.ip() == passes {
                    to = Some(from);
                    let _ = back.send_to(&near[..n], server).await;
                },
                Ok((n, _)) = back.recv_from(&mut far) => if let Some(to) = to {
                    let _ = front.send_to(&far[..n], to).await;
                },
            }
        }
    });
    at
}

#[tokio::test]
async fn an_origin_that_only_the_proxy_reaches_is_spoken_to_through_the_relay() {
    let proxy = proxy(|_| {});
    let origin = Arc::new(listening(7));
    let answers = origin.clone();
    tokio::spawn(async move {
        while let Some(flow) = answers.accept().await {
            tokio::spawn(answer(flow));
        }
    });
    let wall = walled(origin.local_addr(), Ipv4Addr::LOCALHOST).await;
    let (device, _links) = device(3, &proxy).await;
    let address = ServerAddress {
        port: wall.port(),
        ..at(&origin)
    };
    let peer = within(device.connect_origin(&address)).await.unwrap();
    fetch(&peer, SIZE).await;
    let (direct, relayed) = payload(&peer);
    assert!(direct == 0 && relayed >= SIZE, "{direct} and {relayed}");
}

#[tokio::test]
async fn packets_beyond_a_clients_rate_are_not_relayed() {
    // R-RELAY-7
    let rate = 400_000;
    let proxy = proxy(|config| {
        config.client_down_bytes_per_s = rate;
        config.allow_clients = vec![key(3).public().0];
    });
    let origin = Arc::new(listening(7));
    let answers = origin.clone();
    tokio::spawn(async move {
        while let Some(flow) = answers.accept().await {
            tokio::spawn(answer(flow));
        }
    });
    let wall = walled(origin.local_addr(), Ipv4Addr::LOCALHOST).await;
    let (device, _links) = device(3, &proxy).await;
    let address = ServerAddress {
        port: wall.port(),
        ..at(&origin)
    };
    let peer = within(device.connect_origin(&address)).await.unwrap();
    let began = std::time::Instant::now();
    fetch(&peer, 1_000_000).await;
    // A burst of one second is free.
    let least = std::time::Duration::from_secs_f64(1_000_000.0 / rate as f64 - 1.0);
    assert!(began.elapsed() >= least, "{:?}", began.elapsed());
}

#[tokio::test]
async fn an_origin_that_can_be_reached_is_spoken_to_directly_and_the_relay_is_let_go() {
    let proxy = proxy(|_| {});
    let origin = Arc::new(listening(7));
    let answers = origin.clone();
    tokio::spawn(async move {
        while let Some(flow) = answers.accept().await {
            tokio::spawn(answer(flow));
        }
    });
    let (device, _links) = device(3, &proxy).await;
    let peer = within(device.connect_origin(&at(&origin))).await.unwrap();
    fetch(&peer, 1000).await;
    until("a direct path", || peer.is_direct()).await;
    fetch(&peer, SIZE).await;
    let (direct, relayed) = payload(&peer);
    assert!(direct >= SIZE && relayed == 0, "{direct} and {relayed}");
}

#[tokio::test]
async fn relays_to_private_addresses_and_where_there_are_none_are_refused() {
    // R-RELAY-6
    let closed = proxy(|config| config.allow_private = false);
    let off = proxy(|config| config.relay = false);
    for (proxy, status, word) in [(closed, 403, "private"), (off, 403, "does not relay")] {
        let (device, _links) = device(3, &proxy).await;
        let mut flow = device.open(FlowSettings::default()).unwrap();
        let request = b"RELAY 127.0.0.1:4433 HTTP/1.1\r\nHost: h\r\n\r\n";
        flow.write_all(request).await.unwrap();
        flow.shutdown().await.unwrap();
        let mut text = String::new();
        within(flow.read_to_string(&mut text)).await.unwrap();
        assert!(text.starts_with(&format!("HTTP/1.1 {status}")), "{text}");
        assert!(text.contains(word), "{text}");
    }
}
