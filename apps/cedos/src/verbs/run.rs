//! `cedos run -- CMD`: turns options into a running program, and the transport of its connections.
//!
//! Everything up to the program's start happens before this process has threads.

use cedos_terminal::print_stderr;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use cedos_agent::fetch::deadline_text::describe_deadline;
use cedos_agent::fetch::option_parsers;
use cedos_agent::proxy::{
    ClientPolicy, ConnOptions, LocalProxyListener, NameLookup, ProxySession, ProxySessionPeer,
};
use cedos_prox::parse_key;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use d2tp_catch::{
    Executable, LaunchPlan, LaunchResources, LookupNamespace, PRELOAD, ProgramNamespace, VARIABLE,
    launch,
};
use d2tp_driver::{Admission, PublicKey, ServerAddress, ServerList};
use d2tp_links::ClassRule;
use d2tp_sched::CostPolicy;
use tokio::sync::mpsc;

use super::descriptor_limit::raise_descriptor_limit;
use super::device_links::watch_links;
use super::key;
use super::log_levels::log_warnings;
use super::proxy_options::ProxyOptions;
use super::transfer_args::word_parser;
use super::transport::TransportArgs;
use crate::help::{COST_AND_TIME, EXPERT};
use crate::run::{
    CallHandler, CaptureChoice, CaptureMode, ProgramServers, ProgramServing, SignalForwarder,
    choose, ensure_library, take_packets, wait_for_program,
};

/// Run a program as it is, with its connections over D2TP
///
/// Its TCP connections go through the proxy, move between networks and survive outages; the proxy
/// resolves names. With --listen its own listener becomes a D2TP server. Standard error says how the
/// program is caught, and the server's address.
///
/// The exit code is the program's, and so is the signal that ends it; 1 if it could not be run, 2 for
/// wrong usage.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Allow connections only through the proxy: the program gets its own network namespace
    #[arg(long)]
    strict: bool,

    /// End connections at TIME: 07:30 (the next one), 7pm, tomorrow 07:30, friday 16:00, 2030-01-31 07:30,
    /// +45m
    #[arg(long, value_name = "TIME", help_heading = COST_AND_TIME)]
    by: Option<String>,

    /// When to use metered networks [default: any; free-first with --by]
    #[arg(long, value_parser = word_parser::<CostPolicy, 5>(CostPolicy::ALL.map(CostPolicy::as_str)), help_heading = COST_AND_TIME)]
    policy: Option<CostPolicy>,

    #[command(flatten)]
    proxy: ProxyOptions,

    /// Refuse connections when the proxy has not answered for this long although a network is up; 0: they
    /// wait as long as the program does
    #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = parse_answer_limit, help_heading = EXPERT)]
    proxy_timeout: AnswerLimit,

    /// Connect to this D2TP server instead, whatever host and port the program names: d2tp://host:port/KEY,
    /// as `cedos run --listen` prints it
    #[arg(long, value_name = "ADDR", conflicts_with = "listen")]
    to: Option<String>,

    /// This device's private key file [default: $CEDOS_KEY_FILE, or ~/.config/cedos/key]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,

    /// Set what a network costs: wwan0=metered, wlan0=free, rmnet*=roaming
    #[arg(long, value_name = "NAME=CLASS", action = ArgAction::Append, help_heading = COST_AND_TIME)]
    link: Vec<ClassRule>,

    /// How to catch its connections [default: the first of these that works]
    #[arg(long, value_name = "RUNG", value_parser = PossibleValuesParser::new(CaptureMode::ALL.map(CaptureMode::as_str)).try_map(|word| word.parse::<CaptureMode>()), help_heading = EXPERT)]
    rung: Option<CaptureMode>,

    /// The program is a server: make each TCP port at which it listens a D2TP server
    #[arg(long)]
    listen: bool,

    /// UDP address for the first of its ports [default: the same number, on all addresses]
    #[arg(long, value_name = "ADDR", requires = "listen")]
    at: Option<SocketAddr>,

    /// Public key of a client that may connect (repeatable)
    // One key in 64 begins with a hyphen.
    #[arg(long = "allow-client", value_name = "KEY", value_parser = parse_key, allow_hyphen_values = true, requires = "listen")]
    allow_clients: Vec<[u8; 32]>,

    /// Allow any client
    #[arg(long, requires = "listen")]
    allow_any_client: bool,

    #[command(flatten)]
    transport: TransportArgs,

    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// How long a proxy may take to answer; `None`: forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AnswerLimit(Option<Duration>);

/// Reads a length of time, or `0` for no limit. A number alone is seconds.
fn parse_answer_limit(text: &str) -> Result<AnswerLimit, String> {
    match text.parse::<u64>() {
        Ok(0) => Ok(AnswerLimit(None)),
        Ok(seconds) => Ok(AnswerLimit(Some(Duration::from_secs(seconds)))),
        Err(_) => option_parsers::parse_span(text).map(|span| AnswerLimit(Some(span))),
    }
}

/// Exit code of a command line that makes no sense.
const USAGE: u8 = 2;

/// Runs `cedos run`. Must be called before this process has threads.
///
/// # Errors
/// The program could not be run, or its connections not be carried.
pub fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let prepared = match prepare(&args) {
        Ok(prepared) => prepared,
        Err(error) => {
            print_stderr(&format!("cedos run: {error:#}"));
            return Ok(ExitCode::from(USAGE));
        }
    };
    log_warnings("cedos run");
    // Refused by qemu, which runs programs of another processor, for example.
    if let Err(error) = nix::sys::prctl::set_child_subreaper(true) {
        tracing::warn!(%error, "programs in the background lose their connections when the program ends");
    }
    let launched = launch(&prepared.plan)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start")?;
    let ended = runtime.block_on(carry(args, prepared, launched))?;
    // What is still being tried is tried no more.
    runtime.shutdown_background();
    Ok(ended.into_exit_code())
}

struct PreparedRun {
    plan: LaunchPlan,
    chosen: CaptureChoice,
    conn_options: ConnOptions,
    server: Option<ServerList>,
    admission: Option<Admission>,
}

fn prepare(args: &RunArgs) -> anyhow::Result<PreparedRun> {
    let program = Executable::find(&args.command[0])?;
    let conn_options = ConnOptions::of(args.by.as_deref(), args.policy, &jiff::Zoned::now());
    let conn_options = conn_options.map_err(|text| anyhow!("{text}"))?;
    let server_text = match &args.to {
        Some(to) => Some(to.clone()),
        None => args.proxy.address()?,
    };
    let server = match server_text.filter(|text| !text.is_empty()) {
        Some(text) => Some(text.parse::<ServerList>()?),
        // A server may answer and never call.
        None if args.listen => None,
        None => {
            bail!("no proxy: join one (`cedos join LINE`), or give --prox d2tp://host:port/KEY")
        }
    };
    let admission = match (args.listen, args.allow_any_client, &args.allow_clients[..]) {
        (false, ..) => None,
        (true, true, _) => Some(Admission::Anybody),
        (true, false, []) => bail!(
            "no client is allowed; give --allow-client KEY (from `cedos key show`) or \
             --allow-any-client"
        ),
        (true, false, keys) => {
            let keys = keys.iter().copied().map(PublicKey);
            Some(Admission::Only(keys.collect::<BTreeSet<_>>()))
        }
    };
    let chosen = match args.rung {
        Some(rung) => CaptureChoice {
            mode: rung,
            reason: "chosen by --rung".into(),
        },
        None => choose(&program, &args.command, args.listen),
    };
    if args.listen && matches!(chosen.mode, CaptureMode::Environment | CaptureMode::Tun) {
        bail!(
            "--listen needs --rung preload or notify: {} does not catch listeners",
            chosen.mode
        );
    }
    let namespace = match (chosen.mode, args.strict) {
        (CaptureMode::Tun, _) => ProgramNamespace::Tun,
        (_, true) => ProgramNamespace::Own,
        (_, false) => ProgramNamespace::Shared,
    };
    Ok(PreparedRun {
        plan: LaunchPlan {
            program,
            words: args.command.clone(),
            namespace,
            notify: chosen.mode == CaptureMode::Notify,
        },
        chosen,
        conn_options,
        server,
        admission,
    })
}

async fn carry(
    args: RunArgs,
    prepared: PreparedRun,
    mut launched: d2tp_catch::PreparedProgram,
) -> anyhow::Result<crate::run::ProgramExit> {
    let PreparedRun {
        plan,
        chosen,
        conn_options,
        server,
        admission,
    } = prepared;
    raise_descriptor_limit();
    let key = key::load_device_key(args.key.as_deref())?;
    let monitor = watch_links(&args.link).await;
    let monitor = monitor.map_err(|failure| anyhow!(failure.text))?;
    let is_called = server.is_some();
    let server = server.unwrap_or_else(|| nowhere(&key).into());
    let far = match args.to {
        _ if !is_called => ProxySessionPeer::Unconfigured,
        Some(_) => ProxySessionPeer::Server,
        None => ProxySessionPeer::Prox,
    };
    let line = ProxySession::new(far, server, key.clone(), monitor.subscribe(), |config| {
        args.transport.apply(config);
    });
    let round_trip = args.transport.round_trip().unwrap_or_default();
    let limit = args.proxy_timeout.0;
    line.set_answer_limit(limit.map(|limit| limit.max(round_trip * 4)));
    line.report_carriers();
    if let Ok(agent) = cedos_agent::agent::socket_path() {
        line.set_agent(agent);
    }
    let names = Arc::new(d2tp_catch::NameStandIns::default());
    let proxy = launched.resources.proxy.local_addr()?;
    let strangers = match plan.namespace {
        ProgramNamespace::Shared => ClientPolicy::OwnUserOnly,
        ProgramNamespace::Own | ProgramNamespace::Tun => ClientPolicy::Anyone,
    };
    let variables = match chosen.mode {
        CaptureMode::Environment => proxy_variables(proxy),
        CaptureMode::Preload => {
            preload_variables(&ensure_library(PRELOAD)?, &launched.resources.preload_name)
        }
        CaptureMode::Notify | CaptureMode::Tun => Vec::new(),
    };
    let (reserved, channel) = launched.resources.take_port()?;
    let (porter, lookups) = match plan.namespace {
        ProgramNamespace::Shared => (None, channel),
        ProgramNamespace::Own | ProgramNamespace::Tun => (channel, None),
    };
    let port = Arc::new(LaunchResources::port(reserved, porter)?);
    let lookups = lookups.map(|channel| LookupNamespace::new(channel, names.clone()));
    let lookups = lookups.transpose()?.map(Arc::new);
    let dns = SocketAddr::from((Ipv4Addr::LOCALHOST, launched.resources.dns_port));
    say(&chosen, plan.namespace);
    if let Some(due) = conn_options.due {
        let at = describe_deadline(due.at(), &jiff::Zoned::now());
        print_stderr(&format!("cedos run: connections end at {at}"));
    }
    let signals = SignalForwarder::listen()?;
    if is_called {
        // Its round trip, while the program begins.
        line.connect();
    }
    let (mut running, given) = launched.go(&variables)?;
    let listener = tokio::net::TcpListener::from_std(given.proxy)?;
    let local_proxy =
        LocalProxyListener::from_listener(listener, line.clone(), conn_options, strangers);
    tokio::spawn(
        local_proxy
            .with_names(Arc::new(KnownNames(names.clone())))
            .serve(),
    );
    d2tp_catch::serve(given.dns, &names)?;
    if let Some(tun) = given.tun {
        let packets = take_packets(
            tun,
            given.tun_mtu,
            line.clone(),
            conn_options,
            names.clone(),
        );
        tokio::spawn(async move {
            if let Err(error) = packets.await {
                tracing::error!(%error, "the program's network interface is gone");
            }
        });
    }
    let (listeners, mut heard) = mpsc::unbounded_channel();
    let calls = Arc::new(CallHandler {
        session: line.clone(),
        options: conn_options,
        stand_ins: names.clone(),
        catch_port: port.clone(),
        namespace: plan.namespace,
        dns,
        lookups,
        listeners,
        connection_permits: CallHandler::new_connection_permits(),
        filter_permits: CallHandler::new_filter_permits(),
        reported_uncaught: Mutex::default(),
        reported_refusals: Mutex::default(),
    });
    let asked =
        LaunchResources::preload_listener(given.preload_socket, names, dns.port(), plan.namespace)?;
    let answering = calls.clone();
    tokio::spawn(async move {
        loop {
            match asked.next().await {
                Ok(caught) => answering.answer(caught),
                Err(error) => return tracing::error!(%error, "connections are no longer caught"),
            }
        }
    });
    if let Some(supervisor) = running.supervisor()? {
        tokio::spawn(calls.clone().supervise(supervisor));
    }
    tokio::spawn(signals.forward_to(running.pid));
    let mut fronts = admission.map(|admission| {
        ProgramServers::new(ProgramServing {
            first_address: args.at,
            key,
            admission,
            port,
        })
    });
    let ended = wait_for_program(running.pid, running.socket_server);
    tokio::pin!(ended);
    let ended = loop {
        tokio::select! {
            ended = &mut ended => break ended?,
            Some(at) = heard.recv() => if let Some(fronts) = &mut fronts {
                match fronts.open(at).await {
                    Ok(Some(address)) => print_stderr(&format!("cedos run: {at} is {address}")),
                    Ok(None) => {}
                    Err(error) => print_stderr(&format!("cedos run: {error:#}")),
                }
            },
        }
    };
    if let Some(fronts) = fronts {
        fronts.close().await;
    }
    line.close().await;
    if line.lost_connections() > 1 {
        let lost = line.lost_connections();
        tracing::warn!("{lost} connections were reset because the proxy was started again");
    }
    Ok(ended)
}

/// A proxy that is never called: a server without one may not call anybody.
fn nowhere(key: &d2tp_driver::SecretKey) -> ServerAddress {
    ServerAddress::new(
        "127.0.0.1",
        // The discard service: nobody answers with this key.
        9,
        key.public(),
    )
}

fn say(chosen: &CaptureChoice, namespace: ProgramNamespace) {
    let walls = match namespace {
        ProgramNamespace::Shared => "",
        ProgramNamespace::Own | ProgramNamespace::Tun => ", in a network namespace of its own",
    };
    print_stderr(&format!(
        "cedos run: {}{walls}: catches the connections ({})",
        chosen.mode, chosen.reason
    ));
}

struct KnownNames(Arc<d2tp_catch::NameStandIns>);

impl NameLookup for KnownNames {
    fn name_of(&self, ip: std::net::IpAddr) -> Result<Option<String>, String> {
        self.0.name_of(ip)
    }
}

/// In both cases of letters, but for HTTP_PROXY, which web servers make of a request's field `Proxy`.
fn proxy_variables(at: SocketAddr) -> Vec<(OsString, OsString)> {
    let http = format!("http://{at}");
    let socks = format!("socks5h://{at}");
    let near = "localhost,127.0.0.1,::1";
    [
        ("http_proxy", &*http),
        ("https_proxy", &http),
        ("HTTPS_PROXY", &http),
        ("all_proxy", &socks),
        ("ALL_PROXY", &socks),
        ("no_proxy", near),
        ("NO_PROXY", near),
    ]
    .map(|(name, value)| (name.into(), value.into()))
    .into()
}

/// Behind what is there: what others put first stays first.
fn preload_variables(library: &Path, ask: &OsStr) -> Vec<(OsString, OsString)> {
    let mut list = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    if !list.is_empty() {
        list.push(":");
    }
    list.push(library);
    vec![
        ("LD_PRELOAD".into(), list),
        (VARIABLE.into(), ask.to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_for_answers_is_a_length_of_time_or_none() {
        let limit = |text: &str| parse_answer_limit(text).map(|limit| limit.0);
        assert_eq!(limit("0"), Ok(None));
        assert_eq!(limit("2"), Ok(Some(Duration::from_secs(2))));
        assert_eq!(limit("1m30s"), Ok(Some(Duration::from_secs(90))));
        // The default of the option.
        assert_eq!(limit("30s"), Ok(Some(cedos_agent::proxy::ANSWER_LIMIT)));
        assert!(limit("soon").is_err());
    }
}
