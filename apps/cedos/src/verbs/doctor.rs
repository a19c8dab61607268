//! `cedos doctor`: checks the network, the proxy, this machine and its permissions, and prints what
//! to do about faults.
//!
//! ```text
//!  settings ─▶ key ─▶ networks ─▶ proxy: name ▸ UDP, TCP ▸ handshake ▸ round trip, packet size
//!  clock · permissions of `cedos run` · wake alarms · NetworkManager, logind · disk · queues · agent · versions
//! ```
//!
//! Each check is a function that returns its [`Finding`]s; nothing is changed, and only the proxy
//! is contacted.

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use cedos_agent::agent::api::AgentRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::fetch::report::human_bytes;
use cedos_agent::fetch::session_refusal::{host_and_port, session_end_text, session_refusal};
use cedos_agent::fetch::state_directory::state_directory;
use cedos_agent::key::{device_key_path, load_device_key};
use cedos_agent::settings::{self, UserSettings};
use cedos_sandbox::check_file_restriction;
use cedos_terminal::{print_stdout, without_error_numbers};
use clap::Args;
use d2tp_driver::{
    Device, FlowSettings, SecretKey, ServerAddress, ServerList, SessionEvent, VersionProbeAnswer,
    look_up_nodes, probe_version,
};
use d2tp_links::{ClassRules, Link, LinkKind};
use d2tp_power::LinuxMachine;
use d2tp_stream::{StreamTarget, connect, http_proxy_for};
use nix::sys::statvfs::statvfs;
use serde::Serialize;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tokio::sync::broadcast::error::RecvError;

use super::join::ReachingDevice;
use super::proxy_options::ProxyOptions;
use super::queue_keeper::QueueReach;

/// How long the proxy may take to answer.
const PROXY_PATIENCE: Duration = Duration::from_secs(5); // a guess: handshakes are repeated after 0.6, 1.2 and 2 s
/// How long the packet size may take to be found.
const PACKET_SIZE_PATIENCE: Duration = Duration::from_secs(2); // a guess: some round trips
/// The size of packets with which paths begin.
const PACKET_BYTES_FIRST: usize = 1200; // R-HS-5
/// The bytes that are sent before packet sizes are looked at: twice of what a path carries before it is probed.
const PADDING_BYTES: usize = 16 * 1024;
/// The most bytes of the proxy's answer.
const ANSWER_BYTES_MAX: u64 = 64 * 1024;
/// Free room on a disk below which downloads are likely to fill it.
const ROOM_MIN: u64 = 1_000_000_000; // a guess
/// Round trips from which on a proxy is slow to use.
const FAR: Duration = Duration::from_millis(300); // a guess

/// Check the network, the proxy, permissions and the disk, and say what to do
///
/// Sends nothing to anybody but the proxy.
///
/// Exit codes: 0 nothing is wrong, 1 something is, 2 usage.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    proxy: ProxyOptions,

    /// Print one JSON object: `good`, and `checks` with `name`, `status`, `text`, `advice`
    #[arg(long)]
    json: bool,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum FindingStatus {
    /// The checked part works.
    Good,
    /// Something is missing that not everybody needs.
    Note,
    /// Something does not work.
    Bad,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    name: &'static str,
    status: FindingStatus,
    text: String,
    /// What the user can do about the finding.
    advice: Option<String>,
}

impl Finding {
    fn good(name: &'static str, text: impl Into<String>) -> Finding {
        let text = text.into();
        Finding {
            name,
            status: FindingStatus::Good,
            text,
            advice: None,
        }
    }

    fn note(name: &'static str, text: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding {
            status: FindingStatus::Note,
            advice: Some(advice.into()),
            ..Finding::good(name, text)
        }
    }

    fn bad(name: &'static str, text: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding {
            status: FindingStatus::Bad,
            ..Finding::note(name, text, advice)
        }
    }

    fn print(&self) {
        let mark = match self.status {
            FindingStatus::Good => "good",
            FindingStatus::Note => "note",
            FindingStatus::Bad => "BAD ",
        };
        let text = without_error_numbers(&self.text);
        print_stdout(&format!("{mark}  {}: {text}", self.name));
        if let Some(advice) = &self.advice {
            print_stdout(&format!("      {advice}"));
        }
    }
}

/// Checks everything.
///
/// # Errors
/// None: what is wrong is what is reported.
pub async fn run(args: DoctorArgs) -> anyhow::Result<ExitCode> {
    let mut findings = Vec::new();
    let mut tell = |found: Vec<Finding>| {
        if !args.json {
            found.iter().for_each(Finding::print);
        }
        findings.extend(found);
    };
    tell(vec![Finding::good("version", version())]);
    let settings = UserSettings::load(None);
    tell(vec![settings_finding(&settings)]);
    let (key, found) = match &settings {
        Ok(_) => check_key(),
        Err(_) => (
            None,
            Finding::note(
                "key",
                "not looked for: the settings say where it is",
                "correct the settings first",
            ),
        ),
    };
    tell(vec![found]);
    tell(check_networks().await);
    let settings = settings.unwrap_or_default();
    tell(match args.proxy.address_in(&settings) {
        Ok(Some(text)) => check_proxies(&text, key).await,
        Ok(None) => vec![Finding::note(
            "proxy",
            "none is set: downloads go straight to servers, and uploads, `run` and outages need one",
            "an operator makes an invitation by `cedos prox invite`; here: cedos join LINE",
        )],
        Err(error) => vec![Finding::bad(
            "proxy",
            error.to_string(),
            "`cedos config set proxy.default NAME` names another; `cedos join` adds one",
        )],
    });
    tell(vec![check_clock()]);
    tell(check_permissions().await);
    tell(check_disk(&settings));
    tell(vec![check_sandbox()]);
    tell(vec![queue_finding(
        settings
            .parsed("agent.short_queues", str::parse)
            .unwrap_or(true),
        QueueReach::of_this_user(),
    )]);
    tell(vec![check_agent().await]);
    let is_good = findings
        .iter()
        .all(|found| found.status != FindingStatus::Bad);
    if args.json {
        let told = serde_json::json!({"good": is_good, "checks": findings});
        print_stdout(&told.to_string());
    } else {
        print_stdout(match is_good {
            true => "nothing is wrong",
            false => "something is wrong; see above what to do",
        });
    }
    Ok(match is_good {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn version() -> String {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "cedos {version}, D2TP {}, Linux {}",
        d2tp_driver::PROTOCOL_VERSION,
        kernel.trim()
    )
}

fn settings_finding(settings: &Result<UserSettings, settings::SettingsError>) -> Finding {
    match settings {
        Ok(settings) => {
            let paths: Vec<String> = settings
                .paths()
                .map(|path| path.display().to_string())
                .collect();
            match paths.is_empty() {
                true => Finding::good("settings", "no file; the defaults hold"),
                false => Finding::good("settings", paths.join(", ")),
            }
        }
        Err(error) => Finding::bad(
            "settings",
            error.to_string(),
            "correct it by `cedos config edit`; commands do not start before",
        ),
    }
}

/// This device's key, which is not made here.
fn check_key() -> (Option<SecretKey>, Finding) {
    let key = device_key_path().and_then(|path| match path.exists() {
        true => load_device_key(None).map(Some),
        false => Ok(None),
    });
    match key {
        Ok(Some(key)) => {
            let text = format!("this device is {}", key.public());
            (Some(key), Finding::good("key", text))
        }
        Ok(None) => {
            let advice = "`cedos join` makes one";
            (
                None,
                Finding::note("key", "this device has none yet", advice),
            )
        }
        Err(error) => {
            let advice = "a new device gets its key by `cedos join` or `cedos key show`";
            (None, Finding::bad("key", format!("{error:#}"), advice))
        }
    }
}

async fn check_networks() -> Vec<Finding> {
    let manager = settings::network_manager().await;
    let mut found = vec![match &manager {
        Some(_) => Finding::good("NetworkManager", "answers"),
        None => Finding::note(
            "NetworkManager",
            "does not answer: what networks cost is guessed from what the kernel shows",
            "say what they cost: [[network]] in the settings, or `cedos net set`",
        ),
    }];
    match settings::watch(ClassRules::default(), None).await {
        Ok((monitor, _)) => {
            let links = monitor.links();
            let usable: Vec<String> = links
                .iter()
                .filter(|link| link.kind != LinkKind::Loopback && link.is_usable())
                .map(|link: &Link| format!("{} ({:?})", link.name, link.class.class).to_lowercase())
                .collect();
            found.push(match usable.is_empty() {
                true => Finding::bad(
                    "networks",
                    "none is usable: no link has carrier, address and route",
                    "connect to one; `cedos net` shows why each is not usable",
                ),
                false => Finding::good("networks", usable.join(", ")),
            });
        }
        Err(error) => found.push(Finding::bad(
            "networks",
            format!("{error:#}"),
            "`cedos net` shows more",
        )),
    }
    found
}

/// The proxies that commands use, one after the other.
async fn check_proxies(text: &str, key: Option<SecretKey>) -> Vec<Finding> {
    let list = match text.parse::<ServerList>() {
        Ok(list) => list,
        Err(error) => {
            let advice = "`cedos join` writes a right one into the settings";
            return vec![Finding::bad("proxy", error.to_string(), advice)];
        }
    };
    let mut found = Vec::new();
    for address in list.servers() {
        found.extend(check_proxy(address.clone(), key.clone()).await);
    }
    found
}

/// A proxy: its name, whether UDP reaches it, and whether it lets this device in.
async fn check_proxy(address: ServerAddress, key: Option<SecretKey>) -> Vec<Finding> {
    let server = host_and_port(&address);
    let nodes = match look_up_nodes(&address).await {
        Ok(nodes) => nodes,
        Err(error) => {
            return vec![Finding::bad(
                "proxy",
                format!("{server} has no address: {error}"),
                "check the spelling, and whether names are looked up at all here",
            )];
        }
    };
    let nodes: Vec<(String, SocketAddr)> = nodes
        .iter()
        .filter_map(|(node, all)| Some((node.to_string(), *all.first()?)))
        .collect();
    let Some((_, first)) = nodes.first().cloned() else {
        return Vec::new();
    };
    let probes = nodes.iter().map(|(node, at)| check_udp(node, *at));
    let (udp, tcp) = tokio::join!(
        futures_util::future::join_all(probes),
        check_tcp(&address, first)
    );
    let is_there = udp.iter().any(|(_, is_there)| *is_there);
    let mut udp: Vec<Finding> = udp.into_iter().map(|(finding, _)| finding).collect();
    if is_there {
        // One node that answers is enough.
        let silent = udp.iter_mut().filter(|f| f.status == FindingStatus::Bad);
        silent.for_each(|finding| finding.status = FindingStatus::Note);
    }
    let has_stream = tcp
        .as_ref()
        .is_some_and(|found| found.status == FindingStatus::Good);
    if !is_there && has_stream {
        for udp in &mut udp {
            udp.status = FindingStatus::Note;
            udp.advice = Some("this network blocks UDP; D2TP goes over TCP instead".to_owned());
        }
    }
    let mut found = udp;
    found.extend(tcp);
    if let (true, Some(key)) = (is_there || has_stream, key) {
        found.extend(check_session(&address, &server, key).await);
    }
    found
}

/// Whether UDP reaches the proxy and comes back, without its key.
async fn check_udp(server: &str, at: SocketAddr) -> (Finding, bool) {
    let name = "proxy over UDP";
    match probe_version(at, PROXY_PATIENCE).await {
        Ok(VersionProbeAnswer::Answered {
            versions,
            round_trip,
        }) => {
            let ms = round_trip.as_secs_f64() * 1e3;
            if !versions.contains(&d2tp_driver::PROTOCOL_VERSION) {
                let text = format!("{server} speaks D2TP {versions:?}");
                return (Finding::bad(name, text, "update the older one"), false);
            }
            let text = format!("{server} answers after {ms:.1} ms");
            let finding = match round_trip > FAR {
                true => Finding::note(
                    name,
                    text,
                    "that is far away; a nearer proxy would feel faster",
                ),
                false => Finding::good(name, text),
            };
            (finding, true)
        }
        Ok(VersionProbeAnswer::Rejected(_)) => (
            Finding::bad(
                name,
                format!("nobody listens at {server}"),
                "is the proxy running, and is this its address and port?",
            ),
            false,
        ),
        Ok(VersionProbeAnswer::Silent) => (
            Finding::bad(
                name,
                format!("{server} does not answer"),
                "is the proxy running? Does its firewall let the port pass? If it works from another \
                 network, this one blocks UDP",
            ),
            false,
        ),
        Err(error) => (
            Finding::bad(
                name,
                format!("no socket: {error}"),
                "may this user open sockets?",
            ),
            false,
        ),
    }
}

/// Whether a stream reaches the proxy, as networks that block UDP need it; none if the proxy has no streams.
async fn check_tcp(address: &ServerAddress, at: SocketAddr) -> Option<Finding> {
    let name = "proxy over TCP";
    let port = address.stream_port()?;
    let target = StreamTarget {
        host: address.host.clone(),
        port,
    };
    let http_proxy = http_proxy_for(&target);
    let remote = SocketAddr::new(at.ip(), port);
    let opening = connect(
        &target,
        remote,
        http_proxy.as_ref(),
        |remote| match remote.is_ipv4() {
            true => TcpSocket::new_v4(),
            false => TcpSocket::new_v6(),
        },
    );
    let opened = tokio::time::timeout(PROXY_PATIENCE, opening).await;
    Some(match opened {
        Ok(Ok(_)) => Finding::good(
            name,
            format!("port {port} takes D2TP, for networks that block UDP"),
        ),
        failed => {
            let why = match failed {
                Ok(Err(error)) => error.to_string(),
                _ => format!("no answer within {} s", PROXY_PATIENCE.as_secs()),
            };
            Finding::note(
                name,
                format!("port {port}: {why}"),
                "only networks that block UDP need it: its operator gives `cedos prox --stream-listen`",
            )
        }
    })
}

/// Whether the proxy has the key that is pinned, and lets this device in; and what the path is like.
async fn check_session(address: &ServerAddress, server: &str, key: SecretKey) -> Vec<Finding> {
    let public = key.public();
    let ReachingDevice { device, _links } = match ReachingDevice::new(address, &key).await {
        Ok(reaching) => reaching,
        Err(error) => {
            let advice = "may this user open sockets?";
            return vec![Finding::bad("proxy session", format!("{error:#}"), advice)];
        }
    };
    let mut events = device.events();
    let established = async {
        loop {
            if device.ended().is_some() {
                return false;
            }
            match events.recv().await {
                Ok((_, SessionEvent::Established { .. })) => return true,
                Ok((_, SessionEvent::Closed(_))) | Err(RecvError::Closed) => return false,
                Ok(_) | Err(RecvError::Lagged(_)) => {}
            }
        }
    };
    let established = tokio::time::timeout(PROXY_PATIENCE, established).await;
    let found = match (established, device.ended()) {
        (Ok(true), _) => {
            let mut found = vec![Finding::good(
                "proxy key",
                format!("{server} has the key that is pinned, and lets this device in"),
            )];
            found.push(packet_size(&device, server).await);
            found
        }
        (Ok(false), Some(end)) => {
            let proxy = format!("the proxy {server}");
            let (text, advice) = match session_refusal(&end, &proxy, &public) {
                Some(failure) => (
                    failure.text,
                    "its operator invites this device by `cedos prox invite`; here: cedos join LINE",
                ),
                None => (
                    session_end_text(&end, &proxy),
                    "try again later, or ask its operator",
                ),
            };
            vec![Finding::bad("proxy session", text, advice)]
        }
        _ => vec![Finding::bad(
            "proxy key",
            format!("{server} answers, but not with the key that is pinned"),
            "the proxy has a new key, or another one is there: join again with a line from its operator",
        )],
    };
    device.close().await;
    found
}

/// The largest packet that the path to the proxy carries.
async fn packet_size(device: &Device, server: &str) -> Finding {
    let size = || device.paths().first().map(|path| (path.mtu, path.rtt));
    let begun = tokio::time::Instant::now();
    // Without payload, sizes are not probed; a proxy that does not answer is seen by the sizes.
    let refused = send_refused_request(device, server);
    let _ = tokio::time::timeout(PACKET_SIZE_PATIENCE / 2, refused).await;
    let mut last = size();
    // It grows by probes, a round trip each.
    while begun.elapsed() < PACKET_SIZE_PATIENCE {
        tokio::time::sleep(PACKET_SIZE_PATIENCE / 10).await;
        let now = size();
        if now == last && begun.elapsed() > PACKET_SIZE_PATIENCE / 2 {
            break;
        }
        last = now;
    }
    last.map_or_else(
        || Finding::note("path", "it ended before it was measured", "try again"),
        |(bytes, rtt)| path_finding(bytes, rtt.into()),
    )
}

/// Sends a request with a long head that no proxy carries out, and reads the answer.
async fn send_refused_request(device: &Device, server: &str) -> anyhow::Result<()> {
    let mut flow = device.open(FlowSettings::default())?;
    let padding = "x".repeat(PADDING_BYTES);
    let head = format!("OPTIONS * HTTP/1.1\r\nhost: {server}\r\npadding: {padding}\r\n\r\n");
    flow.write_all(head.as_bytes()).await?;
    flow.shutdown().await?;
    let mut answer = flow.take(ANSWER_BYTES_MAX);
    tokio::io::copy(&mut answer, &mut tokio::io::sink()).await?;
    Ok(())
}

/// What the sizes of packets that pass say about a path.
fn path_finding(bytes: usize, rtt: Duration) -> Finding {
    let ms = rtt.as_secs_f64() * 1e3;
    let text = format!("packets of {bytes} bytes pass, round trip {ms:.1} ms");
    match bytes <= PACKET_BYTES_FIRST {
        true => Finding::note(
            "path",
            text + "; larger ones do not",
            "transfers work, and cost more processor time: a tunnel or VPN on the way has a small MTU",
        ),
        false => Finding::good("path", text),
    }
}

/// Whether the clock is kept right: deadlines and invitations are times of day.
fn check_clock() -> Finding {
    let now = jiff::Zoned::now();
    let shown = now.strftime("%Y-%m-%d %H:%M %Z").to_string();
    let is_synchronized = [
        "/run/systemd/timesync/synchronized",
        "/run/chrony/chronyd.pid",
        "/run/chronyd.pid",
        "/run/ntpd.pid",
        "/run/openntpd.pid",
    ];
    if is_synchronized.iter().any(|path| Path::new(path).exists()) {
        return Finding::good("clock", shown);
    }
    Finding::note(
        "clock",
        format!("{shown}; nothing seems to keep it right"),
        "if that is wrong, --by is, too: enable systemd-timesyncd or chrony",
    )
}

/// What `cedos run` and the agent need of the kernel.
async fn check_permissions() -> Vec<Finding> {
    let mut found = vec![check_namespaces(), check_seccomp(), check_socket_binding()];
    match LinuxMachine::open().await {
        Ok(machine) => {
            let limitations = machine.limitations();
            if limitations.is_empty() {
                found.push(Finding::good(
                    "sleep",
                    "the agent can wake this machine and keep it awake",
                ));
            }
            found.extend(limitations.into_iter().map(|text| {
                let advice = "only devices that sleep need it: docs/agent.md says how to allow it";
                Finding::note("sleep", text, advice)
            }));
        }
        Err(error) => found.push(Finding::note(
            "sleep",
            format!("the kernel gives no alarms: {error}"),
            "only devices that sleep need them",
        )),
    }
    found
}

fn read_number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn check_namespaces() -> Finding {
    let name = "namespaces";
    if nix::unistd::geteuid().is_root() {
        return Finding::good(name, "this is root");
    }
    namespaces_of_user(read_number)
}

/// Whether the kernel's settings, by the paths of their files, let an ordinary user make namespaces.
fn namespaces_of_user(setting: impl Fn(&str) -> Option<u64>) -> Finding {
    let name = "namespaces";
    let none = setting("/proc/sys/user/max_user_namespaces") == Some(0);
    let forbidden = setting("/proc/sys/kernel/unprivileged_userns_clone") == Some(0);
    let by_apparmor = setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1);
    let advice = match (none, forbidden, by_apparmor) {
        (true, ..) => "sysctl user.max_user_namespaces=10000",
        (_, true, _) => "sysctl kernel.unprivileged_userns_clone=1",
        (.., true) => {
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a profile for cedos"
        }
        _ => return Finding::good(name, "this user may make them"),
    };
    let text = "this user may not make them: `run --strict` and static programs do not work";
    Finding::note(name, text, advice)
}

fn check_seccomp() -> Finding {
    let name = "socket filters";
    let actions = std::fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail");
    match actions {
        Ok(actions)
            if actions
                .split_whitespace()
                .any(|action| action == "user_notif") =>
        {
            Finding::good(name, "the kernel can hand over system calls of programs")
        }
        _ => Finding::note(
            name,
            "the kernel has no seccomp notifications: `run` cannot catch programs without libc",
            "Linux 5.9 has them",
        ),
    }
}

/// Whether a socket can be bound to a link: each network gets its own.
fn check_socket_binding() -> Finding {
    let name = "sockets per network";
    let bound = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None)
        .and_then(|socket| socket.bind_device(Some(b"lo")));
    match bound {
        Ok(()) => Finding::good(name, "this user may bind sockets to links"),
        Err(error) => Finding::bad(
            name,
            format!("this user may not bind sockets to links: {error}"),
            "Linux 5.7 and later allow it to everybody; a sandbox may forbid it",
        ),
    }
}

fn check_disk(settings: &UserSettings) -> Vec<Finding> {
    let downloads = settings.path("directories.downloads");
    let downloads = downloads.or_else(|| std::env::current_dir().ok());
    let places = [
        ("disk for downloads", downloads),
        ("disk for the state", state_directory().ok()),
    ];
    let room = places.into_iter().filter_map(|(name, path)| {
        let path = path?;
        // What does not exist yet will be made on the disk of its parent.
        let there = path.ancestors().find(|path| path.exists())?;
        let stats = statvfs(there).ok()?;
        let free = stats.blocks_available() as u64 * stats.fragment_size() as u64;
        let text = format!("{} free in {}", human_bytes(free), path.display());
        let is_writable = nix::unistd::access(there, nix::unistd::AccessFlags::W_OK).is_ok();
        Some(match (is_writable, free < ROOM_MIN) {
            (false, _) => {
                let text = format!("this user may not write into {}", path.display());
                Finding::bad(
                    name,
                    text,
                    "choose another: `cedos config set directories.…`, or -o",
                )
            }
            (true, true) => Finding::note(name, text, "make room before a large download"),
            (true, false) => Finding::good(name, text),
        })
    });
    room.collect()
}

async fn check_agent() -> Finding {
    let Some(mut agent) = AgentApiClient::connect().await else {
        return Finding::good("agent", "does not run; commands that need it start it");
    };
    let hello = agent.ask(&AgentRequest::Hello).await.unwrap_or_default();
    let is_filtered = hello["pid"].as_u64().and_then(has_filter);
    agent_finding(&hello, is_filtered)
}

/// What an agent that answers is like; `is_filtered` is none if the system does not say.
fn agent_finding(hello: &Value, is_filtered: Option<bool>) -> Finding {
    let own = env!("CARGO_PKG_VERSION");
    let running = hello["agent"].as_str().unwrap_or(own);
    if running != own {
        return Finding::note(
            "agent",
            format!("version {running} runs, and this is {own}"),
            "start it again: `systemctl --user restart cedos-agent`, or end it; its transfers continue",
        );
    }
    match is_filtered {
        Some(false) => Finding::note(
            "agent",
            "runs without its sandbox",
            "start it without --no-sandbox, and set agent.sandbox to true, so that it gives up what it does not need",
        ),
        _ => Finding::good("agent", "runs"),
    }
}

/// Whether the system calls of a process are filtered; none if the system does not say.
fn has_filter(pid: u64) -> Option<bool> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let mode = status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"))?;
    Some(mode.trim() == "2")
}

/// Who keeps the queues of bloated networks short for programs, if anybody does.
fn queue_finding(is_wanted: bool, reach: QueueReach) -> Finding {
    let name = "short queues";
    match (is_wanted, reach) {
        (_, QueueReach::Service) => Finding::good(
            name,
            "a system service keeps the queues of bloated networks short for all programs",
        ),
        (false, _) => Finding::good(name, "switched off by agent.short_queues"),
        (true, QueueReach::Agent) => Finding::good(
            name,
            "an agent keeps the queues of bloated networks short for this user's programs",
        ),
        (true, QueueReach::Nobody(barrier)) => Finding::note(
            name,
            format!("the agent does it for its own transfers, and not for programs: {barrier}"),
            "a system service does it for all users: cedos agent --short-queues-of-all-users",
        ),
    }
}

/// Whether this kernel has what the sandboxes of proxy and agent are made of.
fn check_sandbox() -> Finding {
    match check_file_restriction() {
        Ok(()) => Finding::good(
            "sandbox",
            "this kernel restricts the files of proxy and agent",
        ),
        Err(reason) => Finding::note(
            "sandbox",
            format!("proxy and agent can use every file of their users: {reason}"),
            "a kernel with `landlock` in /sys/kernel/security/lsm restricts them",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_tcp::ReachBarrier;

    #[test]
    fn what_is_bad_says_what_to_do() {
        let bad = Finding::bad("x", "is broken", "mend it");
        assert_eq!(
            (bad.status, bad.advice.as_deref()),
            (FindingStatus::Bad, Some("mend it"))
        );
        let told = serde_json::to_value(&bad).unwrap();
        assert_eq!(told["status"], "bad");
        assert_eq!(Finding::good("x", "works").advice, None);
    }

    #[test]
    fn a_path_that_carries_only_the_smallest_packets_is_named() {
        let rtt = Duration::from_millis(40);
        let small = path_finding(PACKET_BYTES_FIRST, rtt);
        assert_eq!(small.status, FindingStatus::Note);
        assert_eq!(path_finding(1472, rtt).status, FindingStatus::Good);
    }

    #[test]
    fn what_forbids_namespaces_to_ordinary_users_is_named() {
        let with = |name: &'static str, value| {
            namespaces_of_user(move |path| path.ends_with(name).then_some(value))
        };
        for (name, value) in [
            ("max_user_namespaces", 0),
            ("unprivileged_userns_clone", 0),
            ("apparmor_restrict_unprivileged_userns", 1),
        ] {
            let found = with(name, value);
            assert_eq!(found.status, FindingStatus::Note);
            assert!(found.advice.unwrap().contains(name));
            assert_eq!(with(name, 1 - value).status, FindingStatus::Good);
        }
        assert_eq!(namespaces_of_user(|_| None).status, FindingStatus::Good);
    }

    #[test]
    fn what_keeps_the_queues_of_programs_long_is_named() {
        let yama = QueueReach::Nobody(ReachBarrier::PtraceScope(1));
        let found = queue_finding(true, yama);
        assert_eq!(found.status, FindingStatus::Note);
        assert!(found.text.contains("ptrace_scope = 1"), "{}", found.text);
        for (is_wanted, reach) in [
            (true, QueueReach::Agent),
            (false, yama),
            (false, QueueReach::Agent),
            (true, QueueReach::Service),
        ] {
            let found = queue_finding(is_wanted, reach);
            assert_eq!(found.status, FindingStatus::Good);
        }
    }

    #[test]
    fn an_agent_that_is_older_than_its_command_is_named() {
        let hello = |version| serde_json::json!({"agent": version, "pid": 1});
        let older = agent_finding(&hello("0.0.9"), Some(true));
        assert_eq!(older.status, FindingStatus::Note);
        assert!(older.text.contains("0.0.9"), "{}", older.text);
        let same = agent_finding(&hello(env!("CARGO_PKG_VERSION")), Some(true));
        assert_eq!(same.status, FindingStatus::Good);
    }

    #[test]
    fn settings_that_make_no_sense_are_bad() {
        let error = settings::SettingsError {
            path: None,
            text: "there is no setting `x`".into(),
        };
        let found = settings_finding(&Err(error));
        assert_eq!(found.status, FindingStatus::Bad);
        assert!(found.text.contains("no setting"), "{}", found.text);
    }
}
