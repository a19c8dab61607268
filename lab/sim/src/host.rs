//! A simulated process with a core, for both the device and the proxy: it may stop, hibernate and
//! keep a journal.
//!
//! ```text
//!  running ──crash──▶ away ──▶ a new process, from the journal      (FromCrash)
//!     │ ────freeze──▶ away ──▶ the same process, its clock jumped   (FromFreeze)
//!     └── no path for hibernate_after_s ──▶ the session as a record
//! ```

use std::collections::{BTreeMap, VecDeque};

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::{Crash, CrashKind, Scenario};
use d2tp_session::{
    Addresses, Endpoint, FlowArrival, FlowId, IncomingDatagram, LinkId, Session, SessionId,
    SessionState, Transmit,
};

use crate::clock::SimClock;
use crate::fault::SimFault;
use crate::journal::{Commit, SimJournal};
use crate::log::Log;
use crate::network::Delivery;

/// The most datagrams that one end may send at one time; more is a live-lock.
const BURST_MAX: usize = 20_000;
/// The most datagrams that wait in the sockets of a frozen process.
const SOCKET_DATAGRAMS_MAX: usize = 64;

/// The state of a process that may have stopped.
pub(crate) enum StoppedProcess<S> {
    /// The process runs, and did before.
    Ran,
    /// The process is still away.
    Away,
    /// A new process found this in the journal.
    FromCrash(Option<Commit<S>>),
    /// The process was frozen, and runs again.
    FromFreeze,
}

struct StoppedHost<S> {
    until: Time,
    found: Option<Option<Commit<S>>>,
}

/// A process with a core and an application whose state is `S`.
pub(crate) struct SimHost<S> {
    name: &'static str,
    pub endpoint: Endpoint,
    pub clock: SimClock,
    stopped: Option<StoppedHost<S>>,
    /// Datagrams that arrived while it was frozen.
    inbox: VecDeque<Delivery>,
    pub idle_since: Option<Time>,
    hibernate_after: Span,
    journal: SimJournal<S>,
    journals: bool,
    /// Whether something must not be lost.
    pub dirty: bool,
    /// The offsets that the peer called durable, since this process started.
    pub peer_durable: BTreeMap<FlowId, u64>,
}

impl<S: Clone> SimHost<S> {
    pub(crate) fn new(name: &'static str, endpoint: Endpoint, scenario: &Scenario) -> SimHost<S> {
        SimHost {
            name,
            endpoint,
            clock: SimClock::boot(Time::ZERO),
            stopped: None,
            inbox: VecDeque::new(),
            idle_since: None,
            hibernate_after: Span::from_secs_f64(scenario.hibernate_after_s),
            journal: SimJournal::new(),
            journals: journals(scenario),
            dirty: false,
            peer_durable: BTreeMap::new(),
        }
    }

    pub(crate) fn is_away(&self) -> bool {
        self.stopped.is_some()
    }

    /// Whether its machine has stopped, and will begin anew.
    pub(crate) fn is_crashed(&self) -> bool {
        self.stopped.as_ref().is_some_and(|s| s.found.is_some())
    }

    /// Stops the process without warning.
    pub(crate) fn stop(&mut self, now: Time, crash: &Crash, log: &mut Log) {
        log.note(now, self.name, || match crash.how {
            CrashKind::Crash | CrashKind::Upgrade | CrashKind::Drain => {
                format!("crashes, {} commits lost", crash.lost_commits)
            }
            CrashKind::Freeze => "stands still".to_owned(),
        });
        let until = now + Span::from_secs_f64(crash.for_s);
        let before = self.stopped.take();
        let crashed_before = before.as_ref().is_some_and(|b| b.found.is_some());
        let found = match crash.how {
            CrashKind::Freeze if !crashed_before => None,
            CrashKind::Crash | CrashKind::Upgrade | CrashKind::Drain => {
                Some(self.journal.crash(crash.lost_commits))
            }
            CrashKind::Freeze => before.as_ref().and_then(|b| b.found.clone()),
        };
        if found.is_some() {
            self.inbox.clear();
        }
        let until = before.map_or(until, |b| b.until.max(until));
        self.stopped = Some(StoppedHost { until, found });
    }

    /// Whether the process is back by now, and how.
    pub(crate) fn come_back(&mut self, now: Time, log: &mut Log) -> StoppedProcess<S> {
        match &self.stopped {
            None => return StoppedProcess::Ran,
            Some(stopped) if now < stopped.until => return StoppedProcess::Away,
            Some(_) => {}
        }
        let found = self.stopped.take().and_then(|stopped| stopped.found);
        let how = if found.is_some() {
            "restarts"
        } else {
            "goes on"
        };
        log.note(now, self.name, || how.to_owned());
        match found {
            Some(found) => {
                self.idle_since = None;
                self.clock = SimClock::boot(now);
                self.peer_durable.clear();
                StoppedProcess::FromCrash(found)
            }
            None => StoppedProcess::FromFreeze,
        }
    }

    pub(crate) fn next_at(&self) -> Time {
        if let Some(stopped) = &self.stopped {
            return stopped.until;
        }
        self.clock
            .run(self.endpoint.next_timeout())
            .min(self.hibernate_at())
            .min(self.journal.next_at())
    }

    pub(crate) fn hibernate_at(&self) -> Time {
        self.idle_since
            .map_or(Time::NEVER, |since| since + self.hibernate_after)
    }

    /// Takes the datagrams that waited in the sockets of a process that has just continued.
    pub(crate) fn take_inbox(&mut self) -> VecDeque<Delivery> {
        std::mem::take(&mut self.inbox)
    }

    /// Handles a datagram. Returns `None` if no process receives it now; else its payload by flow.
    pub(crate) fn take_in(
        &mut self,
        now: Time,
        link: LinkId,
        delivery: Delivery,
        session: Option<SessionId>,
    ) -> Option<Vec<FlowArrival>> {
        if let Some(stopped) = &self.stopped {
            if stopped.found.is_none() && self.inbox.len() < SOCKET_DATAGRAMS_MAX {
                self.inbox.push_back(delivery);
            }
            return None;
        }
        let Delivery {
            from, mut bytes, ..
        } = delivery;
        let addresses = Addresses {
            link,
            local: None,
            remote: from,
        };
        let incoming = IncomingDatagram {
            addresses,
            bytes: &mut bytes,
        };
        self.endpoint
            .handle_datagram(self.clock.core(now), incoming);
        // A session that this datagram created did not exist before.
        let session = session.or_else(|| self.endpoint.ids().first().copied());
        let arrived = session.and_then(|id| self.endpoint.with(id, Session::take_arrivals).ok());
        Some(arrived.unwrap_or_default())
    }

    /// Records since when the session has had no path.
    pub(crate) fn note_idle(&mut self, now: Time, session: Option<SessionId>) {
        let life = session.and_then(|id| self.endpoint.session(id));
        match life.map(Session::state) {
            Some(SessionState::Suspended) => {
                self.idle_since.get_or_insert(now);
            }
            Some(_) => self.idle_since = None,
            None => {}
        }
    }

    /// Sends everything that can be sent now, each datagram through `send`.
    pub(crate) fn transmit(
        &mut self,
        now: Time,
        buf: &mut [u8],
        mut send: impl FnMut(&mut Endpoint, &Transmit, &[u8]),
    ) -> Result<bool, SimFault> {
        if self.is_away() {
            return Ok(false);
        }
        let mut sent = 0;
        while let Some(t) = self.endpoint.poll_transmit(self.clock.core(now), buf) {
            for datagram in buf[..t.len].chunks(t.segment) {
                sent += 1;
                send(&mut self.endpoint, &t, datagram);
            }
            if sent > BURST_MAX {
                return Err(SimFault::LiveLock {
                    at_s: now.as_secs_f64(),
                    what: format!("the {} sends without end", self.name),
                });
            }
        }
        Ok(sent > 0)
    }

    // ---- the journal ----

    /// Whether to commit now: at the scenario's interval, or because something must not be lost.
    pub(crate) fn wants_commit(&mut self, pace: bool) -> bool {
        let wants = self.journals && !self.is_away() && (pace || self.dirty);
        if wants {
            self.dirty = false;
        }
        wants
    }

    /// Writes to the journal, if there is one.
    pub(crate) fn commit(&mut self, now: Time, record: Option<Vec<u8>>, state: S) {
        if self.journals {
            self.journal.commit(Commit {
                made_at: now,
                record,
                state,
            });
        }
    }

    /// The state that has become durable by now, if there is one.
    pub(crate) fn synced(&mut self, now: Time) -> Option<S> {
        if self.is_away() {
            return None;
        }
        self.journal.on_time(now).map(|commit| commit.state.clone())
    }

    /// The first limit that a session exceeds, in words.
    pub(crate) fn broken_bound(&self) -> Option<String> {
        let sessions = self.endpoint.ids();
        let mut sessions = sessions.iter().filter_map(|id| self.endpoint.session(*id));
        let broken = sessions.find_map(|s| s.violated_limit(crate::stream::CHUNK_BYTES))?;
        Some(format!("the {}: {broken}", self.name))
    }
}

/// Whether a scenario needs journals.
pub(crate) fn journals(scenario: &Scenario) -> bool {
    !scenario.crashes.is_empty() || scenario.flows.iter().any(|f| f.durable)
}
