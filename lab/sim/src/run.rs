//! A simulation run: it advances from one event to the next, in virtual time.
//!
//! ```text
//!   ┌─▶ the earliest of: link event · packet · timer of either end · flow · crash · journal
//!   │    links change ▸ packets arrive ▸ timers ▸ applications ▸ conductor ▸ both ends send
//!   └──── invariants ◀─────────────────────────────────────────────────────┘
//! ```
//!
//! Nothing is computed between two events, so an outage of hours costs nothing.

use std::io::Write;

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::{
    Crash, CrashKind, CrashedEnd, EventKind, Replay, RunReport, Scenario, ScenarioState,
    SwitchMeter,
};

use crate::coverage::{Coverage, FaultKind};
use crate::device::{ProcessReturn, SimDevice};
use crate::ends::EndpointConfigs;
use crate::fault::SimFault;
use crate::host::journals;
use crate::identity::Identity;
use crate::log::Log;
use crate::network::{Delivery, PassedPacket, SimNetwork};
use crate::proxy::Proxy;
use crate::strategy::Strategy;
use crate::stream_paths::{StreamEvent, StreamRole};
use crate::viewer::{ViewerConfig, ViewingReport};

/// The time without progress, over a permitted link that carries packets, after which the core
/// counts as faulty.
pub const STUCK_AFTER: Span = Span::from_millis(180_000);
/// How often the journals are written while a crash is to come. // a guess: what an SD card endures
const JOURNAL_EVERY: Span = Span::from_millis(200);
/// How long a run continues when all flows are over, to see late packets.
const LINGER: Span = Span::from_millis(3_000);
/// The most steps at one point in time; more is a live-lock.
const STEPS_MAX: u32 = 10_000;
/// The size of the buffer that an end fills at a time, in bytes.
const BATCH_BYTES: usize = 65_536;

/// The result of a complete run.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// The report, with the results of the scenario's expectations.
    pub report: RunReport,
    /// When the run ended, in seconds.
    pub ended_s: f64,
    /// The number of points in time with events.
    pub steps: u64,
    /// Which faults occurred in which states.
    pub coverage: Coverage,
    /// Flows that failed for a reason other than their deadline: id and reason.
    pub failed: Vec<(String, String)>,
}

/// Runs a scenario; all random values come from the scenario's seed. `log` receives the event log.
///
/// ```
/// let text = r#"
///     duration_s = 60
///     [[link]]
///     name = "wlan0"
///     [[flow]]
///     bytes = 100_000
///     [[expect]]
///     text = "flows[0].sha256_ok"
/// "#;
/// let scenario =
///     cedos_lab_scenario::Scenario::parse("example", text, &mut |_| unreachable!()).unwrap();
/// let outcome = cedos_lab_sim::run(&scenario, None).unwrap();
/// assert!(outcome.report.holds());
/// ```
///
/// # Errors
/// The scenario needs real sockets, an invariant of the core is violated, or the log cannot be
/// written.
pub fn run(scenario: &Scenario, log: Option<&mut dyn Write>) -> Result<RunOutcome, SimFault> {
    run_between(scenario, &EndpointConfigs::of(scenario), log)
}

/// Runs a scenario with other configurations of the ends.
///
/// # Errors
/// The same as those of [`run`].
pub fn run_between(
    scenario: &Scenario,
    ends: &EndpointConfigs,
    log: Option<&mut dyn Write>,
) -> Result<RunOutcome, SimFault> {
    let run = SimRun::new(scenario, ends, Log::new(log));
    Ok(finish(scenario, run)?.0)
}

/// Runs a scenario like [`run`], and also returns every packet that passed the device, in order of
/// time.
///
/// # Errors
/// The same as those of [`run`].
pub fn run_watched(scenario: &Scenario) -> Result<(RunOutcome, Vec<PassedPacket>), SimFault> {
    let mut run = SimRun::new(scenario, &EndpointConfigs::of(scenario), Log::new(None));
    run.network.passages = Some(Vec::new());
    finish(scenario, run)
}

/// Runs a scenario like [`run_watched`], with the links that `strategy` chooses among those that
/// the policy permits.
///
/// # Errors
/// The same as those of [`run`].
pub fn run_by(
    scenario: &Scenario,
    strategy: Box<dyn Strategy>,
) -> Result<(RunOutcome, Vec<PassedPacket>), SimFault> {
    let mut run = SimRun::new(scenario, &EndpointConfigs::of(scenario), Log::new(None));
    run.network.passages = Some(Vec::new());
    run.device.strategy = Some(strategy);
    finish(scenario, run)
}

/// Runs a scenario like [`run`], with a viewer of the first flow.
///
/// # Errors
/// The same as those of [`run`].
pub fn run_viewed(
    scenario: &Scenario,
    watching: ViewerConfig,
) -> Result<(RunOutcome, ViewingReport), SimFault> {
    let mut run = SimRun::new(scenario, &EndpointConfigs::of(scenario), Log::new(None));
    run.device.watch(watching);
    while run.step()? {}
    let mut watched = ViewingReport::default();
    if let Some(viewer) = &mut run.device.viewer {
        // Buffered data is played to its end after the last byte arrived.
        viewer.end(run.now);
        watched = viewer.watched.clone();
    }
    let (outcome, _) = finish(scenario, run)?;
    Ok((outcome, watched))
}

fn finish(
    scenario: &Scenario,
    mut run: SimRun,
) -> Result<(RunOutcome, Vec<PassedPacket>), SimFault> {
    if let Some(flow) = scenario.flows.iter().find(|flow| flow.url.is_some()) {
        return Err(SimFault::Url {
            flow: flow.id.clone(),
        });
    }
    if scenario.podcasts.is_some() {
        return Err(SimFault::Podcasts);
    }
    while run.step()? {}
    let SimRun {
        mut switches,
        mut network,
        device,
        proxy,
        log,
        now,
        steps,
        coverage,
        packets_to_payload,
        ..
    } = run;
    if let Some(fault) = log.into_fault() {
        return Err(fault.into());
    }
    switches.on_idle();
    let flows = device.reports(&proxy);
    let bytes = flows.iter().map(|flow| flow.bytes).sum();
    let mut report = RunReport {
        flows,
        links: network.reports(),
        switches: switches.into_switches(),
        origin_requests_twice: None,
        sessions_taken_over: None,
        packets_to_payload,
        energy: network
            .energy
            .as_ref()
            .map(|meter| meter.report(now, bytes)),
        podcasts: None,
        expectations: Vec::new(),
    };
    scenario.judge(&mut report);
    let outcome = RunOutcome {
        report,
        ended_s: now.as_secs_f64(),
        steps,
        coverage,
        failed: device.failures(),
    };
    Ok((outcome, network.passages.take().unwrap_or_default()))
}

struct SimRun<'a> {
    now: Time,
    end: Time,
    network: SimNetwork,
    device: SimDevice,
    proxy: Proxy,
    switches: SwitchMeter,
    /// The crashes to come, the next one last.
    crashes: Vec<Crash>,
    /// The replays to come, the next one last.
    replays: Vec<Replay>,
    /// Crashes and replays that wait for a state.
    ambushes: (Vec<Crash>, Vec<Replay>),
    /// Whether there are journals, which are written at intervals.
    journals: bool,
    /// The ends whose disks have lost a write that they reported as durable.
    liars: Vec<CrashedEnd>,
    journal_at: Time,
    done_at: Option<Time>,
    /// The number of packets that had passed the device when the first payload arrived.
    packets_to_payload: Option<u64>,
    /// The time of the last progress, and the bytes by then.
    moved: (Time, u64),
    /// Since when a permitted link carries packets.
    good_since: Option<Time>,
    stuck_after: Span,
    steps: u64,
    steps_here: u32,
    coverage: Coverage,
    buf: Vec<u8>,
    log: Log<'a>,
}

impl<'a> SimRun<'a> {
    fn new(scenario: &Scenario, ends: &EndpointConfigs, log: Log<'a>) -> SimRun<'a> {
        let identity = Identity::new(scenario.seed);
        let all = scenario.crashes.iter().cloned();
        let (ambushes, mut crashes): (Vec<_>, Vec<_>) = all.partition(|c| c.when.is_some());
        let all = scenario.replays.iter().cloned();
        let (later, mut replays): (Vec<_>, Vec<_>) = all.partition(|r| r.when.is_some());
        crashes.sort_by(|a, b| b.t_s.total_cmp(&a.t_s));
        replays.sort_by(|a, b| b.t_s.total_cmp(&a.t_s));
        let network = SimNetwork::new(scenario);
        let coverage = Coverage::new(network.counters());
        SimRun {
            now: Time::ZERO,
            end: Time::from_secs_f64(scenario.duration_s),
            network,
            device: SimDevice::new(scenario, identity, ends.device.clone()),
            proxy: Proxy::new(scenario, identity, ends.proxy.clone()),
            switches: SwitchMeter::new(scenario.links.iter().map(|l| l.name.as_str())),
            journals: journals(scenario),
            liars: Vec::new(),
            journal_at: Time::ZERO,
            crashes,
            ambushes: (ambushes, later),
            replays,
            done_at: None,
            packets_to_payload: None,
            moved: (Time::ZERO, 0),
            good_since: None,
            // A round trip may itself take minutes.
            stuck_after: STUCK_AFTER + Span::from_millis_f64(8.0 * scenario.rtt_ms()),
            steps: 0,
            steps_here: 0,
            coverage,
            buf: vec![0; BATCH_BYTES],
            log,
        }
    }

    /// Handles one point in time. Returns false at the end.
    fn step(&mut self) -> Result<bool, SimFault> {
        let at = self.next_at();
        if at > self.end || self.done_at.is_some_and(|done| at > done + LINGER) {
            self.now = self
                .done_at
                .map_or(self.end, |done| (done + LINGER).min(self.end));
            return Ok(false);
        }
        self.steps += 1;
        self.steps_here = if at > self.now {
            0
        } else {
            self.steps_here + 1
        };
        if self.steps_here > STEPS_MAX {
            let what = format!("time stands still; {}", self.state());
            return Err(SimFault::LiveLock {
                at_s: self.now.as_secs_f64(),
                what,
            });
        }
        self.now = self.now.max(at);
        self.coverage.look(&self.device, &self.proxy);
        self.stop();
        let mut look = self.change_links();
        self.deliver()?;
        if self.packets_to_payload.is_none() && self.device.has_payload() {
            self.packets_to_payload = Some(self.network.passed);
        }
        look |= self.let_time_pass()?;
        self.replay()?;
        self.talk(look)?;
        self.coverage.on_counters(self.network.counters());
        self.keep();
        self.check()?;
        Ok(true)
    }

    /// Handles timers and restarts. Returns whether the links have to be checked.
    fn let_time_pass(&mut self) -> Result<bool, SimFault> {
        let now = self.now;
        let known = &self.proxy.host.peer_durable;
        let came = self.device.on_time(now, known, &mut self.log)?;
        match came {
            ProcessReturn::Not => {}
            ProcessReturn::Anew => {
                // The new process has new sockets.
                (0..self.device.classes.len()).for_each(|link| self.network.open_socket(link));
                if self.device.rolled_back() && !self.disk_lied(CrashedEnd::Device) {
                    return Err(SimFault::NotDurable { who: "device" });
                }
                self.proxy.forgive();
            }
            ProcessReturn::Thawed => {
                for delivery in self.device.host.take_inbox() {
                    self.hand_to_device(delivery)?;
                }
            }
        }
        let known = &self.device.host.peer_durable;
        let lives = self.proxy.lives();
        if self.proxy.on_time(now, known, &mut self.log)? {
            for delivery in self.proxy.host.take_inbox() {
                self.hand_to_proxy(delivery)?;
            }
        }
        if self.proxy.lives() != lives {
            if self.proxy.rolled_back() && !self.disk_lied(CrashedEnd::Proxy) {
                return Err(SimFault::NotDurable { who: "proxy" });
            }
            self.device.forgive();
        }
        Ok(came != ProcessReturn::Not)
    }

    /// Whether commits of this end were lost that had been reported as durable.
    fn disk_lied(&self, who: CrashedEnd) -> bool {
        self.liars.contains(&who)
    }

    /// Replays old packets.
    fn replay(&mut self) -> Result<(), SimFault> {
        while let Some(replay) = self.replays.pop() {
            if Time::from_secs_f64(replay.t_s) > self.now {
                self.replays.push(replay);
                break;
            }
            self.replay_now(&replay)?;
        }
        let mut all = std::mem::take(&mut self.ambushes.1);
        let is_due = |r: &mut Replay| self.is_in(r.t_s, r.of.unwrap_or(r.to), r.when);
        let due: Vec<Replay> = all.extract_if(.., is_due).collect();
        self.ambushes.1 = all;
        due.iter().try_for_each(|replay| self.replay_now(replay))
    }

    fn replay_now(&mut self, replay: &Replay) -> Result<(), SimFault> {
        self.log.note(self.now, "net", || {
            format!("{} packets again to {:?}", replay.packets, replay.to)
        });
        self.coverage.on_fault(if replay.elsewhere {
            FaultKind::ReplayElsewhere
        } else {
            FaultKind::Replay
        });
        for _ in 0..replay.packets {
            let Some(delivery) = self.network.replayed(replay.to, replay.elsewhere) else {
                break;
            };
            match replay.to {
                CrashedEnd::Device => self.hand_to_device(delivery)?,
                CrashedEnd::Proxy => self.hand_to_proxy(delivery)?,
            }
        }
        Ok(())
    }

    fn next_at(&self) -> Time {
        let crash = self.crashes.last();
        let crash = crash.map_or(Time::NEVER, |c| Time::from_secs_f64(c.t_s));
        // A crash that waits for events has no time of its own.
        let crash = if crash > self.now { crash } else { Time::NEVER };
        let replay = self.replays.last();
        let replay = replay.map_or(Time::NEVER, |r| Time::from_secs_f64(r.t_s));
        let journal = if self.journals && self.is_moving() {
            self.journal_at
        } else {
            Time::NEVER
        };
        self.network
            .next_at()
            .min(self.device.next_at())
            .min(self.proxy.next_at())
            .min(crash)
            .min(replay)
            .min(journal)
            .min(self.stuck_at())
    }

    /// Whether anything is in motion; otherwise the journals are up to date.
    fn is_moving(&self) -> bool {
        self.device.is_active() && self.now.since(self.moved.0) < Span::from_millis(2_000)
    }

    /// Stops the ends that are due to stop now.
    fn stop(&mut self) {
        while let Some(mut crash) = self.crashes.pop() {
            let due = Time::from_secs_f64(crash.t_s) <= self.now;
            if !due || crash.after_events > 0 {
                crash.after_events = crash.after_events.saturating_sub(u64::from(due));
                self.crashes.push(crash);
                break;
            }
            self.strike(&crash);
        }
        let mut all = std::mem::take(&mut self.ambushes.0);
        let is_due = |c: &mut Crash| self.is_in(c.t_s, c.of.unwrap_or(c.who), c.when);
        let due: Vec<Crash> = all.extract_if(.., is_due).collect();
        self.ambushes.0 = all;
        for crash in due {
            self.strike(&crash);
        }
    }

    /// Whether `end` is in the state for which something waits from `t_s` on.
    fn is_in(&self, t_s: f64, end: CrashedEnd, state: Option<ScenarioState>) -> bool {
        let at_device = end == CrashedEnd::Device;
        Time::from_secs_f64(t_s) <= self.now
            && state.is_some_and(|state| self.coverage.is_in(at_device, state))
    }

    fn strike(&mut self, crash: &Crash) {
        self.coverage.on_fault(match (crash.how, crash.who) {
            (CrashKind::Freeze, CrashedEnd::Device) => FaultKind::FreezeDevice,
            (CrashKind::Freeze, CrashedEnd::Proxy) => FaultKind::FreezeProxy,
            (CrashKind::Crash | CrashKind::Upgrade | CrashKind::Drain, CrashedEnd::Device) => {
                FaultKind::CrashDevice
            }
            (CrashKind::Crash | CrashKind::Upgrade | CrashKind::Drain, CrashedEnd::Proxy) => {
                FaultKind::CrashProxy
            }
        });
        if crash.lost_commits > 0 {
            self.coverage.on_fault(FaultKind::LostCommits);
            self.liars.push(crash.who);
        }
        let (role, crashed) = match crash.who {
            CrashedEnd::Device => {
                self.device.stop(self.now, crash, &mut self.log);
                (StreamRole::Device, self.device.host.is_crashed())
            }
            CrashedEnd::Proxy => {
                self.proxy.stop(self.now, crash, &mut self.log);
                (StreamRole::Proxy, self.proxy.host.is_crashed())
            }
        };
        if crashed {
            // Its TCP is gone too, without a word to the peer.
            self.network.streams.forget(role);
        }
    }

    fn change_links(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.network.next_event(self.now) {
            any = true;
            self.coverage.on_link_event(&event);
            let at = event.at;
            self.log.note(at, "net", || {
                format!("link {} {:?}", event.link, event.kind)
            });
            match event.kind {
                EventKind::Up { .. } => self.switches.on_up(at, event.link),
                EventKind::Down => {
                    self.switches.on_down(at, event.link);
                    self.device.on_link_down(event.link);
                }
                EventKind::NewAddress { .. } => {
                    self.switches.on_new_address(at, event.link);
                    self.device.on_link_down(event.link);
                }
                EventKind::Attaching | EventKind::Rebind | EventKind::Changed => {}
            }
        }
        any
    }

    fn deliver(&mut self) -> Result<(), SimFault> {
        let now = self.now;
        let hosts = (&self.device.host, &self.proxy.host);
        self.network.machines_off = [hosts.0.is_crashed(), hosts.1.is_crashed()];
        self.network.streams.device_is_away = hosts.0.is_away();
        self.network.streams.on_time(now);
        while let Some(delivery) = self.network.next_for_device(now) {
            self.hand_to_device(delivery)?;
        }
        while let Some(delivery) = self.network.next_for_proxy(now) {
            self.hand_to_proxy(delivery)?;
        }
        Ok(())
    }

    fn hand_to_device(&mut self, delivery: Delivery) -> Result<(), SimFault> {
        let link = delivery.link;
        if self.device.on_datagram(self.now, delivery, &mut self.log)? {
            self.switches.on_data(self.now, link);
        }
        Ok(())
    }

    fn hand_to_proxy(&mut self, delivery: Delivery) -> Result<(), SimFault> {
        let link = delivery.link;
        let arrived = self.proxy.on_datagram(self.now, delivery);
        self.proxy.attend(self.now, &mut self.log)?;
        if self.proxy.take_met() {
            self.device.forgive();
        }
        self.device.on_uploaded(self.now, link, &arrived);
        Ok(())
    }

    /// Lets both ends send what they can send now.
    fn talk(&mut self, mut look: bool) -> Result<(), SimFault> {
        let now = self.now;
        for _ in 0..STEPS_MAX {
            let log = &mut self.log;
            let mut any = self.device.attend(now, log)?;
            any |= self.proxy.attend(now, log)?;
            if self.proxy.take_met() {
                self.device.forgive();
            }
            if look || self.device.look_at <= now {
                look = false;
                let good = self.device.conduct(now, &mut self.network, log)?;
                self.good_since = if good {
                    self.good_since.or(Some(now))
                } else {
                    None
                };
                any = true;
            }
            any |= self
                .device
                .transmit(now, &mut self.network, &mut self.buf, log)?;
            any |= self
                .proxy
                .transmit(now, &mut self.network, &mut self.buf, log)?;
            any |= self.run_streams()?;
            if !any {
                return Ok(());
            }
        }
        let what = format!("the ends never fall silent; {}", self.state());
        Err(SimFault::LiveLock {
            at_s: now.as_secs_f64(),
            what,
        })
    }

    /// Lets the ends of streams read and write. Returns whether a core learned anything.
    fn run_streams(&mut self) -> Result<bool, SimFault> {
        let now = self.now;
        if self.network.streams.is_empty() {
            return Ok(false);
        }
        let mut any = false;
        if !self.device.host.is_away() {
            for news in self.network.streams.run(now, StreamRole::Device) {
                any = true;
                for delivery in self.device.on_stream(now, news, &mut self.log) {
                    self.hand_to_device(delivery)?;
                }
            }
            for (stream, room) in self.network.streams.take_rooms(StreamRole::Device) {
                any = true;
                self.device.host.endpoint.on_stream_room(stream, room);
            }
        }
        if !self.proxy.host.is_away() {
            for news in self.network.streams.run(now, StreamRole::Proxy) {
                any = true;
                let (stream, link) = (news.stream, news.link);
                match news.event {
                    StreamEvent::Packets(packets) => {
                        for bytes in packets {
                            self.hand_to_proxy(Delivery::in_stream(link, stream, bytes))?;
                        }
                    }
                    StreamEvent::Ended => {
                        self.log
                            .note(now, "proxy", || format!("stream {} ends", stream.0));
                        self.proxy.on_stream_closed(now, stream);
                    }
                    StreamEvent::Opened | StreamEvent::Failed(_) => {}
                }
            }
            for (stream, room) in self.network.streams.take_rooms(StreamRole::Proxy) {
                any = true;
                self.proxy.host.endpoint.on_stream_room(stream, room);
            }
        }
        self.network.streams.run(now, StreamRole::Interceptor);
        self.network.send_segments(now);
        Ok(any)
    }

    fn keep(&mut self) {
        let pace = self.journal_at <= self.now;
        if pace {
            self.journal_at = self.now + JOURNAL_EVERY;
        }
        self.device.keep(self.now, pace);
        self.proxy.keep(self.now, pace);
    }

    fn check(&mut self) -> Result<(), SimFault> {
        let moved = self.device.moved() + self.proxy.taken();
        if moved != self.moved.1 || !self.device.is_active() {
            self.moved = (self.now, moved);
        }
        if !self.device.is_active() {
            self.switches.on_idle();
        }
        self.check_bounds()?;
        let quiet = self.crashes.is_empty() && self.replays.is_empty();
        let here = !self.device.host.is_away() && !self.proxy.host.is_away();
        if self.device.is_done() && quiet && here {
            self.done_at.get_or_insert(self.now);
        } else {
            // A crash may have undone a completed transfer.
            self.done_at = None;
        }
        if self.stuck_at() <= self.now {
            return Err(SimFault::Stuck {
                since_s: self
                    .moved
                    .0
                    .max(self.good_since.unwrap_or(Time::ZERO))
                    .as_secs_f64(),
                at_s: self.now.as_secs_f64(),
                state: self.state(),
            });
        }
        Ok(())
    }

    fn check_bounds(&self) -> Result<(), SimFault> {
        if let Some(flow) = self.device.overdue(self.now) {
            let who = "device";
            return Err(SimFault::Overdue { flow, who });
        }
        if let Some(flow) = self.proxy.overdue(self.now) {
            let who = "proxy";
            return Err(SimFault::Overdue { flow, who });
        }
        let broken = self.device.host.broken_bound();
        match broken.or_else(|| self.proxy.host.broken_bound()) {
            Some(what) => Err(SimFault::Bound {
                at_s: self.now.as_secs_f64(),
                what,
            }),
            None => Ok(()),
        }
    }

    fn stuck_at(&self) -> Time {
        match self.good_since {
            Some(since) if self.device.is_active() => since.max(self.moved.0) + self.stuck_after,
            _ => Time::NEVER,
        }
    }

    fn state(&self) -> String {
        format!("{}; {}", self.device.state(), self.proxy.state())
    }
}
