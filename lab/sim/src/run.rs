//! A run: from one thing that happens to the next, in virtual time.
//!
//! ```text
//!   ┌─▶ the earliest of: link event · packet · timer of either end · flow · crash · journal
//!   │    links change ▸ packets arrive ▸ timers ▸ applications ▸ conductor ▸ both ends send
//!   └──── invariants ◀─────────────────────────────────────────────────────┘
//! ```
//!
//! Between two things nothing is looked at, so an outage of hours costs nothing.

use std::io::Write;

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::{EventKind, Report, Scenario, SwitchMeter, Who};

use crate::device::Device;
use crate::fault::SimFault;
use crate::identity::Identity;
use crate::log::Log;
use crate::network::Network;
use crate::proxy::Proxy;

/// No progress for so long over a permitted link that carries packets is a fault of the core.
pub const STUCK_AFTER: Span = Span::from_millis(180_000);
/// How often the journals are written while a crash is to come. // a guess: what an SD card bears
const JOURNAL_EVERY: Span = Span::from_millis(200);
/// How long a run goes on when all flows are over, to see what still arrives.
const LINGER: Span = Span::from_millis(3_000);
/// Steps at one instant; more is a live-lock.
const STEPS_MAX: u32 = 10_000;
/// Bytes of the buffer that an end fills at a time.
const BATCH_BYTES: usize = 65_536;

/// A run that came to its end.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What it came to, the scenario's expectations judged.
    pub report: Report,
    /// When it ended, in seconds.
    pub ended_s: f64,
    /// Instants at which something happened.
    pub steps: u64,
}

/// Runs a scenario; all its chance comes from the scenario's seed. `log` gets the event log.
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
/// The scenario needs real sockets, the core broke an invariant, or the log cannot be written.
pub fn run(scenario: &Scenario, log: Option<&mut dyn Write>) -> Result<Outcome, SimFault> {
    if let Some(flow) = scenario.flows.iter().find(|flow| flow.url.is_some()) {
        return Err(SimFault::Url {
            flow: flow.id.clone(),
        });
    }
    let mut run = Run::new(scenario, Log::new(log));
    while run.step()? {}
    let Run {
        mut switches,
        network,
        device,
        proxy,
        log,
        now,
        steps,
        ..
    } = run;
    if let Some(fault) = log.into_fault() {
        return Err(fault.into());
    }
    switches.on_idle();
    let mut report = Report {
        flows: device.reports(&proxy),
        links: network.reports(),
        switches: switches.into_switches(),
        expectations: Vec::new(),
    };
    scenario.judge(&mut report);
    Ok(Outcome {
        report,
        ended_s: now.as_secs_f64(),
        steps,
    })
}

struct Run<'a> {
    now: Time,
    end: Time,
    network: Network,
    device: Device,
    proxy: Proxy,
    switches: SwitchMeter,
    /// Crashes to come, the next one last.
    crashes: Vec<(Time, Span, Who)>,
    journal_at: Time,
    done_at: Option<Time>,
    /// The last progress, and how much there had been by then.
    moved: (Time, u64),
    /// Since when a permitted link carries packets.
    good_since: Option<Time>,
    stuck_after: Span,
    steps: u64,
    steps_here: u32,
    buf: Vec<u8>,
    log: Log<'a>,
}

impl<'a> Run<'a> {
    fn new(scenario: &Scenario, log: Log<'a>) -> Run<'a> {
        let identity = Identity::new(scenario.seed);
        let mut crashes: Vec<_> = scenario
            .crashes
            .iter()
            .map(|c| {
                (
                    Time::from_secs_f64(c.t_s),
                    Span::from_secs_f64(c.for_s),
                    c.who,
                )
            })
            .collect();
        crashes.sort_by_key(|(at, _, _)| std::cmp::Reverse(*at));
        Run {
            now: Time::ZERO,
            end: Time::from_secs_f64(scenario.duration_s),
            network: Network::new(scenario),
            device: Device::new(scenario, identity),
            proxy: Proxy::new(scenario, identity),
            switches: SwitchMeter::new(scenario.links.iter().map(|l| l.name.as_str())),
            journal_at: if crashes.is_empty() {
                Time::NEVER
            } else {
                Time::ZERO
            },
            crashes,
            done_at: None,
            moved: (Time::ZERO, 0),
            good_since: None,
            // A round trip may take minutes itself.
            stuck_after: STUCK_AFTER + Span::from_millis_f64(8.0 * scenario.rtt_ms()),
            steps: 0,
            steps_here: 0,
            buf: vec![0; BATCH_BYTES],
            log,
        }
    }

    /// One instant. False at the end.
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
        let now = self.now;
        self.crash();
        let mut look = self.change_links();
        self.deliver()?;
        if self.device.on_time(now, &mut self.log)? {
            look = true;
            // The new process has new sockets.
            (0..self.device.classes.len()).for_each(|link| self.network.open_socket(link));
        }
        self.proxy.on_time(now, &mut self.log)?;
        self.talk(look)?;
        self.keep();
        self.check()?;
        Ok(true)
    }

    fn next_at(&self) -> Time {
        let crash = self.crashes.last().map_or(Time::NEVER, |(at, _, _)| *at);
        let journal = if self.crashes.is_empty() || !self.is_moving() {
            Time::NEVER
        } else {
            self.journal_at
        };
        self.network
            .next_at()
            .min(self.device.next_at())
            .min(self.proxy.next_at())
            .min(crash)
            .min(journal)
            .min(self.stuck_at())
    }

    /// Whether anything is in motion: else the journals say all there is to say.
    fn is_moving(&self) -> bool {
        self.device.is_active() && self.now.since(self.moved.0) < Span::from_millis(2_000)
    }

    fn crash(&mut self) {
        while let Some((at, away, who)) = self.crashes.pop() {
            if at > self.now {
                self.crashes.push((at, away, who));
                return;
            }
            match who {
                Who::Device => self.device.crash(self.now, away, &mut self.log),
                Who::Proxy => self.proxy.crash(self.now, away, &mut self.log),
            }
        }
    }

    fn change_links(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.network.next_event(self.now) {
            any = true;
            let at = event.at;
            self.log.note(at, "net", || {
                format!("link {} {:?}", event.link, event.kind)
            });
            match event.kind {
                EventKind::Up { .. } => self.switches.on_up(at, event.link),
                EventKind::Down => {
                    self.switches.on_down(at, event.link);
                    self.device.on_link_down(self.now, event.link);
                }
                EventKind::NewAddress { .. } => {
                    self.switches.on_new_address(at, event.link);
                    self.device.on_link_down(self.now, event.link);
                }
                EventKind::Attaching | EventKind::Rebind | EventKind::Changed => {}
            }
        }
        any
    }

    fn deliver(&mut self) -> Result<(), SimFault> {
        let now = self.now;
        while let Some(delivery) = self.network.next_for_device(now) {
            let link = delivery.link;
            if self.device.on_datagram(now, delivery, &mut self.log)? {
                self.switches.on_data(now, link);
            }
        }
        while let Some(delivery) = self.network.next_for_proxy(now) {
            let link = delivery.link;
            let before = self.proxy.taken_by_flow();
            let (payload, repeated) = self.proxy.on_datagram(now, delivery);
            self.proxy.attend(now, &mut self.log)?;
            if payload > 0 {
                let after = self.proxy.taken_by_flow();
                self.device
                    .on_uploaded(link, payload, repeated, &before, &after);
            }
        }
        Ok(())
    }

    /// Both ends say what they have to say now.
    fn talk(&mut self, mut look: bool) -> Result<(), SimFault> {
        let now = self.now;
        let log = &mut self.log;
        for _ in 0..STEPS_MAX {
            let mut any = self.device.attend(now, log)?;
            any |= self.proxy.attend(now, log)?;
            if look || self.device.look_at <= now {
                look = false;
                let good = self.device.conduct(now, &self.network, log)?;
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
        if self.device.is_done() && self.crashes.is_empty() {
            self.done_at.get_or_insert(self.now);
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
