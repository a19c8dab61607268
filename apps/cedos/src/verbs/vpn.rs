//! `cedos vpn`: brings the VPN up, keeps it up, and ends it.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use cedos_agent::fetch::report::human_bytes;
use cedos_agent::proxy::{
    ConnOptions, MeteredPackets, PacketTunnel, ProxySession, ProxySessionPeer, RefusalCause,
    RuleTraffic, TrafficRule,
};
use cedos_agent::settings::{SettingsError, UserSettings};
use cedos_terminal::{print_stderr, print_stdout, stdout_result};
use clap::{ArgAction, Args, Subcommand};
use d2tp_driver::{AckOffload, Mirroring, ServerList};
use d2tp_links::{ClassRule, Link};
use d2tp_sched::CostPolicy;
use d2tp_session::DrwaLambda;
use d2tp_tunnel::{INNER_MTU_MIN, PACKET_CONTEXT, TunDevice};
use nix::sys::signal::{Signal, kill};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::descriptor_limit::raise_descriptor_limit;
use super::device_links::watch_links;
use super::key;
use super::log_levels::log_warnings;
use super::proxy_options::ProxyOptions;
use super::transfer_args::{parse_offload, word_parser};
use super::transport::TransportArgs;
use crate::help::{COST_AND_TIME, EXPERT};
use crate::vpn::{
    DEVICE, PacketCarrier, PacketRules, RepairCounts, RuleConnections, RuleSet, RuleStatus,
    RunningVpn, ScopeEntry, TcpFlows, TcpMode, TunnelScope, VpnRoutes, VpnRules, VpnState,
    VpnStatus, remove_kill_switch, remove_rules, set_kill_switch,
};

/// Where the state is: it need not survive a restart of the machine, and neither does the VPN.
const STATE_DIR: &str = "/run/cedos-vpn";

/// How often the status is recorded.
const STATUS_EVERY: Duration = Duration::from_secs(1);

/// How long a VPN may take to end.
const DOWN_WITHIN: Duration = Duration::from_secs(10); // a guess: its connections get 5 s

/// Send everything of this machine through the proxy
///
/// TCP connections become flows, which survive outages of hours; UDP, ping and the rest travel as packets, and the
/// machine has the same inner address on every network. The proxy must allow it (`cedos prox --tunnel-net`). Linux, as
/// root; needs the programs ip and nft.
#[derive(Debug, Args)]
pub struct VpnArgs {
    #[command(subcommand)]
    verb: VpnVerb,
}

#[derive(Debug, Subcommand)]
enum VpnVerb {
    Up(Box<VpnUpArgs>),
    /// End the VPN, and restore the system's network
    ///
    /// Also what a VPN left that was killed. Exit codes: 0 done, 1 error, 2 usage.
    Down(VpnStateArgs),
    /// Show whether the VPN is up
    ///
    /// Exit codes: 0 it is up, 1 it is not, 2 usage.
    Status(VpnStatusArgs),
}

/// Where the VPN's state is.
#[derive(Debug, Args)]
struct VpnStateArgs {
    /// Directory of the VPN's state
    #[arg(long, value_name = "DIR", default_value = STATE_DIR, help_heading = EXPERT)]
    state_dir: PathBuf,
}

#[derive(Debug, Args)]
struct VpnStatusArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    state: VpnStateArgs,
}

/// Start the VPN, and keep it up until Ctrl-C or `cedos vpn down`
///
/// Prints this machine's inner addresses once the VPN is up.
#[derive(Debug, Args)]
struct VpnUpArgs {
    /// How TCP is carried
    #[arg(long, value_name = "MODE", default_value = "flows")]
    tcp: TcpMode,

    /// Send only this network, or the programs of this cgroup (cgroup:PATH), through the proxy; names are looked up as
    /// before (repeatable) [default: all]
    #[arg(long, value_name = "CIDR|CGROUP", action = ArgAction::Append, value_delimiter = ',')]
    include: Vec<ScopeEntry>,

    /// Leave this network, or the programs of this cgroup (cgroup:PATH), outside (repeatable). Networks of this machine's
    /// own links are outside anyhow
    #[arg(long, value_name = "CIDR|CGROUP", action = ArgAction::Append, value_delimiter = ',')]
    exclude: Vec<ScopeEntry>,

    /// Refuse everything that would leave outside the VPN, also after it ended, until `cedos vpn down`
    #[arg(long)]
    kill_switch: bool,

    /// When traffic may use metered networks that no rule is for [default: any]
    #[arg(long, value_parser = word_parser::<CostPolicy, 5>(CostPolicy::ALL.map(CostPolicy::as_str)), help_heading = COST_AND_TIME)]
    policy: Option<CostPolicy>,

    /// When some traffic may use metered networks: "port 443 = free-only", "udp port 3478-3481 = any", "dscp ef = any",
    /// "cgroup PATH = by 2h" (repeatable; the first that matches decides)
    #[arg(long, value_name = "RULE", action = ArgAction::Append, help_heading = COST_AND_TIME)]
    rule: Vec<TrafficRule>,

    #[command(flatten)]
    proxy: ProxyOptions,

    /// This device's private key file [default: $CEDOS_KEY_FILE, or ~/.config/cedos/key]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,

    /// Set what a network costs: wwan0=metered, wlan0=free, rmnet*=roaming
    #[arg(long, value_name = "NAME=CLASS", action = ArgAction::Append, help_heading = COST_AND_TIME)]
    link: Vec<ClassRule>,

    /// With --tcp packets: send ACKs for Wi-Fi over other networks, which makes Wi-Fi faster: never, over free networks, or
    /// also over metered ones, up to this many bytes a second
    #[arg(long, value_name = "never|free|BYTES", default_value = "free", value_parser = parse_offload, help_heading = EXPERT)]
    offload_acks: AckOffload,

    /// Keep the queues of slow networks short, so that a call does not wait behind downloads: limit the round trip to LAMBDA
    /// times the shortest one [default without a value: 3]
    #[arg(long, value_name = "LAMBDA", num_args = 0..=1, require_equals = true, default_missing_value = "3", help_heading = EXPERT)]
    drwa: Option<DrwaLambda>,

    #[command(flatten)]
    transport: TransportArgs,

    #[command(flatten)]
    state: VpnStateArgs,
}

/// Runs `cedos vpn`.
///
/// # Errors
/// The VPN cannot be started or ended.
pub async fn run(args: VpnArgs) -> anyhow::Result<ExitCode> {
    match args.verb {
        VpnVerb::Up(args) => up(*args).await.map(|()| ExitCode::SUCCESS),
        VpnVerb::Down(args) => down(&args).await.map(|()| ExitCode::SUCCESS),
        VpnVerb::Status(args) => status(&args),
    }
}

async fn up(args: VpnUpArgs) -> anyhow::Result<()> {
    log_warnings("cedos vpn");
    raise_descriptor_limit();
    let address = args.proxy.address()?.filter(|text| !text.is_empty());
    let address = address
        .context("no proxy: join one (`cedos join LINE`), or give --prox d2tp://host:port/KEY")?;
    let options = ConnOptions::of(None, args.policy, &jiff::Zoned::now());
    let options = options.map_err(|text| anyhow!("{text}"))?;
    let mut rules = args.rule.clone();
    let of_settings = UserSettings::load(None)?.parsed("vpn.rules", TrafficRule::parse_list);
    rules.extend(of_settings.unwrap_or_default());
    for rule in &rules {
        ConnOptions::of_rule(rule, &jiff::Zoned::now()).map_err(|text| SettingsError {
            path: None,
            text: format!("{rule}: {text}"),
        })?;
    }
    let rules = Arc::new(RuleSet::new(rules, options)?);
    if args.tcp == TcpMode::Packets && rules.has_cgroups() {
        bail!("packets do not tell which program sent them: a rule for a cgroup needs --tcp flows");
    }
    let include = TunnelScope::find(&args.include)?;
    let exclude = TunnelScope::find(&args.exclude)?;
    let key = key::load_device_key(args.key.as_deref())?;
    let mut stop = StopSignals::listen()?;
    let state = VpnState::take(&args.state.state_dir)?;
    let _machine = take_machine(&args.state.state_dir)?;
    if !args.kill_switch {
        remove_kill_switch();
    }
    let (servers, proxies) = resolve(&address.parse()?).await?;
    if args.kill_switch {
        set_kill_switch(&proxies, &exclude, &include)?;
    }
    // What a VPN left that was killed.
    remove_rules();
    let monitor = watch_links(&args.link)
        .await
        .map_err(|failure| anyhow!(failure.text))?;
    let (links, _following) = links_without_tunnel(monitor.subscribe());
    let session = ProxySession::new(ProxySessionPeer::Prox, servers, key, links, |config| {
        args.transport.apply(config);
        config.ack_offload = args.offload_acks;
        config.drwa = args.drwa;
        let is_paid = matches!(config.mirroring, Mirroring::Paid { .. });
        if is_paid && args.tcp == TcpMode::Packets && !rules.lets_some_packets_pay() {
            config.mirroring = Mirroring::Free;
        }
    });
    session.set_answer_limit(None);
    session.report_carriers();
    if let Ok(agent) = cedos_agent::agent::socket_path() {
        session.set_agent(agent);
    }
    let wanted = VpnRoutes {
        addresses: Vec::new(),
        gateways: Vec::new(),
        proxies,
        include,
        exclude,
        redirects: Vec::new(),
        rules,
    };
    let ended = tokio::select! {
        ended = serve(&args, &session, wanted, &state) => ended,
        () = stop.wait() => Ok(()),
    };
    session.close().await;
    if args.kill_switch {
        print_stderr("cedos vpn: the kill switch stays until `cedos vpn down`");
    }
    ended
}

/// The default directory too, whatever this VPN's own is: a machine has one VPN.
fn take_machine(directory: &Path) -> anyhow::Result<Option<VpnState>> {
    let default = Path::new(STATE_DIR);
    let is_other = directory != default;
    is_other.then(|| VpnState::take(default)).transpose()
}

/// Brings the VPN up, and keeps it up. What it changed is restored when this is dropped. `wanted` has no inner addresses
/// and listeners yet.
async fn serve(
    args: &VpnUpArgs,
    session: &Arc<ProxySession>,
    wanted: VpnRoutes,
    state: &VpnState,
) -> anyhow::Result<()> {
    let rules = wanted.rules.clone();
    let options = rules.tunnel_options();
    let metered = match rules.is_empty() {
        true => MeteredPackets::All,
        false => MeteredPackets::AnswersOnly,
    };
    session.set_reports_failures(false);
    let tunnel = first_tunnel(session, options, metered).await?;
    session.set_reports_failures(true);
    let tun = Arc::new(TunDevice::create(DEVICE, INNER_MTU_MIN)?);
    let flows = match args.tcp {
        TcpMode::Flows => Some(TcpFlows::listen(session, &rules).await?),
        TcpMode::Packets => None,
    };
    let routes = VpnRoutes {
        addresses: tunnel.addresses.clone(),
        gateways: tunnel.gateways.clone(),
        redirects: flows
            .as_ref()
            .map(|flows| flows.redirects().to_vec())
            .unwrap_or_default(),
        ..wanted
    };
    let _rules = VpnRules::set(&routes)?;
    let packet_rules = match rules.is_empty() {
        true => None,
        false => Some(Arc::new(PacketRules::new(rules.clone()))),
    };
    let carrier = PacketCarrier::new(
        session.clone(),
        options,
        packet_rules.clone(),
        tun,
        routes.addresses.clone(),
        INNER_MTU_MIN,
    );
    let mut carrying = std::pin::pin!(carrier.clone().run(tunnel));
    print_stdout(&format!("cedos vpn: up as {}", list(&routes.addresses)));
    stdout_result()?;
    let mut known = VpnStatus::default();
    loop {
        let now = VpnStatus {
            connected: carrier.connected().is_ok(),
            reason: carrier.connected().err().flatten(),
            addresses: routes.addresses.clone(),
            mtu_bytes: carrier.mtu(),
            tcp: match args.tcp {
                TcpMode::Flows => "flows".to_owned(),
                TcpMode::Packets => "packets".to_owned(),
            },
            // The tunnel's own flow is one of them.
            flows: session.connections().saturating_sub(1),
            packets: carrier.counts(),
            repairs: carrier.repairs(),
            rules: match &packet_rules {
                Some(packets) => rule_statuses(session, &rules, packets),
                None => Vec::new(),
            },
        };
        if now != known {
            state.report(&now);
            known = now;
        }
        tokio::select! {
            () = &mut carrying => bail!("the network device {DEVICE} is gone"),
            () = tokio::time::sleep(STATUS_EVERY) => {}
        }
    }
}

/// What traffic of each rule has used, and last everything else.
fn rule_statuses(
    session: &ProxySession,
    rules: &RuleSet,
    packets: &PacketRules,
) -> Vec<RuleStatus> {
    let status = |number| {
        let RuleTraffic {
            connections: total,
            open,
            free_bytes,
            metered_bytes,
        } = session.rule_traffic(number);
        let rule = rules.rule(number);
        RuleStatus {
            traffic: rule.map(|rule| rule.traffic_text().to_owned()),
            policy: match rule {
                Some(rule) => rule.policy_text().to_owned(),
                None => rules.rest_policy().as_str().to_owned(),
            },
            connections: RuleConnections {
                open,
                total,
                free_bytes,
                metered_bytes,
            },
            packets: packets.counts(number),
        }
    };
    rules.numbers().map(status).collect()
}

/// The first tunnel, for which a proxy that is silent is waited for. One that does not admit this device is not.
async fn first_tunnel(
    session: &Arc<ProxySession>,
    options: ConnOptions,
    metered: MeteredPackets,
) -> anyhow::Result<PacketTunnel> {
    let mut said = None;
    loop {
        let opened = session.open_packet_tunnel(PACKET_CONTEXT, options, metered);
        match opened.await {
            Ok(tunnel) => return Ok(tunnel),
            Err(refusal) if refusal.cause == RefusalCause::NoProxy => {
                if let Some(text) = session.proxy_refusal() {
                    bail!("{text}");
                }
                if said.as_ref() != Some(&refusal.text) {
                    print_stderr(&format!(
                        "cedos vpn: waiting for the proxy: {}",
                        refusal.text
                    ));
                    said = Some(refusal.text);
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            Err(refusal) => bail!("{}", refusal.text),
        }
    }
}

/// The servers by address, and all their addresses: once the VPN is up, names are looked up through it.
async fn resolve(servers: &ServerList) -> anyhow::Result<(ServerList, Vec<IpAddr>)> {
    let mut addresses = Vec::new();
    for server in servers.servers() {
        let host = server.host.trim_matches(['[', ']']);
        let found = tokio::net::lookup_host((host, server.port)).await;
        let found = found.with_context(|| {
            format!("cannot find the proxy {host}. Check the name, or give its address")
        })?;
        addresses.extend(found.map(|at| at.ip()));
    }
    let pinned = match (servers.servers(), addresses.first()) {
        ([only], Some(first)) => {
            let mut only = only.clone();
            only.host = first.to_string();
            only.into()
        }
        _ => servers.clone(),
    };
    Ok((pinned, addresses))
}

/// The machine's links but the VPN's own.
fn links_without_tunnel(
    mut all: watch::Receiver<Arc<Vec<Link>>>,
) -> (watch::Receiver<Arc<Vec<Link>>>, AbortOnDropHandle<()>) {
    let others = |links: &[Link]| {
        Arc::new(
            links
                .iter()
                .filter(|link| link.name != DEVICE)
                .cloned()
                .collect::<Vec<_>>(),
        )
    };
    let (sender, receiver) = watch::channel(others(&all.borrow_and_update()));
    let following = tokio::spawn(async move {
        while all.changed().await.is_ok() {
            let now = others(&all.borrow_and_update());
            sender.send_if_modified(|known| {
                let differs = *known != now;
                *known = now;
                differs
            });
        }
    });
    (receiver, AbortOnDropHandle::new(following))
}

async fn down(args: &VpnStateArgs) -> anyhow::Result<()> {
    let directory = &args.state_dir;
    let failed = || format!("cannot read {}", directory.display());
    let own = VpnState::running(directory).with_context(failed)?;
    let machine = VpnState::running(Path::new(STATE_DIR));
    let machine = machine.with_context(|| format!("cannot read {STATE_DIR}"))?;
    if machine.is_some() && machine != own {
        bail!(
            "the VPN that is up is not that of {}; `cedos vpn down` without --state-dir ends it",
            directory.display()
        );
    }
    if let Some(RunningVpn(process)) = own {
        kill(process, Signal::SIGTERM)
            .context("cannot end the VPN; `cedos vpn down` needs root")?;
        let over = async {
            while VpnState::running(directory).with_context(failed)?.is_some()
                || VpnState::running(Path::new(STATE_DIR))?.is_some()
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(DOWN_WITHIN, over).await {
            Ok(over) => over?,
            Err(_) => bail!(
                "process {process} does not end; end it with `kill -9 {process}`, then `cedos vpn down` again"
            ),
        }
    }
    remove_rules();
    remove_kill_switch();
    Ok(())
}

fn status(args: &VpnStatusArgs) -> anyhow::Result<ExitCode> {
    let directory = &args.state.state_dir;
    let running = VpnState::running(directory)
        .with_context(|| format!("cannot read {}", directory.display()))?;
    let status = running.and_then(|_| VpnState::status(directory));
    if args.json {
        print_stdout(&serde_json::json!({ "up": running.is_some(), "vpn": status }).to_string());
    } else {
        print_stdout(&in_words(running.is_some(), status.as_ref()));
    }
    Ok(match running {
        Some(_) => ExitCode::SUCCESS,
        None => ExitCode::FAILURE,
    })
}

fn in_words(is_up: bool, status: Option<&VpnStatus>) -> String {
    let Some(status) = status else {
        return match is_up {
            true => "The VPN is starting: it waits for the proxy.".to_owned(),
            false => "The VPN is down.".to_owned(),
        };
    };
    let connected = match (&status.reason, status.connected) {
        (_, true) => "up".to_owned(),
        (Some(reason), false) => format!("up, without the proxy now ({reason})"),
        (None, false) => "up, without the proxy now".to_owned(),
    };
    let packets = status.packets;
    let repairs = repairs_in_words(&status.repairs);
    let lines = format!(
        "The VPN is {connected}.\nAddresses  {}\nMTU        {} bytes\nTCP        as {}, {} now\nPackets    {} sent, {} received, {} dropped",
        list(&status.addresses),
        status.mtu_bytes,
        status.tcp,
        status.flows,
        packets.sent,
        packets.received,
        packets.dropped,
    ) + &repairs;
    let rules = status.rules.iter().map(rule_in_words);
    [lines]
        .into_iter()
        .chain(rules)
        .collect::<Vec<_>>()
        .join("\n")
}

/// A line about lost segments; empty if there were none.
fn repairs_in_words(repairs: &RepairCounts) -> String {
    let RepairCounts {
        same_network,
        other_network,
        metered_sent_bytes,
        metered_received,
        metered_received_bytes,
    } = *repairs;
    if same_network + other_network + metered_received == 0 {
        return String::new();
    }
    format!(
        "\nRepairs    {same_network} sent again over the same network, {other_network} over another; over metered ones {} sent, {} received",
        human_bytes(metered_sent_bytes),
        human_bytes(metered_received_bytes),
    )
}

fn rule_in_words(rule: &RuleStatus) -> String {
    let traffic = rule.traffic.as_deref().unwrap_or("everything else");
    let (connections, packets) = (rule.connections, rule.packets);
    let free = connections.free_bytes + packets.free_bytes;
    let metered = connections.metered_bytes + packets.metered_bytes;
    format!(
        "Rule       {traffic} = {}: {} connections, {} packets, {} refused; {} over free networks, {} over metered ones",
        rule.policy,
        connections.total,
        packets.sent + packets.received,
        packets.refused,
        human_bytes(free),
        human_bytes(metered),
    )
}

fn list(addresses: &[IpAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    texts.join(", ")
}

/// SIGTERM, SIGHUP and Ctrl-C.
struct StopSignals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl StopSignals {
    fn listen() -> anyhow::Result<StopSignals> {
        let listen = |kind| signal(kind).context("cannot wait for signals");
        Ok(StopSignals {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
