//! `cedos agent`: the device's own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use cedos_agent::agent::{self, Hooks, Options};
use cedos_agent::dispatcher::Kind;
use cedos_agent::fetch::when;
use cedos_agent::settings;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use d2tp_links::{ClassRule, ClassRules};
use tokio::sync::watch;

use super::how::stop_on_signal;

/// Keep a queue of downloads and uploads for this user, and decide for all of them which networks
/// they use
///
/// `cedos get`, `put`, `ls`, `status`, `why`, `pause`, `resume`, `cancel`, `retry`, `edit`, `wait`,
/// `net` and `budget` talk to it over a socket in $XDG_RUNTIME_DIR. What it holds survives its end,
/// however that comes.
#[derive(Debug, Args)]
pub struct AgentArgs {
    /// Say what a network costs: wwan0=metered, wlan0=free, rmnet*=roaming
    #[arg(long, value_name = "NAME=CLASS", action = ArgAction::Append)]
    link: Vec<ClassRule>,

    /// Read what networks cost, and their caps, in FILE [default: $CEDOS_CONFIG, or
    /// ~/.config/cedos/config.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Show no notifications on the desktop
    #[arg(long)]
    no_notifications: bool,

    /// While a transfer waits, look for networks so often, and not when it seems worth it: 2min
    #[arg(long, value_name = "SPAN", value_parser = when::parse_span)]
    look_every: Option<Duration>,

    /// How it is decided when networks that cost are used
    #[arg(long, value_name = "NAME", default_value = "d2sched", value_parser = PossibleValuesParser::new(Kind::ALL.map(Kind::word)).try_map(|word| word.parse::<Kind>()))]
    scheduler: Kind,

    /// Give Prometheus its figures at this address of this machine: 127.0.0.1:9646
    #[arg(long, value_name = "ADDR")]
    metrics: Option<SocketAddr>,

    /// Run this in a shell when the first free network comes (at the start too)
    #[arg(long, value_name = "CMD")]
    when_free: Option<String>,

    /// Run this in a shell when the last free network goes (at the start too)
    #[arg(long, value_name = "CMD")]
    when_not_free: Option<String>,
}

/// Runs it until it is stopped.
///
/// # Errors
/// It cannot begin.
pub async fn run(args: AgentArgs) -> anyhow::Result<ExitCode> {
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).context("signals")?;
    let options = Options {
        socket: None,
        flags: ClassRules { rules: args.link },
        rules: settings::rules(args.config.as_deref())?,
        quiet: args.no_notifications,
        look_every: args.look_every,
        scheduler: args.scheduler,
        metrics: args.metrics,
        hooks: Hooks {
            when_free: args.when_free,
            when_not_free: args.when_not_free,
        },
    };
    agent::run(options, stopped, |socket, figures| {
        eprintln!("cedos agent: ready at {}", socket.display());
        if let Some(at) = figures {
            eprintln!("cedos agent: figures at http://{at}/metrics");
        }
    })
    .await?;
    Ok(ExitCode::SUCCESS)
}
