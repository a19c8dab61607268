//! A flow opened inside the SYN, over real sockets.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{device_by_way_of, key, server_with, wifi};
use bytes::Bytes;
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    Admission, EndpointConfig, FlowIo, FlowSettings, HibernationOptions, Journal, ProvidedLinks,
    Server, ServerOptions,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;

/// Forwards datagrams between one device and `server`; towards the device only while `open`.
async fn relay(server: SocketAddr, open: Arc<AtomicBool>) -> SocketAddr {
    let bind = || UdpSocket::bind((Ipv4Addr::LOCALHOST, 0));
    let (front, back) = (bind().await.unwrap(), bind().await.unwrap());
    let address = front.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut up, mut down) = ([0; 65_536], [0; 65_536]);
        let mut device = None;
        loop {
            tokio::select! {
                got = front.recv_from(&mut up) => {
                    let (n, from) = got.unwrap();
                    device = Some(from);
                    back.send_to(&up[..n], server).await.unwrap();
                }
                got = back.recv_from(&mut down) => {
                    let (n, _) = got.unwrap();
                    if let Some(device) = device.filter(|_| open.load(Ordering::Acquire)) {
                        front.send_to(&down[..n], device).await.unwrap();
                    }
                }
            }
        }
    });
    address
}

#[tokio::test]
async fn a_request_in_the_syn_reaches_the_application_before_the_device_is_answered() {
    let server = server_with(EndpointConfig {
        early_data: true,
        ..EndpointConfig::default()
    });
    let open = Arc::new(AtomicBool::new(false));
    let at = relay(server.local_addr(), open.clone()).await;
    let links = ProvidedLinks::new();
    let device = device_by_way_of(at.port(), &server, &links, links.clone()).await;

    let settings = FlowSettings {
        early: true,
        ..FlowSettings::default()
    };
    let mut near = device.open(settings).unwrap();
    near.write_all(b"what time is it?").await.unwrap();
    links.add(wifi(2));

    let mut far = within(server.accept()).await.unwrap();
    let mut request = [0; 16];
    within(far.read_exact(&mut request)).await.unwrap();
    assert_eq!(&request, b"what time is it?");
    assert!(
        !far.is_confirmed(),
        "it may be a copy of what was said before"
    );
    far.write_all(b"half past").await.unwrap();

    open.store(true, Ordering::Release);
    let mut answer = [0; 9];
    within(near.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"half past");
    until("the device has confirmed", || far.is_confirmed()).await;

    // The flow continues like any other.
    near.write_all(&[5; 100_000]).await.unwrap();
    within(far.read_exact(&mut [0; 100_000])).await.unwrap();
    assert_eq!(server.counts(), (1, 0, 0));
}

// R-HS-12
#[tokio::test]
async fn all_flows_that_were_kept_before_the_device_confirmed_are_stored_once_it_has() {
    let directory = tempfile::tempdir().unwrap();
    let journal = Arc::new(Journal::open(&directory.path().join("journal")).unwrap());
    let options = ServerOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        key: key(2),
        admission: Admission::Anybody,
        config: EndpointConfig {
            early_data: true,
            ..EndpointConfig::default()
        },
    };
    let rest = HibernationOptions {
        hibernate_after: None,
        journal: Some(journal.clone()),
    };
    let server = Server::bind_with(options, rest).unwrap();
    let open = Arc::new(AtomicBool::new(false));
    let at = relay(server.local_addr(), open.clone()).await;
    let links = ProvidedLinks::new();
    let device = device_by_way_of(at.port(), &server, &links, links.clone()).await;

    let mut near = Vec::new();
    for request in [b"first", b"other", b"third"] {
        let settings = FlowSettings {
            early: true,
            ..FlowSettings::default()
        };
        let mut flow = device.open(settings).unwrap();
        flow.write_all(request).await.unwrap();
        near.push(flow);
    }
    links.add(wifi(2));
    let mut far = Vec::new();
    for _ in &near {
        let mut flow = within(server.accept()).await.unwrap();
        flow.allow_hibernation(Bytes::from_static(b"what it needs"));
        assert!(!flow.is_confirmed());
        far.push(flow);
    }
    let stored = || {
        let mut flows = Vec::new();
        journal.memos(|key, _| flows.push(key.flow)).unwrap();
        flows.len()
    };
    assert_eq!(stored(), 0);
    open.store(true, Ordering::Release);
    until("all are stored", || stored() == near.len()).await;
}
