//! A server with several workers on one port.

use std::os::fd::AsRawFd;

use cedos_lab_rig::wait::within;
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, Flow, FlowSettings, HibernationOptions,
    Server, ServerAddress, ServerOptions,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::streams::{accept_streams, device_with_key};
use crate::support::key;

const WORKERS: u16 = 3;
const DEVICES: u8 = 24;
const ECHO_BYTES: usize = 200_000;
/// Devices on a network that blocks UDP, each of which looks for more than a second before it opens a stream.
const STREAM_DEVICES: u8 = 9;

fn server() -> Server {
    let options = ServerOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        key: key(2),
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    };
    Server::bind_workers(WORKERS, options, HibernationOptions::default()).unwrap()
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
    let _ = std::future::poll_fn(|cx| d2tp_driver::FlowIo::poll_finished(&mut far, cx)).await;
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
