//! The tunnels that are compared: each opened for some runs, then closed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::tunnel_network::{DEVICE_LINK, HOST_ADDRESS, SERVER_NETWORK, TunnelNetwork, wait_for};

/// WireGuard's interfaces. wireguard-go's control sockets are named after them, and are in one folder.
const DEVICE_WIREGUARD: &str = "wgdevice0";
const HOST_WIREGUARD: &str = "wghost0";

/// What carries the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TunnelKind {
    /// No tunnel: the kernel forwards
    None,
    /// `cedos vpn up --tcp flows`
    Flows,
    /// `cedos vpn up --tcp packets`
    Packets,
    /// WireGuard in the kernel
    Wireguard,
    /// WireGuard in a process, in Go
    WireguardGo,
}

impl TunnelKind {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            TunnelKind::None => "none",
            TunnelKind::Flows => "flows",
            TunnelKind::Packets => "packets",
            TunnelKind::Wireguard => "wireguard",
            TunnelKind::WireguardGo => "wireguard-go",
        }
    }
}

/// A tunnel that is up; closed when this is dropped.
pub struct OpenTunnel<'a> {
    kind: TunnelKind,
    network: &'a TunnelNetwork,
    processes: Vec<Child>,
    directory: tempfile::TempDir,
}

impl<'a> OpenTunnel<'a> {
    /// Opens a tunnel to the server's network.
    ///
    /// # Errors
    /// This machine has no such tunnel.
    pub fn open(
        kind: TunnelKind,
        network: &'a TunnelNetwork,
        cedos: &Path,
    ) -> Result<OpenTunnel<'a>> {
        let mut tunnel = OpenTunnel {
            kind,
            network,
            processes: Vec::new(),
            directory: tempfile::tempdir()?,
        };
        match kind {
            TunnelKind::None => {}
            TunnelKind::Flows => tunnel.open_cedos(cedos, "flows")?,
            TunnelKind::Packets => tunnel.open_cedos(cedos, "packets")?,
            TunnelKind::Wireguard => {
                let add = |name: &str| format!("ip link add {name} type wireguard");
                let added = network
                    .run_on_device(&add(DEVICE_WIREGUARD))
                    .and_then(|()| network.run_on_host(&add(HOST_WIREGUARD)));
                added.context("this kernel has no WireGuard")?;
                tunnel.set_up_wireguard()?;
            }
            TunnelKind::WireguardGo => {
                let program = |name: &str| {
                    let mut command = Command::new("wireguard-go");
                    command.args(["--foreground", name]);
                    command.env("LOG_LEVEL", "silent").stdout(Stdio::null());
                    command
                };
                for started in [
                    network.start_on_device(program(DEVICE_WIREGUARD)),
                    network.start_on_host(program(HOST_WIREGUARD)),
                ] {
                    tunnel
                        .processes
                        .push(started.context("wireguard-go is not installed")?);
                }
                tunnel.set_up_wireguard()?;
            }
        }
        Ok(tunnel)
    }

    fn open_cedos(&mut self, program: &Path, tcp: &str) -> Result<()> {
        let directory = self.directory.path().to_owned();
        let mut command = Command::new(program);
        command
            .args(["prox", "--listen", &format!("{HOST_ADDRESS}:4433")])
            .args(["--allow-private", "--allow-any-client", "--state-dir"])
            .arg(directory.join("proxy"))
            .args(["--tunnel-net", "10.83.0.0/16"]);
        let address = self.start(command, TunnelNetwork::start_on_host)?;
        let mut command = Command::new(program);
        command
            .args(["vpn", "up", "--tcp", tcp, "--prox", &address])
            .args(["--include", SERVER_NETWORK])
            .args(["--link", &format!("{DEVICE_LINK}=free"), "--state-dir"])
            .arg(directory.join("vpn"))
            .env("HOME", directory);
        let up = self.start(command, TunnelNetwork::start_on_device)?;
        ensure!(up.contains("up as"), "{up:?}");
        Ok(())
    }

    /// Starts a program, and returns its first line.
    fn start(
        &mut self,
        mut command: Command,
        start: fn(&TunnelNetwork, Command) -> Result<Child>,
    ) -> Result<String> {
        let level = std::env::var("RUST_LOG").unwrap_or("error".into());
        command
            .env("RUST_LOG", level)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = start(self.network, command)?;
        let stdout = child.stdout.take().context("its output is piped")?;
        self.processes.push(child);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(!line.is_empty(), "cedos ended; its error is above");
        Ok(line.trim().to_owned())
    }

    /// Gives both ends' wg0 keys, addresses and routes. The host translates addresses, as D2Prox's does.
    fn set_up_wireguard(&self) -> Result<()> {
        let network = self.network;
        let directory = self.directory.path().display();
        network.run_on_device(&format!(
            "umask 077; cd {directory}
             for end in device host; do wg genkey > $end.key; wg pubkey < $end.key > $end.pub; done"
        ))?;
        let show = |name: &str| format!("ip link show {name}");
        wait_for("WireGuard", || {
            network.run_on_device(&show(DEVICE_WIREGUARD)).is_ok()
                && network.run_on_host(&show(HOST_WIREGUARD)).is_ok()
        })?;
        network.run_on_host(&format!(
            "cd {directory}
             wg set {HOST_WIREGUARD} private-key host.key listen-port 51820 peer $(cat device.pub) allowed-ips 10.84.0.2/32
             ip addr add 10.84.0.1/24 dev {HOST_WIREGUARD}
             ip link set {HOST_WIREGUARD} up mtu 1420
             nft add table ip bench_nat
             nft add chain ip bench_nat post '{{ type nat hook postrouting priority 100; }}'
             nft add rule ip bench_nat post ip saddr 10.84.0.0/24 masquerade"
        ))?;
        network.run_on_device(&format!(
            "cd {directory}
             wg set {DEVICE_WIREGUARD} private-key device.key peer $(cat host.pub) endpoint {HOST_ADDRESS}:51820 allowed-ips 10.84.0.0/24,{SERVER_NETWORK}
             ip addr add 10.84.0.2/24 dev {DEVICE_WIREGUARD}
             ip link set {DEVICE_WIREGUARD} up mtu 1420
             ip route add {SERVER_NETWORK} dev {DEVICE_WIREGUARD}"
        ))
    }

    /// The CPU time of the tunnel's processes, in seconds; none if it has no processes.
    pub fn cpu_s(&self) -> Option<f64> {
        let of = |child: &Child| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id()));
            let stat = stat.unwrap_or_default();
            let fields = stat.rsplit(')').next().unwrap_or_default();
            let ticks = fields.split_whitespace().skip(11).take(2);
            let ticks: f64 = ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
            ticks / 100.0 // USER_HZ is 100 on all supported Linux systems
        };
        (!self.processes.is_empty()).then(|| self.processes.iter().map(of).sum())
    }
}

impl Drop for OpenTunnel<'_> {
    fn drop(&mut self) {
        let id = |child: &Child| nix::unistd::Pid::from_raw(child.id() as i32);
        // The device's end first. Each fails only if it has ended already.
        for child in self.processes.iter_mut().rev() {
            let _ = nix::sys::signal::kill(id(child), nix::sys::signal::Signal::SIGTERM);
            let _ = child.wait();
        }
        if matches!(self.kind, TunnelKind::Wireguard | TunnelKind::WireguardGo) {
            // wireguard-go has removed them itself.
            let remove = |name: &str| format!("ip link del {name} 2>/dev/null || true");
            let _ = self.network.run_on_device(&remove(DEVICE_WIREGUARD));
            let _ = self.network.run_on_host(&remove(HOST_WIREGUARD));
            let _ = self.network.run_on_host("nft delete table ip bench_nat");
        }
    }
}
