//! Settings of a connection.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::raw;

/// Which networks a connection may pay for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PayPolicy {
    /// Metered links are never used.
    FreeOnly = 0,
    /// Metered links are used when the deadline needs them.
    #[default]
    FreeFirst = 1,
    /// Metered links are used to meet the deadline, with twice the slack of `FreeFirst`.
    Balanced = 2,
    /// All links are used at any time.
    Fast = 3,
    /// Metered links are used when no free one works.
    Any = 4,
}

/// What to do when free networks cannot meet the deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LatePolicy {
    /// Use metered networks, up to the budget.
    #[default]
    Cell = 0,
    /// Be late: the connection continues after its deadline.
    Wait = 1,
    /// Use no metered networks, and end at the deadline.
    Fail = 2,
}

/// What persists after the program has ended, carried by the user's agent (`cedos agent`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConnectionPersist {
    /// The connection does not outlive its process.
    #[default]
    No = 0,
    /// Written data is still delivered to the peer; then the connection ends as by a close.
    Written = 1,
    /// The connection stays open, for a day at most, until [`crate::D2tpStream::reopen`] or
    /// [`crate::D2tpStream::end`].
    Open = 2,
}

/// Which paths carry sent data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SendRoute {
    /// The fastest path.
    #[default]
    Any = 0,
    /// The path that is least likely to fail.
    Steadiest = 1,
    /// A copy on each path; the first to arrive counts.
    Each = 2,
}

/// Whether a buffer threshold counts bytes or seconds of playback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThresholdUnit {
    /// The thresholds are numbers of bytes.
    #[default]
    Bytes = 0,
    /// The thresholds are milliseconds of data, at the rate at which the program reads.
    Ms = 1,
}

/// How much data to buffer ahead of the program: metered networks are used from `low` on, up to
/// `high`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferThresholds {
    /// The level at which the use of metered networks begins. Higher: bridges longer outages.
    pub low: u64,
    /// The level at which paid filling ends. Higher: more is paid for that a free network might
    /// have carried.
    pub high: u64,
    /// Unit of both thresholds.
    pub unit: ThresholdUnit,
    /// The rate at which the program reads, in bytes per second; 0: measured.
    pub rate: u32,
}

impl BufferThresholds {
    /// The bytes of a `struct d2tp_rcvbufth`.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let levels = [self.low.to_ne_bytes(), self.high.to_ne_bytes()].concat();
        let words = [(self.unit as u32).to_ne_bytes(), self.rate.to_ne_bytes()].concat();
        [levels, words].concat()
    }
}

/// How to connect. The defaults are no deadline, free networks first, and `$CEDOS_PROX` as the
/// proxy.
#[derive(Clone, Debug, Default)]
pub struct ConnectSettings {
    /// The deadline, at which both ends drop the connection, in whole seconds from now, at least
    /// one.
    pub deadline: Option<Duration>,
    /// The bytes expected in both directions. Too high a value costs money, too low a value the
    /// deadline.
    pub size: Option<u64>,
    /// Which networks may be paid for.
    pub policy: PayPolicy,
    /// The bytes that metered networks may carry in total.
    pub budget: Option<u64>,
    /// The priority, 0 to 7; higher goes first.
    pub priority: u8,
    /// What to do when free networks cannot meet the deadline.
    pub if_late: LatePolicy,
    /// `d2tp://host:port/KEY` of the proxy.
    pub proxy: Option<String>,
    /// What persists after this process has ended. All but [`ConnectionPersist::No`] need an agent;
    /// without one, connecting fails with `Unsupported`.
    pub persist: ConnectionPersist,
    /// How much to buffer ahead of the program, up to 64 MiB or a day.
    pub buffer: Option<BufferThresholds>,
}

impl ConnectSettings {
    /// Creates a socket with these options, not connected yet.
    pub(crate) fn socket(&self, address: &str, kind: libc::c_int) -> io::Result<OwnedFd> {
        let fd = raw::socket(raw::is_ipv6(address), kind)?;
        let set = |name, value: &[u8]| raw::set(&fd, name, value);
        if let Some(deadline) = self.deadline {
            set(raw::SO_DEADLINE, &seconds(Some(deadline)))?;
        }
        if let Some(size) = self.size {
            set(raw::SO_ESIZE, &size.to_ne_bytes())?;
        }
        if let Some(budget) = self.budget {
            set(raw::SO_BUDGET, &budget.to_ne_bytes())?;
        }
        if let Some(proxy) = &self.proxy {
            raw::set(&fd, raw::SO_PROXY, proxy.as_bytes()).map_err(|said| {
                let words = format!("proxy: {proxy} is not d2tp://host:port/KEY");
                raw::fault(said, words)
            })?;
        }
        if self.persist != ConnectionPersist::No {
            let persist = (self.persist as i32).to_ne_bytes();
            set(raw::SO_PERSIST, &persist).map_err(|said| raw::error(&fd, said))?;
        }
        if let Some(buffer) = self.buffer {
            set(raw::SO_RCVBUFTH, &buffer.to_bytes())?;
        }
        set(raw::SO_POLICY, &(self.policy as i32).to_ne_bytes())?;
        set(raw::SO_IFLATE, &(self.if_late as i32).to_ne_bytes())?;
        set(raw::SO_PRIORITY, &i32::from(self.priority).to_ne_bytes())?;
        Ok(fd)
    }
}

/// A socket whose connection is not established yet. Dropping it leaves nothing with an agent,
/// which has a copy of a persistent one.
#[derive(Debug)]
pub(crate) struct PendingSocket(pub(crate) Option<OwnedFd>);

impl PendingSocket {
    pub(crate) fn get(&self) -> &OwnedFd {
        self.0.as_ref().expect("until it is made")
    }

    pub(crate) fn made(mut self) -> OwnedFd {
        self.0.take().expect("until it is made")
    }
}

impl Drop for PendingSocket {
    fn drop(&mut self) {
        if let Some(fd) = self.0.take() {
            // A socket that was not taken is closed.
            let _ = raw::close(fd);
        }
    }
}

/// A deadline in the library's form: whole seconds from now, rounded up, 0 for none.
pub(crate) fn seconds(within: Option<Duration>) -> [u8; 8] {
    let whole =
        |within: Duration| (within.as_secs()).saturating_add(u64::from(within.subsec_nanos() > 0));
    let seconds = within.map_or(0, |within| whole(within).max(1));
    i64::try_from(seconds).unwrap_or(i64::MAX).to_ne_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_never_sooner_than_said() {
        let told = |within| i64::from_ne_bytes(seconds(within));
        assert_eq!(told(None), 0);
        assert_eq!(told(Some(Duration::ZERO)), 1);
        assert_eq!(told(Some(Duration::from_millis(1_900))), 2);
        assert_eq!(told(Some(Duration::from_secs(2))), 2);
        assert_eq!(told(Some(Duration::from_nanos(2_000_000_001))), 3);
        assert_eq!(told(Some(Duration::MAX)), i64::MAX);
    }
}
