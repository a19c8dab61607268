//! A server with several workers on one port.

use std::net::{TcpListener, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cedos_lab_rig::wait::{until_some, within};
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, Flow, FlowIo, FlowSettings,
    HibernationOptions, Journal, Server, ServerAddress, ServerOptions, SocketsAfter,
    StreamIdentity, TcpStreamAcceptor,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::rest::{Pattern, SIZE, read_to};
use crate::streams::{accept_streams, device_with_key};
use crate::support::key;

const WORKERS: u16 = 3;
const DEVICES: u8 = 24;
const ECHO_BYTES: usize = 200_000;
/// Devices on a network that blocks UDP, each of which looks for more than a second before it opens a stream.
const STREAM_DEVICES: u8 = 9;

fn options() -> ServerOptions {
    ServerOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        key: key(2),
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    }
}

fn server() -> Server {
    Server::bind_workers(WORKERS, options(), HibernationOptions::default()).unwrap()
}

async fn device(server: &Server, number: u8) -> Device {
    let options = DeviceOptions {
        server: ServerAddress::new("127.0.0.1", server.local_addr().port(), server.public_key()),
        key: key(100 + number),
        config: EndpointConfig::default(),
    };
    let device = Device::new(options).await.unwrap();
    device.use_default_route().unwrap();
    device
}

async fn echo(mut far: Flow) {
    let mut bytes = Vec::new();
    far.read_to_end(&mut bytes).await.unwrap();
    far.write_all(&bytes).await.unwrap();
    far.shutdown().await.unwrap();
    finished(far).await;
}

/// Waits until the flow is over, or hibernated.
async fn finished(mut far: Flow) {
    let _ = std::future::poll_fn(|cx| far.poll_finished(cx)).await;
}

/// Sends bytes to the server and has them back.
async fn exchange(device: &Device, number: u8) {
    let mut flow = device.open(FlowSettings::default()).unwrap();
    let sent = vec![number; ECHO_BYTES];
    flow.write_all(&sent).await.unwrap();
    flow.shutdown().await.unwrap();
    let mut back = Vec::new();
    within(flow.read_to_end(&mut back)).await.unwrap();
    assert!(back == sent, "device {number}");
}

async fn echoes(server: &std::sync::Arc<Server>) {
    let server = server.clone();
    tokio::spawn(async move {
        while let Some(far) = server.accept().await {
            tokio::spawn(echo(far));
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_are_divided_among_workers_and_the_kernel_steers_their_packets() {
    let server = std::sync::Arc::new(server());
    echoes(&server).await;
    let mut devices = Vec::new();
    for number in 0..DEVICES {
        let device = device(&server, number).await;
        exchange(&device, number).await;
        devices.push(device);
    }
    let by_worker: Vec<usize> = (server.counts_by_worker().into_iter())
        .map(|(awake, _, _)| awake)
        .collect();
    assert_eq!(by_worker.len(), usize::from(WORKERS));
    assert_eq!(by_worker.iter().sum::<usize>(), usize::from(DEVICES));
    assert!(
        by_worker.iter().all(|sessions| *sessions > 0),
        "{by_worker:?}"
    );
    // First packets come to any worker, and are the only ones that are passed on.
    let passed = server.passed_between_workers();
    assert!((1..=2 * u64::from(DEVICES)).contains(&passed), "{passed}");
    for (device, number) in devices.iter().zip(0..) {
        exchange(device, number).await;
    }
    assert_eq!(server.passed_between_workers(), passed);
    // Another process of the same client comes to the same worker.
    let again = self::device(&server, 0).await;
    exchange(&again, 0).await;
    let now: Vec<usize> = (server.counts_by_worker().into_iter())
        .map(|(awake, _, _)| awake)
        .collect();
    let grown = now
        .iter()
        .zip(&by_worker)
        .filter(|(now, before)| now > before);
    assert_eq!(grown.count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_pass_packets_to_each_other_where_the_kernel_does_not_steer() {
    let server = std::sync::Arc::new(server());
    for socket in server.share_sockets().unwrap() {
        let nothing: libc::c_int = 0;
        // SAFETY: the value is an integer of this size.
        let _ = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_DETACH_REUSEPORT_BPF,
                (&raw const nothing).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
    }
    echoes(&server).await;
    for number in 0..DEVICES {
        exchange(&device(&server, number).await, number).await;
    }
    // Two packets of three come to the wrong worker, of more than 300 for each device.
    let passed = server.passed_between_workers();
    assert!(passed > 10 * u64::from(DEVICES), "{passed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_goes_to_the_worker_that_has_its_devices_sessions() {
    let server = std::sync::Arc::new(server());
    let at = accept_streams(&server, "127.0.0.1");
    echoes(&server).await;
    // Nobody answers there, as in a network that blocks UDP.
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut devices = Vec::new();
    for number in 0..STREAM_DEVICES {
        let device = device_with_key(&server, &silent, at, key(100 + number)).await;
        exchange(&device, number).await;
        devices.push((device, number));
    }
    let by_worker: Vec<usize> = (server.counts_by_worker().into_iter())
        .map(|(awake, _, _)| awake)
        .collect();
    assert_eq!(by_worker.iter().sum::<usize>(), devices.len());
    assert!(
        by_worker.iter().all(|sessions| *sessions > 0),
        "{by_worker:?}"
    );
    // Once a stream is where it belongs, none of its packets is passed on.
    let passed = server.passed_between_workers();
    for (device, number) in &devices {
        exchange(device, *number).await;
    }
    assert_eq!(server.passed_between_workers(), passed);
}

// R-STREAM-9, R-UNKNOWN-4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_with_and_without_udp_go_on_at_once_at_the_next_server_on_the_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let kept = |journal| HibernationOptions {
        hibernate_after: None,
        journal: Some(Arc::new(journal)),
    };
    let identity = || StreamIdentity::self_signed("localhost").unwrap();
    let journal = Journal::open(&path).unwrap();
    let first = Server::bind_workers(WORKERS, options(), kept(journal)).unwrap();
    let acceptor = TcpStreamAcceptor::bind("127.0.0.1:0".parse().unwrap(), identity()).unwrap();
    let at = acceptor.local_addr().unwrap();
    let udp: Vec<UdpSocket> = (first.share_sockets().unwrap().into_iter())
        .map(UdpSocket::from)
        .collect();
    let tcp: Vec<TcpListener> = (acceptor.share_sockets().unwrap().into_iter())
        .map(TcpListener::from)
        .collect();
    first.accept_streams(acceptor);
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut devices = Vec::new();
    for number in 0..STREAM_DEVICES {
        devices.push(device_with_key(&first, &silent, at, key(100 + number)).await);
        devices.push(device(&first, STREAM_DEVICES + number).await);
    }
    let mut near = Vec::new();
    for device in &devices {
        let mut flow = device.open(FlowSettings::default()).unwrap();
        flow.write_all(b"get").await.unwrap();
        near.push(flow);
    }
    let mut far = Vec::new();
    for _ in &devices {
        let mut flow = within(first.accept()).await.unwrap();
        within(flow.read_exact(&mut [0; 3])).await.unwrap();
        flow.send_source(Arc::new(Pattern));
        flow.allow_hibernation(Bytes::from_static(b"what it needs"));
        far.push(flow);
    }
    for flow in &mut near {
        read_to(flow, 0, 100_000).await;
    }
    let left = Instant::now();
    first.leave(0, SocketsAfter::Kept).await.unwrap();
    let (awake, hibernated, _) = first.counts();
    assert_eq!((awake, hibernated), (0, devices.len()));
    drop((far, first));
    let journal = until_some("the journal is free", || Journal::open(&path).ok()).await;
    let second = Server::on_sockets(udp, options(), kept(journal)).unwrap();
    second.accept_streams(TcpStreamAcceptor::on_sockets(tcp, identity()).unwrap());
    for _ in &devices {
        let mut flow = within(second.accept()).await.unwrap();
        assert_eq!(flow.memo().unwrap(), "what it needs");
        flow.resume_source(Arc::new(Pattern));
        tokio::spawn(finished(flow));
    }
    let silence = left.elapsed();
    // A device whose second stream was cut, too, waits for four seconds before its third.
    assert!(silence < Duration::from_secs(2), "{silence:?}");
    for flow in &mut near {
        read_to(flow, 100_000, SIZE).await;
        assert_eq!(within(flow.read(&mut [0])).await.unwrap(), 0, "it is whole");
    }
    assert!(
        second
            .counts_by_worker()
            .iter()
            .all(|(awake, ..)| *awake > 0),
        "each worker has its clients' sessions"
    );
}

#[tokio::test]
async fn the_family_of_the_wildcard_that_was_not_passed_is_bound() {
    let passed = vec![std::net::UdpSocket::bind("0.0.0.0:0").unwrap()];
    let port = passed[0].local_addr().unwrap().port();
    let options = ServerOptions {
        listen: (std::net::Ipv6Addr::UNSPECIFIED, port).into(),
        key: key(2),
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    };
    let listen = options.listen;
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        eprintln!("skipped: no IPv6");
        return;
    }
    let server = Server::on_sockets(passed, options, HibernationOptions::default()).unwrap();
    // Devices are told of both families, whichever socket is the first.
    assert_eq!(server.local_addr(), listen);
    assert_eq!(server.share_sockets().unwrap().len(), 2);
    assert_eq!(server.counts_by_worker().len(), 1);
}
