//! What the kernel says to a socket whose link goes away under it, in a namespace of its own.
//!
//! The test runs itself again under `unshare -Urn`; where the system forbids that, it says so and
//! passes.

use std::process::Command;

use d2tp_udp::{BindOptions, DeviceConfinement, LinkSocket, UdpTransmit, is_link_gone, is_too_big};

const INSIDE: &str = "CEDOS_TEST_INSIDE_NAMESPACE";

fn sh(commands: &str) -> bool {
    Command::new("sh")
        .args(["-ec", commands])
        .status()
        .is_ok_and(|status| status.success())
}

#[test]
fn a_link_that_goes_away_is_told_by_the_next_send_and_a_new_socket_works_after_it_returns() {
    const NAME: &str =
        "a_link_that_goes_away_is_told_by_the_next_send_and_a_new_socket_works_after_it_returns";
    if std::env::var_os(INSIDE).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        return runtime.expect("a runtime").block_on(inside());
    }
    let allowed = Command::new("unshare")
        .args(["-Urn", "ip", "link", "add", "a0", "type", "veth"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !allowed {
        eprintln!("skipped: this system does not let us make a network namespace with veth links");
        return;
    }
    let status = Command::new("unshare")
        .arg("-Urn")
        .arg(std::env::current_exe().expect("path of this test"))
        .args(["--exact", NAME, "--nocapture"])
        // Its closing line is not one of this program's.
        .stdout(std::io::stderr())
        .env(INSIDE, "1")
        .status()
        .expect("run unshare");
    assert!(status.success(), "inside the namespace: {status}");
}

async fn inside() {
    let up = "ip link set wlan0 up; ip addr add 198.51.100.7/24 dev wlan0
              ip route add default via 198.51.100.1 dev wlan0";
    assert!(sh(
        "ip link add wlan0 type veth peer name ap0; ip link set ap0 up"
    ));
    assert!(sh(up));
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

    assert!(sh("ip link set wlan0 down; ip addr flush dev wlan0"));
    let error = socket
        .try_send(&transmit(b"while it is down"))
        .expect_err("no link");
    assert!(is_link_gone(&error), "{error}");
    let error = LinkSocket::bind(&options).expect_err("no address");
    assert!(is_link_gone(&error.into()));

    assert!(sh(up));
    let again = LinkSocket::bind(&options).expect("bind again");
    again.try_send(&transmit(b"up again")).expect("send again");

    assert!(sh("ip link del wlan0"));
    let error = again
        .try_send(&transmit(b"no device"))
        .expect_err("no device");
    assert!(is_link_gone(&error), "{error}");
}
