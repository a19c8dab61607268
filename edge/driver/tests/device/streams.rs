//! Streams at a server: what they occupy, and who pays for it.

use std::io;
use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use cedos_lab_rig::namespace::{in_namespace, sh};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    Admission, Attach, Attachment, Device, DeviceOptions, EndpointConfig, FlowSettings, MemoryPool,
    ProvidedLinks, PublicKey, SecretKey, Server, ServerAddress, ServerOptions, StreamIdentity,
    TcpStreamAcceptor,
};
use d2tp_links::Link;
use d2tp_stream::{PacketReceiver, PacketSender, StreamTarget, connect};
use d2tp_udp::BindError;
use d2tp_wire::{CID_BYTES, DATAGRAM_FIRST_BYTES, PacketKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinHandle;

use crate::support::{flow, key, usage, wifi};

const MEMORY_BYTES: u64 = 5_000_000;
/// What a stream on which nothing waits is charged.
const STREAM_BYTES: u64 = 384 * 1024;

/// A server with streams, whose UDP and TCP ports are at `ip`, and the address of its streams.
fn server_of_streams(ip: &str, memory: &MemoryPool) -> (Server, SocketAddr) {
    let server = Server::bind(ServerOptions {
        listen: SocketAddr::new(ip.parse().expect("an address"), 0),
        key: key(2),
        admission: Admission::Anybody,
        config: EndpointConfig {
            memory: memory.clone(),
            ..EndpointConfig::default()
        },
    })
    .expect("a port");
    let streams = accept_streams(&server, ip);
    (server, streams)
}

/// Has a server accept streams at `ip`; the address of its port.
pub(crate) fn accept_streams(server: &Server, ip: &str) -> SocketAddr {
    let identity = StreamIdentity::self_signed("localhost").expect("a certificate");
    let at = SocketAddr::new(ip.parse().expect("an address"), 0);
    let acceptor = TcpStreamAcceptor::bind(at, identity).expect("a port");
    let streams = acceptor.local_addr().expect("an address");
    server.accept_streams(acceptor);
    streams
}

/// A stream of somebody without a key.
async fn stranger(at: SocketAddr) -> Option<(PacketSender, PacketReceiver)> {
    let target = StreamTarget {
        host: "localhost".into(),
        port: at.port(),
    };
    let socket = |to: SocketAddr| match to.is_ipv6() {
        true => TcpSocket::new_v6(),
        false => TcpSocket::new_v4(),
    };
    within(connect(&target, at, None, socket)).await.ok()
}

#[tokio::test]
async fn streams_that_no_admitted_device_uses_share_one_keys_memory() {
    let memory = MemoryPool::new(MEMORY_BYTES);
    let (_server, at) = server_of_streams("127.0.0.1", &memory);
    let mut streams = Vec::new();
    for _ in 0..20 {
        streams.extend(stranger(at).await);
    }
    let used = memory.used();
    assert!(
        !streams.is_empty() && streams.len() < 20,
        "{} streams",
        streams.len()
    );
    assert!(used > 0 && used <= MEMORY_BYTES / 5, "{used} bytes");
    streams.clear();
    until("their memory is free", || memory.used() == 0).await;
    assert!(stranger(at).await.is_some(), "there is room again");
}

/// Links with sockets as the test provides them, and with TCP.
struct WithTcp(Arc<ProvidedLinks>);

impl Attach for WithTcp {
    fn attach(&self, link: &Link, servers: &[SocketAddr]) -> Result<Vec<Attachment>, BindError> {
        self.0.attach(link, servers)
    }

    fn stream_addresses(&self, _: &Link, servers: &[SocketAddr]) -> Vec<SocketAddr> {
        servers.to_vec()
    }

    fn stream_socket(&self, _: &Link, _: SocketAddr) -> io::Result<TcpSocket> {
        TcpSocket::new_v4()
    }
}

#[tokio::test]
async fn a_stream_that_a_device_uses_is_charged_to_the_device() {
    let memory = MemoryPool::new(100 * MEMORY_BYTES);
    let (server, at) = server_of_streams("127.0.0.1", &memory);
    // Nobody answers there, as in a network that blocks UDP.
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let device = device_of_streams(&server, &silent, at).await;
    let before = memory.account(key(1).public()).used();
    let flows = flow(&device, &server).await;
    let account = memory.account(key(1).public());
    until("the stream is charged", || {
        account.used() >= before + STREAM_BYTES
    })
    .await;
    drop((flows, device));
    until("the stream is gone", || account.used() < STREAM_BYTES).await;
}

/// A device that knows of a UDP port that does not answer, and of streams.
async fn device_of_streams(server: &Server, silent: &UdpSocket, at: SocketAddr) -> Device {
    device_with_key(server, silent, at, key(1)).await
}

/// A device with this key that knows of a UDP port that does not answer, and of streams.
pub(crate) async fn device_with_key(
    server: &Server,
    silent: &UdpSocket,
    at: SocketAddr,
    key: SecretKey,
) -> Device {
    let links = ProvidedLinks::new();
    links.add(wifi(1));
    let options = DeviceOptions {
        server: ServerAddress {
            stream: Some(at.port()),
            ..ServerAddress::new(
                "127.0.0.1",
                silent.local_addr().expect("an address").port(),
                server.public_key(),
            )
        },
        key,
        config: EndpointConfig::default(),
    };
    let attach = Arc::new(WithTcp(links.clone()));
    let mut device = Device::with_attach(options, attach)
        .await
        .expect("a device");
    device.follow_links(links.subscribe(), usage);
    device
}

/// Passes one connection on to `server`, and keeps that half open when the device's half ends. The task ends when the
/// server closes its half.
async fn kept_open(server: SocketAddr) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let at = listener.local_addr().expect("an address");
    let passing = tokio::spawn(async move {
        let (device, _) = listener.accept().await.expect("a device");
        let server = TcpStream::connect(server).await.expect("the server");
        let (mut from_device, mut to_device) = device.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        let up = async {
            let _ = tokio::io::copy(&mut from_device, &mut to_server).await;
            std::future::pending::<()>().await;
        };
        let down = async {
            let mut bytes = [0; 16 * 1024];
            while let Ok(read @ 1..) = from_server.read(&mut bytes).await {
                // The device may be gone.
                let _ = to_device.write_all(&bytes[..read]).await;
            }
        };
        tokio::select! {
            () = up => {}
            () = down => {}
        }
    });
    (at, passing)
}

#[tokio::test]
async fn a_client_that_is_removed_keeps_no_stream_however_long_it_holds_it() {
    let memory = MemoryPool::new(100 * MEMORY_BYTES);
    let (server, at) = server_of_streams("127.0.0.1", &memory);
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let (at, passing) = kept_open(at).await;
    let device = device_of_streams(&server, &silent, at).await;
    let _flows = flow(&device, &server).await;
    server.set_admission(Admission::Only([key(9).public()].into()));
    server.end_client(key(1).public());
    until("the device heard it", || device.ended().is_some()).await;
    within(passing).await.expect("the server closed the stream");
    let account = memory.account(key(1).public());
    until("its memory is free", || account.used() == 0).await;
}

// R-STREAM-8
#[tokio::test]
async fn a_stranger_sends_little_by_a_stream_and_a_device_as_much_as_it_likes() {
    let memory = MemoryPool::new(100 * MEMORY_BYTES);
    let (server, at) = server_of_streams("127.0.0.1", &memory);
    let (mut sender, mut receiver) = stranger(at).await.expect("a stream");
    // Packets of no session.
    let packets = [0x41; 12_000];
    for _ in 0..6 {
        within(sender.send(&packets, 1_200))
            .await
            .expect("it is open");
    }
    let soon = std::time::Duration::from_secs(5); // strangers may be silent for three times as long
    let ended = tokio::time::timeout(soon, async { while receiver.recv().await.is_ok() {} });
    ended.await.expect("the server closes the stream");
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let device = device_of_streams(&server, &silent, at).await;
    let (mut near, mut far) = flow(&device, &server).await;
    let body = vec![7; 1_000_000];
    let mut back = vec![0; body.len()];
    let exchanged = async { tokio::try_join!(near.write_all(&body), far.read_exact(&mut back)) };
    within(exchanged).await.expect("the stream stays open");
    // What opened the flow comes before it.
    assert_eq!(back.last(), Some(&7));
}

#[tokio::test]
async fn a_device_may_send_much_with_its_first_packets() {
    let (server, at) = server_of_streams("127.0.0.1", &MemoryPool::new(100 * MEMORY_BYTES));
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let device = device_of_streams(&server, &silent, at).await;
    let mut near = device.open(FlowSettings::default()).expect("a flow");
    let body = vec![7; 1_000_000];
    let mut read = vec![0; body.len()];
    let reading = async {
        let mut far = server.accept().await.expect("a flow");
        far.read_exact(&mut read).await
    };
    let both = async { tokio::try_join!(near.write_all(&body), reading) };
    within(both).await.expect("the stream stays open");
    assert!(read == body);
}

#[tokio::test]
async fn a_stream_is_charged_to_its_device_when_that_has_room() {
    let memory = MemoryPool::new(100 * MEMORY_BYTES);
    let account = memory.account(key(1).public());
    let mut others = account.charge();
    assert!(others.try_resize(account.room() - STREAM_BYTES + 1));
    let (server, at) = server_of_streams("127.0.0.1", &memory);
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let device = device_of_streams(&server, &silent, at).await;
    let (mut near, _far) = flow(&device, &server).await;
    let strangers = memory.account(PublicKey([0; 32]));
    assert!(strangers.used() >= STREAM_BYTES, "they pay for it");
    others.resize(0);
    near.write_all(b"?").await.expect("it is open");
    until("the stream is charged to the device", || {
        account.used() >= STREAM_BYTES && strangers.used() == 0
    })
    .await;
}

#[tokio::test]
async fn the_send_buffer_of_a_stream_in_the_kernel_is_charged_to_its_device() {
    let memory = MemoryPool::new(100 * MEMORY_BYTES);
    let (server, at) = server_of_streams("127.0.0.1", &memory);
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let device = device_of_streams(&server, &silent, at).await;
    let (mut near, mut far) = flow(&device, &server).await;
    let account = memory.account(key(1).public());
    until("the stream is the device's", || {
        account.used() >= STREAM_BYTES
    })
    .await;
    far.write_all(&[7; 20_000]).await.expect("it is open");
    within(near.read_exact(&mut [0; 20_000]))
        .await
        .expect("all of it arrives");
    // Over loopback the kernel begins with more than two megabytes.
    until("the kernel's part is charged, too", || {
        account.used() >= STREAM_BYTES + 1_000_000
    })
    .await;
    drop((near, far, device));
    until("it is given back", || account.used() < STREAM_BYTES).await;
}

#[tokio::test]
async fn a_stream_of_a_device_without_room_for_its_send_buffer_goes_on() {
    let memory = MemoryPool::new(MEMORY_BYTES);
    let (server, at) = server_of_streams("127.0.0.1", &memory);
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let device = device_of_streams(&server, &silent, at).await;
    let (mut near, mut far) = flow(&device, &server).await;
    let (sent, mut read) = (vec![7; 3_000_000], vec![0; 3_000_000]);
    let both = async { tokio::join!(far.write_all(&sent), near.read_exact(&mut read)) };
    let (wrote, got) = within(both).await;
    wrote.expect("it is open");
    got.expect("all of it arrives");
    let used = memory.account(key(1).public()).used();
    assert!(used <= MEMORY_BYTES / 5, "{used} bytes");
}

/// A SYN of a version that does not exist, which every server answers, with this connection id.
fn version_question(id: u8) -> Vec<u8> {
    let mut question = vec![0; DATAGRAM_FIRST_BYTES];
    question[0] = PacketKind::Syn.first_byte() & 0xe0 | 0x1f;
    question[1..=CID_BYTES].fill(id);
    question
}

fn id_of_answer(packet: &[u8]) -> Option<u8> {
    match PacketKind::split(packet)? {
        (PacketKind::Version, _, id, _) => Some(id.0[0]),
        _ => None,
    }
}

// R-STREAM-5
#[test]
fn a_datagram_from_the_address_that_identifies_a_stream_is_dropped() {
    in_namespace(this_test!(), || async {
        // [100::n]:1 identifies the stream with number n.
        sh("ip addr add 100::1/128 dev lo nodad");
        let (server, at) = server_of_streams("::1", &MemoryPool::default());
        let _first = stranger(at).await.expect("a stream");
        let (mut sender, mut receiver) = stranger(at).await.expect("a stream");
        let forged = UdpSocket::bind((Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1), 1));
        let forged = forged.expect("a port");
        forged
            .send_to(&version_question(0xf0), server.local_addr())
            .expect("it is sent");
        // The server answers in order, so that it has seen the forged datagram when it answers this one.
        let honest = tokio::net::UdpSocket::bind("[::1]:0")
            .await
            .expect("a port");
        let question = version_question(0x0d);
        honest
            .send_to(&question, server.local_addr())
            .await
            .expect("it is sent");
        let mut answer = [0; 2_000];
        let length = within(honest.recv(&mut answer)).await.expect("an answer");
        assert_eq!(id_of_answer(&answer[..length]), Some(0x0d));
        let question = version_question(0x05);
        sender
            .send(&question, question.len())
            .await
            .expect("it is open");
        let mut batch = within(receiver.recv()).await.expect("it is open");
        let ids: Vec<_> = batch.packets().map(|packet| id_of_answer(packet)).collect();
        assert_eq!(ids, [Some(0x05)]);
    });
}
