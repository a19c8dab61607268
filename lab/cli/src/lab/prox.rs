//! The lab's proxy: a `cedos prox` with a key and a state folder of its own, which a crash survives.

use anyhow::{Context, anyhow, bail};
use cedos_lab_emu::{World, plan};
use cedos_lab_scenario::Family;
use serde_json::Value;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::end;

/// Port of the proxy in the lab.
const PROXY_PORT: u16 = 4433;
/// Its TCP port, for clients without D2TP.
const TCP_PORT: u16 = 3128;
/// How long the proxy may take to print its address.
const PROXY_START: Duration = Duration::from_secs(10);

/// The lab's proxy.
pub struct LabProx {
    /// The proxy's process; none while it is crashed.
    child: Option<Child>,
    program: PathBuf,
    folder: PathBuf,
    /// The device's public key.
    client: String,
    /// `d2tp://host:port/KEY`.
    address: String,
    /// The device's key file.
    key: PathBuf,
}

/// Asks a proxy to end, and ends it if it does not.
pub fn stop_prox(mut prox: LabProx) {
    if let Some(child) = &mut prox.child {
        end(child);
    }
}

/// `cedos key gen` for the device and the proxy, then `cedos prox` that lets the device in.
///
/// # Errors
/// The proxy did not start, and what it said.
pub fn start_prox(world: &World, program: &Path, folder: &Path) -> anyhow::Result<LabProx> {
    let key = folder.join("device.key");
    let client = make_key(program, &key)?;
    make_key(program, &folder.join("prox.key"))?;
    std::fs::create_dir_all(folder.join("prox-state"))?;
    let mut prox = LabProx {
        child: None,
        program: program.to_owned(),
        folder: folder.to_owned(),
        client,
        address: String::new(),
        key,
    };
    prox.begin(world)?;
    Ok(prox)
}

/// Makes a key file; the public key.
fn make_key(program: &Path, file: &Path) -> anyhow::Result<String> {
    let mut key_gen = Command::new(program);
    key_gen
        .args(["key", "gen", "--out"])
        .arg(file)
        .arg("--json");
    let made = key_gen.output().context("`cedos key gen` cannot be run")?;
    let told = String::from_utf8_lossy(&made.stdout);
    told.lines()
        .find_map(|line| {
            let value: Value = serde_json::from_str(line).ok()?;
            ["public", "public_key", "key"]
                .iter()
                .find_map(|k| value[*k].as_str().map(str::to_owned))
        })
        .ok_or_else(|| {
            anyhow!(
                "`cedos key gen` told no public key: {}",
                String::from_utf8_lossy(&made.stderr).trim()
            )
        })
}

impl LabProx {
    /// Starts the program, for the first time or after a crash.
    ///
    /// # Errors
    /// It did not start, and what it said.
    pub fn begin(&mut self, world: &World) -> anyhow::Result<()> {
        // One socket for both families.
        let listen = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), PROXY_PORT);
        let tcp = SocketAddr::new(listen.ip(), TCP_PORT);
        let log = self.folder.join("prox.log");
        let mut command = Command::new(&self.program);
        command
            .args(["prox", "--listen", &listen.to_string(), "--allow-private"])
            .args(["--tcp-listen", &tcp.to_string()])
            .args(["--allow-address", "0.0.0.0/0", "--allow-address", "::/0"])
            .args(["--allow-client", &self.client, "--key"])
            .arg(self.folder.join("prox.key"))
            .arg("--state-dir")
            .arg(self.folder.join("prox-state"))
            .args(world.scenario().transport.options());
        if let Some(web) = world.web() {
            command.arg("--ca").arg(&web.ca);
        }
        command
            .stdout(Stdio::piped())
            .stderr(OpenOptions::new().create(true).append(true).open(&log)?);
        let mut child = world.proxy().spawn(command)?;
        let (tell, told) = mpsc::channel();
        let out = child.stdout.take().context("the proxy's output")?;
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Some(at) = line.find("d2tp://") {
                    let address = line[at..].split(['"', ' ', ',']).next().unwrap_or_default();
                    let _ = tell.send(address.to_owned());
                }
            }
        });
        match told.recv_timeout(PROXY_START) {
            Ok(address) => {
                self.address = address;
                self.child = Some(child);
                Ok(())
            }
            Err(_) => {
                end(&mut child);
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("`cedos prox` printed no d2tp:// address: {}", said.trim());
            }
        }
    }

    /// Stops it without a word, as a power cut would: SIGKILL.
    pub fn crash(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// The proxy's address as the device reaches it: the same key; by name where names work, so
    /// that each link takes the family it has.
    pub fn reached_by(&self, world: &World) -> String {
        let key = self.address.rsplit('/').next().unwrap_or_default();
        if world.has_names() {
            return format!("d2tp://proxy:{PROXY_PORT}/{key}");
        }
        let links = &world.scenario().links;
        let families: Vec<Family> = links.iter().map(|link| link.family).collect();
        let v4 = families.iter().all(|f| f.has_v4()) || !families.iter().all(|f| f.has_v6());
        let host = if v4 {
            // Also IPv4 for some and IPv6 for the others, which then need a NAT64.
            IpAddr::V4(plan::PROXY_V4)
        } else {
            IpAddr::V6(plan::PROXY_V6)
        };
        format!("d2tp://{}/{key}", SocketAddr::new(host, PROXY_PORT))
    }

    /// The device's key file.
    pub fn key(&self) -> &Path {
        &self.key
    }
}

/// Host and port of the proxy for clients without D2TP.
pub fn tcp_port(world: &World) -> String {
    if world.has_names() {
        format!("proxy:{TCP_PORT}")
    } else {
        SocketAddr::new(plan::PROXY_V4.into(), TCP_PORT).to_string()
    }
}

/// Has a `cedos get` on the device go through `prox`.
pub fn through(command: &mut Command, prox: &LabProx, world: &World) {
    command
        .args(["--prox", &prox.reached_by(world)])
        .env("CEDOS_KEY_FILE", &prox.key)
        // What a device remembers of its sessions goes with the lab.
        .env("XDG_STATE_HOME", prox.key.with_extension("state"));
}
