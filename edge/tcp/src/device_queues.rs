//! DRWA for every TCP connection of a user's programs, which know nothing of it: the receiver's side of the paper.
//!
//! ```text
//!  sock_diag ── all connections, TCP_INFO of each
//!      │ long round trip, and bytes without a pause, for half a second        else it is left alone
//!      ▼
//!  WindowClamp of the connection
//!      │ a limit
//!      ├─ of one user's programs: /proc/PID/fd ─▶ pidfd_getfd ─▶ TCP_WINDOW_CLAMP ─▶ the descriptor is closed at once
//!      └─ of all users' programs: a BPF program, which finds the socket by its cookie (kernel_clamps.rs)
//! ```
//!
//! A receiver measures a round trip from its own segment to the answer to it. A server that pauses makes it look long, without
//! any queue: so only the measurements of a connection count on which bytes arrive all the time.
//!
//! A descriptor of another program's socket is held for the time of one system call: as long as it is held, the program
//! cannot close its connection. The kernel allows it where a debugger would be allowed: for programs of the same user unless
//! Yama or the program forbids that, and for all with CAP_SYS_PTRACE. The BPF program needs no such right.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use d2tp_session::{Drwa, DrwaLambda, Span, Time};

use crate::connection_list::{ListedConnection, open_connections};
use crate::kernel_clamps::KernelClamps;
use crate::{TcpInfo, WindowClamp, sockopt};

/// The interval of looks while nothing arrives: the first one, and the longest, by doubling. Longer: fewer wake-ups, and a
/// queue that begins to grow then is noticed later.
const REST_LOOK_MIN: Span = Span::from_millis(250); // a guess
const REST_LOOK_MAX: Span = Span::from_secs(4); // a guess: the queue of a phone's link takes seconds to fill
/// The interval of looks while bytes arrive and no queue grows.
const BUSY_LOOK: Span = Span::from_secs(1);
/// The interval of looks while a queue seems to grow.
const SUSPECT_LOOK: Span = PAUSE;
/// Bytes between two looks by which a connection counts as busy: those of a round that counts (`Drwa`).
const BUSY_BYTES: u64 = 12_000;
/// A pause that the server made, and not a slow link: packets of 1,500 bytes come at shorter intervals from 240 kb/s on. Half of
/// [`Drwa::BLOATED_WAIT`]: a pause that makes a round trip look so much longer is seen by looks at this interval.
const PAUSE: Span = Span::from_millis(50);
/// How long the round trip must have been long before a connection is touched.
const SUSPECT_FOR: Span = Span::from_millis(500); // a guess: longer than what a handover or a scheduler holds packets back
/// The time in which fewer than `BUSY_BYTES` put a connection at rest, and lift its limit: what comes next may be of another
/// kind, over a link without a queue.
const REST_AFTER: Span = Span::from_secs(2); // a guess

/// Where a program holds a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SocketHolder {
    process: i32,
    descriptor: i32,
}

/// A connection of a program.
#[derive(Debug)]
struct WatchedConnection {
    cookie: u64,
    /// Payload bytes received at the last look.
    received: u64,
    /// When bytes were last counted, and how many had been received then.
    counted: (Time, u64),
    /// Since when the round trip has been long and bytes have arrived without a pause, and how many had been received then.
    suspect: Option<(Time, u64)>,
    /// The controller, once the connection was found to be bloated.
    clamp: Option<WindowClamp>,
    holder: Option<SocketHolder>,
    /// Whether nobody was found whose descriptor may be used.
    is_out_of_reach: bool,
}

/// What a look at one connection asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ConnectionLook {
    /// When to look again; `None`: it is at rest.
    next: Option<Span>,
    /// The clamp that is to be set, if one is.
    clamp: Option<Option<u64>>,
}

/// How the clamps of other programs' sockets are moved.
#[derive(Debug)]
enum ClampReach {
    /// By descriptors of the programs of one user.
    Descriptors { owner: u32 },
    /// By a program in the kernel, for all users of this network namespace.
    Kernel(KernelClamps),
}

impl ClampReach {
    fn is_of(&self, owner: u32) -> bool {
        match self {
            ClampReach::Descriptors { owner: ours } => *ours == owner,
            ClampReach::Kernel(_) => true,
        }
    }
}

/// The connections of programs, and their clamps.
#[derive(Debug)]
pub struct DeviceQueues {
    lambda: DrwaLambda,
    reach: ClampReach,
    connections: BTreeMap<u32, WatchedConnection>,
    rest_look: Span,
}

/// What a look at all connections found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLook {
    /// Connections that are looked at.
    pub connections: usize,
    /// Connections that have a limit.
    pub limited: usize,
    /// Connections that need a limit, and whose program's descriptor may not be used.
    pub out_of_reach: usize,
    /// When to look again.
    pub next: Span,
}

impl DeviceQueues {
    /// The controller for the programs of this process's user.
    pub fn new(lambda: DrwaLambda) -> DeviceQueues {
        // SAFETY: it has no arguments and cannot fail.
        let owner = unsafe { libc::geteuid() };
        DeviceQueues::within(lambda, ClampReach::Descriptors { owner })
    }

    /// The controller for the programs of all users, by a BPF program: in the network namespace of the calling thread, from which
    /// alone it may be used.
    ///
    /// # Errors
    /// The kernel has no such programs, or this process may not load one.
    pub fn of_all_users(lambda: DrwaLambda) -> io::Result<DeviceQueues> {
        let clamps = KernelClamps::load()?;
        Ok(DeviceQueues::within(lambda, ClampReach::Kernel(clamps)))
    }

    fn within(lambda: DrwaLambda, reach: ClampReach) -> DeviceQueues {
        DeviceQueues {
            lambda,
            reach,
            connections: BTreeMap::new(),
            rest_look: REST_LOOK_MIN,
        }
    }

    /// Looks at all connections, and sets the clamps that are due.
    ///
    /// # Errors
    /// The kernel does not list connections, or does not run the BPF program.
    pub fn update(&mut self, now: Time) -> io::Result<QueueLook> {
        let listed = open_connections()?;
        // No queue of a network is on the way to this machine itself.
        let ours = |one: &&ListedConnection| self.reach.is_of(one.owner) && !one.is_local();
        let listed: Vec<_> = listed.iter().filter(ours).collect();
        let inodes: BTreeSet<u32> = listed.iter().map(|one| one.inode).collect();
        self.connections.retain(|inode, _| inodes.contains(inode));
        let mut shortest = ShortestTrips::default();
        for one in &listed {
            let known = self.connections.get(&one.inode);
            let clamp = known.and_then(|known| known.clamp.as_ref());
            let rtt_min = clamp.and_then(WindowClamp::rtt_min).or(one.info.min_rtt);
            shortest.learn(one, rtt_min);
        }
        let (mut next, mut due) = (None, Vec::new());
        for one in listed {
            let known = self.connections.entry(one.inode);
            let connection =
                known.or_insert_with(|| WatchedConnection::new(now, one.cookie, &one.info));
            let look = connection.look(now, self.lambda, &shortest.told(one));
            next = [next, look.next].into_iter().flatten().min();
            if let Some(limit) = look.clamp
                && !connection.is_out_of_reach
            {
                due.push((one.inode, limit));
            }
        }
        self.set_clamps(&due)?;
        let count = |of: fn(&WatchedConnection) -> bool| {
            self.connections.values().filter(|one| of(one)).count()
        };
        let (limited, out_of_reach) = (
            count(|one| one.is_limited() && !one.is_out_of_reach),
            count(|one| one.is_out_of_reach),
        );
        Ok(QueueLook {
            connections: self.connections.len(),
            limited,
            out_of_reach,
            next: self.next_look(next),
        })
    }

    /// Lifts all limits, because nobody will move them any more.
    pub fn lift(&mut self) {
        let limited = self.connections.iter().filter(|(_, one)| one.is_limited());
        let limited: Vec<_> = limited.map(|(inode, _)| (*inode, None)).collect();
        // What has closed since, or is not to be had, has no limit.
        let _ = self.set_clamps(&limited);
        self.connections.clear();
    }

    fn set_clamps(&mut self, clamps: &[(u32, Option<u64>)]) -> io::Result<()> {
        let connections = &mut self.connections;
        match &self.reach {
            ClampReach::Descriptors { owner } => {
                for (inode, limit) in clamps {
                    if let Some(connection) = connections.get_mut(inode) {
                        connection.set_clamp(*inode, *owner, *limit);
                    }
                }
                Ok(())
            }
            ClampReach::Kernel(kernel) => {
                let cookie = |inode: &u32| connections.get(inode).map(|one| one.cookie);
                let clamps = clamps.iter();
                let clamps = clamps.filter_map(|(inode, limit)| Some((cookie(inode)?, *limit)));
                let clamps: Vec<_> = clamps.collect();
                match clamps.is_empty() {
                    true => Ok(()),
                    false => kernel.set(&clamps),
                }
            }
        }
    }

    /// The time until the next look: at rest it doubles.
    fn next_look(&mut self, busy: Option<Span>) -> Span {
        match busy {
            Some(next) => {
                self.rest_look = REST_LOOK_MIN;
                next
            }
            None => {
                let next = self.rest_look;
                self.rest_look = next.times(2).min(REST_LOOK_MAX);
                next
            }
        }
    }
}

impl WatchedConnection {
    fn new(now: Time, cookie: u64, info: &TcpInfo) -> WatchedConnection {
        WatchedConnection {
            cookie,
            received: info.bytes_received,
            counted: (now, info.bytes_received),
            suspect: None,
            clamp: None,
            holder: None,
            is_out_of_reach: false,
        }
    }

    fn is_limited(&self) -> bool {
        let limit = self.clamp.as_ref().map(WindowClamp::limit);
        limit.flatten().is_some()
    }

    /// Takes in measurements of the connection.
    fn look(&mut self, now: Time, lambda: DrwaLambda, info: &TcpInfo) -> ConnectionLook {
        let arrived = info.bytes_received.saturating_sub(self.received);
        self.received = info.bytes_received;
        if self.is_at_rest(now) {
            let is_limited = self.is_limited();
            (self.suspect, self.clamp) = (None, None);
            return ConnectionLook {
                next: None,
                clamp: is_limited.then_some(None),
            };
        }
        if let Some(clamp) = &mut self.clamp {
            return ConnectionLook {
                clamp: clamp.observe(now, info),
                next: Some(clamp.next_update_in()),
            };
        }
        let bloated = |min: Span| info.rcv_rtt > min + Drwa::BLOATED_WAIT;
        let is_bloated = info.min_rtt.is_some_and(bloated) && info.since_arrival <= PAUSE;
        let is_busy = arrived >= BUSY_BYTES;
        if !is_bloated || (self.suspect.is_none() && !is_busy) {
            self.suspect = None;
            return ConnectionLook {
                next: is_busy.then_some(BUSY_LOOK),
                clamp: None,
            };
        }
        let (since, before) = *self.suspect.get_or_insert((now, self.received));
        if now.since(since) >= SUSPECT_FOR {
            self.suspect = None;
            // A few bytes now and then measure no queue of this connection's.
            if self.received.saturating_sub(before) >= BUSY_BYTES {
                self.clamp = Some(WindowClamp::joining(lambda, info));
            }
        }
        ConnectionLook {
            next: Some(SUSPECT_LOOK),
            clamp: None,
        }
    }

    /// Whether too little has arrived for a while to fill any queue.
    fn is_at_rest(&mut self, now: Time) -> bool {
        let (since, before) = self.counted;
        if now.since(since) < REST_AFTER {
            return false;
        }
        self.counted = (now, self.received);
        self.received.saturating_sub(before) < BUSY_BYTES
    }
}

/// The shortest round trips between two addresses. A connection that begins while others fill the queue measures their queue
/// with its handshake, and is told what they measured before.
#[derive(Debug, Default)]
struct ShortestTrips(BTreeMap<(IpAddr, IpAddr), Span>);

impl ShortestTrips {
    fn learn(&mut self, one: &ListedConnection, rtt_min: Option<Span>) {
        if let Some(rtt_min) = rtt_min {
            let known = self.0.entry((one.local, one.remote)).or_insert(rtt_min);
            *known = rtt_min.min(*known);
        }
    }

    /// The measurements of a connection, with the shortest round trip of all of them.
    fn told(&self, one: &ListedConnection) -> TcpInfo {
        let others = self.0.get(&(one.local, one.remote)).copied();
        let own = one.info.min_rtt;
        TcpInfo {
            min_rtt: own.map(|own| own.min(others.unwrap_or(own))).or(others),
            ..one.info
        }
    }
}

impl WatchedConnection {
    fn set_clamp(&mut self, inode: u32, owner: u32, limit: Option<u64>) {
        let set = |holder: SocketHolder| {
            let socket = holder.duplicate(inode)?;
            sockopt::set_window_clamp(socket.as_fd(), limit)
        };
        if self.holder.is_some_and(|holder| set(holder).is_ok()) {
            return;
        }
        // The program may have handed the socket on.
        self.holder = holders(inode, owner)
            .into_iter()
            .find(|holder| set(*holder).is_ok());
        self.is_out_of_reach = self.holder.is_none();
    }
}

impl SocketHolder {
    /// A descriptor of the socket with this number.
    fn duplicate(self, inode: u32) -> io::Result<OwnedFd> {
        // SAFETY: the arguments are plain numbers.
        let process = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, self.process, 0) })?;
        // SAFETY: the descriptor is open, and the other arguments are plain numbers.
        let socket = owned(unsafe {
            libc::syscall(
                libc::SYS_pidfd_getfd,
                process.as_raw_fd(),
                self.descriptor,
                0,
            )
        })?;
        // The program may have closed it, and opened another of the same number.
        match inode_at(Path::new(&format!("/proc/self/fd/{}", socket.as_raw_fd()))) {
            Some(found) if found == inode => Ok(socket),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// A new descriptor that a system call returned.
fn owned(returned: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(returned) {
        // SAFETY: the kernel has just opened it for this process.
        Ok(descriptor) if descriptor >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The number of the socket to which an entry of `/proc/PID/fd` leads.
fn inode_at(entry: &Path) -> Option<u32> {
    let link = std::fs::read_link(entry).ok()?;
    let number = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
    number.parse().ok()
}

/// The programs of a user that hold a socket.
fn holders(inode: u32, owner: u32) -> Vec<SocketHolder> {
    use std::os::unix::fs::MetadataExt;
    let number = |entry: &std::fs::DirEntry| entry.file_name().to_str()?.parse::<i32>().ok();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let own = processes.filter(|entry| entry.metadata().is_ok_and(|file| file.uid() == owner));
    let mut found = Vec::new();
    for process in own {
        let Some(id) = number(&process) else { continue };
        let open = std::fs::read_dir(process.path().join("fd"));
        let open = open.into_iter().flatten().flatten();
        let holds = open.filter(|entry| inode_at(&entry.path()) == Some(inode));
        found.extend(holds.filter_map(|entry| {
            Some(SocketHolder {
                process: id,
                descriptor: number(&entry)?,
            })
        }));
    }
    found
}

/// What keeps this process from the sockets of its user's other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReachBarrier {
    /// Yama's setting (`kernel.yama.ptrace_scope`).
    PtraceScope(u8),
    /// A filter of system calls, such as that of a service or of a container; or a kernel before Linux 5.6.
    FilteredCalls,
}

impl ReachBarrier {
    /// What holds for this process; none if it may use sockets of its user's other programs.
    pub fn of_this_process() -> Option<ReachBarrier> {
        // SAFETY: the arguments are plain numbers, and no process is named.
        let refused = unsafe { libc::syscall(libc::SYS_pidfd_getfd, -1, -1, 0) };
        let error = io::Error::last_os_error().raw_os_error();
        if refused < 0 && error != Some(libc::EBADF) {
            return Some(ReachBarrier::FilteredCalls);
        }
        let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        forbidding_scope(&scope, &status).map(ReachBarrier::PtraceScope)
    }
}

impl fmt::Display for ReachBarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReachBarrier::PtraceScope(scope) => write!(
                f,
                "the system keeps programs from each other's sockets (kernel.yama.ptrace_scope = {scope})"
            ),
            ReachBarrier::FilteredCalls => {
                f.write_str("the service or container that this runs in may not use pidfd_getfd")
            }
        }
    }
}

/// The number of CAP_SYS_PTRACE (linux/capability.h).
const CAP_SYS_PTRACE: u32 = 19;

/// Yama's setting, if it keeps a process of this status from others.
fn forbidding_scope(scope: &str, status: &str) -> Option<u8> {
    let scope: u8 = scope.trim().parse().ok()?;
    let mut lines = status.lines();
    let effective = lines.find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    let may_debug = effective.is_some_and(|bits| bits & (1 << CAP_SYS_PTRACE) != 0);
    match scope {
        0 => None,
        1 | 2 if may_debug => None,
        _ => Some(scope),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    const MS: Span = Span::from_millis(1);

    /// Measurements of a connection with a shortest round trip of 40 ms.
    fn info(since_arrival: Span, rcv_rtt_ms: u64, bytes_received: u64) -> TcpInfo {
        TcpInfo {
            since_arrival,
            rcv_rtt: Span::from_millis(rcv_rtt_ms),
            min_rtt: Some(MS.times(40)),
            bytes_received,
            open: true,
        }
    }

    /// Looks at a connection of 1 MB/s for this long, with this round trip and this time since the last byte.
    fn looked_at(
        connection: &mut WatchedConnection,
        from: Span,
        lasts: Span,
        (rcv_rtt_ms, since_arrival): (u64, Span),
    ) -> (usize, Vec<Option<u64>>) {
        let (mut at, mut looks, mut clamps) = (from, 0, Vec::new());
        while at < from + lasts {
            let info = info(since_arrival, rcv_rtt_ms, at.as_millis() * 1_000);
            let look = connection.look(Time::ZERO + at, DrwaLambda::default(), &info);
            clamps.extend(look.clamp);
            looks += 1;
            at = at + look.next.unwrap_or(REST_LOOK_MAX);
        }
        (looks, clamps)
    }

    #[test]
    fn a_connection_without_a_queue_is_looked_at_once_a_second_and_never_touched() {
        let mut connection = WatchedConnection::new(Time::ZERO, 1, &info(Span::ZERO, 0, 0));
        let second = Span::from_secs(1);
        let (looks, clamps) = looked_at(&mut connection, second, second.times(60), (130, MS));
        assert_eq!((looks, clamps.len()), (60, 0), "90 ms of queue");
        // A server that sends four times a second: its pauses are no queue.
        let pauses = (290, MS.times(180));
        let from = second.times(61);
        let (looks, clamps) = looked_at(&mut connection, from, second.times(60), pauses);
        assert_eq!((looks, clamps.len()), (60, 0));
        assert!(connection.clamp.is_none());
    }

    #[test]
    fn a_bloated_connection_is_limited_within_seconds_and_let_go_when_it_rests() {
        let mut connection = WatchedConnection::new(Time::ZERO, 1, &info(Span::ZERO, 0, 0));
        let second = Span::from_secs(1);
        let (_, clamps) = looked_at(&mut connection, second, MS.times(500), (400, MS));
        assert_eq!(clamps.len(), 0, "too soon to tell");
        let from = MS.times(1_500);
        let (_, clamps) = looked_at(&mut connection, from, from, (400, MS));
        let limit = clamps.last().copied().flatten().expect("a limit");
        assert!(
            (80_000..=130_000).contains(&limit),
            "{limit}, not 3 x 40 kB"
        );
        assert!(connection.is_limited());
        let after = info(MS.times(2_001), 400, 3_000_000);
        let look = |connection: &mut WatchedConnection, at: u64| {
            connection.look(Time::ZERO + second.times(at), DrwaLambda::default(), &after)
        };
        let look_at_rest = (4..9)
            .map(|at| look(&mut connection, at))
            .find(|look| look.next.is_none());
        assert_eq!(
            look_at_rest.expect("it rests").clamp,
            Some(None),
            "it is lifted"
        );
        assert!(!connection.is_limited());
    }

    #[test]
    fn looks_at_rest_become_rare_and_are_frequent_again_once_something_arrives() {
        let mut queues = DeviceQueues::new(DrwaLambda::default());
        let looks: Vec<u64> = (0..6).map(|_| queues.next_look(None).as_millis()).collect();
        assert_eq!(looks, [250, 500, 1_000, 2_000, 4_000, 4_000]);
        assert_eq!(queues.next_look(Some(BUSY_LOOK)), BUSY_LOOK);
        assert_eq!(queues.next_look(None), REST_LOOK_MIN);
    }

    #[test]
    fn yama_forbids_what_a_debugger_may_not_do() {
        let (root, user) = ("Name:\tx\nCapEff:\t000001ffffffffff\n", "CapEff:\t0\n");
        for (scope, status, forbids) in [
            ("0\n", user, None),
            ("1\n", user, Some(1)),
            ("1\n", root, None),
            ("2\n", root, None),
            ("3\n", root, Some(3)),
            ("1\n", "", Some(1)),
        ] {
            assert_eq!(forbidding_scope(scope, status), forbids, "{scope} {status}");
        }
    }

    #[test]
    fn a_socket_is_found_at_its_program_and_let_go_so_that_it_can_be_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        let descriptor = ours.as_raw_fd();
        let inode = inode_at(Path::new(&format!("/proc/self/fd/{descriptor}"))).unwrap();
        // SAFETY: it has no arguments and cannot fail.
        let owner = unsafe { libc::geteuid() };
        let process = std::process::id() as i32;
        let holder = SocketHolder {
            process,
            descriptor,
        };
        assert_eq!(holders(inode, owner), [holder]);
        let mut connection = WatchedConnection::new(Time::ZERO, 1, &info(Span::ZERO, 0, 0));
        connection.set_clamp(inode, owner, Some(20_000));
        assert_eq!(connection.holder, Some(holder));
        assert!(holder.duplicate(inode + 1).is_err(), "it is another socket");
        drop(ours);
        // The end arrives, for nobody else holds it.
        assert_eq!(io::Read::read(&mut theirs, &mut [0; 1]).unwrap(), 0);
        connection.set_clamp(inode, owner, Some(20_000));
        assert!(connection.is_out_of_reach);
    }

    #[test]
    fn limits_are_lifted_when_nobody_moves_them_any_more() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let descriptor = ours.as_raw_fd();
        let inode = inode_at(Path::new(&format!("/proc/self/fd/{descriptor}"))).unwrap();
        let mut connection = WatchedConnection::new(Time::ZERO, 1, &info(Span::ZERO, 0, 0));
        let second = Span::from_secs(1);
        looked_at(&mut connection, second, second.times(2), (400, MS));
        assert!(connection.is_limited());
        sockopt::set_window_clamp(ours.as_fd(), Some(20_000)).unwrap();
        let mut queues = DeviceQueues::new(DrwaLambda::default());
        queues.connections.insert(inode, connection);
        queues.lift();
        let clamp = sockopt::window_clamp(ours.as_fd()).unwrap();
        assert_eq!(u64::from(clamp), sockopt::NO_CLAMP);
    }

    #[test]
    fn one_that_begins_in_a_queue_is_told_the_round_trip_of_those_beside_it() {
        let one = |local: [u8; 4], min_rtt: Option<u64>| ListedConnection {
            inode: 1,
            cookie: 1,
            owner: 0,
            local: local.into(),
            remote: [192, 0, 2, 1].into(),
            info: TcpInfo {
                min_rtt: min_rtt.map(Span::from_millis),
                ..info(Span::ZERO, 500, 9)
            },
        };
        let (wifi, cellular) = ([10, 0, 0, 2], [10, 0, 1, 2]);
        let mut shortest = ShortestTrips::default();
        for rtt_min in [70, 60, 65] {
            shortest.learn(&one(wifi, None), Some(Span::from_millis(rtt_min)));
        }
        let told = |one: &ListedConnection| shortest.told(one).min_rtt;
        let millis = |ms| Some(Span::from_millis(ms));
        assert_eq!(told(&one(wifi, Some(400))), millis(60));
        assert_eq!(told(&one(wifi, Some(50))), millis(50));
        assert_eq!(told(&one(wifi, None)), millis(60));
        assert_eq!(told(&one(cellular, Some(400))), millis(400), "another link");
    }

    #[test]
    fn connections_to_this_machine_itself_are_left_alone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut queues = DeviceQueues::new(DrwaLambda::default());
        let look = queues.update(Time::ZERO).unwrap();
        let loopback = ListedConnection::is_local;
        assert!(open_connections().unwrap().iter().any(loopback));
        assert_eq!((look.limited, look.out_of_reach), (0, 0));
    }
}
