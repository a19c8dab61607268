//! `cedos get` with several URLs: the agent carries them out, or this process does, as many at a time as its
//! scheduler decides.
//!
//! ```text
//!  URLs ─▶ one order each ─┬─ agent: add all ── one connection hears the events of all
//!                          └─ alone: one scheduler, one limit on the rate, TOGETHER_MAX prepared
//!          both ─▶ BatchReporter ─▶ summary, exit code
//! ```

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cedos_agent::agent::api::AgentRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::fetch::measured_rates::MeasuredRates;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::rate_limiter::RateLimiter;
use cedos_agent::fetch::report::{BatchOutput, BatchReporter, print_stderr, print_stdout};
use cedos_agent::fetch::transfer::{Destination, TransferContext, TransferJob, redact_url};
use cedos_agent::order::TransferOrder;
use cedos_agent::prepared_transfer::{PreparedTransfer, TransportPurpose};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use url::Url;

use super::device_links::watch_links;
use super::get::GetArgs;
use super::handover::{self, STILL_WAITING};
use super::transfer_args::{stop_except_on_hangup, stop_on_signal};

/// Downloads that have a session or a connection at the same time without an agent. Which of them move, the
/// scheduler decides; the others wait for their turn.
const TOGETHER_MAX: usize = 8; // a guess: twice what the scheduler lets run side by side at first

/// The interval at which an agent is asked for downloads of whose end it may have told too fast to be heard.
const MISSED_EVERY: Duration = Duration::from_secs(5); // a guess: rare, and cheap

/// A download of a batch.
struct BatchItem {
    /// Its place in the list, counted from 1.
    number: usize,
    order: TransferOrder,
    job: TransferJob,
}

/// The result of one that is left to the agent, or of all.
pub type BatchResult = Result<u8, TransferFailure>;

/// Downloads all URLs; the exit code is that of the first that fails.
pub(super) async fn run(args: GetArgs, urls: Vec<Url>) -> BatchResult {
    args.check_batch(urls.len())
        .map_err(TransferFailure::usage)?;
    let mut items = Vec::new();
    let limit_group = args.limit_rate.map(|_| new_group()).transpose()?;
    for (at, url) in urls.iter().enumerate() {
        let mut order = args.order(url).map_err(TransferFailure::usage)?;
        order.limit_group.clone_from(&limit_group);
        let job = order.job()?;
        let number = at + 1;
        items.push(BatchItem { number, order, job });
    }
    // Everything that can be wrong with the options is said before anything is started.
    for item in &items {
        let (order, job) = (&item.order, item.job.clone());
        PreparedTransfer::prepare(order, job, args.how.asks_for_paid_links())?;
    }
    let own = args.only_here(&urls, false);
    if let Some(agent) = args.how.agent(own, args.detach).await {
        let reporter = reporter(&args, &items);
        let items = without_refused(items, &args, &reporter);
        args.how
            .announce_deadline_of(items.first().map(|item| &item.order));
        if args.detach {
            return leave_to_agent(agent, items, &args, &reporter).await;
        }
        return follow_agent(agent, items, &reporter).await;
    }
    args.how.refuse_to_recur_alone()?;
    if args.detach {
        return Err(TransferFailure::usage(
            "several URLs in the background need the agent: leave --detach out, or run one command for each",
        ));
    }
    let reporter = reporter(&args, &items);
    let items = without_refused(items, &args, &reporter);
    args.how
        .announce_deadline_of(items.first().map(|item| &item.order));
    download_here(items, &args, &reporter).await
}

fn reporter(args: &GetArgs, items: &[BatchItem]) -> BatchReporter {
    let output = match args.how.json {
        true => BatchOutput::Json,
        false if args.how.shows_bars() && !args.detach => BatchOutput::Bars,
        false => BatchOutput::Lines,
    };
    let named = items.iter().map(|item| {
        let path = item.job.expected_path();
        let name = path.file_name().unwrap_or(path.as_os_str());
        (
            redact_url(&item.job.url),
            name.to_string_lossy().into_owned(),
        )
    });
    BatchReporter::new(output, named)
}

/// The downloads that can begin. Those that are skipped, or whose name is not free, are reported.
fn without_refused(
    items: Vec<BatchItem>,
    args: &GetArgs,
    reporter: &BatchReporter,
) -> Vec<BatchItem> {
    let mut names: HashMap<PathBuf, String> = HashMap::new();
    let mut begin = Vec::new();
    for item in items {
        let path = item.job.expected_path();
        if args.skip_existing && path.exists() {
            reporter.on_skipped(item.number, &path.display().to_string());
            continue;
        }
        let url = redact_url(&item.job.url);
        if let Some(other) = names.insert(path.clone(), url) {
            let text = format!(
                "{} is the name for {other}, too; download one of them by a command of its own with -o FILE",
                path.display()
            );
            names.insert(path, other);
            reporter.on_failure(item.number, TransferExit::Usage, &text);
            continue;
        }
        if path.exists() {
            let shown = path.display();
            let text = format!(
                "exists; --skip-existing leaves it out, and `cedos get {} -o {shown}` replaces it",
                redact_url(&item.job.url)
            );
            reporter.on_failure(item.number, TransferExit::Usage, &text);
            continue;
        }
        match item.job.check_path() {
            Ok(()) => begin.push(item),
            Err(failure) => reporter.on_failure(item.number, failure.exit, &failure.text),
        }
    }
    begin
}

/// Downloads in this process.
async fn download_here(
    items: Vec<BatchItem>,
    args: &GetArgs,
    reporter: &BatchReporter,
) -> BatchResult {
    let log = args
        .qlog
        .open()
        .map_err(|error| TransferFailure::usage(format!("{error:#}")))?;
    let monitor = watch_links(&args.how.link).await?;
    let links = monitor.subscribe();
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
    let scheduler = args.how.scheduler(&links)?;
    let rates = MeasuredRates::restore(&scheduler, &links.borrow());
    let limiter = args.limit_rate.map(|rate| Arc::new(RateLimiter::new(rate)));
    let download = async |item: BatchItem| {
        if *stopped.borrow() {
            return;
        }
        let number = item.number;
        let asks_for_paid = args.how.asks_for_paid_links();
        // A length of time counts from the beginning, not from this download's turn.
        let prepared = PreparedTransfer::prepare(&item.order, item.job, asks_for_paid);
        let mut prepared = match prepared {
            Ok(prepared) => prepared,
            Err(failure) => return reporter.on_failure(number, failure.exit, &failure.text),
        };
        let tuning = args.tuning(log.clone());
        let transport = prepared
            .open_transport(&links, &tuning, TransportPurpose::Carry)
            .await;
        let context = TransferContext {
            id: number as u64,
            rate_limiter: limiter.clone(),
            ..TransferContext::standalone(links.clone(), stopped.clone(), scheduler.clone())
        };
        let mut observer = reporter.observer(number);
        transport
            .run(&prepared.job, None, context, &mut observer)
            .await;
    };
    let downloads = futures_util::stream::iter(items.into_iter().map(download));
    downloads
        .buffer_unordered(TOGETHER_MAX)
        .collect::<()>()
        .await;
    rates.save(&scheduler);
    if let Some(log) = &log {
        log.finish();
    }
    Ok(reporter.finish())
}

/// Leaves all to the agent; prints their numbers.
async fn leave_to_agent(
    mut agent: AgentApiClient,
    items: Vec<BatchItem>,
    args: &GetArgs,
    reporter: &BatchReporter,
) -> BatchResult {
    let mut ids = Vec::new();
    for item in items {
        let url = redact_url(&item.job.url);
        match add(&mut agent, item.order, true).await {
            Ok((id, file)) if args.how.json => {
                let event = serde_json::json!({"event": "detached", "id": id, "file": file,
                                               "url": url, "agent": true, "number": item.number});
                print_stdout(&event.to_string());
                ids.push(id);
            }
            Ok((id, _)) => {
                print_stdout(&id.to_string());
                ids.push(id);
            }
            Err(failure) => reporter.on_failure(item.number, failure.exit, &failure.text),
        }
    }
    if !args.how.json && !ids.is_empty() {
        print_stderr(&format!(
            "The agent carries out {} downloads. See also: cedos ls, cedos wait, cedos why ID, cedos cancel ID",
            ids.len()
        ));
    }
    Ok(reporter.exit_code())
}

/// Adds a download to the agent's queue. Returns its number there, and its file.
async fn add(
    agent: &mut AgentApiClient,
    order: TransferOrder,
    patient: bool,
) -> Result<(u64, Value), TransferFailure> {
    let answer = handover::add(agent, order, patient, false).await?;
    let id = answer["id"].as_u64();
    let id = id.ok_or_else(|| TransferFailure::error("the agent gave no number"))?;
    Ok((id, answer["file"].clone()))
}

/// Downloads that the agent has, by its numbers.
#[derive(Default)]
struct FollowedDownloads {
    /// Their places in the list.
    numbers: BTreeMap<u64, usize>,
    /// Events of numbers that are not known yet: the answer to `add` comes on another connection.
    early: Vec<(u64, Value)>,
    /// Whether all were added.
    are_added: bool,
    /// The last reason for a wait that was shown: the agent says it again and again.
    waits: HashMap<u64, Value>,
}

impl FollowedDownloads {
    fn on_event(&mut self, event: Value, reporter: &BatchReporter) {
        let Some(id) = event["id"].as_u64() else {
            return;
        };
        let Some(number) = self.numbers.get(&id) else {
            if !self.are_added {
                self.early.push((id, event));
            }
            return;
        };
        if event["event"] == "waiting" && self.waits.get(&id) == Some(&event["reason"]) {
            return;
        }
        if event["event"] != "note" {
            self.waits.insert(id, event["reason"].clone());
        }
        reporter.on_agent_event(*number, &event);
    }

    fn on_added(&mut self, id: u64, number: usize, reporter: &BatchReporter) {
        self.numbers.insert(id, number);
        let (ours, others) = std::mem::take(&mut self.early)
            .into_iter()
            .partition(|(of, _)| *of == id);
        self.early = others;
        let ours: Vec<(u64, Value)> = ours;
        for (_, event) in ours {
            self.on_event(event, reporter);
        }
    }

    /// Reports a download that the agent knows no more.
    fn on_removed(&self, id: u64, reporter: &BatchReporter) {
        if let Some(number) = self.numbers.get(&id) {
            let text = "it was removed from the agent's list";
            reporter.on_failure(*number, TransferExit::Error, text);
        }
    }

    /// The agent's numbers of those that have not ended.
    fn going_on(&self, reporter: &BatchReporter) -> Vec<u64> {
        let numbers = self.numbers.iter();
        let going_on = numbers.filter(|(_, number)| !reporter.has_ended(**number));
        going_on.map(|(id, _)| *id).collect()
    }
}

/// Hands all to the agent and follows them to their ends. Ctrl-C and SIGTERM cancel them; if the terminal is
/// closed or this process is killed, they go on.
async fn follow_agent(
    mut agent: AgentApiClient,
    items: Vec<BatchItem>,
    reporter: &BatchReporter,
) -> BatchResult {
    let gone = || TransferFailure::error("the agent is gone");
    let mut events = AgentApiClient::connect().await.ok_or_else(gone)?;
    events.ask(&AgentRequest::Watch { id: None }).await?;
    let (stop, mut stopped) = watch::channel(false);
    stop_except_on_hangup(stop)
        .map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
    let followed = RefCell::new(FollowedDownloads::default());
    let is_stopped = stopped.clone();
    let adding = async {
        for item in items {
            if *is_stopped.borrow() {
                break;
            }
            match add(&mut agent, item.order, false).await {
                Ok((id, _)) => followed.borrow_mut().on_added(id, item.number, reporter),
                Err(failure) => reporter.on_failure(item.number, failure.exit, &failure.text),
            }
        }
        followed.borrow_mut().are_added = true;
        agent
    };
    let mut adding = std::pin::pin!(adding);
    let mut agent = None;
    let mut cancelled = HashSet::new();
    // Outside the loop: events of others would put it off for ever.
    let mut missed = interval_at(Instant::now() + MISSED_EVERY, MISSED_EVERY);
    missed.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        if agent.is_some() && followed.borrow().going_on(reporter).is_empty() {
            return Ok(reporter.finish());
        }
        tokio::select! {
            event = events.next() => match event {
                Some(event) => followed.borrow_mut().on_event(event, reporter),
                None => {
                    print_stderr(
                        "the agent has stopped; the downloads resume when it runs again (cedos ls)",
                    );
                    return Ok(STILL_WAITING);
                }
            },
            done = &mut adding, if agent.is_none() => agent = Some(done),
            _ = stopped.wait_for(|stop| *stop), if agent.is_some() && cancelled.is_empty() => {
                let ids = followed.borrow().going_on(reporter);
                for id in ids {
                    cancelled.insert(id);
                    // It may have ended this very moment.
                    if let Some(agent) = &mut agent {
                        let _ = agent.ask(&AgentRequest::Cancel { id }).await;
                    }
                }
            }
            _ = missed.tick(), if agent.is_some() => {
                let ids = followed.borrow().going_on(reporter);
                for id in ids {
                    let Some(agent) = &mut agent else { break };
                    let Ok(shown) = agent.ask(&AgentRequest::Status { id }).await else {
                        if agent.ask(&AgentRequest::Hello).await.is_err() {
                            // It has stopped: the events end, too.
                            break;
                        }
                        followed.borrow().on_removed(id, reporter);
                        continue;
                    };
                    if matches!(shown["standing"].as_str(), Some("done" | "failed" | "cancelled")) {
                        let mut event = shown["last"].clone();
                        event["id"] = id.into();
                        followed.borrow_mut().on_event(event, reporter);
                    }
                }
            }
        }
    }
}

/// A name under which downloads share a limit.
fn new_group() -> Result<String, TransferFailure> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|error| TransferFailure::error(format!("no randomness: {error}")))?;
    Ok(hex::encode(bytes))
}

impl GetArgs {
    /// Whether these options make sense for several URLs.
    fn check_batch(&self, count: usize) -> Result<(), String> {
        let alone = "name the URL on the command line, once and without -i";
        let whole = |option: &str| match count {
            1 => format!("{option} is not for lists: {alone}"),
            _ => {
                format!("{option} is for one URL, and there are {count}: run one command for each")
            }
        };
        match &self.output {
            Some(path) if path.as_os_str() == "-" => return Err(whole("-o -")),
            Some(path) if !path.is_dir() => {
                let shown = path.display();
                if count == 1 {
                    return Err(format!("-o {shown} is no directory, as for lists: {alone}"));
                }
                return Err(format!(
                    "-o {shown} is no directory, and there are {count} URLs: name a directory that exists, or \
                     leave -o out"
                ));
            }
            _ => {}
        }
        match self.integrity {
            Some(_) => Err(whole("--integrity")),
            None => Ok(()),
        }
    }
}

/// Runs what has no events, `--dry-run` and `--forget`, for one URL after another.
pub(super) async fn one_after_another(
    urls: Vec<Url>,
    mut act: impl AsyncFnMut(Url) -> Result<TransferExit, TransferFailure>,
) -> BatchResult {
    let mut code = 0;
    for url in urls {
        let shown = redact_url(&url);
        let ended = match act(url).await {
            Ok(exit) => exit,
            Err(failure) => {
                print_stderr(&format!("cedos get: {shown}: {}", failure.text));
                failure.exit
            }
        };
        code = if code == 0 { ended as u8 } else { code };
    }
    Ok(code)
}

/// Whether a download would be skipped: the user named its file, or the URL does.
pub(super) fn is_skipped(job: &TransferJob) -> bool {
    !matches!(
        job.destination,
        Destination::Stdout | Destination::Device(_) | Destination::Nowhere
    ) && job.expected_path().exists()
}
