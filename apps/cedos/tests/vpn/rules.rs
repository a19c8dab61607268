//! Rules that tell traffic apart: the kernel's counters say over which networks it went.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use cedos_lab_rig::namespace::{cell_on, in_namespace_with, received, sent, sh, wifi_off, wifi_on};
use cedos_lab_rig::program::run;
use cedos_lab_rig::wait::until_async;
use cedos_lab_rig::{PATIENCE, this_test};
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::Value;

use crate::scene::{
    OBJECT_BYTES, PROXY_HOST, SERVER, SERVER_IPV6, STREAM_PORT, Scene, TUNNEL, Vpn, ask,
    system_network, udp,
};
use crate::tunnel::{connect, echo, end, status};

/// What a session needs on a network without carrying payload: handshakes, and probes of its MTU.
const OVERHEAD_BYTES: u64 = 200_000;

/// A code point for calls: expedited forwarding, as the byte of the IP header.
const EXPEDITED: i32 = 46 << 2;

/// Costs as in life: the Wi-Fi is free, mobile data is not.
const COSTS: [&str; 2] = ["--link", "wwan0=metered"];

fn only_mobile_data() {
    wifi_off();
    cell_on();
}

/// Asks for the server's object.
fn ask_for_object() -> TcpStream {
    let mut stream = TcpStream::connect((SERVER, 80)).expect("connected");
    let request = b"GET / HTTP/1.1\r\n\r\n";
    stream.write_all(request).expect("writable");
    stream
}

fn rule(status: &Value, number: usize) -> &Value {
    &status["vpn"]["rules"][number]
}

#[test]
fn a_connection_uses_metered_networks_only_where_its_rule_allows_it() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let scene = Scene::start().await;
        let rules = ["--rule", "tcp port 80 = free-only"];
        let vpn = scene
            .up_over("wlan0=free", &[&COSTS[..], &rules].concat())
            .await;
        only_mobile_data();
        let mut call = connect();
        echo(&mut call, b"begun");
        let mut download = ask_for_object();
        let before = received("wwan0");
        // Time for the object to come, measured in what another connection carries meanwhile.
        for _ in 0..100 {
            echo(&mut call, &[7; 1_000]);
        }
        let mobile = received("wwan0") - before;
        assert!(mobile > 100_000, "{mobile}: the call went another way");
        assert!(mobile < 100_000 + OVERHEAD_BYTES, "{mobile}");
        let wait = Some(Duration::from_millis(1));
        download.set_read_timeout(wait).expect("a length of time");
        let read = download.read(&mut [0; 1_000]).expect_err("nothing came");
        assert_eq!(read.kind(), ErrorKind::WouldBlock);
        let before = (received("wlan0"), received("wwan0"));
        wifi_on("198.51.100.7");
        download
            .set_read_timeout(Some(PATIENCE))
            .expect("a length of time");
        let mut came = 0;
        let mut buffer = [0; 65_536];
        while came < OBJECT_BYTES {
            let n = download.read(&mut buffer).expect("the download goes on");
            assert!(n > 0, "it ended after {came} bytes");
            came += n;
        }
        assert!(received("wlan0") - before.0 > OBJECT_BYTES as u64);
        assert!(received("wwan0") - before.1 < OVERHEAD_BYTES);
        let now = until_async("the status has it", async || {
            let now = status(&scene).await;
            let free = rule(&now, 0)["connections"]["free_bytes"].as_u64();
            (free >= Some(OBJECT_BYTES as u64)).then_some(now)
        })
        .await;
        let download = rule(&now, 0);
        assert_eq!(download["traffic"], "tcp port 80", "{now}");
        assert_eq!(download["policy"], "free-only", "{now}");
        assert_eq!(download["connections"]["total"], 1, "{now}");
        assert_eq!(download["connections"]["metered_bytes"], 0, "{now}");
        let rest = rule(&now, 1);
        assert_eq!(rest["traffic"], Value::Null, "{now}");
        let paid = rest["connections"]["metered_bytes"].as_u64();
        assert!(paid >= Some(200_000), "{now}");
        let (_, said) = scene.vpn("status", &[]).await;
        assert!(said.contains("tcp port 80 = free-only: 1 conn"), "{said}");
        end(&scene, vpn).await;
    });
}

/// A link that comes up has its address, and the system a route over it, before the link is known to lead anywhere.
#[test]
fn a_connection_that_its_rule_keeps_off_metered_networks_uses_no_route_over_one_either() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let scene = Scene::start().await;
        let rules = ["--rule", "tcp port 80 = free-only"];
        let vpn = scene
            .up_over("wlan0=free", &[&COSTS[..], &rules].concat())
            .await;
        let mut call = connect();
        echo(&mut call, b"begun");
        wifi_off();
        sh(&format!(
            "ip link set wwan0 up
             ip addr add 203.0.113.7/24 dev wwan0
             ip route add {PROXY_HOST} via 203.0.113.1 dev wwan0"
        ));
        let before = received("wwan0");
        let mut download = ask_for_object();
        // sleep: that nothing comes for so long is the subject
        tokio::time::sleep(Duration::from_secs(3)).await;
        let leaked = received("wwan0") - before;
        assert!(leaked < OVERHEAD_BYTES, "{leaked}");
        let wait = Some(Duration::from_millis(1));
        download.set_read_timeout(wait).expect("a length of time");
        let read = download.read(&mut [0; 1_000]).expect_err("nothing came");
        assert_eq!(read.kind(), ErrorKind::WouldBlock);
        // Now the link leads somewhere, and is paid for where that is allowed.
        sh("ip route add default via 203.0.113.1 dev wwan0 metric 700");
        echo(&mut call, &[7; 1_000]);
        let read = download.read(&mut [0; 1_000]).expect_err("nothing came");
        assert_eq!(read.kind(), ErrorKind::WouldBlock);
        end(&scene, vpn).await;
    });
}

#[test]
fn packets_use_metered_networks_only_where_their_rule_allows_it() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let scene = Scene::start().await;
        let before = system_network();
        let rules = [
            "--policy",
            "free-only",
            "--rule",
            "udp port 7 = any",
            "--rule",
            "dscp ef = any",
        ];
        let vpn = scene
            .up_over("wlan0=free", &[&COSTS[..], &rules].concat())
            .await;
        let other = udp("198.18.0.2:9");
        only_mobile_data();
        // One that a rule lets pay, by its port.
        ask(&udp("198.18.0.2:7"), b"a call");
        let sent_before = sent("wwan0");
        for _ in 0..300 {
            other.send(&[7; 1_000]).expect("taken by the kernel");
        }
        let now = until_async("they are refused", async || {
            let now = status(&scene).await;
            (rule(&now, 2)["packets"]["refused"].as_u64() >= Some(300)).then_some(now)
        })
        .await;
        assert!(sent("wwan0") - sent_before < OVERHEAD_BYTES, "{now}");
        assert_eq!(rule(&now, 2)["packets"]["metered_bytes"], 0, "{now}");
        assert!(rule(&now, 0)["packets"]["metered_bytes"].as_u64() > Some(0));
        // The same port, marked as a call.
        mark(&other);
        for _ in 0..300 {
            // The server refuses this port.
            let _ = other.send(&[7; 1_000]);
            // Each is asked for in turn, so that none waits for long.
            ask(&udp("198.18.0.2:7"), b"a call");
        }
        assert!(sent("wwan0") - sent_before > 250_000);
        until_async("the status has them", async || {
            let now = status(&scene).await;
            (rule(&now, 1)["packets"]["sent"].as_u64() >= Some(250)).then_some(())
        })
        .await;
        end(&scene, vpn).await;
        wifi_on("198.51.100.7");
        nothing_is_left(&before);
    });
}

#[test]
fn rules_hold_for_connections_and_packets_of_ipv6() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let scene = Scene::start_with("10.83.0.0/16,fd83::/64").await;
        let before = system_network();
        let rules = [
            "--policy",
            "free-only",
            "--rule",
            "udp port 7 = any",
            "--rule",
            "tcp port 7 = any",
        ];
        let vpn = scene
            .up_over("wlan0=free", &[&COSTS[..], &rules].concat())
            .await;
        assert!(vpn.addresses.contains("fd83:"), "{}", vpn.addresses);
        let echo_at = format!("[{SERVER_IPV6}]:7");
        let mut call = TcpStream::connect(&echo_at).expect("connected");
        call.set_read_timeout(Some(PATIENCE)).expect("a time");
        echo(&mut call, b"begun");
        assert_eq!(ask(&udp(&echo_at), b"a call").0, b"a call");
        only_mobile_data();
        ask(&udp(&echo_at), b"a call");
        echo(&mut call, b"goes on");
        // What no rule lets pay: packets are refused, and a connection waits.
        let other = udp(&format!("[{SERVER_IPV6}]:9"));
        let (sent_before, came_before) = (sent("wwan0"), received("wwan0"));
        for _ in 0..300 {
            other.send(&[7; 1_000]).expect("taken by the kernel");
        }
        let mut download = TcpStream::connect((SERVER_IPV6, 80)).expect("connected");
        download
            .write_all(b"GET / HTTP/1.1\r\n\r\n")
            .expect("writable");
        let now = until_async("they are refused", async || {
            let now = status(&scene).await;
            (rule(&now, 2)["packets"]["refused"].as_u64() >= Some(300)).then_some(now)
        })
        .await;
        for _ in 0..20 {
            echo(&mut call, &[7; 1_000]);
        }
        assert!(sent("wwan0") - sent_before < OVERHEAD_BYTES, "{now}");
        assert!(received("wwan0") - came_before < OVERHEAD_BYTES, "{now}");
        let wait = Some(Duration::from_millis(1));
        download.set_read_timeout(wait).expect("a time");
        let read = download.read(&mut [0; 1_000]).expect_err("nothing came");
        assert_eq!(read.kind(), ErrorKind::WouldBlock);
        assert!(rule(&now, 0)["packets"]["metered_bytes"].as_u64() > Some(0));
        wifi_on("198.51.100.7");
        download.set_read_timeout(Some(PATIENCE)).expect("a time");
        download.read_exact(&mut [0; 100_000]).expect("it comes");
        let now = status(&scene).await;
        assert_eq!(rule(&now, 1)["connections"]["total"], 1, "{now}");
        assert_eq!(rule(&now, 2)["connections"]["metered_bytes"], 0, "{now}");
        drop((call, download));
        end(&scene, vpn).await;
        nothing_is_left(&before);
    });
}

/// A VPN over mobile data alone, beside a call, while a server sends 4 Mb/s that nothing asks for any more.
async fn streamed_to_over_mobile_data(rules: &[&str]) -> (Scene, Vpn, UdpSocket) {
    let scene = Scene::start().await;
    let vpn = scene
        .up_over("wlan0=free", &[&COSTS[..], rules].concat())
        .await;
    let camera = udp(&format!("{SERVER}:{STREAM_PORT}"));
    until_async("it streams", async || {
        camera.send(b"begin").expect("taken by the kernel");
        camera.recv(&mut [0; 1_000]).ok()
    })
    .await;
    only_mobile_data();
    ask(&udp(&format!("{SERVER}:7")), b"a call");
    (scene, vpn, camera)
}

#[test]
fn what_is_sent_to_the_device_unasked_uses_no_metered_network() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let rules = ["--policy", "free-only", "--rule", "udp port 7 = any"];
        let (scene, vpn, _camera) = streamed_to_over_mobile_data(&rules).await;
        let before = received("wwan0");
        // sleep: what the stream would send meanwhile is the subject
        tokio::time::sleep(Duration::from_secs(3)).await;
        ask(&udp(&format!("{SERVER}:7")), b"a call");
        let came = received("wwan0") - before;
        assert!(came < OVERHEAD_BYTES, "{came}");
        end(&scene, vpn).await;
    });
}

#[test]
fn without_rules_what_is_sent_to_the_device_uses_the_network_that_is_up() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let (scene, vpn, _camera) = streamed_to_over_mobile_data(&[]).await;
        let before = received("wwan0");
        until_async("the stream comes", async || {
            (received("wwan0") - before > 2 * OVERHEAD_BYTES).then_some(())
        })
        .await;
        end(&scene, vpn).await;
    });
}

fn mark(socket: &impl AsFd) {
    setsockopt(socket, sockopt::Ipv4Tos, &EXPEDITED).expect("a code point");
}

/// Mobile data was not up at the beginning.
fn nothing_is_left(before: &str) {
    sh("ip addr flush dev wwan0; ip link set wwan0 down");
    assert_eq!(system_network(), before);
}

#[test]
fn a_connection_marked_as_a_call_has_the_policy_of_its_code_point() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let scene = Scene::start().await;
        let rules = ["--policy", "free-only", "--rule", "dscp ef = any"];
        let vpn = scene
            .up_over("wlan0=free", &[&COSTS[..], &rules].concat())
            .await;
        only_mobile_data();
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        mark(&socket);
        let call = socket.connect(format!("{SERVER}:7").parse().expect("an address"));
        let call = call.await.expect("connected").into_std().expect("its own");
        call.set_nonblocking(false).expect("blocking");
        let mut call = call;
        call.set_read_timeout(Some(PATIENCE))
            .expect("a length of time");
        let mut other = ask_for_object();
        let before = received("wwan0");
        for _ in 0..50 {
            echo(&mut call, &[7; 1_000]);
        }
        let mobile = received("wwan0") - before;
        assert!(mobile > 50_000, "{mobile}: the call went another way");
        assert!(mobile < 50_000 + OVERHEAD_BYTES, "{mobile}");
        wifi_on("198.51.100.7");
        other
            .set_read_timeout(Some(PATIENCE))
            .expect("a length of time");
        other.read_exact(&mut [0; 1_000]).expect("it comes");
        drop((call, other));
        end(&scene, vpn).await;
    });
}

#[tokio::test]
async fn a_bad_rule_is_an_error_of_usage_that_names_the_word_that_was_meant() {
    let home = tempfile::tempdir().expect("a directory");
    let bad = ["vpn", "up", "--rule", "prot 443 = free-only"];
    let ended = run(home.path(), &bad).await;
    assert_eq!(ended.code, 2, "{}", ended.errors);
    assert!(
        ended.errors.contains("do you mean `port`?"),
        "{}",
        ended.errors
    );
    let directory = home.path().join(".config/cedos");
    std::fs::create_dir_all(&directory).expect("a directory");
    let settings = "[vpn]\nrules = [\"port 443 = free-only\", \"dcsp ef = any\"]\n";
    std::fs::write(directory.join("config.toml"), settings).expect("written");
    let ended = run(home.path(), &["vpn", "up"]).await;
    assert_eq!(ended.code, 2, "{}", ended.errors);
    assert!(
        ended.errors.contains("do you mean `dscp`?"),
        "{}",
        ended.errors
    );
}
