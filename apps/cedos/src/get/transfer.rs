//! The order of things in a download: choose a link or wait, ask, receive, check, finish.
//!
//! ```text
//!        ┌────────────── link changed · a second passed · link lost · stalled ─────────────┐
//!        ▼                                                                                 │
//!  choose ── Wait: say why, sleep until something changes                                  │
//!        └── Use ──▶ exchange ──▶ 200: from zero   206: compare the overlap, then append ──┤
//!                        └─ fault: back off, count                          whole ──▶ digest, commit
//! ```
//!
//! Whether bytes may be joined to those we hold is decided in one place (`joining`): the origin's
//! strong validator must be the same, the length too, and the last bytes we hold must come again
//! equal. If any of it fails the download starts from zero and says `origin_changed`.

mod ending;
mod joining;
mod proxied;
mod reach;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use d2tp_links::{Class, Link};
use d2tp_sched::{Choice, IfLate, Need, Policy, Way, choose};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use url::Url;

use super::clock::Moment;
use super::dial::{Dial, Fault, Via};
use super::exchange::{Answer, Ask, Part, exchange};
use super::filename;
use super::outcome::{Exit, Failure, Reason};
use super::proxy::Proxy;
use super::report::{Event, Observer, Report};
use super::sink::{OVERLAP_BYTES_MAX, Sink};

pub(super) use reach::on_link;

/// The scheduling epoch of the Cedos paper (§III.D): rates are averages over it.
const EPOCH: Duration = Duration::from_secs(1);

/// Starts from zero before we call the origin unusable: each costs a whole object at worst.
pub const RESTARTS_MAX: u32 = 5; // a guess

/// First wait after a fault; it doubles up to [`BACKOFF_MAX`].
const BACKOFF_FIRST: Duration = Duration::from_millis(250); // a guess

/// Longest wait between tries.
const BACKOFF_MAX: Duration = Duration::from_secs(30); // a guess

/// How long a link that carried nothing is taken as the worst choice.
const STALL_MEMORY: Duration = Duration::from_secs(30); // a guess

/// Where the object goes.
#[derive(Debug, Clone)]
pub enum Destination {
    /// This file, replaced when the object is whole.
    File(PathBuf),
    /// A file in the working directory, named by the URL or the origin; must not exist.
    Named,
    /// Standard output.
    Output,
}

/// A download, as the user asked for it.
#[derive(Debug, Clone)]
pub struct Job {
    /// The object.
    pub url: Url,
    /// Where it goes.
    pub destination: Destination,
    /// Finish within; none is no deadline.
    pub within: Option<Duration>,
    /// Money against time.
    pub policy: Policy,
    /// What to do when free links are not enough.
    pub if_late: IfLate,
    /// Start at once or not at all.
    pub now: bool,
    /// Bytes metered links may carry.
    pub metered_bytes_max: Option<u64>,
    /// The digest the object must have.
    pub integrity: Option<[u8; 32]>,
    /// Tries without a new byte before giving up on the origin.
    pub tries_max: u32,
    /// Time without a byte after which a connection is dropped.
    pub stall: Duration,
    /// Follow redirects from https to http.
    pub allow_downgrade: bool,
}

/// Why an attempt ended without a fault.
enum Step {
    Whole,
    ChooseAgain,
}

struct Transfer<'a, D> {
    job: &'a Job,
    dial: &'a D,
    links: watch::Receiver<Arc<Vec<Link>>>,
    stop: watch::Receiver<bool>,
    observer: &'a mut dyn Observer,
    sink: Sink,
    start: Moment,
    rates: HashMap<String, f64>,
    stalled_until: HashMap<String, Moment>,
    classes: HashMap<String, Class>,
    bytes_by_link: BTreeMap<String, u64>,
    current: Option<String>,
    last_link: Option<String>,
    /// Why the current link, in words.
    why: String,
    said_waiting: Option<Reason>,
    said_encoding: bool,
    switches: u32,
    duplicate_bytes: u64,
    restarts: u32,
    /// Tries since the object last grew beyond `best_length`.
    tries: u32,
    best_length: u64,
    /// Why what we hold cannot be continued, if so.
    distrust: Option<String>,
    ranges_refused: bool,
    /// An answer's bytes are coming in.
    receiving: bool,
    encoding: Option<String>,
    offered_name: Option<String>,
}

/// Runs a download straight from its origin to its end and reports it. `stop` turning true leaves
/// a partial.
pub async fn run<D: Dial>(
    job: &Job,
    dial: &D,
    links: watch::Receiver<Arc<Vec<Link>>>,
    stop: watch::Receiver<bool>,
    observer: &mut dyn Observer,
) -> Exit {
    match begin(job, dial, links, stop, observer) {
        Ok((mut transfer, named)) => {
            transfer.greet();
            let outcome = transfer.receive().await;
            transfer.finish(outcome, named).await
        }
        Err(exit) => exit,
    }
}

/// Runs a download through a proxy, as [`run`] does.
pub async fn run_proxied(
    job: &Job,
    proxy: &Proxy,
    links: watch::Receiver<Arc<Vec<Link>>>,
    stop: watch::Receiver<bool>,
    observer: &mut dyn Observer,
) -> Exit {
    match begin(job, proxy, links, stop, observer) {
        Ok((mut transfer, named)) => {
            transfer.greet();
            let outcome = transfer.receive_proxied().await;
            transfer.finish(outcome, named).await
        }
        Err(exit) => exit,
    }
}

/// Opens the place where the bytes go.
fn begin<'a, D: Dial>(
    job: &'a Job,
    dial: &'a D,
    links: watch::Receiver<Arc<Vec<Link>>>,
    stop: watch::Receiver<bool>,
    observer: &'a mut dyn Observer,
) -> Result<(Transfer<'a, D>, PathBuf), Exit> {
    let start = Moment::now();
    let url = public(&job.url);
    let named = PathBuf::from(filename::from_url(&job.url));
    let opened = match &job.destination {
        Destination::File(path) => Sink::file(path, &url),
        Destination::Named if named.exists() => Err(Failure {
            exit: Exit::Usage,
            reason: None,
            text: format!("{} exists; -o {0} replaces it", named.display()),
        }),
        Destination::Named => Sink::file(&named, &url),
        Destination::Output => Ok(Sink::output(Box::new(std::io::stdout()), &url)),
    };
    let sink = match opened {
        Ok(sink) => sink,
        Err(failure) => {
            let report = Report {
                url,
                file: display(&job.destination, &named),
                bytes: 0,
                sha256: String::new(),
                bytes_by_link: BTreeMap::new(),
                duration_s: Moment::now().since(start).as_secs_f64(),
                deadline_s: job.within.map(|w| w.as_secs_f64()),
                deadline_met: job.within.map(|_| false),
                switches: 0,
                duplicate_bytes: 0,
                content_encoding: None,
                exit: failure.exit as u8,
                reason: failure.reason,
                text: Some(failure.text),
                resumable_bytes: 0,
                proxy_would_add: None,
            };
            observer.tell(&Event::Error(report));
            return Err(failure.exit);
        }
    };
    let transfer = Transfer {
        job,
        dial,
        links,
        stop,
        observer,
        best_length: sink.len(),
        sink,
        start,
        rates: HashMap::new(),
        stalled_until: HashMap::new(),
        classes: HashMap::new(),
        bytes_by_link: BTreeMap::new(),
        current: None,
        last_link: None,
        why: String::new(),
        said_waiting: None,
        said_encoding: false,
        switches: 0,
        duplicate_bytes: 0,
        restarts: 0,
        tries: 0,
        distrust: None,
        ranges_refused: false,
        receiving: false,
        encoding: None,
        offered_name: None,
    };
    Ok((transfer, named))
}

impl<D: Dial> Transfer<'_, D> {
    fn greet(&mut self) {
        if self.sink.len() > 0 {
            let held = self.sink.len();
            self.note(
                None,
                format!("continuing from {held} bytes of an earlier run"),
            );
        }
    }

    /// Receives until the object is whole, or a failure ends it.
    async fn receive(&mut self) -> Result<(), Failure> {
        if self.sink.len() > 0 && self.sink.note.length == Some(self.sink.len()) {
            return Ok(());
        }
        loop {
            self.check_deadline()?;
            let ways = self.ways();
            let (way, why) = match choose(&self.need(), &ways) {
                Choice::Use { index, why } => (ways[index].clone(), why),
                Choice::Wait {
                    reason,
                    why,
                    unblocks,
                } => {
                    let reason = Reason::from(reason);
                    self.refuse_to_wait(reason, &why)?;
                    self.current = None;
                    self.wait(reason, why, unblocks, EPOCH).await?;
                    continue;
                }
            };
            self.take(&way, &why);
            self.why = why;
            let outcome = self.attempt(&way.name).await;
            self.receiving = false;
            match outcome {
                Ok(Step::Whole) => return Ok(()),
                Ok(Step::ChooseAgain) => self.check_stop()?,
                Err(fault) => self.recover(fault, &way.name).await?,
            }
        }
    }

    /// One request over one link, until its bytes end or there is reason to leave.
    async fn attempt(&mut self, link: &str) -> Result<Step, Fault> {
        let Some(via) = self.via(link) else {
            return Ok(Step::ChooseAgain);
        };
        let dial = self.dial;
        let ask = self.ask(link);
        let mut links = self.links.clone();
        let mut stop = self.stop.clone();
        let mut epoch = interval(EPOCH);
        epoch.set_missed_tick_behavior(MissedTickBehavior::Delay);
        epoch.reset();

        let mut answer = {
            let mut fetch = pin!(exchange(dial, &ask, &via));
            loop {
                tokio::select! {
                    biased;
                    _ = stop.wait_for(|stop| *stop) => return Ok(Step::ChooseAgain),
                    answer = &mut fetch => break answer?,
                    Ok(()) = links.changed() => {}
                    _ = epoch.tick() => {}
                }
                if self.should_leave(link, &via).map_err(Fault::Final)? {
                    return Ok(Step::ChooseAgain);
                }
            }
        };
        let Some(mut overlap) = self.accept(&answer, &ask)? else {
            return Ok(Step::ChooseAgain);
        };
        self.said_waiting = None;
        self.receiving = true;
        let held = self.sink.len();

        let mut last_byte = Moment::now();
        let mut epoch_start = Moment::now();
        let mut epoch_bytes = 0u64;
        loop {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Ok(Step::ChooseAgain),
                Ok(()) = links.changed() => {
                    if self.should_leave(link, &via).map_err(Fault::Final)? {
                        return Ok(Step::ChooseAgain);
                    }
                }
                _ = epoch.tick() => {
                    let now = Moment::now();
                    let seconds = now.since(epoch_start).as_secs_f64().max(1e-3);
                    self.measure(link, epoch_bytes as f64 / seconds);
                    self.tell_progress(link, epoch_bytes as f64 / seconds);
                    (epoch_start, epoch_bytes) = (now, 0);
                    self.sink.tick().await.map_err(Fault::Final)?;
                    if self.should_leave(link, &via).map_err(Fault::Final)? {
                        return Ok(Step::ChooseAgain);
                    }
                    if now.since(last_byte) >= self.job.stall {
                        let silence = now.since(last_byte).as_secs();
                        return Err(Fault::Path(format!("not a byte for {silence} s")));
                    }
                }
                data = answer.next() => {
                    let Some(data) = data else { break };
                    let data = data?;
                    last_byte = Moment::now();
                    epoch_bytes += data.len() as u64;
                    *self.bytes_by_link.entry(link.to_owned()).or_default() += data.len() as u64;
                    if !self.take_in(&data, &mut overlap)? {
                        return Ok(Step::ChooseAgain);
                    }
                    if self.metered_bytes_left() == Some(0) && self.is_metered(link) {
                        return Ok(self.step_if_whole(false));
                    }
                }
            }
        }
        let seconds = Moment::now().since(epoch_start).as_secs_f64();
        if seconds > 0.05 {
            self.measure(link, epoch_bytes as f64 / seconds);
        }
        if !overlap.is_empty() {
            self.distrust = Some("the object is shorter than what we hold of it".into());
            return Ok(Step::ChooseAgain);
        }
        match self.step_if_whole(ask.to.is_none()) {
            Step::ChooseAgain if self.sink.len() == held => Err(Fault::Origin {
                text: "the origin answered with nothing new".into(),
                retry_after: None,
            }),
            step => Ok(step),
        }
    }

    /// Adds bytes to what we hold, after those that must come again. False if they differ.
    fn take_in(&mut self, data: &[u8], overlap: &mut Vec<u8>) -> Result<bool, Fault> {
        let repeated = overlap.len().min(data.len());
        self.duplicate_bytes += repeated as u64;
        if data[..repeated] != overlap[..repeated] {
            self.duplicate_bytes += (data.len() - repeated) as u64;
            let text = "the origin calls it the same object, but the bytes differ";
            self.distrust = Some(text.into());
            return Ok(false);
        }
        overlap.drain(..repeated);
        self.sink.append(&data[repeated..]).map_err(Fault::Final)?;
        if self.sink.len() > self.best_length {
            self.best_length = self.sink.len();
            self.tries = 0;
        }
        Ok(true)
    }

    /// Whole when the length says so, or when the origin never told one and ended cleanly.
    fn step_if_whole(&self, ended_cleanly: bool) -> Step {
        match self.sink.note.length {
            Some(length) if self.sink.len() >= length => Step::Whole,
            None if ended_cleanly => Step::Whole,
            _ => Step::ChooseAgain,
        }
    }

    /// What to ask for: all of it, or the rest of what we hold with some overlap.
    fn ask_whole(&self) -> Ask {
        let held = self.sink.len();
        let continues = held > 0 && self.distrust.is_none() && self.sink.note.validator.is_some();
        let overlap = if continues {
            self.sink.tail().len().min(OVERLAP_BYTES_MAX) as u64
        } else {
            0
        };
        let from = if continues { held - overlap } else { 0 };
        Ask {
            url: self.job.url.clone(),
            from,
            to: None,
            if_range: self.sink.note.validator.clone().filter(|_| continues),
            allow_downgrade: self.job.allow_downgrade,
        }
    }

    /// The same; on a metered link with a budget, the origin is not even asked for more than it
    /// allows.
    fn ask(&mut self, link: &str) -> Ask {
        let whole = self.ask_whole();
        let held = self.sink.len();
        let (continues, overlap) = (whole.if_range.is_some(), held - whole.from.min(held));
        let allowed = self.metered_bytes_left().filter(|_| self.is_metered(link));
        let to = allowed
            .filter(|_| !self.ranges_refused && (continues || held == 0))
            .map(|allowed| whole.from + allowed.max(overlap + 1) - 1)
            .filter(|to| self.sink.note.length.is_none_or(|length| to + 1 < length));
        Ask { to, ..whole }
    }

    /// After a fault: give up, or wait a little and say so.
    async fn recover(&mut self, fault: Fault, link: &str) -> Result<(), Failure> {
        let (text, reason, retry_after, counts) = match fault {
            Fault::Final(failure) => return Err(failure),
            Fault::Path(_) if self.via(link).is_none() => return Ok(()), // an outage, not a fault
            Fault::Path(text) => {
                self.stalled_until
                    .insert(link.to_owned(), Moment::now().after(STALL_MEMORY));
                // Once the origin has answered, a bad network is waited out.
                (
                    format!("{link}: {text}"),
                    Reason::PathTooSlow,
                    None,
                    self.best_length == 0,
                )
            }
            Fault::Origin { text, retry_after } => (text, Reason::OriginWait, retry_after, true),
            Fault::Proxy(text) => (text, Reason::ProxyUnreachable, None, true),
        };
        self.tries += 1;
        if counts && self.tries >= self.job.tries_max {
            let text = format!(
                "{text}; gave up after {} tries without a new byte",
                self.tries
            );
            return Err(Failure::of(Exit::Error, reason, text));
        }
        let doublings = self.tries.saturating_sub(1).min(10);
        let pause = retry_after.unwrap_or((BACKOFF_FIRST * 2u32.pow(doublings)).min(BACKOFF_MAX));
        let next = format!("the next try in {:.1} s", pause.as_secs_f64());
        let until = Moment::now().after(pause);
        self.said_waiting = None;
        loop {
            let left = until.since(Moment::now());
            if left.is_zero() {
                return Ok(());
            }
            self.check_deadline()?;
            let before = self.links.borrow().clone();
            self.wait(reason, text.clone(), next.clone(), left.min(EPOCH))
                .await?;
            if before != *self.links.borrow() && retry_after.is_none() {
                return Ok(());
            }
        }
    }

    /// Sleeps until something changes, saying why once per reason.
    async fn wait(
        &mut self,
        reason: Reason,
        why: String,
        unblocks: String,
        at_most: Duration,
    ) -> Result<(), Failure> {
        if self.said_waiting != Some(reason) {
            self.said_waiting = Some(reason);
            self.observer.tell(&Event::Waiting {
                t_s: self.t_s(),
                reason,
                why,
                unblocks,
            });
        }
        self.check_stop()?;
        self.sink.tick().await?;
        let (links, stop) = (&mut self.links, &mut self.stop);
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => {}
            Ok(()) = links.changed() => {}
            () = tokio::time::sleep(at_most) => {}
        }
        self.check_stop()
    }

    fn check_stop(&self) -> Result<(), Failure> {
        if *self.stop.borrow() {
            return Err(Failure::of(Exit::Cancelled, Reason::UserPaused, "stopped"));
        }
        Ok(())
    }

    fn check_deadline(&self) -> Result<(), Failure> {
        if self.left() == Some(Duration::ZERO) && self.job.if_late == IfLate::Fail {
            let text = "the deadline has passed and --if-late fail was asked for";
            return Err(Failure {
                exit: Exit::DeadlineMissed,
                reason: None,
                text: text.into(),
            });
        }
        Ok(())
    }

    fn refuse_to_wait(&self, reason: Reason, why: &str) -> Result<(), Failure> {
        let timeless = matches!(self.job.policy, Policy::Any | Policy::Fast);
        if reason == Reason::OverBudget && (timeless || self.left() == Some(Duration::ZERO)) {
            let text = format!("{why} (--max-cell), and no free network is up");
            return Err(Failure::of(Exit::BudgetExhausted, reason, text));
        }
        if self.job.now && self.bytes_by_link.is_empty() {
            let text = format!("{why}, and --now does not wait");
            return Err(Failure::of(Exit::NoPermittedPath, reason, text));
        }
        Ok(())
    }

    /// True when the transfer should go on elsewhere, or not at all for now.
    fn should_leave(&mut self, link: &str, via: &Via) -> Result<bool, Failure> {
        self.check_deadline()?;
        let Some(now) = self.via(link) else {
            return Ok(!self.dial.moves_by_itself());
        };
        if !via.sources.is_empty()
            && !via
                .sources
                .iter()
                .any(|source| now.sources.contains(source))
        {
            return Ok(true); // the address our connection stands on is gone
        }
        let ways = self.ways();
        let choice = choose(&self.need(), &ways);
        let stays = match choice {
            Choice::Use { index, why } if ways[index].name == link => {
                self.why = why;
                true
            }
            _ => false,
        };
        // Leaving of our own accord is only worth it if what we hold can be continued.
        let spends = self.is_metered(link) && self.metered_bytes_left() == Some(0);
        let continuable = self.sink.note.validator.is_some() || self.sink.len() == 0;
        Ok(!stays && (continuable || spends))
    }

    fn take(&mut self, way: &Way, why: &str) {
        if self.current.as_deref() == Some(&way.name) {
            return;
        }
        let from = self.last_link.replace(way.name.clone());
        if from.as_ref().is_some_and(|from| *from != way.name) {
            self.switches += 1;
        }
        let to = way.name.clone();
        self.observer.tell(&Event::Switch {
            t_s: self.t_s(),
            from,
            to,
            why: why.to_owned(),
            kind: None,
            silence_ms: None,
        });
        self.current = Some(way.name.clone());
    }

    fn need(&self) -> Need {
        Need {
            remaining_bytes: self
                .sink
                .note
                .length
                .map(|l| l.saturating_sub(self.sink.len())),
            left: self.left(),
            policy: self.job.policy,
            if_late: self.job.if_late,
            metered_bytes_left: self.metered_bytes_worth_using(),
        }
    }

    fn left(&self) -> Option<Duration> {
        let within = self.job.within?;
        Some(within.saturating_sub(Moment::now().since(self.start)))
    }

    /// What metered links may still carry.
    fn metered_bytes_left(&self) -> Option<u64> {
        let max = self.job.metered_bytes_max?;
        let metered = self
            .bytes_by_link
            .iter()
            .filter(|(link, _)| self.is_metered(link));
        Some(max.saturating_sub(metered.map(|(_, bytes)| bytes).sum()))
    }

    /// The same as an argument for using a metered link: nothing, if a new request would spend it
    /// on overlap alone.
    fn metered_bytes_worth_using(&self) -> Option<u64> {
        let left = self.metered_bytes_left()?;
        let wasted = !self.receiving && left <= self.sink.tail().len() as u64;
        Some(if wasted { 0 } else { left })
    }

    fn is_metered(&self, link: &str) -> bool {
        self.classes
            .get(link)
            .is_some_and(|class| *class != Class::Free)
    }

    /// Half old, half new: one epoch of silence does not make a link worthless.
    fn measure(&mut self, link: &str, rate_bytes_per_s: f64) {
        let rate = self
            .rates
            .entry(link.to_owned())
            .or_insert(rate_bytes_per_s);
        *rate = (*rate + rate_bytes_per_s) / 2.0;
    }

    fn tell_progress(&mut self, link: &str, rate_bytes_per_s: f64) {
        let event = Event::Progress {
            t_s: self.t_s(),
            bytes: self.sink.len(),
            length: self.sink.note.length,
            rate_bytes_per_s,
            link: link.to_owned(),
            bytes_by_link: self.bytes_by_link.clone(),
            why: self.why.clone(),
        };
        self.observer.tell(&event);
    }

    fn note(&mut self, reason: Option<Reason>, text: String) {
        self.observer.tell(&Event::Note {
            t_s: self.t_s(),
            reason,
            text,
        });
    }

    fn t_s(&self) -> f64 {
        Moment::now().since(self.start).as_secs_f64()
    }
}

fn display(destination: &Destination, file: &std::path::Path) -> String {
    match destination {
        Destination::Output => "-".into(),
        Destination::File(path) => path.display().to_string(),
        Destination::Named => file.display().to_string(),
    }
}

/// The URL without credentials or fragment: what may be written down.
pub fn public(url: &Url) -> String {
    let mut url = url.clone();
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_fragment(None);
    url.to_string()
}
