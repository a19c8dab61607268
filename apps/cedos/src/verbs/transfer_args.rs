//! The options that downloads and uploads share: by when, over what, through whom.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args, FromArgMatches};
use d2tp_driver::AckOffload;
use d2tp_links::{ClassRule, Link};
use d2tp_sched::{CostPolicy, DeadlineFallback, EnergySaving};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::agent_start;
use super::proxy_options::ProxyOptions;
use super::transport::TransportArgs;
use crate::help::{COST_AND_TIME, EXPERT, TRUST};
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::energy_watch::{EnergySettings, watch_energy};
use cedos_agent::fetch::deadline_text::{describe_order_deadline, parse_deadline};
use cedos_agent::fetch::jobs;
use cedos_agent::fetch::option_parsers;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::report::{
    BarObserver, DigestProgress, JsonObserver, LineObserver, TransferObserver, print_stderr,
    print_stdout,
};
use cedos_agent::order::{Deadline, TransferOrder};
use cedos_agent::prepared_transfer::SessionTuning;
use cedos_agent::recurrence::RecurringTime;
use cedos_agent::settings::UserSettings;
use d2tp_driver::SchedulerHandle;
use d2tp_sched::SchedulerKind;

/// Deadline of a transfer that names none.
const WITHIN_DEFAULT: Duration = Duration::from_secs(6 * 3600);

/// Parses which other networks may carry ACKs.
///
/// # Errors
/// It is neither a known word nor a number of bytes.
pub fn parse_offload(text: &str) -> Result<AckOffload, String> {
    match text {
        "never" => Ok(AckOffload::Never),
        "free" => Ok(AckOffload::Free),
        bytes => option_parsers::parse_bytes(bytes)
            .map(|bytes_per_second| AckOffload::Paid { bytes_per_second })
            .map_err(|_| "expected never, free, or bytes a second, such as 16k".to_owned()),
    }
}

fn parse_every(text: &str) -> Result<RecurringTime, String> {
    text.parse()
}

/// How a transfer is to go.
#[derive(Debug, Args)]
pub struct TransferArgs {
    /// Finish by TIME: 07:30 (the next one), 7pm, tomorrow 07:30, friday 16:00, 2030-01-31 07:30, +45m
    #[arg(long, value_name = "TIME", group = "when", help_heading = COST_AND_TIME)]
    by: Option<String>,

    /// Finish within SPAN from now: 2h, 45m, 1h30m [default: 6h]. With --every: begin SPAN before each time
    #[arg(long, value_name = "SPAN", group = "when", value_parser = option_parsers::parse_span, allow_hyphen_values = true, help_heading = COST_AND_TIME)]
    within: Option<Duration>,

    /// No deadline: wait for free networks, however long it takes
    #[arg(long, group = "when", help_heading = COST_AND_TIME)]
    when_free: bool,

    /// Start at once on any network, or fail
    #[arg(long, group = "when", help_heading = COST_AND_TIME)]
    pub now: bool,

    /// Leave it to the agent to do again and again, and to finish by each of TIMES: "weekday 07:30",
    /// "daily 6pm", "mon,fri 16:00". What has not changed is not transferred again
    #[arg(long, value_name = "TIMES", conflicts_with_all = ["by", "when_free", "now", "alone"], value_parser = parse_every, help_heading = COST_AND_TIME)]
    pub every: Option<RecurringTime>,

    /// When to use metered networks [default: free-first; any with --now; free-only with --when-free]
    #[arg(long, value_parser = word_parser::<CostPolicy, 5>(CostPolicy::ALL.map(CostPolicy::as_str)), help_heading = COST_AND_TIME)]
    policy: Option<CostPolicy>,

    /// Use at most this much metered data: 50M, 1.5G
    #[arg(long, value_name = "SIZE", value_parser = option_parsers::parse_bytes, allow_hyphen_values = true, help_heading = COST_AND_TIME)]
    pub max_cell: Option<u64>,

    /// What to do when free networks alone will miss the deadline [default: cell]
    #[arg(long, value_parser = word_parser::<DeadlineFallback, 3>(DeadlineFallback::ALL.map(DeadlineFallback::as_str)), help_heading = COST_AND_TIME)]
    if_late: Option<DeadlineFallback>,

    /// Set what a network costs: wwan0=metered, wlan0=free, rmnet*=roaming
    #[arg(long, value_name = "NAME=CLASS", action = ArgAction::Append, help_heading = COST_AND_TIME)]
    pub link: Vec<ClassRule>,

    /// Priority when not all transfers can be on time: 0 to 7, 7 goes first
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=7), help_heading = COST_AND_TIME)]
    priority: u8,

    /// Let radios rest that carry few bits per joule, while the deadline allows it: always, auto (on
    /// battery) or never [default: auto; always without a word]
    #[arg(long, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "always", value_parser = PossibleValuesParser::new(EnergySaving::ALL.map(EnergySaving::as_str)).try_map(|word| word.parse::<EnergySaving>()), help_heading = COST_AND_TIME)]
    save_energy: Option<EnergySaving>,

    /// This device's private key file, by which the proxy knows it [default: $CEDOS_KEY_FILE, or
    /// ~/.config/cedos/key, which is made on first use]
    #[arg(long, value_name = "FILE", help_heading = TRUST)]
    pub key: Option<PathBuf>,

    /// Send acknowledgements for Wi-Fi over other networks, which makes Wi-Fi faster: never, over free
    /// networks, or also over metered ones, up to this many bytes a second
    #[arg(long, value_name = "never|free|BYTES", default_value = "free", value_parser = parse_offload, help_heading = EXPERT)]
    pub offload_acks: AckOffload,

    #[command(flatten)]
    proxy: ProxyOptions,

    /// Give up after this many tries without new data
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..), help_heading = EXPERT)]
    pub tries: u32,

    /// Drop a connection that was silent for this long
    #[arg(long, value_name = "SPAN", default_value = "10s", value_parser = option_parsers::parse_span, allow_hyphen_values = true, help_heading = EXPERT)]
    pub stall: Duration,

    /// Scheduler that decides when metered networks are used [default: d2sched]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(SchedulerKind::ALL.map(SchedulerKind::as_str)).try_map(|word| word.parse::<SchedulerKind>()), help_heading = EXPERT)]
    pub scheduler: Option<SchedulerKind>,

    #[command(flatten)]
    pub transport: TransportArgs,

    /// Do not hand it to the agent; run in this process
    #[arg(long, help_heading = EXPERT)]
    alone: bool,

    /// Print one JSON object per line: begun, progress, switch, waiting, note, and last done or error
    #[arg(long)]
    pub json: bool,
}

/// Reads one of some words, which `--help` lists.
pub fn word_parser<T, const N: usize>(words: [&'static str; N]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = d2tp_sched::ParsePolicyError> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).try_map(|word| word.parse::<T>())
}

impl TransferArgs {
    /// The options of a transfer that a program asks for: all from the settings and the defaults.
    pub fn default_for_program() -> TransferArgs {
        let command = TransferArgs::augment_args(clap::Command::new("cedos"));
        let matches = command.get_matches_from(["cedos"]);
        TransferArgs::from_arg_matches(&matches).expect("every option has a default")
    }

    /// The deadline that the options name.
    fn deadline(&self, settings: &UserSettings) -> Result<Option<Deadline>, String> {
        let within = |span: Duration| Deadline::WithinS(span.as_secs_f64());
        if self.every.is_some() {
            return Ok(None);
        }
        Ok(match (&self.by, self.within) {
            (Some(by), _) => Some(parse_deadline(by, &jiff::Zoned::now())?),
            (None, Some(span)) => Some(within(span)),
            (None, None) if self.when_free || self.now => None,
            (None, None) => {
                let chosen = settings.parsed("transfer.within", option_parsers::parse_span);
                Some(within(chosen.unwrap_or(WITHIN_DEFAULT)))
            }
        })
    }

    /// Tells people the deadline as it was understood, once the transfer is known to make sense.
    pub fn announce_deadline(&self, order: &TransferOrder) {
        let Some(deadline) = order
            .deadline
            .filter(|_| !self.json && !jobs::is_in_background())
        else {
            return;
        };
        let is_default = self.by.is_none() && self.within.is_none();
        let to_change = if is_default {
            "; --by TIME sets another"
        } else {
            ""
        };
        print_stderr(&format!(
            "Deadline: {}{to_change}",
            describe_order_deadline(deadline)
        ));
    }

    /// Tells people the deadline of several transfers by the first of them.
    pub fn announce_deadline_of(&self, first: Option<&TransferOrder>) {
        if let Some(order) = first {
            self.announce_deadline(order);
        }
    }

    /// What these options say of an order.
    pub fn apply_to(&self, order: &mut TransferOrder) -> Result<(), String> {
        let settings = UserSettings::load(None).map_err(|error| error.to_string())?;
        order.deadline = self.deadline(&settings)?;
        if let Some(every) = self.every {
            order.every = Some(every.to_string());
            let chosen = || settings.parsed("transfer.within", option_parsers::parse_span);
            order.lead_s = self.within.or_else(chosen).map(|lead| lead.as_secs_f64());
            order.recurrence().map_err(|failure| failure.text)?;
        }
        order.policy = self.policy(&settings).as_str().to_owned();
        let if_late = self.if_late;
        let if_late = if_late.or_else(|| settings.parsed("transfer.if_late", str::parse));
        order.if_late = if_late
            .unwrap_or(DeadlineFallback::Cell)
            .as_str()
            .to_owned();
        order.now = self.now;
        let max_cell = || settings.parsed("transfer.max_cell", option_parsers::parse_bytes);
        order.max_cell = self.max_cell.or_else(max_cell);
        order.priority = self.priority;
        order.save_energy = self.save_energy.map(|saving| saving.as_str().to_owned());
        order.tries = self.tries;
        order.stall_s = self.stall.as_secs_f64();
        let proxy = self.proxy.address_in(&settings);
        order.prox = proxy.map_err(|error| error.to_string())?;
        order.key = self.key.clone();
        Ok(())
    }

    /// How sessions are to send.
    pub fn tuning(&self) -> SessionTuning {
        let mut tuning = SessionTuning {
            offload_acks: self.offload_acks,
            ..SessionTuning::default()
        };
        self.transport.apply(&mut tuning.config);
        tuning
    }

    /// The agent, if one runs that can carry out what was asked for; `detach`: it is started if none
    /// runs. What only a process of its own can do is said.
    pub async fn agent(&self, own: Option<&str>, detach: bool) -> Option<AgentApiClient> {
        if self.alone || jobs::is_in_background() {
            return None;
        }
        let own = own
            .or_else(|| (!self.link.is_empty()).then_some("--link"))
            .or_else(|| self.scheduler.map(|_| "--scheduler"))
            .or_else(|| (self.transport != TransportArgs::default()).then_some("how to send"))
            .or_else(|| (self.offload_acks != AckOffload::Free).then_some("--offload-acks"));
        let agent = match AgentApiClient::connect().await {
            None if detach && own.is_none() && agent_start::is_allowed() => {
                let started = agent_start::connect_or_start().await;
                let started =
                    started.inspect_err(|error| print_stderr(&format!("note: {error:#}")));
                started.ok()
            }
            running => running,
        }?;
        if let Some(own) = own.filter(|_| self.every.is_none()) {
            print_stderr(&format!(
                "note: the agent does not support {own}, so this runs in its own process and \
                 competes with the agent"
            ));
            return None;
        }
        Some(agent).filter(|_| own.is_none())
    }

    /// Refuses a transfer that recurs, if the agent does not take it.
    ///
    /// # Errors
    /// It recurs.
    pub fn refuse_to_recur_alone(&self) -> Result<(), TransferFailure> {
        match self.every {
            Some(_) => Err(TransferFailure::usage(
                "--every needs the agent, which is not running and cannot be started, or does not support one of \
                 the other options: standard output, --link, --scheduler, --qlog, --drwa, d2tp://",
            )),
            None => Ok(()),
        }
    }

    /// The scheduler that decides about links.
    ///
    /// # Errors
    /// The settings of energy make no sense.
    pub fn scheduler(
        &self,
        links: &watch::Receiver<Arc<Vec<Link>>>,
    ) -> Result<Arc<SchedulerHandle>, TransferFailure> {
        let scheduler = SchedulerHandle::new(self.scheduler.unwrap_or_default());
        let settings = UserSettings::load(None);
        let settings = settings.map_err(|error| TransferFailure::usage(error.to_string()))?;
        let energy = EnergySettings::load(&settings).map_err(TransferFailure::usage)?;
        watch_energy(&scheduler, links.clone(), energy);
        Ok(scheduler)
    }

    /// The cost policy that the options name.
    fn policy(&self, settings: &UserSettings) -> CostPolicy {
        self.policy.unwrap_or(match (self.when_free, self.now) {
            (true, _) => CostPolicy::FreeOnly,
            (_, true) => CostPolicy::Any,
            _ => (settings.parsed("transfer.policy", str::parse)).unwrap_or(CostPolicy::FreeFirst),
        })
    }

    /// Whether the user said that metered networks may be used.
    pub fn asks_for_paid_links(&self) -> bool {
        self.max_cell.is_some()
            || self
                .policy
                .is_some_and(|policy| policy != CostPolicy::FreeOnly)
    }

    /// The receiver of the progress of reading a file.
    pub fn digest_progress(&self) -> DigestProgress {
        DigestProgress::new(std::io::stderr().is_terminal(), self.json)
    }

    /// Whether progress is shown as bars: on a terminal that can move its cursor.
    pub fn shows_bars(&self) -> bool {
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        !self.json && !is_dumb && std::io::stderr().is_terminal()
    }

    /// The observer of events; `output_taken`: standard output carries the object.
    pub fn observer(&self, output_taken: bool) -> Box<dyn TransferObserver> {
        if self.json && output_taken {
            Box::new(JsonObserver(print_stderr))
        } else if self.json {
            Box::new(JsonObserver(print_stdout))
        } else if self.shows_bars() {
            Box::new(BarObserver::on_stderr())
        } else {
            Box::new(LineObserver::with_progress())
        }
    }
}

/// Ctrl-C, SIGTERM and a closed terminal ask for a clean stop; a second one ends the process at
/// once.
pub fn stop_on_signal(stop: watch::Sender<bool>) -> std::io::Result<()> {
    stop_when_asked(stop, true)
}

/// Stops when a signal asks for it, for a process that only watches another's work: a terminal that
/// closes ends the watching, not the work.
pub fn stop_except_on_hangup(stop: watch::Sender<bool>) -> std::io::Result<()> {
    stop_when_asked(stop, false)
}

fn stop_when_asked(stop: watch::Sender<bool>, heeds_hangup: bool) -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // Under nohup a closed terminal is none of our business, and the system keeps it from us. In
    // the background it is caught, and not heeded.
    let mut hangup = match heeds_hangup && !jobs::hangup_is_ignored() {
        true => Some(signal(SignalKind::hangup())?),
        false => None,
    };
    if jobs::is_in_background() {
        hangup = None;
    }
    tokio::spawn(async move {
        for first in [true, false] {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                () = async {
                    match &mut hangup {
                        Some(hangup) => drop(hangup.recv().await),
                        None => std::future::pending().await,
                    }
                } => {}
            }
            if first {
                stop.send_replace(true);
            } else {
                std::process::exit(TransferExit::Cancelled as i32);
            }
        }
    });
    Ok(())
}
