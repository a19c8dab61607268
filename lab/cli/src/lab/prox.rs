//! The lab's proxy: a `cedos prox` with its own key and state folder, which survive a crash.

use anyhow::{Context, anyhow, bail};
use cedos_lab_emu::{World, plan};
use cedos_lab_scenario::Family;
use serde_json::Value;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::end;
use super::store::LabStore;

/// Port of the proxy in the lab, and that of its second node.
const PROXY_PORT: u16 = plan::PROXY_PORTS[0];
const SECOND_PORT: u16 = plan::PROXY_PORTS[1];
/// The proxy's TCP port, for clients without D2TP.
const TCP_PORT: u16 = 3128;
/// The TCP port of streams, where the scenario has them.
const STREAM_PORT: u16 = 8443;
/// The log of the second node, and what it says there of each session that it takes over.
const SECOND_LOG: &str = "prox-2.log";
const TAKEN_OVER: &str = "took over a session from another node";
/// How long the proxy may take to print its address.
const PROXY_START: Duration = Duration::from_secs(10);

/// The lab's proxy.
pub struct LabProx {
    /// The proxy's process; `None` while it is crashed.
    child: Option<Child>,
    /// The proxy's second node, where the scenario has one.
    second: Option<Child>,
    /// Commands that wait until the first node has ended.
    drains: Vec<Child>,
    /// The store of the nodes, where the scenario has one.
    store: Option<LabStore>,
    program: PathBuf,
    folder: PathBuf,
    /// The device's public key.
    client: String,
    /// `d2tp://host:port/KEY`.
    address: String,
    /// The device's key file.
    key: PathBuf,
    /// The network of inner addresses, if the proxy carries packets.
    inner_net: Option<&'static str>,
}

/// Asks a proxy to end, and ends it if it does not.
pub fn stop_prox(mut prox: LabProx) {
    for child in prox
        .child
        .iter_mut()
        .chain(&mut prox.second)
        .chain(&mut prox.drains)
    {
        end(child);
    }
}

/// Creates keys of the device and the proxy, then starts a `cedos prox` that admits the device. `inner_net`: the network of
/// inner addresses, if it carries packets.
///
/// # Errors
/// The proxy did not start; the error contains its output.
pub fn start_prox(
    world: &World,
    program: &Path,
    folder: &Path,
    inner_net: Option<&'static str>,
) -> anyhow::Result<LabProx> {
    let key = folder.join("device.key");
    let client = make_key(program, &key)?;
    make_key(program, &folder.join("prox.key"))?;
    std::fs::create_dir_all(folder.join("prox-state"))?;
    let mut prox = LabProx {
        child: None,
        second: None,
        drains: Vec::new(),
        store: world
            .scenario()
            .store
            .then(|| LabStore::start(&folder.join("store")))
            .transpose()?,
        program: program.to_owned(),
        folder: folder.to_owned(),
        client,
        address: String::new(),
        key,
        inner_net,
    };
    prox.begin(world)?;
    if world.scenario().nodes > 1 {
        prox.begin_second(world)?;
    }
    Ok(prox)
}

/// Creates a key file. Returns the public key.
fn make_key(program: &Path, file: &Path) -> anyhow::Result<String> {
    let mut key_gen = Command::new(program);
    key_gen
        .args(["key", "gen", "--output"])
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
    /// It did not start; the error contains its output.
    pub fn begin(&mut self, world: &World) -> anyhow::Result<()> {
        self.start(world, false)
    }

    /// Starts the second node, which has the key and a state of its own.
    fn begin_second(&mut self, world: &World) -> anyhow::Result<()> {
        let state = self.folder.join("prox-state-2");
        std::fs::create_dir_all(&state)?;
        let listen = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), SECOND_PORT);
        let log = self.folder.join(SECOND_LOG);
        let mut command = Command::new(&self.program);
        command
            .args(["prox", "--listen", &listen.to_string(), "--allow-private"])
            .args(["--allow-client", &self.client, "--key"])
            .arg(self.folder.join("prox.key"))
            .arg("--state-dir")
            .arg(state)
            .args(self.store_options("b"))
            .args(world.scenario().transport.options());
        if let Some(web) = world.web() {
            command.arg("--ca").arg(&web.ca);
        }
        command
            .env("RUST_LOG", "info")
            .stdout(Stdio::piped())
            .stderr(OpenOptions::new().create(true).append(true).open(&log)?);
        let mut child = world.proxy().spawn(command)?;
        let mut out = BufReader::new(child.stdout.take().context("the node's output")?);
        let mut line = String::new();
        out.read_line(&mut line)?;
        self.second = Some(child);
        if !line.contains("d2tp://") {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            bail!(
                "the second `cedos prox` printed no d2tp:// address: {}",
                said.trim()
            );
        }
        Ok(())
    }

    /// How many sessions the second node took over from the first, by its log. `None` without a second node or a store.
    pub fn sessions_taken_over(&self) -> Option<u64> {
        self.store.as_ref().and(self.second.as_ref())?;
        let said = std::fs::read_to_string(self.folder.join(SECOND_LOG)).ok()?;
        Some(said.matches(TAKEN_OVER).count() as u64)
    }

    /// The options of a node that shares its sessions; none where the scenario has no store.
    fn store_options(&self, node: &str) -> Vec<OsString> {
        let Some(store) = &self.store else {
            return Vec::new();
        };
        let mut options: Vec<OsString> = ["--node", node, "--store"].map(OsString::from).into();
        options.push(store.url().into());
        options.push("--copies-dir".into());
        options.push(self.folder.join("copies").into());
        options
    }

    /// The store of the nodes, where the scenario has one.
    pub fn store(&mut self) -> Option<&mut LabStore> {
        self.store.as_mut()
    }

    /// Starts another process, which takes the running one over.
    ///
    /// # Errors
    /// It did not start; the error contains its output.
    pub fn upgrade(&mut self, world: &World) -> anyhow::Result<()> {
        let old = self.child.take();
        self.start(world, true)?;
        if let Some(mut old) = old {
            // It ends by itself as soon as the new one serves.
            old.wait()?;
        }
        Ok(())
    }

    /// Has the devices go on at the second node. The first one ends by itself.
    ///
    /// # Errors
    /// It refuses.
    pub fn drain(&mut self) -> anyhow::Result<()> {
        let mut command = Command::new(&self.program);
        command
            .args(["prox", "drain", "--within", "60s", "--state-dir"])
            .arg(self.folder.join("prox-state"));
        // It waits for the end of the node, in which the run goes on.
        self.drains.push(command.spawn()?);
        Ok(())
    }

    fn start(&mut self, world: &World, takes_over: bool) -> anyhow::Result<()> {
        // One socket for both address families.
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
            .args(self.store_options("a"))
            .args(world.scenario().transport.options());
        if let Some(net) = self.inner_net {
            command.args(["--tunnel-net", net]);
        }
        if takes_over {
            command.arg("--upgrade");
        }
        if world.scenario().streams {
            let streams = SocketAddr::new(listen.ip(), STREAM_PORT);
            command.args(["--stream-listen", &streams.to_string()]);
        }
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

    /// Stops the proxy without warning, like a power cut: SIGKILL.
    pub fn crash(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// The proxy's address as the device reaches it, with the same key: by name if names work, so
    /// that each link uses the address family that it has.
    pub fn reached_by(&self, world: &World) -> String {
        let key = self.address.rsplit('/').next().unwrap_or_default();
        let two = world.scenario().nodes > 1;
        if world.has_names() {
            return match two {
                true => format!("d2tp://proxy:{PROXY_PORT},proxy:{SECOND_PORT}/{key}"),
                false => format!("d2tp://proxy:{PROXY_PORT}/{key}"),
            };
        }
        let links = &world.scenario().links;
        let families: Vec<Family> = links.iter().map(|link| link.family).collect();
        let v4 = families.iter().all(|f| f.has_v4()) || !families.iter().all(|f| f.has_v6());
        let host = if v4 {
            // Also if some links have IPv4 and others IPv6, which then need a NAT64.
            IpAddr::V4(plan::PROXY_V4)
        } else {
            IpAddr::V6(plan::PROXY_V6)
        };
        let first = SocketAddr::new(host, PROXY_PORT);
        match two {
            true => format!(
                "d2tp://{first},{}/{key}",
                SocketAddr::new(host, SECOND_PORT)
            ),
            false => format!("d2tp://{first}/{key}"),
        }
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

/// Makes a `cedos get` on the device use `prox`.
pub fn through(command: &mut Command, prox: &LabProx, world: &World) {
    command
        .args(["--prox", &prox.reached_by(world)])
        .env("CEDOS_KEY_FILE", &prox.key)
        // The device's stored sessions are deleted with the lab.
        .env("XDG_STATE_HOME", prox.key.with_extension("state"));
}
