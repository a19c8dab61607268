//! Tests of sockets on the loopback device: batches, ECN bits, both address families, and the
//! classification of errors.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use d2tp_udp::{
    BindOptions, DeviceConfinement, Ecn, LinkSocket, RecvBatch, UdpTransmit, is_link_gone,
    is_too_big,
};

const V4: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const V6: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 0);

fn bound(local: SocketAddr) -> LinkSocket {
    LinkSocket::bind(&BindOptions::at(local)).expect("loopback can be bound")
}

fn to(dst: SocketAddr, contents: &[u8]) -> UdpTransmit<'_> {
    UdpTransmit {
        dst,
        src_ip: None,
        ecn: None,
        contents,
        segment_size: None,
    }
}

/// Whether the machine has no IPv6 at all; prints a message if so.
fn without_ipv6() -> bool {
    let missing = std::net::UdpSocket::bind(V6).is_err();
    if missing {
        eprintln!("skipped: this machine has no IPv6 loopback");
    }
    missing
}

/// Receives until `count` datagrams have arrived; returns them with their ECN bits and the number
/// of runs.
async fn collect(socket: &LinkSocket, count: usize) -> (Vec<Vec<u8>>, Vec<Option<Ecn>>, usize) {
    let (mut datagrams, mut bits, mut runs) = (Vec::new(), Vec::new(), 0);
    let mut batch = RecvBatch::default();
    while datagrams.len() < count {
        runs += socket.recv(&mut batch).await.expect("receive");
        for run in batch.received() {
            let ecn = run.ecn;
            for datagram in run.datagrams() {
                datagrams.push(datagram.to_vec());
                bits.push(ecn);
            }
        }
    }
    (datagrams, bits, runs)
}

async fn a_batch_arrives_whole_at(local: SocketAddr) {
    let (sender, receiver) = (bound(local), bound(local));
    let contents: Vec<u8> = (0..10 * 1200 + 77).map(|i| (i % 251) as u8).collect();
    sender
        .try_send(&UdpTransmit {
            segment_size: Some(1200),
            ..to(receiver.local_addr(), &contents)
        })
        .expect("send a batch");
    let (datagrams, _, runs) = collect(&receiver, 11).await;
    assert_eq!(datagrams.concat(), contents);
    assert!(datagrams[..10].iter().all(|d| d.len() == 1200));
    assert_eq!(datagrams[10].len(), 77);
    if sender.max_gso_segments() > 1 && receiver.gro_segments() > 1 {
        assert!(
            runs < 11,
            "GSO and GRO are on, yet every datagram came alone"
        );
    }
}

#[tokio::test]
async fn a_gso_batch_arrives_as_joined_segments_over_v4() {
    a_batch_arrives_whole_at(V4).await;
}

#[tokio::test]
async fn a_gso_batch_arrives_as_joined_segments_over_v6() {
    if !without_ipv6() {
        a_batch_arrives_whole_at(V6).await;
    }
}

#[tokio::test]
async fn congestion_bits_are_carried_in_both_families() {
    for local in [V4, V6] {
        if local == V6 && without_ipv6() {
            continue;
        }
        let (sender, receiver) = (bound(local), bound(local));
        for ecn in [None, Some(Ecn::Ect0), Some(Ecn::Ect1), Some(Ecn::Ce)] {
            sender
                .try_send(&UdpTransmit {
                    ecn,
                    ..to(receiver.local_addr(), b"bits")
                })
                .expect("send");
            let (_, bits, _) = collect(&receiver, 1).await;
            assert_eq!(bits, [ecn], "over {local}");
        }
    }
}

#[tokio::test]
async fn a_receiver_learns_sender_and_own_address() {
    let sender = bound(V4);
    let receiver = bound(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
    let port = receiver.local_addr().port();
    let second_home = Ipv4Addr::new(127, 0, 0, 2);
    sender
        .try_send(&to(SocketAddr::new(second_home.into(), port), b"x"))
        .expect("send");
    let mut batch = RecvBatch::with_capacity(1);
    assert_eq!(receiver.recv(&mut batch).await.expect("receive"), 1);
    let run = batch.received().next().expect("one run");
    assert_eq!(run.from, sender.local_addr());
    assert_eq!(run.dst_ip, Some(second_home.into()));
    // And answers from there.
    let answer = UdpTransmit {
        src_ip: Some(second_home.into()),
        ..to(sender.local_addr(), b"y")
    };
    receiver.try_send(&answer).expect("answer");
    let mut batch = RecvBatch::with_capacity(1);
    sender.recv(&mut batch).await.expect("receive");
    assert_eq!(
        batch.received().next().expect("one run").from.ip(),
        IpAddr::from(second_home)
    );
}

#[tokio::test]
async fn an_empty_socket_would_block() {
    let mut batch = RecvBatch::with_capacity(1);
    let error = bound(V4)
        .try_recv(&mut batch)
        .expect_err("nothing was sent");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    assert!(batch.is_empty());
}

#[tokio::test]
async fn an_impossible_datagram_is_too_big_and_not_a_lost_link() {
    let (sender, receiver) = (bound(V4), bound(V4));
    let contents = vec![0; 65_530]; // above the 65,507 bytes that UDP over IPv4 can carry
    let error = sender
        .try_send(&to(receiver.local_addr(), &contents))
        .expect_err("too big");
    assert!(is_too_big(&error), "{error}");
    assert!(!is_link_gone(&error));
}

#[tokio::test]
async fn an_address_we_do_not_have_is_a_lost_link() {
    // 192.0.2.0/24 is reserved for documentation (RFC 5737): no machine has an address of it.
    let local = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), 0);
    let error = LinkSocket::bind(&BindOptions::at(local)).expect_err("not our address");
    assert!(
        error.to_string().contains("no longer, on this machine"),
        "{error}"
    );
    assert!(is_link_gone(&error.into()));
}

#[tokio::test]
async fn a_device_that_does_not_exist_is_a_lost_link() {
    let error = LinkSocket::bind(&BindOptions::at(V4).on_device("nosuchdev0"))
        .expect_err("there is no such device");
    assert!(error.to_string().contains("nosuchdev0"), "{error}");
    assert!(is_link_gone(&error.into()));
}

#[tokio::test]
async fn a_socket_bound_to_the_loopback_device_stays_on_it() {
    let sender = LinkSocket::bind(&BindOptions::at(V4).on_device("lo")).expect("bind to lo");
    assert_ne!(sender.confinement(), DeviceConfinement::None);
    let receiver = bound(V4);
    sender
        .try_send(&to(receiver.local_addr(), b"on lo"))
        .expect("send on lo");
    let (datagrams, _, _) = collect(&receiver, 1).await;
    assert_eq!(datagrams, [b"on lo"]);
}

#[tokio::test]
async fn two_workers_share_a_port() {
    let first = LinkSocket::bind(&BindOptions {
        reuse_port: true,
        ..BindOptions::at(V4)
    })
    .expect("first worker");
    let second = LinkSocket::bind(&BindOptions {
        reuse_port: true,
        ..BindOptions::at(first.local_addr())
    })
    .expect("second worker on the same port");
    assert_eq!(first.local_addr(), second.local_addr());
    let error = LinkSocket::bind(&BindOptions::at(first.local_addr()))
        .expect_err("a port that is not shared");
    assert!(
        error.to_string().contains("another program has the port"),
        "{error}"
    );
}

#[tokio::test]
async fn where_a_device_may_not_be_bound_looser_ways_of_staying_on_it_carry_datagrams() {
    for firmest in [DeviceConfinement::Egress, DeviceConfinement::Address] {
        for at in [V4, V6] {
            if at.is_ipv6() && without_ipv6() {
                continue;
            }
            let receiver = bound(at);
            let options = BindOptions {
                firmest,
                ..BindOptions::at(at).on_device("lo")
            };
            let sender = LinkSocket::bind(&options).expect("an unprivileged way");
            assert_eq!(sender.confinement(), firmest);
            sender
                .try_send(&to(receiver.local_addr(), b"here"))
                .expect("it leaves");
            let (datagrams, ..) = collect(&receiver, 1).await;
            assert_eq!(datagrams, [b"here"]);
        }
    }
}

#[tokio::test]
async fn a_device_that_does_not_exist_is_no_reason_to_bind_more_loosely() {
    let options = BindOptions {
        firmest: DeviceConfinement::Egress,
        ..BindOptions::at(V4).on_device("nosuchdev0")
    };
    let error = LinkSocket::bind(&options).expect_err("it would leave by another");
    assert_eq!(error.step, "SO_BINDTODEVICE");
    assert!(is_link_gone(&error.into()));
}

#[tokio::test]
async fn a_socket_of_the_programs_own_is_taken_over() {
    let own = std::net::UdpSocket::bind(V4).expect("loopback");
    let address = own.local_addr().expect("bound");
    let socket = LinkSocket::from_std(own).expect("an ordinary socket");
    assert_eq!(socket.local_addr(), address);
    bound(V4)
        .try_send(&to(address, b"to yours"))
        .expect("it leaves");
    let (datagrams, ..) = collect(&socket, 1).await;
    assert_eq!(datagrams, [b"to yours"]);
}
