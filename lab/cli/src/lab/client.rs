//! The clients of D2TP that can carry the flows of a lab run.
//!
//! | `--client` | a flow is |
//! |---|---|
//! | `get` | `cedos get`, or `cedos put` |
//! | `run` | `cedos run -- curl` |
//! | `proxy` | `curl` through the local proxy of one `cedos agent` |
//! | `socket` | a socket of libd2tp, in a separate process (socket_transfer.rs) |
//! | `vpn` | `curl`, whose TCP one `cedos vpn` carries end to end as packets |
//! | `vpn-flows` | `curl`, whose TCP one `cedos vpn` carries as flows |

use anyhow::{Context, bail};
use cedos_lab_emu::{World, plan};
use cedos_lab_scenario::{Direction, Policy, Scenario, ScenarioFlow};
use clap::ValueEnum;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::bridge::LabBridge;
use super::energy_settings::write_energy_settings;
use super::prox::{LabProx, through};
use super::{LOOK, classes, end};

/// A client of D2TP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LabClient {
    /// `cedos get` and `cedos put`.
    #[default]
    Get,
    /// Programs under `cedos run`.
    Run,
    /// Programs that use the local proxy of an agent.
    Proxy,
    /// Sockets of libd2tp.
    Socket,
    /// Programs whose TCP a VPN carries, end to end as packets.
    Vpn,
    /// Programs whose TCP a VPN carries as flows.
    VpnFlows,
}

impl LabClient {
    /// How the client's VPN carries TCP, as `cedos vpn up --tcp` takes it; `None` if the client has no VPN.
    pub fn vpn_mode(self) -> Option<&'static str> {
        match self {
            LabClient::Vpn => Some("packets"),
            LabClient::VpnFlows => Some("flows"),
            LabClient::Get | LabClient::Run | LabClient::Proxy | LabClient::Socket => None,
        }
    }
}

/// The network of inner addresses of a proxy whose client has a VPN.
pub const INNER_NET: &str = "10.83.0.0/16";

/// The address of the agent's local proxy on the device, which has its own network namespace.
const LOCAL_PROXY: &str = "127.0.0.1:1080";
/// The file of the device's settings, in the lab's folder.
const SETTINGS_FILE: &str = "config.toml";
/// How long the agent may take to start.
const AGENT_START: Duration = Duration::from_secs(10);
/// Starts a program with a `/run` of its own: a machine has one VPN, and labs may run beside one another.
const WITH_OWN_RUN: &str = "mount -t tmpfs tmpfs /run && exec \"$0\" \"$@\"";

/// Runs a program once the way to an address leads into the VPN.
const ONCE_VPN_IS_UP: &str =
    "until ip route get \"$0\" | grep -q cedos0; do sleep 0.05; done; exec \"$@\"";

/// The part of a client that all its flows share on the device.
pub struct DeviceClient {
    client: LabClient,
    /// The settings file with the cost classes of the links, for clients that read them from there.
    config: PathBuf,
    agent: Option<Child>,
}

impl DeviceClient {
    /// Prepares the device for a client, before the scenario's time begins. `bridge`: a radio that a VPN uses beside its links.
    ///
    /// # Errors
    /// The client cannot do what the scenario asks, or its agent or VPN did not start.
    pub fn start(
        client: LabClient,
        world: &World,
        program: &Path,
        folder: &Path,
        prox: &LabProx,
        bridge: Option<&LabBridge>,
    ) -> anyhow::Result<DeviceClient> {
        let scenario = world.scenario();
        let budget = |flow: &&ScenarioFlow| flow.metered_bytes_max.is_some();
        if client != LabClient::Get
            && let Some(flow) = scenario.flows.iter().find(budget)
        {
            bail!(
                "flow {}: only --client get takes metered_bytes_max",
                flow.id
            );
        }
        let config = folder.join(SETTINGS_FILE);
        let energy = scenario.energy.as_ref();
        let energy = energy.map(|energy| write_energy_settings(energy, folder));
        let energy = energy.transpose()?.unwrap_or_default();
        let http_proxy = http_proxy_setting(scenario);
        let rules = network_rules(scenario);
        fs::write(&config, format!("{http_proxy}{energy}{rules}"))?;
        let mut started = DeviceClient {
            client,
            config,
            agent: None,
        };
        started.agent = match client {
            LabClient::Proxy => Some(started.start_agent(world, program, folder, prox)?),
            LabClient::Vpn | LabClient::VpnFlows => {
                let tcp = client.vpn_mode().unwrap_or_default();
                Some(start_vpn(tcp, world, program, folder, prox, bridge)?)
            }
            LabClient::Get | LabClient::Run | LabClient::Socket => None,
        };
        Ok(started)
    }

    fn start_agent(
        &self,
        world: &World,
        program: &Path,
        folder: &Path,
        prox: &LabProx,
    ) -> anyhow::Result<Child> {
        let log = folder.join("agent.log");
        let mut command = Command::new(program);
        command
            .args(["agent", "--proxy", LOCAL_PROXY, "--config"])
            .arg(&self.config)
            .env("CEDOS_AGENT", folder.join("agent.sock"))
            .env("XDG_RUNTIME_DIR", folder)
            .stdout(Stdio::null())
            .stderr(File::create(&log)?);
        through(&mut command, prox, world);
        let agent = world.device().spawn(command)?;
        await_line(agent, &log, "proxy for programs at")
    }

    /// Whether the client prints JSON about what it carried.
    pub fn reports(&self) -> bool {
        self.client == LabClient::Get
    }

    /// The command that transfers a flow between `url` and `file`.
    ///
    /// # Errors
    /// The client does not support such a URL.
    pub fn command(
        &self,
        program: &Path,
        world: &World,
        prox: &LabProx,
        flow: &ScenarioFlow,
        url: &str,
        file: &Path,
    ) -> anyhow::Result<Command> {
        let left_s = flow
            .deadline_s
            .map(|at| (at - world.now().as_secs_f64()).floor().max(1.0));
        let mut command = Command::new(program);
        match self.client {
            LabClient::Get => {
                ask(&mut command, world, flow, url, file);
                let scenario = world.scenario();
                if scenario.energy.is_some() || scenario.has_http_proxy() {
                    command.env("CEDOS_CONFIG", &self.config);
                }
                through(&mut command, prox, world);
                return Ok(command);
            }
            LabClient::Run => {
                command.args(["run", "--policy", flow.policy.word()]);
                let by = left_s.map(|left_s| format!("+{left_s}s"));
                command.args(by.iter().flat_map(|by| ["--by", by]));
                for link in &world.scenario().links {
                    command.args(["--link", &format!("{}={}", link.name, link.class.word())]);
                }
                command.args(world.scenario().transport.options());
                through(&mut command, prox, world);
                command.args(["--", "curl"]);
                transfer_by_curl(&mut command, flow.direction, url, file);
            }
            LabClient::Proxy => {
                command = Command::new("curl");
                let mut terms = format!("policy={}", flow.policy.word());
                if let Some(left_s) = left_s {
                    terms = format!("by=+{left_s}s,{terms}");
                }
                command.args(["--proxy", LOCAL_PROXY, "--proxy-user"]);
                command.arg(format!("{terms}:none"));
                transfer_by_curl(&mut command, flow.direction, url, file);
            }
            LabClient::Vpn | LabClient::VpnFlows => {
                // Networks carry nothing before the scenario's time begins.
                command = Command::new("sh");
                command.args(["-c", ONCE_VPN_IS_UP, &plan::ORIGIN_V4.to_string(), "curl"]);
                transfer_by_curl(&mut command, flow.direction, url, file);
            }
            LabClient::Socket => {
                let rest = url.strip_prefix("http://");
                let (host, path) = rest
                    .and_then(|rest| rest.split_once('/'))
                    .with_context(|| format!("a socket carries http:// alone, not {url}"))?;
                command.args(["lab", "socket", host, &format!("/{path}")]);
                match flow.direction {
                    Direction::Down => command.arg("--output").arg(file),
                    Direction::Up => command.arg("--upload").arg(file),
                };
                command.args(["--policy", &(policy_number(flow.policy)).to_string()]);
                let within = left_s.map(|left_s| left_s.to_string());
                command.args(within.iter().flat_map(|within| ["--within-s", within]));
                command.env("CEDOS_PROX", prox.reached_by(world));
                command.env("CEDOS_KEY_FILE", prox.key());
                command.env("XDG_STATE_HOME", prox.key().with_extension("state"));
            }
        }
        // Not the user's own agent, which has other links.
        command
            .env("CEDOS_AGENT", "none")
            .env("CEDOS_CONFIG", &self.config);
        Ok(command)
    }
}

impl Drop for DeviceClient {
    fn drop(&mut self) {
        if let Some(agent) = &mut self.agent {
            end(agent);
        }
    }
}

/// Starts a VPN on the device that carries what is for the origin, TCP in the mode `tcp`.
fn start_vpn(
    tcp: &str,
    world: &World,
    program: &Path,
    folder: &Path,
    prox: &LabProx,
    bridge: Option<&LabBridge>,
) -> anyhow::Result<Child> {
    let scenario = world.scenario();
    if let Some(flow) = scenario.flows.iter().find(|flow| flow.deadline_s.is_some()) {
        bail!("flow {}: packets of a VPN have no deadline", flow.id);
    }
    let file = File::create(folder.join("vpn.log"))?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", WITH_OWN_RUN])
        .arg(program)
        .args(["vpn", "up", "--tcp", tcp, "--include"])
        .arg(format!("{}/32", plan::ORIGIN_V4))
        .arg("--state-dir")
        .arg(folder.join("vpn-state"))
        .env("CEDOS_AGENT", "none")
        .env("CEDOS_CONFIG", folder.join(SETTINGS_FILE))
        .stdout(file.try_clone()?)
        .stderr(file);
    for link in &scenario.links {
        command.args(["--link", &format!("{}={}", link.name, link.class.word())]);
    }
    if let Some(bridge) = bridge {
        command.args(["--link", &format!("{}=free", bridge.line())]);
    }
    command.args(["--offload-acks", &scenario.acks.offload.word()]);
    command.args(scenario.transport.options());
    through(&mut command, prox, world);
    world.device().spawn(command)
}

/// Waits until a process that began to write to `log` says that it serves.
fn await_line(mut process: Child, log: &Path, line: &str) -> anyhow::Result<Child> {
    let mut left = AGENT_START;
    loop {
        let said = fs::read_to_string(log).unwrap_or_default();
        if said.contains(line) {
            return Ok(process);
        }
        if left.is_zero() || process.try_wait()?.is_some() {
            end(&mut process);
            bail!("the client does not start: {}", said.trim());
        }
        std::thread::sleep(LOOK);
        left = left.saturating_sub(LOOK);
    }
}

/// Turns a command into a `cedos get` or `cedos put`.
pub fn ask(command: &mut Command, world: &World, flow: &ScenarioFlow, url: &str, file: &Path) {
    match flow.direction {
        Direction::Down => command.arg("get").arg(url).arg("-o").arg(file),
        Direction::Up => command.arg("put").arg(file).arg(url),
    };
    command.args(["--json", "--policy", flow.policy.word()]);
    let offload = world.scenario().acks.offload;
    command.args(["--offload-acks", &offload.word()]);
    command.args(world.scenario().transport.options());
    if let Some(deadline_s) = flow.deadline_s {
        // The rest of the time until the deadline.
        let left_s = (deadline_s - world.now().as_secs_f64()).max(0.0);
        command.args(["--within", &format!("{}s", left_s.floor().max(1.0))]);
    }
    if let Some(bytes) = flow.metered_bytes_max {
        command.args(["--max-cell", &bytes.to_string()]);
    }
    classes(command, world.scenario());
}

/// Without a buffer, so that received data is in the file at once, where the lab checks it.
fn transfer_by_curl(command: &mut Command, direction: Direction, url: &str, file: &Path) {
    command.args(["--silent", "--show-error", "--fail", "--no-buffer"]);
    match direction {
        Direction::Down => command.arg("--output").arg(file),
        Direction::Up => command.arg("--upload-file").arg(file),
    };
    command.arg(url);
}

/// The HTTP proxy that the lab's networks may have, in the form of the user's settings.
fn http_proxy_setting(scenario: &Scenario) -> String {
    if !scenario.has_http_proxy() {
        return String::new();
    }
    let address = format!("http://{}:{}", plan::ORIGIN_V4, plan::HTTP_PROXY_PORT);
    format!("[proxy]\nhttp = \"{address}\"\n")
}

/// The cost classes of the lab's links, in the form of the user's settings.
pub fn network_rules(scenario: &Scenario) -> String {
    let rule = |link: &cedos_lab_scenario::Link| {
        format!(
            "[[network]]\ndevice = \"{}\"\nclass = \"{}\"\n",
            link.name,
            link.class.word()
        )
    };
    scenario.links.iter().map(rule).collect()
}

/// The value of `D2TP_SO_POLICY` for a policy.
fn policy_number(policy: Policy) -> i32 {
    use d2tp_sockets::PayPolicy;
    let policy = match policy {
        Policy::FreeOnly => PayPolicy::FreeOnly,
        Policy::FreeFirst => PayPolicy::FreeFirst,
        Policy::Balanced => PayPolicy::Balanced,
        Policy::Fast => PayPolicy::Fast,
        Policy::Any => PayPolicy::Any,
    };
    policy as i32
}
