//! Tests of the kernel's errors for a socket whose link disappears, in their own namespace.
//!
//! The test runs itself again under `unshare -Urn`; if the system forbids that, it prints a message
//! and passes.

use cedos_lab_rig::namespace::{LINKS, in_namespace_with, sh};
use cedos_lab_rig::this_test;
use d2tp_udp::{BindOptions, DeviceConfinement, LinkSocket, UdpTransmit, is_link_gone, is_too_big};

#[test]
fn a_link_that_goes_away_is_told_by_the_next_send_and_a_new_socket_works_after_it_returns() {
    in_namespace_with(LINKS, this_test!(), inside);
}

async fn inside() {
    let up = "ip link set wlan0 up; ip addr add 198.51.100.7/24 dev wlan0
              ip route add default via 198.51.100.1 dev wlan0";
    sh("ip link add wlan0 type veth peer name ap0; ip link set ap0 up");
    sh(up);
    let options = BindOptions::at("198.51.100.7:0".parse().expect("an address")).on_device("wlan0");
    let transmit = |contents| UdpTransmit {
        dst: "192.0.2.1:9".parse().expect("an address"),
        src_ip: None,
        ecn: None,
        contents,
        segment_size: None,
    };
    let socket = LinkSocket::bind(&options).expect("bind to the link");
    assert_eq!(socket.confinement(), DeviceConfinement::Device);
    socket.try_send(&transmit(b"while it is up")).expect("send");

    // Larger than the link's MTU, with don't-fragment set.
    let error = socket.try_send(&transmit(&[0; 1600])).expect_err("too big");
    assert!(is_too_big(&error) && !is_link_gone(&error), "{error}");

    // The same in a batch: refused by its segment size, and GSO stays on.
    let segments = socket.max_gso_segments();
    let batch = UdpTransmit {
        segment_size: Some(1600),
        ..transmit(&[0; 4800])
    };
    let error = socket.try_send(&batch).expect_err("too big");
    assert!(is_too_big(&error), "{error}");
    assert_eq!(
        socket.max_gso_segments(),
        segments,
        "one large probe must not switch GSO off"
    );

    sh("ip link set wlan0 down; ip addr flush dev wlan0");
    let error = socket
        .try_send(&transmit(b"while it is down"))
        .expect_err("no link");
    assert!(is_link_gone(&error), "{error}");
    let error = LinkSocket::bind(&options).expect_err("no address");
    assert!(is_link_gone(&error.into()));

    sh(up);
    let again = LinkSocket::bind(&options).expect("bind again");
    again.try_send(&transmit(b"up again")).expect("send again");

    sh("ip link del wlan0");
    let error = again
        .try_send(&transmit(b"no device"))
        .expect_err("no device");
    assert!(is_link_gone(&error), "{error}");
}
