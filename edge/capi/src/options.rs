//! The socket options of level SOL_D2TP, as they are stored.
//!
//! | option | type | |
//! |---|---|---|
//! | DEADLINE | int, int64_t: seconds from now, 0 for none; struct timespec: a time of day | for both directions, at any time |
//! | ESIZE | uint64_t | bytes that will be sent and received together; 0 when not known |
//! | POLICY, IFLATE, PRIORITY | int | constants of the header |
//! | BUDGET | uint64_t | bytes on metered links |
//! | PEERKEY | 32 bytes, or 43 characters | before `connect` |
//! | PROXY | text | before `connect` |
//! | EXPIRY | int: milliseconds | when an unsent datagram is dropped |
//! | ROUTE | int, a constant of the header | which paths |
//! | RCVBUFTH | struct d2tp_rcvbufth | how much to buffer ahead of the program |
//! | PERSIST | int, a constant of the header; read: also a token | before `connect`; what outlives the program |

use std::time::Duration;

use d2tp_driver::{FlowSettings, PathSelection, PublicKey};
use d2tp_sched::{CostPolicy, DeadlineFallback};
use libc::c_int;

use crate::clock::{since_boot, time_of_day};
use crate::errno::{CallResult, Errno, SocketFault};
use crate::rcvbuf_thresholds::RcvbufThresholds;

pub(crate) use crate::header::{
    SO_BUDGET, SO_DEADLINE, SO_ERROR, SO_ESIZE, SO_EXPIRY, SO_HOSTKEY, SO_IFLATE, SO_INFO,
    SO_PEERKEY, SO_PERSIST, SO_POLICY, SO_PRIORITY, SO_PROXY, SO_RCVBUFTH, SO_ROUTE, SOL_D2TP,
};

/// The default time after which an unsent datagram is dropped: a second. Higher: after an outage
/// old datagrams come first. Lower: datagrams expire during a handshake.
pub(crate) const EXPIRY: Duration = Duration::from_secs(1); // a guess
/// The accepted range of that time: up to a day.
const EXPIRY_MS: std::ops::RangeInclusive<i64> = 1..=86_400_000;

/// The longest value of an option.
pub(crate) const VALUE_BYTES_MAX: usize = 512;
/// The accepted priorities.
const PRIORITIES: std::ops::RangeInclusive<i64> = 0..=7;

/// Values of `D2TP_SO_ROUTE`, by number.
pub(crate) const ROUTES: [PathSelection; 3] = [
    PathSelection::Any,
    PathSelection::Steadiest,
    PathSelection::Each,
];

/// How much of a connection outlives its program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PersistMode {
    #[default]
    No,
    /// Delivers the data that the program wrote.
    Written,
    /// The whole connection persists: it is opened again by a token.
    Open,
}

/// The modes by their numbers in the header.
const PERSISTS: [PersistMode; 3] = [PersistMode::No, PersistMode::Written, PersistMode::Open];

/// The options of a socket. Accepted sockets inherit those of their listener.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SocketOptions {
    /// The deadline by the boot clock, which counts sleep.
    pub(crate) deadline: Option<Duration>,
    pub(crate) size: Option<u64>,
    pub(crate) policy: CostPolicy,
    pub(crate) budget: Option<u64>,
    /// Priority as programs give it: 0 to 7, higher goes first, as for `SO_PRIORITY` of socket(7).
    pub(crate) priority: u8,
    pub(crate) if_late: DeadlineFallback,
    pub(crate) peer_key: Option<PublicKey>,
    pub(crate) proxy: Option<String>,
    pub(crate) expiry: Duration,
    pub(crate) route: PathSelection,
    pub(crate) persist: PersistMode,
    /// Receive buffer thresholds, if the program set any.
    pub(crate) thresholds: Option<RcvbufThresholds>,
}

impl Default for SocketOptions {
    fn default() -> SocketOptions {
        SocketOptions {
            deadline: None,
            size: None,
            policy: CostPolicy::FreeFirst,
            budget: None,
            priority: 0,
            if_late: DeadlineFallback::Cell,
            peer_key: None,
            proxy: None,
            expiry: EXPIRY,
            route: PathSelection::Any,
            persist: PersistMode::No,
            thresholds: None,
        }
    }
}

fn integer(value: &[u8]) -> CallResult<i64> {
    match value.len() {
        4 => Ok(i32::from_ne_bytes(value.try_into().expect("four")).into()),
        8 => Ok(i64::from_ne_bytes(value.try_into().expect("eight"))),
        _ => Err(Errno(libc::EINVAL)),
    }
}

fn unsigned(value: &[u8]) -> CallResult<u64> {
    let bytes = value.try_into().map_err(|_| Errno(libc::EINVAL))?;
    Ok(u64::from_ne_bytes(bytes))
}

fn one_of<T: Copy>(all: &[T], value: &[u8]) -> CallResult<T> {
    let index = usize::try_from(integer(value)?).map_err(|_| Errno(libc::EINVAL))?;
    all.get(index).copied().ok_or(Errno(libc::EINVAL))
}

/// A string from C, with or without a terminating 0.
fn text(value: &[u8]) -> CallResult<&str> {
    let value = value.strip_suffix(&[0]).unwrap_or(value);
    std::str::from_utf8(value).map_err(|_| Errno(libc::EINVAL))
}

fn deadline(value: &[u8]) -> CallResult<Option<Duration>> {
    if value.len() == size_of::<libc::timespec>() {
        let seconds = i64::from_ne_bytes(value[..8].try_into().expect("eight"));
        let nanos = i64::from_ne_bytes(value[8..].try_into().expect("eight"));
        let valid = seconds >= 0 && (0..1_000_000_000).contains(&nanos);
        let at = valid.then(|| Duration::new(seconds as u64, nanos as u32));
        let left = at.ok_or(Errno(libc::EINVAL))?.saturating_sub(time_of_day());
        return Ok(Some(since_boot() + left));
    }
    match integer(value)? {
        0 => Ok(None),
        // Longer times are cut to a century.
        seconds @ 1..=3_153_600_000 => Ok(Some(since_boot() + Duration::from_secs(seconds as u64))),
        _ => Err(Errno(libc::EINVAL)),
    }
}

/// The nearest allowed expiry time.
pub(crate) fn expiry_of(ms: u64) -> Duration {
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    Duration::from_millis(ms.clamp(*EXPIRY_MS.start(), *EXPIRY_MS.end()) as u64)
}

/// Parses the time after which an unsent datagram is dropped.
pub(crate) fn expiry(value: &[u8]) -> CallResult<Duration> {
    match integer(value)? {
        ms if EXPIRY_MS.contains(&ms) => Ok(Duration::from_millis(ms as u64)),
        _ => Err(Errno(libc::EINVAL)),
    }
}

/// Parses a path selection.
pub(crate) fn route(value: &[u8]) -> CallResult<PathSelection> {
    one_of(&ROUTES, value)
}

const IF_LATE: [DeadlineFallback; 3] = [
    DeadlineFallback::Cell,
    DeadlineFallback::Wait,
    DeadlineFallback::Fail,
];

impl SocketOptions {
    /// Sets an option; `begun`: the socket is connecting or connected.
    pub(crate) fn set(&mut self, name: c_int, value: &[u8], begun: bool) -> CallResult<()> {
        let not_now = |ok: bool| {
            if ok {
                Err(Errno(libc::EISCONN))
            } else {
                Ok(())
            }
        };
        match name {
            SO_DEADLINE => self.deadline = deadline(value)?,
            SO_ESIZE => self.size = Some(unsigned(value)?).filter(|size| *size > 0),
            SO_POLICY => self.policy = one_of(&CostPolicy::ALL, value)?,
            SO_BUDGET => self.budget = Some(unsigned(value)?).filter(|b| *b < u64::MAX),
            SO_IFLATE => self.if_late = one_of(&IF_LATE, value)?,
            SO_EXPIRY => self.expiry = expiry(value)?,
            SO_ROUTE => self.route = route(value)?,
            SO_RCVBUFTH => self.thresholds = RcvbufThresholds::of_bytes(value)?,
            SO_PRIORITY => {
                let priority = integer(value)?;
                if !PRIORITIES.contains(&priority) {
                    return Err(Errno(libc::EINVAL));
                }
                not_now(begun)?;
                self.priority = priority as u8;
            }
            SO_PERSIST => {
                let persist = one_of(&PERSISTS, value)?;
                not_now(begun)?;
                self.persist = persist;
            }
            SO_PEERKEY => {
                let key = match <[u8; 32]>::try_from(value) {
                    Ok(key) => PublicKey(key),
                    Err(_) => {
                        let text = text(value)?;
                        PublicKey::from_text(text).map_err(|_| Errno(libc::EINVAL))?
                    }
                };
                not_now(begun)?;
                self.peer_key = Some(key);
            }
            SO_PROXY => {
                let text = text(value)?;
                let address: Result<d2tp_driver::ServerAddress, _> = text.parse();
                address.map_err(|_| Errno(libc::EINVAL))?;
                not_now(begun)?;
                self.proxy = Some(text.to_owned());
            }
            _ => return Err(Errno(libc::ENOPROTOOPT)),
        }
        Ok(())
    }

    /// The value of an option, as bytes for C.
    pub(crate) fn get(&self, name: c_int) -> CallResult<Vec<u8>> {
        let place = |index: Option<usize>| (index.unwrap_or(0) as c_int).to_ne_bytes().to_vec();
        Ok(match name {
            SO_DEADLINE => {
                let left = self.time_left().map_or(0, |left| left.as_secs().max(1));
                (left as i64).to_ne_bytes().to_vec()
            }
            SO_ESIZE => self.size.unwrap_or(0).to_ne_bytes().to_vec(),
            SO_POLICY => place(CostPolicy::ALL.iter().position(|p| *p == self.policy)),
            SO_BUDGET => self.budget.unwrap_or(u64::MAX).to_ne_bytes().to_vec(),
            SO_PRIORITY => c_int::from(self.priority).to_ne_bytes().to_vec(),
            SO_IFLATE => place(IF_LATE.iter().position(|i| *i == self.if_late)),
            SO_EXPIRY => (self.expiry.as_millis() as c_int).to_ne_bytes().to_vec(),
            SO_ROUTE => place(ROUTES.iter().position(|r| *r == self.route)),
            SO_PERSIST => place(PERSISTS.iter().position(|p| *p == self.persist)),
            SO_RCVBUFTH => RcvbufThresholds::to_bytes(self.thresholds),
            SO_PEERKEY => self.peer_key.map_or([0; 32], |key| key.0).to_vec(),
            SO_PROXY => format!("{}\0", self.proxy.as_deref().unwrap_or_default()).into(),
            _ => return Err(Errno(libc::ENOPROTOOPT)),
        })
    }

    /// Time until the deadline.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        Some(self.deadline?.saturating_sub(since_boot()))
    }

    /// Time until both ends drop the flow; `None` if it may be late.
    pub(crate) fn within(&self) -> Option<Duration> {
        self.time_left()
            .filter(|_| self.if_late != DeadlineFallback::Wait)
    }

    /// The settings of the flow.
    ///
    /// # Errors
    /// ETIME: the deadline has passed.
    pub(crate) fn settings(&self) -> Result<FlowSettings, SocketFault> {
        let within = self.within();
        if within == Some(Duration::ZERO) {
            return Err(SocketFault::new(libc::ETIME, "the deadline passed"));
        }
        Ok(FlowSettings {
            // In OPEN, priority 0 goes first.
            priority: (*PRIORITIES.end() as u8).saturating_sub(self.priority),
            size: self.size,
            within,
            reachable: true,
            route: self.route,
            ..FlowSettings::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header;

    #[test]
    fn numbers_of_the_header_stand_for_what_they_say() {
        fn stands_for<T: Copy + PartialEq + std::fmt::Debug>(all: &[T], pairs: &[(c_int, T)]) {
            assert_eq!(all.len(), pairs.len());
            for (number, value) in pairs {
                assert_eq!(one_of(all, &number.to_ne_bytes()).unwrap(), *value);
            }
        }
        stands_for(
            &CostPolicy::ALL,
            &[
                (header::POLICY_FREE_ONLY, CostPolicy::FreeOnly),
                (header::POLICY_FREE_FIRST, CostPolicy::FreeFirst),
                (header::POLICY_BALANCED, CostPolicy::Balanced),
                (header::POLICY_FAST, CostPolicy::Fast),
                (header::POLICY_ANY, CostPolicy::Any),
            ],
        );
        stands_for(
            &IF_LATE,
            &[
                (header::IFLATE_CELL, DeadlineFallback::Cell),
                (header::IFLATE_WAIT, DeadlineFallback::Wait),
                (header::IFLATE_FAIL, DeadlineFallback::Fail),
            ],
        );
        stands_for(
            &PERSISTS,
            &[
                (header::PERSIST_NO, PersistMode::No),
                (header::PERSIST_WRITTEN, PersistMode::Written),
                (header::PERSIST_OPEN, PersistMode::Open),
            ],
        );
        stands_for(
            &ROUTES,
            &[
                (header::ROUTE_ANY, PathSelection::Any),
                (header::ROUTE_STEADIEST, PathSelection::Steadiest),
                (header::ROUTE_EACH, PathSelection::Each),
            ],
        );
    }

    /// The bytes of a `struct d2tp_rcvbufth`.
    fn levels(low: u64, high: u64, unit: u32, rate: u32) -> Vec<u8> {
        let words = [unit.to_ne_bytes(), rate.to_ne_bytes()].concat();
        [&low.to_ne_bytes()[..], &high.to_ne_bytes(), &words].concat()
    }

    #[test]
    fn options_come_back_and_nonsense_is_refused() {
        let mut options = SocketOptions::default();
        for (name, value) in [
            (SO_ESIZE, 94_000_000u64.to_ne_bytes().to_vec()),
            (SO_BUDGET, 5_000_000u64.to_ne_bytes().to_vec()),
            (SO_POLICY, 4i32.to_ne_bytes().to_vec()),
            (SO_PRIORITY, 7i32.to_ne_bytes().to_vec()),
            (SO_IFLATE, 2i32.to_ne_bytes().to_vec()),
            (SO_EXPIRY, 250i32.to_ne_bytes().to_vec()),
            (SO_ROUTE, 2i32.to_ne_bytes().to_vec()),
            (SO_PERSIST, 1i32.to_ne_bytes().to_vec()),
            (SO_PERSIST, 2i32.to_ne_bytes().to_vec()),
            (SO_PEERKEY, vec![7; 32]),
            (SO_RCVBUFTH, levels(300_000, 2_000_000, 0, 0)),
            (SO_RCVBUFTH, levels(64 << 20, 64 << 20, 0, 16_000)),
            (SO_RCVBUFTH, levels(0, 86_400_000, 1, u32::MAX)),
            (SO_RCVBUFTH, vec![0; 24]),
        ] {
            options.set(name, &value, false).unwrap();
            assert_eq!(options.get(name), Ok(value), "option {name}");
        }
        for (name, value) in [
            (SO_POLICY, 5i32.to_ne_bytes().to_vec()),
            (SO_POLICY, (-1i32).to_ne_bytes().to_vec()),
            (SO_PRIORITY, 8i32.to_ne_bytes().to_vec()),
            (SO_ESIZE, vec![1, 2, 3]),
            (SO_EXPIRY, 0i32.to_ne_bytes().to_vec()),
            (SO_EXPIRY, 86_400_001i32.to_ne_bytes().to_vec()),
            (SO_ROUTE, 3i32.to_ne_bytes().to_vec()),
            (SO_PERSIST, 3i32.to_ne_bytes().to_vec()),
            (SO_RCVBUFTH, levels(2, 1, 0, 0)),
            (SO_RCVBUFTH, levels(1, 0, 1, 0)),
            (SO_RCVBUFTH, levels(1, (64 << 20) + 1, 0, 0)),
            (SO_RCVBUFTH, levels(1, 86_400_001, 1, 0)),
            (SO_RCVBUFTH, levels(1, u64::MAX, 1, 0)),
            (SO_RCVBUFTH, levels(1, 2, 2, 0)),
            (SO_RCVBUFTH, vec![0; 23]),
            (SO_RCVBUFTH, vec![]),
            (SO_DEADLINE, (-5i32).to_ne_bytes().to_vec()),
            (SO_DEADLINE, vec![]),
            (SO_PEERKEY, b"no key".to_vec()),
            (SO_PROXY, b"http://proxy:1".to_vec()),
        ] {
            assert_eq!(options.set(name, &value, false), Err(Errno(libc::EINVAL)));
        }
        assert_eq!(options.set(99, &[], false), Err(Errno(libc::ENOPROTOOPT)));
        let late = options.set(SO_PRIORITY, &1i32.to_ne_bytes(), true);
        assert_eq!(late, Err(Errno(libc::EISCONN)));
    }

    #[test]
    fn the_highest_priority_is_that_of_the_flow_that_goes_first() {
        let flow_priority = |value: Option<i32>| {
            let mut options = SocketOptions::default();
            if let Some(value) = value {
                (options.set(SO_PRIORITY, &value.to_ne_bytes(), false)).unwrap();
            }
            options.settings().unwrap().priority
        };
        // docs/protocol.md: priority 0 goes first, 7 last.
        assert_eq!(flow_priority(Some(7)), 0);
        assert_eq!(flow_priority(Some(3)), 4);
        assert_eq!(flow_priority(Some(0)), 7);
        assert_eq!(flow_priority(None), flow_priority(Some(0)));
    }

    #[test]
    fn a_deadline_is_seconds_from_now_or_a_time_of_day_and_may_be_lifted() {
        let mut options = SocketOptions::default();
        options
            .set(SO_DEADLINE, &60i32.to_ne_bytes(), true)
            .unwrap();
        let left = options.time_left().unwrap().as_secs();
        assert!((58..=60).contains(&left), "{left}");
        let at = time_of_day().as_secs() as i64 + 600;
        let spec: Vec<u8> = [at.to_ne_bytes(), 0i64.to_ne_bytes()].concat();
        options.set(SO_DEADLINE, &spec, true).unwrap();
        let left = options.time_left().unwrap().as_secs();
        assert!((598..=600).contains(&left), "{left}");
        options.set(SO_IFLATE, &1i32.to_ne_bytes(), true).unwrap();
        assert_eq!(options.within(), None, "it may be late");
        options.set(SO_DEADLINE, &0i32.to_ne_bytes(), true).unwrap();
        assert_eq!(options.time_left(), None);
        let past: Vec<u8> = [1i64.to_ne_bytes(), 0i64.to_ne_bytes()].concat();
        options.set(SO_IFLATE, &0i32.to_ne_bytes(), true).unwrap();
        options.set(SO_DEADLINE, &past, true).unwrap();
        assert_eq!(options.settings().unwrap_err().errno, libc::ETIME);
    }
}
