//! Tests with the real NetworkManager in its own namespace. They pass with a message if it is not
//! installed, or a namespace is not permitted.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use cedos_lab_rig::namespace::{LINKS_AND_MOUNTS, in_namespace_with};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::{until_async, within};
use d2tp_links::{CostClass, CostResolver, LinkMonitor, Metered, NetworkManager};

const DAEMON: &str = "NetworkManager";

/// Every client may do everything, because there are no others on the bus.
const BUS: &str = r#"<busconfig><type>system</type><listen>unix:tmpdir=/run</listen>
<auth>EXTERNAL</auth><policy context="default"><allow send_destination="*" eavesdrop="true"/>
<allow eavesdrop="true"/><allow own="*"/><allow user="*"/></policy></busconfig>"#;

const SETTINGS: &str = "[main]\nplugins=keyfile\nauth-polkit=false\nrc-manager=unmanaged\n\
                        [keyfile]\npath=/run/connections\n";

/// A wired connection that the user marked as metered.
const METERED: &str = "[connection]\nid=cable\ntype=ethernet\ninterface-name=eth9\nmetered=1\n\
                       [ipv4]\nmethod=manual\naddress1=192.0.2.9/24,192.0.2.1\n\
                       [ipv6]\nmethod=disabled\n";

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

#[test]
fn what_the_real_one_says_of_a_metered_cable_decides() {
    let there = Command::new(DAEMON).arg("--version").output();
    if !there.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: NetworkManager is not installed");
        return;
    }
    in_namespace_with(LINKS_AND_MOUNTS, this_test!(), inside);
}

async fn inside() {
    for directory in ["/run", "/var/lib/NetworkManager"] {
        if Path::new(directory).exists() {
            run("mount", &format!("-t tmpfs t {directory}"));
        }
    }
    // It waits for udev to name devices, but not if /sys is read-only.
    run("mount", "-t sysfs -o ro s /sys");
    std::fs::create_dir_all("/run/connections").expect("a folder");
    write("/run/bus.conf", BUS);
    write("/run/nm.conf", SETTINGS);
    write("/run/connections/cable.nmconnection", METERED);
    run("ip", "link set lo up");
    run("ip", "link add eth9 type veth peer name far9");
    run("ip", "link set far9 up");
    let mut bus = Command::new("dbus-daemon")
        .args([
            "--config-file=/run/bus.conf",
            "--nofork",
            "--print-address=1",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it comes with NetworkManager");
    let mut address = String::new();
    let stdout = bus.stdout.take().expect("it was piped");
    let _bus = Process(bus);
    BufReader::new(stdout)
        .read_line(&mut address)
        .expect("an address");
    let manager = Command::new(DAEMON)
        .args([
            "--no-daemon",
            "--config=/run/nm.conf",
            "--config-dir=/run/none",
        ])
        .args(["--state-file=/run/state", "--log-level=WARN"])
        .env("DBUS_SYSTEM_BUS_ADDRESS", address.trim())
        .spawn()
        .expect("it was there a moment ago");
    let _manager = Process(manager);
    within(judged(address.trim())).await;
}

/// Waits until the wired link is up, and metered as NetworkManager reports.
async fn judged(address: &str) {
    let manager = until_async("NetworkManager is on the bus", async || {
        let bus = zbus::connection::Builder::address(address).build().await;
        NetworkManager::on(bus.expect("a bus")).await.ok()
    })
    .await;
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
