//! DRWA for every TCP connection of a user's programs, which know nothing of it: the receiver's side of the paper.
//!
//! ```text
//!  sock_diag ── all connections, TCP_INFO of each ──▶ WindowClamp of each
//!                                                          │ only those whose queue has grown
//!  /proc/PID/fd ── whose socket is it? ── pidfd_getfd ──▶ TCP_WINDOW_CLAMP ── the descriptor is closed at once
//! ```
//!
//! A descriptor of another program's socket is held for the time of one system call: as long as it is held, the program
//! cannot close its connection. The kernel allows it where a debugger would be allowed: for programs of the same user unless
//! Yama or the program forbids that, and for all with CAP_SYS_PTRACE.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use d2tp_session::{DrwaLambda, Span, Time};

use crate::connection_list::{ListedConnection, open_connections};
use crate::{TcpInfo, WindowClamp, sockopt};

/// The interval of looks while no connection is measured.
const IDLE_LOOK: Span = Span::from_millis(250); // a guess: a queue grows for a round trip or two before it is noticed

/// Where a program holds a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SocketHolder {
    process: i32,
    descriptor: i32,
}

#[derive(Debug)]
struct QueuedConnection {
    clamp: WindowClamp,
    holder: Option<SocketHolder>,
    /// Whether nobody was found whose descriptor may be used.
    is_out_of_reach: bool,
}

/// The connections of a user's programs, and their clamps.
#[derive(Debug)]
pub struct DeviceQueues {
    lambda: DrwaLambda,
    owner: u32,
    connections: BTreeMap<u32, QueuedConnection>,
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
        DeviceQueues {
            lambda,
            // SAFETY: it has no arguments and cannot fail.
            owner: unsafe { libc::geteuid() },
            connections: BTreeMap::new(),
        }
    }

    /// Looks at all connections, and sets the clamps that are due.
    ///
    /// # Errors
    /// The kernel does not list connections.
    pub fn update(&mut self, now: Time) -> io::Result<QueueLook> {
        let listed = open_connections()?;
        // No queue of a network is on the way to this machine itself.
        let ours = |one: &&ListedConnection| one.owner == self.owner && !one.remote.is_loopback();
        let listed: Vec<_> = listed.iter().filter(ours).collect();
        let inodes: BTreeSet<u32> = listed.iter().map(|one| one.inode).collect();
        self.connections.retain(|inode, _| inodes.contains(inode));
        let mut shortest = ShortestTrips::default();
        for one in &listed {
            let known = self.connections.get(&one.inode);
            shortest.learn(one, known.and_then(|known| known.clamp.rtt_min()));
        }
        let mut next = IDLE_LOOK;
        for one in listed {
            let lambda = self.lambda;
            let known = self.connections.entry(one.inode);
            let connection = known.or_insert_with(|| QueuedConnection {
                clamp: WindowClamp::joining(lambda, &one.info),
                holder: None,
                is_out_of_reach: false,
            });
            let wanted = connection.clamp.observe(now, &shortest.told(one));
            if one.info.rcv_rtt > Span::ZERO {
                next = next.min(connection.clamp.next_update_in());
            }
            if let Some(limit) = wanted
                && !connection.is_out_of_reach
            {
                connection.set_clamp(one.inode, self.owner, limit);
            }
        }
        let count = |of: fn(&QueuedConnection) -> bool| {
            self.connections.values().filter(|one| of(one)).count()
        };
        Ok(QueueLook {
            connections: self.connections.len(),
            limited: count(|one| one.clamp.limit().is_some() && !one.is_out_of_reach),
            out_of_reach: count(|one| one.is_out_of_reach),
            next,
        })
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

impl QueuedConnection {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

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
        let mut connection = QueuedConnection {
            clamp: WindowClamp::new(DrwaLambda::default()),
            holder: None,
            is_out_of_reach: false,
        };
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
    fn one_that_begins_in_a_queue_is_told_the_round_trip_of_those_beside_it() {
        let one = |local: [u8; 4], min_rtt: Option<u64>| ListedConnection {
            inode: 1,
            owner: 0,
            local: local.into(),
            remote: [192, 0, 2, 1].into(),
            info: TcpInfo {
                rcv_rtt: Span::from_millis(500),
                min_rtt: min_rtt.map(Span::from_millis),
                bytes_received: 9,
                open: true,
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
        let loopback = |one: &ListedConnection| one.remote.is_loopback();
        assert!(open_connections().unwrap().iter().any(loopback));
        assert_eq!((look.limited, look.out_of_reach), (0, 0));
    }
}
