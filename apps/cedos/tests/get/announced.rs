//! Proxies that the local network names: announced by multicast, or in an option of DHCP. The device knows the proxy by an
//! address that does not answer here. Real links in a network namespace; proxy and agent are in their sandboxes.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use cedos_lab_rig::namespace::{NamespaceNeeds, in_namespace_with, origin_namespace, sh};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::program::{AgentProcess, ProxyProcess, cedos, ended, pid_of, run};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::{until, until_async};
use nix::sys::signal::{Signal, kill};
use socket2::{Domain, Socket, Type};
use tokio::net::UdpSocket;

const OBJECT_BYTES: usize = 4_000_000; // 1.6 s at 20 Mb/s
/// The proxy's address on the local network.
const HERE: &str = "192.168.1.5";
/// An address at which nobody answers.
const ELSEWHERE: &str = "192.0.2.200";
const GROUP: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 251);

const LINKS_OF_OWN: NamespaceNeeds = NamespaceNeeds::new(
    "-Urnm",
    "ip link add a0 type veth peer name a1
     tc qdisc add dev a0 root tbf rate 1mbit burst 10k latency 50ms
     mount -t tmpfs t /run",
);

/// A local network with a proxy and an origin.
struct Network {
    url: String,
    proxy: ProxyProcess,
    /// What hosts of the network hear of multicast DNS.
    heard: Arc<Mutex<Vec<Vec<u8>>>>,
    /// A responder for multicast DNS.
    responder: Option<Child>,
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(responder) = &mut self.responder {
            let _ = responder.kill();
            let _ = responder.wait();
        }
    }
}

impl Network {
    fn new(home: &Path, more: &'static [&'static str]) -> Network {
        Network::with_responder(home, more, None)
    }

    /// A local network with one more process, which gets the proxy's address.
    fn with_responder(
        home: &Path,
        more: &'static [&'static str],
        responder: Option<fn(&str) -> Child>,
    ) -> Network {
        let home = home.to_owned();
        let network = origin_namespace(move || served(home, more, responder));
        sh(&format!(
            "ip link set wlan0 up
             ip addr add 192.168.1.7/24 dev wlan0
             ip route add default via {HERE} dev wlan0"
        ));
        network
    }

    fn port(&self) -> u16 {
        let listening: Option<SocketAddr> = self.proxy.listens_at().parse().ok();
        listening.expect("an address").port()
    }

    /// The address by which the device knows the proxy.
    fn known(&self) -> String {
        let key = self.proxy.address.rsplit('/').next().expect("a key");
        format!("d2tp://{ELSEWHERE}:{}/{key}", self.port())
    }

    /// How the device names the proxy and why, where it uses it.
    fn named(&self, why: &str) -> String {
        format!("{HERE}:{} ({why})", self.port())
    }

    /// The messages of multicast DNS that were questions, or were not.
    fn heard(&self, questions: bool) -> Vec<Vec<u8>> {
        let heard = self.heard.lock().unwrap();
        let is_wanted = |message: &&Vec<u8>| (message[2] & 0x80 == 0) == questions;
        heard.iter().filter(is_wanted).cloned().collect()
    }
}

async fn served(home: PathBuf, more: &[&str], responder: Option<fn(&str) -> Child>) -> Network {
    sh(&format!("ip addr add {HERE}/24 dev ap0"));
    let heard = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    listen(heard.clone());
    let bytes = object(OBJECT_BYTES, 1);
    let origin = ScriptedOrigin::start_at("192.0.2.1", move |asked| {
        OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
    })
    .await;
    let more = [&["--public-host", HERE], more].concat();
    let proxy = ProxyProcess::start(&home, "0.0.0.0:0", &more).await;
    Network {
        url: origin.url("/object"),
        responder: responder.map(|start| start(&proxy.address)),
        proxy,
        heard,
    }
}

/// Listens to the group on the calling thread's network.
fn listen(heard: Arc<Mutex<Vec<Vec<u8>>>>) {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).expect("a socket");
    socket.set_reuse_address(true).expect("an option");
    socket.set_nonblocking(true).expect("an option");
    let at = SocketAddr::from((GROUP, 5353));
    socket.bind(&at.into()).expect("the group's address");
    let here = HERE.parse().expect("an address");
    socket.join_multicast_v4(&GROUP, &here).expect("the group");
    let socket = UdpSocket::from_std(socket.into()).expect("a runtime");
    tokio::spawn(async move {
        let mut bytes = [0; 9_000];
        while let Ok(len) = socket.recv(&mut bytes).await {
            heard.lock().unwrap().push(bytes[..len].to_vec());
        }
    });
}

/// Runs the body in a namespace, with a directory.
fn on_a_network<F: Future<Output = ()>>(test: String, body: impl FnOnce(tempfile::TempDir) -> F) {
    in_namespace_with(LINKS_OF_OWN, test, || {
        sh("ip link set lo up; mount -t tmpfs t /run");
        body(tempfile::tempdir().expect("a directory"))
    });
}

#[test]
fn a_proxy_that_announces_itself_is_used_where_its_known_address_does_not_answer() {
    on_a_network(this_test!(), |home| async move {
        let mut network = Network::new(home.path(), &["--announce"]);
        let known = network.known();
        let get = ["get", "--json", "-o", "out", &network.url, "--prox", &known];
        let got = run(home.path(), &get).await;
        got.ends_with(0, &network.named("announced on this network"));
        let bytes = std::fs::read(home.path().join("out")).expect("the file");
        assert!(bytes == object(OBJECT_BYTES, 1), "other bytes");
        assert!(!network.heard(true).is_empty());
        // Hosts are told when it ends: the time to live of its records is zero.
        let gone = [0, 12, 0, 1, 0, 0, 0, 0];
        let is_taken_back = |message: &Vec<u8>| {
            let records = message.windows(gone.len());
            records.into_iter().any(|record| record == gone)
        };
        assert!(!network.heard(false).iter().any(is_taken_back));
        kill(pid_of(&network.proxy.child), Signal::SIGTERM).expect("send");
        until("the announcement is taken back", || {
            network.heard(false).iter().any(is_taken_back)
        })
        .await;
        network.proxy.child.wait().await.expect("it ends");
    });
}

#[test]
fn an_agent_says_that_its_proxy_is_announced_on_this_network() {
    on_a_network(this_test!(), |home| async move {
        let network = Network::new(home.path(), &["--announce"]);
        let agent = AgentProcess::start(home.path()).await;
        let ask = async |arguments: &[&str]| {
            let mut command = cedos(home.path(), arguments);
            command.env("CEDOS_AGENT", &agent.socket);
            ended(command.spawn().expect("start cedos")).await
        };
        let known = network.known();
        let get = ["get", "--detach", "--json", "-o", "out"];
        let more = [&*network.url, "--prox", &known, "--limit-rate", "200k"];
        let left = ask(&[&get[..], &more].concat()).await;
        left.ends_with(0, "id");
        let id = left.last()["id"].to_string();
        let named = network.named("announced on this network");
        until_async("`cedos why` names the address", async || {
            let why = ask(&["why", &id]).await;
            let text = String::from_utf8(why.output).expect("text");
            text.contains(&named).then_some(())
        })
        .await;
        let net = ask(&["net"]).await;
        net.ends_with(0, &format!(", proxy at {named}"));
        let net = ask(&["net", "--json"]).await;
        let links = net.events.iter();
        let mut hints = links.flat_map(|link| link["proxy_hints"].as_array().into_iter().flatten());
        let hint = hints.next().expect("a hint");
        assert_eq!(hint["holds_key"], true, "{hint}");
        assert_eq!(hint["source"], "announced", "{hint}");
    });
}

/// Avahi's configuration: of this namespace alone, and without a bus.
const AVAHI: &str = "[server]\nenable-dbus=no\nuse-ipv6=no\nallow-interfaces=ap0\n";

/// Starts the real Avahi on the calling thread's network, with a record of the proxy at this address.
fn avahi(proxy: &str) -> Child {
    let address = proxy.strip_prefix("d2tp://").expect("an address");
    let (at, key) = address.split_once('/').expect("a key");
    let (_, port) = at.rsplit_once(':').expect("a port");
    // It becomes a user that this namespace does not have: here, the user that runs it.
    sh("for file in passwd group; do
          sed 's/^avahi:x:[0-9]*:[0-9]*:/avahi:x:0:0:/; s/^avahi:x:[0-9]*:/avahi:x:0:/' /etc/$file > /run/$file
          mount --bind /run/$file /etc/$file
        done
        mount -t tmpfs t /etc/avahi
        mkdir /etc/avahi/services");
    let record = format!(
        "<service-group><name>d2tp</name><service><type>_d2tp._udp</type><port>{port}</port>\
         <txt-record>key={key}</txt-record></service></service-group>"
    );
    std::fs::write("/etc/avahi/services/d2tp.service", record).expect("written");
    std::fs::write("/run/avahi.conf", AVAHI).expect("written");
    Command::new("avahi-daemon")
        .args([
            "-f",
            "/run/avahi.conf",
            "--no-drop-root",
            "--no-chroot",
            "--no-rlimits",
        ])
        .spawn()
        .expect("it was there a moment ago")
}

#[test]
fn a_proxy_that_the_real_avahi_announces_is_used_where_its_known_address_does_not_answer() {
    let there = Command::new("avahi-daemon").arg("--version").output();
    if !there.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: Avahi is not installed");
        return;
    }
    on_a_network(this_test!(), |home| async move {
        let network = Network::with_responder(home.path(), &[], Some(avahi));
        let known = network.known();
        // Avahi answers once it has probed for its names.
        until("Avahi has announced the proxy", || {
            !network.heard(false).is_empty()
        })
        .await;
        let get = ["get", "--json", "-o", "out", &network.url, "--prox", &known];
        let got = run(home.path(), &get).await;
        got.ends_with(0, &network.named("announced on this network"));
    });
}

#[test]
fn a_proxy_that_dhcp_names_is_used_where_its_known_address_does_not_answer() {
    on_a_network(this_test!(), |home| async move {
        let network = Network::new(home.path(), &[]);
        let key = network.proxy.address.rsplit('/').next().expect("a key");
        let option = format!("d2tp://{HERE}:{}/{key}", network.port());
        let index = nix::net::if_::if_nametoindex("wlan0").expect("an interface");
        let leases = Path::new("/run/systemd/netif/leases");
        std::fs::create_dir_all(leases).expect("a directory");
        let lease = format!("OPTION_224={}\n", hex::encode(option));
        std::fs::write(leases.join(index.to_string()), lease).expect("written");
        let known = network.known();
        let get = ["get", "--json", "-o", "out", &network.url, "--prox", &known];
        let got = run(home.path(), &get).await;
        got.ends_with(0, &network.named("named by this network's DHCP"));
    });
}

#[test]
fn networks_are_not_asked_where_they_cost_money_or_the_settings_say_no() {
    on_a_network(this_test!(), |home| async move {
        let network = Network::new(home.path(), &["--announce"]);
        let address = network.proxy.address.clone();
        let settings = home.path().join(".config/cedos");
        std::fs::create_dir_all(&settings).expect("a directory");
        let settings = settings.join("config.toml");
        let get = [
            "get",
            "--json",
            "-o",
            "out",
            &network.url,
            "--prox",
            &address,
        ];
        let metered = ["--link", "wlan0=metered", "--policy", "any"];
        let got = run(home.path(), &[&get[..], &metered].concat()).await;
        got.ends_with(0, "wlan0");
        std::fs::write(&settings, "[proxy]\ndiscover = false\n").expect("written");
        run(home.path(), &get).await.ends_with(0, "wlan0");
        // The proxy's own probes for its name are questions, too.
        let is_devices = |message: &Vec<u8>| message[6..12] == [0; 6];
        let count = || network.heard(true).iter().filter(|m| is_devices(m)).count();
        assert_eq!(count(), 0);
        std::fs::remove_file(&settings).expect("removed");
        run(home.path(), &get).await.ends_with(0, "wlan0");
        until("a free network is asked", || count() > 0).await;
    });
}
