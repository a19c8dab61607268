//! A client that sends what it may not, by its own program.

use std::fs::File;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cedos_agent::proxy::{
    ConnOptions, MeteredPackets, PacketTunnel, ProxySession, ProxySessionPeer,
};
use cedos_lab_rig::namespace::{in_namespace_with, sh};
use cedos_lab_rig::program::{ProxyProcess, cedos, device_key, run};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::within;
use d2tp_driver::ServerList;
use d2tp_links::{ClassRules, LinkMonitor};
use d2tp_tunnel::PACKET_CONTEXT;
use nix::sched::{CloneFlags, setns};
use nix::unistd::Pid;

use crate::scene::{Scene, TUNNEL, system_network};

const EXPIRY: Duration = Duration::from_secs(5);

/// A packet of UDP.
fn packet(from: Ipv4Addr, to: &str, port: u16) -> Vec<u8> {
    let to: Ipv4Addr = to.parse().expect("an address");
    let mut bytes = vec![0x45, 0, 0, 33, 0, 0, 0x40, 0, 64, 17, 0, 0];
    bytes.extend(from.octets());
    bytes.extend(to.octets());
    // Without a checksum of UDP, which IPv4 allows.
    bytes.extend([0x9c, 0x40]);
    bytes.extend(port.to_be_bytes());
    bytes.extend([0, 13, 0, 0]);
    bytes.extend(b"hello");
    let sum: u32 = bytes[..20]
        .chunks(2)
        .map(|w| u32::from(w[0]) << 8 | u32::from(w[1]))
        .sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    bytes[10..12].copy_from_slice(&sum.to_be_bytes());
    bytes
}

async fn dropped(reason: &str) -> u64 {
    let output = tokio::process::Command::new("curl")
        .args(["-sS", "http://192.0.2.1:9433/metrics"])
        .output();
    let text = String::from_utf8(output.await.expect("run curl").stdout).expect("text");
    let line = text.lines().find(|line| {
        line.contains("tunnel_packets_dropped") && line.contains(&format!("\"{reason}\""))
    });
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .unwrap_or(0)
}

/// Sends a multicast packet from the proxy's machine to the device of tunnels, as its kernel does by itself.
fn send_multicast(proxy: Pid) {
    let sender = std::thread::spawn(move || {
        let network = File::open(format!("/proc/{proxy}/ns/net")).expect("the proxy runs");
        setns(network, CloneFlags::CLONE_NEWNET).expect("its namespace");
        sh("ip route add 224.0.0.0/4 dev cedos-prox0");
        let socket = UdpSocket::bind("10.83.0.1:0").expect("an address of the device");
        socket.send_to(b"own", "224.0.0.251:5353").expect("sent");
    });
    sender.join().expect("it ends");
}

async fn answer(tunnel: &mut PacketTunnel) -> Bytes {
    let mut packets = Vec::new();
    assert!(within(tunnel.recv_all(&mut packets)).await);
    packets.remove(0)
}

#[test]
fn spoofed_sources_fragments_multicast_and_other_clients_are_dropped_and_counted() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let scene = Scene::start().await;
        let key = cedos_agent::key::read(&scene.home.path().join(".config/cedos/key"));
        let key = key.expect("the device's key");
        let servers: ServerList = scene.address.parse().expect("an address");
        let (_, monitor) = LinkMonitor::start(ClassRules::default())
            .await
            .expect("links");
        let links = monitor.subscribe();
        let session = ProxySession::new(ProxySessionPeer::Prox, servers, key, links, |_| {});
        let opening =
            session.open_packet_tunnel(PACKET_CONTEXT, ConnOptions::default(), MeteredPackets::All);
        let opened: Result<PacketTunnel, _> = within(opening).await;
        let mut tunnel = opened.unwrap_or_else(|refusal| panic!("{}", refusal.text));
        let std::net::IpAddr::V4(own) = tunnel.addresses[0] else {
            panic!("{:?}", tunnel.addresses);
        };
        let other = Ipv4Addr::from(u32::from(own) ^ 1);
        let mut fragment = packet(own, "198.18.0.2", 7);
        fragment[6] = 0x20;
        for (bad, reason) in [
            (packet(other, "198.18.0.2", 7), "spoofed_source"),
            (packet(own, &other.to_string(), 7), "other_client"),
            (packet(own, "10.83.0.1", 22), "other_client"),
            (packet(own, "224.0.0.251", 5353), "multicast"),
            (packet(own, "169.254.169.254", 80), "address_refused"),
            (packet(own, "198.18.0.2", 25), "port_refused"),
            (fragment, "fragment"),
            (vec![0x45; 19], "malformed"),
            (vec![0xff; 700], "malformed"),
        ] {
            let before = dropped(reason).await;
            if reason == "multicast" {
                // It is no client's.
                send_multicast(scene.proxy);
            }
            let good = packet(own, "198.18.0.2", 7);
            let both = [bad, good].map(Bytes::from);
            tunnel
                .connection
                .send_datagrams(PACKET_CONTEXT, both, EXPIRY)
                .expect("a session");
            // The good one behind it is answered.
            assert!(answer(&mut tunnel).await.ends_with(b"hello"), "{reason}");
            assert_eq!(dropped(reason).await, before + 1, "{reason}");
        }
        session.close().await;
    });
}

#[test]
fn a_device_that_is_not_admitted_is_told_so_within_seconds_and_keeps_its_network() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        sh("mount -t tmpfs t /run
            echo nameserver 198.18.0.2 > /run/resolv.conf
            mount --bind /run/resolv.conf /etc/resolv.conf
            ip link set lo up");
        let home = tempfile::tempdir().expect("a directory");
        let device = device_key(home.path()).await;
        let _ = run(home.path(), &["key", "gen", "-o", "prox.key"]).await;
        let log = File::create(home.path().join("log")).expect("created");
        let nobody = "A".repeat(43);
        let listen = ["prox", "--listen", "127.0.0.1:0", "--key", "prox.key"];
        let mut command = cedos(
            home.path(),
            &[&listen[..], &["--allow-client", &nobody]].concat(),
        );
        command.stderr(log);
        let proxy = ProxyProcess::spawned(&mut command).await;
        let proxy = proxy.expect("it starts");
        let (before, began) = (system_network(), Instant::now());
        for more in [&[][..], &["--tcp", "packets"]] {
            let up = ["vpn", "up", "--prox", &*proxy.address, "--state-dir", "vpn"];
            let ended = run(home.path(), &[&up[..], more].concat()).await;
            assert_eq!(ended.code, 1, "{ended:?}");
            let advice = format!(
                "does not let this device in; its operator invites it (`cedos prox invite`), or adds \
                 --allow-client {device}\n"
            );
            assert!(ended.errors.ends_with(&advice), "{ended:?}");
            assert_eq!(ended.errors.lines().count(), 1, "{ended:?}");
        }
        let took = began.elapsed();
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert_eq!(system_network(), before);
        let log = std::fs::read_to_string(home.path().join("log")).expect("text");
        let line = format!("--allow-client {device}");
        assert!(
            log.lines()
                .any(|l| l.contains("not admitted") && l.contains(&line)),
            "{log}"
        );
    });
}
