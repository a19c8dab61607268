//! The one scheduler of a device: every transfer tells it what it needs and what links carried for
//! it, and is told what it may use now.
//!
//! ```text
//!  transfer ─ Seat ─┐  needs, links, bytes                     d2tp_sched::Scheduler
//!  transfer ─ Seat ─┼──────────────────▶ lane (down) ─ sights ─▶ histories, outlook ─▶ roster
//!  transfer ─ Seat ─┘ ◀── Verdict ──────      │
//!                                        lane (up): the same, since links are not as fast that way
//! ```
//!
//! A `cedos get` alone has one of its own; in an agent all transfers share it.
//!
//! A device that has seen no free link yet hopes for one: its place in the scheduler's list is there
//! from the start, as a link that is away, and the first free link that comes takes it. Without that
//! nothing but links that cost would exist, and all would be paid for at once.

mod lane;
mod verdict;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use d2tp_sched::{Mode, Need, Promise, Way};

use crate::fetch::clock::Moment;
use lane::Lane;
pub use verdict::Verdict;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To this device.
    Down,
    /// From it.
    Up,
}

/// How it is decided, as people choose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kind {
    /// By what the outlook on the links says.
    #[default]
    D2Sched,
    /// By Algorithm 1 of the Cedos paper, as published.
    AlgorithmOne,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 2] = [Kind::D2Sched, Kind::AlgorithmOne];

    /// As people write it.
    pub fn word(self) -> &'static str {
        match self {
            Kind::D2Sched => "d2sched",
            Kind::AlgorithmOne => "algorithm-1",
        }
    }

    fn mode(self) -> Mode {
        match self {
            Kind::D2Sched => Mode::Outlook,
            Kind::AlgorithmOne => Mode::AlgorithmOne { margin: 0.0 },
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Kind {
    type Err = String;
    fn from_str(text: &str) -> Result<Kind, String> {
        let found = Kind::ALL.into_iter().find(|kind| kind.word() == text);
        found.ok_or_else(|| format!("`{text}` is none of d2sched, algorithm-1"))
    }
}

/// How a transfer stands, as it sees it.
#[derive(Debug, Clone)]
pub struct Standing<'a> {
    /// What it needs.
    pub need: Need,
    /// Bytes of the whole of it, when known.
    pub size_bytes: Option<u64>,
    /// 0 to 7, higher is more.
    pub priority: u8,
    /// The links it could use.
    pub ways: &'a [Way],
    /// Payload that each carried for it so far.
    pub carried: &'a BTreeMap<String, u64>,
    /// It can be on several links at once.
    pub together: bool,
}

/// The scheduler of a device.
#[derive(Debug)]
pub struct Dispatcher {
    kind: Kind,
    lanes: Mutex<[Lane; 2]>,
}

impl Dispatcher {
    /// Of a device whose links are not known yet.
    pub fn new(kind: Kind) -> Arc<Dispatcher> {
        let lanes = [Lane::new(kind.mode()), Lane::new(kind.mode())];
        Arc::new(Dispatcher {
            kind,
            lanes: Mutex::new(lanes),
        })
    }

    /// How it decides.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What links that cost may carry for all transfers together from now on; none is no limit.
    pub fn allow(&self, metered_bytes: Option<u64>) {
        for lane in self.lanes().iter_mut() {
            lane.allow(metered_bytes);
        }
    }

    /// A place for a transfer, which it keeps until it is dropped.
    /// `transfer` is the number others know it by.
    pub fn seat(self: &Arc<Dispatcher>, direction: Direction, transfer: u64) -> Seat {
        let number = self.lanes()[direction as usize].enter(transfer);
        Seat {
            dispatcher: self.clone(),
            direction,
            number,
        }
    }

    /// What can be promised of a transfer, and in how long that is; none without a deadline, or
    /// before it told what it needs.
    pub fn promise_of(&self, transfer: u64) -> Option<(Promise, Duration)> {
        let mut lanes = self.lanes();
        lanes
            .iter_mut()
            .find_map(|lane| lane.promise_of(Moment::now(), transfer))
    }

    /// The rate of a link towards this device, if it was used, and whether it carries as far as is
    /// known.
    pub fn seen(&self, link: &str) -> Option<(f64, bool)> {
        self.lanes()[Direction::Down as usize].seen(link)
    }

    fn lanes(&self) -> MutexGuard<'_, [Lane; 2]> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one transfer.
#[derive(Debug)]
pub struct Seat {
    dispatcher: Arc<Dispatcher>,
    direction: Direction,
    number: u64,
}

impl Seat {
    /// Tells how the transfer stands, and asks what it may use.
    pub fn ask(&self, standing: &Standing) -> Verdict {
        let mut lanes = self.dispatcher.lanes();
        lanes[self.direction as usize].ask(Moment::now(), self.number, standing)
    }

    /// What can be promised of it, by what it told last; none before it told anything.
    pub fn promise(&self) -> Option<Promise> {
        let mut lanes = self.dispatcher.lanes();
        lanes[self.direction as usize].promise(Moment::now(), self.number)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.dispatcher.lanes()[self.direction as usize].leave(self.number);
    }
}
