//! The real NetworkManager in a namespace of its own. Passes, saying so, where it is not installed or a
//! namespace is not allowed.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use d2tp_links::{CostClass, CostResolver, LinkMonitor, Metered, NetworkManager};

const INSIDE: &str = "CEDOS_TEST_INSIDE_NAMESPACE";
const DAEMON: &str = "NetworkManager";

/// An upper bound for what is certain to come.
const PATIENCE: Duration = Duration::from_secs(60);

/// Everybody may say everything: nobody else is on it.
const BUS: &str = r#"<busconfig><type>system</type><listen>unix:tmpdir=/run</listen>
<auth>EXTERNAL</auth><policy context="default"><allow send_destination="*" eavesdrop="true"/>
<allow eavesdrop="true"/><allow own="*"/><allow user="*"/></policy></busconfig>"#;

const SETTINGS: &str = "[main]\nplugins=keyfile\nauth-polkit=false\nrc-manager=unmanaged\n\
                        [keyfile]\npath=/run/connections\n";

/// A cable whose user said that its bytes are counted.
const METERED: &str = "[connection]\nid=cable\ntype=ethernet\ninterface-name=eth9\nmetered=1\n\
                       [ipv4]\nmethod=manual\naddress1=192.0.2.9/24,192.0.2.1\n\
                       [ipv6]\nmethod=disabled\n";

/// Ends with the test.
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
    // It takes no connection that others could read.
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).expect(path);
}

#[test]
fn what_the_real_one_says_of_a_metered_cable_decides() {
    const NAME: &str = "what_the_real_one_says_of_a_metered_cable_decides";
    if std::env::var_os(INSIDE).is_none() {
        let there = Command::new(DAEMON).arg("--version").output();
        let allowed = Command::new("unshare")
            .args(["-Urnm", "mount", "-t", "tmpfs", "t", "/run"])
            .output();
        if !there.is_ok_and(|o| o.status.success()) || !allowed.is_ok_and(|o| o.status.success()) {
            eprintln!("skipped: NetworkManager is not installed, or a namespace not allowed");
            return;
        }
        let status = Command::new("unshare")
            .arg("-Urnm")
            .arg(std::env::current_exe().expect("path of this test"))
            .args(["--exact", NAME, "--nocapture"])
            // Its closing line is not one of this program's.
            .stdout(std::io::stderr())
            .env(INSIDE, "1")
            .status();
        assert!(status.expect("run unshare").success());
        return;
    }
    for directory in ["/run", "/var/lib/NetworkManager"] {
        if Path::new(directory).exists() {
            run("mount", &format!("-t tmpfs t {directory}"));
        }
    }
    // It waits for udev to name devices, but where /sys cannot be written it does without.
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
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(async {
        let judged = tokio::time::timeout(PATIENCE, judged(address.trim())).await;
        judged.expect("it becomes so");
    });
}

/// Waits until the cable is up, and metered for what NetworkManager says.
async fn judged(address: &str) {
    let manager = loop {
        let bus = zbus::connection::Builder::address(address)
            .build()
            .await
            .expect("a bus");
        match NetworkManager::on(bus).await {
            Ok(manager) => break manager,
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
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
