//! Three namespaces in a row: device, proxy's host, server.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::network::{in_namespace, new_namespace, start_in};

/// The address of the proxy's host towards the device.
pub const HOST_ADDRESS: &str = "10.77.1.1";
/// The address of the server.
pub const SERVER_ADDRESS: &str = "10.77.2.2";
/// The network in which the server is the only host.
pub const SERVER_NETWORK: &str = "10.77.2.0/24";
/// The interface of the device.
pub const DEVICE_LINK: &str = "dev0";

/// How long a program may take to begin.
const PATIENCE: Duration = Duration::from_secs(10);

/// The network namespaces between which a tunnel is measured.
pub struct TunnelNetwork {
    device: File,
    host: File,
    server: File,
}

impl TunnelNetwork {
    /// Makes the namespaces.
    pub fn make() -> Result<TunnelNetwork> {
        let (device, host, server) = (new_namespace()?, new_namespace()?, new_namespace()?);
        // A name for `ip link … netns`: that of a process in the namespace.
        let holder = |namespace: &File| -> Result<HolderProcess> {
            let mut command = Command::new("sleep");
            command.arg("3600");
            Ok(HolderProcess(start_in(namespace, command)?))
        };
        let (in_device, in_server) = (holder(&device)?, holder(&server)?);
        let (device_id, server_id) = (in_device.0.id(), in_server.0.id());
        in_namespace(&host, || {
            shell(&format!(
                "ip link set lo up
                 ip link add host0 type veth peer name {DEVICE_LINK} netns {device_id}
                 ip addr add {HOST_ADDRESS}/24 dev host0
                 ip link set host0 up
                 ip link add host1 type veth peer name srv0 netns {server_id}
                 ip addr add 10.77.2.1/24 dev host1
                 ip link set host1 up
                 echo 1 > /proc/sys/net/ipv4/ip_forward"
            ))
        })?;
        in_namespace(&device, || {
            shell(&format!(
                "ip link set lo up
                 ip addr add 10.77.1.2/24 dev {DEVICE_LINK}
                 ip link set {DEVICE_LINK} up
                 ip route add default via {HOST_ADDRESS}"
            ))
        })?;
        in_namespace(&server, || {
            shell(&format!(
                "ip link set lo up
                 ip addr add {SERVER_ADDRESS}/24 dev srv0
                 ip link set srv0 up
                 ip route add default via 10.77.2.1"
            ))
        })?;
        Ok(TunnelNetwork {
            device,
            host,
            server,
        })
    }

    /// Starts iperf3 as server for one run. One that has served another run may not have heard of its end, by the tunnel,
    /// and would refuse this one.
    pub fn start_server(&self) -> Result<IperfServer> {
        let mut command = Command::new("iperf3");
        command.arg("--server").stdout(Stdio::null());
        let server = start_in(&self.server, command).context("iperf3 is not installed")?;
        let server = IperfServer(server);
        let listens = "ss -Hltn 'sport = :5201' | grep -q .";
        wait_for("iperf3 as server", || {
            in_namespace(&self.server, || shell(listens)).is_ok()
        })?;
        Ok(server)
    }

    /// Starts a program on the device.
    pub fn start_on_device(&self, command: Command) -> Result<Child> {
        start_in(&self.device, command)
    }

    /// Starts a program on the proxy's host.
    pub fn start_on_host(&self, command: Command) -> Result<Child> {
        start_in(&self.host, command)
    }

    /// Runs lines of `sh` on the device.
    pub fn run_on_device(&self, lines: &str) -> Result<()> {
        in_namespace(&self.device, || shell(lines))
    }

    /// Runs lines of `sh` on the proxy's host.
    pub fn run_on_host(&self, lines: &str) -> Result<()> {
        in_namespace(&self.host, || shell(lines))
    }
}

/// iperf3 as server; ended when this is dropped.
pub struct IperfServer(Child);

impl Drop for IperfServer {
    fn drop(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that gives a namespace a name; ended when this is dropped.
struct HolderProcess(Child);

impl Drop for HolderProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs lines of `sh`, of which none may fail.
fn shell(lines: &str) -> Result<()> {
    let output = Command::new("sh")
        .args(["-e", "-c", lines])
        .stdin(Stdio::null())
        .output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", errors.trim());
    Ok(())
}

/// Waits until something holds.
///
/// # Errors
/// It does not in ten seconds.
pub fn wait_for(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let began = Instant::now();
    while !holds() {
        if began.elapsed() > PATIENCE {
            bail!("{what} did not begin within {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
