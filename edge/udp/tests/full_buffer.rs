//! A test of a socket whose buffer is full because its link is slow, in its own namespace.
//!
//! The test runs itself again under `unshare -Urn`; if the system forbids that, it prints a message
//! and passes.

use std::future::poll_fn;
use std::io::ErrorKind;
use std::task::Poll;

use cedos_lab_rig::namespace::{SHAPED_LINKS, in_namespace_with, sh};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::within;
use d2tp_udp::{BindOptions, LinkSocket, UdpTransmit};

/// More bytes than any buffer of the kernel takes.
const BYTES_MAX: usize = 200_000_000;
const DATAGRAM_BYTES: usize = 1_400;

#[test]
fn a_send_that_waits_is_woken_when_there_is_room_each_time() {
    in_namespace_with(SHAPED_LINKS, this_test!(), inside);
}

async fn inside() {
    sh("ip link add wlan0 type veth peer name ap0
        ip link set ap0 up
        ip link set wlan0 up
        ip addr add 198.51.100.7/24 dev wlan0
        ip neigh add 198.51.100.1 lladdr 02:00:00:00:00:01 dev wlan0
        tc qdisc add dev wlan0 root tbf rate 200mbit burst 20k limit 100m");
    let at = "198.51.100.7:0".parse().expect("an address");
    let socket = LinkSocket::bind(&BindOptions::at(at)).expect("bind to the link");
    let transmit = UdpTransmit {
        dst: "198.51.100.1:9".parse().expect("an address"),
        src_ip: None,
        ecn: None,
        contents: &[7; DATAGRAM_BYTES],
        segment_size: None,
    };
    let is_ready = || poll_fn(|cx| Poll::Ready(socket.poll_send_ready(cx).is_ready()));
    for _ in 0..3 {
        let mut sends = 0..BYTES_MAX / DATAGRAM_BYTES;
        let error = sends.find_map(|_| socket.try_send(&transmit).err());
        let error = error.expect("the buffer is full");
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        assert!(!is_ready().await, "nothing has left yet");
        within(poll_fn(|cx| socket.poll_send_ready(cx)))
            .await
            .expect("there is room");
        socket.try_send(&transmit).expect("room for one");
    }
}
