//! Tests with the real NetworkManager, systemd-networkd, dnsmasq and GeoClue in namespaces of their own. They pass with a message
//! if one is not installed, or a namespace is not permitted.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cedos_lab_rig::namespace::{LINKS_AND_MOUNTS, in_namespace_with};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::{until_async, within};
use d2tp_links::{CostClass, CostResolver, GeoClue, LinkMonitor, Metered, NetworkManager};
use futures_util::StreamExt;

const NETWORKD: &str = "/lib/systemd/systemd-networkd";
/// What the network's DHCP says in option 224.
const PROXY: &str = "d2tp://192.0.2.1:4433/KEY";

/// Every client may do everything, because there are no others on the bus.
const BUS: &str = r#"<busconfig><type>system</type><listen>unix:tmpdir=/run</listen>
<auth>EXTERNAL</auth><policy context="default"><allow send_destination="*" eavesdrop="true"/>
<allow eavesdrop="true"/><allow own="*"/><allow user="*"/></policy></busconfig>"#;

const SETTINGS: &str = "[main]\nplugins=keyfile\nauth-polkit=false\nrc-manager=unmanaged\ndhcp=internal\n\
                        [keyfile]\npath=/run/connections\n";

/// A wired connection that the user marked as metered.
const METERED: &str = "[connection]\nid=cable\ntype=ethernet\ninterface-name=eth9\nmetered=1\n\
                       [ipv4]\nmethod=manual\naddress1=192.0.2.9/24,192.0.2.1\n\
                       [ipv6]\nmethod=disabled\n";

/// A wired connection as most are.
const BY_DHCP: &str = "[connection]\nid=cable\ntype=ethernet\ninterface-name=eth9\n\
                       [ipv4]\nmethod=auto\n[ipv6]\nmethod=disabled\n";

/// A wired connection of systemd-networkd, which asks for the option.
const BY_DHCP_OF_NETWORKD: &str =
    "[Match]\nName=eth9\n[Network]\nDHCP=ipv4\n[DHCPv4]\nRequestOptions=224\n";

const GEOCLUE: &str = "/usr/libexec/geoclue";

/// GeoClue listens to a receiver alone, and to the agent of a desktop that is called `test`.
const GEOCLUE_SETTINGS: &str = "[agent]\nwhitelist=test\n\
                                [network-nmea]\nenable=true\nnmea-socket=/run/nmea.sock\n\
                                [3g]\nenable=false\n[cdma]\nenable=false\n[modem-gps]\nenable=false\n\
                                [wifi]\nenable=false\n[cedos]\nallowed=true\nsystem=false\nusers=\n";

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(program: &str, arguments: &str) {
    let status = Command::new(program).args(arguments.split(' ')).status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "{program} {arguments}"
    );
}

fn write(path: &str, text: &str) {
    std::fs::write(path, text).expect(path);
    // It refuses connection files that others could read.
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).expect(path);
}

/// Whether all programs are installed; prints a message if not.
fn are_there(programs: &[&str]) -> bool {
    let is_there = |program: &&&str| {
        let output = Command::new(program).arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    };
    let missing = programs.iter().find(|program| !is_there(program));
    if let Some(program) = missing {
        eprintln!("skipped: {program} is not installed");
    }
    missing.is_none()
}

/// Prepares the namespace: a cable to another namespace `far`, where nothing runs yet.
fn cable() {
    for directory in ["/run", "/var/lib/NetworkManager"] {
        if Path::new(directory).exists() {
            run("mount", &format!("-t tmpfs t {directory}"));
        }
    }
    // The daemons wait for udev to name devices, but not if /sys is read-only.
    run("mount", "-t sysfs -o ro s /sys");
    run("ip", "netns add far");
    run("ip", "link set lo up");
    run("ip", "link add eth9 type veth peer name far9 netns far");
    run("ip", "-n far addr add 192.0.2.1/24 dev far9");
    run("ip", "-n far link set far9 up");
}

/// The DHCP server at the far end of the cable. `forced`: it tells the option to who does not ask for it, too.
fn dhcp_server(forced: bool) -> Process {
    let kind = match forced {
        true => "dhcp-option-force",
        false => "dhcp-option",
    };
    let option = format!("--{kind}=224,{PROXY}");
    // As a daemon it would become a user that this namespace does not have.
    let server = Command::new("ip")
        .args(["netns", "exec", "far", "dnsmasq"])
        .args([
            "--no-daemon",
            "--user=root",
            "--conf-file=/dev/null",
            "--port=0",
        ])
        .args(["--interface=far9", "--bind-interfaces"])
        .args(["--dhcp-range=192.0.2.10,192.0.2.20,255.255.255.0,2m"])
        .args(["--dhcp-leasefile=/run/dnsmasq.leases", &option])
        .spawn();
    Process(server.expect("start dnsmasq"))
}

/// A system bus. Returns its address, too.
fn system_bus() -> (Process, String) {
    write("/run/bus.conf", BUS);
    let mut bus = Command::new("dbus-daemon")
        .args([
            "--config-file=/run/bus.conf",
            "--nofork",
            "--print-address=1",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it comes with the daemons");
    let mut address = String::new();
    let stdout = bus.stdout.take().expect("it was piped");
    let bus = Process(bus);
    BufReader::new(stdout)
        .read_line(&mut address)
        .expect("an address");
    (bus, address.trim().to_owned())
}

/// A bus with NetworkManager on it, which has this connection. Returns the bus's address, too.
fn network_manager(connection: &str) -> ([Process; 2], String) {
    std::fs::create_dir_all("/run/connections").expect("a folder");
    write("/run/nm.conf", SETTINGS);
    write("/run/connections/cable.nmconnection", connection);
    let (bus, address) = system_bus();
    let manager = Command::new("NetworkManager")
        .args([
            "--no-daemon",
            "--config=/run/nm.conf",
            "--config-dir=/run/none",
        ])
        .args(["--state-file=/run/state", "--log-level=WARN"])
        .env("DBUS_SYSTEM_BUS_ADDRESS", &address)
        .spawn()
        .expect("it was there a moment ago");
    ([bus, Process(manager)], address)
}

/// NetworkManager as clients of the bus see it, once it is there.
async fn on_bus(address: &str) -> NetworkManager {
    until_async("NetworkManager is on the bus", async || {
        let bus = zbus::connection::Builder::address(address).build().await;
        NetworkManager::on(bus.expect("a bus")).await.ok()
    })
    .await
}

/// Waits until the cable's network has named its proxy.
async fn names_proxy(manager: Option<NetworkManager>) {
    let (_, mut monitor) = LinkMonitor::start_with(CostResolver::default(), manager)
        .await
        .expect("links");
    let is_named = |monitor: &LinkMonitor| {
        let links = monitor.links();
        let mut links = links.iter();
        links.any(|link| link.name == "eth9" && link.dhcp_proxy.as_deref() == Some(PROXY))
    };
    while !is_named(&monitor) {
        monitor.next().await.expect("it watches");
    }
}

#[test]
fn what_the_real_one_says_of_a_metered_cable_decides() {
    if are_there(&["NetworkManager"]) {
        in_namespace_with(LINKS_AND_MOUNTS, this_test!(), async || {
            cable();
            let (_daemons, address) = network_manager(METERED);
            within(judged(&address)).await;
        });
    }
}

#[test]
fn a_proxy_in_the_dhcp_lease_of_the_real_network_manager_is_found() {
    if are_there(&["NetworkManager", "dnsmasq"]) {
        in_namespace_with(LINKS_AND_MOUNTS, this_test!(), async || {
            cable();
            // It does not ask for the option.
            let _server = dhcp_server(true);
            let (_daemons, address) = network_manager(BY_DHCP);
            within(async { names_proxy(Some(on_bus(&address).await)).await }).await;
        });
    }
}

#[test]
fn a_proxy_in_the_dhcp_lease_of_the_real_networkd_is_found() {
    if are_there(&[NETWORKD, "dnsmasq"]) {
        in_namespace_with(LINKS_AND_MOUNTS, this_test!(), async || {
            cable();
            let _server = dhcp_server(false);
            for folder in ["netif/leases", "netif/links", "netif/lldp", "network"] {
                let folder = Path::new("/run/systemd").join(folder);
                std::fs::create_dir_all(folder).expect("a folder");
            }
            write("/run/systemd/network/eth9.network", BY_DHCP_OF_NETWORKD);
            // It becomes a user that this namespace does not have: here, the user that runs it.
            let own = std::fs::read_to_string("/etc/passwd").expect("users");
            let lines = own
                .lines()
                .map(|line| match line.starts_with("systemd-network:") {
                    true => "systemd-network:x:0:0::/:/usr/sbin/nologin\n".to_owned(),
                    false => format!("{line}\n"),
                });
            write("/run/passwd", &lines.collect::<String>());
            run("mount", "--bind /run/passwd /etc/passwd");
            let networkd = Command::new(NETWORKD)
                .env("SYSTEMD_LOG_LEVEL", "warning")
                .spawn()
                .expect("it was there a moment ago");
            let _networkd = Process(networkd);
            within(names_proxy(None)).await;
        });
    }
}

/// Waits until the wired link is up, and metered as NetworkManager reports.
async fn judged(address: &str) {
    let manager = on_bus(address).await;
    let mut known = manager.clone();
    let (_, mut monitor) = LinkMonitor::start_with(CostResolver::default(), Some(manager))
        .await
        .expect("links");
    loop {
        let links = monitor.links();
        let cable = links
            .iter()
            .find(|link| link.name == "eth9")
            .expect("the cable");
        if cable.is_usable() && cable.class.class == CostClass::Metered {
            assert!(
                cable.class.because.contains("settings say metered"),
                "{cable:?}"
            );
            break;
        }
        monitor.next().await.expect("it watches");
    }
    while known.networks().of("eth9").map(|network| network.metered) != Some(Metered::Yes) {
        known.changed().await;
    }
}

/// A satellite receiver that has come to this latitude, as NMEA 0183 gives it.
struct Receiver(Arc<Mutex<&'static str>>);

impl Receiver {
    fn start(latitude: &'static str) -> Receiver {
        let latitude = Arc::new(Mutex::new(latitude));
        let listener = UnixListener::bind("/run/nmea.sock").expect("a socket");
        let told = latitude.clone();
        std::thread::spawn(move || {
            for (second, mut client) in listener.incoming().flatten().enumerate() {
                for tenth in 0.. {
                    let at = *told.lock().unwrap();
                    let body = format!(
                        "GPGGA,12{second:02}{:02}.00,{at},N,01324.000,E,1,08,0.9,34.0,M,46.9,M,,",
                        tenth / 10 % 60
                    );
                    let sum = body.bytes().fold(0, |sum, byte| sum ^ byte);
                    if write!(client, "${body}*{sum:02X}\r\n").is_err() {
                        break;
                    }
                    // sleep: a receiver sends by its clock
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        });
        Receiver(latitude)
    }
}

/// Answers for the desktop: programs may know where the machine is.
async fn allow(desktop: zbus::Connection) {
    let mut asked = zbus::MessageStream::from(&desktop);
    while let Some(Ok(message)) = asked.next().await {
        let header = message.header();
        if header.message_type() != zbus::message::Type::MethodCall {
            continue;
        }
        let level = || zbus::Variant::from(8u32);
        let answer = match header.member().map(|member| member.as_str()) {
            Some("AuthorizeApp") => desktop.reply(&header, &(true, 8u32)).await,
            Some("Get") => desktop.reply(&header, &level()).await,
            _ => {
                let all = HashMap::from([("MaxAccuracyLevel", level())]);
                desktop.reply(&header, &all).await
            }
        };
        answer.expect("the bus runs");
    }
}

#[test]
fn positions_of_the_real_geoclue_follow_the_machine() {
    // It has no option that would only tell its version.
    if !Path::new(GEOCLUE).exists() {
        return eprintln!("skipped: GeoClue is not installed");
    }
    in_namespace_with(LINKS_AND_MOUNTS, this_test!(), async || {
        for folder in ["/run", "/etc/geoclue"] {
            run("mount", &format!("-t tmpfs t {folder}"));
        }
        write("/etc/geoclue/geoclue.conf", GEOCLUE_SETTINGS);
        let receiver = Receiver::start("5230.000");
        let (_bus, address) = system_bus();
        let geoclue = Command::new(GEOCLUE)
            .env("DBUS_SYSTEM_BUS_ADDRESS", &address)
            .spawn();
        let _geoclue = Process(geoclue.expect("it was there a moment ago"));
        let connect = async || {
            let bus = zbus::connection::Builder::address(&*address).build().await;
            bus.expect("a bus")
        };
        let desktop = connect().await;
        tokio::spawn(allow(desktop.clone()));
        until_async("GeoClue knows the desktop", async || {
            let manager = "/org/freedesktop/GeoClue2/Manager";
            let name = "org.freedesktop.GeoClue2";
            let interface = "org.freedesktop.GeoClue2.Manager";
            let manager = zbus::Proxy::new(&desktop, name, manager, interface)
                .await
                .expect("a proxy");
            manager.call::<_, _, ()>("AddAgent", &("test",)).await.ok()
        })
        .await;
        let mut geoclue = within(GeoClue::on(connect().await)).await.expect("allowed");
        let mut is_at = async |latitude: f64| loop {
            let position = within(geoclue.next()).await.expect("it runs");
            let is_near = (position.latitude - latitude).abs() < 1e-4;
            if is_near && (position.longitude - 13.4).abs() < 1e-4 {
                assert!(position.accuracy_m <= 100.0, "{position:?}");
                return;
            }
        };
        is_at(52.5).await;
        *receiver.0.lock().unwrap() = "5231.200";
        is_at(52.52).await;
    });
}
