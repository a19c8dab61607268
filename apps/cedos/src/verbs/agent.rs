//! `cedos agent`: runs the agent of this device.

use cedos_terminal::print_stderr;
use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use cedos_agent::agent::{self, AgentOptions, BudgetSettings, Hooks, LocalProxy};
use cedos_agent::fetch::option_parsers;
use cedos_agent::proxy::ConnOptions;
use cedos_agent::settings::UserSettings;
use cedos_sandbox::SandboxReport;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use d2tp_driver::ServerList;
use d2tp_links::{ClassRule, ClassRules};
use d2tp_sched::CostPolicy;
use d2tp_sched::SchedulerKind;
use d2tp_session::DrwaLambda;
use tokio::sync::watch;

use super::agent_sandbox;
use super::agent_unit;
use super::descriptor_limit::raise_descriptor_limit;
use super::key;
use super::proxy_options::ProxyOptions;
use super::queue_keeper::{self, QueueReach};
use super::transfer_args::{stop_on_signal, word_parser};
use crate::help::EXPERT;

/// Keep a queue of downloads and uploads for this user, and decide for all of them which networks
/// they use
///
/// `cedos get`, `put`, `ls`, `status`, `why`, `pause`, `resume`, `cancel`, `retry`, `edit`, `wait`,
/// `net`, `budget` and `page` talk to it over a socket in $XDG_RUNTIME_DIR. Its queue survives a crash and a
/// restart.
#[derive(Debug, Args)]
pub struct AgentArgs {
    /// Set what a network costs: wwan0=metered, wlan0=free, rmnet*=roaming
    #[arg(long, value_name = "NAME=CLASS", action = ArgAction::Append)]
    link: Vec<ClassRule>,

    /// Read costs and caps of networks from FILE [default: $CEDOS_CONFIG, or
    /// ~/.config/cedos/config.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Show no notifications on the desktop
    #[arg(long)]
    no_notifications: bool,

    /// While a transfer waits, scan for networks at this interval, not when it seems worth it: 2min
    #[arg(long, value_name = "SPAN", value_parser = option_parsers::parse_span)]
    look_every: Option<Duration>,

    /// Scheduler that decides when metered networks are used
    #[arg(long, value_name = "NAME", default_value = "d2sched", value_parser = PossibleValuesParser::new(SchedulerKind::ALL.map(SchedulerKind::as_str)).try_map(|word| word.parse::<SchedulerKind>()))]
    scheduler: SchedulerKind,

    /// Serve Prometheus metrics at this address of this machine: 127.0.0.1:9646
    #[arg(long, value_name = "ADDR")]
    metrics: Option<SocketAddr>,

    /// Be a SOCKS5 and HTTP proxy for this user's programs at this address of this machine:
    /// 127.0.0.1:1080. Needs a D2Prox: a default one, or --prox
    #[arg(long, value_name = "ADDR")]
    proxy: Option<SocketAddr>,

    #[command(flatten)]
    d2prox: ProxyOptions,

    /// When connections of --proxy use metered networks, unless they say otherwise [default: any]
    #[arg(long, value_parser = word_parser::<CostPolicy, 5>(CostPolicy::ALL.map(CostPolicy::as_str)))]
    proxy_policy: Option<CostPolicy>,

    /// This device's private key file, by which that D2Prox knows it [default: $CEDOS_KEY_FILE, or
    /// ~/.config/cedos/key, which is made on first use]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,

    /// Run this in a shell when the first free network appears (also at the start)
    #[arg(long, value_name = "CMD")]
    when_free: Option<String>,

    /// Run this in a shell when the last free network is lost (also at the start)
    #[arg(long, value_name = "CMD")]
    when_not_free: Option<String>,

    /// Keep the queues of bloated networks short for all TCP connections of this user's programs: limit the round trip to
    /// LAMBDA times the shortest one [default: 3, if the setting agent.short_queues is true]. Linux only
    #[arg(long, value_name = "LAMBDA", num_args = 0..=1, require_equals = true, default_missing_value = "3")]
    short_queues: Option<DrwaLambda>,

    /// Leave the queues of networks as they are [default: the setting agent.short_queues]
    #[arg(long, conflicts_with = "short_queues")]
    no_short_queues: bool,

    /// Exit after this time without a transfer that goes on and without a program that is connected
    /// [default without a value: 5min]. Commands start the agent like this if none runs
    #[arg(long, value_name = "SPAN", num_args = 0..=1, require_equals = true, value_parser = option_parsers::parse_span,
          conflicts_with_all = ["proxy", "metrics", "when_free", "when_not_free"])]
    exit_when_idle: Option<Option<Duration>>,

    /// Keep every right of this user, and start the commands of --when-free in this process. Without this option, the
    /// agent starts no programs and writes only where users have files [default: the setting agent.sandbox]
    #[arg(long, help_heading = EXPERT)]
    no_sandbox: bool,

    /// Start the agent with your session, with the options given here: writes a systemd user unit, and starts it
    #[arg(long, conflicts_with_all = ["exit_when_idle", "detached"])]
    install: bool,

    /// Take --install back: end the agent, and no longer start it with the session
    #[arg(long, exclusive = true)]
    uninstall: bool,

    /// Lead a session of its own, as a command starts it
    #[arg(long, hide = true)]
    detached: bool,

    /// Run the hooks for an agent that is in its sandbox, one for each byte on standard input
    #[arg(long, hide = true, conflicts_with = "install")]
    run_hooks: bool,

    /// Be no agent, but a system service: keep the queues of bloated networks short for the TCP connections of all users, by a
    /// BPF program. LAMBDA is that of --short-queues. Linux only
    #[arg(
        long,
        help_heading = EXPERT,
        value_name = "LAMBDA",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "3",
        exclusive = true
    )]
    short_queues_of_all_users: Option<DrwaLambda>,

    /// Keep queues short for an agent that is in its sandbox, until standard input ends
    #[arg(
        long,
        hide = true,
        value_name = "LAMBDA",
        require_equals = true,
        conflicts_with = "install"
    )]
    keep_queues_short: Option<DrwaLambda>,
}

/// What an agent has of its sandbox before it has threads.
#[derive(Debug, Default)]
pub struct AgentStart {
    /// The pipe to the process that runs the hooks.
    hook_runner: Option<File>,
    /// The pipe to the process that keeps queues short, which ends with it.
    queue_keeper: Option<File>,
    /// What holds of the sandbox, if it is in one.
    sandbox: Option<SandboxReport>,
}

/// Keeps queues short and is no agent, if that is what the options say. Call it before there are threads.
pub fn keep_queues(args: &AgentArgs) -> Option<anyhow::Result<()>> {
    if let Some(lambda) = args.short_queues_of_all_users {
        return Some(queue_keeper::run_for_all(lambda));
    }
    let lambda = args.keep_queues_short?;
    queue_keeper::run(lambda);
    Some(Ok(()))
}

/// Enters the sandbox, unless the options or the settings keep the agent out of it. Call it before there are threads.
///
/// # Errors
/// The process for hooks cannot be started, or the settings make no sense.
pub fn prepare(args: &AgentArgs) -> anyhow::Result<AgentStart> {
    if args.install || args.uninstall || args.run_hooks {
        return Ok(AgentStart::default());
    }
    let settings = UserSettings::load(args.config.as_deref())?;
    let queue_keeper = args.start_queue_keeper(&settings)?;
    let is_wanted = settings.parsed("agent.sandbox", str::parse).unwrap_or(true);
    if args.no_sandbox || !is_wanted {
        agent_sandbox::stay_out();
        return Ok(AgentStart {
            queue_keeper,
            ..AgentStart::default()
        });
    }
    let hook_runner = agent_sandbox::start_hook_runner(&args.hooks(None))?;
    let sandbox = Some(agent_sandbox::enter(
        args.link.iter().any(ClassRule::names_line),
    ));
    Ok(AgentStart {
        hook_runner,
        queue_keeper,
        sandbox,
    })
}

impl AgentArgs {
    /// How many times the shortest round trip queues may make of it, if they are kept short.
    fn queue_factor(&self, settings: &UserSettings) -> Option<DrwaLambda> {
        let is_wanted = settings.parsed("agent.short_queues", str::parse);
        let is_wanted = is_wanted.unwrap_or(true) && !self.no_short_queues;
        let by_settings = || is_wanted.then(DrwaLambda::default);
        self.short_queues.or_else(by_settings)
    }

    /// Starts the process that keeps the queues of programs short, if it can reach any. That it cannot is said only to who
    /// asked for it by an option.
    fn start_queue_keeper(&self, settings: &UserSettings) -> anyhow::Result<Option<File>> {
        let Some(lambda) = self.queue_factor(settings) else {
            return Ok(None);
        };
        match QueueReach::of_this_user() {
            QueueReach::Agent => {}
            QueueReach::Service => return Ok(None),
            QueueReach::Nobody(barrier) => {
                if self.short_queues.is_some() {
                    print_stderr(&format!(
                        "note: the queues of programs are not kept short, because {barrier}; a service for all users \
                         does not need that: cedos agent --short-queues-of-all-users"
                    ));
                }
                return Ok(None);
            }
        }
        match queue_keeper::start(lambda) {
            Ok(pipe) => Ok(Some(pipe)),
            Err(error) if self.short_queues.is_some() => Err(error),
            Err(error) => {
                print_stderr(&format!(
                    "note: queues of programs are not kept short: {error:#}"
                ));
                Ok(None)
            }
        }
    }

    /// The hooks, and the process that runs them.
    fn hooks(&self, runner: Option<File>) -> Hooks {
        Hooks {
            when_free: self.when_free.clone(),
            when_not_free: self.when_not_free.clone(),
            runner: runner.map(Arc::new),
        }
    }
}

/// Runs it until it is stopped.
///
/// # Errors
/// It cannot begin.
pub async fn run(args: AgentArgs, start: AgentStart) -> anyhow::Result<ExitCode> {
    if args.run_hooks {
        // Nothing else runs in this process.
        agent::run_hooks(&args.hooks(None), std::io::stdin().lock());
        return Ok(ExitCode::SUCCESS);
    }
    // Ends with this function.
    let _queue_keeper = start.queue_keeper;
    if args.uninstall {
        return agent_unit::uninstall().await;
    }
    if args.install {
        // What makes no sense is said now, not in the unit's log.
        UserSettings::load(args.config.as_deref())?;
        return agent_unit::install().await;
    }
    if let Some(sandbox) = start.sandbox.as_ref().filter(|sandbox| !sandbox.is_whole()) {
        print_stderr(&format!("cedos agent: {sandbox}"));
    }
    raise_descriptor_limit();
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).context("signals")?;
    let settings = UserSettings::load(args.config.as_deref())?;
    settings.use_http_proxy();
    settings.use_local_hints();
    let address = args
        .proxy
        .or_else(|| settings.parsed("agent.proxy", str::parse));
    let prox = args.d2prox.address_in(&settings)?;
    let local = match (address, prox) {
        (Some(at), Some(prox)) => {
            let policy = args.proxy_policy;
            let policy = policy.or_else(|| settings.parsed("agent.proxy_policy", str::parse));
            Some(LocalProxy {
                address: at,
                server: prox.parse::<ServerList>()?,
                key: key::load_device_key(args.key.as_deref())?,
                options: ConnOptions {
                    policy: policy.unwrap_or(CostPolicy::Any),
                    ..ConnOptions::default()
                },
            })
        }
        (Some(_), None) => bail!(
            "a proxy for programs needs a D2Prox: join one (`cedos join LINE`), or give --prox \
             d2tp://host:port/KEY"
        ),
        (None, _) => None,
    };
    let metrics = args
        .metrics
        .or_else(|| settings.parsed("agent.metrics", str::parse));
    // What the settings have the agent serve is there as long as the session.
    let stays = local.is_some() || metrics.is_some();
    let exit_when_idle = args.exit_when_idle.filter(|_| !stays);
    let notifies = settings
        .parsed("agent.notifications", str::parse)
        .unwrap_or(true);
    let look_every = || settings.parsed("agent.look_every", option_parsers::parse_span);
    let hooks = args.hooks(start.hook_runner);
    let path_drwa = args.queue_factor(&settings);
    let options = AgentOptions {
        socket: None,
        flags: ClassRules { rules: args.link },
        rules: settings.rules(),
        budget: BudgetSettings::of(&settings),
        no_notifications: args.no_notifications || !notifies,
        scan_interval: args.look_every.or_else(look_every),
        scheduler: args.scheduler,
        metrics,
        hooks,
        local_proxy: local,
        exit_when_idle: exit_when_idle.map(|span| span.unwrap_or(agent::IDLE_MAX)),
        path_drwa,
    };
    if args.detached {
        nix::unistd::setsid().context("cannot leave the terminal")?;
    }
    agent::run(options, stopped, |socket, figures, programs| {
        print_stderr(&format!("cedos agent: ready at {}", socket.display()));
        if let Some(at) = figures {
            print_stderr(&format!("cedos agent: metrics at http://{at}/metrics"));
        }
        if let Some(at) = programs {
            print_stderr(&format!("cedos agent: proxy for programs at {at}"));
        }
    })
    .await?;
    Ok(ExitCode::SUCCESS)
}
